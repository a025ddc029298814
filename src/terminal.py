"""What a person sees of a run in a terminal: progress bars, lines that fit, charts; in a pipe or a file, plain lines.

tqdm draws the bars, not rich: it has no thread that takes time from the training, whatever kills the run leaves the
terminal its cursor, and the Hub's downloads are drawn with it too.
"""

import math
import os
import re
import shutil
import sys
import textwrap
from typing import Any

import numpy as np
from tqdm import tqdm

BLOCKS = "▁▂▃▄▅▆▇█"
CHART = 40
"""Characters that a chart has at most."""


def width() -> int | None:
    """Return the columns of the terminal that shows both streams; None if there is none, or a dumb one."""
    is_terminal = sys.stdout.isatty() and sys.stderr.isatty() and os.environ.get("TERM") != "dumb"
    return shutil.get_terminal_size().columns if is_terminal else None


def bar(desc: str = "", **options: Any) -> Any:
    """Return tqdm's bar, which is removed when it is done; only a run's first process shows it, and in a terminal."""
    columns = width()
    form = f"{{percentage:3.0f}}% {{bar:{(columns or 80) // 8}}} {{n_fmt}}/{{total_fmt}}  eta {{remaining}}  {{desc}}"
    options = {"bar_format": form, "leave": False, "delay": 0.5, **options}
    is_hidden = columns is None or os.environ.get("RANK", "0") != "0"
    return tqdm(desc=desc, dynamic_ncols=True, disable=is_hidden, **options)


def fit(line: str, columns: int | None = None) -> list[str]:
    """Return the line as lines of so many columns, None: those of the terminal. A number stays with its name."""
    if (columns := columns or width()) is None:
        return [line]
    indent = " " * (13 if line.startswith("  ") else 2)
    whole = re.sub(r"(?<=\S) (?=[-\d])", "\xa0", line)
    lines = textwrap.wrap(whole, columns, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
    return [line.replace("\xa0", " ") for line in lines]


def has_charts() -> bool:
    """Return whether there is a terminal, and it can show blocks."""
    return width() is not None and sys.stdout.encoding.lower().startswith("utf")


def chart(values: list[float | None]) -> str:
    """Return the course of `values` as a row of blocks, each for the mean of some, and the first and the last value; a
    dot where none is finite. Empty if there are fewer than two finite ones."""
    numbers = np.array(values, dtype=float)
    finite = numbers[np.isfinite(numbers)]
    if len(finite) < 2:
        return ""
    parts = [part[np.isfinite(part)] for part in np.array_split(numbers, min(CHART, len(numbers)))]
    means = [part.mean() if len(part) else math.nan for part in parts]
    low, high = np.nanmin(means), np.nanmax(means)
    scale = (len(BLOCKS) - 1) / (high - low or 1)
    blocks = ["·" if math.isnan(mean) else BLOCKS[round((mean - low) * scale)] for mean in means]
    return f"{''.join(blocks)}  {finite[0]:.4f} to {finite[-1]:.4f}"
