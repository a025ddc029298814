"""What the checks found: errors compared with their bounds, and the table of them."""

import math
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from itertools import zip_longest
from typing import Any

import torch
from accelerate.utils import gather_object
from torch import Tensor

from src.check.advice import likely_cause

EXACT = 1e-4
"""Largest relative error in fp32. The order of a sum makes 1e-7 to 1e-5; a distribution fault, 1e-2 to 1."""
MOST = 0.5
"""The same in half precision, at most: a sum that was not divided by two processes is off by 1."""
FLOOR = 1e-2
"""Share of the root mean square of all gradients: the rounding of larger ones leaks into those below it."""
Row = dict[str, str]
WIDTHS = {"check": 12, "what": 29, "measured": 42, "bound": 23, "result": 6}
"""Characters of the table's columns."""


def finding(check: str, what: str, measured: str, bound: str = "", is_passed: bool = True, cause: str = "") -> Row:
    """Return a row of the table, of check.json and of W&B; without a bound it is a note, which cannot fail. What a
    failure means is what src/check/advice.py says about `what`, unless its cause is given."""
    result = ("pass" if is_passed else "fail") if bound else "note"
    means = (cause or likely_cause(check, what)) if result == "fail" else ""
    return {"check": check, "what": what, "measured": measured, "bound": bound, "result": result, "means": means}


def finding_alike(check: str, what: str, value: str, bound: str = "the same", is_good: bool = True) -> Row:
    """Return a row that passes if all processes have the same value, and it is a good one. Collective."""
    values = gather(value)
    others = [rank for rank, other in enumerate(values) if other != values[0]]
    measured = f"{values[0]} on all processes"
    if others:
        measured = f"{values[0]}; by process {', '.join(map(str, others))}: {values[others[0]]}"
    return finding(check, what, measured, bound, not others and is_good)


class WorstError:
    """The error that comes closest to its bound, or goes furthest beyond it."""

    def __init__(self, bound: float = EXACT) -> None:
        self.least = bound
        self.worst = 0.0, 0.0, "", bound
        """As a share of its bound; itself; its name; the bound."""

    def add(self, errors: Mapping[str, float], noise: Mapping[str, float] | None = None, factor: float = 1.0) -> None:
        """Add errors by name. Each may be up to `factor` times the noise of half precision, which is given by name and
        for `all`; None or empty in fp32."""
        for name, error in errors.items():
            allowed = min(MOST, factor * max(noise.get(name, 0), noise["all"])) if noise else 0.0
            bound = max(self.least, allowed)
            share = error / bound if math.isfinite(error) else math.inf
            if share > self.worst[0]:
                self.worst = share, error, name, bound

    def finding(self, check: str, what: str) -> Row:
        """Return the worst error of all processes as a row, which passes or fails by this process's own. Collective."""
        _, error, name, bound = max(gather(self.worst), key=lambda worst: worst[0])
        measured = f"{error:.1e} ({name})" if name else "0"
        half = ", by what bf16 does to one model" if bound > self.least else ""
        return finding(check, what, measured, f"{bound:.2g}{half}", self.worst[0] <= 1)


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
    norms = {name: norm([tensor]) for name, tensor in expected.items()}
    differences = {name: norm([tensor - found[name] if name in found else tensor]) for name, tensor in expected.items()}
    total = math.hypot(*norms.values()) + 1e-30
    floor = FLOOR * total / math.sqrt(max(1, sum(tensor.numel() for tensor in expected.values())))
    errors = {n: d / (norms[n] + floor * math.sqrt(expected[n].numel())) for n, d in differences.items()}
    return errors | {"all": math.hypot(*differences.values()) / total}


def table(rows: list[Row]) -> Iterator[str]:
    """Yield the table's lines. What a failure means stands below its row."""
    yield from _lines({name: name for name in WIDTHS})
    yield "  ".join("-" * width for width in WIDTHS.values())
    previous = ""
    for row in rows:
        check = "" if row["check"] == previous else row["check"]
        previous = row["check"]
        yield from _lines(row | {"check": check, "result": row["result"].replace("fail", "FAIL")})
        if row["means"]:
            indent = " " * (WIDTHS["check"] + 2)
            yield from textwrap.wrap(f"-> {row['means']}", 110, initial_indent=indent, subsequent_indent=indent)


def _lines(row: Row) -> Iterator[str]:
    wrapped = [textwrap.wrap(row[name], width) for name, width in WIDTHS.items()]
    for parts in zip_longest(*wrapped, fillvalue=""):
        yield "  ".join(part.ljust(width) for part, width in zip(parts, WIDTHS.values(), strict=True)).rstrip()
