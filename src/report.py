"""A report of runs, best first: python -m src.report runs/A [runs/B ...] [--output=FILE.html]

One page that needs no server, no network and no JavaScript, by default report.html in the first run's folder; beside it
a folder with its curves as PNGs. It shows what runs and --check have written; what of that is missing is left out.
"""

import contextlib
import json
import math
import re
import shlex
import sys
from array import array
from collections.abc import Iterator
from importlib import import_module
from itertools import accumulate
from pathlib import Path
from typing import Any

from jinja2 import Environment
from markupsafe import Markup, escape

from src.checkpoint.format import write_text
from src.checkpoint.output_folder import saved_settings
from src.distributed import processes
from src.process import UserError, cause, exit_codes
from src.progress import score
from src.settings import flatten
from src.tasks.base import Table

PICTURE = "data:image/png;base64,"
DETAILED, ROOM, LONGEST = 4, 400_000, 1500
"""Runs whose tables are shown; the characters that these may have together, and a text in them."""
PANELS: tuple[tuple[str, float, dict[str, str]], ...] = (
    ("Loss", 1, {"train/loss": "training", "eval/loss": "evaluation"}),
    ("Learning rate", 1, {"train/lr": "learning rate"}),
    ("Tokens per second", 1, {"perf/tokens_per_second": "tokens per second"}),
    ("Examples per second", 1, {"perf/samples_per_second": "examples per second"}),
    ("Milliseconds per step", 1e3, {f"perf/{part}_seconds": part for part in ("data", "compute", "waiting")}),
    ("Peak memory, GiB", 2**-30, {"perf/peak_memory_bytes": "peak memory"}),
    ("Gradient norm", 1, {"train/grad_norm": "gradient norm"}),
)
"""Pictures of the training: title, factor, and labels by metric."""
SMOOTH = ("eval/", "train/lr", "perf/peak_memory_bytes")
"""What metrics begin with that need no smoothing."""


class Recorded:
    """What a run's folder says about it."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.name, self.settings = folder, folder.resolve().name, saved_settings(folder)
        self.summary, self.status, self.check = (_json(folder / f"{n}.json") for n in ("summary", "status", "check"))
        self.events = list(_lines(folder / "events.jsonl"))
        self.curves: dict[str, tuple[array[float], array[float]]] = {}
        """Steps and values by metric, without values that are not finite."""
        self.step, self.results, self.tables = 0, dict[str, float](), dict[str, Table]()
        """Of the last record; the last evaluation's metrics and tables."""
        self.samples: dict[int, Table] = {}
        """By step."""
        self.marks: dict[str, list[int]] = {}
        """Steps by what happened there."""
        for event in self.events:
            if event["step"] and event.get("kind") not in ("end", "skipped"):
                kind = str(event.get("kind")).replace("start", "resumed")
                self.marks.setdefault(kind, []).append(event["step"])
        skipped = 0
        for record in _lines(folder / "metrics.jsonl"):
            self.step = record["step"]
            if record.get("train/skipped_steps", 0) > skipped or record.get("train/loss", 0) is None:
                skipped = record.get("train/skipped_steps", 0)
                self.marks.setdefault("skipped steps", []).append(self.step)
            tables = {name: value for name, value in record.items() if isinstance(value, list) and value}
            if "eval/loss" in record:
                self.results = {n: math.nan if v is None else v for n, v in record.items() if n.startswith("eval/")}
                self.tables = {name: self.results.pop(name) for name in tables}
                self.samples |= {self.step: tables["eval/samples"]} if "eval/samples" in tables else {}
            for name, value in record.items():
                if isinstance(value, int | float) and math.isfinite(value):
                    steps, values = self.curves.setdefault(name, (array("d"), array("d")))
                    steps.append(self.step)
                    values.append(value)
        self.results |= {name: value for name, value in self.summary.items() if name in self.results}
        task, checkpoint = (self.settings.get(part) or {} for part in ("task", "checkpoint"))
        self.task: str = task.get("name", "a task")
        self.metric, self.mode = checkpoint.get("metric", "eval/loss"), checkpoint.get("mode")

    @property
    def score(self) -> float:
        """What the run is ranked by; higher is better."""
        return score(self.results, self.metric, self.mode) if self.metric in self.results else -math.inf

    def sentence(self) -> str:
        """Return what was run and what came out."""
        summary, results = self.summary, ", ".join(f"{_short(n)} {number(v)}" for n, v in self.results.items())
        checked = {True: "All checks passed. ", False: "Checks FAILED. "}.get(self.check.get("passed", ""), "")
        said = f"{self.task}, recorded up to step {self.step:,} and not finished"
        if "seconds" in summary:
            said = f"{self.task}, trained for {self.step:,} steps ({summary['epoch']:.3g} epochs) in "
            said += f"{_duration(summary['seconds'])} on {processes(summary['num_processes'])} "
            said += f"({summary['strategy']}, {summary['device']}, {summary['precision']})"
        elif self.status.get("reason"):
            said = f"{self.task}, stopped after step {self.step:,} by {self.status['reason']}, and can be continued"
        return checked + (f"{said}: {results or 'not evaluated'}." if self.step or not checked else "")

    def cards(self) -> Iterator[tuple[str, str, str]]:
        """Yield title, value and a note of each figure that matters."""
        for name, value in self.results.items():
            if name in self.curves and name != "eval/examples":
                steps, values = self.curves[name]
                best = max(range(len(values)), key=lambda i: score({name: values[i]}, name, None))
                yield _short(name), number(value), f"best {number(values[best])} at step {steps[best]:,.0f}"
        summary = self.summary
        if summary.get("train/loss") is not None:
            yield "training loss", number(summary["train/loss"]), "over the last interval"
        if "seconds" in summary:
            yield "time", _duration(summary["seconds"]), f"{self.step:,} steps"
            unit = "tokens" if "tokens_per_second" in summary else "samples"
            yield f"{unit} per second", f"{summary[f'{unit}_per_second']:,.0f}", processes(summary["num_processes"])
            yield "parameters", f"{summary['parameters']:,}", f"{summary['trained_parameters']:,} trained"
            yield "peak memory", f"{max(summary['peak_memory_bytes']) / 2**30:.2f} GiB", "of one process"
            yield "skipped steps", f"{summary['skipped_steps']:,}", "gradients not finite"

    def commands(self) -> Table:
        """Return when and by which commands the run was made, and the one that repeats it."""
        starts = [event for event in self.events if event.get("kind") == "start"]
        made = [{"when": e.get("time"), "from step": e["step"], "command": e.get("command")} for e in starts]
        words = shlex.split(str(starts[0].get("command"))) if starts else []
        script = next((i for i, word in enumerate(words) if word.endswith(".py")), None)
        yaml = self.summary.get("config_file") or "accelerate_configs/cpu.yaml"
        launch = words[: script + 1] if script else ["accelerate", "launch", "--config_file", yaml, "train.py"]
        again = [*launch, "--config", str(self.folder / "config.yaml"), f"--run_name={self.name}-again"]
        return [*made, {"when": "to repeat it", "from step": 0, "command": shlex.join(again)}]

    def shown_tables(self, room: int) -> Iterator[tuple[str, Table, int]]:
        """Yield name, rows and number of all rows of each table, in `room` characters together."""
        tables = {n: rows for n, rows in self.tables.items() if n != "eval/samples"}
        if self.samples:
            steps = [*self.samples][:: -(-len(self.samples) // 4)]
            steps += [step for step in [*self.samples][-1:] if step not in steps]
            at_steps = zip(*(self.samples[step] for step in steps), strict=False)
            tables["eval/samples"] = [
                {"prompt": next(iter(rows[0].values()))}
                | {f"step {step:,}": [*row.values()][-1] for step, row in zip(steps, rows, strict=True)}
                for rows in at_steps
            ]
        for name, rows in tables.items():
            yield name, fitting(rows, room // len(tables)), len(rows)


def write_report(folders: list[Path], target: Path) -> None:
    """Write the report of these runs, and its pictures into a folder named after it.

    Raises:
        UserError: some of them are no runs.
    """
    empty = [f for f in folders if not any((f / name).is_file() for name in ("metrics.jsonl", "check.json"))]
    if empty:
        raise UserError("\n".join(f"{f}: holds no run, as there is no metrics.jsonl; name a run's folder" for f in empty))
    runs = [Recorded(folder) for folder in folders]
    tasks = [run.task for run in runs]
    runs.sort(key=lambda run: (tasks.index(run.task), -run.score))
    settings = [dict(flatten(run.settings)) for run in runs]
    names = list(dict.fromkeys(name for each in settings for name in each))
    differing = [n for n in names if len({json.dumps(each.get(n)) for each in settings}) > 1]
    page = {
        "runs": runs,
        "title": runs[0].name if len(runs) == 1 else f"{len(runs)} runs of {' and '.join(dict.fromkeys(tasks))}",
        "ranking": [_row(run, [n for n in differing if n not in ("run_name", "output_dir")][:6]) for run in runs],
        "differing": [{"setting": n} | {r.name: _text(s, n) for r, s in zip(runs, settings)} for n in differing],
        "alike": [{"setting": n, "value": _text(settings[0], n)} for n in names if n not in differing],
        "figures": [Markup(svg) for svg in _draw(runs, target.with_suffix(""))],
        "tables": [(run, list(run.shown_tables(ROOM / len(runs[:DETAILED])))) for run in runs[:DETAILED]],
    }
    template = Environment(autoescape=True, trim_blocks=True).from_string(Path(__file__).with_suffix(".html").read_text())
    template.environment.filters["number"] = number
    write_text(target, template.render(page).encode(errors="replace").decode())


def _draw(runs: list[Recorded], folder: Path) -> Iterator[str]:
    figures = import_module("src.report_figures")
    folder.mkdir(parents=True, exist_ok=True)
    metrics = {name for run in runs for name in run.curves if name.startswith("eval/")} - {"eval/examples", "eval/loss"}
    first, *others = PANELS
    panels = [first, *((_short(n).capitalize(), 1, {n: _short(n)}) for n in sorted(metrics)[:6]), *others]
    if len(runs) > 1:
        panels = [(f"{title}: {label}" if len(m) > 1 else title, factor, {n: label}) for title, factor, m in panels for n, label in m.items()]
    for title, factor, labels in panels:
        curves = [
            figures.Curve(label if len(runs) == 1 else run.name, x, [y * factor for y in ys], not n.startswith(SMOOTH))
            for run in runs for n, label in labels.items() if n in run.curves for x, ys in [run.curves[n]]
        ]
        if curves:
            png = re.sub(r"\W+", "_", title.lower()).strip("_")
            yield figures.draw(title, curves, runs[0].marks if len(runs) == 1 else {}, [], folder / f"{png}.png")
    for name in sorted({n for run in runs[:DETAILED] for n in run.tables if n.startswith("eval/loss_by")}):
        curves = [figures.Curve(run.name, range(len(rows)), [row["loss"] for row in rows]) for run in runs[:DETAILED] if (rows := run.tables.get(name))]
        ticks = [str(next(iter(row.values()))) for row in next(r.tables[name] for r in runs if name in r.tables)]
        yield figures.draw(_short(name).capitalize(), curves, {}, ticks, folder / f"{name.partition('/')[2]}.png")


def report_line(folder: Path) -> str:
    """Write the report of a run that ends; return its line in the closing block, which says why if there is none."""
    try:
        write_report([folder], folder / "report.html")
    except Exception as error:  # no reason to fail a run that has come to its end
        return f"  report     none: {cause(error)}"
    return f"  report     {folder}/report.html"


def fitting(rows: Table, room: int) -> Table:
    """Return the first rows, as many as take at most `room` characters of the page, with long texts cut short."""
    cut = [{n: f"{v[:LONGEST]} …" if _is_long(v) else v for n, v in row.items()} for row in rows]
    sizes = accumulate(len(escape(json.dumps(row))) + 30 * len(row) for row in cut)
    return [row for row, size in zip(cut, sizes, strict=True) if size <= room]


def _is_long(value: Any) -> bool:
    return isinstance(value, str) and len(value) > LONGEST and not value.startswith(PICTURE)


def number(value: float) -> str:
    """Return a number as people read it: 12,345, 0.1137 or 3e-05."""
    if isinstance(value, int) or not math.isfinite(value):
        return f"{value:,}"
    return f"{value:,.4f}" if 1e-3 <= abs(value) < 100 else f"{value:,.1f}" if abs(value) >= 100 else f"{value:.3g}"


def _row(run: Recorded, differing: list[str]) -> dict[str, Any]:
    settings = dict(flatten(run.settings))
    results = {_short(n): v for n, v in run.results.items() if n != "eval/examples"}
    return {"run": run.name, **results, "step": run.step, **{n: _text(settings, n) for n in differing}}


def _text(settings: dict[str, Any], name: str) -> str:
    value = settings.get(name, "")
    return value if isinstance(value, str) else json.dumps(value)


def _short(name: str) -> str:
    return name.partition("/")[2].replace("_", " ")


def _duration(seconds: float) -> str:
    short = f"{seconds:.0f} seconds" if seconds < 100 else f"{seconds / 60:.0f} minutes"
    return short if seconds < 6000 else f"{seconds / 3600:.1f} hours"


def _lines(file: Path) -> Iterator[dict[str, Any]]:
    """Yield the objects of a file of JSON lines; none if it is absent. What a kill cut short is left out."""
    if file.is_file():
        with file.open("rb") as lines:
            for line in lines:
                with contextlib.suppress(ValueError):
                    record = json.loads(line)
                    if isinstance(record, dict) and isinstance(record.get("step"), int):
                        yield record


def _json(file: Path) -> dict[str, Any]:
    with contextlib.suppress(OSError, ValueError):
        content = json.loads(file.read_text())
        return content if isinstance(content, dict) else {}
    return {}


def main(argv: list[str]) -> None:
    folders = [Path(word) for word in argv if not word.startswith("-")]
    options = [word for word in argv if word.startswith("-")]
    if not argv or options in (["-h"], ["--help"]):
        print(__doc__)
        return
    wrong = [word for word in options if not word.startswith("--output=")]
    if wrong or not folders:
        raise UserError("\n".join(f"{word}: no such option; --output=FILE.html is the only one" for word in wrong) or "name a run's folder")
    target = Path(options[-1].partition("=")[2]) if options else folders[0] / "report.html"
    try:
        write_report(folders, target)
    except PermissionError as error:
        raise UserError(f"{error.filename}: {error.strerror}") from error
    print(target)


if __name__ == "__main__":
    with exit_codes("report"):
        main(sys.argv[1:])
