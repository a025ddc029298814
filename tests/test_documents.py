"""From rows to sequences: what is learnt of text, prompts and chats, and that packing drops and mixes nothing."""

import json
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
from datasets import Dataset
from transformers import PreTrainedTokenizerFast

from src.data.byte_tokenizer import byte_tokenizer
from src.data.documents import Format, pieces
from src.data.packing import packed, unpacked
from src.tasks.causal_lm import CausalLM

END = 256


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerFast:
    return byte_tokenizer()


def learnt(tokenizer: PreTrainedTokenizerFast, table: Dataset) -> str:
    """What has to be predicted, all pieces in a row."""
    labels = np.concatenate(table["labels"])
    return str(tokenizer.decode(labels[labels != -100]))


def table_of(
    tokenizer: PreTrainedTokenizerFast, form: Format, length: int = 64, learn_all: bool = False, **columns: list
) -> Dataset:
    return pieces(Dataset.from_dict(columns), form, tokenizer, length, learn_all, "test")


def test_all_of_a_text_is_learnt_and_its_end(tokenizer: PreTrainedTokenizerFast) -> None:
    table = table_of(tokenizer, Format(text="text"), text=["héllo €"])
    assert learnt(tokenizer, table) == "héllo €<|endoftext|>"
    assert table[0]["input_ids"][0] == END
    assert table[0]["input_ids"][1:] == table[0]["labels"][:-1]
    assert table[0]["bytes"] == len("héllo €".encode())


def test_long_text_makes_several_pieces_and_nothing_is_lost(tokenizer: PreTrainedTokenizerFast) -> None:
    text = "".join(chr(ord("a") + i % 26) for i in range(100)) + "ü"
    table = table_of(tokenizer, Format(text="text"), length=10, text=[text])
    assert learnt(tokenizer, table) == text + "<|endoftext|>"
    assert max(table["length"]) == 10
    assert sum(table["bytes"]) == len(text.encode())
    assert not any(table["truncated"])


def test_only_completions_are_learnt_unless_all_is_asked_for(tokenizer: PreTrainedTokenizerFast) -> None:
    form = Format(prompt="q", completion="a")
    rows: dict[str, Any] = {"q": ["2+2=", "ä"], "a": ["4", "ö!"]}
    table = table_of(tokenizer, form, **rows)
    assert learnt(tokenizer, table) == "4<|endoftext|>ö!<|endoftext|>"
    assert table["bytes"] == [1, 3]
    assert learnt(tokenizer, table_of(tokenizer, form, learn_all=True, **rows)) == (
        "2+2=4<|endoftext|>äö!<|endoftext|>"
    )


def test_long_prompts_are_cut_off_and_counted(tokenizer: PreTrainedTokenizerFast) -> None:
    table = table_of(tokenizer, Format(prompt="q", completion="a"), length=8, q=["12345", "1"], a=["abcdef", "b"])
    assert table["truncated"] == [True, False]
    assert learnt(tokenizer, table) == "abcb<|endoftext|>"


CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Yo"},
    {"role": "user", "content": "Bye"},
    {"role": "assistant", "content": "Ciao"},
]


def test_only_the_assistants_turns_are_learnt(tokenizer: PreTrainedTokenizerFast) -> None:
    table = table_of(tokenizer, Format(messages="messages"), length=128, messages=[CHAT])
    assert learnt(tokenizer, table) == "Yo<|endoftext|>Ciao<|endoftext|>"


QWEN = (  # its marks, its empty place for thoughts, which only the last turn keeps, its calls of tools
    "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and loop.last %}<think>\n\n</think>\n\n{% endif %}{{ m.content | trim }}"
    "{% for call in m.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.mark.parametrize("template", [None, QWEN])
@pytest.mark.parametrize("learn_all", [False, True])
def test_the_bytes_of_a_chat_are_those_of_the_text_that_is_learnt(
    tokenizer: PreTrainedTokenizerFast, template: str | None, learn_all: bool
) -> None:
    """As of the same conversation as prompt and completion, whatever a template writes around them. Tried with all
    bytes of the turn: bits per byte depend on how many marks there are."""
    tokenizer.chat_template = template or tokenizer.chat_template
    chat = [{"role": "user", "content": "How are you?"}, {"role": "assistant", "content": "Très bien — et toi?"}]
    as_chat = table_of(tokenizer, Format(messages="m"), 256, learn_all, m=[chat])
    as_pair = table_of(
        tokenizer, Format(prompt="p", completion="c"), 256, learn_all, p=["How are you?"], c=["Très bien — et toi?"]
    )
    assert as_chat["bytes"] == as_pair["bytes"]
    several = table_of(tokenizer, Format(messages="m"), 512, learn_all, m=[[*chat, *CHAT[1:]]])
    assert several[0]["bytes"] - as_chat[0]["bytes"] == len("HiYoByeCiao" if learn_all else "YoCiao")


def test_chats_of_other_kinds_are_learnt_as_the_usual_ones(tokenizer: PreTrainedTokenizerFast) -> None:
    """ShareGPT's names, and content in parts."""
    names = {"system": "system", "user": "human", "assistant": "gpt"}
    sharegpt = [{"from": names[m["role"]], "value": m["content"]} for m in CHAT[:3]]
    others = [m | {"role": {"user": "Human", "assistant": "model"}.get(m["role"], m["role"])} for m in CHAT[:3]]
    parts = [{"role": m["role"], "content": [{"type": "text", "text": c} for c in m["content"]]} for m in CHAT]
    usual = table_of(tokenizer, Format(messages="m"), 128, m=[CHAT[:3]])[:]
    assert table_of(tokenizer, Format(messages="m"), 128, m=[sharegpt])[:] == usual
    assert table_of(tokenizer, Format(messages="m"), 128, m=[parts[:3]])[:] == usual
    assert table_of(tokenizer, Format(messages="m"), 128, m=[others])[:] == usual  # tried without: nothing is learnt


def test_an_answer_of_weight_0_is_not_learnt(tokenizer: PreTrainedTokenizerFast) -> None:
    chat = [{"weight": 0 if m["content"] == "Yo" else None, **m} for m in CHAT]
    whole, part = (table_of(tokenizer, Format(messages="m"), 128, m=[messages]) for messages in (CHAT, chat))
    assert learnt(tokenizer, whole) == "Yo<|endoftext|>" + learnt(tokenizer, part)
    assert whole[0]["bytes"] - part[0]["bytes"] == len("Yo")


@pytest.mark.parametrize("arguments", [{"city": "Bern"}, '{"city": "Bern"}'], ids=["a mapping", "JSON"])
def test_calls_of_tools_are_learnt(tokenizer: PreTrainedTokenizerFast, arguments: object) -> None:
    """With the null that a table has for each key which only other messages have, and the tools that there are."""
    nothing = {"content": None, "tool_calls": None}
    call = [{"type": "function", "function": {"name": "weather", "arguments": arguments}}]
    chat = [
        {**nothing, "role": "user", "content": "Bern?"},
        {**nothing, "role": "assistant", "tool_calls": call},
        {**nothing, "role": "tool", "content": "rain"},
        {**nothing, "role": "assistant", "content": "Rain."},
    ]
    rows: dict[str, Any] = {"m": [chat], "t": [json.dumps([{"function": {"name": "weather"}}])]}
    form = Format(messages="m", tools="t")
    with pytest.raises(ValueError, match="leaves out the tool calls in the chat that begins with 'Bern\\?'"):
        table_of(tokenizer, form, **rows)
    with pytest.raises(ValueError, match="leaves out the tools in the chat that begins with 'Hi'"):
        table_of(tokenizer, form, m=[CHAT[1:3]], t=rows["t"])
    tokenizer.chat_template = QWEN
    table = table_of(tokenizer, form, length=512, **rows)
    turn = '<tool_call>{"name": "weather", "arguments": {"city": "Bern"}}</tool_call>'
    assert learnt(tokenizer, table) == f"{turn}<|im_end|>\n<think>\n\n</think>\n\nRain.<|im_end|>\n"
    assert table[0]["bytes"] == len(f"{turn}Rain.")
    assert str(tokenizer.decode(table[0]["input_ids"])).startswith(
        '<|im_start|>system\n[{"function": {"name": "weather"}}]'
    )


def test_a_template_that_rewrites_earlier_turns_is_refused(tokenizer: PreTrainedTokenizerFast) -> None:
    tokenizer.chat_template = "{{ messages | length }}{% for m in messages %}{{ m.content }}{% endfor %}"
    with pytest.raises(ValueError, match="writes earlier turns otherwise"):
        table_of(tokenizer, Format(messages="messages"), messages=[CHAT])

    table = table_of(tokenizer, Format(messages="messages"), learn_all=True, messages=[CHAT])
    assert learnt(tokenizer, table).startswith("Be brief.HiYo")


THINKING = (  # as Qwen3 does: what was thought stands only in the answers after the user's last turn
    "{% for m in messages %}<{{ m.role }}>{% if m.role == 'assistant' and loop.last %}<think>t</think>{% endif %}"
    "{{ m.content }}<end>\n{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
PROMPTED = THINKING.replace("<assistant>{% endif %}", "<assistant><think>{% endif %}")  # as DeepSeek-R1 does


@pytest.mark.parametrize(
    ("template", "last"), [(THINKING, "<think>t</think>Ciao<end>\n"), (PROMPTED, "t</think>Ciao<end>\n")]
)
def test_a_template_may_leave_out_earlier_thoughts(
    tokenizer: PreTrainedTokenizerFast, template: str, last: str
) -> None:
    tokenizer.chat_template = template
    table = table_of(tokenizer, Format(messages="messages"), length=256, messages=[CHAT])
    assert learnt(tokenizer, table) == f"Yo<end>\n{last}"


@pytest.mark.parametrize("answer", ["<b>Yo</b>", "<", ""])
def test_an_answer_may_begin_as_the_thought_that_is_asked_for(tokenizer: PreTrainedTokenizerFast, answer: str) -> None:
    """Tried without: its first characters are not learnt, and end marks are counted as bytes."""
    tokenizer.chat_template = PROMPTED
    chat = [CHAT[1], CHAT[2] | {"content": answer}, *CHAT[3:]]
    table = table_of(tokenizer, Format(messages="messages"), length=256, messages=[chat])
    assert learnt(tokenizer, table) == f"{answer}<end>\nt</think>Ciao<end>\n"
    assert table[0]["bytes"] == len(f"{answer}Ciao")


def test_a_template_may_end_the_text_where_the_chat_ends(tokenizer: PreTrainedTokenizerFast) -> None:
    """As Phi-4-mini's does. Tried without: "writes earlier turns otherwise"."""
    tokenizer.chat_template = (
        "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
        "{{ '<|assistant|>' if add_generation_prompt else eos_token }}"
    )
    table = table_of(tokenizer, Format(messages="messages"), length=256, messages=[CHAT])
    assert learnt(tokenizer, table) == "Yo<|end|>Ciao<|end|><|endoftext|>"
    assert table[0]["bytes"] == len("YoCiao")


def test_a_template_may_mark_where_the_chat_ends(tokenizer: PreTrainedTokenizerFast) -> None:
    tokenizer.chat_template = (
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
        "{{ '<assistant>' if add_generation_prompt else '<end>' }}"
    )
    table = table_of(tokenizer, Format(messages="messages"), messages=[CHAT[1:3]])
    assert learnt(tokenizer, table) == "Yo<end>"


def test_a_chat_may_begin_with_the_assistant(tokenizer: PreTrainedTokenizerFast) -> None:
    tokenizer.chat_template = "{{ messages[0].role }}:" + THINKING  # fails without a message
    table = table_of(tokenizer, Format(messages="messages"), length=256, messages=[CHAT[2:4], CHAT[2:]])
    assert learnt(tokenizer, table) == "Yo<end>\nYo<end>\n<think>t</think>Ciao<end>\n"


def test_white_space_is_learnt_where_the_tokenizer_reports_it_as_empty(tokenizer: PreTrainedTokenizerFast) -> None:
    from tokenizers import processors

    tokenizer.backend_tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    table = table_of(tokenizer, Format(prompt="q", completion="a"), q=["def f():"], a=["\n  return 1\n"])
    assert learnt(tokenizer, table) == "\n  return 1\n<|endoftext|>"


def test_the_end_is_learnt_also_where_the_tokenizer_puts_it(tokenizer: PreTrainedTokenizerFast) -> None:
    from tokenizers import processors

    end = ("<|endoftext|>", END)
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<|endoftext|> $A <|endoftext|>", pair="$A $B", special_tokens=[end]
    )
    table = table_of(tokenizer, Format(prompt="q", completion="a"), q=["2+2="], a=["4"])
    assert learnt(tokenizer, table) == "4<|endoftext|>"


def test_a_long_text_is_tokenised_slice_by_slice(
    tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = ["ab\ncd\n" * 5 + "x" * 30 + "ü", "short", "", "é\n" * 20]
    whole = table_of(tokenizer, Format(text="text"), length=10, text=texts)[:]
    monkeypatch.setattr("src.data.documents.SLICE", 7)
    assert table_of(tokenizer, Format(text="text"), length=10, text=texts)[:] == whole
    assert sum(whole["bytes"]) == len("".join(texts).encode())


def test_packing_keeps_each_piece_whole_and_fills_the_sequences(tokenizer: PreTrainedTokenizerFast) -> None:
    random = np.random.default_rng(0)
    texts = ["x" * int(n) for n in random.integers(1, 40, 300)]
    table = table_of(tokenizer, Format(text="text"), text=texts)
    together, apart = packed(table, 64), unpacked(table)
    assert sorted(together.rows.tolist()) == list(range(300)) == apart.rows.tolist()
    sizes = [
        sum(len(piece["input_ids"]) for piece in sequence)
        for sequence in together.__getitems__([*range(len(together))])
    ]
    assert max(sizes) <= 64
    assert sum(sizes) == sum(table["length"])
    assert len(together) <= 1.05 * -(-sum(sizes) // 64)
    assert together.describe(64)["padding"] == pytest.approx(1 - sum(sizes) / (64 * len(together)))


def test_documents_in_a_sequence_have_positions_of_their_own() -> None:
    task = CausalLM(dataset="x", architecture={"model_type": "llama"}, sequence_length=8)
    piece = {"input_ids": np.array([5, 6, 7], np.int32), "labels": np.array([6, -100, 8], np.int32), "bytes": 2}
    batch = task.collate([[piece, piece], [piece]])
    assert batch["position_ids"].tolist() == [[0, 1, 2, 0, 1, 2, 3, 4], [0, 1, 2, 3, 4, 5, 6, 7]]  # padding goes on
    assert batch["index"].tolist() == [0, 2, 3, 5, 8, 10]
    assert batch["targets"].tolist() == [6, 8] * 3
    assert batch["bytes"].tolist() == [4, 2]
    assert task.tokens(batch) == (9, 16)


def rows_file(folder: Path) -> Path:
    file = folder / "rows.jsonl"
    file.write_text("".join(json.dumps({"text": f"row {i}"}) + "\n" for i in range(20)))
    return file


def test_tokenising_is_done_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    settings = {"dataset": str(rows_file(tmp_path)), "architecture": {"model_type": "llama"}, "sequence_length": 32}
    first = CausalLM(**settings).build_datasets()[0]

    def fail(*_: object, **__: object) -> None:
        raise AssertionError("tokenised again")

    monkeypatch.setattr("src.data.documents._tokenise", fail)
    again = CausalLM(**settings).build_datasets()[0]
    assert again.describe(32) == first.describe(32)
    with pytest.raises(AssertionError, match="tokenised again"):
        CausalLM(**settings | {"learn_all": True}).build_datasets()


def test_tokenising_a_single_text_is_done_once_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    (tmp_path / "book.txt").write_text("0123456789" * 10)
    settings = {"dataset": str(tmp_path / "book.txt"), "architecture": {"model_type": "llama"}, "sequence_length": 32}
    first = CausalLM(**settings).build_datasets()
    monkeypatch.setattr("src.data.documents._tokenise", lambda *_, **__: pytest.fail("tokenised again"))
    monkeypatch.setattr("src.data.documents._cut_out", lambda *_, **__: pytest.fail("cut again"))
    again = CausalLM(**settings).build_datasets()
    assert [part.describe(32) for part in again] == [part.describe(32) for part in first]


def test_a_share_is_kept_for_evaluation_the_same_in_each_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    task = CausalLM(dataset=str(rows_file(tmp_path)), eval_fraction=0.25)
    rows, _ = task.load_rows()
    train, evaluation = task.split(rows)
    assert (len(train), len(evaluation)) == (15, 5)
    assert sorted([*train["text"], *evaluation["text"]]) == sorted(rows["text"])
    assert task.split(rows)[1]["text"] == evaluation["text"]
    assert task.model_copy(update={"split_seed": 1}).split(rows)[1]["text"] != evaluation["text"]
    last = task.model_copy(update={"eval_from": "last"}).split(rows)[1]
    assert last["text"] == [f"row {i}" for i in range(15, 20)]


def test_a_single_text_is_cut_near_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    file = tmp_path / "book.txt"
    file.write_text("0123456789" * 10)
    task = CausalLM(dataset=str(file), architecture={"model_type": "llama"}, sequence_length=32)
    train, evaluation = task.build_datasets()
    assert (len(train.pieces), len(evaluation.pieces)) == (3, 1)
    assert evaluation.describe(32)["tokens"] == 11  # and the end


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("rows.csv", 'text,n\n"a, b",1\nnull,2\n'),
        ("rows.tsv", 'text\tn\na, b\t1\nnull\t2\n'),
        ("rows.json", '[{"text": "a, b", "n": 1}, {"text": "null", "n": 2}]'),
        ("rows.jsonl", '{"text": "a, b", "n": 1}\n{"text": "null", "n": 2}\n'),
    ],
)  # fmt: skip
def test_each_kind_of_file_is_read_as_it_stands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, content: str
) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    (tmp_path / name).write_text(content)
    rows, evaluation = CausalLM(dataset=str(tmp_path / name)).load_rows()
    assert rows["text"][:] == ["a, b", "null"]
    assert evaluation is None


def test_parquet_and_folders_with_splits_in_the_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    for name in ("my-train-0", "my-train-1", "my_dev", "my.test", "train_test_split_test"):
        Dataset.from_dict({"text": [name]}).to_parquet(tmp_path / "data" / f"{name}.parquet")
    train, evaluation = CausalLM(dataset=str(tmp_path / "data")).load_rows()
    assert train["text"][:] == ["my-train-0", "my-train-1"]
    assert evaluation is not None
    assert evaluation["text"][:] == ["my_dev"]
    _, test = CausalLM(dataset=str(tmp_path / "data"), eval_split="test").load_rows()
    assert test is not None
    assert test["text"][:] == ["my.test", "train_test_split_test"]
    for name in ("training", "testData"):  # tried without: both are trained on
        Dataset.from_dict({"text": [name]}).to_parquet(tmp_path / "more" / f"{name}.parquet")
    train, evaluation = CausalLM(dataset=str(tmp_path / "more")).load_rows()
    assert evaluation is not None
    assert (train["text"][:], evaluation["text"][:]) == (["training"], ["testData"])


def test_a_split_that_is_not_used_need_not_be_readable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And the others may have other columns, as in GLUE."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / "README.txt").write_text("not data")
    for name, text in (("train", "text\tlabel\na\t1\n"), ("dev", "id\ttext\tlabel\n0\tb\t1\n"), ("test", "")):
        (folder / f"{name}.tsv").write_text(text)
    train, evaluation = CausalLM(dataset=str(folder)).load_rows()
    assert evaluation is not None
    assert (train["text"][:], evaluation["text"][:]) == (["a"], ["b"])


def test_columns_can_be_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    (tmp_path / "rows.tsv").write_text("it's \"fine\t1\nNA\t0\n")
    rows, _ = CausalLM(dataset=str(tmp_path / "rows.tsv"), column_names=["words", "label"]).load_rows()
    assert rows[:] == {"words": ["it's \"fine", "NA"], "label": ["1", "0"]}
