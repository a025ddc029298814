"""Streamed shards, rows and settings that do not fit: one line that names shard and row, before training where that is
known; or left out and counted, where the settings say so."""

import json
import os
import shutil
from collections import deque
from collections.abc import Callable, Iterator
from fnmatch import fnmatchcase
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from types import SimpleNamespace
from typing import Any

import datasets
import pyarrow as pa
import pytest
from pyarrow import parquet

from src.config.errors import RunError, UserError
from src.tasks.text.causal_lm import CausalLM
from src.tasks.text.files import find_files, index_files
from src.tasks.text.reading import ShardReader
from src.tasks.text.text_classification import TextClassification
from src.training.workers import load_in_workers
from tests.text import tiny
from train import run_settings

LLAMA: dict[str, Any] = tiny.SIZES | {"model_type": "llama", "num_hidden_layers": 1}
ROWS = [{"text": f"line {i}"} for i in range(60)]
PROMPTS = [{"prompt": f"{i} and", "completion": f" {i + 1}"} for i in range(60)]
REVIEWS = [{"text": f"line {i}", "label": ("even", "odd")[i % 2]} for i in range(60)]
SKIP = "or leave out such rows with --task.bad_rows=skip"
EVALUATED = f"rows in the data to evaluate on cannot be used: fix them, {SKIP}"
HINT = f"fix it, {SKIP}"


def content(name: str, rows: list[Any] | bytes) -> bytes:
    """A shard of these rows: parquet with 25 in a group, or a line for each, JSON where it is no text yet."""
    if isinstance(rows, bytes):
        return rows
    if name.endswith(".parquet"):
        sink = pa.BufferOutputStream()
        table = pa.Table.from_pylist(rows) if rows else pa.table({"text": pa.array([], pa.string())})
        parquet.write_table(table, sink, row_group_size=25, compression="none")
        return sink.getvalue().to_pybytes()
    lines = [row if isinstance(row, bytes) else json.dumps(row).encode() for row in rows]
    return b"".join(line + b"\n" for line in lines)


def write(files: dict[str, Any]) -> str:
    """Write these shards below the working folder; return what they are all in."""
    for name, rows in files.items():
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_bytes(content(name, rows))
    return next(iter(files)).partition("/")[0]


def lm(dataset: str = "", **settings: Any) -> CausalLM:
    own = {"streaming": True, "architecture": LLAMA, "sequence_length": 128, "shuffle_window": 40}
    return CausalLM(dataset=dataset, **own | settings)


def built(task: Any) -> tuple[Any, Any]:
    """Its training set, a stream, and its evaluation set."""
    train, evaluation = task.build_datasets()
    return train, evaluation


def epoch(task: Any, train: Any, batch: int = 4) -> Iterator[list[Any]]:
    """The batches of the first epoch, before they are collated."""
    stream = task.augmented(train, [0, 0, 1])
    for first in range(0, len(stream), batch):
        yield stream.__getitems__([*range(first, min(first + batch, len(stream)))])


def texts(task: Any, train: Any) -> list[str]:
    """What an epoch shows the model, in its order, without what stands for rows that were left out."""
    chunks = (chunk for samples in epoch(task, train) for sample in samples for chunk in sample)
    return [task._tokenizer.decode(chunk["input_ids"], skip_special_tokens=True) for chunk in chunks if chunk["length"]]


def skipped(task: Any, train: Any) -> int:
    """What an epoch counts as train/skipped_rows."""
    return sum(task.count(task.collate(samples))["train/skipped_rows"] for samples in epoch(task, train))


@pytest.fixture(autouse=True)
def _in_its_own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def says(kind: type[Exception], does: Callable[[], Any]) -> str:
    """The lines that it ends with, without the working folder's name in them."""
    with pytest.raises(kind) as error:
        does()
    assert type(error.value) is kind
    return str(error.value).replace(f"{Path.cwd()}/", "")


# ------------------------------------------------------------------------------- known before training, * is anything
def bad(row: Any) -> dict[str, list[Any]]:
    return {"a/x.jsonl": ROWS[:7], "a/y.jsonl": [*ROWS[:5], row, *ROWS]}


NO_PARQUET = "cannot be read, Parquet magic bytes not found in footer. *"
NO_FILE = "no file there of one of the kinds .txt, .jsonl, .json, .csv, .tsv, .parquet"
BEFORE: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "a number": (bad({"text": 3}), {}, f"a/y.jsonl, line 6: text is int, not text; {HINT}"),
    "a null": (bad({"text": None}), {}, f"a/y.jsonl, line 6: text is empty; {HINT}"),
    "an empty text": (bad({"text": " "}), {}, f"a/y.jsonl, line 6: text is empty; {HINT}"),
    "no such column": (bad({"txt": "a"}), {}, f"a/y.jsonl, line 6: text is empty; {HINT}"),
    "no JSON": (bad(b'{"text": '), {}, f"a/y.jsonl, line 6: is no JSON object, *; {HINT}"),
    "a list": (bad(["a"]), {}, f"a/y.jsonl, line 6: is no JSON object, *; {HINT}"),
    "no UTF-8": (bad(b'{"text": "caf\xe9"}'), {}, f"a/y.jsonl, line 6: text is no Unicode text, *utf-8*; {HINT}"),
    "half an emoji": (bad({"text": "a \ud83d"}), {}, f"a/y.jsonl, line 6: text is no Unicode text, *; {HINT}"),
    "too many brackets": (bad(b"[" * 10**5), {}, f"a/y.jsonl, line 6: is no JSON object, *; {HINT}"),
    "the first line": ({"a.jsonl": [b"{", *ROWS]}, {}, f"a.jsonl, line 1: is no JSON object, *; {HINT}"),
    "a null in parquet": (
        {"a.parquet": [*ROWS, {"text": None}, *ROWS]}, {},
        f"a.parquet, row 61: text is empty; {HINT}",
    ),
    "a row to evaluate on": (
        {"a.jsonl": [*ROWS, {"text": 3}, ROWS[0]]}, {},
        f"a.jsonl, line 61: text is int, not text; 1 of 6 {EVALUATED}",
    ),
    "a line to evaluate on": ({"a.jsonl": [*ROWS, b"{"]}, {}, "a.jsonl, line 61: is no JSON object, *"),
    "nothing but bad rows": (
        {"a.jsonl": [{"text": None}] * 60 + ROWS[:6]}, {"bad_rows": "skip", "text_column": "text"},
        "no row of a sample of the data to train on can be used: *",
    ),
    # Columns and parts.
    "a shard without it": (
        {"a/x.parquet": ROWS, "a/y.parquet": [{"txt": "a"}]}, {},
        "a/y.parquet: no column text, as other files have",
    ),
    "a shard to evaluate on without it": (
        {"a/train.jsonl": ROWS, "a/dev-0.parquet": ROWS, "a/dev-1.parquet": [{"txt": "a"}]}, {},
        "a/dev-1.parquet: no column text, as other files have",
    ),
    "no shard to evaluate on with it": (
        {"a/train.jsonl": ROWS, "a/dev.parquet": [{"txt": "a"}]}, {},
        "task.dataset=a: no column text in the data to evaluate on; its columns are txt. Are they kept back, *",
    ),
    "no shard with it": (
        {"a.parquet": [{"txt": "a"}] * 60}, {"text_column": "text"},
        "task.dataset=a.parquet: no column text; its columns are txt",
    ),
    "no usual column": ({"a.parquet": [{"txt": "a"}] * 60}, {}, "which of the dataset's columns txt to train on? *"),
    "no such split": ({"a/train.jsonl": ROWS}, {"train_split": "all"}, "task.train_split=all: a has train"),
    "no such evaluation": ({"a/train.jsonl": ROWS}, {"eval_split": "dev"}, "task.eval_split=dev: a has train"),
    "too few rows": ({"a.jsonl": ROWS[:4]}, {}, "task.dataset=a.jsonl: 4 rows are too few to keep 0.1 of them *"),
    "a single row": ({"a.jsonl": ROWS[:1]}, {"eval_fraction": 0.9}, "task.dataset=a.jsonl: 1 rows are too few *"),
    "raw text unpacked": ({"a.jsonl": ROWS}, {"packing": False}, "task.packing=false: streamed text *"),
    # Shards.
    "no bytes": ({"a.jsonl": b""}, {}, "task.dataset=a.jsonl: no row in its 1 files"),
    "no rows": ({"a.parquet": []}, {}, "task.dataset=a.parquet: no row in its 1 files"),
    "no shards": ({"a/x.doc": b"text\na\n"}, {}, f"task.dataset=a: {NO_FILE}"),
    "cut off": ({"a.parquet": content(".parquet", ROWS)[:-9]}, {}, f"a.parquet: {NO_PARQUET}"),
    "several cut off": (
        {"a/w.parquet": ROWS, "a/x.parquet": content(".parquet", ROWS)[:-9], "a/y.parquet": b"", "a/z.jsonl": ROWS}, {},
        f"a/x.parquet: {NO_PARQUET}\na/y.parquet: cannot be read, Parquet file size is 0 bytes",
    ),
    # Where they are.
    "no such folder": ({}, {"dataset": "memory://nowhere"}, f"task.dataset=memory://nowhere: {NO_FILE}"),
    "no package": (
        {}, {"dataset": "gs://bucket/a"},
        "task.dataset=gs://bucket/a: cannot be read, Please install gcsfs *",
    ),
    "no such kind of URL": (
        {}, {"dataset": "ftpp://a/b"},
        "task.dataset=ftpp://a/b: cannot be read, Protocol not known: *",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", BEFORE)
def test_what_does_not_fit_is_named_before_training(case: str) -> None:
    files, settings, expected = BEFORE[case]
    task = lm(**({"dataset": write(files)} if files else {}) | settings)
    said = says(UserError, task.build_datasets)
    assert fnmatchcase(said, expected), said
    assert said.count("\n") == expected.count("\n")


def test_settings_that_contradict_each_other_are_named_without_loading_anything() -> None:
    write({"a/deep/x.jsonl": ROWS, "b.jsonl": ROWS})
    new = ("--task.name=causal_lm", "--task.streaming=true", *tiny.NEW_LLAMA)

    def refused(*arguments: str) -> str:
        return says(UserError, lambda: run_settings([*new, *arguments]))

    mix = "--task.sources=[{{dataset: a, weight: {}}}, {{dataset: b.jsonl}}]"
    assert refused(mix.format(0)) == "task.sources: a has a weight of 0: leave it out, or give it a share"
    assert "must be greater than or equal to 0" in refused(mix.format(-1))
    both = "task.dataset and task.sources: set one, a dataset or those to mix"
    assert refused(mix.format(1), "--task.dataset=a") == both
    assert refused("--task.sources=[{dataset: no.jsonl}]") == "task.dataset=no.jsonl: no such file or folder"
    run_settings([*new, mix.format(1)])  # folders may have folders


def test_credentials_that_are_missing_are_named_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tried without: they are asked for six times."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    for name in ("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"):
        monkeypatch.setenv(name, "none")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    said = says(UserError, lambda: find_files("s3://bucket/folder"))
    assert said == "task.dataset=s3://bucket/folder: cannot be read, Unable to locate credentials"


def test_hidden_files_and_those_in_hidden_folders_are_no_shards() -> None:
    """As writers leave them behind. Tried without: their rows are trained on."""
    unfinished = [{"text": "unfinished"}] * 20
    hidden = dict.fromkeys(("a/.x.parquet", "a/_x.jsonl", "a/_tmp/x.parquet", "a/b/.git/x.jsonl"), unfinished)
    task = lm(write({"a/x.parquet": ROWS, "a/b/_SUCCESS": b"", "a/b/x.jsonl": ROWS, **hidden}))
    train, _ = built(task)
    assert {*texts(task, train)} == {row["text"] for row in ROWS}
    below = Path("_hidden/a").resolve()
    shutil.copytree("a", below)
    assert len(find_files(str(below))) == 2, "a folder above them may be hidden"


def test_the_split_to_train_on_is_not_evaluated_on_too() -> None:
    """Tried with the first split that is usual for evaluation: the only one."""
    task = lm(write({"a/validation.jsonl": ROWS}), train_split="validation")
    train, evaluation = built(task)
    assert {*texts(task, train)} == {row["text"] for row in ROWS[:-6]}
    assert decoded(task, evaluation) == ROWS[-6:]


def decoded(task: Any, evaluation: Any) -> list[Any]:
    """The rows that an evaluation set shows."""
    chunks = [chunk for sample in evaluation.__getitems__([*range(len(evaluation))]) for chunk in sample]
    return [{"text": task._tokenizer.decode(chunk["input_ids"], skip_special_tokens=True)} for chunk in chunks]


@pytest.mark.parametrize("kind", ["parquet", "jsonl"])
def test_rows_to_evaluate_on_are_those_of_the_file_as_it_is(kind: str) -> None:
    """Also if its size and time are as they were. Tried with a cache that goes by these: the old rows."""
    dataset = write({f"a/train.{kind}": ROWS, f"a/validation.{kind}": ROWS[:5]})
    task = lm(dataset)
    assert decoded(task, built(task)[1]) == ROWS[:5]
    file = Path(f"a/validation.{kind}")
    before = file.stat()
    file.write_bytes(file.read_bytes().replace(b"line 3", b"LINE 3"))
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    task = lm(dataset)
    assert decoded(task, built(task)[1]) == [*ROWS[:3], {"text": "LINE 3"}, ROWS[4]]


def test_shards_to_evaluate_on_are_of_any_kind_and_their_rows_are_named_or_left_out() -> None:
    """As those to train on. Tried with datasets' reader: no file, row or cause is named."""
    good = {"a/train.jsonl": ROWS, "a/dev-0.parquet": ROWS[:3], "a/dev-1.jsonl": ROWS[3:5]}
    task = lm(write(good))
    assert decoded(task, built(task)[1]) == ROWS[:5]
    # another column of another type in each, a value of another type, a line that is none
    more = [{"text": "a", "id": 1}, {"id": "x", "text": "b"}, {"text": 3}, b"{"]
    write({"a/dev-2.jsonl": more})
    said = says(UserError, lm("a").build_datasets)
    assert said == f"a/dev-2.jsonl, line 3: text is int, not text; 2 of 9 {EVALUATED}"
    task = lm("a", bad_rows="skip")
    evaluation = built(task)[1]
    assert decoded(task, evaluation) == [*ROWS[:5], {"text": "a"}, {"text": "b"}]
    assert task.describe("eval", evaluation)["skipped_rows"] == 2
    shutil.rmtree("a")
    write({"a/train.jsonl": ROWS, "a/dev.jsonl": [{"text": None}]})
    said = says(UserError, lm("a", bad_rows="skip").build_datasets)
    assert said == f"a/dev.jsonl, line 1: text is empty; 1 of 1 {EVALUATED}"


def test_rows_to_evaluate_on_that_are_left_out_count_over_all_sources() -> None:
    """Tried without the sum: those of the last source."""
    write({"a/train.jsonl": ROWS, "a/dev.jsonl": [*ROWS[:3], b"{", {"text": 1}]})
    write({"b/train.jsonl": ROWS, "b/dev.jsonl": ROWS[:3]})
    task = lm(sources=[{"dataset": "a"}, {"dataset": "b"}], bad_rows="skip")
    assert task.describe("eval", built(task)[1])["skipped_rows"] == 2


def test_names_of_labels_in_parquet_are_those_of_the_labels(models: Path) -> None:
    """Also where the last rows are evaluated on. Tried without the features: 0 and 1."""
    rows = datasets.Dataset.from_list([{"text": row["text"], "label": i % 2} for i, row in enumerate(REVIEWS)])
    rows.cast_column("label", datasets.ClassLabel(names=["even", "odd"])).to_parquet("a.parquet")
    task = classifier("a.parquet", models)
    built(task)
    assert task._labels == ["even", "odd"]


class OnTheHub:
    """What `load_dataset_builder` finds by the names of files."""

    def __init__(self, files: dict[str, list[str]]) -> None:
        named = {
            datasets.NamedSplit(split): [str(Path(name).resolve()) for name in names] for split, names in files.items()
        }
        self.config = SimpleNamespace(data_files=named)


def test_a_dataset_on_the_hub_lacks_a_split_or_has_a_file_that_cannot_be_streamed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Tried without: a TypeError, as splits are no text, and a KeyError."""
    write({"a/train.jsonl": ROWS, "a/more.txt": b"{}"})
    files = {"train": ["a/train.jsonl"]}
    monkeypatch.setattr("src.tasks.text.files.load_dataset_builder", lambda *_: OnTheHub(files))
    assert says(UserError, lm("org/a", train_split="all").build_datasets) == "task.train_split=all: org/a has train"
    assert len(built(lm("org/a"))[0]) > 0
    files["validation"] = ["a/more.txt"]
    said = says(UserError, lm("org/a").build_datasets)
    assert said == "a/more.txt: cannot be streamed, only .jsonl, .json, .csv, .tsv, .parquet files"


# --------------------------------------------------------------------------------------------- known while training
@pytest.mark.parametrize("part", ["", "a.jsonl"], ids=["a folder", "a file"])
def test_a_file_that_changes_on_a_web_server_is_noticed(tmp_path: Path, part: str) -> None:
    """Of the same size. Tried with what the listing says: nothing of a file."""
    write({"web/a.jsonl": ROWS})
    handler = partial(SilentHandler, directory=str(tmp_path / "web"))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        found = find_files(f"http://127.0.0.1:{server.server_port}/{part}")
        reader = ShardReader(index_files(found, [], tmp_path))
        file = tmp_path / "web/a.jsonl"
        file.write_bytes(file.read_bytes().replace(b"line 7", b"LINE 7"))
        os.utime(file, (10**9, 10**9))  # a server tells seconds
        assert "has changed or is gone since" in says(UserError, lambda: reader.read(0, 7, 8, ["text"]))
        server.shutdown()


class SilentHandler(SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


@pytest.mark.parametrize("kind", ["parquet", "jsonl"])
def test_a_shard_that_has_changed_since_it_was_indexed(tmp_path: Path, kind: str) -> None:
    """Of the same size. Tried without: its rows are mixed with those of the old one."""
    file = tmp_path / write({f"a.{kind}": ROWS})
    reader = ShardReader(index_files(find_files(str(file)), [], tmp_path))
    file.write_bytes(file.read_bytes().replace(b"line 7", b"LINE 7"))
    said = says(UserError, lambda: reader.read(0, 0, 3, ("text",)))
    assert said == f"a.{kind} has changed or is gone since it was indexed: put it back as it was, or begin a new run"
    reader = ShardReader(index_files(find_files(str(file)), [], tmp_path))
    assert reader.read(0, 7, 8, ("text",))[0] == {"text": ["LINE 7"]}, "a new run takes the new one"


@pytest.mark.parametrize("kind", ["parquet", "jsonl"])
def test_a_hard_link_to_a_shard_and_other_permissions_change_nothing(tmp_path: Path, kind: str) -> None:
    """As a backup makes one, in the middle of a run or before it is resumed. Tried with the time of the last change in
    what is compared: the shard "has changed"."""
    file = tmp_path / write({f"a.{kind}": ROWS})
    reader = ShardReader(index_files(find_files(str(file)), [], tmp_path))
    file.with_suffix(".backup").hardlink_to(file)
    file.chmod(0o444)
    assert reader.read(0, 7, 8, ("text",))[0] == {"text": ["line 7"]}
    assert ShardReader(index_files(find_files(str(file)), [], tmp_path)).fingerprint == reader.fingerprint


@pytest.mark.parametrize("kind", ["parquet", "jsonl"])
def test_a_shard_that_is_gone_is_named(tmp_path: Path, kind: str) -> None:
    """Tried without: a traceback, or six tries."""
    file = tmp_path / write({f"a.{kind}": ROWS})
    reader = ShardReader(index_files(find_files(str(file)), [], tmp_path))
    file.unlink()
    assert says(UserError, lambda: reader.read(0, 0, 3, ("text",))).startswith(f"a.{kind} has changed or is gone")


def test_a_bad_row_beyond_the_sample_is_named_when_its_turn_comes() -> None:
    """In a process that loads data too. Tried without: a traceback of that process."""
    rows: list[Any] = [{"text": str(i)} for i in range(20_000)]
    rows[1500] = {"text": 3}
    task = lm(write({"a.jsonl": rows}), shuffle_window=2000)
    train, _ = built(task)
    expected = f"a.jsonl, line 1501: text is int, not text; {HINT}"
    assert says(UserError, lambda: [*epoch(task, train)]) == expected
    config: Any = SimpleNamespace(seed=0, num_workers=2, task=task)
    stream = task.augmented(train, [0, 0, 1])
    batches = [[i] for i in range(len(stream))]
    loaded = load_in_workers(config, stream, batches, 0, 0)
    assert says(UserError, lambda: deque(loaded, maxlen=0)) == expected


class Failing:
    """Examples that cannot be read."""

    def __len__(self) -> int:
        return 1

    def __getitem__(self, _: int) -> None:
        try:
            raise OSError("reset by peer")
        except OSError as error:
            raise RunError("s3://a/b.parquet: cannot be read,\ntried 6 times") from error


def test_what_a_loading_process_could_not_read_stays_a_run_error() -> None:
    """Its exit code says whether to launch the run again."""
    config: Any = SimpleNamespace(seed=0, num_workers=1, task=SimpleNamespace(collate=list))
    said = says(RunError, lambda: [*load_in_workers(config, Failing(), [[0]], 0, 0)])
    assert said == "s3://a/b.parquet: cannot be read,\ntried 6 times"


# ------------------------------------------------------------------------------------------------ left out and counted
BAD: list[Any] = [
    {"text": 3}, {"text": None}, {"text": ""}, {"txt": "a"}, {}, b"{", b"[1]", b"null", b'"a"', b"\xff",
    {"text": "\ud83d"},
]  # fmt: skip


def test_bad_rows_are_left_out_and_counted_and_no_others() -> None:
    """In the order of the rows the counts are those of their windows. Tried without: none is counted."""
    rows = [row for good, bad_row in zip(ROWS[:11], BAD, strict=True) for row in (bad_row, good)] + ROWS[11:]
    task = lm(
        write({"a/x.jsonl": rows, "a/y.jsonl": [*ROWS, *BAD[1:3], *ROWS[:4]]}), bad_rows="skip", shuffle_window=20
    )
    train, evaluation = built(task)
    assert len(evaluation) == 1
    shown = sum(len(sample) for sample in evaluation.__getitems__([0]))
    assert sorted(texts(task, train)) == sorted(row["text"] for row in [*ROWS, *ROWS, *ROWS[:4]][:-shown])
    assert skipped(task, train) == len(BAD)


def test_a_window_of_nothing_but_bad_rows_is_empty_and_counted() -> None:
    task = lm(write({"a.jsonl": [*ROWS, *[{"text": None}] * 300, *ROWS]}), bad_rows="skip", shuffle_window=50)
    train, _ = built(task)
    assert len(texts(task, train)) + skipped(task, train) == sum(train.order.totals)
    for samples in epoch(task, train):
        batch = task.collate(samples)
        labels = [chunk["labels"] for sample in samples for chunk in sample]
        assert task.count(batch)["targets"] == sum(map(len, labels))


def test_prompts_that_are_not_packed_keep_a_place_for_each_row() -> None:
    """An epoch is as long as its rows are many, whatever is left out."""
    bad_rows: list[Any] = [{"prompt": None, "completion": "a"}, {"prompt": "a"}, b"{"]
    task = lm(write({"a.jsonl": [*PROMPTS[:20], *bad_rows, *PROMPTS[20:]]}), bad_rows="skip", packing=False)
    train, evaluation = built(task)
    assert len(train) == 63 - len(evaluation)
    expected = [row["prompt"] + row["completion"] for row in PROMPTS[: -len(evaluation)]]
    assert sorted(texts(task, train)) == sorted(expected)
    assert skipped(task, train) == 3


def classifier(dataset: str, models: Path, **settings: Any) -> TextClassification:
    own = {"streaming": True, "model": str(models / "bert"), "sequence_length": 32, "shuffle_window": 40}
    return TextClassification(dataset=dataset, **own | settings)


def test_labels_that_no_row_to_evaluate_on_has_are_named_or_left_out(models: Path) -> None:
    """What is left out does not count among the targets of the loss."""
    bad_rows: list[Any] = [{"text": "a", "label": "prime"}, {"text": "a"}, {"text": 3, "label": "odd"}, b"{"]
    write({"a.jsonl": [*REVIEWS[:20], *bad_rows, *REVIEWS[20:]]})
    task = classifier("a.jsonl", models)
    train, _ = built(task)
    said = says(UserError, lambda: [*epoch(task, train)])
    assert said == f"a.jsonl, line 21: label prime is not among the evaluation data's (even, odd); {HINT}"
    task = classifier("a.jsonl", models, bad_rows="skip")
    train, evaluation = built(task)
    assert skipped(task, train) == 4
    assert sum(task.count(task.collate(samples))["targets"] for samples in epoch(task, train)) == 60 - len(evaluation)
    model = task.build_model().eval()
    for samples in epoch(task, train, 8):
        good = [sample for sample in samples if sample[0]["length"]]
        loss, alone = (task.loss(model, task.collate(part)).item() for part in (samples, good))
        assert loss == pytest.approx(alone, rel=1e-5)
