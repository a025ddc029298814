"""Prove train.py on the NVIDIA GPU of this machine: it computes right, waits for nothing, remembers right, and is fast.

    python -m benchmarks.gpu [--minutes=9] [--data_dir=DIR] [--output=gpu_proof.json]
    python -m benchmarks.gpu llama      # a part of the rows: right, mnist or llama
    python -m benchmarks.gpu --smoke    # tiny models, to try each line; also for an emulated GPU (tests/plan/gpu)

It needs no internet, and writes each result as soon as it is known: a proof that is cut short is still worth something.
The most important comes first, what no longer fits into the minutes is left out. The Llama of the last rows has 1.1
billion parameters in TinyLlama's shape, or fewer where the GPU has less than 75 GiB. MNIST is read from DIR/MNIST/raw;
without it, random images take its place, and accuracy is not asked for.
"""

import argparse
import datetime
import importlib.metadata
import json
import multiprocessing
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property, partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile
from transformers.utils import is_bitsandbytes_available, is_torchao_available

import train
from benchmarks.hidden import HIDDEN
from benchmarks.language import Plan, write_text
from benchmarks.pairs import drift
from benchmarks.runs import NEVER, PROJECT, Output, Side, arguments, launch, running, train_py, write_images
from plan import null_gpu
from src import parts
from src.config.errors import cause
from src.tracking.performance import peak_flops
from src.tracking.report import Report
from src.training.run import new_model
from tests.launching import rank_environments, warm

STEPS, SAVED = 12, 6
"""Steps of the runs that are compared, and the one after which those that are killed have saved."""
CURVE, BF16 = 1e-5, 2**-8
"""How far apart two curves are at most, as the project promises; the distance of neighbouring numbers in bf16."""
SETTINGS = {"optim.lr": 1e-4, "log_every": 1, "max_steps": STEPS, "save_every": NEVER, "eval_every": NEVER}
"""What all of these runs have in common."""
INTERVAL, INTERVALS = 5, 4
"""Steps between two logged speeds of the Llama, and the number of these intervals; the first one is warm-up."""
SHAPE = {"hidden_size": 2048, "intermediate_size": 5632, "num_attention_heads": 32, "num_key_value_heads": 4,
         "vocab_size": 32_000}  # fmt: skip
SIZES = {75: (22, 4), 44: (22, 2), 32: (22, 1), 0: (4, 1)}
"""Layers of the Llama and sequences of 4,096 tokens at once, by the least GiB of memory: 18 bytes for each parameter,
and 110 kB for a token in each layer."""
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
TINY = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, **HEADS}
SMOKE = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, **HEADS}


# ------------------------------------------------------------------------------------- runs that are forked from here
def exact() -> None:
    """Compute convolutions in fp32 proper: TF32 has 10 bits."""
    torch.backends.cudnn.conv.fp32_precision = "ieee"  # type: ignore[attr-defined]


def be_deterministic() -> None:
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    torch.use_deterministic_algorithms(True)


def compare_with_masks(run: Any, micro_batches: Any, take: Any, found: dict[str, Any]) -> Any:
    (batch,) = micro_batches
    masks = run.task.model_copy(update={"attention": "sdpa"})
    plain: Any = new_model(run.config.model_copy(update={"task": masks}))[0].to(run.device)
    plain.load_state_dict(run.accelerator.unwrap_model(run.model).state_dict())
    inputs = dict(batch.data["inputs"])
    targets = inputs.pop("targets")

    def gradients(is_half: bool) -> torch.Tensor:
        with torch.autocast("cuda", torch.bfloat16, enabled=is_half):
            logits = plain(**inputs)
        loss = F.cross_entropy(logits.float(), targets, reduction="sum")
        return torch.cat([part.flatten() for part in torch.autograd.grad(loss, [*plain.parameters()])])

    loss = run.task.loss(run.model, batch.data)
    ours = torch.cat([part.flatten() for part in torch.autograd.grad(loss, run.parameters)])
    expected = gradients(is_half=False)
    for name, part in (("ours", ours), ("plain", gradients(is_half=True))):
        found[name] = ((part - expected).norm() / expected.norm()).item()
    return take()


def die_once_it_has_saved(run: Any, micro_batches: Any, take: Any, found: dict[str, Any]) -> Any:
    checkpoint = run.config.folder / "checkpoints" / f"step_{SAVED:08d}"
    while not checkpoint.exists():
        time.sleep(0.01)
    take()  # the GPU is busy
    os.kill(os.getpid(), signal.SIGKILL)


def refuse_waits(run: Any, micro_batches: Any, take: Any, found: dict[str, Any]) -> Any:
    torch.cuda.set_sync_debug_mode("error")
    try:
        return take()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def count_kernels(run: Any, micro_batches: Any, take: Any, found: dict[str, Any]) -> Any:
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        result = take()
        torch.cuda.synchronize()
    on_gpu = [event.name for event in profiler.events() or [] if event.device_type == torch.autograd.DeviceType.CUDA]
    found["kernels"] = sum(not name.startswith(("Mem", "nccl")) for name in on_gpu)
    return result


def end_here(run: Any, micro_batches: Any, take: Any, found: dict[str, Any]) -> Any:
    """End the process, without a checkpoint of 13 GB."""
    Path(f"{run.config.folder}.found").write_text(json.dumps(found | peaks()))
    sys.stdout.flush()
    os.kill(os.getpid(), signal.SIGKILL)


@dataclass(frozen=True)
class Recipe:
    """How a run of train.py is started.

    Args:
        settings: names those of the bench, to which `more` are added.
        precision: the mixed precision in place of the yaml's.
        acts: what is done in place of a step, by the number of steps that were taken before: it is given the run, the
            step's micro-batches, what takes the step, and a dictionary for what it finds out.
        begin: called first in the new process.
    """

    yaml: str
    settings: str
    more: Mapping[str, Any] = field(default_factory=dict)
    precision: str = ""
    acts: Mapping[int, Callable[..., Any]] = field(default_factory=dict)
    begin: Callable[[], object] = lambda: None


SAVING = {"save_every": SAVED}
LARGE = Recipe("single_gpu", "large", acts={INTERVAL - 1: count_kernels, INTERVAL * INTERVALS: end_here})
RECIPES = {
    "mnist_cpu": Recipe("cpu", "digits"),
    "mnist_fp32": Recipe("single_gpu", "digits", precision="no", begin=exact),
    "mnist_half": Recipe("single_gpu", "digits", precision="half"),
    "mnist_graphs": Recipe("single_gpu", "digits", {"cuda_graphs": True}, precision="half"),
    "mnist_kept": Recipe("single_gpu", "digits", {**SAVING, "task.dropout": 1.0}, precision="half"),
    "mnist_waits": Recipe("single_gpu", "digits", precision="half", acts={SAVED: refuse_waits}),
    "llama_cpu": Recipe("cpu", "text"),
    "llama_fp32": Recipe("single_gpu", "text", precision="no"),
    "llama_bf16": Recipe("single_gpu", "text"),
    "llama_fsdp": Recipe("fsdp", "text", precision="no"),
    "llama_offload": Recipe("fsdp_offload", "text", precision="no"),
    "llama_masks": Recipe("single_gpu", "text", acts={1: compare_with_masks}),
    "llama_kept": Recipe("single_gpu", "text", SAVING, begin=be_deterministic),
    "llama_waits": Recipe("single_gpu", "text", acts={SAVED: refuse_waits}),
    "llama_check": Recipe("single_gpu", "text", {"check": True}),
    "llama_fsdp_bf16": Recipe("fsdp", "text"),
    "llama_fp8": Recipe("fsdp_fp8", "text"),
    "adapters": Recipe("single_gpu", "adapters"),
    "adapters_nf4": Recipe("single_gpu", "adapters", {"task.lora.base_dtype": "nf4"}),
    "large": LARGE,
    "large_compiled": replace(LARGE, more={"compile": True}),
}


@dataclass(frozen=True)
class Forked(Output):
    """What a run has left behind that was forked from here."""

    found: dict[str, Any]
    """What its acts have found out, and the most bytes that were `allocated` and `reserved`; empty: it was killed."""

    @property
    def parameters(self) -> int:
        """What train.py's start-up summary says."""
        lines = self.folder.with_suffix(".log").read_text().splitlines()
        (line,) = (line for line in lines if line.startswith("  model "))
        return int(line.split()[1].replace(",", ""))


def run_forked(folder: Path, recipe: Recipe, settings: dict[str, Any], deadline: float) -> Forked:
    """Train into this folder, as one process; resume a run that is there. Raises what `fork` does."""

    def work() -> dict[str, Any]:
        words = launch(recipe.yaml, precision=recipe.precision)
        _, _, (environment,) = rank_environments([*words[words.index("accelerate.commands.launch") + 1 :], "train.py"])
        os.environ |= environment
        found: dict[str, Any] = {}
        take_step = train.train_step

        def take_or_act(run: Any, micro_batches: Any, counts: Any) -> Any:
            take = partial(take_step, run, micro_batches, counts)
            act = recipe.acts.get(run.progress.step)
            return act(run, micro_batches, take, found) if act else take()

        train.train_step = take_or_act
        parts.PARTS.remove(Report)  # the figures of a report would take most of so short a run
        sys.argv = ["train.py", *arguments({**settings, "output_dir": folder})]
        recipe.begin()
        train.main()
        return found | peaks()

    found, by_act = fork(work, folder.with_suffix(".log"), deadline), Path(f"{folder}.found")
    return Forked(folder, found or (json.loads(by_act.read_text()) if by_act.exists() else {}))


def peaks() -> dict[str, int]:
    """Return the most bytes that torch's allocator has given out and reserved."""
    found = {"allocated": torch.cuda.max_memory_allocated(), "reserved": torch.cuda.max_memory_reserved()}
    return found if torch.cuda.is_initialized() else {}


def fork(work: Callable[[], Any], log: Path, deadline: float) -> Any:
    """Return what `work` returns in a process of its own, as JSON; None if it was killed. Its output goes to `log`.

    Raises a RuntimeError with its last line if it failed, a TimeoutError if it took until the deadline.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    answer = log.with_suffix(".answer")
    answer.unlink(missing_ok=True)
    child = multiprocessing.get_context("fork").Process(target=write_answer, args=(work, log, answer))
    child.start()
    try:
        child.join(max(0, deadline - time.monotonic()))
        if child.is_alive():
            raise TimeoutError("no time left")
    finally:
        child.kill()  # if it has not ended
        child.join()
    if child.exitcode == -signal.SIGKILL:
        return None
    if child.exitcode:
        lines = [line.strip() for line in log.read_text(errors="replace").splitlines()]
        raise RuntimeError(f"exit code {child.exitcode}: {next(filter(None, reversed(lines)), 'it has said nothing')}")
    return json.loads(answer.read_text())


def write_answer(work: Callable[[], Any], log: Path, answer: Path) -> None:
    for name in HIDDEN:
        del sys.modules[name]
    is_bitsandbytes_available.cache_clear()
    is_torchao_available.cache_clear()
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(output, sys.stdout.fileno())
    os.dup2(output, sys.stderr.fileno())
    answer.write_text(json.dumps(work()))


# -------------------------------------------------------------------------------------------- what rows have in common
@dataclass(frozen=True)
class Finding:
    """A measured value, and its bounds."""

    what: str
    value: float
    unit: str = ""
    at_most: float | None = None
    at_least: float | None = None
    note: str = ""

    @property
    def is_right(self) -> bool:
        """Return whether the value is within its bounds, if it has any."""
        is_enough = self.at_least is None or self.value >= self.at_least
        return is_enough and (self.at_most is None or self.value <= self.at_most)

    def __str__(self) -> str:
        """Return a line for the terminal."""
        value = f"{self.value:,.0f}" if self.value >= 1000 else f"{self.value:.3g}"
        bounds = ((">=", self.at_least), ("<=", self.at_most))
        asked = "".join(f", asked {sign} {bound:.3g}" for sign, bound in bounds if bound is not None)
        note = f" ({self.note})" if self.note else ""
        return f"{'ok' if self.is_right else 'NO':3} {self.what}: {f'{value} {self.unit}'.strip()}{asked}{note}"


@dataclass
class Bench:
    """What all rows share: the deadline in the seconds of time.monotonic, and what CUDA says of the GPU."""

    folder: Path
    deadline: float
    data_dir: Path
    gpu: dict[str, Any]
    is_smoke: bool
    runs: dict[str, Forked] = field(default_factory=dict)

    def run(self, name: str) -> Forked:
        """Return the run of this recipe, which is trained if it has not been."""
        if name not in self.runs:
            self.runs[name] = self.train(name, RECIPES[name])
        return self.runs[name]

    def train(self, name: str, recipe: Recipe) -> Forked:
        if recipe.precision == "half":  # an emulated GPU takes seconds for a CNN in half precision
            recipe = replace(recipe, precision="no" if self.is_smoke else "")
        return run_forked(self.folder / name, recipe, getattr(self, recipe.settings) | recipe.more, self.deadline)

    @cached_property
    def digits(self) -> dict[str, Any]:
        """Settings of MNIST's CNN on small images, without dropout."""
        source: dict[str, Any] = {"task.source": "digits"}
        if self.is_smoke:
            write_images(self.folder / "few_images", 200)
            source = {"task.data_dir": self.folder / "few_images", "global_batch_size": 8}
        return {**SETTINGS, "task.dropout": 0, **source}

    @cached_property
    def text(self) -> dict[str, Any]:
        """Settings of a small Llama on documents of many lengths, packed."""
        length, count = (64, 200) if self.is_smoke else (512, 1000)
        file, draw = self.folder / "documents.jsonl", random.Random(0)
        texts = ["".join(draw.choices("etaoin shrdlu", k=draw.randint(1, length))) for _ in range(count)]
        file.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
        shape = json.dumps({"model_type": "llama", **(SMOKE if self.is_smoke else TINY)})
        data = {"task.name": "causal_lm", "task.dataset": file, "task.sequence_length": length}
        return {**SETTINGS, **data, "task.architecture": shape, "global_batch_size": 8}

    @property
    def adapters(self) -> dict[str, Any]:
        """Settings of adapters over the small Llama, once it is trained."""
        files = {**self.text, "task.model": self.run("llama_fp32").folder / "model", "task.lora.r": 4}
        del files["task.architecture"]
        return files

    @property
    def has_mnist(self) -> bool:
        return (self.data_dir / "MNIST" / "raw" / "train-images-idx3-ubyte").exists()

    @cached_property
    def mnist(self) -> dict[str, Any]:
        """Settings of MNIST's recipe."""
        data = self.data_dir if self.has_mnist else self.folder / "images"
        if not self.has_mnist:
            write_images(data, 2000 if self.is_smoke else 60_000)
        settings = {"config": PROJECT / "configs" / "mnist_reference.yaml", "task.data_dir": data, "save_every": NEVER}
        smoke = {"global_batch_size": 8, "log_every": 4, "max_steps": 12}
        return settings | (smoke if self.is_smoke else {"global_batch_size": 64, "log_every": 134})

    @cached_property
    def plan(self) -> Plan:
        """What the large Llama, and Trainer's, trains."""
        if self.is_smoke:
            return Plan(SMOKE, length=64, batch=8, micro=4, interval=INTERVAL, lr=1e-4, is_cuda=True)
        layers, micro = next(sizes for least, sizes in SIZES.items() if self.gpu["gib"] >= least)
        shape = {**SHAPE, "num_hidden_layers": layers}
        return Plan(shape, length=4096, batch=8, micro=micro, interval=INTERVAL, lr=1e-4, is_cuda=True)

    @cached_property
    def large(self) -> dict[str, Any]:
        folder = self.folder / "sequences"
        write_text(folder, (INTERVAL * INTERVALS + 1) * self.plan.batch, self.plan.length)  # a step more: it ends there
        return {**self.plan.settings(folder / "data"), "save_every": NEVER, "micro_batch_size": self.plan.micro}


# ------------------------------------------------------------------------------------------------------ is it right?
def attention_and_loss(bench: Bench) -> Iterator[Finding]:
    """Of one batch, in bf16: what is off the gradients in fp32, beside what masks and plain cross-entropy are off."""
    found, what = bench.run("llama_masks").found, "varlen attention and chunked loss: error of the gradients in bf16"
    note = f"{found['plain']:.1e} with masks and plain cross-entropy"
    yield Finding(what, found["ours"], at_most=1.5 * found["plain"], note=note)


def killed(name: str, bench: Bench) -> Iterator[Finding]:
    recipe, whole = RECIPES[f"{name}_kept"], bench.run(f"{name}_kept")
    first = bench.train(f"{name}_killed", replace(recipe, acts={SAVED + 2: die_once_it_has_saved}))
    assert not first.found  # it was killed
    resumed = bench.train(f"{name}_killed", recipe)
    assert resumed.found  # it has come to its end
    same = sum(a == b for a, b in zip(resumed.losses, whole.losses, strict=True))
    yield Finding(f"{name}, killed and resumed: losses equal bit for bit", same, f"of {STEPS}", at_least=STEPS)


def check(bench: Bench) -> Iterator[Finding]:
    checks = json.loads((bench.run("llama_check").folder / "check.json").read_text())["checks"]
    failed = [row["what"] for row in checks if row["result"] == "FAIL"]
    yield Finding("train.py --check: findings that fail", len(failed), f"of {len(checks)}", at_most=0)


def waits(bench: Bench) -> Iterator[Finding]:
    for name in ("mnist", "llama"):
        bench.run(f"{name}_waits")
        yield Finding(f"{name}: waits in a step, as set_sync_debug_mode sees them", 0, at_most=0)


# --------------------------------------------------------------------------- is it fast, and does it remember right?
def speed(bench: Bench, what: str, speeds: list[float], peak: float, parameters: int) -> Iterator[Finding]:
    """Yield tokens per second, the share of the GPU's peak, and memory.

    MFU = tokens/s x (6 N + 12 L H Q T) / the GPU's dense bf16 peak, as PaLM and nanochat have it: N parameters without
    the input embedding, L layers, H heads of size Q, T tokens per sequence; attention in full, nothing counted twice.
    """
    plan, tokens = bench.plan, statistics.median(speeds)
    shape = {"vocab_size": 258, **plan.shape}
    width, layers = shape["hidden_size"], shape["num_hidden_layers"]  # H x Q is the width
    per_token = 6 * (parameters - shape["vocab_size"] * width) + 12 * layers * width * plan.length
    at_best = peak_flops(bench.gpu["name"], "bf16")
    spread = f"{min(speeds):,.0f} to {max(speeds):,.0f}"
    yield Finding(f"{what}: speed", tokens, "tokens/s", note=spread)
    if at_best:
        yield Finding(f"{what}: MFU", tokens * per_token / at_best, "of the peak")
    yield Finding(f"{what}: peak memory", peak / 1e9, "GB")


def llama(name: str, bench: Bench) -> Iterator[Finding]:
    run, what = bench.run(name), name.replace("_", ", ")
    speeds = [record["perf/tokens_per_second"] for record in run.records[1:INTERVALS]]
    yield from speed(bench, f"{what} Llama", speeds, run.found["allocated"], run.parameters)
    yield Finding(f"{what} Llama: kernels in a step", run.found["kernels"])


def beside_the_plan(bench: Bench) -> Iterator[Finding]:
    """Compare the run with what the plan finds out about it on a null GPU."""
    if reason := null_gpu.reason_to_skip():
        raise ModuleNotFoundError(reason)
    found = bench.run("large").found
    settings = bench.large | {"output_dir": bench.folder / "planned"}
    words = ["--gpus=1", f"--output={bench.folder}/plan", "--yamls", "single_gpu", "--", *arguments(settings)]
    here = {name: value for name, value in os.environ.items() if not name.startswith(("NULL_GPU", "LD_PRELOAD"))}
    left = max(1.0, bench.deadline - time.monotonic())
    how: Any = {"capture_output": True, "text": True, "env": here, "cwd": PROJECT, "timeout": left}
    done = subprocess.run([sys.executable, "-m", "plan", *words], **how)
    if done.returncode:
        raise RuntimeError(f"python -m plan: {done.stderr.strip()}")
    (file,) = (bench.folder / "plan").glob("*/plan.json")
    (planned,) = json.loads(file.read_text())
    phases = [planned["measured"]["memory"][phase] for phase in ("load", "step")]
    for i, kind in enumerate(("allocated", "reserved")):
        expected = max(phase[i] for phase in phases)
        note = f"{found[kind] / 1e9:.2f} GB, planned {expected / 1e9:.2f}"
        what = f"large Llama: {kind} against the plan"
        yield Finding(what, found[kind] / expected, at_least=0.95, at_most=1.05, note=note)
    kernels = planned["measured"]["work"]["kernels"]
    what = "large Llama: kernels in a step against the null GPU's"
    yield Finding(what, found["kernels"] / kernels, note=f"{kernels:.0f} there")


def run_side(bench: Bench, side: Side) -> None:
    """Start it and wait for its end; raise a TimeoutError when the minutes are over."""
    with running(side):
        side.start()
        side.wait(lambda: side.process.poll() == 0 or time.monotonic() > bench.deadline)
        if side.process.poll() != 0:
            raise TimeoutError("no time left")


def llama_by_trainer(bench: Bench) -> Iterator[Finding]:
    plan, first, what = bench.plan, bench.run("large"), "large Llama by transformers' Trainer"
    side = Side(plan.peer("trainer", bench.folder / "sequences"), bench.folder / "sequences" / "trainer", None)
    run_side(bench, side)
    records = side.output.records
    off = drift(side.values[:INTERVALS], first.losses[:INTERVALS])
    yield Finding(f"{what}: losses against ours", off, at_most=0.02)
    seconds = np.diff([record["time"] for record in records[:INTERVALS]])
    speeds = (INTERVAL * plan.batch * plan.length / seconds).tolist()
    yield from speed(bench, what, speeds, records[-1]["peak"], first.parameters)


def mnist_fast(bench: Bench) -> Iterator[Finding]:
    """By the real launcher, as a user starts it. The clock is `seconds` in summary.json: from the first step to the
    end, with warm-up, evaluations, the last checkpoint and the export, without start-up."""
    command = train_py(bench.mnist | {"cuda_graphs": True}, "single_gpu", precision="no" if bench.is_smoke else "")
    side = Side(command, bench.folder / "mnist14", None)
    run_side(bench, side)
    summary = side.output.summary
    yield Finding("MNIST, 14 epochs with cuda_graphs", summary["seconds"], "s", at_most=10)
    if bench.has_mnist:
        yield Finding("MNIST: accuracy", 100 * summary["eval/accuracy"], "%", at_least=99.1)
    speeds = [record["perf/samples_per_second"] for record in side.output.records[1:]]
    yield Finding("MNIST: a step", 1e3 * bench.mnist["global_batch_size"] / statistics.median(speeds), "ms")


# ----------------------------------------------------------------------------------------------------------- the proof
class Row(NamedTuple):
    """What is asked, and what answers it. The seconds are estimated for an H100, where a run starts within 3 to 6."""

    part: str
    title: str
    seconds: int
    measure: Callable[[Bench], Iterator[Finding]]
    needs: str = ""


def curve(what: str, seconds: int, name: str, base: str, at_most: float = CURVE, needs: str = "") -> Row:
    """Return a row that compares the losses of two runs."""

    def measure(bench: Bench) -> Iterator[Finding]:
        expected, run = bench.run(base), bench.run(name)
        note = ", ".join([run.summary["precision"], *run.summary["optimizations"]])
        yield Finding(what, drift(run.losses, expected.losses), at_most=at_most, note=note)

    return Row("right", what, seconds, measure, needs)


ROWS = [
    curve("MNIST's CNN in fp32 against the CPU", 10, "mnist_fp32", "mnist_cpu"),
    curve("a Llama in fp32 against the CPU", 14, "llama_fp32", "llama_cpu"),
    curve("a Llama in bf16 against fp32", 6, "llama_bf16", "llama_fp32", BF16),
    curve("a Llama in fp32 under fsdp.yaml against single_gpu.yaml", 7, "llama_fsdp", "llama_fp32"),
    curve("a Llama in fp32 under fsdp_offload.yaml against single_gpu.yaml", 7, "llama_offload", "llama_fp32"),
    Row("right", "varlen attention and chunked loss", 6, attention_and_loss),
    curve("MNIST's CNN, cuda_graphs against eager", 8, "mnist_graphs", "mnist_half"),
    Row("right", "killed and resumed: MNIST's CNN", 12, partial(killed, "mnist")),
    Row("right", "killed and resumed: a Llama, deterministic kernels", 15, partial(killed, "llama")),
    Row("right", "train.py --check", 15, check),
    Row("right", "no step waits for the GPU", 10, waits),
    Row("llama", "the large Llama, eager: 20 steps of 0.9 s, and its start", 45, partial(llama, "large")),
    Row("llama", "the same run by the plan", 30, beside_the_plan),
    Row("mnist", "MNIST: 14 epochs", 40, mnist_fast),
    Row("llama", "the large Llama, compiled: 60 s, and 20 steps of 0.7 s", 100, partial(llama, "large_compiled")),
    Row("llama", "the large Llama by transformers' Trainer", 60, llama_by_trainer),
    curve("weights in 4 bits against fp32", 12, "adapters_nf4", "adapters", 0.05, needs="bitsandbytes"),
    curve("a Llama in fp8 against bf16", 20, "llama_fp8", "llama_fsdp_bf16", 0.05, needs="torchao"),
]
"""The most important first."""


def describe() -> dict[str, Any]:
    """Return what CUDA says of the GPU; in a process of its own."""
    properties = torch.cuda.get_device_properties(0)
    gib = properties.total_memory / 2**30
    return {"name": properties.name, "gib": round(gib, 2), "capability": [properties.major, properties.minor]}


def machine() -> dict[str, Any]:
    """Return everything but the GPU that the figures depend on."""
    asked = ("torch", "transformers", "accelerate", "peft", "triton", "bitsandbytes", "torchao")
    versions = {name: importlib.metadata.version(name) for name in asked if find_spec(name) or name in HIDDEN}
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="minutes"),
        "driver": subprocess.getoutput("nvidia-smi --query-gpu=driver_version --format=csv,noheader 2>/dev/null"),
        "cuda": torch.version.cuda,
        "python": sys.version.split()[0],
        "versions": versions,
        "cores": len(os.sched_getaffinity(0)),
        "commit": subprocess.getoutput(f"git -C '{PROJECT}' describe --always --dirty 2>/dev/null"),
        "command": "python -m benchmarks.gpu " + " ".join(sys.argv[1:]),
    }


def answers(bench: Bench, row: Row) -> Iterator[tuple[dict[str, Any], str]]:
    """Yield what a row finds out, or why it doesn't: for the file, and for the terminal."""
    left = bench.deadline - time.monotonic()
    try:
        if row.needs and row.needs not in HIDDEN:
            raise ModuleNotFoundError(f"{row.needs} is not installed")
        if left < row.seconds:
            raise TimeoutError(f"left out: {left:.0f} s are left, and it takes {row.seconds}")
        for finding in row.measure(bench):
            yield asdict(finding) | {"is_right": finding.is_right}, str(finding)
    except Exception as error:  # the other rows are still worth something
        is_left_out = isinstance(error, TimeoutError | subprocess.TimeoutExpired | ModuleNotFoundError)
        says = cause(error)
        shown = f"{'--' if is_left_out else 'NO':3} {row.title}: {says[-600:]}"
        yield {"says": says[-2000:], "is_right": None if is_left_out else False}, shown


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = sorted({row.part for row in ROWS})
    parser.add_argument("parts", nargs="*", help=f"the rows to prove: {', '.join(names)}")
    parser.add_argument("--minutes", type=float, default=9, help="which it takes at most")
    parser.add_argument("--data_dir", type=Path, default="data", help="folder with MNIST/raw")
    parser.add_argument("--output", type=Path, default="gpu_proof.json", help="file to write the results to")
    parser.add_argument("--smoke", action="store_true", help="tiny models, to try each line")
    chosen = parser.parse_args()
    if unknown := {*chosen.parts} - {*names}:
        parser.error(f"no part is named {', '.join(sorted(unknown))}: {', '.join(names)}")
    rows = [row for row in ROWS if row.part in (chosen.parts or names)]
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
        bench = Bench(folder, deadline, chosen.data_dir.absolute(), gpu, chosen.smoke)
        proof = {"gpu": gpu, **machine(), "is_smoke": chosen.smoke}
        for name, value in proof.items():
            print(f"{name:10} {value}")
        print(f"\nplan: {sum(row.seconds for row in rows)} s on an H100, of {60 * chosen.minutes:.0f}")
        for row in rows:
            print(f"{row.seconds:7} s  {row.title}")
        print(flush=True)
        proof["rows"] = []
        for row in rows:
            started = time.monotonic()
            for found, shown in answers(bench, row):
                seconds = round(time.monotonic() - started, 1)
                proof["rows"].append({"row": row.title, **found, "seconds": seconds})
                chosen.output.write_text(json.dumps(proof, indent=1) + "\n")
                print(f"{shown} [{seconds:.0f} s]", flush=True)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    wrong = [row for row in proof["rows"] if row["is_right"] is False]
    print(f"\n{chosen.output}: {len(proof['rows'])} rows, {len(wrong)} of them not as asked")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
