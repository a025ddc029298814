"""Text, models and settings that do not fit: one clear line and exit code 2, never a traceback or a silent mistake."""

import shutil
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest

from src.config.errors import UserError
from tests.launching import Launch
from tests.text import tiny
from train import run_settings

LM = ("name=causal_lm", "sequence_length=16")
NEW = (*LM, *tiny.NEW_LLAMA)
LLAMA = (*LM, "model=llama")
LORA = (*LLAMA, "lora.r=2")
BERT = ("name=text_classification", "sequence_length=16", "model=bert")
TEXT, SKIP = "text_column=text", "bad_rows=skip"
ROWS: list[Any] = [{"text": f"line {i}", "label": ("even", "odd")[i % 2]} for i in range(20)]
CHAT = tiny.chat("hi", "ho")
CHATS: list[Any] = [{"messages": CHAT}] * 19
FIX = "or skip such rows with --task.bad_rows=skip"


@pytest.fixture(autouse=True)
def _beside_the_models(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Copy the models `llama` and `bert`, to be damaged."""
    for name in ("llama", "bert"):
        shutil.copytree(models / name, name)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)


def command(*arguments: str) -> list[str]:
    """Return the arguments as on the command line, where those of the task begin with --task."""
    return [argument if argument.startswith("--") else f"--task.{argument}" for argument in arguments]


def built(*arguments: str) -> tuple[Any, Any, Any, Any]:
    """Return the task, its two datasets and its model, built as train.py does it."""
    task: Any = run_settings(command(*arguments)).task
    return task, *task.build_datasets(), task.build_model()


def refused(*arguments: str) -> str:
    """Return the lines that train.py ends with before it trains, without the current folder's name."""
    with pytest.raises(UserError) as error:
        built(*arguments)
    return str(error.value).replace(f"{Path.cwd()}/", "")


def write(files: dict[str, Any]) -> str:
    """Write files, and return the argument that names them as the dataset, or ROWS where all belong to models."""
    if {name.partition("/")[0] for name in files} <= {"bert", "llama"}:
        files = {"a.jsonl": ROWS, **files}
    return f"dataset={tiny.write(files)}"


BAD_ROWS: dict[str, tuple[Any, str]] = {
    "a number": ({"text": 3}, "text is int, not text"),
    "a null": ({"text": None}, "text is empty"),
    "white space": ({"text": " \n"}, "text is empty"),
    "cut off": (b'{"text": ', "is not a JSON object: *"),
    "a list": (["a"], "is not a JSON object: *"),
    "no UTF-8": (b'{"text": "caf\xe9"}', "text is not valid Unicode: *utf-8*"),
    "half an emoji": ({"text": "a \ud83d"}, "text is not valid Unicode: *"),
    "too many brackets": (b"[" * 10**5, "is not a JSON object: *"),
}


def skipped_rows(task: Any, train: Any, evaluation: Any, *_: Any) -> list[float]:
    return [task.describe("train", train)["skipped_rows"], task.describe("eval", evaluation)["skipped_rows"]]


@pytest.mark.parametrize(("row", "why"), BAD_ROWS.values(), ids=BAD_ROWS)
def test_a_bad_row_is_named_by_file_and_line_or_skipped_and_counted(row: Any, why: str) -> None:
    data = write({"a/train.jsonl": ROWS, "a/test.jsonl": [*ROWS[:2], row, b"", *ROWS[2:6], row]})
    says = f"a/test.jsonl, line 3: {why}; 2 of 8 rows in the evaluation data cannot be used: fix them, {FIX}"
    assert fnmatchcase(refused(*NEW, TEXT, data), says)
    assert skipped_rows(*built(*NEW, TEXT, data, SKIP)) == [0, 2]


STRICT = (
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('alternate!') }}"
    "{% endif %}<{{ m.role }}>{{ m.content }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
THOUGHT = [CHAT[0], CHAT[1] | {"reasoning_content": "Hm."}]
REJECTED = "rejects the chat that begins with 'hi': alternate!"
SHORTENED = "leaves out 'Hm.' of the chat that begins with 'hi': set --task.chat_template=chatml, which *"


@pytest.mark.parametrize(
    ("part", "chat", "why", "skipped"),
    [("train", [CHAT[0], *CHAT], REJECTED, [1, 0]), ("test", THOUGHT, SHORTENED, [0, 1])],
)
def test_a_chat_that_its_template_cannot_write_is_a_bad_row(part: str, chat: Any, why: str, skipped: Any) -> None:
    files = {f"a/{name}.jsonl": [*CHATS, {"messages": CHAT}] for name in ("train", "test")}
    files[f"a/{part}.jsonl"][19] = {"messages": chat}
    data = write(files)
    tiny.write({"strict.jinja": STRICT})
    arguments = (*NEW, "chat_template=strict.jinja", "sequence_length=64", data)
    says = (
        f"a/{part}.jsonl, line 20: the tokenizer's chat template {why}; 1 of 20 rows in the * data *: fix them, {FIX}"
    )
    assert fnmatchcase(refused(*arguments), says)
    assert skipped_rows(*built(*arguments, SKIP)) == skipped


TRAIN: dict[str, Any] = {"data/train.jsonl": ROWS}
NO_ROWS = 'one object, not rows: write a list of objects, or one per line (pandas: orient="records", lines=True)'
KINDS = "must be a file, or a folder of files, of one of the kinds .txt, .jsonl, .json, .csv, .tsv, .parquet"
TOO_LONG = "task.sequence_length=16: the model sees at most"
ROBERTA = {"model_type": "roberta", "max_position_embeddings": 16, "pad_token_id": 1}
TOOL = {"type": "function", "function": "get"}
CASES: list[tuple[dict[str, Any], tuple[str, ...], str]] = [
    # files
    ({"a.txt": "a"}, NEW, "task.dataset: the text is too short to hold out a part of it for evaluation"),
    ({"notes.doc": "a"}, NEW, f"task.dataset=notes.doc: {KINDS}"),
    ({"mixed/train.jsonl": ROWS, "mixed/test.csv": "text\na\n"}, NEW, f"task.dataset=mixed: {KINDS}"),
    ({"data/test.jsonl": ROWS}, NEW, "task.train_split=train: data has test"),
    ({"a.csv": "text,label\none,even\ntwo,odd,2\n"}, NEW, "a.csv, line 3: has 3 cells for 2 columns; 1 of 2 rows*"),
    ({"a.csv": 'text,label\na,x\n"b,x\nc,x\n'}, NEW, "a.csv, line 3: has a quote that is never closed; 1 of 2 rows *"),
    ({"a.jsonl": '{"text": "a"}\n\n' * 9 + '{"text"'}, NEW, "a.jsonl, line 19: is not a JSON object: *; 1 of 10 *"),
    ({"a.json": b"{\n{\n" + b'{"text": "a"}\n\n' * 9}, (*NEW, TEXT), "a.json, row 1: is not a JSON *; 2 of 11 rows *"),
    ({"a.json": '{"text": {"0": "a", "1": "b"}}'}, NEW, f"a.json: cannot be read: {NO_ROWS}"),
    # as Excel and PowerShell write it
    ({"a.csv": "text,label\none,even\n".encode("utf-16")}, NEW, "a.csv: cannot be read: its text is UTF-16: save it*"),
    # columns; a table that Excel writes in much of Europe has one
    (TRAIN | {"data/test.jsonl": [{"txt": "a"}]}, (*NEW, TEXT), "task.dataset=data: no column *txt*"),
    (TRAIN | {"data/train_b.jsonl": [{"txt": "a"}]}, (*NEW, TEXT), "data/train_b.jsonl: no column text, which other *"),
    ({"a.csv": "id;text\n0;one\n" * 9}, NEW, "which of the dataset's columns (id;text) to train on? *"),
    ({}, (*NEW, TEXT, "prompt_column=label"), "which of the dataset's columns (*"),
    ({"a.csv": "text,text\na,b\n"}, NEW, "a.csv: cannot be read: two columns are called text"),
    ({"a.jsonl": [{"text": 1}] * 20}, (*NEW, SKIP), "a.jsonl, line 1: text is int, not text; 20 of 20 rows in the *"),
    # labels
    ({"a.csv": "text,label\none\n"}, BERT, "a.csv, line 2: label is empty; 1 of 1 rows *"),
    (TRAIN | {"data/test.jsonl": [{"text": "a"}]}, BERT, "*no column label in the evaluation data; *Kaggle? *"),
    ({"a.jsonl": ROWS[1::2]}, BERT, "task.label_column=label: the training rows have fewer than two labels: odd"),
    ({"bert/config.json": {"problem_type": "regression"}}, BERT, "task.model=bert: its config.json says regression, *"),
    ({"bert/config.json": {"id2label": {0: "EVEN", 1: "PRIME"}}}, BERT,
     "task.label_column=label: odd is in the data (even, odd), but not among these labels: EVEN, PRIME, the *"),
    # chats and their templates
    ({"a.jsonl": [{"messages": CHAT[:1]}] * 20}, NEW, "task.dataset=a.jsonl: the training data has nothing to pre*"),
    ({"a.jsonl": [*CHATS, {"messages": CHAT, "tools": [TOOL]}]}, NEW, "a.jsonl, line 20: tools is not a list of t*"),
    ({"a.jsonl": [*CHATS, {"messages": []}]}, NEW, "a.jsonl, line 20: messages is not a list of messages, 5,000 *"),
    ({"a.jsonl": [b'{"messages": [{"role": "us\xe9r", "content": "a"}]}']}, NEW, "a.jsonl, line 1: messages *udce9r*"),
    ({"a.jsonl": CHATS, "a.jinja": "{% for %}"}, (*NEW, "chat_template=a.jinja"), "*Expected an expression*"),
    ({"a.jsonl": CHATS, "llama/chat_template.jinja": None}, LLAMA, "a.jsonl, line 1: the tokenizer has no chat templ*"),
    # models and architectures
    ({}, LM, "task.model, task.architecture: set one of them, to fine-tune a model or to train one from scratch"),
    ({}, (*LM, "architecture.model_type=lama"), "*: transformers has no such causal *, did you mean llama?"),
    ({}, (*NEW, "architecture.hiden_size=32", "architecture.num_layers=2"),
     "task.architecture.hiden_size: llama has no such field, did you mean hidden_size?\n"
     "task.architecture.num_layers: llama has no such field, did you mean num_hidden_layers?"),
    ({}, (*NEW, "architecture.model_type=olmoe", "architecture.num_experts=4", "architecture.num_experts_per_tok=8"),
     "olmoe cannot be trained here: it fails on a few tokens: *"),
    ({}, (*NEW, "architecture.model_type=mixtral", "architecture.output_router_logits=True"),
     "mixtral: output_router_logits is true, but the auxiliary loss of a mixture of experts*"),
    ({"bert/config.json": "{"}, BERT, "task.model=bert: cannot be loaded: *"),
    ({"bert/config.json": {"intermediate_size": 128}}, BERT,
     "task.model=bert: not a checkpoint of BertForSequenceClassification: weights are missing or have another *"),
    # transformers makes a BertTokenizer of nothing, to which every word is [UNK]
    ({"bert/tokenizer.json": None, "bert/tokenizer_config.json": None}, BERT, "task.model=bert: has no tokenizer*"),
    ({"llama/config.json": {"max_position_embeddings": 8}}, LLAMA, f"{TOO_LONG} 8 tokens"),
    # 16 positions, of which the first two stand for padding and for nothing
    ({"bert/config.json": ROBERTA}, BERT, f"{TOO_LONG} 14 tokens"),
    ({"llama/generation_config.json": {"max_new_tokens": -1}}, LLAMA, "task.model=llama: *`max_new_tokens` must be *"),
    ({"llama/adapter_config.json": "{}"}, LLAMA, "task.model=llama: holds adapters, not a model; name the model *"),
    # adapters and new tokens
    ({}, (*LORA, "lora.target_modules=[q_proj, q_prj]"), "task.lora: target_modules: q_prj matches no *"),
    ({}, (*LORA, "lora.options={bias: all, init_lora_weights: eva, r: 3, use_dorra: true, use_rslora: 1}"),
     "task.lora.options.bias: not available: FSDP *\n"
     "task.lora.options.init_lora_weights: must be true, gaussian, orthogonal, pissa or olora; *\n"
     "task.lora.options.r: use task.lora.r\n"
     "task.lora.options.use_dorra: none of peft's that was tried here, did you mean use_dora[?]\n"
     "task.lora.options.use_rslora: must be true or false"),
    ({}, (*LORA, "lora.options={init_lora_weights: olora, layers_to_transform: [0], rank_pattern: {q_proj: true}}"),
     "task.lora.options.init_lora_weights: * pissa and olora with task.lora.merge=true, as *\n"
     "task.lora.options.layers_to_transform: must be a list of blocks, * and needs task.lora.target_modules\n"
     "task.lora.options.rank_pattern: must be numbers above 0 by names of layers, *"),
    ({}, (*LORA, "lora.options={init_lora_weights: olora}", "lora.merge=true", "lora.base_dtype=nf4"),
     "task.lora.options.init_lora_weights: * the last three not with base_dtype=nf4, *"),
    ({}, (*LORA, "lora.target_modules=[q_proj]", "lora.options={layers_to_transform: [0, 7], alpha_pattern: {k_proj: "
          "2}, rank_pattern: {.*_proj: 3, model.layers.0.self_attn.q_proj: 2}}"),
     "task.lora: rank_pattern: model.layers.0.self_attn.q_proj matches no layer with adapters, or none but an *\n"
     "task.lora: alpha_pattern: k_proj matches no layer with adapters, or none but an earlier one's\n"
     "task.lora: layers_to_transform: 7\\..[*] matches no layer with adapters, or none but an earlier one's"),
    ({}, (*LORA, "lora.options={init_lora_weights: orthogonal, rank_pattern: {q_proj: 3}}"),
     "task.lora.target_modules, exclude_modules, options: Orthogonal initialization requires the LoRA rank to be *"),
    ({}, (*NEW, "lora.r=2"), "task.lora adapts an existing model: set task.model, not task.architecture"),
    ({}, (*LLAMA, "new_tokens=['<|endoftext|>', <a>]"), "task.new_tokens: <|endoftext|>: the tokenizer has it *"),
]  # fmt: skip


@pytest.mark.parametrize(("files", "arguments", "says"), CASES, ids=[says.split("\n")[0][:90] for *_, says in CASES])
def test_what_does_not_fit_is_one_line(files: dict[str, Any], arguments: tuple[str, ...], says: str) -> None:
    found = refused(*arguments, write(files))
    assert fnmatchcase(found, says), found
    assert found.count("\n") == says.count("\n")


def test_a_missing_dataset_is_reported_with_the_other_mistakes() -> None:
    for dataset, says in (("", " is not set: name a dataset on the Hub, a file or a folder"),
                          ("no/folder/there", "=no/folder/there: no such file or folder")):  # fmt: skip
        found = refused(*NEW, f"dataset={dataset}", "--seed=-1")
        assert found == f"--seed=-1: must be greater than or equal to 0\ntask.dataset{says}"


def test_settings_of_a_model_that_are_not_used_are_reported() -> None:
    """Attention that is chosen here, a limit that the model does not have, and settings of generation without effect,
    with which the export would fail after the training."""
    data = write({
        "llama/config.json": {"_attn_implementation": "flash_attention_2"},
        "llama/tokenizer_config.json": {"model_max_length": 8},
        "llama/generation_config.json": {"temperature": 0.9, "do_sample": False, "early_stopping": True},
    })  # fmt: skip
    task, *_, model = built(*LLAMA, data, TEXT)
    assert task.state.remarks == [
        "llama: its config.json asks for flash_attention_2 attention, which is ignored",
        "tokenizer_config.json has model_max_length=8: the model's 256 are used",
        "generation settings without effect are left out: temperature, early_stopping",
    ]
    for built_model in (model, task.build_empty_model()[0]):
        task.export(built_model, model.state_dict(), Path("export"))
        assert "temperature" not in Path("export/generation_config.json").read_text()


@pytest.mark.parametrize(("arguments", "name"), [((*LLAMA, TEXT), "llama"), (BERT, "bert")])
def test_a_token_that_the_model_lacks_is_refused_if_a_row_has_it(arguments: tuple[str, ...], name: str) -> None:
    """Some tokenizers of multimodal models have such tokens."""
    tokenizer = tiny.byte_tokenizer()
    tokenizer.add_tokens(["<image>"])
    tokenizer.save_pretrained(name)
    built(*arguments, write({}))
    data = write({"a.jsonl": [*ROWS, {"text": "an <image>", "label": "odd"}]})
    says = "the token <image> has the id 258, but the model knows 258 tokens (task.tokenizer, task.architecture.voc*)"
    assert fnmatchcase(refused(*arguments, data), says)


def test_lines_that_quotes_join_are_reported(capsys: pytest.CaptureFixture[str]) -> None:
    """Eleven of 27 rows may be one, by a stray quote."""
    rows = [f"line {i},{i % 2}" for i in range(27)]
    rows[10], rows[21] = '"line 10,0', 'line 21",1'
    says = "the training data: 27 lines hold 16 rows: some quoted cells span lines; the longest row has 12, from"
    for _ in range(2):  # the second time from the cache
        built(*NEW, write({"a.csv": "\n".join(["text,label", *rows])}), TEXT)
        assert capsys.readouterr().err == f"{says} {Path.cwd()}/a.csv, line 12\n"


def test_code_that_comes_with_a_model_is_never_run() -> None:
    auto_map = dict.fromkeys(("AutoConfig", "AutoModelForSequenceClassification"), "mine.Mine")
    data = write({
        "bert/mine.py": "open('it_ran', 'w')\nclass Mine: pass\n",
        "bert/config.json": {"auto_map": auto_map},
        "bert/tokenizer_config.json": {"auto_map": {"AutoTokenizer": [None, "mine.Mine"]}},
    })  # fmt: skip
    *_, model = built(*BERT, data)  # with transformers' own code for this model_type
    assert type(model).__module__ == "transformers.models.bert.modeling_bert"
    write({"bert/config.json": {"model_type": "mine"}})
    assert refused(*BERT, data).startswith("task.model=bert: needs to run code of its own, which is not allowed here; ")
    assert not Path("it_ran").exists()


def test_adapters_of_a_tied_layer_are_not_merged(models: Path) -> None:
    """They would be added to both layers: logits would be 0.3 off."""
    arguments = (*LORA, f"model={models}/tied", "lora.target_modules=[lm_head]", write({}))
    says = "adapters of a layer that shares its weights with another are added to both when they are merged"
    for more in ("", "lora.options.init_lora_weights=pissa"):
        found = refused(*filter(None, [*arguments, "lora.merge=true", more]))
        assert found.startswith(f"task.lora.target_modules: {says}; leave it out, ")
    built(*arguments)
    built(*LORA, "lora.target_modules=[lm_head]", "lora.merge=true", write({}))  # it has weights of its own


def test_bad_data_are_one_line_and_exit_code_2_under_fsdp(launch: Launch, tmp_path: Path) -> None:
    """They fail in the first process while the others wait for it."""
    tiny.write({"a.jsonl": [*ROWS, {"text": None}]})
    arguments = command(*LM, f"model={tmp_path}/llama", f"dataset={tmp_path}/a.jsonl", TEXT)
    run = launch("fsdp", *arguments, processes=2)
    (message,) = run.messages
    assert message.startswith(f"train.py: {tmp_path}/a.jsonl, line 21: ")
    assert 'train.py", line' not in run.stderr, "a traceback"
    assert run.exit_code == 2
    assert not run.folder.exists()
