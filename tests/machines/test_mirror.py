"""Copies of checkpoints elsewhere: a run goes on from them, exactly, on a fresh disk or on machines that share none."""

import contextlib
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from accelerate import Accelerator
from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem

from src.checkpoint.integrity import manifest, problems
from src.checkpoint.mirror import mirrored
from tests.faults.runs import ALL, TINY, assert_same_run, found, lines, refusal
from tests.launching import Launch, Run, Whole
from tests.s3 import s3_bucket
from train import run_settings

STOP: dict[str, Any] = {"FAULT": "die", "FAULT_STEP": "13"}
HELD_UP = """
import time
from fsspec.implementations.local import LocalFileSystem
from pathlib import Path
put_file, awaited = LocalFileSystem.put_file, Path("{}")
def put_later(fs, source, target, **_):
    while not awaited.exists():
        time.sleep(0.01)
    put_file(fs, source, target)
LocalFileSystem.put_file = put_later
"""
"""The mirror takes no file until this one of the run's is there, which it never is if the loop waits for that."""
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
    files, root = url_to_fs(str(mirror))
    files.invalidate_cache()
    paths = files.glob(f"{root}/mnist/step_*/manifest.json")
    return sorted(int(Path(path).parent.name.removeprefix("step_")) for path in paths)


@pytest.fixture
def s3(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    with s3_bucket(monkeypatch):
        yield "s3://bucket/runs"


def test_a_run_goes_on_from_another_disk(launch: Launch, whole: Whole, tmp_path: Path, s3: str) -> None:
    """And exports the best, which only the mirror has. Tried without the mirror's among the candidates: the last."""
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


def test_a_mirror_that_cannot_be_written_is_refused_at_the_start(tmp_path: Path) -> None:
    """Tried without: a traceback."""
    (tmp_path / "file").touch()
    for mirror, says in (
        (f"{tmp_path}/file/mirror", "Not a directory"),
        ("gcs://bucket/folder", "Please install gcsfs to access Google Storage"),
        ("ftpp://host/folder", "Protocol not known: ftpp"),
    ):
        (line,) = refusal(tmp_path / "run", f"--checkpoint.mirror={mirror}")
        assert line.startswith(f"checkpoint.mirror={mirror}: ")
        assert says in line
    assert not (tmp_path / "run").exists()
    with pytest.MonkeyPatch.context() as patch:  # another folder of this name, as on another machine
        patch.setattr(LocalFileSystem, "exists", lambda *_: False)
        (line,) = refusal(tmp_path / "run", f"--checkpoint.mirror={tmp_path}/mirror")
    assert line == f"checkpoint.mirror={tmp_path}/mirror: not the same place on all machines"
    assert not any(tmp_path.glob("mirror/mnist/*"))


def test_the_log_comes_back_with_the_checkpoint(whole: Whole, tmp_path: Path) -> None:
    """The log of another history is set aside. Tried without: it is too short; after the checkpoint: it is missing for
    good if a kill comes between. A branch is refused until told so."""
    run, mirror = whole("cpu", *ALL).folder, f"--checkpoint.mirror={tmp_path}/mirror"
    copy = tmp_path / "mirror" / "mnist" / "step_00000012"
    shutil.copytree(run / "checkpoints" / copy.name, copy)
    shutil.copy(run / "metrics.jsonl", copy)
    fresh, behind = tmp_path / "fresh", tmp_path / "behind"
    (refused,) = refusal(tmp_path / "branch", mirror, f"--resume={run}/checkpoints/step_00000008")
    assert "already holds a run whose newest" in refused
    assert found(fresh, mirror).checkpoint == fresh / "checkpoints" / copy.name
    behind.mkdir()
    (behind / "metrics.jsonl").write_text("another\n")
    found(behind, mirror)
    assert (behind / "damaged_1_metrics.jsonl").read_text() == "another\n"
    with pytest.MonkeyPatch.context() as patch:  # killed once the checkpoint is there
        patch.setattr("src.checkpoint.mirror.say", Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            found(tmp_path / "killed", mirror)
    again = shutil.copytree(tmp_path / "killed", tmp_path / "again")  # without the first one's lock
    assert found(again, mirror).checkpoint == again / "checkpoints" / copy.name
    logs = {folder: (folder / "metrics.jsonl").read_bytes() for folder in (run, fresh, behind)}
    assert logs[fresh] == logs[behind] == logs[run]


def settings(folder: Path, *more: str) -> Any:
    """Those of a run in this folder, with its mirror beside it."""
    return run_settings([f"--output_dir={folder}/run", f"--checkpoint.mirror={folder}/mirror", *more])


def test_a_machine_that_shares_no_disk_reads_all_its_files(whole: Whole, tmp_path: Path) -> None:
    """Of a checkpoint that it fetched before. Tried with a part for each process: damage to the others' is not seen."""
    checkpoint = tmp_path / "step_00000012"
    shutil.copytree(whole("cpu", *ALL).folder / "checkpoints" / checkpoint.name, checkpoint)
    # what the helpers gather with is this process alone; the other one does not see its disk
    one_of_two = Mock(wraps=Accelerator(cpu=True), process_index=0, num_processes=2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("src.checkpoint.mirror.gather_object", Mock(side_effect=[[True, False], [True, True]]))
        patch.setattr("src.checkpoint.mirror.local_main_process_first", contextlib.nullcontext)
        with mirrored(one_of_two, settings(tmp_path)) as store:
            assert store.first_valid([checkpoint]) == (checkpoint, {})
            for file in manifest(checkpoint):
                content = (checkpoint / file).read_bytes()
                (checkpoint / file).write_bytes(content[:-1] + b" ")
                assert store.first_valid([checkpoint])[0] is None, file
                (checkpoint / file).write_bytes(content)


def on_machines(
    launch: Launch, folder: Path, *arguments: str, machines: int = 2, turned: int = 0, before: str = "", **more: Any
) -> tuple[Run, list[str]]:
    """A run on machines without a shared disk, of one process each, whose ranks are turned by so many, and what each of
    them fetched."""
    words = (*TINY, "--task.dropout=0", *arguments, f"--checkpoint.mirror={folder}/mirror", "--output_dir=run")
    before = MACHINE.format(folder=folder, turned=turned, machines=machines) + before
    more["launcher_arguments"] = (f"--num_machines={machines}", "--machine_rank=0", "--main_process_ip=127.0.0.1")
    run = launch("ddp", *words, folder=folder / f"machine{turned}/run", before=before, processes=machines, **more)
    return run, [log.read_text() for log in folder.glob("machine*/fetched")]


def test_machines_without_a_shared_disk_go_on_exactly(launch: Launch, whole: Whole, tmp_path: Path) -> None:
    """Where the second is now the first, and without the second. Each fetches what it lacks, once."""
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


def test_a_mirror_that_hangs_does_not_hold_up_the_loop(launch: Launch, whole: Whole, tmp_path: Path) -> None:
    """Tried with a copy that waits for the one before: it hangs; with deleting what is copied: files are missing."""
    folder, mirror = tmp_path / "run", tmp_path / "mirror"
    arguments = (*TINY, "--save_every=2", "--checkpoint.keep_last=1", f"--checkpoint.mirror={mirror}")
    last = folder / "checkpoints" / "step_00000014" / "manifest.json"
    run = launch("cpu", *arguments, folder=folder, before=HELD_UP.format(last)).succeeded()
    assert [line.rpartition("_")[2] for line in lines(run, "mirrored to ")] == ["00000002", "00000014"]
    assert list(lines(run, "WARNING: ")) == [
        f"WARNING: {folder}/checkpoints/step_{step:08d} is not in the mirror: {mirror}/mnist is slower than the saves"
        for step in (4, 6, 8, 10, 12)
    ]
    assert in_mirror(mirror) == [14]
    assert_same_run(run, whole("cpu", *ALL))


def test_the_end_of_a_run_waits_for_the_copy(whole: Whole, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless the run fails. Tried without waiting: the mirror has nothing."""
    put_file = LocalFileSystem.put_file

    def put_slowly(*arguments: Any, **_: Any) -> None:
        time.sleep(0.2)
        put_file(*arguments)

    monkeypatch.setattr(LocalFileSystem, "put_file", put_slowly)
    shutil.copytree(whole("cpu", *ALL).folder, tmp_path / "run")
    config = settings(tmp_path)
    store: Any
    with contextlib.suppress(KeyboardInterrupt), mirrored(Accelerator(cpu=True), config) as store:
        store.rotate({})
        raise KeyboardInterrupt
    assert in_mirror(tmp_path / "mirror") == []
    store.copier.join()
    shutil.rmtree(tmp_path / "mirror")
    with mirrored(Accelerator(cpu=True), config) as store:
        store.rotate({})
    assert in_mirror(tmp_path / "mirror") == [14]


def test_a_mirror_that_hangs_at_the_end_is_given_up(
    whole: Whole, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """When it took nothing for half of timeout_minutes. Tried without: it waits for ever."""
    answers, put_file = threading.Event(), LocalFileSystem.put_file
    monkeypatch.setattr(LocalFileSystem, "put_file", lambda *arguments, **_: answers.wait() and put_file(*arguments))
    shutil.copytree(whole("cpu", *ALL).folder, tmp_path / "run")
    store: Any
    with mirrored(Accelerator(cpu=True), settings(tmp_path, "--timeout_minutes=1e-4")) as store:
        store.rotate({})
    says = f"WARNING: {tmp_path}/mirror/mnist accepts nothing, and lacks the newest checkpoint\n"
    assert capfd.readouterr().out == says
    assert in_mirror(tmp_path / "mirror") == []
    answers.set()
    store.copier.join()
    assert in_mirror(tmp_path / "mirror") == [14]


def test_a_copy_that_makes_progress_may_take_longer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Than half of timeout_minutes, which pass five times here. Tried with a limit for all of it: a warning."""
    store: Any
    copying = Mock()
    copying.ready = lambda: copying.wait.call_count == 5
    with mirrored(Accelerator(cpu=True), settings(tmp_path)) as store:
        copying.wait.side_effect = lambda _: store._accepted.relative_update()
        monkeypatch.setattr(store, "copier", Mock(apply_async=lambda *_: copying))
    assert copying.wait.call_count == 5


SLOW = """
import time
from fsspec.implementations.local import LocalFileSystem
put_file = LocalFileSystem.put_file
def put_slowly(fs, source, target, **_):
    if "shard-00002" in source and "step_00000004" in source:
        time.sleep(20)
    put_file(fs, source, target)
LocalFileSystem.put_file = put_slowly
"""


@pytest.mark.slow
def test_a_machine_may_take_longer_than_the_timeout_to_copy(launch: Launch, tmp_path: Path) -> None:
    """20 seconds, of 12. Tried with the loop's timeout for the writers' group: a traceback of gloo."""
    run, _ = on_machines(launch, tmp_path, "--timeout_minutes=0.2", before=SLOW)
    run.succeeded()
    assert in_mirror(tmp_path / "mirror") == [12, 14]


def test_killed_at_any_moment_of_a_copy(launch: Launch, whole: Whole, tmp_path: Path) -> None:
    """What mirror_kills.py asserts. Tried with the manifest first: it counts."""
    state = whole("cpu", *ALL).folder / "checkpoints" / "step_00000012" / "state.json"
    run = launch("cpu", str(tmp_path), str(state), script="tests/machines/mirror_kills.py").succeeded()
    (line,) = lines(run, "killed ")
    _, kills, _, _, *steps = line.split()
    assert int(kills) >= 20
    assert set(steps) == {"2", "3"}
    (warning,) = lines(run, "WARNING: ")
    assert warning.startswith(f"WARNING: {tmp_path}/run/checkpoints/step_00000003 is not in the mirror: ")
