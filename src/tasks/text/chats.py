"""Chats as a tokenizer's template writes them, and which parts of that text the assistant wrote."""

import json
from collections.abc import Callable
from functools import partial
from typing import Any

from transformers import PreTrainedTokenizerFast
from transformers.utils.chat_template_utils import render_jinja_template

from src.config.errors import UserError, explained

Chat = list[dict[str, Any]]
Tools = list[Any]
"""Descriptions of tools, each a mapping."""
Spans = list[tuple[int, int]]
"""Parts of a text, each from one character up to another."""
ROLES = dict.fromkeys(("human", "user"), "user")
ROLES |= dict.fromkeys(("gpt", "chatgpt", "bing", "bard", "model", "assistant"), "assistant")
ROLES |= {"system": "system", "tool": "tool", "observation": "tool"}
"""The roles in ShareGPT's `from`, as templates call them."""
PROBE = "\ufdd0"
"""Stands for an answer, to see what the template puts around one. Unicode keeps this one free of any meaning, so that
no text has it."""
ANSWER = {"role": "assistant", "content": PROBE}


def normalize_chat(chat: Any) -> Chat:
    """Return messages in OpenAI's or ShareGPT's format as templates take them, content as text, without nulls. Raise a
    ValueError that says what is wrong if one is anything else."""
    if not isinstance(chat, list):
        raise ValueError("is not a list of messages")
    if not chat:
        raise ValueError("has no message")
    return [_normalize_message(message, f"has a message {number}") for number, message in enumerate(chat, start=1)]


def _normalize_message(message: Any, where: str) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise ValueError(f"{where} that is {type(message).__name__}, not role and content")
    message = _without_nulls(message)
    if "role" not in message and "from" in message:
        if message["from"] not in ROLES:
            raise ValueError(f"{where} from {message['from']!r}, which is none of {', '.join(ROLES)}")
        message = {"role": ROLES[message["from"]], "content": message.get("value")}
    role = message.get("role")
    if not isinstance(role, str):
        raise ValueError(f"{where} with neither role and content nor from and value, but {', '.join(message)}")
    if (known := ROLES.get(role.lower())) in ("user", "assistant"):  # the others may be a template's own
        message["role"] = known
    if "function_call" in message:
        raise ValueError(f"{where} with a function_call: write it as tool_calls")
    if message.get("weight", 1) not in (0, 1):
        raise ValueError(f"{where} of weight {message['weight']}, which must be 0 (not to be learnt) or 1")
    if message.get("tool_calls"):
        message["tool_calls"] = [_normalize_call(call, where) for call in message["tool_calls"]]
    elif message.get("content") is None:
        raise ValueError(f"{where} without content (its role is {message['role']})")
    content = message.get("content", "")
    parts = content if isinstance(content, list) else [{"text": content} if isinstance(content, str) else content]
    for part in parts:
        if not isinstance(part, dict) or not isinstance(part.get("text"), str):
            kind = part.get("type") if isinstance(part, dict) else type(part).__name__
            raise ValueError(f"{where} with content that is not text, but {kind}")
    message["content"] = "".join(part["text"] for part in parts)
    return message


def _normalize_call(call: Any, where: str) -> dict[str, Any]:
    """Return a tool call with its arguments as a mapping: some data hold them as JSON, which templates would quote."""
    function = call.get("function", call) if isinstance(call, dict) else {}
    if not isinstance(function.get("name"), str):
        raise ValueError(f"{where} with a tool call that has no function name")
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        with explained(f"{where} with a tool call whose arguments are not JSON: ", ValueError):
            arguments = json.loads(arguments or "{}")
    return {"type": "function", **call, "function": {**function, "arguments": arguments}}


def _without_nulls(value: Any) -> Any:
    """Return it without nulls: tables give all rows the keys that any row has; templates ask if a key is there."""
    if isinstance(value, dict):
        return {key: _without_nulls(inner) for key, inner in value.items() if inner is not None}
    return [_without_nulls(inner) for inner in value] if isinstance(value, list) else value


def normalize_tools(tools: Any) -> Tools | None:
    """Return a chat's tools, a list or its JSON, as templates take them; raise a ValueError if it is neither."""
    with explained("is not JSON: ", ValueError):
        tools = json.loads(tools) if isinstance(tools, str) and tools.strip() else tools
    if tools and not (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)):
        raise ValueError("is not a list of tools")
    return _without_nulls(tools) or None


def render_chat(
    chat: Chat, tools: Tools | None, tokenizer: PreTrainedTokenizerFast, train_on_prompts: bool
) -> tuple[str, Spans | None, Spans]:
    """Return a chat as its template writes it, which parts of that are to be learnt (the assistant's turns; None: all),
    and which are the chat's own words, not the template's. Raise a UserError if the template fails, leaves out tools or
    tool calls, or writes a turn so that it cannot be found."""
    render = partial(_render, tokenizer=tokenizer, tools=tools)
    text = render(chat)
    calls = [call for message in chat for call in message.get("tool_calls", ())]
    for desc, parts in (("the tool calls", calls), ("the tools", tools or [])):
        if any(str(part.get("function", part).get("name", "")) not in text for part in parts):
            hint = "set another --task.chat_template"
            raise UserError(f"the tokenizer's chat template leaves out {desc} in {_quote(chat)}: {hint}")
    if train_on_prompts:
        return text, None, _content_spans(chat, text)
    template = tokenizer.get_chat_template(tools=tools)
    if "endgeneration" in template:
        known: Any = {"tools": tools, "chat_template": template, **tokenizer.special_tokens_map}
        marked: Any = render_jinja_template([chat], return_assistant_tokens_mask=True, **known)[1]
        return text, *_marked_spans(chat, text, marked[0], render)
    return text, *_assistant_spans(chat, text, render, str(tokenizer.eos_token or ""))


def _render(chat: Chat, tokenizer: PreTrainedTokenizerFast, tools: Tools | None, prompts_answer: bool = False) -> str:
    with explained(f"the tokenizer's chat template refuses {_quote(chat)}: "):  # it is a program: it can raise anything
        return str(tokenizer.apply_chat_template(chat, tools, tokenize=False, add_generation_prompt=prompts_answer))


def _marked_spans(chat: Chat, text: str, marked: Spans, render: Callable[..., str]) -> tuple[Spans, Spans]:
    """Return the parts that the template marks as the assistant's, and the chat's own words in them. Messages of weight
    0 are left out: the parts that change where such a message says something else."""
    for i, message in enumerate(chat):
        if message["role"] == "assistant" and message.get("weight") == 0:
            before, _, after = render([*chat[:i], ANSWER, *chat[i + 1 :]]).partition(PROBE)
            marked = [part for part in marked if part[1] < len(before) or part[0] > len(text) - len(after)]
    probe = render([{"role": "user", "content": "?"}, ANSWER])
    return marked, [_words(text, *part, probe) for part in marked]


def _words(text: str, start: int, end: int, probe: str) -> tuple[int, int]:
    """Return which part of this part of the text is the chat's own words: all but what the template writes in `probe`
    before and after PROBE too."""
    before, _, after = probe.partition(PROBE)
    part = text[start:end]
    return start + _overlap(before, part), end - _overlap(part, after)


def _assistant_spans(chat: Chat, text: str, render: Callable[..., str], eos: str) -> tuple[Spans, Spans]:
    """Return the parts that the assistant wrote, from the generation prompt up to and including the mark that ends the
    turn, and the chat's own words in them. Messages of weight 0 are left out, as OpenAI defines it.

    Some templates (Qwen3, DeepSeek-R1) leave out the thoughts of a turn, or the empty place for them, once the chat
    goes on: the rest of the turn counts. Some (Phi-4-mini) write `eos`, the end of a text, only where it ends.
    """
    turns, texts = [], []
    for i, message in enumerate(chat):
        if message["role"] != "assistant" or message.get("weight") == 0:
            continue
        probe_chat = [*chat[:i], ANSWER]
        probe = render(probe_chat)
        # templates refuse an empty chat; its beginning is what doesn't change with the answer
        before = render(chat[:i], prompts_answer=True) if i else render([ANSWER, *chat[1:]])
        start = _common_prefix(before, text)
        if i and start < len(before):  # it asks for a thought: an answer without one may begin in the same way
            longer = render([*probe_chat, chat[i - 1]])
            start = min(start, _common_prefix(before, probe), _common_prefix(before, longer))
        is_found = not i or start == len(before) or text.startswith(render(chat[:i]).removesuffix(eos))
        turn = render(chat[: i + 1])[start:]
        if i + 1 < len(chat) and not text.startswith(turn, start):
            turn = turn.removesuffix(eos)
        size = _overlap(turn, text[start:])  # its beginning may be left out
        if not size or not is_found:
            raise UserError(
                f"the tokenizer's chat template rewrites earlier turns once a chat goes on, so the assistant's in "
                f"{_quote(chat)} cannot be found: set --task.train_on_prompts=true, or another --task.chat_template"
            )
        turns.append((start, start + size))
        texts.append(_words(text, start, start + size, probe[start:]))
    return turns, texts


def _content_spans(chat: Chat, text: str) -> Spans:
    """Return where the messages are in the text that a template made of them, except those that it changed."""
    spans, end = [], 0
    for content in (message["content"].strip() for message in chat):
        if (start := text.find(content, end)) >= 0:
            end = start + len(content)
            spans.append((start, end))
    return spans


def _quote(chat: Chat) -> str:
    return f"the chat that begins with {chat[0]['content'][:40]!r}"


def _common_prefix(a: str, b: str) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def _overlap(a: str, b: str) -> int:
    """Return how many characters at the end of `a` are the beginning of `b`."""
    return next(size for size in range(min(len(a), len(b)), -1, -1) if a.endswith(b[:size]))
