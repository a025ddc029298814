"""Faults of sequences that several processes share (context parallelism), for tests/check/examine.py: instead of a yaml
each names the part of the test that plants it, "quick" or "slow"."""

from typing import Any

import torch
from torch import Tensor

from src.tasks.base import ContextParallel, Counts
from src.tasks.text.attention import document_attention
from src.tasks.text.rows import Batch
from tests.check.planted import Fault, Hook, rank


def as_it_is(cut: Hook, *arguments: Any) -> Batch:
    return cut(*arguments)


def with_all_targets(count: Hook, task: Any, batch: Batch) -> Counts:
    counts = count(task, batch)
    return {**counts, "targets": counts["targets"] * task.state.cp.size}


def with_positions_from_zero(cut: Hook, batch: Batch, cp: ContextParallel) -> Batch:
    part = cut(batch, cp)
    positions = part["inputs"]["position_ids"]
    positions -= positions[:, :1].clone()
    return part


def without_the_last_labels(cut: Hook, batch: Batch, cp: ContextParallel) -> Batch:
    part = cut(batch, cp)
    inputs = part["inputs"]
    length = inputs["input_ids"].shape[1]
    stays = inputs["index"] % length < length - 1
    return {**part, "inputs": inputs | {name: inputs[name][stays] for name in ("index", "targets")}}


def of_the_other_rank(cut: Hook, batch: Batch, cp: ContextParallel) -> Batch:
    return cut(batch, cp._replace(rank=cp.size - 1 - cp.rank))


def of_the_first_rank(cut: Hook, batch: Batch, cp: ContextParallel) -> Batch:
    return cut(batch, cp._replace(rank=0))


def of_parts_alone(
    _: Hook, cp: ContextParallel, module: Any, *tensors: Any, cu_seq_lens_q: Tensor, **options: Any
) -> Any:
    batch, _, length, _ = tensors[0].shape
    edges = torch.cat([cu_seq_lens_q, torch.arange(batch + 1) * length * cp.size])
    own = edges.unique().sub(cp.rank * length).int()  # of each row, as if the parts of the others were not there
    return document_attention(module, *tensors, cu_seq_lens_q=own.clamp(0, batch * length), **options)


def dealt_by_process(sampler: Hook, order: Any, global_size: int, micro_size: int, *_: int) -> Any:
    return sampler(order, global_size, micro_size, rank(), 2)


def counted_by_each(metrics: Hook, task: Any, loss: float, examples: int, outputs: Any) -> Any:
    return metrics(task, loss, 2 * examples, outputs)


def of_the_first_parts(gather: Hook, run: Any, outputs: Tensor, examples: int) -> Tensor:
    return gather(run, outputs * (run.rank % 2 == 0), examples)


LM, CUT = "src.tasks.text.causal_lm.", "src.tasks.text.context_parallel.shard_batch"
SAMPLER, ATTENTION = "src.training.batches.ShardedBatchSampler", "src.tasks.text.context_parallel.ulysses_attention"
FOUND = (
    ("quick", "each part counts all targets", "Steps", "gradients", LM + "CausalLM.count", with_all_targets),
    ("quick", "positions restart in each part", "Steps", "gradients", CUT, with_positions_from_zero),
    ("quick", "labels are shifted after the cut", "Steps", "gradients", CUT, without_the_last_labels),
    ("quick", "a part is another process's", "Steps", "gradients", CUT, of_the_other_rank),
    ("quick", "each part counts an example", "Evaluation", "eval/examples", "train.metrics_of", counted_by_each),
    ("slow", "all have the first part", "Steps", "gradients", CUT, of_the_first_rank),
    ("slow", "a part sees itself alone", "Steps", "gradients", ATTENTION, of_parts_alone),
    ("slow", "examples are dealt by process", "Data", "epoch 1", SAMPLER, dealt_by_process),
    (
        "slow",
        "outputs of others are lost",
        "Evaluation",
        "eval/perplexity",
        "train.gather_in_order",
        of_the_first_parts,
    ),
)
FAULTS = [
    # without a fault all is well, also where each process draws its part of the dropout
    Fault("none", "quick", "", "", CUT, as_it_is, ("--task.dropout=0.1",)),
    *(Fault(name, part, fails, "", where, hook, measured=what) for part, name, fails, what, where, hook in FOUND),
]
