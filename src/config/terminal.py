"""What a run prints: whole lines, and below them progress bars where a terminal shows them.

tqdm draws the bars, not rich: it needs no thread, and whatever kills a run leaves the terminal its cursor.
"""

import errno
import os
import sys
from threading import RLock
from typing import Any

from tqdm import tqdm

# tqdm's own lock is shared with forked processes too: one that is killed would never give it back
tqdm.set_lock(RLock())
unread: list[str] = []
"""What to say elsewhere once nobody reads the output any more."""


def bar(desc: str = "", **options: Any) -> Any:
    """Return tqdm's bar, or without a total its text alone.

    It is shown in a terminal that takes both streams, by a run's first process, until it is done.
    """
    is_terminal = sys.stdout.isatty() and sys.stderr.isatty() and os.environ.get("TERM") != "dumb"
    counts = "{percentage:3.0f}% {bar:10} {n_fmt}/{total_fmt}  eta {remaining}  {desc}"
    layout = counts if "total" in options else "{desc} …"
    options = {"bar_format": layout, "leave": False, "dynamic_ncols": True, **options}
    return tqdm(desc=desc, disable=not (is_terminal and is_first()), **options)


def is_first() -> bool:
    """Return whether this is a run's first process, or its only one."""
    return os.environ.get("RANK", "0") == "0"


def say(*lines: str, file: Any = None) -> None:
    """Print lines above the bars, each of them whole, whichever threads do so at once.

    All that a run prints goes this way: to `file`, or to the process's standard output, even while a library's is
    redirected to silence it. What nobody reads any more, as after `| head -2` or in a terminal that was closed, is
    dropped from then on, and `unread` says so.
    """
    file = file or sys.__stdout__
    with tqdm.external_write_mode():
        try:
            file.write("".join(f"{line}\n" for line in lines))  # at once: other processes print there too
            file.flush()
        except OSError as error:
            if error.errno not in (errno.EPIPE, errno.EIO):
                raise
            os.dup2(os.open(os.devnull, os.O_WRONLY), file.fileno())
            unread.append("the reader of the output is gone: see metrics.jsonl")


def spare_terminals() -> None:
    """Have standard output and error replace what the encoding of their terminal lacks."""
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="replace")  # type: ignore[union-attr]  # a TextIOWrapper
