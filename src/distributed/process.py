"""The process: its exit codes (0 done, 1 failed, 2 a user error), the signals that stop it, its launcher's death, its
garbage."""

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

from src.config.errors import RunError, UserError
from src.config.terminal import say, spare_terminals

GRACE_SECONDS = 5.0
"""Seconds to wait before reporting an error that may only be a symptom of another process's failure: the launcher ends
this process meanwhile."""
DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)
LAUNCHER_VARIABLES = ("ACCELERATE_DYNAMO_BACKEND", "TORCHELASTIC_RUN_ID")
"""Environment variables that accelerate's and torch's launchers always set, and nothing else does."""
PR_SET_PDEATHSIG = 1
"""The constant of this name in Linux's prctl.h."""


class Signals:
    """The signals that ask this process to stop, noted from `catch` on. A second SIGINT ends it at once.

    A thread notes them: Python's handlers have to wait as long as the main thread is in C++, as it is while processes
    meet.
    """

    name: str | None = None
    """Name of the last signal; None if there was none."""
    _answer: Callable[[str], None] | None = None
    _caught: Sequence[signal.Signals] = ()

    def catch(self) -> None:
        """Note the signals from now on, in place of their default action. SIGHUP stays ignored if nohup said so; others
        may be ignored for the launcher's sake, as by launchers/slurm.sbatch, but not for this process's."""
        noted, written = os.pipe()
        os.set_blocking(written, False)
        signal.set_wakeup_fd(written, warn_on_full_buffer=False)
        os.register_at_fork(after_in_child=lambda: signal.set_wakeup_fd(-1))  # what they are sent is not for this one
        by_nohup = signal.SIGHUP if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN else None
        self._caught = [number for number in STOP_SIGNALS if number != by_nohup]
        for number in self._caught:
            signal.signal(number, lambda *_: None)
        threading.Thread(target=self._watch, args=[noted], daemon=True).start()

    def release(self) -> None:
        """Let the signals end the process again."""
        for number in self._caught:
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
        signal.set_wakeup_fd(-1)  # not before: a signal that came in between would be lost

    def answer_by(self, answer: Callable[[str], None] | None) -> None:
        """Have a thread call `answer` with the name of each signal as it comes, and with one that has come already."""
        self._answer = answer
        if answer and self.name:
            threading.Thread(target=answer, args=[self.name], daemon=True).start()

    def die_later(self, _: str) -> None:
        """End the process, unless it gets so far in GRACE_SECONDS that it answers in another way."""
        time.sleep(GRACE_SECONDS)
        if self._answer == self.die_later:
            self.die()

    def die(self) -> None:
        """End the process without a message, with the exit code of the signal."""
        os._exit(128 + signal.Signals[str(self.name)])

    def _watch(self, noted: int) -> None:
        first_interrupt = math.inf
        while True:
            (number,) = os.read(noted, 1)
            if number not in self._caught:  # what others catch is noted too, such as the death of a loader
                continue
            self.name = signal.Signals(number).name
            if number == signal.SIGINT:
                first_interrupt = min(first_interrupt, time.monotonic())
                if time.monotonic() > first_interrupt + 1:  # else the same, forwarded
                    self.die()
            if self._answer:
                self._answer(self.name)


SIGNALS = Signals()


@contextlib.contextmanager
def exit_codes(program: str = "train.py") -> Iterator[None]:
    """Turn a UserError into its message and exit code 2, a RunError into exit code 1; all else keeps its traceback.

    On each machine the first process prints the message, and another one only if the mistake is its alone. A process
    that merely lost its peers leaves the message to the one that failed.
    """
    spare_terminals()
    rank, is_first_here = os.environ.get("RANK", "0"), os.environ.get("LOCAL_RANK", "0") == "0"
    try:
        try:
            yield
        except BaseException:
            SIGNALS.release()  # nobody is left to answer them
            raise
    except (UserError, RunError) as error:
        if not is_first_here:
            leave_it_to_others()
        which = "" if is_first_here else f" [process {rank}]"
        say(*(f"{program}: {line}{which}" for line in str(error).splitlines()), file=sys.stderr)
        sys.exit(2 if isinstance(error, UserError) else 1)
    except OSError as error:
        if error.errno not in DISK_ERRORS:
            raise
        where = error.filename or "a file"
        remedy = "mount its disk for writing" if error.errno == errno.EROFS else "make room"
        sys.exit(f"{program}: {where} cannot be written, {error.strerror}: {remedy}, then run the same command again")
    except RuntimeError as error:
        # of an exchange: it only says that another process failed
        if re.search("gloo|NCCL|caused pair closure", str(error)):
            leave_it_to_others()
            # gloo's second text: of exchanges whose connection was closed because another one had timed out
            if re.search("(?i)timed out|timeout caused pair closure", str(error)):
                message = f"process {rank} waited for another one, which hangs, until timeout_minutes had passed"
                say(f"{program}: {message}", file=sys.stderr)
        raise


def leave_it_to_others() -> None:
    """End the process without a message if the launcher tells it to end, as another one's failure makes it do, before
    GRACE_SECONDS are over."""
    if not SIGNALS.name:
        time.sleep(GRACE_SECONDS)
    if SIGNALS.name:  # also if it came just before `release`: the thread that notes it may be late
        SIGNALS.die()


@contextlib.contextmanager
def collecting_new_objects() -> Iterator[None]:
    """Have Python look for garbage only among the objects that are made within: to look through those of the libraries,
    400,000 and more, stops a step for 0.3 s."""
    gc.collect()  # or garbage in cycles, and its memory, would be kept
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()  # some libraries report what is still there when the process ends as leaked


def end_with_launcher() -> None:
    """Have Linux send this process SIGTERM when its launcher dies; without a launcher, do nothing: a shell may end
    before the run.

    Launchers leave their processes running on SIGKILL and SIGUSR1; accelerate's, with one process, on any signal.
    """
    if any(name in os.environ for name in LAUNCHER_VARIABLES):
        end_with_parent()


def end_with_parent(number: signal.Signals = signal.SIGTERM) -> None:
    """Have Linux send this process a signal when its parent dies; on another system, do nothing."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, number)
