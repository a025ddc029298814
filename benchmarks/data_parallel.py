"""Data parallelism: two processes of one thread against one, and DDP against data parallelism by hand.

    python -m benchmarks.data_parallel

The CNN, AdamW, global batches of 64 random images, fp32, on gloo: the same batches on one process and on two. Five
sides: one process; src/reference.py, with an all_reduce for each of the CNN's eight parameters after the backward pass;
DDP, which reduces two buckets during it; DDP with ddp_comm_hook=bf16, which sends half the bytes; and the limit, two
runs at once that share nothing, of 32 images a step. They take turns of 40 steps.

Equal work, which is asserted: the mean loss of the first 40 steps (but the limit's) is the same within 1e-5, with the
hook 1e-3.

The limit is not 2, as each has the whole optimizer's work. A step that waits for the other process, be it only for six
numbers, takes 3 to 6 ms more on two virtual cores; the gradients, 4.8 MB through the loopback interface, 3.3 ms.
"""

import shlex
import statistics
import sys
from pathlib import Path

from benchmarks import pairs
from benchmarks.pairs import Comparison, drift
from benchmarks.runs import CNN, Side, arguments, take_turns, train_py, write_images

INTERVAL, ROUNDS, BATCH = 40, 6, 64
STEPS = INTERVAL * (1 + ROUNDS)
BY_HAND = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "src.reference"]


def measure(_: Path, folder: Path) -> list[Comparison]:
    settings = CNN | {"task.dropout": 0, "task.data_dir": folder / "data"}
    settings |= {"global_batch_size": BATCH, "max_steps": STEPS, "log_every": INTERVAL}
    half = settings | {"global_batch_size": BATCH // 2}
    other = half | {"max_steps": 3 * STEPS, "output_dir": "other"}  # it goes on for as long as it is needed
    apart = f"{shlex.join(train_py(other))} & {shlex.join(train_py(half))}; code=$?; kill -9 $! && exit $code"
    one = Side(train_py(settings), folder / "one")
    by_hand = Side([*BY_HAND, *arguments(settings)], folder / "by hand")
    by_hand.file, by_hand.ends, by_hand.every = "log", r"^step \d+  loss (.*)$", INTERVAL
    hook = {"ddp": {}, "ddp_bf16_hook": {"ddp_comm_hook": "bf16"}}
    ddp, hooked = (Side(train_py(settings | more, yaml, 2), folder / yaml) for yaml, more in hook.items())
    sides = [one, by_hand, ddp, hooked, Side(["bash", "-c", apart], folder / "apart")]
    write_images(folder / "data", STEPS * BATCH)
    turns = take_turns(ROUNDS, sides)
    losses = {side.folder.name: statistics.mean(side.values[: side.every]) for side in sides}
    for compared, within in (("by hand", 1e-5), ("ddp", 1e-5), ("ddp_bf16_hook", 1e-3)):
        off = drift([losses[compared]], [losses["one"]])
        assert off <= within, f"{compared}: a loss {off:.0e} away from that of one process"
    times = {name: [1e3 * s / INTERVAL for s in seconds] for name, seconds in zip(losses, turns, strict=True)}
    questions = (
        ("2 processes, bf16 hook, against 1", "ddp_bf16_hook", "one", 1.55),
        ("2 processes, DDP, against 1", "ddp", "one", 1.43),
        ("2 processes, bf16 hook, against by hand", "ddp_bf16_hook", "by hand", 1.4),
        ("2 processes, DDP, against by hand", "ddp", "by hand", 1.3),
        ("2 processes that share nothing (the limit), against 1", "apart", "one", 1),
    )
    return [Comparison(what, "ms/step", times[a], times[b], target, is_gain=True) for what, a, b, target in questions]


if __name__ == "__main__":
    pairs.main(measure, __doc__)
