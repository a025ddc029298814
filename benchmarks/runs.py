"""Start the sides of a benchmark, alternate between them, and read their logs."""

import contextlib
import json
import math
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch

from benchmarks.pairs import in_turn

PROJECT = Path(__file__).resolve().parent.parent
CORES = 2
NEVER = 1_000_000_000
CNN: dict[str, Any] = {"config": PROJECT / "configs" / "mnist.yaml", "task.rotation": 0, "task.shift": 0}
CNN |= {"eval_every": NEVER, "save_every": NEVER}
"""The MNIST CNN without augmentation, fp32; neither evaluated nor saved before its end."""
LOSS = r'"train/loss": ([^,}]+)'


def has_bf16() -> bool:
    """Return whether this CPU multiplies in bf16. Else torch emulates it, at a tenth of fp32's speed."""
    able = torch.cpu.get_capabilities()
    return any(able.get(name) for name in ("avx512_bf16", "amx_bf16", "bf16"))  # of x86 and, the last, of ARM


def launch(yaml: str, processes: int = 1, precision: str = "") -> list[str]:
    """Return the launcher's part of a command line; without a precision, it is the yaml's."""
    launcher = [sys.executable, "-m", "accelerate.commands.launch", "--main_process_port=0"]
    launcher += [f"--config_file={PROJECT}/accelerate_configs/{yaml}.yaml", f"--num_processes={processes}"]
    return [*launcher, *([f"--mixed_precision={precision.replace('fp32', 'no')}"] if precision else [])]


def train_py(settings: dict[str, Any], yaml: str = "cpu", processes: int = 1, precision: str = "") -> list[str]:
    """Return the command of a run of train.py, which writes into `run` of the folder that it is started in."""
    return [*launch(yaml, processes, precision), f"{PROJECT}/train.py", *arguments(settings)]


def arguments(settings: dict[str, Any]) -> list[str]:
    return [f"--{name}={value}" for name, value in {"output_dir": "run", "wandb.mode": "disabled", **settings}.items()]


def own(name: str, *words: object) -> list[str]:
    """Return the command of a benchmark's own program: of a module, or of one of its sides, which the words name."""
    return [sys.executable, "-m", f"benchmarks.{name}", *map(str, words)]


def rate(amount: float, seconds: list[float]) -> list[float]:
    """Return the amount per second of each turn."""
    return [amount / s for s in seconds]


def ms_per_step(steps: int, seconds: list[float]) -> list[float]:
    return [1000 * s / steps for s in seconds]


@dataclass(frozen=True)
class Output:
    """The folder that a run of train.py has written."""

    folder: Path

    @property
    def records(self) -> list[dict[str, Any]]:
        """Those of the training, without evaluations."""
        lines = (self.folder / "metrics.jsonl").read_text().split("\n")[:-1]  # without one that is half written
        return [record for record in map(json.loads, lines) if "train/loss" in record]

    @property
    def losses(self) -> list[float]:
        """By step; of a step that was repeated after a kill, the last. NaN where it was non-finite."""
        by_step = {record["step"]: record["train/loss"] for record in self.records}
        return [math.nan if loss is None else loss for loss in by_step.values()]

    @property
    def summary(self) -> dict[str, Any]:
        return json.loads((self.folder / "summary.json").read_text())


@dataclass
class Side:
    """A command in a session of its own, which can be made to compute only while it is its turn.

    It runs in `folder`, on as many threads (None: as the libraries choose, and one GPU). A turn ends when `every` more
    matches of the pattern `ends`, in lines and with a number as its group, are in `file`.
    """

    command: list[str]
    folder: Path
    threads: int | None = 1
    ends: str = LOSS
    every: int = 1
    file: str = "run/metrics.jsonl"
    process: Any = None
    seconds: list[float] = field(default_factory=list)  # of its turns
    _awaited: int = 0
    _read: int = 0  # bytes of the file
    _values: list[float] = field(default_factory=list)

    @property
    def values(self) -> list[float]:
        """The numbers of all matches so far: of train.py the mean loss of each interval."""
        file = self.folder / self.file
        if file.exists():
            with file.open("rb") as stream:
                stream.seek(self._read)
                text = stream.read()
            text = text[: text.rfind(b"\n") + 1]  # the last line may be half written
            self._read += len(text)
            found = re.findall(self.ends, text.decode(errors="replace"), re.MULTILINE)
            self._values += [float(value.replace(",", "")) for value in found]
        return self._values

    @property
    def log(self) -> str:
        return (self.folder / "log").read_text(errors="replace")

    @property
    def output(self) -> Output:
        return Output(self.folder / "run")

    def start(self) -> None:
        env = {n: v for n, v in os.environ.items() if not n.startswith(("WANDB_", "ACCELERATE_", "FSDP_"))}
        gpu = env.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]  # with several, Trainer would use them all
        env["CUDA_VISIBLE_DEVICES"] = "" if self.threads else gpu
        env |= {"OMP_NUM_THREADS": str(self.threads)} if self.threads else {}
        env |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_CACHE": str(self.folder / "cache"), "PYTHONUNBUFFERED": "1"}
        env |= {"PYTHONPATH": os.pathsep.join(filter(None, (str(PROJECT), env.get("PYTHONPATH"))))}
        self.folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / "log").open("w") as log:
            how: dict[str, Any] = {"cwd": self.folder, "env": env, "stdout": log, "stderr": subprocess.STDOUT}
            self.process = psutil.Popen(self.command, start_new_session=True, **how)

    def turn(self, every: int | None = None) -> float:
        """Let it compute until its turn ends. Return the seconds that took."""
        self._awaited += every or self.every
        started = time.perf_counter()
        self.signal(signal.SIGCONT)
        self.wait(lambda: len(self.values) >= self._awaited)
        self.signal(signal.SIGSTOP)
        self.seconds.append(time.perf_counter() - started)
        return self.seconds[-1]

    def finish(self) -> None:
        self.signal(signal.SIGCONT)
        self.wait()

    def run(self) -> "Side":
        with running(self):
            self.start()
            self.wait()
        return self

    def wait(self, is_done: Callable[[], bool] | None = None) -> None:
        """Wait until `is_done`; without it, until the process has ended. Raise a RuntimeError if it fails."""
        while True:
            code = self.process.poll()
            if is_done() if is_done else code == 0:
                return
            if code is not None:
                raise RuntimeError(f"{shlex.join(self.command)}\n{self.log[-6000:]}\nexit code {code}")
            time.sleep(0.005)

    def signal(self, number: int) -> list[psutil.Process]:
        """Send it to the process and its children: launchers give theirs groups of their own. Return them all."""
        family: list[psutil.Process] = []
        with contextlib.suppress(psutil.NoSuchProcess):  # it has ended
            family = [*self.process.children(recursive=True), self.process] if self.process else []
        for member in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                member.send_signal(number)
        return family


@contextlib.contextmanager
def running(*sides: Side) -> Iterator[None]:
    """Leave no process behind: on a signal to stop they would save first, and hold the GPU's memory until then."""
    try:
        yield
    finally:
        for side in sides:
            psutil.wait_procs(side.signal(signal.SIGKILL), timeout=30)


def take_turns(rounds: int, sides: Sequence[Side]) -> list[list[float]]:
    """Start each and let it take a turn that doesn't count (imports, compiling, first allocations), then one per round,
    then all come to their ends. Return the seconds of each turn, shape (sides, rounds)."""
    with running(*sides):
        for side in sides:
            side.start()
            side.turn()
        seconds = in_turn(rounds, *(side.turn for side in sides))
        for side in sides:
            side.finish()
    return seconds


def write_images(folder: Path, count: int) -> None:
    """Write random images and labels as torchvision keeps MNIST's: `count` to train on, 100 to test."""
    random = np.random.default_rng(0)
    raw = folder / "MNIST" / "raw"
    raw.mkdir(parents=True)
    for name, size in (("train", count), ("t10k", 100)):
        images = random.integers(0, 256, (size, 28, 28), np.uint8)
        for kind, magic, values in (("images-idx3", 2051, images), ("labels-idx1", 2049, random.integers(0, 10, size))):
            head = np.array([magic, *values.shape], dtype=">i4").tobytes()
            (raw / f"{name}-{kind}-ubyte").write_bytes(head + values.astype(np.uint8).tobytes())
