"""What the tests of faults share: short runs, killed and resumed runs, and what makes two runs the same."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from accelerate import Accelerator
from safetensors.torch import load_file

from src.checkpoint.files import file_facts
from src.checkpoint.output_dir import LOCK
from src.checkpoint.resume import find_checkpoint
from src.checkpoint.tensors import StorageReader, saved_tensors
from src.config.errors import UserError
from src.parts import open_store
from src.start import run_settings
from src.training.state import ResumePoint, RunInputs
from tests.launching import Launch, Run, Started

SHORT = ("--max_steps=30", "--log_every=1", "--save_every=8", "--eval_every=23")
"""An epoch has 23 steps: checkpoints at 8, 16, 24 and 30, evaluations at 23 and 30. With dropout."""
TINY = ("--max_steps=14", "--log_every=1", "--save_every=4", "--eval_every=8", "--global_batch_size=16")
"""Checkpoints at 4, 8, 12 and 14, evaluations at 8 and 14. With dropout."""
ALL = (*TINY, "--checkpoint.keep_last=9")
"""The same run, which keeps all of its checkpoints."""
WORKER = ("--num_workers=1",)
ORIGIN = RunInputs(
    settings={}, examples=5, schedule_steps=1, fingerprints=["one", "other"], data_state={}, frozen_norm=0.0,
    strategy="single", precision="fp32", num_processes=1, versions={},
)  # fmt: skip
"""The inputs of a run that is made up."""


def contents(folder: Path) -> dict[Path, bytes]:
    """Return all files, by path, without the lock, which this process holds until it ends."""
    paths = (path for path in folder.rglob("*") if path.name != LOCK)
    return {path: path.read_bytes() if path.is_file() else b"" for path in paths}


def checkpoints(folder: Path) -> list[int]:
    """Return the steps that have a checkpoint."""
    return sorted(int(path.name.removeprefix("step_")) for path in folder.glob("checkpoints/step_*"))


def cut_back(whole: Run, folder: Path, *steps: int) -> Path:
    """Copy the run as if it had been killed in its last steps, with the checkpoints of these steps alone."""
    shutil.copytree(whole.folder, folder)
    for path in folder.glob("checkpoints/step_*"):
        if int(path.name.removeprefix("step_")) not in steps:
            shutil.rmtree(path)
    shutil.rmtree(folder / "model")
    for name in ("summary.json", "status.json"):
        (folder / name).unlink(missing_ok=True)
    return folder


def killed_and_resumed(launch: Launch, yaml: str, arguments: tuple[str, ...], folder: Path) -> Run:
    """Kill a run once it has a checkpoint of step 8 and records up to step 12, and launch it again."""
    with Started(yaml, *arguments, folder=folder) as started:
        started.wait_for("step     12/").wait_until(lambda: 8 in checkpoints(folder)).kill_all()
    run = launch(yaml, *arguments, folder=folder).succeeded()
    assert any("after step 8, from" in line for line in lines(run, "resume"))
    return run


def found(folder: Path, *arguments: str) -> ResumePoint:
    """Return what TINY resumes from in this folder, on this process, which locks the folder until it ends."""
    accelerator = Accelerator(cpu=True)
    config = run_settings([f"--output_dir={folder}", "--task.source=digits", *TINY, *arguments])
    with open_store(accelerator, config) as store:
        return find_checkpoint(store)


def refusal(folder: Path, *arguments: str) -> list[str]:
    """Return the lines that TINY is refused with in this folder."""
    with pytest.raises(UserError) as error:
        found(folder, *arguments)
    return str(error.value).splitlines()


def curve(run: Run) -> list[dict[str, Any]]:
    return without_times(run.records)


def without_times(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{n: v for n, v in record.items() if not n.startswith("perf/")} for record in records]


def evaluations(run: Run) -> list[dict[str, Any]]:
    return [record for record in curve(run) if "eval/loss" in record]


def relist(checkpoint: Path, name: str) -> None:
    """Put a changed file into the manifest, as if it had been saved like that."""
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    manifest["files"][name] = file_facts(checkpoint / name)
    (checkpoint / "manifest.json").write_text(json.dumps(manifest))


def weights(run: Run) -> dict[str, torch.Tensor]:
    return load_file(run.folder / "model" / "model.safetensors")


def whole_tensors(checkpoint: Path) -> dict[str, torch.Tensor]:
    """Return a checkpoint's tensors, unsharded, by name."""
    tensors = {name: torch.empty(facts.size) for name, facts in saved_tensors(checkpoint).items()}
    dcp.load(tensors, storage_reader=StorageReader(str(checkpoint)))
    return tensors


def assert_same_run(run: Run, whole: Run) -> None:
    """Compare bit for bit: every record, in order, each once, and the final weights."""
    assert curve(run) == curve(whole)
    assert_equal(weights(run), weights(whole))


def assert_equal(tensors: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    equal = {name: torch.equal(tensor, expected[name]) for name, tensor in tensors.items()}
    assert equal == dict.fromkeys(expected, True)


def lines(run: Run, start: str) -> Iterator[str]:
    return (line for line in run.stdout.splitlines() if line.strip().startswith(start))
