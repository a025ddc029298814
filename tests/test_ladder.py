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


def wrong_imports(src: Path) -> list[str]:
    """Return what each import that the ladder forbids is, one line each."""
    lines = []
    for file in sorted(src.rglob("*.py")):
        folder = file.relative_to(src).parts[0]
        for other, is_at_top in arrows(file):
            if not is_at_top:
                lines.append(f"{file.relative_to(src)} imports inside a function or a condition")
            if other and other != folder and FLOORS[other] >= FLOORS[folder]:
                lines.append(f"{file.relative_to(src)} imports from {other}, which is not below {folder}")
    return lines


def test_no_import_leads_up_or_hides_in_a_function() -> None:
    assert wrong_imports(PROJECT / "src") == []


def test_an_arrow_up_is_found(tmp_path: Path) -> None:
    for text in ("from src.check import run_checks", "import src.tools.sweep", "from src import tracking"):
        (tmp_path / "config").mkdir(exist_ok=True)
        (tmp_path / "config/errors.py").write_text(f"{text}\n")
        assert len(wrong_imports(tmp_path)) == 1, text
    (tmp_path / "config/errors.py").write_text("def f():\n    import os\n")
    assert len(wrong_imports(tmp_path)) == 1
