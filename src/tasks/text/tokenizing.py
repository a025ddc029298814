"""Tokenization of rows: chunks that a language model has to predict, and a classifier's inputs from labelled texts.

A chunk is at most sequence_length tokens: `input_ids`, and as `labels` the token after each, or -100 where that is
masked out of the loss. Longer raw text is split into several chunks; longer prompts and chats are truncated.
"""

import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import count
from typing import Any

import numpy as np
import pyarrow as pa
from datasets import Dataset, Features, List, Value
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from src.config.errors import UserError, listed
from src.tasks.text.chats import Spans, render_chat
from src.tasks.text.packing import Chunk
from src.tasks.text.reading import Rows, as_json, cached_map

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


def require_known(ids: np.ndarray, tokenizer: PreTrainedTokenizerFast, num_known: int) -> None:
    """Raise a UserError if a model that knows so many tokens does not know one of these, shape (tokens,), or the one
    for padding."""
    largest = int(max(ids.max(initial=0), tokenizer.pad_token_id or 0))
    if largest >= num_known:
        token = tokenizer.convert_ids_to_tokens(largest)
        says = f"the token {token} has the id {largest}, but the model knows {num_known} tokens"
        raise UserError(f"{says} (task.tokenizer, task.architecture.vocab_size)")


SLICE, TOGETHER = 2**16, 16
"""Characters in a slice of text, and how many slices are tokenized at once: a tokenizer's Python objects take 260 times
the memory of the text."""
OVERLAP = 256
"""Characters that a slice repeats of the one before."""
INTS, INT = List(Value("int32")), Value("int32")
CHUNK_FEATURES = Features(
    {"row": INT, "input_ids": INTS, "labels": INTS, "length": INT, "targets": INT, "truncated": Value("bool")}
)
"""Columns of a table of chunks: `row` is the place of the chunk's row in its batch, and `targets` is how many tokens
contribute to the loss."""

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
    return chosen or kinds[0]


@dataclass(frozen=True)
class Chunker:
    """Makes chunks from rows. With `train_on_prompts`, prompts and all turns have labels too, not only completions and
    the assistant's turns."""

    columns: Columns
    tokenizer: PreTrainedTokenizerFast
    sequence_length: int
    train_on_prompts: bool
    num_known: int
    """Number of tokens that the model knows."""

    def make_chunks(self, rows: Dataset, desc: str) -> Dataset:
        """Return a table with the columns of CHUNK_FEATURES; later calls, even in another process, read it from the
        cache. Raise a UserError if a chat template fails (see `render_chat`)."""
        rows = rows.select_columns([*self.columns.values()])
        return cached_map(rows, self.chunks, f"tokenizing {desc}", features=CHUNK_FEATURES, batch_size=100)

    def chunks(self, batch: Rows) -> pa.Table:
        """Return the columns of CHUNK_FEATURES for a batch of rows with the columns of `columns`, in that order. A row
        may have no chunks."""
        rows = [self._as_text(dict(zip(self.columns, row, strict=True))) for row in zip(*batch.values(), strict=True)]
        # a chat template writes its own special tokens
        prefix, suffix = ([], []) if {"messages", "row"} & self.columns.keys() else _special_tokens(self.tokenizer)
        begin, end = ("".join(self.tokenizer.convert_ids_to_tokens(special)) for special in (prefix, suffix))
        has_spans = any(spans is not None for _, spans in rows)
        added = [*self.tokenizer.added_tokens_decoder] if has_spans else []  # takes milliseconds
        encoded = _encode([text for text, _ in rows], self.tokenizer, has_spans)
        chunks: list[Chunk] = []
        for number, ((text, spans), (ids, *offsets)) in enumerate(zip(rows, encoded, strict=True)):
            # text that a chat template wrote has its own ends, and the model would learn to write them twice
            before = [] if text.lstrip().startswith(begin) else prefix
            after = [] if text.rstrip().endswith(end) else suffix
            within = np.ones(len(ids), bool) if spans is None else _within(spans, ids, added, *offsets)
            ids = np.concatenate([before, ids, after], dtype=np.int32, casting="unsafe")
            require_known(ids, self.tokenizer, self.num_known)
            within = np.pad(within, (len(before), len(after)), constant_values=(spans is None, True))
            chunks += self._cut(ids, within, number)
        return pa.Table.from_pylist(chunks, CHUNK_FEATURES.arrow_schema)

    def encode_row(self, row: dict[str, str]) -> str:
        """Return a row of a chat, given as encoded values by column, as the JSON of what `render_chat` returns. Raise a
        UserError if that does."""
        return as_json(self._as_text({role: row[column] for role, column in self.columns.items()}))

    def _as_text(self, values: dict[str, Any]) -> tuple[str, Spans | None]:
        """Return a row, given as values by role, as one text, and which parts of it contribute to the loss (None:
        all)."""
        if "row" in values:
            return json.loads(values["row"])
        if "text" in values:
            return values["text"], None
        if "messages" in values or "tools" in values:
            prompt = [message | {"weight": 0} for message in json.loads(values.get("prompt", "[]"))]
            chat = prompt + json.loads(values.get("messages") or values["completion"])
            tools = json.loads(values.get("tools") or "null")
            return render_chat(chat, tools, self.tokenizer, self.train_on_prompts)
        text = values["prompt"] + values["completion"]
        return text, None if self.train_on_prompts else [(len(values["prompt"]), len(text))]

    def _cut(self, ids: np.ndarray, within: np.ndarray, row: int) -> Iterator[Chunk]:
        """Yield the chunks of a row with this number: all of them for raw text, else the first one. `ids` are its
        tokens, int32; those `within` contribute to the loss, bool."""
        length, splits = self.sequence_length, "text" in self.columns
        labels = np.where(within, ids, np.int32(-100))[1:]  # the last token is predicted, and predicts nothing
        for first in range(0, len(labels) if splits else min(len(labels), 1), length):
            own = labels[first : first + length]
            yield {
                "row": row,
                "input_ids": ids[first : first + len(own)],
                "labels": own,
                "length": len(own),
                "targets": np.count_nonzero(own != -100),
                "truncated": not splits and len(own) < len(labels),
            }


def _within(spans: Spans, ids: np.ndarray, added: list[int], starts: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """Return which tokens are within these spans of their text, shape (tokens,), given the characters where they start
    and end, and the ids of added tokens."""
    # an added token may have taken in the white space after it: where it starts decides
    ends = np.where(np.isin(ids, added), starts + 1, ends)
    # some tokenizers report whitespace tokens as empty: each then spans what is between its neighbours
    starts = np.where(starts == ends, np.concatenate([[0], np.maximum.accumulate(ends)])[:-1], starts)
    found = [(ends > first) & (starts < last) & (ends > starts) for first, last in spans]
    return np.logical_or.reduce([np.zeros(len(ids), bool), *found])


def split_text(rows: Dataset, column: str, fraction: float) -> tuple[Dataset, Dataset]:
    """Return the only row with this fraction of its text, and with the rest. Raise a UserError if the text is too
    short."""
    length = len(rows[0][column])
    cut = round(length * fraction)
    if not 0 < cut < length:
        raise UserError("task.dataset: the text is too short to hold out a part of it for evaluation")
    parts = slice(cut), slice(cut, None)
    train, evaluation = (rows.map(_cut_text, fn_kwargs={"column": column, "part": part}) for part in parts)
    return train, evaluation


def _cut_text(row: dict[str, str], column: str, part: slice) -> dict[str, str]:
    return {column: row[column][part]}


def _special_tokens(tokenizer: PreTrainedTokenizerFast) -> tuple[list[int], list[int]]:
    """Return the tokens that begin and end a document: the eos token at the end, even if the tokenizer adds none."""
    encoded = tokenizer("a", return_special_tokens_mask=True)
    ids, is_special = encoded["input_ids"], encoded["special_tokens_mask"]
    first, last = is_special.index(0), len(ids) - is_special[::-1].index(0)
    eos = tokenizer.eos_token_id
    return ids[:first], ids[last:] + ([eos] if eos is not None and eos not in ids[last:] else [])


def _encode(texts: list[str], tokenizer: PreTrainedTokenizerFast, has_offsets: bool) -> list[np.ndarray]:
    """Return each text's tokens; with `has_offsets`, which takes twice as long, also the characters where they start
    and end; int32 of shape (1, tokens) or (3, tokens). Long texts are encoded slice by slice."""
    fast = tokenizer.backend_tokenizer  # it does not warn about "longer than the model's maximum": we cut
    fast.no_truncation()
    fast.no_padding()
    encode = fast.encode_batch if has_offsets else fast.encode_batch_fast
    found: list[list[np.ndarray]] = [[] for _ in texts]
    slices = [(i, *part) for i, text in enumerate(texts) for part in _slices(text, fast)]
    for number in range(0, len(slices), TOGETHER):
        together = slices[number : number + TOGETHER]
        encodings = encode([part for *_, part in together], add_special_tokens=False)
        for (i, start, skipped, _), encoding in zip(together, encodings, strict=True):
            tokens = np.array([encoding.ids[skipped:]], np.int32)
            if has_offsets:
                offsets = np.array(encoding.offsets[skipped:], np.int32).reshape(-1, 2)
                tokens = np.vstack([tokens, offsets.T + start])
            found[i].append(tokens)
    return [np.hstack(parts) for parts in found]


def _slices(text: str, tokenizer: Tokenizer) -> Iterator[tuple[int, int, str]]:
    """Yield the slices of a text, of about SLICE characters: where each starts, how many of its tokens belong to the
    one before, and itself. Each begins within the one before, as some tokenizers put a space before a text; and ends
    where a token does, as some join line ends."""
    start = skipped = 0
    while len(text) > start + SLICE:
        first = start + SLICE - OVERLAP
        within = tokenizer.encode(text[first : first + 2 * OVERLAP], add_special_tokens=False).ids
        for end in count(start + SLICE):
            tokens = tokenizer.encode(text[first:end], add_special_tokens=False).ids
            if tokens == within[: len(tokens)]:
                break
        yield start, skipped, text[start:end]
        start, skipped = first, len(tokens)
    yield start, skipped, text[start:]


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


@dataclass(frozen=True)
class Labelling:
    """Makes model inputs from rows of a text, or a pair of texts, and a label."""

    label: str
    """Column of labels."""
    labels: list[str]
    """All labels that the model knows, as the data write them."""
    tokenizer: PreTrainedTokenizerFast
    sequence_length: int
    num_known: int
    """Number of tokens that the model knows."""

    def __call__(self, rows: Rows) -> Rows:
        """Return the model's inputs, with `label`, an id, `length` in tokens, and whether the text was `truncated`."""
        texts = [values for name, values in rows.items() if name != self.label]
        encoded = self.tokenizer(*texts, truncation=True, max_length=self.sequence_length)
        require_known(np.concatenate(encoded["input_ids"]), self.tokenizer, self.num_known)
        self.tokenizer.backend_tokenizer.no_truncation()  # remembered, it would change the fingerprint
        return {
            **encoded,
            "label": [self.labels.index(label) for label in rows[self.label]],
            "length": [len(ids) for ids in encoded["input_ids"]],
            "truncated": [bool(encoding.overflowing) for encoding in encoded.encodings or []],
        }


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
