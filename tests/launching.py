"""Runs of train.py: on ranks that start warm (see warm_ranks.py), or by the real `accelerate launch`."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

PROJECT = Path(__file__).parent.parent
SHARED = next(
    (folder for parent in PROJECT.parents if (folder := parent / "shared").is_dir()), PROJECT.parent / "shared"
)
MNIST = SHARED / "data" / "mnist"
BIN = Path(sys.executable).parent
CHANGED = "changed.py"
"""What stands in for train.py where it begins with other code."""
SECONDS = 300
"""After which a run is killed."""

needs_mnist = pytest.mark.skipif(not MNIST.is_dir(), reason=f"needs the real MNIST in {MNIST}")


@dataclass(frozen=True)
class Run:
    """A finished run of train.py."""

    exit_code: int
    """The launcher's; of a run on warm ranks, that of the process that failed first."""
    stdout: str
    stderr: str
    folder: Path

    @property
    def messages(self) -> list[str]:
        """What train.py told a user who erred."""
        return [line for line in self.stderr.splitlines() if line.startswith("train.py: ")]

    @property
    def records(self) -> list[dict[str, Any]]:
        """metrics.jsonl."""
        return [json.loads(line) for line in (self.folder / "metrics.jsonl").read_text().splitlines()]

    @property
    def losses(self) -> list[float]:
        """The training losses, in the order of their steps."""
        return [record["train/loss"] for record in self.records if "train/loss" in record]

    @property
    def summary(self) -> dict[str, Any]:
        return json.loads((self.folder / "summary.json").read_text())

    def succeeded(self) -> "Run":
        assert self.exit_code == 0, self.stdout + self.stderr
        return self


Launch = Callable[..., Run]
"""Of the fixture `launch`."""
Whole = Callable[..., Run]
"""Of the fixture `whole`."""


def run_command(command: list[str], folder: Path, cwd: Path = PROJECT, **environment: str) -> Run:
    """Runs it with one thread per process, as two cores are all that CI has, without credentials or GPUs."""
    env = clean_environment(**environment)
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=SECONDS)
    return Run(done.returncode, done.stdout, done.stderr, folder)


def clean_environment(**more: str) -> dict[str, str]:
    env = {name: value for name, value in os.environ.items() if not name.startswith(("WANDB_", "ACCELERATE_", "FSDP_"))}
    return env | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "NETRC": os.devnull} | more


def launch_words(
    config: str | Path,
    *arguments: str,
    folder: Path,
    processes: int | None = None,
    launcher_arguments: tuple[str, ...] = (),
    wandb: str = "disabled",
    project: Path = PROJECT,
    script: str = "train.py",
) -> list[str]:
    """What follows `accelerate launch`, with one of accelerate_configs/; on the digits, unless a task is named."""
    yaml = project / "accelerate_configs" / f"{config}.yaml" if isinstance(config, str) else config
    words = ["--config_file", str(yaml), "--main_process_port", "0"]
    words += [f"--num_processes={processes}"] if processes else []
    words += [*launcher_arguments, script]
    if Path(script).name in ("train.py", CHANGED):
        words += [f"--output_dir={folder}"]
        words += [f"--wandb.mode={wandb}"] if (project / "src/wandb_logger.py").exists() else []
        words += [] if "--task.name=" in str(arguments) else ["--task.source=digits"]
    return [*words, *arguments]


def environment_in(more: dict[str, Any]) -> dict[str, str]:
    """The environment variables among keyword arguments, taken out of them."""
    return {name: more.pop(name) for name in list(more) if name.isupper() or name == "no_proxy"}


def with_fault(before: str, environment: dict[str, str]) -> str:
    """`before`, and the fault of tests/faults/inject.py that the environment names."""
    return f"{before}\nimport tests.faults.inject as i; i.plant()" if "FAULT" in environment else before


def script_with(before: str, folder: Path) -> str:
    """A script that executes `before`, as a user's change to the project, and then train.py."""
    if not before:
        return "train.py"
    train = PROJECT / "train.py"
    folder.parent.mkdir(parents=True, exist_ok=True)
    script = folder.with_name(CHANGED)
    script.write_text(
        f"import sys\nsys.path.insert(0, {str(PROJECT)!r})\n{before}\n"
        f"exec(compile(open({str(train)!r}).read(), {str(train)!r}, 'exec', dont_inherit=True))\n"
    )
    return str(script)


class WarmRanks:
    """The process of warm_ranks.py, started when it is first asked for."""

    def __init__(self) -> None:
        self._server: subprocess.Popen[str] | None = None

    def start(self, words: list[str], output: Path, **request: Any) -> int:
        """Returns: the id of the process that stands in for the launcher."""
        if self._server is None:
            command = [sys.executable, "-m", "tests.warm_ranks"]
            pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
            self._server = subprocess.Popen(
                command, cwd=PROJECT, env=clean_environment(), start_new_session=True, **pipes
            )
            assert self._server.stdout
            assert self._server.stdout.readline() == "ready\n"
        assert self._server.stdin
        assert self._server.stdout
        files = {"stdout": f"{output}.out", "stderr": f"{output}.err", "result": f"{output}.code"}
        request = {"words": words, "before": "", "project": str(PROJECT), "seconds": SECONDS, **files, **request}
        request.setdefault("cwd", request["project"])
        print(json.dumps(request), file=self._server.stdin, flush=True)
        return int(self._server.stdout.readline())

    def run(self, words: list[str], folder: Path, environment: dict[str, str], **request: Any) -> Run:
        """Returns: when all is done."""
        with tempfile.TemporaryDirectory() as outputs:
            output = Path(outputs) / "run"
            launcher = self.start(words, output, environment=environment, **request)
            while not (code := exit_code(output, launcher)):
                time.sleep(0.005)
            stdout, stderr = (Path(f"{output}.{name}").read_text() for name in ("out", "err"))
        return Run(code[0], stdout, stderr, folder)

    def close(self) -> None:
        if self._server:
            self._server.communicate()


WARM = WarmRanks()


def exit_code(output: Path, launcher: int) -> list[int]:
    """Of a run on warm ranks, when it is over; -9 if what stands in for its launcher was killed."""
    is_gone = not psutil.pid_exists(launcher)
    result = Path(f"{output}.code")
    if result.exists():
        return [int(result.read_text())]
    return [-signal.SIGKILL] if is_gone else []


def launched(
    config: str | Path,
    *arguments: str,
    folder: Path,
    real: bool = False,
    before: str = "",
    project: Path = PROJECT,
    cwd: Path | None = None,
    **more: Any,
) -> Run:
    """As the fixture `launch`, which says what it does, in this folder."""
    environment = environment_in(more)
    before = with_fault(before, environment)
    more |= {"folder": folder, "project": project}
    if real:
        more.setdefault("script", script_with(before, folder))
        words = launch_words(config, *arguments, **more)
        return run_command([str(BIN / "accelerate"), "launch", *words], folder, cwd or project, **environment)
    words = launch_words(config, *arguments, **more)
    where = {"project": str(project), "cwd": str(cwd or project)}
    return WARM.run(words, folder, clean_environment(**environment), before=before, **where)


class Started:
    """A run in the background, on warm ranks or by the real launcher; as a context manager it leaves nothing behind."""

    def __init__(
        self, config: str, *arguments: str, folder: Path, real: bool = False, before: str = "", **more: Any
    ) -> None:
        environment = environment_in(more)
        environment = clean_environment(PYTHONUNBUFFERED="1", **environment)
        before = with_fault(before, environment)
        self.folder = folder
        self._real = real
        self._file = folder.parent / f"{folder.name}.log"
        folder.parent.mkdir(parents=True, exist_ok=True)
        if real:
            words = launch_words(config, *arguments, folder=folder, script=script_with(before, folder), **more)
            with self._file.open("w") as output:
                self._launcher: psutil.Process = psutil.Popen(
                    [str(BIN / "accelerate"), "launch", *words],
                    cwd=PROJECT,
                    env=environment,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                    # where pytest runs in the background of a shell, SIGINT is ignored, and children inherit that
                    preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
                )
        else:
            words = launch_words(config, *arguments, folder=folder, **more)
            self._file.write_text("")
            both = {"stdout": str(self._file), "stderr": str(self._file)}
            pid = WARM.start(words, self._file, before=before, environment=environment, **both)
            self._launcher = psutil.Process(pid)

    @property
    def family(self) -> list[psutil.Process]:
        """The launcher, the processes that train and those that load data, orphans too."""
        return [process for process in psutil.process_iter() if self._is_ours(process)]

    def _is_ours(self, process: psutil.Process) -> bool:
        try:
            if self._real:
                return f"--output_dir={self.folder}" in process.cmdline()
            return os.getsid(process.pid) == self._launcher.pid and process.status() != psutil.STATUS_ZOMBIE
        except (psutil.Error, ProcessLookupError):  # gone meanwhile
            return False

    @property
    def output(self) -> str:
        return self._file.read_text()

    @property
    def trainers(self) -> list[psutil.Process]:
        """The processes that train, in the order of their ranks."""
        with contextlib.suppress(psutil.NoSuchProcess):
            return sorted(filter(self._is_ours, self._launcher.children()), key=lambda process: process.pid)
        return []

    @property
    def exit_code(self) -> int | None:
        """None: it runs."""
        if self._real:
            return self._launcher.poll()  # type: ignore[attr-defined]
        return next(iter(exit_code(self._file, self._launcher.pid)), None)

    def wait_until(self, condition: Callable[[], Any], seconds: float = 120) -> "Started":
        end = time.monotonic() + seconds
        while not condition():
            assert self.exit_code is None, self.output
            assert time.monotonic() < end, self.output
            time.sleep(0.01)
        return self

    def wait_for(self, text: str) -> "Started":
        """Until it has printed `text`."""
        return self.wait_until(lambda: text in self.output)

    def send(self, number: signal.Signals, to: psutil.Process | None = None) -> "Started":
        os.kill((to or self._launcher).pid, number)
        return self

    def kill_all(self) -> "Started":
        """SIGKILL to the launcher and all processes under it, at once."""
        while family := self.family:
            for process in family:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
        while self.exit_code is None:
            time.sleep(0.005)
        return self

    def ended(self, seconds: float = 60) -> Run:
        """Waits for the launcher and for every process that it had started."""
        end = time.monotonic() + seconds
        while (left := self.family) or self.exit_code is None:
            assert time.monotonic() < end, f"left running: {left}\n{self.output}"
            time.sleep(0.02)
        return Run(self.exit_code, self.output, self.output, self.folder)

    def __enter__(self) -> "Started":
        return self

    def __exit__(self, *_: object) -> None:
        self.kill_all()
