"""Copies a checkpoint to a mirror, and is killed before and in the middle of each file: `… FOLDER STATE_FILE`."""

import json
import os
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from fsspec.implementations.local import LocalFileSystem
from safetensors.torch import save_file

from src.checkpoint.compatibility import read_state
from src.checkpoint.files import STATE, file_facts, publish
from src.checkpoint.integrity import problems
from src.checkpoint.mirror import MirroredStore
from src.checkpoint.rng import random_state
from train import run_settings

FOLDER, STATE_FILE = Path(sys.argv[1]), Path(sys.argv[2])
ACCELERATOR = Accelerator(cpu=True)


def store_of(name: str) -> MirroredStore:
    """As a start with this output folder sees it."""
    arguments = [f"--output_dir={FOLDER / name}", f"--checkpoint.mirror={FOLDER}/mirror", "--checkpoint.keep_last=2"]
    return MirroredStore(ACCELERATOR, run_settings(arguments))


def save(step: int) -> Path:
    """A small checkpoint in the folder `run`."""
    checkpoint = FOLDER / "run" / "checkpoints" / f"step_{step:08d}"
    unfinished = checkpoint.with_name("tmp_")
    unfinished.mkdir(parents=True)
    state = json.loads(STATE_FILE.read_text())
    state["progress"]["step"], state["metrics_bytes"] = step, 10 * step
    (unfinished / STATE).write_text(json.dumps(state))
    for number in range(1, 5):
        save_file({f"model.{number}": torch.rand(200)}, unfinished / f"shard-0000{number}.safetensors")
    (unfinished / "rng_00001.json").write_text(json.dumps(random_state(torch.device("cpu"))))
    (FOLDER / "run" / "metrics.jsonl").write_text("123456789\n" * step)
    (FOLDER / "run" / "config.yaml").write_text(f"log_every: {step}")
    publish(unfinished, {path.name: file_facts(path) for path in unfinished.iterdir()}, checkpoint)
    return checkpoint


def copy(store: MirroredStore) -> None:
    """The newest, as after it was saved."""
    store.rotate({})
    store.copier.close()
    store.copier.join()


def kill_at(number: int) -> None:
    """In this process, before the operation of this number on the mirror; each counts twice: in its middle too."""
    left = iter(range(number, -1, -1))

    def count() -> None:
        if next(left) == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    def patch(name: str, begin: Callable[..., Any]) -> None:
        original = getattr(LocalFileSystem, name)

        def patched(self: LocalFileSystem, *arguments: Any, **named: Any) -> Any:
            count()
            begin(*arguments)
            count()
            return original(self, *arguments, **named)

        setattr(LocalFileSystem, name, patched)

    def write_half(target: str, content: bytes) -> None:
        Path(target).parent.mkdir(exist_ok=True)
        Path(target).write_bytes(content[: len(content) // 2])

    patch("put_file", lambda source, target, **_: write_half(target, Path(source).read_bytes()))
    patch("pipe_file", write_half)
    patch("mv", lambda *_: None)
    patch("rm", lambda folder: next(Path(folder).iterdir()).unlink())


for step in (1, 2):
    save(step)
    copy(store_of("run"))
third = save(3)
second = third.with_name("step_00000002")
shutil.copytree(FOLDER / "mirror", FOLDER / "before")
kills, found = 0, []
while True:
    shutil.rmtree(FOLDER / "mirror")
    shutil.copytree(FOLDER / "before", FOLDER / "mirror")
    if not (child := os.fork()):
        store = store_of("run")
        kill_at(kills)
        copy(store)
        os._exit(0)
    is_killed = os.waitpid(child, 0)[1] == signal.SIGKILL
    elsewhere = store_of(f"fresh{kills}")
    newest, damaged = elsewhere.first_valid(elsewhere.checkpoints())
    assert newest is not None, kills
    assert not damaged, damaged
    assert not any(problems(newest)), kills
    assert (newest.parent.parent / "metrics.jsonl").read_text() == "123456789\n" * read_state(newest).progress.step
    found.append(read_state(newest).progress.step)
    copy(store_of("run"))  # it is copied anew, and what was left behind is gone
    steps = {path.name for path in (FOLDER / "mirror" / "mnist").iterdir()}
    assert steps == {second.name, third.name}, steps
    if not is_killed:
        break
    kills += 1
assert found == sorted(found)

store = store_of("run")
(third / "shard-00001.safetensors").write_bytes(bytes(1000))  # is replaced by the mirror's
assert store.first_valid([third]) == (third, {})
assert not any(problems(third))
for shard in (FOLDER / "mirror" / "mnist").glob("*/shard-00001.safetensors"):  # damaged there too: the one before
    shard.write_bytes(bytes(shard.stat().st_size)) if shard.parent.name == third.name else None
(third / "shard-00001.safetensors").unlink()
newest, damaged = store.first_valid(store.checkpoints())
assert newest == second, newest
assert damaged == {third: "shard-00001.safetensors has changed since it was saved"}
assert store.checkpoints() == [third, second]

shutil.rmtree(FOLDER / "mirror")
(FOLDER / "mirror").write_text("a disk that fails")
copy(store)
print("killed", kills, "times, found", *found)
