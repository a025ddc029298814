"""Chats as a template writes them, and which parts of them the assistant wrote."""

import json
from collections.abc import Callable
from typing import Any

from transformers import PreTrainedTokenizerFast

from src.process import UserError

Chat = list[dict[str, Any]]
Spans = list[tuple[int, int]]
"""Parts of a text, from one character up to another."""
Tools = list[dict[Any, Any] | Callable[..., Any]]
"""As transformers takes them; here all are mappings."""
Render = Callable[..., str]
"""`written` with its tokenizer and tools."""
SHAREGPT = {
    "human": "user", "user": "user", "gpt": "assistant", "chatgpt": "assistant", "bing": "assistant",
    "bard": "assistant", "model": "assistant", "assistant": "assistant", "system": "system", "tool": "tool",
    "observation": "tool",
}  # fmt: skip
"""The roles that ShareGPT's `from` names, as templates call them."""
MARK = "x7Qz"
"""Stands for an answer, to see what the template puts around one."""


def understood(chat: Any) -> Chat:
    """Return the messages as templates take them: role, content, tool_calls and what else there is that is not null.

    Understood are OpenAI's messages, content in parts of text and calls of tools among them, and ShareGPT's.

    Raises:
        ValueError: a message is something else; says what.
    """
    if not isinstance(chat, list):
        raise ValueError("is no list of messages")
    if not chat:
        raise ValueError("has no message")
    return [_message(number, message) for number, message in enumerate(chat, start=1)]


def _message(number: int, message: Any) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise ValueError(f"has a message {number} that is {type(message).__name__}, not role and content")
    known: dict[str, Any] = _without_nulls(message)
    if "role" not in known and "from" in known:
        if known["from"] not in SHAREGPT:
            raise ValueError(f"has a message {number} from {known['from']!r}, which is none of {', '.join(SHAREGPT)}")
        known = {"role": SHAREGPT[known["from"]], "content": known.get("value")}
    role = known.get("role")
    if not isinstance(role, str):
        keys = ", ".join(known)
        raise ValueError(f"has a message {number} with neither role and content nor from and value, but {keys}")
    if (meant := SHAREGPT.get(role.lower())) in ("user", "assistant"):  # the others may be a template's own
        known["role"] = meant
    if "function_call" in known:
        raise ValueError(f"has a message {number} with a function_call: write it as tool_calls")
    if known.get("weight", 1) not in (0, 1):
        raise ValueError(f"has a message {number} of weight {known['weight']}, which can be 0, not to be learnt, or 1")
    if calls := known.get("tool_calls"):
        known["tool_calls"] = [_call(number, call) for call in calls]
    elif known.get("content") is None:
        raise ValueError(f"has a message {number} without content (its role is {known['role']})")
    known["content"] = _text(number, known.get("content", ""))
    return known


def _text(number: int, content: Any) -> str:
    if isinstance(content, str):
        return content
    texts = []
    for part in content if isinstance(content, list) else [content]:
        if not isinstance(part, dict) or not isinstance(part.get("text"), str):
            kind = part.get("type") if isinstance(part, dict) else type(part).__name__
            raise ValueError(f"has a message {number} with content that is not text, but {kind}")
        texts.append(part["text"])
    return "".join(texts)


def _call(number: int, call: Any) -> dict[str, Any]:
    """A call of a tool, its arguments as a mapping: some data have them as JSON, which templates would quote again."""
    function = call.get("function", call) if isinstance(call, dict) else {}
    if not isinstance(function.get("name"), str):
        raise ValueError(f"has a message {number} with a tool call that has no function name")
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except ValueError as error:
            raise ValueError(f"has a message {number} with a tool call whose arguments are no JSON") from error
    return {"type": "function", **call, "function": {**function, "arguments": arguments}}


def _without_nulls(value: Any) -> Any:
    """Tables give each row of a column all keys that any row has; templates ask whether a key is there."""
    if isinstance(value, dict):
        return {key: _without_nulls(inner) for key, inner in value.items() if inner is not None}
    return [_without_nulls(inner) for inner in value] if isinstance(value, list) else value


def understood_tools(tools: Any) -> Tools | None:
    """The descriptions of a chat's tools as templates take them, from a list or its JSON.

    Raises:
        ValueError: it is neither.
    """
    try:
        found = json.loads(tools) if isinstance(tools, str) and tools.strip() else tools
    except ValueError as error:
        raise ValueError("is no JSON") from error
    if found and not (isinstance(found, list) and all(isinstance(tool, dict) for tool in found)):
        raise ValueError("is no list of tools")
    return _without_nulls(found) or None


def written(
    chat: Chat,
    tokenizer: PreTrainedTokenizerFast,
    tools: Tools | None = None,
    begins_answer: bool = False,
) -> str:
    """The chat as its template writes it."""
    try:
        text = tokenizer.apply_chat_template(chat, tools=tools, tokenize=False, add_generation_prompt=begins_answer)
    except Exception as error:  # it is a program
        reason = " ".join(str(error).split())
        raise UserError(f"the tokenizer's chat template refuses {_named(chat)}: {reason}") from error
    assert isinstance(text, str)
    return text


def require_tools(chat: Chat, tools: Tools | None, text: str) -> None:
    """Raises: UserError: the template left them, or the calls of them, out of the text."""
    calls = [call for message in chat for call in message.get("tool_calls", ())]
    descriptions: list[Any] = [*(tools or ())]
    for what, parts in (("the tool calls", calls), ("the tools", descriptions)):
        names = [part.get("function", part).get("name", "") for part in parts]
        if any(str(name) not in text for name in names):
            raise UserError(
                f"the tokenizer's chat template leaves out {what} in {_named(chat)}: set another --task.chat_template"
            )


def assistant_turns(chat: Chat, text: str, render: Render, eos: str) -> tuple[Spans, Spans]:
    """What the assistant wrote: what comes after the generation prompt, up to the end of the turn with its mark.
    Messages of weight 0 are left out, as OpenAI's have them.

    Some templates (Qwen3, DeepSeek-R1) leave out the thoughts of a turn, or the empty place for them, once the chat
    goes on: what is left of the turn counts. Some (Phi-4-mini) write `eos`, the end of a text, only where it ends.

    Returns:
        The turns, and what of each is the assistant's text, without what the template puts around it.
    """
    turns, texts = [], []
    for i, message in enumerate(chat):
        if message["role"] != "assistant" or message.get("weight") == 0:
            continue
        marked = [*chat[:i], {"role": "assistant", "content": MARK}]
        probe = render(marked)
        if i:
            before = render(chat[:i], begins_answer=True)
        else:  # templates refuse an empty chat; its beginning is what doesn't change with the answer
            other = "a" if message["content"].strip()[:1] != "a" else "b"
            before = render([{"role": "assistant", "content": other}, *chat[1:]])
        start = _common(before, text)
        if i and start < len(before):  # it asks for a thought: an answer without may begin as that does
            start = min(start, _common(before, probe), _common(before, render([*marked, chat[i - 1]])))
        goes_on = not i or start == len(before) or text.startswith(render(chat[:i]).removesuffix(eos))
        turn = render(chat[: i + 1])[start:]
        ends = turn.endswith(eos) and not text.startswith(turn, start) and i + 1 < len(chat)
        turn = turn.removesuffix(eos) if ends else turn
        kept = next((k for k in range(len(turn)) if text.startswith(turn[k:], start)), None)
        if kept is None or not goes_on:
            raise UserError(
                f"the tokenizer's chat template writes earlier turns otherwise once a chat goes on, so that the "
                f"assistant's cannot be told apart in {_named(chat)}: set --task.learn_all=true, or another "
                f"--task.chat_template"
            )
        head, _, tail = probe[start:].partition(MARK)
        tail = tail.removesuffix(eos) if ends else tail
        first = len(head) if turn.startswith(head) else 0
        last = len(turn) - len(tail) if turn.endswith(tail) else len(turn)
        turns.append((start, start + len(turn) - kept))
        texts.append((start + max(0, first - kept), start + max(0, last - kept)))
    return turns, texts


def contents(chat: Chat, text: str) -> Spans:
    """Where the messages stand in the text that a template made of them; none for one that it wrote otherwise."""
    spans, at = [], 0
    for content in (message["content"].strip() for message in chat):
        if (start := text.find(content, at)) >= 0:
            at = start + len(content)
            spans.append((start, at))
    return spans


def _named(chat: Chat) -> str:
    return f"the chat that begins with {chat[0]['content'][:40]!r}"


def _common(a: str, b: str) -> int:
    """How many characters both begin with."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
