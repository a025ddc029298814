"""src/tasks/text/streaming: the order and the sequences depend on the seed and the step alone, each row comes exactly
once, and a run goes on exactly, at any number of processes."""

import json
import os
import random
import re
from collections import Counter
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from threading import Thread
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from src.config.errors import RunError
from src.tasks.base import samples
from src.tasks.text.causal_lm import CausalLM
from src.tasks.text.files import GROUP_ROWS, find_files, index_files
from src.tasks.text.packing import best_fit
from src.tasks.text.reading import ShardReader, cache_folder
from src.tasks.text.streaming import blocks, stream
from src.tasks.text.streaming.blocks import Blocks
from src.tasks.text.streaming.order import Order
from src.tasks.text.streaming.stream import Stream, count_sequences, masses_of, packed
from src.tasks.text.text_classification import TextClassification
from tests.launching import Launch, Run, Started, slow, wait
from tests.text import tiny
from tests.text.tasks import over

ARCHITECTURE = {"model_type": "llama", "num_hidden_layers": 1, "hidden_size": 32, "num_attention_heads": 2}
ROWS, FILES, STEPS = 3000, 8, 40
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


def write_shards(folder: Path, rows: int, files: int, seed: int = 0, words: int = 12) -> Path:
    """Files of ragged sizes, two of them empty, in row groups of ragged sizes. A row begins with its number."""
    folder.mkdir(parents=True)
    draw = random.Random(seed)
    cuts = sorted(draw.randrange(rows) for _ in range(files - 3))
    bounds = [0, *cuts, cuts[1], cuts[1], rows]
    bounds.sort()
    for number, (first, last) in enumerate(pairwise(bounds)):
        texts = [
            f"<{row}> {' '.join(draw.choices(tiny.WORDS, k=draw.randint(1, 2 * words)))}" for row in range(first, last)
        ]
        table = pa.table({"text": pa.array(texts, pa.string())})
        parquet.write_table(table, folder / f"part-{number:02}.parquet", row_group_size=draw.randint(50, 400))
    return folder


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("streaming")
    write_shards(folder / "other", 300, FILES, seed=1, words=30)
    return write_shards(folder / "shards", ROWS, FILES)


def task(dataset: Path | str = "", **settings: Any) -> CausalLM:
    """A task that streams."""
    options = {"streaming": True, "sequence_length": 64, "shuffle_window": 500} | settings
    return CausalLM(dataset=str(dataset), architecture=ARCHITECTURE, **options)


def epoch(task: CausalLM, number: int = 0, seed: int = 0) -> Stream:
    """The training set as an epoch sees it."""
    train, _ = task.build_datasets()
    return task.augmented(train, [seed, number, 1])


def rows_of(dataset: Any, of: CausalLM) -> list[int]:
    """The numbers of the rows that begin in its sequences, in their order."""
    found = []
    for i in range(len(dataset)):
        (sequence,) = samples(dataset, [i])
        texts = (str(of._tokenizer.decode(chunk["input_ids"])) for chunk in sequence)
        found += [int(number) for text in texts for number in re.findall(r"<(\d+)>", text)]
    return found


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
    for number, size in enumerate([0, *sizes.tolist(), 0, 0, 0]):
        rows = pa.table({"text": pa.array(["a"] * size, pa.string())})
        parquet.write_table(rows, tmp_path / f"{number}.parquet", row_group_size=1000 + 37 * number)
    index = index_files(find_files(str(tmp_path)), [], tmp_path / "cache")
    groups = [group[0] for shard in index for group in shard.groups]
    assert len(index) == 64
    of = order([groups], 10_000, [1.0], [1])
    rows = np.concatenate([of.rows(0, 1, window)[1] for window in range(len(of.shares))])
    assert np.array_equal(np.sort(rows), np.arange(1_000_000))
    assert not np.array_equal(rows, np.concatenate([of.rows(0, 2, window)[1] for window in range(len(of.shares))]))


def test_a_window_is_worked_out_without_those_before_it() -> None:
    whole = order([[3, 40, 7, 20], [9, 9]], 8, [2.0, 1.0], [1, 2])
    expected = drawn(whole, seed=5, epoch=3)
    last = order([[3, 40, 7, 20], [9, 9]], 8, [2.0, 1.0], [1, 2]).rows(5, 3, len(whole.shares) - 1)
    assert [*zip(*(part.tolist() for part in last), strict=True)] == expected[-len(last[0]) :]


def test_seed_and_epoch_change_the_order() -> None:
    of = order([[10, 20, 30]], 15, [1.0], [1])
    assert len({tuple(drawn(of, seed, epoch)) for seed in (0, 1) for epoch in (0, 1)}) == 4


def test_a_mixture_has_its_shares_in_each_window_until_a_source_is_used_up() -> None:
    """Of 7 : 2 : 1 in windows of 100; the second source has 90 rows, twice, the third 500, of which each comes once."""
    of = order([[1000, 400], [90], [500]], 100, [7.0, 2.0, 1.0], [1, 2, 1])
    assert of.shares[:9].tolist() == [[70, 20, 10]] * 9
    assert of.shares[9].tolist() == [79, 9, 12] or of.shares[9, 1] == 0
    assert (of.shares[:-1].sum(1) == 100).all()
    for number in (0, 1):
        counts = Counter(drawn(of, 0, number))
        assert all(count == (2 if source == 1 else 1) for (source, _), count in counts.items())
        assert Counter(source for source, _ in counts) == {0: 1400, 1: 90, 2: 500}


def test_shares_that_are_no_whole_rows_are_made_good_in_the_next_windows() -> None:
    of = order([[10_000], [10_000], [10_000]], 10, [1.0, 1.0, 1.0], [1, 1, 1])
    sums = np.cumsum(of.shares, axis=0)
    exact = np.arange(1, len(sums) + 1)[:, None] * 10 / 3
    assert np.abs(sums - exact).max() <= 1  # a whole row


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
def test_a_window_that_fits_is_packed_as_tightly_as_map_style() -> None:
    lengths = np.random.default_rng(0).integers(1, 65, 300)
    tight = best_fit(lengths, 64)
    found = packed(lengths.tolist(), 64, len(tight) + 3)
    assert found == [*tight, [], [], []]


def test_a_window_that_does_not_fit_makes_sequences_a_little_longer_and_loses_nothing() -> None:
    lengths = np.random.default_rng(0).integers(1, 65, 300)
    count = len(best_fit(lengths, 64)) * 9 // 10
    found = packed(lengths.tolist(), 64, count)
    assert len(found) == count
    assert sorted(i for chunks in found for i in chunks) == [*range(300)]
    assert (
        max(lengths[chunks].sum() for chunks in found) <= 64 / 0.9 * 1.1
    )  # the tokens in 9/10, and what packing loses


KINDS = {"alike": [4.0] * 100, "web, then books": [3.5] * 80 + [6.0] * 20, "sorted": np.linspace(2, 6, 100).tolist()}
"""Means of the logarithms of the rows' lengths, for each group of rows."""


@pytest.mark.parametrize("kind", KINDS)
def test_few_windows_do_not_fit(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond two standard deviations: one in 44. Tried without the variance of the sample's mean: 20 of 160."""
    monkeypatch.setattr(stream, "SAMPLED", 25)
    misfits, windows, capacity, group = 0, 0, 256, 100
    for seed in range(16):
        draw = np.random.default_rng(seed)
        drawn_lengths = np.concatenate([draw.lognormal(mean, 0.8, group) for mean in KINDS[kind]])
        lengths = drawn_lengths.clip(1, capacity).astype(int)
        sizes = np.full(len(lengths) // group, group)
        source: Any = SimpleNamespace(sizes=sizes, row_bytes=lengths.reshape(-1, group).mean(1))
        sampled: Any = SimpleNamespace(read=lambda _, rows, of=lengths: [[{"input_ids": range(n)}] for n in of[rows]])
        of = Order([sizes], [masses_of(source)], [1.0], [1], 1000)
        counts = count_sequences(of, [source], sampled, capacity)
        windows += len(counts)
        rows = [lengths[of.rows(seed, 0, number)[1]] for number in range(len(counts))]
        misfits += sum(len(best_fit(own, capacity)) > count for own, count in zip(rows, counts, strict=True))
    expected = windows / 44
    assert misfits <= expected + 5 * np.sqrt(expected)


@pytest.mark.parametrize("kind", ["parquet", "jsonl"])
def test_each_row_is_in_an_epoch_exactly_once(kind: str, shards: Path, tmp_path: Path) -> None:
    """Of .jsonl, with files that end within a group, at its end, without an end of line, or are empty."""
    folder = shards
    if kind == "jsonl":
        folder = tmp_path / "lines"
        folder.mkdir()
        bounds = [0, 7, GROUP_ROWS + 7, 2 * GROUP_ROWS + 6, 2 * GROUP_ROWS + 6, ROWS]
        for number, (first, last) in enumerate(pairwise(bounds)):
            lines = [json.dumps({"text": f"<{row}> the of"}) for row in range(first, last)]
            (folder / f"{number}.jsonl").write_text("\n".join(lines) + "\n" * (number % 2 and first < last))
    of = task(folder)
    train, evaluation = of.build_datasets()
    held_out = rows_of(evaluation, of)
    assert sorted(held_out) == [*range(ROWS - len(held_out), ROWS)]
    for number in (0, 1):
        found = rows_of(of.augmented(train, [0, number, 1]), of)
        assert sorted(found) == [*range(ROWS - len(held_out))]
        assert found != sorted(found)


def test_prompts_and_raw_text_lose_nothing_that_map_style_has(tmp_path: Path) -> None:
    """Neither packed nor, of prompts, one by one."""
    tiny.questions(tmp_path / "train.jsonl")
    tiny.questions(tmp_path / "dev.jsonl", rows=9)
    for packing in (True, False):
        tokens = []
        for streaming in (True, False):
            of = task(tmp_path, streaming=streaming, packing=packing)
            train, _ = of.build_datasets()
            chunks = [chunk for sample in samples(train, [*range(len(train))]) for chunk in sample]
            tokens.append(sorted((chunk["input_ids"].tolist(), chunk["labels"].tolist()) for chunk in chunks))
        assert tokens[0] == tokens[1]


def test_a_streamed_classifier_sees_each_row_with_its_label(models: Path, tmp_path: Path) -> None:
    """As map-style does, which sorts them by length."""
    tiny.reviews(tmp_path / "reviews")
    for name, split in (("train.tsv", "train"), ("dev.tsv", "validation")):
        rows = [line.split("\t") for line in (tmp_path / "reviews" / name).read_text().splitlines()]
        table = pa.table({"text": [text for text, _ in rows], "label": [label for _, label in rows]})
        (tmp_path / "shards").mkdir(exist_ok=True)
        parquet.write_table(table, tmp_path / "shards" / f"{split}.parquet", row_group_size=7)
    found = []
    for streaming in (True, False):
        of = TextClassification(
            model=str(models / "bert"), dataset=f"{tmp_path}/shards", streaming=streaming, shuffle_window=50
        )
        train, evaluation = of.build_datasets()
        batch = of.collate(samples(train, [*range(len(train))]))
        pairs = zip(batch["inputs"]["input_ids"].tolist(), batch["labels"].tolist(), strict=True)
        found.append((sorted(pairs), len(train), len(evaluation), of.state.data))
        assert of.count(batch)["targets"] == len(train)
    assert found[0] == found[1]


# ------------------------------------------------------------------------------------------------ reading
def test_a_resume_reads_nothing_but_its_window_and_the_next(shards: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At 90% of an epoch, with nothing in the cache but what the start needs."""
    of = task(shards)
    stream = epoch(of)
    read: set[int] = set()
    original = ShardReader.read

    def recorded(self: ShardReader, number: int, *more: Any) -> Any:
        read.add(number)
        return original(self, number, *more)

    monkeypatch.setattr(ShardReader, "read", recorded)
    for block in stream.blocks.folder.glob("*.arrow"):
        block.unlink()
    first = len(stream) * 9 // 10
    samples(stream, [first])
    window = int(np.searchsorted(np.cumsum(stream.counts), first, side="right"))
    stream._read[max(stream._read)].result()
    ends = np.cumsum(stream.order.groups[0])
    due = [stream.order.rows(0, 0, number)[1] for number in (window, window + 1) if number < len(stream.counts)]
    assert read == {*np.searchsorted(ends, np.concatenate(due), side="right").tolist()}
    assert len(read) < len(ends) / 2


def test_rows_that_changed_are_tokenized_anew_even_where_the_footer_is_as_before(tmp_path: Path) -> None:
    """And the file has its old size and time. Tried with blocks that go by the footer alone: the old rows come."""
    file = tmp_path / "rows.parquet"
    found = []
    for middle in ("<7> the", "<8> the"):
        rows = ["<0> a", *[middle] * 40, "<9> z"]
        parquet.write_table(pa.table({"text": rows}), file, use_dictionary=False, compression="none")
        os.utime(file, (0, 0))
        of = task(file, eval_fraction=0.03)
        train = epoch(of)
        found.append((train.sources[0].fingerprint, Counter(rows_of(train, of))))
    (before, old), (after, new) = found
    assert before == after
    assert old[7] == new[8] == 40


def test_a_process_that_ends_waits_for_a_block_at_most(shards: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads are joined when the main one has ended."""
    of = task(shards)
    stream = epoch(of)
    original = Blocks._open

    def ended(self: Blocks, *where: Any) -> Any:
        monkeypatch.setattr(blocks, "main_thread", lambda: SimpleNamespace(is_alive=lambda: False))
        return original(self, *where)

    monkeypatch.setattr(Blocks, "_open", ended)
    with pytest.raises(RunError, match="the process has ended"):
        stream.read_window(0)


def test_the_cache_is_bounded_and_what_it_lost_is_made_again(shards: Path) -> None:
    """To the size of about three blocks."""
    roomy = task(shards)
    expected = rows_of(epoch(roomy), roomy)
    sizes = [file.stat().st_size for file in (cache_folder() / "blocks").glob("*.arrow")]
    for file in (cache_folder() / "blocks").glob("*.arrow"):
        file.unlink()
    bounded = task(shards, cache_gb=3 * max(sizes) / 1e9)
    stream = epoch(bounded)
    assert rows_of(stream, bounded) == expected
    kept = [file.stat().st_size for file in (cache_folder() / "blocks").glob("*.arrow")]
    assert 0 < sum(kept) <= 3 * max(sizes) < sum(sizes)


def test_processes_of_a_machine_tokenize_no_block_twice(shards: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads stand in for them."""
    folder = cache_folder() / "blocks"
    made: list[str] = []
    original = Blocks._make

    def recorded(self: Blocks, *where: Any) -> Any:
        if self.folder == folder:  # not in a thread that a test before has left behind
            made.append(str(where[1:]))
        return original(self, *where)

    monkeypatch.setattr(Blocks, "_make", recorded)
    streams = [epoch(of := task(shards)) for _ in range(3)]
    threads = [Thread(target=rows_of, args=(stream, of)) for stream in streams]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == len({*made}) > 10, made


# ------------------------------------------------------------------------------------------------ runs
def arguments(shards: Path) -> tuple[str, ...]:
    """A mixture, of which the second source is used up before the end, after it came twice."""
    other = shards.parent / "other"
    sources = f"[{{dataset: {shards}, weight: 2}}, {{dataset: {other}, weight: 1, max_epochs: 2}}]"
    return (
        "--task.name=causal_lm",
        f"--task.sources={sources}", "--task.streaming=true", "--task.sequence_length=64",
        "--task.shuffle_window=500", *tiny.NEW_LLAMA, f"--max_steps={STEPS}", "--log_every=1", "--save_every=3",
        "--global_batch_size=12", "--optim.lr=1e-3",
    )  # fmt: skip


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


def tokens(run: Run) -> list[tuple[float, float]]:
    """Those of each source so far, at each step."""
    return [
        (record["train/tokens_shards"], record["train/tokens_other"])
        for record in run.records
        if "train/loss" in record
    ]


@pytest.fixture(scope="module")
def whole_run(shards: Path, tmp_path_factory: pytest.TempPathFactory, launch: Launch) -> Run:
    """On one process, uninterrupted."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    return launch("cpu", *arguments(shards), folder=folder, before=RECORD).succeeded()


def test_a_mixture_records_losses_and_tokens_by_source(whole_run: Run) -> None:
    """The loss of all targets lies between those of the sources; tokens are all that were trained on."""
    (*_, (shards, other)) = tokens(whole_run)
    assert min(shards, other) > 0
    trained = [record["perf/padding"] for record in whole_run.records if "perf/padding" in record]
    assert shards + other == pytest.approx(sum(12 * 64 * (1 - padding) for padding in trained))
    last = whole_run.records[-1]
    assert last["eval/loss_shards"] != last["eval/loss_other"]
    assert min(last["eval/loss_shards"], last["eval/loss_other"]) < last["eval/loss"]
    assert last["eval/loss"] < max(last["eval/loss_shards"], last["eval/loss_other"])


@pytest.mark.parametrize(
    ("processes", "workers"),
    [(2, 2), (3, 0), slow(1, 2), slow(4, 0), slow(4, 2)],
)
def test_sequences_and_curve_are_the_same_at_any_number_of_processes(
    processes: int, workers: int, shards: Path, whole_run: Run, launch: Launch, tmp_path: Path
) -> None:
    yaml, more = how(processes)
    settings = (*arguments(shards), f"--num_workers={workers}")
    run = launch(yaml, *settings, folder=tmp_path / "run", before=RECORD, **more).succeeded()
    assert sequences(run.folder) == sequences(whole_run.folder)
    assert len(sequences(run.folder)) == STEPS
    assert run.losses == pytest.approx(whole_run.losses, rel=1e-5)
    assert tokens(run) == tokens(whole_run)


@pytest.mark.parametrize("number", [2, slow(20)])
def test_a_killed_run_goes_on_with_the_same_sequences_at_another_number_of_processes(
    number: int, shards: Path, whole_run: Run, launch: Launch, tmp_path: Path
) -> None:
    folder, draw, processes = tmp_path / "run", random.Random(0), 1
    for step in sorted(draw.sample(range(1, STEPS - 1), number)):
        yaml, more = how(processes)
        with Started(yaml, *arguments(shards), folder=folder, before=RECORD, **more) as started:
            # read one step ahead of the one that is computed
            wait(lambda step=step: max(sequences(folder), default=0) > step, say=lambda: started.output)  # type: ignore
            started.kill_all()
        processes = draw.choice([other for other in (1, 2, 3, 4) if other != processes])
    yaml, more = how(processes)
    run = launch(yaml, *arguments(shards), folder=folder, before=RECORD, **more).succeeded()
    assert sequences(folder) == sequences(whole_run.folder)
    assert run.losses == pytest.approx(whole_run.losses, rel=1e-5)
    assert tokens(run) == tokens(whole_run)


def test_processes_that_share_sequences_count_each_token_and_target_of_a_source_once(
    shards: Path, whole_run: Run, launch: Launch
) -> None:
    """Tried with counts by every process of a group."""
    run = launch("fsdp_cp", *arguments(shards), **over(1, 2)).succeeded()
    assert run.losses == pytest.approx(whole_run.losses, rel=1e-5)
    assert tokens(run) == tokens(whole_run)
    evaluated, expected = (
        {n: v for n, v in of.records[-1].items() if n.startswith("eval/")} for of in (run, whole_run)
    )
    assert evaluated == pytest.approx(expected, rel=1e-5)
