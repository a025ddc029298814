"""Printing: whole lines, above progress bars if there is a terminal.

tqdm draws the bars rather than rich: it needs no thread, and a killed run leaves the terminal's cursor visible.
"""

import os
import re
import shlex
import shutil
import sys
from threading import RLock
from typing import Any

from tqdm import tqdm

# tqdm's own lock is shared with forked processes: one that is killed while holding it would never release it
tqdm.set_lock(RLock())

CONTROL = r"[\x00-\x08\n-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
"""What controls a terminal (C0 but for the tab, C1), ends a line, turns its direction, or is no character."""
USER = r"(?i)(https?:/+|:/+[^\s/?#@:]*:)[^\s/?#]+(?=@)|\bhf_[a-z\d]{30,}"
"""A secret before the host of a URL, where other file systems than HTTP may have a name alone; a token of the Hub."""
QUERY = (
    r"(?i)([?&;#][\w.%-]*(?:token|secret|passw(?:or)?d|pass|pwd|sig|sas|signature|credentials?|key|auth|authorization"
    r"|jwt|bearer|session)=)[^\s&;#'\"]*[^\s&;#'\":,.)]"
)
"""A secret in the query of a URL."""
HERE, NAME = os.path.split(sys.executable)
BIN = (
    ""
    # `uv run` sets PATH for its command alone
    if shutil.which(NAME) == sys.executable and "UV" not in os.environ
    else shlex.quote(f"{min(HERE, os.path.relpath(HERE), key=len)}/")
)
"""What to type before the name of a program that is installed for this Python: nothing if a shell finds it."""


def visible(text: str) -> str:
    """Return text as one line that only shows: with \\x1b or \\u202e, for example, in place of those characters."""
    return re.sub(CONTROL, lambda found: ascii(found[0]).strip("'"), text)


def masked(text: str) -> str:
    """Return text with *** in place of secrets in URLs."""
    text = re.sub(USER, r"\1***", text)
    return re.sub(r":/\S+", lambda url: re.sub(QUERY, r"\1***", url[0]), text)


def bar(desc: str = "", leave: bool = False, **options: Any) -> Any:
    """Return a tqdm bar; `options` has its total, None if it is unknown. It is shown by the run's first process, if
    both streams go to a terminal, until it is done or, if `leave`, also after that."""
    layout = "{percentage:3.0f}% {bar:10} {n:,}/{total:,}  eta {remaining}  {desc}"
    if options.get("total", 0) is None:
        layout = "{n:,}  {desc}"
    is_shown = is_first() and sys.stdout.isatty() and sys.stderr.isatty() and os.environ.get("TERM") != "dumb"
    return tqdm(desc=desc, leave=leave, bar_format=layout, disable=not is_shown, dynamic_ncols=True, **options)


def is_first() -> bool:
    """Return whether this is the run's first process."""
    return os.environ.get("RANK", "0") == "0"


def say(*lines: str, file: Any = None) -> None:
    """Print whole lines above the bars, safely from any thread: control characters visible, secrets masked.

    Everything that a run prints goes through here: to `file`, or to the process's real standard output, even while
    sys.stdout is redirected to silence a library. Once it cannot be written, as after `| head -2` or when the
    terminal was closed, drop it.
    """
    file = file or sys.__stdout__
    with tqdm.external_write_mode():
        try:
            # in one call, as other processes print there too
            file.write("".join(f"{visible(masked(line))}\n" for line in lines))
            file.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), file.fileno())
