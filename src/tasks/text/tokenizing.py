"""Tokenization of rows: chunks that a language model has to predict, and a classifier's inputs from labelled texts.

A chunk is at most sequence_length tokens: `input_ids`, and as `labels` the token after each, or -100 where that is
masked out of the loss. Longer raw text is split into several chunks; longer prompts and chats are truncated.
"""

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, chain, groupby
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa
from datasets import Dataset, Features, List, Value
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from src.config.errors import UserError, listed
from src.tasks.text.chats import Spans, render_chat
from src.tasks.text.packing import Chunk, ranges
from src.tasks.text.reading import Rows, as_label, cached_map

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


SLICE, TOGETHER = 2**16, 16
"""Characters in a slice of text, and how many slices' worth is tokenized at once: a tokenizer's Python objects take 260
times the memory of the text."""
INTS, INT = List(Value("int32")), Value("int32")
BOOL = Value("bool")
CHUNK_FEATURES = Features(
    {"input_ids": INTS, "labels": INTS, "length": INT, "targets": INT, "truncated": BOOL, "had_ends": BOOL}
)
"""Columns of a table of chunks: `targets` is how many tokens contribute to the loss; `had_ends` tells, for a row's
first chunk, whether the text itself began or ended with the special token for that."""


Columns = dict[str, str]
"""Names of columns by role: text; or prompt and completion; or messages, with or without tools."""
USUAL: tuple[Columns, ...] = (
    {"messages": "messages"},
    {"messages": "conversations"},
    {"prompt": "prompt", "completion": "completion"},
    {"text": "text"},
)


def find_columns(asked: dict[str, str | None], names: list[str]) -> Columns:
    """Return the columns by role: those asked for, or else those with usual names. Raise a UserError if the roles of
    those asked for don't belong together, or none has a usual name."""
    chosen = {role: column for role, column in asked.items() if column}
    kinds = [usual for usual in USUAL if ({*chosen} == {*usual} if chosen else {*usual.values()} <= {*names})]
    if not kinds:
        hint = "--task.text_column, or --task.prompt_column and --task.completion_column, or --task.messages_column"
        raise UserError(f"which of the dataset's columns ({listed(names)}) to train on? Set {hint}")
    found = chosen or kinds[0]
    # rows without tools need not have the column
    return found | {"tools": "tools"} if "messages" in found else found


@dataclass(frozen=True)
class Chunker:
    """Makes chunks from rows. With `train_on_prompts`, prompts and all turns have labels too, not only completions and
    the assistant's turns."""

    columns: Columns
    tokenizer: PreTrainedTokenizerFast
    sequence_length: int
    train_on_prompts: bool
    filler: ClassVar[Chunk] = {"input_ids": [], "labels": [], "length": 0}  # room: streaming
    """Placeholder for a row without a chunk."""

    def make_chunks(self, rows: Dataset, desc: str) -> Dataset:
        """Return a table with the columns of CHUNK_FEATURES; later calls, even in another process, read it from the
        cache. Raise a UserError if a chat template fails (see `render_chat`)."""
        rows = rows.select_columns([*self.columns.values()])
        return cached_map(rows, self, f"tokenizing {desc}", features=CHUNK_FEATURES, batch_size=100)

    def __call__(self, batch: Rows) -> pa.Table:
        """Return the columns of CHUNK_FEATURES for a batch of rows with the columns of `columns`, in that order."""
        return self.chunks(batch).drop_columns("row")

    def chunks(self, batch: Rows) -> pa.Table:
        """Return the same, with the place of each chunk's row in the batch as `row`; int64. A row may have none."""
        rows = [self._as_text(dict(zip(self.columns, row, strict=True))) for row in zip(*batch.values(), strict=True)]
        # a chat template writes its own special tokens
        prefix, suffix = ([], []) if "messages" in self.columns else _special_tokens(self.tokenizer)
        has_spans = any(spans is not None for _, spans in rows)
        (bare, *positions), lengths = _encode([text for text, _ in rows], self.tokenizer, has_spans)
        ends = np.cumsum(lengths)
        # text that a chat template wrote has its own ends, and the model would learn to write them twice
        lacks_begin = ~_have(bare, ends - lengths, lengths, prefix)
        lacks_end = ~_have(bare, ends - len(suffix), lengths, suffix)
        begins = len(prefix) * lacks_begin
        sizes = begins + lengths + len(suffix) * lacks_end
        firsts = np.cumsum(sizes) - sizes
        ids = np.empty(sizes.sum(), np.int32)
        ids[ranges(firsts + begins, lengths)] = bare
        for places, special in ((firsts[lacks_begin], prefix), ((firsts + sizes)[lacks_end] - len(suffix), suffix)):
            ids[places[:, None] + np.arange(len(special))] = special
        loss_mask = np.repeat([spans is None for _, spans in rows], sizes)
        if has_spans:
            for (_, spans), first, end, length in zip(rows, firsts + begins, ends, lengths, strict=True):
                if spans:
                    own = (of_all[end - length : end] for of_all in positions)
                    loss_mask[first : first + length] = _within(spans, *own)
            loss_mask[(firsts + sizes)[:, None] - 1 - np.arange(len(suffix))] = True
        return self._cut(ids, loss_mask, firsts, sizes, ~lacks_begin & bool(prefix) | ~lacks_end & bool(suffix))

    def _as_text(self, values: dict[str, Any]) -> tuple[str, Spans | None]:
        """Return a row, given as values by role, as one text, and which parts of it contribute to the loss (None:
        all)."""
        if "text" in values:
            return values["text"], None
        if "messages" in values:
            tools = json.loads(values.get("tools") or "null")
            return render_chat(json.loads(values["messages"]), tools, self.tokenizer, self.train_on_prompts)
        text = values["prompt"] + values["completion"]
        return text, None if self.train_on_prompts else [(len(values["prompt"]), len(text))]

    def _cut(
        self, ids: np.ndarray, loss_mask: np.ndarray, firsts: np.ndarray, sizes: np.ndarray, had_ends: np.ndarray
    ) -> pa.Table:
        """Return the rows' chunks: all of them for raw text, else the first one.

        Args:
            ids: the tokens of all rows; int32.
            loss_mask: which of them contribute to the loss.
            firsts: where each row begins in them, as `sizes` says how many it has; shape (rows,), int64.
            had_ends: which rows' texts had ends of their own.
        """
        sizes = np.maximum(sizes - 1, 0)  # the last token is predicted, and predicts nothing
        number = -(-sizes // self.sequence_length)
        splits = "text" in self.columns
        if not splits:
            number = np.minimum(number, 1)
        row = np.repeat(np.arange(len(sizes)), number)
        before = ranges(np.zeros_like(number), number) * self.sequence_length
        left = sizes[row] - before
        lengths = np.minimum(left, self.sequence_length)
        tokens = ranges(firsts[row] + before, lengths)
        ends = np.append(0, np.cumsum(lengths)).astype(np.int32)
        counts = loss_mask[tokens + 1]
        columns = {
            "input_ids": pa.ListArray.from_arrays(ends, ids[tokens]),
            "labels": pa.ListArray.from_arrays(ends, np.where(counts, ids[tokens + 1], np.int32(-100))),
            "length": lengths.astype(np.int32),
            "targets": np.diff(np.append(0, np.cumsum(counts))[ends]).astype(np.int32),
            "truncated": (lengths < left) & (not splits),
            "had_ends": had_ends[row] & (before == 0),
            "row": row,
        }
        return pa.table(columns)


def _have(ids: np.ndarray, firsts: np.ndarray, lengths: np.ndarray, special: list[int]) -> np.ndarray:
    """Return which rows have these tokens from a place in `ids` on; shape (rows,)."""
    padded = np.append(ids, np.array(special, np.int32))  # a row at the end may have fewer
    return (lengths >= len(special)) & (padded[firsts[:, None] + np.arange(len(special))] == special).all(1)


def _within(spans: Spans, starts: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """Return which tokens are within these spans of their text, shape (tokens,), given the characters where they start
    and end."""
    # some tokenizers report whitespace tokens as empty: each then spans what is between its neighbours
    starts = np.where(starts == ends, np.concatenate([[0], np.maximum.accumulate(ends)])[:-1], starts)
    return np.logical_or.reduce([(ends > first) & (starts < last) & (ends > starts) for first, last in spans])


def split_text(rows: Dataset, column: str, fraction: float) -> tuple[Dataset, Dataset]:
    """Return the only row with this fraction of its text, and with the rest. Raise a UserError if the text is too
    short."""
    length = len(rows[0][column])
    cut = round(length * fraction)
    if not 0 < cut < length:
        raise UserError("task.dataset: the text is too short to hold out a part of it for evaluation")
    train, evaluation = (
        cached_map(rows, partial(_cut_text, column=column, part=part), "splitting the text")
        for part in (slice(cut), slice(cut, None))
    )
    return train, evaluation


def _cut_text(batch: Rows, column: str, part: slice) -> Rows:
    return {column: [text[part] for text in batch[column]]}


def _special_tokens(tokenizer: PreTrainedTokenizerFast) -> tuple[list[int], list[int]]:
    """Return the tokens that begin and end a document: the eos token at the end, even if the tokenizer adds none."""
    encoded = tokenizer("a", return_special_tokens_mask=True)
    ids, is_special = encoded["input_ids"], encoded["special_tokens_mask"]
    first, last = is_special.index(0), len(ids) - is_special[::-1].index(0)
    eos = tokenizer.eos_token_id
    return ids[:first], ids[last:] + ([eos] if eos is not None and eos not in ids[last:] else [])


def _encode(texts: list[str], tokenizer: PreTrainedTokenizerFast, has_offsets: bool) -> tuple[np.ndarray, np.ndarray]:
    """Return the texts' tokens, one text after the other; with `has_offsets`, which takes twice as long, also the
    characters where they start and end; int32 of shape (1, tokens) or (3, tokens). And each text's number of tokens;
    int64. Long texts are cut into slices of up to SLICE characters, at the end of a line if possible."""
    a_slice = re.compile(rf"(?s).{{1,{SLICE}}}\Z|.{{0,{SLICE - 1}}}\n|.{{1,{SLICE}}}")
    slices = [(i, match.start(), match[0]) for i, text in enumerate(texts) for match in a_slice.finditer(text)]
    characters = accumulate(len(part) for _, _, part in slices)
    groups = groupby(slices, lambda _: next(characters) // (SLICE * TOGETHER))
    fast = tokenizer.backend_tokenizer  # it does not warn about "longer than the model's maximum": we cut
    fast.no_truncation()
    fast.no_padding()
    fast.encode_special_tokens = tokenizer.split_special_tokens
    encode = fast.encode_batch if has_offsets else fast.encode_batch_fast
    found = [np.empty((3 if has_offsets else 1, 0), np.int32)]
    lengths = np.zeros(len(texts), np.int64)
    for _, together in groups:
        rows, starts, parts = zip(*together, strict=True)
        encodings = encode(parts, add_special_tokens=False)
        sizes = [*map(len, encodings)]
        np.add.at(lengths, [*rows], sizes)
        # one array for all: for each text of 100 tokens, one of its own would take longer than its tokens
        tokens = np.fromiter(chain.from_iterable(encoding.ids for encoding in encodings), np.int32, sum(sizes))
        if has_offsets:
            pairs = chain.from_iterable(encoding.offsets for encoding in encodings)
            offsets = np.fromiter(chain.from_iterable(pairs), np.int32, 2 * len(tokens)).reshape(-1, 2)
            tokens = np.vstack([tokens, offsets.T + np.repeat(starts, sizes)])
        found.append(np.atleast_2d(tokens))
    return np.hstack(found), lengths


MEGA_BATCH = 50
"""Batches that are sorted by length together, as in transformers' LengthGroupedSampler."""


NUMBER = re.compile(r"(LABEL_)?-?[0-9]+(\.[0-9]*)?([eE][-+]?[0-9]+)?")
"""A label that is a number, or that transformers made of one."""


def sorted_labels(labels: Iterable[str]) -> list[str]:
    """Return the labels, sorted: numbers by value, names alphabetically."""
    names = sorted(labels)  # 1 and 01 in the same order on every process
    are_numbers = all(map(NUMBER.fullmatch, names))
    return sorted(names, key=lambda name: float(name.removeprefix("LABEL_"))) if are_numbers else names


def fold(label: str) -> str:
    """Return a label without its case and white space."""
    return "".join(label.split()).casefold()


def known_label(value: Any, labels: list[str]) -> str:  # room: streaming
    """Return a label as text. Raise a ValueError if it is not one of `labels`."""
    label = as_label(value)
    if label not in labels:
        raise ValueError(f"{label} is not in the evaluation data ({listed(labels)})")
    return label


@dataclass(frozen=True)
class Labelling:
    """Makes model inputs from rows of a text, or a pair of texts, and a label."""

    label: str
    """Column of labels."""
    labels: list[str]
    """All labels that the model knows, as the data write them."""
    tokenizer: PreTrainedTokenizerFast
    sequence_length: int

    def __call__(self, rows: Rows) -> Rows:
        """Return the model's inputs, with `label`, an id, `length` in tokens, and whether the text was `truncated`."""
        texts = [values for name, values in rows.items() if name != self.label]
        encoded = self.tokenizer(*texts, truncation=True, max_length=self.sequence_length)
        self.tokenizer.backend_tokenizer.no_truncation()  # remembered, it would change the fingerprint
        return {
            **encoded,
            "label": [self.labels.index(label) for label in rows[self.label]],
            "length": [len(ids) for ids in encoded["input_ids"]],
            "truncated": [bool(encoding.overflowing) for encoding in encoded.encodings or []],
        }

    @property
    def filler(self) -> Chunk:  # room: streaming
        """Return a placeholder for a skipped row, whose label the loss ignores."""
        return {name: [1] for name in self.tokenizer.model_input_names} | {"label": -100, "length": 0}

    def chunks(self, rows: Rows) -> pa.Table:  # room: streaming
        """Return one chunk for each row, and the rows' places as `row`."""
        return pa.table(self(rows) | {"row": range(len(rows[self.label]))})


def length_grouped(lengths: np.ndarray, random: np.random.Generator, batch_size: int) -> np.ndarray:
    """Return indices, each once, in an order that groups texts of similar lengths into batches and shuffles the
    batches; `lengths` and indices have shape (examples,), int64. The last batch may be smaller."""
    order = random.permutation(len(lengths))
    size = MEGA_BATCH * batch_size
    parts = np.split(order, range(size, len(order), size))
    order = np.concatenate([part[np.argsort(-lengths[part], kind="stable")] for part in parts])
    whole = len(order) // batch_size * batch_size
    batches = random.permutation(order[:whole].reshape(-1, batch_size))
    return np.concatenate([batches.reshape(-1), order[whole:]])
