"""What has to be installed, by requirements.txt and pyproject.toml: looked at before any library is imported.

Python 3.8 can read this file, and is told by it which one is needed.
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
    """Return a line about all that is missing or, if nothing is, one for each library whose version is outside its
    bounds: those in requirements.txt, or those of an extra in pyproject.toml, such as `text`."""
    if sys.version_info < (3, 11):  # noqa: UP036  # an older one gets here
        return [f"Python 3.11 or newer is needed, and this is {platform.python_version()}: {sys.executable}"]
    file = PROJECT / ("pyproject.toml" if extra else "requirements.txt")
    if not file.exists():  # a copy that installs in its own way
        return []
    text = file.read_bytes().decode()
    asked = text.splitlines()
    if extra:
        asked = import_module("tomllib").loads(text)["project"]["optional-dependencies"][extra]
    lines = [line for line in (line.partition("#")[0].strip() for line in asked) if line]
    hint = f"{sys.executable} -m pip install -e '{PROJECT}{f'[{extra}]' if extra else ''}'"

    versions: dict[str, str] = {}
    missing = []
    for line in (*lines, "packaging"):
        name = re.split(r"[^\w.-]", line)[0]
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            missing.append(name)
    if missing:
        return [f"not installed: {', '.join(missing)}: {hint}"]
    return [
        f"{one.name} {versions[one.name]} is installed, and {one} is needed: {hint}"
        for one in map(import_module("packaging.requirements").Requirement, lines)
        if not one.specifier.contains(versions[one.name], prereleases=True)
    ]


def require_installed() -> None:
    """End this process with exit code 2 if something is lacking; say what, unless another process of this machine does
    so."""
    lines = lacking()
    if lines:
        if os.environ.get("LOCAL_RANK", "0") == "0":
            print("\n".join(lines), file=sys.stderr)
        sys.exit(2)
