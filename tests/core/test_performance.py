"""The metrics perf/… and profiles of chosen steps: they are right, no step waits for them, and no loss changes."""

import json
from collections import Counter
from unittest.mock import Mock

import pytest
import torch

from src.tracking import performance
from src.tracking.performance import Performance, peak_flops
from tests.launching import QUIET, Launch, Whole, mistakes
from train import run_settings


def test_a_gpus_peak_is_known_by_the_words_of_its_name() -> None:
    """An L40 is no L4, and a slice no whole GPU."""
    assert peak_flops("NVIDIA L40S", "bf16") == pytest.approx(362e12)
    for name, precision in (("A100-SXM4-80GB", "fp32"), ("L40", "bf16"), ("H100 80GB HBM3 MIG 1g.10gb", "bf16")):
        assert peak_flops(f"NVIDIA {name}", precision) is None


class Event:
    """An event of a device that has been given work until `clock`."""

    clock = 0.0

    def __init__(self, device: torch.device, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        self.at = Event.clock

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, end: "Event") -> float:
        return 1e3 * (end.at - self.at)


def test_the_metrics_of_an_interval_are_those_of_its_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU. Dummy micro-batches, of weight 0, don't count. That no step waits: plan/gpu/test_null.py."""
    monkeypatch.setattr(torch, "Event", Event)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA H100 80GB HBM3")
    monkeypatch.setattr(performance, "peak_memory", lambda _: [5, 7])
    monkeypatch.setattr(performance, "gather_object", lambda own: own)
    run = Mock(total_steps=9, device=torch.device("cuda"), rank=0, world_size=1)
    run.config.profile_steps, run.progress.step, run.launch.precision = None, 0, "bf16"
    run.task.flops = lambda model, data: data * 1e12
    measured = Performance(run)
    for _ in range(2):
        for _ in range(3):
            measured.begin_step()
            Event.clock += 1
            measured.begin_computing()
            Event.clock += 3
            measured.end_step([Mock(weight=weight, data=989) for weight in (1.0, 0.0)])
            Event.clock += 10
        found = {name.removeprefix("perf/"): value for name, value in measured.interval_metrics().items()}
        assert found == {"data_seconds": 1.0, "compute_seconds": 3.0, "mfu": 0.25, "peak_memory_bytes": 7}


STEPS = ("--max_steps=3", "--log_every=1", "--eval_every=3")
SLOW = """
import time
from src.tasks.mnist import Mnist
loss = Mnist.loss
Mnist.loss = lambda *arguments: (loss(*arguments), time.sleep(0.3))[0]
"""


def test_steps_on_a_cpu_are_measured_by_the_clock(whole: Whole) -> None:
    run = whole("ddp", *STEPS, before=SLOW)
    record, *_ = run.records
    assert record["perf/compute_seconds"] > 0.3
    assert record["perf/data_seconds"] < 0.1
    assert record["perf/peak_memory_bytes"] == pytest.approx(max(run.summary["peak_memory_bytes"]), rel=0.2)
    assert "perf/mfu" not in record


def test_a_profile_has_the_operators_of_its_steps_alone(launch: Launch, whole: Whole) -> None:
    """And changes no loss. An evaluation follows the last step."""
    run = launch("ddp", *STEPS, "--profile_steps=2:3").succeeded()
    assert run.losses == whole("ddp", *STEPS, before=SLOW).losses
    for rank in range(2):
        (file,) = run.folder.glob(f"profile/rank_{rank}.*.pt.trace.json")
        counts = Counter(event["name"] for event in json.loads(file.read_text())["traceEvents"] if event["ph"] == "X")
        assert (counts["ProfilerStep#1"], counts["ProfilerStep#2"], counts["ProfilerStep#3"]) == (1, 1, 0)
        assert (counts["Optimizer.step#AdamW.step"], counts["aten::max_pool2d"]) == (2, 2)


def test_steps_to_profile_that_the_run_lacks_are_refused() -> None:
    for steps in ("15:10", "0:3", "a:b"):
        (line,) = mistakes(f"--profile_steps={steps}")
        assert line == f"profile_steps={steps}: name the first and the last step, such as 10:15"
    (line,) = run_settings(["--profile_steps=10:15", "--max_steps=9", *QUIET]).length_errors(100)
    assert line == "profile_steps=10:15: the run has only 9 steps; choose among them, or set it to null"
