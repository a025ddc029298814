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
from itertools import chain, groupby, pairwise
from pathlib import Path
from threading import Thread
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from src.tasks.base import ContextParallel, samples
from src.tasks.streaming import index, streamed_lm
from src.tasks.streaming.cache import TokenCache
from src.tasks.streaming.index import Block, Source, read_block
from src.tasks.streaming.order import Cut, order_epoch
from src.tasks.streaming.stream import Stream, packed
from src.tasks.streaming.streamed_lm import StreamedLM
from src.tasks.text.causal_lm import CausalLM
from src.tasks.text.files import find_files
from src.tasks.text.packing import best_fit
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
def blocks_of(groups: list[list[int]], weight: float = 1.0, passes: int = 1, tokens: Any = None) -> Any:
    """A source by the rows of the blocks of its groups."""
    rows = np.array([*chain.from_iterable(groups)])
    group_of = np.repeat(np.arange(len(groups)), [*map(len, groups)])
    tokens = rows if tokens is None else tokens
    return SimpleNamespace(rows=rows, groups=group_of, tokens=tokens, weight=weight, passes=passes)


def windows_of(sources: list[Any], window: int, seed: int = 0, number: int = 0) -> list[list[tuple[int, int]]]:
    """The source and the number of each block, by window of about so many rows."""
    rows = sum(int(source.rows.sum()) * source.passes for source in sources)
    of = order_epoch(sources, Cut(max(1, rows // window), rows), seed, number)
    blocks = [*zip(of.sources.tolist(), of.blocks.tolist(), strict=True)]
    return [blocks[first:last] for first, last in pairwise(of.windows.tolist())]


def test_an_epoch_has_each_row_of_a_million_in_ragged_files_exactly_once() -> None:
    sizes = np.random.default_rng(0).multinomial(1_000_000, np.random.default_rng(1).dirichlet(np.ones(60)))
    Path("data").mkdir()
    for number, size in enumerate([0, *sizes.tolist(), 0, 0, 0]):
        rows = pa.table({"text": pa.array(["a"] * size, pa.string())})
        parquet.write_table(rows, f"data/{number:02}.parquet", row_group_size=1000 + 37 * number)
    source = Source(find_files("data"), 625, {})
    blocks = [source[number] for number in range(len(source.rows))]
    places = [(block["file"], block["line"] + block["first"] + row) for block in blocks for row in range(block["rows"])]
    assert len({*places}) == len(places) == 1_000_000
    for number in (0, 1):
        windows = windows_of([source], 10_000, number=number)
        assert sorted(block for _, block in chain(*windows)) == [*range(len(source.rows))]
        of_window = [sum(source.rows[block] for _, block in window) for window in windows]
        assert max(of_window) - min(of_window) <= 2 * 625


def test_seed_and_epoch_change_the_order_and_groups_stay_together() -> None:
    sources = [blocks_of([[1] * 3, [1] * 40, [1] * 7, [1] * 20]), blocks_of([[1] * 9] * 2, passes=2)]
    found = [[*chain(*windows_of(sources, 8, seed, number))] for seed in (0, 1) for number in (0, 1)]
    assert len({*map(tuple, found)}) == 4
    for of_epoch in found:
        own = [int(sources[0].groups[block]) for source, block in of_epoch if source == 0]
        assert len([group for group, _ in groupby(own)]) == 4
        assert Counter(of_epoch) == {(0, i): 1 for i in range(70)} | {(1, i): 2 for i in range(18)}


def test_any_stretch_has_rows_from_all_parts_of_a_source() -> None:
    """Also if it is one group. In a random order, the mean of 100 is off by 0.058 of the mean of all (standard
    deviation), here by that of a part, a hundredth of the source: 0.00058."""
    for groups in ([[1] * 10_000], [[1]] * 10_000):
        order = np.array([*chain(*windows_of([blocks_of(groups)], 10_000))])[:, 1]
        means = order.reshape(100, 100).mean(axis=1)
        assert np.abs(means / order.mean() - 1).max() < 5 * 0.00058
        assert abs(np.corrcoef(order[:-1], order[1:])[0, 1]) < 5 / np.sqrt(len(order))


def test_a_mixture_has_its_shares_in_each_window_until_a_source_is_used_up() -> None:
    """Of 7 : 2 : 1 in windows of about 100, each row once, or twice: each window has its share, and so have all before
    it together, to within a block at either end."""
    sources = [blocks_of([[2] * 500, [2] * 200], 7.0), blocks_of([[2] * 45], 2.0, 2), blocks_of([[2] * 250], 1.0)]
    for number in (0, 1):
        windows = windows_of(sources, 100, number=number)
        rows = np.array([[2 * sum(i == source for i, _ in window) for source in range(3)] for window in windows])
        for found in (rows[:8], np.cumsum(rows[:8], axis=0)):
            assert np.abs(found - found.sum(1, keepdims=True) * [0.7, 0.2, 0.1]).max() <= 4
        assert not rows[9:, 1].any()
        others = rows[9:17]
        assert np.abs(others - others.sum(1, keepdims=True) * [7 / 8, 0, 1 / 8]).max() <= 4
        assert Counter(chain(*windows)) == {
            (source, block): of.passes for source, of in enumerate(sources) for block in range(len(of.rows))
        }


def test_windows_of_long_rows_have_fewer_of_them() -> None:
    """All are alike in bytes, to within a block at either end."""
    draw = np.random.default_rng(0)
    rows, row_bytes = draw.integers(1, 30, 2000), 10.0 ** draw.integers(0, 4, 2000)
    source = blocks_of([[size] for size in rows.tolist()], tokens=rows * row_bytes)
    found = [sum(source.tokens[block] for _, block in window) for window in windows_of([source], 500)]
    assert np.abs(np.array(found) - source.tokens.sum() / len(found)).max() <= 2 * source.tokens.max()


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
    """Stands for a source, and for its cache: rows that are nothing but their lengths, whose bytes are known by
    group."""

    weight, passes = 1.0, 1

    def __init__(self, lengths: np.ndarray, group: int, block: int) -> None:
        self.lengths = lengths
        firsts = [np.arange(first, first + group, block) for first in range(0, len(lengths), group)]
        self.firsts = np.concatenate(firsts)
        self.groups = self.firsts // group
        self.rows = np.diff(np.append(self.firsts, len(lengths)))
        of_group = np.add.reduceat(lengths + 8, np.arange(0, len(lengths), group)) / group
        self.sizes = (of_group[self.groups] * self.rows).astype(int)
        self.tokens = self.rows

    def __getitem__(self, number: int) -> int:
        return number

    def read(self, number: int) -> pa.Table:
        first = self.firsts[number]
        lengths = self.lengths[first : first + self.rows[number]]
        parts = -(-lengths // CAPACITY)
        row = np.repeat(np.arange(len(lengths)), parts)
        before = np.arange(len(row)) - (np.cumsum(parts) - parts)[row]
        return pa.table({"length": np.minimum(CAPACITY, lengths[row] - before * CAPACITY)})


CAPACITY = 1024


@pytest.mark.parametrize("window", [500, 10_000])
@pytest.mark.parametrize("group", [1000, 64_000], ids=["small groups", "one group"])
@pytest.mark.parametrize("is_sorted", [False, True], ids=["drawn", "sorted"])
@pytest.mark.parametrize("kind", KINDS_OF_DATA)
def test_little_is_padding(kind: str, is_sorted: bool, group: int, window: int) -> None:
    """At most 2%, and rarely longer sequences."""
    lengths = KINDS_OF_DATA[kind](np.random.default_rng(0))
    of_task = task(shuffle_window=window, sequence_length=CAPACITY)
    source: Any = Lengths(np.sort(lengths) if is_sorted else lengths, group, of_task.block_rows)
    train = of_task.stream([source], source)
    assert 1 - lengths.sum() / len(train) / CAPACITY <= 0.02
    of, over = train.epoch, 0
    left: list[np.ndarray] = []
    for number, (first, last) in enumerate(pairwise(of.windows.tolist())):
        own = np.concatenate([source.read(block)["length"].to_numpy() for block in of.blocks[first:last]])
        count = int(of.sequences[number + 1] - of.sequences[number])
        is_last = train.ends_span(number)
        own, left = (np.concatenate([own, *left]), []) if is_last else (own, left)
        sequences = packed(own, CAPACITY, count, is_last)
        left += [own[[*chain.from_iterable(sequences[count:])]]]
        over += sum(own[sequence].sum() > CAPACITY for sequence in sequences[:count])
    assert not sum(map(len, left))
    assert over <= len(train) / 44


@pytest.mark.parametrize("kind", ["parquet", "jsonl"])
def test_each_row_is_in_an_epoch_exactly_once(kind: str, shards: Path) -> None:
    """Of .jsonl, with files that end within a group, at its end, without an end of line, or are empty."""
    if kind == "jsonl":
        block = task().block_rows
        bounds = [0, 7, block + 7, 2 * block + 6, 2 * block + 6, 3000]
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


def test_rows_off_the_end_are_held_out_whatever_block_they_are_in() -> None:
    tiny.write({"rows.jsonl": "\n".join(json.dumps({"text": f"<{row}> the of"}) for row in range(40))})
    for wanted in (1, 7, 8, 9, 39):
        source = Source(find_files("rows.jsonl"), 8, {})
        held_out = [record.row["text"] for block in source.hold_out(wanted) for record in read_block(block, ["text"])]
        kept = [record.row["text"] for i in range(len(source.rows)) for record in read_block(source[i], ["text"])]
        assert kept + held_out == [f"<{row}> the of" for row in range(40)]
        assert len(held_out) == wanted


def test_prompts_that_are_not_packed_come_once_in_any_number_of_windows() -> None:
    """With rows held out, which change the number of each window's sequences. Tried without: an IndexError."""
    tiny.write({"rows.jsonl": [{"prompt": f"<{row}> the", "completion": " of"} for row in range(500)]})
    for window in (20, 100, 1000):
        train, evaluation = task("rows.jsonl", packing=False, shuffle_window=window).build_datasets()
        assert sorted(rows_of(train) + rows_of(evaluation)) == [*range(500)]
        assert len(train) == 450


def test_a_resume_knows_its_data_in_another_folder_and_after_a_change_of_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """Streamed and loaded. Tried with the folder or the code in what is compared: it is refused."""
    for streaming in (True, False):
        found = []
        for folder, code in (("a", "b"), ("b", "b"), ("b", "c")):
            monkeypatch.setattr("src.tasks.streaming.cache.CACHE_CODE", [code])
            tiny.write({f"{folder}/rows.jsonl": [{"text": f"<{row}> the"} for row in range(50)]})
            found.append(task(folder, streaming=streaming).build_datasets()[0].fingerprint())
        assert found[0] == found[1] == found[2]
        tiny.write({"b/rows.jsonl": [{"text": f"<{row}> teh"} for row in range(50)]})
        assert task("b", streaming=streaming).build_datasets()[0].fingerprint() != found[0]


def test_row_groups_are_decoded_once_though_files_have_the_same_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in folders by language, and in a mixture. Tried with groups by name: each for nearly each block."""
    for number in range(8):
        rows = pa.table({"text": [f"<{row}> the of" for row in range(number * 200, number * 200 + 200)]})
        file = Path(f"{'ab'[number % 2]}/{number}/part.parquet")
        file.parent.mkdir(parents=True)
        parquet.write_table(rows, file)
    decoded: list[str] = []
    original = index.require_unchanged
    monkeypatch.setattr(index, "require_unchanged", lambda *file: decoded.append(file[0]) or original(*file))  # type: ignore[func-returns-value]
    of = task(sources=[{"dataset": "a"}, {"dataset": "b"}], shuffle_window=100, bad_rows="skip")
    of_epoch = epoch(of)
    for file in of_epoch.cache.folder.glob("*.arrow"):
        file.unlink()
    index.read_group.cache_clear()
    decoded.clear()
    assert len(rows_of(of_epoch)) == 1600 - 160
    assert len(decoded) <= 2 * len(of_epoch.epoch.windows)


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
    read: list[Block] = []
    original = TokenCache._make

    def recorded(self: TokenCache, block: Block) -> Any:
        read.append(block)
        return original(self, block)

    monkeypatch.setattr(TokenCache, "_make", recorded)
    for file in of_epoch.cache.folder.glob("*.arrow"):
        file.unlink()
    window = 1  # neither the last of its span nor the one before
    samples(of_epoch, [int(of_epoch.epoch.sequences[window])])
    of_epoch._read[max(of_epoch._read)].result()
    first, _, last = of_epoch.epoch.windows[window : window + 3].tolist()
    due = of_epoch.epoch.blocks[first:last].tolist()
    assert sorted(map(str, read)) == sorted(str(of_epoch.sources[0][number]) for number in due)
    assert len(read) < len(of_epoch.epoch.blocks) / 2


def test_a_window_is_the_same_whatever_was_read_before(shards: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last one of a span too, which a resumed run reads without those before it."""
    monkeypatch.setattr(streamed_lm, "SPAN_ROWS", 0)
    monkeypatch.setattr(streamed_lm, "SPAN", 3)
    of_epoch = epoch(task(shards, shuffle_window=200))
    starts = of_epoch.epoch.sequences.tolist()
    assert len(starts) > 10
    whole = tiny.texts_of(samples(of_epoch, [*range(len(of_epoch))]))
    assert len(of_epoch._left) < of_epoch.cut.span
    apart = [tiny.texts_of(samples(replace(of_epoch), [*range(first, last)])) for first, last in pairwise(starts)]
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
    folder = epoch(task(shards)).cache.folder
    for file in folder.glob("*.arrow"):
        file.unlink()
    made: list[str] = []
    original = TokenCache._make

    def recorded(self: TokenCache, block: Block) -> Any:
        if self.folder == folder:  # not in a thread that a test before has left behind
            made.append(str(block))
        return original(self, block)

    monkeypatch.setattr(TokenCache, "_make", recorded)
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
