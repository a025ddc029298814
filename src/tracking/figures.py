"""The curves of a report: as SVG for the page, and as PNG for papers and slides."""

import io
import re
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import matplotlib as mpl
import numpy as np
from cycler import cycler
from matplotlib.figure import Figure

MOST = 6
"""Curves that have a colour and a place in the legend; the others are grey."""
POINTS, SMOOTHED = 1200, 25
"""Points that the curves of a picture have together, each the mean of some records; smoothing averages 1/25 of one."""
STYLE: Any = {
    "svg.fonttype": "none",
    "svg.hashsalt": "report",  # the same run gives the same page
    "text.parse_math": False,
    "font.size": 8,
    "axes.grid": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "grid.alpha": 0.35,
    # of Okabe and Ito, https://jfly.uni-koeln.de/color/: whoever is colour-blind can tell them apart
    "axes.prop_cycle": cycler(color=["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9"]),
}
NO_METADATA = dict.fromkeys(("Creator", "Date", "Format", "Type"))


class Curve(NamedTuple):
    """A line of a picture, through at least one point."""

    label: str
    steps: Sequence[float]
    values: Sequence[float]
    """Finite."""
    kind: Literal["smooth", "dotted", "noisy"]


def draw(title: str, curves: list[Curve], png: Path, ticks: Sequence[str]) -> str:
    """Draw curves, the most important first. Write `png`; return the SVG.

    Args:
        ticks: names of the steps 0, 1, …; empty: they are numbers.
    """
    with mpl.rc_context(STYLE), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the PNG's font lacks the letters of some scripts
        figure = Figure(figsize=(3.75, 2.4), layout="constrained")
        axes = figure.subplots()
        axes.set_title(title, loc="left", fontweight="bold")
        for curve in curves[:MOST]:
            plot(axes, curve, POINTS // len(curves), label=curve.label[:40])
        for curve in curves[MOST:]:
            plot(axes, curve, POINTS // len(curves), color="#999999", linewidth=0.5, zorder=1)
        shown = np.concatenate([line.get_ydata() for line in axes.lines])
        if shown.min() > 0 and shown.max() > 30 * np.median(shown):
            axes.set_yscale("log")
        if ticks:
            every = -(-len(ticks) // 5)
            axes.set_xticks(range(0, len(ticks), every), ticks[::every])
        if len(curves) > 1:
            others = f"{len(curves) - MOST} others" if len(curves) > MOST else None
            axes.legend(frameon=False, fontsize=6, title=others)
        png.unlink(missing_ok=True)  # it may be a link
        figure.savefig(png, dpi=200, pil_kwargs={"compress_level": 1})
        svg = io.StringIO()
        figure.savefig(svg, format="svg", metadata=NO_METADATA | {"Title": title})
    text = svg.getvalue()
    text = re.sub(r'(?<=<g) id="[^"]*"', "", text[text.index("<svg") :])  # each picture has the same ones
    return text.replace("<svg ", '<svg role="img" ', 1)


def plot(axes: Any, curve: Curve, most: int, **style: Any) -> None:
    """Draw a curve through at most so many points; smooth one that is noisy."""
    x, y = thinned(np.array(curve.steps), most), thinned(np.array(curve.values), most)
    if curve.kind == "noisy" and len(y) > SMOOTHED:
        window = np.ones(1 + len(y) // SMOOTHED)
        y = np.convolve(y, window, "same") / np.convolve(np.ones_like(y), window, "same")
    elif len(y) == 1 or (curve.kind == "dotted" and len(y) <= 50):
        style |= {"marker": "o", "markersize": 3}
    axes.plot(x, y, **style)


def thinned(values: np.ndarray, most: int) -> np.ndarray:
    """Return at most `most` numbers, each the mean of as many neighbours."""
    parts = np.array_split(values, min(len(values), max(most, 2)))
    return np.array([part.mean() for part in parts])
