"""Loading a checkpoint executes nothing, whatever lies in it, and no secret gets into what a run writes."""

import contextlib
import fcntl
import functools
import json
import math
import os
import pickle
import random
import shutil
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import yaml
from accelerate import Accelerator
from safetensors.torch import save_file
from torch.distributed.checkpoint import CheckpointException

from src.checkpoint import files, output_dir, resume
from src.checkpoint.compatibility import read_state
from src.checkpoint.export import replacing
from src.checkpoint.integrity import problems, quarantine
from src.checkpoint.load import config_of, find_model
from src.checkpoint.rng import restore_random_state
from src.checkpoint.tensors import load_tensors
from src.config.errors import RunError, UserError
from src.config.settings import read_yaml
from src.parts import open_store
from src.tasks.mnist import MnistCnn
from src.tools import checkpoints
from src.tracking import report
from src.training.state import ResumePoint
from tests.faults.runs import ALL, TINY, relist
from tests.launching import PROJECT, WANDB, Launch, Tool, Whole, mistakes
from train import run_settings

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


def test_no_secret_is_written_anywhere(launch: Launch) -> None:
    names = ("WANDB_API_KEY", "HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "MY_PASSWORD")
    secrets: dict[str, Any] = {name: f"sentinel-{name.lower()}-0123456789abcdef0123456789" for name in names}
    run = launch("cpu", *TINY, "--max_steps=4", wandb="offline", **secrets).succeeded()
    files = [path for path in run.folder.rglob("*") if path.is_file()]
    assert any(path.suffix == ".wandb" for path in files) == WANDB
    for written in ((run.stdout + run.stderr).encode(), *(path.read_bytes() for path in files)):
        assert b"sentinel-" not in written


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
    monkeypatch.setattr(resume, "claim", lambda _: None)  # the lock is held until this process ends
    config = run_settings([f"--output_dir={folder}", "--task.source=digits", *ALL])
    return lambda: resume.find_checkpoint(accelerator, config, open_store(accelerator, config))


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
        stream.truncate(files.MOST_BYTES + 1)


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
def test_whatever_is_in_a_runs_files_ends_in_one_line(
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
    monkeypatch.setattr(report, "plots", lambda _: {})  # which take a second
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


# ------------------------------------------------------------ secrets in URLs

# ------------------------------------------------------------ control characters, names, printed commands

# ------------------------------------------------------------ supply chain
