"""The process: its exit codes (0 done, 1 failed, 2 user error), the signals that stop it, its launcher's death and its
garbage collection."""

import atexit
import contextlib
import ctypes
import errno
import gc
import math
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence

import psutil

from src.config.errors import RunError, UserError
from src.config.terminal import say, visible

GRACE_SECONDS = 5.0
"""Seconds to wait before reporting an error that may only be a symptom of another process's failure: meanwhile, the
launcher ends this process."""
DISK_ERRORS = errno.ENOSPC, errno.EDQUOT, errno.EFBIG
STOP_SIGNALS = signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP
LAUNCHER_VARIABLES = {"ACCELERATE_DYNAMO_BACKEND", "TORCHELASTIC_RUN_ID"}
"""Environment variables that only accelerate's and torch's launchers set, and always do."""
LAUNCHERS = {"accelerate", "accelerate-launch", "accelerate.commands.launch", "torchrun", "torch.distributed.run"}
"""Words of their command lines, without folders."""
COLLECTIVE_FAILED = "gloo|NCCL|caused pair closure"
"""Matches errors of a collective, which only say that another process has failed."""
TIMED_OUT = "(?i)timed out|timeout caused pair closure"
"""Matches those of one that timed out. Gloo's second message: the connection was closed as another collective had."""
PR_SET_PDEATHSIG = 1
"""A constant in Linux's prctl.h."""


class Signals:
    """The signals that ask this process to stop, caught after a call of `catch`. A second SIGINT ends it at once.

    A thread catches them: Python's handlers don't run while the main thread is in C++, as when processes rendezvous.
    """

    name: str | None = None
    """Name of the first signal; None if there was none."""
    since = math.inf
    """When `catch` was called, by time.monotonic(): the wall clock may jump."""
    _answer: Callable[[], None] | None = None
    _caught: Sequence[signal.Signals] = ()

    def catch(self) -> None:
        """Catch the signals from now on. SIGHUP stays ignored under nohup. Other signals are caught even if the parent
        ignored them, as a batch script does to protect the launcher."""
        self.since = time.monotonic()
        reader, writer = os.pipe()
        os.set_blocking(writer, False)
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        os.register_at_fork(after_in_child=lambda: signal.set_wakeup_fd(-1))  # a child's signals are its own
        self._caught = [n for n in STOP_SIGNALS if n != signal.SIGHUP or signal.getsignal(n) != signal.SIG_IGN]
        for number in self._caught:
            signal.signal(number, lambda *_: None)
        threading.Thread(target=self._watch, args=[reader], daemon=True).start()

    def release(self) -> None:
        """Restore the default: signals end the process."""
        for number in self._caught:
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
        signal.set_wakeup_fd(-1)  # last, or a signal in between would be lost

    def answer_by(self, answer: Callable[[], None] | None) -> None:
        """Call `answer`, in a thread, for each signal, including one that has arrived already."""
        self._answer = answer
        if answer and self.name:
            threading.Thread(target=answer, daemon=True).start()

    def die_later(self) -> None:
        """End the process after GRACE_SECONDS, unless another answer has been set by then."""
        time.sleep(GRACE_SECONDS)
        if self._answer == self.die_later:
            self.die()

    def die(self) -> None:
        """End the process silently, with the signal's exit code."""
        os._exit(128 + signal.Signals[str(self.name)])

    def _watch(self, reader: int) -> None:
        first_interrupt = math.inf
        while True:
            (number,) = os.read(reader, 1)
            if number not in self._caught:  # others handle it, such as a data worker's death
                continue
            self.name = self.name or signal.Signals(number).name  # launchers answer SIGINT by SIGTERM to this process
            if number == signal.SIGINT:
                first_interrupt = min(first_interrupt, time.monotonic())
                if time.monotonic() > first_interrupt + 1:  # else it is the same one, forwarded
                    self.die()
            if self._answer:
                self._answer()
            if number == signal.SIGINT and "RANK" not in os.environ:
                time.sleep(0.2)  # after 0.25, Accelerate's launcher prints its traceback, and ends without waiting
                end_launcher()


SIGNALS = Signals()
HAS_FAILED = threading.Event()
"""Set when this process ends with an error, after a message or a traceback."""


@contextlib.contextmanager
def exit_codes(program: str = "train.py") -> Iterator[None]:
    """Turn a UserError into its message and exit code 2, a RunError into exit code 1. Others keep their traceback.

    On each machine the first process prints the message; another does only if it alone failed. A process that merely
    lost its peers leaves the message to the one that failed.
    """
    for stream in (sys.stdout, sys.stderr):  # not every terminal can encode all characters
        stream.reconfigure(errors="replace")  # type: ignore[union-attr]  # a TextIOWrapper
    rank, is_first_here = os.environ.get("RANK", "0"), os.environ.get("LOCAL_RANK", "0") == "0"
    try:
        try:
            yield
        except BaseException as error:
            SIGNALS.release()  # nothing answers them any more
            if not isinstance(error, SystemExit) or error.code:
                HAS_FAILED.set()
            if isinstance(error, RuntimeError) and re.search(COLLECTIVE_FAILED, str(error)):
                leave_it_to_others()  # if a process of this machine failed
                if re.search(TIMED_OUT, str(error)):
                    timed_out = "timed out (timeout_minutes) waiting for another process"
                    say(f"{program}: process {rank} {timed_out}", file=sys.stderr)
                elif num_machines() > 1:
                    advice = "run the same command on all machines; they resume from the newest checkpoint"
                    raise RunError(f"a process on another machine was lost: {advice}") from error
            raise
    except (UserError, RunError) as error:
        if not is_first_here:
            leave_it_to_others()
        which = "" if is_first_here else f" [process {rank}]"
        # an indented line is to be pasted
        say(*(line if line.startswith(" ") else f"{program}: {line}{which}" for line in error.args), file=sys.stderr)
        sys.exit(2 if isinstance(error, UserError) else 1)
    except OSError as error:
        if error.errno not in DISK_ERRORS:
            raise
        says = f"{error.filename or 'a file'} cannot be written ({error.strerror}): free some space"
        sys.exit(visible(f"{program}: {says}, then run the same command again"))


def num_machines() -> int:
    """Return the number of machines that torch's launcher started the run on."""
    return int(os.environ.get("GROUP_WORLD_SIZE", "1"))


def leave_it_to_others() -> None:
    """End the process silently if the launcher ends it within GRACE_SECONDS, as it does when another process failed."""
    if not SIGNALS.name:
        time.sleep(GRACE_SECONDS)
    if SIGNALS.name:  # also one from just before `release`, which the thread may notice late
        SIGNALS.die()


def collect_only_new_objects() -> None:
    """Have the garbage collector leave out the objects that there are now: going through the libraries' 400,000 and
    more would stop a step for 0.3 s."""
    gc.freeze()
    gc.enable()
    atexit.register(gc.unfreeze)  # some libraries report whatever is left when the process ends as leaked


def end_with_launcher() -> None:
    """On Linux, have this process get SIGTERM when its launcher dies. Do nothing without a launcher: a shell may end
    before the run.

    On SIGKILL and SIGUSR1 launchers leave their processes running; with one process, accelerate's does on any signal.
    """
    if LAUNCHER_VARIABLES & os.environ.keys():
        end_with_parent()
        atexit.register(end_launcher)  # before all others, and so called last


def end_launcher() -> None:
    """End the launcher after an error or Ctrl-C, once this process has said what happened: its own traceback, of 11
    lines in Accelerate's and 41 in torch's, would bury that. Then end the other processes, as the launcher would have.

    SIGUSR1 ends it without a word, as it has no handler for it. A launcher goes on if it tries again, if other machines
    wait for it, or if it has yet to show what this process has said (--tee).
    """
    value = os.environ.get
    if value("TORCHELASTIC_MAX_RESTARTS", "0") != "0" or num_machines() > 1:
        return
    with contextlib.suppress(psutil.Error, OSError):  # such as systems without /proc
        launcher = psutil.Process(os.getppid())
        words = launcher.cmdline()
        was_interrupted = SIGNALS.name == "SIGINT" and value("LOCAL_RANK", "0") == "0"
        is_quiet = "--quiet" in words and "RANK" not in os.environ  # with several processes, that does nothing
        is_due = was_interrupted or (HAS_FAILED.is_set() and not is_quiet)
        writes_there = os.path.samestat(os.fstat(2), os.stat(f"/proc/{launcher.pid}/fd/2"))
        if is_due and writes_there and LAUNCHERS & {*map(os.path.basename, words)}:
            others = [process for process in launcher.children() if process.pid != os.getpid()]
            end_with_parent(0)  # this process outlives the launcher, whose death asks the others to end
            launcher.send_signal(signal.SIGUSR1)
            launcher.wait(1)  # an error if it ignores the signal, as under a batch script that does
            kill_at = time.monotonic() + float(value("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "30"))
            while (alive := [*filter(_is_alive, others)]) and time.monotonic() < kill_at:
                time.sleep(0.05)
            for process in alive:
                process.kill()


def _is_alive(process: psutil.Process) -> bool:
    """Return whether a process runs: in some containers, nobody buries those that have ended."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.status() != psutil.STATUS_ZOMBIE
    return False


def end_with_parent(number: int = signal.SIGTERM) -> None:
    """On Linux, have this process get a signal when its parent dies; 0: none."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, number)
