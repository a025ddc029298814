"""The plots of a report, as SVG."""

import base64
import io
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import rc_context
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter

STYLE = Path(__file__).with_suffix(".mplstyle")
MAX_CURVES = 6
"""Curves in a plot: as many as the style has colours."""
POINTS = 600
"""Points per plot, over all its curves; each is the mean of neighbouring values."""
UNITS = {"bytes": "B", "seconds": "s"}
"""Of metrics whose names end so: 1.3 GB, 80 ms."""


def draw_curves(title: str, curves: list[tuple[str, list[tuple[float, float]]]]) -> str:
    """Return a plot of curves, the most important first, as SVG in base64: label and points (step, finite value) of
    each, at least one. Say which of them cannot be told apart."""
    with rc_context(fname=STYLE):
        figure = Figure(figsize=(3.75, 2.4), layout="constrained")
        axes: Any = figure.subplots()
        axes.set_title(title, loc="left", fontweight="bold")
        most = POINTS // min(len(curves), MAX_CURVES)
        for label, points in curves[:MAX_CURVES]:
            marker = "o" if len(points) < 20 else ""
            # each point shown is the mean of as many neighbours
            shown = [part.mean(axis=0) for part in np.array_split(points, min(len(points), most))]
            axes.plot(*np.transpose(shown), marker=marker, label=label[:40])
        axes.locator_params("x", integer=True)
        if unit := UNITS.get(title.rpartition("_")[2]):
            axes.yaxis.set_major_formatter(EngFormatter(unit))
        if len(curves) > 1:
            axes.legend(frameon=False, fontsize=6)
        for below, above in combinations(axes.get_lines(), 2):
            gap = abs(below.get_ydata() - np.interp(below.get_xdata(), *above.get_data())).max()
            if gap < np.ptp(axes.get_ylim()) / 100:  # the thickness of a line
                difference = axes.yaxis.get_major_formatter().format_data(float(f"{gap:.1g}")) if gap else 0
                says = f"{below.get_label()} and {above.get_label()}: largest difference {difference}\n"
                axes.set_xlabel(axes.get_xlabel() + says, fontsize=6)
        svg = io.StringIO()
        figure.savefig(svg, format="svg", metadata={"Date": None})
    return base64.b64encode(svg.getvalue().encode(errors="replace")).decode()
