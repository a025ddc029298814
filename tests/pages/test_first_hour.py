"""The first hour: commands that a run prints, and those that the pages show, work as they stand there."""

import argparse
import importlib.util
import re
import runpy
import shlex
import signal
import subprocess
import sys
import threading
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import pytest
import yaml
from accelerate.commands.launch import launch_command_parser
from torch.distributed.run import get_args_parser

from src.config.config import read_config
from src.config.errors import UserError
from src.config.settings import read_arguments
from src.tasks import TASKS
from tests.launching import PROJECT, Launch, clean_environment

PROGRAMS = "accelerate|hf|pip|python3?|tensorboard|trackio|wandb"
PRINTED = re.compile(rf"(?m)(?:`|to resume: |^  \w+ +)((?:\S*/)?(?:{PROGRAMS}) [^`\n]*)")
"""A command in what a run prints: in backticks, after `to resume: `, or in the closing block."""
INSTEAD = {"wandb sync": "--dry-run", "wandb login": "--help"}
"""Arguments for commands that need an account."""


@pytest.mark.slow
def test_each_command_that_a_run_prints_works_as_printed(launch: Launch, tmp_path: Path) -> None:
    """In a shell that has not activated .venv, after a stop and after the end."""
    arguments = ("--max_steps=8", "--save_every=100")
    environment = {**clean_environment(HOME=str(tmp_path)), "PATH": "/usr/bin:/bin"}
    kinds = set()
    for more in ("--max_hours=1e-9", "--max_hours=1"):
        run = launch(
            "cpu", *arguments, more, folder=tmp_path / "run", real=True, wandb="offline", PATH=environment["PATH"]
        )
        for command in dict.fromkeys(PRINTED.findall(run.succeeded().stdout)):
            extra = [arguments for program, arguments in INSTEAD.items() if program in command]
            typed = " ".join([command, *extra])
            done = subprocess.run(typed, shell=True, cwd=PROJECT, env=environment, capture_output=True, text=True)
            assert done.returncode == 0, f"{typed}\n{done.stdout}{done.stderr}"
            kinds.add(re.sub(r"\S*/", "", command).split()[0] + " " + command.split()[1])
    assert {"accelerate launch", "python -m", "wandb sync"} <= kinds


# --------------------------------------------------------------------------------------------- commands of the pages
PAGES = [PROJECT / "README.md", *sorted(PROJECT.glob("docs/**/*.md")), *sorted(PROJECT.glob("plan/*.md"))]
SHELL = ("sh", "bash", "console")
"""Languages of blocks in which each line is a command; in others, only lines that begin with a program are."""
OTHERS = {
    ".", "comet", "curl", "docker", "git", "hf", "kubectl", "llama-cli", "llama-quantize", "llama-server", "lm-eval",
    "mlflow", "ollama", "printf", "sky", "tensorboard", "trackio", "trl", "vllm", "wandb",
}  # fmt: skip
"""Programs whose options are not ours."""
NOT_OURS = re.compile(r"-m venv|llama\.cpp/")
"""Arguments of `python` that are not ours."""
NOT_HERE = re.compile(r"task\.\w+=\S+: no such file or folder")
"""A mistake where the page's reader would have the data."""
FOLDERS = "accelerate_configs|benchmarks|configs|docs|examples|launchers|plan|scripts|src|sweeps|tests"


@dataclass
class Parsed(BaseException):
    """Ends a program once it has parsed its arguments."""

    options: argparse.Namespace
    unknown: list[str]


def commands(page: str) -> Iterator[list[str]]:
    """Yield the words of each command of a page, without variables set before it and anything after `>`."""
    pieces = re.split(r"(?m)^ *```(\w*).*\n", page)
    blocks = [("", "".join(re.findall(r"(?m)^ {4}(.*\n)", text))) for text in pieces[::4]]
    blocks += zip(pieces[1::4], pieces[2::4], strict=True)
    for language, block in blocks:
        for line in re.sub(r" *\\\n *", " ", block).splitlines() if language in ("", *SHELL) else []:
            is_command = language in SHELL or re.match(rf"(\$ )?(make|torchrun|sbatch|uv|{PROGRAMS}) ", line)
            if is_command and not line.lstrip().startswith("#"):
                text = re.sub(r"\$\([^)]*\)", "PRINTED", line.strip().removeprefix("$ "))
                words = "\0".join(shlex.split(text, comments=True)).partition("\0>\0")[0]
                yield from (re.sub(r"^([A-Z_]+=[^\0]*\0)+", "", part).split("\0") for part in words.split("\0&&\0"))


@pytest.mark.parametrize("page", PAGES, ids=[str(page.relative_to(PROJECT)) for page in PAGES])
def test_each_command_of_a_page_is_understood_by_its_program(page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(PROJECT)
    for words in commands(page.read_text()):
        missing = [word for word in words if re.match(f"({FOLDERS})/[^:*]+$", word) and not Path(word).exists()]
        assert not missing, words
        try:
            understand(*words)
        except (AssertionError, SystemExit, UserError) as error:
            raise AssertionError(f"{shlex.join(words)}: {error}") from error


def understand(program: str, *words: str) -> None:
    """Fail unless the program takes these words."""
    if program == "make":
        makefiles = "".join(file.read_text() for file in (PROJECT / "Makefile", *PROJECT.glob("*/*.mk")))
        for word in words:
            name, equals, _ = word.partition("=")
            used = rf"\$\((value )?{name}\)|\(or \$\({name}\)" if equals else rf"(?m)^{name}:"
            assert re.search(used, makefiles), word
    elif program == "torchrun":
        run_script(get_args_parser().parse_args(words))
    elif program == "accelerate":
        parsed = launch_command_parser().parse_args(words[1:])
        sizes = yaml.safe_load(Path(parsed.config_file).read_text())
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("WORLD_SIZE", str(parsed.num_processes or sizes["num_processes"]))
            patch.setenv("PARALLELISM_CONFIG_CP_SIZE", str(parsed.parallelism_config_cp_size or 1))
            patch.setenv("TORCHELASTIC_RUN_ID", "")
            run_script(parsed)
    elif program in ("python", "python3"):
        python(*words)
    elif program in ("bash", "sbatch"):
        script = next(word for word in words if not word.startswith("-"))
        assert Path(script).exists()
        read_settings(words[words.index(script) + 1 :])
    elif program == "pip":
        extras = tomllib.loads(Path("pyproject.toml").read_text())["project"]["optional-dependencies"]
        asked = re.findall(r"^\.\[(.*)\]$", words[-1])
        assert {name for names in asked for name in names.split(",")} <= extras.keys()
    else:
        assert program in OTHERS


def run_script(parsed: Any) -> None:
    """Fail unless the script that a launcher would start takes its words."""
    python(*["-m"] * bool(parsed.module), parsed.training_script, *parsed.training_script_args)


def python(*words: str) -> None:
    """Fail unless what Python runs is there and takes the words after it."""
    if NOT_OURS.match(" ".join(words)):
        return
    name, *arguments = words[words[0] == "-m" :]
    file = Path(name)
    if words[0] == "-m":
        found = importlib.util.find_spec(name)
        assert found
        file = Path(str(found.origin).replace("__init__.py", "__main__.py"))
    assert file.exists()
    if name in ("train.py", "src.check.reference"):
        read_settings(arguments)
    elif name == "examples.optuna_sweep":
        read_settings(arguments[2:])
    elif "ArgumentParser" in file.read_text():
        parsed = parse(file, arguments)
        if name == "plan":
            read_settings(parsed.options.arguments)
        elif name == "src.tools.evaluate":
            mistakes: list[str] = []
            values, _ = read_arguments(parsed.unknown, mistakes)
            assert not mistakes
            assert values.keys() <= {
                f"task.{name}" for task in TASKS.values() for name in resolve_name(task).model_fields
            }
        else:
            assert not parsed.unknown


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


def read_settings(arguments: Any) -> None:
    """Fail unless train.py takes these settings, apart from files that only the page's reader has."""
    try:
        read_config([*arguments], TASKS)
    except UserError as error:
        wrong = [line for line in error.args if not NOT_HERE.fullmatch(line)]
        assert not wrong
