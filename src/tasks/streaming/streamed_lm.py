"""Next-token prediction on text that is read while training, from one dataset or several: `--task.name=streamed_lm`."""

from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset, concatenate_datasets
from datasets.fingerprint import Hasher
from torch import Tensor

from src.config.errors import UserError, raise_if_any
from src.tasks.base import Counts, Indices, Tensors
from src.tasks.streaming.blocks import BLOCK_CODE, Blocks
from src.tasks.streaming.order import Order
from src.tasks.streaming.settings import StreamedLMSettings
from src.tasks.streaming.stream import Stream, count_sequences, masses_of
from src.tasks.text.causal_lm import CausalLM, by_sequence
from src.tasks.text.files import splits_of
from src.tasks.text.listing import KINDS
from src.tasks.text.packing import Batch, Chunk, Sequences
from src.tasks.text.reading import (
    Encoders,
    Opened,
    RowRange,
    Source,
    TableReader,
    cache_folder,
    require_columns,
    with_versions,
)

HELD_OUT = 1000
"""Maximum number of rows held out from the end of streamed data for evaluation, if it has no split for that."""


def identity(value: Any) -> Any:
    """Return an already encoded value as it is."""
    return value


class StreamedLM(StreamedLMSettings, CausalLM):
    """Predicts the next token of text that is read while training, or of several datasets at once."""

    def build_datasets(self) -> tuple[Stream, Sequences]:
        opened = [self.open_rows(part.dataset, part.dataset_config) for part in self.parts]
        first, *others = (dataset.train.column_names for dataset in opened)
        shared = set(first).intersection(*others)
        columns = self.choose_columns(opened[0].train, [name for name in first if name in shared])
        if self.streaming:
            pairs = [self._hold_out(dataset, columns) for dataset in opened]
        else:
            pairs = [self._load(dataset, columns) for dataset in opened]
            columns = dict.fromkeys(self._columns.values(), identity)  # loaded rows are encoded already
        sources, evaluations = zip(*pairs, strict=True)
        train = self._stream([*sources], columns)
        tables = [self.chunker.make_chunks(rows, "evaluation data") for rows in evaluations]
        return train, self.packed(with_sources(tables), sum(map(len, evaluations)), "evaluation data")

    def find_on_hub(self, dataset: str, config: str | None) -> dict[str, Any]:
        if not self.streaming:
            return super().find_on_hub(dataset, config)
        files = splits_of(dataset, config)
        others = [name for names in files.values() for name in names if not name.lower().endswith(KINDS[1:])]
        raise_if_any(f"{name}: cannot be streamed; only {', '.join(KINDS[1:])} files can" for name in others)
        return with_versions(files)

    def _load(self, opened: Opened, columns: Encoders) -> tuple[Source, Dataset]:
        """Return the usable rows of a dataset: a source to train on, and a table to evaluate on."""
        rows, evaluation = self.usable_parts(opened, columns)
        return TableReader(rows, opened.dataset), evaluation

    def _hold_out(self, opened: Opened, columns: Encoders) -> tuple[Source, Dataset]:
        """Return the rows of a dataset: a source to train on, and a table of the usable ones to evaluate on. Without a
        split for these, they are taken off the end of the source."""
        name, train, ranges = opened.dataset, opened.train, None
        require_columns(columns, train, name)
        if not opened.evaluation and self.eval_from != "all":
            ranges = hold_out(train.sizes, self.num_held_out(int(train.sizes.sum()), name))
        return train, self.usable_rows(name, opened.evaluation or train, columns, "eval", ranges)

    def _stream(self, sources: list[Source], columns: Encoders) -> Stream:
        """Return the training set: sequences of chunks of the sources' rows, which `columns` encode."""
        if not self.packing and "text" in self._columns:
            raise UserError("task.packing=false: streamed text yields an unknown number of sequences: set packing=true")
        chunker, skips, parts = self.chunker, self.bad_rows == "skip", self.parts
        key = Hasher.hash([columns, chunker, skips, BLOCK_CODE])
        blocks = Blocks(columns, chunker, skips, key, cache_folder() / "blocks", int(self.cache_gb * 1e9))
        capacity = self.sequence_length if self.packing else None
        groups = [source.sizes for source in sources]
        # if each row is a sequence, windows are measured in rows
        masses = [masses_of(source) for source in sources] if capacity else groups
        weights, passes = [part.weight for part in parts], [part.max_epochs for part in parts]
        order = Order(groups, masses, weights, passes, self.shuffle_window)
        return Stream(order, sources, blocks, capacity, *count_sequences(order, sources, blocks, capacity))

    def augmented(self, train: Stream, seed: list[int]) -> Stream:
        run_seed, epoch, *_ = seed
        return replace(train, seed=run_seed, epoch=epoch)

    def order(self, train: Stream, random: np.random.Generator, global_batch_size: int) -> Indices:
        return range(len(train))  # each window is shuffled already

    @property
    def source_names(self) -> list[str]:
        """Return the names of a mixture's sources: the last part of each dataset's path, with a number unless it is
        unique. Empty if there is no mixture."""
        stems = [Path(source.dataset).stem for source in self.sources]
        return [stem if stems.count(stem) == 1 else f"{stem}_{number}" for number, stem in enumerate(stems, start=1)]

    def collate(self, samples: list[list[Chunk]]) -> Batch:
        """Return a batch of what the chunks of each sample hold. It also counts the rows that were skipped, and the
        tokens from each source of a mixture, and has the source of each target: `sources`, shape (targets,), int64."""
        batch = super().collate([[chunk for chunk in sample if chunk["length"]] for sample in samples])
        chunks = [*chain.from_iterable(samples)]
        counts = {"train/skipped_rows": sum(not chunk["length"] for chunk in chunks)}
        for number, name in enumerate(self.source_names):
            own = (len(chunk["input_ids"]) for chunk in chunks if chunk["source"] == number)
            counts[f"train/tokens_{name}"] = sum(own)
        if self.sources:
            targets = [np.count_nonzero(np.asarray(chunk["labels"]) != -100) for chunk in chunks]
            sources = torch.from_numpy(np.repeat([chunk["source"] for chunk in chunks], targets))
            batch["sources"] = sources[batch.pop("own_targets", ...)]
        is_first = self.state.cp.rank == 0  # processes that share sequences count them once
        return batch | {"counts": {name: number * is_first for name, number in counts.items()}}

    def shown(self, chunks: list[Chunk]) -> str:
        return super().shown([chunk for chunk in chunks if chunk["length"]])

    def count(self, batch: Batch) -> Counts:
        return super().count(batch) | batch["counts"]

    def scores(self, batch: Batch, nats: Tensor, correct: Tensor) -> Tensors:
        scores = super().scores(batch, nats, correct)
        values = torch.stack([nats, torch.ones_like(nats)], 1)
        for number, name in enumerate(self.source_names):
            own = (batch["sources"] == number).unsqueeze(1) * values
            scores[f"loss_{name}"] = by_sequence(batch, own)
        return scores

    def metrics(self, outputs: Tensors) -> dict[str, float]:
        metrics = super().metrics(outputs)
        for name in self.source_names:
            loss, targets = outputs[f"loss_{name}"].double().sum(0).tolist()
            metrics[f"loss_{name}"] = loss / max(targets, 1)
        return metrics


def hold_out(sizes: np.ndarray, wanted: int) -> list[RowRange]:
    """Take up to `wanted` rows off the end of the last group of these sizes, in place. Return their range: the group,
    its first row, and the row after its last."""
    size = min(HELD_OUT, wanted, int(sizes[-1]))
    sizes[-1] -= size
    first = int(sizes[-1])
    return [(len(sizes) - 1, first, first + size)]


def with_sources(tables: list[Dataset]) -> Dataset:
    """Return the rows of the tables, one for each source, with its number in a column `source`."""
    numbered = [table.add_column("source", np.full(len(table), source)) for source, table in enumerate(tables)]
    return concatenate_datasets(numbered)
