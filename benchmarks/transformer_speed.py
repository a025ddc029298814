"""Tokens per second of train.py (task causal_lm) against the Trainer of transformers, on the CPU, from scratch.

    python -m benchmarks.transformer_speed --data=FILE.txt      (any text of UTF-8; none: a generated one)
    python -m benchmarks.transformer_speed --precision fp32 bf16 --processes 1 2 --steps=20 --rounds=3

Both sides run in turn, several times, each in fresh processes; the medians and their spread are printed. A speed is
that of the steps after the first 10, from time stamps every 10 steps that each side takes in its own loop; starting,
evaluation and export are not in it. What equal work means:
- the same Llama of 10.8 million parameters with the same first weights and sdpa, fp32 weights, fused AdamW at a
  constant learning rate, no clipping, no dropout, a record every 10 steps;
- the same sequences of 256 tokens, each seen once, in the same order, 8 per step over all processes;
- one process with 2 threads, or two on gloo with one thread each, in DDP: ours by `accelerate launch`, theirs by
  `python` and `torchrun`.
The number of parameters, of steps, of tokens and of processes, the device and the precision must be the same, and the
training loss of every interval within 1%; else this ends with an error and no figure.

Different on purpose: ours goes through its packing of documents (all sequences are full here, so it has nothing to
pack), divides the summed loss by an exact count over all processes, as Trainer also does by default, and computes the
gradient norm in float64 for each record, where Trainer computes it in fp32 at every step. Ours learns from 256 targets
per sequence, Trainer from 255, since its model shifts the labels. Two of its defaults are off: the search for
unused parameters (DDP), which ours doesn't do, and its shuffling, since its data comes in the order of ours.
"""

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments, set_seed

from src.data.byte_tokenizer import byte_tokenizer

PROJECT = Path(__file__).parent.parent
LENGTH, BATCH, INTERVAL = 256, 8, 10
CORES = 2
SHAPE: dict[str, Any] = {
    "hidden_size": 384,
    "intermediate_size": 1024,
    "num_hidden_layers": 6,
    "num_attention_heads": 6,
    "num_key_value_heads": 6,
}
LR, WEIGHT_DECAY, SEED = 1e-3, 0.01, 0


@dataclass(frozen=True)
class Run:
    """What one side did and how fast. `work` must be the same on both."""

    work: dict[str, Any]
    losses: list[float]
    """Mean training loss of each interval."""
    speeds: list[float]
    """Tokens per second over all processes in each interval but the first."""

    @property
    def speed(self) -> float:
        """Tokens per second."""
        return statistics.harmonic_mean(self.speeds)  # the intervals are of equal size


# -------------------------------------------------------------------------------------------------------------- data
def prepare(data: Path | None, folder: Path, steps: int) -> None:
    """Writes a text that makes exactly `steps` batches of full sequences, and these sequences as theirs reads them."""
    size = steps * BATCH * LENGTH - 1  # of bytes: a token in front begins the document
    text = data.read_text(encoding="utf-8") if data else generated(size)
    text = (text * (size // len(text) + 1)).encode()[:size].decode(errors="ignore")
    text += " " * (size - len(text.encode()))
    (folder / "data").mkdir()
    (folder / "data" / "train.txt").write_bytes(text.encode())
    (folder / "data" / "validation.txt").write_bytes(text.encode()[:LENGTH].decode(errors="ignore").encode())
    sequences = torch.tensor(byte_tokenizer()(text, verbose=False)["input_ids"]).view(-1, LENGTH)
    order = np.random.default_rng([SEED, 0]).permutation(len(sequences))  # as src/batches.py has it
    torch.save(sequences[order], folder / "sequences.pt")


def generated(size: int) -> str:
    """At least `size` bytes of words that a model can learn: a few are frequent, most are rare."""
    source = random.Random(SEED)
    words = ["".join(source.choices("etaoinshrdlu", k=source.randint(1, 8))) for _ in range(1000)]
    return " ".join(source.choices(words, weights=[1 / rank for rank in range(1, 1001)], k=size))


# -------------------------------------------------------------------------------------------------------------- ours
def run_ours(folder: Path, processes: int, precision: str) -> Run:
    output = Path(tempfile.mkdtemp(dir=folder)) / "run"
    launcher = [sys.executable, "-m", "accelerate.commands.launch", "--main_process_port=0"]
    launcher += [f"--config_file=accelerate_configs/{'cpu' if processes == 1 else 'ddp'}.yaml"]
    launcher += [f"--num_processes={processes}", f"--mixed_precision={precision.replace('fp32', 'no')}"]
    settings = {
        "output_dir": output,
        "seed": SEED,
        "epochs": 1,
        "global_batch_size": BATCH,
        "log_every": INTERVAL,
        "wandb.mode": "disabled",
        "task.name": "causal_lm",
        "task.dataset": folder / "data",
        "task.sequence_length": LENGTH,
        "task.architecture.model_type": "llama",
        **{f"task.architecture.{name}": value for name, value in SHAPE.items()},
        "optim.lr": LR,
        "optim.weight_decay": WEIGHT_DECAY,
        "optim.schedule": "constant",
        "optim.warmup_steps": 0,
    }
    execute([*launcher, "train.py", *(f"--{name}={value}" for name, value in settings.items())], folder, processes)
    summary = json.loads((output / "summary.json").read_text())
    records = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    records = [record for record in records if "train/loss" in record]
    assert all(record["perf/padding"] == 0 for record in records)
    work = {
        "parameters": summary["trained_parameters"],
        "steps": summary["step"],
        "tokens": round(summary["epoch"] * summary["data"]["train"]["tokens"]),
        "processes": summary["num_processes"],
        "device": summary["device"],
        "precision": summary["precision"],
    }
    speeds = [record["perf/tokens_per_second"] for record in records[1:]]
    return Run(work, [record["train/loss"] for record in records], speeds)


# ------------------------------------------------------------------------------------------------------------ theirs
def run_theirs(folder: Path, processes: int, precision: str) -> Run:
    launcher = [sys.executable]
    if processes > 1:
        launcher += ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
    side = ["-m", "benchmarks.transformer_speed", "--side=trainer", f"--folder={folder}", f"--precision={precision}"]
    execute([*launcher, *side], folder, processes)
    return Run(**json.loads((folder / "trainer.json").read_text()))


class Sequences(Dataset[dict[str, Tensor]]):
    """Sequences of shape (sequences, LENGTH), int64, that counts the tokens it gave out."""

    def __init__(self, sequences: Tensor) -> None:
        self.sequences = sequences
        self.tokens = 0

    def __len__(self) -> int:
        return len(self.sequences)

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        self.tokens += LENGTH
        return {"input_ids": self.sequences[i], "labels": self.sequences[i]}


class Clock(TrainerCallback):
    """When each interval ended."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def on_step_end(self, args: TrainingArguments, state: Any, control: Any, **_: Any) -> None:
        if state.global_step % INTERVAL == 0:
            self.ends.append(time.perf_counter())


def train_theirs(folder: Path, precision: str) -> None:
    """One process of theirs; the first writes trainer.json."""
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    arguments = TrainingArguments(
        output_dir=str(folder / "trainer"),
        use_cpu=True,
        ddp_backend="gloo" if world_size > 1 else None,
        ddp_find_unused_parameters=False,
        bf16=precision == "bf16",
        per_device_train_batch_size=BATCH // world_size,
        train_sampling_strategy="sequential",
        num_train_epochs=1,
        optim="adamw_torch_fused",
        learning_rate=LR,
        weight_decay=WEIGHT_DECAY,
        lr_scheduler_type="constant",
        max_grad_norm=0,
        logging_steps=INTERVAL,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        seed=SEED,
    )
    set_seed(SEED)
    tokenizer = byte_tokenizer()
    ids = {name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), max_position_embeddings=LENGTH, **SHAPE, **ids))
    assert model.config._attn_implementation == "sdpa"
    assert model.dtype == torch.float32
    sequences, clock = Sequences(torch.load(folder / "sequences.pt")), Clock()
    trainer = Trainer(model=model, args=arguments, train_dataset=sequences, callbacks=[clock])
    trainer.train()
    work = {
        "parameters": sum(p.numel() for p in model.parameters() if p.requires_grad),
        "steps": trainer.state.global_step,
        "tokens": int(trainer.accelerator.reduce(torch.tensor(sequences.tokens), "sum")),
        "processes": trainer.accelerator.num_processes,
        "device": trainer.accelerator.device.type,
        "precision": trainer.accelerator.mixed_precision.replace("no", "fp32"),
    }
    losses = [record["loss"] for record in trainer.state.log_history if "loss" in record]
    speeds = [INTERVAL * BATCH * LENGTH / seconds for seconds in np.diff(clock.ends).tolist()]
    if trainer.is_world_process_zero():
        (folder / "trainer.json").write_text(json.dumps(asdict(Run(work, losses, speeds))))
    trainer.accelerator.wait_for_everyone()
    trainer.accelerator.end_training()


# ----------------------------------------------------------------------------------------------------------- compare
def execute(command: list[str], folder: Path, processes: int) -> None:
    """Runs it without GPUs and network, with an equal share of CORES threads per process."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(("WANDB_", "ACCELERATE_", "FSDP_"))}
    env |= {
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": str(CORES // processes),
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_CACHE": str(folder / "cache"),
    }
    done = subprocess.run(command, cwd=PROJECT, env=env, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(command)}\n{done.stdout}{done.stderr}\nended with exit code {done.returncode}")


def compare(folder: Path, rounds: int, processes: int, precision: str) -> None:
    pairs = []
    for _ in range(rounds):
        ours, theirs = run_ours(folder, processes, precision), run_theirs(folder, processes, precision)
        assert ours.work == theirs.work, f"not the same work: ours {ours.work}, theirs {theirs.work}"
        for a, b in zip(ours.losses, theirs.losses, strict=True):
            assert abs(a / b - 1) < 0.01, f"not the same losses: ours {ours.losses}, theirs {theirs.losses}"
        assert len(ours.speeds) == len(theirs.speeds)
        pairs.append((ours, theirs))
    name = f"{precision} x{processes}"
    for who, runs in zip(("ours", "theirs"), zip(*pairs, strict=True), strict=True):
        low, median, high = (f(run.speed for run in runs) for f in (min, statistics.median, max))
        print(f"{name}  {who:<6}  {median:8,.0f} tokens per second  ({low:,.0f} to {high:,.0f})")
    ratios = sorted(ours.speed / theirs.speed for ours, theirs in pairs)
    low, median, high = ratios[0], statistics.median(ratios), ratios[-1]
    print(f"{name}  ours / theirs {median:.3f}  ({low:.3f} to {high:.3f}) times as fast")
    work = f"{theirs.work['parameters']:,} parameters, {theirs.work['steps']} steps, {theirs.work['tokens']:,} tokens"
    print(f"{name}  both: {work}; last loss {ours.losses[-1]:.4f}, {theirs.losses[-1]:.4f}\n", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="a text; none: a generated one")
    parser.add_argument("--precision", nargs="+", choices=("fp32", "bf16"), default=["fp32"])
    parser.add_argument("--processes", nargs="+", type=int, choices=(1, 2), default=[1, 2])
    parser.add_argument("--steps", type=int, default=20, help="measured ones, a multiple of 10")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--side", choices=("trainer",), help=argparse.SUPPRESS)  # how this starts theirs
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.side:
        train_theirs(arguments.folder, *arguments.precision)
        return
    if arguments.steps <= 0 or arguments.steps % INTERVAL:
        parser.error(f"--steps={arguments.steps}: must be a multiple of {INTERVAL}")
    print(f"torch {torch.__version__}, {CORES} threads in all\n")
    with tempfile.TemporaryDirectory() as folder:
        prepare(arguments.data, Path(folder), INTERVAL + arguments.steps)
        for precision in arguments.precision:
            for processes in arguments.processes:
                compare(Path(folder), arguments.rounds, processes, precision)


if __name__ == "__main__":
    main()
