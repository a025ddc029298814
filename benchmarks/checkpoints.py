"""What checkpoints cost: the pause per save, resuming, the size on disk, an export's memory. One process, CPU.

    python -m benchmarks.checkpoints

- pause: for how long a save keeps the loop from training, of a Llama of 100M parameters with AdamW's state (1.3 GB),
  against `accelerator.save_state` of the same. In turn; ours is written in the background, while it trains.
- resume: a whole session of train.py that resumes at 99% of an epoch of 60,000 images for one step, against at 1%.
- size: all files of a checkpoint against the bytes of its tensors.
- export: the peak of resident memory of `python -m src.tools.checkpoints export`, beyond that of the same for a tiny
  model, against the bytes of the model and of one shard, which is mapped into memory: here the whole checkpoint.
"""

import json
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator

from benchmarks import pairs
from benchmarks.language import Plan, write_text
from benchmarks.language_peers import new_llama
from benchmarks.pairs import Comparison, in_turn
from benchmarks.runs import CNN, NEVER, PROJECT, Side, running, train_py, write_images

REPEATS, STEPS = 5, 20  # saves, and steps between two of ours, in which the one before is written
LLAMA = {
    "hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 12, "num_attention_heads": 12,
    "num_key_value_heads": 12, "vocab_size": 16_000,
}  # fmt: skip
PAUSES: dict[str, Any] = {"ends": r"\(paused ([\d,]+) ms\)", "file": "log"}


def save_states() -> None:
    """Print the milliseconds that each save_state takes."""
    accelerator = Accelerator(cpu=True)
    model: Any = new_llama(LLAMA, length=32)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    while True:
        started = time.perf_counter()
        accelerator.save_state("saved")
        print(f"(paused {1e3 * (time.perf_counter() - started):.0f} ms)", flush=True)
        shutil.rmtree("saved")


def llama(folder: Path, shape: dict[str, int], steps: int) -> Side:
    """Return a training that saves each STEPS steps and tells the pauses, in ms."""
    settings = Plan(shape, length=32, batch=1).settings(folder / "data") | {"max_steps": steps, "save_every": STEPS}
    return Side(train_py(settings), folder / f"llama-{shape['hidden_size']}", **PAUSES)


def newest(side: Side) -> Path:
    return max((side.folder / "run" / "checkpoints").glob("step_*"))


def bytes_of_tensors(checkpoint: Path, group: str) -> int:
    """Sum up those of the tensors whose names begin with `group`, from the heads of the safetensors files."""
    total = 0
    for path in checkpoint.glob("*.safetensors"):
        with path.open("rb") as file:
            head = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        offsets = [head[name]["data_offsets"] for name in head if name.startswith(group) and name != "__metadata__"]
        total += sum(end - start for start, end in offsets)
    return total


def peak_of_export(checkpoint: Path) -> int:
    """Return the bytes that the tool has resident at most; a small process starts it, whose own don't count."""
    code = "import resource, subprocess, sys; subprocess.run(sys.argv[1:], check=True);"
    code += "print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)"
    command = [sys.executable, "-c", code, sys.executable, "-m", "src.tools.checkpoints", "export", str(checkpoint)]
    return int(subprocess.check_output(command, cwd=PROJECT, text=True).split()[-1]) * 1024


def session(folder: Path, steps: int, resume: Path | None = None) -> tuple[float, Path]:
    """Train on images up to a step of an epoch's 938. Return the session's seconds and its last checkpoint."""
    settings = CNN | {"task.data_dir": folder / "images", "max_steps": steps, "save_every": NEVER}
    side = Side(train_py(settings | ({"resume": resume} if resume else {})), Path(tempfile.mkdtemp(dir=folder)))
    started = time.perf_counter()
    side.run()
    return time.perf_counter() - started, newest(side)


def measure(_: Path, folder: Path) -> list[Comparison]:
    write_text(folder, sequences=(REPEATS + 2) * STEPS, length=32)
    write_images(folder / "images", 60_000)
    ours = llama(folder, LLAMA, NEVER)
    theirs = Side([sys.executable, "-m", "benchmarks.checkpoints", "--theirs"], folder / "theirs", **PAUSES)
    with running(ours, theirs):
        for side in (ours, theirs):
            side.start()
            side.turn()
        in_turn(REPEATS, ours.turn, theirs.turn)
    checkpoint, tiny = newest(ours), llama(folder, LLAMA | {"hidden_size": 48, "vocab_size": 300}, 1)
    tiny.run()
    size = sum(file.stat().st_size for file in checkpoint.iterdir())
    tensors, model = bytes_of_tensors(checkpoint, ""), bytes_of_tensors(checkpoint, "model.")
    peak = peak_of_export(checkpoint) - peak_of_export(newest(tiny))
    early = session(folder, 9)[1]
    late = session(folder, 929, early)[1]
    times = in_turn(REPEATS, lambda: session(folder, 10, early)[0], lambda: session(folder, 930, late)[0])
    print(f"size on disk / bytes of tensors: {size / tensors:.4f}")
    print(f"peak memory of an export: {peak / 1e9:.2f} GB; model, one shard: {model / 1e9:.2f} GB, {size / 1e9:.2f} GB")
    return [
        Comparison("pause per save, 100M, save_state", "ms", ours.values[1:], theirs.values[1:], 1, is_gain=False),
        Comparison("session resumed at 99%, at 1%", "s", times[1], times[0], 1.05, is_gain=False),
    ]


if __name__ == "__main__":
    if "--theirs" in sys.argv:
        save_states()
    else:
        pairs.main(measure, pairs.parser(__doc__))
