"""From rows of text to pieces of tokens: what a causal language model reads, and what of it it has to predict.

A row is raw text, a prompt with its completion, or a chat. A piece is at most sequence_length tokens: `input_ids`, and
as `labels` the token after each, or -100 where it is not to be learnt. Text that is longer makes several pieces;
prompts and chats are cut off.
"""

import inspect
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from datasets import Dataset, Features, List, Value
from datasets.fingerprint import Hasher
from transformers import PreTrainedTokenizerFast

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
"""Columns of a table of pieces: `targets` is how many labels are to be learnt, `bytes` what they are in UTF-8."""


@dataclass(frozen=True)
class Format:
    """Which columns hold what; either text, or prompt and completion, or messages."""

    text: str | None = None
    prompt: str | None = None
    completion: str | None = None
    messages: str | None = None

    @property
    def columns(self) -> dict[str, type]:
        """The columns and the type of their values."""
        kinds = {self.text: str, self.prompt: str, self.completion: str, self.messages: list}
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
    source = inspect.getsource(sys.modules[__name__])  # else the cache outlives a change in this file
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


def _tokenise(
    batch: dict[str, list[Any]],
    form: dict[str, Any],
    tokenizer: PreTrainedTokenizerFast,
    sequence_length: int,
    learn_all: bool,
) -> dict[str, list[Any]]:
    columns = Format(**form)
    texts, spans = _texts(batch, columns, tokenizer)
    encoded = tokenizer(
        texts,
        add_special_tokens=columns.messages is None,  # a chat template writes its own
        return_offsets_mapping=True,
        return_attention_mask=False,
        verbose=False,  # "longer than the model's maximum": we cut
    )
    table: dict[str, list[Any]] = {name: [] for name in PIECES}
    for text, learnt, ids, offsets in zip(texts, spans, encoded["input_ids"], encoded["offset_mapping"], strict=True):
        ends_itself = columns.messages is not None
        document = _Document.of(text, learnt if not learn_all else None, ids, offsets, tokenizer, ends_itself)
        for piece in document.pieces(sequence_length, split=columns.text is not None):
            for name, value in piece.items():
                table[name].append(value)
    return table


Spans = list[tuple[int, int]]
"""Parts of a text, from one character up to another."""


def _texts(
    batch: dict[str, list[Any]], columns: Format, tokenizer: PreTrainedTokenizerFast
) -> tuple[list[str], list[Spans | None]]:
    """Each row as one text, and which parts of it are to be learnt; None: all."""
    if columns.text:
        return batch[columns.text], [None] * len(batch[columns.text])
    if columns.messages:
        rendered = [_render(messages, tokenizer) for messages in batch[columns.messages]]
        return [text for text, _ in rendered], [spans for _, spans in rendered]
    rows = list(zip(batch[str(columns.prompt)], batch[str(columns.completion)], strict=True))
    return [prompt + completion for prompt, completion in rows], [[(len(p), len(p) + len(c))] for p, c in rows]


def _render(messages: list[dict[str, Any]], tokenizer: PreTrainedTokenizerFast) -> tuple[str, Spans]:
    def written(count: int, begins_answer: bool = False) -> str:
        try:
            text = tokenizer.apply_chat_template(messages[:count], tokenize=False, add_generation_prompt=begins_answer)
        except Exception as error:  # it is a program
            raise ValueError(f"the tokenizer's chat template refuses a chat: {' '.join(str(error).split())}") from error
        assert isinstance(text, str)
        return text

    text = written(len(messages))
    spans = []
    for i, message in enumerate(messages):
        if message["role"] == "assistant":
            before, after = written(i, begins_answer=True), written(i + 1)
            if not (text.startswith(after) and after.startswith(before)):
                raise ValueError(
                    "the tokenizer's chat template writes earlier turns otherwise once a chat goes on, so that the "
                    "assistant's cannot be told apart: set --task.learn_all=true, or another --task.chat_template"
                )
            spans.append((len(before), len(after)))
    return text, spans


@dataclass(frozen=True)
class _Document:
    ids: np.ndarray
    """Shape (tokens,), int32."""
    is_learnt: np.ndarray
    """Shape (tokens,), bool."""
    byte_ends: np.ndarray
    """Where each token ends in the text, in bytes of UTF-8; shape (tokens,), int64."""

    @classmethod
    def of(
        cls,
        text: str,
        spans: Spans | None,
        ids: list[int],
        offsets: list[tuple[int, int]],
        tokenizer: PreTrainedTokenizerFast,
        ends_itself: bool,
    ) -> "_Document":
        starts, ends = np.array(offsets, np.int64).reshape(-1, 2).T
        is_learnt = np.full(len(ids), spans is None)
        for first, last in spans or []:
            is_learnt |= (ends > first) & (starts < last) & (ends > starts)
        codes = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32)
        sizes = 1 + (codes >= 0x80).astype(np.int64) + (codes >= 0x800) + (codes >= 0x10000)
        byte_ends = np.concatenate([[0], sizes.cumsum()])[np.maximum.accumulate(ends)]
        tokens = np.array(ids, np.int32)
        eos = tokenizer.eos_token_id
        if not ends_itself and eos is not None and (len(tokens) == 0 or tokens[-1] != eos):
            tokens = np.append(tokens, np.int32(eos))
            is_learnt, byte_ends = np.append(is_learnt, True), np.append(byte_ends, byte_ends[-1:])
        return cls(tokens, is_learnt, byte_ends)

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
