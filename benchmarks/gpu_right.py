"""Whether a real GPU computes right and no step waits for it: rows of the proof that benchmarks/gpu.py writes.

Runs of train.py are compared with each other, each in a process of its own (gpu_forked.py).
"""

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F

from benchmarks.gpu_forked import Forked, run_forked
from benchmarks.pairs import drift
from benchmarks.runs import NEVER
from src.tasks.base import ContextParallel
from src.tasks.text.context_parallel import register
from src.training.run import new_model

STEPS, SAVED = 12, 6
"""Steps of the runs that are compared, and the one after which those that are killed have saved."""
BF16 = 2**-8
"""Relative distance of two neighbouring numbers in bf16."""
CURVE = 1e-5
"""How far apart the project promises that two curves are, at most."""
SETTINGS = {"optim.lr": 1e-4, "log_every": 1, "max_steps": STEPS, "save_every": NEVER, "eval_every": NEVER}
"""What all of these runs have in common."""


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
        has_more = self.at_least is not None and not self.value >= self.at_least
        return not has_more and not (self.at_most is not None and not self.value <= self.at_most)


@dataclass
class Bench:
    """What all rows share."""

    folder: Path
    deadline: float
    """Of all rows, in the seconds of time.monotonic."""
    digits: dict[str, Any]
    """Settings of MNIST's CNN on small images, without dropout."""
    text: dict[str, Any]
    """Settings of a small Llama on documents of many lengths, packed."""
    cnn_precision: str | None = None
    """Of MNIST's CNN where it is to be in half precision; None: the yaml's. (An emulated GPU takes seconds for it.)"""
    runs: dict[str, Forked] = field(default_factory=dict)
    """Those that several rows compare with."""

    def train(
        self, name: str, yaml: str, settings: dict[str, Any], precision: str | None = None, **more: Any
    ) -> Forked:
        """Return the run of this name, which is trained if it has not been: see `run_forked`."""
        if name not in self.runs:
            how = {"precision": precision, "deadline": self.deadline, **more}
            self.runs[name] = run_forked(self.folder / name, yaml, settings, **how)
        return self.runs[name]

    def ended(self, name: str) -> Forked:
        """Return the run of this name; raise a TimeoutError if the row that it belongs to had no time or failed."""
        if name not in self.runs:
            raise TimeoutError(f"needs the run {name}, which has not ended")
        return self.runs[name]


Measure = Callable[[Any], Iterator[Finding]]
"""A row: it is given the Bench, and yields what it has found out."""


def exact() -> None:
    """Compute convolutions in fp32 proper: TF32 has 10 bits."""
    torch.backends.cudnn.conv.fp32_precision = "ieee"  # type: ignore[attr-defined]


def mnist_in_fp32(bench: Bench) -> Iterator[Finding]:
    cpu = bench.train("mnist_cpu", "cpu", bench.digits)
    gpu = bench.train("mnist_fp32", "single_gpu", bench.digits, "no", begin=exact)
    yield Finding("MNIST's CNN in fp32 against the CPU", drift(gpu.losses, cpu.losses), at_most=CURVE)


def llama_in_fp32(bench: Bench) -> Iterator[Finding]:
    cpu = bench.train("llama_cpu", "cpu", bench.text)
    gpu = bench.train("llama_fp32", "single_gpu", bench.text, "no")
    yield Finding("a Llama in fp32 against the CPU", drift(gpu.losses, cpu.losses), at_most=CURVE)


def llama_in_bf16(bench: Bench) -> Iterator[Finding]:
    half = bench.train("llama_bf16", "single_gpu", bench.text)
    off, tuned = drift(half.losses, bench.ended("llama_fp32").losses), ", ".join(half.summary["optimizations"])
    yield Finding("a Llama in bf16 against fp32", off, at_most=BF16, note=tuned)


def llama_sharded(bench: Bench) -> Iterator[Finding]:
    for yaml in ("fsdp", "fsdp_offload"):
        run = bench.train(f"llama_{yaml}", yaml, bench.text, "no")
        off = drift(run.losses, bench.ended("llama_fp32").losses)
        yield Finding(f"a Llama in fp32 under {yaml}.yaml against single_gpu.yaml", off, at_most=CURVE)


def attention_and_loss(bench: Bench) -> Iterator[Finding]:
    """Of one batch, in bf16: what is off the gradients in fp32, beside what masks and plain cross-entropy are off."""
    found = bench.train("masks", "single_gpu", bench.text, acts={1: compare_with_masks}).found
    what = "varlen attention and chunked loss: error of the gradients in bf16"
    note = f"{found['plain']:.1e} with masks and plain cross-entropy"
    yield Finding(what, found["ours"], at_most=1.5 * found["plain"], note=note)


def compare_with_masks(run: Any, micro_batches: Any, take: Callable[[], Any], found: dict[str, Any]) -> Any:
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


def shared_by_one(bench: Bench) -> Iterator[Finding]:
    """A group of one process that shares its sequences: all-to-alls on the GPU, by NCCL, that change nothing."""
    found = bench.train("shared", "fsdp", bench.text | {"max_steps": 2}, acts={1: all_to_all_with_itself}).found
    yield Finding("all-to-alls of a group of one: difference of the loss in bf16", found["difference"], at_most=0)


def all_to_all_with_itself(run: Any, micro_batches: Any, take: Callable[[], Any], found: dict[str, Any]) -> Any:
    decoder, data = run.accelerator.unwrap_model(run.model).hf, micro_batches[0].data
    group = torch.distributed.group.WORLD.group_name  # type: ignore[union-attr]
    alone = run.task.loss(run.model, data)
    alone.backward()
    decoder.set_attn_implementation(register("varlen", ContextParallel(0, 1, group)))
    shared = run.task.loss(run.model, data)
    shared.backward()
    decoder.set_attn_implementation("varlen")
    run.model.zero_grad()
    found["difference"] = (shared - alone).abs().item()
    return take()


def recorded_steps(bench: Bench) -> Iterator[Finding]:
    eager = bench.train("mnist_half", "single_gpu", bench.digits, bench.cnn_precision)
    graphs = bench.train("mnist_graphs", "single_gpu", bench.digits | {"cuda_graphs": True}, bench.cnn_precision)
    yield Finding("MNIST's CNN, cuda_graphs against eager", drift(graphs.losses, eager.losses), at_most=CURVE)


def killed_mnist(bench: Bench) -> Iterator[Finding]:
    settings = bench.digits | {"task.dropout": 1.0}
    yield killed(bench, "MNIST's CNN", "mnist", settings, precision=bench.cnn_precision)


def killed_llama(bench: Bench) -> Iterator[Finding]:
    yield killed(bench, "a Llama, deterministic kernels", "llama", bench.text, begin=be_deterministic)


def be_deterministic() -> None:
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    torch.use_deterministic_algorithms(True)


def killed(bench: Bench, what: str, name: str, settings: dict[str, Any], **more: Any) -> Finding:
    settings = settings | {"save_every": SAVED}
    whole = bench.train(f"{name}_whole", "single_gpu", settings, **more)
    first = bench.train(f"{name}_killed", "single_gpu", settings, acts={SAVED + 2: die_once_it_has_saved}, **more)
    assert not first.found  # it was killed
    del bench.runs[f"{name}_killed"]
    resumed = bench.train(f"{name}_killed", "single_gpu", settings, **more)
    assert resumed.found  # it has come to its end
    same = sum(a == b for a, b in zip(resumed.losses, whole.losses, strict=True))
    return Finding(f"{what}, killed and resumed: losses the same to the last bit", same, f"of {STEPS}", at_least=STEPS)


def die_once_it_has_saved(run: Any, micro_batches: Any, take: Callable[[], Any], found: dict[str, Any]) -> Any:
    checkpoint = run.config.folder / "checkpoints" / f"step_{SAVED:08d}"
    while not checkpoint.exists():
        time.sleep(0.01)
    take()  # the GPU is busy
    os.kill(os.getpid(), signal.SIGKILL)


def check(bench: Bench) -> Iterator[Finding]:
    bench.train("check", "single_gpu", bench.text | {"check": True})
    checks = json.loads((bench.folder / "check" / "check.json").read_text())["checks"]
    failed = [row["what"] for row in checks if row["result"] == "FAIL"]
    yield Finding("train.py --check: findings that fail", len(failed), f"of {len(checks)}", at_most=0)


def four_bits(bench: Bench) -> Iterator[Finding]:
    files = {**bench.text, "task.model": bench.ended("llama_fp32").folder / "model", "task.lora.r": 4}
    del files["task.architecture"]
    half = bench.train("adapters", "single_gpu", files)
    nf4 = bench.train("adapters_nf4", "single_gpu", files | {"task.lora.base_dtype": "nf4"})
    yield Finding("adapters over weights in 4 bits against fp32", drift(nf4.losses, half.losses), at_most=0.05)


def fp8(bench: Bench) -> Iterator[Finding]:
    half, eighth = (bench.train(f"llama_{yaml}_bf16", yaml, bench.text) for yaml in ("fsdp", "fsdp_fp8"))
    note = eighth.summary["precision"]
    yield Finding("a Llama in fp8 against bf16", drift(eighth.losses, half.losses), at_most=0.05, note=note)


def waits(bench: Bench) -> Iterator[Finding]:
    for name, settings, precision in (("mnist", bench.digits, bench.cnn_precision), ("llama", bench.text, None)):
        bench.train(f"waits_{name}", "single_gpu", settings, precision, acts={SAVED: refuse_waits})
        yield Finding(f"{name}: waits in a step, as set_sync_debug_mode sees them", 0, at_most=0)


def refuse_waits(run: Any, micro_batches: Any, take: Callable[[], Any], found: dict[str, Any]) -> Any:
    torch.cuda.set_sync_debug_mode("error")
    try:
        return take()
    finally:
        torch.cuda.set_sync_debug_mode("default")


RIGHT: list[tuple[str, int, Measure]] = [
    ("MNIST's CNN in fp32 against the CPU", 10, mnist_in_fp32),
    ("a Llama in fp32 against the CPU", 14, llama_in_fp32),
    ("a Llama in bf16", 6, llama_in_bf16),
    ("FSDP and offload on one process", 14, llama_sharded),
    ("varlen attention and chunked loss", 6, attention_and_loss),
    ("all-to-alls of a group of one", 6, shared_by_one),
    ("cuda_graphs", 8, recorded_steps),
    ("killed and resumed: MNIST's CNN", 12, killed_mnist),
    ("killed and resumed: a Llama", 15, killed_llama),
    ("train.py --check", 15, check),
    ("no step waits for the GPU", 10, waits),
]
"""What is asked, the seconds that it takes on an H100 by an estimate, and what answers it; the most important first. A
run takes 3 to 6 s, most of them to make CUDA's context and to load kernels."""
OPTIONAL: list[tuple[str, int, Measure]] = [("weights in 4 bits", 12, four_bits), ("fp8", 20, fp8)]
"""The same of what not everybody has installed."""
NEEDS: dict[Measure, str] = {four_bits: "bitsandbytes", fp8: "torchao"}
