"""Steps of this project's train.py next to a handwritten loop: the same losses, and the collectives behind them."""

import course  # prints that the processes start and, in a line, which assertion fails
import sys
import threading
import traceback
from itertools import groupby
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

sys.path.insert(0, ".")  # the project's root, where the command is run: train.py and src are there

from src.distributed.stop import StopSignal
from src.training.batches import CountedSteps, training_steps
from src.training.optim import build_optimizers, lr_at, set_lr
from src.training.progress import mean_loss
from src.training.run import new_model
from train import build, run_settings, train_step

STEPS, MAIN_THREAD = 3, threading.get_ident()


class Collectives(TorchDispatchMode):
    """Notes each collective, whoever calls it: its name, the calling line of train_step, the whole tensor's size."""

    def __init__(self) -> None:
        super().__init__()
        self.notes: list[tuple[str, str, int]] = []

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if op.namespace == "c10d":
            size = max(t.nbytes for t in tree_leaves(args) if isinstance(t, Tensor))
            stack = traceback.extract_stack(sys._current_frames()[MAIN_THREAD])  # on a GPU, backward runs in another
            line = [frame.line for frame in stack if frame.name in ("<module>", "train_step")][-1]
            self.notes.append((op.name().removeprefix("c10d::").replace("_base", "").strip("_"), str(line), size))
        return op(*args, **(kwargs or {}))


# 1. Connect the processes. 2. Each gets its part of the data. 3. The same model everywhere, wrapped or sharded.
settings = ["--task.source=digits", "--task.dropout=0", "--micro_batch_size=16", "--output_dir=runs/from_here"]
config = run_settings([*settings, "--dry_run=true"])  # writes nothing
run = build(config)
assert run is not None, "runs/from_here holds a finished run"
by_hand = new_model(run.config)[0].to(run.device)  # the same seed, so the same weights
optimizers = build_optimizers(config.optim, by_hand)
losses = []
stop = StopSignal(run.accelerator, config)
steps = CountedSteps(training_steps(run, 0), stop)
for step in range(STEPS):
    with Collectives() as collectives:
        # 4. Count, forward, backward, reduce. 5. Update.
        micro_batches, counts = next(steps)
        result = train_step(run, micro_batches, counts)
    losses.append(mean_loss(run.accelerator, result))
    sums = torch.zeros(2, dtype=torch.float64, device=run.device)  # the loss and the number of targets
    for batch in micro_batches:
        loss_sum = config.task.loss(by_hand, batch.data)
        loss_sum.backward()
        sums += torch.tensor([loss_sum.item(), batch.counts["targets"]], device=run.device)
    dist.all_reduce(sums)
    for parameter in by_hand.parameters():
        assert parameter.grad is not None
        dist.all_reduce(parameter.grad)
        parameter.grad /= sums[1]
    set_lr(optimizers, lr_at(step, config.optim, *run.schedule))
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
    expected = float(sums[0] / sums[1])
    assert abs(losses[-1] - expected) < 1e-5, f"step {step + 1}: {losses[-1]:.3f}, not {expected:.3f}"
if run.is_main:
    print(f"{run.launch.strategy} x {run.world_size}, losses as by hand:", *(f"{loss:.3f}" for loss in losses))
    print(f"step {STEPS} called")
    for (name, line), notes in groupby(collectives.notes, key=lambda note: note[:2]):
        print(f"{len(sizes := [note[2] for note in notes])} {name:15}{sum(sizes):10,} bytes  {line}")
run.accelerator.wait_for_everyone()
run.accelerator.end_training()
