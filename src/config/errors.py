"""Errors for users: a UserError is a mistake of theirs, a RunError a failure that no code is to blame for."""

import contextlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from textwrap import shorten


class UserError(ValueError):
    """A mistake of the user's, one per line of the message: printed without a traceback, exit code 2.

    Raise it for settings and data. Any other exception keeps its traceback.
    """


class RunError(Exception):
    """A failure that no code is to blame for (disk, network, data): one line without a traceback, exit code 1."""


def refuse(mistakes: Iterable[str]) -> None:
    """Raise a UserError with these lines, if there are any."""
    if lines := [*mistakes]:
        raise UserError("\n".join(lines))


def cause(error: BaseException) -> str:
    """Return what an error says, in one line; its type's name where it says nothing."""
    return " ".join(str(error).split()) or type(error).__name__


def listed(names: Iterable[str]) -> str:
    """Return names for a message, as many of them as fit into 200 characters; what is no Unicode in them as \\xNN."""
    text = ", ".join(names).encode(errors="backslashreplace").decode()
    return shorten(text, 200, placeholder=" …")


@contextlib.contextmanager
def explained(
    says: str, kinds: type[Exception] | tuple[type[Exception], ...] = Exception, raises: type[Exception] = UserError
) -> Iterator[None]:
    """Turn errors of these kinds, as a library raises them, into one line that begins with `says`."""
    try:
        yield
    except kinds as error:
        raise raises(f"{says}{cause(error)}") from error


@contextlib.contextmanager
def naming(file: Path) -> Iterator[None]:
    """Name the file in OSErrors that don't, as those of writing to an open file."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(file)
        raise
