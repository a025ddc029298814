"""Figures for each source of a mixture: the tokens of batches, and the losses of evaluations."""

from pathlib import Path

import numpy as np
import torch
from datasets import Dataset, concatenate_datasets
from torch import Tensor

from src.tasks.base import Metrics, Tensors
from src.tasks.text.packing import Batch, Chunk
from src.tasks.text.reading import TextTask


def source_names(task: TextTask) -> list[str]:
    """Return the names of a mixture's sources: the last part of each dataset's path, with a number unless it is unique.
    Empty if there is no mixture."""
    stems = [Path(source.dataset).stem for source in task.sources]
    return [stem if stems.count(stem) == 1 else f"{stem}_{number}" for number, stem in enumerate(stems, start=1)]


def counts_by_source(task: TextTask, chunks: list[Chunk]) -> Batch:
    """Return what a batch of these chunks has in addition: how many tokens come from each source of a mixture, how many
    rows were skipped, and the source of each target."""
    if not task.is_streamed:
        return {}
    names = source_names(task)
    counts = {"train/skipped_rows": sum(not chunk["length"] for chunk in chunks)}
    if not names:
        return {"counts": counts}
    for number, name in enumerate(names):
        own = (len(chunk["input_ids"]) for chunk in chunks if chunk["source"] == number)
        counts[f"train/tokens_{name}"] = sum(own)
    targets = [np.sum(chunk["labels"] != -100) for chunk in chunks]
    sources = np.repeat([chunk["source"] for chunk in chunks], targets)
    return {"counts": counts, "sources": torch.from_numpy(sources)}


def sums_by_source(task: TextTask, batch: Batch, losses: Tensor, rows: Tensor, num_rows: int) -> Tensors:
    """Return, for each source of a mixture, the loss and the number of targets in each example; shape (examples, 2).

    Args:
        batch: what `collate` returned.
        losses: the loss of each target; shape (targets,).
        rows: the example that each target is in; shape (targets,).
        num_rows: the number of examples.
    """
    values, sums = torch.stack([losses, torch.ones_like(losses)], 1), {}
    for number, name in enumerate(source_names(task)):
        own = (batch["sources"] == number).unsqueeze(1) * values
        sums[f"loss_{name}"] = values.new_zeros(num_rows, 2).index_add(0, rows, own)
    return sums


def losses_by_source(task: TextTask, outputs: Tensors) -> Metrics:
    """Return the mean loss over the targets of each source, from what `sums_by_source` returned."""
    sums = {f"loss_{name}": outputs[f"loss_{name}"].double().sum(0).tolist() for name in source_names(task)}
    return {name: loss / max(targets, 1) for name, (loss, targets) in sums.items()}


def with_sources(tables: list[Dataset]) -> Dataset:
    """Return the rows of the tables, one for each source, with its number in a column `source`."""
    numbered = [table.add_column("source", np.full(len(table), source)) for source, table in enumerate(tables)]
    return concatenate_datasets(numbered)
