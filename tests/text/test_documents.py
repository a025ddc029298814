"""From rows to sequences: what is learnt of text, prompts and chats, and that packing drops and mixes nothing."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
from datasets import Dataset
from tokenizers import processors
from transformers import PreTrainedTokenizerFast

from src.data.byte_tokenizer import byte_tokenizer
from src.data.documents import Chunker, RowFormat
from src.data.packing import pack, unpacked
from src.tasks.causal_lm import CausalLM

END = 256


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerFast:
    return byte_tokenizer()


def learnt(tokenizer: PreTrainedTokenizerFast, table: Dataset) -> str:
    """What has to be predicted, all chunks in a row."""
    labels = np.concatenate(table["labels"])
    return str(tokenizer.decode(labels[labels != -100]))


def table_of(
    tokenizer: PreTrainedTokenizerFast,
    row_format: RowFormat,
    length: int = 64,
    train_on_prompts: bool = False,
    **columns: list,
) -> Dataset:
    return Chunker(row_format, tokenizer, length, train_on_prompts).make_chunks(Dataset.from_dict(columns), "test")


def test_all_of_a_text_is_learnt_and_its_end(tokenizer: PreTrainedTokenizerFast) -> None:
    table = table_of(tokenizer, RowFormat(text="text"), text=["héllo €"])
    assert learnt(tokenizer, table) == "héllo €<|endoftext|>"
    assert table[0]["input_ids"][0] == END
    assert table[0]["input_ids"][1:] == table[0]["labels"][:-1]
    assert table[0]["bytes"] == len("héllo €".encode())


def test_long_text_makes_several_chunks_and_nothing_is_lost(tokenizer: PreTrainedTokenizerFast) -> None:
    text = "".join(chr(ord("a") + i % 26) for i in range(100)) + "ü"
    table = table_of(tokenizer, RowFormat(text="text"), length=10, text=[text])
    assert learnt(tokenizer, table) == text + "<|endoftext|>"
    assert max(table["length"]) == 10
    assert sum(table["bytes"]) == len(text.encode())
    assert not any(table["truncated"])


def test_only_completions_are_learnt_unless_all_is_asked_for(tokenizer: PreTrainedTokenizerFast) -> None:
    form = RowFormat(prompt="q", completion="a")
    rows: dict[str, Any] = {"q": ["2+2=", "ä"], "a": ["4", "ö!"]}
    table = table_of(tokenizer, form, **rows)
    assert learnt(tokenizer, table) == "4<|endoftext|>ö!<|endoftext|>"
    assert table["bytes"] == [1, 3]
    assert learnt(tokenizer, table_of(tokenizer, form, train_on_prompts=True, **rows)) == (
        "2+2=4<|endoftext|>äö!<|endoftext|>"
    )


def test_long_prompts_are_cut_off_and_counted(tokenizer: PreTrainedTokenizerFast) -> None:
    table = table_of(tokenizer, RowFormat(prompt="q", completion="a"), length=8, q=["12345", "1"], a=["abcdef", "b"])
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
    table = table_of(tokenizer, RowFormat(messages="m"), length=128, m=[CHAT])
    assert learnt(tokenizer, table) == "Yo<|endoftext|>Ciao<|endoftext|>"


QWEN = (  # its marks, its empty place for thoughts, which only the last turn keeps, its calls of tools
    "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and loop.last %}<think>\n\n</think>\n\n{% endif %}{{ m.content | trim }}"
    "{% for call in m.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.mark.parametrize("template", [None, QWEN])
@pytest.mark.parametrize("train_on_prompts", [False, True])
def test_the_bytes_of_a_chat_are_those_of_the_text_that_is_learnt(
    tokenizer: PreTrainedTokenizerFast, template: str | None, train_on_prompts: bool
) -> None:
    """As of the same conversation as prompt and completion, whatever a template writes around them. Tried with all
    bytes of the turn: bits per byte depend on how many marks there are."""
    tokenizer.chat_template = template or tokenizer.chat_template
    chat = [{"role": "user", "content": "How are you?"}, {"role": "assistant", "content": "Très bien — et toi?"}]
    as_chat = table_of(tokenizer, RowFormat(messages="m"), 256, train_on_prompts, m=[chat])
    as_pair = table_of(
        tokenizer,
        RowFormat(prompt="p", completion="c"),
        256,
        train_on_prompts,
        p=["How are you?"],
        c=["Très bien — et toi?"],
    )
    assert as_chat["bytes"] == as_pair["bytes"]
    several = table_of(tokenizer, RowFormat(messages="m"), 512, train_on_prompts, m=[[*chat, *CHAT[1:]]])
    assert several[0]["bytes"] - as_chat[0]["bytes"] == len("HiYoByeCiao" if train_on_prompts else "YoCiao")


def test_chats_of_other_kinds_are_learnt_as_the_usual_ones(tokenizer: PreTrainedTokenizerFast) -> None:
    """ShareGPT's names, and content in parts."""
    names = {"system": "system", "user": "human", "assistant": "gpt"}
    sharegpt = [{"from": names[m["role"]], "value": m["content"]} for m in CHAT[:3]]
    others = [m | {"role": {"user": "Human", "assistant": "model"}.get(m["role"], m["role"])} for m in CHAT[:3]]
    parts = [{"role": m["role"], "content": [{"type": "text", "text": c} for c in m["content"]]} for m in CHAT]
    usual = table_of(tokenizer, RowFormat(messages="m"), 128, m=[CHAT[:3]])[:]
    assert table_of(tokenizer, RowFormat(messages="m"), 128, m=[sharegpt])[:] == usual
    assert table_of(tokenizer, RowFormat(messages="m"), 128, m=[parts[:3]])[:] == usual
    assert table_of(tokenizer, RowFormat(messages="m"), 128, m=[others])[:] == usual  # tried without: nothing is learnt


def test_an_answer_of_weight_0_is_not_learnt(tokenizer: PreTrainedTokenizerFast) -> None:
    chat = [{"weight": 0 if m["content"] == "Yo" else None, **m} for m in CHAT]
    whole, part = (table_of(tokenizer, RowFormat(messages="m"), 128, m=[messages]) for messages in (CHAT, chat))
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
    form = RowFormat(messages="m", tools="t")
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
    with pytest.raises(ValueError, match="rewrites earlier turns"):
        table_of(tokenizer, RowFormat(messages="m"), m=[CHAT])

    table = table_of(tokenizer, RowFormat(messages="m"), train_on_prompts=True, m=[CHAT])
    assert learnt(tokenizer, table).startswith("Be brief.HiYo")


THINKING = (  # as Qwen3 does: what was thought stands only in the answers after the user's last turn
    "{% for m in messages %}<{{ m.role }}>{% if m.role == 'assistant' and loop.last %}<think>t</think>{% endif %}"
    "{{ m.content }}<end>\n{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
PROMPTED = THINKING.replace("<assistant>{% endif %}", "<assistant><think>{% endif %}")  # as DeepSeek-R1 does
ENDING = (  # the text where the chat ends, as Phi-4-mini's does; tried without: "rewrites earlier turns"
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
    "{{ '<|assistant|>' if add_generation_prompt else eos_token }}"
)
MARKING = (  # where the chat ends
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    "{{ '<assistant>' if add_generation_prompt else '<end>' }}"
)
BEGINNING = "{{ messages[0].role }}:" + THINKING  # with the assistant's turn; it fails without a message
ANSWERS = [[CHAT[1], CHAT[2] | {"content": answer}, *CHAT[3:]] for answer in ("<b>Yo</b>", "<", "")]


@pytest.mark.parametrize(
    ("template", "chats", "learns", "says"),
    [
        (THINKING, [CHAT], "Yo<end>\n<think>t</think>Ciao<end>\n", "YoCiao"),
        (PROMPTED, [CHAT], "Yo<end>\nt</think>Ciao<end>\n", "YoCiao"),
        # An answer may begin as the thought that is asked for. Tried without: its first characters are not learnt, and
        # end marks are counted as bytes.
        (PROMPTED, ANSWERS[:1], "<b>Yo</b><end>\nt</think>Ciao<end>\n", "<b>Yo</b>Ciao"),
        (PROMPTED, ANSWERS[1:2], "<<end>\nt</think>Ciao<end>\n", "<Ciao"),
        (PROMPTED, ANSWERS[2:], "<end>\nt</think>Ciao<end>\n", "Ciao"),
        (ENDING, [CHAT], "Yo<|end|>Ciao<|end|><|endoftext|>", "YoCiao"),
        (MARKING, [CHAT[1:3]], "Yo<end>", "Yo"),
        (BEGINNING, [CHAT[2:4], CHAT[2:]], "Yo<end>\nYo<end>\n<think>t</think>Ciao<end>\n", "YoYoCiao"),
    ],
)
def test_templates_may_write_the_last_turn_or_the_end_otherwise(
    tokenizer: PreTrainedTokenizerFast, template: str, chats: list[list[dict[str, str]]], learns: str, says: str
) -> None:
    tokenizer.chat_template = template
    table = table_of(tokenizer, RowFormat(messages="m"), length=256, m=chats)
    assert learnt(tokenizer, table) == learns
    assert sum(table["bytes"]) == len(says)


def test_white_space_is_learnt_where_the_tokenizer_reports_it_as_empty(tokenizer: PreTrainedTokenizerFast) -> None:
    tokenizer.backend_tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    table = table_of(tokenizer, RowFormat(prompt="q", completion="a"), q=["def f():"], a=["\n  return 1\n"])
    assert learnt(tokenizer, table) == "\n  return 1\n<|endoftext|>"


def test_the_end_is_learnt_also_where_the_tokenizer_puts_it(tokenizer: PreTrainedTokenizerFast) -> None:
    end = ("<|endoftext|>", END)
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<|endoftext|> $A <|endoftext|>", pair="$A $B", special_tokens=[end]
    )
    table = table_of(tokenizer, RowFormat(prompt="q", completion="a"), q=["2+2="], a=["4"])
    assert learnt(tokenizer, table) == "4<|endoftext|>"


def test_a_long_text_is_tokenized_slice_by_slice(
    tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = ["ab\ncd\n" * 5 + "x" * 30 + "ü", "short", "", "é\n" * 20]
    whole = table_of(tokenizer, RowFormat(text="text"), length=10, text=texts)[:]
    monkeypatch.setattr("src.data.documents.SLICE", 7)
    assert table_of(tokenizer, RowFormat(text="text"), length=10, text=texts)[:] == whole
    assert sum(whole["bytes"]) == len("".join(texts).encode())


def test_packing_keeps_each_chunk_whole_and_fills_the_sequences(tokenizer: PreTrainedTokenizerFast) -> None:
    random = np.random.default_rng(0)
    texts = ["x" * int(n) for n in random.integers(1, 40, 300)]
    table = table_of(tokenizer, RowFormat(text="text"), text=texts)
    together, apart = pack(table, 64), unpacked(table)
    assert sorted(together.rows.tolist()) == list(range(300)) == apart.rows.tolist()
    sizes = [
        sum(len(chunk["input_ids"]) for chunk in sequence)
        for sequence in together.__getitems__([*range(len(together))])
    ]
    assert max(sizes) <= 64
    assert sum(sizes) == sum(table["length"])
    assert len(together) <= 1.05 * -(-sum(sizes) // 64)
    assert together.describe(64)["padding"] == pytest.approx(1 - sum(sizes) / (64 * len(together)))


def test_documents_in_a_sequence_have_positions_of_their_own() -> None:
    task = CausalLM(dataset="x", architecture={"model_type": "llama"}, sequence_length=8)
    chunk = {"input_ids": np.array([5, 6, 7], np.int32), "labels": np.array([6, -100, 8], np.int32), "bytes": 2}
    batch = task.collate([[chunk, chunk], [chunk]])
    assert batch["position_ids"].tolist() == [[0, 1, 2, 0, 1, 2, 3, 4], [0, 1, 2, 3, 4, 5, 6, 7]]  # padding goes on
    assert batch["index"].tolist() == [0, 2, 3, 5, 8, 10]
    assert batch["targets"].tolist() == [6, 8] * 3
    assert batch["bytes"].tolist() == [4, 2]
    assert task.count_tokens(batch) == (9, 16)


def rows_file(folder: Path) -> Path:
    file = folder / "rows.jsonl"
    file.write_text("".join(json.dumps({"text": f"row {i}"}) + "\n" for i in range(20)))
    return file


def book(folder: Path) -> Path:
    (folder / "book.txt").write_text("0123456789" * 10)
    return folder / "book.txt"


@pytest.mark.parametrize("data", [rows_file, book])
def test_tokenizing_and_cutting_are_done_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, data: Callable[[Path], Path]
) -> None:
    def written() -> dict[Path, float]:
        return {file: file.stat().st_mtime for file in (tmp_path / "cache").rglob("*.arrow")}

    settings = {"dataset": str(data(tmp_path)), "architecture": {"model_type": "llama"}, "sequence_length": 32}
    first, cached = CausalLM(**settings).build_datasets(), written()
    again = CausalLM(**settings).build_datasets()
    assert [part.describe(32) for part in again] == [part.describe(32) for part in first]
    assert written() == cached
    CausalLM(**settings | {"train_on_prompts": True}).build_datasets()
    assert (others := written()).keys() > cached.keys()
    monkeypatch.setattr("src.data.text.CODE", ["a change of it"])
    CausalLM(**settings).build_datasets()
    assert written().keys() > others.keys()


def test_a_share_is_kept_for_evaluation_the_same_in_each_run(tmp_path: Path) -> None:
    task = CausalLM(dataset=str(rows_file(tmp_path)), eval_fraction=0.25)
    rows, _ = task.load_rows()
    train, evaluation = task.split(rows)
    assert (len(train), len(evaluation)) == (15, 5)
    assert sorted([*train["text"], *evaluation["text"]]) == sorted(rows["text"])
    assert task.split(rows)[1]["text"] == evaluation["text"]
    assert task.model_copy(update={"split_seed": 1}).split(rows)[1]["text"] != evaluation["text"]
    last = task.model_copy(update={"eval_from": "last"}).split(rows)[1]
    assert last["text"] == [f"row {i}" for i in range(15, 20)]


def test_a_single_text_is_cut_near_its_end(tmp_path: Path) -> None:
    task = CausalLM(dataset=str(book(tmp_path)), architecture={"model_type": "llama"}, sequence_length=32)
    train, evaluation = task.build_datasets()
    assert (len(train.chunks), len(evaluation.chunks)) == (3, 1)
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
def test_each_kind_of_file_is_read_as_it_stands(tmp_path: Path, name: str, content: str) -> None:
    (tmp_path / name).write_text(content)
    rows, evaluation = CausalLM(dataset=str(tmp_path / name)).load_rows()
    assert rows["text"][:] == ["a, b", "null"]
    assert evaluation is None


def test_parquet_and_folders_with_splits_in_the_names(tmp_path: Path) -> None:
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


def test_a_split_that_is_not_used_need_not_be_readable(tmp_path: Path) -> None:
    """And the others may have other columns, as in GLUE."""
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / "README.txt").write_text("not data")
    for name, text in (("train", "text\tlabel\na\t1\n"), ("dev", "id\ttext\tlabel\n0\tb\t1\n"), ("test", "")):
        (folder / f"{name}.tsv").write_text(text)
    train, evaluation = CausalLM(dataset=str(folder)).load_rows()
    assert evaluation is not None
    assert (train["text"][:], evaluation["text"][:]) == (["a"], ["b"])


def test_columns_can_be_named(tmp_path: Path) -> None:
    (tmp_path / "rows.tsv").write_text("it's \"fine\t1\nNA\t0\n")
    rows, _ = CausalLM(dataset=str(tmp_path / "rows.tsv"), column_names=["words", "label"]).load_rows()
    assert rows[:] == {"words": ["it's \"fine", "NA"], "label": ["1", "0"]}
