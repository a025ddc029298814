"""Read the log of a run, whoever wrote it."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from src.checkpoint.files import MAX_BYTES, Json, json_object


def is_number(value: Any) -> bool:
    """Return whether this is a finite number that fits into a float."""
    return isinstance(value, int | float) and abs(value) < 1e308


def read_records(file: Path) -> Iterator[Json]:
    """Yield each record of metrics.jsonl, if the file exists. Skip damaged lines, such as one that a kill cut short."""
    if file.is_file():
        with file.open("rb") as stream:
            lines = iter(lambda: stream.readline(MAX_BYTES), b"")
            yield from (record for record in map(json_object, lines) if is_number(record.get("step")))
