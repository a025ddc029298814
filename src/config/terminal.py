"""Printing: whole lines, above progress bars if there is a terminal.

tqdm draws the bars rather than rich: it needs no thread, and a killed run leaves the terminal's cursor visible.
"""

import errno
import os
import sys
from threading import RLock
from typing import Any

from tqdm import tqdm

# tqdm's own lock is shared with forked processes: one that is killed while holding it would never release it
tqdm.set_lock(RLock())


def bar(desc: str = "", **options: Any) -> Any:
    """Return a tqdm bar; `options` has its total. It is shown until it is done, by the run's first process, if both
    streams go to a terminal."""
    is_terminal = sys.stdout.isatty() and sys.stderr.isatty() and os.environ.get("TERM") != "dumb"
    layout = "{percentage:3.0f}% {bar:10} {n:,}/{total:,}  eta {remaining}  {desc}"
    options = {"bar_format": layout, "leave": False, **options}
    return tqdm(desc=desc, disable=not (is_terminal and is_first()), dynamic_ncols=True, **options)


def is_first() -> bool:
    """Return whether this is the run's first process."""
    return os.environ.get("RANK", "0") == "0"


def say(*lines: str, file: Any = None) -> None:
    """Print whole lines above the bars, safely from any thread.

    Everything that a run prints goes through here: to `file`, or to the process's real standard output, even while
    sys.stdout is redirected to silence a library. Once nobody reads the output, as after `| head -2` or when the
    terminal was closed, drop it.
    """
    file = file or sys.__stdout__
    with tqdm.external_write_mode():
        try:
            file.write("".join(f"{line}\n" for line in lines))  # in one call, as other processes print there too
            file.flush()
        except OSError as error:
            if error.errno not in (errno.EPIPE, errno.EIO):
                raise
            os.dup2(os.open(os.devnull, os.O_WRONLY), file.fileno())


def spare_terminals() -> None:
    """Let standard output and error replace characters that the terminal cannot encode."""
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="replace")  # type: ignore[union-attr]  # a TextIOWrapper
