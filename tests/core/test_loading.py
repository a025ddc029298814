"""Each example is read once, in the same order, on any number of processes."""

from collections import UserDict
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from src.tasks.base import Counts
from src.training.batches import CountedSteps, MicroBatch, ShardedBatchSampler, training_steps
from src.training.cuda_graph import tensors_in
from src.training.evaluation import gather_in_order

EXAMPLES = 103


def shards(world_size: int) -> list[ShardedBatchSampler]:
    order = np.random.default_rng(0).permutation(EXAMPLES)
    return [ShardedBatchSampler(order, 24, 2, rank, world_size) for rank in range(world_size)]


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 6])
def test_a_global_batch_is_the_same_on_any_number_of_processes(world_size: int) -> None:
    """Each example comes once, and all processes run equally many micro-batches."""
    (alone,) = shards(1)
    steps = zip(*(shard.steps() for shard in shards(world_size)), strict=True)
    seen = []
    for expected, batches in zip(alone.steps(), steps, strict=True):
        split = np.concatenate([micro_batch for batch in batches for micro_batch in batch])
        assert sorted(split) == sorted(np.concatenate(expected))
        assert len({len(batch) for batch in batches}) == 1
        seen += split.tolist()
    assert sorted(seen) == list(range(EXAMPLES))


def test_a_process_without_examples_gets_a_dummy() -> None:
    ranks = [ShardedBatchSampler(np.array([7, 8, 9]), 8, 2, rank, 4) for rank in range(4)]
    shares = [share for rank in ranks for (share,) in rank.steps()]
    assert [len(share) for share in shares] == [1, 1, 1, 0]
    fetched = [rank.to_fetch(share) for rank, share in zip(ranks, shares, strict=True)]
    assert fetched == [[7], [8], [9], [9]]


@pytest.mark.parametrize("cp_size", [1, 3])
@pytest.mark.parametrize(("examples", "data_size"), [(7, 1), (7, 2), (8, 4), (2, 4)])
def test_outputs_come_back_in_the_order_of_the_dataset(examples: int, data_size: int, cp_size: int) -> None:
    """Processes that share examples have their outputs summed."""
    dataset = torch.arange(examples * 3).view(examples, 3)
    sent = torch.zeros(data_size, cp_size, -(-examples // data_size), 3, dtype=torch.long)
    for rank in range(data_size):
        share = dataset[rank::data_size]
        sent[rank, :, : len(share)] = share
    accelerator = SimpleNamespace(gather=lambda _: sent.flatten(0, 2))
    run: Any = SimpleNamespace(accelerator=accelerator, data_size=data_size, cp_size=cp_size)
    assert torch.equal(gather_in_order(run, dataset[::data_size], examples), cp_size * dataset)


class Noise:
    """Draws each example when it is read, as torchvision's transforms do."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, _: int) -> torch.Tensor:
        return torch.rand(())


def test_data_workers_draw_their_own_random_numbers_in_each_epoch() -> None:
    task = SimpleNamespace(collate=torch.stack, count=lambda _: {"targets": 0})
    task.order, task.augmented = lambda *_: np.arange(8), lambda train, _: train
    config = SimpleNamespace(seed=0, global_batch_size=8, num_workers=1, task=task, forward_batch_size=lambda _: 4)
    run: Any = SimpleNamespace(config=config, train_set=Noise(), steps_per_epoch=1, total_steps=2, data_size=2)
    run.device, drawn = torch.device("cpu"), []
    for run.data_rank in (0, 1):
        drawn += [batch.data for step in training_steps(run, 0) for batch in step]
    assert len(torch.cat(drawn).unique()) == 16


def test_counts_are_summed_while_the_step_before_is_computed() -> None:
    did = []

    def begin_sum(values: Counts) -> Callable[[], tuple[Counts, bool]]:
        did.append("begun")
        is_requested = stop.reason is not None

        def wait() -> tuple[Counts, bool]:
            did.append("waited")
            return {name: 2 * value for name, value in values.items()}, is_requested

        return wait

    stop: Any = SimpleNamespace(begin_sum=begin_sum, reason=None)
    counts = {"targets": 8.0, "tokens": 20.0}
    batches = [[MicroBatch(None, 4, counts)] * 2, [MicroBatch(None, 0, counts)], [MicroBatch(None, 4, counts)]]
    steps = CountedSteps(iter(batches), stop)
    assert next(steps) == (batches[0], {"targets": 32, "tokens": 80})
    assert did == ["begun", "waited", "begun"]
    stop.reason = "SIGTERM"  # while the first step is computed, when the second one's counts are being summed
    assert not steps.is_stop_requested()
    assert next(steps) == (batches[1], {"targets": 0, "tokens": 0})
    assert steps.is_stop_requested()


def test_a_captured_step_finds_the_tensors_of_any_mapping() -> None:
    """A tokenizer's BatchEncoding is a UserDict, which pytree does not know."""
    inputs, labels = torch.zeros(2, 3), torch.ones(2)
    found = tensors_in({"inputs": UserDict(ids=inputs), "labels": [labels]})
    assert [tensor.shape for tensor in found] == [inputs.shape, labels.shape]
