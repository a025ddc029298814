"""What a run prints: lines, each of them whole, that fit the terminal, and progress bars below them there. tqdm draws
the bars, not rich: it needs no thread, and whatever kills a run leaves the terminal its cursor."""

import os
import re
import shutil
import sys
import textwrap
from threading import RLock
from typing import Any

from tqdm import tqdm

# tqdm's own lock is shared with forked processes too: one that is killed would never give it back
tqdm.set_lock(RLock())


def width() -> int | None:
    """Return the columns of the terminal that shows both streams; None if there is none, or a dumb one."""
    is_terminal = sys.stdout.isatty() and sys.stderr.isatty() and os.environ.get("TERM") != "dumb"
    return shutil.get_terminal_size().columns if is_terminal else None


def bar(desc: str = "", **options: Any) -> Any:
    """Return tqdm's bar, or without a total its text alone, shown in a terminal, by a run's first process, until it is
    done."""
    counts = f"{{percentage:3.0f}}% {{bar:{(width() or 80) // 8}}} {{n_fmt}}/{{total_fmt}}  eta {{remaining}}  {{desc}}"
    options = {"bar_format": counts if "total" in options else "{desc} …", "leave": False, **options}
    is_hidden = width() is None or os.environ.get("RANK", "0") != "0"
    return tqdm(desc=desc, dynamic_ncols=True, disable=is_hidden, **options)


def say(*lines: str, file: Any = None) -> None:
    """Print lines, above the bars and whole, whichever threads do so at once. All that a run prints goes this way: to
    `file`, or to the process's standard output, even while a library's is redirected to silence it."""
    file = file or sys.__stdout__
    with tqdm.external_write_mode():
        file.write("".join(f"{line}\n" for line in lines))  # at once: other processes print there too
        file.flush()


def fit(line: str) -> str:
    """Return the line, broken where the terminal ends: between words, but not between a name and its number."""
    if (columns := width()) is None:
        return line
    glued, indent = re.sub(r"(?<=\S) (?=[-\d])", "\xa0", line), " " * (13 if line.startswith("  ") else 2)
    return textwrap.fill(
        glued, columns, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    ).replace("\xa0", " ")
