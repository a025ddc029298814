"""Streamed shards, rows and settings that do not fit, here and elsewhere: one line that names shard and row, before
training where that is known; or left out and counted, where the settings say so."""

import json
import os
import random
import subprocess
import sys
from collections import Counter, deque
from collections.abc import Callable, Iterator
from datetime import timedelta
from fnmatch import fnmatchcase
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import boto3
import datasets
import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from src.config.errors import RunError, UserError
from src.tasks.streaming import forecast, index
from src.tasks.streaming.cache import TokenCache
from src.tasks.streaming.index import Source, read_block
from src.tasks.streaming.streamed_lm import CONVERSION, StreamedLM
from src.tasks.text import files
from src.tasks.text.files import find_files
from src.tools.evaluate import _with_settings  # room: tools
from src.training.workers import load_in_workers
from tests.launching import PROJECT
from tests.s3 import S3FileSystem, s3_bucket
from tests.text import tiny
from tests.text.test_bad_text import BAD_ROWS, CHATS, FIX, SHORTENED, STRICT, THOUGHT
from tests.text.test_documents import CHAT
from tests.text.tiny import content, texts_of, write
from train import run_settings

ROWS: list[Any] = [{"text": f"line {i}"} for i in range(60)]
TEXTS = [row["text"] for row in ROWS]
EVALUATED = f"rows in the evaluation data cannot be used: fix them, {FIX}"
HINT = f"fix it, {FIX}"


def lm(dataset: str = "", **settings: Any) -> Any:
    return tiny.task(StreamedLM, dataset=dataset, **{"sequence_length": 128, "shuffle_window": 40} | settings)


def epoch(task: Any, train: Any, batch: int = 4) -> Iterator[list[Any]]:
    """The batches of the first epoch, before they are collated."""
    of_epoch = task.augmented(train, [0, 0, 1])
    for first in range(0, len(of_epoch), batch):
        yield of_epoch.__getitems__([*range(first, min(first + batch, len(of_epoch)))])


def texts(task: Any, train: Any) -> list[str]:
    """What an epoch shows, in its order."""
    return [text for samples in epoch(task, train) for text in texts_of(samples)]


def evaluated(task: Any) -> list[str]:
    """What an evaluation shows."""
    _, evaluation = task.build_datasets()
    return texts_of(evaluation.__getitems__([*range(len(evaluation))]))


def skipped(task: Any, train: Any) -> int:
    """What an epoch counts as train/skipped_rows."""
    return sum(task.count(task.collate(samples))["train/skipped_rows"] for samples in epoch(task, train))


def says(kind: type[Exception], does: Callable[[], Any]) -> str:
    """The lines that it ends with, without the current folder's name in them."""
    with pytest.raises(kind) as error:
        does()
    assert type(error.value) is kind
    return str(error.value).replace(f"{Path.cwd()}/", "")


DAMAGED = content(".parquet", ROWS, {"huggingface": b"{"})
NO_PARQUET = "cannot be read: Parquet magic bytes not found in footer. *"
BEFORE: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    **{
        name: ({"a/x.jsonl": ROWS[:7], "a/y.jsonl": [*ROWS[:5], row, *ROWS]}, {}, f"a/y.jsonl, line 6: {why}; {HINT}")
        for name, (row, why) in BAD_ROWS.items()
    },
    "nothing but bad rows": (
        {"a/x.jsonl": [{"text": None}] * 60 + ROWS[:6]}, {"bad_rows": "skip", "text_column": "text"},
        "no row in a sample of the training data can be used: *",
    ),
    "a shard without it": (
        {"a/x.parquet": ROWS, "a/y.parquet": [{"txt": "a"}]}, {}, "a/y.parquet: no column text, which other files have",
    ),
    "damaged metadata beside a file that is well": (
        {"a/x.parquet": ROWS, "a/y.parquet": DAMAGED}, {},
        "a/y.parquet: cannot be read: its metadata are not those of `datasets`: *",
    ),
    "too few rows": ({"a/x.jsonl": ROWS[:4]}, {}, "task.dataset=a: too few rows (4) to hold out 10% for evaluation *"),
    "raw text unpacked": ({"a/x.jsonl": ROWS}, {"packing": False}, "task.packing=false: streamed text *"),
    "several cut off": (
        {"a/w.parquet": ROWS, "a/x.parquet": content(".parquet", ROWS)[:-9], "a/y.parquet": b"", "a/z.jsonl": ROWS}, {},
        f"a/x.parquet: {NO_PARQUET}\na/y.parquet: cannot be read: Parquet file size is 0 bytes",
    ),
    "no package": (
        {}, {"dataset": "gs://bucket/a"}, "task.dataset=gs://bucket/a: cannot be read: Please install gcsfs *",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", BEFORE)
def test_what_does_not_fit_is_named_before_training(case: str) -> None:
    files, settings, expected = BEFORE[case]
    write(files) if files else None
    said = says(UserError, lm(**{"dataset": "a", **settings}).build_datasets)
    assert fnmatchcase(said, expected), said
    assert said.count("\n") == expected.count("\n")


def test_settings_that_contradict_each_other_are_named_without_loading_anything() -> None:
    write({"a/deep/x.jsonl": ROWS, "b.jsonl": ROWS})
    new = ("--task.name=streamed_lm", *tiny.NEW_LLAMA)
    mix = "--task.sources=[{{dataset: a, weight: {}}}, {{dataset: b.jsonl}}]"
    for arguments, expected in (
        ([mix.format(0)], "task.sources: a has a weight of 0: remove it, or give it a weight"),
        ([mix.format(1), "--task.dataset=a"], "task.dataset and task.sources: set one, a single dataset or a mixture"),
        (["--task.sources=[{dataset: no.jsonl}]"], "task.dataset=no.jsonl: no such file or folder"),
    ):
        assert fnmatchcase(says(UserError, lambda more=arguments: run_settings([*new, *more])), expected)  # type: ignore[misc]
    run_settings([*new, mix.format(1)])  # folders may have folders
    for setting in ("--task.streaming=true", mix.format(1)):
        said = says(UserError, lambda more=setting: run_settings([*new, "--task.name=causal_lm", more]))  # type: ignore[misc]
        assert said.startswith("--task.name=causal_lm: use --task.name=streamed_lm, which streams and mixes datasets\n")
        assert "--task.name=streamed_lm" in said.splitlines()[-1]


def test_credentials_that_are_missing_are_named_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tried without: they are asked for six times."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    for name in ("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"):
        monkeypatch.setenv(name, "none")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    said = says(UserError, lambda: find_files("s3://bucket/folder"))
    assert said == "task.dataset=s3://bucket/folder: cannot be read: Unable to locate credentials"


def test_hidden_files_and_those_in_hidden_folders_are_no_shards() -> None:
    """As writers leave them behind. Tried without: their rows are trained on."""
    hidden = dict.fromkeys(("a/.x.parquet", "a/_x.jsonl", "a/_tmp/x.parquet", "a/b/.git/x.jsonl"), ROWS[:1] * 20)
    task = lm(write({"a/x.parquet": ROWS[1:], "a/b/_SUCCESS": b"", "a/b/x.jsonl": ROWS[1:], **hidden}))
    assert {*texts(task, task.build_datasets()[0])} == {*TEXTS[1:]}


@pytest.mark.parametrize("kind", ["parquet", "jsonl"])
def test_rows_to_evaluate_on_are_those_of_the_file_as_it_is(kind: str) -> None:
    """Also if its size and time are as they were. Tried with a cache that goes by these: the old rows."""
    write({f"a/train.{kind}": ROWS, f"a/validation.{kind}": ROWS[:5]})
    assert evaluated(lm("a")) == TEXTS[:5]
    file = Path(f"a/validation.{kind}")
    before = file.stat()
    file.write_bytes(file.read_bytes().replace(b"line 3", b"LINE 3"))
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert evaluated(lm("a")) == [*TEXTS[:3], "LINE 3", TEXTS[4]]


def test_rows_to_evaluate_on_are_of_any_kind_of_file_and_named_or_left_out_and_counted() -> None:
    """Over all sources. Tried without the sum: those of the last source."""
    write({"a/train.jsonl": ROWS, "a/dev-0.parquet": ROWS[:3], "a/dev-1.jsonl": [*ROWS[3:5], {"text": 3}, b"{"]})
    write({"b/train.jsonl": ROWS, "b/dev.jsonl": [*ROWS[:3], b"{"]})
    said = says(UserError, lm("a").build_datasets)
    assert said == f"a/dev-1.jsonl, line 3: text is int, not text; 2 of 7 {EVALUATED}"
    assert evaluated(lm("a", bad_rows="skip")) == TEXTS[:5]
    task = lm(sources=[{"dataset": "a"}, {"dataset": "b"}], bad_rows="skip")
    assert task.describe("eval", task.build_datasets()[1])["skipped_rows"] == 3


def test_a_dataset_of_the_hub_is_streamed_from_its_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """By their URLs; here of this machine. Tried without: a TypeError, as splits are no text, and a KeyError."""
    write({"a/train.jsonl": ROWS, "a/more.txt": b"{}"})
    files = {datasets.NamedSplit("train"): [str(Path("a/train.jsonl").resolve())]}
    found = {("org/a", "small"): SimpleNamespace(config=SimpleNamespace(data_files=files))}
    monkeypatch.setattr("src.tasks.text.text_task.load_dataset_builder", lambda *name: found[name])
    task = lm("org/a", dataset_config="small")
    assert {*texts(task, task.build_datasets()[0])} == {*TEXTS[:-6]}
    absent = lm("org/a", dataset_config="small", train_split="all")
    assert says(UserError, absent.build_datasets) == "task.train_split=all: org/a has train"
    files[datasets.NamedSplit("train")] = [str(Path("a/more.txt").resolve())]
    assert says(UserError, task.build_datasets).startswith("a/more.txt: cannot be streamed: ")


@pytest.mark.parametrize("kind", ["csv", "tsv", "json", "txt"])
def test_other_kinds_are_refused_with_a_command_that_writes_their_rows_as_jsonl(kind: str) -> None:
    """As they are written; a row that cannot be read ends it."""
    rows = [["text", "id"], ["1.10 \u00e9", "001"], ["NA", "true"]]
    lines = {name: "\n".join(sign.join(row) for row in rows) for name, sign in (("csv", ","), ("tsv", "\t"))}
    written = [dict(zip(rows[0], row, strict=True)) for row in rows[1:]]
    data = {**lines, "json": json.dumps(written), "txt": "one\r\ndocument"}[kind]
    write({f"a.{kind}": data})
    said = says(UserError, lm(f"a.{kind}").build_datasets)
    command = said.partition("write its rows as .jsonl, ")[2].partition(", or load it, --task.streaming=false")[0]
    shell: Any = {"shell": True, "cwd": Path.cwd(), "env": {**os.environ, "PYTHONPATH": str(PROJECT)}}
    subprocess.run(command.replace("python", sys.executable, 1), check=True, **shell)
    found = [json.loads(line) for line in Path("a.jsonl").read_text().splitlines()]
    assert found == ([{"text": "one\r\ndocument"}] if kind == "txt" else written)


def test_such_a_command_ends_with_a_row_that_cannot_be_read() -> None:
    write({"a.csv": "text\none\ntwo,2\n"})
    command = CONVERSION.format("a.csv", "a").partition("python")[2].partition(", or load it")[0]
    shell: Any = {"shell": True, "cwd": Path.cwd(), "env": {**os.environ, "PYTHONPATH": str(PROJECT)}}
    done = subprocess.run(sys.executable + command, capture_output=True, text=True, **shell)
    assert done.returncode == 1
    assert done.stderr == "row 3 has 2 cells for 1 columns\n"


def first_rows(source: Source, number: int = 0) -> list[str]:
    """The texts of a block's first three rows."""
    return [record.row["text"] for record in read_block(source[number], READ)[:3]]


@pytest.mark.parametrize("kind", ["parquet", "jsonl"])
def test_a_shard_that_has_changed_or_is_gone_since_it_was_indexed_is_named(kind: str) -> None:
    """Of the same size. Tried without: its rows are mixed with those of the old one; a traceback, or six tries."""
    file = Path.cwd() / write({f"a.{kind}": ROWS})
    source = Source(find_files(str(file)), 20, {})
    file.write_bytes(file.read_bytes().replace(b"line 1", b"LINE 1"))
    expected = f"a.{kind} has changed or disappeared since it was indexed: restore it, or start a new run"
    assert says(UserError, lambda: first_rows(source)) == expected
    assert first_rows(Source(find_files(str(file)), 20, {})) == ["line 0", "LINE 1", "line 2"], (
        "a new run takes the new one"
    )
    file.unlink()
    assert says(UserError, lambda: first_rows(source)) == expected


def test_a_bad_row_beyond_the_sample_is_named_when_its_turn_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a process that loads data too. Tried without: a traceback of that process."""
    monkeypatch.setattr(forecast, "MIN_SAMPLE", 500)
    monkeypatch.setattr(forecast, "PRECISION", 1.0)
    read: list[index.Block] = []
    original = TokenCache.read
    monkeypatch.setattr(TokenCache, "read", lambda cache, block: read.append(block) or original(cache, block))  # type: ignore[func-returns-value]
    rows: list[Any] = [{"text": str(i)} for i in range(5000)]
    lm(write({"a.jsonl": rows}), shuffle_window=2000).build_datasets()
    sampled = {block["line"] + row - 1 for block in read for row in range(block["rows"])}
    beyond = min({*range(2500, 4000)} - sampled)
    rows[beyond] = {"text": 3}
    task = lm(write({"a.jsonl": rows}), shuffle_window=2000)
    train, _ = task.build_datasets()
    expected = f"a.jsonl, line {beyond + 1}: text is int, not text; {HINT}"
    assert says(UserError, lambda: [*epoch(task, train)]) == expected
    config: Any = SimpleNamespace(seed=0, num_workers=2, task=task)
    of_epoch = task.augmented(train, [0, 0, 1])
    loaded = load_in_workers(config, of_epoch, [[i] for i in range(len(of_epoch))], 0, 0)
    assert says(UserError, lambda: deque(loaded, maxlen=0)) == expected


class Unreadable(list[int]):
    def __getitem__(self, _: Any) -> Any:
        raise RunError("s3://a/b.parquet: cannot be read,\ntried 6 times") from OSError("reset by peer")


def test_what_a_loading_process_could_not_read_stays_a_run_error() -> None:
    """Its exit code says whether to launch the run again."""
    config: Any = SimpleNamespace(seed=0, num_workers=1, task=SimpleNamespace(collate=list))
    said = says(RunError, lambda: [*load_in_workers(config, Unreadable([0]), [[0]], 0, 0)])
    assert said == "s3://a/b.parquet: cannot be read,\ntried 6 times"


BAD: list[Any] = [row for row, _ in BAD_ROWS.values()]


def test_bad_rows_are_left_out_and_counted_and_no_others() -> None:
    """In the order of the rows the counts are those of their windows. Tried without: none is counted."""
    rows = [row for pair in zip(BAD, ROWS, strict=False) for row in pair] + ROWS[len(BAD) :]
    write({"a/x.jsonl": rows, "a/y.jsonl": [*ROWS, *BAD[1:3], *ROWS[:4]]})
    task = lm("a", bad_rows="skip", shuffle_window=20)
    train, _ = task.build_datasets()
    kept = [*TEXTS, *TEXTS, *TEXTS[:4]]
    assert sorted(texts(task, train)) == sorted(kept[: -len(evaluated(task))])
    assert skipped(task, train) == len(BAD)


def test_prompts_that_are_not_packed_keep_a_place_for_each_row() -> None:
    """An epoch is as long as its rows are many, whatever is left out."""
    prompts: list[Any] = [{"prompt": f"{i} and", "completion": f" {i + 1}"} for i in range(60)]
    bad_rows: list[Any] = [{"prompt": None, "completion": "a"}, {"prompt": "a"}, b"{"]
    write({"a.jsonl": [*prompts[:20], *bad_rows, *prompts[20:]]})
    task = lm("a.jsonl", bad_rows="skip", packing=False)
    train, evaluation = task.build_datasets()
    assert len(train) == 63 - len(evaluation)
    expected = [row["prompt"] + row["completion"] for row in prompts[: -len(evaluation)]]
    assert sorted(texts(task, train)) == sorted(expected)
    assert skipped(task, train) == 3
    # what stands for them is not shown. Tried without: an IndexError, in --dry-run too
    shown = [task.preview(train, i) for i in range(len(train))]
    assert sum(text.startswith("0 tokens, 0 of them (0.0%)") for text in shown) == 3


def test_a_streamed_chat_that_the_template_cannot_write_is_named_by_file_and_line_or_left_out() -> None:
    write({"strict.jinja": STRICT, "a/train.jsonl": [*CHATS, {"messages": THOUGHT}, *CHATS], "a/test.jsonl": CHATS})
    said = says(UserError, lm("a", chat_template="strict.jinja").build_datasets)
    assert fnmatchcase(said, f"a/train.jsonl, line 20: the tokenizer's chat template {SHORTENED}; {HINT}"), said
    task = lm("a", chat_template="strict.jinja", bad_rows="skip")
    assert skipped(task, task.build_datasets()[0]) == 1


MIXED: dict[str, Any] = {"sources": [{"dataset": "a.jsonl"}] * 2, "streaming": False}


@pytest.mark.parametrize("data", [{"dataset": "a.jsonl"}, MIXED], ids=["streamed", "mixed"])
def test_prompts_and_completions_of_messages_are_chats_whose_completion_is_learnt(data: dict[str, Any]) -> None:
    """Streamed and mixed. Tried without: prompt is list, not text."""
    write({"a.jsonl": [{"prompt": CHAT[:4], "completion": CHAT[4:]}] * 20})
    end = tiny.END
    shows = f"{end}<system>Be brief.{end}<user>Hi{end}<assistant>Yo{end}<user>Bye{end}<assistant>⟦Ciao{end}⟧"
    task = lm(**data, packing=False, sequence_length=256)
    assert {task.preview(part, 0).split("────\n")[1] for part in task.build_datasets()} == {shows}


def test_the_data_are_said_in_rows_and_sequences() -> None:
    task = lm(write({"a.jsonl": [{"messages": CHAT}] * 4}), sequence_length=256, eval_fraction=0.5)
    assert task.dataset_size(task.build_datasets()[0]) == "2 chats in 1 sequence of 256"


def test_all_rows_of_other_data_can_be_evaluated_on() -> None:  # room: tools
    """By a model that was trained on a mixture. Tried without dropping its sources: they contradict the dataset."""
    write({"a.jsonl": ROWS[:9], "b.jsonl": ROWS})
    mixture = "--task.sources=[{dataset: a.jsonl}, {dataset: a.jsonl}]"
    config = run_settings(["--task.name=streamed_lm", "--task.sequence_length=64", *tiny.NEW_LLAMA, mixture])
    assert sorted(evaluated(_with_settings(config, ["--task.dataset=b.jsonl"]).task)) == sorted(TEXTS)


NAMES = {"data/x.parquet": range(90), "data/deep/y.jsonl": range(90, 200), "data/z.parquet": range(200, 240)}
FILES = {name: content(name, [{"text": f"line {i}"} for i in numbers]) for name, numbers in NAMES.items()}
READ = ("text",)


def seen(dataset: str) -> list[str]:
    """The texts of the first epoch."""
    task = lm(dataset)
    return texts(task, task.build_datasets()[0])


@pytest.fixture
def waited(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The seconds that would have been waited."""
    seconds: list[float] = []
    monkeypatch.setattr(files, "time", SimpleNamespace(sleep=seconds.append))
    return seconds


@pytest.fixture(autouse=True)
def _nothing_in_memory() -> None:
    """Another test has read the same shards."""
    index.read_group.cache_clear()


@pytest.mark.parametrize("name", ["x.parquet", "y.jsonl"])
def test_waits_grow_until_the_shard_is_named(waited: list[float], monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """A traceback would not say which shard, and a second launch may do."""
    monkeypatch.setattr(MemoryFileSystem, "store", {})
    for path, shard in FILES.items():
        fsspec.filesystem("memory").pipe_file(f"/{path}", shard)
    (url,) = (url for url in find_files("memory://data") if url.endswith(name))
    source = Source(find_files(url), 40, {})
    for what_reads in ("_open", "cat_file", "find"):
        monkeypatch.setattr(MemoryFileSystem, what_reads, Mock(side_effect=OSError("reset\nby peer")))
    said = says(RunError, lambda: first_rows(source))
    assert said == f"{url}: cannot be read, tried 6 times: reset by peer"
    assert waited == [*files.WAITS] == sorted({*waited})


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
    """Its listings may tell finer times, as MinIO's do. Tried with these in the version, and without another try."""
    with monkeypatch.context() as patch:
        patch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache of what is here")
        calm = seen(write(FILES))
    # the last 24 are to evaluate on
    assert Counter(calm) == Counter(f"line {i}" for i in range(240) if i < 216)
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
    source = Source(find_files(bucket), 40, {})
    client = boto3.client("s3")
    client.put_object(Bucket="bucket", Key="data/deep/y.jsonl", Body=FILES["data/deep/y.jsonl"].upper())
    client.delete_object(Bucket="bucket", Key="data/x.parquet")
    numbers = {source[number]["file"]: number for number in range(len(source.rows))}
    for name in ("deep/y.jsonl", "x.parquet"):
        said = says(UserError, lambda name=name: first_rows(source, numbers[f"{bucket}/{name}"]))  # type: ignore[misc]
        assert said.startswith(f"{bucket}/{name} has changed or disappeared")
    assert says(UserError, lambda: find_files("s3://bucket/nowhere")).endswith(".tsv, .parquet")
    assert "bucket does not exist" in says(UserError, lambda: find_files("s3://nowhere/data"))
    assert waited == []
