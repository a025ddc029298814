"""Run a W&B sweep file without W&B's server: python -m src.sweep FILE [--trials=N] [--name=value]...

The trials run one after the other; --name=value is a setting for all of them. The same command continues a sweep that
was stopped or killed. See docs/sweeps.md.
"""

import argparse
import contextlib
import ctypes
import itertools
import json
import math
import os
import random
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, Literal

import psutil
import yaml
from pydantic import BaseModel, Field, PositiveInt, ValidationError

from src.checkpoint.format import write_json
from src.checkpoint.output_folder import saved_settings
from src.config import Config, load_config
from src.process import PR_SET_PDEATHSIG, SIGNALS, RunError, UserError, exit_codes, explained
from src.settings import repeated_keys

MACROS = {"${env}": ["/usr/bin/env"], "${interpreter}": ["python"]}
"""What W&B's agent puts in their place, besides ${program} and ${args}."""
DISTRIBUTIONS = "uniform, int_uniform, log_uniform_values (min above 0) or q_uniform (with q)"
Values = Sequence[Any] | Callable[[random.Random], float]
"""What a setting can be: one of several values, or a number drawn from a range."""


class Metric(BaseModel, extra="forbid"):
    name: str
    goal: Literal["minimize", "maximize"] = "minimize"


class Halving(BaseModel, extra="forbid"):
    type: Literal["hyperband"]
    min_iter: PositiveInt
    eta: Annotated[int, Field(ge=2)] = 3


class Sweep(BaseModel, extra="forbid"):
    """A sweep file: https://docs.wandb.ai/guides/sweeps/sweep-config-keys."""

    program: str
    method: Literal["grid", "random"]
    metric: Metric
    parameters: Annotated[dict[str, dict[str, Any]], Field(min_length=1)]
    command: list[str] = [*MACROS, "${program}", "${args}"]
    early_terminate: Halving | None = None
    name: str = ""
    description: str = ""
    run_cap: PositiveInt | None = None


@dataclass
class Trial:
    """A run with the settings drawn for it."""

    folder: Path
    label: str
    """Its settings, as a table shows them."""
    command: list[str]
    config: Config
    metric: Metric
    failure: str = ""
    """Why it failed; empty if it did not."""
    rung: int = 0
    """How many times it was among the better ones."""

    def result(self, steps: float = math.inf) -> tuple[int, float]:
        """Return step and value of its last evaluation up to `steps`; (0, NaN) if there is none."""
        with contextlib.suppress(FileNotFoundError):
            lines = (self.folder / "metrics.jsonl").read_text().rpartition("\n")[0].splitlines()
            found = [(record["step"], record.get(self.metric.name)) for record in map(json.loads, lines)]
            return max((pair for pair in found if pair[1] is not None and pair[0] <= steps), default=(0, math.nan))
        return 0, math.nan

    def is_done(self, steps: int | None) -> bool:
        """Return whether it has got as far as `steps`, or to its end."""
        goal = steps or self.config.max_steps or math.inf
        has_ended = (self.folder / "summary.json").exists()
        asked = saved_settings(self.folder).get("max_steps") or math.inf
        return (has_ended and asked >= goal) or self.result()[0] >= goal

    def score(self, steps: float = math.inf) -> float:
        """Return the value of that evaluation, so that less is better."""
        value = self.result(steps)[1]
        return value if self.metric.goal == "minimize" else -value

    def row(self, steps: float = math.inf) -> str:
        """Return a line of the table, as of that evaluation."""
        step, value = self.result(steps)
        row = f"{self.folder.name:<9} {step:>6}  {value:<#{len(self.metric.name)}.4g}  {self.label}"
        return row + (f"  FAILED: {self.failure}" if self.failure else "")


def values_of(parameter: dict[str, Any]) -> Values | None:
    """Return what a parameter of a sweep file can be, as W&B understands it; None if it makes no sense."""
    kind = parameter.get("distribution")
    match {name: value for name, value in parameter.items() if name != "distribution"}:
        case {"value": value, **rest} if not rest and kind in (None, "constant"):
            return [value]
        case {"values": [_, *_] as values, **rest} if not rest and kind in (None, "categorical"):
            return values
        case {"min": int(low), "max": int(high), **rest} if low < high and not rest and kind in (None, "int_uniform"):
            return range(low, high + 1)
        case {"min": int() | float() as low, "max": int() | float() as high, **rest} if low < high:
            if kind in (None, "uniform") and not rest:
                return lambda generator: generator.uniform(low, high)
            if kind == "log_uniform_values" and low > 0 and not rest:
                return lambda generator: math.exp(generator.uniform(math.log(low), math.log(high)))
            if kind == "q_uniform" and [*rest] == ["q"] and isinstance(q := rest["q"], int | float) and q > 0:
                return lambda generator: round(generator.uniform(low, high) / q) * q
    return None


def read_sweep(file: str) -> Sweep:
    """Read a sweep file; raise a UserError with all its mistakes, one per line."""
    with explained(f"{file}: cannot be read: ", (OSError, UnicodeDecodeError, yaml.YAMLError)):
        text = Path(file).read_text()
        mistakes, content = list(repeated_keys(text)), yaml.safe_load(text)
    if isinstance(content, dict) and content.get("method") == "bayes":
        mistakes.append("method: bayes is drawn by W&B's server: start it with `wandb sweep`, or write random")
        content["method"] = "random"
    try:
        sweep = Sweep.model_validate(content)
    except ValidationError as error:
        where = [(".".join(map(str, problem["loc"])), problem["msg"]) for problem in error.errors()]
        mistakes += [f"{name}: {says.replace('Input should be', 'must be')}" for name, says in where]
    else:
        macros = {word for word in sweep.command if word.startswith("${")}
        if not {"${program}", "${args}"} <= macros <= {*MACROS, "${program}", "${args}"}:
            mistakes.append(
                "command: needs ${program} and ${args}, and has no other macros than ${env}, ${interpreter}"
            )
        for name, values in ((name, values_of(parameter)) for name, parameter in sweep.parameters.items()):
            if values is None:
                says = f"needs value, values, or numbers min < max, and a distribution: {DISTRIBUTIONS}"
                mistakes.append(f"parameters.{name}: {says}; 1e-4 is text to W&B, write 0.0001")
            elif sweep.method == "grid" and not isinstance(values, Sequence):
                mistakes.append(f"parameters.{name}: method: grid needs values, or integers min and max")
    if mistakes:
        raise UserError("\n".join(f"{file}: {mistake}" for mistake in mistakes))
    sweep.name = sweep.name or f"{Path(file).stem}-sweep"
    return sweep


def draw(sweep: Sweep, count: int | None, seed: int) -> list[dict[str, Any]]:
    """Return the settings of the first `count` trials by name. A longer sweep begins with the same ones."""
    values: dict[str, Any] = {name: values_of(parameter) for name, parameter in sorted(sweep.parameters.items())}
    if sweep.method == "grid":
        grid = itertools.product(*values.values())
        return [dict(zip(values, choice, strict=True)) for choice in itertools.islice(grid, count)]
    if count is None:
        raise UserError("method: random has no end: add --trials=8, or run_cap in the file")
    generator = random.Random(seed)

    def one(of: Any) -> Any:
        if isinstance(of, Sequence):
            return generator.choice(of)
        return value if isinstance(value := of(generator), int) else float(f"{value:.4g}")

    return [{name: one(of) for name, of in values.items()} for _ in range(count)]


def build_trials(sweep: Sweep, drawn: list[dict[str, Any]], folder: Path, others: list[str]) -> list[Trial]:
    """Return the trials, their settings checked as train.py does; raise a UserError with all mistakes."""
    trials, mistakes = [], []
    columns = [[f"{name}={settings[name]}" for settings in drawn] for name in drawn[0]]
    widths = [max(map(len, column)) for column in columns]
    for i, words in enumerate(zip(*columns, strict=True)):
        own = folder / f"trial-{i:02}"
        arguments = [*(f"--{word}" for word in words), *others]
        arguments += [f"--run_name={folder.name}-{own.name}", f"--output_dir={own}"]
        macros = MACROS | {"${program}": [sweep.program], "${args}": arguments}
        command = [text for word in sweep.command for text in macros.get(word, [word])]
        metric = f"--checkpoint.metric={sweep.metric.name}"  # which is refused if no evaluation has it
        try:
            config = load_config([*command[command.index(sweep.program) + 1 :], metric])
        except UserError as error:
            mistakes += str(error).splitlines()
        else:
            label = "  ".join(map(str.ljust, words, widths)).rstrip()
            trials.append(Trial(own, label, command, config, sweep.metric))
    if mistakes:
        raise UserError("\n".join(dict.fromkeys(mistakes)))
    return trials


def measure(config: Config) -> tuple[int, int]:
    """Return a run's steps and the steps between two evaluations; raise a UserError if it can't be cut short."""
    steps_per_epoch = math.ceil(len(config.task.build_datasets()[0]) / config.global_batch_size)
    total, schedule = config.steps(steps_per_epoch)
    if schedule > (config.epochs or 0) * steps_per_epoch:
        raise UserError("early_terminate: cutting a run short keeps its learning rates only if `epochs` spans them all")
    return total, config.eval_every or steps_per_epoch


def train(trial: Trial, steps: int | None, log: Path) -> int:
    """Run a trial as far as `steps`, or to its end, and return the exit code. A signal stops it once it has saved."""
    family: list[psutil.Process] = []
    command = [*trial.command, *([f"--max_steps={steps}"] if steps else [])]
    environment = os.environ | {"WANDB_RUN_GROUP": trial.folder.parent.name}
    environment["PATH"] = f"{Path(sys.executable).parent}:{environment['PATH']}"
    # if this process is killed, the trial is told to stop
    bound = partial(ctypes.CDLL(None).prctl, PR_SET_PDEATHSIG, signal.SIGTERM) if sys.platform == "linux" else None
    with log.open("ab") as output:
        to: Any = {"stdin": subprocess.DEVNULL, "stdout": output, "stderr": output}
        process = psutil.Popen(command, env=environment, start_new_session=True, preexec_fn=bound, **to)

    def stop(_: str) -> None:
        with contextlib.suppress(psutil.NoSuchProcess):
            family.extend(process.children(recursive=True))
            process.terminate()

    SIGNALS.answer_by(stop)
    code = process.wait()
    SIGNALS.answer_by(None)
    psutil.wait_procs(family)  # a launcher does not wait for a process that saves
    return int(code)


def run(trial: Trial, steps: int | None) -> None:
    """Have a trial trained as far as `steps`, or to its end, unless it has been, and print a line about it."""
    log = trial.folder.with_suffix(".log")
    code = 0 if trial.is_done(steps) else train(trial, steps, log)
    if SIGNALS.name:
        raise RunError(f"stopped by {SIGNALS.name} in {trial.folder}; to continue: {shlex.join(sys.orig_argv)}")
    if code or not trial.is_done(steps):
        lines = log.read_text(errors="replace").splitlines() or ["no output"]
        said = next((line for line in reversed(lines) if line.startswith("train.py: ")), lines[-1])
        trial.failure = f"exit code {code}, {said}"
    elif not math.isfinite(trial.score(steps or math.inf)):
        trial.failure = "not finite"
    print(trial.row(steps or math.inf), flush=True)


def search(trials: list[Trial], halving: Halving | None) -> None:
    """Run all trials to their end; with halving, only the better 1/eta of them, again and again, eta times as far."""
    alive = [(trial, *(measure(trial.config) if halving else (0, 0))) for trial in trials]
    evaluations = halving.min_iter if halving else 0
    while halving and len(alive) > 1 and all(evaluations * every < total for _, total, every in alive):
        for trial, _, every in alive:
            run(trial, evaluations * every)
        good = [entry for entry in alive if not entry[0].failure]
        good.sort(key=lambda entry: entry[0].score(evaluations * entry[2]))
        alive, evaluations = good[: max(1, len(alive) // halving.eta)], evaluations * halving.eta
        print(f"going on: {', '.join(trial.folder.name for trial, *_ in alive) or 'none'}", flush=True)
        for trial, *_ in alive:
            trial.rung += 1
    for trial, *_ in alive:
        run(trial, None)


def write_trials(file: Path, trials: list[Trial]) -> None:
    """Write down each trial's command; raise a UserError if those in the file are of another sweep."""
    known = json.loads(file.read_text()) if file.exists() else {}
    commands = {trial.folder.name: shlex.join(trial.command) for trial in trials}
    if any(known.get(name, command) != command for name, command in commands.items()):
        raise UserError(f"{file}: of a sweep with other settings; choose another --folder")
    file.parent.mkdir(parents=True, exist_ok=True)
    write_json(file, known | commands)


def main(argv: list[str]) -> None:
    """Run, or continue, the sweep that the arguments ask for."""
    parser = argparse.ArgumentParser("python -m src.sweep", allow_abbrev=False, description=__doc__)
    parser.add_argument("file", help="sweep file, such as sweeps/mnist.yaml")
    parser.add_argument("--trials", type=int, help="number of trials; default: run_cap, or the whole grid")
    parser.add_argument("--draw_seed", type=int, default=0, help="seed of what is drawn; default: 0")
    parser.add_argument("--folder", type=Path, help="folder of the sweep; default: runs/ and its name")
    options, others = parser.parse_known_args(argv)
    if options.trials is not None and options.trials < 1:
        raise UserError(f"--trials={options.trials}: must be 1 or more")
    sweep = read_sweep(options.file)
    folder = options.folder or Path("runs", sweep.name)
    trials = build_trials(sweep, draw(sweep, options.trials or sweep.run_cap, options.draw_seed), folder, others)
    write_trials(folder / "trials.json", trials)
    SIGNALS.catch()
    header = f"{'trial':<9} {'step':>6}  {sweep.metric.name}"
    print(f"trials: {len(trials)}, in {folder}, each with a log beside its folder", header, sep="\n", flush=True)
    search(trials, sweep.early_terminate)
    trials.sort(key=lambda trial: (bool(trial.failure), -trial.rung, trial.score()))
    print("\nbest first:", header, *(trial.row() for trial in trials), sep="\n")
    if find_spec("src.report"):  # it may have been thrown out
        folders = [trial.folder for trial in trials if trial.result()[0]]
        import_module("src.report").write_report(folders, folder / "report.html")
        print(f"report: {folder}/report.html")
    if trials[0].failure:
        raise RunError("all trials failed; the same command tries them again")
    print(f"best model: {trials[0].folder}/model; its settings: {trials[0].folder}/config.yaml")


if __name__ == "__main__":
    with exit_codes("sweep"):
        main(sys.argv[1:])
