"""A streamed shard that fails, changes or has bad rows is one line that names it, before training where that is known;
bad rows are skipped and counted if the settings ask for it; reads that fail for a moment are retried."""

import json
import os
import random
import subprocess
import sys
from collections import Counter, deque
from collections.abc import Callable, Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import datasets
import fsspec
import pyarrow as pa
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from src.config.errors import RunError, UserError
from src.tasks.streaming import index, streamed_lm
from src.tasks.streaming.cache import TokenCache
from src.tasks.streaming.index import Source, read_block
from src.tasks.streaming.streamed_lm import CONVERSION, StreamedLM
from src.tasks.text import files
from src.tasks.text.files import find_files
from src.tasks.text.rows import BLOCK
from src.tasks.text.tokenizing import CHUNK_FEATURES
from src.training.workers import workers_if_any
from tests.launching import PROJECT, mistakes
from tests.s3 import S3FileSystem, s3_bucket
from tests.text import tiny
from tests.text.test_reading import COLUMNS, Row, assert_read_as_written
from tests.text.tiny import content, texts_of, write
from train import run_settings

ROWS: list[Any] = [{"text": f"line {i}"} for i in range(60)]
TEXTS = [row["text"] for row in ROWS]
CHAT = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yo"}]
SKIP = "or skip such rows with --task.bad_rows=skip"
HINT = f"fix it, {SKIP}"


def lm(dataset: str = "", **settings: Any) -> Any:
    return tiny.task(StreamedLM, dataset=dataset, **{"sequence_length": 128, "shuffle_window": 40} | settings)


def batches(task: Any, train: Any) -> Iterator[list[Any]]:
    """Yield the batches of the first epoch, before they are collated."""
    of_epoch = task.augmented(train, [0, 0, 1])
    for first in range(0, len(of_epoch), 4):
        yield of_epoch.__getitems__([*range(first, min(first + 4, len(of_epoch)))])


def trained(task: Any) -> tuple[list[str], int]:
    """Return the sorted texts of the first epoch, and the rows that it counts as skipped."""
    train, _ = task.build_datasets()
    found = [*batches(task, train)]
    counts = [task.count(task.collate(samples))["train/skipped_rows"] for samples in found]
    return sorted(text for samples in found for text in texts_of(samples)), sum(counts)


def evaluated(task: Any) -> list[str]:
    _, evaluation = task.build_datasets()
    return texts_of(evaluation.__getitems__([*range(len(evaluation))]))


def refusal(does: Callable[[], Any], kind: type[Exception] = UserError) -> str:
    """Return the lines that it ends with, without the current folder's name in them."""
    with pytest.raises(kind) as error:
        does()
    assert type(error.value) is kind
    return str(error.value).replace(f"{Path.cwd()}/", "")


class Recording:
    """Stands for a tokenizer: keeps the rows that it gets, and has a token for each."""

    columns = dict(zip(COLUMNS, COLUMNS, strict=True))

    def __init__(self) -> None:
        self.rows: list[Row] = []

    def chunks(self, rows: dict[str, list[Any]]) -> pa.Table:
        found = [*zip(*rows.values(), strict=True)]
        self.rows += found
        chunks = [{"input_ids": [7], "labels": [7], "length": 1, "row": row} for row in range(len(found))]
        return pa.Table.from_pylist(chunks, CHUNK_FEATURES.arrow_schema)


def stream(folder: Path) -> tuple[list[Row], int]:
    tokenizer: Any = Recording()
    source, cache = Source(find_files(str(folder)), BLOCK, COLUMNS), TokenCache(COLUMNS, tokenizer, True, 1.0)
    for number in range(len(source.rows)):
        cache._make(source[number])
    return tokenizer.rows, int(source.rows.sum()) - len(tokenizer.rows)


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_each_streamed_value_is_what_the_file_says(kind: str) -> None:
    assert_read_as_written(kind, stream)


# ---------------------------------------------------------------------------------------------------- before training
BAD_ROWS: dict[str, tuple[Any, str]] = {
    "a number": ({"text": 3}, "text is int, not text"),
    "a null": ({"text": None}, "text is empty"),
    "cut off": (b'{"text": ', "is not a JSON object: *"),
    "not UTF-8": (b'{"text": "caf\xe9"}', "text is not valid Unicode: *utf-8*"),
}
NO_PARQUET = "cannot be read: Parquet magic bytes not found in footer. *"
DAMAGED = content(".parquet", ROWS, {"huggingface": b"{"})
BEFORE: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    **{
        name: ({"a/x.jsonl": ROWS[:7], "a/y.jsonl": [*ROWS[:5], row, *ROWS]}, {}, f"a/y.jsonl, line 6: {why}; {HINT}")
        for name, (row, why) in BAD_ROWS.items()
    },
    **{
        f"a .{kind}": ({f"a.{kind}": "a"}, {"dataset": f"a.{kind}"}, f"a.{kind}: cannot be streamed: write its rows *")
        for kind in ("csv", "tsv", "json", "txt")
    },
    "a chat": (
        {"a/x.jsonl": [{"messages": CHAT}] * 9 + [{"messages": []}] + [{"messages": CHAT}] * 9}, {},
        f"a/x.jsonl, line 10: messages is not a list of messages, *; {HINT}",
    ),
    "nothing but bad rows": (
        {"a/x.jsonl": [{"text": None}] * 60 + ROWS[:6]}, {"bad_rows": "skip", "text_column": "text"},
        "no row in a sample of the training data can be used: *",
    ),
    "a shard without the column": (
        {"a/x.parquet": ROWS, "a/y.parquet": [{"txt": "a"}]}, {}, "a/y.parquet: no column text, which other files have",
    ),
    "damaged metadata": (
        {"a/x.parquet": ROWS, "a/y.parquet": DAMAGED}, {},
        "a/y.parquet: cannot be read: its metadata are not those of `datasets`: *",
    ),
    "too few rows": ({"a/x.jsonl": ROWS[:4]}, {}, "task.dataset=a: too few rows (4) to hold out 10% for evaluation *"),
    "raw text unpacked": ({"a/x.jsonl": ROWS}, {"packing": False}, "task.packing=false: streamed text *"),
    "several cut off": (
        {"a/w.parquet": ROWS, "a/x.parquet": content(".parquet", ROWS)[:-9], "a/y.parquet": b"", "a/z.jsonl": ROWS}, {},
        f"a/x.parquet: {NO_PARQUET}\na/y.parquet: cannot be read: Parquet file size is 0 bytes",
    ),
    "evaluation rows": (
        {"a/train.jsonl": ROWS, "a/dev-0.parquet": ROWS[:3], "a/dev-1.jsonl": [*ROWS[3:5], {"text": 3}, b"{"]}, {},
        f"a/dev-1.jsonl, line 3: text is int, not text; 2 of 7 rows in the evaluation data *: fix them, {SKIP}",
    ),
    "no package": (
        {}, {"dataset": "gs://bucket/a"}, "task.dataset=gs://bucket/a: cannot be read: Please install gcsfs *",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", BEFORE)
def test_what_does_not_fit_is_named_before_training(case: str) -> None:
    files, settings, expected = BEFORE[case]
    write(files) if files else None
    said = refusal(lm(**{"dataset": "a", **settings}).build_datasets)
    assert fnmatchcase(said, expected), said
    assert said.count("\n") == expected.count("\n")


MIX = "--task.sources=[{{dataset: a, weight: {}}}, {{dataset: b.jsonl}}]"


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([MIX.format(0)], "task.sources: a has a weight of 0: remove it, or give it a weight"),
        ([MIX.format(1), "--task.dataset=a"], "task.dataset and task.sources: set one, a single dataset or a mixture"),
        (["--task.sources=[{dataset: no.jsonl}]"], "task.dataset=no.jsonl: no such file or folder"),
        (["--task.name=causal_lm", MIX.format(1)], "--task.name=causal_lm: use --task.name=streamed_lm, *"),
        (["--task.name=causal_lm", "--task.streaming=true"], "--task.name=causal_lm: use --task.name=streamed_lm, *"),
    ],
)
def test_settings_of_mixtures_that_do_not_fit_are_one_line(arguments: list[str], expected: str) -> None:
    write({"a/deep/x.jsonl": ROWS, "b.jsonl": ROWS})
    new = ("--task.name=streamed_lm", *tiny.NEW_LLAMA)
    assert fnmatchcase(mistakes(*new, *arguments)[0], expected)
    run_settings([*new, MIX.format(1)])


def test_missing_credentials_are_named_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    for name in ("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"):
        monkeypatch.setenv(name, "none")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    said = refusal(lambda: find_files("s3://bucket/folder"))
    assert said == "task.dataset=s3://bucket/folder: cannot be read: Unable to locate credentials"


@pytest.mark.parametrize(("more", "error"), [("", ""), ("two,2,3\n", "row 4 has 3 cells for 2 columns\n")])
def test_the_command_in_a_refusal_writes_rows_as_jsonl(more: str, error: str) -> None:
    """As they are written; it ends with a row that cannot be read."""
    write({"a.csv": f"text,id\n1.10 \u00e9,001\nNA,true\n{more}"})
    command = CONVERSION.format("a.csv", "a").partition("python")[2].partition(", or load it")[0]
    environment = {**os.environ, "PYTHONPATH": str(PROJECT)}
    done = subprocess.run(sys.executable + command, shell=True, capture_output=True, text=True, env=environment)
    assert (done.stderr, done.returncode) == (error, 1 if error else 0)
    found = [json.loads(line) for line in Path("a.jsonl").read_text().splitlines()]
    assert found == [{"text": "1.10 \u00e9", "id": "001"}, {"text": "NA", "id": "true"}]


# ---------------------------------------------------------------------------------------------------- which are read
def test_evaluation_rows_are_of_any_kind_and_skipped_ones_are_counted() -> None:
    """Over all sources."""
    write({"a/train.jsonl": ROWS, "a/dev-0.parquet": ROWS[:3], "a/dev-1.jsonl": [*ROWS[3:5], {"text": 3}, b"{"]})
    write({"b/train.jsonl": ROWS, "b/dev.jsonl": [*ROWS[:3], b"{"]})
    task = lm(sources=[{"dataset": "a"}, {"dataset": "b"}], bad_rows="skip")
    assert sorted(evaluated(task)) == sorted(TEXTS[:5] + TEXTS[:3])
    assert task.describe("eval", task.build_datasets()[1])["skipped_rows"] == 3


def test_bad_rows_are_skipped_and_counted_and_no_others() -> None:
    bad = [row for row, _ in BAD_ROWS.values()]
    rows = [row for pair in zip(bad, ROWS, strict=False) for row in pair] + ROWS[len(bad) :]
    write({"a/x.jsonl": rows, "a/y.jsonl": [*ROWS, *bad[1:3], *ROWS[:4]]})
    task = lm("a", bad_rows="skip", shuffle_window=20)
    kept = [*TEXTS, *TEXTS, *TEXTS[:4]]
    assert trained(task) == (sorted(kept[: -len(evaluated(task))]), len(bad))


@pytest.mark.parametrize("window", [20, 100, 1000])
def test_unpacked_prompts_keep_a_place_for_each_row(window: int) -> None:
    """An epoch is as long as its rows are many, whatever is skipped, which --dry-run shows as 0 tokens."""
    prompts: list[Any] = [{"prompt": f"{i} and", "completion": f" {i + 1}"} for i in range(60)]
    bad_rows: list[Any] = [{"prompt": None, "completion": "a"}, {"prompt": "a"}, b"{"]
    write({"a.jsonl": [*prompts[:20], *bad_rows, *prompts[20:]]})
    task = lm("a.jsonl", bad_rows="skip", packing=False, shuffle_window=window)
    train, evaluation = task.build_datasets()
    assert len(train) == 63 - len(evaluation)
    expected = [row["prompt"] + row["completion"] for row in prompts[: -len(evaluation)]]
    assert trained(task) == (sorted(expected), 3)
    shown = [task.preview(train, i) for i in range(len(train))]
    assert sum(text.startswith("0 tokens, 0 of them (0.0%)") for text in shown) == 3


MIXED: dict[str, Any] = {"sources": [{"dataset": "a.jsonl"}] * 2, "streaming": False}


@pytest.mark.parametrize("data", [{"dataset": "a.jsonl"}, MIXED], ids=["streamed", "mixed"])
def test_of_prompts_of_messages_the_completion_is_learnt(data: dict[str, Any]) -> None:
    write({"a.jsonl": [{"prompt": CHAT[:1], "completion": CHAT[1:]}] * 20})
    task = lm(**data, packing=False)
    shows = f"{tiny.END}<user>Hi{tiny.END}<assistant>⟦Yo{tiny.END}⟧"
    assert {task.preview(part, 0).split("────\n")[1] for part in task.build_datasets()} == {shows}


def test_a_dataset_of_the_hub_is_streamed_from_its_files(monkeypatch: pytest.MonkeyPatch) -> None:
    write({"a/train.jsonl": ROWS, "a/more.txt": b"{}"})
    files = {datasets.NamedSplit("train"): [str(Path("a/train.jsonl").resolve())]}
    found = {("org/a", "small"): SimpleNamespace(config=SimpleNamespace(data_files=files))}
    monkeypatch.setattr("src.tasks.text.text_task.load_dataset_builder", lambda *name: found[name])
    task = lm("org/a", dataset_config="small")
    assert trained(task) == (sorted(TEXTS[:-6]), 0)
    absent = lm("org/a", dataset_config="small", train_split="all")
    assert refusal(absent.build_datasets) == "task.train_split=all: org/a has train"
    files[datasets.NamedSplit("train")] = [str(Path("a/more.txt").resolve())]
    assert refusal(task.build_datasets).startswith("a/more.txt: cannot be streamed: ")


# ------------------------------------------------------------------------------------------------- while it is trained
def first_rows(source: Source) -> list[str]:
    return [record.row["text"] for record in read_block(source[0], ["text"])[:3]]


@pytest.mark.parametrize("kind", ["parquet", "jsonl"])
def test_a_shard_that_changed_or_is_gone_since_it_was_indexed_is_named(kind: str) -> None:
    file = Path.cwd() / write({f"a.{kind}": ROWS})
    source = Source(find_files(str(file)), 20, {})
    file.write_bytes(file.read_bytes().replace(b"line 1", b"LINE 1"))  # of the same size
    expected = f"a.{kind} has changed or disappeared since it was indexed: restore it, or start a new run"
    assert refusal(lambda: first_rows(source)) == expected
    new = Source(find_files(str(file)), 20, {})
    assert first_rows(new) == ["line 0", "LINE 1", "line 2"]
    file.unlink()
    assert refusal(lambda: first_rows(source)) == expected


@pytest.mark.parametrize("workers", [0, 2])
def test_a_bad_row_beyond_the_sample_is_named_in_its_turn(monkeypatch: pytest.MonkeyPatch, workers: int) -> None:
    monkeypatch.setattr(streamed_lm, "forecast", lambda *_: (10, 1.0))  # without a sample
    task = lm(write({"a.jsonl": [*ROWS, {"text": 3}, *ROWS]}))
    train, _ = task.build_datasets()
    loaded: Iterator[Any] = batches(task, train)
    if workers:
        of_epoch = task.augmented(train, [0, 0, 1])
        config: Any = SimpleNamespace(seed=0, num_workers=workers, task=task)
        from_workers = workers_if_any(config, of_epoch, [[i] for i in range(len(of_epoch))], 0, 0)
        assert from_workers
        loaded = from_workers
    assert refusal(lambda: deque(loaded, maxlen=0)) == f"a.jsonl, line 61: text is int, not text; {HINT}"


# ---------------------------------------------------------------------------------------------------- remote shards
NAMES = {"data/x.parquet": range(90), "data/deep/y.jsonl": range(90, 200), "data/z.parquet": range(200, 240)}
FILES = {name: content(name, [{"text": f"line {i}"} for i in numbers]) for name, numbers in NAMES.items()}


@pytest.fixture
def waited(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Return the seconds that would have been waited."""
    seconds: list[float] = []
    monkeypatch.setattr(files, "time", SimpleNamespace(sleep=seconds.append))
    index.read_group.cache_clear()  # of the same shards, in another test
    return seconds


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Return a bucket with the shards."""
    with s3_bucket(monkeypatch) as client:
        for name, shard in FILES.items():
            client.put_object(Bucket="bucket", Key=name, Body=shard)
        yield "s3://bucket/data"


@pytest.mark.parametrize("name", ["x.parquet", "y.jsonl"])
def test_waits_grow_until_the_shard_is_named(waited: list[float], monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(MemoryFileSystem, "store", {})
    for path, shard in FILES.items():
        fsspec.filesystem("memory").pipe_file(f"/{path}", shard)
    (url,) = (url for url in find_files("memory://data") if url.endswith(name))
    source = Source(find_files(url), 40, {})
    for what_reads in ("_open", "cat_file", "find"):
        monkeypatch.setattr(MemoryFileSystem, what_reads, Mock(side_effect=OSError("reset\nby peer")))
    assert refusal(lambda: first_rows(source), RunError) == f"{url}: cannot be read, tried 6 times: reset by peer"
    assert waited == [*files.WAITS] == sorted({*waited})


def test_s3_has_the_rows_of_a_disk_in_their_order_though_calls_fail(
    bucket: str, tmp_path: Path, waited: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    def seen(dataset: str) -> list[str]:
        task = lm(dataset)
        train, _ = task.build_datasets()
        return [text for samples in batches(task, train) for text in texts_of(samples)]

    with monkeypatch.context() as patch:
        patch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache of what is here")
        calm = seen(write(FILES))
    assert Counter(calm) == Counter(f"line {i}" for i in range(216))  # the last 24 are to evaluate on
    monkeypatch.setattr(files, "WAITS", (0.0,) * 99)
    draw = random.Random(0)

    def unreliable(call: Callable[..., Any]) -> Callable[..., Any]:
        async def attempt(system: Any, *arguments: Any, **options: Any) -> Any:
            if draw.random() < 1 / 3:
                raise OSError(5, "Internal Server Error")
            return await call(system, *arguments, **options)

        return attempt

    for name in ("_cat_file", "_info"):
        monkeypatch.setattr(S3FileSystem, name, unreliable(getattr(S3FileSystem, name)))
    S3FileSystem.clear_instance_cache()
    assert seen(bucket) == calm
    assert waited
