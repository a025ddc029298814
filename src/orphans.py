"""No process stays behind when the one above it is gone."""

import ctypes
import os
import signal
import sys
import threading
import time

PR_SET_PDEATHSIG = 1
SET_BY_LAUNCHERS = ("ACCELERATE_DYNAMO_BACKEND", "TORCHELASTIC_RUN_ID")
"""Environment variables that accelerate's and torch's launchers always set, and nobody else does."""


def end_with_launcher() -> None:
    """From now on, sends this process SIGTERM when its launcher is gone: killed, or ended by a signal itself, as each
    does on SIGUSR1, and accelerate's for a single process on any. Without a launcher, does nothing."""
    launcher = os.getppid()

    def watch() -> None:
        while os.getppid() == launcher:
            time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGTERM)

    if any(name in os.environ for name in SET_BY_LAUNCHERS):
        threading.Thread(target=watch, daemon=True).start()


def outlive_signals(_worker: int) -> None:
    """For processes that load data: launchers and terminals signal the whole process group, and the one that trains
    still needs them. They end with it."""
    os.setpgid(0, 0)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # elsewhere torch notices, after 5 seconds
