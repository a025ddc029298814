"""SIGTERM, SIGINT and SIGUSR1, which ask a process to save and end: noted from its beginning on."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from types import FrameType

NUMBERS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


class StopSignals:
    """What was asked of this process. A second SIGINT, a second or more after the first, ends it at once."""

    def __init__(self) -> None:
        self.name: str | None = None
        """Of the signal that came last; None: none has."""
        self._answer: Callable[[str], None] | None = None
        self._interrupted = 0.0
        self._process = 0

    def catch(self) -> None:
        """From now on notes them, in place of what they do by themselves."""
        self._process = os.getpid()
        for number in NUMBERS:
            signal.signal(number, self._note)

    def release(self) -> None:
        """From now on they end the process."""
        for number in NUMBERS:
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)

    def answer_by(self, answer: Callable[[str], None] | None) -> None:
        """Calls `answer` with the name of each signal as soon as it comes, and for one that has come already."""
        self._answer = answer
        if answer and self.name:
            answer(self.name)

    def die(self) -> None:
        """As the signal does by itself: there is no other way to end, and nothing to say."""
        self.release()
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        signal.raise_signal(signal.Signals[str(self.name)])

    def _note(self, number: int, _: FrameType | None) -> None:
        name = signal.Signals(number).name
        if name == "SIGINT" and self._interrupted and time.monotonic() > self._interrupted + 1:
            self.name = name
            self.die()
        if name == "SIGINT" and not self._interrupted:  # within a second it is the same one, passed on by the launcher
            self._interrupted = time.monotonic()
        self.name = name
        if self._answer and os.getpid() == self._process:  # not in a process that loads data
            self._answer(name)


STOP_SIGNALS = StopSignals()
"""This process's."""
