"""Check 8, Checkpoint: saved, restored, and the run goes on to the last bit."""

import dataclasses
import shutil
from collections.abc import Iterator

import torch

from src.check.findings import Finding
from src.check.subject import Subject, checksum
from src.checkpoint.resume import find, restore
from src.checkpoint.write import Saver
from src.checkpoint.tensors import run_tensors
from src.config import Checkpoint, Config
from src.progress import Progress

STEPS = 2
"""To take after the checkpoint: the optimizer's state shows in the second one's loss."""


def examine(subject: Subject) -> Iterator[Finding]:
    """In a folder of its own in the output folder, deleted afterwards."""
    if subject.drifted():
        yield Finding("Checkpoint", "not examined", "the replicas differ, and a checkpoint has one of them")
        return
    folder = subject.config.folder / "tmp_check"
    config = subject.config.model_copy(
        update={"output_dir": str(folder), "checkpoint": Checkpoint(), "resume": "auto", "check": False}
    )
    is_main, on_gpu = subject.accelerator.is_main_process, subject.device.type != "cpu"
    if is_main:
        shutil.rmtree(folder, ignore_errors=True)  # of an examination that was killed
        folder.mkdir(parents=True)
    subject.accelerator.wait_for_everyone()
    try:
        torch.use_deterministic_algorithms(on_gpu, warn_only=True)  # else the order of atomic additions shows
        yield from _save_and_restore(subject, config)
        subject.accelerator.wait_for_everyone()
    finally:
        torch.use_deterministic_algorithms(False)
        if is_main:
            shutil.rmtree(folder, ignore_errors=True)


def _save_and_restore(subject: Subject, config: Config) -> Iterator[Finding]:
    said: list[str] = []
    progress = subject.progress(STEPS)
    about = subject.about | {"config": config.model_dump(mode="json"), "metrics_bytes": 0, "wandb_id": None}
    subject.seed()
    saver = Saver(subject.accelerator, config, subject.model, subject.optimizers, None, said.append)
    saver.save(progress, about)
    saver.finish()
    if saver.newest is None:
        yield Finding("Checkpoint", "saved", said[-1], "saved", False, "the folder can't be written as it must be")
        return
    losses, sums = _go_on(subject, dataclasses.replace(progress))
    found = find(subject.accelerator, config)
    for optimizer in subject.optimizers:
        optimizer.state.clear()  # as in a new process
    restore(subject.accelerator, config, found, subject.model, subject.optimizers, about)
    again, sums_again = _go_on(subject, found.progress)
    yield Finding(
        "Checkpoint",
        "losses of the next two steps",
        f"{', '.join(f'{loss:.9g}' for loss in losses)}; restored {', '.join(f'{loss:.9g}' for loss in again)}",
        "the same, bitwise",
        losses == again,
        "the checkpoint forgets something: the optimizer's state (the second loss differs, not the first), the random "
        "numbers or the position in the data",
    )
    same = [here == there for here, there in zip(subject.gather(sums), subject.gather(sums_again), strict=True)]
    yield Finding(
        "Checkpoint",
        "weights, optimizer after them",
        "the same on all processes" if all(same) else f"differ on process {same.index(False)}",
        "the same, bitwise",
        all(same),
        "as above",
    )


def _go_on(subject: Subject, progress: Progress) -> tuple[list[float], str]:
    """Losses of the next steps, and the checksum of what they leave on this process."""
    windows = subject.windows(progress.step)
    losses = []
    for _ in range(STEPS):
        done = subject.step(next(windows), progress)
        losses.append(done.loss)
    left = run_tensors(subject.model, subject.optimizers)
    return losses, checksum([left[name] for name in sorted(left)])
