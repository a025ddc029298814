"""src/tasks/streaming: the order and the sequences depend on the seed and the step alone, each row comes exactly
once, and a run goes on exactly, at any number of processes."""

import json
import os
import random
import re
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from itertools import chain, pairwise
from pathlib import Path
from threading import Thread
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from src.tasks.base import ContextParallel, samples
from src.tasks.streaming.blocks import Blocks
from src.tasks.streaming.order import Order
from src.tasks.streaming.stream import Stream, count_sequences, masses_of, packed
from src.tasks.streaming.streamed_lm import StreamedLM
from src.tasks.text.causal_lm import CausalLM
from src.tasks.text.files import GROUP_ROWS, find_files, index_files
from src.tasks.text.packing import best_fit
from src.tasks.text.reading import ShardReader, cache_folder
from tests.faults.runs import cut_back
from tests.launching import Launch, Run, Started, slow, wait
from tests.text import tiny
from tests.text.conftest import Trained
from tests.text.tasks import TEXT, over

STEPS = 24


@pytest.fixture(scope="session")
def shards(shared: Path) -> Path:
    """3,000 rows."""
    TEXT["mixture, streamed"].ready(shared)
    return shared / "mixture" / "shards"


def task(dataset: Path | str = "", **settings: Any) -> Any:
    """A task that streams."""
    return tiny.task(StreamedLM, dataset=str(dataset), **{"shuffle_window": 500} | settings)


def epoch(task: Any, number: int = 0) -> Stream:
    """The training set as an epoch sees it."""
    train, _ = task.build_datasets()
    return task.augmented(train, [0, number, 1])


def rows_of(dataset: Any) -> list[int]:
    """The numbers of the rows that begin in its sequences, in their order."""
    texts = tiny.texts_of([samples(dataset, [i])[0] for i in range(len(dataset))])
    return [int(number) for text in texts for number in re.findall(r"<(\d+)>", text)]


# ------------------------------------------------------------------------------------------------ the order
def order(groups: list[list[int]], window: int, weights: list[float], passes: list[int]) -> Order:
    arrays = [np.array(rows) for rows in groups]
    return Order(arrays, arrays, weights, passes, window)


def drawn(of: Order, seed: int, epoch: int) -> list[tuple[int, int]]:
    """The rows of an epoch in their order, each with its source."""
    parts = (of.rows(seed, epoch, window) for window in range(len(of.shares)))
    return [pair for sources, rows in parts for pair in zip(sources.tolist(), rows.tolist(), strict=True)]


def test_an_epoch_has_each_row_of_a_million_in_ragged_files_exactly_once(tmp_path: Path) -> None:
    sizes = np.random.default_rng(0).multinomial(1_000_000, np.random.default_rng(1).dirichlet(np.ones(60)))
    Path("data").mkdir()
    for number, size in enumerate([0, *sizes.tolist(), 0, 0, 0]):
        rows = pa.table({"text": pa.array(["a"] * size, pa.string())})
        parquet.write_table(rows, f"data/{number}.parquet", row_group_size=1000 + 37 * number)
    index = index_files(find_files("data"), [], tmp_path / "cache")
    of = order([[group[0] for shard in index for group in shard.groups]], 10_000, [1.0], [1])
    rows = np.concatenate([of.rows(0, 1, window)[1] for window in range(len(of.shares))])
    assert np.array_equal(np.sort(rows), np.arange(1_000_000))


def test_seed_and_epoch_change_the_order_and_a_window_is_worked_out_without_those_before_it() -> None:
    ragged = ([[3, 40, 7, 20], [9, 9]], 8, [2.0, 1.0], [1, 2])
    whole = order(*ragged)
    assert len({tuple(drawn(whole, seed, epoch)) for seed in (0, 1) for epoch in (0, 1)}) == 4
    last = order(*ragged).rows(5, 3, len(whole.shares) - 1)
    assert [*zip(*(part.tolist() for part in last), strict=True)] == drawn(whole, seed=5, epoch=3)[-len(last[0]) :]


def test_a_mixture_has_its_shares_in_each_window_until_a_source_is_used_up() -> None:
    """Of 7 : 2 : 1 in windows of 100, each row once, or twice. Parts of rows are made good in the next windows."""
    of = order([[1000, 400], [90], [500]], 100, [7.0, 2.0, 1.0], [1, 2, 1])
    assert of.shares[:9].tolist() == [[70, 20, 10]] * 9
    assert of.shares[9].tolist() == [79, 9, 12] or of.shares[9, 1] == 0
    assert (of.shares[:-1].sum(1) == 100).all()
    for number in (0, 1):
        counts = Counter(drawn(of, 0, number))
        assert all(count == (2 if source == 1 else 1) for (source, _), count in counts.items())
        assert Counter(source for source, _ in counts) == {0: 1400, 1: 90, 2: 500}
    thirds = np.cumsum(order([[10_000]] * 3, 10, [1.0] * 3, [1] * 3).shares, axis=0)
    assert np.abs(thirds - np.arange(1, len(thirds) + 1)[:, None] * 10 / 3).max() <= 1  # a whole row


def test_windows_of_long_rows_have_fewer_of_them() -> None:
    """All are alike in bytes. Tried with windows cut by rows: from 500 bytes to 500,000, in place of 171,000."""
    draw = np.random.default_rng(0)
    sizes, row_bytes = draw.integers(0, 300, 200), 10.0 ** draw.integers(0, 4, 200)
    source: Any = SimpleNamespace(sizes=sizes, row_bytes=row_bytes)
    of = Order([sizes], [masses_of(source)], [1.0], [2], 500)
    windows = [of.rows(0, 1, number)[1] for number in range(len(of.shares))]
    assert Counter(np.concatenate(windows).tolist()) == dict.fromkeys(range(sizes.sum()), 2)
    bytes_of = np.repeat(row_bytes, sizes)
    expected = of.shares[:, 0] * bytes_of.mean()
    # half a row at either end
    assert max(abs(bytes_of[rows].sum() - size) for rows, size in zip(windows, expected, strict=True)) <= 1000.0


# ------------------------------------------------------------------------------------------------ packing
def test_a_window_is_packed_as_tightly_as_map_style_and_loses_nothing() -> None:
    lengths = np.random.default_rng(0).integers(1, 65, 300)
    tight = best_fit(lengths, 64)
    for is_last in (False, True):
        found = packed(lengths, 64, len(tight) + 3, is_last)
        assert sorted(found) == sorted([*tight, [], [], []])
    count = len(tight) * 9 // 10
    *found, last = packed(lengths, 64, count, False)
    assert sorted(i for chunks in [*found, last] for i in chunks) == [*range(300)]
    assert max(lengths[chunks].sum() for chunks in found) <= 64
    fills = [lengths[chunks].sum() for chunks in [*found, last]]
    assert min(fills[:count]) >= max(fills[count:])
    # what nothing comes after has to be longer: the tokens in 9/10, and what packing loses
    found = packed(lengths, 64, count, True)
    assert len(found) == count
    assert sorted(i for chunks in found for i in chunks) == [*range(300)]
    assert max(lengths[chunks].sum() for chunks in found) <= 64 / 0.9 * 1.1


KINDS_OF_DATA: dict[str, Callable[[np.random.Generator], np.ndarray]] = {
    "short": lambda draw: draw.integers(20, 181, 64_000),
    "web": lambda draw: draw.lognormal(5.2, 1.1, 64_000).clip(5, 20_000).astype(int),
    "chats": lambda draw: draw.lognormal(4.8, 0.7, 64_000).clip(5, 1024).astype(int),
}
"""Tokens of the rows."""


class Lengths:
    """Stands for a source, and for blocks of it: rows that are nothing but their lengths."""

    def __init__(self, lengths: np.ndarray, group: int) -> None:
        self.lengths = lengths
        firsts = np.arange(0, len(lengths), group)
        self.sizes = np.diff(np.append(firsts, len(lengths)))
        self.row_bytes = np.add.reduceat(lengths, firsts) / self.sizes + 8

    def read(self, _: Any, rows: np.ndarray) -> pa.Table:
        lengths = self.lengths[rows]
        number = -(-lengths // CAPACITY)
        row = np.repeat(np.arange(len(rows)), number)
        before = np.arange(len(row)) - (np.cumsum(number) - number)[row]
        return pa.table({"length": np.minimum(CAPACITY, lengths[row] - before * CAPACITY), "row": row})


CAPACITY = 1024


@pytest.mark.parametrize("window", [500, 10_000])
@pytest.mark.parametrize("group", [1000, 64_000], ids=["small groups", "one group"])
@pytest.mark.parametrize("is_sorted", [False, True], ids=["drawn", "sorted"])
@pytest.mark.parametrize("kind", KINDS_OF_DATA)
def test_little_is_padding(kind: str, is_sorted: bool, group: int, window: int) -> None:
    """At most 2%, and rarely longer sequences."""
    lengths = KINDS_OF_DATA[kind](np.random.default_rng(0))
    source: Any = Lengths(np.sort(lengths) if is_sorted else lengths, group)
    of = Order([source.sizes], [masses_of(source)], [1.0], [1], window)
    counts, span = count_sequences(of, [source], source, CAPACITY)
    assert 1 - lengths.sum() / counts.sum() / CAPACITY <= 0.02
    over = 0
    left: list[np.ndarray] = []
    for number, count in enumerate(counts.tolist()):
        own = source.read(None, of.rows(0, 0, number)[1])["length"].to_numpy()
        is_last = (number + 1) % span == 0 or number + 1 == len(counts)
        own, left = (np.concatenate([own, *left]), []) if is_last else (own, left)
        sequences = packed(own, CAPACITY, count, is_last)
        left += [own[[*chain.from_iterable(sequences[count:])]]]
        over += sum(own[sequence].sum() > CAPACITY for sequence in sequences[:count])
    assert not sum(map(len, left))
    assert over <= counts.sum() / 44


@pytest.mark.parametrize("kind", ["parquet", "jsonl"])
def test_each_row_is_in_an_epoch_exactly_once(kind: str, shards: Path) -> None:
    """Of .jsonl, with files that end within a group, at its end, without an end of line, or are empty."""
    if kind == "jsonl":
        bounds = [0, 7, GROUP_ROWS + 7, 2 * GROUP_ROWS + 6, 2 * GROUP_ROWS + 6, 3000]
        for number, (first, last) in enumerate(pairwise(bounds)):
            lines = "\n".join(json.dumps({"text": f"<{row}> the of"}) for row in range(first, last))
            tiny.write({f"lines/{number}.jsonl": lines + "\n" * (number % 2 and first < last)})
    of = task(shards if kind == "parquet" else "lines")
    train, evaluation = of.build_datasets()
    held_out = rows_of(evaluation)
    assert sorted(held_out) == [*range(3000 - len(held_out), 3000)]
    for number in (0, 1):
        found = rows_of(of.augmented(train, [0, number, 1]))
        assert sorted(found) == [*range(3000 - len(held_out))]
        assert found != sorted(found)


def test_a_window_may_have_a_row_twice(tmp_path: Path) -> None:
    """Where two passes meet. Tried with slices of blocks only: <6> comes in place of <9>."""
    tiny.write({"rows.jsonl": "\n".join(json.dumps({"text": f"<{row}> the of"}) for row in range(40))})
    of_epoch = epoch(task("rows.jsonl", eval_fraction=0.1))
    for rows in ([3, 2, 1, 0], [5, 9], [2, 0, 0, 3], [1, 3, 1], []):
        chunks = of_epoch.blocks.read(of_epoch.sources[0], np.array(rows, int)).to_pylist()
        found = zip([chunk["row"] for chunk in chunks], tiny.texts_of([chunks]), strict=True)
        assert sorted(found) == [(place, f"<{row}> the of") for place, row in enumerate(rows)]


def test_prompts_packed_or_not_lose_nothing_that_map_style_has() -> None:
    Path("asked").mkdir()
    tiny.questions(Path("asked/train.jsonl"))
    tiny.questions(Path("asked/dev.jsonl"), rows=9)
    for packing in (True, False):
        tokens = []
        for kind in (StreamedLM, CausalLM):
            train, _ = tiny.task(kind, dataset="asked", packing=packing).build_datasets()
            chunks = [chunk for sample in samples(train, [*range(len(train))]) for chunk in sample]
            tokens.append(sorted((chunk["input_ids"].tolist(), chunk["labels"].tolist()) for chunk in chunks))
        assert tokens[0] == tokens[1]


# ------------------------------------------------------------------------------------------------ reading
def test_a_resume_reads_nothing_but_its_window_and_the_next(shards: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With nothing in the cache. Only the last window of a span takes what those before it leave over."""
    of_epoch = epoch(task(shards))
    read: set[int] = set()
    original = ShardReader.read

    def recorded(self: ShardReader, number: int, *more: Any) -> Any:
        read.add(number)
        return original(self, number, *more)

    monkeypatch.setattr(ShardReader, "read", recorded)
    for block in of_epoch.blocks.folder.glob("*.arrow"):
        block.unlink()
    window = len(of_epoch.counts) - 3  # not in the last window of its span, nor in the one before
    samples(of_epoch, [int(of_epoch.counts[:window].sum())])
    of_epoch._read[max(of_epoch._read)].result()
    ends = np.cumsum(of_epoch.order.groups[0])
    due = [of_epoch.order.rows(0, 0, n)[1] for n in (window, window + 1) if n < len(of_epoch.counts)]
    assert read == {*np.searchsorted(ends, np.concatenate(due), side="right").tolist()}
    assert len(read) < len(ends) / 2


def test_a_window_is_the_same_whatever_was_read_before(shards: Path) -> None:
    """The last one of a span too, which a resumed run reads without those before it."""
    of_epoch = epoch(task(shards))
    assert of_epoch.span > 1
    whole = tiny.texts_of(samples(of_epoch, [*range(len(of_epoch))]))
    assert len(of_epoch._left) < of_epoch.span
    apart = [
        tiny.texts_of(samples(replace(of_epoch), [*range(end - count, end)]))
        for count, end in zip(of_epoch.counts.tolist(), np.cumsum(of_epoch.counts).tolist(), strict=True)
    ]
    assert whole == [*chain.from_iterable(apart)]


def test_rows_that_changed_are_tokenized_anew_even_where_the_footer_is_as_before(tmp_path: Path) -> None:
    """And the file has its old size and time. Tried with blocks that go by the footer alone: the old rows come."""
    file = tmp_path / "rows.parquet"
    found = []
    for middle in ("<7> the", "<8> the"):
        rows = ["<0> a", *[middle] * 40, "<9> z"]
        parquet.write_table(pa.table({"text": rows}), file, use_dictionary=False, compression="none")
        os.utime(file, (0, 0))
        train = epoch(task(file, eval_fraction=0.03))
        found.append((train.sources[0].fingerprint, Counter(rows_of(train))))
    (before, old), (after, new) = found
    assert before == after
    assert old[7] == new[8] == 40


def test_no_block_is_tokenized_twice_unless_the_cache_lost_it(shards: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads stand in for them. Then with a cache of the size of about three blocks."""
    folder = cache_folder() / "blocks"
    made: list[str] = []
    original = Blocks._make

    def recorded(self: Blocks, *where: Any) -> Any:
        if self.folder == folder:  # not in a thread that a test before has left behind
            made.append(str(where[1:]))
        return original(self, *where)

    monkeypatch.setattr(Blocks, "_make", recorded)
    found: list[list[int]] = []
    streams = [epoch(task(shards)) for _ in range(3)]
    threads = [Thread(target=lambda of_epoch=of_epoch: found.append(rows_of(of_epoch))) for of_epoch in streams]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == len({*made}) > 10, made
    sizes = []
    for file in folder.glob("*.arrow"):
        sizes.append(file.stat().st_size)
        file.unlink()
    assert rows_of(epoch(task(shards, cache_gb=3 * max(sizes) / 1e9))) == found[0] == found[1] == found[2]
    assert 0 < sum(file.stat().st_size for file in folder.glob("*.arrow")) <= 3 * max(sizes) < sum(sizes)


# ------------------------------------------------------------------------------------------------ runs
RECORD = """
import hashlib, json
import src.training.batches as batches
unrecorded = batches.training_steps
def training_steps(run, first, last=None):
    size = run.config.forward_batch_size(run.world_size)
    for step, micro_batches in enumerate(unrecorded(run, first, last), start=first + 1):
        found = {}
        for number, batch in enumerate(micro_batches):
            inputs = batch.data["inputs"]
            for i in range(batch.num_examples):
                content = inputs["input_ids"][i].numpy().tobytes() + inputs["position_ids"][i].numpy().tobytes()
                place = (number * size + i) * run.world_size + run.rank
                found[place] = hashlib.sha256(content).hexdigest()
        with (run.config.folder / f"sequences-{run.rank}.jsonl").open("a") as file:
            file.write("\\n" + json.dumps([step, found]) + "\\n")
        yield micro_batches
batches.training_steps = training_steps
"""
"""Has each process write down the sequences that it reads, each with its place in the global batch."""
NAME = "mixture, streamed"


def how(processes: int) -> tuple[str, dict[str, Any]]:
    """Another strategy at each number of processes."""
    return ("cpu", {}) if processes == 1 else (("ddp", "fsdp")[processes % 2], {"processes": processes})


def sequences(folder: Path) -> dict[int, dict[int, str]]:
    """The hashes that the processes of a run wrote down, by step and place; the later ones, where it was resumed."""
    found: dict[int, dict[int, str]] = {}
    for file in sorted(folder.glob("sequences-*")):
        for line in file.read_text().splitlines():
            # not of a line that is being written, or that a kill cut short: its step comes again
            with suppress(ValueError):
                step, places = json.loads(line)
                found.setdefault(step, {}).update({int(place): content for place, content in places.items()})
    return found


def numbers(run: Run, *names: str) -> list[list[float]]:
    """Those that are recorded at each step."""
    return [[record[name] for name in names] for record in run.records if names[0] in record]


def assert_same(run: Run, whole: Run) -> None:
    """The curve, and the tokens of each source so far, at each step; the losses of each source at the end."""
    assert run.losses == pytest.approx(whole.losses, rel=1e-5)
    assert numbers(run, *TOKENS) == numbers(whole, *TOKENS)
    for name in ("eval/loss", "eval/loss_shards", "eval/loss_other"):
        assert run.summary[name] == pytest.approx(whole.summary[name], rel=1e-5)


TOKENS = ("train/tokens_shards", "train/tokens_other")


@pytest.fixture
def alone(trained: Trained) -> Run:
    """On one process, uninterrupted."""
    return trained(NAME, before=RECORD)


def test_a_mixture_records_losses_and_tokens_by_source(alone: Run) -> None:
    """The loss of all targets lies between those of the sources; tokens are all that were trained on."""
    (*_, (shards, other)) = numbers(alone, *TOKENS)
    assert min(shards, other) > 0
    assert shards + other == pytest.approx(
        sum(12 * 64 * (1 - padding) for (padding,) in numbers(alone, "perf/padding"))
    )
    losses = sorted(alone.summary[f"eval/loss{source}"] for source in ("_shards", "", "_other"))
    assert losses[0] < losses[1] == alone.summary["eval/loss"] < losses[2]


@pytest.mark.parametrize(("processes", "workers"), [(2, 2), slow(3, 0), slow(1, 2), slow(4, 0), slow(4, 2)])
def test_sequences_are_the_same_on_any_processes(processes: int, workers: int, alone: Run, trained: Trained) -> None:
    yaml, more = how(processes)
    run = trained(NAME, yaml, f"--num_workers={workers}", before=RECORD, **more)
    assert sequences(run.folder) == sequences(alone.folder)
    assert len(sequences(run.folder)) == STEPS
    assert_same(run, alone)


def test_a_killed_run_goes_on_with_the_next_row(alone: Run, launch: Launch, shared: Path, tmp_path: Path) -> None:
    """As it was on one, on two under FSDP. Killed for real, and often: the next test."""
    folder = cut_back(alone, tmp_path / "run", 12)
    (folder / "sequences-0.jsonl").unlink()
    run = TEXT[NAME].ready(shared).run(launch, "fsdp", folder=folder, before=RECORD, processes=2).succeeded()
    assert sequences(folder) == {step: sequences(alone.folder)[step] for step in range(13, STEPS + 1)}
    assert_same(run, alone)


@pytest.mark.slow
def test_so_does_one_that_is_killed_twenty_times(alone: Run, launch: Launch, shared: Path, tmp_path: Path) -> None:
    folder, draw, processes = tmp_path / "run", random.Random(0), 1
    arguments = TEXT[NAME].ready(shared).arguments
    for step in sorted(draw.sample(range(1, STEPS - 1), 20)):
        yaml, more = how(processes)
        with Started(yaml, *arguments, folder=folder, before=RECORD, **more) as started:
            # read one step ahead of the one that is computed
            wait(lambda step=step: max(sequences(folder), default=0) > step, say=lambda: started.output)  # type: ignore
            started.kill_all()
        processes = draw.choice([other for other in (1, 2, 3, 4) if other != processes])
    yaml, more = how(processes)
    run = launch(yaml, *arguments, folder=folder, before=RECORD, **more).succeeded()
    assert sequences(folder) == sequences(alone.folder)
    assert_same(run, alone)


@pytest.mark.parametrize("size", [2, 3])
def test_processes_that_share_sequences_count_each_token_and_target_of_a_source_once(shards: Path, size: int) -> None:
    """And know the source of each target. Tried with counts by every process of a group, and with all sources."""

    def counted(cp: ContextParallel) -> Counter[Any]:
        of = task(sources=[{"dataset": str(shards)}, {"dataset": str(shards.parent / "other")}])
        of.state.cp = cp
        batch = of.collate(samples(epoch(of), [*range(12)]))
        counts = of.count(batch)
        of_targets = zip(batch["sources"].tolist(), batch["inputs"]["targets"].tolist(), strict=True)
        return Counter({name: int(counts[name]) for name in ("targets", *TOKENS)}) + Counter(of_targets)

    whole = counted(ContextParallel())
    assert sum((counted(ContextParallel(rank, size)) for rank in range(size)), Counter()) == whole
    assert min(whole[name] for name in TOKENS) > 0


@pytest.mark.slow
def test_so_they_do_in_a_run(alone: Run, trained: Trained) -> None:
    assert_same(trained(NAME, "fsdp_cp", "--num_workers=0", **over(1, 2)), alone)
