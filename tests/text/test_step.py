"""Between two records the host waits for nothing that the device computes. `main`, in a process of its own, counts
operators that wait, with varlen attention, as on a GPU: under a mask, transformers asks whether documents share a row.
"""

import json
import sys
from collections import Counter
from typing import Any

import torch
from accelerate.utils import set_seed
from torch.utils._python_dispatch import TorchDispatchMode

import train
from src.distributed.stop import StopSignal
from src.tasks.text import attention
from tests.launching import Launch
from tests.text.tiny import NEW_LLAMA
from train import run_settings

WAITING = ("_local_scalar_dense", "is_nonzero", "nonzero", "masked_select", "_unique2", "unique_dim", "equal")
"""Operators whose result, or its shape, the host has to know: torch.cuda.set_sync_debug_mode lists them."""


class Waits(TorchDispatchMode):
    """Counts operators that wait."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        is_mask = name in ("index", "index_put_") and any(getattr(i, "dtype", None) == torch.bool for i in args[1])
        if name in WAITING or is_mask:
            self.counts[name] += 1
        return func(*args, **(kwargs or {}))


def test_a_step_of_four_micro_batches_waits_only_for_whether_it_is_finite(launch: Launch, made: Any) -> None:
    """On a GPU not even for that, as AdamW skips a step by itself: tests/plan/gpu/test_null.py."""
    arguments = ("--task.name=causal_lm", f"--task.dataset={made}/questions.jsonl", "--task.sequence_length=32",
                 *NEW_LLAMA, "--optim.max_grad_norm=1", "--global_batch_size=8", "--micro_batch_size=2")  # fmt: skip
    run = launch("cpu", *arguments, script="tests/text/test_step.py").succeeded()
    assert json.loads(run.stdout.splitlines()[-1]) == [{"_local_scalar_dense": 1}] * 2


def main() -> None:
    set_seed(0)
    run = train.build(run_settings(sys.argv[1:]))
    assert run
    attention.varlen_attn = lambda query, *_, **__: query  # the kernel is a GPU's
    model: Any = run.model
    model.hf.set_attn_implementation("varlen")
    model._takes_lengths = True
    steps = train.CountedSteps(train.training_steps(run, 0), StopSignal(run.accelerator, run.config))
    found = []
    for _ in range(3):
        micro_batches, counts = next(steps)
        assert len(micro_batches) == 4
        with Waits() as waits:
            train.train_step(run, micro_batches, counts)
        found.append(waits.counts)
    print(json.dumps(found[1:]))


if __name__ == "__main__":
    main()
