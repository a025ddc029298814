"""Copies of checkpoints elsewhere: a run resumes from them exactly, on a fresh disk or on machines that share none."""

import contextlib
import itertools
import json
import shutil
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from accelerate import Accelerator
from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem
from safetensors.torch import save_file

from src.checkpoint.files import file_facts, publish
from src.checkpoint.integrity import manifest, problems
from src.checkpoint.mirror import MirroredStore, mirrored
from src.checkpoint.rng import random_state
from tests.faults.runs import ALL, TINY, assert_same_run, found, lines, refusal
from tests.launching import Launch, Run, Whole
from tests.s3 import s3_bucket
from train import run_settings

STOP: dict[str, Any] = {"FAULT": "die", "FAULT_STEP": "13"}
MACHINE = """
import os
from fsspec.implementations.local import LocalFileSystem
group = (int(os.environ["GROUP_RANK"]) + {turned}) % {machines}
os.makedirs(f"{folder}/machine{{group}}", exist_ok=True)
os.chdir(f"{folder}/machine{{group}}")
get = LocalFileSystem.get
def noted(fs, source, target):
    with open("fetched", "a") as log:
        log.write(f"{{os.path.basename(os.path.dirname(source))}} ")
    return get(fs, source, target)
LocalFileSystem.get = noted
"""
"""Each machine has a folder of its own, in which it notes what it fetches."""


def in_mirror(mirror: Path | str) -> list[int]:
    """Return the steps of the complete checkpoints."""
    files, root = url_to_fs(str(mirror))
    files.invalidate_cache()
    paths = files.glob(f"{root}/mnist/step_*/manifest.json")
    return sorted(int(Path(path).parent.name.removeprefix("step_")) for path in paths)


def settings(folder: Path, *more: str) -> Any:
    """Return the settings of a run in this folder, with its mirror beside it."""
    return run_settings([f"--output_dir={folder}/run", f"--checkpoint.mirror={folder}/mirror", *more])


@pytest.fixture
def s3(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    with s3_bucket(monkeypatch):
        yield "s3://bucket/runs"


def test_a_run_resumes_on_another_disk(launch: Launch, whole: Whole, tmp_path: Path, s3: str) -> None:
    """It also exports the best checkpoint, which only the mirror has."""
    best = (*TINY, "--checkpoint.keep_last=1", "--checkpoint.export_best=true", "--checkpoint.mode=max")
    mirror = f"--checkpoint.mirror={s3}"
    assert launch("cpu", *best, mirror, folder=tmp_path / "first" / "run", **STOP).exit_code != 0
    assert in_mirror(s3) == [8, 12]
    run = launch("cpu", *best, mirror, folder=tmp_path / "second" / "run").succeeded()
    fetched = [line.rpartition("_")[2] for line in lines(run, f"fetched from {s3}/mnist/step_")]
    assert fetched == ["00000012", "00000008"]
    assert in_mirror(s3) == [8, 14]
    assert_same_run(run, whole("cpu", *best))
    (refused,) = refusal(tmp_path / "third", mirror, "--resume=never")
    assert refused.startswith(f"output_dir={tmp_path}/third: already holds a run (checkpoint.mirror); choose another ")


@pytest.mark.parametrize(
    ("mirror", "says"),
    [
        ("{folder}/file/mirror", "Not a directory"),
        ("gcs://bucket/folder", "Please install gcsfs to access Google Storage"),
        ("ftpp://host/folder", "Protocol not known: ftpp"),
        ("{folder}/mirror", "not the same place on all machines"),
    ],
)
def test_an_unwritable_mirror_is_refused_at_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mirror: str, says: str
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setattr(LocalFileSystem, "exists", lambda *_: False)  # as on a machine that has another folder there
    mirror = mirror.format(folder=tmp_path)
    (line,) = refusal(tmp_path / "run", f"--checkpoint.mirror={mirror}")
    assert line.startswith(f"checkpoint.mirror={mirror}: ")
    assert says in line
    assert not any(tmp_path.glob("mirror/mnist/*"))


def test_the_log_comes_back_with_the_checkpoint(whole: Whole, tmp_path: Path) -> None:
    """The log of a different history is set aside. A branch must not write into another run's mirror."""
    run, mirror = whole("cpu", *ALL).folder, f"--checkpoint.mirror={tmp_path}/mirror"
    copy = tmp_path / "mirror" / "mnist" / "step_00000012"
    shutil.copytree(run / "checkpoints" / copy.name, copy)
    shutil.copy(run / "metrics.jsonl", copy)
    (refused,) = refusal(tmp_path / "branch", mirror, f"--resume={run}/checkpoints/step_00000008")
    assert "already holds a run whose newest" in refused
    (folder := tmp_path / "run").mkdir()
    (folder / "metrics.jsonl").write_text("another\n")
    assert found(folder, mirror).checkpoint == folder / "checkpoints" / copy.name
    assert (folder / "metrics.jsonl").read_bytes() == (run / "metrics.jsonl").read_bytes()
    assert (folder / "damaged_1_metrics.jsonl").read_text() == "another\n"


# ------------------------------------------------------------------------------------------ machines that share no disk
def on_machines(
    launch: Launch, folder: Path, *arguments: str, machines: int = 2, turned: int = 0, before: str = "", **more: Any
) -> tuple[Run, list[str]]:
    """Run one process on each machine, with ranks turned by so many. Return the run, and what each machine fetched."""
    words = (*TINY, "--task.dropout=0", *arguments, f"--checkpoint.mirror={folder}/mirror", "--output_dir=run")
    before = MACHINE.format(folder=folder, turned=turned, machines=machines) + before
    more["launcher_arguments"] = (f"--num_machines={machines}", "--machine_rank=0", "--main_process_ip=127.0.0.1")
    run = launch("ddp", *words, folder=folder / f"machine{turned}/run", before=before, processes=machines, **more)
    return run, [log.read_text() for log in folder.glob("machine*/fetched")]


def test_machines_without_a_shared_disk_resume_exactly(launch: Launch, whole: Whole, tmp_path: Path) -> None:
    """With their ranks swapped, and without the second one. Each machine fetches what it lacks, once."""
    expected = whole("ddp", *TINY, "--task.dropout=0")
    folder, fewer = tmp_path / "two", tmp_path / "one"
    killed, _ = on_machines(launch, folder, **STOP)
    assert killed.exit_code != 0
    for checkpoint in folder.glob("machine*/run/checkpoints/step_*"):
        assert any(problems(checkpoint)), "only the mirror has all of it"
    assert in_mirror(folder / "mirror") == [8, 12]
    shutil.copytree(folder, fewer)
    copy = fewer / "mirror" / "mnist" / "step_00000012.bak"
    shutil.copytree(copy.with_suffix(""), copy)
    turned, fetched = on_machines(launch, folder, turned=1)
    assert_same_run(turned.succeeded(), expected)
    assert fetched == ["step_00000012 "] * 2
    assert in_mirror(folder / "mirror") == [12, 14]
    alone, fetched = on_machines(launch, fewer, machines=1)
    assert alone.succeeded().losses == pytest.approx(expected.losses, rel=1e-5)
    assert fetched == ["step_00000012 "]
    assert copy.exists(), "a user's own copy is no checkpoint"


def test_a_machine_without_a_shared_disk_verifies_all_files(whole: Whole, tmp_path: Path) -> None:
    """As no other process sees them. The others wait for its copies for longer than timeout_minutes."""
    checkpoint = tmp_path / "step_00000012"
    shutil.copytree(whole("cpu", *ALL).folder / "checkpoints" / checkpoint.name, checkpoint)
    one_of_two = Mock(wraps=Accelerator(cpu=True), process_index=0, num_processes=2)
    with pytest.MonkeyPatch.context() as patch:
        # whether each process sees the main process's disk, and its mirror
        patch.setattr("src.checkpoint.mirror.gather_object", Mock(side_effect=[[True, False], [True, True]]))
        patch.setattr("src.checkpoint.mirror.local_main_process_first", contextlib.nullcontext)
        with mirrored(one_of_two, settings(tmp_path)) as store:
            assert store.timeout == timedelta(days=1)
            assert store.first_valid([checkpoint]) == (checkpoint, {})
            for file in manifest(checkpoint):
                content = (checkpoint / file).read_bytes()
                (checkpoint / file).write_bytes(content[:-1] + b" ")
                assert store.first_valid([checkpoint])[0] is None, file
                (checkpoint / file).write_bytes(content)


# ---------------------------------------------------------------------------------------- mirrors that are slow or hang
def test_a_mirror_that_hangs_does_not_hold_up_training(launch: Launch, whole: Whole, tmp_path: Path) -> None:
    """It takes no file until the run's last checkpoint is there."""
    folder, mirror = tmp_path / "run", tmp_path / "mirror"
    arguments = (*TINY, "--save_every=2", "--checkpoint.keep_last=1", f"--checkpoint.mirror={mirror}")
    last = folder / "checkpoints" / "step_00000014" / "manifest.json"
    hangs = (
        "import os, time\nfrom fsspec.implementations.local import LocalFileSystem\n"
        "put_file = LocalFileSystem.put_file\ndef put_later(files, source, target, **_):\n"
        f"    while not os.path.exists('{last}'):\n        time.sleep(0.01)\n    put_file(files, source, target)\n"
        "LocalFileSystem.put_file = put_later\n"
    )
    run = launch("cpu", *arguments, folder=folder, before=hangs).succeeded()
    assert [line.rpartition("_")[2] for line in lines(run, "mirrored to ")] == ["00000002", "00000014"]
    assert list(lines(run, "WARNING: ")) == [
        f"WARNING: {folder}/checkpoints/step_{step:08d} is not in the mirror: {mirror}/mnist is slower than the saves"
        for step in (4, 6, 8, 10, 12)
    ]
    assert in_mirror(mirror) == [14]
    assert_same_run(run, whole("cpu", *ALL))


@pytest.mark.parametrize(
    ("error", "minutes", "at_the_end", "says"),
    [
        (None, 30, [14], ""),
        (KeyboardInterrupt, 30, [], ""),
        (None, 1e-4, [], "WARNING: {}/mirror/mnist accepts nothing, and lacks the newest checkpoint\n"),
    ],
    ids=["done", "failed", "hangs"],
)
def test_the_end_of_a_run_waits_for_the_copy(
    whole: Whole, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str],
    error: Any, minutes: float, at_the_end: list[int], says: str,
) -> None:  # fmt: skip
    """Unless the run failed, or the mirror took nothing for half of timeout_minutes."""
    answers, put_file = threading.Event(), LocalFileSystem.put_file
    monkeypatch.setattr(LocalFileSystem, "put_file", lambda *words, **_: answers.wait() and put_file(*words))
    shutil.copytree(whole("cpu", *ALL).folder, tmp_path / "run")
    store: Any
    config = settings(tmp_path, f"--timeout_minutes={minutes}")
    with contextlib.suppress(KeyboardInterrupt), mirrored(Accelerator(cpu=True), config) as store:
        store.rotate({})
        if at_the_end:
            threading.Timer(1, answers.set).start()
        if error:
            raise error
    assert capfd.readouterr().out.startswith(says.format(tmp_path))
    assert in_mirror(tmp_path / "mirror") == at_the_end
    answers.set()
    store.copier.join()
    assert in_mirror(tmp_path / "mirror") == [14]


def test_a_copy_that_makes_progress_may_take_longer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Than half of timeout_minutes, which pass five times here."""
    store: Any
    copying = Mock()
    copying.ready = lambda: copying.wait.call_count == 5
    with mirrored(Accelerator(cpu=True), settings(tmp_path)) as store:
        copying.wait.side_effect = lambda _: store._accepted.relative_update()
        monkeypatch.setattr(store, "copier", Mock(apply_async=lambda *_: copying))
    assert copying.wait.call_count == 5


# ------------------------------------------------------------------------------------ copies that are killed or damaged
class Killed(BaseException):
    """Stands for the process's death."""


def kill_at(number: int, patch: pytest.MonkeyPatch) -> None:
    """Die in the operation of this number on the mirror; each counts twice: at its beginning and in its middle."""
    left = iter(range(number, -1, -1))

    def count() -> None:
        if next(left) == 0:
            raise Killed

    def halve(name: str, do_half: Callable[..., Any]) -> None:
        original = getattr(LocalFileSystem, name)

        def patched(files: LocalFileSystem, *arguments: Any, **named: Any) -> Any:
            count()
            do_half(*arguments)
            count()
            return original(files, *arguments, **named)

        patch.setattr(LocalFileSystem, name, patched)

    def write_half(target: str, content: bytes) -> None:
        Path(target).parent.mkdir(exist_ok=True)
        Path(target).write_bytes(content[: len(content) // 2])

    halve("put_file", lambda source, target: write_half(target, Path(source).read_bytes()))
    halve("pipe_file", write_half)
    halve("mv", lambda *_: None)
    halve("rm", lambda folder: next(Path(folder).iterdir()).unlink())


def open_store(folder: Path, name: str) -> MirroredStore:
    words = [f"--output_dir={folder / name}", f"--checkpoint.mirror={folder}/mirror", "--checkpoint.keep_last=2"]
    return MirroredStore(Accelerator(cpu=True), run_settings(words))


@pytest.fixture
def three(whole: Whole, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Small checkpoints of steps 1 to 3 in tmp_path/run, of which only the first two are in tmp_path/mirror. Copies are
    made at once, in this thread."""
    at_once = Mock(apply_async=lambda function, arguments: function(*arguments))
    monkeypatch.setattr("src.checkpoint.mirror.ThreadPool", lambda _: at_once)
    state = json.loads((whole("cpu", *ALL).folder / "checkpoints/step_00000012/state.json").read_text())
    saved = [tmp_path / "run/checkpoints" / f"step_{step:08d}" for step in (1, 2, 3)]
    for step, checkpoint in enumerate(saved, start=1):
        (unfinished := checkpoint.with_name("tmp_")).mkdir(parents=True)
        state["progress"]["step"], state["metrics_bytes"] = step, 10 * step
        (unfinished / "state.json").write_text(json.dumps(state))
        (unfinished / "rng_00001.json").write_text(json.dumps(random_state(torch.device("cpu"))))
        save_file({"model.weight": torch.rand(200)}, unfinished / "shard-00001.safetensors")
        (tmp_path / "run/metrics.jsonl").write_text("123456789\n" * step)
        publish(unfinished, {path.name: file_facts(path) for path in unfinished.iterdir()}, checkpoint)
        if step < 3:
            open_store(tmp_path, "run").rotate({})
    return saved


def test_killed_at_any_moment_of_a_copy_it_leaves_a_complete_one(three: list[Path], tmp_path: Path) -> None:
    """The next copy is made anew, and what was left behind is gone."""
    mirror, steps = tmp_path / "mirror", []
    shutil.copytree(mirror, tmp_path / "before")
    for kill in itertools.count():
        shutil.rmtree(mirror)
        shutil.copytree(tmp_path / "before", mirror)
        store, is_killed = open_store(tmp_path, "run"), True
        with pytest.MonkeyPatch.context() as patch, contextlib.suppress(Killed):
            kill_at(kill, patch)
            store.rotate({})
            is_killed = False
        elsewhere = open_store(tmp_path, f"fresh{kill}")
        newest, damaged = elsewhere.first_valid(elsewhere.checkpoints())
        assert newest is not None, kill
        assert (damaged, list(problems(newest))) == ({}, []), kill
        steps.append(int(newest.name[-1]))
        assert (newest.parent.parent / "metrics.jsonl").read_text() == "123456789\n" * steps[-1]
        open_store(tmp_path, "run").rotate({})
        assert {path.name for path in (mirror / "mnist").iterdir()} == {"step_00000002", "step_00000003"}
        if not is_killed:
            break
    assert set(steps) == {2, 3}
    assert steps == sorted(steps)


def test_a_damaged_checkpoint_is_replaced_by_the_mirrors(
    three: list[Path], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """If it is damaged there too, the one before is taken. A mirror that fails later is a warning."""
    _, second, third = three
    shard, store = third / "shard-00001.safetensors", open_store(tmp_path, "run")
    store.rotate({})
    shard.write_bytes(bytes(1000))
    assert store.first_valid([third]) == (third, {})
    assert not any(problems(third))
    copy = tmp_path / "mirror/mnist" / third.name / shard.name
    copy.write_bytes(bytes(copy.stat().st_size))
    shard.unlink()
    assert store.first_valid(store.checkpoints()) == (second, {third: f"{shard.name} has changed since it was saved"})
    shutil.rmtree(tmp_path / "mirror")
    (tmp_path / "mirror").write_text("a disk that fails")
    capfd.readouterr()
    store.rotate({})
    assert capfd.readouterr().out.startswith(f"WARNING: {third} is not in the mirror: ")
