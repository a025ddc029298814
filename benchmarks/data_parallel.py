"""Data parallelism: two processes of one thread against one, and against plain PyTorch's DDP at its best.

    python -m benchmarks.data_parallel

The CNN, AdamW, global batches of 64 random images, fp32, on gloo: the same batches on one process and on two. Five
sides: one process; plain DDP, `by_hand` below; DDP; DDP with ddp_comm_hook=bf16, which sends half the bytes; and the
limit, two runs at once that share nothing, of 32 images a step. They take turns of 40 steps.

Plain DDP is the shortest loop that does the same, tuned as well as we know: gradients are views of DDP's buckets, and
memory that was freed stays with the process (without both, its step takes 1.17 times as long). It exchanges nothing
but gradients until it tells the mean loss.

Equal work, which is asserted: the mean loss of the first 40 steps (but the limit's) is the same within 1e-5, with the
hook 1e-3.

The limit is not 2, as each has the whole optimizer's work. The gradients, 4.8 MB through the loopback interface, take
3.3 ms; each time that a process waits for the other, the slower of two virtual cores decides.
"""

import math
import shlex
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks import pairs
from benchmarks.pairs import Comparison, drift
from benchmarks.runs import CNN, Side, arguments, take_turns, train_py, write_images
from src.check.reference import own_share
from src.checkpoint.folder import run_settings
from src.training.batches import fetch
from src.training.optim import build_optimizers, lr_at, set_lr
from src.training.run import new_model

INTERVAL, ROUNDS, BATCH = 40, 6, 64
STEPS = INTERVAL * (1 + ROUNDS)
PLAIN_DDP = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
PLAIN_DDP += ["-m", "benchmarks.data_parallel", "by_hand"]


def by_hand(argv: list[str]) -> None:
    """Train with plain DDP, as one process of several; print the mean loss of each interval."""
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    config = run_settings(argv)
    task, (_, schedule_steps) = config.task, config.steps(STEPS)
    examples = task.build_datasets()[0]
    model = DistributedDataParallel(new_model(config, "cpu", "fp32")[0], gradient_as_bucket_view=True)
    (optimizer,) = build_optimizers(config.optim, model)
    loss_sum = torch.zeros(())
    model.train()
    for step, indices in enumerate(own_share(config, examples, 0, rank, world_size)):
        loss = task.loss(model, fetch(task, examples, indices.tolist()))
        (loss * (world_size / BATCH)).backward()
        loss_sum += loss.detach()
        norm = nn.utils.clip_grad_norm_(model.parameters(), math.inf)
        set_lr([optimizer], lr_at(step, config.optim, schedule_steps, STEPS))
        if math.isfinite(norm):
            optimizer.step()
        optimizer.zero_grad()
        if (step + 1) % INTERVAL == 0:
            dist.all_reduce(loss_sum)
            if rank == 0:
                print(f"loss {loss_sum.item() / BATCH / INTERVAL}", flush=True)
            loss_sum.zero_()
    dist.destroy_process_group()


def measure(_: Path, folder: Path) -> list[Comparison]:
    settings = CNN | {"task.dropout": 0, "task.data_dir": folder / "data"}
    settings |= {"global_batch_size": BATCH, "max_steps": STEPS, "log_every": INTERVAL}
    half = settings | {"global_batch_size": BATCH // 2}
    other = half | {"max_steps": 3 * STEPS, "output_dir": "other"}  # it goes on for as long as it is needed
    apart = f"{shlex.join(train_py(other))} & {shlex.join(train_py(half))}; code=$?; kill -9 $! && exit $code"
    one = Side(train_py(settings), folder / "one")
    plain = Side([*PLAIN_DDP, *arguments(settings)], folder / "plain", ends=r"^loss (.*)$", file="log")
    hook = {"ddp": {}, "ddp_bf16_hook": {"ddp_comm_hook": "bf16"}}
    ddp, hooked = (Side(train_py(settings | more, yaml, 2), folder / yaml) for yaml, more in hook.items())
    sides = [one, plain, ddp, hooked, Side(["bash", "-c", apart], folder / "apart")]
    write_images(folder / "data", STEPS * BATCH)
    turns = take_turns(ROUNDS, sides)
    losses = {side.folder.name: side.values[0] for side in sides}
    for compared, within in (("plain", 1e-5), ("ddp", 1e-5), ("ddp_bf16_hook", 1e-3)):
        off = drift([losses[compared]], [losses["one"]])
        assert off <= within, f"{compared}: a loss {off:.0e} away from that of one process"
    times = {name: [1e3 * s / INTERVAL for s in seconds] for name, seconds in zip(losses, turns, strict=True)}
    questions = (
        ("2 processes, bf16 hook, against 1", "ddp_bf16_hook", "one", 1.55),
        ("2 processes, DDP, against 1", "ddp", "one", 1.5),
        ("2 processes, plain tuned DDP, against 1", "plain", "one", 1.5),
        ("2 processes, DDP, against plain tuned DDP", "ddp", "plain", 1),
        ("2 processes that share nothing (the limit), against 1", "apart", "one", 1),
    )
    return [Comparison(what, "ms/step", times[a], times[b], target, is_gain=True) for what, a, b, target in questions]


if __name__ == "__main__":
    if sys.argv[1:2] == ["by_hand"]:
        by_hand(sys.argv[2:])
    else:
        pairs.main(measure, __doc__)
