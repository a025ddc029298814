"""Files of strangers run no code, end in one line and lead nowhere: checkpoints, models, links, yamls."""

import ast
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
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import Any

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
from src.checkpoint.export import replacing
from src.checkpoint.integrity import problems
from src.checkpoint.rng import restore_random_state
from src.checkpoint.tensors import load_tensors
from src.config.config import config_from
from src.config.errors import RunError, UserError
from src.config.groups import Optim
from src.config.settings import read_arguments, read_yaml
from src.parts import open_store
from src.tasks import TASKS
from src.tasks.mnist import MnistCnn
from src.training.optim import build_optimizers
from src.training.state import ResumePoint
from tests.faults.runs import ALL, relist
from tests.launching import PROJECT, Tool, Whole, mistakes, needs
from train import run_settings

SHARD, RANDOM, STATE, MANIFEST = FILES = [
    "shard-00001-model-00001-of-00001.safetensors", "rng_00001.json", "state.json", "manifest.json"
]  # fmt: skip
Damage = Callable[[Path], object]


@pytest.fixture
def checkpoint(whole: Whole, tmp_path: Path) -> Path:
    saved = whole("cpu", *ALL).folder / "checkpoints" / "step_00000014"
    return shutil.copytree(saved, tmp_path / "saved" / saved.name)


# ------------------------------------------------------------ code


class Payload:
    """Unpickled, it writes a file."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> tuple:
        return os.system, (f"touch {self.file}",)


@pytest.mark.parametrize("is_listed", [False, True], ids=["planted", "with a manifest to match"])
@pytest.mark.parametrize("name", [*FILES, ".metadata"])
def test_a_pickle_as_any_file_of_a_checkpoint_is_never_run(
    checkpoint: Path, tmp_path: Path, name: str, is_listed: bool
) -> None:
    """It is reported, unless the manifest matches."""
    proof = tmp_path / "executed"
    payload = pickle.dumps(Payload(proof))
    (checkpoint / name).write_bytes(payload)
    if is_listed and name != MANIFEST:
        relist(checkpoint, name)
    else:
        assert any(name in problem for problem in problems(checkpoint))
    for read in (
        lambda: read_state(checkpoint),
        lambda: load_tensors(checkpoint, MnistCnn()),
        lambda: restore_random_state(checkpoint / RANDOM, torch.device("cpu")),
    ):
        with contextlib.suppress(UserError, RunError, CheckpointException):
            read()
    assert not proof.exists()
    pickle.loads(payload)
    assert proof.exists(), "the payload works"


def test_nothing_in_the_project_unpickles() -> None:
    for path in [PROJECT / "train.py", *(PROJECT / "src").rglob("*.py")]:
        text = path.read_text().replace("from joblib import cpu_count", "")  # which reads no file but the kernel's
        for word in ("pickle", "torch.load", "weights_only", "allow_pickle", "trust_remote_code=True", "joblib"):
            assert word not in text, f"{path}: {word}"


CALLS = {"from_pretrained": "trust_remote_code=False", "from_config": "trust_remote_code=False", "open": "formats="}
NO_CODE = ("GenerationConfig", "PeftConfig", "PeftModel")
"""Classes for which a model can bring no code."""


def test_no_model_brings_its_own_code_and_no_picture_starts_a_program() -> None:
    """Without trust_remote_code, transformers asks whoever writes to standard input; Pillow starts Ghostscript."""
    folders = [PROJECT / folder for folder in ("src", "examples", "benchmarks")]
    for path in [PROJECT / "train.py", *(path for folder in folders for path in folder.rglob("*.py"))]:
        for call in ast.walk(ast.parse(path.read_text())):
            if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr in CALLS:
                owner = ast.unparse(call.func.value).rpartition(".")[2]
                if owner not in NO_CODE and (call.func.attr != "open" or owner == "Image"):
                    assert CALLS[call.func.attr] in ast.unparse(call), f"{path}: {ast.unparse(call)}"


LAUGHS = "a: &a [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{name}: &{name} [{', '.join([f'*{before}'] * 10)}]\n" for before, name in pairwise("abcdefghi")
)


def test_a_yaml_that_stands_for_gigabytes_is_refused(tmp_path: Path) -> None:
    """Nine lines stand for 10^9 values. On the command line they are text."""
    (tmp_path / "a.yaml").write_text(LAUGHS)
    found: list[str] = []
    values, _ = read_arguments([f"--config={tmp_path}/a.yaml", f"--run_name={LAUGHS}"], found)
    assert values == {"run_name": LAUGHS}
    assert found == [f"--config={tmp_path}/a.yaml: cannot be read as yaml, stands for more than 100,000 values"]
    text = "a: &a {x: 1, y: [&b 2, *b]}\nc: {<<: *a, x: 3}\nd: [*a, *a]"
    a = {"x": 1, "y": [2, 2]}
    assert read_yaml(text) == {"a": a, "c": {"x": 3, "y": [2, 2]}, "d": [a, a]}
    with pytest.raises(YAMLError, match="^Circular reference detected$"):
        read_yaml("a: &a {b: [*a]}")


# ------------------------------------------------------------ links and locks in shared folders

FOREIGN = "another user's link: remove it"


def made_by_another_user(link: Path, patch: pytest.MonkeyPatch) -> None:
    """Let the link seem to be nobody's, which only root could make."""
    lstat = Path.lstat

    def seen(path: Path) -> os.stat_result:
        found = [*lstat(path)]
        found[stat.ST_UID] = 65534 if path.absolute() == link.absolute() else found[stat.ST_UID]
        return os.stat_result(found)

    patch.setattr(Path, "lstat", seen)


@pytest.fixture
def victim(tmp_path: Path) -> Path:
    """A folder that nothing may be written to."""
    (tmp_path / "victim").mkdir()
    (tmp_path / "victim/file").write_text("precious")
    return tmp_path / "victim"


@pytest.mark.parametrize("is_pipe", [False, True], ids=["link", "pipe"])
@pytest.mark.parametrize("name", ["metrics.jsonl", "config.yaml", "summary.json"])
def test_a_link_or_a_pipe_in_a_files_place_is_refused(
    tmp_path: Path, victim: Path, monkeypatch: pytest.MonkeyPatch, name: str, is_pipe: bool
) -> None:
    """Whoever made it: an archive's links belong to whoever unpacks it."""
    monkeypatch.chdir(tmp_path)
    file = Path("runs/mnist", name)
    file.parent.mkdir(parents=True)
    os.mkfifo(file) if is_pipe else file.symlink_to(victim / "file")
    assert any(f"output_dir=runs/mnist: cannot write to {file}, " in line for line in mistakes())
    assert (victim / "file").read_text() == "precious"


@pytest.mark.parametrize("name", [".", "checkpoints", "checkpoints/step_00000008", "model", "wandb", "profile"])
def test_only_this_user_and_root_link_folders_elsewhere(
    tmp_path: Path, victim: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    config, link = run_settings([]), Path("runs/mnist", name)
    link.parent.mkdir(parents=True)
    link.symlink_to(victim)
    assert FOREIGN not in "".join(output_dir.folder_errors(config))
    made_by_another_user(link, monkeypatch)
    assert any(f"cannot write to {link}, {FOREIGN}" in line for line in mistakes())


def test_links_are_neither_written_through_nor_deleted_through(tmp_path: Path, victim: Path) -> None:
    """Planted before or during a run, under any name that it writes to for a while."""
    checkpoints = tmp_path / "checkpoints"
    (checkpoints / "tmp_step_00000004/inner").mkdir(parents=True)
    for name, target in (("tmp_step_00000008", victim), ("tmp_state.json", victim / "file"), ("tmp_x", Path("none"))):
        (checkpoints / name).symlink_to(target)
    files.remove_incomplete(checkpoints)
    assert [*checkpoints.iterdir()] == []

    for name in ("config.yaml", "tmp_config.yaml"):
        (tmp_path / name).symlink_to(victim / "file")
    files.write_text(tmp_path / "config.yaml", "mine")
    for name in ("tmp_step_00000004", "tmp_model"):
        (tmp_path / name).symlink_to(victim)
    files.new_folder(tmp_path / "tmp_step_00000004")
    with replacing(tmp_path / "model") as folder:
        (folder / "weights").touch()
    assert (tmp_path / "config.yaml").read_text() == "mine"
    assert not any(path.is_symlink() for path in tmp_path.iterdir())
    assert {path.name: path.read_text() for path in victim.iterdir()} == {"file": "precious"}


def test_a_folder_replaced_by_a_link_during_a_run_is_refused(
    tmp_path: Path, victim: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    link = tmp_path / "link"
    link.symlink_to(victim)
    made_by_another_user(link, monkeypatch)
    with pytest.raises(UserError, match=FOREIGN), replacing(link):
        pytest.fail("it writes")
    with pytest.raises(UserError, match=FOREIGN):
        files.new_folder(link / "tmp_step_00000004")
    assert [path.name for path in victim.iterdir()] == ["file"]


def test_another_user_cannot_keep_a_run_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever may read a folder may lock it, but not the file in it. A link in its place is refused."""
    monkeypatch.setattr(output_dir, "PATIENCE_SECONDS", 1)
    reader = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(reader, fcntl.LOCK_EX)
    output_dir.lock(tmp_path)
    os.close(reader)
    assert stat.S_IMODE((tmp_path / ".lock").stat().st_mode) == 0o600
    (folder := tmp_path / "run").mkdir()
    (folder / ".lock").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UserError, match=rf"^output_dir={folder}: cannot be locked, .*{folder}/.lock"):
        output_dir.lock(folder)
    assert not (tmp_path / "elsewhere").exists()


# ------------------------------------------------------------ damaged checkpoints and models

DEEP = {f"deep{levels}": f"{'[' * levels}{']' * levels}" for levels in (300, 900, 3000)}
"""Texts that a mutation replaces names with."""
VALUES: list[Any] = [None, True, -1, 0.5, math.inf, math.nan, 10**400, 10**18, -(10**400), [], {}, [[]], {"a": 1}]
VALUES += ["", "..", "../x", "/etc/passwd", "\0", "x" * 10**4, "1" * 5000, *DEEP]


def places(tree: Any) -> list[tuple[Any, Any]]:
    """Return each dictionary or list within, with each of its keys."""
    inner = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    return [found for key, value in inner for found in [(tree, key), *places(value)]]


def mutated(content: bytes, draw: random.Random, is_json: bool) -> bytes:
    """Return a file with another value, name or structure somewhere, or other bytes."""
    if draw.random() < 0.3:
        here = draw.randrange(len(content))
        flipped = content[:here] + bytes([content[here] ^ 1 << draw.randrange(8)]) + content[here + 1 :]
        return draw.choice([content[:here], content[here:], content + content[here:], flipped, b""])
    tree = json.loads(content) if is_json else yaml.safe_load(content)
    parent, key = draw.choice(places(tree))
    value = parent.pop(key) if draw.random() < 0.5 else parent[key]
    if isinstance(parent, dict):
        key = draw.choice([key, key, "..", "", "../x", "/etc/passwd", "a/b", "\0", "NaN", "1e999", "x" * 999])
        parent[key] = draw.choice([value, *VALUES])
    else:
        parent.insert(key, draw.choice(VALUES))
    text = json.dumps(tree).replace("Infinity", "1e999") if is_json else yaml.safe_dump(tree)
    for name, nested in DEEP.items():
        text = text.replace(f'"{name}"' if is_json else name, nested)
    return text.encode()


@pytest.fixture
def small_run(whole: Whole, tmp_path: Path) -> Path:
    """A run with two checkpoints, whose shards are small. Beside it lies a file that a path in another may lead to."""
    run, folder = whole("cpu", *ALL).folder, tmp_path / "runs" / "run"
    for step in ("step_00000012", "step_00000014"):
        copy = shutil.copytree(run / "checkpoints" / step, folder / "checkpoints" / step)
        save_file({"model.a": torch.ones(1)}, copy / SHARD)
        relist(copy, SHARD)
    for name in ("config.yaml", "metrics.jsonl", "status.json", "summary.json"):
        shutil.copy(run / name, folder)
    (folder.parent / "x").write_text("precious")
    return folder


@pytest.fixture
def resumed(small_run: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], ResumePoint]:
    """Returns what a run in the folder resumes from, as often as it is called."""
    monkeypatch.setattr(resume, "lock_run", lambda _: None)  # the lock is held until this process ends
    config = run_settings([f"--output_dir={small_run}", "--task.source=digits", *ALL])
    with open_store(Accelerator(cpu=True), config) as store:
        return lambda: resume.find_checkpoint(store)


def rewritten(name: str, change: Callable[[dict[str, Any]], object]) -> Damage:
    """Return what changes a file's content, with a manifest to match."""

    def damage(checkpoint: Path) -> None:
        content = json.loads((checkpoint / name).read_text())
        change(content)
        (checkpoint / name).write_text(json.dumps(content).replace("Infinity", "1e999"))
        if name != MANIFEST:
            relist(checkpoint, name)

    return damage


def replaced(name: str, make: Damage) -> Damage:
    """Return what puts something else in a file's place, with a manifest to match if that is a shard."""

    def damage(checkpoint: Path) -> None:
        (checkpoint / name).unlink()
        make(checkpoint / name)
        if name == SHARD and (checkpoint / name).is_file():
            relist(checkpoint, name)

    return damage


def sharding(info: str) -> Damage:
    return replaced(SHARD, lambda file: save_file({"model.a": torch.ones(1)}, file, {"DCP_SHARDING_INFO": info}))


def oversized(file: Path) -> None:
    with file.open("wb") as stream:
        stream.truncate(files.MAX_BYTES + 1)


def listing(name: str) -> Damage:
    return rewritten(MANIFEST, lambda manifest: manifest["files"].update({name: {"bytes": 0, "sha256": ""}}))


DAMAGES: dict[str, Damage] = {
    **{f"a pipe as {name}": replaced(name, os.mkfifo) for name in FILES},
    **{f"a device as {name}": replaced(name, lambda file: file.symlink_to("/dev/zero")) for name in FILES},
    **{f"an endless {name}": replaced(name, oversized) for name in FILES[1:]},
    "a damaged header": replaced(SHARD, lambda file: file.write_bytes(b"\xff" * 999)),
    "no offsets": sharding("{}"),
    "offsets too deep": sharding("[" * 10**5),
    # numpy takes it, and reads behind the words: the process dies
    "numbers from behind the generator": rewritten(RANDOM, lambda state: state["numpy"].__setitem__(2, 10**9)),
    "words of another generator": rewritten(RANDOM, lambda state: state["python"][1].pop()),
    "a negative length": rewritten(STATE, lambda state: state.update(metrics_bytes=-1)),
    "more examples than a float holds": rewritten(STATE, lambda state: state["origin"].update(examples=10**400)),
    "an infinite size": rewritten(MANIFEST, lambda content: content["files"][STATE].update(bytes=math.inf)),
    **{f"a file named {name!r}": listing(name) for name in ("", ".", "..", "../x", "/x", "\0")},
}


@pytest.mark.parametrize("what", DAMAGES)
def test_a_checkpoint_that_a_stranger_damaged_is_set_aside(
    small_run: Path, resumed: Callable[[], ResumePoint], what: str
) -> None:
    """With a manifest to match. The run resumes from the one before."""
    newest = small_run / "checkpoints/step_00000014"
    DAMAGES[what](newest)
    assert [*problems(newest)]
    assert resumed().checkpoint == newest.with_name("step_00000012")
    assert newest.with_name(f"damaged_1_{newest.name}").exists()


@needs("src/tracking/report.py")
@needs("src/tools/checkpoints.py")
@pytest.mark.parametrize(("name", "times"), [(STATE, 220), (MANIFEST, 220), ("config.yaml", 60)])
def test_any_mutation_of_a_runs_files_ends_in_one_line(
    small_run: Path,
    resumed: Callable[[], ResumePoint],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    name: str,
    times: int,
) -> None:
    """And changes nothing outside the run's folder."""
    load, report = import_module("src.checkpoint.load"), import_module("src.tracking.report")
    verify = Tool("checkpoints", import_module("src.tools.checkpoints").main, capsys)
    newest, is_config = small_run / "checkpoints/step_00000014", name == "config.yaml"
    monkeypatch.chdir(small_run)
    monkeypatch.setattr(report, "draw_plots", lambda _: {})  # which take a second
    monkeypatch.setattr(files, "read_yaml", functools.cache(read_yaml))
    entries: list[Callable[[], object]] = [resumed, lambda: report.write_report([small_run], small_run / "report.html")]
    if not is_config:
        (small_run / "config.yaml").write_text("resume: auto")  # a longer one takes long to parse
        entries = [lambda: [*problems(newest)], lambda: read_state(newest), lambda: load.config_of(newest), resumed]
        entries += [lambda: load.find_model(str(small_run)), lambda: verify("verify", small_run)]
    intact = {path: path.read_bytes() for path in small_run.rglob("*") if path.is_file()}
    file = small_run / name if is_config else newest / name
    for seed in range(times):
        draw = random.Random(seed)
        content = mutated(intact[file], draw, not is_config)
        shutil.rmtree(small_run)
        for path, written in intact.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content if path == file else written)
        if name == STATE and draw.random() < 0.8:  # else the manifest tells
            relist(newest, name)
        for entry in entries:
            with contextlib.suppress(UserError, RunError):
                entry()
        outside = {path for path in tmp_path.rglob("*") if small_run not in path.parents}
        assert outside == {small_run.parent, small_run, small_run.parent / "x"}
        assert (small_run.parent / "x").read_text() == "precious"


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("model.safetensors", b"garbage"),
        ("model.safetensors", b""),
        ("model.safetensors", b"\xff" * 100),
        ("model.safetensors", save({"x": torch.zeros(3)})),
        ("data_state.json", b"{"),
        ("data_state.json", b"[" * 100_000),
    ],
    ids=["garbage", "no weights", "a header without end", "another model's weights", "damaged data", "deep data"],
)
def test_a_model_that_no_run_exported_is_one_line(whole: Whole, tmp_path: Path, name: str, content: bytes) -> None:
    run = whole("cpu", *ALL).folder
    model = shutil.copytree(run / "model", tmp_path / "model")
    (model / name).write_bytes(content)
    config = config_from(read_yaml((run / "config.yaml").read_bytes()), TASKS)
    with pytest.raises(UserError, match=f"^{model}: not as a run exports it: [^\n]*$"):
        config.task.load_export(model)


def test_an_optimizers_state_of_another_shape_is_refused(checkpoint: Path) -> None:
    model = MnistCnn()
    tensors = load_file(checkpoint / SHARD)
    with safe_open(checkpoint / SHARD, "pt") as opened:
        metadata = opened.metadata()
    name = next(name for name in tensors if name.endswith(".exp_avg") and tensors[name].ndim == 1)
    save_file(tensors | {name: torch.zeros(3)}, checkpoint / SHARD, metadata)
    with pytest.raises(UserError, match=rf"^{checkpoint} does not fit this model: {name} has shape \(3,\) in the "):
        load_tensors(checkpoint, model, build_optimizers(Optim(name="adamw"), model))
