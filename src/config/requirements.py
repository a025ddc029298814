"""Check that what requirements.txt and pyproject.toml ask for is installed, before any library is imported.

Python 3.8 can still run this file, to be told which version is needed.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import sys
from importlib import import_module
from pathlib import Path

PROJECT = Path(__file__).parents[2]


def lacking(extra: str = "") -> list[str]:
    """Return one line about everything that is missing or else one for each library of the wrong version, by the bounds
    in requirements.txt or those of an extra in pyproject.toml, such as `text`."""
    if sys.version_info < (3, 11):  # noqa: UP036  # older ones get here
        return [f"Python 3.11 or newer is needed, and this is {platform.python_version()}: {sys.executable}"]
    file = PROJECT / ("pyproject.toml" if extra else "requirements.txt")
    if not file.exists():  # a copy with its own way of installing
        return []
    text = file.read_bytes().decode()
    asked = text.splitlines()
    if extra:
        asked = import_module("tomllib").loads(text)["project"]["optional-dependencies"][extra]
    lines = [line for line in (line.partition("#")[0].strip() for line in asked) if line]
    hint = f"{sys.executable} -m pip install -e '{PROJECT}{f'[{extra}]' if extra else ''}'"

    missing = []
    for line in (*lines, "packaging"):
        name = re.split(r"[^\w.-]", line)[0]
        try:
            importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            missing.append(name)
    if missing:
        return [f"not installed: {', '.join(missing)}: {hint}"]
    return [
        f"{one.name} {version} is installed, and {one} is needed: {hint}"
        for one in map(import_module("packaging.requirements").Requirement, lines)
        if not one.specifier.contains(version := importlib.metadata.version(one.name), prereleases=True)
    ]


def require_installed() -> None:
    """Exit with code 2 if something is missing; the first process on each machine says what."""
    lines = lacking()
    if lines:
        if os.environ.get("LOCAL_RANK", "0") == "0":
            print("\n".join(lines), file=sys.stderr)
        sys.exit(2)
