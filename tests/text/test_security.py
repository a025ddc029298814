"""Text, tables and their metadata from strangers cost no hours, and what is damaged is one line. Their models:
test_bad_text.py and test_tools.py."""

import json
import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import parquet

from src.config.errors import UserError
from src.tasks.text import files
from src.tasks.text.chats import CHATML, encode_messages, render_chat, with_date
from src.tasks.text.rows import open_files, read_file
from src.tasks.text.tokenizing import byte_tokenizer
from tests.text import tiny


@pytest.fixture(autouse=True)
def _no_hours() -> Iterator[None]:
    """Let each test compute for 30 s at most, however loaded the machine is."""

    def stop(*_: Any) -> None:
        raise AssertionError("it would take hours")

    signal.signal(signal.SIGVTALRM, stop)
    signal.setitimer(signal.ITIMER_VIRTUAL, 30)
    yield
    signal.setitimer(signal.ITIMER_VIRTUAL, 0)


PIECES = ("\n", "<", "<think", "<think>", "</think>", "<think>\n", "think", "[", '"', "\\", "1", "\n/", "</think", "<|")


@pytest.mark.parametrize("piece", PIECES)
@pytest.mark.parametrize("begins", ["", "<", "<think>"])
def test_a_chat_is_read_in_a_time_that_grows_with_its_length(piece: str, begins: str) -> None:
    """100 kB of a content, a thought or an argument."""
    tokenizer: Any = byte_tokenizer()
    tokenizer.chat_template = CHATML
    text = begins + piece * (100_000 // len(piece))
    call = {"function": {"name": "f", "arguments": {"a": text}}}
    for message in ({"content": text + "x"}, {"content": "x", "reasoning_content": text + "x"}, {"tool_calls": [call]}):
        chat = [tiny.chat("q")[0], {"role": "assistant", "content": "", **message}]
        for turns in (chat, [*chat, *tiny.chat("q", "y")]):
            with suppress(UserError):  # ChatML leaves something out
                render_chat(turns, None, tokenizer, train_on_prompts=False)
    tokenizer.chat_template = f"{{# {text} {'strftime_now(' + chr(39)} #}}"
    encode_messages(tiny.chat("q"), tokenizer.chat_template)
    with_date(tokenizer, "2026-01-01")


def test_a_chat_has_5000_messages_at_most() -> None:
    """Each of the assistant's turns is found by writing all before it again."""
    chat = tiny.chat("q") * 5_001
    with pytest.raises(ValueError, match="not a list of messages, 5,000 at most"):
        encode_messages(chat, "")
    assert json.loads(encode_messages(chat[1:], "")) == chat[1:]


def rows(file: str) -> list[tuple[Any, str]]:
    """Return the text of each row of a file, and why it cannot be used."""
    return [(record.row.get("text"), record.reason) for record in read_file(str(Path(file).resolve()), ["text"])]


def test_a_header_may_have_many_columns() -> None:
    names = ["text", *(f"column {i}" for i in range(80_000))]
    tiny.write({"a.csv": f"{','.join(names)}\none\n", "b.csv": f"{','.join(names)},column 7\none\n"})
    assert rows("a.csv") == [("one", "")]
    with pytest.raises(UserError, match="^[^\n]*b.csv: cannot be read: two columns are called column 7$"):
        rows("b.csv")


def test_a_file_that_is_nested_too_deeply_is_tried_once(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []
    monkeypatch.setattr(files, "time", SimpleNamespace(sleep=waits.append))
    tiny.write({"a.json": "[" * 100_000 + "]" * 100_000})
    too_deep = "(maximum recursion depth exceeded|Stack overflow)"  # the latter since Python 3.15
    with pytest.raises(UserError, match=f"^[^\n]*a.json: cannot be read: {too_deep}[^\n]*$"):
        rows("a.json")
    assert not waits


DAMAGED: dict[str, bytes] = {
    "no JSON": b"{",
    "too deep": b"[" * 100_000,
    "null": b"null",
    "no text": b"\xff",
    "features of numbers": b'{"info": {"features": [1]}}',
    "unknown": b'{"info": {"features": {"text": {"_type": "Tensor9"}}}}',
    "a function": b'{"info": {"features": {"text": {"_type": "partial"}}}}',
    "no dtype": b'{"info": {"features": {"text": {"_type": "Value", "dtype": "wat"}}}}',
}


@pytest.mark.parametrize("metadata", DAMAGED.values(), ids=DAMAGED)
def test_damaged_metadata_of_a_table_are_one_line_for_each_file(metadata: bytes) -> None:
    for name in "ab":
        tiny.write({f"{name}.parquet": tiny.content(".parquet", [{"text": "one"}], {"huggingface": metadata})})
    with pytest.raises(UserError) as error:
        open_files(files.find_files("."), [], "data")
    lines = str(error.value).replace(f"{Path.cwd()}/", "").splitlines()
    says = "parquet: cannot be read: its metadata are not those of `datasets`: "
    assert [line.partition(says)[0] for line in lines] == ["a.", "b."]


def test_a_value_that_is_not_the_promised_json_is_a_bad_row() -> None:
    features = b'{"info": {"features": {"text": {"_type": "Json"}}}}'
    table = pa.table({"text": ['"one"', "{", "[" * 100_000]}).replace_schema_metadata({"huggingface": features})
    parquet.write_table(table, "a.parquet")
    good, *bad = rows("a.parquet")
    assert good == ("one", "")
    assert [reason.partition(": ")[0] for _, reason in bad] == ["text cannot be read"] * 2
