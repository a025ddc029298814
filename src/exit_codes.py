"""How a run ends: 0 done, 2 the user erred (one message, no traceback), 1 failed (traceback)."""

import contextlib
import errno
import os
import sys
import time
import traceback
from collections.abc import Iterator
from pathlib import Path

from src.stop_signals import STOP_SIGNALS

PROJECT = Path(__file__).parent.parent
GRACE_SECONDS = 5.0
"""How long a process keeps quiet that may be failing only because another one did: the launcher ends it meanwhile."""


FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)
"""Of OSError: nothing more can be written, for which no code is to blame."""


class FailureError(Exception):
    """What ended the run from outside: its message is told, in a line, with exit code 1 and without a traceback."""


def has_lost_others(error: BaseException | None) -> bool:
    """Whether it says no more than that another process failed."""
    return isinstance(error, RuntimeError) and ("gloo" in str(error) or "NCCL" in str(error))


@contextlib.contextmanager
def exit_codes(program: str = "train.py") -> Iterator[None]:
    """Turns a `raise ValueError` of this project into its message and exit code 2; all else keeps its traceback.

    Of a machine's processes the first one speaks, and the others only where the mistake is theirs alone. One that
    merely lost its peers leaves the word to the one that failed.
    """
    rank, local_rank = (int(os.environ.get(name, "0")) for name in ("RANK", "LOCAL_RANK"))
    try:
        try:
            yield
        except BaseException:
            STOP_SIGNALS.release()  # nobody is left to answer them
            raise
    except ValueError as error:
        origin = traceback.extract_tb(error.__traceback__)[-1]
        ours = PROJECT in Path(origin.filename).parents and "site-packages" not in origin.filename
        if not (ours and (origin.line or "").startswith("raise ")):
            raise
        if local_rank > 0:
            if STOP_SIGNALS.name:  # the first one has spoken, and the launcher told this one to end
                STOP_SIGNALS.die()
            time.sleep(GRACE_SECONDS)
        for line in str(error).splitlines():
            print(f"{program}: {line}" + (f" [process {rank}]" if rank else ""), file=sys.stderr, flush=True)
        sys.exit(2)
    except FailureError as error:
        sys.exit(f"{program}: {error}")
    except OSError as error:
        if error.errno not in FULL:
            raise
        where = error.filename or "a file"
        sys.exit(f"{program}: {where} cannot be written, {error.strerror}: make room, and the same command goes on")
    except FloatingPointError as error:
        sys.exit(f"{program}: {error}" if rank == 0 else 1)  # it is the same on all processes
    except RuntimeError as error:
        if has_lost_others(error):
            if STOP_SIGNALS.name:  # as the others were
                STOP_SIGNALS.die()
            time.sleep(GRACE_SECONDS)
            if "timed out" in str(error).lower():
                message = f"process {rank} waited for another one, which hangs, until timeout_minutes had passed"
                print(f"{program}: {message}", file=sys.stderr, flush=True)
        raise
