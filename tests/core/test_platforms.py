"""What differs where there is no Linux with NVIDIA's GPUs: stand-ins take the place of Windows, Apple's GPUs and
containers. What Apple's GPUs do is known from torch's source and its threads, which the code names."""

import subprocess
import sys
import threading
from fnmatch import fnmatchcase
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import AdamW

from src.config.errors import UserError
from src.tasks.mnist import Digits
from src.training import batches
from src.training.batches import MicroBatch
from src.training.evaluation import evaluate_batches
from src.training.gradients import step_if_finite
from src.training.out_of_memory import explaining_memory
from src.training.transforms import checkpoint_and_compile
from tests.launching import PROJECT, Launch

MPS = torch.device("mps")
WINDOWS = """
import sys
sys.platform = "win32"
sys.modules.update(dict.fromkeys(("fcntl", "resource", "torch", "psutil")))  # as if they were missing
sys.argv = ["train.py"]
import runpy
runpy.run_path("train.py", run_name="__main__")
"""
HAS_APPLE_GPU = """
import torch
torch.backends.mps.is_available = torch.backends.mps.is_built = lambda: True
torch.backends.mps.is_macos_or_newer = lambda *_: True
"""
ENDS_WITH_ITS_DEVICE = """
import sys
import src.distributed.accelerator as module
torch.accelerator.is_available = lambda: True
torch.accelerator.device_count = lambda: 1
module.refuse_another_strategy = lambda a, _: sys.exit(f"{a.device.type} {a.mixed_precision} {a.native_amp}")
"""


def test_windows_is_told_of_wsl_before_anything_is_imported() -> None:
    done = subprocess.run([sys.executable, "-c", WINDOWS], cwd=PROJECT, capture_output=True, text=True)
    line = "Windows has neither fork nor Unix signals: install WSL by `wsl --install`, and run this inside it\n"
    assert (done.returncode, done.stdout, done.stderr) == (2, "", line)


# ------------------------------------------------------------------------------------------------------- Apple's GPUs
def test_several_processes_on_a_mac_use_its_cpu_and_say_why(launch: Launch) -> None:
    run = launch("ddp", "--max_steps=2", processes=2, before=HAS_APPLE_GPU).succeeded()
    says = "Apple's GPU serves one process alone: the CPU stand-in for *ddp.yaml, 2 processes on gloo, fp32"
    assert fnmatchcase(run.stdout.splitlines()[1], says)
    assert (run.summary["device"], run.summary["precision"]) == ("cpu", "fp32")


NEEDS = "train.py: Apple's GPU needs torch 2.15 and has no fp8: accelerate_configs/cpu.yaml trains on the CPU"


@pytest.mark.parametrize(
    ("version", "precision", "says"),
    [("2.15.0", "bf16", "mps bf16 True"), ("2.14.1", "bf16", NEEDS), ("2.15.0", "fp8", NEEDS)],
)
def test_one_process_on_a_mac_uses_its_gpu(launch: Launch, version: str, precision: str, says: str) -> None:
    """There is none here, so the run ends where it has been chosen."""
    torch_version = f"torch.__version__ = torch.torch_version.TorchVersion('{version}')"
    before, words = HAS_APPLE_GPU + ENDS_WITH_ITS_DEVICE + torch_version, ("--mixed_precision", precision)
    run = launch("single_gpu", "--max_steps=2", launcher_arguments=words, before=before)
    assert run.stderr.splitlines()[-1] == says


def test_batches_reach_an_apple_gpu_from_one_thread_and_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch crashes if two threads use it, and reads a batch after it was freed (pytorch#197805, #189690)."""
    found = []

    def send(data: Any, device: torch.device, non_blocking: bool) -> Any:
        found.append((device, non_blocking, threading.current_thread()))
        return data

    monkeypatch.setattr(batches, "send_to_device", send)
    run: Any = SimpleNamespace(device=MPS, config=SimpleNamespace())
    steps = iter([[MicroBatch(torch.zeros(2), 2, {"targets": 2.0})]] * 3)
    assert len([*batches._on_device(run, steps)]) == 3
    assert found == [(MPS, False, threading.current_thread())] * 3


def test_an_evaluation_on_an_apple_gpu_counts_in_float64() -> None:
    """In fp32, 2**24 + 1 is 2**24. A tensor of float64 on the device would be an error there, as any on it is here."""
    task: Any = SimpleNamespace(evaluate=lambda _model, data: (data, {}), kept_outputs={})
    parts = [MicroBatch(torch.tensor(loss), 1, {"targets": loss}) for loss in (2.0**24, 1.0)]
    scores = evaluate_batches(task, nn.Identity(), parts, MPS)
    assert scores
    assert scores.totals.tolist() == [2**24 + 1, 2**24 + 1, 2]


class NormOnApple(Tensor):
    """A gradient norm that says it is neither on a CPU nor on a CUDA device."""

    is_cpu = property(lambda _: False)
    is_cuda = property(lambda _: False)


class IgnoresFoundInf(AdamW):
    """AdamW whose fused step, like torch's on Apple's GPUs, never looks at found_inf."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter -= parameter.grad


@pytest.mark.parametrize(("norm", "weight"), [(1.0, 0.5), (float("nan"), 1.5), (float("inf"), 1.5)])
def test_a_step_that_is_not_finite_is_skipped_on_an_apple_gpu(norm: float, weight: float) -> None:
    parameter = nn.Parameter(torch.tensor(1.5))
    parameter.grad = torch.tensor(1.0)
    optimizer = IgnoresFoundInf([parameter], fused=True)
    step_if_finite([optimizer], torch.tensor(norm).as_subclass(NormOnApple))
    assert parameter.item() == weight


def test_activation_checkpointing_on_an_apple_gpu_is_refused() -> None:
    """Torch recomputes with another dropout there (pytorch#194478): the gradients would be of another function."""
    accelerator: Any = SimpleNamespace(device=MPS)
    config: Any = SimpleNamespace(activation_checkpointing=True)
    with pytest.raises(UserError, match="torch recomputes with other dropout on MPS: leave it out"):
        checkpoint_and_compile(nn.Linear(1, 1), config, accelerator)


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("XPU out of memory. Tried to allocate"), RuntimeError("MPS backend out of memory")]
)
def test_memory_that_runs_out_on_other_gpus_is_one_line_too(error: Exception) -> None:
    with (
        pytest.raises(UserError, match=r"^out of memory in the training step; what would help: "),
        explaining_memory("training step"),
    ):
        raise error


def test_digits_are_indexed_on_the_device_that_they_are_on() -> None:
    asked = []
    images: Any = SimpleNamespace(index_select=lambda _, index: asked.append(index.device))
    Digits(images, torch.empty(9, dtype=torch.int64, device="meta")).__getitems__([3, 1])
    assert asked == [torch.device("meta")]


# ------------------------------------------------------------------------------------------- the memory of a container
@pytest.mark.parametrize(
    ("cgroup", "files", "limit"),
    [
        ("0::/\n", {"memory.max": "300\n"}, 300),  # in a container
        ("0::/job/step\n", {"job/memory.max": "400\n", "job/step/memory.max": "max\n"}, 400),  # under Slurm or systemd
        ("0::/job/step\n", {"job/memory.max": "400\n", "job/step/memory.max": "200\n"}, 200),
        ("0::/\n", {"memory.max": "max\n"}, 1000),
        ("0::/\n", {"memory.max": "5000\n"}, 1000),  # more than the machine has
        ("4:memory:/job\n0::/\n", {"memory/job/memory.limit_in_bytes": "250\n"}, 250),  # version 1
        ("4:memory:/docker/1\n", {"memory/memory.limit_in_bytes": "350\n"}, 350),  # in a container of version 1
        ("5:devices:/job\n", {"memory/job/memory.limit_in_bytes": "250\n"}, 1000),
        (None, {}, 1000),  # macOS
    ],
)
def test_memory_is_that_of_the_container(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, cgroup: str | None, files: dict[str, str], limit: int
) -> None:
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(total=1000))
    memory_limit = pytest.importorskip("src.tasks.text.fine_tuning").memory_limit
    written = {f"sys/fs/cgroup/{name}": content for name, content in files.items()}
    written |= {"proc/self/cgroup": cgroup} if cgroup else {}
    for name, content in written.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(content)
    assert memory_limit(tmp_path) == limit
