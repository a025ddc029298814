"""From rows to batches: which tokens are learnt, packing drops and mixes nothing, and changed data are another run."""

import dataclasses
import json
import os
import re
from contextlib import nullcontext
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset
from tokenizers import AddedToken, Regex, Tokenizer, pre_tokenizers, processors, trainers
from tokenizers import models as kinds
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedTokenizerFast

from src.checkpoint.compatibility import require_same_data
from src.config.config import changed_settings, config_from
from src.config.errors import UserError
from src.tasks import TASKS
from src.tasks.text.chats import CHATML
from src.tasks.text.export import save
from src.tasks.text.packing import best_fit
from src.tasks.text.text_classification import TextClassification
from src.tasks.text.tokenizing import Chunker, byte_tokenizer
from tests.faults.runs import ORIGIN
from tests.launching import Launch
from tests.text import tiny
from tests.text.tiny import END, write

CHAT = [{"role": "system", "content": "Be brief."}, *tiny.chat("Hi", "Yo", "Bye", "Ciao")]
SYSTEM, ASKED, ANSWERED = CHAT[:3]


def shown(*rows: Any, **settings: Any) -> str:
    """Return the first sequence of these rows as --dry-run shows it, below its header, with what is learnt in ⟦ ⟧. A
    `template` is the tokenizer's own."""
    if template := settings.pop("template", None):
        tokenizer = byte_tokenizer()
        tokenizer.chat_template = template
        tokenizer.save_pretrained("templated")
        settings["tokenizer"] = "templated"
    settings = {"sequence_length": 4096, "eval_from": "all", "packing": False} | settings
    task = tiny.task(dataset=write({"rows.jsonl": rows}), **settings)
    dataset, _ = task.build_datasets()
    for chunk in dataset.chunks:
        assert len(chunk["input_ids"]) == len(chunk["labels"]) == chunk["length"] <= settings["sequence_length"]
        following = zip(chunk["labels"][:-1], chunk["input_ids"][1:], strict=True)
        assert all(label in (-100, token) for label, token in following)
    return task.preview(dataset, 0).partition("────\n")[2]


# ------------------------------------------------------------------------------------------------- what is learnt
ROLES = "{% for m in messages %}<{{ m.role }}>"
PLAIN = ROLES + "{{ m.content }}{{ eos_token }}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
# as Qwen3 does: thoughts are written only into the last answer
THOUGHT = "{% if m.role == 'assistant' and loop.last %}<think>t</think>{% endif %}"
THINKING = PLAIN.replace("{{ m.content", THOUGHT + "{{ m.content")
PROMPTED = THINKING.replace("<assistant>{% endif %}", "<assistant><think>{% endif %}")  # as DeepSeek-R1 does
EMPTY, PROMPTED_EMPTY = THINKING.replace(">t<", ">\n\n<"), PROMPTED.replace(">t<", ">\n\n<")  # as Qwen3.5 does
MARKING_THE_END = ROLES + "{{ m.content }}{% endfor %}{{ '<assistant>' if add_generation_prompt else eos_token }}"
REWRITING = "{{ messages | length }}{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}"
STRICT = "{{ raise_exception('wants a system message') }}"
MARKED = REWRITING.replace("{{ m.content }}", "{% generation %}{{ m.content }}!{% endgeneration %}")
PROMPT = f"{END}<system>Be brief.{END}<user>Hi{END}<assistant>"
EARLIER = f"<system>Be brief.{END}<user>Hi{END}<assistant>⟦Yo{END}⟧<user>Bye{END}<assistant>"
LEARNT: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({"text": "añb €"}, {}, f"{END}⟦añb €{END}⟧"),
    ({"prompt": "2+2=", "completion": "ö!"}, {}, f"{END}2+2=⟦ö!{END}⟧"),
    ({"prompt": "Q:", "completion": " A"}, {"train_on_prompts": True}, f"{END}⟦Q: A{END}⟧"),
    # cut off: the next token is shown if it is learnt
    ({"prompt": "Q:", "completion": "ABC"}, {"sequence_length": 4}, f"{END}Q:⟦AB⟧"),
    ({"messages": CHAT}, {}, f"{PROMPT}⟦Yo{END}⟧<user>Bye{END}<assistant>⟦Ciao{END}⟧"),
    ({"messages": CHAT[:4]}, {}, f"{PROMPT}⟦Yo{END}⟧<user>Bye"),
    # TRL's prompts and completions of messages
    ({"prompt": CHAT[:4], "completion": CHAT[4:]}, {}, f"{PROMPT}Yo{END}<user>Bye{END}<assistant>⟦Ciao{END}⟧"),
    # a template may write the last turn otherwise, or mark the end of the chat alone
    ({"messages": CHAT}, {"template": THINKING}, f"{EARLIER}⟦<think>t</think>Ciao{END}⟧"),
    ({"messages": CHAT}, {"template": PROMPTED}, f"{EARLIER}<think>⟦t</think>Ciao{END}⟧"),
    ({"messages": CHAT[1:3]}, {"template": MARKING_THE_END}, f"<user>Hi<assistant>⟦Yo{END}⟧"),
    # empty thoughts that the template adds are not learnt, but those of the data are
    ({"messages": CHAT}, {"template": EMPTY}, f"{EARLIER}<think>\n\n</think>⟦Ciao{END}⟧"),
    ({"messages": CHAT}, {"template": PROMPTED_EMPTY}, f"{EARLIER}<think>\n\n</think>⟦Ciao{END}⟧"),
    ({"messages": tiny.chat("Hi", "<think></think>Yo")}, {}, f"{END}<user>Hi{END}<assistant>⟦<think></think>Yo{END}⟧"),
    # where a template marks what it generates, that is learnt
    ({"messages": tiny.chat("Hi")}, {"template": MARKED, "train_on_prompts": True}, f"1⟦Hi!{END}⟧"),
    ({"messages": tiny.chat("Hi", "Yo")}, {"template": MARKED}, f"2⟦Hi!⟧{END}⟦Yo!⟧"),
    # the first and the last token are not doubled where a template has written them
    ({"text": f"{END}hi{END}"}, {}, f"{END}⟦hi{END}⟧"),
    ({"text": f"hi{END}\n"}, {}, f"{END}⟦hi{END}\n⟧"),
    ({"prompt": f"{END}hi", "completion": f"yo{END} \n"}, {}, f"{END}hi⟦yo{END} \n⟧"),
]  # fmt: skip


@pytest.mark.parametrize(("row", "settings", "expected"), LEARNT)
def test_answers_and_text_are_learnt_but_prompts_are_not(row: Any, settings: dict[str, Any], expected: str) -> None:
    assert shown(row, **settings) == expected


def test_chats_in_other_formats_are_the_same_chats() -> None:
    """ShareGPT's names, other names and cases of roles, content in parts. An answer of weight 0 is not learnt."""
    names = {"system": "system", "user": "Human", "assistant": "gpt"}
    expected = shown({"messages": CHAT})
    for chat in (
        [{"from": names[m["role"]], "value": m["content"]} for m in CHAT],
        [{"role": names[m["role"]], "content": [{"type": "text", "text": c} for c in m["content"]]} for m in CHAT],
        [m | {"role": f" {m['role'].upper()}"} for m in CHAT],
    ):
        assert shown({"messages": chat}) == expected
    weighed = [{"weight": 0 if m["content"] == "Yo" else None, **m} for m in CHAT]
    assert shown({"messages": weighed}) == expected.replace(f"⟦Yo{END}⟧", f"Yo{END}")
    narrated = PLAIN.replace("messages %}", "messages if m.role in ['assistant', 'narrator'] %}")
    assert "Once" in shown({"messages": [{"role": "Narrator", "content": "Once"}, ANSWERED]}, template=narrated)


def test_argument_values_of_tool_calls_are_learnt_as_they_were_written() -> None:
    """Dates, nulls and numbers, in rows whose types differ; and the model is given the tools."""
    calls = "{% for call in m.tool_calls or [] %}{{ call.function | tojson }}{% endfor %}{{ eos_token }}"
    template = "{{ tools | tojson }}" + PLAIN.replace("{{ eos_token }}", calls)
    arguments: list[Any] = ['{"city": "Bern"}', {"date": "2024-01-04", "n": None}, {"n": 1.0, "x": [{"a": None}]}]
    functions = [{"name": "weather", "arguments": value} for value in arguments]
    rain = {"role": "tool", "content": "rain", "tool_calls": None}
    chats = [[ASKED, {"role": "assistant", "tool_calls": [{"id": None, "function": f}]}, rain] for f in functions]
    tools = json.dumps([{"function": {"name": "weather"}}])
    found = shown(*({"messages": chat, "tools": tools} for chat in chats), template=template, packing=True)
    for value in arguments:
        written = value if isinstance(value, str) else json.dumps(value)
        assert f'<assistant>⟦{{"name": "weather", "arguments": {written}}}{END}⟧<tool>rain' in found
    assert found.startswith('[{"function": {"name": "weather"}}]<user>Hi')


KEEPS_THE_LAST = PLAIN.replace("m.content", "m.content if loop.last else m.content.split('</think>')[-1]")
WEATHER = {"name": "weather", "arguments": '{"city": "Bern", "days": [{"n": 70}]}'}
UNWRITTEN: list[tuple[str, list[Any], str | None]] = [
    (PLAIN, [ASKED, ANSWERED | {"reasoning_content": "I add."}], "I add."),
    (PLAIN, [ASKED, ANSWERED | {"thinking": "I add."}], "I add."),
    (PLAIN, [ASKED, {"role": "assistant", "content": "", "function_call": WEATHER}], "weather"),
    (PLAIN, [ASKED, ANSWERED | {"tool_calls": [{"function": WEATHER}]}], "weather"),
    (PLAIN.replace("m.content", "m.tool_calls[0].function.name if m.tool_calls else m.content"),
     [ASKED, {"role": "assistant", "content": "", "function_call": WEATHER}], "city"),
    # content that a template expects in parts
    (PLAIN.replace("m.content", "m.content[0].text"), [ASKED, ANSWERED], "Yo"),
    # an answer that is a part of its question
    (PLAIN.replace("m.content", "m.content if m.role == 'user'"), tiny.chat("0 plus 0?", "0"), "0"),
    (PLAIN.replace("messages", "messages[1:]"), CHAT, "Be brief."),
    # DeepSeek-R1's template leaves out thoughts within the content
    (PLAIN.replace("content", "content.split('</think>')[-1]"), tiny.chat("Hi", "<think>I add.</think>0"), "I add."),
    (KEEPS_THE_LAST, tiny.chat("Hi", "Sure. <think>I add.</think>0", "And?", "1"), "Sure. "),
    # earlier thoughts may be left out, and text may be written as JSON, with other white space or without a flag
    (KEEPS_THE_LAST, tiny.chat("Hi", "I add.</think>0", "And?", "1"), None),
    (PLAIN.replace("content", "content.replace('\\n\\n', '\\n') | trim"), tiny.chat("Hi", " 0\n\n1\n"), None),
    (PLAIN.replace("content", "content | tojson"), tiny.chat("Hi", 'She said:\n"0"'), None),
    (PLAIN.replace("content", "content.replace('/no_think', '')"), tiny.chat("Hi /no_think", "Yo"), None),
]  # fmt: skip


@pytest.mark.parametrize(("template", "chat", "missing"), UNWRITTEN)
def test_a_chat_is_refused_if_its_template_leaves_something_out(
    template: str, chat: list[Any], missing: str | None
) -> None:
    """Contents, thoughts and calls, down to each value in their arguments."""
    says = f"leaves out {missing!r} of the chat that begins with {chat[0]['content']!r}: set --task.chat_template="
    with pytest.raises(UserError, match=re.escape(says)) if missing else nullcontext():
        shown({"messages": chat}, template=template, train_on_prompts=True)


@pytest.mark.parametrize(
    ("row", "settings", "says"),
    [
        ({"messages": CHAT}, {"template": REWRITING}, "rewrites earlier turns"),
        ({"messages": tiny.chat("Hi", " \n")}, {}, "has a message 2 that is empty (its role is assistant)"),
        ({"messages": [ASKED, ANSWERED | {"role": "Bot"}]}, {}, "of unknown roles, bot: neither system"),
        ({"messages": [ASKED, ANSWERED], "tools": [{"function": {"name": "sum"}}]}, {}, "leaves out 'sum' of the chat"),
        ({"prompt": [ASKED], "completion": "Yo"}, {}, "completion is not a list of messages, 5,000 at most"),
    ],
)
def test_a_chat_that_cannot_be_read_is_refused(row: Any, settings: dict[str, Any], says: str) -> None:
    with pytest.raises(UserError, match=re.escape(says)):
        shown(row, **settings)


def test_chatml_writes_tools_calls_and_thoughts_as_qwen3_does() -> None:
    """But for empty thoughts. Earlier thoughts are left out."""
    tool, call = (
        {"type": "function", "function": {"name": "weather"}},
        {"name": "weather", "arguments": {"city": "Bern"}},
    )
    chat: list[Any] = [
        *CHAT[:2], ANSWERED | {"reasoning_content": "left out"}, {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": "Let me see.", "thinking": "Ask.", "tool_calls": [{"function": call}] * 2},
        *[{"role": "tool", "content": "rain"}] * 2, {"role": "assistant", "content": "", "function_call": call},
        {"role": "function", "content": "sun"}, ANSWERED | {"reasoning_content": "So."},
    ]  # fmt: skip
    written = '<tool_call>\n{"name": "weather", "arguments": {"city": "Bern"}}\n</tool_call>'
    user, answer, end = "<|im_start|>user\n", "<|im_start|>assistant\n", "<|im_end|>\n"
    results = "<tool_response>\nrain\n</tool_response>\n<tool_response>\nrain\n</tool_response>"
    system, _, turns = shown({"messages": chat, "tools": [tool]}, template=CHATML).partition(f"</tool_call>{end}")
    assert system.startswith("<|im_start|>system\nBe brief.\n\n# Tools\n\nYou may call one or more functions to ")
    assert '<tools>\n{"type": "function", "function": {"name": "weather"}}\n</tools>\n\nFor each function' in system
    assert turns == (
        f"{user}Hi{end}{answer}⟦Yo{end}⟧{user}Weather?{end}"
        f"{answer}⟦<think>\nAsk.\n</think>\n\nLet me see.\n{written}\n{written}{end}⟧"
        f"{user}{results}{end}{answer}⟦{written}{end}⟧"
        f"{user}<tool_response>\nsun\n</tool_response>{end}{answer}⟦<think>\nSo.\n</think>\n\nYo{end}⟧"
    )


def test_tokens_of_an_answer_are_found_whatever_offsets_the_tokenizer_has() -> None:
    """Some report white space as empty, or let a role's token take in the space after it."""
    tokenizer = byte_tokenizer()
    tokenizer.backend_tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    tokenizer.save_pretrained("trims")
    asked = {"prompt": "def f():", "completion": "\n  return 1\n"}
    assert shown(asked, tokenizer="trims") == f"def f():⟦\n  return 1\n{END}⟧"
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens([AddedToken(f"<|{role}|>", special=True, rstrip=True) for role in ("assistant", "end")])
    turn = "<|{{ m.role }}|>\n{{ m.content }}<|end|>{% endfor %}"
    tokenizer.chat_template = (
        "{% for m in messages %}" + turn + "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
    )
    tokenizer.save_pretrained("strips")
    assert "⟦return 0 <|end|>⟧" in shown({"messages": tiny.chat("Hi", "    return 0 ")}, tokenizer="strips")


@pytest.mark.parametrize("scheme", ["first", "always", "never"])
def test_long_text_has_the_tokens_that_it_has_as_a_whole(monkeypatch: pytest.MonkeyPatch, scheme: str) -> None:
    """Though it is tokenized slice by slice, and the tokenizer puts a space before each or joins line ends."""
    text = "".join(np.random.default_rng(0).choice(["ab", " ", "\n", "\n\n", "ü", "😀", "abc "], 4000))
    tokenizer = Tokenizer(kinds.BPE(unk_token="<unk>"))
    line_ends = pre_tokenizers.Split(Regex(r"\n+"), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([line_ends, pre_tokenizers.Metaspace(prepend_scheme=scheme)])
    trainer = trainers.BpeTrainer(vocab_size=60, special_tokens=["<unk>", END], show_progress=False)
    tokenizer.train_from_iterator([text], trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END)
    whole = tokenizer.encode(text, add_special_tokens=False)
    monkeypatch.setattr("src.tasks.text.tokenizing.SLICE", 300)
    monkeypatch.setattr("src.tasks.text.tokenizing.OVERLAP", 60)
    for row, start in (({"text": text}, 0), ({"prompt": text[:500], "completion": text[500:]}, 500)):
        chunker = Chunker(dict(zip(row, row, strict=True)), fast, 10**5, False, 10**6)
        (chunk,) = chunker.make_chunks(Dataset.from_list([row]), "test")
        assert chunk["input_ids"] == whole.ids
        assert chunk["targets"] == sum(end > start for _, end in whole.offsets) + bool(start)


# ---------------------------------------------------------------------------------------------------- ends of a turn
def test_a_template_that_ends_no_turn_with_a_special_token_is_refused(models: Path) -> None:
    """The model would never stop. A template that only rejects a simple chat is not refused."""
    write({"none.jinja": PLAIN.replace("{{ eos_token }}", "\n"), "eos.jinja": PLAIN, "strict.jinja": STRICT})
    for template in ("chatml", "none.jinja"):
        says = rf"task.chat_template={template} ends a turn without a .* token .*: list its marks in task.new_tokens,"
        with pytest.raises(UserError, match=says):
            _ = tiny.task(model=str(models / "llama"), chat_template=template)._tokenizer
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens(["<|im_start|>", "<|im_end|>"])  # not special, but tokens
    tokenizer.save_pretrained("known")
    for template, settings, eos in (
        ("chatml", {"new_tokens": ["<|im_start|>", "<|im_end|>"]}, "<|im_end|>"),
        ("chatml", {"tokenizer": "known"}, "<|im_end|>"),
        ("eos.jinja", {}, END),
        ("strict.jinja", {}, END),
    ):
        assert tiny.task(chat_template=template, **settings)._tokenizer.eos_token == eos


@pytest.mark.parametrize(("eos", "ends"), [("<|endoftext|>", [256, 258]), ("<|end|>", [258, 256])])
def test_an_exported_base_model_stops_at_the_end_of_a_turn(models: Path, eos: str, ends: list[int]) -> None:
    """And still where it stopped before."""
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|end|>"]})
    tokenizer.chat_template, tokenizer.eos_token = "{% for m in messages %}{{ m.content }}<|end|>{% endfor %}", eos
    model: Any = AutoModelForCausalLM.from_pretrained(models / "llama")
    save(model, tokenizer, model.state_dict(), Path("model"))
    assert GenerationConfig.from_pretrained("model").eos_token_id == ends
    assert AutoConfig.from_pretrained("model").eos_token_id == tokenizer.eos_token_id


# ----------------------------------------------------------------------------------------------------------- packing
def test_packing_keeps_each_document_whole_and_fills_the_sequences() -> None:
    lengths = np.random.default_rng(0).integers(1, 40, 300)
    sequences = best_fit(lengths, 64)
    assert sorted(chain(*sequences)) == [*range(300)]
    sizes = [lengths[sequence].sum() for sequence in sequences]
    assert max(sizes) <= 64
    assert sum(sizes) > 0.95 * 64 * len(sequences)


def test_packed_documents_have_positions_of_their_own() -> None:
    """Padding is a document to attention that takes lengths, and empty ones make their number a power of two. FLOPs
    count the pairs of tokens that the masks leave."""
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
    assert (inputs["cu_seq_lens_q"].dtype, inputs["max_length_q"]) == (torch.int32, 8)


def test_dry_run_shows_each_document_of_a_packed_sequence() -> None:
    """The size is given in chats too, so that packing is not taken for a loss, and what is cut off is counted."""
    data = write({"a.jsonl": [{"messages": CHAT}, {"messages": CHAT[3:]}]})
    task = tiny.task(dataset=data, sequence_length=256, eval_from="all")
    dataset, _ = task.build_datasets()
    assert task.dataset_size(dataset) == "2 chats in 1 sequence of 256"
    assert task.preview(dataset, 0).splitlines() == [
        "93 tokens, 13 of them (14.0%) contribute to the loss",
        "──── document 1 of 2 ────",
        f"{PROMPT}⟦Yo{END}⟧<user>Bye{END}<assistant>⟦Ciao{END}⟧",
        "──── document 2 of 2 ────",
        f"{END}<user>Bye{END}<assistant>⟦Ciao{END}⟧",
    ]
    assert task.describe("train", dataset)["truncated"] == 0
    short = tiny.task(dataset=data, sequence_length=64, eval_from="all")
    assert short.describe("train", short.build_datasets()[0])["truncated"] == 1


# ------------------------------------------------------------------------------------------------------------- files
ROWS = [{"text": f"row {i}"} for i in range(20)]
FILES: dict[str, Any] = {"rows.jsonl": ROWS, "book.txt": "0123456789" * 10}


def loaded(files: dict[str, Any], **settings: Any) -> list[list[str]]:
    """Return the texts of these files to train and to evaluate on."""
    task = tiny.task(dataset=write(files), packing=False, **settings)
    return [tiny.texts_of(part.__getitems__([*range(len(part))])) for part in task.build_datasets()]


@pytest.mark.parametrize("dataset", FILES)
def test_data_are_tokenized_once_until_content_settings_or_code_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dataset: str
) -> None:
    """Content decides, not the file's time, which tar and rsync set."""

    def read(content: bytes = tiny.content(dataset, FILES[dataset]), **more: bool) -> tuple[list[str], set[Path]]:
        Path(dataset).write_bytes(content)
        os.utime(dataset, (10**9, 10**9))
        task = tiny.task(dataset=dataset, sequence_length=32, **more)
        fingerprints = [task.fingerprint(part) for part in task.build_datasets()]
        return fingerprints, {*(tmp_path / "cache").rglob("*.arrow")}

    fingerprints, cached = read()
    assert read() == (fingerprints, cached)
    changed, more = read(Path(dataset).read_bytes().translate(bytes.maketrans(b"19", b"78")))
    assert not {*fingerprints} & {*changed}
    assert read() == (fingerprints, more)
    _, others = read(train_on_prompts=True)
    assert others > more
    monkeypatch.setattr("src.tasks.text.rows.CODE", ["a change of it"])
    assert read()[1] > others


def test_the_same_rows_are_held_out_for_evaluation_in_each_run() -> None:
    """At random, or the last rows. A single text is cut near its end."""
    parts, again = (loaded({"rows.jsonl": ROWS}, eval_fraction=0.25) for _ in range(2))
    assert parts == again
    assert [len(part) for part in parts] == [15, 5]
    assert sorted(parts[0] + parts[1]) == sorted(row["text"] for row in ROWS)
    _, last = loaded({"rows.jsonl": ROWS}, eval_fraction=0.25, eval_from="last")
    assert last == [f"row {i}" for i in range(15, 20)]
    train, evaluation = loaded({"book.txt": FILES["book.txt"]}, sequence_length=32)
    assert ("".join(train), evaluation) == ("0123456789" * 9, ["0123456789"])


NAMES = ("my-train-0", "training", "my_dev", "testData", "train_test_split_test", ".train_backup")
NAMED: dict[str, Any] = {f"data/{name}.parquet": [{"text": name}] for name in NAMES}
SPLITS: dict[str, tuple[dict[str, Any], dict[str, Any], list[list[str]]]] = {
    "names of files": (NAMED, {}, [["my-train-0", "training"], ["my_dev"]]),
    "names of files, test": (
        NAMED, {"eval_split": "test"}, [["my-train-0", "training"], ["testData", "train_test_split_test"]],
    ),
    "names of folders": (
        {f"data/{name}.jsonl": [{"text": name}] for name in ("train/a", "train/b", "Test/a", ".cache/a")}, {},
        [["train/a", "train/b"], ["Test/a"]],
    ),
    "a configuration that its card declares": (
        {"hub/README.md": "---\nconfigs:\n- config_name: small\n  data_files: [{split: train, path: a.jsonl}, "
         "{split: test, path: b.jsonl}]\n- config_name: large\n  data_files: c.jsonl\n---\n",
         "hub/a.jsonl": [{"text": "2024-01-04"}], "hub/b.jsonl": [{"text": "1.10"}], "hub/c.jsonl": ROWS},
        {"dataset_config": "small"}, [["2024-01-04"], ["1.10"]],
    ),
    # a split that is not used need not be readable
    "without a header": (
        {"data/train.tsv": "it's \"fine\t1\nNA\t0\n", "data/dev.tsv": "b\t1\n", "data/test.tsv": "",
         "data/README.txt": "no data"},
        {"column_names": ["words", "label"], "text_column": "words"}, [["it's \"fine", "NA"], ["b"]],
    ),
}  # fmt: skip


@pytest.mark.parametrize(("files", "settings", "expected"), SPLITS.values(), ids=SPLITS)
def test_names_tell_the_split_of_a_file_and_values_stay_as_they_are(
    files: dict[str, Any], settings: dict[str, Any], expected: list[list[str]]
) -> None:
    assert loaded(files, **settings) == expected


# ------------------------------------------------------------------------------------------- tables of an evaluation
def test_an_evaluation_shows_the_texts_with_the_highest_loss_per_token() -> None:
    """Not the longest ones, nor one without a target first."""
    texts = ["hard", "long " * 400, "empty", *"abcdefghij"]
    write({"rows.jsonl": [{"text": text} for text in texts]})
    task = tiny.task(dataset="rows.jsonl", eval_from="all", packing=False, sequence_length=4096)
    _, dataset = task.build_datasets()
    nats, targets = torch.tensor([10.0, 1000.0, 0.0] + [6.0] * 10), torch.tensor([5.0, 2000.0, 0.0] + [6.0] * 10)
    rows = task.tables({"nats": nats, "targets": targets, "correct": targets}, dataset)["hardest"]
    found = [(row["loss"], row["text"].partition("⟦")[2].partition(END)[0]) for row in rows]
    assert found == [(2.0, "hard"), *((1.0, text) for text in "abcdefg")]


def test_a_table_of_mistakes_has_the_texts_as_they_were_written(models: Path) -> None:
    """In the order of the evaluation set, which is by length, and cut after 200 characters."""
    rows = ["long  text, CAFÉ\tits second\tyes\n", f"{'x' * 300}\tb\tno\n", "Short\tc\tyes\n"]
    write({f"data/{name}.tsv": "text\tsecond\tlabel\n" + "".join(rows) for name in ("train", "dev")})
    task = tiny.task(TextClassification, model=str(models / "bert"), dataset="data", text_pair_column="second")
    _, evaluation = task.build_datasets()
    references = torch.tensor(evaluation["label"][:])
    outputs = {"references": references, "predictions": 1 - references, "probabilities": torch.eye(2)[1 - references]}
    mistakes = sorted(task.tables(outputs, evaluation)["mistakes"], key=lambda row: row["index"])
    assert [tuple(row[name] for name in ("text", "text_pair", "label", "prediction")) for row in mistakes] == [
        ("Short", "c", "yes", "no"), ("long  text, CAFÉ", "its second", "yes", "no"), ("x" * 200, "b", "no", "yes"),
    ]  # fmt: skip


# ------------------------------------------------------------------------------------------------------- other runs
@pytest.mark.parametrize(
    ("name", "pattern", "replacement", "says"),
    [
        ("*.tsv", "falling", "low", '["falling", "rising"] -> ["low", "rising"]'),
        ("train.tsv", "(fall|ris)(?=ing)", {"fall": "ris", "ris": "fall"}, "labels to train on"),
        ("dev.tsv", "the", "teh", "other text, images or labels to evaluate on"),
        ("train.tsv", r"\n(.*)\n(.*)\n", r"\n\2\n\1\n", "other text, images or labels to train on"),
    ],
)
def test_changed_data_are_another_run(models: Path, name: str, pattern: str, replacement: Any, says: str) -> None:
    """Renamed or swapped labels, edited or moved texts are named; a moved folder is the same data."""

    def inputs(reviews: str) -> Any:
        task = tiny.task(TextClassification, model=f"{models}/bert", dataset=reviews)
        fingerprints = [task.fingerprint(part) for part in task.build_datasets()]
        return dataclasses.replace(ORIGIN, data_state=task.state.data, fingerprints=fingerprints)

    then = inputs(str(tiny.reviews(Path("reviews"))))
    Path("reviews").rename("moved")
    require_same_data(Path("step"), then, inputs("moved"))
    swapped = replacement if isinstance(replacement, str) else lambda match: replacement[match[0]]
    for file in Path("moved").glob(name):
        file.write_text(re.sub(pattern, swapped, file.read_text()))
    with pytest.raises(ValueError, match=re.escape(says)):
        require_same_data(Path("step"), then, inputs("moved"))


def test_a_changed_field_of_the_architecture_is_a_changed_setting() -> None:
    task = {"name": "causal_lm", "architecture": {"model_type": "llama"}}
    now = config_from({"task": task, "output_dir": "run"}, TASKS)
    then = now.model_dump(mode="json")
    assert changed_settings(now, then) == {}
    then["task"]["architecture"]["hidden_act"] = "relu"
    assert list(changed_settings(now, then)) == ["task.architecture"]


def test_a_date_in_a_chat_template_is_that_of_the_runs_start(launch: Launch, tmp_path: Path) -> None:
    """The same on all processes and after resuming without the cache, and the summary says so."""
    tiny.chats(Path("chats.jsonl"))
    dated = "<{{ strftime_now( '%d %b %Y, %H:%M:%S.%f') }}>" + byte_tokenizer().get_chat_template()
    write({"dated.jinja": dated})
    data = ("--task.name=causal_lm", f"--task.dataset={tmp_path}/chats.jsonl", "--task.sequence_length=128")
    arguments = (*data, *tiny.NEW_LLAMA, "--global_batch_size=4", f"--task.chat_template={tmp_path}/dated.jinja")
    said = []
    for steps, yaml, processes in ((1, "ddp", 2), (2, "cpu", 1)):
        how: dict[str, Any] = {"folder": tmp_path / "run", "processes": processes}
        how["before"] = f"import datasets; datasets.config.HF_DATASETS_CACHE = '{tmp_path}/{steps}'"
        run = launch(yaml, *arguments, f"--max_steps={steps}", **how).succeeded()
        said += re.findall("chats are dated ([-0-9]+ [:0-9]+)", "".join(run.stdout.split("\n    ")))
    assert len(said) == 2
    assert said[0] == said[1]
    for date in ("2026-02-03 04:05:06", "2026-02-03 04:05:07"):  # though the first one's rows are cached
        task = tiny.task(dataset="chats.jsonl", sequence_length=128, chat_template="dated.jinja")
        task.state.date = date
        train, _ = task.build_datasets()
        assert task.state.data == {"date": date}
        assert f"03 Feb 2026, {date[11:]}.000000" in task.preview(train, 0)
        assert task._tokenizer.chat_template == dated
