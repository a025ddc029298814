"""Chats as a tokenizer's template writes them, and the parts that the assistant wrote."""

import copy
import json
import re
from contextlib import suppress
from datetime import datetime
from functools import lru_cache, partial
from operator import eq
from typing import Any

from transformers import PreTrainedTokenizerFast
from transformers.utils.chat_template_utils import render_jinja_template

from src.config.errors import UserError, as_user_error, listed, reraised_as
from src.tasks.text.rows import as_json
from src.tasks.text.tokenizing import Span, Spans

Message = dict[str, Any]
Chat = list[Message]
Tools = list[Any]
"""Descriptions of tools, each a mapping."""
ROLES = {"human": "user", "gpt": "assistant", "chatgpt": "assistant", "model": "assistant", "observation": "tool"}
"""Roles of ShareGPT's format and others, as templates call them."""
USUAL_ROLES = ("system", "developer", "user", "assistant", "tool", "function", "ipython")
"""Common roles, in lower case."""
ANSWER = {"role": "assistant", "content": "\ufdd0"}
"""An answer that no chat has, a noncharacter of Unicode, to see what the template writes around one."""
CHATML = r"""
{%- set turns = messages %}
{%- if tools %}
    {{- '<|im_start|>system\n' }}
    {%- if messages[0].role == 'system' %}
        {%- set turns = messages[1:] %}
        {{- messages[0].content + '\n\n' }}
    {%- endif %}
    {{- '# Tools\n\nYou may call one or more functions to assist with the user query.\n\n' }}
    {{- 'You are provided with function signatures within <tools></tools> XML tags:\n<tools>' }}
    {%- for tool in tools %}
        {{- '\n' + tool | tojson }}
    {%- endfor %}
    {{- '\n</tools>\n\nFor each function call, return a json object with function name and arguments ' }}
    {{- 'within <tool_call></tool_call> XML tags:\n<tool_call>\n' }}
    {{- '{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call><|im_end|>\n' }}
{%- endif %}
{%- set results = ['tool', 'function'] %}
{%- for message in turns %}
    {%- set content = message.content or '' %}
    {%- if message.role in results %}
        {{- '<|im_start|>user' if loop.first or turns[loop.index0 - 1].role not in results }}
        {{- '\n<tool_response>\n' + content + '\n</tool_response>' }}
        {{- '<|im_end|>\n' if loop.last or turns[loop.index].role not in results }}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\n' }}
        {%- if message.reasoning_content and not turns[loop.index:] | selectattr('role', 'equalto', 'user') | list %}
            {{- '<think>\n' + message.reasoning_content.strip('\n') + '\n</think>\n\n' + content.lstrip('\n') }}
        {%- else %}
            {{- content }}
        {%- endif %}
        {%- for call in message.tool_calls or [] %}
            {%- set function = call.function or call %}
            {%- set arguments = function.arguments %}
            {{- '\n' if content or not loop.first }}
            {{- '<tool_call>\n{"name": "' + function.name + '", "arguments": ' }}
            {{- (arguments if arguments is string else arguments | tojson) + '}\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
{%- endif %}"""
"""A template for models without one, in the format of Qwen3, without its empty thoughts."""
MAX_MESSAGES = 5_000
"""In a chat: the template writes it again for each of the assistant's turns."""
OTHER = "set --task.chat_template=chatml, which writes tools, calls and thoughts, or another, or change the row"
"""What to do about a template that cannot be used."""
MAX_TAG = 20
"""Maximum length of a thought's opening tag, with the space around it, before a turn, in characters."""
THINK = r"[\w:]{0,20}think\w{0,20}"
"""The name in a tag, bounded so that no text takes a time that grows with the square of its length."""
EMPTY_THOUGHT = re.compile(rf"\s*(?P<open>[<\[])(?P<tag>{THINK})[>\]]\s*(?P=open)/(?P=tag)[>\]]\s*", re.IGNORECASE)
"""<think></think> of Qwen3, SmolLM3 and GLM-4.5, or [THINK][/THINK] of Magistral, with nothing in between."""
OPENING, CLOSING, TAG = (re.compile(rf"[<\[]{slash}{THINK}[>\]]", re.IGNORECASE) for slash in ("", "/", "/?"))
"""What begins a thought within a content, what ends it, and either."""
FLAG = re.compile(r"/(no_think|think|system_override)")
"""A flag within a content, which SmolLM3's template obeys and leaves out."""
LEAF = re.compile(r'"(?:[^"\\]|\\.)*"|-?\d[^\s,\]}]*')
"""A key, a string or a number in JSON."""
DATE = re.compile(r"strftime_now\(\s*(['\"])([^'\"]*)\1\s*\)")
"""Where a template writes today's date."""


def encode_messages(value: Any, template: str) -> str:
    """Return messages as JSON, for this chat template. Raise a ValueError if one of them is not a message, or has a
    role that neither the standard nor the template knows."""
    if not isinstance(value, list) or not 0 < len(value) <= MAX_MESSAGES:
        raise ValueError(f"is not a list of messages, {MAX_MESSAGES:,} at most")
    chat = [_normalize_message(message, f"has a message {number}") for number, message in enumerate(value, start=1)]
    roles = {message["role"]: written_role(message["role"], template) for message in chat}
    if unknown := sorted(role for role, written in roles.items() if not written):
        raise ValueError(
            f"has turns of unknown roles, {listed(unknown)}: neither {', '.join(USUAL_ROLES)} nor in the chat template"
        )
    return as_json([message | {"role": roles[message["role"]]} for message in chat])


@lru_cache
def written_role(role: str, template: str) -> str | None:
    """Return a role, given in lower case, as the chat template writes it; None if neither it nor the standard has such
    a role."""
    named = re.findall(rf"['\"]({re.escape(role)})['\"]", template, re.IGNORECASE)
    return max(named, default=role if role in USUAL_ROLES else None)  # lower case comes last


def as_tools(value: Any) -> str | None:
    """Return a chat's tools, a list or its JSON, as JSON; None if there are none. Raise a ValueError for anything
    else."""
    with reraised_as(ValueError, "is not a list of tools: "):
        tools = json.loads(value) if value and isinstance(value, str) else value
        for tool in tools or ():
            _ = {**tool, **tool.get("function", {})}  # both are mappings
        return as_json([*tools]) if tools else None


def _normalize_message(message: Any, where: str) -> Message:
    """Return a message in OpenAI's or ShareGPT's format as templates take it: role in lower case, content as text, its
    thought as `reasoning_content`, an old `function_call` among `tool_calls`, and no nulls except in the arguments of
    calls. Raise a ValueError that says what is wrong with any other."""
    message = _without_nulls(message) if isinstance(message, dict) else {}
    if "from" in message:
        message = {"role": message["from"], "content": message.get("value")}
    if not isinstance(message.get("role"), str):
        raise ValueError(f"{where} with neither role and content nor from and value")
    role = message["role"].strip().lower()
    role = ROLES.get(role, role)
    with reraised_as(ValueError, f"{where} with a tool call without a name, or arguments that are not JSON: "):
        found = *message.get("tool_calls", ()), message.pop("function_call", None)
        calls = [_normalize_call(call) for call in found if call]
    thought = message.get("reasoning_content") or message.get("thinking") or message.get("reasoning")
    content = message.get("content", "" if calls or thought else None)
    parts: list[Any] = content if isinstance(content, list) else [{"text": content}]
    if not all(isinstance(part, dict) and isinstance(part.get("text"), str) for part in parts):
        raise ValueError(f"{where} whose content is not text (its role is {role})")
    content = "".join(part["text"] for part in parts)
    if role == "assistant" and not (content.strip() or calls or thought):
        raise ValueError(f"{where} that is empty (its role is {role})")
    message |= {"role": role, "content": content, "reasoning_content": thought, "tool_calls": calls or None}
    return _without_nulls(message)


def _normalize_call(call: Message) -> Message:
    """Return a tool call with its arguments as a mapping: some data have them as JSON text, which templates would
    quote."""
    call = _without_nulls(call)
    function = call.get("function", call)
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        arguments = json.loads(arguments)
    return {"type": "function", **call, "function": {"name": function["name"], "arguments": arguments}}


def _without_nulls(fields: Message) -> Message:
    """Return a message's fields without nulls: templates test whether a field is there."""
    return {name: value for name, value in fields.items() if value is not None}


def encode_chat(
    row: dict[str, str], columns: dict[str, str], tokenizer: PreTrainedTokenizerFast, train_on_prompts: bool
) -> str:
    """Return a row of a chat, or of a prompt and a completion of messages, as the JSON of what `render_chat` returns.
    Its values are encoded by `encode_messages` and `as_tools`; `columns` are their names by role."""
    values = {role: row[column] for role, column in columns.items()}
    prompt = [message | {"weight": 0} for message in json.loads(values.get("prompt", "[]"))]
    chat = prompt + json.loads(values.get("messages") or values["completion"])
    tools = json.loads(values.get("tools") or "null")
    return as_json(render_chat(chat, tools, tokenizer, train_on_prompts))


def render_chat(
    chat: Chat, tools: Tools | None, tokenizer: PreTrainedTokenizerFast, train_on_prompts: bool
) -> tuple[str, Spans | None]:
    """Return a chat as its template writes it, and which parts of it contribute to the loss: the assistant's turns,
    except for messages of weight 0; None: all. Raise a UserError if there is no template, or it fails, leaves out what
    the chat says, or writes a turn so that it cannot be found."""
    if not tokenizer.chat_template:
        raise UserError(
            "the tokenizer has no chat template: set --task.chat_template to a Jinja file with one, or to chatml"
        )
    render = partial(_render, tokenizer=tokenizer, tools=tools)
    text = render(chat)
    _require_written(chat, tools, text)
    if train_on_prompts:
        return text, None
    template = tokenizer.get_chat_template(tools=tools)
    has_weight = [message.get("weight") != 0 for message in chat]
    if "endgeneration" in template and all(has_weight):
        known: Any = {"tools": tools, "chat_template": template, **tokenizer.special_tokens_map}
        marked: Any = render_jinja_template([chat], return_assistant_tokens_mask=True, **known)[1]
        return text, marked[0]
    return text, [
        _turn(chat, i, text, render, str(tokenizer.eos_token or ""))
        for i, message in enumerate(chat)
        if has_weight[i] and message["role"].lower() == "assistant"
    ]


def _require_written(chat: Chat, tools: Tools | None, text: str) -> None:
    """Raise a UserError if something that the chat says does not occur in the text that the template has made of it.
    Thoughts may be left out once the user has spoken again, as Qwen3's template does."""
    parts = [tool.get("function", tool).get("name", "") for tool in tools or []]
    is_over = False
    for message in reversed(chat):
        is_over |= message["role"] == "user"
        content = message["content"]
        parts += _beside_thoughts(content) if is_over else [message.get("reasoning_content", ""), *TAG.split(content)]
        calls = [[*call["function"].values()] for call in message.get("tool_calls", ())]
        parts += map(json.loads, LEAF.findall(json.dumps(calls)))
    text = _without_spaces(text)
    # the longest first, and each in a place of its own: an answer may be part of its question
    for part in sorted(filter(_without_spaces, map(str, parts)), key=len, reverse=True):
        forms = part, json.dumps(part, ensure_ascii=False)[1:-1], FLAG.sub("", part)
        written = [form for form in map(_without_spaces, forms) if form in text]
        if not written:
            raise UserError(f"the tokenizer's chat template leaves out {part[:40]!r} of {_quote(chat)}: {OTHER}")
        text = text.replace(written[0], "\0", 1)


def _beside_thoughts(content: str) -> list[str]:
    """Return the parts of a content that are not thoughts. The first thought may lack its opening tag, which a
    generation prompt wrote."""
    *closed, rest = CLOSING.split(content)
    return [*(OPENING.split(part)[0] for i, part in enumerate(closed) if i or OPENING.search(part)), rest]


def _without_spaces(text: str) -> str:
    return "".join(text.split())


def with_date(tokenizer: PreTrainedTokenizerFast, date: str) -> PreTrainedTokenizerFast:
    """Return the tokenizer with a chat template that writes this date, in ISO format, in place of today's."""
    dated, now = copy.copy(tokenizer), datetime.fromisoformat(date)
    if isinstance(dated.chat_template, str):
        dated.chat_template = DATE.sub(lambda call: repr(now.strftime(call[2])), dated.chat_template)
    return dated


def ends_of_turn(tokenizer: PreTrainedTokenizerFast) -> list[str]:
    """Return the added tokens that the chat template writes after an answer, such as special ones; the eos token if
    there is no template, or it rejects a simple chat."""
    after = str(tokenizer.eos_token)
    with suppress(UserError):  # the template may want more of a chat than this one has
        text = _render([{"role": "user", "content": "?"}, ANSWER], tokenizer, None)
        _, answer, end = text.partition(ANSWER["content"])
        after = end if answer else after
    added = tokenizer.get_added_vocab()
    return [token for token in tokenizer.tokenize(after) if token in added and token.strip()]


def _without_empty_thought(message: Message, start: int, end: int, text: str) -> Span:
    """Return the part of the text that is a turn, without the empty thought that templates of models with optional
    thinking write into a turn that has none: in the loss, it would teach the model not to think (NeMo Automodel issue
    3738)."""
    for begin in range(max(0, start - MAX_TAG), start + 1):  # some generation prompts end with <think>
        thought = EMPTY_THOUGHT.match(text, begin, end)
        if thought and start < thought.end() and not EMPTY_THOUGHT.match(message["content"]):
            return thought.end(), end
    return start, end


def _render(chat: Chat, tokenizer: PreTrainedTokenizerFast, tools: Tools | None, prompts_answer: bool = False) -> str:
    # it is a program: it can raise anything
    with as_user_error(f"the tokenizer's chat template rejects {_quote(chat)}: "):
        return str(tokenizer.apply_chat_template(chat, tools, tokenize=False, add_generation_prompt=prompts_answer))


def _turn(chat: Chat, i: int, text: str, render: partial[str], eos: str) -> Span:
    """Return the part of the text that is the assistant's message `i`, from the generation prompt up to and including
    the mark that ends the turn.

    Three renderings are compared: `given`, what the model is given before it answers; `turn`, what it must then write;
    and `rest`, which the whole chat has in its place. Once a chat continues, some templates (Qwen3, DeepSeek-R1) leave
    out a turn's thoughts, or the empty place for them: the rest of the turn counts. Some (Phi-4-mini) write `eos`, the
    end of a text, only where it ends.
    """
    # templates reject an empty chat; its beginning is what doesn't change with the answer
    given = render(chat[:i], prompts_answer=True) if i else render([ANSWER | {"role": chat[0]["role"]}, *chat[1:]])
    start = [*map(eq, given, text), False].index(False)  # where they differ, or the shorter one ends
    turn, rest = render(chat[: i + 1])[start:], text[start:]
    is_found = not i or start == len(given) or text.startswith(render(chat[:i]).removesuffix(eos))
    written = {turn, turn.removesuffix(eos)}
    whole = [len(part) for part in written if rest.startswith(part)]
    size = max(whole, default=0) or max(_overlap(part, rest) for part in written)
    if not size or not is_found:
        raise UserError(
            f"the tokenizer's chat template rewrites earlier turns once a chat continues, so the assistant's in "
            f"{_quote(chat)} cannot be found: set --task.train_on_prompts=true, or another --task.chat_template"
        )
    return _without_empty_thought(chat[i], start, start + size, text)


def _overlap(turn: str, rest: str) -> int:
    """Return how many characters of a turn's end, as many as possible, begin the rest."""
    return next(size for size in range(min(len(turn), len(rest)), -1, -1) if turn.endswith(rest[:size]))


def _quote(chat: Chat) -> str:
    return f"the chat that begins with {chat[0]['content'][:40]!r}"
