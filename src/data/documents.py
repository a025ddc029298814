"""From rows of text to pieces of tokens: what a causal language model reads, and what of it it has to predict.

A row is raw text, a prompt with its completion, or a chat. A piece is at most sequence_length tokens: `input_ids`, and
as `labels` the token after each, or -100 where it is not to be learnt. Text that is longer makes several pieces;
prompts and chats are cut off.
"""

import inspect
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import partial
from itertools import accumulate, groupby
from typing import Any

import numpy as np
from datasets import Dataset, Features, List, Value
from datasets.fingerprint import Hasher
from transformers import PreTrainedTokenizerFast

from src.data import chats
from src.data.chats import Spans
from src.data.text import Kind

SLICE = 2**20
"""Characters that are tokenised at once: a tokenizer's Python objects take 260 times the memory of the text."""
PIECES = Features(
    {
        "input_ids": List(Value("int32")),
        "labels": List(Value("int32")),
        "length": Value("int32"),
        "targets": Value("int32"),
        "bytes": Value("int32"),
        "truncated": Value("bool"),
    }
)
"""Columns of a table of pieces: `targets` is how many labels are to be learnt, `bytes` what they are in UTF-8, without
end marks and what else a tokenizer or a chat template adds to the text."""


@dataclass(frozen=True)
class Format:
    """Which columns hold what; either text, or prompt and completion, or messages, with tools or without."""

    text: str | None = None
    prompt: str | None = None
    completion: str | None = None
    messages: str | None = None
    tools: str | None = None

    @property
    def columns(self) -> dict[str, Kind]:
        """The columns and what their values are."""
        kinds: dict[str | None, Kind] = {self.text: "text", self.prompt: "text", self.completion: "text"}
        kinds |= {self.messages: "chat", self.tools: "tools"}
        return {name: kind for name, kind in kinds.items() if name}


def pieces(
    rows: Dataset, form: Format, tokenizer: PreTrainedTokenizerFast, sequence_length: int, learn_all: bool, what: str
) -> Dataset:
    """Tokenises, with a progress bar named `what`; a second time, also in another process, it comes from the cache.

    Args:
        learn_all: labels for prompts and all turns too, not only for completions and the assistant's turns.

    Returns:
        A table with the columns of PIECES.

    Raises:
        ValueError: the chat template writes a chat otherwise once it goes on.
    """
    arguments = {
        "form": asdict(form),
        "tokenizer": tokenizer,
        "sequence_length": sequence_length,
        "learn_all": learn_all,
    }
    source = [inspect.getsource(module) for module in (sys.modules[__name__], chats)]  # a change there is a change here
    return rows.map(
        _tokenise,
        batched=True,
        batch_size=100,
        remove_columns=rows.column_names,
        features=PIECES,
        fn_kwargs=arguments,
        new_fingerprint=Hasher.hash([rows._fingerprint, arguments, source]),
        desc=f"tokenising {what}",
    )


def cut_out(rows: Dataset, column: str, start: int, end: int) -> Dataset:
    """One document from character `start` up to `end`, in the cache, so that what is made of it is cached too."""
    key = Hasher.hash([rows._fingerprint, column, start, end])
    return rows.map(
        _cut_out, fn_kwargs={"column": column, "start": start, "end": end}, new_fingerprint=key, desc="cutting the text"
    )


def _cut_out(row: dict[str, Any], column: str, start: int, end: int) -> dict[str, str]:
    return {column: row[column][start:end]}


def _tokenise(
    batch: dict[str, list[Any]],
    form: dict[str, Any],
    tokenizer: PreTrainedTokenizerFast,
    sequence_length: int,
    learn_all: bool,
) -> dict[str, list[Any]]:
    columns = Format(**form)
    rows = _texts(batch, columns, tokenizer, learn_all)
    begin, end = _special_tokens(tokenizer) if columns.messages is None else ([], [])  # chat templates write their own
    table: dict[str, list[Any]] = {name: [] for name in PIECES}
    for (text, learnt, said), encoded in zip(rows, _encode([text for text, *_ in rows], tokenizer), strict=True):
        document = _Document.of(text, learnt, said, *encoded, begin, end)
        for piece in document.pieces(sequence_length, split=columns.text is not None):
            for name, value in piece.items():
                table[name].append(value)
    return table


def _texts(
    batch: dict[str, list[Any]], columns: Format, tokenizer: PreTrainedTokenizerFast, learn_all: bool
) -> list[tuple[str, Spans | None, Spans | None]]:
    """Each row as one text, which parts of it are to be learnt, and of these, which are text; None: all."""
    if columns.text:
        return [(text, None, None) for text in batch[columns.text]]
    if columns.messages:
        tools = batch[columns.tools] if columns.tools else [None] * len(batch[columns.messages])
        return [
            _chat(chats.understood(chat), chats.understood_tools(tools_of), tokenizer, learn_all)
            for chat, tools_of in zip(batch[columns.messages], tools, strict=True)
        ]
    rows = zip(batch[str(columns.prompt)], batch[str(columns.completion)], strict=True)
    found: list[tuple[str, Spans | None, Spans | None]] = []
    for prompt, completion in rows:
        learnt = None if learn_all else [(len(prompt), len(prompt) + len(completion))]
        found.append((prompt + completion, learnt, learnt))
    return found


def _chat(
    chat: chats.Chat, tools: chats.Tools | None, tokenizer: PreTrainedTokenizerFast, learn_all: bool
) -> tuple[str, Spans | None, Spans]:
    render = partial(chats.written, tokenizer=tokenizer, tools=tools)
    text = render(chat)
    chats.require_tools(chat, tools, text)
    if learn_all:
        return text, None, chats.contents(chat, text)
    return text, *chats.assistant_turns(chat, text, render, str(tokenizer.eos_token or ""))


def _special_tokens(tokenizer: PreTrainedTokenizerFast) -> tuple[list[int], list[int]]:
    """What a document begins and ends with; the eos token at the end, also where the tokenizer would not put it."""
    encoded = tokenizer("a", return_special_tokens_mask=True)
    ids, is_special = encoded["input_ids"], encoded["special_tokens_mask"]
    first = is_special.index(0)
    last = len(ids) - is_special[::-1].index(0)
    eos = tokenizer.eos_token_id
    return ids[:first], ids[last:] + ([eos] if eos is not None and eos not in ids[last:] else [])


def _encode(texts: list[str], tokenizer: PreTrainedTokenizerFast) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Of each text the tokens, and the characters where they start and end; each int32 of shape (tokens,)."""
    parts = [(i, start, end) for i, text in enumerate(texts) for start, end in _slices(text)]
    found: list[list[np.ndarray]] = [[np.zeros((0, 3), np.int32)] for _ in texts]
    sizes = accumulate(end - start for _, start, end in parts)
    for _, together in groupby(zip(parts, sizes, strict=True), key=lambda part: part[1] // SLICE):
        group = [part for part, _ in together]
        encoded = tokenizer(
            [texts[i][start:end] for i, start, end in group],
            add_special_tokens=False,
            return_offsets_mapping=True,
            return_attention_mask=False,
            verbose=False,  # "longer than the model's maximum": we cut
        )
        for (i, start, _), ids, offsets in zip(group, encoded["input_ids"], encoded["offset_mapping"], strict=True):
            ends = np.array(offsets, np.int32).reshape(-1, 2) + start
            found[i].append(np.column_stack([np.array(ids, np.int32), ends]))
    return [tuple(np.concatenate(columns).T) for columns in found]


def _slices(text: str) -> Iterator[tuple[int, int]]:
    """The text in parts of about SLICE characters, cut after the end of a line where there is one."""
    start = 0
    while start < len(text):
        end = min(start + SLICE, len(text))
        if end < len(text):
            end = text.rfind("\n", start, end) + 1 or end
        yield start, end
        start = end


@dataclass(frozen=True)
class _Document:
    ids: np.ndarray
    """Shape (tokens,), int32."""
    is_learnt: np.ndarray
    """Shape (tokens,), bool."""
    byte_ends: np.ndarray
    """Bytes of UTF-8 up to the end of each token; shape (tokens,), int64."""

    @classmethod
    def of(
        cls,
        text: str,
        spans: Spans | None,
        said: Spans | None,
        ids: np.ndarray,
        starts: np.ndarray,
        ends: np.ndarray,
        begin: list[int],
        end: list[int],
    ) -> "_Document":
        is_learnt = np.full(len(ids), spans is None)
        so_far = np.maximum.accumulate(ends)
        # some tokenizers report tokens of white space as empty: they are what is between their neighbours
        starts = np.where(starts == ends, np.concatenate([[0], so_far])[:-1], starts)
        for first, last in spans or []:
            is_learnt |= (ends > first) & (starts < last) & (ends > starts)
        codes = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32)
        sizes = 1 + (codes >= 0x80).astype(np.int8) + (codes >= 0x800) + (codes >= 0x10000)
        is_text = np.full(len(codes), said is None)
        for first, last in said or []:
            is_text[first:last] = True
        sizes *= is_text
        byte_ends = np.concatenate([[0], sizes.cumsum(dtype=np.int64)])
        return cls(
            np.concatenate([begin, ids, end]).astype(np.int32),
            np.concatenate([np.full(len(begin), spans is None), is_learnt, np.full(len(end), True)]),
            np.concatenate([np.zeros(len(begin), np.int64), byte_ends[so_far], np.full(len(end), byte_ends[-1])]),
        )

    def pieces(self, sequence_length: int, split: bool) -> Iterator[dict[str, Any]]:
        labels = np.where(self.is_learnt, self.ids, -100)
        size = len(self.ids) - 1  # the last token is predicted, and predicts nothing
        for start in range(0, size if split else min(size, 1), sequence_length):
            end = min(start + sequence_length, size)
            learnt = self.is_learnt[start + 1 : end + 1]
            yield {
                "input_ids": self.ids[start:end],
                "labels": labels[start + 1 : end + 1],
                "length": end - start,
                "targets": int(learnt.sum()),
                "bytes": int((np.diff(self.byte_ends[start : end + 1]) * learnt).sum()),
                "truncated": end < size and not split,
            }
