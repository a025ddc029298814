"""Check that what requirements.txt and pyproject.toml ask for is installed, before any library is imported.

Python 3.8 can still run this file, to be told which version is needed.
"""

from __future__ import annotations

import os
import re
import shlex
import sys
from importlib import import_module, metadata
from pathlib import Path
from typing import Any, NoReturn

PROJECT = Path(__file__).parents[1]


def missing_requirements(extra: str = "") -> list[str]:
    """Return a line about everything that is missing or else one for each library of the wrong version, by the bounds
    in requirements.txt or those of an extra in pyproject.toml, such as `text`."""
    activate = PROJECT / ".venv/bin/activate"
    pip = f"{shlex.quote(sys.executable)} -m pip install -e '{PROJECT}{f'[{extra}]' if extra else ''}'"
    remedy = f"run `make setup` or, in an environment of your own, {pip}"
    if activate.exists() and not activate.parent.samefile(os.path.dirname(sys.executable)):
        remedy = f"run `. {shlex.quote(os.path.relpath(activate))}` first, as this is {sys.executable}"
    if sys.version_info < (3, 11):  # noqa: UP036  # older ones get here
        return [f"Python 3.11 or newer is needed, and this is {sys.version.split()[0]}: {remedy}"]

    file = PROJECT / ("pyproject.toml" if extra else "requirements.txt")
    if not file.exists():  # a copy with its own way of installing
        return []
    text = file.read_text(encoding="utf-8")
    if extra:
        text = "\n".join(import_module("tomllib").loads(text)["project"]["optional-dependencies"][extra])
    required = re.findall(r"(?m)^((\w[\w.-]*)[^#\n]*)", text)
    missing = [name for _, name in required if not any(metadata.distributions(name=name))]
    if missing:
        return [f"not installed: {', '.join(missing)}: {remedy}"]
    parse = import_module("packaging.requirements").Requirement
    return [
        f"{name} {version} is installed, and {line.strip()} is needed: {remedy}"
        for line, name in required
        if not parse(line).specifier.contains(version := metadata.version(name), prereleases=True)
    ]


def explain_missing(kind: type, error: BaseException, traceback: Any) -> None:
    """Print an exception that nobody handles; for a missing module of the project, the line that names it, and exit
    with code 2."""
    name = str(getattr(error, "name", ""))
    if isinstance(error, ModuleNotFoundError) and name.startswith(("src.", "examples.")):
        if process := sys.modules.get("src.distributed.process"):
            process.HAS_FAILED.set()  # so that it ends the launcher without its traceback
        first = [PROJECT / "src/parts.py", PROJECT / "src/tasks/__init__.py"]  # where optional things are listed
        for file in [*first, *sorted(PROJECT.glob("src/**/*.py")), PROJECT / "train.py"]:
            for number, line in enumerate(file.read_text(encoding="utf-8").split("\n"), start=1):
                if re.search(rf"\b{re.escape(name)}\b", line):
                    where = f"{file.relative_to(PROJECT)}: line {number} names {name}, which is not there"
                    fail([f"{where}: delete the line, and its name in a list, or bring the file back"])
    sys.__excepthook__(kind, error, traceback)


def fail(lines: list[str]) -> NoReturn:
    """Exit with code 2; the first process on each machine prints the lines."""
    if os.environ.get("LOCAL_RANK", "0") == "0":
        print("\n".join(lines), file=sys.stderr)
    sys.exit(2)


def require_installed() -> None:
    """Exit with code 2 on Windows, or if something is missing; the first process on each machine says what."""
    if sys.platform == "win32":
        fail(["Windows has neither fork nor Unix signals: install WSL by `wsl --install`, and run this inside it"])
    if lines := missing_requirements():
        fail(lines)
