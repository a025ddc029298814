"""Run a W&B sweep file without W&B's server.

    python -m src.tools.sweep FILE [--trials=N] [--folder=DIR] [--name=value]...

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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, Literal

import psutil
import yaml
from pydantic import BaseModel, BeforeValidator, Field, PositiveInt, ValidationError

from src.checkpoint.folder import changed_settings, read_lines, run_settings, saved_settings
from src.config.config import Config
from src.config.errors import RunError, UserError, explained
from src.config.settings import complaint, read_yaml
from src.distributed.process import PR_SET_PDEATHSIG, SIGNALS, exit_codes

MACROS = {"${env}": ["/usr/bin/env"], "${interpreter}": ["python"]}
"""What W&B's agent puts in their place, besides ${program} and ${args}."""
Values = Sequence[Any] | Callable[[random.Random], float]
"""What a setting can be: one of several values, or a number drawn from a range."""


def values_of(parameter: Any) -> Values:
    """Return what a parameter of a sweep file can be, as W&B understands it; raise a ValueError if that is nothing."""
    match parameter:
        case {"value": value, **rest} if not rest:
            return [value]
        case {"values": [_, *_] as values, **rest} if not rest:
            return values
        case {"min": int(low), "max": int(high), **rest} if low < high and not rest:
            return range(low, high + 1)
        case {"min": int() | float() as low, "max": int() | float() as high, **rest} if low < high:
            if rest in ({}, {"distribution": "uniform"}):
                return lambda generator: generator.uniform(low, high)
            if rest == {"distribution": "log_uniform_values"} and low > 0:
                return lambda generator: math.exp(generator.uniform(math.log(low), math.log(high)))
    says = "needs value, values, or min < max, with distribution: uniform or (above 0) log_uniform_values, or none"
    raise ValueError(f"{says}; 1e-4 is text to W&B, write 0.0001")


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
    parameters: Annotated[dict[str, Annotated[Any, BeforeValidator(values_of)]], Field(min_length=1)]
    command: list[str]
    early_terminate: Halving | None = None
    name: str = "sweep"


@dataclass
class Trial:
    """A run with the settings drawn for it, which `label` shows."""

    folder: Path
    label: str
    command: list[str]
    config: Config
    """Its checkpoint.metric and checkpoint.mode are those of the sweep."""
    failure: str = ""
    rung: int = 0
    """How many times it was among the better ones."""

    def result(self, steps: float = math.inf) -> tuple[int, float]:
        """Return step and value of its last evaluation up to `steps`; (0, NaN) if there is none."""
        metric, records = self.config.checkpoint.metric, read_lines(self.folder / "metrics.jsonl")
        found = [(record["step"], record[metric]) for record in records if record.get(metric) is not None]
        return next((pair for pair in reversed(found) if pair[0] <= steps), (0, math.nan))

    def badness(self, steps: float = math.inf) -> float:
        """Return the value of that evaluation, so that less is better."""
        value = self.result(steps)[1]
        return -value if self.config.checkpoint.mode == "max" else value

    def is_done(self, steps: int | None) -> bool:
        """Return whether it has got as far as `steps`, or to its end."""
        goal = steps or self.config.max_steps or math.inf
        asked = saved_settings(self.folder).get("max_steps") or math.inf
        has_ended = (self.folder / "summary.json").exists() and asked >= goal
        return has_ended or self.result()[0] >= (steps or math.inf)

    def row(self, steps: float = math.inf) -> str:
        """Return a line of the table, as of that evaluation."""
        step, value = self.result(steps)
        width = len(self.config.checkpoint.metric)
        return f"{self.folder.name:<9} {step:>6}  {value:<#{width}.4g}  {self.label}  {self.failure}".rstrip()


def read_sweep(file: str) -> Sweep:
    """Read a sweep file; raise a UserError with all its mistakes, one per line."""
    with explained(f"{file}: cannot be read: ", (OSError, UnicodeDecodeError, yaml.YAMLError)):
        content, mistakes = read_yaml(Path(file).read_text())
    try:
        sweep = Sweep.model_validate(content)
    except ValidationError as error:
        for problem in error.errors():
            mistakes.append(f"{'.'.join(map(str, problem['loc']))}: {complaint(problem)}")
    else:
        mistakes += [f"command: lacks {word}" for word in ("${program}", "${args}") if word not in sweep.command]
    if mistakes:
        raise UserError("\n".join(f"{file}: {mistake}" for mistake in mistakes))
    return sweep


def draw(sweep: Sweep, count: int | None) -> list[dict[str, Any]]:
    """Return the settings of the first `count` trials by name. A longer sweep begins with the same ones."""
    values: dict[str, Any] = dict(sorted(sweep.parameters.items()))
    generator = random.Random(0)
    if sweep.method == "grid":
        if ranges := [name for name, of in values.items() if callable(of)]:
            raise UserError(f"method: grid needs values, or integers min and max, for {', '.join(ranges)}")
        choices = itertools.islice(itertools.product(*values.values()), count)
        return [dict(zip(values, choice, strict=True)) for choice in choices]
    if count is None:
        raise UserError("method: random has no end: add --trials=8")

    def one(of: Any) -> Any:
        return float(f"{of(generator):.4g}") if callable(of) else generator.choice(of)

    return [{name: one(of) for name, of in values.items()} for _ in range(count)]


def build_trials(sweep: Sweep, drawn: list[dict[str, Any]], folder: Path, others: list[str]) -> list[Trial]:
    """Return the trials, their settings checked as train.py does; raise a UserError with all mistakes."""
    trials, mistakes = [], []
    metric = [f"--checkpoint.metric={sweep.metric.name}", f"--checkpoint.mode={sweep.metric.goal[:3]}"]
    for i, settings in enumerate(drawn):
        own = folder / f"trial-{i:02}"
        written = {
            name: value if isinstance(value, str) else json.dumps(value, default=str)
            for name, value in settings.items()
        }
        arguments = [*(f"--{name}={text}" for name, text in written.items()), *others]
        arguments += [f"--run_name={folder.name}-{own.name}", f"--output_dir={own}"]
        macros = MACROS | {"${program}": [sweep.program], "${args}": arguments}
        command = [text for word in sweep.command for text in macros.get(word, [word])]
        try:
            config = run_settings([*command[command.index(sweep.program) + 1 :], *metric])
        except UserError as error:
            mistakes += str(error).splitlines()
            continue
        if changed := changed_settings(config, saved_settings(own)).keys() - {"max_steps"}:
            mistakes.append(f"{folder}: holds trials with other {', '.join(sorted(changed))}; choose another --folder")
        label = "  ".join(f"{name}={text:<8}" for name, text in written.items())
        trials.append(Trial(own, label, command, config))
    if mistakes:
        raise UserError("\n".join(dict.fromkeys(mistakes)))
    return trials


def rungs(config: Config, halving: Halving) -> Iterator[int]:
    """Yield the steps after which only the better trials go on; raise a UserError if the run can't be cut short."""
    steps_per_epoch = math.ceil(len(config.task.build_datasets()[0]) / config.global_batch_size)
    total, schedule = config.steps(steps_per_epoch)
    if schedule > (config.epochs or 0) * steps_per_epoch:
        raise UserError("early_terminate: cutting a run short keeps its learning rates only if `epochs` spans them all")
    steps = halving.min_iter * (config.eval_every or steps_per_epoch)
    while steps < total:
        yield steps
        steps *= halving.eta


def train(trial: Trial, steps: int | None, log: Path) -> int:
    """Run a trial as far as `steps`, or to its end, and return the exit code. A signal stops it once it has saved; so
    does, on Linux, the death of this process."""
    family: list[psutil.Process] = []
    command = [*trial.command, *([f"--max_steps={steps}"] if steps else [])]
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = os.environ | {"PATH": path, "WANDB_RUN_GROUP": trial.folder.parent.name}
    bound = partial(ctypes.CDLL(None).prctl, PR_SET_PDEATHSIG, signal.SIGTERM) if sys.platform == "linux" else None
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as output:
        process = psutil.Popen(
            command,
            env=environment,
            start_new_session=True,
            preexec_fn=bound,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
        )

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
        trial.failure = f"FAILED: exit code {code}, see {log}"
    elif not math.isfinite(trial.result(steps or math.inf)[1]):
        trial.failure = "FAILED: not finite"
    print(trial.row(steps or math.inf), flush=True)


def search(trials: list[Trial], halving: Halving | None) -> None:
    """Run all trials to their end; with halving, only the better 1/eta of them, again and again, eta times as far."""
    alive, rounds = trials, {tuple(rungs(trial.config, halving)) for trial in trials if halving}
    if len(rounds) > 1:
        raise UserError("early_terminate: needs trials with the same number of steps")
    for steps in next(iter(rounds), ()):
        if halving and len(alive) > 1:
            for trial in alive:
                run(trial, steps)
            good = sorted((trial for trial in alive if not trial.failure), key=lambda trial: trial.badness(steps))
            alive = good[: max(1, len(alive) // halving.eta)]
            print(f"going on: {', '.join(trial.folder.name for trial in alive) or 'none'}", flush=True)
            for trial in alive:
                trial.rung += 1
    for trial in alive:
        run(trial, None)


def main(argv: list[str]) -> None:
    """Run, or continue, the sweep that the arguments ask for."""
    parser = argparse.ArgumentParser("python -m src.tools.sweep", allow_abbrev=False, description=__doc__)
    parser.add_argument("file", help="sweep file, such as sweeps/mnist.yaml")
    parser.add_argument("--trials", type=int, help="number of trials; default: the whole grid")
    parser.add_argument("--folder", type=Path, help="folder of the sweep; default: runs/ and its name")
    options, others = parser.parse_known_args(argv)
    if options.trials is not None and options.trials < 1:
        raise UserError(f"--trials={options.trials}: must be 1 or more")
    sweep = read_sweep(options.file)
    folder = options.folder or Path("runs", sweep.name)
    trials = build_trials(sweep, draw(sweep, options.trials), folder, others)
    SIGNALS.catch()
    header = f"{'trial':<9} {'step':>6}  {sweep.metric.name}"
    print(f"trials: {len(trials)}, in {folder}, each with a log beside its folder", header, sep="\n", flush=True)
    search(trials, sweep.early_terminate)
    trials.sort(key=lambda trial: (bool(trial.failure), -trial.rung, trial.badness()))
    print("\nbest first:", header, *(trial.row() for trial in trials), sep="\n", flush=True)
    folders = [str(trial.folder) for trial in trials if trial.result()[0]]
    if folders and find_spec("src.tracking.report"):  # it may have been thrown out; if it fails, it says why
        subprocess.run([sys.executable, "-m", "src.tracking.report", *folders, f"--output={folder}/report.html"])
    if trials[0].failure:
        raise RunError("all trials failed; the same command tries them again")
    print(f"best model: {trials[0].folder}/model; its settings: {trials[0].folder}/config.yaml")


if __name__ == "__main__":
    with exit_codes("sweep"):
        main(sys.argv[1:])
