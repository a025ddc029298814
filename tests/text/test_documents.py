"""From rows to sequences and batches: what is learnt of text, prompts, chats and labelled rows, that packing drops and
mixes nothing, what --dry-run and tables show of it, and that other data are another run."""

import dataclasses
import json
import os
import re
from fnmatch import fnmatchcase
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from datasets import Dataset
from pyarrow import parquet
from tokenizers import AddedToken, Regex, Tokenizer, pre_tokenizers, processors, trainers
from tokenizers import models as kinds
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedTokenizerFast

from src.checkpoint.compatibility import require_same_data
from src.config.config import changed_settings, config_from
from src.config.errors import UserError
from src.tasks import TASKS
from src.tasks.text.chats import CHATML, ChatEncoder, as_tools, encode_chat
from src.tasks.text.export import save
from src.tasks.text.packing import pack
from src.tasks.text.rows import require_text
from src.tasks.text.text_classification import TextClassification
from src.tasks.text.tokenizing import Chunker, Columns, byte_tokenizer
from src.training.state import RunInputs
from tests.faults.runs import ORIGIN
from tests.launching import Launch
from tests.text import tiny
from tests.text.tiny import END, write

TEXT, PAIR, CHATS = {"text": "t"}, {"prompt": "q", "completion": "a"}, {"messages": "m"}


def chunks(
    row_format: Columns,
    length: int = 512,
    train_on_prompts: bool = False,
    template: str | None = None,
    post_processor: Any = None,
    **columns: list[Any],
) -> Dataset:
    """The table of chunks that is made of the columns, with byte_tokenizer or a variant of it."""
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = template or tokenizer.chat_template
    if post_processor is not None:
        tokenizer.backend_tokenizer.post_processor = post_processor
    encoders: dict[str, Any] = {"messages": ChatEncoder(str(tokenizer.chat_template)), "tools": as_tools}
    rows = {
        column: [encoders.get(role, require_text)(value) for value in columns[column]]
        for role, column in row_format.items()
    }
    if "messages" in row_format:
        chats = (dict(zip(rows, row, strict=True)) for row in zip(*rows.values(), strict=True))
        rows = {"chat": [encode_chat(chat, row_format, tokenizer, train_on_prompts) for chat in chats]}
        row_format = {"chat": "chat"}
    return Chunker(row_format, tokenizer, length, train_on_prompts, 10**6).make_chunks(Dataset.from_dict(rows), "test")


def learnt(table: Dataset) -> str:
    """What has to be predicted, all chunks in a row."""
    labels = np.concatenate(table["labels"])
    return str(byte_tokenizer().decode(labels[labels != -100]))


CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Yo"},
    {"role": "user", "content": "Bye"},
    {"role": "assistant", "content": "Ciao"},
]
QWEN = (  # its marks, its empty place for thoughts, which only the last turn keeps, its calls of tools
    "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and loop.last %}<think>\n\n</think>\n\n{% endif %}{{ m.content | trim }}"
    "{% for call in m.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
THINKING = (  # as Qwen3 does: what was thought stands only in the answers after the user's last turn
    "{% for m in messages %}<{{ m.role }}>{% if m.role == 'assistant' and loop.last %}<think>t</think>{% endif %}"
    "{{ m.content }}<end>\n{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
PROMPTED = THINKING.replace("<assistant>{% endif %}", "<assistant><think>{% endif %}")  # as DeepSeek-R1 does
# Qwen3's, and Qwen3.5's, whose generation prompt has its beginning
EMPTY, PROMPTED_EMPTY = THINKING.replace(">t<", ">\n\n<"), PROMPTED.replace(">t<", ">\n\n<")
MARKING = (  # where the chat ends
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    "{{ '<assistant>' if add_generation_prompt else '<end>' }}"
)
REWRITING = "{{ messages | length }}{% for m in messages %}{{ m.content }}{% endfor %}"
MARKS_TEXT = "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}!{% endgeneration %}"
MARKED_REWRITING = REWRITING.replace("{{ m.content }}", MARKS_TEXT + "{% else %}{{ m.content }}{% endif %}")
OWN_THOUGHT = [CHAT[1], {"role": "assistant", "content": "<think></think>Yo"}]
PAIRS = {"q": ["2+2=", "ä"], "a": ["4", "ö!"]}
LONG: dict[str, Any] = {"q": ["12345", "1"], "a": ["abcdef", "b"], "length": 8}
TRIMS = processors.ByteLevel(trim_offsets=True)  # reports tokens of white space as empty


@pytest.mark.parametrize(
    ("row_format", "given", "learns"),
    [
        (TEXT, {"t": ["héllo €"]}, f"héllo €{END}"),
        (PAIR, PAIRS, f"4{END}ö!{END}"),
        (PAIR, {**PAIRS, "train_on_prompts": True}, f"2+2=4{END}äö!{END}"),
        (PAIR, LONG, f"abcb{END}"),  # the rest is cut off
        (PAIR, {"q": ["def f():"], "a": ["\n  return 1\n"], "post_processor": TRIMS}, f"\n  return 1\n{END}"),
        (CHATS, {"m": [CHAT]}, f"Yo{END}Ciao{END}"),
        # Templates may write the last turn or the end otherwise.
        (CHATS, {"m": [CHAT], "template": THINKING}, "Yo<end>\n<think>t</think>Ciao<end>\n"),
        (CHATS, {"m": [CHAT], "template": PROMPTED}, "Yo<end>\nt</think>Ciao<end>\n"),
        (CHATS, {"m": [CHAT[1:3]], "template": MARKING}, "Yo<end>"),
        # Thoughts that a template writes for those that a turn doesn't have.
        (CHATS, {"m": [CHAT], "template": EMPTY}, "Yo<end>\nCiao<end>\n"),
        (CHATS, {"m": [CHAT], "template": PROMPTED_EMPTY}, "Yo<end>\nCiao<end>\n"),
        (CHATS, {"m": [OWN_THOUGHT], "template": MARKING}, "<think></think>Yo<end>"),
        # Marks decide where there are any. Tried without: the assistant's name is learnt; others are refused.
        (CHATS, {"m": [CHAT[:2], CHAT[:3]], "template": MARKED_REWRITING}, "Yo!"),
    ],
)  # fmt: skip
def test_what_is_learnt(row_format: Columns, given: dict[str, Any], learns: str) -> None:
    table = chunks(row_format, **given)
    assert learnt(table) == learns
    for chunk in table:
        ids, labels = chunk["input_ids"], chunk["labels"]
        assert ids[0] == 256 or row_format == CHATS or "post_processor" in given
        assert len(ids) == len(labels) == chunk["length"] <= given.get("length", 512)
        assert all(label in (-100, following) for label, following in zip(labels[:-1], ids[1:], strict=True))


def test_long_text_makes_several_chunks_and_long_prompts_are_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokenized at once or slice by slice."""
    texts = ["ab\ncd\n" * 5 + "x" * 30 + "ü", "short", "é\n" * 20]
    table = chunks(TEXT, length=10, t=texts)
    assert learnt(table) == "".join(text + END for text in texts)
    assert max(table["length"]) == 10
    assert not any(table["truncated"])
    assert chunks(PAIR, **LONG)["truncated"] == [True, False]
    monkeypatch.setattr("src.tasks.text.tokenizing.SLICE", 7)
    monkeypatch.setattr("src.tasks.text.tokenizing.OVERLAP", 3)
    assert chunks(TEXT, length=10, t=texts)[:] == table[:]


def test_chats_of_other_kinds_are_learnt_as_the_usual_ones() -> None:
    """ShareGPT's names, other names and cases of roles, content in parts. An answer of weight 0 is not learnt."""
    names = {"system": "system", "user": "Human", "assistant": "gpt"}
    sharegpt = [{"from": names[m["role"]], "value": m["content"]} for m in CHAT]
    parts = [{"role": names[m["role"]], "content": [{"type": "text", "text": c} for c in m["content"]]} for m in CHAT]
    cased = [m | {"role": f" {m['role'].upper()}"} for m in CHAT]
    whole = chunks(CHATS, m=[CHAT])
    for chat in (sharegpt, parts, cased):
        assert chunks(CHATS, m=[chat])[:] == whole[:]
    weighed = [{"weight": 0 if m["content"] == "Yo" else None, **m} for m in CHAT]
    assert learnt(whole) == f"Yo{END}{learnt(chunks(CHATS, m=[weighed]))}"
    for empty in ("", " \n"):  # as an empty completion is
        with pytest.raises(ValueError, match=r"has a message 2 that is empty \(its role is assistant\)"):
            chunks(CHATS, m=[[CHAT[1], {"role": "assistant", "content": empty}]])


def test_roles_that_neither_the_standard_nor_the_template_knows_are_named_with_their_turns() -> None:
    narrated = "{% for m in messages if m.role in ['assistant', 'narrator'] %}{{ m.content }}{% endfor %}"
    assert learnt(chunks(CHATS, m=[[{"role": "Narrator", "content": "Once"}, CHAT[2]]], template=narrated)) == "Yo"
    chat = [{"role": role, "content": "a"} for role in ("user", "Bot", "user", "bot", "narrator")]
    with pytest.raises(ValueError, match="of unknown roles, bot, narrator: neither system"):
        chunks(CHATS, m=[chat])


@pytest.mark.parametrize(
    ("row_format", "templated", "plain"),
    [
        (TEXT, {"t": [f"{END}hi{END}", f"{END}hi", f"hi{END}", "hi"]}, {"t": ["hi"] * 4}),
        (PAIR, {"q": [f"{END}hi", "hi"], "a": [f"yo{END}", "yo"]}, {"q": ["hi"] * 2, "a": ["yo"] * 2}),
    ],
)
def test_rows_with_a_first_and_last_token_get_no_second_one(row_format: Columns, templated: Any, plain: Any) -> None:
    """As a template has written them. Tried without: two of each."""
    marked, bare = chunks(row_format, **templated), chunks(row_format, **plain)
    for name in ("input_ids", "labels", "targets"):
        assert marked[name][:] == bare[name][:]
    # white space may follow, as ChatML has it. Tried without: a second end after it
    spaced: list[tuple[Columns, Any]] = [
        (TEXT, {"t": [f"{END}hi{END}\n"]}),
        (PAIR, {"q": ["hi"], "a": [f"yo{END} \n"]}),
    ]
    for columns, written in spaced:
        assert learnt(chunks(columns, **written)).count(END) == 1


def test_calls_of_tools_are_learnt_with_their_arguments_as_they_were_written() -> None:
    """And the tools that there are. Tried with the nulls taken out, and with one type for all rows."""
    arguments: list[Any] = [
        '{"city": "Bern"}', {"date": "2024-01-04", "n": None}, {"n": "1", "date": None}, {"n": 1.0, "x": [{"a": None}]},
    ]  # fmt: skip
    chats = [
        [
            {"role": "user", "content": "Bern?", "tool_calls": None},
            {"role": "assistant", "tool_calls": [{"id": None, "function": {"name": "weather", "arguments": of}}]},
            {"role": "tool", "content": "rain", "tool_calls": None},
            {"role": "assistant", "content": "Rain.", "tool_calls": None},
        ]
        for of in arguments
    ]
    tools = [json.dumps([{"function": {"name": "weather"}}])]
    form = {"messages": "m", "tools": "t"}
    for without, begins in ((chats[0], r"Bern\?"), (CHAT[1:3], "Hi")):
        with pytest.raises(ValueError, match=f"leaves out 'weather' of the chat that begins with '{begins}'"):
            chunks(form, m=[without], t=tools)
    table = chunks(form, m=chats, t=tools * 4, template=QWEN)
    written = [of if isinstance(of, str) else json.dumps(of) for of in arguments]
    turns = [f'<tool_call>{{"name": "weather", "arguments": {of}}}</tool_call><|im_end|>\n' for of in written]
    assert learnt(table) == "".join(f"{turn}Rain.<|im_end|>\n" for turn in turns)
    text = str(byte_tokenizer().decode(table[0]["input_ids"]))
    assert text.startswith('<|im_start|>system\n[{"function": {"name": "weather"}}]')


def test_an_evaluation_shows_the_hardest_texts_by_the_loss_per_token() -> None:
    """Not those that are longest, nor one without a target first. Tried with the loss of a sequence: the long one."""
    texts = ["short", "long " * 400, "empty", *(f"text {i}" for i in range(20))]
    write({"rows.jsonl": [{"prompt": "Say it:", "completion": text} for text in texts]})
    task = tiny.task(dataset="rows.jsonl", eval_from="all", packing=False, sequence_length=4096)
    _, dataset = task.build_datasets()
    targets = torch.tensor([5.0, 2000.0, 0.0] + [6.0] * 20)
    nats = torch.tensor([10.0, 100.0, 0.0] + [6.0] * 20)
    rows = task.tables({"nats": nats, "targets": targets, "correct": targets}, dataset)["hardest"]
    assert [row["loss"] for row in rows] == [2.0] + [1.0] * 7
    for row, text in zip(rows, ["short", *texts[3:]], strict=False):
        assert row["text"].endswith(f"────\n<|endoftext|>Say it:⟦{text}<|endoftext|>⟧")
    nats[1] = 1e6
    (longest, *_) = task.tables({"nats": nats, "targets": targets, "correct": targets}, dataset)["hardest"]
    assert "long long" in longest["text"]
    assert len(longest["text"]) == 1000


def test_a_prompt_and_a_completion_of_messages_are_a_chat_whose_completion_is_learnt() -> None:
    """As TRL has them, with tools or without. Tried without: prompt is list, not text."""
    row = {"prompt": CHAT[:4], "completion": CHAT[4:]}
    shows = f"<|endoftext|><system>Be brief.{END}<user>Hi{END}<assistant>Yo{END}<user>Bye{END}<assistant>⟦Ciao{END}⟧"
    assert shown(row, packing=False).split("────\n")[1] == shows
    with pytest.raises(UserError, match="line 2: prompt is not a list of messages, 5,000 at most; 1 of 2 rows"):
        shown(row, {"prompt": "Hi", "completion": "Yo"})


def test_a_template_that_rewrites_earlier_turns_is_refused() -> None:
    with pytest.raises(ValueError, match="rewrites earlier turns"):
        chunks(CHATS, m=[CHAT], template=REWRITING)
    assert learnt(chunks(CHATS, m=[CHAT], template=REWRITING, train_on_prompts=True)).startswith("Be brief.HiYo")


# ------------------------------------------------------------------------------------- what a template has to write
ROLES = "{% for m in messages %}<{{ m.role }}>"
PLAIN = ROLES + "{{ m.content }}{% endfor %}"
LIKE_QWEN3 = (
    ROLES
    + "{% if m.reasoning_content and loop.last %}({{ m.reasoning_content }}){% endif %}{{ m.content }}{% endfor %}"
)
WANTS_PARTS = ROLES + "{% for part in m.content if part.type == 'text' %}{{ part.text }}{% endfor %}{% endfor %}"
ASKED = {"role": "user", "content": "What is 0 plus 0?"}
FUNCTION = {"name": "weather", "arguments": '{"city": "Bern", "days": [{"n": 70}]}'}
ANSWERED: dict[str, Any] = {"role": "assistant", "content": "0"}


@pytest.mark.parametrize(
    ("template", "chat", "missing"),
    [
        (PLAIN, [ASKED, ANSWERED | {"reasoning_content": "I add."}], "I add."),
        (PLAIN, [ASKED, ANSWERED | {"thinking": "I add."}], "I add."),
        (PLAIN, [ASKED, {"role": "assistant", "content": "", "function_call": FUNCTION}], "weather"),
        (PLAIN, [ASKED, ANSWERED | {"tool_calls": [{"function": FUNCTION}]}], "weather"),
        (QWEN.replace("call.function", "call.function.name"), [ASKED, {**ANSWERED, "function_call": FUNCTION}], "city"),
        (WANTS_PARTS, [ASKED, ANSWERED], ASKED["content"]),
        # An answer that is a part of its question. Tried with looking for it anywhere.
        (ROLES + "{% if m.role == 'user' %}{{ m.content }}{% endif %}{% endfor %}", [ASKED, ANSWERED], "0"),
        (PLAIN.replace("messages", "messages[1:]"), [CHAT[0], ASKED, ANSWERED], "Be brief."),
        # Thoughts within the content, as DeepSeek-R1's template leaves them out.
        (
            PLAIN.replace("content", "content.split('</think>')[-1]"),
            [ASKED, ANSWERED | {"content": "<think>I add.</think>0"}],
            "I add.",
        ),
        # What is beside a thought.
        (
            ROLES + "{{ m.content if loop.last else m.content.split('</think>')[-1] }}{% endfor %}",
            [ASKED, ANSWERED | {"content": "Sure. <think>I add.</think>0"}, ASKED, ANSWERED],
            "Sure. ",
        ),
        (
            ROLES + "{{ m.content if loop.last else m.content.split('</think>')[-1] }}{% endfor %}",
            [ASKED, ANSWERED | {"content": "I add.</think>0"}, ASKED, ANSWERED],
            None,
        ),
        (PLAIN.replace("content", "content.replace('\\n\\n', '\\n')"), [ASKED, ANSWERED | {"content": "0\n\n1"}], None),
        # What may be left out or written otherwise: earlier thoughts, white space, as JSON, and SmolLM3's flag.
        (LIKE_QWEN3, [ASKED, ANSWERED | {"thinking": "I add."}, ASKED, ANSWERED | {"thinking": "Again."}], None),
        (PLAIN.replace("content", "content | trim"), [ASKED, ANSWERED | {"content": " 0\n"}], None),
        (PLAIN.replace("content", "content | tojson"), [ASKED, ANSWERED | {"content": 'She said:\n"0"'}], None),
        (
            PLAIN.replace("content", "content.replace('/no_think', '').rstrip()"),
            [{"role": "system", "content": "Be brief. /no_think"}, ASKED, ANSWERED],
            None,
        ),
    ],
)
def test_what_a_chat_says_and_its_template_does_not_write_is_refused(
    template: str, chat: list[Any], missing: str | None
) -> None:
    """Contents, thoughts and calls, to each value in their arguments. Tried without: they are not learnt."""
    if missing is None:
        chunks(CHATS, m=[chat], template=template, train_on_prompts=True)
        return
    says = (
        f"leaves out {missing!r} of the chat that begins with {chat[0]['content']!r}: set --task.chat_template=chatml"
    )
    with pytest.raises(UserError, match=re.escape(says)):
        chunks(CHATS, m=[chat], template=template, train_on_prompts=True)


def test_chatml_writes_tools_calls_and_thoughts_as_qwen3_does() -> None:
    """Written out as Qwen3's template writes it, but for the empty thoughts. Earlier thoughts are left out."""
    call = {"function": {"name": "weather", "arguments": {"city": "Bern"}}}
    chat: list[Any] = [
        CHAT[0],
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Yo", "reasoning_content": "left out"},
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": "Let me see.", "thinking": "Ask.", "tool_calls": [call, call]},
        *[{"role": "tool", "content": "rain"}] * 2,
        {"role": "assistant", "content": "", "function_call": call["function"]},
        {"role": "function", "content": "sun"},
        {"role": "assistant", "content": "Mixed.", "reasoning_content": "So."},
    ]
    tool = {"type": "function", "function": {"name": "weather"}}
    written = '<tool_call>\n{"name": "weather", "arguments": {"city": "Bern"}}\n</tool_call>'
    turns = [
        f"<think>\nAsk.\n</think>\n\nLet me see.\n{written}\n{written}<|im_end|>\n",
        f"{written}<|im_end|>\n",
        "<think>\nSo.\n</think>\n\nMixed.<|im_end|>\n",
    ]
    table = chunks({"messages": "m", "tools": "t"}, 4096, m=[chat], t=[[tool]], template=CHATML)
    assert learnt(table) == "".join(["Yo<|im_end|>\n", *turns])
    answers = "<|im_start|>assistant\n"
    results = "<tool_response>\nrain\n</tool_response>"
    assert str(byte_tokenizer().decode(table[0]["input_ids"])) + "\n" == (
        "<|im_start|>system\nBe brief.\n\n# Tools\n\n"
        "You may call one or more functions to assist with the user query.\n\n"
        "You are provided with function signatures within <tools></tools> XML tags:\n"
        '<tools>\n{"type": "function", "function": {"name": "weather"}}\n</tools>\n\n'
        "For each function call, return a json object with function name and arguments within "
        '<tool_call></tool_call> XML tags:\n<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n'
        "</tool_call><|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
        f"{answers}Yo<|im_end|>\n<|im_start|>user\nWeather?<|im_end|>\n{answers}{turns[0]}"
        f"<|im_start|>user\n{results}\n{results}<|im_end|>\n{answers}{turns[1]}"
        f"<|im_start|>user\n<tool_response>\nsun\n</tool_response><|im_end|>\n{answers}{turns[2]}"
    )


def test_a_role_token_that_takes_in_the_space_after_it_is_not_learnt() -> None:
    """Tried without: `<|assistant|>` is, as it ends within the answer."""
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens(
        [AddedToken(f"<|{name}|>", special=True, rstrip=True) for name in ("user", "assistant", "end")]
    )
    tokenizer.chat_template = (
        "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}<|end|>{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
    )
    chat = ChatEncoder(tokenizer.chat_template)([CHAT[1], {"role": "assistant", "content": "    return 0 "}])
    rows = Dataset.from_dict({"chat": [encode_chat({"m": chat}, CHATS, tokenizer, train_on_prompts=False)]})
    table = Chunker({"chat": "chat"}, tokenizer, 64, False, 10**6).make_chunks(rows, "test")
    (labels,) = np.array(table["labels"])
    assert tokenizer.decode(labels[labels != -100]) == "return 0 <|end|>"


@pytest.mark.parametrize("scheme", ["first", "always", "never"])
def test_long_text_is_cut_where_the_tokenizer_cuts(monkeypatch: pytest.MonkeyPatch, scheme: str) -> None:
    """Its tokens are those of the whole text, though the tokenizer puts a space before each text that it gets, or joins
    line ends. Tried with slices that end with a line: a space too many in each, and a line end for two."""
    text = "".join(np.random.default_rng(0).choice(["ab", " ", "\n", "\n\n", "ü", "😀", "abc "], 4000))
    tokenizer = Tokenizer(kinds.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(r"\n+"), "isolated"), pre_tokenizers.Metaspace(prepend_scheme=scheme),
    ])  # fmt: skip
    trainer = trainers.BpeTrainer(vocab_size=60, special_tokens=["<unk>", END], show_progress=False)
    tokenizer.train_from_iterator([text], trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END)
    whole = tokenizer.encode(text, add_special_tokens=False)
    monkeypatch.setattr("src.tasks.text.tokenizing.SLICE", 300)
    monkeypatch.setattr("src.tasks.text.tokenizing.OVERLAP", 60)
    table = Chunker(TEXT, fast, 10**5, False, 10**6).make_chunks(Dataset.from_dict({"t": [text]}), "test")
    assert table[0]["input_ids"] == whole.ids
    pair = {"q": [text[:500]], "a": [text[500:]]}
    table = Chunker(PAIR, fast, 10**5, False, 10**6).make_chunks(Dataset.from_dict(pair), "test")
    targets = sum(end > 500 for _, end in whole.offsets) + 1
    assert (table[0]["input_ids"], table[0]["targets"]) == (whole.ids, targets)


# --------------------------------------------------------------------------------------------------- ends of a turn
def test_a_template_that_ends_no_turn_with_a_special_token_is_refused(models: Path) -> None:
    """The model would never stop. Tried without: it is trained. One that only rejects a simple chat is not refused."""
    write(
        {
            "none.jinja": PLAIN,
            "line.jinja": PLAIN.replace("{% endfor", "\n{% endfor"),
            "eos.jinja": PLAIN + "{{ eos_token }}",
        }
    )
    for template in ("chatml", "none.jinja", "line.jinja"):
        says = f"task.chat_template={template} ends a turn without a * token *: list its marks in task.new_tokens,*"
        with pytest.raises(UserError) as error:
            _ = tiny.task(model=str(models / "llama"), chat_template=template)._tokenizer
        assert fnmatchcase(str(error.value), says)
    marks = ["<|im_start|>", "<|im_end|>"]
    assert tiny.task(chat_template="chatml", new_tokens=marks)._tokenizer.eos_token == "<|im_end|>"
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens(marks)  # not special, but tokens
    tokenizer.save_pretrained("known")
    assert tiny.task(chat_template="chatml", tokenizer="known")._tokenizer.eos_token == "<|im_end|>"
    write({"strict.jinja": "{{ raise_exception('wants a system message') }}"})
    for template in ("eos.jinja", "strict.jinja"):
        assert tiny.task(chat_template=template)._tokenizer.eos_token == END


@pytest.mark.parametrize(("eos", "ends"), [("<|endoftext|>", [256, 258]), ("<|end|>", [258, 256])])
def test_a_base_model_is_exported_to_end_a_turn(models: Path, tmp_path: Path, eos: str, ends: list[int]) -> None:
    """And still where it ended before. Tried without the mark of the template: [256]."""
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|end|>"]})
    tokenizer.chat_template, tokenizer.eos_token = "{% for m in messages %}{{ m.content }}<|end|>{% endfor %}", eos
    model: Any = AutoModelForCausalLM.from_pretrained(models / "llama")
    save(model, tokenizer, model.state_dict(), tmp_path / "model")
    assert GenerationConfig.from_pretrained(tmp_path / "model").eos_token_id == ends
    assert AutoConfig.from_pretrained(tmp_path / "model").eos_token_id == tokenizer.eos_token_id


# ---------------------------------------------------------------------------------------------------------- packing
def test_packing_keeps_each_chunk_whole_and_fills_the_sequences() -> None:
    texts = ["x" * int(n) for n in np.random.default_rng(0).integers(1, 40, 300)]
    table = chunks(TEXT, length=64, t=texts)
    together, apart = pack(table, 64, 300), pack(table, None, 300)
    rows, alone = (packed.sequences.flatten().to_pylist() for packed in (together, apart))
    assert sorted(rows) == list(range(300)) == alone
    sequences = together.__getitems__([*range(len(together))])
    sizes = [sum(len(chunk["input_ids"]) for chunk in sequence) for sequence in sequences]
    assert max(sizes) <= 64
    assert sum(sizes) == sum(table["length"])
    assert together.describe(64)["padding"] == pytest.approx(1 - sum(sizes) / (64 * len(together)))
    assert together.describe(64)["padding"] < 0.05


def test_documents_in_a_sequence_have_positions_of_their_own() -> None:
    """Padding goes on, and is a document where lengths are given; empty ones make their number a power of two. Pairs
    of tokens are counted as the model's masks have them: tried with the square of the length."""
    task = tiny.task(dataset="x", sequence_length=8)
    chunk = {"input_ids": np.array([5, 6, 7], np.int32), "labels": np.array([6, -100, 8], np.int32)}
    batch = task.collate([[chunk, chunk], [chunk]])
    inputs = batch["inputs"]
    assert inputs["position_ids"].tolist() == [[0, 1, 2, 0, 1, 2, 3, 4], [*range(8)]]
    assert inputs["index"].tolist() == [0, 2, 3, 5, 8, 10]
    assert inputs["targets"].tolist() == [6, 8] * 3
    assert task.count(batch) == {"targets": 6, "tokens": 9, "padded_tokens": 16}
    counts: Any = SimpleNamespace(flops=(10_000, 100, 1))
    assert task.flops(counts, batch) == 90_618
    assert inputs["cu_seq_lens_q"].tolist() == [0, 3, 6, 8, 11, 16, 16, 16, 16]
    assert (inputs["cu_seq_lens_q"].dtype, inputs["max_length_q"], type(inputs["max_length_q"])) == (
        torch.int32,
        8,
        int,
    )


# ----------------------------------------------------------------------------------------------------------- files
ROWS = [{"text": f"row {i}"} for i in range(20)]
FILES: dict[str, Any] = {"rows.jsonl": ROWS, "book.txt": "0123456789" * 10}


def loaded(files: dict[str, Any], **settings: Any) -> list[list[str]]:
    """The texts of these files to train and to evaluate on."""
    task = tiny.task(dataset=write(files), packing=False, **settings)
    return [tiny.texts_of(part.__getitems__([*range(len(part))])) for part in task.build_datasets()]


@pytest.mark.parametrize("dataset", FILES)
def test_tokenizing_and_cutting_are_done_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dataset: str) -> None:
    """A file's content decides, not its time, which tar and rsync set. Tried without: the old rows."""

    def read(content: bytes = tiny.content(dataset, FILES[dataset]), **more: bool) -> tuple[list[str], set[Path]]:
        Path(dataset).write_bytes(content)
        os.utime(dataset, (10**9, 10**9))
        task = tiny.task(dataset=dataset, sequence_length=32, **more)
        prints = [task.fingerprint(part) for part in task.build_datasets()]
        return prints, {*(tmp_path / "cache").rglob("*.arrow")}

    prints, cached = read()
    assert read() == (prints, cached)
    changed, more = read(Path(dataset).read_bytes().translate(bytes.maketrans(b"19", b"78")))
    assert not {*prints} & {*changed}
    assert read() == (prints, more)
    _, others = read(train_on_prompts=True)
    assert others > more
    monkeypatch.setattr("src.tasks.text.rows.CODE", ["a change of it"])
    assert read()[1] > others


def test_columns_that_are_not_read_may_have_anything() -> None:
    """Such as Postgres' infinity, a date beyond the year 9999. Tried without: the file is read six times, in vain."""
    rows = pa.table({"text": ["one"] * 20, "at": pa.array([2**63 - 1] * 20, pa.timestamp("us"))})
    parquet.write_table(rows, "rows.parquet")
    task = tiny.task(dataset="rows.parquet", packing=False)
    assert [len(part) for part in task.build_datasets()] == [18, 2]


def test_a_share_is_kept_for_evaluation_the_same_in_each_run() -> None:
    """At random, or the last rows. A single text is cut near its end."""
    parts, again = (loaded({"rows.jsonl": ROWS}, eval_fraction=0.25) for _ in range(2))
    assert parts == again
    assert [len(part) for part in parts] == [15, 5]
    assert sorted(parts[0] + parts[1]) == sorted(row["text"] for row in ROWS)
    _, last = loaded({"rows.jsonl": ROWS}, eval_fraction=0.25, eval_from="last")
    assert last == [f"row {i}" for i in range(15, 20)]
    train, evaluation = loaded({"book.txt": FILES["book.txt"]}, sequence_length=32)
    assert ("".join(train), evaluation) == ("0123456789" * 9, ["0123456789"])


ONE: list[Any] = [{"text": "one"}]
NAMES = ("my-train-0", "training", "my_dev", "testData", "train_test_split_test", ".train_backup")
SPLITS: dict[str, tuple[dict[str, Any], dict[str, Any], list[list[str]]]] = {
    # Kinds of files, as other programs write them; their values: test_reading.py.
    "pandas', with its index": ({"a.CSV": ",text\n0,one\n"}, {"text_column": "text"}, [["one"]]),
    # Names of files say their split, and hidden ones are not read. Tried without: the backup is trained on too.
    **{
        f"names, {asked} to evaluate on": (
            {f"data/{name}.parquet": [{"text": name}] for name in NAMES}, {"eval_split": asked},
            [["my-train-0", "training"], found],
        )
        for asked, found in ((None, ["my_dev"]), ("test", ["testData", "train_test_split_test"]))
    },
    # So may folders. Tried without: what is to be evaluated on is trained on.
    "folders": (
        {f"data/{name}.jsonl": [{"text": name}] for name in ("train/a", "train/b", "Test/a", ".cache/a")}, {},
        [["train/a", "train/b"], ["Test/a"]],
    ),
    "as it was downloaded": (
        {"hub/README.md": "---\n---\n", "hub/data/test-0.jsonl": [{"text": "b"}], "hub/data/train-0.jsonl": ONE}, {},
        [["one"], ["b"]],
    ),
    # A split that is not used need not be readable, and the others may have no columns that are named, as in GLUE.
    "without a header": (
        {"data/train.tsv": "it's \"fine\t1\nNA\t0\n", "data/dev.tsv": "b\t1\n", "data/test.tsv": "",
         "data/README.txt": "no data"},
        {"column_names": ["words", "label"], "text_column": "words"}, [["it's \"fine", "NA"], ["b"]],
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", SPLITS)
def test_files_of_each_kind_are_read_as_they_stand_and_names_say_their_split(case: str) -> None:
    files, settings, expected = SPLITS[case]
    if len(expected) == 1:
        settings, expected = settings | {"eval_from": "all"}, expected * 2
    assert loaded(files, **settings) == expected


# ----------------------------------------------------------------------------------------------------- --dry-run
def shown(*rows: Any, **settings: Any) -> str:
    """The first example of these rows."""
    settings = {"sequence_length": 256, "eval_from": "all", **settings}
    task = tiny.task(dataset=write({"rows.jsonl": rows}), **settings)
    return task.preview(task.build_datasets()[0], 0)


def test_the_assistants_turns_are_marked_and_packed_documents_ruled_off() -> None:
    """Tried with marks that are not shifted: ⟦>Yo⟧; and without the last label: no end mark."""
    beginning = f"{END}<system>Be brief.{END}<user>Hi{END}"
    assert shown({"messages": CHAT}, {"messages": CHAT[3:]}).splitlines() == [
        "93 tokens, 13 of them (14.0%) contribute to the loss",
        "──── document 1 of 2 ────",
        f"{beginning}<assistant>⟦Yo{END}⟧<user>Bye{END}<assistant>⟦Ciao{END}⟧",
        "──── document 2 of 2 ────",
        f"{END}<user>Bye{END}<assistant>⟦Ciao{END}⟧",
    ]


@pytest.mark.parametrize(
    ("rows", "settings", "expected"),
    [
        ([{"messages": CHAT}] * 4, {}, "4 chats in 2 sequences of 256"),
        ([{"messages": CHAT}] * 4, {"packing": False}, "4 chats in 4 sequences of 256"),
        ([{"prompt": "Q:", "completion": "A"}], {}, "1 prompt in 1 sequence of 256"),
        ([{"text": "a" * 1000}], {}, "1 text in 4 sequences of 256"),
    ],
)
def test_the_data_are_said_in_rows_and_sequences(rows: Any, settings: dict[str, Any], expected: str) -> None:
    """So that packing is not taken for a loss. Tried with the number of sequences alone."""
    task = tiny.task(dataset=write({"rows.jsonl": rows}), sequence_length=256, eval_from="all", **settings)
    assert task.dataset_size(task.build_datasets()[0]) == expected


@pytest.mark.parametrize(
    ("row", "settings", "expected"),
    [
        ({"text": "añb"}, {}, f"{END}⟦añb{END}⟧"),
        ({"prompt": "Q:", "completion": " A"}, {"train_on_prompts": True}, f"{END}⟦Q: A{END}⟧"),
        ({"messages": [*CHAT[3:], CHAT[1]]}, {}, f"{END}<user>Bye{END}<assistant>⟦Ciao{END}⟧<user>Hi"),
        # cut off: of what is not read, the next token is shown if it contributes
        ({"prompt": "Q:", "completion": "ABC"}, {"sequence_length": 4}, f"{END}Q:⟦AB⟧"),
    ],
)
def test_what_is_read_and_what_contributes(row: Any, settings: dict[str, Any], expected: str) -> None:
    assert shown(row, packing=False, **settings).split("────\n")[1] == expected


def test_mistakes_show_the_texts_as_they_were_written_in_the_order_of_the_evaluation_set(models: Path) -> None:
    """Tried without the order by length: the texts are another example's. Tried without the cut."""
    rows = ["A\tlong  text, CAFÉ\tits second\tyes\n", f"B\t{'x' * 300}\tb\tno\n", "C\tShort\tc\tyes\n"]
    tiny.write({f"data/{name}.tsv": "id\tfirst\tsecond\tlabel\n" + "".join(rows) for name in ("train", "dev")})
    pair = {"text_column": "first", "text_pair_column": "second"}
    task = tiny.task(TextClassification, model=str(models / "bert"), dataset="data", **pair)
    _, evaluation = task.build_datasets()
    references = torch.tensor(evaluation["label"][:])
    outputs = {"references": references, "predictions": 1 - references, "probabilities": torch.eye(2)[1 - references]}
    mistakes = task.tables(outputs, evaluation)["mistakes"]
    named = {row["index"]: (row["text"], row["text_pair"], row["label"], row["prediction"]) for row in mistakes}
    assert named == {
        0: ("Short", "c", "yes", "no"),
        1: ("long  text, CAFÉ", "its second", "yes", "no"),
        2: ("x" * 200, "b", "no", "yes"),
    }


SWAPPED = {"falling": "rising", "rising": "falling"}


@pytest.mark.parametrize(
    ("name", "edit", "says"),
    [
        ("*.tsv", lambda text: text.replace("falling", "low"), '["falling", "rising"] -> ["low", "rising"]'),
        ("train.tsv", lambda text: re.sub("falling|rising", lambda m: SWAPPED[m[0]], text), "labels to train on"),
        ("dev.tsv", lambda text: text.replace("the", "teh"), "other text, images or labels to evaluate on"),
        ("train.tsv", lambda text: "\n".join([*text.split("\n")[:1], *text.split("\n")[:0:-1]]), "other text, images"),
    ],
)
def test_other_data_are_another_run(models: Path, tmp_path: Path, name: str, edit: Any, says: str) -> None:
    """Renamed or swapped labels, edited or moved texts: each is named. Tried with comparing the number of examples."""

    def origin(reviews: Path) -> RunInputs:
        task = tiny.task(TextClassification, model=f"{models}/bert", dataset=str(reviews))
        data = task.build_datasets()
        fingerprints = [task.fingerprint(part) for part in data]
        return dataclasses.replace(ORIGIN, data_state=task.state.data, fingerprints=fingerprints)

    then = origin(tiny.reviews(tmp_path / "reviews"))
    reviews = (tmp_path / "reviews").rename(tmp_path / "moved")
    require_same_data(Path("step"), then, origin(reviews))
    for file in reviews.glob(name):
        file.write_text(edit(file.read_text()))
    with pytest.raises(ValueError, match=re.escape(says)):
        require_same_data(Path("step"), then, origin(reviews))


def test_a_date_in_a_chat_template_is_that_of_the_runs_start(launch: Launch, tmp_path: Path) -> None:
    """The same on all processes and after a resume without the cache, and the summary says so. Tried without: the
    processes read different rows, and the resumed run is refused as one of other data."""
    tiny.chats(tmp_path / "chats.jsonl")
    dated = "<{{ strftime_now( '%d %b %Y, %H:%M:%S.%f') }}>" + byte_tokenizer().get_chat_template()
    write({"dated.jinja": dated})
    data = ("--task.name=causal_lm", f"--task.dataset={tmp_path}/chats.jsonl", "--task.sequence_length=128")
    arguments = (*data, *tiny.NEW_LLAMA, "--global_batch_size=4", f"--task.chat_template={tmp_path}/dated.jinja")
    runs = [
        launch(
            "ddp", *arguments, f"--max_steps={steps}", folder=tmp_path / "run", processes=2,
            before=f"import datasets; datasets.config.HF_DATASETS_CACHE = '{tmp_path}/{steps}'",
        ).succeeded()
        for steps in (1, 2)
    ]  # fmt: skip
    said = [re.findall("chats are dated ([-0-9]+ [:0-9]+)", "".join(run.stdout.split("\n    "))) for run in runs]
    assert len(said[0]) == 1
    assert said[0] == said[1]
    plain, written = (
        tiny.task(dataset="chats.jsonl", sequence_length=128, **more) for more in ({}, {"chat_template": "dated.jinja"})
    )
    written.state.date = "2026-02-03 04:05:06"
    parts = [task.build_datasets()[0] for task in (plain, written)]
    assert (plain.state.data, plain.state.optimizations) == ({}, [])
    assert written.state.data == {"date": "2026-02-03 04:05:06"}
    assert "03 Feb 2026, 04:05:06.000000" in written.preview(parts[1], 0)
    assert written._tokenizer.chat_template == dated
    later = tiny.task(dataset="chats.jsonl", sequence_length=128, chat_template="dated.jinja")
    later.state.date = "2026-02-03 04:05:07"  # other rows, though these are cached
    assert "04:05:07.000000" in later.preview(later.build_datasets()[0], 0)


def test_a_change_within_a_mapping_is_a_change() -> None:
    """Tried with comparing only what is no mapping."""
    task = {"name": "causal_lm", "architecture": {"model_type": "llama"}}
    now = config_from({"task": task, "output_dir": "run"}, TASKS)
    then = now.model_dump(mode="json")
    assert changed_settings(now, then) == {}
    then["task"]["architecture"]["hidden_act"] = "relu"
    assert list(changed_settings(now, then)) == ["task.architecture"]
