"""Check that a checkpoint's files are as they were saved, and set damaged checkpoints aside."""

import itertools
import os
from collections.abc import Iterator
from pathlib import Path

import torch

from src.checkpoint.compatibility import read_state
from src.checkpoint.files import MANIFEST, STATE, file_facts, is_checkpoint_name, read_json, reading, step_of
from src.checkpoint.rng import restore_random_state
from src.checkpoint.tensors import saved_tensors
from src.config.errors import RunError, UserError

RUN_COPIES = "metrics.jsonl", "config.yaml"
"""Files of the run that a mirror keeps beside each checkpoint."""
Damaged = dict[Path, str]
"""What is wrong with each damaged checkpoint."""


def manifest(checkpoint: Path) -> dict[str, tuple[int, str]]:
    """Return a checkpoint's manifest: size and SHA-256 of each file, by name. Raise a RunError if it is not one."""
    content = read_json(file := checkpoint / MANIFEST)
    with reading(file):
        return {name: (int(facts["bytes"]), str(facts["sha256"])) for name, facts in content["files"].items()}


def problems(checkpoint: Path, contents: bool = True, shard: tuple[int, int] = (0, 1)) -> Iterator[str]:
    """Yield what is wrong with a checkpoint, in a few words each. Raise a UserError if this user may not read
    a file.

    Args:
        contents: whether to compare checksums too, which reads every file.
        shard: (r, n): check only every n-th file, starting at the r-th.
    """
    try:
        there = {path.name: path.is_file() and not path.is_symlink() for path in checkpoint.iterdir()}
        if MANIFEST not in there:
            yield f"{MANIFEST} is missing"
            return
        files = manifest(checkpoint)
        wrong = [f"{name} is an unexpected file" for name in sorted(there.keys() - files - {MANIFEST, *RUN_COPIES})]
        # nor may the manifest lead to other folders, links, or pipes, on which whoever reads all shards would wait
        wrong += [f"{name} is missing" for name in files if not there.get(name)]
        yield from wrong
        if wrong:
            return
        for name, (size, checksum) in [*files.items()][shard[0] :: shard[1]]:
            file = checkpoint / name
            if file.stat().st_size != size:
                yield f"{name} has {file.stat().st_size:,} bytes, not {size:,}"
            elif contents and file_facts(file)["sha256"] != checksum:
                yield f"{name} has changed since it was saved"
            elif contents and name.startswith("rng"):
                restore_random_state(file, torch.device("cpu"))  # seeded anew when it is loaded
        if contents and shard[0] == 0:
            saved_tensors(checkpoint)
        saved = read_state(checkpoint).progress.step
        if is_checkpoint_name(checkpoint.name) and saved != step_of(checkpoint):
            yield f"{STATE} is of step {saved}: rename the folder back"
    except RunError as error:
        yield str(error).removeprefix(f"{checkpoint}/")
    except PermissionError as error:
        raise UserError(f"{error.filename} cannot be read, {error.strerror}: ask for permission to read it") from error
    except OSError as error:
        yield f"{error.filename} cannot be read, {error.strerror}"
    except UserError:
        pass  # of another version, as is said where it is loaded


def require_intact(checkpoint: Path) -> None:
    """Raise a UserError if the checkpoint is damaged."""
    if wrong := next(problems(checkpoint), None):
        raise UserError(f"{checkpoint}: {wrong}")


def quarantine(path: Path) -> None:
    """Rename a damaged checkpoint or file, if it exists, so that it neither counts nor blocks a new one of its name."""
    names = (path.with_name(f"damaged_{number}_{path.name}") for number in itertools.count(1))
    if path.exists():
        path.rename(next(name for name in names if not os.path.lexists(name)))
