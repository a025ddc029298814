"""What the fault tests share: a short run, runs in the background, and what makes two runs the same."""

import contextlib
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import torch
from safetensors.torch import load_file

from tests.conftest import PROJECT, Run, clean_environment, launch_command

Whole = Callable[..., Run]
"""Of the fixture `whole`."""
INJECT = "tests/faults/inject.py"
SHORT = ("--max_steps=30", "--log_every=1", "--save_every=8", "--eval_every=23")
"""An epoch has 23 steps: checkpoints at 8, 16, 24 and 30, evaluations at 23 and 30. With dropout."""
EACH_STEP = (*SHORT, "--save_every=1", "--checkpoint.keep_last=9")
"""The same run, with the checkpoints of its last nine steps."""


class Started:
    """A launch in the background; as a context manager it leaves no process behind."""

    def __init__(self, config: str, *arguments: str, folder: Path, processes: int | None = None, **more: Any) -> None:
        environment = {name: more.pop(name) for name in list(more) if name.isupper()}
        self.folder = folder
        self._output = folder.parent / f"{folder.name}.log"
        with self._output.open("w") as output:
            self._launcher = psutil.Popen(
                launch_command(config, *arguments, folder=folder, processes=processes, **more),
                cwd=PROJECT,
                env=clean_environment(PYTHONUNBUFFERED="1", **environment),
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                # where pytest itself runs in the background of a shell, SIGINT is ignored, and children inherit that
                preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
            )

    @property
    def family(self) -> list[psutil.Process]:
        """The launcher, the processes that train and those that load data, orphans too."""
        return [p for p in psutil.process_iter() if f"--output_dir={self.folder}" in _command_line(p)]

    @property
    def output(self) -> str:
        return self._output.read_text()

    @property
    def trainers(self) -> list[psutil.Process]:
        """The processes that train, in the order of their ranks."""
        own = [p for p in self._launcher.children() if f"--output_dir={self.folder}" in _command_line(p)]
        return sorted(own, key=lambda process: process.pid)

    def wait_until(self, condition: Callable[[], Any], seconds: float = 120) -> "Started":
        end = time.monotonic() + seconds
        while not condition():
            assert self._launcher.poll() is None, self.output
            assert time.monotonic() < end, self.output
            time.sleep(0.02)
        return self

    def wait_for(self, text: str) -> "Started":
        """Until it has printed `text`."""
        return self.wait_until(lambda: text in self.output)

    def send(self, number: signal.Signals, to: psutil.Process | None = None) -> "Started":
        os.kill((to or self._launcher).pid, number)
        return self

    def kill_all(self) -> "Started":
        """SIGKILL to the launcher and all processes under it, at once."""
        for process in self.family:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self._launcher.wait()
        return self

    def ended(self, seconds: float = 60) -> Run:
        """Waits for the launcher and for every process that it had started."""
        end = time.monotonic() + seconds
        while left := self.family:
            assert time.monotonic() < end, f"left running: {left}\n{self.output}"
            time.sleep(0.02)
            self._launcher.poll()
        return Run(self._launcher.wait(), self.output, self.output, self.folder)

    def __enter__(self) -> "Started":
        return self

    def __exit__(self, *_: object) -> None:
        self.kill_all()


def _command_line(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:  # gone meanwhile
        return []


def checkpoints(folder: Path) -> list[int]:
    """The steps that have one."""
    return sorted(int(path.name.removeprefix("step_")) for path in folder.glob("checkpoints/step_*"))


def cut_back(whole: Run, folder: Path, *steps: int) -> Path:
    """A copy of the run as if it had been killed in its last steps, with the checkpoints of `steps` alone."""
    shutil.copytree(whole.folder, folder)
    for path in folder.glob("checkpoints/step_*"):
        if int(path.name.removeprefix("step_")) not in steps:
            shutil.rmtree(path)
    shutil.rmtree(folder / "model")
    for name in ("summary.json", "status.json"):
        (folder / name).unlink()
    return folder


def curve(run: Run) -> list[dict[str, Any]]:
    """metrics.jsonl without the times."""
    return [{n: v for n, v in record.items() if not n.startswith("perf/")} for record in run.records]


def weights(run: Run) -> dict[str, torch.Tensor]:
    return load_file(run.folder / "model" / "model.safetensors")


def assert_same_run(run: Run, whole: Run) -> None:
    """Bitwise: every record, in order, each once, and the final weights."""
    assert curve(run) == curve(whole)
    expected = weights(whole)
    assert {name: torch.equal(weight, expected[name]) for name, weight in weights(run).items()} == dict.fromkeys(
        expected, True
    )


def assert_close_run(run: Run, whole: Run, within: float) -> None:
    """Every training loss, relative; the same records."""
    assert [(r["step"], list(r)) for r in curve(run)] == [(r["step"], list(r)) for r in curve(whole)]
    for loss, expected in zip(run.losses, whole.losses, strict=True):
        assert abs(loss - expected) <= within * expected


def lines(run: Run, start: str) -> Iterator[str]:
    return (line for line in run.stdout.splitlines() if line.strip().startswith(start))
