"""Data parallelism by hand (src/reference.py) against DDP and FSDP in train.py: seconds per step, all in one run.

    python -m benchmarks.data_parallel [--data_dir=DIR]      (DIR holds MNIST; without it, scikit-learn's digits)

Two processes of one thread each, in turn, several times; medians of the ratios and their spread. Equal work: the CNN,
AdamW, batches of 64, fp32; the first 50 losses are asserted to be the same within 1e-5. By hand there is an all_reduce
for each of the CNN's eight parameters after the backward pass; DDP reduces two buckets during it; FSDP gathers each
layer's weights twice and reduces its gradients once, which a model as small as this one doesn't need.
train.py also sums losses and counts, takes the gradient norm and keeps a record.
"""

import argparse
import json
import re
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

STEPS = 300
BIN = Path(sys.executable).parent
BY_HAND = [str(BIN / "torchrun"), "--standalone", "--nproc-per-node=2", "-m", "src.reference"]


def launched(yaml: str) -> list[str]:
    config = f"accelerate_configs/{yaml}.yaml"
    return [str(BIN / "accelerate"), "launch", "--config_file", config, "--main_process_port=0", "train.py"]


def run(variant: str, settings: list[str]) -> tuple[float, list[float]]:
    """Returns: milliseconds per step, and the losses."""
    with tempfile.TemporaryDirectory() as folder:
        command = BY_HAND if variant == "by hand" else launched(variant)
        command = [*command, *settings, f"--output_dir={folder}/run"]
        output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        if variant == "by hand":
            (milliseconds,) = re.findall(r"^([\d.]+) ms per step", output, re.MULTILINE)
            return float(milliseconds), [float(line.split()[-1]) for line in re.findall(r"^step .*", output, re.M)]
        records = [json.loads(line) for line in Path(folder, "run", "metrics.jsonl").read_text().splitlines()]
        summary = json.loads(Path(folder, "run", "summary.json").read_text())
        return 64e3 / summary["samples_per_second"], [r["train/loss"] for r in records if "train/loss" in r]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data_dir")
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    data = f"--task.data_dir={arguments.data_dir}" if arguments.data_dir else "--task.source=digits"
    settings = ["--config=configs/mnist.yaml", data, f"--max_steps={STEPS}", "--log_every=1", "--wandb.mode=disabled"]
    settings += ["--task.rotation=0", "--task.shift=0", f"--eval_every={STEPS}", "--save_every=1000"]
    settings += ["--epochs=30"] if not arguments.data_dir else []  # as slow a rise of the learning rate
    times: dict[str, list[float]] = {"by hand": [], "ddp": [], "fsdp": []}
    for _ in range(arguments.rounds):
        losses = {}
        for variant, found in times.items():
            milliseconds, losses[variant] = run(variant, settings)
            found.append(milliseconds)
        for variant in ("ddp", "fsdp"):
            pairs = list(zip(losses[variant], losses["by hand"], strict=True))[:50]
            assert all(abs(loss - expected) <= 1e-5 * expected for loss, expected in pairs), variant
    for variant, found in times.items():
        low, median, high = min(found), statistics.median(found), max(found)
        ratios = sorted(hand / other for hand, other in zip(times["by hand"], found, strict=True))
        print(
            f"{variant:<8} {median:7.2f} ms per step ({low:.2f} to {high:.2f}): "
            f"{statistics.median(ratios):.2f} times as fast as by hand ({ratios[0]:.2f} to {ratios[-1]:.2f})"
        )


if __name__ == "__main__":
    main()
