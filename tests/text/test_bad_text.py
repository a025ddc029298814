"""Text, models and settings that do not fit: one clear line and exit code 2, never a traceback or a silent mistake."""

import datetime
import json
import re
import shutil
from collections.abc import Callable
from decimal import Decimal
from functools import partial
from pathlib import Path
from typing import Any

import datasets
import huggingface_hub
import numpy as np
import pandas as pd
import pytest
import torch
from safetensors.torch import load_file, save_file

from src.config import load_config
from src.data.byte_tokenizer import byte_tokenizer
from src.process import exit_codes
from tests.launching import Launch
from tests.text import tiny

Refused = Callable[..., list[str]]


def architecture(**fields: object) -> tuple[str, ...]:
    return tuple(f"--task.architecture.{name}={value}" for name, value in fields.items())


LM = ("--task.name=causal_lm", "--task.sequence_length=16")
NEW = (*LM, *architecture(model_type="llama", **tiny.LLAMA))
LLAMA = (*LM, "--task.model=models/llama")
CLASSIFIER = ("--task.name=text_classification", "--task.sequence_length=16")
BERT = (*CLASSIFIER, "--task.model=models/bert")
ROWS: list[dict[str, Any]] = [{"text": f"line {i}", "label": ("even", "odd")[i % 2]} for i in range(20)]
CHAT = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]
LORA = (*LLAMA, "--task.lora.r=2")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the models `llama` and `bert`."""
    folder = tmp_path_factory.mktemp("models")
    tiny.llama(folder / "llama")
    tiny.bert(folder / "bert")
    return folder


@pytest.fixture(autouse=True)
def _in_a_folder_with_models(tmp_path: Path, models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And with an empty cache. The environment is read when these libraries are imported: too late for it here."""
    monkeypatch.chdir(tmp_path)
    Path("models").symlink_to(models)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)


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


def write(files: dict[str, object] | None = None) -> str:
    """The argument that names them, or ROWS, as the dataset. Lists become lines of JSON."""
    files = {"a.jsonl": ROWS} if files is None else files
    for name, content in files.items():
        if isinstance(content, list):
            content = "".join(json.dumps(row) + "\n" for row in content)
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_bytes(content if isinstance(content, bytes) else str(content).encode())
    return f"--task.dataset={next(iter(files)).partition('/')[0]}"


def set_in(file: Path, **fields: object) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))


def fits(says: str, expected: str) -> bool:
    """Whether it is as expected, where *** stands for anything."""
    return re.fullmatch(".*".join(map(re.escape, expected.split("***"))), says) is not None


# ---------------------------------------------------------------------------------------- refused, *** is anything
TEXT, SKIP = "--task.text_column=text", "--task.bad_rows=skip"
TRAIN: dict[str, object] = {"data/train.jsonl": ROWS}
TABLE: dict[str, object] = {"a.csv": "one,even\ntwo,odd\n" * 9}
NUMBERS: dict[str, object] = {"a.jsonl": [{"text": i} for i in range(20)]}
SMALL: dict[str, dict[str, int]] = {
    "opt": {"ffn_dim": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "word_embed_proj_dim": 32},
    "bloom": {"n_layer": 2, "n_head": 2},
    "bert": {"intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2},
}
KINDS = ".txt, .jsonl, .json, .csv, .tsv, .parquet"
ONE_KIND = f"it must hold files of one of {KINDS}"
NO_COLUMN = "task.dataset=a.jsonl: no column {} in the data to train on; its columns are text, label"
UNPACK = "is not read: unpack it, or move it into the folder, or away***"
NO_TARGETS = (
    "task.dataset=a.jsonl: the training data has nothing to predict: no row has a completion, or a turn of the "
    "assistant, within sequence_length=16"
)
TOO_LONG = "task.sequence_length=16: the model sees at most 8 tokens"
ONE_OF_TWO = "task.model or task.architecture: set one, to start from that model, or to train that from scratch"
UNKNOWN = "transformers has no such causal language model"
REFUSES = "task.architecture: llama refuses it, ***"
EMPTY: list[tuple[dict[str, object], tuple[str, ...], str]] = [
    ({name: ""}, NEW, f"task.dataset={name}: the file is empty") for name in map("a{}".format, KINDS.split(", "))
]
FILES: list[tuple[dict[str, object], tuple[str, ...], str]] = [
    *EMPTY,
    (TRAIN | {"data/test.jsonl": ""}, NEW, "task.dataset=data/test.jsonl: the file is empty"),
    (
        TRAIN | {"data/more.jsonl": ROWS}, NEW,
        "task.dataset=data: the names of other files say their split, but not more.jsonl: rename or move away what is "
        "not to be used",
    ),
    # Tried without these three: they are passed over in silence, or read as rows.
    (TRAIN | {"data/train-2.jsonl.gz": "{}"}, NEW, f"task.dataset=data: train-2.jsonl.gz {UNPACK}"),
    (TRAIN | {"data/more/train-2.jsonl": "{}"}, NEW, f"task.dataset=data: more/train-2.jsonl {UNPACK}"),
    (
        TRAIN | {"data/dataset_dict.json": "{}"}, NEW,
        "task.dataset=data: was written by save_to_disk (dataset_dict.json), which is not read: write each ***",
    ),
    ({"a.txt": "a"}, NEW, "task.dataset=a.txt: too short to keep a part of it for evaluation"),
    (
        {"a.jsonl": ROWS[:3]}, (*NEW, TEXT),
        "task.dataset=a.jsonl: 3 rows are too few to keep 0.1 of them for evaluation (task.eval_fraction)",
    ),
    ({"data/test.jsonl": ROWS}, NEW, "task.train_split=train: data has test"),
    (
        {"data/test.jsonl": ROWS}, (*NEW, "--task.train_split=test", "--task.eval_split=dev"),
        "task.eval_split=dev: data has test",
    ),
    # Columns.
    (TRAIN | {"data/test.jsonl": [{"txt": "a"}]}, (*NEW, TEXT), "task.dataset=data: ***txt***"),
    (
        {"a.jsonl": [{"a": "x", "b": "y"}] * 9}, NEW,
        "task.dataset=a.jsonl: which of its columns a, b to learn? Set --task.text_column, or --task.prompt_column "
        "and --task.completion_column, or --task.messages_column",
    ),
    (TABLE, (*NEW, "--task.column_names=[text]"), "task.column_names has 1 names, but a.csv has 2 columns"),
    (TABLE, (*NEW, "--task.column_names=[text, label, x]"), "task.column_names has 3 names, but a.csv has 2 columns"),
    (TABLE, (*NEW, "--task.column_names=[text, text]"), "task.dataset=a.csv: the column text is there twice"),
    (
        TABLE, (*NEW, "--task.column_names=[one, even]"),
        "task.column_names: a.csv has that header itself; leave them out",
    ),
    ({"a.csv": "text,text\none,two\n" * 9}, NEW, "task.dataset=a.csv: the column text is there twice"),
    # Such as Excel writes them in much of Europe. Tried without: one column is learnt, numbers and all.
    ({"a.csv": "id;text\n0;one\n" * 9}, NEW, "task.dataset=a.csv: its only column would be 'id;text': ***"),
    ({"a.csv": "id\ttext\n0\tone\n" * 9}, NEW, "task.dataset=a.csv: its only column would be 'id\\ttext': ***"),
    ({"a.tsv": "id;text\n0;one\n" * 9}, NEW, "task.dataset=a.tsv: its only column would be 'id;text': ***"),
    (
        {"data/train-1.csv": "text,label\none,even\n", "data/train-2.csv": "label,txt\neven,one\n"}, NEW,
        "task.dataset=data/train-2.csv: has no column text, which data/train-1.csv has",
    ),
    # Rows.
    (
        {"a.jsonl": [{"other": "x"}, {"text": "y"}] * 9}, (*NEW, TEXT),
        "***9 of 18 rows in the data to train on have no usable text (row 1, 3, 5, 7, 9, …; the first is 1)***",
    ),
    (  # empty cells and short lines, but not what pandas takes for missing
        {"a.csv": "label,text\nx,one\nx,\nx\n" + "x,null\nx,NA\nx,2\n" * 3}, NEW,
        "***2 of 12 rows in the data to train on have no usable text (row 2, 3; the first is 1)***",
    ),
    (
        NUMBERS, NEW,
        "***20 of 20 rows in the data to train on have no usable text (row 1, 2, 3, 4, 5, …; the first is 1)***",
    ),
    (
        NUMBERS, (*NEW, SKIP),
        "task.dataset=a.jsonl: no usable row in the data to train on: in row 1 text is int, not text",
    ),
    ({"a.jsonl": [{"prompt": "a prompt that fills the sequence", "completion": "x"}] * 20}, NEW, NO_TARGETS),
    ({"a.jsonl": [{"messages": [CHAT[0]]}] * 20}, NEW, NO_TARGETS),
    # Labels.
    (
        TRAIN | {"data/test.jsonl": [*ROWS[:2], {"text": "a", "label": "prime"}]}, BERT,
        "task.label_column=label: prime is in the data to evaluate on, but not in the data to train on (even, odd)",
    ),
    (
        {"a.jsonl": [row | {"label": "odd"} for row in ROWS]}, BERT,
        "task.label_column=label: all rows to train on have the same label, odd",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("files", "arguments", "expected"), FILES)
def test_data_that_do_not_fit(
    refused: Refused, files: dict[str, object], arguments: tuple[str, ...], expected: str
) -> None:
    (says,) = refused(*arguments, write(files))
    assert fits(says, expected)


SETTINGS: list[tuple[tuple[str, ...], str]] = [
    ((*NEW, "--task.column_names=[a]"), "task.column_names is for .csv and .tsv files, and a.jsonl is none"),
    ((*NEW, "--task.dataset_config=en"), "task.dataset_config=en: a.jsonl is not on the Hub, and has none"),
    ((*NEW, "--task.text_column=txt"), NO_COLUMN.format("txt")),
    ((*NEW, "--task.messages_column=chat"), NO_COLUMN.format("chat")),
    ((*NEW, "--task.prompt_column=q", "--task.completion_column=a"), NO_COLUMN.format("q nor a")),
    ((*BERT, "--task.text_column=txt"), NO_COLUMN.format("txt")),
    ((*BERT, "--task.text_pair_column=txt"), NO_COLUMN.format("txt")),
    ((*BERT, "--task.label_column=txt"), NO_COLUMN.format("txt")),
    ((*BERT, "--task.text_pair_column=text"), "***task.text_pair_column***"),
    # Sequence lengths and tokenizers.
    ((*LLAMA, "--task.sequence_length=257"), "task.sequence_length=257: the model sees at most 256 tokens"),
    ((*BERT, "--task.sequence_length=257"), "task.sequence_length=257: the model sees at most 256 tokens"),
    ((*NEW, *architecture(max_position_embeddings=8)), TOO_LONG),
    ((*LM, *architecture(model_type="gpt2", n_embd=32, n_head=2, n_positions=8)), TOO_LONG),
    ((*NEW, "--task.tokenizer=./nowhere"), "task.tokenizer=./nowhere: ***"),
    (
        (*NEW, "--task.architecture.vocab_size=100"),
        "the tokenizer has 258 tokens, but the model knows 100 (task.tokenizer, task.architecture.vocab_size)",
    ),
    # Models and architectures.
    (CLASSIFIER, "task.model is not set: name a model on the Hub or a local folder"),
    ((*CLASSIFIER, "--task.model=./nowhere/at/all"), "task.model=nowhere/at/all: no such folder"),
    (
        (*CLASSIFIER, "--task.model=models"),
        "task.model=models: the folder has no config.json, so it is no model of transformers",
    ),
    ((*LM, *architecture(model_type="lama")), f"task.architecture.model_type=lama: {UNKNOWN}, did you mean llama?"),
    ((*LM, *architecture(model_type="t5")), f"task.architecture.model_type=t5: {UNKNOWN}"),
    ((*LM, *architecture(model_type="None of these")), f"task.architecture.model_type=None of these: {UNKNOWN}"),
    (LM, ONE_OF_TWO),
    ((*NEW, "--task.model=models/llama"), ONE_OF_TWO),
    (
        (*LM, *architecture(hidden_size=32)),
        "task.architecture.model_type is not set: name an architecture of transformers, such as llama",
    ),
    (
        (*NEW, *architecture(num_attention_heads=5)),
        f"{REFUSES}The hidden size (32) is not a multiple of the number of attention heads (5)***",
    ),
    ((*NEW, *architecture(num_attention_heads=0)), REFUSES),
    ((*NEW, *architecture(hidden_size=-32)), REFUSES),
    ((*NEW, *architecture(hidden_size="a")), f"{REFUSES}Field 'hidden_size' expected int, got str (value: 'a')***"),
    ((*NEW, *architecture(hidden_act="reluu")), f"{REFUSES}reluu***"),
    ((*NEW, *architecture(hidden_act="[")), f"{REFUSES}[***"),
    ((*NEW, *architecture(pad_token_id=5000)), REFUSES),
    (  # it can be built, but does not run
        (*LM, *architecture(**{**tiny.LLAMA, "model_type": "olmoe", "num_experts": 4, "num_experts_per_tok": 8})),
        "OlmoeForCausalLM fails on eight tokens: ***",
    ),
    (  # it would see the tokens that it has to predict
        (*LM, *architecture(model_type="bert", hidden_size=32, **SMALL["bert"]), "--task.packing=false"), "***bert***",
    ),
    # LoRA. Without a rank, its other settings would adapt nothing.
    ((*LORA, "--task.lora.target_modules=[q_prj]"), "task.lora.target_modules: *** q_prj***"),
    ((*LORA, "--task.lora.target_modules=[q_proj, q_prj]"), "task.lora.target_modules: *** q_prj***"),
    (
        (*LORA, "--task.lora.target_modules=[input_layernorm]"),
        "task.lora.target_modules: Target module LlamaRMSNorm***",
    ),
    ((*NEW, "--task.lora.r=2"), "task.lora adapts a model that there is: set task.model, not task.architecture"),
    ((*LLAMA, "--task.lora.merge=true"), "***task.lora.r***"),
    ((*LLAMA, "--task.lora.target_modules=[q_proj]"), "***task.lora.r***"),
    ((*LLAMA, "--task.lora.alpha=32"), "***task.lora.r***"),
]  # fmt: skip


@pytest.mark.parametrize(("arguments", "expected"), SETTINGS)
def test_settings_that_do_not_fit(refused: Refused, arguments: tuple[str, ...], expected: str) -> None:
    (says,) = refused(*arguments, write())
    assert fits(says, expected)


@pytest.mark.parametrize(
    ("dataset", "says"),
    [
        ("", "task.dataset is not set: name a dataset on the Hub, a file or a folder"),
        ("nowhere.jsonl", "task.dataset=nowhere.jsonl: no such file or folder"),
        ("no/folder/there", "task.dataset=no/folder/there: no such file or folder"),
        ("notes.doc", f"task.dataset=notes.doc: .doc is none of {KINDS}"),
        ("bare", f"task.dataset=bare: the folder has no file; {ONE_KIND}"),
        ("mixed", f"task.dataset=mixed: the folder has files of several kinds; {ONE_KIND}"),
    ],
)
def test_a_dataset_that_is_not_there_is_named_with_the_other_mistakes(
    refused: Refused, dataset: str, says: str
) -> None:
    write({"notes.doc": "a", "bare/README.md": "a", "mixed/train.jsonl": ROWS, "mixed/test.csv": "text\na\n"})
    assert refused(*NEW, f"--task.dataset={dataset}", "--seed=-1") == [
        "--seed=-1: must be greater than or equal to 0",
        says,
    ]


def test_several_mistakes_at_once(refused: Refused) -> None:
    assert refused(*NEW, write(), "--task.text_column=text", "--task.prompt_column=label") == [
        "task.prompt_column and task.completion_column: set both",
        "task.text_column, task.prompt_column and task.messages_column: the rows are of one kind, set one",
    ]
    assert refused(*NEW, write(), *architecture(hiden_size=32, num_layers=2)) == [
        "task.architecture.hiden_size: llama has no such field, did you mean hidden_size?",
        "task.architecture.num_layers: llama has no such field, did you mean num_hidden_layers?",
    ]


# ------------------------------------------------------------------------------------------------ files and folders
@pytest.mark.parametrize(
    ("name", "content"), [("a.csv", "text\n"), ("a.tsv", "text\n"), ("a.jsonl", "\n"), ("a.json", "[]")]
)
def test_a_file_without_a_row(refused: Refused, name: str, content: str) -> None:
    (says,) = refused(*NEW, write({name: content}))
    assert says.startswith(f"task.dataset={name}: ")
    assert re.search("no rows?|empty", says)


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
    (says,) = refused(*NEW, TEXT, write({name: content}))
    assert says.startswith(f"task.dataset={name}: ")
    assert reason.lower() in says.lower()


def test_a_folder_with_names_in_capitals() -> None:
    """Tried without: "has no file"."""
    data = write(
        {"data/Train.CSV": "text,label\n" + "one,even\ntwo,odd\n" * 9, "data/TEST.csv": "text,label\none,even\n"}
    )
    _, train, evaluation, _ = built(*BERT, data)
    assert (len(train), len(evaluation)) == (18, 1)
    assert len(built(*BERT, "--task.dataset=data/Train.CSV")[1]) == 16


def test_a_file_name_with_what_globs_are_made_of() -> None:
    _, train, evaluation, _ = built(*NEW, write({"a[1].jsonl": ROWS}), TEXT, "--task.packing=false")
    assert len(train) + len(evaluation) == 20


@pytest.mark.parametrize(
    "content",
    ["\ufefftext,label\n" + "one,even\n" * 9, ",text\n" + "0,one\n" * 9, f"text,label\none,{'x' * 200_000}\n"],
    ids=["Excel's, with a byte order mark", "pandas', with its index", "with a long text"],
)
def test_a_csv_as_other_programs_write_it(content: str) -> None:
    content += content.splitlines(keepends=True)[-1]
    more = TEXT, "--task.packing=false", "--task.eval_fraction=0.5"
    task, train, *_ = built(*NEW, write({"a.csv": content}), *more)
    (chunk,) = train.__getitems__([0])[0]
    assert task._tokenizer.decode(chunk["input_ids"], skip_special_tokens=True) == "one"


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
    (says,) = refused(*NEW, write({name: content}))
    assert says.startswith(f"task.dataset={name}: row 1 has 3 fields, and the header 2: mend such rows; ")
    suffix, header = Path(name).suffix, content.splitlines()[0]
    (says,) = refused(*NEW, write({f"data/train-1{suffix}": f"{header}\n{header}\n", f"data/train-2{suffix}": content}))
    assert says.startswith(f"task.dataset=data/train-2{suffix}: row 1 has 3 fields")


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
    arguments = (*NEW, write({"a.jsonl": rows}), "--task.packing=false")
    assert refused(*arguments) == [
        f"task.dataset=a.jsonl: 2 of 20 rows in the data to train on have no usable text (row 3, 7; the first is 1): "
        f"in row 3 text is {is_what}; mend them, or leave them out with --task.bad_rows=skip"
    ]
    task, train, evaluation, _ = built(*arguments, SKIP)
    assert len(train) + len(evaluation) == 18
    assert task.skipped_rows == {"train": 2, "eval": 0}


def test_bad_rows_of_the_evaluation_split_are_told_from_those_to_train_on(refused: Refused) -> None:
    bad = {"text": " ", "label": "odd"}
    arguments = (*NEW, write({"data/train.jsonl": ROWS, "data/test.jsonl": [*ROWS[:2], bad]}))
    (says,) = refused(*arguments)
    assert "1 of 3 rows in the data to evaluate on have no usable text (row 3; the first is 1)" in says
    assert built(*arguments, SKIP)[0].skipped_rows == {"train": 0, "eval": 1}


@pytest.mark.parametrize(
    ("label", "is_what"),
    [
        (None, "empty"), ("", "empty"), (2.5, "2.5, neither a name nor a whole number"), (["x"], "list, not text"),
        ({"a": 1}, "dict, not text"),
    ],
)  # fmt: skip
def test_labels_that_are_missing_or_neither_text_nor_number(refused: Refused, label: object, is_what: str) -> None:
    arguments = (*BERT, write({"a.jsonl": [*ROWS, {"text": "a", "label": label}]}))
    assert refused(*arguments) == [
        f"task.dataset=a.jsonl: 1 of 21 rows in the data to train on have no usable text or label (row 21; the first "
        f"is 1): in row 21 label is {is_what}; mend them, or leave them out with --task.bad_rows=skip"
    ]
    task, train, evaluation, _ = built(*arguments, SKIP)
    assert (len(train) + len(evaluation), task.skipped_rows["train"]) == (20, 1)


USER, ASSISTANT = CHAT
PARTS = [{"type": "text", "text": "hi"}, {"type": "text", "text": " there"}]
BAD_CALL = {"function": {"name": "f", "arguments": "{"}}


@pytest.mark.parametrize(
    ("chat", "why"),
    [
        (None, "is not a list of messages"),
        ("hi", "is not a list of messages"),
        ([], "has no message"),
        (["hi"], "has a message 1 that is str, not role and content"),
        ([{"role": "user"}], "has a message 1 without content (its role is user)"),
        ([USER, {"role": "assistant", "content": None}], "has a message 2 without content (its role is assistant)"),
        ([{"role": "user", "content": 3}], "has a message 1 with content that is not text, but int"),
        (
            [{"role": "user", "content": [*PARTS, {"type": "image", "url": "a.png"}]}],
            "has a message 1 with content that is not text, but image",
        ),
        (
            [USER, {"speaker": "me", "text": "ho"}],
            "has a message 2 with neither role and content nor from and value, but speaker, text",
        ),
        ([{"from": "narrator", "value": "hi"}], "has a message 1 from 'narrator', which is none of human, user, gpt, "),
        ([{"from": "human"}], "has a message 1 without content (its role is user)"),
        ([USER, ASSISTANT | {"weight": 2}], "has a message 2 of weight 2, which can be 0, not to be learnt, or 1"),
        ([USER, ASSISTANT | {"function_call": {"name": "f"}}], "has a message 2 with a function_call: write it as to"),
        ([{"role": "assistant", "tool_calls": [{"id": "1"}]}], "has a message 1 with a tool call that has no function"),
        (
            [{"role": "assistant", "tool_calls": [BAD_CALL]}],
            "has a message 1 with a tool call whose arguments are not JSON",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_chats_that_are_none_and_what_they_lack(refused: Refused, chat: object, why: str) -> None:
    (says,) = refused(*NEW, write({"a.jsonl": [{"messages": CHAT}] * 19 + [{"messages": chat}]}))
    assert "1 of 20 rows in the data to train on have no usable messages (row 20; the first is 1): " in says
    assert f"in row 20 messages {why}" in says


# ---------------------------------------------------------------------------------------------------------- labels
@pytest.mark.parametrize(
    ("labels", "names"),
    [
        ([0.0, 1.0, 2.0] * 7, ["0", "1", "2"]),
        ([0, 1, None] * 7, ["0", "1"]),
        ([True, False] * 10, ["False", "True"]),
        (["pos", "neg", "pos ", "\tneg"] * 5, ["neg", "pos"]),
        (["1.0", "1.5"] * 10, ["1.0", "1.5"]),
        (["--1", "1"] * 10, ["--1", "1"]),
    ],
    ids=[
        "whole floats", "one missing among whole numbers", "true and false", "white space around names", "versions",
        "names that look like numbers",
    ],
)  # fmt: skip
def test_labels_as_files_have_them(labels: list[Any], names: list[str]) -> None:
    """Tried without: all rows are refused, `pos` and `pos ` are two classes."""
    lines = [f"line {i}" for i in range(len(labels))]
    rows = [{"text": line, "label": label} for line, label in zip(lines, labels, strict=True)]
    task, *_, model = built(*BERT, write({"a.jsonl": rows}), SKIP)
    assert task.data_state()["labels"] == sorted(model.config.label2id) == names
    if None not in labels:
        table = "text,label\n" + "".join(f"{line},{label}\n" for line, label in zip(lines, labels, strict=True))
        assert built(*BERT, write({"a.csv": table}), SKIP)[0].data_state()["labels"] == names


def test_labels_of_which_some_are_whole() -> None:
    """The evaluation data may have no other than these. Tried with a look at each part alone: "2 is in the data to
    evaluate on, but not in the data to train on"."""
    whole = "two,2.0\n" * 5
    data = write({"data/train.csv": "text,label\n" + "one,1.5\ntwo,2.0\n" * 5, "data/test.csv": f"text,label\n{whole}"})
    assert built(*BERT, data)[0].data_state()["labels"] == ["1.5", "2.0"]


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
def test_labels_of_every_type_that_parquet_has(refused: Refused, kind: str) -> None:
    column, expected = COLUMNS[kind]
    pd.DataFrame({"text": [f"line {i}" for i in range(20)], "label": column}).to_parquet("a.parquet")
    arguments = (*BERT, "--task.dataset=a.parquet")
    if isinstance(expected, list):
        assert built(*arguments)[0].data_state()["labels"] == expected
    else:
        (says,) = refused(*arguments)
        assert "20 of 20 rows in the data to train on have no usable text or label (row 1, 2, 3, 4, 5, …; " in says
        assert f"in row 1 label is {expected}; mend them" in says


# ------------------------------------------------------------------------------------------------------ tokenizers
def test_a_sequence_length_beyond_the_tokenizers(refused: Refused, llama: Path) -> None:
    set_in(llama / "tokenizer_config.json", model_max_length=8)
    assert refused(*LM, "--task.model=llama", write()) == [TOO_LONG]


def test_a_tokenizer_without_a_pad_token_and_the_advice_that_the_line_gives(refused: Refused, bert: Path) -> None:
    tokenizer = byte_tokenizer()
    tokenizer.pad_token = None
    tokenizer.save_pretrained(bert)
    arguments = (*CLASSIFIER, "--task.model=bert", write())
    (says,) = refused(*arguments)
    assert says.startswith("task.model=bert: its tokenizer has no pad token; set task.pad_token, such as --task.pad")
    assert refused(*arguments, "--task.pad_token=<mask>") == ["task.pad_token=<mask>: the tokenizer has no such token"]
    advice = says.split("such as ")[1].replace("'", "")  # quoted for the shell
    task, train, _, model = built(*arguments, advice)
    assert torch.isfinite(task.loss(model, task.collate([train[i] for i in range(4)]))[0])


def test_a_causal_language_model_needs_no_pad_token(llama: Path) -> None:
    tokenizer = byte_tokenizer()
    tokenizer.pad_token = None
    tokenizer.save_pretrained(llama)
    task, train, _, model = built(*LM, "--task.model=llama", write())
    assert torch.isfinite(task.loss(model, task.collate(train.__getitems__([0, 1])))[0])


def test_a_tokenizer_without_a_chat_template_and_the_advice_that_the_line_gives(refused: Refused, llama: Path) -> None:
    (llama / "chat_template.jinja").unlink()
    arguments = (*LM, "--task.model=llama", write({"a.jsonl": [{"messages": CHAT}] * 20}))
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
    chats = write({"a.jsonl": [{"messages": CHAT}] * 20})
    (says,) = refused(*NEW, chats, "--task.chat_template=a.jinja")
    assert "chat template" in says or "chat_template" in says
    assert reason in says


def test_a_tokenizer_of_another_model_than_the_classifiers(refused: Refused, bert: Path) -> None:
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens(["line"])  # index 258: out of range in the embeddings, once training has begun
    tokenizer.save_pretrained(bert)
    (says,) = refused(*CLASSIFIER, "--task.model=bert", write())
    assert "the tokenizer has 259 tokens, but the model knows 258" in says


# ----------------------------------------------------------------------------------------------------- checkpoints
def shortened(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])


def without_head(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    del weights["lm_head.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def without_tokenizer(folder: Path) -> None:
    for file in folder.glob("tokenizer*"):
        file.unlink()


WEIGHTS: dict[str, Callable[[Path], object]] = {
    "cut off": shortened,
    "empty": lambda folder: (folder / "model.safetensors").write_bytes(b""),
    "garbage": lambda folder: (folder / "model.safetensors").write_bytes(b"?" * 999),
    "gone": lambda folder: (folder / "model.safetensors").unlink(),
    "garbage of torch.save": lambda folder: (
        (folder / "model.safetensors").rename(folder / "pytorch_model.bin").write_bytes(b"not a checkpoint")
    ),
}
CONFIGS = ("{", "[]", "{}", '{"model_type": "lama"}', '{"model_type": "bert", "hidden_size": "wide"}')


def write_config(content: str, folder: Path) -> None:
    (folder / "config.json").write_text(content)


MAMBA = '{"model_type": "mamba", "hidden_size": 32, "num_hidden_layers": 1, "vocab_size": 258}'
CANNOT = "task.model={}: cannot be loaded, ***"
NOT_ITS = "task.model={}: not a checkpoint of {}, {} of its weights are missing or of another shape ({}"
DAMAGED: dict[str, tuple[str, Callable[[Path], object], str]] = {
    **{f"{name} of {kind}": (kind, damage, CANNOT.format(kind)) for name, damage in WEIGHTS.items()
       for kind in ("bert", "llama")},
    **{f"config {content}": ("bert", partial(write_config, content),
                             CANNOT.format("bert")) for content in CONFIGS},
    "tokenizer {": ("bert", lambda folder: (folder / "tokenizer.json").write_text("{"), CANNOT.format("bert")),
    # transformers makes a BertTokenizer of nothing, with five tokens: every word is [UNK] to it
    "no tokenizer of bert": ("bert", without_tokenizer, "task.model=bert: ***tokenizer***"),
    "no tokenizer of llama": ("llama", without_tokenizer, "task.model=llama: ***tokenizer***"),
    "other shapes": (
        "bert", lambda folder: set_in(folder / "config.json", intermediate_size=128),
        NOT_ITS.format("bert", "BertForSequenceClassification", 6, "bert.encoder.layer.***"),
    ),
    "more layers": (
        "bert", lambda folder: set_in(folder / "config.json", num_hidden_layers=3),
        NOT_ITS.format("bert", "BertForSequenceClassification", 16, "bert.encoder.layer.***"),
    ),
    "no output layer": ("llama", without_head, NOT_ITS.format("llama", "LlamaForCausalLM", 1, "lm_head.weight)")),
    "no classifier": (
        "bert", lambda folder: (folder / "config.json").write_text(MAMBA),
        "task.model=bert: transformers has no text classifier of kind mamba",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", DAMAGED)
def test_a_model_folder_that_is_damaged(refused: Refused, models: Path, case: str) -> None:
    kind, damage, expected = DAMAGED[case]
    damage(Path(shutil.copytree(models / kind, kind)))
    arguments = LM if kind == "llama" else CLASSIFIER
    (says,) = refused(*arguments, f"--task.model={kind}", write())
    assert fits(says, expected)


@pytest.mark.parametrize("kind", ["known", "unknown"])
def test_code_that_comes_with_a_model_is_never_run(refused: Refused, bert: Path, kind: str) -> None:
    for name in ("configuration", "modeling", "tokenization"):
        (bert / f"{name}.py").write_text("open('it_ran', 'w')\nclass Mine: pass\n")
    code = {"AutoConfig": "configuration.Mine", "AutoModelForSequenceClassification": "modeling.Mine"}
    set_in(bert / "config.json", auto_map=code, **({"model_type": "mine"} if kind == "unknown" else {}))
    set_in(bert / "tokenizer_config.json", auto_map={"AutoTokenizer": [None, "tokenization.Mine"]})
    arguments = (*CLASSIFIER, "--task.model=bert", write())
    if kind == "unknown":
        assert refused(*arguments) == [
            "task.model=bert: wants to run code of its own, which is not allowed here; take one that transformers has"
        ]
    else:  # transformers' own code for this model_type takes its place
        *_, model = built(*arguments)
        assert type(model).__module__ == "transformers.models.bert.modeling_bert"
    assert not Path("it_ran").exists()


# ---------------------------------------------------------------------------------------------------- architecture
MIXTURE = (*LM, *architecture(**{**tiny.LLAMA, "model_type": "mixtral", "num_local_experts": 4}))
NOT_ADDED = (
    "the auxiliary loss of a mixture of experts is not added here: it is one of the whole batch's routing, and would "
    "be another on each number of processes"
)


@pytest.mark.parametrize("field", ["output_router_logits=True", "router_aux_loss_coef=50"])
def test_the_auxiliary_loss_of_a_mixture_of_experts(refused: Refused, field: str) -> None:
    """Tried without: it is dropped, silently."""
    arguments = (*MIXTURE, write())
    assert refused(*arguments, f"--task.architecture.{field}") == [
        f"task.architecture.{field}: {NOT_ADDED}; leave it out to train without"
    ]
    off = "output_router_logits=False" if field.endswith("True") else "router_aux_loss_coef=0.0"
    *_, model = built(*arguments, f"--task.architecture.{off}")
    model.hf.save_pretrained("mixture")
    byte_tokenizer().save_pretrained("mixture")
    arguments = (*LM, write(), "--task.model=mixture")
    built(*arguments)
    set_in(Path("mixture/config.json"), output_router_logits=True)
    assert refused(*arguments) == [
        f"task.model=mixture: its config asks for it by output_router_logits, but {NOT_ADDED}; set that to false in "
        f"its config.json to train without"
    ]


@pytest.mark.parametrize(("value", "expected"), [("20000.0", 20000.0), ("1e4", 1e4), ("'1'x", "'1'x"), ('"x"', "x")])
def test_fields_within_fields_are_numbers_too(value: str, expected: object) -> None:
    task: Any = load_config([*NEW, write(), f"--task.architecture.rope_parameters.rope_theta={value}"]).task
    assert task.architecture["rope_parameters"] == {"rope_theta": expected}


@pytest.mark.parametrize("kind", ["opt", "bloom"])
def test_a_model_in_which_packed_documents_see_each_other(refused: Refused, kind: str) -> None:
    arguments = (*LM, *architecture(model_type=kind, hidden_size=32, **SMALL[kind]), write())
    assert refused(*arguments) == [f"{kind} lets packed documents see each other: set --task.packing=false"]
    built(*arguments, "--task.packing=false")


# -------------------------------------------------------------------------------------------- through the launcher
@pytest.mark.parametrize("bad", ["data", "model"])
@pytest.mark.parametrize(("config", "processes"), [("cpu", None), ("ddp", 2), ("fsdp", 2)])
def test_one_line_and_exit_code_2_under_every_strategy(
    launch: Launch, llama: Path, tmp_path: Path, config: str, processes: int | None, bad: str
) -> None:
    """Data fail in the first process while the others wait for it; a model in all of them at once."""
    write({"a.jsonl": [*ROWS, {"text": None}] if bad == "data" else ROWS})
    data = f"{tmp_path}/a.jsonl"
    if bad == "data":
        arguments = NEW
        says = f"task.dataset={data}: 1 of 21 rows in the data to train on have no usable text (row 21; "
    else:
        shortened(llama)
        arguments = (*LM, f"--task.model={tmp_path}/llama")
        says = f"task.model={tmp_path}/llama: cannot be loaded, "
    run = launch(
        config, *arguments, f"--task.dataset={data}", TEXT, processes=processes, real=True, HF_HOME=f"{tmp_path}/home"
    )
    (message,) = run.messages
    assert message.startswith(f"train.py: {says}")
    assert 'train.py", line' not in run.stderr, "a traceback"
    # The launcher's own is 1: in its words, what ended it.
    ends = re.findall(r"returned non-zero exit status (\d+)|Root Cause[^=]*?exitcode +: (-?\d+)", run.stderr)
    assert ["".join(end) for end in ends] == ["2"]
    assert not run.folder.exists()
