"""Streamed rows, packed and mixed, make the same sequences at the same steps on any number of processes, each row
exactly once; a run resumes exactly."""

import os
import re
from collections import Counter
from dataclasses import replace
from itertools import chain, groupby, pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from src.tasks.base import ContextParallel, samples
from src.tasks.streaming import streamed_lm
from src.tasks.streaming.cache import TokenCache
from src.tasks.streaming.index import Block, Source, read_block
from src.tasks.streaming.order import Cut, order_epoch
from src.tasks.streaming.stream import Stream, packed
from src.tasks.streaming.streamed_lm import StreamedLM
from src.tasks.text.causal_lm import CausalLM
from src.tasks.text.files import find_files
from src.tasks.text.packing import best_fit
from tests.faults.runs import cut_back
from tests.launching import Launch, Run, slow
from tests.text import tiny
from tests.text.conftest import Trained
from tests.text.tasks import TEXT, over

MIXTURE = "mixture, streamed"
ROWS = [{"text": f"<{row}> the of"} for row in range(3000)]
SWAPPED = [ROWS[1], ROWS[0], *ROWS[2:]]


@pytest.fixture(scope="session")
def shards(shared: Path) -> Path:
    """Return a folder with 3,000 rows."""
    TEXT[MIXTURE].ready(shared)
    return shared / "mixture" / "shards"


def task(dataset: Path | str = "", **settings: Any) -> Any:
    return tiny.task(StreamedLM, dataset=str(dataset), **{"shuffle_window": 500} | settings)


def epoch(task: Any, number: int = 0) -> Stream:
    """Return the training set as an epoch sees it."""
    train, _ = task.build_datasets()
    return task.augmented(train, [0, number, 1])


def texts_of(dataset: Any, first: int = 0, last: int | None = None) -> list[str]:
    return tiny.texts_of(samples(dataset, [*range(first, len(dataset) if last is None else last)]))


def rows_of(dataset: Any) -> list[int]:
    """Return the numbers of the rows that begin in its sequences, in their order."""
    return [int(number) for text in texts_of(dataset) for number in re.findall(r"<(\d+)>", text)]


def forget(cache: TokenCache) -> int:
    """Empty the cache; return the bytes that it had."""
    files = [*cache.folder.glob("*.arrow")]
    size = sum(file.stat().st_size for file in files)
    for file in files:
        file.unlink()
    return size


# ---------------------------------------------------------------------------------------------------------- the order
def source_of(groups: list[list[int]], weight: float = 1.0, passes: int = 1) -> Any:
    """Return a stand-in for a source, by the rows of the blocks of its groups."""
    rows = np.array([*chain.from_iterable(groups)])
    group_of = np.repeat(np.arange(len(groups)), [*map(len, groups)])
    return SimpleNamespace(rows=rows, groups=group_of, tokens=rows, weight=weight, passes=passes)


def windows_of(sources: list[Any], window: int, seed: int = 0, number: int = 0) -> list[list[tuple[int, int]]]:
    """Return the source and the number of each block, by window of about so many rows."""
    rows = sum(int(source.rows.sum()) * source.passes for source in sources)
    of = order_epoch(sources, Cut(max(1, rows // window), rows), seed, number)
    blocks = [*zip(of.sources.tolist(), of.blocks.tolist(), strict=True)]
    return [blocks[first:last] for first, last in pairwise(of.windows.tolist())]


def test_seed_and_epoch_change_the_order_and_groups_stay_together() -> None:
    sources = [source_of([[1] * 3, [1] * 40, [1] * 7, [1] * 20]), source_of([[1] * 9] * 2, passes=2)]
    found = [[*chain(*windows_of(sources, 8, seed, number))] for seed in (0, 1) for number in (0, 1)]
    assert len({*map(tuple, found)}) == 4
    for of_epoch in found:
        own = [int(sources[0].groups[block]) for source, block in of_epoch if source == 0]
        assert len([*groupby(own)]) == 4
        assert Counter(of_epoch) == {(0, i): 1 for i in range(70)} | {(1, i): 2 for i in range(18)}


def test_row_groups_of_files_with_the_same_name_are_different() -> None:
    """In folders by language, say. Taken for one, each would be decoded for nearly each block."""
    tiny.write({f"a/{number}/part.parquet": ROWS[:50] for number in range(4)})
    assert len({*Source(find_files("a"), 10, {}).groups}) == 4 * 2


@pytest.mark.parametrize("groups", [[[1] * 10_000], [[1]] * 10_000], ids=["one group", "small groups"])
def test_any_stretch_has_rows_from_all_parts_of_a_source(groups: list[list[int]]) -> None:
    """The mean of 100 is off by that of a part, a hundredth of the source: 0.00058; in a random order, by 0.058."""
    order = np.array([*chain(*windows_of([source_of(groups)], 10_000))])[:, 1]
    assert np.abs(order.reshape(100, 100).mean(axis=1) / order.mean() - 1).max() < 5 * 0.00058
    assert abs(np.corrcoef(order[:-1], order[1:])[0, 1]) < 5 / np.sqrt(len(order))


@pytest.mark.parametrize("number", [0, 1])
def test_each_window_has_a_mixtures_shares_until_a_source_is_used_up(number: int) -> None:
    """Of 7 : 2 : 1 in windows of about 100, each window has its share, to within a block at either end, and so have all
    before it together."""
    sources = [source_of([[2] * 500, [2] * 200], 7.0), source_of([[2] * 45], 2.0, 2), source_of([[2] * 250], 1.0)]
    windows = windows_of(sources, 100, number=number)
    rows = np.array([[2 * sum(i == source for i, _ in window) for source in range(3)] for window in windows])
    for found, shares in ((rows[:8], [0.7, 0.2, 0.1]), (rows[9:17], [7 / 8, 0, 1 / 8])):
        for sums in (found, np.cumsum(found, axis=0)):
            assert np.abs(sums - sums.sum(1, keepdims=True) * shares).max() <= 4
    assert not rows[9:, 1].any()
    assert Counter(chain(*windows)) == {
        (number, block): source.passes for number, source in enumerate(sources) for block in range(len(source.rows))
    }


# ------------------------------------------------------------------------------------------------------------ packing
def test_a_window_is_packed_tightly_and_loses_nothing() -> None:
    lengths = np.random.default_rng(0).integers(1, 65, 300)
    tight = best_fit(lengths, 64)
    for is_last in (False, True):
        assert sorted(packed(lengths, 64, len(tight) + 3, is_last)) == sorted([*tight, [], [], []])
    count = len(tight) * 9 // 10
    for is_last, most in ((False, 64), (True, 64 / 0.9 * 1.1)):  # with none after it, its sequences have to be longer
        found = packed(lengths, 64, count, is_last)
        assert sorted(chain(*found)) == [*range(300)]
        fills = [lengths[chunks].sum() for chunks in found]
        assert max(fills) <= most
        assert min(fills[:count]) >= max(fills[count:], default=0)
        assert len(found) > count or is_last


@pytest.mark.parametrize("is_sorted", [False, True], ids=["drawn", "sorted"])
@pytest.mark.parametrize("window", [200, 2000])
def test_at_most_2_percent_is_padding(is_sorted: bool, window: int) -> None:
    """Rows are as long as those of the web. Few sequences are longer than they should be."""
    lengths = np.random.default_rng(0).lognormal(4.2, 1.1, 4000).clip(5, 5000).astype(int)
    tiny.write({"a.jsonl": [{"text": "a" * size} for size in (sorted(lengths) if is_sorted else lengths)]})
    train, _ = task("a.jsonl", shuffle_window=window, sequence_length=256, eval_fraction=0.001).build_datasets()
    fills = [sum(chunk["length"] for chunk in sequence) for sequence in samples(train, [*range(len(train))])]
    assert 1 - sum(fills) / len(train) / 256 <= 0.02
    assert sum(fill > 256 for fill in fills) <= len(train) / 44


# -------------------------------------------------------------------------------------------------------------- rows
@pytest.mark.parametrize("kind", ["parquet", "jsonl"])
def test_each_row_is_in_an_epoch_exactly_once(kind: str, shards: Path) -> None:
    """Files end within a block, at its end, without an end of line, or are empty."""
    if kind == "jsonl":
        block = task().block_rows
        bounds = [0, 7, block + 7, 2 * block + 6, 2 * block + 6, 3000]
        for number, (first, last) in enumerate(pairwise(bounds)):
            lines = tiny.content(".jsonl", ROWS[first:last])
            tiny.write({f"lines/{number}.jsonl": lines if number % 2 else lines[:-1]})
    of = task(shards if kind == "parquet" else "lines")
    train, evaluation = of.build_datasets()
    held_out = rows_of(evaluation)
    assert sorted(held_out) == [*range(3000 - len(held_out), 3000)]
    for number in (0, 1):
        found = rows_of(of.augmented(train, [0, number, 1]))
        assert sorted(found) == [*range(3000 - len(held_out))]
        assert found != sorted(found)


def test_rows_off_the_end_are_held_out_whatever_block_they_are_in() -> None:
    tiny.write({"rows.jsonl": ROWS[:40]})
    for wanted in (1, 7, 8, 9, 39):
        source = Source(find_files("rows.jsonl"), 8, {})
        held_out = [record.row for block in source.hold_out(wanted) for record in read_block(block, ["text"])]
        kept = [record.row for i in range(len(source.rows)) for record in read_block(source[i], ["text"])]
        assert (kept, held_out) == (ROWS[: 40 - wanted], ROWS[40 - wanted : 40])


@pytest.mark.parametrize("packing", [True, False])
def test_streamed_prompts_are_those_of_loaded_data(packing: bool) -> None:
    Path("asked").mkdir()
    tiny.questions(Path("asked/train.jsonl"))
    tiny.questions(Path("asked/dev.jsonl"), rows=9)
    tokens = []
    for kind in (StreamedLM, CausalLM):
        train, _ = tiny.task(kind, dataset="asked", packing=packing).build_datasets()
        chunks = chain(*samples(train, [*range(len(train))]))
        tokens.append(sorted((chunk["input_ids"].tolist(), chunk["labels"].tolist()) for chunk in chunks))
    assert tokens[0] == tokens[1]


@pytest.mark.parametrize("streaming", [True, False])
def test_a_resume_knows_its_data_by_their_content(streaming: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """They may be in another folder, and the code of the cache may have changed."""
    found = []
    for folder, code, rows in (("a", "b", ROWS), ("b", "b", ROWS), ("b", "c", ROWS), ("b", "c", SWAPPED)):
        monkeypatch.setattr("src.tasks.streaming.cache.CACHE_CODE", [code])
        tiny.write({f"{folder}/rows.jsonl": rows})
        found.append(task(folder, streaming=streaming).build_datasets()[0].fingerprint())
    assert found[0] == found[1] == found[2] != found[3]


@pytest.mark.parametrize("kind", ["parquet", "jsonl"])
def test_rows_are_those_of_the_file_as_it_is_now(kind: str) -> None:
    """Even if its size and times, and a footer, are as before."""
    found: list[Any] = []
    for number in (1, 2):
        middle = [{"text": f"<{number}> the"}] * 23
        rows = [{"text": "<0> a"}, *middle, {"text": "<3> z"}]  # which are the bounds that a footer has
        tiny.write({f"a/train.{kind}": rows, f"a/dev.{kind}": rows})
        for file in Path("a").iterdir():
            os.utime(file, (0, 0))
        found += [Counter(rows_of(part)) for part in task("a").build_datasets()]
    assert found == [{0: 1, 1: 23, 3: 1}] * 2 + [{0: 1, 2: 23, 3: 1}] * 2


# ------------------------------------------------------------------------------------------------------------ windows
def test_a_resume_reads_nothing_but_its_window_and_the_next(shards: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    of_epoch = epoch(task(shards))
    forget(of_epoch.cache)
    read: list[Block] = []
    original = TokenCache._make
    monkeypatch.setattr(TokenCache, "_make", lambda cache, block: read.append(block) or original(cache, block))  # type: ignore[func-returns-value]
    window = 1  # neither the last of its span nor the one before
    samples(of_epoch, [int(of_epoch.epoch.sequences[window])])
    of_epoch._read[max(of_epoch._read)].result()
    first, _, last = of_epoch.epoch.windows[window : window + 3].tolist()
    due = of_epoch.epoch.blocks[first:last].tolist()
    assert sorted(map(str, read)) == sorted(str(of_epoch.sources[0][number]) for number in due)
    assert len(read) < len(of_epoch.epoch.blocks) / 2


def test_a_window_is_the_same_whatever_was_read_before(shards: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last one of a span takes what those before it leave over."""
    monkeypatch.setattr(streamed_lm, "SPAN_ROWS", 0)
    monkeypatch.setattr(streamed_lm, "SPAN", 3)
    of_epoch = epoch(task(shards, shuffle_window=200))
    starts = of_epoch.epoch.sequences.tolist()
    assert len(starts) > 10
    apart = [texts_of(replace(of_epoch), first, last) for first, last in pairwise(starts)]
    assert texts_of(of_epoch) == [*chain.from_iterable(apart)]


def test_a_small_cache_stays_small_and_changes_no_row(shards: Path) -> None:
    of_epoch = epoch(task(shards))
    forget(of_epoch.cache)
    whole = rows_of(of_epoch)
    size = forget(of_epoch.cache)
    assert rows_of(epoch(task(shards, cache_gb=size / 4 / 1e9))) == whole
    assert 0 < forget(of_epoch.cache) <= size / 4


# --------------------------------------------------------------------------------------------------------------- runs
TOKENS = ("train/tokens_shards", "train/tokens_other")


def recorded(run: Run, *names: str) -> list[list[float]]:
    return [[record[name] for name in names] for record in run.records if names[0] in record]


def assert_same(run: Run, alone: Run) -> None:
    """Assert that runs have the same curve, tokens of each source at each step, and losses of each source."""
    assert run.losses == pytest.approx(alone.losses, rel=1e-5)
    assert len(run.losses) == 24
    assert recorded(run, *TOKENS) == recorded(alone, *TOKENS)
    for name in ("eval/loss", "eval/loss_shards", "eval/loss_other"):
        assert run.summary[name] == pytest.approx(alone.summary[name], rel=1e-5)


def test_a_mixture_records_losses_and_tokens_by_source(trained: Trained) -> None:
    alone = trained(MIXTURE)
    shards, other = recorded(alone, *TOKENS)[-1]
    assert min(shards, other) > 0
    filled = sum(12 * 64 * (1 - padding) for (padding,) in recorded(alone, "perf/padding"))
    assert shards + other == pytest.approx(filled)
    losses = sorted(alone.summary[f"eval/loss{source}"] for source in ("_shards", "", "_other"))
    assert losses[0] < losses[1] == alone.summary["eval/loss"] < losses[2]


@pytest.mark.parametrize(
    ("yaml", "workers", "how"),
    [
        ("ddp", 2, {"processes": 2}),
        slow("fsdp", 0, {"processes": 3}),
        slow("cpu", 2, {}),
        slow("ddp", 0, {"processes": 4}),
        slow("ddp", 2, {"processes": 4}),
        slow("fsdp_cp", 0, over(1, 2)),
    ],
)
def test_a_mixture_is_the_same_on_any_processes(yaml: str, workers: int, how: dict[str, Any], trained: Trained) -> None:
    assert_same(trained(MIXTURE, yaml, f"--num_workers={workers}", **how), trained(MIXTURE))


def test_a_mixture_resumes_with_the_next_row(trained: Trained, launch: Launch, shared: Path, tmp_path: Path) -> None:
    """After a run on one process, on two under FSDP."""
    folder = cut_back(trained(MIXTURE), tmp_path / "run", 12)
    run = TEXT[MIXTURE].ready(shared).run(launch, "fsdp", folder=folder, processes=2).succeeded()
    assert_same(run, trained(MIXTURE))


@pytest.mark.parametrize("size", [2, 3])
def test_processes_that_share_sequences_count_each_token_once(shards: Path, size: int) -> None:
    """They know the source of each target, too."""

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
