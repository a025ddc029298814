"""Whatever happens to what records a run elsewhere, the training goes on, and is told once."""

import time
from typing import Any
from unittest.mock import Mock

import pytest

from src.tracking import guard
from src.tracking.guard import Guarded, Risky
from tests.faults.runs import curve
from tests.launching import Run

crash = RuntimeError("a bug\nof theirs")


def numbers(run: Run) -> list[dict[str, Any]]:
    """Its records without times and tables: what every tracker has to have."""
    return [{n: v for n, v in record.items() if not isinstance(v, list)} for record in curve(run)]


def hang(*_: object) -> None:
    time.sleep(10_000)


@pytest.mark.parametrize(
    ("method", "fault", "why", "calls"),
    [
        ("start", hang, "no answer for 0 seconds", "start abandon"),
        ("log", hang, "no answer for 0 seconds", "start log abandon"),
        ("end", hang, "no answer for 0 seconds", "start log log end abandon"),
        ("start", crash, "a bug of theirs", "start abandon"),
        ("end", crash, "a bug of theirs", "start log log end abandon"),
        ("end", None, None, "start log log end"),
    ],
)
def test_one_that_hangs_or_raises_is_dropped(
    monkeypatch: pytest.MonkeyPatch, method: str, fault: Any, why: str | None, calls: str
) -> None:
    """Tried without the thread: it waits forever."""
    monkeypatch.setattr(guard, "START_SECONDS", 0.3)
    monkeypatch.setattr(guard, "HANG_SECONDS", 0.3)
    recorder, said, began = Mock(spec=Risky, title="X"), list[str](), time.monotonic()
    getattr(recorder, method).side_effect = fault
    monkeypatch.setattr(guard, "say", said.append)
    guarded = Guarded(recorder)
    guarded.start()
    for _ in range(2):
        guarded.log({"step": 1}, {})
        time.sleep(0.4 if method == "log" else 0)
    guarded.end(None, None)
    assert time.monotonic() < began + 5
    time.sleep(0.1)
    assert guarded.failure == why
    assert " ".join(name for name, _, _ in recorder.method_calls) == calls
    warning = f"WARNING: X failed ({why}); training continues, logged in metrics.jsonl"
    assert said == ([warning] if why and method != "start" else [])
