"""Two processes: train.py against plain DDP, under FSDP against other loops, and with sequences shared by both.

    python -m benchmarks.two_processes

Two processes of one thread each, on gloo, fp32, in turn.

DDP: the MNIST CNN in global batches of 64 random images, turns of 40 steps, under ddp.yaml. Plain DDP is the shortest
loop that does the same, tuned as well as we know: gradients are views of DDP's buckets, the graph is static, freed
memory stays with the process, and the model has train.py's faster layers. It exchanges nothing but gradients until it
tells the mean loss. Asserted: the same mean loss of the first turn, within 1e-5.

FSDP: the Llama of benchmarks/language.py, 8 sequences of 256 tokens per step, turns of 4 steps, under fsdp.yaml. The
peers are language_peers.py's, started under the same yaml and let shard on a CPU as train.py does. Asserted:
parameters, steps, tokens, and the mean loss of each turn within 1%.

Sequences shared by both processes (fsdp_cp.yaml) against one each (fsdp.yaml): the same Llama, 2 sequences of 2,048
tokens per step, turns of 2 steps. Each computes as many tokens at once; what is more are two all-to-alls per block,
forward and backward, through the memory of this machine. Asserted: the same curve.
"""

import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks import pairs
from benchmarks.language import BATCH as SEQUENCES
from benchmarks.language import INTERVAL as TURN
from benchmarks.language import LENGTH, PEERS, SHAPE, Plan, assert_same, write_text
from benchmarks.pairs import Comparison, drift
from benchmarks.runs import CNN, Side, arguments, launch, ms_per_step, own, rate, take_turns, train_py, write_images
from src.check.reference import own_indices
from src.training.batches import fetch_batch
from src.training.optim import build_optimizers, lr_at, set_lr
from src.training.run import new_model
from train import run_settings

INTERVAL, ROUNDS, BATCH = 40, 10, 64
STEPS = INTERVAL * (1 + ROUNDS)
LONG, SHARED_TURN, SHARED_ROUNDS = 2048, 2, 7


def by_hand(words: list[str]) -> None:
    """Train with plain DDP, as one process of several; print the mean loss of each interval."""
    torch.set_flush_denormal(True)
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    config = run_settings(words)
    examples: Any = config.task.build_datasets()[0]
    model = DistributedDataParallel(new_model(config)[0], gradient_as_bucket_view=True, static_graph=True)
    parameters = list(model.parameters())
    (optimizer,) = build_optimizers(config.optim, model)
    schedule = config.schedule_steps(len(examples)), config.steps_per_epoch(len(examples))
    loss_sum = torch.zeros(())
    global_batch_size = config.global_batch_size
    model.train()
    for step, indices in zip(range(STEPS), own_indices(config, examples, 0, rank, world_size), strict=False):
        loss = config.task.loss(model, fetch_batch(config.task, examples, list(indices)))
        (loss * (world_size / global_batch_size)).backward()
        loss_sum += loss.detach()
        norm = nn.utils.clip_grad_norm_(parameters, math.inf)
        set_lr([optimizer], lr_at(step, config.optim, *schedule))
        if math.isfinite(norm):
            optimizer.step()
        optimizer.zero_grad()
        if (step + 1) % INTERVAL == 0:
            dist.all_reduce(loss_sum)
            if rank == 0:
                print(f"loss {loss_sum.item() / global_batch_size / INTERVAL}", flush=True)
            loss_sum.zero_()
    dist.barrier()
    dist.destroy_process_group()


def compare_ddp(folder: Path) -> Comparison:
    settings = CNN | {"task.dropout": 0, "task.label_smoothing": 0, "task.data_dir": folder / "data"}
    settings |= {"global_batch_size": BATCH, "max_steps": STEPS, "log_every": INTERVAL}
    write_images(folder / "data", STEPS * BATCH)
    ours = Side(train_py(settings, "ddp", 2, "fp32"), folder / "ours")
    by_torch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command = [*by_torch, *own("two_processes", "by_hand", *arguments(settings))[1:]]
    theirs = Side(command, folder / "theirs", ends=r"^loss (.*)$", file="log")
    turns = take_turns(ROUNDS, [ours, theirs])
    off = drift(ours.values[:1], theirs.values[:1])
    assert off < 1e-5, f"other losses: {ours.values}, {theirs.values}"
    times = [ms_per_step(INTERVAL, seconds) for seconds in turns]
    return Comparison("DDP x2: MNIST CNN, plain tuned DDP", "ms/step", times[0], times[1], 1, is_gain=True)


def compare_fsdp(folder: Path) -> Iterator[Comparison]:
    plan = Plan(SHAPE, LENGTH, SEQUENCES, SEQUENCES // 2, TURN, precision="fp32")
    write_text(folder, (1 + ROUNDS) * TURN * SEQUENCES, LENGTH)
    under = launch("fsdp", 2, "fp32")
    commands = {"ours": train_py(plan.settings(folder / "data"), "fsdp", 2, "fp32")}
    commands |= {name: [*under, *plan.peer(name, folder)[1:]] for name in PEERS}
    sides = [Side(command, folder / name) for name, command in commands.items()]
    first, *others = (rate(TURN * SEQUENCES * LENGTH, seconds) for seconds in take_turns(ROUNDS, sides))
    for side in sides:
        assert_same(side, sides[0], within=0.01)
    for name, speeds in zip(("Trainer", "Accelerate's loop"), others, strict=True):
        yield Comparison(f"FSDP x2: small Llama, {name}", "tokens/s", first, speeds, 1, is_gain=True)


def compare_shared(folder: Path) -> Comparison:
    """Compare a whole sequence for each process with a half of both."""
    write_text(folder, (1 + SHARED_ROUNDS) * SHARED_TURN * 2, LONG)
    settings = Plan(SHAPE, LONG, batch=2, interval=SHARED_TURN).settings(folder / "data")
    yamls = {"fsdp_cp": 2, "fsdp": 1}
    sides = [Side(train_py(settings | {"micro_batch_size": n}, yaml, 2), folder / yaml) for yaml, n in yamls.items()]
    times = take_turns(SHARED_ROUNDS, sides)
    assert_same(sides[0], sides[1], within=1e-5)
    return Comparison("sequences shared by two processes, FSDP x2", "s", times[0], times[1], 1.2, is_gain=False)


def measure(_: Path, folder: Path) -> list[Comparison]:
    return [compare_ddp(folder / "ddp"), *compare_fsdp(folder / "fsdp"), compare_shared(folder / "shared")]


if __name__ == "__main__":
    pairs.main(measure, __doc__, {"by_hand": by_hand})
