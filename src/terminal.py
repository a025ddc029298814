"""What a run in a terminal shows beyond plain lines: progress bars and lines that fit. tqdm draws the bars, not
rich: it needs no thread, and whatever kills a run leaves the terminal its cursor."""

import os
import re
import shutil
import sys
import textwrap
from typing import Any

from tqdm import tqdm


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


def fit(line: str) -> str:
    """Return the line, broken where the terminal ends: between words, but not between a name and its number."""
    if (columns := width()) is None:
        return line
    glued, indent = re.sub(r"(?<=\S) (?=[-\d])", "\xa0", line), " " * (13 if line.startswith("  ") else 2)
    return textwrap.fill(
        glued, columns, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    ).replace("\xa0", " ")
