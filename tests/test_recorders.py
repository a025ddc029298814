"""Whatever happens to what records a run elsewhere, the training goes on, and is told once."""

import time
from collections.abc import Callable

import pytest

from src.tracking import guard
from src.tracking.guard import Guarded, Record, Recorder


class Faulty(Recorder):
    """One of its methods raises, or hangs; `abandon` notes that it was called."""

    title = "X"

    def __init__(self, method: str, fault: Callable[[], None]) -> None:
        self.calls: list[str] = []
        self._method, self._fault = method, fault

    def _called(self, method: str) -> None:
        self.calls.append(method)
        if method == self._method:
            self._fault()

    def start(self) -> None:
        self._called("start")

    def log(self, *_: object) -> None:
        self._called("log")

    def finish(self, summary: Record | None, crash: str | None) -> None:
        self._called("finish")

    def abandon(self) -> None:
        self.calls.append("abandon")


def hang() -> None:
    time.sleep(10_000)


def crash() -> None:
    raise RuntimeError("a bug\nof theirs")


@pytest.mark.parametrize(
    ("method", "fault", "why", "calls"),
    [
        ("start", hang, "it has not answered for 0 seconds", ["start", "abandon"]),
        ("log", hang, "it has not answered for 0 seconds", ["start", "log", "abandon"]),
        ("finish", hang, "it has not answered for 0 seconds", ["start", "log", "log", "finish", "abandon"]),
        ("start", crash, "a bug of theirs", ["start", "abandon"]),
        ("log", crash, "a bug of theirs", ["start", "log", "abandon"]),
        ("finish", crash, "a bug of theirs", ["start", "log", "log", "finish", "abandon"]),
        ("", crash, None, ["start", "log", "log", "finish"]),
    ],
)
def test_one_that_hangs_or_raises_is_dropped(
    monkeypatch: pytest.MonkeyPatch, method: str, fault: Callable[[], None], why: str | None, calls: list[str]
) -> None:
    """Tried without the thread: it waits forever."""
    monkeypatch.setattr(guard, "START_SECONDS", 0.3)
    monkeypatch.setattr(guard, "HANG_SECONDS", 0.3)
    recorder, said, began = Faulty(method, fault), list[str](), time.monotonic()
    guarded = Guarded(recorder, said.append)
    for _ in range(2):
        guarded.tell(recorder.log, {"step": 1}, {})
        time.sleep(0.4)
    guarded.finish(None, None)
    assert time.monotonic() < began + 5
    time.sleep(0.1)
    assert guarded.failure == why
    assert recorder.calls == calls
    warning = f"WARNING: X failed ({why}): the run goes on, recorded in metrics.jsonl"
    assert said == ([warning] if why and method != "start" else [])
