"""The proof of benchmarks/gpu.py on an emulated GPU: its minutes on a real one are not spent on its own mistakes."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.launching import PROJECT, Launch, needs, run_command
from tests.plan.gpu.build import emulated_environment

pytestmark = needs("benchmarks/gpu.py")
NOT_EMULATED = {"the same run by the plan", "MNIST: 14 epochs"}
NOT_EMULATED |= {"weights in 4 bits against fp32", "a Llama in fp8 against bf16"}
"""Rows that ask for a real GPU's memory or speed, or for the kernels of bitsandbytes and of torchao."""
IMPORTS = """
from benchmarks.gpu import torch, warm
warm()
assert torch.cuda.device_count() and not torch.cuda.is_initialized()
"""


def prove(folder: Path, *words: str) -> Any:
    """Return the run, and what it has written."""
    command = [sys.executable, "-m", "benchmarks.gpu", "--smoke"]
    command += [f"--data_dir={folder}", f"--output={folder}/proof.json"]
    run = run_command([*command, *words], folder, PROJECT, **emulated_environment())
    return run, json.loads((folder / "proof.json").read_text())


@pytest.mark.slow
def test_each_row_of_the_proof_is_answered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.launching.SECONDS", 900)
    run, proof = prove(tmp_path)
    assert {row["row"] for row in proof["rows"] if row["is_right"] is False} <= NOT_EMULATED, run.stdout
    assert proof["gpu"]["name"] == "NVIDIA H100 80GB HBM3"
    assert len(proof["rows"]) == 31, run.stdout


@pytest.mark.slow
@pytest.mark.parametrize(("part", "rows"), [([], 18), (["llama"], 4)])
def test_rows_without_time_are_left_out_and_named(tmp_path: Path, part: list[str], rows: int) -> None:
    run, proof = prove(tmp_path, "--minutes=0.05", *part)
    assert all(row["is_right"] is None and "left out" in row["says"] for row in proof["rows"])
    assert f"{rows} rows, 0 of them not as asked" in run.succeeded().stdout


def test_importing_the_proof_leaves_the_gpu_alone(tmp_path: Path) -> None:
    """A process that has touched a GPU can't be forked: torchao and bitsandbytes do when they are imported."""
    run_command([sys.executable, "-c", IMPORTS], tmp_path, PROJECT, **emulated_environment()).succeeded()


def test_a_proof_without_a_gpu_ends_in_one_line(launch: Launch, tmp_path: Path) -> None:
    run = launch("cpu", "--smoke", f"--output={tmp_path}/proof.json", script="benchmarks/gpu.py")
    (line,) = run.stderr.splitlines()
    assert (run.exit_code, (tmp_path / "proof.json").exists()) == (1, False)
    assert line.startswith("benchmarks.gpu: no NVIDIA GPU that this torch ")
