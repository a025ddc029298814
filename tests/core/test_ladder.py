"""The house in src: a file imports at its top, from lower floors or its own folder."""

import ast
from collections.abc import Iterator
from pathlib import Path

from tests.launching import PROJECT

FLOORS = {
    "config": 1, "tasks": 2, "distributed": 3, "training": 4, "checkpoint": 5, "tracking": 6, "tools": 7, "check": 7,
    "requirements": 0, "requirements.py": 0, "__init__.py": 8, "parts.py": 8, "start.py": 8,
}  # fmt: skip
BESIDE = {"plan", "benchmarks", "examples", "tests", "scripts"}
"""Programs beside src, which src does not know."""


def imports(file: Path) -> Iterator[tuple[str, str, bool]]:
    """Yield the package and, in src, the folder that each import of the file comes from, and whether it is at the
    file's top."""
    tree = ast.parse(file.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            for name in node.names:
                package, *inner = f"{getattr(node, 'module', name.name)}.{name.name}".split(".")
                yield package, inner[0] if package == "src" else "", node in tree.body


def test_src_imports_at_the_top_and_from_lower_floors_only() -> None:
    src = PROJECT / "src"
    assert {path.name for path in src.iterdir()} - {"__init__.py", "__pycache__"} <= FLOORS.keys()
    for file in src.rglob("*.py"):
        folder = file.relative_to(src).parts[0]
        for package, other, is_at_top in imports(file):
            assert package not in BESIDE, f"{file} imports from {package}, which stands beside src"
            assert is_at_top, f"{file} imports inside a function or a condition"
            assert other in ("", folder) or FLOORS[other] < FLOORS[folder], f"{file} imports from {other}, not below it"
