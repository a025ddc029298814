"""Next-token prediction with any transformers decoder, from scratch or fine-tuned: `--task.name=causal_lm`."""

import math
from heapq import nlargest
from itertools import groupby
from operator import itemgetter, mul
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from datasets import Dataset
from torch import Tensor

from src.config.errors import UserError
from src.tasks.base import Counts, Tables, Tensors
from src.tasks.text.adapters import add_embeddings
from src.tasks.text.chat_rows import ChatRows
from src.tasks.text.context_parallel import LongSequences
from src.tasks.text.load import load_exported
from src.tasks.text.loss import LanguageModel
from src.tasks.text.packing import Chunk, Sequences, pack
from src.tasks.text.rows import Batch, Rows
from src.tasks.text.samples import Samples
from src.tasks.text.sequences import PackedSequences
from src.tasks.text.tokenizing import Chunker
from src.tasks.text.trial import require_decoder

MAX_SAMPLES, MAX_SAMPLE = 8, 1000
"""Sequences in the table of an evaluation, and characters of each."""


class CausalLM(
    ChatRows,
    LongSequences,
    Samples,
    PackedSequences,
):
    """Predicts the next token of raw text, of prompts with completions, or of chats."""

    next_step: ClassVar[tuple[str, str]] = "talk", "src.tools.generate"
    hf_name: ClassVar[str] = "lm"

    def load_model(self) -> Any:
        model = super().load_model()
        if self.new_tokens:
            self._trained_rows = add_embeddings(model, self._tokenizer, self.new_tokens)
        return model

    def build_empty_model(self) -> Any:
        if self.new_tokens:
            return None  # their rows start as the mean of all others, which no process would have
        return super().build_empty_model()

    def wrap(self, model: Any) -> LanguageModel:
        require_decoder(self._config, self.packing, self.sequence_length)
        attention = self.choose_attention()
        return LanguageModel(self.with_adapters(model), attention)

    def build_datasets(self) -> Any:
        opened = self.open_rows()
        columns = self.choose_columns(opened.train, opened.train.column_names)
        parts = zip(self.usable_parts(opened, columns), ("training data", "evaluation data"), strict=True)
        return tuple(self.packed(self.chunker.make_chunks(rows, of), len(rows), of) for rows, of in parts)

    @property
    def chunker(self) -> Chunker:
        known = self._config.get_text_config().vocab_size
        if self.new_tokens:  # the model is resized for them
            known = max(known, len(self._tokenizer))
        return Chunker(self._columns, self._tokenizer, self.sequence_length, self.train_on_prompts, known)

    def split(self, rows: Dataset, dataset: str) -> tuple[Dataset, Dataset]:
        if "text" not in self._columns or len(rows) > 1 or self.eval_from == "all":
            return super().split(rows, dataset)
        parts = rows.map(cut_text, batched=True, fn_kwargs={"fraction": 1 - self.eval_fraction})
        return parts.select([0]), parts.select([1])

    def packed(self, chunks: Dataset, num_rows: int, part: str) -> Sequences:
        """Return the sequences that these chunks, of so many rows, make. Raise a UserError if they have no targets."""
        length = self.sequence_length
        if not any(chunks["targets"][:]):
            says = f"no row has a completion, or an assistant's turn, within sequence_length={length}"
            raise UserError(f"task.dataset={self.dataset}: the {part} has nothing to predict: {says}")
        return pack(chunks, length if self.packing else None, num_rows)

    def fingerprint(self, dataset: Sequences) -> str:
        return dataset.fingerprint()

    def dataset_size(self, dataset: Sequences) -> str:
        rows, sequences, (kind, *_) = dataset.num_rows, len(dataset), self._columns
        length = f"sequence{'s' * (sequences > 1)} of {self.sequence_length:,}"
        return f"{rows:,} {kind}{'s' * (rows > 1)} in {sequences:,} {length}"

    def describe(self, part: Literal["train", "eval"], dataset: Sequences) -> dict[str, float]:
        return dataset.describe(self.sequence_length) | {"skipped_rows": self._skipped_rows[part]}

    def documents(self, sample: list[Chunk]) -> list[list[Chunk]]:
        return [[chunk] for chunk in sample]

    def preview(self, dataset: Sequences, index: int) -> str:
        return self.shown(*dataset.__getitems__([index]))

    def shown(self, chunks: list[Chunk]) -> str:
        """Return the chunks of a sequence as lines of text, with what contributes to the loss in ⟦ ⟧."""
        labels = np.concatenate([[], *(chunk["labels"] for chunk in chunks)])
        targets = np.count_nonzero(labels != -100)
        share = f"{targets:,} of them ({targets / max(len(labels), 1):.1%})"
        text = f"{len(labels):,} tokens, {share} contribute to the loss"
        for number, chunk in enumerate(chunks, start=1):
            text += f"\n──── document {number} of {len(chunks)} ────\n"
            # each label is the next token: the last one is not an input, and shown only if it contributes
            pairs = zip([*chunk["input_ids"], chunk["labels"][-1]], [-100, *chunk["labels"]], strict=True)
            for contributes, run in groupby(pairs, lambda pair: pair[1] != -100):
                words = str(self._tokenizer.decode([token for token, _ in run if token != -100]))
                text += f"⟦{words}⟧" if contributes else words
        return text

    def count(self, batch: Batch) -> Counts:
        inputs, tokens = batch["inputs"], batch["tokens"]
        return {"targets": len(inputs["targets"]), "tokens": tokens, "padded_tokens": inputs["input_ids"].numel()}

    def flops(self, model: LanguageModel, batch: Batch) -> float:
        counts = batch["tokens"], len(batch["inputs"]["targets"]), batch["pairs"]
        return sum(map(mul, model.flops or (), counts))

    def loss(self, model: Any, batch: Batch) -> Tensor:
        return model(**batch["inputs"])

    def evaluate(self, model: Any, batch: Batch) -> tuple[Tensor, Tensors]:
        nats, correct = model(**batch["inputs"], is_scoring=True)
        return nats.sum(), self.scores(batch, nats, correct)

    def scores(self, batch: Batch, nats: Tensor, correct: Tensor) -> Tensors:
        """Return sums over each sequence, by name, from what `LanguageModel` returns for each target: the loss, the
        number of targets, and how many of them were the likeliest token."""
        values = {"nats": nats, "targets": torch.ones_like(nats), "correct": correct}
        return {name: by_sequence(batch, of_targets) for name, of_targets in values.items()}

    def metrics(self, outputs: Tensors) -> dict[str, float]:
        nats, targets, correct = (outputs[name].double().sum().item() for name in ("nats", "targets", "correct"))
        return {"perplexity": math.exp(min(nats / targets, 700.0)), "accuracy": correct / targets}

    def tables(self, outputs: Tensors, dataset: Sequences) -> Tables:
        losses = (outputs["nats"] / outputs["targets"].clamp(min=1)).tolist()
        hardest = nlargest(MAX_SAMPLES, enumerate(losses), key=itemgetter(1))
        return {"hardest": [{"loss": loss, "text": self.preview(dataset, i)[:MAX_SAMPLE]} for i, loss in hardest]}

    def load_export(self, folder: Path) -> LanguageModel:
        return LanguageModel(load_exported(folder, self.base_dtype))


def by_sequence(batch: Batch, values: Tensor) -> Tensor:
    """Return the sums over each sequence of a batch, given the values of each target; shape (sequences, ...) and
    (targets, ...)."""
    tokens = batch["inputs"]["input_ids"]
    rows = batch["inputs"]["index"] // tokens.shape[1]
    return values.new_zeros(len(tokens), *values.shape[1:]).index_add(0, rows, values)


def cut_text(rows: Rows, fraction: float) -> Rows:
    """Return the text of the only row in two parts, the first of which has this fraction of it. Raise a UserError if
    the text is too short."""
    [(column, [text])] = rows.items()
    cut = round(len(text) * fraction)
    if not 0 < cut < len(text):
        raise UserError("task.dataset: the text is too short to hold out a part of it for evaluation")
    return {column: [text[:cut], text[cut:]]}
