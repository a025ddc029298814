"""What each script of the course imports first: it says that the processes start, before torch takes seconds to import,
and where an assertion fails, it prints one line in place of torchrun's hundred."""

import ctypes
import os
import signal
import sys
import time
import traceback
from types import TracebackType

if "RANK" not in os.environ:
    sys.exit("start several processes: torchrun --standalone --nproc-per-node=4 docs/learn/…")
RANK = int(os.environ["RANK"])


def end(kind: type[BaseException], error: BaseException, where: TracebackType | None) -> None:
    """Print which assertion failed, or the traceback of another error, on one process. End the others and torchrun."""
    time.sleep(RANK and 1 + RANK / 10)  # the same assertion usually fails on all: rank 0 ends the others meanwhile
    lines = traceback.format_exception(kind, error, where)
    if issubclass(kind, AssertionError):
        place = traceback.extract_tb(where)[-1]
        lines = [f"{os.path.relpath(place.filename)}:{place.lineno}, rank {RANK}: {lines[-1]}"]
    sys.stdout.flush()
    print(*lines, sep="", end="", file=sys.__stderr__, flush=True)  # torch keeps what goes to sys.stderr now
    if sys.platform == "linux" and "TORCHELASTIC_RUN_ID" in os.environ:
        os.kill(os.getppid(), signal.SIGUSR1)  # torchrun has no handler for it, so it prints nothing
    os._exit(1)


sys.excepthook = end
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: each process ends with torchrun
if RANK == 0:
    print(f"{os.environ['WORLD_SIZE']} processes are starting …", file=sys.stderr, flush=True)
