"""Mixtures: their settings, and what is told apart by source, tokens of batches and losses of evaluations."""

from collections.abc import Callable

import numpy as np
import torch
from datasets import Dataset, concatenate_datasets
from pydantic import NonNegativeFloat, PositiveInt
from torch import Tensor

from src.config.settings import Settings
from src.tasks.base import Metrics, Tensors
from src.tasks.text.packing import Batch, Chunk
from src.tasks.text.source import TextSource


class MixtureSource(Settings):
    """One of the datasets that are mixed."""

    dataset: str = ""
    dataset_config: str | None = None
    weight: NonNegativeFloat = 1.0
    max_epochs: PositiveInt = 1


class BySource(TextSource):
    """Settings of a mixture, and what is counted for each source."""

    streaming: bool = False
    """Read files while training, in place of loading them before: task.dataset is a file, a folder,
    a dataset on the Hub or a URL such as s3://bucket/folder. Evaluation data are loaded."""
    sources: list[MixtureSource] = []
    """Datasets to mix, in place of task.dataset: [{dataset: A, weight: 3}, {dataset: B, weight: 1, max_epochs: 2}].
    Weights share out the rows. An epoch has each row max_epochs times, 1 by default: a source that is used up leaves
    its share to the others."""
    _source_names: list[str] = []
    """Those of a mixture: the last part of each dataset's path, and a number where that is not the only one."""

    @property
    def is_streamed(self) -> bool:
        """Return whether rows are tokenized while training."""
        return (self.streaming or bool(self.sources)) and self.eval_from != "all"

    def counts_by_source(self, chunks: list[Chunk], labels: str) -> Batch:
        """Return what a batch of these chunks, each with `labels`, has more than others: how many tokens are from each
        source of a mixture and how many rows cannot be used, and the source of each target."""
        if not self.is_streamed:
            return {}
        counts = {"train/skipped_rows": sum(not chunk["length"] for chunk in chunks)}
        if not self._source_names:
            return {"counts": counts}
        for number, name in enumerate(self._source_names):
            own = (len(chunk["input_ids"]) for chunk in chunks if chunk["source"] == number)
            counts[f"train/tokens_{name}"] = sum(own)
        targets = [np.sum(chunk[labels] != -100) for chunk in chunks]
        sources = np.repeat([chunk["source"] for chunk in chunks], targets)
        return {"counts": counts, "sources": torch.from_numpy(sources)}

    def sums_by_source(self, batch: Batch, losses: Tensor, rows: Tensor, num_rows: int) -> Tensors:
        """Return for each source of a mixture the loss and the number of targets in each example; shape (examples, 2).

        Args:
            batch: what `collate` returned.
            losses: the loss of each target; shape (targets,).
            rows: the example that each target is in; shape (targets,).
            num_rows: the number of examples.
        """
        values, sums = torch.stack([losses, torch.ones_like(losses)], 1), {}
        for number, name in enumerate(self._source_names):
            own = (batch["sources"] == number).unsqueeze(1) * values
            sums[f"loss_{name}"] = values.new_zeros(num_rows, 2).index_add(0, rows, own)
        return sums

    def losses_by_source(self, outputs: Tensors) -> Metrics:
        """Return the mean loss over the targets of each source, from what `sums_by_source` returned."""
        names = [f"loss_{name}" for name in self._source_names]
        sums = {name: outputs[name].double().sum(0).tolist() for name in names}
        return {name: loss / max(targets, 1) for name, (loss, targets) in sums.items()}


def by_source(parts: list[Dataset], make_chunks: Callable[[Dataset], Dataset]) -> Dataset:
    """Return the chunks that are made of the rows of each source, with a column `source`."""
    made = enumerate(map(make_chunks, parts))
    return concatenate_datasets([chunks.add_column("source", np.full(len(chunks), source)) for source, chunks in made])
