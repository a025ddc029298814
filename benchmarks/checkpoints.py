"""What checkpoints cost: the pause per save, resuming early and late in an epoch, the size on disk, the memory that an
export takes. One process, CPU.

    python -m benchmarks.checkpoints

- pause: for how long a save keeps the loop from training, of a Llama of 100M parameters with AdamW's state (1.3 GB),
  against `accelerator.save_state` of the same. In turn; ours is written in the background, which is waited for before
  the next, and whose time is printed too.
- resume: a whole session of train.py that goes on from 1% and from 99% of an epoch of 60,000 images for one step.
- size: all files of a checkpoint against the bytes of its tensors.
- export: the peak of resident memory of `python -m src.checkpoint export`, beyond that of the same for a tiny model,
  against the bytes of the model and of one shard, which is mapped into memory: here the whole checkpoint.
"""

import contextlib
import io
import json
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from benchmarks.runs import write_images
from src.checkpoint import folders
from src.checkpoint.resume import about
from src.checkpoint.save import Saver
from src.checkpoint.tensors import saved_tensors
from src.config import Config, load_config
from src.launch import build_accelerator, prepare
from src.optim import build_optimizers
from src.progress import Progress
from train import train

REPEATS = 5
LLAMA = {
    "hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 12, "num_attention_heads": 12,
    "num_key_value_heads": 12, "vocab_size": 16_000,
}  # fmt: skip


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        ours, theirs, written, checkpoint = saving(Path(folder), LLAMA)
        *_, tiny = saving(Path(folder), LLAMA | {"hidden_size": 48, "vocab_size": 300})
        on_disk = folders.size_on_disk(checkpoint)
        of_tensors, of_model = bytes_of_tensors(checkpoint), bytes_of_tensors(checkpoint, "model.")
        peak = peak_of_export(checkpoint) - peak_of_export(tiny)
        early, late = resuming(Path(folder))
    print(f"pause per save, 100M parameters   {report(ours)}, written after {report(written)}")
    print(f"accelerator.save_state            {report(theirs)}")
    print(f"  ratio                           {statistics.median(ours) / statistics.median(theirs):.3f}")
    print(f"session resumed at 1%             {report(early)}")
    print(f"session resumed at 99%            {report(late)}")
    print(f"  ratio                           {statistics.median(late) / statistics.median(early):.3f}")
    print(f"size on disk / bytes of tensors   {on_disk / of_tensors:.4f}")
    print(f"peak memory of an export          {peak / 1e9:.2f} GB")
    print(f"  model, one shard                {of_model / 1e9:.2f} GB, {on_disk / 1e9:.2f} GB")


def report(seconds: list[float]) -> str:
    return f"{statistics.median(seconds):.3f} s ({min(seconds):.3f} to {max(seconds):.3f})"


def saving(folder: Path, architecture: dict[str, int]) -> tuple[list[float], list[float], list[float], Path]:
    """Returns: seconds of our pauses, of theirs and of our saves as a whole, and the last checkpoint."""
    config = load_config(
        [
            "--task.name=causal_lm",
            f"--task.architecture={json.dumps({'model_type': 'llama', **architecture})}",
            "--task.dataset=requirements.txt",
            f"--output_dir={tempfile.mkdtemp(dir=folder)}",
        ]
    )
    (config.folder / "metrics.jsonl").touch()
    accelerator, launch = build_accelerator()
    model = config.task.build_model()
    model, optimizers = prepare(accelerator, model, build_optimizers(config.optim, model, accelerator.is_fsdp2))
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
    saver = Saver(accelerator, config, model, optimizers, None, say=lambda _: None)
    ours, theirs, written = [], [], []
    for step in range(1, REPEATS + 1):
        started = time.perf_counter()
        saver.save(Progress(step=step), about(config, launch, examples=0, fingerprints=[], frozen_norm=0.0))
        ours.append(time.perf_counter() - started)
        saver.collect(wait=True)
        written.append(time.perf_counter() - started)
        newest = folders.step_folder(config.folder / "checkpoints", step)
        assert saver.newest == newest
        started = time.perf_counter()
        accelerator.save_state(str(folder / "theirs"))
        theirs.append(time.perf_counter() - started)
        shutil.rmtree(folder / "theirs")
    return ours, theirs, written, newest


def bytes_of_tensors(checkpoint: Path, group: str = "") -> int:
    tensors = [facts for name, facts in saved_tensors(checkpoint).items() if name.startswith(group)]
    return sum(facts.size.numel() * facts.properties.dtype.itemsize for facts in tensors)


def peak_of_export(checkpoint: Path) -> int:
    """Bytes that the tool has resident at most, as Linux counts them."""
    tool = subprocess.Popen(
        [sys.executable, "-m", "src.checkpoint", "export", str(checkpoint)], stdout=subprocess.DEVNULL
    )
    peak = 0
    while tool.poll() is None:
        if found := re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{tool.pid}/status").read_text()):
            peak = int(found[1]) * 1024
        time.sleep(0.001)
    assert tool.returncode == 0
    return peak


def resuming(folder: Path) -> tuple[list[float], list[float]]:
    """Returns: seconds of the sessions that go on from 1% and from 99% of an epoch of 938 steps."""
    write_images(folder / "images", 60_000)

    def session(steps: int, resume: Path | None = None) -> tuple[float, Path]:
        output = Path(tempfile.mkdtemp(dir=folder)) / "run"
        arguments = [
            f"--output_dir={output}",
            f"--task.data_dir={folder}/images",
            "--wandb.mode=disabled",
            "--epochs=1",
        ]
        arguments += [f"--max_steps={steps}", "--task.shift=0", "--task.rotation=0"]
        config: Config = load_config(arguments + ([f"--resume={resume}"] if resume else []))
        started = time.perf_counter()
        with contextlib.redirect_stdout(io.StringIO()):
            train(config)
        return time.perf_counter() - started, output / "checkpoints" / f"step_{steps:08d}"

    _, early = session(9)
    _, late = session(929, resume=early)
    times = [(session(10, resume=early)[0], session(930, resume=late)[0]) for _ in range(REPEATS)]
    return [early for early, _ in times], [late for _, late in times]


if __name__ == "__main__":
    main()
