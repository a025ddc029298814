"""Chats as a tokenizer's template writes them, and the parts that the assistant wrote."""

import json
import re
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache, partial
from os.path import commonprefix
from typing import Any

from transformers import PreTrainedTokenizerFast
from transformers.utils.chat_template_utils import render_jinja_template

from src.config.errors import UserError, explained, listed
from src.tasks.text.reading import as_json

Message = dict[str, Any]
Chat = list[Message]
Tools = list[Any]
"""Descriptions of tools, each a mapping."""
Span = tuple[int, int]
"""A part of a text, from one character up to another."""
Spans = list[Span]
ROLES = {"human": "user", "gpt": "assistant", "chatgpt": "assistant", "model": "assistant", "observation": "tool"}
"""Roles of ShareGPT's format and others, as templates call them."""
USUAL_ROLES = ("system", "developer", "user", "assistant", "tool", "function", "ipython")
"""Common roles, in lower case."""
ANSWER = {"role": "assistant", "content": "\ufdd0"}
"""An answer that no chat has, a noncharacter of Unicode, to see what the template writes around one."""
CHATML = """\
{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}{% endfor %}\
{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""
"""A template for models without one, in the format of Qwen and SmolLM."""
OTHER = "set another --task.chat_template"
"""What to do about a template that cannot be used."""
LONGEST_TAG = 20
"""Maximum length of a thought's opening tag, with the space around it, before a turn, in characters."""
EMPTY_THOUGHT = re.compile(
    r"\s*(?P<open>[<\[])(?P<tag>[\w:]*think\w*)[>\]]\s*(?P=open)/(?P=tag)[>\]]\s*", re.IGNORECASE
)
"""<think></think> of Qwen3, SmolLM3 and GLM-4.5, or [THINK][/THINK] of Magistral, with nothing in between."""


@dataclass(frozen=True)
class ChatEncoder:
    """Returns messages as JSON, for a chat template. Raises a ValueError if one of them is not a message, or has an
    unknown role: the model would learn nothing from it."""

    template: str

    def __call__(self, value: Any) -> str:
        if not isinstance(value, list) or not value:
            raise ValueError("is not a list of messages")
        chat = [_normalize_message(message, f"has a message {number}") for number, message in enumerate(value, start=1)]
        known = role_names(self.template)
        if unknown := {message["role"] for message in chat} - known.keys():
            usual = ", ".join(USUAL_ROLES)
            raise ValueError(
                f"has turns of unknown roles, {listed(sorted(unknown))}: neither {usual} nor in the chat template"
            )
        return as_json([message | {"role": known[message["role"]]} for message in chat])


@lru_cache
def role_names(template: str) -> dict[str, str]:
    """Return the roles that messages may have, in lower case, and how the chat template writes each."""
    named = {first or second for first, second in re.findall(r"'([^']+)'|\"([^\"]+)\"", template)}
    return {role: role for role in USUAL_ROLES} | {
        name.lower(): name.lower() if name.lower() in named else name for name in sorted(named)
    }


def as_tools(value: Any) -> str | None:
    """Return a chat's tools, a list or its JSON, as JSON; None if there are none. Raise a ValueError for anything
    else."""
    with explained("is not JSON: ", ValueError):
        tools = json.loads(value) if isinstance(value, str) and value.strip() else value
    if tools and not isinstance(tools, list):
        raise ValueError("is not a list of tools")
    return as_json(tools) if tools else None


def _normalize_message(message: Any, where: str) -> Message:
    """Return a message in OpenAI's or ShareGPT's format as templates take it: role in lower case, content as text, and
    no nulls except in the arguments of tool calls. Raise a ValueError that says what is wrong with any other."""
    message = _without_nulls(message) if isinstance(message, dict) else {}
    if "from" in message:
        message = {"role": message["from"], "content": message.get("value")}
    if not isinstance(message.get("role"), str):
        raise ValueError(f"{where} with neither role and content nor from and value")
    role = message["role"].strip().lower()
    with explained(f"{where} with a tool call without a name, or arguments that are not JSON: ", Exception, ValueError):
        calls = [_normalize_call(call) for call in message.get("tool_calls", ())]
    content = message.get("content", "" if calls else None)
    parts: list[Any] = content if isinstance(content, list) else [{"text": content}]
    if not all(isinstance(part, dict) and isinstance(part.get("text"), str) for part in parts):
        raise ValueError(f"{where} whose content is not text (its role is {role})")
    message |= {"role": ROLES.get(role, role), "content": "".join(part["text"] for part in parts)}
    return message | {"tool_calls": calls} if calls else message


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


def render_chat(
    chat: Chat, tools: Tools | None, tokenizer: PreTrainedTokenizerFast, train_on_prompts: bool
) -> tuple[str, Spans | None]:
    """Return a chat as its template writes it, and which parts of it contribute to the loss: the assistant's turns,
    except for messages of weight 0; None: all. Raise a UserError if the template fails, leaves out tools or tool calls,
    or writes a turn so that it cannot be found."""
    render = partial(_render, tokenizer=tokenizer, tools=tools)
    text = render(chat)
    calls = [call for message in chat for call in message.get("tool_calls", ())]
    for part in [*calls, *(tools or [])]:
        if str(part.get("function", part).get("name", "")) not in text:
            says = f"the tokenizer's chat template leaves out the tools or their calls in {_quote(chat)}"
            raise UserError(f"{says}: {OTHER}")
    if train_on_prompts:
        return text, None
    template = tokenizer.get_chat_template(tools=tools)
    learnt = [
        i for i, message in enumerate(chat) if message["role"].lower() == "assistant" and message.get("weight") != 0
    ]
    if "endgeneration" in template and all(message.get("weight") != 0 for message in chat):
        known: Any = {"tools": tools, "chat_template": template, **tokenizer.special_tokens_map}
        marked: Any = render_jinja_template([chat], return_assistant_tokens_mask=True, **known)[1]
        has_text = any(chat[i]["content"].strip() for i in learnt)
        if has_text and not any(start < end for start, end in marked[0]):
            raise UserError(f"the tokenizer's chat template has {{% generation %}} marks around nothing: {OTHER}")
        return text, marked[0]
    return text, [_turn(chat, i, text, render, str(tokenizer.eos_token or "")) for i in learnt]


def ends_of_turn(tokenizer: PreTrainedTokenizerFast) -> list[str]:
    """Return the special tokens that the chat template writes after an answer; none if there is no template."""
    text = ""
    with suppress(UserError):  # the template may want more of a chat than this one has
        text = _render([{"role": "user", "content": "?"}, ANSWER], tokenizer, None)
    after = tokenizer.encode(text.partition(ANSWER["content"])[2], add_special_tokens=False)
    added = tokenizer.added_tokens_decoder
    return [added[token].content for token in after if token in added and added[token].special]


def _without_empty_thought(message: Message, start: int, end: int, text: str) -> Span:
    """Return the part of the text that is a turn, without the empty thought that templates of models with optional
    thinking write into a turn that has none: in the loss, it would teach the model not to think (NeMo Automodel issue
    3738)."""
    for thought in EMPTY_THOUGHT.finditer(text, max(0, start - LONGEST_TAG), end):
        # it may begin before the turn: some generation prompts end with <think>
        if thought.start() <= start < thought.end() and not EMPTY_THOUGHT.match(message["content"]):
            return thought.end(), end
    return start, end


def _render(chat: Chat, tokenizer: PreTrainedTokenizerFast, tools: Tools | None, prompts_answer: bool = False) -> str:
    with explained(f"the tokenizer's chat template rejects {_quote(chat)}: "):  # it is a program: it can raise anything
        return str(tokenizer.apply_chat_template(chat, tools, tokenize=False, add_generation_prompt=prompts_answer))


def _turn(chat: Chat, i: int, text: str, render: partial[str], eos: str) -> Span:
    """Return the part of the text that is the assistant's message `i`, from the generation prompt up to and including
    the mark that ends the turn.

    Once a chat continues, some templates (Qwen3, DeepSeek-R1) leave out a turn's thoughts, or the empty place for them:
    the rest of the turn counts. Some (Phi-4-mini) write `eos`, the end of a text, only where it ends.
    """
    # templates reject an empty chat; its beginning is what doesn't change with the answer
    before = render(chat[:i], prompts_answer=True) if i else render([ANSWER | {"role": chat[0]["role"]}, *chat[1:]])
    start = len(commonprefix([before, text]))  # noqa: RUF071  # by character, not by part of a path
    is_found = not i or start == len(before) or text.startswith(render(chat[:i]).removesuffix(eos))
    turn = render(chat[: i + 1])[start:]
    if i + 1 < len(chat) and not text.startswith(turn, start):
        turn = turn.removesuffix(eos)
    rest = text[start:]
    sizes = range(min(len(turn), len(rest)), 0, -1)  # the turn's beginning may be left out
    size = next((size for size in sizes if turn.endswith(rest[:size])), 0)
    if not size or not is_found:
        raise UserError(
            f"the tokenizer's chat template rewrites earlier turns once a chat continues, so the assistant's in "
            f"{_quote(chat)} cannot be found: set --task.train_on_prompts=true, or another --task.chat_template"
        )
    return _without_empty_thought(chat[i], start, start + size, text)


def _quote(chat: Chat) -> str:
    return f"the chat that begins with {chat[0]['content'][:40]!r}"
