"""The pictures of a report: curves over steps, as SVG whose colours follow the page, and as PNG."""

import io
import re
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, NullFormatter

BLACK, GREY = "#222222", "#999999"
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
"""Of Okabe and Ito, https://jfly.uni-koeln.de/color/: whoever is colour-blind can tell them apart."""
DASHES = ("-", "--", "-.", ":", (0, (6, 1, 1, 1, 1, 1)), (0, (1, 4)))
VARIABLES = {BLACK: "currentColor", GREY: "var(--grey)"} | {c: f"var(--c{i})" for i, c in enumerate(COLOURS)}
"""What an SVG says in place of a colour: the page sets it, by day and by night."""
POINTS, SMOOTHED = 1200, 25
"""What the curves of a picture have together, each the mean of some records; smoothing averages 1/25 of a curve."""
STYLE = {
    "svg.fonttype": "none", "svg.hashsalt": "report", "text.parse_math": False, "font.size": 8, "axes.grid": True,
    "figure.facecolor": "none", "axes.facecolor": "none", "axes.edgecolor": GREY, "axes.linewidth": 0.6,
    "axes.spines.top": False, "axes.spines.right": False, "grid.color": GREY, "grid.alpha": 0.25, "grid.linewidth": 0.5,
    "xtick.color": GREY, "ytick.color": GREY, "xtick.labelcolor": BLACK, "ytick.labelcolor": BLACK,
    "text.color": BLACK, "axes.labelcolor": BLACK, "legend.frameon": False, "legend.borderaxespad": 0,
}  # fmt: skip


class Curve(NamedTuple):
    """A line of a picture."""

    label: str
    steps: Sequence[float]
    values: Sequence[float]
    """As many as the steps, at least one, all finite."""
    is_noisy: bool = False
    """Draw it smoothed."""


def draw(title: str, curves: list[Curve], marks: Mapping[str, Sequence[int]], ticks: Sequence[str], png: Path) -> str:
    """Draw curves, the most important first: the seventh and what follows are grey. Write `png`; return the SVG.

    Args:
        marks: steps by what happened there.
        ticks: names of the steps 0, 1, …; empty: they are numbers.
    """
    with mpl.rc_context(STYLE), warnings.catch_warnings(action="ignore"):  # the PNG's font lacks some scripts' letters
        labels = [curve.label[:40] for curve in curves[: len(COLOURS)]]
        labels += [f"{len(curves) - len(labels)} others"] * (len(curves) > len(labels)) + [*marks]
        columns = 3 if max(map(len, labels)) <= 12 else 2 if max(map(len, labels)) <= 22 else 1
        height = 2.2 + 0.17 * -(-len(labels) // columns)  # inches
        figure = Figure(figsize=(3.75, height))
        axes = figure.add_axes((0.135, 0.36 / height, 0.84, 1.5 / height))
        handles: list[Any] = []
        for i, curve in reversed(list(enumerate(curves))):  # the most important above the others
            style: dict[str, Any] = {"color": GREY, "linewidth": 0.5}
            if i < len(COLOURS):
                style = {"color": COLOURS[i], "linestyle": DASHES[i], "linewidth": 1.5}
            steps, low, mean, high = thinned(curve, POINTS // len(curves))
            if curve.is_noisy and len(mean) > SMOOTHED:
                if len(curves) <= 3:
                    raw = np.column_stack([low, high]).ravel()
                    axes.plot(np.repeat(steps, 2), raw, color=style["color"], linewidth=0.6, alpha=0.4, zorder=1)
                window = np.ones(1 + len(mean) // SMOOTHED)
                mean = np.convolve(mean, window, "same") / np.convolve(np.ones_like(mean), window, "same")
            elif len(mean) <= 50 and not curve.is_noisy or len(mean) == 1:
                style |= {"marker": "o", "markersize": 3}
            handles = [*axes.plot(steps, mean, **style), *handles[: len(COLOURS)]]
        for i, at in enumerate(marks.values()):
            markers = {"marker": "|^xd"[i % 4], "markersize": 4, "color": BLACK, "linestyle": "", "clip_on": False}
            y = np.full(len(at), i / 25)  # above the axis, each kind in a row of its own
            handles += axes.plot(at, y, transform=axes.get_xaxis_transform(), **markers)
        values = np.concatenate([line.get_ydata() for line in axes.lines])
        if values.min() > 0 and values.max() > 30 * np.median(values):
            axes.set_yscale("log")
            axes.yaxis.set_minor_formatter(NullFormatter())
        else:
            axes.yaxis.set_major_locator(MaxNLocator(5))
        axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_formatter(lambda value, _: f"{value:,.10g}")
        if ticks:
            axes.set_xticks(range(0, len(ticks), -(-len(ticks) // 5)), ticks[:: -(-len(ticks) // 5)])
        figure.text(0.02, 1 - 0.16 / height, title, fontsize=9.5, fontweight="bold")
        if len(labels) > 1:
            place = {"loc": "lower left", "bbox_to_anchor": (-0.13, 1.04), "ncols": columns, "columnspacing": 1.2}
            axes.legend(handles, labels, **place)
        svg = io.StringIO()
        figure.savefig(svg, format="svg", metadata={"Title": title, "Date": None})
        figure.savefig(png, dpi=200, facecolor="white")
    return in_page(svg.getvalue())


def thinned(curve: Curve, most: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return at most `most` steps, and the least, the mean and the greatest of the values around each."""
    steps, values = np.asarray(curve.steps, float), np.asarray(curve.values, float)
    edges = np.unique(np.linspace(0, len(values), most, endpoint=False, dtype=int))
    sizes = np.diff([*edges, len(values)])
    means = (np.add.reduceat(a, edges) / sizes for a in (steps, values))
    return next(means), np.minimum.reduceat(values, edges), next(means), np.maximum.reduceat(values, edges)


def in_page(svg: str) -> str:
    """Return the SVG as a part of a page: in the page's colours, short, and without names that another one has too."""
    svg = re.sub(r"<g id=\"[^\"]*\">|<metadata>.*?</metadata>", lambda part: "<g>" * part[0].startswith("<g"), svg[svg.index("<svg") :], flags=re.DOTALL)
    svg = re.sub(r"(?<= d=\")[^\"]*", lambda path: re.sub(r"(\.\d)\d+", r"\1", path[0]), svg)
    svg = re.sub("|".join(VARIABLES), lambda colour: VARIABLES[colour[0]], svg)
    return svg.replace("<svg ", '<svg role="img" ', 1)
