"""Text, models and settings that do not fit: one clear line and exit code 2, never a traceback or a silent mistake."""

import datetime
import json
import re
import shutil
from decimal import Decimal
from pathlib import Path
from typing import Any

import huggingface_hub
import numpy as np
import pandas as pd
import pytest
import torch
from safetensors.torch import load, save

from src.checkpoint.folder import run_settings
from src.tasks.text.byte_tokenizer import byte_tokenizer
from tests.launching import Launch
from tests.text import tiny
from tests.text.ending import build, end_of

Files = dict[str, Any]


def architecture(**fields: object) -> tuple[str, ...]:
    return tuple(f"architecture.{name}={value}" for name, value in fields.items())


LM = ("name=causal_lm", "sequence_length=16")
NEW = (*LM, *architecture(model_type="llama", **tiny.LLAMA))
LLAMA = (*LM, "model=llama")
LORA = (*LLAMA, "lora.r=2")
CLASSIFIER = ("name=text_classification", "sequence_length=16")
BERT = (*CLASSIFIER, "model=bert")
TEXT, SKIP = "text_column=text", "bad_rows=skip"
ROWS: list[dict[str, Any]] = [{"text": f"line {i}", "label": ("even", "odd")[i % 2]} for i in range(20)]
CHAT = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]
CHATS = [{"messages": CHAT}] * 19


@pytest.fixture(autouse=True)
def _beside_the_models(tmp_path: Path, models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies of them, to damage: `llama` and `bert`."""
    monkeypatch.chdir(shutil.copytree(models, tmp_path, dirs_exist_ok=True))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)


def command(*arguments: str) -> list[str]:
    """The arguments as on the command line; those of the task are without the --task. that they begin with."""
    return [argument if argument.startswith("--") else f"--task.{argument}" for argument in arguments]


def built(*arguments: str) -> tuple[Any, Any, Any, Any]:
    return build(command(*arguments))


def refused(*arguments: str) -> list[str]:
    """The lines that train.py ends with before it trains; that its exit code is 2 is checked."""
    code, lines = end_of(command(*arguments))
    assert code == 2
    return lines


def write(files: Files) -> str:
    """The argument that names the first of them as the dataset, or ROWS where all belong to models.

    Args:
        files: contents by name. A list becomes lines of JSON; a mapping changes fields of the JSON that is there, a
            function the bytes; None deletes.
    """
    if {name.partition("/")[0] for name in files} <= {"bert", "llama"}:
        files = {"a.jsonl": ROWS, **files}
    for name, content in files.items():
        file = Path(name)
        file.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(content, list):
            content = "".join(json.dumps(row) + "\n" for row in content)
        if isinstance(content, dict):
            content = json.dumps(json.loads(file.read_text()) | content)
        if callable(content):
            content = content(file.read_bytes())
        if content is None:
            file.unlink()
        else:
            file.write_bytes(content if isinstance(content, bytes) else content.encode())
    return f"dataset={next(iter(files)).partition('/')[0]}"


def labelled(labels: Any) -> pd.DataFrame:
    return pd.DataFrame({"text": [f"line {i}" for i in range(len(labels))], "label": labels})


def fits(says: str, expected: str) -> bool:
    """Whether it is as expected, where *** stands for anything."""
    return re.fullmatch(".*".join(map(re.escape, expected.split("***"))), says) is not None


# ---------------------------------------------------------------------------------------- refused, *** is anything
TRAIN: Files = {"data/train.jsonl": ROWS}
TABLE: Files = {"a.csv": "one,even\ntwo,odd\n" * 9}
NUMBERS: Files = {"a.jsonl": [{"text": i} for i in range(20)]}
KINDS = ".txt, .jsonl, .json, .csv, .tsv, .parquet"
ONE_FIELD_MORE = "row 1 has 3 fields, and the header 2: fix such rows; ***"
DATA: list[tuple[Files, tuple[str, ...], str]] = [
    *(({f"a{kind}": ""}, NEW, "the file is empty") for kind in KINDS.split(", ")),
    (TRAIN | {"data/test.jsonl": ""}, NEW, "task.dataset=data/test.jsonl: the file is empty"),
    ({"a.csv": "text\n"}, NEW, "no row in it"),
    ({"a.tsv": "text\n"}, NEW, "no row in it"),
    ({"a.jsonl": "\n"}, NEW, "no row in it"),
    ({"a.json": "[]"}, NEW, "no row in it"),
    (
        TRAIN | {"data/more.jsonl": ROWS}, NEW,
        "the names of other files say their split, but not more.jsonl: rename or move away what is not to be used",
    ),
    ({"a.txt": "a"}, NEW, "task.dataset: the text is too short to keep a part of it for evaluation"),
    ({"a.jsonl": ROWS[:3]}, (*NEW, TEXT), "3 rows are too few to keep 0.1 of them for evaluation (task.eval_fraction)"),
    ({"data/test.jsonl": ROWS}, NEW, "task.train_split=train: data has test"),
    ({"data/test.jsonl": ROWS}, (*NEW, "train_split=test", "eval_split=dev"), "task.eval_split=dev: data has test"),
    # Malformed.
    ({"a.jsonl": '{"text": "a"}\n{"text": \n'}, NEW, "cannot be read, ***JSON parse error: ***"),
    ({"a.json": '[{"text": "a"}'}, NEW, "cannot be read, ***decoding array value***"),
    ({"a.csv": "text,label\na,b\nc,d,e\n"}, NEW, "cannot be read, ***Expected 2 fields in line 3, saw 3***"),
    ({"a.csv": 'text,label\na,b\n"c,d\n'}, NEW, "cannot be read, ***EOF inside string starting at row ***"),
    ({"a.tsv": "text\tlabel\na\tb\tc\td\ne\tf\n"}, NEW, "row 1 has 4 fields, and the header 2: ***"),
    ({"a.parquet": "PAR1, but nothing of the kind"}, NEW, "cannot be read, ***"),
    ({"a.txt": "café".encode("latin-1")}, NEW, "cannot be read, ***utf-8***"),
    ({"a.csv": "text\ncafé\n".encode("latin-1")}, NEW, "cannot be read, ***utf-8***"),
    ({"a.tsv": "text\ncafé\n".encode("latin-1")}, NEW, "cannot be read, ***utf-8***"),
    ({"a.jsonl": '{"text": "café"}\n'.encode("latin-1")}, NEW, "cannot be read, ***utf-8***"),
    # Tried without: the first field is lost, as pandas takes it for an index.
    ({"a.csv": "text,label\none,even,1\ntwo,odd,2\n"}, NEW, ONE_FIELD_MORE),
    ({"a.csv": "text,label\n\none,even,\ntwo,odd\n"}, NEW, ONE_FIELD_MORE),
    ({"a.tsv": "text\tlabel\none\teven\t1\n"}, NEW, ONE_FIELD_MORE),
    (
        {"data/train-1.csv": "text,label\none,even\n", "data/train-2.csv": "text,label\none,even,1\n"}, NEW,
        f"task.dataset=data/train-2.csv: {ONE_FIELD_MORE}",
    ),
    # Columns.
    (TRAIN | {"data/test.jsonl": [{"txt": "a"}]}, (*NEW, TEXT), "no column ***txt***"),
    (
        {"a.jsonl": [{"a": "x", "b": "y"}] * 9}, NEW,
        "which of the dataset's columns a, b to train on? Set --task.text_column, or --task.prompt_column and "
        "--task.completion_column, or --task.messages_column",
    ),
    (TABLE, (*NEW, "column_names=[text]"), "task.column_names has 1 names, but a.csv has 2 columns"),
    (TABLE, (*NEW, "column_names=[text, label, x]"), "task.column_names has 3 names, but a.csv has 2 columns"),
    ({"a.csv": "text,text\none,two\n" * 9}, NEW, "two of its columns have the same name"),
    # Such as Excel writes them in much of Europe. Tried without: one column is learnt, numbers and all.
    ({"a.csv": "id;text\n0;one\n" * 9}, NEW, "its only column would be 'id;text': ***"),
    ({"a.csv": "id\ttext\n0\tone\n" * 9}, NEW, "its only column would be 'id\\ttext': ***"),
    ({"a.tsv": "id;text\n0;one\n" * 9}, NEW, "its only column would be 'id;text': ***"),
    # Rows.
    (
        {"a.jsonl": [{"other": "x"}, {"text": "y"}] * 9}, (*NEW, TEXT),
        "9 of 18 rows in the data to train on have no usable text (row 1, 3, 5, 7, 9, …; the first is 1)***",
    ),
    (  # empty cells and short lines, but not what pandas takes for missing
        {"a.csv": "label,text\nx,one\nx,\nx\n" + "x,null\nx,NA\nx,2\n" * 3}, NEW,
        "2 of 12 rows in the data to train on have no usable text (row 2, 3; the first is 1)***",
    ),
    (
        NUMBERS, NEW,
        "20 of 20 rows in the data to train on have no usable text (row 1, 2, 3, 4, 5, …; the first is 1)***",
    ),
    (NUMBERS, (*NEW, SKIP), "no usable row in the data to train on: in row 1 text is int, not text"),
    *(
        (
            {"a.jsonl": rows}, NEW,
            "the training data has nothing to predict: no row has a completion, or a turn of the assistant, "
            "within sequence_length=16",
        )
        for rows in (
            [{"prompt": "a prompt that fills the sequence", "completion": "x"}] * 20, [{"messages": CHAT[:1]}] * 20,
        )
    ),
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
NO_LABELS: list[tuple[Any, str]] = [
    (pd.to_datetime(["2020-01-01", "2020-01-02"] * 10), "datetime, not text"),
    ([datetime.date(2020, 1, 1)] * 20, "date, not text"),
    ([b"a", b"b"] * 10, "bytes, not text"),
    ([["a"], ["b"]] * 10, "list, not text"),
    ([None] * 20, "empty"),
    (pd.to_timedelta([1, 2] * 10), "Timedelta, not text"),
]
NO_USABLE_LABEL = "20 of 20 rows in the data to train on have no usable text or label (row 1, 2, 3, 4, 5, …; ***"
NO_COLUMN = "task.dataset=a.jsonl: no column {} in the data to train on; its columns are text, label"
TOO_LONG = "task.sequence_length=16: the model sees at most 8 tokens"
ONE_OF_TWO = "task.model or task.architecture: set one, to start from that model, or to train that from scratch"
UNKNOWN = "transformers has no such causal language model"
REFUSES = "task.architecture: llama refuses it, ***"
OLMOE = tiny.LLAMA | {"model_type": "olmoe", "num_experts": 4, "num_experts_per_tok": 8}
ENCODER = {"model_type": "bert", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
SETTINGS: list[tuple[tuple[str, ...], str]] = [
    ((*NEW, "column_names=[a]"), "task.column_names is for .csv and .tsv files, and a.jsonl is neither"),
    ((*NEW, "dataset_config=en"), "task.dataset_config=en: a.jsonl is not on the Hub, and has none"),
    ((*NEW, "text_column=txt"), NO_COLUMN.format("txt")),
    ((*NEW, "messages_column=chat"), NO_COLUMN.format("chat")),
    ((*NEW, "prompt_column=q", "completion_column=a"), NO_COLUMN.format("q nor a")),
    ((*BERT, "text_column=txt"), NO_COLUMN.format("txt")),
    ((*BERT, "text_pair_column=txt"), NO_COLUMN.format("txt")),
    ((*BERT, "label_column=txt"), NO_COLUMN.format("txt")),
    ((*BERT, "text_pair_column=text"), "***task.text_pair_column***"),
    (
        (*NEW, TEXT, "prompt_column=label"),
        "task.prompt_column and task.completion_column: set both\n"
        "task.text_column, task.prompt_column and task.messages_column: the rows are of one kind, set one",
    ),
    # Sequence lengths and tokenizers.
    ((*LLAMA, "sequence_length=257"), "task.sequence_length=257: the model sees at most 256 tokens"),
    ((*BERT, "sequence_length=257"), "task.sequence_length=257: the model sees at most 256 tokens"),
    ((*NEW, *architecture(max_position_embeddings=8)), TOO_LONG),
    ((*LM, *architecture(model_type="gpt2", n_embd=32, n_head=2, n_positions=8)), TOO_LONG),
    ((*NEW, "tokenizer=./nowhere"), "task.tokenizer=./nowhere: ***"),
    (
        (*NEW, *architecture(vocab_size=100)),
        "the tokenizer has 258 tokens, but the model knows 100 (task.tokenizer, task.architecture.vocab_size)",
    ),
    # A template in place of its file's name.
    ((*NEW, "chat_template=" + "{{ a }}\n" * 99), "task.chat_template: cannot be read, ***long***"),
    ((*NEW, "chat_template=llama"), "task.chat_template: cannot be read, ***Is a directory***"),
    # Models and architectures.
    (CLASSIFIER, "task.model is not set: name a model on the Hub or a local folder"),
    ((*CLASSIFIER, "model=./nowhere/at/all"), "task.model=nowhere/at/all: no such folder"),
    ((*CLASSIFIER, "model=."), "task.model=.: the folder has no config.json, so it is not a transformers model"),
    ((*LM, *architecture(model_type="lama")), f"task.architecture.model_type=lama: {UNKNOWN}, did you mean llama?"),
    ((*LM, *architecture(model_type="t5")), f"task.architecture.model_type=t5: {UNKNOWN}"),
    ((*LM, *architecture(model_type="None of these")), f"task.architecture.model_type=None of these: {UNKNOWN}"),
    (
        (*NEW, *architecture(hiden_size=32, num_layers=2)),
        "task.architecture.hiden_size: llama has no such field, did you mean hidden_size?\n"
        "task.architecture.num_layers: llama has no such field, did you mean num_hidden_layers?",
    ),
    (LM, ONE_OF_TWO),
    ((*NEW, "model=llama"), ONE_OF_TWO),
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
    # It can be built, but does not run; it would see the tokens that it has to predict.
    ((*LM, *architecture(**OLMOE)), "OlmoeForCausalLM fails on a few tokens: ***"),
    ((*LM, *architecture(**ENCODER, num_attention_heads=2), "packing=false"), "***bert***"),
    # LoRA. Without a rank, its other settings would adapt nothing.
    ((*LORA, "lora.target_modules=[q_prj]"), "task.lora.target_modules: *** q_prj***"),
    ((*LORA, "lora.target_modules=[q_proj, q_prj]"), "task.lora.target_modules: *** q_prj***"),
    ((*LORA, "lora.target_modules=[input_layernorm]"), "task.lora.target_modules: Target module LlamaRMSNorm***"),
    ((*NEW, "lora.r=2"), "task.lora adapts an existing model: set task.model, not task.architecture"),
    ((*LLAMA, "lora.merge=true"), "***task.lora.r***"),
    ((*LLAMA, "lora.target_modules=[q_proj]"), "***task.lora.r***"),
    ((*LLAMA, "lora.alpha=32"), "***task.lora.r***"),
]  # fmt: skip
USER, ASSISTANT = CHAT
NO_TEXT = [{"type": "text", "text": "hi"}, {"type": "image", "url": "a.png"}]
CALLS: list[dict[str, Any]] = [{"id": "1"}, {"function": {"name": "f", "arguments": "{"}}]
BAD_CHATS: list[tuple[Any, str]] = [
    (None, "is not a list of messages"),
    ("hi", "is not a list of messages"),
    ([], "is not a list of messages"),
    (["hi"], "has a message 1 with neither role and content nor from and value"),
    ([USER, {"speaker": "me", "text": "ho"}], "has a message 2 with neither role and content nor from and value"),
    ([{"role": "user"}], "has a message 1 whose content is not text (its role is user)"),
    ([USER, {"role": "assistant", "content": None}], "has a message 2 whose content is not text"),
    ([{"role": "user", "content": 3}], "has a message 1 whose content is not text"),
    ([{"role": "user", "content": NO_TEXT}], "has a message 1 whose content is not text"),
    ([USER, ASSISTANT | {"weight": 2}], "has a message 2 of weight 2, which must be 0 (masked out) or 1"),
    ([{"from": "human"}], "has a message 1 whose content is not text"),
    ([{"role": "assistant", "tool_calls": CALLS[:1]}], "has a message 1 with a tool call that has no function"),
    ([{"role": "assistant", "tool_calls": CALLS[1:]}], "has a message 1 with a tool call that has no function"),
]
NO_USABLE = "1 of 20 rows in the data to train on have no usable messages (row 20; the first is 1): in row 20 messages "
BAD_TEMPLATES = {
    b"{% for %}": "Expected an expression",
    b"{{ nobody.knows }}": "'nobody' is undefined",
    b"{{ raise_exception('Roles must\nalternate') }}": "Roles must alternate",
    b"{{ 1 + messages[0].role }}": "",
    b"{{ 'caf\xe9' }}": "",
}


def without_head(weights: bytes) -> bytes:
    tensors = load(weights)
    del tensors["lm_head.weight"]
    return save(tensors, {"format": "pt"})


CANNOT = "cannot be loaded, ***"
DAMAGED: list[tuple[Files, str]] = [
    ({"model.safetensors": lambda weights: weights[:-1000]}, CANNOT),
    ({"model.safetensors": ""}, CANNOT),
    ({"model.safetensors": "?" * 999}, CANNOT),
    ({"model.safetensors": None}, CANNOT),
    ({"model.safetensors": None, "pytorch_model.bin": "not a checkpoint"}, CANNOT),
    # transformers makes a BertTokenizer of nothing, with five tokens: every word is [UNK] to it
    ({"tokenizer.json": None, "tokenizer_config.json": None}, "***tokenizer***"),
]
NOT_ITS = "not a checkpoint of {}, {} of its weights are missing or of another shape ({}"
MAMBA = '{"model_type": "mamba", "hidden_size": 32, "num_hidden_layers": 1, "vocab_size": 258}'
LAYERS = "bert.encoder.layer.***"
DAMAGED_BERT: list[tuple[Files, str]] = [
    ({"config.json": "{"}, CANNOT),
    ({"config.json": "[]"}, CANNOT),
    ({"config.json": "{}"}, CANNOT),
    ({"config.json": '{"model_type": "lama"}'}, CANNOT),
    ({"config.json": '{"model_type": "bert", "hidden_size": "wide"}'}, CANNOT),
    ({"config.json": MAMBA}, "transformers has no text classifier of kind mamba"),
    ({"config.json": {"intermediate_size": 128}}, NOT_ITS.format("BertForSequenceClassification", 6, LAYERS)),
    ({"config.json": {"num_hidden_layers": 3}}, NOT_ITS.format("BertForSequenceClassification", 16, LAYERS)),
    ({"tokenizer.json": "{"}, CANNOT),
]
DAMAGED_LLAMA: list[tuple[Files, str]] = [
    ({"model.safetensors": without_head}, NOT_ITS.format("LlamaForCausalLM", 1, "lm_head.weight)")),
]


@pytest.mark.parametrize(("files", "arguments", "expected"), [
    *DATA,
    *(
        ({"a.parquet": labelled(column).to_parquet()}, BERT, f"{NO_USABLE_LABEL}in row 1 label is {says}; fix them***")
        for column, says in NO_LABELS
    ),
    *(({}, arguments, says) for arguments, says in SETTINGS),
    *(({"a.jsonl": [*CHATS, {"messages": chat}]}, NEW, f"{NO_USABLE}{why}***") for chat, why in BAD_CHATS),
    *(
        ({"a.jsonl": CHATS, "a.jinja": template}, (*NEW, "chat_template=a.jinja"), f"***chat***template***{why}***")
        for template, why in BAD_TEMPLATES.items()
    ),
    *(
        ({f"bert/{name}": content for name, content in files.items()}, BERT, f"task.model=bert: {says}")
        for files, says in [*DAMAGED, *DAMAGED_BERT]
    ),
    *(
        ({f"llama/{name}": content for name, content in files.items()}, LLAMA, f"task.model=llama: {says}")
        for files, says in [*DAMAGED, *DAMAGED_LLAMA]
    ),
    ({"llama/tokenizer_config.json": {"model_max_length": 8}}, LLAMA, TOO_LONG),
])  # fmt: skip
def test_what_does_not_fit_is_one_line(files: Files, arguments: tuple[str, ...], expected: str) -> None:
    dataset = write(files)
    says = "\n".join(refused(*arguments, dataset))
    assert fits(says, expected) or fits(says, f"task.{dataset}: {expected}"), says


@pytest.mark.parametrize(
    ("dataset", "says"),
    [
        ("", "task.dataset is not set: name a dataset on the Hub, a file or a folder"),
        ("nowhere.jsonl", "task.dataset=nowhere.jsonl: no such file or folder"),
        ("no/folder/there", "task.dataset=no/folder/there: no such file or folder"),
        ("notes.doc", f"task.dataset=notes.doc: .doc is none of {KINDS}"),
        ("bare", f"task.dataset=bare: the folder has no file; it must hold files of one of {KINDS}"),
        ("mixed", f"task.dataset=mixed: the folder has files of several kinds; it must hold files of one of {KINDS}"),
    ],
)
def test_a_dataset_that_is_not_there_is_named_with_the_other_mistakes(dataset: str, says: str) -> None:
    write({"notes.doc": "a", "bare/README.md": "a", "mixed/train.jsonl": ROWS, "mixed/test.csv": "text\na\n"})
    too_small = "--seed=-1: must be greater than or equal to 0"
    assert refused(*NEW, f"dataset={dataset}", "--seed=-1") == [too_small, says]


@pytest.mark.parametrize(
    ("column", "value", "is_what"),
    [
        *(("text", value, "empty") for value in (None, "", " \n")),
        ("text", 3, "int, not text"), ("text", 2.5, "float, not text"), ("text", True, "bool, not text"),
        ("text", ["x"], "list, not text"), ("text", {"a": "x"}, "dict, not text"),
        ("text", CHAT, "list, not text"),
        ("label", None, "empty"), ("label", "", "empty"), ("label", 2.5, "2.5, neither a name nor a whole number"),
        ("label", ["x"], "list, not text"), ("label", {"a": 1}, "dict, not text"),
    ],
)  # fmt: skip
def test_bad_values_are_counted_and_named_by_row_or_skipped(column: str, value: object, is_what: str) -> None:
    rows = [row | {column: value} if i in (2, 6) else row for i, row in enumerate(ROWS)]
    columns, kind = ("text", (*NEW, "packing=false")) if column == "text" else ("text or label", BERT)
    arguments = (*kind, write({"a.jsonl": rows}))
    assert refused(*arguments) == [
        f"task.dataset=a.jsonl: 2 of 20 rows in the data to train on have no usable {columns} (row 3, 7; the first is "
        f"1): in row 3 {column} is {is_what}; fix them, or leave them out with --task.bad_rows=skip"
    ]
    task, train, evaluation, _ = built(*arguments, SKIP)
    assert len(train) + len(evaluation) == 18
    assert task._skipped_rows == {"train": 2, "eval": 0}


def test_bad_rows_of_the_evaluation_split_are_told_from_those_to_train_on() -> None:
    arguments = (*NEW, write(TRAIN | {"data/test.jsonl": [*ROWS[:2], {"text": " ", "label": "odd"}]}))
    (says,) = refused(*arguments)
    assert "1 of 3 rows in the data to evaluate on have no usable text (row 3; the first is 1)" in says
    assert built(*arguments, SKIP)[0]._skipped_rows == {"train": 0, "eval": 1}


# ------------------------------------------------------------------------------------------ files that are read
def test_names_of_files_in_capitals_or_with_what_globs_are_made_of() -> None:
    """Tried without: "has no file"."""
    table = "text,label\n" + "one,even\ntwo,odd\n" * 9
    data = write({"data/Train.CSV": table, "data/TEST.csv": "text,label\none,even\n"})
    _, train, evaluation, _ = built(*BERT, data)
    assert (len(train), len(evaluation)) == (18, 1)
    assert len(built(*BERT, "dataset=data/Train.CSV")[1]) == 16
    _, train, evaluation, _ = built(*NEW, write({"a[1].jsonl": ROWS}), TEXT, "packing=false")
    assert len(train) + len(evaluation) == 20


@pytest.mark.parametrize(
    "content",
    ["\ufefftext,label\n" + "one,even\n" * 9, ",text\n" + "0,one\n" * 9, f"text,label\none,{'x' * 200_000}\n"],
    ids=["Excel's, with a byte order mark", "pandas', with its index", "with a long text"],
)
def test_a_csv_as_other_programs_write_it(content: str) -> None:
    content += content.splitlines(keepends=True)[-1]
    more = TEXT, "packing=false", "eval_fraction=0.5"
    task, train, *_ = built(*NEW, write({"a.csv": content}), *more)
    (chunk,) = train.__getitems__([0])[0]
    assert task._tokenizer.decode(chunk["input_ids"], skip_special_tokens=True) == "one"


# ---------------------------------------------------------------------------------------------------------- labels
LABELS: list[tuple[Any, list[str]]] = [
    ([0.0, 1.0, 2.0] * 7, ["0", "1", "2"]),
    ([0, 1, None] * 7, ["0", "1"]),
    ([True, False] * 10, ["False", "True"]),
    (["pos", "neg", "pos ", "\tneg"] * 5, ["neg", "pos"]),
    (["1.0", "1.5"] * 10, ["1.0", "1.5"]),  # such as versions
    (["--1", "1"] * 10, ["--1", "1"]),
]
IN_PARQUET: list[tuple[Any, list[str]]] = [
    (pd.Categorical(["x", "y"] * 10), ["x", "y"]),
    (pd.array([0, 1] * 10, dtype="Int64"), ["0", "1"]),
    (np.array([0, 1] * 10, np.float16), ["0", "1"]),
    (np.array([0, 1] * 10, np.uint8), ["0", "1"]),
    ([Decimal("1.0"), Decimal("2.0")] * 10, ["1", "2"]),
    ([True, False] * 10, ["False", "True"]),
    (pd.array(["a", "b"] * 10, dtype="string"), ["a", "b"]),
]


@pytest.mark.parametrize(("files", "names"), [
    *(({"a.jsonl": labelled(pd.Series(labels, dtype=object)).to_dict("records")}, names) for labels, names in LABELS),
    *(({"a.csv": labelled(labels).to_csv(index=False)}, names) for labels, names in LABELS if None not in labels),
    *(({"a.parquet": labelled(column).to_parquet()}, names) for column, names in IN_PARQUET),
])  # fmt: skip
def test_labels_as_files_have_them(files: Files, names: list[str]) -> None:
    """Tried without: all rows are refused, `pos` and `pos ` are two classes."""
    task, *_, model = built(*BERT, write(files), SKIP)
    assert task.data_state()["labels"] == sorted(model.config.label2id) == names


def test_labels_of_which_some_are_whole() -> None:
    """The evaluation data may have no other than these. Tried with a look at each part alone: "2 is in the data to
    evaluate on, but not in the data to train on"."""
    header, whole = "text,label\n", "two,2.0\n" * 5
    data = write({"data/train.csv": header + "one,1.5\ntwo,2.0\n" * 5, "data/test.csv": header + whole})
    assert built(*BERT, data)[0].data_state()["labels"] == ["1.5", "2.0"]


# ------------------------------------------------------------------------------------------------------ tokenizers
def test_a_tokenizer_without_a_pad_token_and_the_advice_that_the_line_gives() -> None:
    """A causal language model needs none."""
    tokenizer = byte_tokenizer()
    tokenizer.pad_token = None
    tokenizer.save_pretrained("bert")
    tokenizer.save_pretrained("llama")
    data = write({})
    (says,) = refused(*BERT, data)
    assert says.startswith("task.model=bert: its tokenizer has no pad token; set task.pad_token, such as --task.pad")
    assert refused(*BERT, data, "pad_token=<mask>") == ["task.pad_token=<mask>: the tokenizer has no such token"]
    advice = says.split("such as ")[1].replace("'", "")  # quoted for the shell
    for arguments in ((*BERT, advice), (*LLAMA, "packing=false")):
        task, train, _, model = built(*arguments, data)
        assert torch.isfinite(task.loss(model, task.collate(train.__getitems__([0, 1, 2, 3]))))


def test_a_tokenizer_without_a_chat_template_and_the_advice_that_the_line_gives() -> None:
    own = write({"a.jsonl": CHATS, "a.jinja": ""}), "chat_template=a.jinja"  # empty: the tokenizer's own
    built(*LLAMA, *own, "train_on_prompts=true")
    Path("a.jinja").unlink()
    arguments = (*LLAMA, write({"a.jsonl": CHATS, "llama/chat_template.jinja": None}))
    assert refused(*arguments) == [
        "the tokenizer has no chat template: set --task.chat_template to a Jinja file with one"
    ]
    (says,) = refused(*arguments, "chat_template=a.jinja")
    assert re.match("task.chat_template: cannot be read, .*No such file.*a.jinja", says)
    Path("a.jinja").write_bytes(b"caf\xe9")
    assert len(refused(*arguments, "chat_template=a.jinja", "--seed=-1")) == 2  # before the data are read
    Path("a.jinja").write_text("{% for message in messages %}{{ message.content }};{% endfor %}")
    built(*arguments, "chat_template=a.jinja")


# ---------------------------------------------------------------------------------------------------------- models
@pytest.mark.parametrize("is_known", [True, False])
def test_code_that_comes_with_a_model_is_never_run(is_known: bool) -> None:
    auto_map = {"AutoConfig": "configuration.Mine", "AutoModelForSequenceClassification": "modeling.Mine"}
    code = "open('it_ran', 'w')\nclass Mine: pass\n"
    data = write({
        **{f"bert/{name}.py": code for name in ("configuration", "modeling", "tokenization")},
        "bert/config.json": {"auto_map": auto_map, **({} if is_known else {"model_type": "mine"})},
        "bert/tokenizer_config.json": {"auto_map": {"AutoTokenizer": [None, "tokenization.Mine"]}},
    })  # fmt: skip
    if is_known:  # transformers' own code for this model_type takes its place
        *_, model = built(*BERT, data)
        assert type(model).__module__ == "transformers.models.bert.modeling_bert"
    else:
        assert refused(*BERT, data) == [
            "task.model=bert: wants to run code of its own, which is not allowed here; use one that transformers has"
        ]
    assert not Path("it_ran").exists()


def test_the_auxiliary_loss_of_a_mixture_of_experts() -> None:
    """Tried without: it is dropped, silently."""
    mixture = (*LM, *architecture(**tiny.LLAMA, model_type="mixtral", num_local_experts=4), write({}))
    says = (
        "mixtral: output_router_logits is true, but the auxiliary loss of a mixture of experts would differ with the "
        "number of processes: set it to false"
    )
    assert refused(*mixture, "architecture.output_router_logits=True") == [says]
    *_, model = built(*mixture, "architecture.output_router_logits=False")
    model.hf.save_pretrained("mixture")
    byte_tokenizer().save_pretrained("mixture")
    arguments = (*LM, "model=mixture", write({}))
    built(*arguments)
    write({"a.jsonl": ROWS, "mixture/config.json": {"output_router_logits": True}})
    assert refused(*arguments) == [says]


@pytest.mark.parametrize(("value", "expected"), [("20000.0", 20000.0), ("1e4", 1e4), ("'1'x", "'1'x"), ('"x"', "x")])
def test_fields_within_fields_are_numbers_too(value: str, expected: object) -> None:
    task: Any = run_settings(command(*NEW, write({}), f"architecture.rope_parameters.rope_theta={value}")).task
    assert task.architecture["rope_parameters"] == {"rope_theta": expected}
    assert type(task)(architecture="{rms_norm_eps: 1e-5}").architecture == {"rms_norm_eps": 1e-5}


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        ("opt", {"ffn_dim": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "word_embed_proj_dim": 32}),
        ("bloom", {"n_layer": 2, "n_head": 2}),
    ],
)
def test_a_model_in_which_packed_documents_see_each_other(kind: str, fields: dict[str, object]) -> None:
    arguments = (*LM, *architecture(model_type=kind, hidden_size=32, **fields), write({}))
    assert refused(*arguments) == [f"{kind} lets packed documents see each other: set --task.packing=false"]
    built(*arguments, "packing=false")


# ----------------------------------------------------------------------------------------------------- as whole runs
@pytest.mark.parametrize("bad", ["data", "model"])
@pytest.mark.parametrize(("config", "processes"), [("cpu", None), ("ddp", 2), ("fsdp", 2)])
def test_one_line_and_exit_code_2_under_every_strategy(
    launch: Launch, tmp_path: Path, config: str, processes: int | None, bad: str
) -> None:
    """Data fail in the first process while the others wait for it; a model in all of them at once."""
    dataset, model = f"dataset={tmp_path}/a.jsonl", f"model={tmp_path}/llama"
    if bad == "data":
        write({"a.jsonl": [*ROWS, {"text": None}]})
        says = f"{dataset}: 1 of 21 rows in the data to train on have no usable text (row 21; "
    else:
        write({"llama/model.safetensors": lambda weights: weights[:-1000]})
        says = f"{model}: cannot be loaded, "
    run = launch(config, *command(*LM, model, dataset, TEXT), processes=processes)
    (message,) = run.messages
    assert message.startswith(f"train.py: task.{says}")
    assert 'train.py", line' not in run.stderr, "a traceback"
    assert run.exit_code == 2
    assert not run.folder.exists()
