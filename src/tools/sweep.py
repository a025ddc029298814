"""Run a W&B sweep file with Optuna, without W&B's server: python -m src.tools.sweep FILE [--trials=N] [--name=value]...

Trials run one after the other; --name=value is a setting for all of them. The same command resumes a sweep that was
stopped or killed. See docs/running.md.
"""

import argparse
import contextlib
import json
import math
import os
import shlex
import subprocess
import sys
import time
from pathlib import Path
from typing import Annotated, Any, Literal

import optuna  # pip install -e '.[sweeps]'
import psutil
from optuna.pruners import NopPruner, SuccessiveHalvingPruner
from optuna.samplers import BaseSampler, GridSampler, RandomSampler, TPESampler
from optuna.trial import Trial, TrialState
from pydantic import BaseModel, Field, PositiveInt, ValidationError
from ruamel.yaml.error import YAMLError

from src.checkpoint.files import read_lines
from src.config.errors import RunError, UserError, explained
from src.config.settings import problem_text, read_yaml
from src.config.terminal import say
from src.distributed.process import SIGNALS, end_with_parent, exit_codes

MACROS = {"${env}": ["/usr/bin/env"], "${interpreter}": ["python"]}
"""Words that W&B's agent replaces in a command, besides ${program} and ${args}."""
POLL_SECONDS = 0.5
"""Seconds between two looks at a trial's metrics."""


class Parameter(BaseModel, extra="forbid", strict=True):
    """The values of a setting: one, several to choose from, or a range of numbers (written as 0.0001, not 1e-4)."""

    value: Any = None
    values: list[Any] = []
    min: int | float | None = None
    max: int | float | None = None
    distribution: Literal["uniform", "log_uniform_values"] = "uniform"

    @property
    def choices(self) -> list[str]:
        """Return the values to choose from, as written on the command line; empty for a range of floats."""
        if self.min is None or self.max is None:
            values = self.values or [self.value]
        elif isinstance(self.min, int) and isinstance(self.max, int):
            values = list(range(self.min, self.max + 1))
        else:
            return []
        return [value if isinstance(value, str) else json.dumps(value, default=str) for value in values]


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
    method: Literal["grid", "random", "bayes"]
    metric: Metric
    parameters: Annotated[dict[str, Parameter], Field(min_length=1)]
    command: list[str]
    early_terminate: Halving | None = None
    name: str = "sweep"
    """Name of the sweep's folder in runs/."""

    @property
    def size(self) -> int:
        """Return the number of combinations of settings; 0 if one of them is a range of floats."""
        return math.prod(len(parameter.choices) for parameter in self.parameters.values())

    def sampler(self, seed: int = 0) -> BaseSampler:
        """Return Optuna's sampler for the method. A grid ignores the seed."""
        if self.method == "grid":
            return GridSampler({name: parameter.choices for name, parameter in self.parameters.items()}, seed=0)
        return RandomSampler(seed=seed) if self.method == "random" else TPESampler(seed=seed)

    def choose(self, trial: Trial) -> dict[str, str]:
        """Return a trial's settings, as written on the command line."""
        settings = {}
        for name, parameter in self.parameters.items():
            if choices := parameter.choices:
                settings[name] = str(trial.suggest_categorical(name, choices))
            else:
                bounds: Any = parameter.min, parameter.max  # neither is None, or there would be choices
                is_log = parameter.distribution == "log_uniform_values"
                settings[name] = f"{trial.suggest_float(name, *bounds, log=is_log):.4g}"
        return settings


def settings_of(sweep: Sweep, number: int) -> dict[str, str]:
    """Return the settings of trial `number`, counted from 0, of a sweep that runs as a job array. Raise a UserError if
    the grid has fewer trials."""
    study = optuna.create_study(sampler=sweep.sampler(number))
    if sweep.method == "grid":
        if number >= sweep.size:
            raise UserError(f"{sweep.name} has {sweep.size} trials: --array=0-{sweep.size - 1}")
        for _ in range(number):
            study.ask()  # skip the combinations before it
    return sweep.choose(study.ask())


def read_sweep(file: str) -> Sweep:
    """Read a sweep file. Raise a UserError with all its mistakes, one per line."""
    with explained(f"{file}: cannot be read: ", (OSError, UnicodeDecodeError, YAMLError)):
        content = read_yaml(Path(file).read_bytes())
    try:
        return Sweep.model_validate(content)
    except ValidationError as error:
        lines = [f"{file}: {'.'.join(map(str, of['loc']))}: {problem_text(of)}" for of in error.errors()]
        raise UserError("\n".join(lines)) from error


def command_of(sweep: Sweep, settings: dict[str, str], folder: Path, others: list[str]) -> list[str]:
    """Return the command of a trial: that of W&B's agent plus the run's name and output folder."""
    own = settings | {"run_name": f"{folder.parent.name}-{folder.name}", "output_dir": str(folder)}
    arguments = [*others, *(f"--{name}={text}" for name, text in own.items())]
    macros = MACROS | {"${program}": [sweep.program], "${args}": arguments}
    return [text for word in sweep.command for text in macros.get(word, [word])]


def stop_trial(process: psutil.Popen) -> None:
    """Have a trial save and exit. Wait for all its processes, as a launcher doesn't wait for those that save."""
    with contextlib.suppress(psutil.NoSuchProcess):
        family = process.children(recursive=True)
        process.terminate()
        psutil.wait_procs([process, *family])


def objective(trial: Trial, sweep: Sweep, folder: Path, others: list[str]) -> float:
    """Run a trial until it finishes or is pruned. Return the last value of its metric; NaN if it failed."""
    own = folder / trial.user_attrs.get("folder", f"trial-{trial.number:02}")
    trial.set_user_attr("folder", own.name)
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    say(f"{own.name}, see {own}.log …")
    with Path(f"{own}.log").open("ab") as log:
        process = psutil.Popen(
            command_of(sweep, sweep.choose(trial), own, others),
            env=os.environ | {"PATH": path, "WANDB_RUN_GROUP": folder.name},
            start_new_session=True,
            preexec_fn=end_with_parent,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
        )
    values: list[float] = []
    while True:
        code = process.poll()
        entries, name = read_lines(own / "metrics.jsonl"), sweep.metric.name
        for value in [entry[name] for entry in entries if entry.get(name) is not None][len(values) :]:
            values.append(value)
            trial.report(value, len(values))
        if code is not None:
            return values[-1] if code == 0 and values else math.nan  # Optuna counts NaN as a failure
        if SIGNALS.name:
            stop_trial(process)
            # no error of ours: Optuna would print its traceback
            sys.exit(f"sweep: stopped by {SIGNALS.name} in {own}; to resume: {shlex.join(sys.orig_argv)}")
        if trial.should_prune():
            stop_trial(process)
            raise optuna.TrialPruned
        time.sleep(POLL_SECONDS)


def open_study(sweep: Sweep, folder: Path) -> optuna.Study:
    """Return the study in the folder, or a new one. Queue its unfinished trials, so that they come first."""
    folder.mkdir(parents=True, exist_ok=True)
    halving = sweep.early_terminate
    study = optuna.create_study(
        storage=f"sqlite:///{folder}/study.db",
        study_name="sweep",
        direction=sweep.metric.goal,
        pruner=SuccessiveHalvingPruner(halving.min_iter, halving.eta) if halving else NopPruner(),
        load_if_exists=True,
    )
    study.sampler = sweep.sampler(seed=len(study.trials))  # with the same seed it would draw the same again
    last_in_folder = {trial.user_attrs["folder"]: trial for trial in study.trials}
    for trial in last_in_folder.values():
        if trial.state == TrialState.RUNNING:  # of a sweep that was stopped or killed
            study.tell(trial.number, state=TrialState.FAIL)
        if trial.state in (TrialState.RUNNING, TrialState.FAIL):
            study.enqueue_trial(trial.params, user_attrs=trial.user_attrs)
    return study


def finished(study: optuna.Study) -> list[Any]:
    """Return the trials that finished or were pruned."""
    return study.get_trials(states=(TrialState.COMPLETE, TrialState.PRUNED))


def main(argv: list[str]) -> None:
    """Run or resume a sweep."""
    parser = argparse.ArgumentParser("python -m src.tools.sweep", allow_abbrev=False, description=__doc__)
    parser.add_argument("file", help="sweep file, such as sweeps/mnist.yaml")
    parser.add_argument("--trials", type=int, help="number of trials; default: all combinations of values")
    options, others = parser.parse_known_args(argv)
    sweep = read_sweep(options.file)
    folder = Path("runs", sweep.name)
    wanted = options.trials or sweep.size
    if not wanted:
        raise UserError(f"method: {sweep.method} never ends by itself: add --trials=8")
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = open_study(sweep, folder)
    SIGNALS.catch()
    study.optimize(
        lambda trial: objective(trial, sweep, folder, others),
        n_trials=max(0, wanted - len(finished(study))),
        callbacks=[lambda _, trial: say(f"{trial.state.name}, {sweep.metric.name} {trial.value}")],
    )
    table = study.trials_dataframe(("value", "user_attrs", "params", "state"))
    table.columns = table.columns.str.replace("user_attrs_|params_", "", regex=True)
    print(table.sort_values("value", ascending=sweep.metric.goal == "minimize").to_string(index=False))
    if not finished(study):
        raise RunError("all trials failed; to retry them, run the same command")
    print(f"best model: {folder / study.best_trial.user_attrs['folder']}/model")


if __name__ == "__main__":
    with exit_codes("sweep"):
        main(sys.argv[1:])
