"""Write a report of runs, best first: a page that needs no server, no network and no JavaScript.

It shows what runs and --check have written into their folders, and leaves out what is missing.
"""

import argparse
import math
from collections import defaultdict
from pathlib import Path
from pkgutil import resolve_name

from jinja2 import Template, TemplateError

from src.checkpoint.files import read_json, saved_settings, write_text
from src.config.errors import UserError, as_user_error, cause
from src.config.settings import flatten
from src.config.terminal import masked, say
from src.distributed.process import exit_codes
from src.tasks.base import PICTURE, Tables
from src.tracking.part import Entry, Part
from src.tracking.records import is_number, read_records
from src.training.score import score

MAX_PLOTS = 24


class LoggedRun:
    """The contents of a run's folder, or of a check's.

    Raises:
        UserError: it is neither.
    """

    def __init__(self, folder: Path) -> None:
        self.name = str(folder)
        self.status, self.check = read_json(folder / "status.json"), read_json(folder / "check.json")
        self.settings = dict(flatten(saved_settings(folder) or self.check.get("config", {})))
        """Values by dotted name."""
        if "task.name" not in self.settings:
            raise UserError(f"{folder}: not a run's folder (it has no config.yaml of a run)")
        self.curves: dict[str, list[tuple[float, float]]] = defaultdict(list)
        """Points (step, finite value), by metric."""
        self.step, self.results, self.tables = 0, Entry(), Tables()
        """The last step, the metrics of the exported model or else of the last evaluation, and the tables of that."""
        for entry in read_records(folder / "metrics.jsonl"):
            self.step = entry["step"]
            if "eval/loss" in entry:
                self.results, self.tables = {}, {}
            for name, value in entry.items():
                if isinstance(value, list):
                    self.tables[name] = value
                elif name.startswith("eval/"):
                    self.results[name] = value
                if "/" in name and is_number(value):
                    self.curves[name].append((self.step, value))
        self.results |= read_json(folder / "summary.json")
        metric, mode = self.settings["checkpoint.metric"], self.settings["checkpoint.mode"]
        is_scored = is_number(self.results.get(metric))
        self.score = score(self.results[metric], metric, mode) if is_scored else -math.inf
        """Of the exported model, or else of the last evaluation: higher is better."""


def write_report(folders: list[Path], target: Path) -> None:
    """Write the report of these runs.

    Raises:
        UserError: a folder is not a run's, or a file is not as a run writes it.
    """
    what = f"{', '.join(map(str, folders))}: files are not as a run writes them: "
    with as_user_error(what, (ArithmeticError, AttributeError, LookupError, TypeError, TemplateError)):
        runs = sorted(map(LoggedRun, folders), key=lambda run: (run.settings["task.name"], -run.score))
        source = Path(__file__).with_suffix(".html").read_text(encoding="utf-8")
        template = Template(source, autoescape=True, trim_blocks=True)
        page = template.render(runs=runs, PICTURE=PICTURE, figures=draw_plots(runs))
    write_text(target, masked(page).encode(errors="replace").decode())


def draw_plots(runs: list[LoggedRun]) -> dict[str, str]:
    """Return a plot of each metric that changes, by its title: an SVG in base64."""
    draw = resolve_name("src.tracking.plots:draw_curves")  # imports matplotlib, which nothing else needs
    curves = defaultdict(list)
    for run in runs:
        for name, points in run.curves.items():
            part, _, metric = name.partition("/")
            # for a single run, plot training loss and evaluation loss together
            title, label = (metric, part) if len(runs) == 1 else (name, run.name)
            if len({value for _, value in points}) > 1:
                curves[title].append((label, points))
    titles = sorted(curves, key=lambda title: "loss" not in title)[:MAX_PLOTS]
    return {title: draw(title, curves[title]) for title in titles}


class Report(Part):
    """Writes the report of a finished run."""

    title = "report"

    def end(self, summary: Entry | None, crash: str | None) -> None:
        if summary:
            try:
                write_report([self.folder], self.folder / "report.html")
                self.closing = f"  report     {self.folder}/report.html"
            except Exception as error:  # no reason to fail a finished run
                self.closing = f"  report     none: {cause(error)}"


if __name__ == "__main__":
    parser = argparse.ArgumentParser("python -m src.tracking.report", description=__doc__)
    parser.add_argument("runs", nargs="+", type=Path, help="output folders of runs")
    parser.add_argument("--output", type=Path, help="page to write; default: report.html in the first run's folder")
    arguments = parser.parse_args()
    target = arguments.output or arguments.runs[0] / "report.html"
    with exit_codes("report"), as_user_error("cannot write the report: ", (OSError, ImportError)):
        write_report(arguments.runs, target)
    say(f"{target}")
