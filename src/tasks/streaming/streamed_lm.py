"""Next-token prediction on text that is read while training, from one dataset or several: `--task.name=streamed_lm`."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain
from os.path import basename
from pathlib import Path

import numpy as np
import torch
from datasets import Dataset, concatenate_datasets
from datasets.fingerprint import Hasher
from torch import Tensor

from src.config.errors import UserError, raise_if_any
from src.tasks.base import Counts, Indices, Tensors
from src.tasks.streaming.cache import TokenCache
from src.tasks.streaming.forecast import forecast
from src.tasks.streaming.index import EXTENSIONS, Block, Source, read_block
from src.tasks.streaming.order import Cut
from src.tasks.streaming.settings import StreamedLMSettings
from src.tasks.streaming.stream import Stream
from src.tasks.text.causal_lm import CausalLM, by_sequence
from src.tasks.text.files import find_files
from src.tasks.text.packing import Chunk, Sequences
from src.tasks.text.rows import BLOCK, Batch, Encoders, Record, Split, open_files, write_parquet
from src.tasks.text.text_task import Opened, require_columns

HELD_OUT = 1000
"""Maximum number of rows held out from the end of streamed data for evaluation, if it has no split for that."""
MIN_BLOCKS = 16
"""Blocks in a window, at least."""
SPAN, SPAN_ROWS = 32, 65_536
"""Windows whose leftovers the last of them takes: so many, or more if they are small. A run that is resumed on another
machine may read them again."""
CONVERSION = (
    'write its rows as .jsonl, python -c "import json, sys; from src.tasks.text.rows import read_file; '
    "[print(json.dumps(row)) if not reason else sys.exit(f'row {{number}} {{reason}}') "
    "for number, row, reason, _ in read_file('{0}')]\" > {1}.jsonl, or load it, --task.streaming=false"
)


class StreamedLM(StreamedLMSettings, CausalLM):
    """Predicts the next token of text that is read while training, or of several datasets at once."""

    def build_datasets(self) -> tuple[Stream, Sequences]:
        opened = [self.open_dataset(part.dataset, part.dataset_config) for part in self.parts]
        first, *others = (train.column_names for train, _ in opened)
        shared = [name for name in first if all(name in names for names in others)]
        encoders = self.choose_columns(opened[0].train, shared)
        if not self.packing and "text" in self._columns:
            raise UserError("task.packing=false: streamed text yields an unknown number of sequences: set packing=true")
        prepare = self._index if self.streaming else self._load
        sources, evaluations = zip(*(prepare(of_part, encoders) for of_part in opened), strict=True)
        if not self.streaming:
            encoders = dict.fromkeys(self._columns.values(), str)  # loaded rows are text already
        train = self.stream(sources, TokenCache(encoders, self.chunker, self.bad_rows == "skip", self.cache_gb))
        tables = (self.chunker.make_chunks(rows, "evaluation data") for rows in evaluations)
        numbered = [table.add_column("source", np.full(len(table), source)) for source, table in enumerate(tables)]
        return train, self.packed(concatenate_datasets(numbered), sum(map(len, evaluations)), "evaluation data")

    def open_split(self, files: dict[str, str], dataset: str, config: str | None, split: str) -> Split:
        if not self.streaming or split != self.train_split:
            return super().open_split(files, dataset, config, split)
        raise_if_any(
            f"{file}: cannot be streamed: {CONVERSION.format(file, Path(file).stem)}"
            for file in files
            if not file.lower().endswith(EXTENSIONS)
        )
        return open_files(files, [], dataset)

    def _load(self, opened: Opened, encoders: Encoders) -> tuple[Source, Dataset]:
        """Return the usable rows of a dataset: a source to train on, and a table to evaluate on."""
        rows, evaluation = self.usable_parts(opened, encoders)
        source = Source(find_files(write_parquet(rows, "rows")), self.block_rows, {})
        files = opened.train.files  # the table's own fingerprint would change with their folder
        source.fingerprint = Hasher.hash([[*map(basename, files)], [*files.values()]])
        return source, evaluation

    def _index(self, opened: Opened, encoders: Encoders) -> tuple[Source, Dataset]:
        """Return the rows of a dataset: a source to train on, and a table of the usable ones to evaluate on. Without a
        split for these, they are taken off the end of the source."""
        train, evaluation = opened
        require_columns(encoders, train)
        source = Source(train.files, self.block_rows, encoders)
        if not evaluation and self.eval_from != "all":
            wanted = self.num_held_out(int(source.rows.sum()), train.dataset)
            evaluation = of_blocks(train, source.hold_out(min(HELD_OUT, wanted)))
        return source, self.usable_rows(evaluation or train, encoders, "eval")

    @property
    def block_rows(self) -> int:
        """Return the maximum number of rows in a block."""
        return max(1, min(BLOCK, self.shuffle_window // MIN_BLOCKS))

    def stream(self, sources: Sequence[Source], cache: TokenCache) -> Stream:
        """Return the training set: sequences of chunks of the sources' rows."""
        for source, part in zip(sources, self.parts, strict=True):
            source.weight, source.passes = part.weight, part.max_epochs
        num_rows = sum(int(source.rows.sum()) * source.passes for source in sources)
        capacity, window = self.sequence_length, self.shuffle_window
        windows, span = max(1, num_rows // window), max(SPAN, SPAN_ROWS // window)
        if not self.packing:  # each row is a sequence
            return Stream(sources, cache, None, num_rows, Cut(windows, num_rows))
        count, filled = forecast(sources, cache, capacity, window)
        return Stream(sources, cache, capacity, num_rows, Cut(windows, count, span, filled))

    def augmented(self, train: Stream, seed: list[int]) -> Stream:
        run_seed, epoch, *_ = seed
        return replace(train, seed=run_seed, number=epoch)

    def order(self, train: Stream, random: np.random.Generator, global_batch_size: int) -> Indices:
        return range(len(train))  # each window is shuffled already

    def collate(self, samples: list[list[Chunk]]) -> Batch:
        """Return a batch of what the chunks of each sample hold. It also counts the rows that were skipped, and the
        tokens from each source of a mixture, and has the source of each target: `sources`, shape (targets,), int64."""
        batch = super().collate([[chunk for chunk in sample if chunk["length"]] for sample in samples])
        chunks = [*chain.from_iterable(samples)]
        counts = {"train/skipped_rows": sum(not chunk["length"] for chunk in chunks)}
        for i, name in enumerate(self.source_names):
            counts[f"train/tokens_{name}"] = sum(len(chunk["input_ids"]) for chunk in chunks if chunk["source"] == i)
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
            scores[f"loss_{name}"] = by_sequence(batch, (batch["sources"] == number).unsqueeze(1) * values)
        return scores

    def metrics(self, outputs: Tensors) -> dict[str, float]:
        metrics = super().metrics(outputs)
        for name in self.source_names:
            loss, targets = outputs[f"loss_{name}"].double().sum(0).tolist()
            metrics[f"loss_{name}"] = loss / max(targets, 1)
        return metrics


def of_blocks(split: Split, blocks: list[Block]) -> Split:
    """Return these blocks of a split."""

    def read(file: str, columns: Sequence[str]) -> Iterator[Record]:
        return chain.from_iterable(read_block(block, columns) for block in blocks if block["file"] == file)

    return replace(split, files={block["file"]: "" for block in blocks}, read=read, version=blocks)
