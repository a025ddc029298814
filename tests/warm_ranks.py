"""Starts runs within a second: processes that are forked from one which has imported everything already.

It reads a `Request` a line from its standard input, and answers each with the id of a process that stands in for the
launcher: it works out the environment by Accelerate's own functions, forks the ranks, ends them all when one fails, and
writes how they ended. A rank goes on as `python train.py` would. tests/launching.py sends the requests.
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
import signal
import socket
import sys
import threading
import time
import traceback
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import accelerate.commands.launch
import psutil

import src
from src.config.errors import UserError
from src.distributed.process import STOP_SIGNALS
from src.start import run_settings
from src.tracking import plots  # room: report

PROJECT = Path(__file__).parent.parent
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


@dataclass(frozen=True)
class Request:
    """A run: the launcher's words, with a script in `project`; the Python code that each rank executes before that; the
    files to append its output to, and to write the exit code of the process that failed first into; and the seconds
    after which it is killed."""

    words: list[str]
    before: str
    project: str
    cwd: str
    environment: dict[str, str]
    stdout: str
    stderr: str
    result: str
    seconds: float


def warm() -> None:
    """Import the libraries and every module of the project."""
    own = [module.name for module in pkgutil.walk_packages(src.__path__, "src.")]
    installed = [name for name in LIBRARIES if find_spec(name.partition(".")[0])]  # some may not be needed here
    for name in [*installed, *own]:
        if not name.endswith(("__main__", "tracking.wandb")):
            importlib.import_module(name)
    with contextlib.suppress(UserError):  # the first task may need settings
        run_settings([])  # pydantic looks up the source of all of them
    # Curves take as long to draw as a short run: a report draws them.  # room: report
    plots.draw_curves = lambda *_, **__: ""  # room: report
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
            return stand_in_for_launcher(Request(**json.loads(line)))
    sys.exit()


def stand_in_for_launcher(request: Request) -> tuple[str, str]:
    """Fork the ranks, wait for them and end this process. Returns in a rank only."""
    os.setsid()  # by which all that the run leaves behind can be found
    for descriptor, name in enumerate((os.devnull, request.stdout, request.stderr)):
        file = os.open(name, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(file, descriptor)
        os.close(file)
    os.chdir(request.cwd)
    os.environ.clear()
    os.environ |= request.environment
    if "PYTHONUNBUFFERED" in os.environ:
        sys.stdout.reconfigure(write_through=True)  # type: ignore[union-attr]
    code = 1
    try:
        script, arguments, environments = launched(request.words)
        pids = []
        for environment in environments:
            if pid := os.fork():
                os.setpgid(pid, pid)  # as the rank does: it may be signalled before it gets there
                pids.append(pid)
            else:
                return become_rank(request, script, arguments, environment)
        code = wait_for(pids, request.seconds)
    except BaseException:
        traceback.print_exc()
    partial = Path(f"{request.result}.partial")
    partial.write_text(str(code))
    partial.rename(request.result)
    os._exit(0)


def launched(words: list[str]) -> tuple[str, list[str], list[dict[str, str]]]:
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
    # train.py looks there for what was asked of Accelerate's launcher
    seem("cmdline", [sys.executable, "accelerate", "launch", *request.words])
    seem("environ", request.environment)
    seem("cwd", request.cwd)
    # after an error, it would end the launcher, whose words nobody reads here, and wait for its other processes
    seem("send_signal", None)
    seem("children", [])
    sys.argv = [script, *arguments]
    sys.orig_argv = [sys.executable, *sys.argv]
    if request.project != str(PROJECT):  # a copy of it, with changes
        for name in [name for name in sys.modules if name.split(".")[0] in ("src", "tests")]:
            del sys.modules[name]
        sys.path[0] = request.project
    return script, request.before


def seem(name: str, said: object) -> None:
    """Let psutil say this of the parent process."""
    parent, asked = os.getppid(), getattr(psutil.Process, name)

    def answer(process: psutil.Process, *arguments: object, **more: object) -> object:
        return said if process.pid == parent else asked(process, *arguments, **more)

    setattr(psutil.Process, name, answer)


def wait_for(pids: list[int], seconds: float) -> int:
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
            print(f"warm_ranks.py: killed {len(running)} processes", file=sys.stderr, flush=True)
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
        __file__ = os.path.join(sys.path[0], script)
        exec(compile(Path(__file__).read_text(), __file__, "exec", dont_inherit=True))
    except BaseException as error:
        end(error)
    end(None)
