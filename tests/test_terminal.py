"""What a person sees of a run: in a terminal, in a pipe, on several processes, and with --dry-run."""

import fcntl
import os
import pty
import re
import struct
import sys
import termios
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.launching import PROJECT, WRITES_TO, Launch, needs, run_command

CAN_EVALUATE = (PROJECT / "src/tools/evaluate.py").exists()
SHORT = ("--max_steps=6", "--log_every=2", "--eval_every=3", "--save_every=3", "--task.source=digits")
needs_text = needs("src/tasks/text/causal_lm.py")
Shown = Callable[..., tuple[str, list[str]]]


def screen(output: str) -> list[str]:
    """What is on the screen in the end, scrolled back, if no line was longer than it is wide."""
    lines, row, column = [""], 0, 0
    for part in re.findall(r"\r|\n|\x1b\[A|[^\r\n\x1b]+", output):
        if part == "\r":
            column = 0
        elif part == "\n":
            row += 1
            lines += [""] * (row == len(lines))
        elif part == "\x1b[A":
            row -= 1
        else:
            lines[row] = lines[row][:column].ljust(column) + part + lines[row][column + len(part) :]
            column += len(part)
    return [line.rstrip() for line in lines]


@pytest.fixture
def in_terminal(launch: Launch, tmp_path: Path) -> Shown:
    """in_terminal(80, "ddp", "--max_steps=2"): what is written to a terminal of this width, and the screen in the end.
    The run is runs/x in the test's folder."""

    def run(width: int, config: str, *arguments: str, **more: Any) -> tuple[str, list[str]]:
        ours, theirs = pty.openpty()
        fcntl.ioctl(ours, termios.TIOCSWINSZ, struct.pack("HHHH", 40, width, 0, 0))
        chunks: list[bytes] = []

        def read() -> None:
            while not chunks or not chunks[-1].endswith(b"\0"):
                chunks.append(os.read(ours, 65536))

        reader = threading.Thread(target=read)
        reader.start()
        environment = {"TERM": "xterm", "NO_COLOR": "1", "COLUMNS": "0", **more}  # xdist sets it
        attached = WRITES_TO.format(f"os.open({os.ttyname(theirs)!r}, os.O_RDWR | os.O_NOCTTY)")
        where = {"folder": Path("runs/x"), "cwd": tmp_path, "project": PROJECT}
        code = launch(config, *arguments, before=attached, **where, **environment).exit_code
        os.write(theirs, b"\0")
        reader.join()
        os.close(ours)
        os.close(theirs)
        output = b"".join(chunks)[:-1].decode()
        assert code == 0, output
        return output, screen(output)

    return run


def test_a_terminal_shows_what_goes_on_and_ends_with_what_to_do_next(in_terminal: Shown) -> None:
    """By the main process alone. Tried without a bar around the evaluation, and with bars on all processes."""
    output, shown = in_terminal(120, "ddp", *SHORT)
    commands = [line for line in shown if "python -m" in line]  # whole, to be copied
    assert set(re.findall(r"\x1b\[[\d;?]*[A-Za-z]", output)) <= {"\x1b[A"}
    for expected in (" 50% ", "3/6  eta", "evaluating", "  batches", "saving"):
        assert expected in output, shown
    assert output.count("eta ?  batches") == 2  # evaluations begin, on one process
    (last,) = [line for line in shown if line.startswith("100% █")]
    assert re.search(r"6/6  eta 00:00  loss \d", last)
    assert not [line for line in shown if "evaluating" in line or "batches evaluated" in line]
    assert commands == ["  evaluate   python -m src.tools.evaluate runs/x"][:CAN_EVALUATE]


def test_output_that_nobody_reads_ends_no_run(launch: Launch) -> None:
    """As after `| head -2`. It is said in status.json at once, and in the end. Tried without: BrokenPipeError."""
    without_reader = "import os; reader, writer = os.pipe(); os.close(reader)" + WRITES_TO.format("writer")
    says = {"output": "nobody reads the output any more: see metrics.jsonl"}
    for more, status in (
        ({}, {"status": "done", "step": 6}),
        ({"FAULT": "die", "FAULT_STEP": "3"}, {"status": "unfinished", "checkpoint": None}),
    ):
        run = launch("ddp", *SHORT, before=without_reader, **more)
        assert run.status == status | says
    assert len(run.losses) == 1


KILLED = """
import os, signal
from src.config.terminal import say, tqdm

say("begins")
child = os.fork()
if child == 0:
    with tqdm.external_write_mode():  # in the middle of a line
        os.kill(os.getpid(), signal.SIGKILL)
os.waitpid(child, 0)
say("goes on")
"""


def test_a_process_that_is_killed_while_it_speaks_silences_no_other(tmp_path: Path) -> None:
    """As a worker that loads data. Tried with tqdm's own lock, which they would share: it waits for ever."""
    assert run_command([sys.executable, "-c", KILLED], tmp_path).stdout == "begins\ngoes on\n"


@needs_text
def test_reading_and_tokenizing_are_shown_while_they_last(in_terminal: Shown, tmp_path: Path) -> None:
    """Tried with the bars that datasets draws: they stay on the screen."""
    text = f"To be, or not to be: {os.urandom(8).hex()}.\n"  # what was read once comes from the cache
    (tmp_path / "text.txt").write_text(text * 200)
    model = "{model_type: llama, hidden_size: 8, intermediate_size: 8, num_hidden_layers: 1, num_attention_heads: 1}"
    task = (f"--task.dataset={tmp_path}/text.txt", f"--task.architecture={model}", "--task.sequence_length=32")
    output, shown = in_terminal(80, "cpu", "--task.name=causal_lm", *task, "--max_steps=2", "--global_batch_size=4")
    assert "reading the training data" in output
    assert "tokenizing training data" in output
    assert shown[0] == "causal_lm"
    assert ("  talk       python -m src.tools.generate runs/x" in shown) == (PROJECT / "src/tools/generate.py").exists()


def test_a_dumb_terminal_gets_plain_lines(in_terminal: Shown) -> None:
    """As a pipe does (test_runs.py). Tried without a look at TERM: a bar."""
    output, shown = in_terminal(80, "cpu", *SHORT, TERM="dumb")
    assert not re.search(r"[\x1b%█▁]", output)
    assert len([line for line in shown if re.match("step +[246]/6  loss", line)]) == 3
