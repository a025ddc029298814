"""How a run ends: 0 done, 2 the user erred (one message, no traceback), 1 failed (traceback)."""

import contextlib
import os
import sys
import time
import traceback
from collections.abc import Iterator
from pathlib import Path

PROJECT = Path(__file__).parent.parent


@contextlib.contextmanager
def exit_codes() -> Iterator[None]:
    """Turns a ValueError that this project raised into its message and exit code 2.

    One that a library raised is a bug, and keeps its traceback. Of several processes the first one speaks: the
    others are ended by the launcher while they wait, unless the mistake is theirs alone (a file that only their
    machine lacks).
    """
    try:
        yield
    except ValueError as error:
        raised_in = Path(traceback.extract_tb(error.__traceback__)[-1].filename)
        if PROJECT not in raised_in.parents or "site-packages" in raised_in.parts:
            raise
        rank = int(os.environ.get("RANK", "0"))
        if rank > 0:
            time.sleep(5)
        for line in str(error).splitlines():
            print(f"train.py: {line}" + (f" [process {rank}]" if rank else ""), file=sys.stderr, flush=True)
        sys.exit(2)
