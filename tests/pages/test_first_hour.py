"""The first hour: what the project prints and what its pages show can be typed as it is.

In a clone, by a shell that has not activated .venv, with a Python of the system that lacks every library.
"""

import argparse
import contextlib
import importlib.util
import os
import re
import runpy
import shlex
import signal
import subprocess
import sys
import sysconfig
import threading
import tomllib
import venv
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import psutil
import pytest
import yaml
from accelerate.commands.launch import launch_command_parser
from rooms import FILES
from torch.distributed.run import get_args_parser

from src.config.config import read_config
from src.config.errors import UserError
from src.config.settings import read_arguments
from src.tasks import TASKS
from tests.launching import BIN, PROJECT, hear_signals, wait
from tests.pages.test_kit import TARGETS, read

# ------------------------------------------------------------------------------------------------ what is printed
PROGRAMS = "accelerate|hf|pip|python3?|tensorboard|trackio|wandb"
PRINTED = re.compile(rf"(?m)(?:`|to resume: |^  \w+ +)((?:\S*/)?(?:{PROGRAMS}) [^`\n]*)")
"""A command in what a run prints: in backticks, after `to resume: `, or in the closing block."""
INSTEAD = {"wandb sync": "--dry-run", "wandb login": "--help"}
"""What is added to commands that need an account."""
SHORT = "--max_steps=400 --log_every=1 --save_every=1000 --eval_every=1000"


class Shell:
    """A shell in a clone. Its PATH has the system's programs, and HOME is empty."""

    def __init__(self, folder: Path) -> None:
        self.clone = folder / "clone"
        subprocess.run(["git", "clone", "--quiet", PROJECT, self.clone], check=True)
        changed = subprocess.run(["git", "diff", "HEAD"], cwd=PROJECT, capture_output=True, check=True).stdout
        subprocess.run(["git", "apply", "--allow-empty"], cwd=self.clone, input=changed, check=True)
        # as `make setup` leaves it, with this environment's libraries
        venv.create(self.clone / ".venv", symlinks=True)
        own = self.clone / ".venv/bin"
        libraries = sysconfig.get_path("purelib", vars={"base": str(self.clone / ".venv")})
        Path(libraries, "libraries.pth").write_text(sysconfig.get_path("purelib"))
        for name in ("accelerate", "pytest", "wandb"):
            (own / name).write_text(f"#!{own}/python\n" + (BIN / name).read_text().partition("\n")[2])
            (own / name).chmod(0o755)
        (self.clone / ".venv/installed").touch()
        (folder / "system").mkdir()
        for name in ("python", "python3"):
            (folder / "system" / name).write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')
            (folder / "system" / name).chmod(0o755)
        (folder / "home").mkdir()
        self.environment = {"PATH": f"{folder}/system:/usr/bin:/bin", "HOME": str(folder / "home")}
        self.environment |= {"CUDA_VISIBLE_DEVICES": "", "PYTHONUNBUFFERED": "1", "LC_ALL": "C.UTF-8"}

    def types(self, command: str, interrupt: str = "") -> tuple[int, str]:
        """Type a command, and Ctrl-C once this text is there. Return the exit code, and what was printed."""
        file = self.clone.parent / "printed"
        with file.open("w") as printed:
            streams: dict[str, Any] = {"stdout": printed, "stderr": printed, "stdin": subprocess.DEVNULL}
            where: dict[str, Any] = {"cwd": self.clone, "env": self.environment, "start_new_session": True}
            process = subprocess.Popen(command, shell=True, preexec_fn=hear_signals, **streams, **where)
            if interrupt:
                wait(lambda: interrupt in file.read_text() or process.poll() is not None, say=file.read_text)
                os.killpg(process.pid, signal.SIGINT)
            process.wait(300)
            # a launcher may end before the run
            wait(lambda: not any(is_left(other, process.pid) for other in psutil.process_iter()), say=file.read_text)
        return process.returncode, file.read_text()


def is_left(process: psutil.Process, session: int) -> bool:
    """Whether it runs and was started by the command of this session."""
    with contextlib.suppress(psutil.Error, OSError):  # gone meanwhile
        return os.getsid(process.pid) == session and process.status() != psutil.STATUS_ZOMBIE
    return False


@pytest.mark.slow
def test_what_is_printed_in_the_first_hour_works_as_printed(tmp_path: Path) -> None:
    """By `make train`, a stop, a resume and the end. Tried with the bare names of programs: each command fails. Tried
    with another name for each `make train`: the second one starts over."""
    shell, ran = Shell(tmp_path), list[str]()

    def run_all(printed: str) -> None:
        for command in dict.fromkeys(PRINTED.findall(printed)):
            if "accelerate launch" in command or command in ran:
                continue  # the former is run below
            (more,) = [more for kind, more in INSTEAD.items() if f"{kind}" in command] or [""]
            code, output = shell.types(f"{command} {more}")
            assert code == 0, f"{command} {more}\n{output}"
            ran.append(command)

    _, printed = shell.types(f"make train ARGS='{SHORT}'", interrupt="step      3/400")
    stopped = re.search(r"^stopped after step (\d+) by SIGINT; to resume: (.*)$", printed, re.M)
    assert stopped, printed
    run_all(printed)
    _, printed = shell.types(stopped[2], interrupt="/400  loss")
    assert f"after step {stopped[1]}, from runs/digits/" in printed
    stopped = re.search(r"^stopped after step (\d+) by SIGINT", printed, re.M)
    assert stopped, printed

    code, printed = shell.types(f"make train ARGS='{SHORT}'")
    assert code == 0, printed
    assert "runs/digits is not done: resuming it" in printed
    assert f"after step {stopped[1]}, from runs/digits/" in printed
    assert "done in " in printed
    run_all(printed)
    kinds = [" ".join(word.split("/")[-1] for word in command.split()[:2]) for command in ran]
    assert sorted(kinds) == ["python -m", "wandb login", "wandb sync"]
    code, printed = shell.types(f"make train ARGS='{SHORT} --dry-run'")
    assert code == 0, printed
    assert re.search(r"output +runs/digits-2$", printed, re.M)

    # a command of a page: the system's Python says what to do first
    command = "python3 -m src.tools.evaluate runs/digits --output=other.parquet"
    code, printed = shell.types(command)
    (first,) = re.findall(r"not installed: torch, .*: run `([^`]*)` first", printed)
    assert (code, first) == (2, ". .venv/bin/activate")
    code, printed = shell.types(f"{first} && {command}")
    assert code == 0, printed


# --------------------------------------------------------------------------------------------- what the pages show
PAGES = [PROJECT / "README.md", *sorted(PROJECT.glob("docs/**/*.md")), *sorted(PROJECT.glob("plan/*.md"))]
SHELL = ("sh", "bash", "console")
"""Languages of blocks in which each line is a command; elsewhere, those are that begin with a program of PROGRAMS."""
OTHERS = {
    ".", "curl", "git", "hf", "kubectl", "llama-cli", "llama-quantize", "llama-server", "lm-eval", "ollama", "printf",
    "tensorboard", "trackio", "trl", "vllm", "wandb",
}  # fmt: skip
"""Programs of others, whose options are theirs."""
THEIRS = re.compile(r"^python (-m venv|llama\.cpp/)")
"""What is somebody else's that Python runs."""
NOT_HERE = re.compile(r"task\.\w+=\S+: no such file or folder")
"""A mistake in the settings of a page that is none where its reader has the data."""
FOLDERS = "accelerate_configs|benchmarks|configs|docs|examples|launchers|plan|scripts|src|sweeps|tests"


@dataclass
class Parsed(BaseException):
    """Ends a program once it has parsed its arguments."""

    options: argparse.Namespace
    left: list[str]


def commands(page: str) -> Iterator[list[str]]:
    """Yield the words of each command of a page, without those that set variables before it."""
    pieces = re.split(r"(?m)^ *```(\w*).*\n", page)
    blocks = [("", "".join(re.findall(r"(?m)^ {4}(.*\n)", text))) for text in pieces[::4]]
    blocks += [*zip(pieces[1::4], pieces[2::4], strict=True)]
    for language, block in blocks:
        if language not in ("", *SHELL):
            continue
        for line in re.sub(r" *\\\n *", " ", block).splitlines():
            is_command = language in SHELL or re.match(rf"(\$ )?(make|torchrun|sbatch|uv|{PROGRAMS}) ", line)
            if is_command and not line.lstrip().startswith("#"):
                text = re.sub(r"\$\([^)]*\)", "PRINTED", line.strip().removeprefix("$ "))
                for words in split(shlex.split(text, comments=True)):
                    yield [word for i, word in enumerate(words) if i or not re.match(r"[A-Z_]+=", word)]


def split(words: list[str]) -> Iterator[list[str]]:
    """Yield the commands between && and before >."""
    text = "\0".join(words).partition("\0>\0")[0]
    yield from (part.split("\0") for part in text.split("\0&&\0"))


@pytest.mark.parametrize("page", PAGES, ids=[str(page.relative_to(PROJECT)) for page in PAGES])
def test_each_command_of_a_page_is_understood(page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By what would run it: launchers, train.py's settings, our programs' own parsers, the Makefile. Tried with a wrong
    setting, a wrong option of each program, a wrong yaml, a wrong target and a program of another name."""
    monkeypatch.chdir(PROJECT)
    for words in commands(page.read_text()):
        missing = [word for word in words if re.match(f"({FOLDERS})/[^:*]+$", word) and not Path(word).exists()]
        assert not missing, words
        understand(words)


def understand(words: list[str]) -> None:
    """Fail unless the command's program takes these words."""
    program, *rest = words
    if program == "make":
        targets = [word for word in rest if "=" not in word]
        makefiles = "".join(file.read_text() for file in (PROJECT / "Makefile", *PROJECT.glob("*/*.mk")))
        assert {*targets} <= TARGETS, words
        for name in (word.partition("=")[0] for word in rest if "=" in word):
            assert re.search(rf"\$\((value )?{name}\)|\(or \$\({name}\)", makefiles), words
    elif program == "accelerate":
        assert rest.pop(0) == "launch", words
        parsed = launch_command_parser().parse_args(rest)
        sizes = yaml.safe_load(Path(parsed.config_file).read_text())
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("WORLD_SIZE", str(parsed.num_processes or sizes["num_processes"]))
            patch.setenv("PARALLELISM_CONFIG_CP_SIZE", str(parsed.parallelism_config_cp_size or 1))
            patch.setenv("TORCHELASTIC_RUN_ID", "")
            python([*(["-m"] if parsed.module else []), parsed.training_script, *parsed.training_script_args], words)
    elif program == "torchrun":
        parsed = get_args_parser().parse_args(rest)
        python([*(["-m"] if parsed.module else []), parsed.training_script, *parsed.training_script_args], words)
    elif program in ("python", "python3"):
        python(rest, words)
    elif program == "sbatch":
        script = next(i for i, word in enumerate(rest) if not word.startswith("-"))
        assert Path(rest[script]).exists(), words
        settings(rest[script + 1 :], words)
    elif program == "pip":
        extras = tomllib.loads(read("pyproject.toml"))["project"]["optional-dependencies"]
        asked = re.findall(r"^\.\[(.*)\]$", rest[-1])
        assert {name for names in asked for name in names.split(",")} <= extras.keys(), words
    else:
        assert program in OTHERS, words


def python(rest: list[str], words: list[str]) -> None:
    """Fail unless what Python runs is there and takes the words after it."""
    if THEIRS.match(" ".join(["python", *rest])):
        return
    is_module = rest[0] == "-m"
    name, *arguments = rest[is_module:]
    if is_module:
        found = importlib.util.find_spec(name)
        assert found, words
        file = Path(str(found.origin))
        file = file.with_name("__main__.py") if file.name == "__init__.py" else file
    else:
        file = PROJECT / name
        assert file.exists(), words
    if name in ("train.py", "src.check.reference"):
        settings(arguments, words)
    elif name == "examples.optuna_sweep":
        settings(arguments[2:], words)
    elif name == "scripts/rooms.py":
        assert {*arguments} <= FILES.keys(), words
    elif "ArgumentParser" in file.read_text():
        parsed = parse(file, arguments)
        if name == "plan":
            settings(parsed.options.arguments, words)
        elif name == "src.tools.evaluate":
            mistakes: list[str] = []
            values, _ = read_arguments(parsed.left, mistakes)
            assert not mistakes, words
            known = {f"task.{name}" for task in TASKS.values() for name in resolve_name(task).model_fields}
            assert values.keys() <= known, words
        else:
            assert not parsed.left, words
    else:
        assert not arguments or name == "examples.weights", words


def parse(file: Path, arguments: list[str]) -> Parsed:
    """Run a program until it has parsed these arguments."""
    parse_known = argparse.ArgumentParser.parse_known_args

    def parse_and_end(self: Any, *given: Any) -> Any:
        raise Parsed(*parse_known(self, *given))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(argparse.ArgumentParser, "parse_known_args", parse_and_end)
        patch.setattr(signal, "signal", lambda *_: None)  # they are this process's
        patch.setattr("src.distributed.process.HAS_FAILED", threading.Event())
        patch.setattr(sys, "argv", [str(file), *arguments])
        with pytest.raises(Parsed) as parsed:
            runpy.run_path(str(file), run_name="__main__")
    return parsed.value


def settings(arguments: list[str], words: list[str]) -> None:
    """Fail unless train.py takes these settings, where its reader has the files that are only named."""
    try:
        read_config(arguments, TASKS)
    except UserError as error:
        wrong = [line for line in error.args if not NOT_HERE.fullmatch(line)]
        assert not wrong, (words, wrong)
