"""Shards elsewhere: the same rows, each once, on a slow and unreliable network; what stays broken is named."""

import random
import time
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import boto3
import datasets
import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from src.config.errors import RunError, UserError
from src.tasks.text import files
from src.tasks.text import reading as readers
from src.tasks.text.files import find_files, index_files
from tests.s3 import S3FileSystem, s3_bucket
from tests.text.test_streaming_input import evaluated, lm, reader_of, says, texts
from tests.text.tiny import content, write

NAMES = {"data/x.parquet": range(90), "data/deep/y.jsonl": range(90, 200), "data/z.parquet": range(200, 240)}
FILES = {name: content(name, [{"text": f"line {i}"} for i in numbers]) for name, numbers in NAMES.items()}
CALLS = ("_open", "cat_file", "find")
"""What reads shards, and what says which version they are."""
READ = ("text",)


def seen(dataset: str) -> list[str]:
    """The texts of the first epoch."""
    task = lm(dataset)
    return texts(task, task.build_datasets()[0])


@pytest.fixture
def calm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What an epoch of the same shards on the disk shows."""
    with monkeypatch.context() as patch:
        patch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache of what is here")
        rows = seen(write(FILES))
    # the last group of 40 rows ends with the 24 to evaluate on
    assert Counter(rows) == Counter(f"line {i}" for i in range(240) if not i >= 225)
    return rows


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> str:
    """The shards in a memory that stands for another machine's."""
    monkeypatch.setattr(MemoryFileSystem, "store", {})
    monkeypatch.setattr(MemoryFileSystem, "pseudo_dirs", [""])
    for name, shard in FILES.items():
        fsspec.filesystem("memory").pipe_file(f"/{name}", shard)
    return "memory://data"


@pytest.fixture
def waited(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The seconds that would have been waited."""
    seconds: list[float] = []
    monkeypatch.setattr(files, "time", SimpleNamespace(sleep=seconds.append))
    return seconds


@pytest.fixture(autouse=True)
def _nothing_in_memory() -> None:
    """Another test has read the same shards."""
    readers._row_group.cache_clear()


def failing(monkeypatch: pytest.MonkeyPatch, error: Exception, share: float = 1.0, only: str = "") -> Counter[str]:
    """Have the first of CALLS of each kind fail that is about a file of this name, and a share of the others. Return
    how many failed."""
    failed: Counter[str] = Counter()
    draw = random.Random(0)  # every third would be the same one of each try's calls

    def wrapped(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def attempt(system: Any, path: str, *more: Any, **options: Any) -> Any:
            if only in path and (name not in failed or draw.random() < share):
                failed[name] += 1
                raise error
            time.sleep(0.01)  # a slow network
            return call(system, path, *more, **options)

        return attempt

    for name in CALLS:
        monkeypatch.setattr(MemoryFileSystem, name, wrapped(name, getattr(MemoryFileSystem, name)))
    return failed


@pytest.mark.parametrize("error", [OSError("reset by peer"), TimeoutError()], ids=lambda e: type(e).__name__)
def test_elsewhere_the_same_rows_come_in_the_same_order_when_a_third_of_the_calls_fail_and_the_others_are_slow(
    memory: str, calm: list[str], waited: list[float], monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """Tried without another try: it ends with the first failure."""
    monkeypatch.setattr(files, "WAITS", (0.0,) * 99)
    failed = failing(monkeypatch, error, share=1 / 3)
    assert seen(memory) == calm
    assert {*failed} == {*CALLS}
    assert len(waited) == failed.total()


@pytest.mark.parametrize("kind", ["parquet", "jsonl"])
def test_rows_to_evaluate_on_are_those_of_the_shard_as_it_is_and_read_as_patiently(
    memory: str, waited: list[float], monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Tried with datasets' reader, whose downloads go by ETags, which not all file systems have: the old rows."""
    fsspec.filesystem("memory").mv("/data/x.parquet", "/data/train.parquet")
    monkeypatch.setattr(files, "WAITS", (0.0,) * 99)
    for word in ("old", "new"):
        rows = [f"{word} {i}" for i in range(5)]
        shard = content(f".{kind}", [{"text": row} for row in rows])
        fsspec.filesystem("memory").pipe_file(f"/data/validation.{kind}", shard)
        with monkeypatch.context() as patch:
            failing(patch, OSError("reset"), share=1 / 3, only="validation")
            assert evaluated(lm(memory)) == rows
    assert waited


# -------------------------------------------------------------------------------------------------- what stays broken
@pytest.mark.parametrize("name", ["x.parquet", "y.jsonl"])
def test_waits_grow_and_then_the_shard_is_named_in_one_line(
    memory: str, waited: list[float], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """A traceback would not say which shard, and a second launch may do."""
    (url,) = (url for url in find_files(memory) if url.endswith(name))
    reader = reader_of(url)
    failing(monkeypatch, OSError("reset\nby peer"))
    said = says(RunError, lambda: reader.read(0, 0, 3, READ))
    assert said == f"{url}: cannot be read, tried 6 times: reset by peer"
    assert waited == [*files.WAITS] == sorted({*waited})


LASTING = [
    FileNotFoundError(2, "No such file or directory"), PermissionError(13, "Access Denied"), ValueError("bad parquet"),
    type("NoCredentialsError", (Exception,), {})("Unable to locate credentials"),
]  # fmt: skip


@pytest.mark.parametrize("error", LASTING, ids=lambda error: type(error).__name__)
def test_what_another_try_would_not_mend_is_named_at_once(
    memory: str, waited: list[float], monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """Tried without: half a minute of tries, or a traceback."""
    reader = reader_of(memory)
    failing(monkeypatch, error)
    first = reader.groups[0][0].url
    assert says(UserError, lambda: reader.read(0, 0, 3, READ)).startswith(f"{first}: cannot be read: ")
    assert says(UserError, lambda: find_files(memory)).startswith(f"task.dataset={memory}: cannot be read: ")
    assert waited == []


def test_bad_parquet_is_not_tried_again_and_all_broken_shards_are_named_at_once(
    memory: str, tmp_path: Path, waited: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    fsspec.filesystem("memory").pipe_file("/data/x.parquet", FILES["data/x.parquet"][:-9])
    fsspec.filesystem("memory").pipe_file("/data/z.parquet", b"PAR1")
    found = find_files(memory)

    def named() -> list[str]:
        lines = says(UserError, lambda: index_files(found, [], tmp_path)).splitlines()
        return [line.rpartition("/")[2].partition(":")[0] for line in lines]

    assert named() == ["x.parquet", "z.parquet"]
    assert waited == []
    monkeypatch.setattr(files, "WAITS", (0.0,))
    failing(monkeypatch, OSError("reset"), only="y.jsonl")
    assert named() == ["y.jsonl", "x.parquet", "z.parquet"], "what is not to be reached is named beside them"


def test_a_shard_that_changed_elsewhere_is_refused_without_another_try(memory: str, waited: list[float]) -> None:
    """By its size, or where the file system knows a time, by that."""
    reader = reader_of(memory)
    for name in NAMES:
        fsspec.filesystem("memory").pipe_file(f"/{name}", FILES[name])
    for number, (shard, *_) in enumerate(reader.groups):
        said = says(UserError, lambda number=number: reader.read(number, 0, 3, READ))  # type: ignore[misc]
        assert said.startswith(f"{shard.url} has changed or disappeared since it was indexed")
    assert waited == []


# ------------------------------------------------------------------------------------------------------------------ S3
@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The shards in a bucket."""
    with s3_bucket(monkeypatch) as client:
        for name, shard in FILES.items():
            client.put_object(Bucket="bucket", Key=name, Body=shard)
        yield "s3://bucket/data"


def test_s3_shows_the_same_rows_in_the_same_order_though_calls_fail(
    bucket: str, calm: list[str], waited: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its listings may tell times more finely than what it says of a file, as MinIO's do. Tried with such a time as a
    part of the version: every shard has changed."""
    monkeypatch.setattr(files, "WAITS", (0.0,) * 99)
    draw, find, cat, info = random.Random(0), S3FileSystem._find, S3FileSystem._cat_file, S3FileSystem._info

    async def finely(system: Any, path: str, **options: Any) -> Any:
        found = await find(system, path, **options)
        for facts in found.values():
            facts["LastModified"] += timedelta(milliseconds=7)
        return found

    def unreliable(call: Callable[..., Any]) -> Callable[..., Any]:
        async def attempt(system: Any, *arguments: Any, **options: Any) -> Any:
            if draw.random() < 1 / 3:
                raise OSError(5, "Internal Server Error")
            return await call(system, *arguments, **options)

        return attempt

    for name, call in (("_find", finely), ("_cat_file", unreliable(cat)), ("_info", unreliable(info))):
        monkeypatch.setattr(S3FileSystem, name, call)
    S3FileSystem.clear_instance_cache()
    assert seen(bucket) == calm
    assert waited


def test_s3_refuses_objects_that_changed_are_gone_or_never_were(bucket: str, waited: list[float]) -> None:
    reader = reader_of(bucket)
    client = boto3.client("s3")
    client.put_object(Bucket="bucket", Key="data/deep/y.jsonl", Body=FILES["data/deep/y.jsonl"].upper())
    client.delete_object(Bucket="bucket", Key="data/x.parquet")
    numbers = {shard.url: number for number, (shard, *_) in enumerate(reader.groups)}
    for name in ("deep/y.jsonl", "x.parquet"):
        said = says(UserError, lambda name=name: reader.read(numbers[f"{bucket}/{name}"], 0, 3, READ))  # type: ignore[misc]
        assert said.startswith(f"{bucket}/{name} has changed or disappeared")
    assert says(UserError, lambda: find_files("s3://bucket/nowhere")).endswith(".tsv, .parquet")
    assert "bucket does not exist" in says(UserError, lambda: find_files("s3://nowhere/data"))
    assert waited == []
