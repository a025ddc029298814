"""Chats as a template writes them, and which parts of them the assistant wrote."""

from typing import Any

from transformers import PreTrainedTokenizerFast

Spans = list[tuple[int, int]]
"""Parts of a text, from one character up to another."""


def written(chat: list[dict[str, Any]], tokenizer: PreTrainedTokenizerFast, begins_answer: bool = False) -> str:
    """The chat as its template writes it."""
    try:
        text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=begins_answer)
    except Exception as error:  # it is a program
        reason = " ".join(str(error).split())
        raise ValueError(f"the tokenizer's chat template refuses {_named(chat)}: {reason}") from error
    assert isinstance(text, str)
    return text


def assistant_turns(chat: list[dict[str, Any]], text: str, tokenizer: PreTrainedTokenizerFast) -> Spans:
    """What the assistant wrote: what comes after the generation prompt, up to the end of the turn with its mark.

    Some templates (Qwen3, DeepSeek-R1) leave out the thoughts of a turn, or the empty place for them, once the chat
    goes on: what is left of the turn counts.
    """
    spans = []
    for i, message in enumerate(chat):
        if message["role"] != "assistant":
            continue
        if i:
            before = written(chat[:i], tokenizer, begins_answer=True)
        else:  # templates refuse an empty chat; its beginning is what doesn't change with the answer
            other = "a" if message["content"].strip()[:1] != "a" else "b"
            before = written([{**message, "content": other}, *chat[1:]], tokenizer)
        start = _common(before, text)
        goes_on = not i or start == len(before) or text.startswith(written(chat[:i], tokenizer))
        turn = written(chat[: i + 1], tokenizer)[start:]
        kept = next((k for k in range(len(turn)) if text.startswith(turn[k:], start)), None)
        if kept is None or not goes_on:
            raise ValueError(
                f"the tokenizer's chat template writes earlier turns otherwise once a chat goes on, so that the "
                f"assistant's cannot be told apart in {_named(chat)}: set --task.learn_all=true, or another "
                f"--task.chat_template"
            )
        spans.append((start, start + len(turn) - kept))
    return spans


def _named(chat: list[dict[str, Any]]) -> str:
    return f"the chat that begins with {chat[0]['content'][:40]!r}"


def _common(a: str, b: str) -> int:
    """How many characters both begin with."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
