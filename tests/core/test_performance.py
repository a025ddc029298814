"""The metrics perf/… and profiles of chosen steps: they are right, no step waits for them, and no loss changes."""

import json
import re
from collections import Counter
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from src.config.settings import read_yaml
from src.tracking import performance
from src.tracking.performance import TABLE, interval_metrics, measure, peak_flops, peaks
from src.training.progress import StepResult
from tests.launching import PROJECT, QUIET, Launch, Whole, mistakes
from train import run_settings

FOLDERS = ("src", "plan", "benchmarks", "examples", "configs", "docs")


def test_a_gpus_peak_is_known_by_its_whole_name() -> None:
    """As CUDA or ROCm reports it. In fp8 it is that of bf16."""
    for name, teraflops in (
        ("NVIDIA H100 80GB HBM3", 989), ("NVIDIA H100 PCIe", 756), ("NVIDIA H100 NVL", 835), ("NVIDIA H200", 989),
        ("NVIDIA H200 NVL", 835), ("NVIDIA B200", 2250), ("NVIDIA A100-SXM4-80GB", 312), ("NVIDIA L4", 121),
        ("NVIDIA A100-PCIE-40GB", 312), ("NVIDIA A100 80GB PCIe", 312), ("NVIDIA L40S", 362), ("NVIDIA A10G", 70),
        ("NVIDIA GeForce RTX 3090", 71), ("NVIDIA GeForce RTX 4090", 165.2), ("NVIDIA GeForce RTX 5090", 209.5),
        ("AMD Instinct MI300X", 1307.4), ("AMD Instinct MI300X OAM", 1307.4),
    ):  # fmt: skip
        for precision in ("bf16", "fp16", "fp8"):
            assert peak_flops(name, precision) == pytest.approx(teraflops * 1e12), name
        assert peak_flops(name, "fp32") is None
    assert peak_flops("Tesla T4", "fp16") == pytest.approx(65e12)


@pytest.mark.parametrize(
    "name",
    ["Tesla T4", "NVIDIA L40", "NVIDIA H100 80GB HBM3 MIG 1g.10gb", "NVIDIA A10G-24Q", "NVIDIA GeForce RTX 4090 D",
     "NVIDIA GeForce RTX 4090 Laptop GPU", "NVIDIA GeForce RTX 3090 Ti", ""],
)  # fmt: skip
def test_other_gpus_and_slices_have_no_peak(name: str) -> None:
    """Nor has a T4 in bf16, which it lacks."""
    assert peak_flops(name, "bf16") is None


def test_one_table_has_the_peaks_of_gpus() -> None:
    """No name of a device is twice in it, and nothing else says what an A100 computes."""
    assert len(peaks()) == sum(len(gpu["names"]) for gpu in read_yaml(TABLE.read_bytes()).values())
    files = [
        file for end in ("py", "yaml", "md") for folder in FOLDERS for file in (PROJECT / folder).rglob(f"*.{end}")
    ]
    (table,) = (file for file in files if re.search(r"(?is)\ba100.{,200}\b312\b", file.read_text(encoding="utf-8")))
    assert table.name == "gpus.yaml"


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

    def passing(seconds: float, value: object) -> Any:
        Event.clock += seconds
        return value

    steps = (passing(1, [Mock(weight=weight, data=989) for weight in (1.0, 0.0)]) for _ in range(6))
    fetched: Any
    fetched, take = measure(run, steps, lambda *_: passing(3, StepResult({}, 0.0, [], torch.zeros(()))))
    for step in range(1, 7):
        run.is_logged = lambda step=step: step % 3 == 0
        result = take(run, next(fetched), {})
        Event.clock += 10
        found = {name.removeprefix("perf/"): value for name, value in result.measured.items()}
        expected = {
            "data_seconds": 1.0, "compute_seconds": 3.0, "step_seconds": 4.0, "own_seconds": 1.0,
            "own_seconds_max": 1.0, "mfu": 0.25, "peak_memory_bytes": 7,
        }  # fmt: skip
        assert found == (expected if step % 3 == 0 else {})


def test_a_process_that_the_others_wait_for_is_named_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the medians of an interval of ten steps or more, of a second each, of which it has 0.2 for itself."""
    monkeypatch.setattr(performance, "peak_memory", lambda _: [0])
    monkeypatch.setattr(performance, "now", lambda _: Mock())
    told: list[str] = []
    run = Mock(device=torch.device("cuda"), tell=told.append)

    def slowest(
        others: list[float], own: float = 0.2, steps: int = 10, spike: float = 0.0, named: Any = None
    ) -> float | None:
        def gathered(given: list[Any]) -> list[Any]:
            each = given * (len(others) + 1)
            return each if isinstance(given[0], str) else [given[0], *((0.1, 0.9, 0.0, other) for other in others)]

        monkeypatch.setattr(performance, "gather_object", gathered)
        interval = [([0.0, own / 2, 0.3, 0.3 + own / 2 + spike * (step == 0), 1.0], 0.0) for step in range(steps)]
        metrics = interval_metrics(run, interval, None, [] if named is None else named)
        assert not interval
        assert metrics["perf/own_seconds_max"] == pytest.approx(max(own, *others))
        return metrics.get("perf/slowest_rank")

    assert slowest([0.2, 0.23, 0.2]) == 2  # by 11% of the mean
    assert slowest([0.2, 0.226, 0.2]) is None
    assert slowest([0.05], own=0.07) is None  # by 17%, which is 1% of a step
    assert slowest([0.2, 0.23, 0.2], steps=9) is None
    assert slowest([0.2, 0.2], spike=0.4) is None  # one step is not the rule
    assert slowest([0.17]) is None  # this one, but by less than a tenth of the mean
    assert slowest([0.15]) == 0
    told.clear()
    named: list[int] = []
    for others, lines in (([0.3], 1), ([0.3], 1), ([0.1], 2), ([0.3], 2)):
        slowest(others, named=named)
        assert len(told) == lines
    says = r"WARNING: process 1 on \S+ takes 0.300 s a step for its data and forward passes, 20% longer than the mean "
    assert re.match(says, told[0])


@pytest.mark.parametrize("yaml", ["ddp", "fsdp"])
@pytest.mark.parametrize("where", ["torch.nn.Linear.forward", "src.tasks.mnist.Mnist.collate"])
def test_a_process_that_is_slow_by_itself_is_the_slowest(launch: Launch, yaml: str, where: str) -> None:
    """In its forward passes, or in loading. It takes 0.2 s longer than its own and the other's work, at least."""
    module, owner, name = where.rsplit(".", 2)
    sleep = (
        f"import os, time, {module}\nowner = {module}.{owner}\noriginal = owner.{name}\n"
        f"if os.environ['RANK'] == '1':\n    owner.{name} = lambda *a: (time.sleep(0.2), original(*a))[1]\n"
    )
    run = launch(yaml, "--max_steps=10", "--log_every=10", "--eval_every=10", before=sleep).succeeded()
    record = run.records[0]
    assert record["perf/slowest_rank"] == 1
    assert 0.2 < record["perf/own_seconds_max"] < record["perf/step_seconds"] * 1.5


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
