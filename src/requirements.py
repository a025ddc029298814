"""What has to be installed, by requirements.txt and pyproject.toml: looked at before any library is imported.

Python 3.8 can read this file, and is told by it which one is needed.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import sys
from pathlib import Path

PROJECT = Path(__file__).parents[1]


def lacking(extra: str = "") -> list[str]:
    """Return a line about all that is missing or, if nothing is, one for each library whose version is outside its
    bounds: those in requirements.txt, or those of an extra in pyproject.toml, such as `text`."""
    if sys.version_info < (3, 11):  # noqa: UP036  # an older one gets here
        return [f"Python 3.11 or newer is needed, and this is {platform.python_version()}: {sys.executable}"]
    import tomllib

    if extra:
        project = tomllib.loads((PROJECT / "pyproject.toml").read_text())["project"]
        asked = project["optional-dependencies"][extra]
    else:
        asked = (PROJECT / "requirements.txt").read_text().splitlines()
    lines = list(filter(None, (line.partition("#")[0].strip() for line in asked)))
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
    from packaging.requirements import Requirement

    return [
        f"{asked.name} {versions[asked.name]} is installed, and {asked} is needed: {hint}"
        for asked in map(Requirement, lines)
        if not asked.specifier.contains(versions[asked.name], prereleases=True)
    ]


def require_installed() -> None:
    """End this process with exit code 2 if something is lacking; say what, unless another process of this machine does
    so."""
    lines = lacking()
    if lines:
        if os.environ.get("LOCAL_RANK", "0") == "0":
            print("\n".join(lines), file=sys.stderr)
        sys.exit(2)
