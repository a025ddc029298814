"""Examines one run in this process again and again, each time with another fault planted in its code.

    accelerate launch … tests/check/examine.py OUTPUT.json SETTINGS…

It writes, for each of tests.check.planted.ALONE by name and for the project as it is (""), the rows that failed.
"""

import contextlib
import importlib
import inspect
import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import train
from src.check import CHECKS
from src.check.subject import Subject
from src.checkpoint.folder import run_settings
from src.training.optim import build_optimizers
from src.training.progress import Progress
from tests.check.planted import ALONE, SMALLER, Edit
from tests.launching import PROJECT

EXAMINED = ("Data", "Gradients and Updates", "Accumulation", "Evaluation", "Checkpoint")


@contextlib.contextmanager
def planted(edits: tuple[Edit, ...]) -> Iterator[None]:
    """Give the functions of this process the code of the edited files: whoever has imported one has the edited one."""
    sources = {file: (PROJECT / file).read_text() for file, *_ in edits}
    for file, text, instead in edits:
        assert sources[file].count(text) == 1, f"{file} has changed: {text}"
        sources[file] = sources[file].replace(text, instead)
    kept = {}
    for file, source in sources.items():
        module = importlib.import_module(file.removesuffix(".py").replace("/", "."))
        edited = ModuleType(module.__name__)
        exec(compile(source, file, "exec"), vars(edited))
        there = functions(edited)
        for name, function in functions(module).items():
            kept[function] = function.__code__
            function.__code__ = there[name].__code__
    yield
    for function, code in kept.items():
        function.__code__ = code


def functions(module: ModuleType) -> dict[str, FunctionType]:
    """Return the functions and methods that a module defines, by their qualified names."""
    found: dict[str, FunctionType] = {}
    owners = [of for of in vars(module).values() if inspect.isclass(of) and of.__module__ == module.__name__]
    for owner in (module, *owners):
        for value in vars(owner).values():
            function = inspect.unwrap(value) if callable(value) else None
            if isinstance(function, FunctionType) and function.__module__ == module.__name__:
                found[function.__qualname__] = function
    return found


def main(output: Path, settings: list[str]) -> None:
    run = train.build(run_settings(settings))
    assert run
    weights = {name: tensor.clone() for name, tensor in run.model.state_dict().items()}

    def failures(*arguments: str) -> list[dict[str, str]]:
        config = run_settings([*settings, *arguments])
        run.model.load_state_dict(weights)
        optimizers = build_optimizers(config.optim, run.model)
        examined = replace(run, config=config, optimizers=optimizers, progress=Progress())
        subject = Subject(examined, train.train_step, train.evaluate, train.restore)
        rows = [row for name in EXAMINED for row in CHECKS[name](subject)]
        return [row for row in rows if row["result"] == "fail"]

    found: dict[str, Any] = {"": failures()}
    for fault in ALONE:
        with planted(fault.edits):
            found[fault.name] = failures(*fault.arguments)
    output.write_text(json.dumps(found))


if __name__ == "__main__":
    with planted(SMALLER):
        main(Path(sys.argv[1]), sys.argv[2:])
