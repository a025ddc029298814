"""Start-up: to the first finished step, and to the answer to --help or to a mistake.

    python -m benchmarks.startup [--data_dir=DIR]

The peers are short scripts that take one step as in Accelerate's documentation: startup_mnist.py with torchvision's
dataset, startup_language.py with transformers and `datasets`. Both sides train the same model by AdamW, from the same
files, on the CPU; asserted: the number of parameters, and a first loss near that of a guess. In each round a language
model is started twice: with nothing in the cache of `datasets`, then with the tokens that the first start left there.

By `accelerate launch`, configs/mnist.yaml is compared with a script that builds an Accelerator and takes no step. The
launcher imports torch itself, which is half of both. Answers are compared with `import torch`, which once came first;
asserted: each within a second.
"""

import json
import math
import re
import sys
import tempfile
from functools import partial
from itertools import count
from pathlib import Path
from time import perf_counter
from typing import Any

from ruamel.yaml import YAML

from benchmarks import pairs
from benchmarks.pairs import Comparison, in_turn
from benchmarks.runs import CORES, PROJECT, Side, arguments, launch, running, train_py
from src.tasks.mnist import mnist
from src.tasks.text.tokenizing import byte_tokenizer

ROUNDS = 5
RUNS = count()
FIRST_STEP = re.compile(r"^step +1/.* loss ([\d.]+)", re.MULTILINE)
ANSWER = "train.py: --optim.lrr=1: unknown setting, did you mean optim.lr?"


def seconds_until(says: str, command: list[str], folder: Path) -> tuple[float, str]:
    """Return those from starting the command until a line of its output matches the pattern, and the output."""
    side = Side(command, folder, CORES)
    with running(side):
        started = perf_counter()
        side.start()
        side.wait(lambda: re.search(says, side.log, re.MULTILINE) is not None)
        return perf_counter() - started, side.log


def seconds_to_step(command: list[str], folder: Path, parameters: str, classes: int) -> float:
    """Return those to the first step of a model with that many parameters, which predicts one of `classes`."""
    seconds, log = seconds_until(FIRST_STEP.pattern, command, folder)
    assert f"{parameters} parameters" in log, log
    loss = float(FIRST_STEP.findall(log)[0])
    assert abs(loss - math.log(classes)) < 0.3, log
    return seconds


def ours(settings: dict[str, Any], folder: Path, **work: Any) -> float:
    words = arguments({"log_every": 1, "output_dir": f"run-{next(RUNS)}", **settings})
    return seconds_to_step([sys.executable, f"{PROJECT}/train.py", *words], folder, **work)


def theirs(peer: str, words: list[Any], folder: Path, **work: Any) -> float:
    return seconds_to_step([sys.executable, "-m", f"benchmarks.{peer}", *map(str, words)], folder, **work)


def compare_mnist(data_dir: Path, folder: Path) -> Comparison:
    work = {"parameters": "1,199,882", "classes": 10}
    we = partial(ours, {"task.data_dir": data_dir}, folder / "ours", **work)
    they = partial(theirs, "startup_mnist", [data_dir], folder / "theirs", **work)
    mine, peers = in_turn(ROUNDS, we, they)
    return Comparison("start-up: MNIST to the first step, a script", "s", mine, peers, 1.3, is_gain=False)


def compare_language_models(folder: Path) -> list[Comparison]:
    text, tokenizer, config = folder / "text.txt", folder / "tokenizer", PROJECT / "configs" / "pretrain.yaml"
    text.write_text("".join(page.read_text() for page in sorted(PROJECT.rglob("docs/**/*.md"))))
    byte_tokenizer().save_pretrained(tokenizer)
    task: Any = YAML(typ="safe").load(config)["task"]
    settings = {"config": config, "optim.name": "adamw", "task.dataset": text, "task.tokenizer": tokenizer}
    words = [text, tokenizer, task["sequence_length"], 12, json.dumps(task["architecture"])]
    work = {"parameters": "857,728", "classes": len(byte_tokenizer())}

    def start_twice() -> list[float]:
        both = [Path(tempfile.mkdtemp(dir=folder)) for _ in range(2)]  # each with a cache of its own
        we, they = partial(ours, settings, both[0], **work), partial(theirs, "startup_language", words, both[1], **work)
        return [we(), they(), we(), they()]

    rounds = [start_twice() for _ in range(ROUNDS)]
    first, first_theirs, again, again_theirs = ([*values] for values in zip(*rounds, strict=True))
    name = "start-up: language model to the first step, a script"
    return [
        Comparison(name, "s", again, again_theirs, 1.3, is_gain=False),
        Comparison(f"{name}, nothing cached", "s", first, first_theirs, 1.3, is_gain=False),
    ]


def compare_launches(data_dir: Path, folder: Path) -> Comparison:
    empty = folder / "empty.py"
    empty.write_text("from accelerate import Accelerator\nAccelerator()\nprint('built', flush=True)\n")

    def first_step() -> float:
        settings = {"config": PROJECT / "configs" / "mnist.yaml", "task.data_dir": data_dir, "log_every": 1}
        command = train_py(settings | {"output_dir": f"run-{next(RUNS)}"})
        return seconds_until(FIRST_STEP.pattern, command, folder / "launched")[0]

    nothing = [*launch("cpu"), str(empty)]
    mine, peers = in_turn(ROUNDS, first_step, lambda: seconds_until("^built", nothing, folder / "empty")[0])
    name = "start-up: accelerate launch, MNIST to the first step, an empty script"
    return Comparison(name, "s", mine, peers, 1.3, is_gain=False)


def compare_answers(folder: Path) -> list[Comparison]:
    """Compare each answer, of which the last line is awaited, with importing torch."""
    rows = []
    torch = [sys.executable, "-c", "import torch; print('imported', flush=True)"]
    for name, words, says in (("--help", ["--help"], "task.label_smoothing"), ("a mistake", ["--optim.lrr=1"], ANSWER)):
        answer = [sys.executable, f"{PROJECT}/train.py", *words]
        mine, peers = in_turn(
            ROUNDS,
            lambda answer=answer, says=says: seconds_until(re.escape(says), answer, folder / "answer")[0],  # type: ignore[misc]
            lambda: seconds_until("^imported", torch, folder / "torch")[0],
        )
        assert max(mine) <= 1, mine
        rows.append(Comparison(f"start-up: answer to {name}, import torch", "s", mine, peers, 0.5, is_gain=False))
    return rows


def measure(data_dir: Path, folder: Path) -> list[Comparison]:
    mnist(str(data_dir))  # downloads it where it is missing
    return [
        compare_mnist(data_dir, folder),
        *compare_language_models(folder),
        compare_launches(data_dir, folder),
        *compare_answers(folder),
    ]


if __name__ == "__main__":
    pairs.main(measure, pairs.parser(__doc__))
