"""The first start on text: a million rows of jsonl, tokenized and packed, from nothing and from the cache, against what
TRL does with the same rows.

    python -m benchmarks.first_start [--rows=N] [--trl=PYTHON]

Ours is all that train.py does before its first step: rows are read and checked, tokenized, cut into sequences, and a
small model is built. Theirs is SFTTrainer with packing, which does so too, with a process per core. Both have two
cores, the same tokenizer, and sequences of 512 tokens. Rows per second, and per second of CPU time, over all threads
and processes; imports are left out. Asserted: as many tokens, but for one or two per row, which mark its ends.

For PYTHON, see benchmarks/chat.py.
"""

import json
import os
import re
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import pairs
from benchmarks.pairs import Comparison, in_turn
from benchmarks.runs import CORES, Side, arguments, own, rate

ROUNDS, LENGTH = 2, 512
LLAMA: dict[str, Any] = {"model_type": "llama", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
LLAMA |= {"num_attention_heads": 2}
FOUND = r"^prepared ([\d.]+) s, cpu ([\d.]+) s, tokens (\d+)$"


def write_rows(file: Path, rows: int) -> None:
    random = np.random.default_rng(0)
    words = np.array(["".join(random.choice([*"etaoinshrdlu"], size)) for size in random.integers(1, 9, 1000)])
    with file.open("w") as stream:
        for number, length in enumerate(random.integers(5, 32, rows)):
            text = f"{number} {' '.join(words[random.integers(0, 1000, length)])}"
            stream.write(json.dumps({"text": text}) + "\n")


def measured(prepare: Callable[[], int]) -> None:
    """Print the seconds and the CPU seconds that `prepare` takes, and the tokens that it returns."""

    def used() -> float:
        return sum(
            usage.ru_utime + usage.ru_stime
            for usage in map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
        )

    started, before = time.perf_counter(), used()
    tokens = prepare()
    print(f"prepared {time.perf_counter() - started} s, cpu {used() - before} s, tokens {tokens}", flush=True)


def by_train_py(words: list[str]) -> None:
    os.environ.pop("TOKENIZERS_PARALLELISM", None)  # nothing forks here

    import src.tasks.text.causal_lm  # noqa: F401  # with transformers, which takes seconds
    import train

    def prepare() -> int:
        run: Any = train.build(train.run_settings(words))
        return int(run.metadata["data"]["train"]["tokens"])

    measured(prepare)


def by_trl(words: list[str]) -> None:
    os.environ.pop("TOKENIZERS_PARALLELISM", None)
    from datasets import load_dataset
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
    from trl import SFTConfig, SFTTrainer  # type: ignore[import-not-found]

    file, folder = words

    def prepare() -> int:
        tokenizer: Any = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
        auto: Any = AutoModelForCausalLM
        config = AutoConfig.for_model(**LLAMA, vocab_size=len(tokenizer), max_position_embeddings=LENGTH)
        how = {"packing": True, "max_length": LENGTH, "dataset_num_proc": CORES, "use_cpu": True, "bf16": False}
        settings = SFTConfig("trl", report_to="none", **how)
        rows = load_dataset("json", data_files=file, split="train")
        model = auto.from_config(config, trust_remote_code=False)
        trainer = SFTTrainer(model, settings, train_dataset=rows, processing_class=tokenizer)
        packed = trainer.train_dataset.with_format("arrow")
        return sum(len(part["input_ids"].combine_chunks().flatten()) for part in packed.iter(10_000))

    measured(prepare)


def measure(_: Path, folder: Path, rows: int, trl: str) -> list[Comparison]:
    from src.tasks.text.tokenizing import byte_tokenizer

    file, tokenizer = folder / "data" / "train.jsonl", folder / "tokenizer"
    file.parent.mkdir()
    write_rows(file, rows)
    write_rows(file.with_name("validation.jsonl"), 100)
    byte_tokenizer().save_pretrained(tokenizer)
    task = {
        "task.name": "causal_lm",
        "task.dataset": file.parent,
        "task.tokenizer": tokenizer,
        "task.sequence_length": LENGTH,
    }
    words = arguments(task | {"task.architecture": json.dumps(LLAMA)})
    commands = {
        "ours": own("first_start", "by_train_py", *words),
        "theirs": own("first_start", "by_trl", file, tokenizer),
    }
    commands["theirs"][0] = trl
    if subprocess.run([trl, "-c", "import trl"], capture_output=True).returncode:
        print(f"no row: {trl} does not have trl (--trl=PYTHON)", file=sys.stderr)
        return []

    def start_twice(name: str) -> list[tuple[float, ...]]:
        place, starts = Path(tempfile.mkdtemp(dir=folder)), []
        for _ in range(2):
            log = Side(commands[name], place, CORES).run().log
            (figures,) = re.findall(FOUND, log, re.MULTILINE)
            starts.append(tuple(map(float, figures)))
        return starts

    turns = in_turn(ROUNDS, *(partial(start_twice, name) for name in commands))
    compared = []
    for which, says in enumerate(("from nothing", "from the cache")):
        mine, peers = ([turn[which] for turn in side] for side in turns)
        for our_start, their_start in zip(mine, peers, strict=True):
            assert abs(our_start[-1] - their_start[-1]) <= 2 * rows, f"{our_start}, {their_start}: other tokens"
        for kind, column in (("", 0), (" per CPU second", 1)):
            speeds = [rate(rows, [figures[column] for figures in side]) for side in (mine, peers)]
            question = f"first start: {rows:,} rows {says}{kind}, SFTTrainer"
            compared.append(Comparison(question, "rows/s", speeds[0], speeds[1], 1, is_gain=True))
    return compared


if __name__ == "__main__":
    sides = {"by_train_py": by_train_py, "by_trl": by_trl}
    rows = {"type": int, "default": 1_000_000, "help": "how many rows to write"}
    trl = {"default": os.environ.get("TRL_PYTHON", sys.executable), "help": "a Python with trl"}
    pairs.main(measure, __doc__, sides, rows=rows, trl=trl)
