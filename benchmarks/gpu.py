"""What only a GPU can answer: is train.py fast there, against a clock, the hardware's limit and the usual peers?

    python -m benchmarks.gpu [mnist] [llama] [fp8] [--data_dir=DIR] [--save=FILE] [--smoke]

On one NVIDIA H100 or H200; MNIST is downloaded where DIR lacks it. --smoke tries the whole script with tiny models, on
the CPU or on the GPU there is, also an emulated one (tests/gpu/build.py): its figures mean nothing.

- mnist: configs/mnist_reference.yaml (14 epochs) to 99.1% in 10 seconds, configs/mnist_fast.yaml to 99% in 2, both with
  --cuda_graphs=true; and how many times as fast a step is with it as without. The clock is `seconds` in summary.json:
  from the first step to the end, with warm-up, all evaluations, the last checkpoint and the export, without start-up.
- llama: 1.1 billion parameters in TinyLlama's shape, sequences of 4,096, bf16 with fp32 weights and optimizer, under
  single_gpu.yaml and fsdp.yaml (one process), --compile=true. Peers: those of language_peers.py, both with sdpa,
  autocast and fused AdamW, and not compiled, as is their default.
  MFU = tokens/s x (6 N + 12 L H Q T) / the GPU's dense bf16 peak, as PaLM and nanochat have it: N parameters without
  the input embedding, L layers, H heads of size Q, T tokens per sequence; attention in full, nothing counted twice.
  Asked are 42%, with PyTorch's FlashAttention 2; what was used is printed.
- fp8: fsdp_fp8.yaml (needs torchao) against fsdp.yaml, on the model of llama; also how far the losses are apart.

Equal work, which is asserted: parameters, steps, tokens and precision, and of llama the losses within 2%. Each side
runs in a fresh process, one after the other. Speeds are of intervals of steps; the first, which loads and compiles,
isn't counted. Runs of train.py on the Llama are ended at their last step.
"""

import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks import pairs
from benchmarks.language import PEERS, Plan, assert_same, told, work, write_text
from benchmarks.pairs import Comparison, drift, table
from benchmarks.runs import NEVER, PROJECT, Side, running, train_py
from src.tracking.performance import peak_flops

LLAMA = {
    "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 22, "num_attention_heads": 32,
    "num_key_value_heads": 4, "vocab_size": 32_000,
}  # fmt: skip
TINY = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 512,
}  # fmt: skip
INTERVAL, INTERVALS = 5, 4
PLAN = Plan(LLAMA, length=4096, batch=8, micro=4, interval=INTERVAL, lr=1e-4)
"""4 sequences at once: eager, a token takes 110 kB in each layer, 40 GB of them all; 18 GB are for parameters."""


@dataclass(frozen=True)
class Bench:
    """What all questions share."""

    folder: Path
    data_dir: Path
    is_smoke: bool
    is_cuda: bool

    def plan(self) -> Plan:
        plan = replace(PLAN, is_cuda=self.is_cuda)
        return replace(plan, shape=TINY, length=64) if self.is_smoke else plan

    def ours(self, settings: dict[str, Any], yaml: str) -> Side:
        """Return a run of train.py. A yaml means its GPUs: on the CPU the precision is that of the command line."""
        precision = "" if self.is_cuda else "fp8" if yaml == "fsdp_fp8" else "bf16"
        folder = Path(tempfile.mkdtemp(prefix=f"{yaml}_", dir=self.folder))
        return Side(train_py(settings, yaml, precision=precision), folder, None if self.is_cuda else 1)


def mnist(bench: Bench) -> Iterator[Comparison]:
    def run(config: str, has_graphs: bool, **settings: Any) -> Side:
        settings |= {"config": PROJECT / "configs" / f"{config}.yaml", "task.data_dir": bench.data_dir}
        settings |= {"cuda_graphs": has_graphs and bench.is_cuda, "save_every": NEVER}
        settings |= {"log_every": 5 if bench.is_smoke else 134}  # a seventh of an epoch
        if bench.is_smoke:
            settings |= {"max_steps": 20, "eval_every": NEVER}
        side = bench.ours(settings, "single_gpu")
        side.run()
        return side

    for config, seconds, accuracy in (("mnist_reference", 10.0, 99.1), ("mnist_fast", 2.0, 99.0)):
        found = run(config, has_graphs=True).summary
        yield Comparison(f"{config}, single_gpu.yaml", "s", [found["seconds"]], [seconds], 1.0, is_gain=False)
        yield Comparison(f"{config}: accuracy", "%", [100 * found["eval/accuracy"]], [accuracy], 1.0, True, True)
    with_graphs, without = (run("mnist_reference", graphs, max_steps=938, eval_every=NEVER) for graphs in (True, False))
    ours, theirs = ([64e3 / r["perf/samples_per_second"] for r in side.records[1:]] for side in (with_graphs, without))
    yield Comparison("mnist: a step with cuda_graphs against one without", "ms", ours, theirs, 1.0, is_gain=True)


@cache
def train_llama(bench: Bench, yaml: str) -> Side:
    """Run it once per yaml: the questions share it."""
    plan, folder = bench.plan(), bench.folder / "llama"
    steps = INTERVALS * INTERVAL
    if not folder.exists():
        write_text(folder, steps * plan.batch, plan.length)
    settings = {"save_every": NEVER, "micro_batch_size": plan.micro, "compile": not bench.is_smoke}
    side = bench.ours(plan.settings(folder / "data") | settings, yaml)
    with running(side):
        side.start()
        side.wait(lambda: len(side.records) == INTERVALS)
    done = work(side)
    assert (done["steps"], done["tokens"]) == (steps, steps * plan.batch * plan.length)
    assert all(record["perf/padding"] == 0 for record in side.records)
    return side


def speeds_of(side: Side) -> list[float]:
    """Return the tokens per second of each interval but the first."""
    return [record["perf/tokens_per_second"] for record in side.records[1:]]


def train_peer(bench: Bench, name: str) -> list[float]:
    """Return the same of a peer, which has done the same."""
    plan, folder = bench.plan(), bench.folder / "llama"
    side = Side(plan.peer(name, folder), folder / name, None if bench.is_cuda else 1)
    side.run()
    assert_same(side, train_llama(bench, "single_gpu"), within=0.02)
    seconds = np.diff([record["time"] for record in side.records])
    return (INTERVAL * plan.batch * plan.length / seconds).tolist()


def llama(bench: Bench) -> Iterator[Comparison]:
    plan, first = bench.plan(), train_llama(bench, "single_gpu")
    (tuned,) = told(first, "tuned +(.*)")
    parameters, shape = work(first)["parameters"], plan.shape
    print(f"llama: {parameters:,} parameters; {tuned}; losses {first.values}")
    width, layers = shape["hidden_size"], shape["num_hidden_layers"]  # H x Q is the width
    per_token = 6 * (parameters - shape["vocab_size"] * width) + 12 * layers * width * plan.length
    peak = peak_flops(torch.cuda.get_device_name(), "bf16") if bench.is_cuda else None
    peers = {name: train_peer(bench, name) for name in PEERS}
    for yaml in ("single_gpu", "fsdp"):
        side = train_llama(bench, yaml)
        assert_same(side, first, within=0.02)
        ours = speeds_of(side)
        if peak:
            mfu = [speed * per_token / peak for speed in ours]
            target = 0.42
            yield Comparison(f"llama, {yaml}.yaml: MFU", "of the peak", mfu, [1.0] * len(mfu), target, True, True)
        for name, theirs in peers.items():
            yield Comparison(f"llama, {yaml}.yaml, {name}", "tokens/s", ours, theirs, 1.25, True, True)


def fp8(bench: Bench) -> Iterator[Comparison]:
    half, eighth = (train_llama(bench, yaml) for yaml in ("fsdp", "fsdp_fp8"))
    assert work(half) | {"precision": "fp8"} == work(eighth)
    print(f"fp8: losses up to {drift(eighth.values, half.values):.2%} apart: {eighth.values}, {half.values}")
    question = "fsdp_fp8.yaml against fsdp.yaml"
    yield Comparison(question, "tokens/s", speeds_of(eighth), speeds_of(half), 1.0, is_gain=True, is_speed=True)


QUESTIONS = {"mnist": mnist, "llama": llama, "fp8": fp8}


def measure(data_dir: Path, folder: Path, questions: list[str], smoke: bool) -> list[Comparison]:
    is_cuda = torch.cuda.is_available()
    assert is_cuda or smoke, "this machine has no GPU"
    print(torch.cuda.get_device_name() if is_cuda else "CPU", torch.__version__, flush=True)
    bench = Bench(folder, data_dir, smoke, is_cuda)
    rows = []
    for question in questions:
        for row in QUESTIONS[question](bench):
            print(table([row]), flush=True)
            rows.append(row)
    return rows


if __name__ == "__main__":
    options = pairs.parser(__doc__)
    options.add_argument("questions", nargs="*", default=list(QUESTIONS), help=", ".join(QUESTIONS))
    options.add_argument("--smoke", action="store_true", help="tiny models, to try the script")
    pairs.main(measure, options)
