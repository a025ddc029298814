"""No secret is written, no stranger's text controls a terminal or a shell, and CI takes known code alone."""

import errno
import json
import os
import re
import shlex
import shutil
import sys
import tomllib
from importlib import import_module
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest

from src.checkpoint.export import write_cards
from src.checkpoint.hub import push_to_hub
from src.config.config import config_from
from src.config.errors import RunError, UserError, as_run_error, cause
from src.config.settings import read_yaml, write_yaml
from src.config.terminal import masked, say
from src.distributed.process import exit_codes
from src.tasks import TASKS
from tests.faults.runs import ALL, TINY, relist
from tests.launching import BIN, PROJECT, QUIET, WANDB, Launch, Whole, mistakes, needs, run_command
from train import run_settings

# ------------------------------------------------------------ secrets

MASKED = {
    "https://bob:SECRET@host/train.jsonl": "https://***@host/train.jsonl",
    "https://SECRET@host/train.jsonl": "https://***@host/train.jsonl",
    "https:/bob:SECRET@host/train.jsonl": "https:/***@host/train.jsonl",  # as a Path writes it
    "s3://KEY:SECRET@bucket/runs": "s3://KEY:***@bucket/runs",
    "simplecache::ftp://bob:SECRET@b@host/x": "simplecache::ftp://bob:***@host/x",
    "s3://b/x?X-Amz-Date=1&X-Amz-Signature=SECRET&b=2": "s3://b/x?X-Amz-Date=1&X-Amz-Signature=***&b=2",
    "az://b/x?sv=1&sig=SECRET%2Fb": "az://b/x?sv=1&sig=***",
    **{f"https://h/x?{name}=SECRET": f"https://h/x?{name}=***" for name in (
        "token", "access_token", "key", "api_key", "apikey", "password", "X-Amz-Security-Token", "Signature", "secret",
        "jwt",
    )},
}  # fmt: skip
"""URLs with a secret, and what is shown of them."""
OPEN = (
    "https://host:8080/a@main/b.jsonl?revision=main&max_tokens=5&design=x", "hf://datasets/me/data@main/a.jsonl",
    "abfs://container@account.dfs.core.windows.net/x", "sftp://bob@host:22/x", "gs://bucket/x", "me@home.org: 12:30",
    "see https://h/x for #key=3 and ;pass=2", "what is ?token=1",
)  # fmt: skip
"""Texts without a secret. On Azure, a container stands before the @."""
HOLDS_SECRET = "it has a secret, which the run would write down: keep that in ~/.netrc, fsspec's configuration or the "


def test_only_secrets_in_urls_are_masked() -> None:
    assert {url: masked(f"'{url}' is")[1:-4] for url in MASKED} == MASKED
    for text in (*OPEN, *MASKED.values()):
        assert masked(text) == text
    assert masked("https://a:" * 100_000 + "/" * 100_000 + "://" * 100_000 + "?a" * 100_000)  # in linear time


@pytest.mark.parametrize("setting", ["resume", "output_dir", "run_name", "push_to_hub", "seed", "task.source", "other"])
def test_a_setting_with_a_secret_is_refused_in_one_line_that_hides_it(tmp_path: Path, setting: str) -> None:
    """At any depth, and even if the setting has another mistake."""
    for url, shown in MASKED.items():
        (line,) = [line for line in mistakes(f"--{setting}={url}") if "it has a secret" in line]
        assert line.startswith(f"--{setting}={shown}: {HOLDS_SECRET}")
    (tmp_path / "a.yaml").write_text(f"{setting}: [{{mixed: [{{url: 'https://bob:SECRET@host/x'}}]}}]")
    for argument in (f"--config={tmp_path}/a.yaml", f"--{setting}={{a: [{{b: 'https://h/?token=SECRET'}}]}}"):
        lines = "\n".join(mistakes(argument))
        assert HOLDS_SECRET in lines
        assert "SECRET" not in masked(lines)  # as they are printed


def test_a_refused_secret_is_neither_printed_nor_written(launch: Launch) -> None:
    url = "http://bob:SECRET@127.0.0.1:9/x?token=SECRET"
    run = launch("ddp", f"--push_to_hub={url}", f"--resume={url}", f"--x={url}", "--seed=-1", wandb="offline")
    assert run.exit_code == 2
    assert "SECRET" not in run.stdout + run.stderr
    assert len(run.messages) == len(run.stderr.splitlines()) == 6
    assert not run.folder.exists()


AT_A_SERVER = """
import os
import src.parts
from src.tracking.part import Part

class Server(Part):
    title, where = "own", f"{os.environ['WANDB_BASE_URL']}/runs/1"

src.parts.PARTS.append(Server)
"""
"""Adds a tracker whose server's URL has a password."""


def test_no_secret_is_written_anywhere(launch: Launch) -> None:
    keys = ("WANDB_API_KEY", "HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "MY_PASSWORD")
    urls = ("WANDB_BASE_URL", "HF_ENDPOINT", "HTTPS_PROXY", "HTTP_PROXY")
    secrets: dict[str, Any] = {name: f"sentinel-{name.lower()}-0123456789abcdef0123456789" for name in (*keys, *urls)}
    given = secrets | {name: f"http://bob:{secrets[name]}@127.0.0.1:9" for name in urls}
    run = launch("cpu", *TINY, "--max_steps=4", wandb="offline", before=AT_A_SERVER, **given).succeeded()
    assert "http://***@127.0.0.1:9/runs/1" in run.summary["trackers"].values()
    files = [path for path in run.folder.rglob("*") if path.is_file()]
    assert any(path.suffix == ".wandb" for path in files) == WANDB
    for written in ((run.stdout + run.stderr).encode(), *(path.read_bytes() for path in files)):
        assert not any(secret.encode() in written for secret in secrets.values())


def test_a_secret_of_an_old_run_is_in_no_report_and_no_card(whole: Whole, tmp_path: Path) -> None:
    folder = shutil.copytree(whole("cpu", *ALL).folder, tmp_path / "run")
    settings = read_yaml((folder / "config.yaml").read_bytes()) | {"resume": "https://bob:SECRET@host/x?token=SECRET"}
    (folder / "config.yaml").write_text(write_yaml(settings))
    write_cards(config_from(settings, TASKS), {"": {}}, {"eval/loss": 1.0}, tmp_path)
    pages = [tmp_path / "README.md"]
    if (PROJECT / "src/tracking/report.py").exists():
        pages.append(folder / "report.html")
        import_module("src.tracking.report").write_report([folder], pages[-1])
    for page in pages:
        assert "https://***@host" in page.read_text()
        assert "SECRET" not in page.read_text()


def test_a_secret_in_the_error_of_a_library_is_masked(capsys: pytest.CaptureFixture[str]) -> None:
    """Such as that of a download that was redirected to a signed URL."""
    signed = "403, message='Forbidden', url='https://cdn.host/x?Policy=a&Signature=SECRET&Key-Pair-Id=b'"
    with pytest.raises(SystemExit), exit_codes(), as_run_error("train.jsonl: ", OSError):
        raise OSError(signed)
    assert capsys.readouterr().err == f"train.py: train.jsonl: {signed.replace('SECRET', '***')}\n"
    with pytest.raises(SystemExit), exit_codes():
        raise UserError("resume=https://bob:SECRET@host/x: not a checkpoint")
    assert "SECRET" not in capsys.readouterr().err
    assert "SECRET" not in cause(OSError(signed))


def test_fsspec_reads_netrc_with_the_setting_that_the_page_names(tmp_path: Path) -> None:
    """The refusal of a password says that it belongs there. aiohttp reads ~/.netrc if it trusts the environment."""
    pytest.importorskip("aiohttp")
    (setting,) = re.findall("FSSPEC_HTTPS='(.*)'", (PROJECT / "docs/running.md").read_text())
    read = "import fsspec; print(fsspec.filesystem('https').client_kwargs)"
    done = run_command([sys.executable, "-c", read], tmp_path, FSSPEC_HTTPS=setting)
    assert done.stdout == "{'trust_env': True}\n", done.stderr


# ------------------------------------------------------------ control characters, names, printed commands

EVIL = "\x1b]0;owned\x07\r\ntrain.py: all is well\x0b\x1c\x85\x9b2J\u2028x\u202ey\u2066z\udcff\x7f\x00"
"""Sets a terminal's title, clears it, begins lines that look like ours, and turns the direction of writing."""
CONTROLS = re.compile(r"[^\S\n\t ]|[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]")
PLAIN = "\ttab, ümläut, 日本語, עברית, 👩‍👩‍👧, \u200f, C:\\x1b"


def printed(capfd: pytest.CaptureFixture[str], lines: int = 1) -> str:
    """Return what was printed, after checking that it is this many lines without control characters."""
    captured = capfd.readouterr()
    text = captured.out + captured.err
    assert not CONTROLS.search(text), ascii(text)
    assert text.count("\n") == lines, text
    return text


def test_control_characters_are_shown_rather_than_obeyed(capfd: pytest.CaptureFixture[str]) -> None:
    say(PLAIN, f"a{EVIL}b", "c")
    plain, evil, last, _ = printed(capfd, lines=3).split("\n")
    assert (plain, last) == (PLAIN, "c")
    assert evil.startswith(r"a\x1b]0;owned\x07\r\ntrain.py: all is well\x0b\x1c\x85\x9b2J\u2028x\u202ey\u2066z")


def test_mistakes_in_strangers_files_are_one_line_each(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    evil = EVIL.replace("\udcff", "")  # which no file in UTF-8 has
    (tmp_path / "a.yaml").write_text(json.dumps({f"a{evil}": 1, "seed": evil, "optim": {evil: [evil]}}))
    with pytest.raises(SystemExit), exit_codes():
        run_settings([f"--config={tmp_path}/a.yaml", f"--lr={EVIL}"])
    assert all(line.startswith("train.py: ") for line in printed(capfd, lines=4).splitlines())
    with pytest.raises(SystemExit) as ended, exit_codes():
        raise OSError(errno.ENOSPC, "No space left on device", EVIL)
    assert not CONTROLS.search(str(ended.value.code))
    assert "\n" not in str(ended.value.code)


@needs("src/tools/checkpoints.py")
def test_a_strangers_checkpoint_is_listed_without_control_characters(
    whole: Whole, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Its folder, strategy and metrics have names that would control the terminal."""
    folder = tmp_path / f"a{EVIL.replace(chr(0), '')}b" / "step_00000014"
    shutil.copytree(whole("cpu", *ALL).folder / "checkpoints" / folder.name, folder)
    state = json.loads((folder / "state.json").read_text())
    state["origin"]["strategy"] = EVIL
    state["progress"]["evaluations"]["14"] = {EVIL: 1.0}
    (folder / "state.json").write_text(json.dumps(state))
    relist(folder, "state.json")
    checkpoints = import_module("src.tools.checkpoints")
    assert checkpoints.main(["list", str(folder)]) == 0
    assert r"\x1b]0;owned" in printed(capfd, lines=2)
    (folder / "state.json").write_text("{}")
    assert checkpoints.main(["verify", str(folder)]) == 1
    assert "DAMAGED: " in printed(capfd)


@needs("src/tools/generate.py")
def test_the_words_of_a_model_are_shown_without_control_characters(capfd: pytest.CaptureFixture[str]) -> None:
    printer = import_module("src.tools.generate").Printer(None)
    printer.on_finalized_text(f"{PLAIN}\nx{EVIL}")
    printer.on_finalized_text("y", stream_end=True)
    assert printed(capfd, lines=3).startswith(f"{PLAIN}\nx\\x1b]0;owned")


def test_a_dry_run_shows_an_example_without_control_characters(launch: Launch) -> None:
    first = f"first\n{EVIL}"
    example = f"from src.tasks.mnist import Mnist; Mnist.preview = lambda *_: {first!r}"
    run = launch("cpu", *TINY, "--dry-run", before=example).succeeded()
    assert not CONTROLS.search(run.stdout)
    assert run.stdout.count("\nfirst\n\\x1b]0;owned") == 2


@pytest.mark.parametrize("name", ["group/chat", "a..b", "..a", "日本 👩‍👩‍👧", "$(touch x)", "-x", "a b'c"])
def test_a_run_may_have_any_other_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str) -> None:
    monkeypatch.chdir(tmp_path)
    assert run_settings([f"--run_name={name}"]).folder == Path("runs", name)


@pytest.mark.parametrize("name", ["../elsewhere", "a/../../b", "/etc/x", "a\x1b[2J", "a\u202eb"])
def test_a_name_that_leaves_its_folder_or_controls_a_terminal_is_refused(name: str) -> None:
    (line,) = mistakes(f"--run_name={name}")
    assert "leads out of its folder, or has control characters" in line


AWKWARD = "it's; touch pwned $(touch pwned) `touch pwned`"


def test_what_is_printed_to_be_copied_is_one_word_to_a_shell(launch: Launch, tmp_path: Path) -> None:
    folder = tmp_path / AWKWARD / "run"
    launch("cpu", *TINY, "--max_steps=2", folder=folder).succeeded()
    newest = folder / "checkpoints/step_00000002"
    state = json.loads((newest / "state.json").read_text())
    (newest / "state.json").write_text(json.dumps(state | {"run_id": "$(touch pwned)"}))  # as a stranger may
    relist(newest, "state.json")
    more = ("--wandb.model=no",) if WANDB else ()  # as artifacts cannot have that name
    logged: dict[str, Any] = {"wandb": "offline", "WANDB_SAVE_CODE": "false"}
    run = launch("cpu", *TINY, "--max_steps=4", *more, folder=folder, **logged).succeeded()
    commands = {
        name: shlex.split(text) for name, text in re.findall("(?m)^  (model|evaluate|upload) +(.*)", run.stdout)
    }
    assert commands["model"] == [f"{folder}/model"]
    assert commands.get("evaluate", [str(folder)])[-1] == str(folder)
    upload = f"{folder}/wandb/offline-run-*-$(touch pwned)"
    assert commands.get("upload", [upload])[-1] == upload


def test_a_failed_upload_names_a_command_that_a_shell_takes_as_it_is(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")  # where nobody listens
    monkeypatch.setenv("HF_TOKEN", "dummy")
    config = run_settings(["--push_to_hub=me/mine", f"--output_dir={tmp_path}/{AWKWARD}", *QUIET])
    (part := config.folder / "model" / AWKWARD).mkdir(parents=True)
    (part / "README.md").touch()
    with pytest.raises(RunError) as error:
        push_to_hub(config)
    (command,) = re.findall("upload its model with `(.*)`: ", str(error.value))
    words = ["hf", "upload", "me/mine", f"{config.folder}/model", "--private", f"--exclude={AWKWARD}/*"]
    assert shlex.split(command) == words


@needs("launchers/slurm.sbatch")
def test_slurm_sbatch_takes_the_runs_folder_and_nothing_that_is_printed(tmp_path: Path) -> None:
    """Not even what the task's file prints. Asked for --help, it prints that and starts nothing."""
    (tmp_path / "bin").mkdir()
    for name in ("srun", "scontrol", "squeue"):
        (tmp_path / "bin" / name).write_text('#!/bin/bash\necho "STATUS=$STATUS" >&2\n')
        (tmp_path / "bin" / name).chmod(0o755)
    slurm: dict[str, Any] = {"PATH": f"{tmp_path}/bin:{BIN}:{os.environ['PATH']}"}
    command = ["bash", "launchers/slurm.sbatch", f"--run_name={AWKWARD}", *QUIET]
    asked = run_command([*command, "--help"], tmp_path, **slurm)
    assert (asked.exit_code, asked.stderr) == (0, "")
    assert "  --run_name=" in asked.stdout
    slurm |= {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "a", "PYTHONPATH": str(tmp_path)}
    wrong = run_command([*command, "--bad=1"], tmp_path, **slurm)
    assert (wrong.exit_code, wrong.stderr) == (2, "slurm.sbatch: --bad=1: unknown setting\n")
    (tmp_path / "sitecustomize.py").write_text("print('; touch pwned')")
    done = run_command(command, tmp_path, **slurm)
    assert done.stderr.splitlines()[-1] == f"STATUS=runs/{AWKWARD}/status.json"


# ------------------------------------------------------------ supply chain


@pytest.mark.parametrize("file", sorted((PROJECT / ".github/workflows").iterdir()), ids=lambda file: file.name)
def test_a_workflow_runs_actions_of_known_commits_without_rights(file: Path) -> None:
    """A tag can be moved to other code, as that of tj-actions/changed-files was in 2025."""
    text = file.read_text()
    actions = re.findall(r"uses: (.*)", text)
    assert actions
    assert all(re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+", action) for action in actions)
    assert text.count("persist-credentials: false") == text.count("actions/checkout@")
    assert "\npermissions:\n  contents: read\n" in text
    assert "pull_request_target" not in text


def test_the_image_and_locked_packages_are_pinned_and_raised() -> None:
    """By a digest and by hashes; Dependabot raises them."""
    images = re.findall(r"(?m)^FROM (\S+)", (PROJECT / "Dockerfile").read_text())
    assert re.fullmatch(r"python:3\.\d+-slim@sha256:[0-9a-f]{64}", images[0])
    assert images[1:] == ["base"]
    packages = tomllib.loads((PROJECT / "uv.lock").read_text())["package"]
    files = [file for package in packages for file in (*package.get("wheels", ()), package.get("sdist")) if file]
    assert len(files) > 1000
    assert all(file["hash"].startswith("sha256:") for file in files)
    assert "run: uv sync --locked" in (PROJECT / ".github/workflows/versions.yml").read_text()
    raised = re.findall(r"package-ecosystem: ([\w-]+)", (PROJECT / ".github/dependabot.yml").read_text())
    assert sorted(raised) == ["docker", "github-actions", "pip", "uv"]


def test_no_secret_gets_into_the_image() -> None:
    ignored = (PROJECT / ".dockerignore").read_text().split()
    assert {"**/.env*", "**/.netrc", "**/*.pem", "**/*.key", "**/.ssh"} <= {*ignored}
