"""Errors for users: a UserError is the user's mistake, a RunError an environment failure."""

import contextlib
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from textwrap import shorten

from src.config.terminal import masked


class UserError(ValueError):
    """Mistakes in settings or data, each an argument. They are printed without a traceback, one per line; exit code 2.

    Any other exception keeps its traceback.
    """

    def __str__(self) -> str:
        return "\n".join(self.args)


class RunError(Exception):
    """An environment failure (disk, network, data). It is printed in one line without a traceback; exit code 1."""


def raise_if_any(mistakes: Iterable[str]) -> None:
    """Raise a UserError with these lines, if there are any."""
    if lines := [*mistakes]:
        raise UserError(*lines)


def cause(error: BaseException) -> str:
    """Return the error's message in one line, without secrets, or the name of its type if it has none."""
    return masked(" ".join(str(error).split())) or type(error).__name__


def listed(names: Iterable[str]) -> str:
    """Return as many names as fit into 200 characters, for a message."""
    return shorten(", ".join(names), 200, placeholder=" …")


@contextlib.contextmanager
def reraised_as(
    raises: type[Exception], says: str, kinds: type[Exception] | tuple[type[Exception], ...] = Exception
) -> Iterator[None]:
    """Turn a library's errors of these kinds into one line that begins with `says`."""
    try:
        yield
    except kinds as error:
        raise raises(f"{says}{cause(error)}") from error


as_user_error = partial(reraised_as, UserError)
as_run_error = partial(reraised_as, RunError)


@contextlib.contextmanager
def naming(file: Path) -> Iterator[None]:
    """Add the file's name to OSErrors that lack one, such as those of writing to an open file."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(file)
        raise
