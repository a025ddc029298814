"""Read the settings of a run: defaults in code < yaml files < the command line."""

import contextlib
import sys
from collections.abc import Callable, Iterable
from functools import partial, reduce
from operator import getitem
from pkgutil import resolve_name
from typing import Any, Generic

from pydantic import ValidationError
from typing_extensions import TypeVar

from src.config.aliases import in_our_terms
from src.config.check import CheckSettings
from src.config.cuda_graphs import CudaGraphSettings
from src.config.ema import EmaSettings
from src.config.environment import leftovers
from src.config.errors import UserError, as_user_error
from src.config.groups import TaskSettings
from src.config.hub import HubSettings
from src.config.mirror import MirrorSettings
from src.config.performance import PerformanceSettings
from src.config.run import RunSettings
from src.config.settings import (
    Change,
    Values,
    Written,
    flatten,
    help_lines,
    nearest,
    read_arguments,
    read_value,
    setting_fields,
    validate,
)
from src.config.terminal import say
from src.config.trackers import TrackerSettings
from src.config.transforms import TransformSettings
from src.config.wandb import WandbSettings
from src.config.workers import WorkerSettings

USAGE = """\
accelerate launch --config_file accelerate_configs/ddp.yaml
    train.py [--config=FILE.yaml]... [--key.sub=value]...

Settings and their defaults. Yamls given by --config override the defaults; the
command line overrides both. The task's own settings are shown for the chosen
--task.name:
"""
PLACE = {"run_name", "output_dir", "resume"}
"""Settings that determine the files a run reads and writes."""
T = TypeVar("T", bound=TaskSettings, default=TaskSettings, covariant=True)


class Config(
    # first, as it replaces a group that the others inherit
    MirrorSettings,
    CheckSettings,
    CudaGraphSettings,
    EmaSettings,
    HubSettings,
    PerformanceSettings,
    TransformSettings,
    WorkerSettings,
    WandbSettings,
    TrackerSettings,
    RunSettings,
    Generic[T],
):
    """All settings of a run. Those of `Config[Task]` are of a task that can be trained."""

    task: T
    """Settings of the task chosen by `task.name`."""


EXPLANATIONS: list[Callable[..., list[str] | None]] = [
    # functions that explain mistakes better than line by line
    in_our_terms,
]
LENGTH_SETTINGS = {"epochs", "max_steps"}
"""Settings that determine how long a run is."""


def changed_settings(config: Config, saved: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Return the (old, new) values, by name, of changed settings that make this a different run or, for epochs and
    max_steps, a longer or shorter one."""
    now, changed = config.model_dump(mode="json"), {}
    for name, _, marks in setting_fields(type(config)):
        if Change.SAFE in marks:
            continue
        with contextlib.suppress(KeyError, TypeError):  # another version of the code did not have it
            before, after = (reduce(getitem, name.split("."), values) for values in (saved, now))
            if before != after:
                changed[name] = before, after
    return changed


def read_config(
    argv: list[str], tasks: dict[str, str], place_errors: Callable[[Config], Iterable[str]] = lambda _: ()
) -> Config:
    """Read the settings; if `argv` contains --help, print them and exit with code 0.

    Args:
        tasks: import path of each task's class, or of its settings', by name.
        place_errors: yields an error line for each problem with the run's files.

    Raises:
        UserError: the settings have mistakes. All of them are listed, one per line.
    """
    mistakes = [*leftovers()]
    values, written = read_arguments(["--help" if word == "-h" else word for word in argv], mistakes)
    misread = [*mistakes]
    config, wrong = _check(values, written, mistakes, tasks)
    if config and not wrong & PLACE:
        mistakes.extend(place_errors(config))
    if not mistakes:
        return config
    for explain in EXPLANATIONS:
        mistakes = explain(values, written, tasks, misread, partial(_check, tasks=tasks)) or mistakes
    raise UserError(*dict.fromkeys(mistakes))


def load_config(argv: list[str], tasks: dict[str, str]) -> Config[Any]:
    """Return what `read_config` does, with a Task."""
    return config_from(read_config(argv, tasks).model_dump(), tasks)


def _check(values: Values, written: Written, mistakes: list[str], tasks: dict[str, str]) -> tuple[Any, set[str]]:
    """Return what `validate` does, with the chosen task's settings and defaults."""
    default, *_ = tasks
    name = str(values.get("task.name", default))
    if name not in tasks:
        mistakes.append(f"{written['task.name']}: no such task{nearest(name, list(tasks))} ({', '.join(tasks)})")
        name, values = default, {setting: value for setting, value in values.items() if not setting.startswith("task.")}
    task_class = resolve_name(tasks[name])
    defaults = task_class.run_defaults(dict(flatten({key: read_value(value) for key, value in values.items()})))
    config_class = Config[task_class]  # type: ignore[valid-type]
    if "help" in values:
        say(*USAGE.splitlines(), *(f"  {task}" for task in tasks), "", *help_lines(config_class, defaults))
        sys.exit(0)
    values = defaults | values | {"task.name": name, "run_name": values.get("run_name") or name}
    return validate(config_class, values, written, mistakes)


@as_user_error("not the settings of a run: ", (KeyError, TypeError, ValidationError))
def config_from(saved: dict[str, Any], tasks: dict[str, str]) -> Config[Any]:
    """Return the settings saved in a checkpoint or config.yaml, with a Task. `tasks` is as for `read_config`.

    Raises:
        UserError: these are not the settings of a run, or of another version.
    """
    path = tasks[saved["task"]["name"]]
    task_class = resolve_name(vars(resolve_name(path)).get("task_class", path))
    return Config[task_class].model_validate(saved)  # type: ignore[valid-type]
