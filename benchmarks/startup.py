"""Start-up: to the first finished step, and to the answer to --help or to a mistake.

    python -m benchmarks.startup [--data_dir=DIR]

The peers are the short scripts below, which take one step as in Accelerate's documentation: on MNIST with torchvision's
dataset, on text with transformers and `datasets`. Both sides train the same model by AdamW, from the same files, on the
CPU; asserted: the number of parameters, and a first loss near that of a guess. In each round a language model is
started twice: with nothing in the cache of `datasets`, then with the tokens that the first start left there.

By `accelerate launch`, configs/mnist.yaml is compared with a script that builds an Accelerator and takes no step. The
launcher imports torch itself, which is half of both. Answers are compared with `import torch`, which once came first;
asserted: each within a second.
"""

import json
import math
import re
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from itertools import chain, count
from pathlib import Path
from time import perf_counter
from typing import Any

from benchmarks import pairs
from benchmarks.pairs import Comparison, in_turn
from benchmarks.runs import CORES, PROJECT, Side, arguments, launch, own, running

ROUNDS = 5
RUNS = count()
FIRST_STEP = r"^step +1/.* loss ([\d.]+)"
ANSWER = "train.py: --optim.lrr=1: unknown setting, did you mean optim.lr?"


# -------------------------------------- the peers: what they import is inside them, as it is part of what is measured
def mnist_script(words: list[str]) -> None:
    from accelerate import Accelerator
    from torch.nn.functional import cross_entropy
    from torch.optim import AdamW
    from torch.utils.data import DataLoader
    from torchvision.datasets import MNIST
    from torchvision.transforms import Compose, Normalize, ToTensor

    from benchmarks.mnist_peer import build_model

    accelerator = Accelerator(cpu=True)
    dataset = MNIST(words[0], train=True, transform=Compose([ToTensor(), Normalize(0.1307, 0.3081)]))
    model = build_model()
    optimizer = AdamW(model.parameters(), lr=1e-3)
    model, optimizer, batches = accelerator.prepare(model, optimizer, DataLoader(dataset, 64, shuffle=True))
    take_a_step(accelerator, model, optimizer, batches, lambda batch: cross_entropy(model(batch[0]), batch[1]))


def language_script(words: list[str]) -> None:
    """Read and tokenize text by `datasets` and cut it into sequences, as transformers' run_clm_no_trainer.py does."""
    from accelerate import Accelerator
    from datasets import load_dataset
    from torch.optim import AdamW
    from torch.utils.data import DataLoader
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, default_data_collator

    text, folder, length, batch, architecture = words[0], words[1], int(words[2]), int(words[3]), json.loads(words[4])
    accelerator = Accelerator(cpu=True)
    tokenizer: Any = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    rows: Any = load_dataset("text", data_files=text)["train"]

    def grouped(lines: dict[str, list[list[int]]]) -> dict[str, list[list[int]]]:
        tokens = [*chain(*lines["input_ids"])]
        sequences = [tokens[i : i + length] for i in range(0, len(tokens) // length * length, length)]
        return {"input_ids": sequences, "labels": sequences}

    tokenized = rows.map(lambda lines: tokenizer(lines["text"]), batched=True, remove_columns=["text"])
    dataset = tokenized.map(grouped, batched=True, remove_columns=tokenized.column_names)
    config = AutoConfig.for_model(**architecture, vocab_size=len(tokenizer), max_position_embeddings=length)
    auto: Any = AutoModelForCausalLM
    model = auto.from_config(config, trust_remote_code=False)
    optimizer = AdamW(model.parameters(), lr=1e-3)
    loader: Any = DataLoader(dataset, batch, shuffle=True, collate_fn=default_data_collator)
    model, optimizer, batches = accelerator.prepare(model, optimizer, loader)
    take_a_step(accelerator, model, optimizer, batches, lambda inputs: model(**inputs).loss)


def take_a_step(accelerator: Any, model: Any, optimizer: Any, batches: Any, loss_of: Callable[[Any], Any]) -> None:
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters")
    model.train()
    loss = loss_of(next(iter(batches)))
    accelerator.backward(loss)
    optimizer.step()
    print(f"step 1/ loss {loss.item():.4f}", flush=True)


# ---------------------------------------------------------------------------------------------------- what is measured
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
    seconds, log = seconds_until(FIRST_STEP, command, folder)
    (loss,) = re.findall(FIRST_STEP, log, re.MULTILINE)
    assert f"{parameters} parameters" in log and abs(float(loss) - math.log(classes)) < 0.3, log  # noqa: PT018
    return seconds


def ours(settings: dict[str, Any]) -> list[str]:
    """Return the command of a new run, without a launcher."""
    words = arguments({"log_every": 1, "output_dir": f"run-{next(RUNS)}", **settings})
    return [sys.executable, f"{PROJECT}/train.py", *words]


def row(question: str, mine: list[float], peers: list[float], target: float = 1.3) -> Comparison:
    return Comparison(f"start-up: {question}", "s", mine, peers, target, is_gain=False)


def compare_mnist(data_dir: Path, folder: Path) -> Comparison:
    to_step = partial(seconds_to_step, parameters="1,199,882", classes=10)
    script = own("startup", "mnist", data_dir)
    settings = {"task.data_dir": data_dir}
    found = in_turn(ROUNDS, lambda: to_step(ours(settings), folder / "ours"), lambda: to_step(script, folder / "peer"))
    return row("MNIST to the first step, a script", found[0], found[1])


def compare_language_models(folder: Path) -> list[Comparison]:
    from ruamel.yaml import YAML

    from src.tasks.text.tokenizing import byte_tokenizer

    text, tokenizer, config = folder / "text.txt", folder / "tokenizer", PROJECT / "configs" / "pretrain.yaml"
    text.write_text("".join(page.read_text() for page in sorted(PROJECT.rglob("docs/**/*.md"))))
    byte_tokenizer().save_pretrained(tokenizer)
    task: Any = YAML(typ="safe").load(config)["task"]
    settings = {"config": config, "optim.name": "adamw", "task.dataset": text, "task.tokenizer": tokenizer}
    script = own("startup", "language", text, tokenizer, task["sequence_length"], 12, json.dumps(task["architecture"]))
    to_step = partial(seconds_to_step, parameters="857,728", classes=len(byte_tokenizer()))

    def start_twice() -> list[float]:
        own_cache, their_cache = (Path(tempfile.mkdtemp(dir=folder)) for _ in range(2))
        mine, peers = in_turn(2, lambda: to_step(ours(settings), own_cache), lambda: to_step(script, their_cache))
        return [*mine, *peers]

    first, again, their_first, theirs_again = map(list, zip(*(start_twice() for _ in range(ROUNDS)), strict=True))
    name = "language model to the first step, a script"
    return [row(name, again, theirs_again), row(f"{name}, nothing cached", first, their_first)]


def compare_launches(data_dir: Path, folder: Path) -> Comparison:
    empty = folder / "empty.py"
    empty.write_text("from accelerate import Accelerator\nAccelerator()\nprint('built', flush=True)\n")

    settings = {"config": PROJECT / "configs" / "mnist.yaml", "task.data_dir": data_dir}
    found = in_turn(
        ROUNDS,
        lambda: seconds_until(FIRST_STEP, [*launch("cpu"), *ours(settings)[1:]], folder / "launched")[0],
        lambda: seconds_until("^built", [*launch("cpu"), str(empty)], folder / "empty")[0],
    )
    return row("accelerate launch, MNIST to the first step, an empty script", found[0], found[1])


def compare_answer(name: str, word: str, says: str, folder: Path) -> Comparison:
    """Compare an answer, of which the last line is awaited, with importing torch."""
    answer, imports = [sys.executable, f"{PROJECT}/train.py", word], "import torch; print('imported', flush=True)"
    mine, peers = in_turn(
        ROUNDS,
        lambda: seconds_until(re.escape(says), answer, folder / "answer")[0],
        lambda: seconds_until("^imported", [sys.executable, "-c", imports], folder / "torch")[0],
    )
    assert max(mine) <= 1, mine
    return row(f"answer to {name}, import torch", mine, peers, 0.5)


def measure(data_dir: Path, folder: Path) -> list[Comparison]:
    from src.tasks.mnist import mnist

    mnist(str(data_dir))  # downloads it where it is missing
    return [
        compare_mnist(data_dir, folder),
        *compare_language_models(folder),
        compare_launches(data_dir, folder),
        compare_answer("--help", "--help", "task.label_smoothing", folder),
        compare_answer("a mistake", "--optim.lrr=1", ANSWER, folder),
    ]


if __name__ == "__main__":
    pairs.main(measure, __doc__, {"mnist": mnist_script, "language": language_script})
