"""Compare errors with their bounds, and turn the findings into lines."""

import math
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from accelerate.utils import gather_object
from torch import Tensor

from src.config.settings import read_yaml
from src.tasks.base import Tensors

EXACT = 1e-4
"""Bound for relative errors. The order of a sum causes 1e-7 to 1e-5; a fault in distribution, 1e-2 to 1."""
FLOOR = 1e-2
"""Fraction of the root mean square of all gradients: the rounding of large ones leaks into smaller ones."""
CAUSES: dict[str, str] = read_yaml(Path(__file__).with_name("causes.yaml").read_bytes())
"""What a failure usually means, and how to fix it, by a pattern: see `cause`."""
FOLLOWS = "probably follows from the failure above"
Errors = dict[str, float]
"""Errors by the name of what was compared."""
Row = dict[str, str]
"""A finding: a line in the terminal and an entry in check.json."""


def finding(what: str, measured: str, bound: str, is_right: bool) -> Row:
    """Return a row that passes if `is_right`."""
    return {
        "what": what,
        "measured": measured,
        "bound": bound,
        "result": "pass" if is_right else "FAIL",
        "means": "" if is_right else FOLLOWS,
    }


def cause(rows: list[Row], setup: str) -> str:
    """Return what a failure usually means, and how to fix it: the first entry of CAUSES whose pattern matches these
    rows, the one that failed first and then all of its check, followed by the run's setup."""
    text = "".join(f"{row['result']} {row['what']}: {row['measured']} [{row['bound']}]\n" for row in rows)
    return next(means for pattern, means in CAUSES.items() if re.match(pattern, text + setup))


def none_differ(what: str, differing: Iterable[str], bound: str) -> Row:
    """Return a row that passes if nothing differs, and otherwise names the first three that do."""
    named = [*differing][:3]
    return finding(what, f"differing: {', '.join(named) or 'none'}", bound, not named)


def worst(what: str, errors: Errors, bound: float) -> Row:
    """Return a row that compares the largest error with the bound."""
    name, error = [*errors.items()][np.argmax([*errors.values()])]  # NaN counts as the largest
    return finding(what, f"off by {error:.2g} ({name})", f"at most {bound:g}", error <= bound)


def worst_process(rows: tuple[Row, ...]) -> Row:
    """Return the row of the first process that failed, or of process 0 if none did. Unless all failed, name those that
    did."""
    failed = [rank for rank, row in enumerate(rows) if row["means"]]
    row = rows[failed[0] if failed else 0]
    if 0 < len(failed) < len(rows):
        row["measured"] += f", on process {', '.join(map(str, failed))}"
    return row


def lines(row: Row) -> Iterator[str]:
    """Yield a row as a line and, if it failed, another line with its likely cause."""
    yield f"{row['result']}  {row['check']:10}  {row['what']}: {row['measured']}  [{row['bound']}]"
    if row["means"]:
        yield f"{'->':>17} {row['means']}"


def gather(value: Any) -> list[Any]:
    """Return the values of all processes, by rank, on every process. Collective."""
    return gather_object([value])


def norm(tensors: Iterable[Tensor]) -> float:
    """Return the L2 norm over all tensors."""
    # torch's norm of a million values is off by 5e-5 on a CPU, but its sum is pairwise
    return math.sqrt(sum(tensor.float().square().sum().item() for tensor in tensors))


def relative_error(found: float, expected: float) -> float:
    """Return the relative error, or the absolute one if 0 was expected."""
    return abs(found - expected) / (abs(expected) or 1.0)


def relative_errors(found: Tensors, expected: Tensors, where: str) -> Errors:
    """Return each tensor's relative error by its name and `where`: the L2 norm of the difference over that of the
    expected tensor. Tensors that are missing in `found` count as zeros."""
    num_values = sum(tensor.numel() for tensor in expected.values())
    floor = FLOOR * norm(expected.values()) / math.sqrt(num_values) + 1e-30
    errors = {}
    for name, tensor in expected.items():
        scale = norm([tensor]) + floor * math.sqrt(tensor.numel())
        errors[f"{name}, {where}"] = norm([tensor - found.get(name, 0)]) / scale
    return errors
