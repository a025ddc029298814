"""A report of runs, best first: a page that needs no server, no network and no JavaScript, and its curves as PNGs.

It shows what runs and --check have written into their folders; what of that is missing is left out.
"""

import argparse
import json
import math
import re
import shlex
from array import array
from collections import defaultdict
from collections.abc import Iterator
from importlib import import_module
from itertools import accumulate
from pathlib import Path
from typing import Any

from jinja2 import Environment
from markupsafe import Markup, escape
from tqdm import tqdm

from src.checkpoint.folder import is_number, parse, read_lines, saved_settings
from src.checkpoint.format import write_text
from src.config.errors import UserError, cause, explained
from src.config.settings import flatten
from src.distributed.accelerator import processes
from src.distributed.process import exit_codes
from src.tasks.base import PICTURE, Table
from src.training.score import score

PICTURES: dict[str, tuple[str, str, float]] = {
    "train/loss": ("Loss", "training", 1),
    "eval/loss": ("Loss", "evaluation", 1),
    "train/lr": ("Learning rate", "", 1),
    "train/grad_norm": ("Gradient norm", "", 1),
    "perf/tokens_per_second": ("Tokens per second", "", 1),
    "perf/samples_per_second": ("Examples per second", "", 1),
    "perf/data_seconds": ("Milliseconds per step", "data", 1e3),
    "perf/compute_seconds": ("Milliseconds per step", "compute", 1e3),
    "perf/waiting_seconds": ("Milliseconds per step", "waiting", 1e3),
    "perf/peak_memory_bytes": ("Peak memory, GiB", "", 2**-30),
}
"""Picture that each metric is drawn in, its label there, and what its values are multiplied by."""
SMOOTH = ("train/lr", "perf/peak_memory_bytes")
"""Metrics of training without noise."""
ROOM, LONGEST = 400_000, 1500
"""Characters of the page that the tables of a run may take, and those of a text in a table."""


class Recorded:
    """What the folder of a run, or of a check, holds."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.name = folder, folder.resolve().name
        self.damaged: list[str] = []
        """What can't be read, and is left out."""
        self.summary, self.status, self.check = (self._json(f"{n}.json") for n in ("summary", "status", "check"))
        self.settings = dict(flatten(saved_settings(folder) or parse(json.dumps(self.check.get("config")))))
        """Values by dotted name. Where it isn't a run's folder, task.name is absent."""
        self.task = self.settings.get("task.name")
        self.curves: dict[str, tuple[array[float], array[float]]] = defaultdict(lambda: (array("d"), array("d")))
        """Steps and finite values by metric."""
        self.step, self.results, self.tables = 0, dict[str, float](), dict[str, Table]()
        """The last step, and what the last evaluation gave."""
        self.samples: dict[int, Table] = {}
        damaged = 0
        for record in read_lines(folder / "metrics.jsonl"):
            if not record:
                damaged += 1
                continue
            self.step = record["step"]
            numbers = {name: value for name, value in record.items() if isinstance(value, int | float)}
            for name, value in numbers.items():
                if is_number(value):
                    steps, values = self.curves[name]
                    steps.append(self.step)
                    values.append(value)
            if "eval/loss" in record:
                self.results = {n: v for n, v in numbers.items() if n.startswith("eval/") and n != "eval/examples"}
                self.tables = {name: rows for name, rows in record.items() if isinstance(rows, list) and rows}
                if "eval/samples" in self.tables:
                    self.samples[self.step] = self.tables["eval/samples"]
        self.results |= {name: self.summary[name] for name in self.results if name in self.summary}
        if damaged:
            self.damaged.append(f"{damaged} line{'s' if damaged > 1 else ''} of metrics.jsonl")

    def score(self, metric: str, value: float | None) -> float:
        """Return how good a metric's value is: higher is better."""
        mode = self.settings["checkpoint.mode"] if metric == self.settings["checkpoint.metric"] else None
        return -math.inf if value is None else score(value, metric, mode)

    def _json(self, name: str) -> dict[str, Any]:
        if not (file := self.folder / name).exists():
            return {}
        found = parse(file.read_bytes())
        if not found:
            self.damaged.append(name)
        return found


def sentence(run: Recorded) -> str:
    """Return what was run and what came out."""
    summary, results = run.summary, ", ".join(f"{short(n)} {number(v)}" for n, v in run.results.items())
    if run.check and not run.step:
        return f"{run.task}: " + ("all checks passed." if run.check["passed"] else "checks FAILED.")
    if summary:
        said = f"{run.step:,} steps ({summary['epoch']:.3g} epochs) in {tqdm.format_interval(summary['seconds'])} on "
        said += f"{processes(summary['num_processes'])} ({summary['strategy']}, {summary['device']}, "
        said += f"{summary['precision']})"
    elif "reason" in run.status:
        said = f"stopped after step {run.step:,} by {run.status['reason']}, and can be continued"
    else:
        said = f"not finished, recorded up to step {run.step:,}"
    return f"{run.task}: {said} gave {results}." if results else f"{run.task}: {said}; not evaluated."


def cards(run: Recorded) -> Iterator[tuple[str, str, str]]:
    """Yield title, value and a note of each figure that matters."""
    for name, value in run.results.items():
        steps, values = run.curves[name]
        note = ""
        if values:
            scores = [run.score(name, value) for value in values]
            best = scores.index(max(scores))
            note = f"best {number(values[best])} at step {steps[best]:,.0f}"
        yield short(name), number(value), note
    if summary := run.summary:
        unit = "tokens" if "tokens_per_second" in summary else "samples"
        yield (
            "time",
            tqdm.format_interval(summary["seconds"]),
            f"{summary[f'{unit}_per_second']:,.0f} {unit} per second",
        )
        yield "parameters", number(summary["parameters"]), f"{number(summary['trained_parameters'])} trained"
        yield "peak memory", f"{max(summary['peak_memory_bytes']) / 2**30:.2f} GiB", "of the process with the most"


def command(run: Recorded) -> str | None:
    """Return the command that repeats the run; None for a check alone."""
    if not (config := run.folder / "config.yaml").exists():
        return None
    file = run.summary.get("config_file")
    launch = ["accelerate", "launch", *(["--config_file", file] if file else []), "train.py"]
    return shlex.join([*launch, f"--config={config}", f"--run_name={run.name}-again"])


def tables(run: Recorded) -> Iterator[tuple[str, Table, int]]:
    """Yield each table of the last evaluation: name, the rows that fit, number of all rows. Samples are of several
    evaluations, side by side."""
    steps = list(run.samples)
    samples: dict[str, dict[str, Any]] = {}  # by prompt
    for step in sorted({steps[i * (len(steps) - 1) // 3] for i in range(4) if steps}):
        for row in run.samples[step]:
            prompt, *_, said = row.values()
            samples.setdefault(prompt, {"prompt": prompt})[f"step {step:,}"] = said
    found = run.tables | ({"eval/samples": [*samples.values()]} if samples else {})
    for name, rows in found.items():
        yield name, fitting(rows, ROOM // len(found)), len(rows)


def write_report(folders: list[Path], target: Path) -> list[str]:
    """Write the report of these runs, and its curves into a folder with the target's name. Return what of the runs
    is damaged, and left out.

    Raises:
        UserError: some of them hold no run, a line for each; or files that no run writes.
    """
    runs = [Recorded(folder) for folder in folders]
    if strangers := [run.folder for run in runs if "task.name" not in run.settings]:
        raise UserError("\n".join(f"{f}: holds no run (no config.yaml of one); name a run's folder" for f in strangers))
    says = f"{', '.join(map(str, folders))}: not as a run writes its files: "
    with explained(says, (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)):
        page = render(runs, target.with_suffix(""))
    write_text(target, page.encode(errors="replace").decode())
    return [damaged for run in runs for damaged in run.damaged]


def render(runs: list[Recorded], pictures: Path) -> str:
    """Return the page; write its pictures into that folder."""
    tasks = list(dict.fromkeys(run.task for run in runs))
    metric = {run.task: run.settings["checkpoint.metric"] for run in runs}
    runs.sort(key=lambda run: (tasks.index(run.task), -run.score(metric[run.task], run.results.get(metric[run.task]))))
    for run in runs if len({run.name for run in runs}) < len(runs) else []:
        run.name = str(run.folder)
    settings = {
        run.name: {n: v if isinstance(v, str) else json.dumps(v) for n, v in run.settings.items()} for run in runs
    }
    names = list(dict.fromkeys(name for each in settings.values() for name in each))
    differing = [name for name in names if len({each.get(name) for each in settings.values()}) > 1]
    chosen = [name for name in differing if name not in ("run_name", "output_dir")][:6]
    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    environment.filters |= {"number": number, "short": short, "fitting": fitting, "command": command}
    return environment.from_string(Path(__file__).with_suffix(".html").read_text()).render(
        runs=runs,
        tasks=tasks,
        PICTURE=PICTURE,
        sentence=sentence(runs[0]),
        cards=cards(runs[0]),
        ranking=[
            {"run": run.name, **{short(n): v for n, v in run.results.items()}, "step": run.step}
            | {name: settings[run.name].get(name) for name in chosen}
            for run in runs
        ],
        figures=[Markup(svg) for svg in draw(runs, pictures)],
        tables=list(tables(runs[0])),
        differing=[{"setting": n} | {run: each.get(n) for run, each in settings.items()} for n in differing],
        alike=[{"setting": n, "value": settings[runs[0].name][n]} for n in names if n not in differing],
    )


def draw(runs: list[Recorded], folder: Path) -> Iterator[str]:
    """Draw the curves of the runs, best first, into PNGs in the folder; yield each as SVG."""
    figures, is_alone = import_module("src.tracking.figures"), len(runs) == 1  # matplotlib: nothing else needs it
    folder.mkdir(parents=True, exist_ok=True)
    evaluated = list(dict.fromkeys(name for run in runs for name in run.results))
    pictures = defaultdict(list)
    for name in dict.fromkeys(["train/loss", "eval/loss", *evaluated[:7], *PICTURES]):
        title, label, factor = PICTURES.get(name, (short(name).capitalize(), "", 1))
        title = title if is_alone or not label else f"{title}, {label}"  # of several runs, each metric on its own
        kind = "dotted" if name.startswith("eval/") else "smooth" if name in SMOOTH else "noisy"
        for run in runs:
            steps, values = run.curves[name]
            if steps:
                curve = figures.Curve(label if is_alone else run.name, steps, [factor * v for v in values], kind)
                pictures[title].append(curve)
    ticks: dict[str, list[str]] = {}
    for name, rows in runs[0].tables.items():
        if name.startswith("eval/loss_by_"):
            title = short(name).capitalize()
            pictures[title].append(figures.Curve("", range(len(rows)), [row["loss"] for row in rows], "dotted"))
            ticks[title] = [str(next(iter(row.values()))) for row in rows]
    for number, (title, curves) in enumerate(pictures.items(), start=1):
        name = re.sub("[^a-z0-9]+", "_", title.lower())[:50]  # of a name that whoever sent the run has chosen
        yield figures.draw(title, curves, folder / f"{number:02}_{name}.png", ticks.get(title, ()))


def report_line(folder: Path) -> str:
    """Write the report of a run that ends; return its line of the closing block, which says why if there is none."""
    try:
        damaged = write_report([folder], folder / "report.html")
    except Exception as error:  # no reason to fail a run that has come to its end
        return f"  report     none: {cause(error)}"
    left_out = f" (left out, as damaged: {', '.join(damaged)})" if damaged else ""
    return f"  report     {folder}/report.html{left_out}"


def fitting(rows: Table, room: int = 50_000) -> Table:
    """Return the first rows, as many as fit into `room` characters of the page, with the same keys; cut long texts."""
    keys = dict.fromkeys(key for row in rows for key in row)
    cut = [{key: _cut(row.get(key)) for key in keys} for row in rows]
    sizes = accumulate(len(escape(json.dumps(row))) + 30 * len(row) for row in cut)
    return [row for row, size in zip(cut, sizes, strict=True) if size <= room]


def number(value: float) -> str:
    """Return a number as people read it: 12,345, 0.1137 or 3e-05."""
    if isinstance(value, int) or not math.isfinite(value):
        return f"{value:,}"
    return f"{value:,.4f}" if 1e-3 <= abs(value) < 100 else f"{value:,.1f}" if abs(value) >= 100 else f"{value:.3g}"


def short(metric: str) -> str:
    """Return the name of a metric, or a table, for people."""
    return metric.partition("/")[2].replace("_", " ")


def _cut(value: Any) -> Any:
    is_long = isinstance(value, str) and len(value) > LONGEST and not value.startswith(PICTURE)
    return f"{value[:LONGEST]} …" if is_long else value


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        "python -m src.tracking.report", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", nargs="+", type=Path, help="folders of runs")
    parser.add_argument("--output", type=Path, help="the page to write; default: report.html in the first run's folder")
    arguments = parser.parse_args()
    target = arguments.output or arguments.runs[0] / "report.html"
    with exit_codes("report"), explained("cannot write the report: ", (OSError, ImportError)):
        write_report(arguments.runs, target)
    print(target)
