"""What strangers send, as text, tables, models or adapters: it runs no code, and costs no hours."""

import io
import json
import shutil
import signal
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pyarrow as pa
import pytest
from pyarrow import parquet

from src.config.errors import UserError
from src.distributed.process import exit_codes
from src.tasks.text import files
from src.tasks.text.chats import CHATML, MAX_MESSAGES, ChatEncoder, render_chat, with_date
from src.tasks.text.rows import open_files, read_file
from src.tasks.text.tokenizing import byte_tokenizer
from src.tools.generate import main as generate  # room: tools
from tests.text import tiny

CODE = "open('it_ran', 'w')\nclass Mine: pass\n"


@pytest.fixture(autouse=True)
def _no_hours(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing here may compute for longer than this, however loaded the machine is; nor does anything wait."""

    def stop(*_: Any) -> None:
        raise AssertionError("it would take hours")

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    signal.signal(signal.SIGVTALRM, stop)
    signal.setitimer(signal.ITIMER_VIRTUAL, 30)
    yield
    signal.setitimer(signal.ITIMER_VIRTUAL, 0)


def copied(models: Path, folder: str, changes: dict[str, Any]) -> None:
    """A model that brings code, with these changes of its files."""
    shutil.copytree(models / "llama", folder)
    Path(folder, "mine.py").write_text(CODE)
    tiny.write({f"{folder}/{name}": fields for name, fields in changes.items()})


def line(error: Any) -> str:
    """What an error says, in one line, without the current folder's name."""
    assert "\n" not in str(error.value)
    return str(error.value).replace(f"{Path.cwd()}/", "")


# ------------------------------------------------------------ code that comes with a model

TOKENIZER = {"auto_map": {"AutoTokenizer": [None, "mine.Mine"]}, "tokenizer_class": "MineTokenizer"}
MODEL: dict[str, Any] = {"auto_map": dict.fromkeys(("AutoConfig", "AutoModel", "AutoModelForCausalLM"), "mine.Mine")}
MODEL |= {"model_type": "mine"}
BRINGS = {"a tokenizer": {"tokenizer_config.json": TOKENIZER}, "a model": {"config.json": MODEL}}


@pytest.mark.parametrize("changes", BRINGS.values(), ids=BRINGS)
def test_generate_asks_nobody_whether_to_run_a_models_code(  # room: tools
    models: Path, changes: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nor that of the base of adapters. The answer would come from its prompts. Tried without trust_remote_code=False:
    the tokenizer's runs."""
    copied(models, "theirs", changes)
    tiny.write({"adapters/adapter_config.json": '{"peft_type": "LORA", "base_model_name_or_path": "theirs"}'})
    for folder in ("theirs", "adapters"):
        monkeypatch.setattr(sys, "stdin", io.StringIO("y\ny\n"))
        with pytest.raises(SystemExit) as end, exit_codes("generate"):
            generate([folder])
        assert end.value.code == 2
        (says,) = capsys.readouterr().err.splitlines()
        assert says.startswith("generate: ")
        assert not Path("it_ran").exists()


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("generation_config.json", {"eos_token_id": {"a": 1}}),
        ("chat_template.jinja", "{% for i in range(10**9) %}{% endfor %}"),
        ("chat_template.jinja", "{{ raise_exception('no') }}"),
    ],
    ids=["ends", "a long loop", "an error"],
)
def test_a_models_own_settings_that_cannot_be_are_one_line(  # room: tools
    models: Path, name: str, content: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """Tried without: a traceback."""
    copied(models, "theirs", {name: content})
    with pytest.raises(SystemExit) as end, exit_codes("generate"):
        generate(["theirs", "--prompt=a", "--max_new_tokens=1"])
    assert end.value.code == 2
    (says,) = capsys.readouterr().err.splitlines()
    assert says.startswith("generate: ")


# ------------------------------------------------------------ small inputs that would cost hours

PIECES = ("\n", "<", "<think", "<think>", "</think>", "<think>\n", "think", "[", '"', "\\", "1", "\n/", "</think", "<|")


@pytest.mark.parametrize("piece", PIECES)
@pytest.mark.parametrize("begins", ["", "<", "<think>"])
def test_a_chat_is_read_in_a_time_that_grows_with_its_length(piece: str, begins: str) -> None:
    """100 kB of a content, a thought or an argument. Tried with the patterns before: minutes for newlines, which a
    pattern tries from each of them on, and for <thinkthinkthink."""
    tokenizer: Any = byte_tokenizer()
    tokenizer.chat_template = CHATML
    text = begins + piece * (100_000 // len(piece))
    asks: dict[str, Any] = {"role": "user", "content": "q"}
    call = {"function": {"name": "f", "arguments": {"a": text}}}
    for message in ({"content": text + "x"}, {"content": "x", "reasoning_content": text + "x"}, {"tool_calls": [call]}):
        answer = {"role": "assistant", "content": "", **message}
        for chat in ([asks, answer], [asks, answer, asks, {"role": "assistant", "content": "y"}]):
            with suppress(UserError):  # of what ChatML leaves out
                render_chat(chat, None, tokenizer, train_on_prompts=False)
    tokenizer.chat_template = f"{{# {text} {'strftime_now(' + chr(39)} #}}"
    ChatEncoder(tokenizer.chat_template)([asks])
    with_date(tokenizer, "2026-01-01")


def test_a_chat_has_5000_messages_at_most() -> None:
    """Each of the assistant's turns is found by writing all before it again."""
    chat = [{"role": "user", "content": "q"}] * (MAX_MESSAGES + 1)
    with pytest.raises(ValueError, match="not a list of messages, 5,000 at most"):
        ChatEncoder("")(chat)
    assert json.loads(ChatEncoder("")(chat[1:])) == chat[1:]


def rows_of(file: str) -> dict[str, list[Any]]:
    """The texts of a file, and why some cannot be used."""
    records = [*read_file(str(Path(file).resolve()), ["text"])]
    texts = [None if record.reason else record.row["text"] for record in records]
    return {"texts": texts, "bad": [record.reason for record in records if record.reason]}


def test_a_header_may_have_many_columns() -> None:
    """Tried with list.count for each: a minute for 80,000."""
    names = [f"column {i}" for i in range(80_000)]
    tiny.write({"a.csv": [",".join(["text", *names]).encode(), b"one", b"two"]})
    assert rows_of("a.csv")["texts"] == ["one", "two"]
    tiny.write({"a.csv": [",".join(["text", *names, "column 7"]).encode(), b"one"]})
    with pytest.raises(UserError) as error:
        rows_of("a.csv")
    assert line(error) == "a.csv: cannot be read: two columns are called column 7"


def test_a_file_that_is_nested_too_deeply_is_tried_once(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []
    monkeypatch.setattr(files, "time", SimpleNamespace(sleep=waits.append))
    tiny.write({"a.json": "[" * 100_000 + "]" * 100_000})
    with pytest.raises(UserError) as error:
        rows_of("a.json")
    assert line(error).startswith("a.json: cannot be read: maximum recursion depth exceeded")
    assert not waits


# ------------------------------------------------------------ what a file says of itself

DAMAGED: dict[str, bytes] = {
    "no JSON": b"{",
    "too deep": b"[" * 100_000,
    "a list": b"[1]",
    "null": b"null",
    "no text": b"\xff",
    "features of numbers": b'{"info": {"features": [1]}}',
    "unknown": b'{"info": {"features": {"text": {"_type": "Tensor9"}}}}',
    "a function": b'{"info": {"features": {"text": {"_type": "partial"}}}}',
    "no dtype": b'{"info": {"features": {"text": {"_type": "Value", "dtype": "wat"}}}}',
}


@pytest.mark.parametrize("metadata", DAMAGED.values(), ids=DAMAGED)
def test_damaged_metadata_of_datasets_are_one_line(metadata: bytes) -> None:
    """Before any row is read, with the other files that are damaged. Tried without: a traceback."""
    for name in "ab":
        table = pa.table({"text": ["one", "two"]}).replace_schema_metadata({"huggingface": metadata})
        parquet.write_table(table, f"{name}.parquet")
    with pytest.raises(UserError) as error:
        open_files(files.find_files("."), [], "data")
    lines = str(error.value).replace(f"{Path.cwd()}/", "").splitlines()
    says = "parquet: cannot be read: its metadata are not those of `datasets`: "
    assert [found.partition(says)[0] for found in lines] == ["a.", "b."]


def test_a_value_that_is_not_the_json_that_its_file_promises_is_a_bad_row() -> None:
    features = b'{"info": {"features": {"text": {"_type": "Json"}}}}'
    values = ['"one"', "{", "[" * 100_000]
    parquet.write_table(pa.table({"text": values}).replace_schema_metadata({"huggingface": features}), "a.parquet")
    found = rows_of("a.parquet")
    assert found["texts"] == ["one", None, None]
    assert [reason.partition(": ")[0] for reason in found["bad"]] == ["text cannot be read"] * 2
