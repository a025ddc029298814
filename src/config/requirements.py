"""Check that what requirements.txt and pyproject.toml ask for is installed, before any library is imported.

Python 3.8 can still run this file, to be told which version is needed.
"""

from __future__ import annotations

import importlib.metadata
import os
import re
import shlex
import sys
from importlib import import_module
from pathlib import Path

PROJECT = Path(__file__).parents[2]


def remedy(extra: str = "") -> str:
    """Return what to do so that the project's libraries, or those of an extra in pyproject.toml, are there."""
    activate = PROJECT / ".venv/bin/activate"
    if activate.exists() and not activate.parent.samefile(os.path.dirname(sys.executable)):
        return f"run `. {shlex.quote(os.path.relpath(activate))}` first, as this is {sys.executable}"
    pip = f"{shlex.quote(sys.executable)} -m pip install -e '{PROJECT}{f'[{extra}]' if extra else ''}'"
    return f"run `make setup` or, in an environment of your own, {pip}"


def missing_requirements(extra: str = "") -> list[str]:
    """Return one line about everything that is missing or else one for each library of the wrong version, by the bounds
    in requirements.txt or those of an extra in pyproject.toml, such as `text`."""
    if sys.version_info < (3, 11):  # noqa: UP036  # older ones get here
        return [f"Python 3.11 or newer is needed, and this is {sys.version.split()[0]}: {remedy()}"]
    file = PROJECT / ("pyproject.toml" if extra else "requirements.txt")
    if not file.exists():  # a copy with its own way of installing
        return []
    text = file.read_bytes().decode()
    if extra:
        text = "\n".join(import_module("tomllib").loads(text)["project"]["optional-dependencies"][extra])
    missing = [one for one in re.findall(r"(?m)^[\w.-]+", text) if not any(importlib.metadata.distributions(name=one))]
    if missing:
        return [f"not installed: {', '.join(missing)}: {remedy(extra)}"]
    return [
        f"{one.name} {version} is installed, and {one} is needed: {remedy(extra)}"
        for one in map(import_module("packaging.requirements").Requirement, re.findall(r"(?m)^\w[^#\n]*", text))
        if not one.specifier.contains(version := importlib.metadata.version(one.name), prereleases=True)
    ]


def require_installed() -> None:
    """Exit with code 2 if something is missing; the first process on each machine says what."""
    if lines := missing_requirements():
        if os.environ.get("LOCAL_RANK", "0") == "0":
            print("\n".join(lines), file=sys.stderr)
        sys.exit(2)
