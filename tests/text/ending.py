"""How train.py ends with settings, before it trains. In a process of its own, for libraries that read the environment
when they are imported:

    python -m tests.text.ending JSON    # a list of lists of arguments; prints how each ends, as JSON, a line each
"""

import contextlib
import io
import json
import sys
from typing import Any

from src.checkpoint.folder import run_settings
from src.distributed.process import exit_codes

End = tuple[Any, list[str]]
"""The exit code, 0 where it would train, and what train.py told a user who erred."""


def build(arguments: list[str]) -> tuple[Any, Any, Any, Any]:
    """Return the task, its two datasets and its model, built as train.py does it."""
    task: Any = run_settings(arguments).task
    return task, *task.build_datasets(), task.build_model()


def end_of(arguments: list[str]) -> End:
    code: Any = 0
    with contextlib.redirect_stderr(io.StringIO()) as said:
        try:
            with exit_codes():
                build(arguments)
        except SystemExit as end:
            code = end.code
    start = "train.py: "
    return code, [line.removeprefix(start) for line in said.getvalue().splitlines() if line.startswith(start)]


if __name__ == "__main__":
    for arguments in json.loads(sys.argv[1]):
        print(json.dumps(end_of(arguments)), flush=True)
