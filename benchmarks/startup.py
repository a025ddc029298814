"""Start-up: until `--help` or a mistake is answered, and from `accelerate launch` to the first finished step.

    python -m benchmarks.startup [--data_dir=DIR]

- `python train.py --help` and a misspelt setting, against the 0.7 s that they are to take. Nothing is imported before
  the settings are valid but pydantic and yaml.
- configs/mnist.yaml, from `accelerate launch` to its first record (log_every=1), against `accelerate launch` of a
  script that only builds an Accelerator(). The launcher is most of both: it imports torch, and then starts a process
  that imports it again. Ours reads MNIST besides, and takes a step. FSDP, the checkpoints' library, torch._dynamo
  (a second; any optimizer would import it: docs/upstream.md), `evaluate`, scikit-learn, transformers and torchvision
  are imported after it, or never.
"""

import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks import pairs
from benchmarks.pairs import Comparison, in_turn
from benchmarks.runs import PROJECT, launch_command


def answered(*arguments: str, exit_code: int) -> Callable[[], float]:
    def seconds() -> float:
        started = time.perf_counter()
        done = subprocess.run([sys.executable, "train.py", *arguments], cwd=PROJECT, capture_output=True)
        assert done.returncode == exit_code, done.stderr
        return time.perf_counter() - started

    return seconds


def until(says: str, *command: str) -> Callable[[], float]:
    """Seconds from starting the command to the first line that has `says` in it."""

    def seconds() -> float:
        with tempfile.TemporaryDirectory() as folder:
            started = time.perf_counter()
            filled = [part.replace("FOLDER", folder) for part in command]
            process = subprocess.Popen(
                [*launch_command("cpu", 1), *filled],
                cwd=PROJECT,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
            )
            assert process.stdout
            for line in process.stdout:
                if says in line:
                    found = time.perf_counter() - started
                    process.kill()  # its launcher gone, the training process stops by itself
                    process.stdout.read()  # until it has
                    return found
            raise AssertionError(f"{command} ended without a word of {says}")

    return seconds


def measure(data_dir: str) -> list[Comparison]:
    helped, mistaken = in_turn(5, answered("--help", exit_code=0), answered("--optim.lrr=1", exit_code=2))
    with tempfile.TemporaryDirectory() as folder:
        empty = Path(folder) / "empty.py"
        empty.write_text("from accelerate import Accelerator\nAccelerator()\nprint('built', flush=True)\n")
        ours, theirs = in_turn(
            5,
            until(
                "step      1/", "train.py", "--config=configs/mnist.yaml", f"--task.data_dir={data_dir}",
                "--log_every=1", "--max_steps=2", "--wandb.mode=disabled", "--output_dir=FOLDER/run",
            ),
            until("built", str(empty)),
        )  # fmt: skip
    limit = [0.7] * 5
    return [
        Comparison("start-up: --help, against 0.7 s", "s", helped, limit, 1, is_gain=False),
        Comparison("start-up: a mistake, against 0.7 s", "s", mistaken, limit, 1, is_gain=False),
        Comparison("start-up: first MNIST step, empty script", "s", ours, theirs, 1.4, is_gain=False),
    ]


if __name__ == "__main__":
    pairs.main(measure, __doc__)
