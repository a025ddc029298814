"""Text, models and settings that do not fit: one clear line and exit code 2, never a traceback or a silent mistake."""

import datetime
import json
import shutil
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import huggingface_hub
import pandas as pd
import pytest
import torch
from datasets import Dataset

from src.config.errors import UserError
from src.tasks.text.tokenizing import byte_tokenizer
from tests.launching import Launch
from tests.text import tiny
from train import run_settings

Files = dict[str, Any]


LM = ("name=causal_lm", "sequence_length=16")
NEW = (*LM, *tiny.NEW_LLAMA)
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
    """Return the task, its two datasets and its model, built as train.py does it."""
    task: Any = run_settings(command(*arguments)).task
    return task, *task.build_datasets(), task.build_model()


def refused(*arguments: str) -> list[str]:
    """The lines that train.py ends with before it trains."""
    with pytest.raises(UserError) as error:
        built(*arguments)
    return str(error.value).splitlines()


def write(files: Files) -> str:
    """The argument that names the first of them as the dataset, or ROWS where all belong to models.

    Args:
        files: contents by name. A list becomes lines of JSON; a mapping changes fields of the JSON that is there; None
            deletes.
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
        if content is None:
            file.unlink()
        else:
            file.write_bytes(content if isinstance(content, bytes) else content.encode())
    return f"dataset={next(iter(files)).partition('/')[0]}"


def labelled(labels: Any) -> pd.DataFrame:
    return pd.DataFrame({"text": [f"line {i}" for i in range(len(labels))], "label": labels})


# ------------------------------------------------------------------------------------------ refused, * is anything
NO_ROWS = 'no rows but one object: write a list of objects, or one a line (pandas: orient="records", lines=True)'
TRAIN: Files = {"data/train.jsonl": ROWS}
KINDS = "must be a file, or a folder with files, of one of the kinds .txt, .jsonl, .json, .csv, .tsv, .parquet"
DATA: list[tuple[Files, tuple[str, ...], str]] = [
    *(({f"a{kind}": ""}, NEW, "*") for kind in (".json", ".csv")),
    ({"a.txt": "a"}, NEW, "task.dataset: the text is too short to keep a part of it for evaluation"),
    ({"data/test.jsonl": ROWS}, NEW, "task.train_split=train: data has test"),
    ({"a.jsonl": '{"text": "a"}\n{"text": \n'}, NEW, "a.jsonl, line 2: is no JSON object, *; 1 of 2 rows*"),
    ({"a.csv": "text\ncafé\n".encode("latin-1")}, NEW, "a.csv, line 2: text is no Unicode text, *utf-8*"),
    # Tried without: the first field is lost, or the last one.
    ({"a.csv": "text,label\none,even\ntwo,odd,2\n"}, NEW, "a.csv, line 3: has 3 cells for 2 columns; 1 of 2 rows*"),
    # Columns. A table such as Excel writes it in much of Europe has one.
    (TRAIN | {"data/test.jsonl": [{"txt": "a"}]}, (*NEW, TEXT), "no column *txt*"),
    ({"a.csv": "id;text\n0;one\n" * 9}, NEW, "which of the dataset's columns id;text to train on? *"),
    (  # empty cells and short lines, but not what pandas takes for missing
        {"a.csv": "label,text\nx,one\nx,\nx\n" + "x,null\nx,NA\nx,2\n" * 3}, NEW,
        "a.csv, line 3: text is empty; 2 of 12 rows in the data to train on cannot be used: *",
    ),
    (
        {"a.jsonl": [{"text": i} for i in range(20)]}, (*NEW, SKIP),
        "a.jsonl, line 1: text is int, not text; 20 of 20 rows in the data to train on cannot be used: *",
    ),
    ({"a.jsonl": [{"messages": CHAT[:1]}] * 20}, NEW, "the training data has nothing to predict: *"),
    ({"a.csv": "text,text\na,b\n"}, NEW, "a.csv: cannot be read, two columns are called text"),
    # A stray quote. Lines are those of the file; a broken one can be left out.
    (
        {"a.csv": 'text,label\na,x\n"b,x\nc,x\n'}, NEW,
        "a.csv, line 3: has a quote that is never closed; 1 of 2 rows in the data to train on cannot be used: *",
    ),
    ({"a.jsonl": '{"text": "a"}\n\n' * 9 + '{"text"'}, NEW, "a.jsonl, line 19: is no JSON object, *; 1 of 10 rows *"),
    ({"a.json": [], "a.jsonl": []}, NEW, "no row in its 1 files"),
    # What pandas writes, unless it is told to write rows.
    ({"a.json": '{"text": {"0": "a", "1": "b"}}'}, NEW, f"a.json: cannot be read, {NO_ROWS}"),
    ({"a.json": '{\n "text": ["a", "b"]\n}'}, NEW, f"a.json: cannot be read, {NO_ROWS}"),
    (
        TRAIN | {"data/test.jsonl": [{"text": "a"}]}, BERT,
        "no column label in the data to evaluate on; its columns are text. Are they kept back, as at Kaggle? Without "
        "that file, a part of the rows to train on is kept",
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
    (
        {"a.parquet": labelled([datetime.date(2020, 1, 1)] * 20).to_parquet()}, BERT,
        "a.parquet, row 1: label is date, not text; 20 of 20 rows in the data to train on cannot be used: *",
    ),
]  # fmt: skip
TOO_LONG = "task.sequence_length=16: the model sees at most 8 tokens"
SETTINGS: list[tuple[tuple[str, ...], str]] = [
    ((*NEW, TEXT, "prompt_column=label"), "which of the dataset's columns *"),
    # Sequence lengths, tokenizers, and a template in place of its file's name.
    (
        (*LM, "architecture.model_type=gpt2", "architecture.n_embd=32", "architecture.n_head=2",
         "architecture.n_positions=8"), TOO_LONG,
    ),
    (
        (*NEW, "architecture.vocab_size=100"),
        "the tokenizer has 258 tokens, but the model knows 100 (task.tokenizer, task.architecture.vocab_size)",
    ),
    ((*NEW, "chat_template=" + "{{ a }}\n" * 99), "task.chat_template: cannot be read, *long*"),
    # Models and architectures.
    (CLASSIFIER, "task.model is not set: name a model on the Hub or a local folder"),
    ((*CLASSIFIER, "model=team/unknown"), "task.model=team/unknown: the Hub cannot be reached; give a folder *"),
    (
        (*LM, "architecture.model_type=lama"),
        "task.architecture.model_type=lama: transformers has no such causal language model, did you mean llama?",
    ),
    (
        (*NEW, "architecture.hiden_size=32", "architecture.num_layers=2"),
        "task.architecture.hiden_size: llama has no such field, did you mean hidden_size?\n"
        "task.architecture.num_layers: llama has no such field, did you mean num_hidden_layers?",
    ),
    (
        (*LM, "architecture.hidden_size=32"),
        "task.architecture.model_type=None: transformers has no such causal language model*",
    ),
    ((*NEW, "architecture.num_attention_heads=5"), "task.architecture: llama refuses it, *(32)*"),
    # It can be built, but does not run.
    (
        (*NEW, "architecture.model_type=olmoe", "architecture.num_experts=4", "architecture.num_experts_per_tok=8"),
        "olmoe cannot be trained here: Olmoe fails on a few tokens, *",
    ),
    # LoRA. Without a rank, its other settings would adapt nothing.
    ((*LORA, "lora.target_modules=[q_proj, q_prj]"), "task.lora.target_modules: * q_prj*"),
    ((*LORA, "lora.exclude_modules=("), "task.lora.target_modules, exclude_modules: *unterminated*"),
    ((*LORA, "lora.exclude_modules=.*"), "task.lora.target_modules, exclude_modules: All modules were excluded*"),
    ((*NEW, "lora.r=2"), "task.lora adapts an existing model: set task.model, not task.architecture"),
    ((*LLAMA, "lora.merge=true"), "*task.lora.r*"),
    (LM, "task.model or task.architecture: set one, to start from that model, or to train that from scratch"),
]  # fmt: skip
CALL = [{"function": {"name": "f", "arguments": "{"}}]
BAD_CHATS: list[tuple[Any, str]] = [
    ([], "is not a list of messages"),
    ([CHAT[0], {"role": "assistant", "content": None}], "has a message 2 whose content is not text"),
    ([{"role": "assistant", "tool_calls": CALL}], "has a message 1 with a tool call without a name, or arguments"),
]
BAD_TEMPLATES = {
    "{% for %}": "Expected an expression",
    "{% for m in messages %}{% generation %}{{ m.content }}{% endfor %}": "unknown tag 'endfor'",
    "{{ messages }}{% generation %}{% endgeneration %}": "marks around nothing",
    "{{ raise_exception('Roles must\nalternate') }}": "Roles must alternate",
}


MAMBA = '{"model_type": "mamba", "hidden_size": 32, "num_hidden_layers": 1, "vocab_size": 258}'
NOT_ITS = "task.model=bert: not a checkpoint of BertForSequenceClassification, 6 of its *"
DAMAGED: list[tuple[Files, tuple[str, ...], str]] = [
    ({"bert/config.json": "{"}, BERT, "task.model=bert: cannot be loaded, *"),
    ({"bert/config.json": MAMBA}, BERT, "task.model=bert: transformers has no text classifier of kind mamba"),
    ({"bert/config.json": {"intermediate_size": 128}}, BERT, NOT_ITS),
    ({"bert/tokenizer.json": "{"}, BERT, "task.model=bert: cannot be loaded, *"),
    # transformers makes a BertTokenizer of nothing, with five tokens: every word is [UNK] to it
    ({"bert/tokenizer.json": None, "bert/tokenizer_config.json": None}, BERT, "task.model=bert: *tokenizer*"),
    ({"llama/tokenizer_config.json": {"model_max_length": 8}}, LLAMA, TOO_LONG),
    ({"a.jsonl": CHATS, "llama/chat_template.jinja": None}, LLAMA, "the tokenizer has no chat template: *"),
]


@pytest.mark.parametrize(("files", "arguments", "expected"), [
    *DATA,
    *DAMAGED,
    *(({}, arguments, says) for arguments, says in SETTINGS),
    *(
        ({"a.jsonl": [*CHATS, {"messages": chat}]}, NEW, f"a.jsonl, line 20: messages {why}*; 1 of 20 rows *")
        for chat, why in BAD_CHATS
    ),
    *(
        ({"a.jsonl": CHATS, "a.jinja": template}, (*NEW, "chat_template=a.jinja"), f"*chat*template*{why}*")
        for template, why in BAD_TEMPLATES.items()
    ),
])  # fmt: skip
def test_what_does_not_fit_is_one_line(files: Files, arguments: tuple[str, ...], expected: str) -> None:
    dataset = write(files)
    says = "\n".join(refused(*arguments, dataset))
    assert fnmatchcase(says.removeprefix(f"task.{dataset}: ").replace(f"{Path.cwd()}/", ""), expected), says
    assert says.count("\n") == expected.count("\n")


def test_a_dataset_that_is_not_there_is_named_with_the_other_mistakes() -> None:
    write({"notes.doc": "a", "mixed/train.jsonl": ROWS, "mixed/test.csv": "text\na\n"})
    too_small = "--seed=-1: must be greater than or equal to 0"
    for dataset, says in (
        ("", " is not set: name a dataset on the Hub, a file or a folder"),
        ("no/folder/there", "=no/folder/there: no such file or folder"),
        ("notes.doc", f"=notes.doc: {KINDS}"),
        ("mixed", f"=mixed: {KINDS}"),
    ):
        assert refused(*NEW, f"dataset={dataset}", "--seed=-1") == [too_small, f"task.dataset{says}"]


@pytest.mark.parametrize(
    ("column", "value", "is_what"),
    [
        ("text", None, "empty"), ("text", " \n", "empty"), ("text", 3, "int, not text"),
        ("label", "", "empty"), ("label", {"a": 1}, "dict, not text"),
    ],
)  # fmt: skip
def test_bad_values_are_counted_and_named_by_row_or_skipped(column: str, value: object, is_what: str) -> None:
    """In either part. Tried without: they are tokenized as what they are called."""
    rows = [row | {column: value} if i in (2, 6) else row for i, row in enumerate(ROWS)]
    kind = NEW if column == "text" else BERT
    data = write({"data/train.jsonl": ROWS, "data/test.jsonl": rows})
    assert refused(*kind, data) == [
        f"{Path.cwd()}/data/test.jsonl, line 3: {column} is {is_what}; 2 of 20 rows in the data to evaluate on cannot "
        f"be used: fix them, or leave out such rows with --task.bad_rows=skip"
    ]
    assert built(*kind, data, SKIP)[0]._skipped_rows == {"train": 0, "eval": 2}


@pytest.mark.parametrize(
    "content",
    ["\ufefftext,label\n" + "one,even\n" * 9, ",text\n" + "0,one\n" * 9, f"text,label\none,{'x' * 200_000}\n"],
    ids=["Excel's, with a byte order mark", "pandas', with its index", "with a long text"],
)
def test_a_csv_as_other_programs_write_it(content: str) -> None:
    content += content.splitlines(keepends=True)[-1]
    task, train, *_ = built(*NEW, write({"a.csv": content}), TEXT, "packing=false", "eval_fraction=0.5")
    (chunk,) = train.__getitems__([0])[0]
    assert task._tokenizer.decode(chunk["input_ids"], skip_special_tokens=True) == "one"


def test_a_line_beyond_the_first_groups_is_named_by_its_number_and_left_out() -> None:
    """As an editor has it. Tried with the number in its group: row 1562."""
    rows = [json.dumps({"text": f"line {i}"}) for i in range(30_000)]
    rows[29_000] = '{"text": "cut'
    data = write({"a.jsonl": "\n".join(rows)})
    assert refused(*NEW, data, TEXT)[0].startswith(f"{Path.cwd()}/a.jsonl, line 29001: is no JSON object, ")
    task, train, evaluation, _ = built(*NEW, data, TEXT, SKIP)
    assert len(train.chunks) + len(evaluation.chunks) == 29_999
    assert task._skipped_rows == {"train": 1, "eval": 0}


def test_lines_that_quotes_join_are_said(capsys: pytest.CaptureFixture[str]) -> None:
    """Eleven of 27 rows may be one, by a stray quote. Tried without: not a word."""
    rows = [f"line {i},{i % 2}" for i in range(27)]
    rows[10], rows[21] = '"line 10,0', 'line 21",1'
    data = write({"a.csv": "\n".join(["text,label", *rows])})
    built(*NEW, data, TEXT)
    says = "28 lines are 16 rows, as cells in quotes go over several: the longest row has lines 12 to 23"
    assert capsys.readouterr().err == f"{Path.cwd()}/a.csv: {says}\n"


def test_a_wrong_column_of_labels_is_said_in_a_line_of_200_characters() -> None:
    """Tried without: 23 KB."""
    for part in ("train", "test"):
        write({f"data/{part}.jsonl": [{"text": "a", "label": f"{part} {i}"} for i in range(3000)]})
    (says,) = refused(*BERT, "dataset=data")
    assert says.startswith("task.label_column=label: test 0, test 1, ")
    assert len(says) < 550


def test_folders_that_are_no_datasets_say_what_they_are() -> None:
    Dataset.from_list(ROWS).save_to_disk("data")
    says = "is a folder of Dataset.save_to_disk: write its rows by to_parquet or to_json, and name those"
    assert refused(*NEW, "dataset=data") == [f"task.dataset=data: {says}"]
    data = write({"some/train.jsonl": ROWS, "some/test.jsonl": ROWS})
    says = "is what is trained on; without it, a part of that is kept to evaluate on"
    assert refused(*NEW, data, "eval_split=train") == [f"task.eval_split=train: {says}"]


# ---------------------------------------------------------------------------------------------------------- labels
@pytest.mark.parametrize("content", [
    "text,label\na,1.10\nb,1.1\nc,2.0\nd,001\ne,1e2\nf,100\ng,NA\nh,True\n",
    "text\tlabel\na\t1.10\nb\t1.1\nc\t2.0\nd\t001\ne\t1e2\nf\t100\ng\tNA\nh\tTrue\n",
], ids=["csv", "tsv"])  # fmt: skip
def test_labels_are_what_a_table_says(content: str) -> None:
    """Tried with pandas' guesses: 1.1, 1.1, 2.0, 1, 100, 100."""
    kind = "tsv" if "\t" in content else "csv"
    task, *_ = built(*BERT, write({f"a.{kind}": content}), "eval_from=all")
    assert task.state.data["labels"] == sorted(["1.10", "1.1", "2.0", "001", "1e2", "100", "NA", "True"])


@pytest.mark.parametrize(
    ("labels", "names"),
    [
        ([0, 1, None] * 7, ["0", "1"]), (["pos", "neg", "pos ", "\tneg"] * 5, ["neg", "pos"]),
    ],
)  # fmt: skip
def test_labels_as_files_have_them(labels: list[Any], names: list[str]) -> None:
    """Tried without: all rows are refused, `pos` and `pos ` are two classes."""
    table = labelled(pd.Series(labels, dtype=object))
    for content in ({"a.jsonl": table.to_dict("records")}, {"a.csv": table.to_csv(index=False)}):
        task, *_, model = built(*BERT, write(content), SKIP)
        assert task.state.data["labels"] == [*model.config.label2id] == names


# ------------------------------------------------------------------------------------------------------ tokenizers
def test_a_tokenizer_without_a_pad_token_pads_with_the_end() -> None:
    """A causal language model needs none."""
    tokenizer = byte_tokenizer()
    tokenizer.pad_token = None
    tokenizer.save_pretrained("bert")
    tokenizer.save_pretrained("llama")
    for arguments in (BERT, (*LLAMA, "packing=false")):
        task, train, _, model = built(*arguments, write({}))
        assert torch.isfinite(task.loss(model, task.collate(train.__getitems__([0, 1, 2, 3]))))
    tokenizer.eos_token = None
    tokenizer.save_pretrained("bert")
    assert "no token to pad with" in refused(*BERT, write({}))[0]


# ---------------------------------------------------------------------------------------------------------- models
def test_code_that_comes_with_a_model_is_never_run() -> None:
    auto_map = {"AutoConfig": "configuration.Mine", "AutoModelForSequenceClassification": "modeling.Mine"}
    code = "open('it_ran', 'w')\nclass Mine: pass\n"
    data = write({
        **{f"bert/{name}.py": code for name in ("configuration", "modeling", "tokenization")},
        "bert/config.json": {"auto_map": auto_map},
        "bert/tokenizer_config.json": {"auto_map": {"AutoTokenizer": [None, "tokenization.Mine"]}},
    })  # fmt: skip
    *_, model = built(*BERT, data)  # transformers' own code for this model_type takes its place
    assert type(model).__module__ == "transformers.models.bert.modeling_bert"
    write({"a.jsonl": ROWS, "bert/config.json": {"model_type": "mine"}})
    assert refused(*BERT, data) == [
        "task.model=bert: wants to run code of its own, which is not allowed here; use one that transformers has"
    ]
    assert not Path("it_ran").exists()


@pytest.mark.parametrize(("layer", "name"), [("lm_head", "lm_head"), ("embed_tokens", "model.embed_tokens")])
def test_adapters_of_a_layer_that_is_tied_are_not_merged(layer: str, name: str) -> None:
    """They would be added to both. Tried without: logits 0.3 off those of the adapters."""
    tiny.saved("llama", Path("tied"), **tiny.LLAMA, tie_word_embeddings=True)
    arguments = (*LORA, "model=tied", f"lora.target_modules=[{layer}]", write({}))
    says = (
        f"{name} shares its weights with another layer, to which its adapters would be added too when they are merged"
    )
    expected = f"task.lora.target_modules: {says}; leave it out, or set merge=false"
    assert refused(*arguments, "lora.merge=true") == [expected]
    built(*arguments)
    built(*LORA, "lora.target_modules=[lm_head]", "lora.merge=true", write({}))  # of its own weights


def test_the_auxiliary_loss_of_a_mixture_of_experts() -> None:
    """Tried without: it is dropped, silently."""
    mixture = (*NEW, "architecture.model_type=mixtral", "architecture.num_local_experts=4", write({}))
    (says,) = refused(*mixture, "architecture.output_router_logits=True")
    assert says.startswith("mixtral: output_router_logits is true, but the auxiliary loss of a mixture of experts")
    built(*mixture, "architecture.output_router_logits=False")


def test_fields_within_fields_are_numbers_too() -> None:
    task: Any = run_settings(command(*NEW, write({}), "architecture.rope_parameters.rope_theta=1e4")).task
    assert task.architecture["rope_parameters"] == {"rope_theta": 1e4}
    assert type(task)(architecture="{rms_norm_eps: 1e-5}").architecture == {"rms_norm_eps": 1e-5}


# ----------------------------------------------------------------------------------------------------- as whole runs
def test_one_line_and_exit_code_2_under_fsdp(launch: Launch, tmp_path: Path) -> None:
    """Data fail in the first process while the others wait for it; a model in all of them at once."""
    for file, content in (("a.jsonl", [*ROWS, {"text": None}]), ("llama/model.safetensors", None)):
        write({"a.jsonl": ROWS, file: content})
        model, dataset = f"model={tmp_path}/llama", f"dataset={tmp_path}/a.jsonl"
        run = launch("fsdp", *command(*LM, model, dataset, TEXT), processes=2)
        (message,) = run.messages
        where = f"{tmp_path}/a.jsonl, line 21" if content else f"task.{model}"
        assert message.startswith(f"train.py: {where}: ")
        assert 'train.py", line' not in run.stderr, "a traceback"
        assert run.exit_code == 2
        assert not run.folder.exists()
