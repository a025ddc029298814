"""The house in src: eight folders, one ladder. A file imports from lower floors or its own folder, at its top."""

import ast
from collections.abc import Iterator
from pathlib import Path

from tests.launching import PROJECT

FLOORS = {
    "config": 1, "tasks": 2, "distributed": 3, "training": 4, "checkpoint": 5, "tracking": 6, "tools": 6, "check": 7,
}  # fmt: skip
"""Those that are there in every copy: the others are rooms."""


def arrows(file: Path) -> Iterator[tuple[str, bool]]:
    """Yield the folder of src that each import of the file comes from, and whether it is at the file's top."""
    tree = ast.parse(file.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            modules = [
                f"{node.module}.{name.name}" if node.module == "src" else str(node.module) for name in node.names
            ]
        elif isinstance(node, ast.Import):
            modules = [name.name for name in node.names]
        else:
            continue
        for module in modules:
            yield module.split(".")[1] if module.startswith("src.") else "", node in tree.body


def test_no_import_leads_up_or_hides_in_a_function() -> None:
    """Tried with `from src import tracking` in src/config/errors.py, and with an import in a function."""
    src, wrong = PROJECT / "src", []
    for file in sorted(src.rglob("*.py")):
        folder = file.relative_to(src).parts[0]
        for other, is_at_top in arrows(file):
            if not is_at_top:
                wrong.append(f"{file} imports inside a function or a condition")
            if other and other != folder and FLOORS[other] >= FLOORS[folder]:
                wrong.append(f"{file} imports from {other}, which is not below {folder}")
    assert not wrong
