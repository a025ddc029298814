"""What the examination found: a table for the terminal, check.json, and W&B."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from src.checkpoint.format import write_json

WIDTHS = {"check": 12, "what": 29, "measured": 42, "bound": 23, "result": 6}
"""Characters of the table's columns."""


@dataclass(frozen=True)
class Finding:
    """A row of the table."""

    check: str
    """Which of the ten: Launch, Data, Same start, …"""
    what: str
    measured: str
    bound: str = ""
    """What it was held against; empty: it is a note, that nothing can fail."""
    is_passed: bool = True
    means: str = ""
    """Where it failed: what that usually means, and what to do."""

    @property
    def result(self) -> str:
        """pass, fail, or note."""
        return ("pass" if self.is_passed else "FAIL") if self.bound else "note"


def table(findings: list[Finding]) -> Iterator[str]:
    """Its lines. The meaning of a failure stands below its row."""
    yield from _row({name: name for name in WIDTHS})
    yield "  ".join("-" * width for width in WIDTHS.values())
    before = ""
    for finding in findings:
        cells = {name: getattr(finding, name) for name in WIDTHS}
        yield from _row(cells | {"check": "" if finding.check == before else finding.check})
        before = finding.check
        if not finding.is_passed:
            indent = " " * (WIDTHS["check"] + 2)
            yield from textwrap.wrap(f"-> {finding.means}", 110, initial_indent=indent, subsequent_indent=indent)


def as_dict(findings: list[Finding], about: dict[str, Any]) -> dict[str, Any]:
    """What check.json holds."""
    rows = [asdict(finding) | {"result": finding.result.lower()} for finding in findings]
    for row in rows:
        if row.pop("is_passed"):
            row["means"] = ""
    return {"passed": all(finding.is_passed for finding in findings), "checks": rows, **about}


def write(content: dict[str, Any], folder: Path) -> Path:
    """Returns: check.json in `folder`, which is made where there is none; nothing else in it is touched."""
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "check.json", content)
    return folder / "check.json"


def record(run: Any, content: dict[str, Any]) -> None:
    """Puts the table into a W&B run.

    Args:
        content: of check.json.
    """
    import wandb

    columns: list[str | int] = [*WIDTHS, "means"]
    run.log({"check": wandb.Table(columns=columns, data=[[row[str(c)] for c in columns] for row in content["checks"]])})
    run.summary.update({"check/passed": content["passed"]})


def _row(cells: dict[str, str]) -> Iterator[str]:
    wrapped = [textwrap.wrap(cells[name], width) for name, width in WIDTHS.items()]
    for number in range(max(map(len, wrapped))):
        parts = [lines[number] if number < len(lines) else "" for lines in wrapped]
        yield "  ".join(part.ljust(width) for part, width in zip(parts, WIDTHS.values(), strict=True)).rstrip()
