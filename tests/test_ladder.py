"""The house in src: a file imports from lower floors or its own folder, at its top."""

import ast
from collections.abc import Iterator
from pathlib import Path

from tests.launching import PROJECT

FLOORS = {
    "config": 1, "tasks": 2, "distributed": 3, "training": 4, "checkpoint": 5, "tracking": 6, "tools": 7, "check": 7,
    "requirements": 0, "requirements.py": 0, "__init__.py": 8, "parts.py": 8, "start.py": 8,
}  # fmt: skip
"""Those that are there in every copy: the others are rooms."""


def arrows(file: Path) -> Iterator[tuple[str, bool]]:
    """Yield the folder of src that each import of the file comes from, and whether it is at the file's top."""
    tree = ast.parse(file.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            for name in node.names:
                package, *inner = f"{getattr(node, 'module', name.name)}.{name.name}".split(".")
                yield inner[0] if package == "src" else "", node in tree.body


def test_no_import_leads_up_or_hides_in_a_function() -> None:
    """Tried in src/config/errors.py with `from src.training.score import score`, and with an import in a function."""
    src = PROJECT / "src"
    assert {path.name for path in src.iterdir()} - {"__init__.py", "__pycache__"} <= FLOORS.keys()
    for file in src.rglob("*.py"):
        folder = file.relative_to(src).parts[0]
        for other, is_at_top in arrows(file):
            assert is_at_top, f"{file} imports inside a function or a condition"
            assert other in ("", folder) or FLOORS[other] < FLOORS[folder], f"{file} imports from {other}, not below it"
