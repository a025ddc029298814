"""What only a GPU can answer: is train.py fast there, against a clock, the hardware's limit and the usual peers?

    python -m benchmarks.gpu [mnist] [llama] [packing] [fp8] [offload] [attention] [lean] [--data_dir=DIR] [--smoke]

On one NVIDIA H100 or H200; MNIST is downloaded where DIR lacks it. A call ends after 7.75 minutes, whatever still runs:
make five, `mnist packing`, `llama fp8`, `attention`, `lean` and `offload`. Each adds an entry to
benchmarks/gpu_results.json, which it writes after each question; where one has no answer, it says why. --smoke tries
the whole script with tiny models, on the CPU or on the GPU there is, also an emulated one (tests/gpu/build.py): its
figures mean nothing. On a machine with nothing but torch and no network, install the rest from wheels first:

    pip download --dest wheels --python-version 3.12 --only-binary=:all: -r requirements.txt psutil    # elsewhere
    pip install --no-index --find-links wheels $(python -m benchmarks.gpu --missing)                    # there

- mnist: configs/mnist_reference.yaml (14 epochs) to 99.1% in 10 seconds, configs/mnist_fast.yaml to 99% in 2, both with
  --cuda_graphs=true; and how many times as fast a step is with it as without. The clock is `seconds` in summary.json:
  from the first step to the end, with warm-up, all evaluations, the last checkpoint and the export, without start-up.
  How much of it is not training is printed.
- llama: 1.1 billion parameters in TinyLlama's shape, sequences of 4,096, bf16 with fp32 weights and optimizer, under
  single_gpu.yaml and fsdp.yaml (one process), --compile=true. Peers: the Trainer of transformers and a plain Accelerate
  loop as run_clm_no_trainer.py has it, both with sdpa, autocast and fused AdamW, and not compiled, as is their default.
  MFU = tokens/s x (6 N + 12 L H Q T) / the GPU's dense bf16 peak, as PaLM and nanochat have it: N parameters without
  the input embedding, L layers, H heads of size Q, T tokens per sequence; attention in full, nothing counted twice.
  Attention is computed by PyTorch's own FlashAttention 2, or by FA3 or FA4, as train.py's start-up summary says and is
  printed: asked are 42% with the first and 48% with the others.
- packing: instructions of log-normal length, packed, against Trainer with batches padded to their longest document, as
  it does by default; both not compiled. Real tokens per second.
- fp8: fsdp_fp8.yaml (needs torchao) against fsdp.yaml, on the model of llama; also how far the losses are apart.
- attention: tokens per second of a Llama of 0.2 billion parameters, on documents of 300 tokens (the median) packed into
  sequences of 4,096 and of 32,768, with task.attention=varlen against sdpa, which builds a mask of all pairs.
- lean: a Llama of 8 billion parameters in bf16 files, of random values, to which adapters are trained under fsdp.yaml:
  the seconds to the first step, and the most of the CPU's memory that the process takes, against what its files take.
- offload: the largest Llama that trains three steps with fsdp.yaml and with fsdp_offload.yaml, and what a step costs
  with offload at the largest size that fits both. A size is calculated from smaller ones, as memory grows by the layer,
  and has to train: up to 95% of the GPU's memory, or 80% of what is free of the CPU's. If it doesn't, fsdp.yaml has one
  more try with 7% less. The largest with offload is left out where the time that is left wouldn't suffice.

Equal work, which is asserted: parameters, steps, tokens and precision, in llama the loss in the end within 2%, and in
packing the documents and targets per epoch, in about as many steps. Each side runs in a fresh process, one after the
other. Speeds are of intervals of steps; the first, which loads and compiles, isn't counted. train.py's runs are ended
at their last step.
"""

import sys
from importlib.util import find_spec

PACKAGES = (
    "accelerate", "datasets", "evaluate", "huggingface_hub", "peft", "psutil", "pydantic", "safetensors", "sklearn",
    "torchvision", "transformers", "wandb", "yaml",
)  # fmt: skip
if __name__ == "__main__" and (absent := [name for name in PACKAGES if not find_spec(name)]):
    packages = " ".join({"sklearn": "scikit-learn", "yaml": "pyyaml"}.get(name, name) for name in absent)
    print(packages if "--missing" in sys.argv else f"nothing is measured: this machine has no {packages}")
    sys.exit()

import argparse
import contextlib
import json
import os
import re
import shlex
import signal
import statistics
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.language import Plan, assert_same_work, told, train_data, work, write_instructions, write_text
from benchmarks.pairs import Comparison, drift, table
from benchmarks.runs import NEVER, PROJECT, Side, running, train_py
from src.tasks.text.byte_tokenizer import byte_tokenizer
from src.tracking.performance import peak_flops

SECONDS = 465
COMMIT = ["git", "describe", "--always", "--dirty"]
LLAMA = {
    "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 22, "num_attention_heads": 32,
    "num_key_value_heads": 4, "vocab_size": 32_000,
}  # fmt: skip
BATCH, INTERVAL, INTERVALS = 8, 5, 4
MICRO = 4
"""Sequences at once: eager, a token takes 110 kB in each layer, 40 GB of them all; 18 GB are for parameters."""
SMALL = LLAMA | {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 12, "num_attention_heads": 16}
del SMALL["vocab_size"]  # bytes
LADDER = LLAMA | {"hidden_size": 4096, "intermediate_size": 8192, "num_key_value_heads": 32}
"""168 million parameters per layer, in matrices of 2^n bytes: pinned memory is handed out in such pieces."""
LLAMA_3 = {
    "hidden_size": 4096, "intermediate_size": 14_336, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 8, "vocab_size": 128_256,
}  # fmt: skip
TINY = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2,
}  # fmt: skip


@dataclass(frozen=True)
class Bench:
    """What all questions share."""

    folder: Path
    data_dir: Path
    is_smoke: bool
    is_cuda: bool
    end: float  # of the time there is, by perf_counter

    def plan(self, shape: dict[str, int], length: int, batch: int, **fields: Any) -> Plan:
        if self.is_smoke:
            shape, length = shape | TINY | ({"vocab_size": 512} if "vocab_size" in shape else {}), 64
        return Plan(shape, length, batch, lr=1e-4, is_cuda=self.is_cuda, **fields)

    def ours(self, settings: dict[str, Any], yaml: str, folder: Path) -> Side:
        """Return a run of train.py. A yaml means its GPUs: on the CPU the precision is that of the command line."""
        precision = "" if self.is_cuda else "fp8" if yaml == "fsdp_fp8" else "bf16"
        return Side(train_py(settings, yaml, precision=precision), folder, None if self.is_cuda else 1)

    def gpu(self, field: str) -> str:
        """Ask nvidia-smi, which takes none of the GPU's memory; an emulated GPU has none."""
        which = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
        query = ["nvidia-smi", f"--id={which}", f"--query-gpu={field}", "--format=csv,noheader,nounits"]
        if self.is_smoke:
            return "1000" if field != "name" else torch.cuda.get_device_name() if self.is_cuda else "CPU"
        return subprocess.run(query, stdout=subprocess.PIPE, text=True, check=True).stdout.strip()


def train(bench: Bench, yaml: str, plan: Plan, folder: Path, **settings: Any) -> tuple[Side, int]:
    """Run train.py on folder/data for the plan's epochs, and end it there. Return it, and the GPU's MiB in use then."""
    side = bench.ours(plan.settings(folder / "data") | {"save_every": NEVER, **settings}, yaml, folder / yaml)
    with running(side):
        side.start()
        side.wait(lambda: any(record["epoch"] > plan.epochs - 1e-6 for record in side.records))
        side.signal(signal.SIGSTOP)
        return side, int(bench.gpu("memory.used"))


def reason(error: RuntimeError) -> str:
    """Return the line in which train.py says why it failed; without one, the end of what it printed."""
    lines = re.findall(r"^(?:train\.py: |(?!subprocess)[\w.]+Error: ).*", str(error), re.MULTILINE)
    return lines[-1] if lines else str(error)[-2000:]


def peer(bench: Bench, name: str, plan: Plan, folder: Path) -> tuple[Side, list[float]]:
    """Run a peer to its end. Return it, and the seconds of each interval but the first."""
    side = Side(plan.peer(f"language_peers.{name}", folder), folder / name, None if bench.is_cuda else 1)
    side.run()
    return side, np.diff([record["time"] for record in side.records]).tolist()


def mnist(bench: Bench) -> Iterator[Comparison]:
    every = 5 if bench.is_smoke else 134  # a seventh of an epoch

    def run(config: str, has_graphs: bool, **settings: Any) -> tuple[Side, list[float]]:
        """Return also the milliseconds of a step in each interval."""
        settings |= {"config": PROJECT / "configs" / f"{config}.yaml", "task.data_dir": bench.data_dir}
        settings |= {"save_every": NEVER, "log_every": every, "cuda_graphs": has_graphs and bench.is_cuda}
        settings |= {"max_steps": 20, "eval_every": NEVER} if bench.is_smoke else {}
        side = bench.ours(settings, "single_gpu", Path(tempfile.mkdtemp(dir=bench.folder)))
        side.run()
        return side, [64e3 / record["perf/samples_per_second"] for record in side.records]

    for config, epochs, seconds, accuracy in (("mnist_reference", 14, 10.0, 99.1), ("mnist_fast", None, 2.0, 99.0)):
        side, (first, *others) = run(config, has_graphs=True)
        found = side.summary
        assert bench.is_smoke or (found["device"] == "cuda" and epochs in (None, round(found["epoch"])))
        warm_up = every * (first - statistics.median(others)) / 1e3
        evaluations = found["seconds"] - 64 * found["step"] / found["samples_per_second"]
        rest = f"{warm_up:.2f} s are warm-up, {evaluations:.2f} evaluation, {found['save_pause_seconds']:.2f} saving"
        print(f"{config}: {found['step']} steps in {found['seconds']:.2f} s, of which {rest}")
        yield Comparison(f"{config}, single_gpu.yaml", "s", [found["seconds"]], [seconds], 1.0, is_gain=False)
        yield Comparison(f"{config}: accuracy", "%", [100 * found["eval/accuracy"]], [accuracy], 1.0, True, True)
    ours, theirs = (run("mnist_reference", graphs, max_steps=938, eval_every=NEVER)[1][1:] for graphs in (True, False))
    yield Comparison("mnist: a step with cuda_graphs against one without", "ms", ours, theirs, 1.0, is_gain=True)


@cache
def train_llama(bench: Bench, yaml: str) -> tuple[Side, list[float]]:
    """Run it once per yaml: the questions share it. Return it, and the tokens per second of each interval but one."""
    plan, folder = bench.plan(LLAMA, 4096, BATCH, interval=INTERVAL), bench.folder / "llama"
    if not folder.exists():
        write_text(folder, INTERVALS * INTERVAL * BATCH, plan.length)
    side, _ = train(bench, yaml, plan, folder, micro_batch_size=MICRO, compile=not bench.is_smoke)
    steps, done = INTERVALS * INTERVAL, work(side)
    assert (done["steps"], done["tokens"]) == (steps, steps * BATCH * plan.length)
    assert all(record["perf/padding"] == 0 for record in side.records)
    return side, [record["perf/tokens_per_second"] for record in side.records[1:]]


def llama(bench: Bench) -> Iterator[Comparison]:
    plan = bench.plan(LLAMA, 4096, BATCH, interval=INTERVAL, micro=MICRO, passes=BATCH // MICRO)
    peers: dict[str, tuple[Side, list[float]]] = {}
    first, _ = train_llama(bench, "single_gpu")
    done, losses = work(first), first.values

    def assert_same(name: str, side: Side) -> None:
        assert_same_work({"single_gpu": done, name: work(side)})
        off = drift(side.values[-1:], losses[-1:])
        assert off < 0.02, f"{name}: a last loss of {side.values[-1]}, that of single_gpu is {losses[-1]}"

    (tuned,) = told(first, "tuned +(.*)")
    print(f"llama: {tuned}; {done}, losses of single_gpu {losses}")
    width, layers = plan.shape["hidden_size"], plan.shape["num_hidden_layers"]  # H x Q is the width
    per_token = 6 * (done["parameters"] - plan.shape["vocab_size"] * width) + 12 * layers * width * plan.length
    for yaml in ("single_gpu", "fsdp"):
        side, ours = train_llama(bench, yaml)
        assert_same(yaml, side)
        what = f"llama {done['parameters'] / 1e9:.2g}B, {yaml}.yaml"
        if peak := peak_flops(bench.gpu("name"), "bf16"):
            mfu, target = [speed * per_token / peak for speed in ours], 0.48 if re.search("FA[34]", tuned) else 0.42
            yield Comparison(f"{what}: MFU", "of the peak", mfu, [1.0] * len(mfu), target, True, True)
        for name, label in (("sequential", "trainer"), ("plain", "plain")):
            if name not in peers:
                peers[name] = peer(bench, name, plan, bench.folder / "llama")
                assert_same(name, peers[name][0])
            theirs = [INTERVAL * BATCH * plan.length / seconds for seconds in peers[name][1]]
            yield Comparison(f"{what}, {label}", "tokens/s", ours, theirs, 1.25, True, True)


def packing(bench: Bench) -> Iterator[Comparison]:
    folder, (documents, median) = bench.folder / "packing", (200, 15) if bench.is_smoke else (1024, 200)
    plan = bench.plan(SMALL, 2048, 8, epochs=3)
    write_instructions(folder, documents, median, plan.length)
    run, _ = train(bench, "single_gpu", plan, folder)
    data, done = train_data(run), work(run)
    steps = -(-data["sequences"] // plan.batch)
    sizes = [*([plan.batch] * (steps - 1)), data["sequences"] - plan.batch * (steps - 1)]  # of the steps of an epoch
    seconds = [s / r["perf/samples_per_second"] for s, r in zip(sizes * plan.epochs, run.records, strict=True)]
    ours = [data["tokens"] / sum(seconds[i : i + steps]) for i in range(steps, len(seconds), steps)]

    # documents that are padded to one length at once, and how often per step, for as many steps as ours; a pass over
    # more than 32 documents would not fit where one of them is long
    ways = [(micro, passes) for passes in range(1, 9) for micro in range(1, 33)]
    micro, passes = min(ways, key=lambda way: (abs(-(-documents // (way[0] * way[1])) - steps), way[1], way[0]))
    side, seconds = peer(bench, "random", replace(plan, micro=micro, passes=passes), folder)
    theirs = work(side)
    off, padded = theirs.pop("steps") / done.pop("steps") - 1, theirs.pop("padded_tokens")
    assert abs(off) < 0.05, f"their steps are {off:+.0%}"
    assert_same_work({"packed": done | {"targets": plan.epochs * data["targets"]}, "padded": theirs})
    paddings = 1 - data["tokens"] / (data["sequences"] * plan.length), 1 - done["tokens"] / padded
    print(f"packing: {done}; padding {paddings[0]:.1%} packed, {paddings[1]:.1%} padded, {off:+.1%} steps there")
    question, speeds = f"packing {done['parameters'] / 1e6:.3g}M, Trainer padded", [data["tokens"] / s for s in seconds]
    yield Comparison(question, "real tokens/s", ours, speeds, 3.0, is_gain=True, is_speed=True)


def fp8(bench: Bench) -> Iterator[Comparison]:
    (half, half_speeds), (eighth, speeds) = (train_llama(bench, yaml) for yaml in ("fsdp", "fsdp_fp8"))
    assert_same_work({"fsdp": work(half) | {"precision": "fp8"}, "fsdp_fp8": work(eighth)})
    print(f"fp8: losses up to {drift(eighth.values, half.values):.2%} apart: {eighth.values}, {half.values}")
    question = "fsdp_fp8.yaml against fsdp.yaml"
    yield Comparison(question, "tokens/s", speeds, half_speeds, 0.0, is_gain=True, is_speed=True)
    yield Comparison(f"{question}: loss", "nats", eighth.values, half.values, 0.0, is_gain=True)


@cache
def train_layers(bench: Bench, yaml: str, layers: int) -> tuple[float, float, int] | None:
    """Train three steps. Return billions of parameters, seconds per step and MiB of the GPU; None: they don't fit."""
    folder, plan = bench.folder / f"{yaml}_{layers}", bench.plan(LADDER, 1024, 1)
    write_text(folder, 3, plan.length)
    try:
        side, memory = train(bench, yaml, replace(plan, shape=plan.shape | {"num_hidden_layers": layers}), folder)
    except RuntimeError as error:
        print(f"offload: {yaml}, {layers} layers: {reason(error)}", flush=True)
        return None
    seconds = min(1 / record["perf/samples_per_second"] for record in side.records)  # the first step allocates
    memory = layers * (100 if yaml == "fsdp" else 50) if bench.is_smoke else memory
    found = work(side)["parameters"] / 1e9, seconds, memory
    print(f"offload: {yaml}, {layers} layers: {found}", flush=True)
    return found


def largest(bench: Bench) -> int:
    """Return the number of layers that trained with fsdp.yaml and nearly fills the GPU."""
    small, larger = filter(None, (train_layers(bench, "fsdp", layers) for layers in (2, 4)))
    room = 0.95 * int(bench.gpu("memory.total")) - small[2]  # 95%: there are always gaps
    fitting = 2 + int(room / max((larger[2] - small[2]) / 2, 1))
    return next((n for n in (fitting, round(fitting * 0.93)) if train_layers(bench, "fsdp", n)), 4)


def offload(bench: Bench) -> Iterator[Comparison]:
    shape = bench.plan(LADDER, 1024, 1).shape
    width, rest = shape["hidden_size"], 2 * shape["vocab_size"] * shape["hidden_size"]
    # of the CPU's memory a parameter takes 16 bytes, as it would of the GPU's, and there are the copies of a block
    most = int((usable_memory() / 17 - rest) / (4 * width**2 + 3 * width * shape["intermediate_size"]))
    alone = largest(bench)
    started, both = time.perf_counter(), min(alone, most)
    ours = train_layers(bench, "fsdp_offload", both)
    took, theirs = time.perf_counter() - started, train_layers(bench, "fsdp", both)
    if not (ours and theirs):
        raise RuntimeError(f"{both} layers do not train with both")
    question = f"offload: a step at {ours[0]:.3g}B parameters, fsdp.yaml"
    yield Comparison(question, "s", [ours[1]], [theirs[1]], 0.0, is_gain=True)
    # too few rather than too many: what the embeddings take of the GPU doesn't grow with the layers
    more = min(most, int(both * 0.95 * int(bench.gpu("memory.total")) / ours[2]))
    if more > both:
        needed, left = 1.2 * took * more / both, bench.end - time.perf_counter()
        print(f"offload: {more} layers would take about {needed:.0f} s, of {left:.0f} that are left", flush=True)
        ours = (needed < left and train_layers(bench, "fsdp_offload", more)) or ours
    if theirs := train_layers(bench, "fsdp", alone):
        yield Comparison("offload: the largest model, fsdp.yaml", "B", [ours[0]], [theirs[0]], 1.0, True, True)


def usable_memory() -> int:
    """Return 80% of what is free of the CPU's, in bytes, in this container too."""
    free = psutil.virtual_memory().available
    limit, used = (Path("/sys/fs/cgroup", f"memory.{name}") for name in ("max", "current"))
    with contextlib.suppress(OSError, ValueError):  # ValueError: it says max
        free = min(free, int(limit.read_text()) - int(used.read_text()))
    return int(0.8 * free)


def attention(bench: Bench) -> Iterator[Comparison]:
    for length in (4096,) if bench.is_smoke else (4096, 32_768):
        folder, plan = bench.folder / f"attention_{length}", bench.plan(SMALL, length, 8, epochs=2)
        sides = {}
        for kind in ("varlen", "sdpa"):
            documents = 100 if bench.is_smoke else 6 * 8 * length // 500  # 500: their mean
            write_instructions(folder / kind, documents, 300, 4096)
            settings = {"task.attention": kind, "micro_batch_size": 1, "task.train_on_prompts": True}
            try:
                sides[kind], memory = train(bench, "single_gpu", plan, folder / kind, **settings)
                loss = sides[kind].values[-1]
                print(f"attention: {kind} at {length}: loss {loss:.4f}, {memory} MiB", flush=True)
            except RuntimeError as error:
                print(f"attention: {kind} at {length}: {reason(error)}", flush=True)
        if len(sides) == 2:
            assert_same_work({kind: work(side) for kind, side in sides.items()})
            ours, theirs = ([r["perf/tokens_per_second"] for r in side.records[1:]] for side in sides.values())
            yield Comparison(f"attention at {length}: varlen, masked", "tokens/s", ours, theirs, 1.0, True, True)


def lean(bench: Bench) -> Iterator[Comparison]:
    plan, folder = bench.plan(LLAMA_3, 1024, 1), bench.folder / "lean"
    write_text(folder, 4, plan.length)
    size = write_model(LlamaConfig(**{"vocab_size": 258, **plan.shape}), folder / "model")
    settings = plan.settings(folder / "data") | {"max_steps": 2, "eval_every": NEVER, "save_every": NEVER}
    del settings["task.architecture"]
    settings |= {"task.model": folder / "model", "task.lora.r": 16}
    side = bench.ours(settings, "fsdp", folder / "run")
    started = time.perf_counter()
    with running(side):
        side.start()
        side.wait(lambda: bool(side.records))
        seconds = time.perf_counter() - started
        processes = psutil.Process().children(recursive=True)
        peak = max(int(re.findall(r"VmHWM:\s+(\d+)", Path(f"/proc/{p.pid}/status").read_text())[0]) for p in processes)
    print(f"lean: {size / 1e9:.1f} GB of files, {seconds:.0f} s to the first step")
    question = "lean: the most of the CPU's memory, the files"
    yield Comparison(question, "GB", [peak * 1024 / 1e9], [size / 1e9], 1.0, is_gain=False)


def write_model(config: LlamaConfig, folder: Path) -> int:
    """Write a model of random values in bf16, a file for each layer and one for the rest. Return its size in bytes."""
    with torch.device("meta"):
        shapes = {name: weight.shape for name, weight in LlamaForCausalLM(config).state_dict().items()}
    place = {name: f"{name.split('.')[2] if '.layers.' in name else 'rest'}.safetensors" for name in shapes}
    config.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    for file in sorted(set(place.values())):
        names = [name for name in shapes if place[name] == file]
        weights = {name: torch.rand(shapes[name], dtype=torch.bfloat16) / 50 - 0.01 for name in names}
        save_file(weights, folder / file, {"format": "pt"})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": place}))
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))


QUESTIONS = {
    "mnist": mnist, "llama": llama, "packing": packing, "fp8": fp8, "attention": attention, "lean": lean,
    "offload": offload,
}  # fmt: skip


def no_time_left(*_: Any) -> None:
    raise TimeoutError("no time left")


def main() -> None:
    started = time.perf_counter()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("questions", nargs="*", default=list(QUESTIONS), help=", ".join(QUESTIONS))
    parser.add_argument("--data_dir", type=Path, default=Path("data"), help="folder with MNIST")
    parser.add_argument("--smoke", action="store_true", help="tiny models, to try the script")
    parser.add_argument("--save", type=Path, help="another file for the rows")
    chosen = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # else it would leave processes behind
    signal.signal(signal.SIGALRM, no_time_left)
    rows: list[Comparison] = []
    errors: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as name:
        is_cuda, end = not chosen.smoke or torch.cuda.is_available(), started + (3600 if chosen.smoke else SECONDS)
        bench = Bench(Path(name), chosen.data_dir.absolute(), chosen.smoke, is_cuda, end)
        facts: dict[str, Any] = {
            "device": f"{bench.gpu('name')}, {bench.gpu('memory.total')} MiB",
            "versions": {name: metadata.version(name) for name in ("torch", "accelerate", "transformers")},
            "commit": subprocess.run(COMMIT, cwd=PROJECT, stdout=subprocess.PIPE, text=True).stdout.strip(),
            "date": time.strftime("%Y-%m-%d"),
            "command": shlex.join(["python", "-m", "benchmarks.gpu", *sys.argv[1:]]),
        }
        print(facts, flush=True)
        file = chosen.save or Path(name if chosen.smoke else Path(__file__).parent, "gpu_results.json")
        earlier = json.loads(file.read_text()) if file.exists() else []
        for question in chosen.questions:
            signal.alarm(max(1, int(end - time.perf_counter())))
            try:
                for row in QUESTIONS[question](bench):
                    rows.append(row)
                    print(table([row]), flush=True)
            except Exception as error:  # the other questions have answers all the same
                errors[question] = f"{type(error).__name__}: {error}"
                print(f"{question}: {errors[question]}", flush=True)
            signal.alarm(0)
            results = facts | {"rows": [asdict(row) for row in rows], "errors": errors}
            file.write_text(json.dumps([*earlier, results], indent=1) + "\n")
    print(table(rows))
    sys.exit(bool(errors))


if __name__ == "__main__":
    main()
