"""What the checks find: errors compared with their bounds, and the line for each."""

import math
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
from accelerate.utils import gather_object
from torch import Tensor

from src.tasks.base import Tensors

EXACT = 1e-4
"""Largest relative error. The order of a sum makes 1e-7 to 1e-5; a distribution fault, 1e-2 to 1."""
FLOOR = 1e-2
"""Share of the root mean square of all gradients: rounding of the larger ones leaks into those below it."""
Errors = dict[str, float]
"""Errors by the names of what was compared."""
Row = dict[str, str]
"""A line of the terminal, of check.json and of W&B."""


def finding(what: str, measured: str, bound: str, is_right: bool, cause: str) -> Row:
    """Return a row that passes if `is_right`. `cause` tells what a failure usually means, and what to do about it."""
    result, means = ("pass", "") if is_right else ("FAIL", cause)
    return {"what": what, "measured": measured, "bound": bound, "result": result, "means": means}


def none_differ(what: str, differing: Iterable[str], bound: str, cause: str) -> Row:
    """Return a row that passes if nothing differs, and names the first of what does."""
    named = [*differing][:3]
    return finding(what, f"differing: {', '.join(named) or 'none'}", bound, not named, cause)


def worst(what: str, errors: Errors, bound: float, cause: str) -> Row:
    """Return a row that compares the largest of the errors with their bound."""
    index = int(np.argmax([*errors.values()]))  # NaN counts as the largest
    name, error = [*errors.items()][index]
    return finding(what, f"{error:.1e} ({name})", f"{bound:.2g}", error <= bound, cause)


def worst_process(rows: tuple[Row, ...]) -> Row:
    """Return the row of the first process that failed, or of process 0 if none did. Name the processes that failed,
    unless all did."""
    failed = [rank for rank, row in enumerate(rows) if row["means"]]
    row = rows[failed[0] if failed else 0]
    if 0 < len(failed) < len(rows):
        row["measured"] += f", on process {', '.join(map(str, failed))}"
    return row


def lines(row: Row) -> Iterator[str]:
    """Yield the line for a row and, if it failed, a line that says what that means."""
    yield f"{row['result']}  {row['check']:10}  {row['what']}: {row['measured']}  [{row['bound']}]"
    if row["means"]:
        yield f"      -> {row['means']}"


def gather(value: Any) -> list[Any]:
    """Return each process's value, in the order of their ranks, on all of them. Collective."""
    return gather_object([value])


def norm(tensors: Iterable[Tensor]) -> float:
    """Return the L2 norm over all of them."""
    # torch's norm of a million values is off by 5e-5 on a CPU, but its sum adds in pairs
    return math.sqrt(sum(tensor.float().square().sum().item() for tensor in tensors))


def relative_error(found: float, expected: float) -> float:
    """Return the relative error; the absolute one if 0 was expected."""
    return abs(found - expected) / (abs(expected) or 1.0)


def relative_errors(found: Tensors, expected: Tensors, where: str) -> Errors:
    """Return each tensor's relative error by its name and `where`: the L2 norm of the difference, as a share of the
    expected norm. A tensor that is not in `found` counts as zeros."""
    num_values = sum(tensor.numel() for tensor in expected.values())
    floor = FLOOR * norm(expected.values()) / math.sqrt(num_values) + 1e-30
    errors = {}
    for name, tensor in expected.items():
        scale = norm([tensor]) + floor * math.sqrt(tensor.numel())
        errors[f"{name}, {where}"] = norm([tensor - found.get(name, 0)]) / scale
    return errors
