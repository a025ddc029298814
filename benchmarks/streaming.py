"""Streamed rows against rows that are loaded before, and against other libraries' streams. One process, CPU.

    python -m benchmarks.streaming [--only=start,…] [--litdata=DIR] [--rows=N]

The data: rows of about 100 characters in ragged parquet files, one in eight empty, in row groups of 1,000; a tenth as
many in a tenth of the files where two sizes are compared. One token is one byte. `--litdata` names a folder where
`pip install --target` has put it and polars; without it, its rows are left out.

- start: a new process's seconds from `build_datasets` until the first batch is collated, of all rows against a tenth;
  cold: nothing is in the cache. The operating system's cache of files is warm.
- loaded: the same of map-style, once; printed only.
- resume: seconds to the first batch at 90% of an epoch against 1%, of a stream that is open. Cold: no block is there.
- memory: growth of a new process's peak of resident memory over 20 windows, tokenizing, all rows against a tenth.
- throughput: sequences of an epoch, collated, from the cache, against the same rows map-style in random order.
- peers: rows per CPU second up to the first rows of an epoch, from an open data set, in a buffer or window of 10,000
  (LitData: a file). First epoch: both tokenize, theirs with `tokenizer(texts)` in batches of 1,024; ours also packs and
  writes the cache. Later epochs: ours come from the cache, and theirs are tokenized again. Last: theirs are text that
  is not tokenized, which nothing can be trained on.
- padding: of an epoch of short prompts with completions, of raw text of long-tailed lengths, and of chats, as drawn
  and sorted by length, in one row group, in windows of 500 and of 10,000 rows; the fraction of all tokens in percent,
  against the 2 allowed. How many sequences are longer than they should be is printed.
- workers: a step of 100 ms that waits for batches of 8 x 512 tokens, which two processes load and tokenize, against the
  step alone.
- shuffle: how well a window shuffles, and what it costs; printed only.
"""

import gc
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import tracemalloc
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import islice, pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import numpy as np
import psutil
import pyarrow as pa
from datasets import load_dataset
from pyarrow import parquet

from benchmarks import pairs
from benchmarks.pairs import Comparison, in_turn
from benchmarks.runs import PROJECT
from src.tasks.streaming.order import Cut, order_epoch
from src.tasks.streaming.streamed_lm import StreamedLM
from src.tasks.text.causal_lm import CausalLM
from src.tasks.text.rows import Batch
from src.tasks.text.tokenizing import byte_tokenizer
from src.training.workers import load_in_workers

ROUNDS, FILES, GROUP, WINDOW, LENGTH, BATCH = 5, 64, 1000, 10_000, 512, 8
TOKENIZED, CACHED = 60_000, 100_000  # rows that are timed of a peer's first epoch, of a later one
STEP, STEPS, LATE = 0.1, 500, 0.01  # seconds, steps, and the seconds after which a batch is late
LLAMA = {
    "model_type": "llama", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2,
}  # fmt: skip
Measured = Iterator[Comparison]


def compared(question: str, unit: str, found: list[list[float]], target: float, **direction: bool) -> Comparison:
    """Return what `in_turn` found, ours and theirs, as a row."""
    ours, theirs = found
    return Comparison(question, unit, ours, theirs, target, **direction)


def write_rows(folder: Path, rows: int, files: int) -> Path:
    """Write `rows` rows into `files` files."""
    random = np.random.default_rng(0)
    words = np.array(["".join(random.choice([*"etaoinshrdlu"], size)) for size in random.integers(1, 9, 1000)])
    folder.mkdir()
    ends = np.append(np.sort(random.integers(0, rows, files - 1)), rows)
    ends[::8] = np.append(0, ends)[:-1:8]  # as many rows as up to the file before: this one is empty
    for number, (first, end) in enumerate(zip(np.append(0, ends)[:-1], ends, strict=True)):
        texts = [
            f"{row} {' '.join(words[random.integers(0, 1000, random.integers(5, 32))])}" for row in range(first, end)
        ]
        table = pa.table({"text": pa.array(texts, pa.string())})
        parquet.write_table(table, folder / f"train-{number:03}.parquet", row_group_size=GROUP)
    return folder


def filled(folder: Path) -> Path:
    """Return a folder with the files that are not empty, which `datasets` and LitData do not read."""
    others = folder.with_name(f"{folder.name}-filled")
    if not others.exists():
        others.mkdir()
        for file in folder.iterdir():
            if parquet.read_metadata(file).num_rows:
                (others / file.name).symlink_to(file)
    return others


def new_task(folder: Path, window: int = WINDOW, is_loaded: bool = False, **settings: Any) -> Any:
    shown = {"dataset": str(folder), "architecture": LLAMA, "sequence_length": LENGTH, **settings}
    return CausalLM(**shown) if is_loaded else StreamedLM(shuffle_window=window, **shown)


def use_cache(folder: Path) -> None:
    datasets.config.HF_DATASETS_CACHE = folder


def batch(task: Any, train: Any, first: int) -> Batch:
    return task.collate(train.__getitems__([*range(first, first + BATCH)]))


def seconds(act: Callable[[], Any]) -> float:
    started = time.perf_counter()
    act()
    return time.perf_counter() - started


def cpu_seconds(act: Callable[[], Any]) -> float:
    """Return those of all threads: a busy machine changes them little."""
    started = time.process_time()
    act()
    return time.process_time() - started


def in_child(question: str, cache: Path, **settings: Any) -> float:
    """Return what one of CHILDREN measures in a new process."""
    command = [sys.executable, "-m", "benchmarks.streaming", "--child", question, json.dumps(settings, default=str)]
    environment = os.environ | {"HF_DATASETS_CACHE": str(cache)}
    printed = subprocess.check_output(command, cwd=PROJECT, env=environment, text=True, stderr=subprocess.DEVNULL)
    return float(printed.split()[-1])


def first_batch(**settings: Any) -> float:
    def act() -> None:
        task = new_task(**settings)
        train, _ = task.build_datasets()
        batch(task, task.augmented(train, [0, 0, 1]), 0)

    # a search for cycles among what was imported takes 0.3 s, and falls to one run or another by chance
    gc.freeze()
    return seconds(act)


def growth(**settings: Any) -> float:
    """Return the megabytes that 20 windows add to the peak."""
    before = psutil.Process().memory_info().rss
    task = new_task(**settings)
    train, _ = task.build_datasets()
    stream = task.augmented(train, [0, 0, 1])
    for first in range(0, int(stream.epoch.sequences[20]) - BATCH, BATCH):
        batch(task, stream, first)
    status = Path("/proc/self/status").read_text()  # getrusage would tell the parent's peak, if that is higher
    return int(status.split("VmHWM:")[1].split()[0]) / 1e3 - before / 1e6


CHILDREN = {"start": first_batch, "memory": growth}


def start(small: Path, large: Path, caches: Path) -> Measured:
    def cold(folder: Path) -> float:
        with tempfile.TemporaryDirectory(dir=caches) as cache:
            return in_child("start", Path(cache), folder=folder)

    def warm(folder: Path) -> float:
        return in_child("start", caches, folder=folder)

    found = in_turn(ROUNDS, lambda: cold(large), lambda: cold(small))
    yield compared("start cold, all rows, a tenth", "s", found, 1.3, is_gain=False)
    for folder in (large, small):
        warm(folder)
    found = in_turn(ROUNDS, lambda: warm(large), lambda: warm(small))
    yield compared("start warm, all rows, a tenth", "s", found, 1.3, is_gain=False)


def loaded(small: Path, large: Path, caches: Path) -> Measured:
    for name in ("cold", "warm"):
        found = [in_child("start", caches, folder=filled(folder), is_loaded=True) for folder in (small, large)]
        print(f"start {name}, map-style, a tenth: {found[0]:.1f} s, all rows: {found[1]:.1f} s", flush=True)
    yield from ()


def resume(_: Path, large: Path, caches: Path) -> Measured:
    task = new_task(large)
    train, _ = task.build_datasets()
    epochs = iter(range(10**6))
    for name in ("cold", "cached"):

        def reach(share: float, epoch: int, clears: bool = name == "cold") -> float:
            if clears:
                shutil.rmtree(caches / "blocks")
            stream, place = task.augmented(train, [0, epoch, 1]), int(len(train) * share)
            if not clears:  # in a stream of its own, so that the blocks are cached, and no window is kept
                replace(stream).__getitems__([place])
                time.sleep(3)  # until the window after it is read too
            taken = seconds(lambda: batch(task, stream, place))
            time.sleep(0 if clears else 0.5)
            for future in stream._read.values():
                future.result()  # its prefetching must not slow down the next
            return taken

        late, early = in_turn(ROUNDS, lambda: reach(0.9, next(epochs)), lambda: reach(0.01, next(epochs)))
        yield Comparison(f"resume {name}, at 90%, at 1%", "s", late, early, 1.2, is_gain=False)


def memory(small: Path, large: Path, caches: Path) -> Measured:
    def grow(folder: Path) -> float:
        with tempfile.TemporaryDirectory(dir=caches) as cold:
            return in_child("memory", Path(cold), folder=folder, window=WINDOW // 4)

    found = in_turn(ROUNDS, lambda: grow(large), lambda: grow(small))
    yield compared("memory, all rows, a tenth", "MB", found, 1.1, is_gain=False)


def throughput(_: Path, large: Path, caches: Path) -> Measured:
    """In CPU seconds of the process, all threads: other processes on the machine count less."""
    task, other = new_task(large), new_task(filled(large), is_loaded=True)
    stream, table = task.build_datasets()[0], other.build_datasets()[0]
    stream = task.augmented(stream, [0, 0, 1])
    size = int(stream.epoch.sequences[CACHED // WINDOW]) // BATCH * BATCH
    order = np.random.default_rng(0).permutation(len(table))[:size].tolist()

    def speed(task: Any, train: Any, order: list[int], clock: Callable[[], float] = time.perf_counter) -> float:
        started, tokens = clock(), 0
        for first in range(0, size, BATCH):
            tokens += task.collate(train.__getitems__(order[first : first + BATCH]))["tokens"]
        return tokens / (clock() - started)

    def ours(clock: Callable[[], float] = time.perf_counter) -> float:
        return speed(task, replace(stream), [*range(size)], clock)

    for name, clock in {"second": time.perf_counter, "CPU second": time.process_time}.items():
        ours()
        found = in_turn(ROUNDS, partial(ours, clock), partial(speed, other, table, order, clock))
        question = f"tokens per {name} from the cache, map-style"
        yield compared(question, "tokens/s", found, 0.9, is_gain=True, is_speed=True)
    padding = 1 - sum(task.collate([s])["tokens"] for s in stream.__getitems__([*range(size)])) / size / LENGTH
    print(f"padding: {padding:.2%}, map-style {table.describe(LENGTH)['padding']:.2%}")


def write_kind(folder: Path, kind: str, lengths: np.ndarray) -> Path:
    """Write rows of about so many characters in one row group."""
    text = "the quick brown fox jumps over the lazy dog " * 500
    make: Any = {
        "text": lambda first, rest: {"text": first + rest},
        "prompts": lambda first, rest: {"prompt": first, "completion": rest},
        "chats": lambda first, rest: {
            "messages": [{"role": "user", "content": first}, {"role": "assistant", "content": rest}]
        },
    }
    rows = [make[kind](text[: size // 3 + 1], text[size // 3 + 1 : size + 2]) for size in lengths.tolist()]
    folder.mkdir()
    parquet.write_table(pa.Table.from_pylist(rows), folder / "train.parquet", row_group_size=len(rows))
    return folder


def padding(small: Path, _: Path, caches: Path) -> Measured:
    draw = np.random.default_rng(0)
    kinds = {
        "prompts": draw.integers(20, 181, 60_000),
        "text": draw.lognormal(5.2, 1.1, 40_000).clip(5, 20_000).astype(int),
        "chats": draw.lognormal(4.8, 0.7, 60_000).clip(5, 600).astype(int),
    }
    for kind, lengths in kinds.items():
        for name, sizes in {"as drawn": lengths, "sorted": np.sort(lengths)}.items():
            folder = write_kind(small.with_name(f"{kind} {name}"), kind, sizes)
            for window in (500, WINDOW):
                task = new_task(folder, window, sequence_length=1024)
                stream = task.augmented(task.build_datasets()[0], [0, 0, 1])
                sequences = (stream.__getitems__([place])[0] for place in range(len(stream)))
                used = np.array([sum(len(chunk["input_ids"]) for chunk in sequence) for sequence in sequences])
                question = f"padding of {kind}, {name}, windows of {window:,}"
                print(
                    f"{question}: {(used > 1024).mean():.1%} are longer, by up to {used.max() / 1024 - 1:.0%}",
                    flush=True,
                )
                share = 100 * (1 - used.sum() / len(used) / 1024)
                yield Comparison(question, "%", [share], [2.0], 1, is_gain=False)


def tokenized(rows: Iterable[dict[str, str]]) -> Iterator[list[int]]:
    tokenizer, rows = byte_tokenizer(), iter(rows)
    while texts := [row["text"] for row in islice(rows, 1024)]:
        yield from tokenizer(texts, return_attention_mask=False)["input_ids"]


def peers(_: Path, large: Path, caches: Path) -> Measured:
    task = new_task(large)
    train, _ = task.build_datasets()
    seeds = iter(range(10**6))
    opened: dict[str, Callable[[int], Any]] = {
        "datasets": lambda seed: load_dataset(
            "parquet", data_files=[*map(str, filled(large).glob("*.parquet"))], split="train", streaming=True
        ).shuffle(seed, buffer_size=WINDOW)
    }
    with suppress(ImportError):
        from litdata import StreamingDataset, index_parquet_dataset  # type: ignore[import-not-found]
        from litdata.streaming.item_loader import ParquetLoader  # type: ignore[import-not-found]

        folder = str(filled(large))
        index_parquet_dataset(folder)
        opened["litdata"] = lambda seed: StreamingDataset(folder, item_loader=ParquetLoader(), shuffle=True, seed=seed)

    def ours(rows: int, epoch: int, clears: bool) -> float:
        """Count rows by windows: they are all in its sequences."""
        if clears:
            shutil.rmtree(caches / "blocks")
        stream = task.augmented(train, [0, epoch, 1])
        windows, sequences = (edges[: rows // WINDOW + 1] for edges in stream.epoch[2:])
        vars(stream)["epoch"] = stream.epoch._replace(windows=windows, sequences=sequences)  # none is read ahead after
        size = int(sequences[-1])
        return rows / cpu_seconds(lambda: deque((stream.__getitems__([place]) for place in range(size)), maxlen=0))

    def theirs(open_rows: Callable[[int], Any], rows: int, tokenizes: bool) -> float:
        found: Any = open_rows(next(seeds))
        found = tokenized(found) if tokenizes else found
        return rows / cpu_seconds(lambda: deque(islice(found, rows), maxlen=0))

    for name, open_rows in opened.items():
        for kind, size, (clears, tokenizes) in (
            ("first epoch", TOKENIZED, (True, True)),
            ("later epochs", TOKENIZED, (False, True)),
            ("their text alone", CACHED, (False, False)),
        ):
            ours(size, 0, clears)
            found = in_turn(ROUNDS, partial(ours, size, 0, clears), partial(theirs, open_rows, size, tokenizes))
            yield compared(f"rows, {kind}, {name}", "rows/s", found, 1, is_gain=True, is_speed=True)


def workers(_: Path, large: Path, caches: Path) -> Measured:
    with suppress(FileNotFoundError):
        shutil.rmtree(caches / "blocks")
    task = new_task(large)
    train, _ = task.build_datasets()
    config: Any = SimpleNamespace(task=task, num_workers=2, seed=0)
    sampler = [[*range(first, first + BATCH)] for first in range(0, (STEPS + 1) * BATCH, BATCH)]
    batches = load_in_workers(config, task.augmented(train, [0, 0, 1]), sampler, 0, 0)
    first = seconds(lambda: next(batches))
    time.sleep(STEP)
    waits, alone = np.array(
        [(seconds(lambda: next(batches)), seconds(lambda: time.sleep(STEP))) for _ in range(STEPS)]
    ).T
    print(
        f"workers: first batch {first:.1f} s; later {(waits > LATE).mean():.2%} late, longest wait {waits.max():.3f} s"
    )
    means = [part.reshape(ROUNDS, -1).mean(1).tolist() for part in (waits + alone, alone)]
    yield compared("100 ms step with two workers, alone", "s", means, 1.05, is_gain=False)


def shuffle(_: Path, large: Path, caches: Path) -> Measured:
    rows, epochs = 1_000_000, 10
    near = [np.diff(np.random.default_rng(epoch).permutation(rows)) for epoch in range(epochs)]
    print(f"shuffle, all at once: {np.mean([(abs(steps) <= 100).mean() for steps in near]):.4%} of neighbours near")
    for group in (1000, 20_000):
        for window in (1000, 10_000, 100_000):
            firsts = np.concatenate([np.arange(first, first + group, window // 16) for first in range(0, rows, group)])
            ends = np.minimum(firsts + window // 16, (firsts // group + 1) * group)
            sizes = ends - firsts
            source: Any = SimpleNamespace(rows=sizes, groups=firsts // group, tokens=sizes, weight=1.0, passes=1)
            correlations, shares = [], []
            for epoch in range(epochs):
                of = order_epoch([source], Cut(rows // window, rows), 0, epoch)
                parts = [np.arange(firsts[i], ends[i]) for i in of.blocks]
                windows = [np.concatenate(parts[first:last]) for first, last in pairwise(of.windows)]
                numbers = np.concatenate([np.random.default_rng(epoch).permutation(own) for own in windows])
                correlations.append(np.corrcoef(numbers, np.arange(rows))[0, 1])
                places = np.empty(rows, int)
                places[numbers] = np.arange(rows)
                shares.append((abs(np.diff(places)) <= 100).mean())
            correlation = np.sqrt(np.mean(np.square(correlations)))
            print(f"shuffle {group} {window}: correlation {correlation:.4f}, {np.mean(shares):.3%} of neighbours near")
    train = new_task(large).build_datasets()[0]
    train.read_window(0)
    for window in (1000, 10_000, 100_000):
        stream = new_task(large, window).build_datasets()[0]
        before = pa.total_allocated_bytes()
        tracemalloc.start()
        kept = stream.read_window(0)
        size = tracemalloc.get_traced_memory()[0] + pa.total_allocated_bytes() - before
        tracemalloc.stop()
        print(f"window of {window}: {size / window:.0f} bytes a row, {len(kept)} sequences; two are kept")
    yield from ()


QUESTIONS = {
    function.__name__: function
    for function in (start, loaded, resume, memory, throughput, padding, peers, workers, shuffle)
}


def measure(_: Path, folder: Path, only: str, litdata: str | None, rows: int) -> list[Comparison]:
    sys.path += [litdata] if litdata else []
    small = write_rows(folder / "small", rows // 10, FILES // 10)
    large = write_rows(folder / "large", rows, FILES)
    use_cache(folder / "cache")
    (folder / "cache").mkdir()
    # a search for cycles among what was imported takes 0.3 s, and falls to one side or the other by chance
    gc.freeze()
    found = []
    for question in only.split(","):
        found += [*QUESTIONS[question](small, large, folder / "cache")]
    return found


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        print(CHILDREN[sys.argv[2]](**json.loads(sys.argv[3])))
    else:
        options = pairs.parser(__doc__)
        options.add_argument("--only", default=",".join(QUESTIONS))
        options.add_argument("--litdata")
        options.add_argument("--rows", type=int, default=1_000_000)
        pairs.main(measure, options)
