"""The curves of a report: as SVG, whose colours the page sets, and as PNG."""

import io
import re
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, NullFormatter

BLACK, GREY = "#222222", "#999999"
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
"""Of Okabe and Ito, https://jfly.uni-koeln.de/color/: whoever is colour-blind can tell them apart."""
DASHES = ("-", "--", "-.", ":", (0, (6, 1, 1, 1, 1, 1)), (0, (1, 4)))
VARIABLES = {BLACK: "currentColor", GREY: "var(--grey)"} | {c: f"var(--c{i})" for i, c in enumerate(COLOURS)}
NO_METADATA = dict.fromkeys(("Creator", "Date", "Format", "Type"))
POINTS, SMOOTHED = 1200, 25
"""What a picture's curves have together, each the mean of some records; smoothing averages 1/25 of a curve."""
STYLE: Any = {
    "svg.fonttype": "none", "svg.hashsalt": "report", "text.parse_math": False, "font.size": 8, "text.color": BLACK,
    "figure.facecolor": "none", "axes.facecolor": "none", "axes.grid": True, "axes.grid.axis": "y",
    "axes.spines.top": False, "axes.spines.right": False, "axes.spines.left": False, "axes.edgecolor": GREY,
    "axes.linewidth": 0.6, "grid.color": GREY, "grid.alpha": 0.35, "grid.linewidth": 0.5, "xtick.bottom": False,
    "ytick.left": False, "xtick.labelcolor": BLACK, "ytick.labelcolor": BLACK, "legend.frameon": False,
    "legend.borderaxespad": 0, "legend.borderpad": 0,
}  # fmt: skip


class Curve(NamedTuple):
    """A line of a picture, through at least one point."""

    label: str
    steps: Sequence[float]
    values: Sequence[float]
    """Finite."""
    kind: Literal["smooth", "dotted", "noisy"]


def draw(title: str, curves: list[Curve], png: Path, ticks: Sequence[str]) -> str:
    """Draw curves, the most important first; from the seventh on they are grey. Write `png`; return the SVG.

    Args:
        ticks: names of the steps 0, 1, …; empty: they are numbers.
    """
    labels = [curve.label[:40] for curve in curves[: len(COLOURS)]]
    if len(curves) > len(labels):
        labels.append(f"{len(curves) - len(labels)} others")
    columns = max(1, min(4, 64 // (6 + max(map(len, labels)))))
    height = 2.0 + 0.17 * -(-len(labels) // columns) * (len(labels) > 1)  # inches
    with mpl.rc_context(STYLE), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the PNG's font lacks the letters of some scripts
        figure = Figure(figsize=(3.75, height))
        axes = figure.add_axes((0.13, 0.25 / height, 0.84, 1.4 / height))
        handles: list[Any] = []
        for i, curve in reversed(list(enumerate(curves))):  # the most important above the others
            style: dict[str, Any] = {"color": GREY, "linewidth": 0.5}
            if i < len(COLOURS):
                style = {"color": COLOURS[i], "linestyle": DASHES[i], "linewidth": 1.5}
            x, low, y, high = thinned(np.array(curve.steps), np.array(curve.values), POINTS // len(curves))
            if curve.kind == "noisy" and len(y) > SMOOTHED:
                if len(curves) <= 3:
                    raw = np.column_stack([low, high]).ravel()
                    axes.plot(np.repeat(x, 2), raw, color=style["color"], linewidth=0.6, alpha=0.4, zorder=1)
                window = np.ones(1 + len(y) // SMOOTHED)
                y = np.convolve(y, window, "same") / np.convolve(np.ones_like(y), window, "same")
            elif len(y) == 1 or (curve.kind == "dotted" and len(y) <= 50):
                style |= {"marker": "o", "markersize": 3}
            handles = [*axes.plot(x, y, **style), *handles[: len(COLOURS)]]
        shown = np.concatenate([line.get_ydata() for line in axes.lines])
        if shown.min() > 0 and shown.max() > 30 * np.median(shown):
            axes.set_yscale("log")
            axes.yaxis.set_minor_formatter(NullFormatter())
        else:
            axes.yaxis.set_major_locator(MaxNLocator(4))
        axes.set_xlim(None if ticks else 0)
        axes.xaxis.set_major_locator(MaxNLocator(4, integer=True))
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_formatter("{x:,.10g}")
        if ticks:
            axes.set_xticks(range(0, len(ticks), -(-len(ticks) // 5)), ticks[:: -(-len(ticks) // 5)])
        figure.text(0, 1 - 0.13 / height, title, fontsize=9.5, fontweight="bold")
        if len(labels) > 1:
            axes.legend(handles, labels, loc="lower left", bbox_to_anchor=(-0.15, 1.06), ncols=columns)
        png.unlink(missing_ok=True)  # it may be a link
        figure.savefig(png, dpi=200, facecolor="white", pil_kwargs={"compress_level": 1})
        svg = io.StringIO()
        figure.savefig(svg, format="svg", metadata=NO_METADATA | {"Title": title})
    text = svg.getvalue()
    text = re.sub(r'(?<=<g) id="[^"]*"', "", text[text.index("<svg") :])  # each picture has the same ones
    text = re.sub("|".join(VARIABLES), lambda colour: VARIABLES[colour[0]], text)
    return text.replace("<svg ", '<svg role="img" ', 1)


def thinned(steps: np.ndarray, values: np.ndarray, most: int) -> tuple[np.ndarray, ...]:
    """Return at most `most` steps, and the least, the mean and the greatest of the values around each."""
    edges = np.unique(np.linspace(0, len(values), max(most, 2), endpoint=False, dtype=int))
    sizes = np.diff([*edges, len(values)])
    x, mean = (np.add.reduceat(numbers, edges) / sizes for numbers in (steps, values))
    return x, np.minimum.reduceat(values, edges), mean, np.maximum.reduceat(values, edges)
