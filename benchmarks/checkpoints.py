"""What checkpoints cost: the pause per save, resuming early and late in an epoch, the size on disk. One process, CPU.

    python -m benchmarks.checkpoints

- pause: for how long a save keeps the loop from training, of a Llama of 100M parameters with AdamW's state (1.2 GB),
  against `accelerator.save_state` of the same. In turn; ours is written in the background, which is waited for before
  the next, and whose time is printed too.
- resume: a whole session of train.py that goes on from 1% and from 99% of an epoch of 60,000 images for one step.
- size: all files of a checkpoint against the bytes of its tensors.
"""

import contextlib
import io
import shutil
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from accelerate import Accelerator

from src.checkpoint import folders
from src.checkpoint.save import Saver
from src.checkpoint.tensors import saved_tensors
from src.config import Config, load_config
from src.launch import prepare
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
        ours, theirs, written, ratio_on_disk = saving(Path(folder))
        early, late = resuming(Path(folder))
    print(f"pause per save, 100M parameters   {report(ours)}, written after {report(written)}")
    print(f"accelerator.save_state            {report(theirs)}")
    print(f"  ratio                           {statistics.median(ours) / statistics.median(theirs):.3f}")
    print(f"session resumed at 1%             {report(early)}")
    print(f"session resumed at 99%            {report(late)}")
    print(f"  ratio                           {statistics.median(late) / statistics.median(early):.3f}")
    print(f"size on disk / bytes of tensors   {ratio_on_disk:.4f}")


def report(seconds: list[float]) -> str:
    return f"{statistics.median(seconds):.3f} s ({min(seconds):.3f} to {max(seconds):.3f})"


def saving(folder: Path) -> tuple[list[float], list[float], list[float], float]:
    """Returns: seconds of our pauses, of theirs and of our saves as a whole, and the ratio of the size on disk."""
    architecture = f"--task.architecture={ {'model_type': 'llama', **LLAMA} }".replace("'", '"')
    arguments = [
        "--task.name=causal_lm",
        architecture,
        "--task.dataset=requirements.txt",
        f"--output_dir={folder / 'saving'}",
    ]
    config = load_config(arguments)
    config.folder.mkdir()
    (config.folder / "metrics.jsonl").touch()
    accelerator = Accelerator(cpu=True)
    model = config.task.build_model()
    model, optimizers = prepare(accelerator, model, build_optimizers(accelerator, config.optim, model))
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
    saver = Saver(accelerator, config, model, optimizers, None, say=lambda _: None)
    ours, theirs, written = [], [], []
    for step in range(1, REPEATS + 1):
        started = time.perf_counter()
        saver.save(Progress(step=step), {})
        ours.append(time.perf_counter() - started)
        saver.collect(wait=True)
        written.append(time.perf_counter() - started)
        newest = folders.step_folder(config.folder / "checkpoints", step)
        assert saver.newest == newest
        started = time.perf_counter()
        accelerator.save_state(str(folder / "theirs"))
        theirs.append(time.perf_counter() - started)
        shutil.rmtree(folder / "theirs")
    tensors = saved_tensors(newest).values()
    size = sum(facts.size.numel() * facts.properties.dtype.itemsize for facts in tensors)
    return ours, theirs, written, folders.size_on_disk(newest) / size


def resuming(folder: Path) -> tuple[list[float], list[float]]:
    """Returns: seconds of the sessions that go on from 1% and from 99% of an epoch of 938 steps."""
    random = np.random.default_rng(0)
    for name, count in (("train", 60_000), ("t10k", 100)):
        images, labels = random.integers(0, 256, (count, 28, 28)), random.integers(0, 10, count)
        for kind, magic, content in (("images-idx3", 2051, images), ("labels-idx1", 2049, labels)):
            head = np.array([magic, *content.shape], dtype=">i4").tobytes()
            (folder / f"{name}-{kind}-ubyte").write_bytes(head + content.astype(np.uint8).tobytes())

    def session(steps: int, resume: Path | None = None) -> tuple[float, Path]:
        output = Path(tempfile.mkdtemp(dir=folder)) / "run"
        arguments = [f"--output_dir={output}", f"--task.data_dir={folder}", "--wandb.mode=disabled", "--epochs=1"]
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
