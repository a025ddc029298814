"""What the checks found: errors compared with their bounds, and the table of them."""

import math
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from itertools import zip_longest
from typing import Any

import torch
from accelerate.utils import gather_object
from torch import Tensor

EXACT = 1e-4
"""Largest relative error. The order of a sum makes 1e-7 to 1e-5; a distribution fault, 1e-2 to 1."""
FLOOR = 1e-2
"""Share of the root mean square of all gradients: the rounding of larger ones leaks into those below it."""
Row = dict[str, str]
WIDTHS = {"check": 12, "what": 29, "measured": 42, "bound": 23, "result": 6}
"""Characters of the table's columns."""
INDENT = " " * 14
"""Of what a failure means, below its row."""


def finding(what: str, measured: str, bound: str = "", is_passed: bool = True, cause: str = "", check: str = "") -> Row:
    """Return a row of the table, of check.json and of W&B. Without a bound it is a note, which cannot fail.

    Args:
        cause: what a failure usually means, and what to do.
        check: the check's name; empty: the one in CHECKS.
    """
    row = {"check": check, "what": what, "measured": measured, "bound": bound, "result": "note", "means": ""}
    if bound:
        row["result"] = "pass"
        if not is_passed:
            row |= {"result": "fail", "means": cause}
    return row


def finding_alike(what: str, value: str, cause: str, is_good: bool = True) -> Row:
    """Return a row that passes if all processes have the same value, and it is a good one. Collective."""
    first, *others = gather(value)
    differing = [rank for rank, other in enumerate(others, start=1) if other != first]
    measured = f"{first} on all processes"
    if differing:
        measured = f"{first}; by process {', '.join(map(str, differing))}: {others[differing[0] - 1]}"
    return finding(what, measured, "the same on all", not differing and is_good, cause)


class WorstError:
    """The largest of some errors, which are all compared with one bound."""

    def __init__(self, bound: float = EXACT) -> None:
        self._bound = bound
        self._errors = [(0.0, "")]

    def add(self, errors: Mapping[str, float]) -> None:
        """Add errors by name; one that is not a number counts as infinite."""
        self._errors += [(math.inf if math.isnan(error) else error, name) for name, error in errors.items()]

    def finding(self, what: str, cause: str, check: str = "") -> Row:
        """Return the worst error of all processes as a row, which passes or fails by this process's own. Collective."""
        own, _ = max(self._errors)
        error, name = max(gather(max(self._errors)))
        measured = f"{error:.1e} ({name})" if error else "0"
        return finding(what, measured, f"{self._bound:.2g}", own <= self._bound, cause, check)


def gather(value: Any) -> list[Any]:
    """Return each process's value, in the order of their ranks, on all of them. Collective."""
    return gather_object([value])


def norm(tensors: Iterable[Tensor]) -> float:
    """Return the L2 norm over all of them."""
    on_cpu = (tensor.cpu() if tensor.device.type == "mps" else tensor for tensor in tensors)  # MPS has no float64
    return math.hypot(*(float(torch.linalg.vector_norm(tensor, dtype=torch.float64)) for tensor in on_cpu))


def relative_error(found: float, expected: float) -> float:
    """Return the relative error; the absolute one if 0 was expected."""
    return abs(found - expected) / (abs(expected) or 1.0)


def relative_errors(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> dict[str, float]:
    """Return by name the L2 norm of the difference as a share of that of what was expected; a tensor that is not in
    `found` counts as zeros. `all` is that of all tensors together."""
    num_values = sum(tensor.numel() for tensor in expected.values())
    total = norm(expected.values()) + 1e-30
    floor = FLOOR * total / math.sqrt(max(1, num_values))
    errors, differences = {}, []
    for name, tensor in expected.items():
        difference = norm([tensor - found.get(name, 0)])
        errors[name] = difference / (norm([tensor]) + floor * math.sqrt(tensor.numel()))
        differences.append(difference)
    return errors | {"all": math.hypot(*differences) / total}


def table(rows: list[Row]) -> Iterator[str]:
    """Yield the table's lines. What a failure means stands below its row."""
    yield from _lines({name: name for name in WIDTHS})
    yield "  ".join("-" * width for width in WIDTHS.values())
    previous = ""
    for row in rows:
        shown = row | {"result": row["result"].replace("fail", "FAIL")}
        if row["check"] == previous:
            shown["check"] = ""
        previous = row["check"]
        yield from _lines(shown)
        if row["means"]:
            yield from textwrap.wrap(f"-> {row['means']}", 110, initial_indent=INDENT, subsequent_indent=INDENT)


def _lines(row: Row) -> Iterator[str]:
    wrapped = [textwrap.wrap(row[name], width) for name, width in WIDTHS.items()]
    for parts in zip_longest(*wrapped, fillvalue=""):
        yield "  ".join(part.ljust(width) for part, width in zip(parts, WIDTHS.values(), strict=True)).rstrip()
