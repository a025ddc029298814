"""Streamed rows against rows that are loaded before, and against `datasets`' own stream. One process, CPU.

    python -m benchmarks.streaming [--rows=N]

The data: rows of about 100 characters in ragged parquet files, in row groups of 1,000. One token is one byte.

- from the cache: sequences of an epoch, collated, against the same rows map-style in random order.
- first epoch: rows per CPU second of a tenth of the rows, against a buffer of 10,000 of them; both tokenize, and ours
  also packs, and writes the cache.
- start: a new process's seconds from `build_datasets` until the first batch is collated, with nothing in the cache; of
  all rows against a tenth, in a tenth of the files.
"""

import gc
import os
import shutil
import subprocess
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import count, islice
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
from datasets import load_dataset
from pyarrow import parquet

from benchmarks import pairs
from benchmarks.pairs import Comparison, in_turn
from benchmarks.runs import PROJECT, own
from src.tasks.streaming.streamed_lm import StreamedLM
from src.tasks.text.causal_lm import CausalLM
from src.tasks.text.tokenizing import byte_tokenizer

ROUNDS, FILES, GROUP, WINDOW, BATCH = 5, 64, 1000, 10_000, 8
LLAMA = {"model_type": "llama", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
SETTINGS: dict[str, Any] = {"architecture": LLAMA | {"num_attention_heads": 2}, "sequence_length": 512}


def write_rows(folder: Path, rows: int, files: int) -> Path:
    random = np.random.default_rng(0)
    words = np.array(["".join(random.choice([*"etaoinshrdlu"], size)) for size in random.integers(1, 9, 1000)])
    folder.mkdir()
    ends = [*np.sort(1 + random.choice(rows - 1, files - 1, replace=False)), rows]
    for number, size in enumerate(np.diff(ends, prepend=0)):
        lengths = enumerate(random.integers(5, 32, size))
        texts = [f"{row} {' '.join(words[random.integers(0, 1000, length)])}" for row, length in lengths]
        table = pa.table({"text": pa.array(texts, pa.string())})
        parquet.write_table(table, folder / f"train-{number:03}.parquet", row_group_size=GROUP)
    return folder


def streamed(folder: Path) -> tuple[Any, Any]:
    """Return the task, and its training rows."""
    task: Any = StreamedLM(dataset=str(folder), shuffle_window=WINDOW, **SETTINGS)
    return task, task.build_datasets()[0]


def read(task: Any, train: Any, places: Iterable[int]) -> int:
    """Collate batches of these sequences. Return their tokens."""
    places, tokens = iter(places), 0
    while batch := [*islice(places, BATCH)]:
        tokens += task.collate(train.__getitems__(batch))["tokens"]
    return tokens


def seconds(act: Callable[[], Any], clock: Callable[[], float] = time.perf_counter) -> float:
    started = clock()
    act()
    return clock() - started


def first_batch(words: list[str]) -> None:
    """Print the seconds that this process takes for it."""

    def act() -> None:
        task, train = streamed(Path(words[0]))
        read(task, task.augmented(train, [0, 0, 1]), range(BATCH))

    gc.freeze()  # a search for cycles among what was imported takes 0.3 s, and falls to one run or another by chance
    print(seconds(act))


def compare_starts(large: Path, small: Path) -> Comparison:
    def start(folder: Path) -> float:
        with tempfile.TemporaryDirectory() as cache:
            env = os.environ | {"HF_DATASETS_CACHE": cache}
            return float(subprocess.check_output(own("streaming", "start", folder), cwd=PROJECT, env=env).split()[-1])

    found = in_turn(ROUNDS, lambda: start(large), lambda: start(small))
    return Comparison("streaming: start, all rows, a tenth", "s", found[0], found[1], 1.3, is_gain=False)


def compare_first_epochs(folder: Path, rows: int) -> Comparison:
    task, train = streamed(folder)
    epochs, tokenizer = count(), byte_tokenizer()

    def tokenized(texts: Iterator[dict[str, str]]) -> Iterator[list[int]]:
        while some := [row["text"] for row in islice(texts, 1024)]:
            yield from tokenizer(some, return_attention_mask=False)["input_ids"]

    def ours() -> float:
        shutil.rmtree(Path(datasets.config.HF_DATASETS_CACHE, "blocks"), ignore_errors=True)
        stream = task.augmented(train, [0, next(epochs), 1])
        sequences = (stream.__getitems__([place]) for place in range(len(stream)))
        return rows / seconds(lambda: deque(sequences, maxlen=0), time.process_time)

    def theirs() -> float:
        parts: Any = load_dataset("parquet", data_dir=str(folder), split="train", streaming=True)
        texts = tokenized(iter(parts.shuffle(next(epochs), buffer_size=WINDOW)))
        return rows / seconds(lambda: deque(texts, maxlen=0), time.process_time)

    found = in_turn(ROUNDS, ours, theirs)
    return Comparison("streaming: first epoch, datasets", "rows/s", found[0], found[1], 1, is_gain=True)


def compare_with_loaded(folder: Path) -> Comparison:
    task, train = streamed(folder)
    stream, loaded = task.augmented(train, [0, 0, 1]), CausalLM(dataset=str(folder), **SETTINGS)
    table: Any = loaded.build_datasets()[0]
    size = min(len(stream), len(table)) // BATCH * BATCH
    order = np.random.default_rng(0).permutation(len(table))[:size].tolist()

    def speed(task: Any, train: Any, places: Iterable[int]) -> float:
        started = time.perf_counter()
        return read(task, train, places) / (time.perf_counter() - started)

    read(task, stream, range(size))  # fills the cache
    found = in_turn(ROUNDS, lambda: speed(task, replace(stream), range(size)), lambda: speed(loaded, table, order))
    return Comparison("streaming: from the cache, map-style", "tokens/s", found[0], found[1], 0.9, is_gain=True)


def measure(_: Path, folder: Path, rows: int) -> list[Comparison]:
    small, large = (write_rows(folder / f"{part}", rows // part, FILES // part) for part in (10, 1))
    datasets.config.HF_DATASETS_CACHE = folder / "cache"
    (folder / "cache").mkdir()
    gc.freeze()
    return [compare_starts(large, small), compare_first_epochs(small, rows // 10), compare_with_loaded(large)]


if __name__ == "__main__":
    rows = {"type": int, "default": 400_000, "help": "how many rows to write"}
    pairs.main(measure, __doc__, {"start": first_batch}, rows=rows)
