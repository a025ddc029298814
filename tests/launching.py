"""Runs of train.py: on ranks that start warm (see warm_ranks.py), or by the real `accelerate launch`."""

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from src.config.errors import UserError
from src.distributed.process import exit_codes
from train import run_settings

PROJECT = Path(__file__).parent.parent
SHARED = next(  # room: template
    (parent / "shared" for parent in PROJECT.parents if (parent / "shared").is_dir()), Path("shared")
)
MNIST = SHARED / "data" / "mnist"  # room: template
BIN = Path(sys.executable).parent
FAULTY = "tests/faults/inject.py"  # room: template
"""What stands in for train.py where a fault is planted under the real launcher."""
SECONDS = 300
"""After which a run is killed."""

WANDB = (PROJECT / "src/tracking/wandb.py").exists()  # room: template
"""Whether Weights & Biases has not been thrown out."""
QUIET = ("--wandb.mode=disabled",) if WANDB else ()  # room: template

WRITES_TO = (  # room: template
    "\nimport os, sys\n"
    "os.dup2({}, 1)\n"
    "os.dup2(1, 2)\n"
    "sys.stdout = sys.__stdout__ = open(1, 'w')\n"
    "sys.stderr = sys.__stderr__ = open(2, 'w')\n"
)
"""Python code that makes this descriptor the output of its process, as if that had begun with it."""


def slow(*values: Any) -> Any:  # room: template
    """A case that `make test` leaves out."""
    return pytest.param(*values, marks=pytest.mark.slow)


def needs(path: str) -> pytest.MarkDecorator:  # room: template
    """A test of something that may have been thrown out, by docs/make-it-yours.md."""
    return pytest.mark.skipif(not (PROJECT / path).exists(), reason=f"{path} was thrown out")


@dataclass(frozen=True)
class Run:
    """A finished run of train.py; on warm ranks, the exit code is that of the process that failed first."""

    exit_code: int
    stdout: str
    stderr: str
    folder: Path

    @property
    def messages(self) -> list[str]:
        return [line for line in self.stderr.splitlines() if line.startswith("train.py: ")]

    @property
    def records(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.folder / "metrics.jsonl").read_text().splitlines()]

    @property
    def losses(self) -> list[float]:
        return [record["train/loss"] for record in self.records if "train/loss" in record]

    @property
    def summary(self) -> dict[str, Any]:
        return json.loads((self.folder / "summary.json").read_text())

    @property
    def status(self) -> dict[str, Any]:
        return json.loads((self.folder / "status.json").read_text())

    def succeeded(self) -> "Run":
        assert self.exit_code == 0, self.stdout + self.stderr
        return self


Launch = Callable[..., Run]
"""Of the fixture of this name."""
Whole = Callable[..., Run]  # room: template
"""Of the fixture of this name."""
Rounding = Callable[..., float]  # room: template
"""Of the fixture of this name."""


class Tool:  # room: template
    """A command, `name`, in this process, which has imported what it needs."""

    def __init__(self, name: str, main: Callable[[list[str]], int | None], capsys: pytest.CaptureFixture[str]) -> None:
        self._name, self._main, self._capsys = name, main, capsys

    def __call__(self, *arguments: str | Path) -> Run:
        self._capsys.readouterr()
        with pytest.raises(SystemExit) as ended, exit_codes(self._name):
            sys.exit(self._main([*map(str, arguments)]))
        code, (stdout, stderr) = ended.value.code, self._capsys.readouterr()
        if isinstance(code, str):  # as the interpreter does
            code, stderr = 1, f"{stderr}{code}\n"
        return Run(code or 0, stdout, stderr, Path())


def wait(condition: Callable[[], object], seconds: float = SECONDS, say: Callable[[], object] = str) -> None:
    """Until it is so; after these seconds, fail with what `say` returns."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, say()
        time.sleep(0.01)


def project_with_task(folder: Path, task: str, code: str) -> Path:
    """Copy what trains into a folder, and add a task as a user does: a file, and a line. `task` is its class's name;
    the file and the task have the same name in small letters."""
    name = task.lower()
    for part in ("src", "accelerate_configs"):
        shutil.copytree(PROJECT / part, folder / part)
    shutil.copy(PROJECT / "train.py", folder)
    (folder / f"src/tasks/{name}.py").write_text(code)
    tasks, line = folder / "src/tasks/__init__.py", f'    "{name}": "src.tasks.{name}:{task}",\n'
    tasks.write_text(tasks.read_text().replace("TASKS = {\n", f"TASKS = {{\n{line}"))
    return folder


def mistakes(*arguments: str) -> list[str]:
    """What these settings are refused with, before anything is loaded."""
    with pytest.raises(UserError) as error:
        run_settings(list(arguments))
    return str(error.value).splitlines()


def run_command(command: list[str], folder: Path, cwd: Path = PROJECT, **environment: str) -> Run:
    """Runs it with one thread per process, as two cores are all that CI has, without credentials or GPUs."""
    env = clean_environment(**environment)
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=SECONDS)
    return Run(done.returncode, done.stdout, done.stderr, folder)


def clean_environment(**more: str) -> dict[str, str]:
    """Without GPUs, unless TESTS_USE_GPUS is set or `more` names some in CUDA_VISIBLE_DEVICES."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(("WANDB_", "ACCELERATE_", "FSDP_"))}
    env |= {} if "TESTS_USE_GPUS" in os.environ else {"CUDA_VISIBLE_DEVICES": ""}
    return env | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "NETRC": os.devnull} | more


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
    """What follows `accelerate launch`, with one of accelerate_configs/."""
    yaml = project / "accelerate_configs" / f"{config}.yaml" if isinstance(config, str) else config
    words = ["--config_file", str(yaml), "--main_process_port", "0"]
    words += [f"--num_processes={processes}"] if processes else []
    words += ["--mixed_precision=no"] if "TESTS_USE_GPUS" in os.environ else []  # as without a GPU
    words += [*launcher_arguments, script]
    trains = ["train.py"]
    trains += [FAULTY]  # room: template
    if script in trains:
        words += [f"--output_dir={folder}"]
        words += [f"--wandb.mode={wandb}"] if (project / "src/tracking/wandb.py").exists() else []
        words += [] if "--task.name=" in str(arguments) else ["--task.source=digits"]  # room: template
    return [*words, *arguments]


class WarmRanks:
    """The process of warm_ranks.py, started when it is first asked for, with these variables in its environment."""

    def __init__(self, **environment: str) -> None:
        self._environment = environment
        self._server: subprocess.Popen[str] | None = None

    def start(self, **request: Any) -> int:
        """Returns: the id of the process that stands in for the launcher."""
        if self._server is None:
            command = [sys.executable, "-m", "tests.warm_ranks"]
            pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
            self._server = subprocess.Popen(
                command, cwd=PROJECT, env=clean_environment(**self._environment), start_new_session=True, **pipes
            )
            assert self._server.stdout
            assert self._server.stdout.readline() == "ready\n"
        assert self._server.stdin
        assert self._server.stdout
        print(json.dumps(request, default=str), file=self._server.stdin, flush=True)
        return int(self._server.stdout.readline())

    def close(self) -> None:
        if self._server:
            self._server.communicate()


WARM = WarmRanks()


def launched(config: str | Path, *arguments: str, folder: Path, **more: Any) -> Run:
    """As the fixture `launch`, which says what it does, in this folder."""
    with Started(config, *arguments, folder=folder, **more) as started:
        return started.result()


class Started:
    """A run in the background, on warm ranks or by the real launcher; as a context manager it leaves nothing behind. Of
    `launch`'s arguments, `words` are to follow `accelerate launch` in place of others, `within` is to come before."""

    def __init__(
        self,
        config: str | Path,
        *arguments: str,
        folder: Path,
        real: bool = False,
        before: str = "",
        project: Path = PROJECT,
        cwd: Path | None = None,
        words: list[str] | None = None,
        ranks: WarmRanks = WARM,
        within: tuple[str, ...] = (),
        **more: Any,
    ) -> None:
        variables = {name: more.pop(name) for name in list(more) if name.isupper() or name == "no_proxy"}
        environment = clean_environment(PYTHONUNBUFFERED="1", **variables)
        if "FAULT" in environment:  # room: template
            before += "\nimport tests.faults.inject as i; i.plant()"
            if real:
                path = [str(project), environment.get("PYTHONPATH", "")]
                more["script"], environment["PYTHONPATH"] = FAULTY, ":".join(filter(None, path))
        words = words or launch_words(config, *arguments, folder=folder, project=project, **more)
        self.folder = folder
        self._real = real
        self._files = tempfile.TemporaryDirectory()
        self._stdout, self._stderr, self._code = (Path(self._files.name, name) for name in ("out", "err", "code"))
        if real:
            with self._stdout.open("w") as stdout, self._stderr.open("w") as stderr:
                how: dict[str, Any] = {"stdout": stdout, "stderr": stderr, "cwd": cwd or project, "env": environment}
                how |= {"start_new_session": True, "preexec_fn": hear_signals}
                command = [*within, str(BIN / "accelerate"), "launch", *words]
                self._launcher: psutil.Process = psutil.Popen(command, **how)
        else:
            self._stdout.touch()
            self._stderr.touch()
            files = {"stdout": self._stdout, "stderr": self._stderr, "result": self._code}
            where = {"project": project, "cwd": cwd or project, "environment": environment}
            self._launcher = psutil.Process(ranks.start(words=words, before=before, seconds=SECONDS, **where, **files))

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
        return self._stdout.read_text() + self._stderr.read_text()

    @property
    def trainers(self) -> list[psutil.Process]:
        """The processes that train, in the order of their ranks."""
        with contextlib.suppress(psutil.NoSuchProcess):
            ours = filter(self._is_ours, self._launcher.children())
            # between fork and exec, a process has its launcher's command line, and then for a moment none
            return sorted((process for process in ours if "launch" not in process.cmdline()), key=lambda p: p.pid)
        return []

    @property
    def exit_code(self) -> int | None:
        """None: it runs. -9 if what stands in for its launcher was killed."""
        if self._real:
            return self._launcher.poll()  # type: ignore[attr-defined]
        is_gone = not psutil.pid_exists(self._launcher.pid)
        if self._code.exists():
            return int(self._code.read_text())
        return -signal.SIGKILL if is_gone else None

    def wait_until(self, condition: Callable[[], Any], seconds: float = 120) -> "Started":
        wait(lambda: condition() or self.exit_code is not None, seconds, lambda: self.output)
        assert condition(), self.output
        return self

    def wait_for(self, text: str) -> "Started":
        return self.wait_until(lambda: text in self.output)

    def wait_for_handlers(self, number: signal.Signals, processes: int = 1) -> list[psutil.Process]:
        """Until so many processes train, each with a handler of its own for this signal. Returns: these."""
        found: list[psutil.Process] = []

        def catches(process: psutil.Process) -> bool:
            caught = re.search(r"SigCgt:\t(\w+)", Path(f"/proc/{process.pid}/status").read_text())
            return bool(caught and int(caught[1], 16) >> (number - 1) & 1)

        def is_ready() -> bool:
            found[:] = self.trainers
            return len(found) == processes and all(map(catches, found))

        self.wait_until(is_ready)
        return found

    def send(self, number: signal.Signals, to: psutil.Process | None = None) -> "Started":
        os.kill((to or self._launcher).pid, number)
        return self

    def kill_all(self) -> "Started":
        """SIGKILL to the launcher and all processes under it, at once."""
        while family := self.family:
            for process in family:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
        self.result()
        return self

    def result(self) -> Run:
        """When the launcher has ended."""
        wait(lambda: self.exit_code is not None, say=lambda: self.output)
        return Run(self.exit_code or 0, self._stdout.read_text(), self._stderr.read_text(), self.folder)

    def ended(self, seconds: float = 60) -> Run:
        """When the launcher and every process that it had started have ended; stdout has both streams."""
        wait(
            lambda: self.exit_code is not None and not self.family,
            seconds,
            lambda: f"left running: {self.family}\n{self.output}",
        )
        return replace(self.result(), stdout=self.output)

    def __enter__(self) -> "Started":
        return self

    def __exit__(self, *_: object) -> None:
        self.kill_all()
        self._files.cleanup()


def hear_signals() -> None:
    """Take back what children inherit: pytest ignores SIGINT in the background of a shell, and SIGHUP under nohup."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
