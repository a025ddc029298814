"""The folders of checkpoints: publishing one, telling whether it is whole, keeping the right ones."""

import contextlib
import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from src.checkpoint.output_folder import published
from src.config import Config
from src.process import UserError
from src.progress import score

MANIFEST = "manifest.json"
STATE = "state.json"
UNPUBLISHED = "tmp_"
"""How the names of folders begin that are being written or deleted; a crash leaves them."""


def step_folder(checkpoints: Path, step: int) -> Path:
    return checkpoints / f"step_{step:08d}"


def unpublished(checkpoint: Path) -> Path:
    """Where it is written before it is complete."""
    return checkpoint.with_name(f"{UNPUBLISHED}{checkpoint.name}")


def step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix("step_"))


def newest_first(checkpoints: Path) -> list[Path]:
    """The published ones, whole or damaged since."""
    return published(checkpoints)[::-1]


def read_state(checkpoint: Path) -> dict[str, Any]:
    return json.loads((checkpoint / STATE).read_text())


def file_facts(file: Path) -> dict[str, Any]:
    """Its entry in the manifest: size in bytes and SHA-256."""
    return {"bytes": file.stat().st_size, "sha256": _checksum(file)}


def write_json(file: Path, content: Any) -> None:
    """As `write_text`."""
    write_text(file, json.dumps(content, indent=2) + "\n")


def write_text(file: Path, text: str) -> None:
    """Whole or not at all, whenever the process or the machine stops."""
    unfinished = file.with_name(f"{UNPUBLISHED}{file.name}")
    with unfinished.open("w") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())
    unfinished.replace(file)


def publish(unpublished: Path, files: dict[str, Any], checkpoint: Path) -> None:
    """Gives a folder that is complete but for its manifest the name that makes it a checkpoint.

    Args:
        files: the manifest's entries by file name.

    Raises:
        OSError: among others where `checkpoint` exists.
    """
    write_json(unpublished / MANIFEST, {"files": files})
    _sync(unpublished)
    os.rename(unpublished, checkpoint)  # refuses to replace a folder with something in it
    _sync(checkpoint.parent)


def delete(checkpoint: Path) -> None:
    """At once by its name, then file by file: a crash in between leaves nothing that looks like a checkpoint."""
    doomed = checkpoint.with_name(f"{UNPUBLISHED}deleted_{checkpoint.name}")
    os.rename(checkpoint, doomed)
    if doomed.is_symlink():  # someone moved it to another disk: it is theirs
        doomed.unlink()
    else:
        shutil.rmtree(doomed)


def set_aside(checkpoint: Path) -> Path:
    """Renames a damaged one, so that it neither counts as one to keep nor is in the way of the next at its step."""
    number = 1
    while (aside := checkpoint.with_name(f"damaged_{number}_{checkpoint.name}")).exists():
        number += 1
    checkpoint.rename(aside)
    return aside


def sweep(checkpoints: Path) -> None:
    """Deletes what crashes left unfinished."""
    for path in checkpoints.glob(f"{UNPUBLISHED}*"):
        shutil.rmtree(path, ignore_errors=True)


def rotate(checkpoints: Path, config: Config) -> None:
    """Deletes checkpoints that are neither among the newest nor among the best. Damaged ones don't count, and stay."""
    whole = [path for path in newest_first(checkpoints) if not any(problems(path, contents=False))]
    newest = whole[: config.checkpoint.keep_last]
    best = best_first(whole, config)[: config.checkpoint.num_best] if config.checkpoint.num_best else []
    for path in whole:
        if path not in newest and path not in best:
            delete(path)


def best_first(checkpoints: list[Path], config: Config) -> list[Path]:
    """Those of a step that was evaluated, by checkpoint.metric; of equal ones the newest first."""
    judged = config.checkpoint
    scores = {
        step: score(results, judged.metric, judged.mode)
        for step, results in evaluations(config.folder).items()
        if judged.metric in results
    }
    evaluated = [path for path in checkpoints if step_of(path) in scores]
    return sorted(evaluated, key=lambda path: (scores[step_of(path)], step_of(path)), reverse=True)


def evaluations(run: Path) -> dict[int, dict[str, float]]:
    """What the evaluations in a run's metrics.jsonl gave, by their step; lines that are no records are passed over."""
    records = []
    for line in (run / "metrics.jsonl").read_text(errors="replace").splitlines():
        if line.startswith("{") and '"eval/' in line:
            with contextlib.suppress(ValueError):
                records.append(json.loads(line))
    return {
        record["step"]: {n: v for n, v in record.items() if n.startswith("eval/") and not isinstance(v, list)}
        for record in records
    }


def problems(checkpoint: Path, contents: bool = True, share: tuple[int, int] = (0, 1)) -> Iterator[str]:
    """What is wrong with it, in a few words each; nothing: it is whole. A missing rng_*.json is no problem.

    Args:
        contents: whether to compare checksums too, which reads all of it.
        share: (r, n): to look at every n-th file only, from the r-th on.

    Raises:
        ValueError: it may be whole, but is not this user's to read.
    """
    try:
        yield from _problems(checkpoint, contents, share)
    except PermissionError as error:
        raise UserError(f"{error.filename} cannot be read, {error.strerror}: have it made readable for you") from error
    except OSError as error:
        yield f"{error.filename} cannot be read, {error.strerror}"


def _problems(checkpoint: Path, contents: bool, share: tuple[int, int]) -> Iterator[str]:
    try:
        files = json.loads((checkpoint / MANIFEST).read_text())["files"]
        entries = [(str(name), int(facts["bytes"]), str(facts["sha256"])) for name, facts in files.items()]
    except FileNotFoundError:
        yield f"{MANIFEST} is missing"
        return
    except (ValueError, KeyError, TypeError, AttributeError):
        yield f"{MANIFEST} is damaged"
        return
    there = {path.name for path in checkpoint.iterdir()}
    for name in sorted(there - files.keys() - {MANIFEST}):
        yield f"{name} does not belong to it"
    if STATE not in files:
        yield f"{STATE} is not in the manifest"
    elif _is_damaged(checkpoint / STATE):
        yield f"{STATE} is damaged"
    first, every = share
    for name, size, checksum in entries[first::every]:
        file = checkpoint / name
        if file.parent != checkpoint or file.is_symlink():
            yield f"{name} is not a file in it"
        elif name not in there:
            if not name.startswith("rng_"):
                yield f"{name} is missing"
        elif file.stat().st_size != size:
            yield f"{name} has {file.stat().st_size:,} bytes, not {size:,}"
        elif contents and _checksum(file) != checksum:
            yield f"{name} has changed since it was saved"


def size_on_disk(checkpoint: Path) -> int:
    return sum(path.stat().st_size for path in checkpoint.iterdir())


def evaluation_of(checkpoint: Path) -> dict[str, float]:
    """The results of the evaluation after its step, by name; empty: there was none, or it is not beside its run."""
    progress = read_state(checkpoint)["progress"]
    if progress["evaluated"] == progress["step"]:
        return progress["evaluation"]
    record = checkpoint.parent.parent / "metrics.jsonl"
    return evaluations(checkpoint.parent.parent).get(progress["step"], {}) if record.exists() else {}


def _is_damaged(state: Path) -> bool:
    try:
        content = json.loads(state.read_text())
    except FileNotFoundError:
        return False  # said elsewhere
    except ValueError:
        return True
    return not isinstance(content, dict) or not {"progress", "config", "strategy", "num_processes"} <= content.keys()


def _checksum(file: Path) -> str:
    digest = hashlib.sha256()
    with file.open("rb") as stream:
        while piece := stream.read(2**20):
            digest.update(piece)
    return digest.hexdigest()


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
