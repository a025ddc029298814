"""What a person sees of a run: in a terminal, in a pipe, on several processes, and with --dry-run."""

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
from tests.launching import PROJECT, WRITES_TO, Launch, Started, Whole, needs, run_command, slow

CAN_EVALUATE = (PROJECT / "src/tools/evaluate.py").exists()
SHORT = ("--max_steps=6", "--log_every=2", "--eval_every=3", "--save_every=3", "--task.source=digits")
needs_text = needs("src/tasks/text/causal_lm.py")
Shown = Callable[..., str]


@pytest.fixture
def in_terminal(launch: Launch, tmp_path: Path) -> Shown:
    """in_terminal(80, "ddp", "--max_steps=2"): what the run runs/x writes to a terminal of this width."""

    def run(width: int, config: str, *arguments: str, **more: Any) -> str:
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
        return output

    return run


def test_a_terminal_shows_what_goes_on_and_ends_with_what_to_do_next(in_terminal: Shown) -> None:
    """By the main process alone. Tried without a bar around the evaluation, and with bars on all processes."""
    output = in_terminal(120, "ddp", *SHORT)
    assert set(re.findall(r"\x1b\[[\d;?]*[A-Za-z]", output)) <= {"\x1b[A"}  # no colours
    for expected in (" 50% ", "3/6  eta", "evaluating", "  batches", "saving"):
        assert expected in output
    assert output.count("eta ?  batches") == 2  # evaluations begin, on one process
    assert re.search(r"100% █.*6/6  eta 00:00  loss \d", output)
    commands = [line.rstrip() for line in output.split("\n") if "python -m" in line]  # whole, to be copied
    assert commands == [f"  evaluate   {BIN}python -m src.tools.evaluate runs/x"][:CAN_EVALUATE]


def test_output_that_nobody_reads_ends_no_run(launch: Launch) -> None:
    """As after `| head -2`. Tried without: BrokenPipeError."""
    without_reader = "import os; reader, writer = os.pipe(); os.close(reader)" + WRITES_TO.format("writer")
    for more, status in (
        ({}, {"status": "done", "step": 6}),
        ({"FAULT": "die", "FAULT_STEP": "3"}, {"status": "unfinished", "checkpoint": None}),
    ):
        run = launch("ddp", *SHORT, before=without_reader, **more)
        assert run.status == status
    assert len(run.losses) == 1


@pytest.mark.parametrize(
    ("path", "more", "typed"),
    [
        ("/usr/bin", {}, ".venv/bin/"),
        ("{0}/.venv/bin:/usr/bin", {}, ""),
        ("{0}/.venv/bin:/usr/bin", {"UV": "/usr/bin/uv"}, ".venv/bin/"),  # `uv run`, whose PATH ends with it
        ("{0}/other:{0}/.venv/bin", {}, ".venv/bin/"),  # where another python comes first
    ],
)
def test_printed_commands_are_of_the_environment_that_prints_them(
    tmp_path: Path, path: str, more: dict[str, str], typed: str
) -> None:
    """By their path, except where a shell finds them. Tried without a look at PATH, and without one at UV."""
    for folder in (".venv/bin", "other"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "python").symlink_to(sys.executable)
    code = f"import sys; sys.path[:0] = {[str(PROJECT), *sys.path]}; from src.config.terminal import BIN; print(BIN)"
    command = [str(tmp_path / ".venv/bin/python"), "-S", "-c", code]
    env = {"PATH": path.format(tmp_path), **more}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=True)
    assert done.stdout == f"{typed}\n"


@pytest.mark.parametrize(
    ("variables", "arguments", "says"),
    [
        ({"RANK": "0", "WORLD_SIZE": "4"}, [], "4 processes are starting …\n"),
        ({"RANK": "1", "WORLD_SIZE": "4"}, [], ""),
        ({"RANK": "0", "WORLD_SIZE": "1"}, [], ""),
        ({}, [], ""),
        ({"RANK": "0", "WORLD_SIZE": "4"}, ["--bad=1"], ""),
    ],
)
def test_several_processes_say_that_they_start_before_torch_is_imported(
    tmp_path: Path, variables: dict[str, str], arguments: list[str], says: str
) -> None:
    """Unless there is a mistake to tell. Tried with the line in `main`, after the imports, and on each process."""
    variables = {**variables, "TORCHELASTIC_RUN_ID": "x"} if variables else {}
    code = f"import sys; from src.start import begin; begin({arguments}); assert 'torch' not in sys.modules"
    run = run_command([sys.executable, "-c", code], tmp_path, PROJECT, **variables)
    assert (run.stdout, run.exit_code) == (says, 2 if arguments else 0)


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
    """Not under what the run has said, which is what to read. Tried without `end_launcher`: 11 lines, and 41."""
    run = launch(yaml, *arguments, real=True, **ends)
    assert run.exit_code != 0
    assert (run.stderr or run.stdout).splitlines()[-1].startswith(last), run.stderr


def test_after_ctrl_c_the_last_line_says_how_to_resume(tmp_path: Path) -> None:
    """A terminal sends SIGINT to the launcher, too. Tried without `end_launcher`: 29 lines follow."""
    with Started("ddp", *SHORT, "--max_steps=9999", folder=tmp_path / "run", real=True) as started:
        started.wait_for("step ")
        os.killpg(started.family[0].pid, signal.SIGINT)
        started.ended()
        stopped = started.result()
    assert stopped.status["reason"] == "SIGINT"
    assert stopped.stdout.splitlines()[-1].startswith("stopped after step ")
    assert "Traceback" not in stopped.stderr


def test_a_launcher_that_is_quiet_or_still_needed_is_not_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """It passes on exit code 1, starts the run again, waits for other machines, shows what a process wrote to a file,
    or is none. Tried without each of the conditions."""
    ended: list[int] = []
    words = ["python", "/bin/accelerate", "launch", "train.py"]
    own = {"pid": os.getpid(), "children": list, "send_signal": ended.append, "cmdline": lambda: words, "wait": id}
    monkeypatch.setattr(process.psutil, "Process", lambda _: SimpleNamespace(**own))
    monkeypatch.setattr(process, "HAS_FAILED", threading.Event())
    process.HAS_FAILED.set()
    for name, value in (("GROUP_WORLD_SIZE", "2"), ("TORCHELASTIC_MAX_RESTARTS", "3")):
        with monkeypatch.context() as patched:
            patched.setenv(name, value)
            process.end_launcher()
    with monkeypatch.context() as patched, open(os.devnull) as elsewhere:
        patched.setattr(os, "stat", lambda _: os.fstat(elsewhere.fileno()))
        process.end_launcher()
    for others in ([*words, "--quiet"], ["bash", "-c", "python train.py; accelerate launch train.py"]):
        own["cmdline"] = lambda others=others: others
        process.end_launcher()
    assert ended == []
    own["cmdline"] = lambda: words
    process.end_launcher()
    assert ended == [signal.SIGUSR1]


HANGS = """
import os, sys, time
sys.path.insert(0, os.getcwd())
import train
from src.start import begin
from src.tasks.mnist import Mnist

def loss(*_):
    if os.environ["RANK"] == "1":
        raise RuntimeError("the root cause")
    time.sleep(10_000)

begin(sys.argv[1:])
Mnist.loss = loss
train.main()
"""


@pytest.mark.slow
def test_a_process_that_hangs_does_not_outlive_the_launcher(tmp_path: Path) -> None:
    """Torch's launcher would kill it after this timeout. Tried without: it is left running."""
    (tmp_path / "hangs.py").write_text(HANGS)
    where: dict[str, Any] = {"folder": tmp_path / "run", "script": str(tmp_path / "hangs.py")}
    own = ("--task.source=digits", "--wandb.mode=disabled", f"--output_dir={tmp_path}/run")
    with Started("ddp", *own, real=True, TORCH_ELASTIC_SHUTDOWN_TIMEOUT="2", **where) as started:
        ended = started.ended(seconds=60)
    assert ended.exit_code != 0
    assert ended.stdout.splitlines()[-1].endswith("RuntimeError: the root cause")


@needs_text
def test_reading_and_tokenizing_are_shown_while_they_last(in_terminal: Shown, tmp_path: Path) -> None:
    text = f"To be, or not to be: {os.urandom(8).hex()}.\n"  # what was read once comes from the cache
    (tmp_path / "text.txt").write_text(text * 200)
    model = "{model_type: llama, hidden_size: 8, intermediate_size: 8, num_hidden_layers: 1, num_attention_heads: 1}"
    task = (f"--task.dataset={tmp_path}/text.txt", f"--task.architecture={model}", "--task.sequence_length=32")
    output = in_terminal(80, "cpu", "--task.name=causal_lm", *task, "--max_steps=2", "--global_batch_size=4")
    assert "reading the training data" in output
    assert "tokenizing training data" in output
    talk = f"  talk       {BIN}python -m src.tools.generate runs/x"
    assert (talk in output) == (PROJECT / "src/tools/generate.py").exists()


def test_a_dumb_terminal_gets_plain_lines(in_terminal: Shown) -> None:
    """As a pipe does (test_runs.py). Tried without a look at TERM: a bar."""
    output = in_terminal(80, "cpu", *SHORT, TERM="dumb")
    assert not re.search(r"[\x1b█▁]", output)
    assert len(re.findall("^step +[246]/6  loss", output, re.MULTILINE)) == 3


def order(epoch: int) -> np.ndarray:
    return np.random.default_rng([0, epoch]).permutation(1438)


def digit(task: Mnist, index: int) -> str:
    return task.preview(task.augmented(task.build_datasets()[0], [0, 0, 1]), index)


def test_a_dry_run_of_a_new_run_says_what_would_happen_and_leaves_nothing(launch: Launch, tmp_path: Path) -> None:
    """Tried with the lock, which makes the folders."""
    run = launch("fsdp", *TINY, "--dry-run", folder=tmp_path / "a/b", wandb="offline").succeeded()
    assert contents(tmp_path) == {}
    assert run.stderr == ""
    assert run.stdout.splitlines()[-2].startswith("dry run: 14 of 14 steps to take, evaluating every 8, saving")
    assert ", 2 processes" in run.stdout
    assert "optimizer  name=adamw*, lr=0.003*, schedule=one_cycle*, warmup_steps=0.3*, max_grad_norm=" in run.stdout
    assert f"output     {tmp_path}/a/b" in run.stdout
    task = Mnist(source="digits")
    first = [f"training example {i}, in step 1:\n{digit(task, i)}" for i in order(epoch=0)[:2]]
    assert "\n\n".join(first) in run.stdout


def test_a_batch_that_takes_all_data_gets_a_line(launch: Launch) -> None:
    """Tried with one of 1,437, which leaves an example for another step."""
    run = launch("cpu", "--task.source=digits", "--global_batch_size=1438", "--optim.max_grad_norm=1", "--dry-run")
    assert "one step per epoch: global_batch_size=1,438 takes all training data\n" in run.succeeded().stdout
    assert "warmup_steps=0.3*, max_grad_norm=1.0, weight_decay=0.01*  (* the default)\n" in run.stdout


def test_a_dry_run_loads_the_resume_point_and_touches_nothing(launch: Launch, whole: Whole, tmp_path: Path) -> None:
    """Not even a damaged checkpoint: tried with their removal. It refuses what a run would."""
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
    assert f"training example {order(epoch=0)[12 * 16]}, in step 13:" in run.stdout
    other = launch("cpu", *TINY, "--optim.lr=1", "--dry-run", folder=folder)
    assert other.exit_code == 2
    assert "was saved with different settings: optim.lr" in other.messages[0]
    assert contents(folder) == before


def test_an_example_is_shown_by_its_names_shapes_types_and_values(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tried without the case of no elements: torch refuses to take their minimum."""
    monkeypatch.setattr(Mnist, "collate", lambda _, samples: default_collate(samples))
    example = {"x": np.arange(5) / 8, "at": {"n": 3}, "boxes": torch.zeros(0, 4)}
    shown = '{ "x": "torch.float64 (5,), 0 to 0.5", "at": { "n": 3 }, "boxes": [] }'
    assert " ".join(Mnist().preview([example], 0).split()) == shown


def test_a_long_text_is_cut_with_what_was_left_out() -> None:
    text = "x" * 10 + "⟦" + "y" * 9000 + "⟧z"
    assert shown(text) == text[:MAX_CHARACTERS] + f"\n… and {9013 - MAX_CHARACTERS:,} more characters"
