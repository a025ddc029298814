"""Shards elsewhere: the same rows, each once, on an unreliable network; what stays broken is named."""

import random
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
from src.tasks.text import files, reading
from src.tasks.text.files import find_files
from tests.s3 import S3FileSystem, s3_bucket
from tests.text.test_streaming_input import lm, reader_of, says, texts
from tests.text.tiny import content, write

NAMES = {"data/x.parquet": range(90), "data/deep/y.jsonl": range(90, 200), "data/z.parquet": range(200, 240)}
FILES = {name: content(name, [{"text": f"line {i}"} for i in numbers]) for name, numbers in NAMES.items()}
READ = ("text",)


def seen(dataset: str) -> list[str]:
    """The texts of the first epoch."""
    task = lm(dataset)
    return texts(task, task.build_datasets()[0])


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
    reading._row_group.cache_clear()


def fail(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    """Have what reads shards fail, and what says which version they are."""

    def fails(*_: Any, **__: Any) -> None:
        raise error

    for name in ("_open", "cat_file", "find"):
        monkeypatch.setattr(MemoryFileSystem, name, fails)


# -------------------------------------------------------------------------------------------------- what stays broken
@pytest.mark.parametrize("name", ["x.parquet", "y.jsonl"])
def test_waits_grow_and_then_the_shard_is_named_in_one_line(
    memory: str, waited: list[float], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """A traceback would not say which shard, and a second launch may do."""
    (url,) = (url for url in find_files(memory) if url.endswith(name))
    reader = reader_of(url)
    fail(monkeypatch, OSError("reset\nby peer"))
    said = says(RunError, lambda: reader.read(0, 0, 3, READ))
    assert said == f"{url}: cannot be read, tried 6 times: reset by peer"
    assert waited == [*files.WAITS] == sorted({*waited})


@pytest.mark.parametrize("error", [PermissionError(13, "Access Denied"), ValueError("bad parquet")])
def test_what_another_try_would_not_mend_is_named_at_once(
    memory: str, waited: list[float], monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """Tried without: half a minute of tries, or a traceback."""
    reader = reader_of(memory)
    fail(monkeypatch, error)
    first = reader.groups[0][0].url
    assert says(UserError, lambda: reader.read(0, 0, 3, READ)).startswith(f"{first}: cannot be read: ")
    assert says(UserError, lambda: find_files(memory)).startswith(f"task.dataset={memory}: cannot be read: ")
    assert waited == []


# ------------------------------------------------------------------------------------------------------------------ S3
@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The shards in a bucket."""
    with s3_bucket(monkeypatch) as client:
        for name, shard in FILES.items():
            client.put_object(Bucket="bucket", Key=name, Body=shard)
        yield "s3://bucket/data"


def test_s3_shows_the_rows_of_a_disk_in_their_order_though_calls_fail(
    bucket: str, tmp_path: Path, waited: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its listings may tell times more finely than what it says of a file, as MinIO's do. Tried with such a time as a
    part of the version: every shard has changed; without another try: it ends with the first failure."""
    with monkeypatch.context() as patch:
        patch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache of what is here")
        calm = seen(write(FILES))
    # the last group of 40 rows ends with the 24 to evaluate on
    assert Counter(calm) == Counter(f"line {i}" for i in range(240) if not i >= 225)
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
