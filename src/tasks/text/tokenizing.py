"""Tokenization of rows: chunks that a language model has to predict.

A chunk is at most sequence_length tokens: `input_ids`, and as `labels` the token after each, or -100 where that is
masked out of the loss. Longer raw text is split into several chunks; longer prompts and chats are truncated.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import chain, count
from typing import Any

import numpy as np
import pyarrow as pa
from datasets import Dataset, Features, List, Value
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from src.tasks.text.load import require_known
from src.tasks.text.packing import Chunk
from src.tasks.text.rows import Rows, cached_map

END_OF_TEXT = "<|endoftext|>"
PAD = "<|pad|>"
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<{{ message.role }}>{{ message.content }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer of the 256 bytes, `<|endoftext|>`, which begins and ends a document, and `<|pad|>`, with a
    plain chat template. `AutoTokenizer.from_pretrained` loads what its `save_pretrained` writes."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())  # a printable character for each byte, as in GPT-2
    tokenizer = Tokenizer(models.BPE(vocab={character: i for i, character in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([END_OF_TEXT, PAD])
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{END_OF_TEXT} $A",
        pair=f"{END_OF_TEXT} $A {END_OF_TEXT} $B",
        special_tokens=[(END_OF_TEXT, tokenizer.token_to_id(END_OF_TEXT))],
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=END_OF_TEXT,
        eos_token=END_OF_TEXT,
        pad_token=PAD,
        chat_template=CHAT_TEMPLATE,
    )


SLICE = 2**16
"""Characters that are tokenized at once: the tokenizer's Python objects take 260 times the memory of the text."""
OVERLAP = 256
"""Characters that a slice repeats of the one before."""
INT = Value("int32")
INTS = List(INT)
CHUNK_FEATURES = Features(
    {"row": INT, "input_ids": INTS, "labels": INTS, "length": INT, "targets": INT, "truncated": Value("bool")}
)
"""Columns of a table of chunks: `row` is the place of the chunk's row in its batch, and `targets` is how many tokens
contribute to the loss."""

Span = tuple[int, int]
"""A part of a text, from one character up to another."""
Spans = list[Span]
Text = tuple[str, Spans | None]
"""A text, and the parts of it that are learnt; None: all."""
Columns = dict[str, str]
"""Names of columns by role: text; or prompt and completion; or chat, as `encode_chat` returns it."""


@dataclass(frozen=True)
class Chunker:
    """Makes chunks from rows. With `train_on_prompts`, prompts have labels too, not only completions."""

    columns: Columns
    tokenizer: PreTrainedTokenizerFast
    sequence_length: int
    train_on_prompts: bool
    num_known: int
    """Number of tokens that the model knows."""

    def make_chunks(self, rows: Dataset, desc: str) -> Dataset:
        """Return a table with the columns of CHUNK_FEATURES; later calls, even in another process, read it from the
        cache."""
        return cached_map(rows, self.chunks, f"tokenizing {desc}", features=CHUNK_FEATURES, batch_size=100)

    def chunks(self, batch: Rows) -> pa.Table:
        """Return the columns of CHUNK_FEATURES for a batch of rows. A row may have no chunks."""
        texts = [self._text(*row) for row in zip(*(batch[name] for name in self.columns.values()), strict=True)]
        rows = enumerate(encode(texts, self.tokenizer, has_ends="chat" in self.columns))
        chunks = [{"row": place, **chunk} for place, tokens in rows for chunk in self._row_chunks(*tokens)]
        return pa.Table.from_pylist(chunks, CHUNK_FEATURES.arrow_schema)

    def _text(self, text: str, completion: str = "") -> Text:
        """Return the text of a row, which is a text, a prompt with its completion, or a chat."""
        if "chat" in self.columns:
            text, spans = json.loads(text)
            return text, spans
        whole = text + completion
        return whole, [(len(text), len(whole))] if completion and not self.train_on_prompts else None

    def _row_chunks(self, ids: np.ndarray, labels: np.ndarray) -> Iterator[Chunk]:
        """Yield the chunks of a row's tokens: all of them for raw text, else the first one."""
        require_known(ids, self.tokenizer, self.num_known)
        labels = labels[1:]  # the last token is predicted, and predicts nothing
        length, splits = self.sequence_length, "text" in self.columns
        for first in range(0, len(labels), length)[: None if splits else 1]:
            own = labels[first : first + length]
            yield {
                "input_ids": ids[first : first + len(own)],
                "labels": own,
                "length": len(own),
                "targets": np.count_nonzero(own != -100),
                "truncated": not splits and len(own) < len(labels),
            }


def encode(
    texts: Sequence[Text], tokenizer: PreTrainedTokenizerFast, has_ends: bool
) -> Iterator[tuple[np.ndarray, ...]]:
    """Yield the tokens of each text, and their labels: those within its spans, and -100 for the others; int32 of shape
    (tokens,). Unless a chat template wrote them, so that they have ends (`has_ends`), the tokens that begin and end a
    document are added; the last one is always learnt."""
    sliced = [[*_slices(text, tokenizer)] for text, _ in texts]
    parts = (part for slices in sliced for *_, part in slices)
    tokenized = _tokenized(parts, tokenizer, return_offsets_mapping=any(spans is not None for _, spans in texts))
    for (text, spans), slices in zip(texts, sliced, strict=True):
        before, after = ([], []) if has_ends else missing_ends(text, tokenizer)
        found: list[Any] = [(before, before if spans is None else [-100] * len(before))]
        for start, known, _ in slices:
            tokens, places = next(tokenized)
            ids, labels = np.array([tokens, tokens], np.int32)
            if spans is not None:
                offsets = np.array(places).reshape(-1, 2) + start
                labels[~_within(spans, offsets, np.isin(ids, _added_ids(tokenizer)))] = -100
            found.append((ids[known:], labels[known:]))
        yield tuple(
            np.concatenate(arrays, dtype=np.int32, casting="unsafe")
            for arrays in zip(*found, (after, after), strict=True)
        )


def _tokenized(parts: Iterator[str], tokenizer: PreTrainedTokenizerFast, **options: Any) -> Iterator[tuple[Any, Any]]:
    """Yield the tokens of each part of a text and, if `options` ask for offsets, where each token starts and ends.
    Parts of SLICE characters or more together are tokenized at once, on all cores."""
    some: list[str] = []
    for part in chain(parts, [""]):  # an empty one, as after the last, ends what is tokenized together
        some.append(part)
        if not part or sum(map(len, some)) >= SLICE:
            encoded = tokenizer(some, add_special_tokens=False, return_attention_mask=False, verbose=False, **options)
            yield from zip(encoded["input_ids"], encoded.get("offset_mapping") or some, strict=True)
            some = []


@lru_cache(maxsize=1)
def _added_ids(tokenizer: PreTrainedTokenizerFast) -> np.ndarray:
    """Return the ids of added tokens. With the thousands that Gemma has, this takes 11 ms."""
    return np.array([*tokenizer.added_tokens_decoder], np.int32)


def _within(spans: Spans, offsets: np.ndarray, is_added: np.ndarray) -> np.ndarray:
    """Return which tokens are within these spans of their text, shape (tokens,), given the characters where each starts
    and ends, shape (tokens, 2), and whether it is an added token."""
    starts, ends = offsets.T
    # an added token may have taken in the white space after it: where it starts decides
    ends = np.where(is_added, starts + 1, ends)
    # some tokenizers report whitespace tokens as empty: each then spans what is between its neighbours
    starts = np.where(starts == ends, np.maximum.accumulate(np.append(0, ends[:-1])), starts)
    return np.any([(ends > first) & (starts < last) & (ends > starts) for first, last in spans], axis=0)


def _slices(text: str, tokenizer: PreTrainedTokenizerFast) -> Iterator[tuple[int, int, str]]:
    """Yield the slices of a text, of about SLICE characters: where each starts, how many of its tokens belong to the
    one before, and itself. Each begins within the one before, as some tokenizers put a space before a text; and ends
    where a token does, as some join line ends."""
    encode = partial(tokenizer.encode, add_special_tokens=False, verbose=False)
    start = known = 0
    while len(text) > start + SLICE:
        first = start + SLICE - OVERLAP
        around = encode(text[first : first + 2 * OVERLAP])
        for end in count(start + SLICE):
            tokens = encode(text[first:end])
            if tokens == around[: len(tokens)]:
                break
        yield start, known, text[start:end]
        start, known = first, len(tokens)
    yield start, known, text[start:]


def missing_ends(text: str, tokenizer: PreTrainedTokenizerFast) -> tuple[list[int], list[int]]:
    """Return the tokens that begin a document and those that end it, unless the text has them: text that a chat
    template wrote has its own, and the model would learn to write them twice."""
    (before, begin), (after, end) = _document_ends(tokenizer)
    return [] if text.lstrip().startswith(begin) else before, [] if text.rstrip().endswith(end) else after


@lru_cache(maxsize=1)
def _document_ends(tokenizer: PreTrainedTokenizerFast) -> list[tuple[list[int], str]]:
    """Return the tokens that begin a document and those that end it, each also as text: the eos token at the end, even
    if the tokenizer adds none."""
    encoded: Any = tokenizer("a")
    first, last = encoded.word_to_tokens(0)
    before, after = encoded["input_ids"][:first], encoded["input_ids"][last:]
    if tokenizer.eos_token_id not in (None, *after):
        after.append(tokenizer.eos_token_id)
    return [(special, "".join(tokenizer.convert_ids_to_tokens(special))) for special in (before, after)]
