"""Loading a checkpoint executes nothing, whatever lies in it, and no secret gets into what a run writes."""

import ast
import base64
import contextlib
import errno
import fcntl
import functools
import json
import math
import os
import pickle
import random
import re
import shlex
import shutil
import stat
import sys
import threading
import tomllib
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import huggingface_hub
import pytest
import torch
import yaml
from accelerate import Accelerator
from ruamel.yaml.error import YAMLError
from safetensors import safe_open
from safetensors.torch import load_file, save, save_file
from torch.distributed.checkpoint import CheckpointException

from src.checkpoint import files, output_dir, resume
from src.checkpoint.compatibility import read_state
from src.checkpoint.export import replacing, write_cards
from src.checkpoint.hub import push_to_hub
from src.checkpoint.integrity import problems, quarantine
from src.checkpoint.load import config_of, find_model  # room: tools
from src.checkpoint.rng import restore_random_state
from src.checkpoint.tensors import load_tensors
from src.config.config import config_from
from src.config.errors import RunError, UserError, as_run_error, cause
from src.config.groups import Optim
from src.config.settings import read_arguments, read_yaml, write_yaml
from src.config.terminal import masked, say
from src.distributed.process import exit_codes
from src.parts import open_store
from src.tasks import TASKS
from src.tasks.mnist import MnistCnn
from src.tools import checkpoints  # room: tools
from src.tracking import report  # room: report
from src.training.optim import build_optimizers
from src.training.state import ResumePoint
from tests.faults.runs import ALL, TINY, relist
from tests.launching import BIN, PROJECT, QUIET, WANDB, Launch, Tool, Whole, mistakes, needs, run_command
from train import run_settings

HOLDS_SECRET = (
    "it has a secret, which the run would write down: keep that in ~/.netrc, fsspec's configuration or the "
    "environment, as docs/running.md says"
)
FILES = ["shard-00001-model-00001-of-00001.safetensors", "rng_00001.json", "state.json", "manifest.json"]


class Payload:
    """Unpickled, it writes a file."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> tuple:
        return os.system, (f"touch {self.file}",)


@pytest.fixture(scope="module")
def checkpoint(whole: Whole) -> Path:
    return whole("cpu", *ALL).folder / "checkpoints" / "step_00000014"


@pytest.mark.parametrize("is_listed", [False, True], ids=["planted", "with a manifest to match"])
@pytest.mark.parametrize("name", [*FILES, ".metadata"])
def test_a_payload_in_any_file_stays_inert(checkpoint: Path, tmp_path: Path, name: str, is_listed: bool) -> None:
    """However it is read; and it is reported, unless the manifest matches. Tried with pickle.loads: it runs."""
    proof, checkpoint = tmp_path / "executed", shutil.copytree(checkpoint, tmp_path / "step_00000014")
    payload = pickle.dumps(Payload(proof))
    (checkpoint / name).write_bytes(payload)
    if is_listed and name != "manifest.json":
        relist(checkpoint, name)
    else:
        assert any(name in problem for problem in problems(checkpoint))
    for read in (
        lambda: read_state(checkpoint),
        lambda: load_tensors(checkpoint, MnistCnn()),
        lambda: restore_random_state(checkpoint / "rng_00001.json", torch.device("cpu")),
        lambda: list(problems(checkpoint)),
    ):
        with contextlib.suppress(UserError, RunError, CheckpointException):
            read()
    assert not proof.exists()
    pickle.loads(payload)
    assert proof.exists(), "the payload is one"


def test_nothing_in_the_project_unpickles() -> None:
    for path in [PROJECT / "train.py", *(PROJECT / "src").rglob("*.py")]:
        text = path.read_text()
        for word in ("pickle", "torch.load", "weights_only", "allow_pickle", "trust_remote_code=True", "joblib"):
            assert word not in text, f"{path}: {word}"


AT_A_SERVER = """
import os
import src.parts
from src.tracking.part import Part

class Server(Part):
    title, where = "own", f"{os.environ['WANDB_BASE_URL']}/runs/1"

src.parts.PARTS.append(Server)
"""
"""A tracker whose server's URL has a password."""
CALLS = {"from_pretrained": "trust_remote_code=False", "from_config": "trust_remote_code=False", "open": "formats="}
NO_CODE = ("GenerationConfig", "PeftConfig", "PeftModel")
"""Classes of which a model can bring none of its own."""


def test_no_model_brings_its_own_code_and_no_picture_starts_a_program() -> None:
    """Left out, trust_remote_code asks whoever writes to standard input; and Pillow starts Ghostscript."""
    found = 0
    for path in [
        PROJECT / "train.py",
        *(p for part in ("src", "examples", "benchmarks") for p in (PROJECT / part).rglob("*.py")),
    ]:
        for call in ast.walk(ast.parse(path.read_text())):
            if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr in CALLS:
                owner = ast.unparse(call.func.value).rpartition(".")[2]
                if owner not in NO_CODE and (call.func.attr != "open" or owner == "Image"):
                    found += 1
                    words = [ast.unparse(keyword) for keyword in call.keywords]
                    assert any(word.startswith(CALLS[call.func.attr]) for word in words), f"{path}: {ast.unparse(call)}"
    assert found


LAUGHS = "a: &a [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{name}: &{name} [{', '.join([f'*{before}'] * 10)}]\n" for before, name in pairwise("abcdefghi")
)


def test_a_yaml_that_stands_for_gigabytes_is_refused(tmp_path: Path) -> None:
    """Nine lines would be 10^9 values. Tried without: a minute and 6 GB. In a file, and on the command line, where it
    is a text."""
    says = "stands for more than 100,000 values"
    with pytest.raises(YAMLError, match=f"^{says}$"):
        read_yaml(LAUGHS)
    (tmp_path / "a.yaml").write_text(LAUGHS)
    mistakes: list[str] = []
    values, _ = read_arguments([f"--config={tmp_path}/a.yaml", f"--run_name={LAUGHS}"], mistakes)
    assert values == {"run_name": LAUGHS}
    assert mistakes == [f"--config={tmp_path}/a.yaml: cannot be read as yaml, {says}"]


def test_aliases_of_a_config_are_read() -> None:
    text = "a: &a {x: 1, y: [&b 2, *b]}\nc: {<<: *a, x: 3}\nd: [*a, *a]"
    a = {"x": 1, "y": [2, 2]}
    assert read_yaml(text) == {"a": a, "c": {"x": 3, "y": [2, 2]}, "d": [a, a]}
    with pytest.raises(YAMLError, match="^Circular reference detected$"):
        read_yaml("a: &a {b: [*a]}")


def test_no_secret_is_written_anywhere(launch: Launch) -> None:
    names = ("WANDB_API_KEY", "HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "MY_PASSWORD")
    secrets: dict[str, Any] = {name: f"sentinel-{name.lower()}-0123456789abcdef0123456789" for name in names}
    urls = ("WANDB_BASE_URL", "HF_ENDPOINT", "HTTPS_PROXY", "HTTP_PROXY")
    passwords = {name: f"sentinel-{name.lower()}" for name in urls}
    given = secrets | {name: f"http://bob:{password}@127.0.0.1:9" for name, password in passwords.items()}
    run = launch("cpu", *TINY, "--max_steps=4", wandb="offline", before=AT_A_SERVER, **given).succeeded()
    assert "http://***@127.0.0.1:9/runs/1" in run.summary["trackers"].values()
    files = [path for path in run.folder.rglob("*") if path.is_file()]
    assert any(path.suffix == ".wandb" for path in files) == WANDB
    for written in ((run.stdout + run.stderr).encode(), *(path.read_bytes() for path in files)):
        assert not any(secret.encode() in written for secret in (*secrets.values(), *passwords.values()))


# ------------------------------------------------------------ links and locks in shared folders

FOREIGN = "another user's link: remove it"


def made_by_another_user(link: Path, patch: pytest.MonkeyPatch) -> None:
    """Let the link be seen as one of nobody's, which only root could make it."""
    lstat = Path.lstat

    def seen(path: Path) -> os.stat_result:
        found = [*lstat(path)]
        found[stat.ST_UID] = 65534 if path.absolute() == link.absolute() else found[stat.ST_UID]
        return os.stat_result(found)

    patch.setattr(Path, "lstat", seen)


@pytest.mark.parametrize("is_pipe", [False, True], ids=["link", "pipe"])
@pytest.mark.parametrize("name", ["metrics.jsonl", "config.yaml", "summary.json"])
def test_what_is_no_file_in_a_files_place_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, is_pipe: bool
) -> None:
    """Whoever made it: an archive's links are those of who unpacks it. Tried without: the victim's file grows by a log;
    the start hangs."""
    monkeypatch.chdir(tmp_path)
    Path("runs/mnist").mkdir(parents=True)
    Path("bashrc").write_text("precious")
    if is_pipe:
        os.mkfifo(f"runs/mnist/{name}")
    else:
        Path(f"runs/mnist/{name}").symlink_to(tmp_path / "bashrc")
    assert any(f"output_dir=runs/mnist: cannot write to runs/mnist/{name}, " in line for line in mistakes())
    assert Path("bashrc").read_text() == "precious"


@pytest.mark.parametrize("name", [".", "checkpoints", "checkpoints/step_00000008", "model", "wandb", "profile"])
def test_a_folder_is_where_this_user_or_root_has_linked_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Tried without: the run writes into a folder of another user's choice."""
    monkeypatch.chdir(tmp_path)
    Path("disk").mkdir()
    config, link = run_settings([]), Path("runs/mnist", name)
    link.parent.mkdir(parents=True)
    link.symlink_to(tmp_path / "disk")
    assert FOREIGN not in "".join(output_dir.folder_errors(config))
    made_by_another_user(link, monkeypatch)
    assert any(f"cannot write to {link}, {FOREIGN}" in line for line in mistakes())


def test_a_file_is_never_written_through_a_link(tmp_path: Path) -> None:
    """Tried with opening what is there: ~/.bashrc is overwritten."""
    bashrc = tmp_path / "bashrc"
    bashrc.write_text("precious")
    for name in ("config.yaml", "tmp_config.yaml"):
        (tmp_path / name).symlink_to(bashrc)
    files.write_text(tmp_path / "config.yaml", "mine")
    assert bashrc.read_text() == "precious"
    assert not (tmp_path / "config.yaml").is_symlink()
    assert (tmp_path / "config.yaml").read_text() == "mine"


def test_what_is_left_behind_is_deleted_but_not_what_a_link_leads_to(tmp_path: Path) -> None:
    """Tried with rmtree: the link stays, and with it whatever is saved under this name goes elsewhere."""
    (elsewhere := tmp_path / "elsewhere").mkdir()
    (elsewhere / "file").write_text("precious")
    checkpoints = tmp_path / "checkpoints"
    (checkpoints / "tmp_step_00000004" / "inner").mkdir(parents=True)
    (checkpoints / "tmp_file").touch()
    for name, target in (("tmp_step_00000008", elsewhere), ("tmp_state.json", elsewhere / "file"), ("tmp_x", "none")):
        (checkpoints / name).symlink_to(target)
    files.remove_incomplete(checkpoints)
    assert [*checkpoints.iterdir()] == []
    assert (elsewhere / "file").read_text() == "precious"


def test_links_planted_during_a_run_receive_nothing(launch: Launch, tmp_path: Path) -> None:
    """While the first step is taken. Tried without: `model` replaces the victim's folder, and the checkpoint of step 4
    is in another one."""
    folder, victims = tmp_path / "run", tmp_path / "victims"
    victims.mkdir()
    (victims / "file").write_text("precious")
    plant = (
        "import os, pathlib\n"
        "from src.tracking import tracker\n"
        "advance = tracker.Tracker.advance\n"
        "def plant(of):\n"
        "    advance(of)\n"
        "    if os.environ['RANK'] == '0' and of._run.progress.step == 1:\n"
        "        (of.folder / 'checkpoints').mkdir()\n"
        "        for name in ('checkpoints/tmp_step_00000004', 'tmp_status.json', 'tmp_summary.json', 'tmp_model'):\n"
        f"            (of.folder / name).symlink_to({str(victims)!r})\n"
        "tracker.Tracker.advance = plant\n"
    )
    run = launch("ddp", *TINY, "--max_steps=4", folder=folder, before=plant).succeeded()
    assert [path.name for path in victims.iterdir()] == ["file"]
    assert "WARNING" not in run.stdout
    (saved,) = (folder / "checkpoints").iterdir()
    assert not any(problems(saved))
    assert not (folder / "model").is_symlink()
    assert {path.name for path in folder.glob("tmp_*")} == set()


def test_a_folder_that_is_replaced_by_a_link_during_a_run_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tried without: the export deletes what `model` leads to, and the checkpoint is made elsewhere."""
    (elsewhere := tmp_path / "elsewhere").mkdir()
    (elsewhere / "file").write_text("precious")
    link = tmp_path / "link"
    link.symlink_to(elsewhere)
    made_by_another_user(link, monkeypatch)
    with pytest.raises(UserError, match=FOREIGN), replacing(link):
        pytest.fail("it writes")
    with pytest.raises(UserError, match=FOREIGN):
        files.new_folder(link / "tmp_step_00000004")
    assert [path.name for path in elsewhere.iterdir()] == ["file"]


def test_a_name_for_what_is_damaged_is_free(tmp_path: Path) -> None:
    """Tried with names of broken links: an error, as a folder cannot replace one."""
    (tmp_path / "damaged_1_step_00000004").symlink_to("nowhere")
    (tmp_path / "step_00000004").mkdir()
    quarantine(tmp_path / "step_00000004")
    assert (tmp_path / "damaged_2_step_00000004").is_dir()


def test_another_user_cannot_keep_a_run_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who may read a folder may lock it, but not the file in it. Tried with the folder: "another process is …"."""
    monkeypatch.setattr(output_dir, "PATIENCE_SECONDS", 1)
    reader = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(reader, fcntl.LOCK_EX)
    output_dir.lock(tmp_path)
    os.close(reader)
    assert stat.S_IMODE((tmp_path / ".lock").stat().st_mode) == 0o600
    (shared := tmp_path / "shared").mkdir()
    shared.chmod(0o2775)  # its group, who may delete the file, may resume the run of one of them that was killed
    before = os.umask(0o002)
    try:
        output_dir.lock(shared)
    finally:
        os.umask(before)
    assert stat.S_IMODE((shared / ".lock").stat().st_mode) == 0o660
    for number, plant in enumerate((lambda file: file.symlink_to(tmp_path / "victim"), Path.mkdir)):
        (folder := tmp_path / str(number)).mkdir()
        plant(folder / ".lock")
        with pytest.raises(UserError, match=rf"^output_dir={folder}: cannot be locked, .*{folder}/.lock"):
            output_dir.lock(folder)
    assert not (tmp_path / "victim").exists()


def test_a_lock_is_gone_with_its_run_and_no_two_hold_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tried without looking whether the file is still there: who waited holds one that nobody else sees."""
    monkeypatch.setattr(output_dir, "PATIENCE_SECONDS", 2)
    atexit = Mock()
    monkeypatch.setattr(output_dir, "atexit", atexit)
    file = tmp_path / "run" / ".lock"
    output_dir.lock(file.parent)
    refused, delete = (call.args for call in atexit.register.call_args_list)
    assert refused[1] == file.parent
    ends = iter([file.unlink])  # the first run, between opening and locking
    monkeypatch.setattr(fcntl, "flock", lambda *_: next(ends, Mock())())
    output_dir.lock(file.parent)
    assert file.exists()
    delete[0](missing_ok=True)
    refused[0](file.parent)
    assert not file.parent.exists()


# ------------------------------------------------------------ damaged files of a run

DEEP = {f"deep{levels}": f"{'[' * levels}{']' * levels}" for levels in (300, 900, 3000)}
"""What stands for a value in a mutation, which is written in its place."""
VALUES: list[Any] = [
    None,
    True,
    -1,
    0.5,
    math.inf,
    math.nan,
    10**400,
    10**18,
    -(10**400),
    "",
    "..",
    "../x",
    "/etc/passwd",
    "\0",
]
VALUES += [[], {}, [[]], {"a": 1}, "x" * 10**4, "1" * 5000, *DEEP]


def places(tree: Any) -> list[tuple[Any, Any]]:
    """Each dictionary or list within, with each of its keys."""
    inner = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    return [found for key, value in inner for found in [(tree, key), *places(value)]]


def mutated(content: bytes, draw: random.Random, is_json: bool) -> bytes:
    """A file as nobody wrote it: with another value, name or structure somewhere, or other bytes."""
    if draw.random() < 0.3:
        here, there = sorted(draw.choices(range(len(content)), k=2))
        flipped = bytes([content[here] ^ 1 << draw.randrange(8)])
        cut, twice = content[:here], content[:there] + content[here:]
        return draw.choice([cut, twice, content[:here] + flipped + content[here + 1 :], b"", content[here:]])
    tree = json.loads(content) if is_json else yaml.safe_load(content)
    parent, key = draw.choice(places(tree))
    value = draw.choice([*VALUES, *(json.loads(json.dumps(p[k])) for p, k in draw.choices(places(tree), k=3))])
    match draw.randrange(4) if isinstance(parent, dict) else 0:
        case 1:
            del parent[key]
        case 2:
            parent[draw.choice(["..", "", "../x", "/etc/passwd", "step", "1e999", "x" * 999])] = value
        case 3:
            parent[draw.choice(["..", "", "a/b", "-1", "\0", "NaN"])] = parent.pop(key)
        case _:
            parent[key] = value
    text = json.dumps(tree).replace("Infinity", "1e999") if is_json else yaml.safe_dump(tree)
    for name, nested in DEEP.items():
        text = text.replace(f'"{name}"' if is_json else name, nested)
    return text.encode()


@pytest.fixture
def small_run(checkpoint: Path, tmp_path: Path) -> dict[Path, bytes]:
    """The files of a run with two checkpoints, of which only the shards are others: small, so that they are read
    quickly. Beside its folder lies what a path in a file may lead to."""
    folder = tmp_path / "runs" / "run"
    for step in (12, 14):
        copy = shutil.copytree(checkpoint.with_name(f"step_{step:08d}"), folder / "checkpoints" / f"step_{step:08d}")
        save_file({"model.a": torch.ones(1)}, copy / FILES[0])
        relist(copy, FILES[0])
    for name in ("config.yaml", "metrics.jsonl", "status.json", "summary.json"):
        shutil.copy(checkpoint.parents[1] / name, folder)
    (folder.parent / "x").write_text("precious")
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], ResumePoint]:
    """What a run in the folder goes on from, as often as it is asked."""
    folder, accelerator = tmp_path / "runs" / "run", Accelerator(cpu=True)
    monkeypatch.setattr(resume, "lock_run", lambda _: None)  # the lock is held until this process ends
    config = run_settings([f"--output_dir={folder}", "--task.source=digits", *ALL])
    with open_store(accelerator, config) as store:
        return lambda: resume.find_checkpoint(store)


def rewritten(name: str, change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    """With another content, and a manifest to match."""

    def damage(checkpoint: Path) -> None:
        content = json.loads((checkpoint / name).read_text())
        change(content)
        (checkpoint / name).write_text(json.dumps(content).replace("Infinity", "1e999"))
        if name != FILES[3]:
            relist(checkpoint, name)

    return damage


def replaced(name: str, make: Callable[[Path], object]) -> Callable[[Path], None]:
    """With something else in a file's place, and a manifest to match if that is a file."""

    def damage(checkpoint: Path) -> None:
        (checkpoint / name).unlink()
        make(checkpoint / name)
        if name == FILES[0] and (checkpoint / name).is_file():
            relist(checkpoint, name)

    return damage


def listing(name: str) -> Callable[[dict[str, Any]], object]:
    return lambda manifest: manifest["files"].update({name: {"bytes": 0, "sha256": ""}})


def oversized(file: Path) -> None:
    with file.open("wb") as stream:
        stream.truncate(files.MAX_BYTES + 1)


def shard(metadata: dict[str, str]) -> Callable[[Path], None]:
    return lambda file: save_file({"model.a": torch.ones(1)}, file, metadata)


DAMAGES: dict[str, Callable[[Path], None]] = {
    **{f"a pipe as {name}": replaced(name, os.mkfifo) for name in FILES},
    **{f"a device as {name}": replaced(name, lambda file: file.symlink_to("/dev/zero")) for name in FILES},
    **{f"an endless {name}": replaced(name, oversized) for name in FILES[1:]},
    "a header that is none": replaced(FILES[0], lambda file: file.write_bytes(b"\xff" * 999)),
    "no offsets": replaced(FILES[0], shard({"DCP_SHARDING_INFO": "{}"})),
    "offsets that are none": replaced(FILES[0], shard({"DCP_SHARDING_INFO": '{"model.a": {"saved_offsets": ["x"]}}'})),
    "offsets too deep": replaced(FILES[0], shard({"DCP_SHARDING_INFO": "[" * 10**5})),
    # numpy takes it, and reads behind the words: the process dies
    "numbers from behind the generator": rewritten(FILES[1], lambda state: state["numpy"].__setitem__(2, 10**9)),
    "words of another generator": rewritten(FILES[1], lambda state: state["python"][1].pop()),
    "no generator": rewritten(FILES[1], lambda state: state.pop("torch")),
    "a negative length": rewritten(FILES[2], lambda state: state.update(metrics_bytes=-1)),
    "an infinite time": rewritten(FILES[2], lambda state: state["progress"].update(seconds=math.inf)),
    "more examples than a float holds": rewritten(FILES[2], lambda state: state["origin"].update(examples=10**400)),
    "a list of evaluations": rewritten(FILES[2], lambda state: state["progress"].update(evaluations=[1])),
    **{f"a file named {name!r}": rewritten(FILES[3], listing(name)) for name in ("", ".", "..", "../x", "/x", "\0")},
    "an infinite size": rewritten(FILES[3], lambda content: content["files"]["state.json"].update(bytes=math.inf)),
}


@pytest.mark.parametrize("what", DAMAGES)
def test_what_strangers_can_make_of_a_checkpoint_is_set_aside(
    small_run: dict[Path, bytes], resumed: Callable[[], ResumePoint], what: str
) -> None:
    """With a manifest to match, and the checkpoint before it is taken. Tried without: a traceback or a crash; `verify`
    waits, or fills the memory."""
    newest = max(path.parent for path in small_run if path.name == "state.json")
    DAMAGES[what](newest)
    assert [*problems(newest)]
    assert resumed().checkpoint == newest.with_name("step_00000012")
    assert newest.with_name(f"damaged_1_{newest.name}").exists()


@pytest.mark.parametrize("name", ["state.json", "manifest.json", "config.yaml"])
def test_whatever_is_in_a_runs_files_ends_in_one_line(  # room: tools+report
    small_run: dict[Path, bytes],
    resumed: Callable[[], ResumePoint],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    name: str,
) -> None:
    """Of 500 mutations, none ends in a traceback, and none changes anything outside of the run's folder."""
    folder = tmp_path / "runs" / "run"
    newest = folder / "checkpoints" / "step_00000014"
    monkeypatch.chdir(folder)
    monkeypatch.setattr(report, "draw_plots", lambda _: {})  # which take a second
    monkeypatch.setattr(files, "read_yaml", functools.cache(read_yaml))
    is_config = name == "config.yaml"
    file = folder / name if is_config else newest / name
    verify = Tool("checkpoint", checkpoints.main, capsys)
    entries: list[Callable[[], object]] = [resumed, lambda: report.write_report([folder], folder / "report.html")]
    if not is_config:
        small_run[folder / "config.yaml"] = b"resume: auto"  # a longer one takes long to parse
        entries = [lambda: [*problems(newest)], lambda: read_state(newest), lambda: config_of(newest)]
        entries += [lambda: find_model(str(folder)), lambda: verify("verify", folder), resumed]
    for seed in range(60 if is_config else 220):
        draw = random.Random(seed)
        content = mutated(small_run[file], draw, not is_config)
        shutil.rmtree(folder)
        for path, written in small_run.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content if path == file else written)
        if name == "state.json" and draw.random() < 0.8:  # else the manifest tells
            relist(newest, name)
        for entry in entries:
            with contextlib.suppress(UserError, RunError):
                entry()
        assert {path for path in tmp_path.rglob("*") if folder not in path.parents} == {
            folder.parent, folder, folder.parent / "x"
        }  # fmt: skip
        assert (folder.parent / "x").read_text() == "precious"


EXPORTS: dict[str, tuple[str, Any]] = {
    "weights that are none": ("model.safetensors", b"garbage"),
    "no weights": ("model.safetensors", b""),
    "a header without end": ("model.safetensors", b"\xff" * 100),
    "damaged data": ("data_state.json", b"{"),
    "deep data": ("data_state.json", b"[" * 100_000),
    "weights of another model": ("model.safetensors", {"x": torch.zeros(3)}),
}


@pytest.mark.parametrize(("name", "content"), EXPORTS.values(), ids=EXPORTS)
def test_a_model_that_no_run_exported_is_one_line(whole: Whole, tmp_path: Path, name: str, content: Any) -> None:
    """Tried without: a traceback, which advises to unpickle the file."""
    run = whole("cpu", *ALL).folder
    model = shutil.copytree(run / "model", tmp_path / "model")
    shutil.copy(run / "config.yaml", tmp_path)
    (model / name).write_bytes(content if isinstance(content, bytes) else save(content))
    config = config_from(read_yaml((run / "config.yaml").read_bytes()), TASKS)
    with pytest.raises(UserError, match=f"^{model}: not as a run exports it: [^\n]*$"):
        config.task.load_export(model)


def test_an_optimizers_state_of_another_shape_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    """Tried without: DCP's traceback."""
    model = MnistCnn()
    checkpoint = shutil.copytree(checkpoint, tmp_path / "step_00000014")
    tensors = load_file(checkpoint / FILES[0])
    with safe_open(checkpoint / FILES[0], "pt") as opened:
        metadata = opened.metadata()
    name = next(name for name in tensors if name.endswith(".exp_avg") and tensors[name].ndim == 1)
    save_file(tensors | {name: torch.zeros(3)}, checkpoint / FILES[0], metadata)
    with pytest.raises(UserError, match=rf"^{checkpoint} does not fit this model: {name} has shape \(3,\) in the "):
        load_tensors(checkpoint, model, build_optimizers(Optim(name="adamw"), model))


# ------------------------------------------------------------ secrets in URLs

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
"""Texts without one. On Azure, what comes before the @ is a container."""


def test_what_is_secret_in_a_url_is_masked_and_nothing_else() -> None:
    assert {url: masked(f"'{url}' is")[1:-4] for url in MASKED} == MASKED
    for text in (*OPEN, *MASKED.values()):
        assert masked(text) == text
    assert masked("https://a:" * 100_000 + "/" * 100_000 + "://" * 100_000 + "?a" * 100_000)  # in linear time


@pytest.mark.parametrize(
    "setting",
    ["checkpoint.mirror", "resume", "output_dir", "run_name", "push_to_hub", "seed", "task.source", "nothing"],
)
def test_a_setting_with_a_secret_is_one_line_that_hides_it(tmp_path: Path, setting: str) -> None:
    """At any depth, also where another mistake is said of it. Tried without: it is in config.yaml, or in a message."""
    for url, shown in MASKED.items():
        says = [line for line in mistakes(f"--{setting}={url}") if "it has a secret" in line]
        assert says == [f"--{setting}={shown}: {HOLDS_SECRET}"]
    *groups, name = setting.split(".")
    nested: Any = {name: [{"mixed": [{"url": "https://bob:SECRET@host/x"}]}]}
    for group in groups:
        nested = {group: nested}
    (tmp_path / "a.yaml").write_text(write_yaml(nested))
    for arguments in ([f"--config={tmp_path}/a.yaml"], [f"--{setting}={{a: [{{b: 'https://h/?token=SECRET'}}]}}"]):
        assert any(HOLDS_SECRET in line for line in mistakes(*arguments))


def test_a_refused_secret_is_neither_printed_nor_written(launch: Launch, tmp_path: Path) -> None:
    """Tried without: seven files and the terminal have it."""
    url = "http://bob:SECRET@127.0.0.1:9/x?token=SECRET"
    run = launch("ddp", f"--push_to_hub={url}", f"--resume={url}", f"--x={url}", "--seed=-1", wandb="offline")
    assert run.exit_code == 2
    assert "SECRET" not in run.stdout + run.stderr
    assert len(run.messages) == len(run.stderr.splitlines()) == 6
    assert not run.folder.exists()


def test_a_secret_of_an_old_run_is_in_no_report_and_no_card(whole: Whole, tmp_path: Path) -> None:
    """One from before they were refused."""
    folder = shutil.copytree(whole("cpu", *ALL).folder, tmp_path / "run")
    settings = read_yaml((folder / "config.yaml").read_bytes())
    settings["resume"] = "https://bob:SECRET@host/x?token=SECRET"
    (folder / "config.yaml").write_text(write_yaml(settings))
    write_cards(config_from(settings, TASKS), {"": {}}, {"eval/loss": 1.0}, tmp_path)
    card = (tmp_path / "README.md").read_text()
    assert "https://***@host/x?token=***" in card
    assert "SECRET" not in card
    if (PROJECT / "src/tracking/report.py").exists():
        import_module("src.tracking.report").write_report([folder], folder / "report.html")
        page = (folder / "report.html").read_text()
        assert "https://***@host" in page
        assert "SECRET" not in page


def test_a_secret_in_the_error_of_a_library_is_masked(capsys: pytest.CaptureFixture[str]) -> None:
    """As of a download that was redirected to a signed URL."""
    signed = "403, message='Forbidden', url='https://cdn.host/x?Policy=a&Signature=SECRET&Key-Pair-Id=b'"
    with pytest.raises(SystemExit), exit_codes(), as_run_error("train.jsonl: ", OSError):
        raise OSError(signed)
    assert capsys.readouterr().err == f"train.py: train.jsonl: {signed.replace('SECRET', '***')}\n"
    with pytest.raises(SystemExit), exit_codes():
        raise UserError("resume=https://bob:SECRET@host/x: not a checkpoint")
    assert "SECRET" not in capsys.readouterr().err
    assert "SECRET" not in cause(OSError(signed))


def test_a_password_works_where_its_refusal_says_that_it_belongs(tmp_path: Path) -> None:
    """And as docs/running.md writes it. A canary: fsspec reads ~/.netrc only if it is told to."""
    pytest.importorskip("aiohttp")
    expected = "Basic " + base64.b64encode(b"bob:SECRET").decode()

    class Server(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            is_known = self.headers.get("Authorization") == expected
            self.send_response(200 if is_known else 401)
            self.send_header("Content-Length", "2")
            self.end_headers()
            self.wfile.write(b"ok")

        def log_message(self, *_: object) -> None:
            pass

    (tmp_path / "netrc").write_text("machine 127.0.0.1 login bob password SECRET\n")
    (tmp_path / "netrc").chmod(0o600)
    (setting,) = re.findall("FSSPEC_HTTPS='(.*)'", (PROJECT / "docs/running.md").read_text())
    with ThreadingHTTPServer(("127.0.0.1", 0), Server) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        read = f"import fsspec; print(fsspec.open('http://127.0.0.1:{server.server_port}/x').open().read())"
        netrc: dict[str, Any] = {"NETRC": str(tmp_path / "netrc"), "no_proxy": "127.0.0.1"}
        without = run_command([sys.executable, "-c", read], tmp_path, **netrc)
        done = run_command([sys.executable, "-c", read], tmp_path, **netrc, FSSPEC_HTTPS=setting)
        server.shutdown()
    assert (without.exit_code, done.stdout) == (1, "b'ok'\n"), done.stderr


# ------------------------------------------------------------ control characters, names, printed commands

EVIL = "\x1b]0;owned\x07\r\ntrain.py: all is well\x0b\x1c\x85\x9b2J\u2028x\u202ey\u2066z\udcff\x7f\x00"
"""What sets a terminal's title, clears it, begins lines that look like ours, and turns the direction of writing."""
CONTROLS = re.compile(r"[^\S\n\t ]|[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]")
PLAIN = "\ttab, ümläut, 日本語, עברית, 👩‍👩‍👧, \u200f, C:\\x1b"


def says(capfd: pytest.CaptureFixture[str], lines: int = 1) -> str:
    """What was printed, in so many lines, none of which does more than show."""
    captured = capfd.readouterr()
    printed = captured.out + captured.err
    assert not CONTROLS.search(printed), ascii(printed)
    assert printed.count("\n") == lines, printed
    return printed


def test_what_is_printed_shows_what_would_control_a_terminal(capfd: pytest.CaptureFixture[str]) -> None:
    """And leaves all other characters, emojis that are joined too. Tried without."""
    say(PLAIN, f"a{EVIL}b", "c")
    plain, evil, last, _ = says(capfd, lines=3).split("\n")
    assert (plain, last) == (PLAIN, "c")
    assert evil.startswith(r"a\x1b]0;owned\x07\r\ntrain.py: all is well\x0b\x1c\x85\x9b2J\u2028x\u202ey\u2066z")


def test_mistakes_of_strangers_files_are_as_many_lines_as_mistakes(
    capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """As the names in a yaml, in the head of a table or in a folder. Tried without: they fake lines of ours."""
    evil = EVIL.replace("\udcff", "")  # which no file in UTF-8 has
    (tmp_path / "a.yaml").write_text(json.dumps({f"a{evil}": 1, "seed": evil, "optim": {evil: [evil]}}))
    with pytest.raises(SystemExit), exit_codes():
        run_settings([f"--config={tmp_path}/a.yaml", f"--lr={EVIL}"])
    lines = says(capfd, lines=4).splitlines()
    assert all(line.startswith("train.py: ") for line in lines)
    for error in (
        UserError(f"train.csv: two columns are called {EVIL}", "b"),
        RunError(f"{EVIL}: cannot be read", "b"),
    ):
        with pytest.raises(SystemExit), exit_codes():
            raise error
        assert says(capfd, lines=2).startswith("train.py: ")
    with pytest.raises(SystemExit) as ended, exit_codes():
        raise OSError(errno.ENOSPC, "No space left on device", EVIL)
    assert not CONTROLS.search(str(ended.value.code))
    assert "\n" not in str(ended.value.code)


def test_a_checkpoint_of_a_stranger_is_listed_in_lines_of_ours(  # room: tools
    checkpoint: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Its folder, strategy and metrics have names that would control the terminal."""
    folder = tmp_path / f"a{EVIL.replace(chr(0), '')}b" / "step_00000014"
    shutil.copytree(checkpoint, folder)
    state = json.loads((folder / "state.json").read_text())
    state["origin"]["strategy"] = EVIL
    state["progress"]["evaluations"]["14"] = {EVIL: 1.0}
    (folder / "state.json").write_text(json.dumps(state))
    relist(folder, "state.json")
    assert checkpoints.main(["list", str(folder)]) == 0
    assert r"\x1b]0;owned" in says(capfd, lines=2)
    (folder / "state.json").write_text("{}")
    assert checkpoints.main(["verify", str(folder)]) == 1
    assert "DAMAGED: " in says(capfd)


@needs("src/tools/generate.py")
def test_the_words_of_a_model_only_show(capfd: pytest.CaptureFixture[str]) -> None:
    """But ends of lines are what they are. Tried with transformers' own streamer."""
    printer = import_module("src.tools.generate").Printer(None)
    printer.on_finalized_text(f"{PLAIN}\nx{EVIL}")
    printer.on_finalized_text("y", stream_end=True)
    printed = says(capfd, lines=3)
    assert printed.startswith(f"{PLAIN}\nx\\x1b]0;owned")


def test_an_example_only_shows(launch: Launch) -> None:
    """In a dry run, where it may have several lines. Tried without: a terminal takes it as orders."""
    first = f"first\n{EVIL}"
    example = f"from src.tasks.mnist import Mnist; Mnist.preview = lambda *_: {first!r}"
    run = launch("cpu", *TINY, "--dry-run", before=example).succeeded()
    assert not CONTROLS.search(run.stdout)
    assert run.stdout.count("\nfirst\n\\x1b]0;owned") == 2


MIRROR = ("checkpoint.mirror",) if (PROJECT / "src/checkpoint/mirror.py").exists() else ()


def test_other_names_are_allowed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("group/chat", "a..b", "..a", "日本 👩‍👩‍👧", "$(touch x)", "-x", "a b'c"):
        for mirror in ("/mnt/backup", "s3://bucket/a..b", "backup"):
            config = run_settings([f"--run_name={name}", *(f"--{setting}={mirror}" for setting in MIRROR)])
            assert config.folder == Path("runs", name)


@pytest.mark.parametrize("name", ["../elsewhere", "a/../../b", "/etc/x", "a\x1b[2J", "a\u202eb"])
def test_a_name_that_leaves_its_folder_or_controls_a_terminal_is_refused(name: str) -> None:
    (line,) = mistakes(f"--run_name={name}")
    assert "leads out of its folder, or has control characters" in line


def test_a_trial_s_id_that_leaves_the_folder_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where W&B, which has rules of its own for it, is off. Tried without: the folder is outside of runs."""
    monkeypatch.setenv("WANDB_SWEEP_ID", "s1")
    for name in ("/../../x", "a\nb", "a b", ""):
        monkeypatch.setenv("WANDB_RUN_ID", name)
        (line,) = mistakes(*QUIET)
        assert line.startswith("WANDB_SWEEP_ID is set in the environment, but WANDB_RUN_ID is no trial's id")


AWKWARD = "it's; touch pwned $(touch pwned) `touch pwned`"


def test_what_is_printed_to_be_copied_is_one_word_to_a_shell(launch: Launch, tmp_path: Path) -> None:
    """Paths and ids, whatever their names: tried without quotes."""
    folder = tmp_path / AWKWARD / "run"
    launch("cpu", *TINY, "--max_steps=2", folder=folder).succeeded()
    newest = folder / "checkpoints/step_00000002"
    state = json.loads((newest / "state.json").read_text())
    (newest / "state.json").write_text(json.dumps(state | {"run_id": "$(touch pwned)"}))  # as a stranger may
    relist(newest, "state.json")
    more = ("--wandb.model=no",) if WANDB else ()  # as artifacts cannot have that name
    logged: dict[str, Any] = {"wandb": "offline", "WANDB_SAVE_CODE": "false"}
    run = launch("cpu", *TINY, "--max_steps=4", *more, folder=folder, **logged).succeeded()
    commands = dict(re.findall("^  (model|evaluate|upload) +(.*)", run.stdout, re.MULTILINE))
    assert shlex.split(commands["model"]) == [f"{folder}/model"]
    if "evaluate" in commands:
        assert shlex.split(commands["evaluate"])[-1] == str(folder)
    if WANDB:
        *_, files = shlex.split(commands["upload"])
        assert files == f"{folder}/wandb/offline-run-*-$(touch pwned)"


def test_a_failed_upload_says_a_command_that_a_shell_takes_as_it_is(
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


@pytest.mark.parametrize("asks", ["--help", "-h"])
def test_slurm_sbatch_answers_help_and_starts_nothing(tmp_path: Path, asks: str) -> None:  # room: machines
    """Also outside of a job. Tried with what is printed as the run's folder: srun starts the processes."""
    done = run_command(["bash", "launchers/slurm.sbatch", "--seed=1", asks], tmp_path, PATH=with_slurm(tmp_path))
    assert (done.exit_code, done.stderr) == (0, "")
    assert "  --run_name=" in done.stdout


def test_slurm_sbatch_takes_the_folder_and_nothing_that_is_printed(tmp_path: Path) -> None:  # room: machines
    """Even if the task's file prints; and a mistake ends it."""
    job: dict[str, Any] = {
        "PATH": with_slurm(tmp_path),
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_NODELIST": "a",
        "PYTHONPATH": str(tmp_path),
    }
    command = ["bash", "launchers/slurm.sbatch", f"--run_name={AWKWARD}", *QUIET]
    refused = run_command([*command, "--bad=1"], tmp_path, **job)
    assert (refused.exit_code, refused.stderr) == (2, "slurm.sbatch: --bad=1: unknown setting\n")
    (tmp_path / "sitecustomize.py").write_text("print('; touch pwned')")
    done = run_command(command, tmp_path, **job)
    assert done.stderr.splitlines()[-1] == f"STATUS=runs/{AWKWARD}/status.json"


def with_slurm(folder: Path) -> str:  # room: machines
    """PATH with programs of Slurm that only say what they are called with."""
    folder = folder / "bin"
    folder.mkdir()
    for name in ("srun", "scontrol", "squeue"):
        (folder / name).write_text('#!/bin/bash\necho "STATUS=$STATUS" >&2\n')
        (folder / name).chmod(0o755)
    return f"{folder}:{BIN}:{os.environ['PATH']}"


# ------------------------------------------------------------ supply chain


@pytest.mark.parametrize("file", sorted((PROJECT / ".github/workflows").iterdir()), ids=lambda file: file.name)
def test_a_workflow_runs_actions_of_known_commits_without_rights(file: Path) -> None:
    """A tag can be moved to other code, as that of tj-actions/changed-files was in 2025. Tried with checkout@v7."""
    text = file.read_text()
    actions = re.findall(r"uses: (.*)", text)
    assert actions
    assert all(re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+", action) for action in actions)
    assert text.count("persist-credentials: false") == text.count("actions/checkout@")
    assert "\npermissions:\n  contents: read\n" in text
    assert "pull_request_target" not in text


def test_what_is_pinned_is_raised() -> None:
    """The image by its digest, and each file that `uv sync` installs by its hash."""
    images = re.findall(r"(?m)^FROM (\S+)", (PROJECT / "Dockerfile").read_text())
    assert re.fullmatch(r"python:3\.\d+-slim@sha256:[0-9a-f]{64}", images[0])
    assert images[1:] == ["base"]
    packages = tomllib.loads((PROJECT / "uv.lock").read_text())["package"]
    files = [file for package in packages for file in (*package.get("wheels", ()), package.get("sdist")) if file]
    assert len(files) > 1000
    assert all(file["hash"].startswith("sha256:") for file in files)
    assert "run: uv sync --locked" in (PROJECT / ".github/workflows/locked.yml").read_text()
    raised = re.findall(r"package-ecosystem: (\S+)", (PROJECT / ".github/dependabot.yml").read_text())
    assert sorted(raised) == ["docker", "github-actions", "pip", "uv"]


def test_no_secret_gets_into_the_image() -> None:
    """Tried without `**/.env*`."""
    ignored = (PROJECT / ".dockerignore").read_text().split()
    assert {"**/.env*", "**/.netrc", "**/*.pem", "**/*.key", "**/.ssh"} <= {*ignored}
