"""Text, models and settings that do not fit: one clear line and exit code 2, never a traceback or a silent mistake."""

import datetime
import json
import re
import shutil
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any

import datasets
import huggingface_hub
import numpy as np
import pandas as pd
import pytest
import torch

from src.config import load_config
from src.data.byte_tokenizer import byte_tokenizer
from src.exit_codes import exit_codes
from tests import tiny
from tests.launching import Launch

Refused = Callable[..., list[str]]

LLAMA = [f"--task.architecture.{name}={value}" for name, value in {"model_type": "llama", **tiny.LLAMA}.items()]
LM = ["--task.name=causal_lm", "--task.sequence_length=16"]
CLASSIFIER = ["--task.name=text_classification", "--task.sequence_length=16"]
ROWS: list[dict[str, Any]] = [{"text": f"line {i}", "label": ("even", "odd")[i % 2]} for i in range(20)]
CHAT = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]


@pytest.fixture(autouse=True)
def _in_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And with an empty cache. The environment is read when these libraries are imported: too late for it here."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the models `llama` and `bert`."""
    folder = tmp_path_factory.mktemp("models")
    tiny.llama(folder / "llama")
    tiny.bert(folder / "bert")
    return folder


@pytest.fixture
def bert(models: Path) -> Path:
    """A copy to damage."""
    return Path(shutil.copytree(models / "bert", "bert"))


@pytest.fixture
def llama(models: Path) -> Path:
    return Path(shutil.copytree(models / "llama", "llama"))


def built(*arguments: str) -> tuple[Any, Any, Any, Any]:
    """The task, its two datasets and its model, built from the arguments as train.py does it."""
    task: Any = load_config(list(arguments)).task
    return task, *task.build_datasets(), task.build_model()


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str]) -> Refused:
    """refused(*arguments): the lines that train.py ends with before it trains; that its exit code is 2 is checked."""

    def refused(*arguments: str) -> list[str]:
        capsys.readouterr()
        with pytest.raises(SystemExit) as end, exit_codes():
            built(*arguments)
        assert end.value.code == 2
        said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("train.py: ")]
        return [line.removeprefix("train.py: ") for line in said]

    return refused


def write(name: str, content: object) -> str:
    """The argument that names it as the dataset. Lists become lines of JSON."""
    file = Path(name)
    file.parent.mkdir(parents=True, exist_ok=True)
    if isinstance(content, list):
        content = "".join(json.dumps(row) + "\n" for row in content)
    file.write_bytes(content if isinstance(content, bytes) else str(content).encode())
    return f"--task.dataset={name}"


def set_in(file: Path, **fields: object) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))


# ------------------------------------------------------------------------------------------------ files and folders
@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "a.json", "a.csv", "a.tsv", "a.parquet"])
def test_an_empty_file(refused: Refused, name: str) -> None:
    assert refused(*LM, *LLAMA, write(name, "")) == [f"task.dataset={name}: the file is empty"]


@pytest.mark.parametrize(
    ("name", "content"), [("a.csv", "text\n"), ("a.tsv", "text\n"), ("a.jsonl", "\n"), ("a.json", "[]")]
)
def test_a_file_without_a_row(refused: Refused, name: str, content: str) -> None:
    (says,) = refused(*LM, *LLAMA, write(name, content))
    assert says.startswith(f"task.dataset={name}: ")
    assert re.search("no rows?|empty", says)


def test_an_empty_file_among_others_is_named(refused: Refused) -> None:
    write("data/train.jsonl", ROWS)
    write("data/test.jsonl", "")
    assert refused(*LM, *LLAMA, "--task.dataset=data") == ["task.dataset=data/test.jsonl: the file is empty"]


def test_files_that_do_not_say_their_split_among_others_that_do(refused: Refused) -> None:
    write("data/train.jsonl", ROWS)
    write("data/more.jsonl", ROWS)
    assert refused(*LM, *LLAMA, "--task.dataset=data") == [
        "task.dataset=data: the names of other files say their split, but not more.jsonl: rename or move away what is "
        "not to be used"
    ]


@pytest.mark.parametrize(
    ("other", "says"),
    [
        ("data/train-2.jsonl.gz", "train-2.jsonl.gz is not read: unpack it, or move it into the folder, or away"),
        ("data/more/train-2.jsonl", "more/train-2.jsonl is not read: unpack it, or move it into the folder, or away"),
        ("data/dataset_dict.json", "was written by save_to_disk (dataset_dict.json), which is not read: write each "),
    ],
)
def test_data_that_would_not_be_read(refused: Refused, other: str, says: str) -> None:
    """Tried without: they are passed over in silence, or read as rows."""
    write("data/train.jsonl", ROWS)
    write(other, "{}")
    (line,) = refused(*LM, *LLAMA, "--task.dataset=data")
    assert line.startswith(f"task.dataset=data: {says}")


def test_settings_that_the_data_have_no_use_for(refused: Refused) -> None:
    data = write("a.jsonl", ROWS)
    assert refused(*LM, *LLAMA, data, "--task.column_names=[a]") == [
        "task.column_names is for .csv and .tsv files, and a.jsonl is none"
    ]
    assert refused(*LM, *LLAMA, data, "--task.dataset_config=en") == [
        "task.dataset_config=en: a.jsonl is not on the Hub, and has none"
    ]


def test_a_document_that_is_too_short_to_keep_a_part_for_evaluation(refused: Refused) -> None:
    assert refused(*LM, *LLAMA, write("a.txt", "a")) == [
        "task.dataset=a.txt: too short to keep a part of it for evaluation"
    ]


def test_too_few_rows_to_keep_some_for_evaluation(refused: Refused) -> None:
    assert refused(*LM, *LLAMA, write("a.jsonl", ROWS[:3]), "--task.text_column=text") == [
        "task.dataset=a.jsonl: 3 rows are too few to keep 0.1 of them for evaluation (task.eval_fraction)"
    ]


@pytest.mark.parametrize(
    ("dataset", "says"),
    [
        ("", "task.dataset is not set: name a dataset on the Hub, a file or a folder"),
        ("nowhere.jsonl", "task.dataset=nowhere.jsonl: no such file or folder"),
        ("no/folder/there", "task.dataset=no/folder/there: no such file or folder"),
        ("notes.doc", "task.dataset=notes.doc: .doc is none of .txt, .jsonl, .json, .csv, .tsv, .parquet"),
        (
            "bare",
            "task.dataset=bare: the folder has no file; it must hold files of one of "
            ".txt, .jsonl, .json, .csv, .tsv, .parquet",
        ),
        (
            "mixed",
            "task.dataset=mixed: the folder has files of several kinds; it must hold files of one of "
            ".txt, .jsonl, .json, .csv, .tsv, .parquet",
        ),
    ],
)
def test_a_dataset_that_is_not_there_is_a_mistake_like_those_in_the_settings(
    refused: Refused, dataset: str, says: str
) -> None:
    write("notes.doc", "a")
    write("bare/README.md", "a")
    write("mixed/train.jsonl", ROWS)
    write("mixed/test.csv", "text\na\n")
    assert refused(*LM, *LLAMA, f"--task.dataset={dataset}", "--seed=-1") == [
        "--seed=-1: must be greater than or equal to 0",
        says,
    ]


def test_a_folder_with_names_in_capitals(models: Path) -> None:
    """Tried without: "has no file"."""
    write("data/Train.CSV", "text,label\n" + "one,even\ntwo,odd\n" * 9)
    write("data/TEST.csv", "text,label\none,even\n")
    _, train, evaluation, _ = built(*CLASSIFIER, f"--task.model={models}/bert", "--task.dataset=data")
    assert (len(train), len(evaluation)) == (18, 1)
    assert len(built(*CLASSIFIER, f"--task.model={models}/bert", "--task.dataset=data/Train.CSV")[1]) == 16


def test_a_file_name_with_what_globs_are_made_of() -> None:
    data = write("a[1].jsonl", ROWS)
    _, train, evaluation, _ = built(*LM, *LLAMA, data, "--task.text_column=text", "--task.packing=false")
    assert len(train) + len(evaluation) == 20


def test_a_split_that_is_not_there_is_refused_with_those_that_are(refused: Refused) -> None:
    data = write("data/test.jsonl", ROWS).removesuffix("/test.jsonl")
    assert refused(*LM, *LLAMA, data) == ["task.train_split=train: data has test"]
    assert refused(*LM, *LLAMA, data, "--task.train_split=test", "--task.eval_split=dev") == [
        "task.eval_split=dev: data has test"
    ]


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("a.jsonl", '{"text": "a"}\n{"text": \n', "JSON parse error: "),
        ("a.json", '[{"text": "a"}', "decoding array value"),
        ("a.csv", "text,label\na,b\nc,d,e\n", "Expected 2 fields in line 3, saw 3"),
        ("a.csv", 'text,label\na,b\n"c,d\n', "EOF inside string starting at row "),
        ("a.tsv", "text\tlabel\na\tb\tc\td\ne\tf\n", ""),
        ("a.parquet", "PAR1, but nothing of the kind", ""),
        ("a.txt", "café".encode("latin-1"), "utf-8"),
        ("a.csv", "text\ncafé\n".encode("latin-1"), "utf-8"),
        ("a.tsv", "text\ncafé\n".encode("latin-1"), "utf-8"),
        ("a.jsonl", '{"text": "café"}\n'.encode("latin-1"), "UTF8"),
    ],
    ids=[
        "jsonl", "json", "csv with a field too many", "csv with an open quote", "tsv", "parquet",
        "txt in latin-1", "csv in latin-1", "tsv in latin-1", "jsonl in latin-1",
    ],
)  # fmt: skip
def test_a_malformed_file(refused: Refused, name: str, content: str | bytes, reason: str) -> None:
    (says,) = refused(*LM, *LLAMA, "--task.text_column=text", write(name, content))
    assert says.startswith(f"task.dataset={name}: ")
    assert reason.lower() in says.lower()


# --------------------------------------------------------------------------------------------------------- columns
@pytest.mark.parametrize(
    ("column", "says"),
    [
        ("--task.text_column=txt", "no column txt in the data to train on; its columns are text, label"),
        ("--task.messages_column=chat", "no column chat in the data to train on; its columns are text, label"),
    ],
)
def test_a_column_that_is_not_there_is_refused_with_those_that_are(refused: Refused, column: str, says: str) -> None:
    assert refused(*LM, *LLAMA, write("a.jsonl", ROWS), column) == [f"task.dataset=a.jsonl: {says}"]


def test_two_columns_that_are_not_there(refused: Refused) -> None:
    columns = "--task.prompt_column=question", "--task.completion_column=answer"
    assert refused(*LM, *LLAMA, write("a.jsonl", ROWS), *columns) == [
        "task.dataset=a.jsonl: no column question nor answer in the data to train on; its columns are text, label"
    ]


@pytest.mark.parametrize("setting", ["text_column", "text_pair_column", "label_column"])
def test_a_column_that_a_classifier_misses(refused: Refused, models: Path, setting: str) -> None:
    data = write("a.jsonl", ROWS)
    assert refused(*CLASSIFIER, f"--task.model={models}/bert", data, f"--task.{setting}=txt") == [
        "task.dataset=a.jsonl: no column txt in the data to train on; its columns are text, label"
    ]


def test_a_column_that_only_the_evaluation_split_lacks_is_named(refused: Refused) -> None:
    write("data/train.jsonl", ROWS)
    write("data/test.jsonl", [{"txt": "a"}])
    (says,) = refused(*LM, *LLAMA, "--task.dataset=data", "--task.text_column=text")
    assert says.startswith("task.dataset=data: ")
    assert "txt" in says


def test_columns_that_leave_open_which_to_learn(refused: Refused) -> None:
    assert refused(*LM, *LLAMA, write("a.jsonl", [{"a": "x", "b": "y"}] * 9)) == [
        "task.dataset=a.jsonl: which of its columns a, b to learn? Set --task.text_column, or --task.prompt_column "
        "and --task.completion_column, or --task.messages_column"
    ]


def test_columns_of_several_kinds_or_half_a_pair(refused: Refused) -> None:
    data = write("a.jsonl", ROWS)
    assert refused(*LM, *LLAMA, data, "--task.text_column=text", "--task.prompt_column=label") == [
        "task.prompt_column and task.completion_column: set both",
        "task.text_column, task.prompt_column and task.messages_column: the rows are of one kind, set one",
    ]


@pytest.mark.parametrize(
    ("names", "reason"),
    [
        ("[text]", "task.column_names has 1 names, but a.csv has 2 columns"),
        ("[text, label, more]", "task.column_names has 3 names, but a.csv has 2 columns"),
        ("[text, text]", "task.dataset=a.csv: the column text is there twice"),
        ("[one, even]", "task.column_names: a.csv has that header itself; leave them out"),
    ],
)
def test_column_names_that_do_not_fit_the_file(refused: Refused, names: str, reason: str) -> None:
    data = write("a.csv", "one,even\ntwo,odd\n" * 9)
    assert refused(*LM, *LLAMA, data, f"--task.column_names={names}") == [reason]


def test_a_column_that_a_csv_has_twice(refused: Refused) -> None:
    (says,) = refused(*LM, *LLAMA, write("a.csv", "text,text\none,two\n" * 9))
    assert says.startswith("task.dataset=a.csv: ")
    assert "twice" in says or "uplicate" in says


@pytest.mark.parametrize(("name", "found"), [("a.csv", ";"), ("a.csv", "\t"), ("a.tsv", ";")])
def test_a_table_with_other_separators(refused: Refused, name: str, found: str) -> None:
    """Such as Excel writes them in much of Europe. Tried without: one column is learnt, numbers and all."""
    (says,) = refused(*LM, *LLAMA, write(name, f"id{found}text\n0{found}one\n" * 9))
    assert says.startswith(f"task.dataset={name}: its only column would be {f'id{found}text'!r}: ")


@pytest.mark.parametrize(
    "content",
    ["\ufefftext,label\n" + "one,even\n" * 9, ",text\n" + "0,one\n" * 9, f"text,label\none,{'x' * 200_000}\n"],
    ids=["Excel's, with a byte order mark", "pandas', with its index", "with a long text"],
)
def test_a_csv_as_other_programs_write_it(content: str) -> None:
    more = "--task.text_column=text", "--task.packing=false", "--task.eval_fraction=0.5"
    content += content.splitlines(keepends=True)[-1]
    task, train, *_ = built(*LM, *LLAMA, write("a.csv", content), *more)
    (piece,) = train.__getitems__([0])[0]
    assert task._tokenizer.decode(piece["input_ids"], skip_special_tokens=True) == "one"


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.csv", "text,label\none,even,1\ntwo,odd,2\n"),
        ("a.csv", "text,label\n\none,even,\ntwo,odd\n"),
        ("a.tsv", "text\tlabel\none\teven\t1\n"),
    ],
    ids=["in all rows", "in the first", "in a .tsv"],
)
def test_a_row_with_one_field_more_than_the_header(refused: Refused, name: str, content: str) -> None:
    """Also in the second of two files. Tried without: the first field is lost, as pandas takes it for an index."""
    (says,) = refused(*LM, *LLAMA, write(name, content))
    assert says.startswith(f"task.dataset={name}: row 1 has 3 fields, and the header 2: mend such rows; ")
    suffix = Path(name).suffix
    header = content.splitlines()[0]
    write(f"data/train-1{suffix}", f"{header}\n{header}\n")
    write(f"data/train-2{suffix}", content)
    (says,) = refused(*LM, *LLAMA, "--task.dataset=data")
    assert says.startswith(f"task.dataset=data/train-2{suffix}: row 1 has 3 fields")


def test_the_second_of_two_tables_lacks_a_column(refused: Refused) -> None:
    write("data/train-1.csv", "text,label\none,even\n")
    write("data/train-2.csv", "label,txt\neven,one\n")
    assert refused(*LM, *LLAMA, "--task.dataset=data") == [
        "task.dataset=data/train-2.csv: has no column text, which data/train-1.csv has"
    ]


def test_a_pair_of_twice_the_same_column(refused: Refused, models: Path) -> None:
    data = write("a.jsonl", ROWS)
    (says,) = refused(*CLASSIFIER, f"--task.model={models}/bert", data, "--task.text_pair_column=text")
    assert "task.text_pair_column" in says


# ------------------------------------------------------------------------------------------------------------ rows
@pytest.mark.parametrize(
    ("value", "is_what"),
    [
        (None, "empty"), ("", "empty"), (" \n", "empty"), (3, "int, not text"), (2.5, "float, not text"),
        (True, "bool, not text"), (["x"], "list, not text"), ({"a": "x"}, "dict, not text"),
        (CHAT, "a list of messages, not text: put each chat into one column, named by --task.messages_column"),
    ],
)  # fmt: skip
def test_values_that_are_no_text_are_counted_and_named_by_row_or_skipped(
    refused: Refused, value: object, is_what: str
) -> None:
    rows = [{"text": value} if i in (2, 6) else {"text": f"line {i}"} for i in range(20)]
    arguments = (*LM, *LLAMA, write("a.jsonl", rows), "--task.packing=false")
    assert refused(*arguments) == [
        f"task.dataset=a.jsonl: 2 of 20 rows in the data to train on have no usable text (row 3, 7; the first is 1): "
        f"in row 3 text is {is_what}; mend them, or leave them out with --task.bad_rows=skip"
    ]
    task, train, evaluation, _ = built(*arguments, "--task.bad_rows=skip")
    assert len(train) + len(evaluation) == 18
    assert task.skipped_rows == {"train": 2, "eval": 0}


def test_rows_that_lack_the_column_are_counted_too(refused: Refused) -> None:
    (says,) = refused(*LM, *LLAMA, write("a.jsonl", [{"other": "x"}, {"text": "y"}] * 9), "--task.text_column=text")
    assert "9 of 18 rows in the data to train on have no usable text (row 1, 3, 5, 7, 9, …; the first is 1)" in says


def test_empty_cells_and_short_lines_of_a_csv_but_not_what_pandas_takes_for_missing(refused: Refused) -> None:
    data = write("a.csv", "label,text\nx,one\nx,\nx\n" + "x,null\nx,NA\nx,2\n" * 3)
    (says,) = refused(*LM, *LLAMA, data)
    assert "2 of 12 rows in the data to train on have no usable text (row 2, 3; the first is 1)" in says


def test_a_column_without_any_text(refused: Refused) -> None:
    arguments = (*LM, *LLAMA, write("a.jsonl", [{"text": i} for i in range(20)]))
    (says,) = refused(*arguments)
    assert "20 of 20 rows in the data to train on have no usable text (row 1, 2, 3, 4, 5, …; the first is 1)" in says
    assert refused(*arguments, "--task.bad_rows=skip") == [
        "task.dataset=a.jsonl: no usable row in the data to train on: in row 1 text is int, not text"
    ]


def test_bad_rows_of_the_evaluation_split_are_told_from_those_to_train_on(refused: Refused) -> None:
    write("data/train.jsonl", ROWS)
    write("data/test.jsonl", [*ROWS[:2], {"text": " ", "label": "odd"}])
    arguments = (*LM, *LLAMA, "--task.dataset=data")
    (says,) = refused(*arguments)
    assert "1 of 3 rows in the data to evaluate on have no usable text (row 3; the first is 1)" in says
    assert built(*arguments, "--task.bad_rows=skip")[0].skipped_rows == {"train": 0, "eval": 1}


@pytest.mark.parametrize(
    ("label", "is_what"),
    [
        (None, "empty"), ("", "empty"), (2.5, "2.5, neither a name nor a whole number"), (["x"], "list, not text"),
        ({"a": 1}, "dict, not text"),
    ],
)  # fmt: skip
def test_labels_that_are_missing_or_neither_text_nor_number(
    refused: Refused, models: Path, label: object, is_what: str
) -> None:
    data = write("a.jsonl", [*ROWS, {"text": "a", "label": label}])
    arguments = (*CLASSIFIER, f"--task.model={models}/bert", data)
    assert refused(*arguments) == [
        f"task.dataset=a.jsonl: 1 of 21 rows in the data to train on have no usable text or label (row 21; the first "
        f"is 1): in row 21 label is {is_what}; mend them, or leave them out with --task.bad_rows=skip"
    ]
    task, train, evaluation, _ = built(*arguments, "--task.bad_rows=skip")
    assert (len(train) + len(evaluation), task.skipped_rows["train"]) == (20, 1)


CALL = {"function": {"name": "weather", "arguments": {"city": "Bern"}}}
PARTS = [{"type": "text", "text": "hi"}, {"type": "text", "text": " there"}]


@pytest.mark.parametrize(
    ("chat", "why"),
    [
        (None, "is no list of messages"),
        ("hi", "is no list of messages"),
        ([], "has no message"),
        (["hi"], "has a message 1 that is str, not role and content"),
        ([{"role": "user"}], "has a message 1 without content (its role is user)"),
        ([CHAT[0], {"role": "assistant", "content": None}], "has a message 2 without content (its role is assistant)"),
        ([{"role": "user", "content": 3}], "has a message 1 with content that is not text, but int"),
        (
            [{"role": "user", "content": [*PARTS, {"type": "image", "url": "a.png"}]}],
            "has a message 1 with content that is not text, but image",
        ),
        (
            [CHAT[0], {"speaker": "me", "text": "ho"}],
            "has a message 2 with neither role and content nor from and value, but speaker, text",
        ),
        ([{"from": "narrator", "value": "hi"}], "has a message 1 from 'narrator', which is none of human, user, gpt, "),
        ([{"from": "human"}], "has a message 1 without content (its role is user)"),
        ([CHAT[0], CHAT[1] | {"weight": 2}], "has a message 2 of weight 2, which can be 0, not to be learnt, or 1"),
        ([CHAT[0], CHAT[1] | {"function_call": {"name": "f"}}], "has a message 2 with a function_call: write it as to"),
        ([{"role": "assistant", "tool_calls": [{"id": "1"}]}], "has a message 1 with a tool call that has no function"),
        (
            [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}],
            "has a message 1 with a tool call whose arguments are no JSON",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_chats_that_are_none_and_what_they_lack(refused: Refused, chat: object, why: str) -> None:
    data = write("a.jsonl", [{"messages": CHAT}] * 19 + [{"messages": chat}])
    (says,) = refused(*LM, *LLAMA, data)
    assert "1 of 20 rows in the data to train on have no usable messages (row 20; the first is 1): " in says
    assert f"in row 20 messages {why}" in says


@pytest.mark.parametrize(
    "row",
    [{"prompt": "a prompt that fills the sequence", "completion": "x"}, {"messages": [CHAT[0]]}],
    ids=["prompts as long as the sequence", "chats without an answer"],
)
def test_rows_that_leave_nothing_to_predict(refused: Refused, row: dict[str, object]) -> None:
    (says,) = refused(*LM, *LLAMA, write("a.jsonl", [row] * 20))
    assert says == (
        "task.dataset=a.jsonl: the training data has nothing to predict: no row has a completion, or a turn of the "
        "assistant, within sequence_length=16"
    )


# ---------------------------------------------------------------------------------------------------------- labels
def test_a_label_that_is_only_in_the_evaluation_split(refused: Refused, models: Path) -> None:
    write("data/train.jsonl", ROWS)
    write("data/test.jsonl", [*ROWS[:2], {"text": "a", "label": "prime"}])
    assert refused(*CLASSIFIER, f"--task.model={models}/bert", "--task.dataset=data") == [
        "task.label_column=label: prime is in the data to evaluate on, but not in the data to train on (even, odd)"
    ]


def test_a_single_label(refused: Refused, models: Path) -> None:
    data = write("a.jsonl", [row | {"label": "odd"} for row in ROWS])
    assert refused(*CLASSIFIER, f"--task.model={models}/bert", data) == [
        "task.label_column=label: all rows to train on have the same label, odd"
    ]


def labels_of(models: Path, labels: list[Any], name: str = "a.jsonl") -> list[str]:
    rows = [{"text": f"line {i}", "label": label} for i, label in enumerate(labels)]
    table = "text,label\n" + "".join(f"line {i},{label}\n" for i, label in enumerate(labels))
    data = write(name, rows if name.endswith("jsonl") else table)
    task, *_ = built(*CLASSIFIER, f"--task.model={models}/bert", data, "--task.bad_rows=skip")
    return task.from_data()["labels"]


@pytest.mark.parametrize(
    ("labels", "names"),
    [
        ([0.0, 1.0, 2.0] * 7, ["0", "1", "2"]),
        ([0, 1, None] * 7, ["0", "1"]),
        ([True, False] * 10, ["False", "True"]),
        (["pos", "neg", "pos ", "\tneg"] * 5, ["neg", "pos"]),
        (["1.0", "1.5"] * 10, ["1.0", "1.5"]),
    ],
    ids=["whole floats", "one missing among whole numbers", "true and false", "white space around names", "versions"],
)  # fmt: skip
def test_labels_as_files_have_them(models: Path, labels: list[Any], names: list[str]) -> None:
    """Tried without: all rows are refused, `pos` and `pos ` are two classes."""
    assert labels_of(models, labels) == names
    if None not in labels:
        assert labels_of(models, labels, "a.csv") == names


def test_labels_of_which_some_are_whole(refused: Refused, models: Path) -> None:
    """The evaluation data may have no other than these. Tried with a look at each part alone: "2 is in the data to
    evaluate on, but not in the data to train on"."""
    write("data/train.csv", "text,label\n" + "one,1.5\ntwo,2.0\n" * 5)
    write("data/test.csv", "text,label\n" + "two,2.0\n" * 5)
    task, *_ = built(*CLASSIFIER, f"--task.model={models}/bert", "--task.dataset=data")
    assert task.from_data()["labels"] == ["1.5", "2.0"]


COLUMNS: dict[str, tuple[Any, list[str] | str]] = {
    "category": (pd.Categorical(["x", "y"] * 10), ["x", "y"]),
    "Int64": (pd.array([0, 1] * 10, dtype="Int64"), ["0", "1"]),
    "float16": (np.array([0, 1] * 10, np.float16), ["0", "1"]),
    "uint8": (np.array([0, 1] * 10, np.uint8), ["0", "1"]),
    "decimal": ([Decimal("1.0"), Decimal("2.0")] * 10, ["1", "2"]),
    "bool": ([True, False] * 10, ["False", "True"]),
    "string": (pd.array(["a", "b"] * 10, dtype="string"), ["a", "b"]),
    "datetime": (pd.to_datetime(["2020-01-01", "2020-01-02"] * 10), "datetime, not text"),
    "date": ([datetime.date(2020, 1, 1)] * 20, "date, not text"),
    "bytes": ([b"a", b"b"] * 10, "bytes, not text"),
    "lists": ([["a"], ["b"]] * 10, "list, not text"),
    "null": ([None] * 20, "empty"),
    "timedelta": (pd.to_timedelta([1, 2] * 10), "Timedelta, not text"),
}


@pytest.mark.parametrize("kind", COLUMNS)
def test_labels_of_every_type_that_parquet_has(refused: Refused, models: Path, kind: str) -> None:
    column, expected = COLUMNS[kind]
    pd.DataFrame({"text": [f"line {i}" for i in range(20)], "label": column}).to_parquet("a.parquet")
    arguments = (*CLASSIFIER, f"--task.model={models}/bert", "--task.dataset=a.parquet")
    if isinstance(expected, list):
        assert built(*arguments)[0].from_data()["labels"] == expected
    else:
        (says,) = refused(*arguments)
        assert "20 of 20 rows in the data to train on have no usable text or label (row 1, 2, 3, 4, 5, …; " in says
        assert f"in row 1 label is {expected}; mend them" in says


def test_labels_that_only_look_like_numbers_are_names(models: Path) -> None:
    data = write("a.jsonl", [row | {"label": "--1" if row["label"] == "odd" else "1"} for row in ROWS])
    *_, model = built(*CLASSIFIER, f"--task.model={models}/bert", data)
    assert sorted(model.config.label2id) == ["--1", "1"]


# -------------------------------------------------------------------------------------------------- sequence length
@pytest.mark.parametrize("task", ["causal_lm", "text_classification"])
def test_a_sequence_length_beyond_the_models(refused: Refused, models: Path, task: str) -> None:
    model = models / ("llama" if task == "causal_lm" else "bert")
    arguments = f"--task.name={task}", f"--task.model={model}", write("a.jsonl", ROWS), "--task.sequence_length=257"
    assert refused(*arguments) == ["task.sequence_length=257: the model sees at most 256 tokens"]


@pytest.mark.parametrize(
    "architecture",
    [
        [*LLAMA, "--task.architecture.max_position_embeddings=8"],
        [f"--task.architecture.{field}" for field in ("model_type=gpt2", "n_embd=32", "n_head=2", "n_positions=8")],
    ],
    ids=["llama", "gpt2"],
)
def test_a_sequence_length_beyond_the_architectures(refused: Refused, architecture: list[str]) -> None:
    assert refused(*LM, *architecture, write("a.jsonl", ROWS)) == [
        "task.sequence_length=16: the model sees at most 8 tokens"
    ]


def test_a_sequence_length_beyond_the_tokenizers(refused: Refused, llama: Path) -> None:
    set_in(llama / "tokenizer_config.json", model_max_length=8)
    assert refused(*LM, f"--task.model={llama}", write("a.jsonl", ROWS)) == [
        "task.sequence_length=16: the model sees at most 8 tokens"
    ]


# ------------------------------------------------------------------------------------------------------ tokenizers
def test_a_tokenizer_without_a_pad_token_and_the_advice_that_the_line_gives(refused: Refused, bert: Path) -> None:
    tokenizer = byte_tokenizer()
    tokenizer.pad_token = None
    tokenizer.save_pretrained(bert)
    arguments = (*CLASSIFIER, f"--task.model={bert}", write("a.jsonl", ROWS))
    (says,) = refused(*arguments)
    assert says.startswith("task.model=bert: its tokenizer has no pad token; set task.pad_token, such as --task.pad")
    assert refused(*arguments, "--task.pad_token=<mask>") == ["task.pad_token=<mask>: the tokenizer has no such token"]
    advice = says.split("such as ")[1].replace("'", "")  # quoted for the shell
    task, train, _, model = built(*arguments, advice)
    batch = task.collate([train[i] for i in range(4)])
    assert torch.isfinite(task.loss(model, batch)[0])


def test_a_causal_language_model_needs_no_pad_token(llama: Path) -> None:
    tokenizer = byte_tokenizer()
    tokenizer.pad_token = None
    tokenizer.save_pretrained(llama)
    task, train, _, model = built(*LM, f"--task.model={llama}", write("a.jsonl", ROWS))
    batch = task.collate(train.__getitems__([0, 1]))
    assert torch.isfinite(task.loss(model, batch)[0])


def test_a_tokenizer_without_a_chat_template_and_the_advice_that_the_line_gives(refused: Refused, llama: Path) -> None:
    (llama / "chat_template.jinja").unlink()
    arguments = (*LM, f"--task.model={llama}", write("a.jsonl", [{"messages": CHAT}] * 20))
    assert refused(*arguments) == [
        "the tokenizer has no chat template: set --task.chat_template to a Jinja file with one"
    ]
    assert refused(*arguments, "--task.chat_template=a.jinja") == ["task.chat_template=a.jinja: no such file"]
    Path("a.jinja").write_text("{% for message in messages %}{{ message.content }};{% endfor %}")
    built(*arguments, "--task.chat_template=a.jinja")


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        (b"{% for %}", "Expected an expression"),
        (b"{{ nobody.knows }}", "'nobody' is undefined"),
        (b"{{ raise_exception('Roles must\nalternate') }}", "Roles must alternate"),
        (b"{{ 1 + messages[0].role }}", ""),
        (b"{{ 'caf\xe9' }}", ""),
    ],
    ids=["syntax", "undefined", "raises", "a type error", "latin-1"],
)
def test_a_chat_template_that_fails(refused: Refused, template: bytes, reason: str) -> None:
    Path("a.jinja").write_bytes(template)
    chats = write("a.jsonl", [{"messages": CHAT}] * 20)
    (says,) = refused(*LM, *LLAMA, chats, "--task.chat_template=a.jinja")
    assert "chat template" in says or "chat_template" in says
    assert reason in says


def test_a_tokenizer_setting_that_is_no_tokenizer_is_named(refused: Refused) -> None:
    (says,) = refused(*LM, *LLAMA, write("a.jsonl", ROWS), "--task.tokenizer=./nowhere")
    assert says.startswith("task.tokenizer=./nowhere: ")


@pytest.mark.parametrize("kind", ["bert", "llama"])
def test_a_model_folder_without_a_tokenizer(refused: Refused, models: Path, kind: str) -> None:
    # transformers makes a BertTokenizer of nothing, with five tokens: every word is [UNK] to it.
    folder = shutil.copytree(models / kind, kind, ignore=shutil.ignore_patterns("tokenizer*"))
    arguments = LM if kind == "llama" else CLASSIFIER
    (says,) = refused(*arguments, f"--task.model={folder}", write("a.jsonl", ROWS))
    assert says.startswith(f"task.model={folder}: ")
    assert "tokenizer" in says


def test_a_vocabulary_smaller_than_the_tokenizer(refused: Refused) -> None:
    assert refused(*LM, *LLAMA, write("a.jsonl", ROWS), "--task.architecture.vocab_size=100") == [
        "the tokenizer has 258 tokens, but the model knows 100 (task.tokenizer, task.architecture.vocab_size)"
    ]


def test_a_tokenizer_of_another_model_than_the_classifiers(refused: Refused, bert: Path) -> None:
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens(["line"])  # index 258: out of range in the embeddings, once training has begun
    tokenizer.save_pretrained(bert)
    (says,) = refused(*CLASSIFIER, f"--task.model={bert}", write("a.jsonl", ROWS))
    assert "the tokenizer has 259 tokens, but the model knows 258" in says


# ----------------------------------------------------------------------------------------------------- checkpoints
def shortened(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1000])


def of_torch(file: Path) -> None:
    file.rename(file.with_name("pytorch_model.bin")).write_bytes(b"not a checkpoint")


@pytest.mark.parametrize(
    "damage",
    [shortened, lambda file: file.write_bytes(b""), lambda file: file.write_bytes(b"?" * 999), Path.unlink, of_torch],
    ids=["cut off", "empty", "garbage", "gone", "garbage of torch.save"],
)
@pytest.mark.parametrize("kind", ["bert", "llama"])
def test_a_corrupted_checkpoint(refused: Refused, models: Path, kind: str, damage: Callable[[Path], object]) -> None:
    folder = Path(shutil.copytree(models / kind, kind))
    damage(folder / "model.safetensors")
    arguments = LM if kind == "llama" else CLASSIFIER
    (says,) = refused(*arguments, f"--task.model={folder}", write("a.jsonl", ROWS))
    assert says.startswith(f"task.model={kind}: cannot be loaded, ")


@pytest.mark.parametrize(
    "content",
    ["{", "[]", "{}", '{"model_type": "lama"}', '{"model_type": "bert", "hidden_size": "wide"}'],
)
def test_a_config_that_is_none(refused: Refused, bert: Path, content: str) -> None:
    (bert / "config.json").write_text(content)
    (says,) = refused(*CLASSIFIER, f"--task.model={bert}", write("a.jsonl", ROWS))
    assert says.startswith("task.model=bert: cannot be loaded, ")


def test_a_tokenizer_file_that_is_none(refused: Refused, bert: Path) -> None:
    (bert / "tokenizer.json").write_text("{")
    (says,) = refused(*CLASSIFIER, f"--task.model={bert}", write("a.jsonl", ROWS))
    assert says.startswith("task.model=bert: cannot be loaded, ")


@pytest.mark.parametrize(
    ("fields", "count"), [({"intermediate_size": 128}, 6), ({"num_hidden_layers": 3}, 16)], ids=["shapes", "layers"]
)
def test_a_checkpoint_that_does_not_match_its_config(
    refused: Refused, bert: Path, fields: dict[str, int], count: int
) -> None:
    set_in(bert / "config.json", **fields)
    (says,) = refused(*CLASSIFIER, f"--task.model={bert}", write("a.jsonl", ROWS))
    assert says.startswith(
        f"task.model=bert: not a checkpoint of BertForSequenceClassification, {count} of its weights are missing or "
        f"of another shape (bert.encoder.layer."
    )


def test_a_checkpoint_without_the_output_layer_of_a_language_model(refused: Refused, llama: Path) -> None:
    from safetensors.torch import load_file, save_file

    weights = load_file(llama / "model.safetensors")
    del weights["lm_head.weight"]
    save_file(weights, llama / "model.safetensors", metadata={"format": "pt"})
    assert refused(*LM, f"--task.model={llama}", write("a.jsonl", ROWS)) == [
        "task.model=llama: not a checkpoint of LlamaForCausalLM, 1 of its weights are missing or of another shape "
        "(lm_head.weight)"
    ]


def test_a_folder_that_is_no_model(refused: Refused) -> None:
    Path("folder").mkdir()
    data = write("a.jsonl", ROWS)
    assert refused(*CLASSIFIER, data) == ["task.model is not set: name a model on the Hub or a local folder"]
    assert refused(*CLASSIFIER, data, "--task.model=./nowhere/at/all") == ["task.model=nowhere/at/all: no such folder"]
    assert refused(*CLASSIFIER, data, "--task.model=folder") == [
        "task.model=folder: the folder has no config.json, so it is no model of transformers"
    ]


@pytest.mark.parametrize("kind", ["known", "unknown"])
def test_code_that_comes_with_a_model_is_never_run(refused: Refused, bert: Path, kind: str) -> None:
    for name in ("configuration", "modeling", "tokenization"):
        (bert / f"{name}.py").write_text("open('it_ran', 'w')\nclass Mine: pass\n")
    code = {"AutoConfig": "configuration.Mine", "AutoModelForSequenceClassification": "modeling.Mine"}
    set_in(bert / "config.json", auto_map=code, **({"model_type": "mine"} if kind == "unknown" else {}))
    set_in(bert / "tokenizer_config.json", auto_map={"AutoTokenizer": [None, "tokenization.Mine"]})
    arguments = (*CLASSIFIER, f"--task.model={bert}", write("a.jsonl", ROWS))
    if kind == "unknown":
        assert refused(*arguments) == [
            "task.model=bert: wants to run code of its own, which is not allowed here; take one that transformers has"
        ]
    else:  # transformers' own code for this model_type takes its place
        *_, model = built(*arguments)
        assert type(model).__module__ == "transformers.models.bert.modeling_bert"
    assert not Path("it_ran").exists()


def test_a_kind_of_model_that_has_no_classifier(refused: Refused, bert: Path) -> None:
    config = {"model_type": "mamba", "hidden_size": 32, "num_hidden_layers": 1, "vocab_size": 258}
    (bert / "config.json").write_text(json.dumps(config))
    assert refused(*CLASSIFIER, f"--task.model={bert}", write("a.jsonl", ROWS)) == [
        "task.model=bert: transformers has no text classifier of kind mamba"
    ]


# ---------------------------------------------------------------------------------------------------- architecture
def test_unknown_fields_of_the_architecture_are_refused_by_name_with_the_nearest(refused: Refused) -> None:
    unknown = "--task.architecture.hiden_size=32", "--task.architecture.num_layers=2"
    assert refused(*LM, *LLAMA, write("a.jsonl", ROWS), *unknown) == [
        "task.architecture.hiden_size: llama has no such field, did you mean hidden_size?",
        "task.architecture.num_layers: llama has no such field, did you mean num_hidden_layers?",
    ]


@pytest.mark.parametrize(("kind", "hint"), [("lama", ", did you mean llama?"), ("t5", ""), ("None of these", "")])
def test_an_unknown_architecture(refused: Refused, kind: str, hint: str) -> None:
    assert refused(*LM, write("a.jsonl", ROWS), f"--task.architecture.model_type={kind}") == [
        f"task.architecture.model_type={kind}: transformers has no such causal language model{hint}"
    ]


def test_a_model_and_an_architecture_or_neither(refused: Refused, models: Path) -> None:
    says = "task.model or task.architecture: set one, to start from that model, or to train that from scratch"
    data = write("a.jsonl", ROWS)
    assert refused(*LM, data) == [says]
    assert refused(*LM, data, *LLAMA, f"--task.model={models}/llama") == [says]


def test_an_architecture_without_a_model_type(refused: Refused) -> None:
    assert refused(*LM, write("a.jsonl", ROWS), "--task.architecture.hidden_size=32") == [
        "task.architecture.model_type is not set: name an architecture of transformers, such as llama"
    ]


@pytest.mark.parametrize(
    ("field", "reason"),
    [
        ("num_attention_heads=5", "The hidden size (32) is not a multiple of the number of attention heads (5)"),
        ("num_attention_heads=0", ""),
        ("hidden_size=-32", ""),
        ("hidden_size=wide", "Field 'hidden_size' expected int, got str (value: 'wide')"),
        ("hidden_act=reluu", "reluu"),
        ("hidden_act=[", "["),
        ("pad_token_id=5000", ""),
    ],
)
def test_values_that_the_architecture_refuses(refused: Refused, field: str, reason: str) -> None:
    (says,) = refused(*LM, *LLAMA, write("a.jsonl", ROWS), f"--task.architecture.{field}")
    assert says.startswith("task.architecture: llama refuses it, ")
    assert reason in says


def test_an_architecture_that_builds_but_does_not_run(refused: Refused) -> None:
    fields = {**tiny.LLAMA, "model_type": "olmoe", "num_experts": 4, "num_experts_per_tok": 8}
    architecture = [f"--task.architecture.{name}={value}" for name, value in fields.items()]
    (says,) = refused(*LM, write("a.jsonl", ROWS), *architecture)
    assert says.startswith("OlmoeForCausalLM fails on eight tokens: ")


MIXTURE = {**tiny.LLAMA, "model_type": "mixtral", "num_local_experts": 4}
NOT_ADDED = (
    "the auxiliary loss of a mixture of experts is not added here: it is one of the whole batch's routing, and would "
    "be another on each number of processes"
)


@pytest.mark.parametrize("field", ["output_router_logits=True", "router_aux_loss_coef=50"])
def test_the_auxiliary_loss_of_a_mixture_of_experts(refused: Refused, field: str) -> None:
    """Tried without: it is dropped, silently."""
    architecture = [f"--task.architecture.{name}={value}" for name, value in MIXTURE.items()]
    arguments = (*LM, write("a.jsonl", ROWS), *architecture)
    assert refused(*arguments, f"--task.architecture.{field}") == [
        f"task.architecture.{field}: {NOT_ADDED}; leave it out to train without"
    ]
    off = "output_router_logits=False" if field.endswith("True") else "router_aux_loss_coef=0.0"
    *_, model = built(*arguments, f"--task.architecture.{off}")
    model.hf.save_pretrained("mixture")
    byte_tokenizer().save_pretrained("mixture")
    arguments = (*LM, write("a.jsonl", ROWS), "--task.model=mixture")
    built(*arguments)
    set_in(Path("mixture/config.json"), output_router_logits=True)
    assert refused(*arguments) == [
        f"task.model=mixture: its config asks for it by output_router_logits, but {NOT_ADDED}; set that to false in "
        f"its config.json to train without"
    ]


def test_fields_within_fields_are_numbers_too() -> None:
    rope = "--task.architecture.rope_parameters.rope_theta"
    for value, expected in (("20000.0", 20000.0), ("1e4", 1e4), ("'1'x", "'1'x"), ('"x"', "x")):
        task = load_config([*LM, *LLAMA, write("a.jsonl", ROWS), f"{rope}={value}"]).task
        assert task.architecture["rope_parameters"] == {"rope_theta": expected}  # type: ignore[attr-defined]


SMALL = {
    "opt": {"ffn_dim": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "word_embed_proj_dim": 32},
    "bloom": {"n_layer": 2, "n_head": 2},
    "bert": {"intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2},
}


@pytest.mark.parametrize("kind", ["opt", "bloom"])
def test_a_model_in_which_packed_documents_see_each_other(refused: Refused, kind: str) -> None:
    fields = {"model_type": kind, "hidden_size": 32, **SMALL[kind]}
    architecture = [f"--task.architecture.{name}={value}" for name, value in fields.items()]
    arguments = (*LM, write("a.jsonl", ROWS), *architecture)
    assert refused(*arguments) == [f"{kind} lets packed documents see each other: set --task.packing=false"]
    built(*arguments, "--task.packing=false")


def test_an_encoder_that_would_see_the_tokens_that_it_has_to_predict(refused: Refused) -> None:
    fields = {"model_type": "bert", "hidden_size": 32, **SMALL["bert"]}
    architecture = [f"--task.architecture.{name}={value}" for name, value in fields.items()]
    (says,) = refused(*LM, write("a.jsonl", ROWS), *architecture, "--task.packing=false")
    assert "bert" in says


# ------------------------------------------------------------------------------------------------------------ LoRA
@pytest.mark.parametrize("modules", ["[q_prj]", "[q_proj, q_prj]"])
def test_lora_on_modules_that_the_model_has_not(refused: Refused, models: Path, modules: str) -> None:
    lora = "--task.lora.r=2", f"--task.lora.target_modules={modules}"
    (says,) = refused(*LM, f"--task.model={models}/llama", write("a.jsonl", ROWS), *lora)
    assert says.startswith("task.lora.target_modules: ")
    assert "'q_prj'" in says or " q_prj" in says


def test_lora_on_modules_that_it_cannot_adapt(refused: Refused, models: Path) -> None:
    lora = "--task.lora.r=2", "--task.lora.target_modules=[input_layernorm]"
    (says,) = refused(*LM, f"--task.model={models}/llama", write("a.jsonl", ROWS), *lora)
    assert says.startswith("task.lora.target_modules: Target module LlamaRMSNorm")


def test_lora_with_an_architecture(refused: Refused) -> None:
    assert refused(*LM, *LLAMA, write("a.jsonl", ROWS), "--task.lora.r=2") == [
        "task.lora adapts a model that there is: set task.model, not task.architecture"
    ]


@pytest.mark.parametrize("setting", ["merge=true", "target_modules=[q_proj]", "alpha=32"])
def test_lora_settings_without_a_rank_would_adapt_nothing(refused: Refused, models: Path, setting: str) -> None:
    (says,) = refused(*LM, f"--task.model={models}/llama", write("a.jsonl", ROWS), f"--task.lora.{setting}")
    assert "task.lora.r" in says


# -------------------------------------------------------------------------------------------- through the launcher
@pytest.mark.parametrize("bad", ["data", "model"])
@pytest.mark.parametrize(("config", "processes"), [("cpu", None), ("ddp", 2), ("fsdp", 2)])
def test_one_line_and_exit_code_2_under_every_strategy(
    launch: Launch, models: Path, tmp_path: Path, config: str, processes: int | None, bad: str
) -> None:
    """Data fail in the first process while the others wait for it; a model in all of them at once."""
    arguments = [*LM, write(f"{tmp_path}/a.jsonl", [*ROWS, {"text": None}] if bad == "data" else ROWS)]
    if bad == "data":
        arguments += LLAMA
        says = f"task.dataset={tmp_path}/a.jsonl: 1 of 21 rows in the data to train on have no usable text (row 21; "
    else:
        folder = Path(shutil.copytree(models / "llama", tmp_path / "llama"))
        shortened(folder / "model.safetensors")
        arguments += [f"--task.model={folder}"]
        says = f"task.model={folder}: cannot be loaded, "
    run = launch(config, *arguments, "--task.text_column=text", processes=processes, HF_HOME=f"{tmp_path}/home")
    (message,) = run.messages
    assert message.startswith(f"train.py: {says}")
    assert 'train.py", line' not in run.stderr, "a traceback"
    # The launcher's own is 1: in its words, what ended it.
    ends = re.findall(r"returned non-zero exit status (\d+)|Root Cause[^=]*?exitcode +: (-?\d+)", run.stderr)
    assert ["".join(end) for end in ends] == ["2"]
    assert not run.folder.exists()
