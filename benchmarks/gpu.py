"""Prove train.py on the NVIDIA GPU of this machine: it computes right, waits for nothing, remembers right, and is fast.

    python -m benchmarks.gpu [--minutes=9] [--data_dir=DIR] [--output=gpu_proof.json]

It needs no internet, and writes each result as soon as it is known: a proof that is cut short is still
worth something. The most important comes first, what no longer fits into the minutes is left out. The Llama of the last
rows has 1.1 billion parameters in TinyLlama's shape, or fewer where the GPU has less than 75 GiB. MNIST is read from
DIR/MNIST/raw; without it, random images take its place, and accuracy is not asked for.

    python -m benchmarks.gpu --smoke

tries each line with tiny models, also on an emulated GPU (tests/plan/gpu/build.py): its speeds mean nothing.
"""

import argparse
import datetime
import importlib.metadata
import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.gpu_forked import HIDDEN, Act, Forked, fork, peaks
from benchmarks.gpu_right import NEEDS, OPTIONAL, RIGHT, SETTINGS, Bench, Finding, Measure
from benchmarks.language import Plan, write_text
from benchmarks.pairs import drift
from benchmarks.runs import NEVER, PROJECT, Side, arguments, running, train_py, write_images
from plan import null_gpu
from src.config.errors import cause
from src.tracking.performance import peak_flops
from tests.launching import warm

INTERVAL, INTERVALS = 5, 4
"""Steps between two logged speeds of the Llama, and the number of these intervals; the first one is warm-up."""
SHAPE = {"hidden_size": 2048, "intermediate_size": 5632, "num_attention_heads": 32, "num_key_value_heads": 4,
         "vocab_size": 32_000}  # fmt: skip
SIZES = {75: (22, 4), 44: (22, 2), 32: (22, 1), 0: (4, 1)}
"""Layers of the Llama and sequences of 4,096 tokens at once, by the least GiB of memory: 18 bytes for each parameter,
and 110 kB for a token in each layer."""
TINY = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 8,
        "num_key_value_heads": 4}  # fmt: skip
SMOKE = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
         "num_key_value_heads": 2}  # fmt: skip


class LargeBench(Bench):
    """Also what the rows about memory and speed share."""

    data_dir: Path
    is_smoke: bool
    gpu: dict[str, Any]
    """Its name, memory and so on, as CUDA reports them."""

    def __init__(self, folder: Path, deadline: float, data_dir: Path, gpu: dict[str, Any], is_smoke: bool) -> None:
        digits: dict[str, Any] = {**SETTINGS, "task.dropout": 0, "task.source": "digits"}
        if is_smoke:
            digits |= {"task.source": "mnist", "task.data_dir": images(folder, 200), "global_batch_size": 8}
        super().__init__(folder, deadline, digits, small_text(folder, is_smoke))
        self.data_dir, self.gpu, self.is_smoke = data_dir, gpu, is_smoke
        self.cnn_precision = "no" if is_smoke else None

    def large(self) -> Plan:
        """Return what the Llama of the last rows, and Trainer's, trains."""
        if self.is_smoke:
            return Plan(SMOKE, length=64, batch=8, micro=4, interval=INTERVAL, lr=1e-4, is_cuda=True)
        layers, micro = next(sizes for least, sizes in SIZES.items() if self.gpu["gib"] >= least)
        shape = {**SHAPE, "num_hidden_layers": layers}
        return Plan(shape, length=4096, batch=8, micro=micro, interval=INTERVAL, lr=1e-4, is_cuda=True)

    def large_settings(self) -> dict[str, Any]:
        plan, folder = self.large(), self.folder / "sequences"
        if not folder.exists():  # a step more, in which the run is ended
            write_text(folder, (INTERVAL * INTERVALS + 1) * plan.batch, plan.length)
        return {**plan.settings(folder / "data"), "save_every": NEVER, "micro_batch_size": plan.micro}


def images(folder: Path, count: int) -> Path:
    """Return a folder with random images instead of MNIST's: `count` for training, 100 for testing."""
    made = folder / f"images_{count}"
    if not made.exists():
        write_images(made, count)
    return made


def small_text(folder: Path, is_smoke: bool) -> dict[str, Any]:
    """Return the settings of a small Llama on documents of many lengths."""
    length, count = (64, 200) if is_smoke else (512, 1000)
    file, draw = folder / "documents.jsonl", random.Random(0)
    texts = ["".join(draw.choices("etaoin shrdlu", k=draw.randint(1, length))) for _ in range(count)]
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    model = {"task.name": "causal_lm", "task.dataset": file, "task.sequence_length": length}
    shape = json.dumps({"model_type": "llama", **(SMOKE if is_smoke else TINY)})
    return {**SETTINGS, **model, "task.architecture": shape, "global_batch_size": 8}


def count_kernels(run: Any, micro_batches: Any, take: Callable[[], Any], found: dict[str, Any]) -> Any:
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        result = take()
        torch.cuda.synchronize()
    events = profiler.events() or []
    on_gpu = [event.name for event in events if event.device_type == torch.autograd.DeviceType.CUDA]
    found["kernels"] = sum(not name.startswith(("Mem", "nccl")) for name in on_gpu)
    found["collectives"] = sum(event.name.startswith("c10d::") for event in events)
    return result


def end_here(run: Any, micro_batches: Any, take: Callable[[], Any], found: dict[str, Any]) -> Any:
    """End the process, without a checkpoint of 13 GB."""
    Path(f"{run.config.folder}.found").write_text(json.dumps(found | peaks()))
    sys.stdout.flush()
    os.kill(os.getpid(), signal.SIGKILL)


def train_large(bench: LargeBench, name: str, **settings: Any) -> tuple[Forked, list[float]]:
    """Return a run of the Llama, and its tokens per second in each interval but the first."""
    acts: dict[int, Act] = {INTERVAL - 1: count_kernels, INTERVAL * INTERVALS: end_here}
    run = bench.train(name, "single_gpu", bench.large_settings() | settings, acts=acts)
    found = json.loads(Path(f"{run.folder}.found").read_text())
    run.found.update(found)
    return run, [record["perf/tokens_per_second"] for record in run.records[1:INTERVALS]]


def speed(bench: LargeBench, what: str, speeds: list[float], peak: float, parameters: int) -> Iterator[Finding]:
    """Yield tokens per second, the share of the GPU's peak, and memory.

    MFU = tokens/s x (6 N + 12 L H Q T) / the GPU's dense bf16 peak, as PaLM and nanochat have it: N parameters without
    the input embedding, L layers, H heads of size Q, T tokens per sequence; attention in full, nothing counted twice.
    """
    plan, tokens = bench.large(), statistics.median(speeds)
    shape = {"vocab_size": 258, **plan.shape}
    width, layers = shape["hidden_size"], shape["num_hidden_layers"]  # H x Q is the width
    per_token = 6 * (parameters - shape["vocab_size"] * width) + 12 * layers * width * plan.length
    at_best = peak_flops(bench.gpu["name"], "bf16")
    spread = f"{min(speeds):,.0f} to {max(speeds):,.0f}"
    yield Finding(f"{what}: speed", tokens, "tokens/s", note=spread)
    if at_best:
        yield Finding(f"{what}: MFU", tokens * per_token / at_best, "of the peak")
    yield Finding(f"{what}: peak memory", peak / 1e9, "GB")


def llama_eager(bench: LargeBench) -> Iterator[Finding]:
    run, speeds = train_large(bench, "large")
    yield from speed(bench, "large Llama, eager", speeds, run.found["allocated"], parameters_of(run))
    yield Finding("large Llama, eager: kernels in a step", run.found["kernels"])
    yield Finding("large Llama, eager: collectives in a step", run.found["collectives"], at_most=0)


def parameters_of(run: Forked) -> int:
    """Return what train.py's start-up summary says."""
    (line,) = (line for line in run.folder.with_suffix(".log").read_text().splitlines() if line.startswith("  model "))
    return int(line.split()[1].replace(",", ""))


def beside_the_plan(bench: LargeBench) -> Iterator[Finding]:
    """Compare the run with what the plan finds out about it on a null GPU."""
    if reason := null_gpu.reason_to_skip():
        raise ModuleNotFoundError(reason)
    found = bench.ended("large").found
    settings = bench.large_settings() | {"output_dir": bench.folder / "planned"}
    words = [sys.executable, "-m", "plan", "--gpus=1", f"--output={bench.folder}/plan"]
    words += ["--yamls", "single_gpu", "--", *arguments(settings)]
    here = {name: value for name, value in os.environ.items() if not name.startswith(("NULL_GPU", "LD_PRELOAD"))}
    left = max(1.0, bench.deadline - time.monotonic())
    how: Any = {"capture_output": True, "text": True, "env": here, "cwd": PROJECT, "timeout": left}
    done = subprocess.run(words, **how)
    if done.returncode:
        raise RuntimeError(f"python -m plan: {done.stderr.strip()}")
    (file,) = (bench.folder / "plan").glob("*/plan.json")
    (planned,) = json.loads(file.read_text())
    phases = [planned["measured"]["memory"][phase] for phase in ("load", "step")]
    for i, kind in enumerate(("allocated", "reserved")):
        expected = max(phase[i] for phase in phases)
        note = f"{found[kind] / 1e9:.2f} GB, planned {expected / 1e9:.2f}"
        yield Finding(
            f"large Llama: {kind} against the plan", found[kind] / expected, at_least=0.95, at_most=1.05, note=note
        )
    kernels = planned["measured"]["work"]["kernels"]
    yield Finding(
        "large Llama: kernels in a step against the null GPU's", found["kernels"] / kernels, note=f"{kernels:.0f} there"
    )


def llama_compiled(bench: LargeBench) -> Iterator[Finding]:
    run, speeds = train_large(bench, "large_compiled", compile=True)
    yield from speed(bench, "large Llama, compiled", speeds, run.found["allocated"], parameters_of(run))


def run_side(bench: LargeBench, side: Side) -> None:
    """Start it and wait for its end, or for that of the minutes.

    Raises:
        TimeoutError: these are over.
    """
    with running(side):
        side.start()
        side.wait(lambda: is_over(side) or time.monotonic() > bench.deadline)
        if not is_over(side):
            raise TimeoutError("no time left")


def is_over(side: Side) -> bool:
    return side.process is not None and side.process.poll() == 0


def llama_by_trainer(bench: LargeBench) -> Iterator[Finding]:
    plan, folder, first = bench.large(), bench.folder / "sequences", bench.ended("large")
    side = Side(plan.peer("trainer", folder), folder / "trainer", None)
    run_side(bench, side)
    off = drift(side.values[:INTERVALS], [record["train/loss"] for record in first.records[:INTERVALS]])
    yield Finding("large Llama by transformers' Trainer: losses against ours", off, at_most=0.02)
    seconds = np.diff([record["time"] for record in side.records[:INTERVALS]])
    speeds = (INTERVAL * plan.batch * plan.length / seconds).tolist()
    yield from speed(
        bench, "large Llama by transformers' Trainer", speeds, side.records[-1]["peak"], parameters_of(first)
    )


def mnist_fast(bench: LargeBench) -> Iterator[Finding]:
    """By the real launcher, as a user starts it. The clock is `seconds` in summary.json: from the first step to the
    end, with warm-up, evaluations, the last checkpoint and the export, without start-up."""
    is_real = (bench.data_dir / "MNIST" / "raw" / "train-images-idx3-ubyte").exists()
    data = bench.data_dir if is_real else images(bench.folder, 2000 if bench.is_smoke else 60_000)
    settings = {"config": PROJECT / "configs" / "mnist_reference.yaml", "task.data_dir": data, "save_every": NEVER}
    batch = 8 if bench.is_smoke else 64  # the recipe's
    settings |= {"global_batch_size": batch, "log_every": 134}  # a seventh of an epoch
    if bench.is_smoke:
        settings |= {"max_steps": 12, "log_every": 4}
    command = train_py(settings | {"cuda_graphs": True}, "single_gpu", precision=bench.cnn_precision or "")
    side = Side(command, bench.folder / "mnist14", None)
    run_side(bench, side)
    yield Finding("MNIST, 14 epochs with cuda_graphs", side.summary["seconds"], "s", at_most=10)
    if is_real:
        yield Finding("MNIST: accuracy", 100 * side.summary["eval/accuracy"], "%", at_least=99.1)
    eager = bench.train("mnist_eager", "single_gpu", {"max_steps": 938} | settings, bench.cnn_precision)
    for what, records in (("recorded", side.records), ("eager", eager.records)):
        each = [1e3 * batch / record["perf/samples_per_second"] for record in records[1:]]
        yield Finding(f"MNIST: a step, {what}", statistics.median(each), "ms")


# ------------------------------------------------------------------------------------------------------- the proof
MEASURED: list[tuple[str, int, Measure]] = [
    ("the large Llama, eager: 20 steps of 0.9 s, and its start", 45, llama_eager),
    ("the same run by the plan", 30, beside_the_plan),
    ("MNIST: 14 epochs", 40, mnist_fast),
    ("the large Llama, compiled: 60 s to compile, and 20 steps of 0.7 s", 100, llama_compiled),
    ("the large Llama by transformers' Trainer", 60, llama_by_trainer),
]
ROWS = [*RIGHT, *MEASURED, *OPTIONAL]


def describe() -> dict[str, Any]:
    """Return what CUDA says of the GPU; in a process of its own."""
    properties = torch.cuda.get_device_properties(0)
    gib = properties.total_memory / 2**30
    return {"name": properties.name, "gib": round(gib, 2), "capability": [properties.major, properties.minor]}


def machine() -> dict[str, Any]:
    """Return everything but the GPU that the figures depend on."""
    asked = ("torch", "transformers", "accelerate", "peft", "triton", "bitsandbytes", "torchao")
    driver = output_of("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="minutes"),
        "driver": driver,
        "cuda": torch.version.cuda,
        "python": sys.version.split()[0],
        "versions": {name: importlib.metadata.version(name) for name in asked if find_spec(name) or name in HIDDEN},
        "cores": len(os.sched_getaffinity(0)),
        "commit": output_of("git", "-C", str(PROJECT), "describe", "--always", "--dirty"),
        "command": "python -m benchmarks.gpu " + " ".join(sys.argv[1:]),
    }


def output_of(*command: str) -> str:
    """Return the first line that a command prints; empty if it is not there, or fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except OSError:
        return ""
    return done.stdout.partition("\n")[0]


def prove(bench: LargeBench, proof: dict[str, Any], output: Path) -> None:
    """Run each row for which there is time; write and print each result as soon as it is known."""
    for title, estimate, measure in ROWS:
        started = time.monotonic()
        for found, shown in answers(bench, title, estimate, measure):
            seconds = round(time.monotonic() - started, 1)
            proof["rows"].append({"row": title, **found, "seconds": seconds})
            output.write_text(json.dumps(proof, indent=1) + "\n")
            print(f"{shown} [{seconds:.0f} s]", flush=True)


def answers(bench: LargeBench, title: str, estimate: int, measure: Measure) -> Iterator[tuple[dict[str, Any], str]]:
    """Yield what a row finds out, or why it doesn't: for the file, and for the terminal. `is_right` is None where it
    was left out."""
    left = bench.deadline - time.monotonic()
    try:
        if (needed := NEEDS.get(measure)) and needed not in HIDDEN:
            raise ModuleNotFoundError(f"{needed} is not installed")
        if left < estimate:
            raise TimeoutError(f"left out: {left:.0f} s are left, and it takes {estimate}")
        for finding in measure(bench):
            yield asdict(finding) | {"is_right": finding.is_right}, line(finding)
    except Exception as error:  # the other rows are still worth something
        is_left_out = isinstance(error, TimeoutError | subprocess.TimeoutExpired | ModuleNotFoundError)
        says = cause(error)
        yield (
            {"says": says[-2000:], "is_right": None if is_left_out else False},
            (f"{'--' if is_left_out else 'NO':3} {title}: {says[-600:]}"),
        )


def line(finding: Finding) -> str:
    """Return a finding as a line for the terminal."""
    value = f"{finding.value:,.0f}" if abs(finding.value) >= 1000 else f"{finding.value:.3g}"
    asked = "".join(
        f", asked {sign} {bound:.3g}"
        for sign, bound in ((">=", finding.at_least), ("<=", finding.at_most))
        if bound is not None
    )
    note = f" ({finding.note})" if finding.note else ""
    is_right = "ok" if finding.is_right else "NO"
    return f"{is_right:3} {finding.what}: {f'{value} {finding.unit}'.strip()}{asked}{note}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=9, help="which it takes at most")
    parser.add_argument("--data_dir", type=Path, default="data", help="folder with MNIST/raw")
    parser.add_argument("--output", type=Path, default="gpu_proof.json", help="file to write the results to")
    parser.add_argument("--smoke", action="store_true", help="tiny models, to try each line")
    chosen = parser.parse_args()
    deadline = time.monotonic() + 60 * chosen.minutes
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # else some libraries touch the GPU when they are imported
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    folder = Path(tempfile.mkdtemp())  # a TemporaryDirectory would also be deleted by processes that are forked
    try:
        try:
            gpu = fork(describe, folder / "gpu.log", deadline)
        except RuntimeError as error:
            sys.exit(f"benchmarks.gpu: no NVIDIA GPU that this torch {torch.__version__} can use: {error}")
        warm()
        bench = LargeBench(folder, deadline, chosen.data_dir.absolute(), gpu, chosen.smoke)
        proof = {"gpu": gpu, **machine(), "is_smoke": chosen.smoke, "rows": []}
        for name, value in proof.items():
            if name != "rows":
                print(f"{name:10} {value}")
        total = sum(estimate for _, estimate, _ in ROWS)
        print(f"\nplan: {total} s on an H100, of {60 * chosen.minutes:.0f}")
        for title, estimate, _ in ROWS:
            print(f"{estimate:7} s  {title}")
        print(flush=True)
        prove(bench, proof, chosen.output)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    wrong = [row for row in proof["rows"] if row["is_right"] is False]
    print(f"\n{chosen.output}: {len(proof['rows'])} rows, {len(wrong)} of them not as asked")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
