"""A report of runs, best first: a page that needs no server, no network and no JavaScript, and its curves as PNGs.

It shows what runs and --check have written into their folders; what of that is missing is left out.
"""

import argparse
import contextlib
import json
import math
import re
import shlex
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
from src.process import UserError, cause, exit_codes, explained
from src.progress import score
from src.settings import flatten
from src.tasks.base import Table

PICTURE = "data:image/png;base64,"
MOST_BYTES = 2**24
"""Of metrics.jsonl that are read, evaluations apart."""
DETAILED, ROOM, LONGEST = 4, 400_000, 1500
"""Runs whose tables are shown; the characters that all tables may take; those of a text in one."""
PANELS: list[tuple[str, float, dict[str, str]]] = [
    ("Loss", 1, {"train/loss": "training", "eval/loss": "evaluation"}),
    ("Learning rate", 1, {"train/lr": ""}),
    ("Gradient norm", 1, {"train/grad_norm": ""}),
    ("Tokens per second", 1, {"perf/tokens_per_second": ""}),
    ("Examples per second", 1, {"perf/samples_per_second": ""}),
    ("Milliseconds per step", 1e3, {f"perf/{part}_seconds": part for part in ("data", "compute", "waiting")}),
    ("Peak memory, GiB", 2**-30, {"perf/peak_memory_bytes": ""}),
]
"""Pictures: title, factor, and what tells its metrics apart."""
PLAIN = ("train/lr", "perf/peak_memory_bytes")
"""Training metrics without noise."""


class Recorded:
    """What a run's folder holds."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.name = folder, folder.resolve().name
        self.summary, self.status, self.check = (_json(folder / f"{n}.json") for n in ("summary", "status", "check"))
        self.settings = saved_settings(folder) or self.check.get("config", {})
        task, checkpoint = (self.settings.get(part) or {} for part in ("task", "checkpoint"))
        self.task, events = str(task.get("name", "?")), list(_lines(folder / "events.jsonl"))
        self.starts = [event for event in events if event.get("kind") == "start"]
        self.events = [{name: event.get(name) for name in ("time", "step", "kind", "text")} for event in events]
        self.curves: dict[str, tuple[array[float], array[float]]] = {}  # steps and values that are finite
        self.samples: dict[int, Table] = {}
        self.marks: dict[str, list[int]] = {}  # steps by what happened there
        self.step, self.results, self.tables, skipped = 0, dict[str, float](), dict[str, Table](), 0
        for event in self.events:
            kind = str(event["kind"]).replace("start", "resumed")
            if event["step"] and kind not in ("end", "skipped"):
                self.marks.setdefault(kind, []).append(event["step"])
        for record in _lines(folder / "metrics.jsonl"):
            self.step = record["step"]
            if record.get("train/skipped_steps", 0) > skipped or record.get("train/loss", 0) is None:
                skipped = record.get("train/skipped_steps", 0)
                self.marks.setdefault("skipped steps", []).append(self.step)
            if "eval/loss" in record:
                found: dict[str, Any] = {n: v for n, v in record.items() if n.startswith("eval/") and v is not None}
                self.results = {n: v for n, v in found.items() if isinstance(v, int | float) and n != "eval/examples"}
                self.tables = {name: v for name, v in found.items() if isinstance(v, list) and v}
                self.samples |= {self.step: found["eval/samples"]} if "eval/samples" in self.tables else {}
            for name, value in record.items():
                if isinstance(value, int | float) and math.isfinite(value):
                    steps, values = self.curves.setdefault(name, (array("d"), array("d")))
                    steps.append(self.step)
                    values.append(value)
        self.results |= {name: self.summary[name] for name in self.results if self.summary.get(name) is not None}
        metric = checkpoint.get("metric", "eval/loss")
        self.score = score(self.results, metric, checkpoint.get("mode")) if metric in self.results else -math.inf

    def sentence(self) -> str:
        """Return what was run and what came out."""
        summary, results = self.summary, ", ".join(f"{_short(n)} {number(v)}" for n, v in self.results.items())
        said = f"{self.task}: not finished, recorded up to step {self.step:,}"
        if self.status.get("reason"):
            said = f"{self.task}: stopped after step {self.step:,} by {self.status['reason']}, and can be continued"
        if "seconds" in summary:
            said = f"{self.task}: {self.step:,} steps ({summary['epoch']:.3g} epochs) in {_time(summary['seconds'])} "
            said += f"on {processes(summary['num_processes'])} ({summary['strategy']}, {summary['device']}, "
            said += f"{summary['precision']})"
        if self.check and not self.step:
            return f"{self.task}: " + ("all checks passed." if self.check.get("passed") else "checks FAILED.")
        return f"{said} gave {results}." if results else f"{said}; not evaluated."

    def cards(self) -> Iterator[tuple[str, str, str]]:
        """Yield title, value and a note of each figure that matters."""
        for name, value in self.results.items():
            steps, values = self.curves.get(name, ([], []))
            best = max(range(len(values)), key=lambda i: score({name: values[i]}, name, None), default=None)
            note = "" if best is None else f"best {number(values[best])} at step {steps[best]:,.0f}"
            yield _short(name), number(value), note
        if "seconds" in (summary := self.summary):
            unit = "tokens" if "tokens_per_second" in summary else "samples"
            yield "time", _time(summary["seconds"]), f"{summary[f'{unit}_per_second']:,.0f} {unit} per second"
            yield "parameters", f"{summary['parameters']:,}", f"{summary['trained_parameters']:,} trained"
            yield "peak memory", f"{max(summary['peak_memory_bytes']) / 2**30:.2f} GiB", "the process with the most"

    def commands(self) -> Iterator[tuple[str, str]]:
        """Yield when, and by which command, the run was started; last the one that repeats it."""
        for event in self.starts:
            when = f"{event.get('time')}, from step {event['step']:,}, commit {event.get('commit')}"
            yield when, str(event.get("command"))
        if not (self.folder / "config.yaml").exists():  # a check
            return
        script = re.match(r".*?\.py\b", str(self.starts[0].get("command"))) if self.starts else None
        yaml = self.summary.get("config_file") or "accelerate_configs/cpu.yaml"
        launch = script[0] if script else f"accelerate launch --config_file {yaml} train.py"
        again = [f"--config={self.folder / 'config.yaml'}", f"--run_name={self.name}-again"]
        yield "To repeat it", f"{launch} {shlex.join(again)}"

    def shown_tables(self, room: int) -> Iterator[tuple[str, Table, int]]:
        """Yield name, rows and number of all rows of each table, in `room` characters together."""
        tables = dict(self.tables)
        if self.samples:
            steps = sorted({*[*self.samples][:: -(-len(self.samples) // 3)], max(self.samples)})
            tables["eval/samples"] = [
                {"prompt": next(iter(rows[0].values()))}
                | {f"step {step:,}": [*row.values()][-1] for step, row in zip(steps, rows, strict=True)}
                for rows in zip(*(self.samples[step] for step in steps), strict=False)
            ]
        for name, rows in tables.items():
            yield name, fitting(rows, room // len(tables)), len(rows)


def write_report(folders: list[Path], target: Path) -> None:
    """Write the report of these runs, and its curves into a folder with the target's name.

    Raises:
        UserError: some of them hold no run; a line for each.
    """
    empty = [f for f in folders if not any((f / name).is_file() for name in ("metrics.jsonl", "check.json"))]
    if empty:
        raise UserError("\n".join(f"{f}: holds no run (no metrics.jsonl); name a run's folder" for f in empty))
    runs = [Recorded(folder) for folder in folders]
    tasks = list(dict.fromkeys(run.task for run in runs))
    runs.sort(key=lambda run: (tasks.index(run.task), -run.score))
    for run in runs if len({run.name for run in runs}) < len(runs) else []:
        run.name = str(run.folder)
    settings = [{n: v if isinstance(v, str) else json.dumps(v) for n, v in flatten(run.settings)} for run in runs]
    names = dict.fromkeys(name for each in settings for name in each)
    differing = [name for name in names if len({each.get(name) for each in settings}) > 1]
    chosen = [n for n in differing if n not in ("run_name", "output_dir")][:6]
    by_run = dict(zip((run.name for run in runs), settings, strict=True))
    ranking: Table = [
        {"run": run.name, **{_short(n): v for n, v in run.results.items()}, "step": run.step}
        | {n: by_run[run.name].get(n) for n in chosen}
        for run in runs
    ]
    differences = [{"setting": n, **{name: each.get(n) for name, each in by_run.items()}} for n in differing]
    text = Path(__file__).with_suffix(".html").read_text()
    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    environment.filters |= {"number": number, "short": _short, "fitting": fitting}
    page = environment.from_string(text).render(
        runs=runs,
        tasks=tasks,
        ranking=ranking,
        differences=differences,
        settings=[{"setting": n, "value": v} for n, v in settings[0].items() if n not in differing],
        figures=[Markup(svg) for svg in draw(runs, target.with_suffix(""))],
        detailed=[(run, list(run.shown_tables(ROOM // len(runs[:DETAILED])))) for run in runs[:DETAILED]],
    )
    write_text(target, page.encode(errors="replace").decode())


def draw(runs: list[Recorded], folder: Path) -> Iterator[str]:
    """Draw the curves of the runs, best first, into PNGs in the folder; yield each as SVG."""
    figures, is_alone, best = import_module("src.report_figures"), len(runs) == 1, runs[:DETAILED]
    folder.mkdir(parents=True, exist_ok=True)
    metrics = sorted({n for run in runs for n in run.curves if n.startswith("eval/")} - {"eval/loss", "eval/examples"})
    panels = [PANELS[0], *((_short(n).capitalize(), 1, {n: ""}) for n in metrics[:6]), *PANELS[1:]]
    if not is_alone:  # a picture for each metric
        panels = [
            (f"{t}, {label}".strip(", "), factor, {n: label}) for t, factor, m in panels for n, label in m.items()
        ]
    for title, factor, labels in panels:
        curves = [
            figures.Curve(label if is_alone else run.name, steps, [factor * v for v in values], _kind(name))
            for run in runs
            for name, label in labels.items()
            for steps, values in [run.curves.get(name, ((), ()))]
            if steps
        ]
        marks = runs[0].marks if is_alone and "train/loss" in labels else {}
        if curves:
            yield figures.draw(title, curves, marks, (), folder / f"{re.sub('[^a-z]+', '_', title.lower())}.png")
    for name in sorted({n for run in best for n in run.tables if n.startswith("eval/loss_by_")}):
        tables = {run.name: run.tables[name] for run in best if name in run.tables}
        curves = [
            figures.Curve(n, range(len(rows)), [row["loss"] for row in rows], "dotted") for n, rows in tables.items()
        ]
        ticks = [str(next(iter(row.values()))) for row in max(tables.values(), key=len)]
        yield figures.draw(_short(name).capitalize(), curves, {}, ticks, folder / f"{name[5:]}.png")


def report_line(folder: Path) -> str:
    """Write the report of a run that ends; return its line of the closing block, which says why if there is none."""
    try:
        write_report([folder], folder / "report.html")
    except Exception as error:  # no reason to fail a run that has come to its end
        return f"  report     none: {cause(error)}"
    return f"  report     {folder}/report.html"


def fitting(rows: Table, room: int) -> Table:
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


def _cut(value: Any) -> Any:
    is_long = isinstance(value, str) and len(value) > LONGEST and not value.startswith(PICTURE)
    return f"{value[:LONGEST]} …" if is_long else value


def _kind(metric: str) -> str:
    return "dotted" if metric.startswith("eval/") else "plain" if metric in PLAIN else "noisy"


def _short(name: str) -> str:
    return name.partition("/")[2].replace("_", " ")


def _time(seconds: float) -> str:
    size, unit = (1, "s") if seconds < 100 else (60, "min") if seconds < 6000 else (3600, "h")
    return f"{seconds / size:.0f} {unit}"


def _lines(file: Path) -> Iterator[dict[str, Any]]:
    """Yield the records of a file of JSON lines: of a very long one, evaluations and every so manieth other; none if it
    is absent. What a kill cut short is left out."""
    with contextlib.suppress(FileNotFoundError), file.open("rb") as lines:
        stride = 1 + file.stat().st_size // MOST_BYTES
        for i, line in enumerate(lines):
            if i % stride and b'"eval/' not in line:
                continue
            with contextlib.suppress(ValueError):
                record = json.loads(line)
                if isinstance(record, dict) and isinstance(record.get("step"), int):
                    yield record


def _json(file: Path) -> dict[str, Any]:
    with contextlib.suppress(OSError, ValueError):
        return dict(json.loads(file.read_text()))
    return {}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        "python -m src.report", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", nargs="+", type=Path, help="folders of runs")
    parser.add_argument("--output", type=Path, help="the page to write; default: report.html in the first run's folder")
    arguments = parser.parse_args()
    target = arguments.output or arguments.runs[0] / "report.html"
    with exit_codes("report"), explained("cannot write the report: ", PermissionError):
        write_report(arguments.runs, target)
    print(target)
