"""The process: its exit codes (0 done, 1 failed, 2 a user error), the signals that stop it, its launcher's death."""

import contextlib
import ctypes
import errno
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator
from types import FrameType

from src.config.errors import RunError, UserError

GRACE_SECONDS = 5.0
"""Seconds to wait before reporting an error that may only be a symptom of another process's failure: the launcher ends
this process meanwhile."""
DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
LAUNCHER_VARIABLES = ("ACCELERATE_DYNAMO_BACKEND", "TORCHELASTIC_RUN_ID")
"""Environment variables that accelerate's and torch's launchers always set, and nothing else does."""
PR_SET_PDEATHSIG = 1
"""The constant of this name in Linux's prctl.h."""


class Signals:
    """The signals that ask this process to stop, noted from `catch` on. A second SIGINT ends it at once."""

    name: str | None = None
    """Name of the last signal; None if there was none."""
    _answer: Callable[[str], None] | None = None  # room: status
    _interrupted = 0.0
    _process = 0  # room: status

    def catch(self) -> None:
        """Note the signals from now on, in place of their default action."""
        self._process = os.getpid()  # room: status
        for number in STOP_SIGNALS:
            signal.signal(number, self._note)

    def release(self) -> None:
        """Let the signals end the process again."""
        for number in STOP_SIGNALS:
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)

    def answer_by(self, answer: Callable[[str], None] | None) -> None:  # room: status
        """Call `answer` with the name of each signal as it comes, and at once if one has come already."""
        self._answer = answer
        if answer and self.name:
            answer(self.name)

    def die(self) -> None:
        """End the process as the signal itself would, without a message."""
        self.release()
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        signal.raise_signal(signal.Signals[str(self.name)])

    def _note(self, number: int, _: FrameType | None) -> None:
        self.name = signal.Signals(number).name
        if number == signal.SIGINT:
            self._interrupted = self._interrupted or time.monotonic()
            if time.monotonic() > self._interrupted + 1:  # else the same, forwarded
                self.die()
        # not in a data loading worker  # room: status
        if self._answer and os.getpid() == self._process:  # room: status
            self._answer(self.name)


SIGNALS = Signals()


@contextlib.contextmanager
def exit_codes(program: str = "train.py") -> Iterator[None]:
    """Turn a UserError into its message and exit code 2, a RunError into exit code 1; all else keeps its traceback.

    On each machine the first process prints the message, and another one only if the mistake is its alone. A process
    that merely lost its peers leaves the message to the one that failed.
    """
    rank, local_rank = (int(os.environ.get(name, "0")) for name in ("RANK", "LOCAL_RANK"))
    try:
        try:
            yield
        except BaseException:
            SIGNALS.release()  # nobody is left to answer them
            raise
    except UserError as error:
        if local_rank > 0:
            if SIGNALS.name:  # the first process has printed it, and the launcher told this one to end
                SIGNALS.die()
            time.sleep(GRACE_SECONDS)
        which = f" [process {rank}]" if local_rank else ""
        sys.stderr.writelines(f"{program}: {line}{which}\n" for line in str(error).splitlines())
        sys.exit(2)
    except RunError as error:
        sys.exit(f"{program}: {error}" if local_rank == 0 else 1)  # it is the same on all processes
    except OSError as error:
        if error.errno not in DISK_ERRORS:
            raise
        where = error.filename or "a file"
        remedy = "mount its disk for writing" if error.errno == errno.EROFS else "make room"
        sys.exit(f"{program}: {where} cannot be written, {error.strerror}: {remedy}, then run the same command again")
    except RuntimeError as error:
        # of an exchange: it only says that another process failed
        if re.search("gloo|NCCL|caused pair closure", str(error)):
            if SIGNALS.name:  # the others were told to stop as well
                SIGNALS.die()
            time.sleep(GRACE_SECONDS)
            # gloo's second text: of exchanges whose connection was closed because another one had timed out
            if re.search("(?i)timed out|timeout caused pair closure", str(error)):
                message = f"process {rank} waited for another one, which hangs, until timeout_minutes had passed"
                sys.stderr.write(f"{program}: {message}\n")
        raise


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
