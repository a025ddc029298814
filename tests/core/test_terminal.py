"""The output of a run: in a terminal, in a pipe, of several processes, after an error, and with --dry-run."""

import fcntl
import os
import pty
import re
import shutil
import signal
import struct
import subprocess
import sys
import termios
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import default_collate

from src.config.terminal import BIN
from src.distributed import process
from src.tasks.mnist import Mnist
from src.tracking.summary import MAX_CHARACTERS, shown
from tests.faults.runs import ALL, TINY, contents
from tests.launching import PROJECT, WRITES_TO, Launch, Started, Whole, run_command, slow

CAN_EVALUATE = (PROJECT / "src/tools/evaluate.py").exists()
SHORT = ("--max_steps=6", "--log_every=2", "--eval_every=3", "--save_every=3", "--task.source=digits")
Shown = Callable[..., str]


@pytest.fixture
def in_terminal(launch: Launch, tmp_path: Path) -> Shown:
    """in_terminal(80, "ddp", "--max_steps=2"): what the run runs/x writes to a terminal of this width."""

    def run(width: int, config: str, *arguments: str, **more: Any) -> str:
        ours, theirs = pty.openpty()
        fcntl.ioctl(ours, termios.TIOCSWINSZ, struct.pack("HHHH", 40, width, 0, 0))
        chunks = [b""]

        def read() -> None:
            while not chunks[-1].endswith(b"\0"):
                chunks.append(os.read(ours, 65536))

        reader = threading.Thread(target=read)
        reader.start()
        attached = WRITES_TO.format(f"os.open({os.ttyname(theirs)!r}, os.O_RDWR | os.O_NOCTTY)")
        more = {"TERM": "xterm", "NO_COLOR": "1", "COLUMNS": "0", **more}  # xdist sets COLUMNS
        more |= {"folder": Path("runs/x"), "cwd": tmp_path, "project": PROJECT}
        code = launch(config, *arguments, before=attached, **more).exit_code
        os.write(theirs, b"\0")
        reader.join()
        for descriptor in (ours, theirs):
            os.close(descriptor)
        output = b"".join(chunks)[:-1].decode()
        assert code == 0, output
        return output

    return run


def test_a_terminal_shows_progress_and_ends_with_what_to_do_next(in_terminal: Shown) -> None:
    """Printed by the main process alone."""
    output = in_terminal(120, "ddp", *SHORT)
    assert set(re.findall(r"\x1b\[[\d;?]*[A-Za-z]", output)) <= {"\x1b[A"}  # no colours
    for expected in (" 50% ", "3/6  eta", "evaluating", "  batches", "saving"):
        assert expected in output
    assert output.count("eta ?  batches") == 2  # evaluations begin, on one process
    assert re.search(r"100% █.*6/6  eta 00:00  loss \d", output)
    commands = [line.rstrip() for line in output.split("\n") if "python -m" in line]  # on one line, to be copied
    assert commands == [f"  evaluate   {BIN}python -m src.tools.evaluate runs/x"][:CAN_EVALUATE]


def test_a_dumb_terminal_gets_plain_lines(in_terminal: Shown) -> None:
    output = in_terminal(80, "cpu", *SHORT, TERM="dumb")
    assert not re.search(r"[\x1b█▁]", output)
    assert len(re.findall("^step +[246]/6  loss", output, re.MULTILINE)) == 3


@pytest.mark.parametrize(
    ("fault", "status"),
    [
        ({}, {"status": "done", "step": 6}),
        ({"FAULT": "die", "FAULT_STEP": "3"}, {"status": "unfinished", "checkpoint": None}),
    ],
)
def test_output_that_nobody_reads_ends_no_run(launch: Launch, fault: dict[str, str], status: Any) -> None:
    """As after `| head -2`."""
    without_reader = "import os; reader, writer = os.pipe(); os.close(reader)" + WRITES_TO.format("writer")
    run = launch("ddp", *SHORT, before=without_reader, **fault)
    assert run.status == status
    assert len(run.losses) == (1 if fault else 3)


@pytest.mark.parametrize(
    ("path", "more", "typed"),
    [
        ("/usr/bin", {}, ".venv/bin/"),
        ("{0}/.venv/bin:/usr/bin", {}, ""),
        ("{0}/.venv/bin:/usr/bin", {"UV": "/usr/bin/uv"}, ".venv/bin/"),  # under `uv run`, whose PATH ends with it
        ("{0}/other:{0}/.venv/bin", {}, ".venv/bin/"),  # another python comes first
    ],
)
def test_printed_commands_are_found_by_the_shell_or_named_by_their_path(
    tmp_path: Path, path: str, more: dict[str, str], typed: str
) -> None:
    for folder in (".venv/bin", "other"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "python").symlink_to(sys.executable)
    code = f"import sys; sys.path[:0] = {[str(PROJECT), *sys.path]}; from src.config.terminal import BIN; print(BIN)"
    command = [str(tmp_path / ".venv/bin/python"), "-S", "-c", code]
    env = {"PATH": path.format(tmp_path), **more}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=True)
    assert done.stdout == f"{typed}\n"


KILLED = """
import os, signal
from src.config.terminal import say, tqdm

say("begins")
child = os.fork()
if child == 0:
    with tqdm.external_write_mode():  # while it prints
        os.kill(os.getpid(), signal.SIGKILL)
os.waitpid(child, 0)
say("continues")
"""


def test_a_process_killed_while_it_prints_silences_no_other(tmp_path: Path) -> None:
    """Such as a data worker: they would share tqdm's own lock."""
    assert run_command([sys.executable, "-c", KILLED], tmp_path).stdout == "begins\ncontinues\n"


@pytest.mark.parametrize(
    ("yaml", "arguments", "ends", "last"),
    [
        ("ddp", ("--bad=1",), {}, "train.py: --bad=1: unknown setting"),
        slow("cpu", ("--bad=1",), {}, "train.py: --bad=1: unknown setting"),
        slow("ddp", SHORT, {"FAULT": "raise", "FAULT_RANK": "0", "FAULT_STEP": "3"}, "[rank0]: RuntimeError: the root"),
        slow("cpu", SHORT, {"FAULT": "raise", "FAULT_STEP": "3"}, "RuntimeError: the root cause"),
        slow("ddp", (*SHORT, "--check"), {"FAULT": "nan", "FAULT_STEP": "3"}, "FAILED: Steps; see "),
    ],
)
def test_after_an_error_the_launcher_adds_nothing(
    launch: Launch, yaml: str, arguments: tuple[str, ...], ends: dict[str, str], last: str
) -> None:
    """The run's own words come last."""
    run = launch(yaml, *arguments, real=True, **ends)
    assert run.exit_code != 0
    assert (run.stderr or run.stdout).splitlines()[-1].startswith(last), run.stderr


def test_after_ctrl_c_the_last_line_says_how_to_resume(tmp_path: Path) -> None:
    """A terminal sends SIGINT to the launcher too."""
    with Started("ddp", *SHORT, "--max_steps=9999", folder=tmp_path / "run", real=True) as started:
        started.wait_for("step ")
        os.killpg(started.family[0].pid, signal.SIGINT)
        started.ended()
        stopped = started.result()
    assert stopped.status["reason"] == "SIGINT"
    assert stopped.stdout.splitlines()[-1].startswith("stopped after step ")
    assert "Traceback" not in stopped.stderr


WORDS = ["python", "/bin/accelerate", "launch", "train.py"]


@pytest.mark.parametrize(
    ("environment", "words", "is_shared", "ends"),
    [
        ({}, WORDS, True, [signal.SIGUSR1]),
        ({"GROUP_WORLD_SIZE": "2"}, WORDS, True, []),  # other machines wait for it
        ({"TORCHELASTIC_MAX_RESTARTS": "3"}, WORDS, True, []),  # it starts the run again
        ({}, WORDS, False, []),  # it shows what a process wrote to a file
        ({}, [*WORDS, "--quiet"], True, []),  # it only passes on the exit code
        ({}, ["bash", "-c", "python train.py; accelerate launch train.py"], True, []),
    ],
)
def test_only_a_launcher_that_would_bury_the_error_is_ended(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], words: list[str], is_shared: bool, ends: list[int]
) -> None:
    ended: list[int] = []
    parent = SimpleNamespace(pid=os.getpid(), cmdline=lambda: words, children=list, send_signal=ended.append, wait=id)
    monkeypatch.setattr(process.psutil, "Process", lambda _: parent)
    monkeypatch.setattr(process, "HAS_FAILED", threading.Event())
    monkeypatch.setattr(os.path, "samestat", lambda *_: is_shared)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    process.end_launcher()
    assert ended == []
    process.HAS_FAILED.set()
    process.end_launcher()
    assert ended == ends


ORDER = np.random.default_rng([0, 0]).permutation(1438)
"""Of the examples in the first epoch."""


def test_a_dry_run_says_what_would_happen_and_leaves_nothing(launch: Launch, tmp_path: Path) -> None:
    run = launch("fsdp", *TINY, "--dry-run", folder=tmp_path / "a/b", wandb="offline").succeeded()
    assert contents(tmp_path) == {}
    assert run.stderr == ""
    assert run.stdout.splitlines()[-2].startswith("dry run: 14 of 14 steps to take, evaluating every 8, saving")
    assert ", 2 processes" in run.stdout
    assert "optimizer  name=adamw*, lr=0.003*, schedule=one_cycle*, warmup_steps=0.3*, max_grad_norm=" in run.stdout
    assert f"output     {tmp_path}/a/b" in run.stdout
    task = Mnist(source="digits")
    digits = task.augmented(task.build_datasets()[0], [0, 0, 1])
    first = [f"training example {i}, in step 1:\n{task.preview(digits, i)}" for i in ORDER[:2]]
    assert "\n\n".join(first) in run.stdout


def test_one_step_per_epoch_gets_a_line_and_defaults_are_marked(launch: Launch) -> None:
    run = launch("cpu", "--task.source=digits", "--global_batch_size=1438", "--optim.max_grad_norm=1", "--dry-run")
    assert "one step per epoch: global_batch_size=1,438 takes all training data\n" in run.succeeded().stdout
    assert "warmup_steps=0.3*, max_grad_norm=1.0, weight_decay=0.01*  (* the default)\n" in run.stdout


def test_a_dry_run_loads_the_resume_point_and_touches_nothing(launch: Launch, whole: Whole, tmp_path: Path) -> None:
    """Not even a damaged checkpoint. It refuses what a run would."""
    folder = tmp_path / "run"
    shutil.copytree(whole("ddp", *ALL).folder, folder)
    assert "this run has finished" in launch("cpu", *TINY, "--dry-run", folder=folder).succeeded().stdout
    damaged = folder / "checkpoints" / "step_00000014"
    (damaged / "state.json").write_text("{}")
    (folder / "checkpoints" / "tmp_step_00000009").mkdir()
    before = contents(folder)
    run = launch("fsdp", *TINY, "--max_steps=20", "--dry-run", folder=folder).succeeded()
    assert f"skipped: {damaged}, state.json has " in run.stdout
    assert "after step 12, from" in run.stdout
    assert run.stdout.splitlines()[-2].startswith("dry run: 8 of 20 steps to take")
    assert f"training example {ORDER[12 * 16]}, in step 13:" in run.stdout
    other = launch("cpu", *TINY, "--optim.lr=1", "--dry-run", folder=folder)
    assert other.exit_code == 2
    assert "was saved with different settings: optim.lr" in other.messages[0]
    assert contents(folder) == before


def test_a_dry_run_shows_names_shapes_types_and_values_of_an_example(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Mnist, "collate", lambda _, samples: default_collate(samples))
    example = {"x": np.arange(5) / 8, "at": {"n": 3}, "boxes": torch.zeros(0, 4)}
    preview = '{ "x": "torch.float64 (5,), 0 to 0.5", "at": { "n": 3 }, "boxes": [] }'
    assert " ".join(Mnist().preview([example], 0).split()) == preview


def test_a_long_example_is_cut_with_the_number_of_characters_left_out() -> None:
    text = "x" * 10 + "⟦" + "y" * 9000 + "⟧z"
    assert shown(text) == text[:MAX_CHARACTERS] + f"\n… and {9013 - MAX_CHARACTERS:,} more characters"
