"""Sharding's price: how much longer a step takes under FSDP than under DDP, and how much less memory it holds.

    python -m benchmarks.sharding

A Llama of 97.5 million parameters in fp32, two processes of one thread each on gloo: fsdp.yaml, which gathers a block's
parameters in the forward and again in the backward pass, and fsdp_grad_op.yaml, which gathers them once, both against
ddp.yaml. In turn, several times, each in fresh processes.

Equal work, which is asserted: the same model with the same first weights, 8 sequences of 128 tokens a step without
padding, in the same order, fused AdamW at a constant learning rate; the losses of all steps within 1e-4. A step's time
is what the run itself records, at every step; the first one, in which memory is touched for the first time, doesn't
count. Starting, the evaluation of one sequence, the checkpoint at the end and the export aren't in it, but take most
of this script's time.

Bytes are those of the tensors that a process holds from one step to the next, parameters, gradients and AdamW's state,
as tests/test_sharding.py has them counted (tests/count_bytes.py, started under the same yaml): resident memory would
also show what glibc keeps. They are no times, so that one count is enough.

Where the time goes: DDP reduces while the backward pass computes. FSDP on the CPU waits for each block's parameters
and gradients, and copies them into and out of flat buffers.
"""

import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import pairs
from benchmarks.pairs import Comparison

PROJECT = Path(__file__).parent.parent
PROCESSES, BATCH, LENGTH = 2, 8, 128
ROUNDS, WARM_UP, MEASURED = 3, 1, 3
PARAMETERS = 97.5e6
LLAMA = {
    "model_type": "llama", "hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 12,
    "num_attention_heads": 12, "num_key_value_heads": 12, "vocab_size": 16_384, "tie_word_embeddings": True,
}  # fmt: skip


@dataclass(frozen=True)
class Run:
    """What a run wrote down about itself."""

    summary: dict[str, Any]
    records: list[dict[str, Any]]
    """Those of the training, without evaluations."""


def launch_command(yaml: str, processes: int) -> list[str]:
    launcher = [str(Path(sys.executable).parent / "accelerate"), "launch", "--main_process_port=0"]
    return [*launcher, f"--config_file=accelerate_configs/{yaml}.yaml", f"--num_processes={processes}"]


def environment(threads: int = 1) -> dict[str, str]:
    """Without GPUs, and without what a user's shell says to W&B and Accelerate."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(("WANDB_", "ACCELERATE_", "FSDP_"))}
    return env | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"}


def launched(command: list[str], threads: int = 1) -> str:
    """What it prints."""
    done = subprocess.run(command, cwd=PROJECT, env=environment(threads), capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(command)}\n{done.stdout}{done.stderr}\nended with exit code {done.returncode}")
    return done.stdout


def arguments(settings: dict[str, Any]) -> list[str]:
    return [f"--{name}={value}" for name, value in settings.items()]


def read_run(output: Path) -> Run:
    records = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    summary = json.loads((output / "summary.json").read_text())
    return Run(summary, [record for record in records if "train/loss" in record])


# ------------------------------------------------------------------------------------------------------------- steps
def write_data(folder: Path) -> None:
    """A text of exactly the steps' sequences, and one sequence to evaluate on."""
    source = random.Random(0)
    for name, sequences in (("train", (WARM_UP + MEASURED) * BATCH), ("validation", 1)):
        size = sequences * LENGTH - 1  # of bytes: a token in front begins the document
        (folder / f"{name}.txt").write_text("".join(source.choices("etaoin shrdlu", k=size)))


def run(yaml: str, data: Path) -> Run:
    settings = {
        "global_batch_size": BATCH,
        "epochs": 1,
        "log_every": 1,
        "eval_every": 1_000_000,
        "save_every": 1_000_000,
        "wandb.mode": "disabled",
        "task.name": "causal_lm",
        "task.dataset": data,
        "task.sequence_length": LENGTH,
        "task.architecture": json.dumps(LLAMA),
        "optim.lr": 1e-3,
        "optim.schedule": "constant",
        "optim.warmup_steps": 0,
    }
    with tempfile.TemporaryDirectory() as folder:  # 1.6 GB, gone before the next run
        written = arguments(settings | {"output_dir": f"{folder}/run"})
        launched([*launch_command(yaml, PROCESSES), "train.py", *written])
        found = read_run(Path(folder, "run"))
    assert (found.summary["strategy"], found.summary["precision"]) == (yaml, "fp32")
    assert found.summary["num_processes"] == PROCESSES
    assert abs(found.summary["parameters"] / PARAMETERS - 1) < 0.01
    assert len(found.records) == WARM_UP + MEASURED
    assert all(record["perf/padding"] == 0 for record in found.records)
    return found


def seconds_per_step(found: Run) -> float:
    return statistics.median(BATCH * LENGTH / r["perf/tokens_per_second"] for r in found.records[WARM_UP:])


def assert_equal_losses(runs: dict[str, Run]) -> None:
    for yaml, found in runs.items():
        for record, expected in zip(found.records, runs["ddp"].records, strict=True):
            drift = abs(record["train/loss"] / expected["train/loss"] - 1)
            assert drift < 1e-4, f"{yaml}, step {record['step']}: a loss {drift:.0e} away from DDP's"


# ------------------------------------------------------------------------------------------------------------- bytes
def bytes_held(yaml: str) -> float:
    """By the process that holds most."""
    lines = launched([*launch_command(yaml, PROCESSES), "-m", "tests.count_bytes"]).splitlines()
    counts = [json.loads(line) for line in lines]
    assert [count["strategy"] for count in counts] == [yaml] * PROCESSES
    return max(count["parameters"] + count["gradients"] + count["optimizer"] for count in counts)


def measure(data_dir: str) -> list[Comparison]:
    yamls = ["ddp", "fsdp", "fsdp_grad_op"]
    times: dict[str, list[float]] = {yaml: [] for yaml in yamls}
    with tempfile.TemporaryDirectory() as folder:
        write_data(Path(folder))
        for _ in range(ROUNDS):
            runs = {yaml: run(yaml, Path(folder)) for yaml in yamls}
            assert_equal_losses(runs)
            for yaml, found in runs.items():
                times[yaml].append(seconds_per_step(found))
    sizes = {yaml: [bytes_held(yaml) / 1e6] for yaml in yamls}
    what = "97.5M Llama, fp32, x2"
    targets = {"fsdp": (1.2, 0.505), "fsdp_grad_op": (1.12, 0.505)}
    comparisons = []
    for yaml, (of_time, of_bytes) in targets.items():
        name = f"{yaml.replace('_', ' ')} against ddp, {what}"
        comparisons += [
            Comparison(f"sharding: step, {name}", "s", times[yaml], times["ddp"], of_time, is_gain=False),
            Comparison(f"sharding: bytes, {name}", "MB", sizes[yaml], sizes["ddp"], of_bytes, is_gain=False),
        ]
    return comparisons


if __name__ == "__main__":
    pairs.main(measure, __doc__)
