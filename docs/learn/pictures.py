"""Draw the tutorial's pictures as SVG: `python docs/learn/pictures.py [FOLDER]`, by default next to this file.

Each function below draws the picture of the same name, on axes 80 units wide; a unit is a tenth of an inch. The page's
colour scheme, light or dark, sets the colour of text and arrows; boxes are translucent.
"""

import io
import re
import sys
from collections.abc import Callable
from pathlib import Path

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

INK, GREY = "#222222", "#888888"
RANKS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7")
"""One colour per process, by Okabe and Ito, https://jfly.uni-koeln.de/color/, safe for colour-blind readers."""
STYLE = (
    "<style>svg{color:#222;font-family:system-ui,'DejaVu Sans',sans-serif}"
    "@media(prefers-color-scheme:dark){svg{color:#e6edf3}}</style>"
)


def box(axes: Axes, x: float, y: float, width: float, height: float, words: str = "", colour: str = GREY) -> None:
    """Draw a box around words, with its lower left corner at (x, y)."""
    face = mpl.colors.to_rgba(colour, 0.35)
    axes.add_patch(mpl.patches.Rectangle((x, y), width, height, facecolor=face, edgecolor=colour, linewidth=1))
    axes.text(x + width / 2, y + height / 2, words, ha="center", va="center_baseline")


def arrow(axes: Axes, start: tuple[float, float], end: tuple[float, float], colour: str = INK) -> None:
    axes.annotate("", end, start, arrowprops={"arrowstyle": "-|>", "color": colour, "shrinkA": 0, "shrinkB": 0})


def draw(picture: Callable[[Axes], None], height: float) -> str:
    """Return the picture as SVG."""
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": "learn", "font.size": 10, "text.color": INK}):
        figure = Figure(figsize=(8, height / 10), facecolor="none")
        axes = figure.add_axes((0, 0, 1, 1), xlim=(0, 80), ylim=(0, height))
        axes.axis("off")
        picture(axes)
        svg = io.StringIO()
        figure.savefig(svg, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
    text = re.sub(r"font-family: [^;]*; ", "", svg.getvalue())
    return text.replace(INK, "currentColor").replace("<defs>", STYLE + "<defs>", 1)


def collectives(axes: Axes) -> None:
    """Before and after: one row per process, a colour for each process's numbers, grey for sums."""
    own = [[(rank, letter) for letter in "abcd"] for rank in range(4)]
    first, firsts = [[(rank, "a")] for rank in range(4)], [(rank, "a") for rank in range(4)]
    sums = [(4, f"Σ{letter}") for letter in "abcd"]
    panels = {
        "broadcast": (own, [own[0]] * 4), "reduce": (own, [sums]),
        "scatter": (own[:1], [[cell] for cell in own[0]]), "gather": (first, [firsts]),
        "all-reduce": (own, [sums] * 4), "all-gather": (first, [firsts] * 4),
        "reduce-scatter": (own, [[cell] for cell in sums]),
    }  # fmt: skip
    for i, (name, sides) in enumerate(panels.items()):
        left, top = 6 + 40 * (i % 2), 65 - 17 * (i // 2)
        axes.text(left, top, name, fontweight="bold")
        for rank in range(4):
            axes.text(left - 5, top - 2.5 - 3 * rank, f"rank {rank}", va="center_baseline", fontsize=8)
        arrow(axes, (left + 14.5, top - 7), (left + 17.5, top - 7))
        for x, rows in zip((left, left + 18), sides, strict=True):
            for y, row in enumerate(rows):
                for c, (source, words) in enumerate(row):
                    box(axes, x + 3.5 * c, top - 4 - 3 * y, 3.5, 3, words, (*RANKS, GREY)[source])
    axes.text(46, 13, "a ring", fontweight="bold")
    for rank, (x, y) in enumerate([(46, 8), (60, 8), (60, 1), (46, 1)]):
        box(axes, x, y, 10, 4, f"rank {rank}", RANKS[rank])
    for start, end in (((56, 10), (60, 10)), ((65, 8), (65, 5)), ((60, 3), (56, 3)), ((51, 5), (51, 8))):
        arrow(axes, start, end)


def data_parallel(axes: Axes) -> None:
    """When a process computes and when it sends, by hand and in DDP."""
    axes.text(16, 29, "backward pass, last layer first", fontweight="bold")
    for top, name, starts in ((23, "by hand", (40, 49, 58)), (9, "DDP", (24, 33, 42))):
        axes.text(1, top + 1.5, name, fontweight="bold", va="center_baseline")
        axes.text(1, top - 4.5, "sends", va="center_baseline", fontsize=8)
        for layer, start in enumerate(starts):
            box(axes, 16 + 8 * layer, top, 8, 3, f"layer {3 - layer}", RANKS[layer])
            box(axes, start, top - 6, 9, 3, "all-reduce", RANKS[layer])
        box(axes, starts[-1] + 9, top, 9, 3, "step")


def optimizer_sharding(axes: Axes) -> None:
    """What each process holds and sends in a step of ZeRO stage 1."""
    for rank in range(4):
        left = 2 + 20 * rank
        axes.text(left, 42, f"rank {rank}", fontweight="bold")
        for y, what, label in ((36, "gradients", 39.6), (8, "weights", 5.8)):
            axes.text(left, label, what, fontsize=8)
            for part in range(4):
                box(axes, left + 4 * part, y, 4, 3, colour=RANKS[part])
        middle = left + 4 * rank + 2
        box(axes, min(max(middle - 5, left), left + 6), 21, 10, 4, "Adam's state", RANKS[rank])
        for other in range(4):
            outer = 4 + 20 * other + 4 * rank
            arrow(axes, (outer, 35.7), (middle, 25.3), RANKS[rank])
            arrow(axes, (middle, 20.7), (outer, 11.3), RANKS[rank])
    axes.text(2, 1.5, "top: reduce, each part's sum to its owner; bottom: broadcast, its new weights to all")


def fully_sharded(axes: Axes) -> None:
    """When a process has all of a block's weights: its shards stay, the rest is gathered and freed."""
    moments = ("forward 1", "forward 2", "forward 3", "backward 3", "backward 2", "backward 1", "Adam")
    for i, moment in enumerate(moments):
        axes.text(15.5 + 9 * i, 33, moment, ha="center", fontweight="bold", fontsize=9)
    for block in range(3):
        y = 25 - 9 * block
        axes.text(1, y + 0.7, f"block {block + 1}", va="center_baseline")
        box(axes, 11, y, 63, 1.4, colour=RANKS[0])
        for i, end in ((block, "free"), (5 - block, "reduce-scatter, free")):
            box(axes, 11 + 9 * i, y + 1.4, 9, 4.2, "all-gather", RANKS[1 + block])
            axes.text(15.5 + 9 * i, y - 1.6, end, ha="center", fontsize=7)
    axes.text(11, 1.5, "blue: its shards of weights, gradients and Adam's state; above: the full weights", fontsize=9)


def precision(axes: Axes) -> None:
    """The powers of 2 that each format covers, and what the loss scale does to a small gradient."""

    def at(power: float) -> float:
        return 10 + (power + 150) * 68 / 280

    for y, name, low, high, steps in ((23, "fp32", -149, 128, "8,388,608"), (17, "bf16", -133, 128, "128"),
                                      (11, "fp16", -24, 16, "1,024")):  # fmt: skip
        axes.text(2, y + 1.5, name, va="center_baseline", fontweight="bold")
        box(axes, at(low), y, at(high) - at(low), 3, colour=RANKS[0])
        if name == "fp16":
            axes.text(at(high) + 1, y + 1.5, f"{steps} from 1 to 2", va="center_baseline", fontsize=9)
        else:
            axes.text(at(64), y + 1.5, f"{steps} from 1 to 2", va="center_baseline", ha="center", fontsize=9)
    for power in (-149, -100, -50, 0, 50, 100, 128):
        axes.text(at(power), 28, f"$2^{{{power}}}$", ha="center", fontsize=9)
    arrow(axes, (at(-26.6), 7.5), (at(-11.6), 7.5))
    axes.text(at(-26.6) - 1, 7.5, "a gradient of $10^{-8}$, 0 in fp16", ha="right", va="center_baseline", fontsize=9)
    axes.text(at(-11.6) + 1, 7.5, "times a loss scale of $2^{15}$", va="center_baseline", fontsize=9)
    axes.text(10, 2, "longer bar: smaller gradients; more numbers from 1 to 2: smaller updates survive", fontsize=9)


def from_here(axes: Axes) -> None:
    """Where the six steps are by hand, and in the project."""
    rows = (
        ("1 connect the processes", "data_parallel.py", "src/distributed/accelerator.py"),
        ("2 split the data", "data_parallel.py", "src/training/batches.py"),
        ("3 the same model on each", "fully_sharded.py", "src/training/run.py, src/distributed/accelerator.py"),
        ("4 count, forward, backward", "precision.py", "train_step in train.py"),
        ("5 update", "precision.py", "src/training/optim.py"),
        ("6 evaluate, save", "", "evaluate in train.py, src/checkpoint"),
    )
    for x, title in ((1, "a step"), (27, "by hand, in this tutorial"), (51, "in the project")):
        axes.text(x, 39, title, fontweight="bold")
    for i, (step, by_hand, file) in enumerate(rows):
        y = 33 - 6 * i
        box(axes, 1, y, 22, 4, step, RANKS[0])
        box(axes, 51, y, 28, 4, file, RANKS[2])
        if by_hand:
            box(axes, 27, y, 20, 4, by_hand, RANKS[1])
            arrow(axes, (23, y + 2), (27, y + 2))
        arrow(axes, (47 if by_hand else 23, y + 2), (51, y + 2))


PICTURES: dict[Callable[[Axes], None], int] = {
    collectives: 69, data_parallel: 32, optimizer_sharding: 45, fully_sharded: 36, precision: 31, from_here: 42,
}  # fmt: skip
"""The pictures and their heights, in units."""


if __name__ == "__main__":
    folder = Path(sys.argv[1]) if sys.argv[1:] else Path(__file__).parent
    for picture, height in PICTURES.items():
        (folder / f"{picture.__name__}.svg").write_text(draw(picture, height), encoding="utf-8")
