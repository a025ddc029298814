"""Draw the course's pictures as SVG: `python docs/learn/pictures.py [FOLDER]`, by default next to this file.

Each function below draws the picture of the same name, on axes 80 units wide; a unit is a tenth of an inch. The numbers
are those that the page says its script prints. The colour scheme, light or dark, sets the colour of text and arrows;
boxes are translucent.
"""

import io
import math
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

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
ROW = 2.6
"""The height of a row of small boxes."""


def printed(page: str, block: int = 0) -> str:
    """Return what this page says its script prints: the first of its blocks of text, or the one of this number."""
    (file,) = Path(__file__).parent.glob(f"?-{page}.md")
    return re.findall(r"^```text\n(.*?)^```$", file.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)[block]


def find(pattern: str, text: str) -> tuple[str, ...]:
    """Return what the groups of the pattern match, where it first does."""
    found = re.search(pattern, text, re.MULTILINE)
    assert found, f"{pattern} is not in\n{text}"
    return found.groups()


def number(words: str) -> int:
    """Return a number that has commas between its thousands."""
    return int(words.replace(",", ""))


def box(
    axes: Axes, x: float, y: float, width: float, height: float, words: str = "", colour: str = GREY, **how: Any
) -> None:
    """Draw a box around words, with its lower left corner at (x, y)."""
    face = mpl.colors.to_rgba(colour, 0.35)
    axes.add_patch(mpl.patches.Rectangle((x, y), width, height, facecolor=face, edgecolor=colour, linewidth=1))
    axes.text(x + width / 2, y + height / 2, words, **{"ha": "center", "va": "center_baseline"} | how)


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


def exchange(axes: Axes, left: float, top: float, rows: list[str], title: str, size: str) -> None:
    """Draw each process's numbers before and after a collective: the colour says whose they were, grey is a sum."""
    cell = 2.1
    axes.text(left + 4.5, top, title, fontweight="bold")
    right = 0.0
    for rank, row in enumerate(rows):
        y = top - 4 - ROW * rank
        axes.text(left, y + ROW / 2, f"rank {rank}", va="center_baseline", fontsize=8)
        old, new = ([int(n) for n in re.findall(r"\d+", side)] for side in row.split(f"rank {rank}")[1].split("->"))
        after = left + 4.5 + cell * len(old) + 3.6
        for x, numbers in ((left + 4.5, old), (after, new)):
            for i, n in enumerate(numbers):
                colour = RANKS[n // 10] if n < 10 * len(rows) else GREY
                box(axes, x + cell * i, y, cell, ROW, str(n), colour, fontsize=8)
        right = max(right, after + cell * max(len(old), len(new)))
    arrow(axes, (after - 3, y + 2 * ROW), (after - 0.6, y + 2 * ROW))
    axes.text(right, top, size, ha="right", fontsize=8)


def collectives(axes: Axes) -> None:
    """Each process's numbers before and after each collective."""
    places = ((0, 66), (0, 49), (27, 66), (27, 49), (0, 32), (27, 32), (54, 32), (0, 15))
    for (left, top), table in zip(places, printed("collectives").split("\n\n"), strict=True):
        title, *rows = table.splitlines()
        name, size = find(r"^(.{16}).*= (\d+ bytes), N", title)
        exchange(axes, left, top, rows, name.strip(), f"{size} sent")
    for rank, (x, y) in enumerate([(46, 10), (60, 10), (60, 3), (46, 3)]):
        box(axes, x, y, 10, 4, f"rank {rank}", RANKS[rank])
    for start, end in (((56, 12), (60, 12)), ((65, 10), (65, 7)), ((60, 5), (56, 5)), ((51, 7), (51, 10))):
        arrow(axes, start, end)
    axes.text(33, 8, "each sends\nto the next", va="center")


def data_parallel(axes: Axes) -> None:
    """When a process has each gradient and when it sends, by hand and in DDP: the events of a step."""
    unit = 4.4
    for i, line in enumerate(printed("data-parallelism").splitlines()):
        name, losses, events = find(r"^(.{13})([\d. ]+)  ([gR]+) ", line)
        top = 35 - 13.5 * i
        axes.text(1, top + 4.5, name.strip(), fontweight="bold")
        axes.text(15, top + 4.5, f"losses {'  '.join(losses.split())}", fontsize=8)
        ready, free, length = 0.0, 0.0, unit * events.count("g") / max(events.count("R"), 1)
        for y, what in ((top, "backward"), (top - 4, "sends"))[: 1 + ("R" in events)]:
            axes.text(1, y + 1.5, what, va="center_baseline", fontsize=8)
        for event in events:
            if event == "g":
                box(axes, 15 + ready, top, unit, 3, event, RANKS[0])
                ready += unit
            else:
                start = max(ready, free)
                box(axes, 15 + start, top - 4, length, 3, event, RANKS[1])
                free = start + length
        box(axes, 15 + max(ready, free), top, 6, 3, "update", fontsize=8)
    words = "g: a gradient is ready. R: an all-reduce starts, of one gradient by hand, of a bucket in DDP"
    axes.text(1, 1, words, fontsize=9)


def optimizer_sharding(axes: Axes) -> None:
    """What each process holds and sends in a step of ZeRO stage 1, in bytes, drawn to scale."""
    line = next(line for line in printed("optimizer-sharding").splitlines() if line.startswith("by hand"))
    reduces, broadcasts = find(r"(\d+ reduce) \+ (\d+ broadcast)", line)
    weights, *states = re.findall(r"[\d,]{5,}", line.split("broadcast")[1])
    scale = 17 / number(weights)  # units for a byte
    parts = [scale * number(state) / 2 for state in states]  # the weights of an owner: half the size of its state
    for rank, state in enumerate(states):
        left = 2 + 20 * rank
        axes.text(left, 44, f"rank {rank}", fontweight="bold")
        for y, what, label in ((37, "gradients", 40.7), (8, "weights", 5.6)):
            axes.text(left, label, f"{what} {weights}", fontsize=8)
            for part, width in enumerate(parts):
                box(axes, left + sum(parts[:part]), y, width, 3, colour=RANKS[part])
        middle = left + sum(parts[:rank]) + parts[rank] / 2
        width = 2 * parts[rank]
        inner = min(max(middle - width / 2, left), left + 17 - width)
        box(axes, inner, 21, width, 5, f"Adam's state\n{state}", RANKS[rank], fontsize=7.5, linespacing=1.3)
        for other in range(4):
            outer = 2 + 20 * other + sum(parts[:rank]) + parts[rank] / 2
            arrow(axes, (outer, 36.7), (middle, 26.3), RANKS[rank])
            arrow(axes, (middle, 20.7), (outer, 11.3), RANKS[rank])
    words = f"top: {reduces}s, each gradient's sum to the owner; bottom: {broadcasts}s, the new weights to all"
    axes.text(2, 1.5, f"bytes; {words}", fontsize=9)


def fully_sharded(axes: Axes) -> None:
    """When a process has all of a block's weights: its shards stay, the rest is gathered and freed."""
    held, sent, moved = re.findall(r"[\d,]+(?= held| sent| moved)", printed("fully-sharded").splitlines()[-1])
    moments = [f"forward\nblock {b}" for b in (1, 2, 3, 4)] + [f"backward\nblock {b}" for b in (4, 3, 2, 1)] + ["Adam"]
    for i, moment in enumerate(moments):
        axes.text(16 + 7.4 * i, 52, moment, ha="center", fontweight="bold", fontsize=9)
    for block in range(4):
        y = 44 - 11 * block
        axes.text(1, y + 2.6, f"block {block + 1}", fontweight="bold", fontsize=9)
        axes.text(1, y + 0.2, f"{number(held) // 4:,}\nheld", fontsize=8, va="center")
        box(axes, 12.3, y, 7.4 * 9, 1.4, colour=RANKS[0])
        for i, end in ((block, "free"), (7 - block, "reduce-scatter")):
            box(axes, 12.3 + 7.4 * i, y + 1.4, 7.4, 4.6, f"all-gather\n{number(sent) // 12:,}", RANKS[1], fontsize=8)
            axes.text(16 + 7.4 * i, y - 1.8, end, ha="center", fontsize=8)
        axes.text(16 + 7.4 * (7 - block), y - 3.8, f"{number(sent) // 12:,}, free", ha="center", fontsize=8)
    shards = f"a rank's shards of weights, gradients and Adam's averages, 4 x {number(held) // 4:,}"
    axes.text(1, 4, f"blue: {shards} = {held} bytes held", fontsize=9)
    copies = f"offloaded, a shard is copied 12 times: 12 x {number(moved) // 12:,} = {moved} moved"
    axes.text(1, 1, f"12 x {number(sent) // 12:,} = {sent} sent; {copies}", fontsize=9)


def precision(axes: Axes) -> None:
    """The powers of 2 that each format covers, what the loss scale does, and how far off each wrong way is."""
    says = printed("precision")
    sums = find(r"0.001: +fp32 (\S+) +fp16 (\S+) +bf16 (\S+)$", says)
    pattern = r"a gradient of (\S+): fp16 (\S+) +fp16 with loss scale (\d+) (\S+) +bf16 (\S+)"
    tiny, unscaled, scale, scaled, in_bf16 = find(pattern, says)

    def at(power: float) -> float:
        return 10 + (power + 150) * 68 / 280

    for y, name, low, high, steps, total in (
        (56, "fp32", -149, 128, "8,388,608", sums[0]),
        (50, "bf16", -133, 128, "128", sums[2]),
        (44, "fp16", -24, 16, "1,024", sums[1]),
    ):
        axes.text(2, y + 1.5, name, va="center_baseline", fontweight="bold")
        box(axes, at(low), y, at(high) - at(low), 3, colour=RANKS[0])
        words, left = f"{steps} from 1 to 2; 1 + 1,000 x 0.001 = {total}", at(17 if name == "fp16" else -24)
        axes.text(left, y + 1.5, words, va="center_baseline", fontsize=8)
    for power in (-149, -100, -50, 0, 50, 100, 128):
        axes.text(at(power), 61, f"$2^{{{power}}}$", ha="center", fontsize=9)
    small = math.log2(float(tiny))
    large = small + math.log2(int(scale))
    arrow(axes, (at(small), 40.5), (at(large), 40.5))
    words = f"a gradient of {tiny}: {in_bf16} in bf16, {unscaled} in fp16"
    axes.text(at(small) - 1, 40.5, words, ha="right", va="center_baseline", fontsize=9)
    axes.text(at(large) + 1, 40.5, f"with loss scale {scale}: {scaled}", va="center_baseline", fontsize=9)
    ways = re.findall(r"^(.+?) +loss (\S+) +off by +(\S+)$", says, re.MULTILINE)
    for i, (way, loss, off) in enumerate(ways):
        middle = 32.2 - 3.6 * i
        axes.text(2, middle, way, va="center_baseline", fontsize=9)
        box(axes, 28, middle - 1.2, 30 * float(off), 2.4, colour=RANKS[1] if float(off) else RANKS[2])
        axes.text(29 + 30 * float(off), middle, f"loss {loss}, off by {off}", va="center_baseline", fontsize=9)


def long_sequences(axes: Axes) -> None:
    """Who has which tokens and heads, before, in and after attention; and what waits for the backward pass."""
    says = printed("long-sequences")
    before, after = (
        [[int(n) for n in re.findall(r"\d+", row)] for row in re.findall(rf"{side}(\[.*?\])", says)]
        for side in (r"rank \d +", "-> +")
    )
    runs = re.findall(r"^c = (\d) +(\S+) tokens .* (\S+) kept +(\S+) sent$", says, re.MULTILINE)
    tokens = number(runs[1][1])
    for left, title, owners in ((8, "before attention", before), (35, "in attention", after), (62, "after", before)):
        axes.text(left, 37.5, title, fontweight="bold")
        for rank, own in enumerate(owners):
            for n in own:
                part, group = divmod(n, 10)
                box(axes, left + 4.4 * part, 32 - 3.4 * group, 4.4, 3.4, str(n), RANKS[rank], fontsize=8)
        for part in range(4):
            words = f"{tokens * part}-\n{tokens * (part + 1) - 1}"
            axes.text(left + 4.4 * part + 2.2, 19.3, words, ha="center", va="center", fontsize=7)
    for group in range(4):
        axes.text(1, 33.7 - 3.4 * group, f"group {group}", va="center_baseline", fontsize=8)
    axes.text(1, 19.3, "tokens", va="center_baseline", fontsize=8)
    for start, words in ((26.3, "all-to-all\nof q, k, v"), (53.3, "all-to-all\nof results")):
        arrow(axes, (start, 28.6), (start + 8, 28.6))
        axes.text(start + 4, 31.5, words, ha="center", va="center", fontsize=8)
    for rank in range(4):
        box(axes, 35 + 11 * rank, 12.5, 9, 3, f"rank {rank}", RANKS[rank], fontsize=8)
    axes.text(1, 14, "colours: who has them", va="center_baseline", fontsize=9)
    for i, (c, own, kept, sent) in enumerate(runs):
        y = 6.5 - 4.5 * i
        axes.text(1, y + 1.4, f"c = {c}: {own} tokens", va="center_baseline", fontsize=9)
        width = 30 * number(kept) / number(runs[0][2])
        box(axes, 20, y, width, 2.8, colour=RANKS[0])
        axes.text(21 + width, y + 1.4, f"{kept} bytes kept, {sent} sent", va="center_baseline", fontsize=9)


def from_here(axes: Axes) -> None:
    """The collectives of a step in their order, by the line of train_step that calls them, in bytes."""
    colours = dict(zip(("allreduce", "allgather", "reduce_scatter"), RANKS, strict=False))
    for i, (kind, colour) in enumerate(colours.items()):
        box(axes, 41 + 13 * i, 53.6, 12, 3, kind, colour, fontsize=8)
    top = 54.0
    for says in (printed("train", 0), printed("train", 1)):
        axes.text(1, top, says.splitlines()[0], fontweight="bold")
        calls = re.findall(r"^(\d+) (\w+) +(\S+) bytes  (.*)$", says, re.MULTILINE)
        for line in dict.fromkeys(line for *_, line in calls):
            axes.text(1, top - 2.8, line, fontsize=8)
            for i, (times, kind, size, caller) in enumerate(calls):
                if caller == line:
                    words = f"{times}\n{size}"
                    box(axes, 0.8 + 4.9 * i, top - 8, 4.9, 4.4, words, colours[kind], va="center", fontsize=6.8)
            top -= 8
        top -= 5
    axes.text(1, 2.5, "in each box: how many, and their bytes", fontsize=9)


PICTURES: dict[Callable[[Axes], None], int] = {
    collectives: 69, data_parallel: 43, optimizer_sharding: 47, fully_sharded: 57, precision: 64, long_sequences: 41,
    from_here: 57,
}  # fmt: skip
"""The pictures and their heights, in units."""


if __name__ == "__main__":
    folder = Path(sys.argv[1]) if sys.argv[1:] else Path(__file__).parent
    for picture, height in PICTURES.items():
        (folder / f"{picture.__name__}.svg").write_text(draw(picture, height), encoding="utf-8")
