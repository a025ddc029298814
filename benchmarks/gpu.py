"""What only a GPU can answer: is train.py fast there, against a clock, the hardware's limit and the usual peers?

    python benchmarks/gpu.py [mnist] [llama] [packing] [fp8] [offload] [--data_dir=DIR] [--smoke]

On one NVIDIA GPU, made for an H100 or H200; all questions in less than 8 minutes, without any download. Rows are
printed and benchmarks/gpu_results.json is written after each question. A question that this machine can't answer is
left out, with a line that says why; after 7 minutes no other one begins. --smoke tries the whole script on the CPU,
with tiny models: its figures mean nothing.

- mnist: configs/mnist_reference.yaml (14 epochs) to 99.1% in 10 seconds, configs/mnist_fast.yaml to 99% in 2, both with
  --cuda_graphs=true; and how many times as fast a step is with it as without. The clock is `seconds` in summary.json:
  from the first step to the end, with all evaluations, checkpoints and the export, without start-up. The real MNIST
  has to be in DIR.
- llama: 1.1 billion parameters in TinyLlama's shape, sequences of 4,096, bf16 with fp32 weights and optimizer, under
  single_gpu.yaml and fsdp.yaml (one process), --compile=true. Peers: the Trainer of transformers and a plain Accelerate
  loop as run_clm_no_trainer.py has it, both with sdpa, autocast and fused AdamW, and not compiled, as is their default.
  MFU = tokens/s x (6 N + 12 L H Q T) / the GPU's dense bf16 peak, as PaLM and nanochat have it: N parameters without
  the input embedding, L layers, H heads of size Q, T tokens per sequence. It counts attention in full, though half of
  it is masked, and nothing that is computed twice. Omitted for a GPU whose peak isn't in PEAKS.
- packing: fine-tuning on instructions of very different lengths (log-normal), packed, against Trainer with batches
  padded to their longest document, as it does by default; both not compiled. Real tokens per second.
- fp8: fsdp_fp8.yaml (needs torchao) against fsdp.yaml, on the model of llama; also how far the losses are apart.
  Recorded, nothing is asked.
- offload: the largest Llama that trains three steps with fsdp.yaml and with fsdp_offload.yaml, and what a step costs
  with offload at the largest size that fits both. Memory grows by the layer: it is measured at two small sizes, the
  largest is calculated, and is only reported after it has trained. Largest means: up to 95% of the GPU's memory, or 80%
  of what is free of the CPU's.

Equal work, which is asserted: parameters, steps, tokens and precision, and in llama the loss in the end within 2%,
which needs the same first weights and sequences; the micro-batch is the same for all sides, smaller where one is out of
memory. In packing: the same documents and targets per epoch, in about as many steps. Each side runs in a fresh process,
one after the other. Speeds are of intervals of steps, the first not counted (compiling, first allocations), by time
stamps of a loop that has waited for the GPU.

Where this script's time goes: start-up (imports, 1.1 billion random numbers), and compiling. The runs of train.py are
ended at their last measured step: checkpoint and export of such a model would be 17 GB.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import random
import re
import shlex
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

PROJECT = Path(__file__).resolve().parent.parent
sys.path[0] = str(PROJECT)  # started as a script, it is the folder of this file, whose modules are named like others

import numpy as np  # noqa: E402
import psutil  # noqa: E402

from benchmarks.gpu_peers import LR, SEED, Plan  # noqa: E402
from benchmarks.llama import WEIGHT_DECAY  # noqa: E402
from benchmarks.pairs import Comparison, table  # noqa: E402
from benchmarks.transformer import generated  # noqa: E402

RESULTS = Path(__file__).parent / "gpu_results.json"
NO_MORE_QUESTIONS, ALL_DONE = 7 * 60, 7.75 * 60
"""Seconds after which no other question begins, and after which whatever still runs is ended."""
PEAKS = {"H200": 989e12, "H100 PCIe": 756e12, "H100 NVL": 835e12, "H100": 989e12, "A100": 312e12}
"""Dense bf16 floating-point operations per second, from NVIDIA's data sheets; the first name that fits counts."""
NEVER = 1_000_000_000

LLAMA = {
    "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 22, "num_attention_heads": 32,
    "num_key_value_heads": 4, "vocab_size": 32_000,
}  # fmt: skip
LENGTH, BATCH = 4096, 8
MICRO = 4
"""Sequences at once: eager, a token takes 110 kB in each layer, 40 GB of them all; 18 GB are for parameters."""
INTERVAL, INTERVALS = 5, 4

SMALL = LLAMA | {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 12, "num_attention_heads": 16}
del SMALL["vocab_size"]  # bytes
DOCUMENTS, MEDIAN, SIGMA, PACKED_LENGTH, PACKED_BATCH, EPOCHS = 1024, 200, 1.0, 2048, 8, 3

LADDER = LLAMA | {"hidden_size": 4096, "intermediate_size": 8192, "num_key_value_heads": 32}
"""168 million parameters per layer, in matrices of 2^n bytes: pinned memory is handed out in such pieces."""
LADDER_LENGTH, FIRST_LAYERS = 1024, (2, 4)

TINY = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2,
}  # fmt: skip


class Left(Exception):  # noqa: N818  # no error
    """The question is left out; says why."""


class OutOfMemory(Exception):  # noqa: N818
    """Of the GPU."""


@dataclass(frozen=True)
class Bench:
    """What all questions share."""

    folder: Path
    data_dir: Path
    is_smoke: bool
    gpu: str
    memory: int
    """Of the GPU, in bytes."""
    capability: tuple[int, int]
    started: float

    @property
    def left(self) -> float:
        """Seconds until all has to be done."""
        return (3600 if self.is_smoke else ALL_DONE) - (time.perf_counter() - self.started)

    def launch(self, yaml: str) -> list[str]:
        launcher = [sys.executable, "-m", "accelerate.commands.launch", "--main_process_port=0", "--num_processes=1"]
        # a yaml means its GPUs: on the CPU the precision is that of the command line
        precision = [f"--mixed_precision={'fp8' if yaml == 'fsdp_fp8' else 'bf16'}"] if self.is_smoke else []
        return [*launcher, f"--config_file=accelerate_configs/{yaml}.yaml", *precision]

    def shape(self, shape: dict[str, int]) -> dict[str, int]:
        return shape | TINY | ({"vocab_size": 512} if "vocab_size" in shape else {}) if self.is_smoke else shape

    def length(self, length: int) -> int:
        return 64 if self.is_smoke else length


@dataclass(frozen=True)
class Run:
    """What a training by train.py wrote down before it was ended."""

    records: list[dict[str, Any]]
    """One per step."""
    data: dict[str, int]
    """Sequences, tokens and targets of an epoch."""
    work: dict[str, Any]


# ------------------------------------------------------------------------------------------------------- processes
def environment(bench: Bench) -> dict[str, str]:
    """One GPU, no network, and without what a user's shell says to W&B and Accelerate."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(("WANDB_", "ACCELERATE_", "FSDP_"))}
    gpu = env.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]  # with several, Trainer would use them all
    env |= {"CUDA_VISIBLE_DEVICES": "" if bench.is_smoke else gpu, "HF_HUB_OFFLINE": "1"}
    env |= {"HF_DATASETS_CACHE": str(bench.folder / "cache"), "TOKENIZERS_PARALLELISM": "false"}
    if bench.is_smoke:
        env["OMP_NUM_THREADS"] = "1"
    return env | {"PYTHONPATH": os.pathsep.join([str(PROJECT), *filter(None, [env.get("PYTHONPATH")])])}


def execute(bench: Bench, command: list[str], log: Path, seconds: float, is_done: Callable[[], bool]) -> None:
    """Runs it until it ends, or until `is_done`; leaves no process behind.

    Raises:
        OutOfMemory: the GPU's memory was too small.
        TimeoutError: it took longer than `seconds`, or than all may take.
        RuntimeError: it failed.
    """
    limit = time.perf_counter() + min(seconds, bench.left)
    with log.open("w") as output:
        process = psutil.Popen(command, cwd=PROJECT, env=environment(bench), stdout=output, stderr=subprocess.STDOUT)
        try:
            while process.poll() is None and not is_done():
                if time.perf_counter() > limit:
                    raise TimeoutError(f"{log.stem} was not done in time")
                time.sleep(0.05)
        finally:
            end(process)
    if process.returncode and not is_done():
        said = log.read_text(errors="replace")
        if "OutOfMemoryError" in said or "CUDA out of memory" in said:
            raise OutOfMemory(log.stem)
        raise RuntimeError(f"{shlex.join(command)}\n{said[-6000:]}\n{log.stem}: exit code {process.returncode}")


def end(process: psutil.Popen) -> None:
    """At once, and its children, which are in sessions of their own: told to stop, they would save their models first,
    and as long as one of them lives, the GPU's memory is taken."""
    family: list[psutil.Process] = []
    with contextlib.suppress(psutil.NoSuchProcess):
        family = process.children(recursive=True)
    for member in (*family, process):
        with contextlib.suppress(psutil.NoSuchProcess):
            member.kill()
    psutil.wait_procs([*family, process], timeout=30)


def need(*packages: str) -> None:
    missing = [package for package in packages if find_spec(package) is None]
    if missing:
        raise Left(f"pip install {' '.join(missing)}")


# ------------------------------------------------------------------------------------------------------------ ours
def train(bench: Bench, yaml: str, settings: dict[str, Any], folder: Path, epochs: int, seconds: float) -> Run:
    """Runs train.py on folder/data until it has recorded so many epochs, and ends it there."""
    output = folder / yaml
    settings = {
        "output_dir": output,
        "seed": SEED,
        "epochs": "null",
        "max_steps": NEVER,
        "eval_every": NEVER,
        "save_every": NEVER,
        "log_every": 1,
        "wandb.mode": "disabled",
        "task.name": "causal_lm",
        "task.dataset": folder / "data",
        "task.architecture.model_type": "llama",
        "optim.lr": LR,
        "optim.weight_decay": WEIGHT_DECAY,
        "optim.schedule": "constant",
        "optim.warmup_steps": 0,
        **settings,
    }

    def records() -> list[dict[str, Any]]:
        file = output / "metrics.jsonl"
        lines = file.read_text().split("\n")[:-1] if file.exists() else []  # the last one may be half written
        found = [json.loads(line) for line in lines]
        return [record for record in found if record["epoch"] < epochs + 1e-6]

    def is_done() -> bool:
        return any(record["epoch"] > epochs - 1e-6 for record in records())

    log = folder / f"{yaml}.log"
    command = [*bench.launch(yaml), "train.py", *(f"--{name}={value}" for name, value in settings.items())]
    execute(bench, command, log, seconds, is_done)
    said = log.read_text()
    device, precision = search(r"^  strategy .*, (\w+), (\w+)$", said)
    (parameters,) = search(r"^  model +([\d,]+) parameters", said)
    data = search(r"^  train +sequences ([\d,]+), tokens ([\d,]+), targets ([\d,]+)", said)
    numbers = dict(zip(("sequences", "tokens", "targets"), map(whole, data), strict=True))
    work = {
        "parameters": whole(parameters),
        "steps": len(records()),
        "tokens": epochs * numbers["tokens"],
        "device": device,
        "precision": precision,
    }
    return Run(records(), numbers, work)


def search(pattern: str, text: str) -> tuple[str, ...]:
    found = re.search(pattern, text, re.MULTILINE)
    assert found, f"{pattern} is not in {text[:3000]}"
    return found.groups()


def whole(number: str) -> int:
    return int(number.replace(",", ""))


def architecture(shape: dict[str, int]) -> dict[str, int]:
    return {f"task.architecture.{name}": value for name, value in shape.items()}


def peer(bench: Bench, name: str, plan: Plan, folder: Path, seconds: float) -> dict[str, Any]:
    """Runs a side of benchmarks/gpu_peers.py. Returns: what it wrote."""
    (folder / "plan.json").write_text(json.dumps(asdict(plan)))
    command = [sys.executable, "-m", "benchmarks.gpu_peers", name, str(folder)]
    execute(bench, command, folder / f"{name}.log", seconds, lambda: False)
    return json.loads((folder / f"{name}.json").read_text())


# ----------------------------------------------------------------------------------------------------------- mnist
def mnist(bench: Bench) -> list[Comparison]:
    from src.data.mnist import IDX_FILES

    need("datasets", "evaluate")
    places = (bench.data_dir / "MNIST" / "raw", bench.data_dir)
    if not any(all((place / name).is_file() for name in IDX_FILES) for place in places):
        raise Left(f"MNIST is not in {bench.data_dir}: --data_dir=DIR")

    def launched(config: str, name: str, has_graphs: bool, **settings: Any) -> Path:
        output = bench.folder / name
        settings |= {"output_dir": output, "task.data_dir": bench.data_dir, "wandb.mode": "disabled"}
        if has_graphs and not bench.is_smoke:
            settings["cuda_graphs"] = True
        if bench.is_smoke:
            settings |= {"max_steps": 20, "eval_every": NEVER, "log_every": 5}
        words = [f"--config=configs/{config}.yaml", *(f"--{name}={value}" for name, value in settings.items())]
        command = [*bench.launch("single_gpu"), "train.py", *words]
        execute(bench, command, bench.folder / f"{name}.log", 90, lambda: False)
        return output

    def milliseconds(name: str, has_graphs: bool) -> list[float]:
        """Per step of an epoch, in each interval but the first, in which libraries are loaded."""
        settings = {"max_steps": 938, "log_every": 134, "eval_every": NEVER, "save_every": NEVER}
        output = launched("mnist_reference", name, has_graphs, **settings)
        records = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
        return [64e3 / r["perf/samples_per_second"] for r in records if "train/loss" in r][1:]

    rows = []
    for config, epochs, seconds, accuracy in (("mnist_reference", 14, 10.0, 99.1), ("mnist_fast", None, 2.0, 99.0)):
        output = launched(config, config, has_graphs=True, save_every=NEVER, log_every=938)
        found = json.loads((output / "summary.json").read_text())
        if not bench.is_smoke:
            assert found["device"] == "cuda"
            assert epochs in (None, round(found["epoch"]))
        print(
            f"{config}: {found['step']} steps, {found['epoch']:.3g} epochs, {found['eval/accuracy']:.2%} in "
            f"{found['seconds']:.2f} s, {found['save_pause_seconds']:.2f} of them pauses for checkpoints"
        )
        rows += [
            Comparison(f"{config}, single_gpu.yaml", "s", [found["seconds"]], [seconds], 1.0, is_gain=False),
            Comparison(f"{config}: accuracy", "%", [100 * found["eval/accuracy"]], [accuracy], 1.0, True, True),
        ]
    ours, theirs = milliseconds("with_graphs", True), milliseconds("without", False)
    question = "mnist: a step with cuda_graphs against one without"
    return [*rows, Comparison(question, "ms", ours, theirs, 1.0, is_gain=True)]


# ----------------------------------------------------------------------------------------------------------- llama
def write_text(folder: Path, length: int) -> None:
    """A text of exactly the steps' sequences, and these as the peers read them: an epoch in train.py's order."""
    from src.data.byte_tokenizer import byte_tokenizer

    if (folder / "data").exists():
        return
    text = generated(INTERVALS * INTERVAL * BATCH * length - 1, random.Random(SEED))  # a token in front begins it
    (folder / "data").mkdir(parents=True)
    (folder / "data" / "train.txt").write_text(text)
    (folder / "data" / "validation.txt").write_text(text[: length - 1])
    sequences = np.array(byte_tokenizer()(text, verbose=False)["input_ids"]).reshape(-1, length)
    np.save(folder / "sequences.npy", sequences[np.random.default_rng([SEED, 0]).permutation(len(sequences))])


def train_llama(bench: Bench, yaml: str, micro: int) -> Run:
    """Once per yaml and micro-batch: the questions share it."""
    folder, length = bench.folder / f"llama_{micro}", bench.length(LENGTH)
    if (folder / f"{yaml}.done.json").exists():
        return Run(**json.loads((folder / f"{yaml}.done.json").read_text()))
    write_text(folder, length)
    settings = {
        "global_batch_size": BATCH,
        "micro_batch_size": micro,
        "compile": not bench.is_smoke,
        "task.sequence_length": length,
        **architecture(bench.shape(LLAMA)),
    }
    run = train(bench, yaml, settings, folder, 1, 150)
    assert (run.work["steps"], run.work["tokens"]) == (INTERVALS * INTERVAL, INTERVALS * INTERVAL * BATCH * length)
    assert all(record["perf/padding"] == 0 for record in run.records)
    (folder / f"{yaml}.done.json").write_text(json.dumps(asdict(run)))
    return run


def by_interval(run: Run) -> tuple[list[float], list[float]]:
    """The mean loss of each interval, and the tokens per second of each but the first."""
    steps = [run.records[i : i + INTERVAL] for i in range(0, len(run.records), INTERVAL)]
    speeds = [statistics.harmonic_mean(r["perf/tokens_per_second"] for r in some) for some in steps]
    return [statistics.mean(r["train/loss"] for r in some) for some in steps], speeds[1:]


def llama(bench: Bench) -> list[Comparison]:
    need("datasets")
    for micro in (MICRO, MICRO // 2, MICRO // 4):
        try:
            return compare_llama(bench, micro)
        except OutOfMemory as error:
            print(f"llama: {error} is out of memory with {micro} sequences at once", flush=True)
    raise Left("out of memory with a single sequence")


def compare_llama(bench: Bench, micro: int) -> list[Comparison]:
    folder, length, shape = bench.folder / f"llama_{micro}", bench.length(LENGTH), bench.shape(LLAMA)
    write_text(folder, length)
    plan = Plan(shape, length, micro, BATCH // micro, INTERVAL, is_cuda=not bench.is_smoke)
    # those that need most memory first: if there isn't enough, little is lost
    peers = {name: peer(bench, name, plan, folder, 120) for name in ("trainer", "plain")}
    runs = {yaml: train_llama(bench, yaml, micro) for yaml in ("single_gpu", "fsdp")}
    losses = {yaml: by_interval(run)[0] for yaml, run in runs.items()}
    speeds = {yaml: by_interval(run)[1] for yaml, run in runs.items()}
    work = runs["single_gpu"].work
    print(f"llama: {work}, {micro} sequences at once, losses of single_gpu {losses['single_gpu']}")
    for name, other, last in [
        *((name, found["work"], found["losses"][-1]) for name, found in peers.items()),
        ("fsdp", runs["fsdp"].work, losses["fsdp"][-1]),
    ]:
        assert other == work, f"not the same work: single_gpu {work}, {name} {other}"
        drift = last / losses["single_gpu"][-1] - 1
        assert abs(drift) < 0.02, f"{name}: a last loss of {last}, that of single_gpu is {losses['single_gpu'][-1]}"
    counted = work["parameters"] - shape["vocab_size"] * shape["hidden_size"]
    per_token = 6 * counted + 12 * shape["num_hidden_layers"] * shape["hidden_size"] * length  # H x Q is hidden_size
    peak = next((peak for name, peak in PEAKS.items() if name in bench.gpu), None)
    rows = []
    for yaml, of_yaml in speeds.items():
        what = f"llama {work['parameters'] / 1e9:.2g}B, {yaml}.yaml"
        if peak:
            mfu = [speed * per_token / peak for speed in of_yaml]
            rows.append(Comparison(f"{what}: MFU", "of the peak", mfu, [1.0] * len(mfu), 0.55, True, True))
        for name, found in peers.items():
            rows.append(Comparison(f"{what}, {name}", "tokens/s", of_yaml, found["speeds"], 1.25, True, True))
    return rows


# --------------------------------------------------------------------------------------------------------- packing
def write_instructions(folder: Path, length: int, documents: int, median: float) -> None:
    """Rows of prompt and completion; a few of them also to evaluate on, which the run doesn't come to."""
    source = random.Random(SEED)
    rows = []
    words = generated(2**18, source)
    for _ in range(documents):
        size = min(max(round(source.lognormvariate(math.log(median), SIGMA)), 8), length - 2)
        start, cut = source.randrange(len(words) - size), source.randint(2, size - 2)
        text = words[start : start + size]
        rows.append(json.dumps({"prompt": text[:cut], "completion": text[cut:]}) + "\n")
    (folder / "data").mkdir(parents=True)
    (folder / "data" / "train.jsonl").write_text("".join(rows))
    (folder / "data" / "validation.jsonl").write_text("".join(rows[:8]))


def packing(bench: Bench) -> list[Comparison]:
    need("datasets")
    folder, length, shape = bench.folder / "packing", bench.length(PACKED_LENGTH), bench.shape(SMALL)
    documents, median = (200, 15) if bench.is_smoke else (DOCUMENTS, MEDIAN)
    write_instructions(folder, length, documents, median)
    settings = {"global_batch_size": PACKED_BATCH, "task.sequence_length": length, **architecture(shape)}
    run = train(bench, "single_gpu", settings, folder, EPOCHS, 120)
    sequences, tokens = run.data["sequences"], run.data["tokens"]
    steps = -(-sequences // PACKED_BATCH)
    sizes = [*([PACKED_BATCH] * (steps - 1)), sequences - PACKED_BATCH * (steps - 1)]  # of the steps of an epoch
    seconds = [size / r["perf/samples_per_second"] for size, r in zip(sizes * EPOCHS, run.records, strict=True)]
    ours = [tokens / sum(seconds[i : i + steps]) for i in range(steps, len(seconds), steps)]

    # documents that are padded to one length at once, and how often per step, for as many steps as ours; a pass over
    # more than 32 documents would not fit where one of them is long
    ways = [(micro, passes) for passes in range(1, 9) for micro in range(1, 33)]
    micro, passes = min(ways, key=lambda way: (abs(-(-documents // (way[0] * way[1])) - steps), way[1], way[0]))
    plan = Plan(shape, length, micro, passes, steps, EPOCHS, not bench.is_smoke)
    theirs = peer(bench, "padded", plan, folder, 120)
    work = run.work | {"targets": EPOCHS * run.data["targets"], "tokens": EPOCHS * tokens}
    drift = theirs["work"].pop("steps") / work.pop("steps") - 1
    assert abs(drift) < 0.05, f"their steps are {drift:+.0%}"
    assert theirs["work"] == work, f"not the same work: packed {work}, padded {theirs['work']}"
    print(
        f"packing: {work}; padding {1 - tokens / (sequences * length):.1%} packed, "
        f"{1 - EPOCHS * tokens / theirs['padded_tokens']:.1%} padded, {drift:+.1%} steps there"
    )
    question = f"packing {work['parameters'] / 1e6:.3g}M, Trainer padded"
    return [Comparison(question, "real tokens/s", ours, theirs["speeds"], 3.0, is_gain=True, is_speed=True)]


# ------------------------------------------------------------------------------------------------------------- fp8
def fp8(bench: Bench) -> list[Comparison]:
    need("datasets", "torchao")
    if bench.capability < (8, 9) and not bench.is_smoke:
        raise Left(f"{bench.gpu} has no fp8")
    micro = next((m for m in (4, 2, 1) if (bench.folder / f"llama_{m}" / "fsdp.done.json").exists()), MICRO)
    half, eighth = (train_llama(bench, yaml, micro) for yaml in ("fsdp", "fsdp_fp8"))
    assert eighth.work == half.work | {"precision": "fp8"}, f"not the same work: {half.work}, {eighth.work}"
    losses = [[record["train/loss"] for record in run.records] for run in (eighth, half)]
    apart = max(abs(a / b - 1) for a, b in zip(*losses, strict=True))
    print(
        f"fp8: losses up to {apart:.2%} apart in {len(losses[0])} steps, the last ones {losses[0][-1]}, {losses[1][-1]}"
    )
    question = "fsdp_fp8.yaml against fsdp.yaml"
    return [
        Comparison(question, "tokens/s", by_interval(eighth)[1], by_interval(half)[1], 0.0, True, True),
        Comparison(f"{question}: loss", "nats", losses[0], losses[1], 0.0, is_gain=True),
    ]


# --------------------------------------------------------------------------------------------------------- offload
def offload(bench: Bench) -> list[Comparison]:
    shape = bench.shape(LADDER)
    width, inner = shape["hidden_size"], shape["intermediate_size"]
    rest, per_layer = 2 * shape["vocab_size"] * width, 4 * width**2 + 3 * width * inner
    # of the CPU's memory a parameter takes 16 bytes, as it would of the GPU's, and there are the copies of a block
    most = int((usable_memory(bench) / 17 - rest) / per_layer)

    def climb(yaml: str, sizes: tuple[int, ...], most: int, seconds: float) -> list[dict[str, Any]]:
        """Returns: those that trained, the smallest first."""
        folder, seconds = bench.folder / f"ladder_{yaml}", min(seconds, bench.left - 10)
        (folder / "data").mkdir(parents=True)
        (folder / "data" / "train.txt").write_text("not read")
        length, ends_at = bench.length(LADDER_LENGTH), time.time() + seconds
        plan = Plan(shape, length, 1, 1, 3, 1, not bench.is_smoke, sizes, most, ends_at)
        (folder / "plan.json").write_text(json.dumps(asdict(plan)))
        command, log = [*bench.launch(yaml), "-m", "benchmarks.gpu_peers", "ladder", str(folder)], folder / "ladder.log"
        try:
            execute(bench, command, log, seconds + 5, lambda: False)
        except (OutOfMemory, RuntimeError, TimeoutError) as error:  # what it found before counts
            print(f"offload: {yaml} ended early: {str(error)[-5000:]}", flush=True)
        file = folder / "ladder.json"
        found = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
        for rung in found:
            print(f"offload: {yaml}: {rung}", flush=True)
        trained = [rung for rung in found if "seconds" in rung]
        assert all((rung["strategy"], rung["precision"]) == (yaml, "bf16") for rung in trained)
        return trained

    without = climb("fsdp", (*FIRST_LAYERS, most), NEVER, 120)
    if len(without) <= len(FIRST_LAYERS):
        raise Left("no largest size without offload was found, see above")
    offloaded = climb("fsdp_offload", (*FIRST_LAYERS, without[-1]["layers"]), most, 240)
    rows = []
    both = [(a, b) for a in offloaded for b in without if a["layers"] == b["layers"] > max(FIRST_LAYERS)]
    if both:
        a, b = both[-1]
        question = f"offload: a step at {a['parameters'] / 1e9:.3g}B parameters, fsdp.yaml"
        rows.append(Comparison(question, "s", [a["seconds"]], [b["seconds"]], 0.0, is_gain=True))
    if offloaded and offloaded[-1]["is_largest"]:
        ours, theirs = ([side[-1]["parameters"] / 1e9] for side in (offloaded, without))
        rows.append(Comparison("offload: the largest model, fsdp.yaml", "B", ours, theirs, 1.0, True, True))
    return rows


def usable_memory(bench: Bench) -> int:
    """80% of what is free of the CPU's, in this container too."""
    if bench.is_smoke:
        return 20_000_000
    free = psutil.virtual_memory().available
    limit, used = (Path("/sys/fs/cgroup", f"memory.{name}") for name in ("max", "current"))
    with contextlib.suppress(OSError, ValueError):  # ValueError: it says max
        free = min(free, int(limit.read_text()) - int(used.read_text()))
    return int(0.8 * free)


# ------------------------------------------------------------------------------------------------------------ main
QUESTIONS = {"mnist": mnist, "llama": llama, "packing": packing, "fp8": fp8, "offload": offload}
"""In this order: offload takes what time is left."""


def find_gpu() -> tuple[str, int, tuple[int, int]]:
    """Name, memory and compute capability, asked for in another process: this one must hold none of the memory."""
    code = (
        "import json, torch; assert torch.cuda.is_available(); p = torch.cuda.get_device_properties(0);"
        "print(json.dumps([p.name, p.total_memory, [p.major, p.minor]]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    if done.returncode:
        sys.exit(f"no NVIDIA GPU: --smoke tries this script without one\n{done.stderr[-500:]}")
    name, memory, capability = json.loads(done.stdout.splitlines()[-1])
    return name, memory, tuple(capability)


def main() -> None:
    started = time.perf_counter()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("questions", nargs="*", help=", ".join(QUESTIONS))
    parser.add_argument("--data_dir", type=Path, default=Path("data"), help="folder with MNIST; nothing is downloaded")
    parser.add_argument("--smoke", action="store_true", help="on the CPU, tiny, to try the script")
    arguments = parser.parse_args()
    if unknown := set(arguments.questions) - set(QUESTIONS):
        parser.error(f"{', '.join(sorted(unknown))}: no such question ({', '.join(QUESTIONS)})")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # else it would leave processes behind
    gpu, memory, capability = ("CPU", 0, (0, 0)) if arguments.smoke else find_gpu()
    versions = {name: metadata.version(name) for name in ("torch", "accelerate", "transformers")}
    facts: dict[str, Any] = {
        "device": f"{gpu}, {memory / 2**30:.0f} GiB",
        "versions": versions | {"python": sys.version.split()[0]},
        "date": time.strftime("%Y-%m-%d"),
        "command": shlex.join(sys.orig_argv),
    }
    print(*(f"{name}: {value}" for name, value in facts.items()), sep="\n", flush=True)
    rows: list[Comparison] = []
    notes: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as name:
        folder, data_dir = Path(name), arguments.data_dir.absolute()
        bench = Bench(folder, data_dir, arguments.smoke, gpu, memory, capability, started)
        for question in [name for name in QUESTIONS if name in (arguments.questions or QUESTIONS)]:
            if bench.left < ALL_DONE - NO_MORE_QUESTIONS:
                notes[question] = "left out: no time left"
                print(f"{question}: {notes[question]}", flush=True)
                continue
            try:
                found = QUESTIONS[question](bench)
                rows += found
                print(table(found), flush=True)
            except Left as reason:
                notes[question] = f"left out: {reason}"
            except Exception as error:  # the other questions have answers all the same
                notes[question] = f"failed: {type(error).__name__}: {error}"
            if question in notes:
                print(f"{question}: {notes[question]}", flush=True)
            print(f"-- {time.perf_counter() - started:.0f} s so far\n", flush=True)
            results = facts | {"rows": [asdict(row) for row in rows], "notes": notes}
            file = folder / RESULTS.name if arguments.smoke else RESULTS
            file.write_text(json.dumps(results, indent=1) + "\n")
    print(table(rows))
    for question, note in notes.items():
        print(f"{question}: {note[:300]}")
    sys.exit(any(note.startswith("failed") for note in notes.values()))


if __name__ == "__main__":
    main()
