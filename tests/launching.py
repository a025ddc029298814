"""Run train.py in tests, within a second or two.

Most tests use the fixture `launch` of tests/conftest.py:

    run = launch("fsdp", "--epochs=1", processes=2).succeeded()  # under accelerate_configs/fsdp.yaml
    assert run.summary["eval/accuracy"] > 0.9  # a `Run` has its output, records, summary and status

**Warm ranks.** Under `accelerate launch`, each process imports for seconds before it trains. Here a server, at the end
of this file (`python -m tests.launching`), imports everything once, and the ranks of each run are forked from it.
Accelerate's own functions turn the yaml into their environment, and a rank sees what it would see under the launcher:
its parent's command line, the signals, its output. What differs, or goes wrong, is an argument of `launch`:

    real=True      runs `accelerate launch` itself, as a user does, for tests of the launcher: several seconds.
    before="…"     is Python code that each process executes before train.py, where it must be broken from inside.
    FAULT="die"    plants a fault (tests.faults.inject), in step FAULT_STEP on rank FAULT_RANK. All arguments in
                   capitals are environment variables.

`Started` is a run in the background: wait for a line of its output, send it a signal, kill it. Quicker than a run:
`Tool` calls a command in this process, and `mistakes` returns what settings are refused with.
"""

import argparse
import atexit
import contextlib
import gc
import importlib
import json
import os
import pkgutil
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import accelerate.commands.launch
import psutil
import pytest

import src
from src.config.errors import UserError
from src.distributed.process import STOP_SIGNALS, exit_codes
from src.start import run_settings

PROJECT = Path(__file__).parent.parent
SHARED = next((parent / "shared" for parent in PROJECT.parents if (parent / "shared").is_dir()), Path("shared"))
MNIST = SHARED / "data" / "mnist"
BIN = Path(sys.executable).parent
FAULTY = "tests.faults.inject".replace(".", "/") + ".py"
"""The script in place of train.py where a fault is planted under the real launcher."""
SECONDS = 300
"""The time after which a run is killed."""

WANDB = (PROJECT / "src/tracking" / "wandb.py").exists()
QUIET = ("--wandb.mode=disabled",) if WANDB else ()

WRITES_TO = (
    "\nimport os, sys; os.dup2({}, 1); os.dup2(1, 2)\n"
    "sys.stdout = sys.__stdout__ = open(1, 'w'); sys.stderr = sys.__stderr__ = open(2, 'w')\n"
)
"""Python code for `before` that makes this descriptor the output of its process, as if that had begun with it."""


def slow(*values: Any) -> Any:
    """Mark a case that `make test` leaves out."""
    return pytest.param(*values, marks=pytest.mark.slow)


def needs(path: str) -> pytest.MarkDecorator:
    """Skip a test of an optional part that is not here."""
    return pytest.mark.skipif(not (PROJECT / path).exists(), reason=f"{path} is not here")


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
Whole = Callable[..., Run]
Rounding = Callable[..., float]
"""Types of the fixtures of these names."""


@dataclass
class Tool:
    """Call a command, `name`, in this process, which has imported what it needs."""

    name: str
    main: Callable[[list[str]], int | None]
    capsys: pytest.CaptureFixture[str]

    def __call__(self, *arguments: str | Path) -> Run:
        self.capsys.readouterr()
        with pytest.raises(SystemExit) as ended, exit_codes(self.name):
            sys.exit(self.main([*map(str, arguments)]))
        code, (stdout, stderr) = ended.value.code, self.capsys.readouterr()
        if isinstance(code, str):  # as the interpreter does
            code, stderr = 1, f"{stderr}{code}\n"
        return Run(code or 0, stdout, stderr, Path())


def wait(condition: Callable[[], object], seconds: float = SECONDS, say: Callable[[], object] = str) -> None:
    """Wait until the condition holds; after these seconds, fail with what `say` returns."""
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
    """Return the lines that these settings are refused with, before anything is loaded."""
    with pytest.raises(UserError) as error:
        run_settings(list(arguments))
    return str(error.value).splitlines()


def run_command(command: list[str], folder: Path, cwd: Path = PROJECT, **environment: str) -> Run:
    """Run a command in a clean environment."""
    env = clean_environment(**environment)
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=SECONDS)
    return Run(done.returncode, done.stdout, done.stderr, folder)


def clean_environment(**more: str) -> dict[str, str]:
    """Return the environment with one thread a process, as CI has two cores, and without credentials. It has no GPUs,
    unless TESTS_USE_GPUS is set or `more` names some in CUDA_VISIBLE_DEVICES."""
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
    """Return what follows `accelerate launch`, with one of accelerate_configs/."""
    yaml = project / "accelerate_configs" / f"{config}.yaml" if isinstance(config, str) else config
    words = ["--config_file", str(yaml), "--main_process_port", "0"]
    words += [f"--num_processes={processes}"] if processes else []
    words += ["--mixed_precision=no"] if "TESTS_USE_GPUS" in os.environ else []  # as without a GPU
    words += [*launcher_arguments, script]
    if script in ("train.py", FAULTY):
        words += [f"--output_dir={folder}"]
        words += [f"--wandb.mode={wandb}"] if (project / "src/tracking" / "wandb.py").exists() else []
        words += [] if "--task.name=" in str(arguments) else ["--task.source=digits"]
    return [*words, *arguments]


@dataclass(frozen=True)
class Request:
    """A run on warm ranks."""

    words: list[str]  # follow `accelerate launch`
    before: str  # Python code that each rank executes before its script
    project: str
    cwd: str
    environment: dict[str, str]
    files: str  # a folder for its output, `out` and `err`, and the exit code of the process that failed first, `code`
    seconds: float  # after which it is killed


class WarmRanks:
    """The server's process, started when it is first needed, with these variables in its environment."""

    def __init__(self, **environment: str) -> None:
        self._environment = environment
        self._server: subprocess.Popen[str] | None = None

    def start(self, request: Request) -> int:
        """Return the id of the process that stands in for the launcher."""
        if self._server is None:
            command = [sys.executable, "-m", "tests.launching"]
            how: dict[str, Any] = {"cwd": PROJECT, "env": clean_environment(**self._environment)}
            how |= {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
            self._server = subprocess.Popen(command, start_new_session=True, **how)
            assert self._server.stdout
            assert self._server.stdout.readline() == "ready\n"
        assert self._server.stdin
        assert self._server.stdout
        print(json.dumps(asdict(request)), file=self._server.stdin, flush=True)
        return int(self._server.stdout.readline())

    def close(self) -> None:
        if self._server:
            self._server.communicate()


WARM = WarmRanks()


def launched(config: str | Path, *arguments: str, folder: Path, **more: Any) -> Run:
    """Run train.py in this folder, as the fixture `launch` does."""
    with Started(config, *arguments, folder=folder, **more) as started:
        return started.result()


class Started:
    """A run in the background, on warm ranks or by the real launcher. As a context manager, it leaves nothing behind.

    Args:
        words: those that follow `accelerate launch`, in place of the ones that the other arguments make.
        within: a command, such as that of another network, which the real launcher is an argument of.

    The others are those of the fixture `launch`.
    """

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
        if "FAULT" in environment and real:
            path = [str(project), environment.get("PYTHONPATH", "")]
            more["script"], environment["PYTHONPATH"] = FAULTY, ":".join(filter(None, path))
        elif "FAULT" in environment:
            before += "\nimport tests.faults.inject as i; i.plant()"
        words = words or launch_words(config, *arguments, folder=folder, project=project, **more)
        cwd = cwd or project
        self.folder = folder
        self._real = real
        self._files = tempfile.TemporaryDirectory()
        self._stdout, self._stderr, self._code = (Path(self._files.name, name) for name in ("out", "err", "code"))
        with self._stdout.open("w") as stdout, self._stderr.open("w") as stderr:
            if real:
                command = [*within, str(BIN / "accelerate"), "launch", *words]
                how: dict[str, Any] = {"start_new_session": True, "preexec_fn": hear_signals}
                self._launcher: psutil.Process = psutil.Popen(
                    command, stdout=stdout, stderr=stderr, cwd=cwd, env=environment, **how
                )
            else:
                words = [*map(str, words)]
                request = Request(words, before, str(project), str(cwd), environment, self._files.name, SECONDS)
                self._launcher = psutil.Process(ranks.start(request))

    @property
    def family(self) -> list[psutil.Process]:
        """The launcher, the processes that train and those that load data, with orphans."""
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
        """None while it runs; -9 if the process in place of its launcher was killed."""
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
        """Wait until so many processes train, each with a handler of its own for this signal. Return them."""

        def catches(process: psutil.Process) -> bool:
            caught = re.search(r"SigCgt:\t(\w+)", Path(f"/proc/{process.pid}/status").read_text())
            return bool(caught and int(caught[1], 16) >> (number - 1) & 1)

        self.wait_until(lambda: len(self.trainers) == processes and all(map(catches, self.trainers)))
        return self.trainers

    def send(self, number: signal.Signals, to: psutil.Process | None = None) -> "Started":
        os.kill((to or self._launcher).pid, number)
        return self

    def kill_all(self) -> "Started":
        """Send SIGKILL to the launcher and all processes under it, at once."""
        while family := self.family:
            for process in family:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
        self.result()
        return self

    def result(self) -> Run:
        """Wait until the launcher has ended."""
        wait(lambda: self.exit_code is not None, say=lambda: self.output)
        return Run(self.exit_code or 0, self._stdout.read_text(), self._stderr.read_text(), self.folder)

    def ended(self, seconds: float = 60) -> Run:
        """Wait until the launcher and every process that it had started have ended. stdout has both streams."""

        def left() -> str:
            return f"left running: {self.family}\n{self.output}"

        wait(lambda: self.exit_code is not None and not self.family, seconds, left)
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


# ------------------------------------------------------------------------------- the server that forks the warm ranks

LIBRARIES = (
    "datasets", "evaluate", "matplotlib.backends.backend_agg", "matplotlib.backends.backend_svg", "peft",
    "sklearn.metrics", "torch._dynamo", "torch._inductor.compile_fx",
    "torch.distributed.checkpoint", "torch.distributed.fsdp", "torchvision", "transformers.models.bert.modeling_bert",
    "transformers.models.llama.modeling_llama",
)  # fmt: skip
"""What runs import, some of it late. Not wandb: it makes a folder then, which every process deletes when it ends."""
GRACE_SECONDS = 30.0
"""Between SIGTERM and SIGKILL; TORCH_ELASTIC_SHUTDOWN_TIMEOUT sets it for torch's launcher, and here."""
KILLED = 124
"""Exit code of a run that took too long, or longer to end than that."""


def warm() -> None:
    """Import the libraries and every module of the project."""
    own = [module.name for module in pkgutil.walk_packages(src.__path__, "src.")]
    installed = [name for name in LIBRARIES if find_spec(name.partition(".")[0])]  # some may not be needed here
    for name in [*installed, *own]:
        if not name.endswith(("__main__", "tracking.wandb")):
            importlib.import_module(name)
    with contextlib.suppress(UserError):  # the first task may need settings
        run_settings([])  # pydantic looks up the source of all of them
    if plots := sys.modules.get("src.tracking.plots"):  # curves take as long to draw as a short run
        plots.draw_curves = lambda *_, **__: ""  # type: ignore[attr-defined]
    gc.collect()
    gc.freeze()  # or each rank copies what the collector touches
    comm = Path("/proc/self/comm").read_text()
    threads = {file.read_text() for file in Path("/proc/self/task").glob("[0-9]*/comm")}
    assert threads <= {comm, "jemalloc_bg_thd\n"}, threads  # the latter outlives forks, others would be missing


def serve() -> tuple[str, str]:
    """Answer requests until the standard input ends. Return in a rank only: its script, and the code before."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where pytest runs in the background of a shell
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # leaves no zombies
    print("ready", flush=True)
    for line in sys.stdin:
        if pid := os.fork():
            print(pid, flush=True)
        else:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            return launch_ranks(Request(**json.loads(line)))
    sys.exit()


def launch_ranks(request: Request) -> tuple[str, str]:
    """Stand in for the launcher: fork the ranks, wait for them and end this process. Return in a rank only."""
    os.setsid()  # by which all that the run leaves behind can be found
    out, err, result = (Path(request.files, name) for name in ("out", "err", "code"))
    for descriptor, path in enumerate((Path(os.devnull), out, err)):
        file = os.open(path, os.O_RDWR | os.O_APPEND)
        os.dup2(file, descriptor)
        os.close(file)
    os.chdir(request.cwd)
    os.environ.clear()
    os.environ |= request.environment
    if "PYTHONUNBUFFERED" in os.environ:
        sys.stdout.reconfigure(write_through=True)  # type: ignore[union-attr]
    code = 1
    try:
        script, arguments, environments = rank_environments(request.words)
        pids = []
        for environment in environments:
            if pid := os.fork():
                os.setpgid(pid, pid)  # as the rank does: it may be signalled before it gets there
                pids.append(pid)
            else:
                return become_rank(request, script, arguments, environment)
        code = wait_for_ranks(pids, request.seconds)
    except BaseException:
        traceback.print_exc()
    (partial := result.with_suffix(".partial")).write_text(str(code))
    partial.rename(result)
    os._exit(0)


def rank_environments(words: list[str]) -> tuple[str, list[str], list[dict[str, str]]]:
    """Return the script, its arguments and the ranks' environments, as Accelerate's launcher makes them."""
    launch = accelerate.commands.launch
    environments: list[dict[str, str]] = []

    def several(arguments: argparse.Namespace) -> None:
        shared = launch.prepare_multi_gpu_env(arguments)
        size, local = arguments.num_processes, arguments.num_processes // arguments.num_machines
        shared |= {"WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(local)}
        shared |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "TORCHELASTIC_RUN_ID": "none"}
        for rank in range(size):
            own = {"RANK": rank, "LOCAL_RANK": rank % local, "GROUP_RANK": rank // local}
            environments.append(shared | {name: str(value) for name, value in own.items()})

    def one(arguments: argparse.Namespace) -> None:
        environments.append(launch.prepare_simple_launcher_cmd_env(arguments)[1])

    launch.multi_gpu_launcher, launch.simple_launcher = several, one  # in this process, which then ends
    arguments = launch.launch_command_parser().parse_args(words)
    launch.launch_command(arguments)
    return arguments.training_script, arguments.training_script_args, environments


def free_port() -> int:
    """Return one below those that the system gives to clients: nobody is given it before it is used."""
    while True:
        port = random.SystemRandom().randrange(20_000, 30_000)
        with socket.socket() as attempt:
            if attempt.connect_ex(("127.0.0.1", port)) != 0:
                return port


def become_rank(request: Request, script: str, arguments: list[str], environment: dict[str, str]) -> tuple[str, str]:
    """Set this process up as if it had been started with the script and its arguments."""
    os.setpgid(0, 0)  # launchers signal whole groups: the processes that load data too
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests may run under nohup
    os.environ.clear()
    os.environ |= environment
    # train.py looks there for the options of Accelerate's launcher
    pretend("cmdline", [sys.executable, "accelerate", "launch", *request.words])
    pretend("environ", request.environment)
    pretend("cwd", request.cwd)
    # after an error, it would end the launcher, whose words nobody reads here, and wait for its other processes
    pretend("send_signal", None)
    pretend("children", [])
    sys.argv = [script, *arguments]
    sys.orig_argv = [sys.executable, *sys.argv]
    if request.project != str(PROJECT):  # a copy of it, with changes
        for name in [name for name in sys.modules if name.split(".")[0] in ("src", "tests")]:
            del sys.modules[name]
        sys.path[0] = request.project
    return script, request.before


def pretend(name: str, said: object) -> None:
    """Make psutil say this of the parent process."""
    parent, asked = os.getppid(), getattr(psutil.Process, name)

    def answer(process: psutil.Process, *arguments: object, **more: object) -> object:
        return said if process.pid == parent else asked(process, *arguments, **more)

    setattr(psutil.Process, name, answer)


def wait_for_ranks(pids: list[int], seconds: float) -> int:
    """Pass signals on, as torch's launcher does, and end all processes when one fails. Return that one's exit code."""
    signals: list[int] = []
    for number in STOP_SIGNALS:
        signal.signal(number, lambda number, _: signals.append(number))
    grace = float(os.environ.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", GRACE_SECONDS))
    code, kill_at, running = 0, time.monotonic() + seconds, set(pids)
    while running:
        pid, status = os.waitpid(-1, os.WNOHANG)
        running.discard(pid)
        if pid and status and not code:
            code = os.waitstatus_to_exitcode(status)
            signals.append(signal.SIGTERM)
        if signals:
            kill_at = min(kill_at, time.monotonic() + grace)
        if time.monotonic() > kill_at:
            code, kill_at = code or KILLED, float("inf")
            print(f"launching.py: killed {len(running)} processes", file=sys.stderr, flush=True)
            signals.append(signal.SIGKILL)
        while signals:
            told = signals.pop(0)
            for group in running:
                os.killpg(group, told)
        if not pid:
            time.sleep(0.005)
    return code


def end(error: BaseException | None) -> None:
    """End as the interpreter does, but without taking down all that was imported, which takes most of a second."""
    code = 0
    if isinstance(error, SystemExit):
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
        if isinstance(error.code, str):
            print(error.code, file=sys.stderr)
    elif error is not None:
        sys.excepthook(type(error), error, error.__traceback__)
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]  # these two are what it begins with
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    warm()
    script, before = serve()  # returns in the ranks
    try:
        exec(before, {})
        sys.modules["__main__"] = main = ModuleType("__main__")
        main.__file__ = os.path.join(sys.path[0], script)
        exec(compile(Path(main.__file__).read_text(), main.__file__, "exec", dont_inherit=True), main.__dict__)
    except BaseException as error:
        end(error)
    end(None)
