"""Looks after checkpoints: python -m src.checkpoint list|verify|export|diff PATH...

list PATH...            what is there: step, size, what saved it, how it was evaluated
verify PATH...          whether each is whole: sizes and checksums; exit code 1 where one is not
export PATH [FOLDER]    the model as a run exports it, on one CPU; FOLDER: model_step_... beside `checkpoints`
diff PATH PATH          settings, progress and tensors that differ; exit code 1 where there are any

PATH is a checkpoint (step_...), or a run's output folder: all of its checkpoints, for `export` the newest.
"""

import json
import sys
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path

from src.process import UserError
from src.checkpoint import folders
from src.checkpoint.rng import absent_random_file
from src.process import exit_codes
from src.settings import flatten

OF_ITS_OWN = ("seconds", "output_dir", "run_name", "wandb_id", "metrics_bytes")
"""What differs between two runs that are the same."""


def main(argv: list[str]) -> int:
    """Returns: the exit code.

    Raises:
        ValueError: what was asked for makes no sense.
    """
    commands: dict[str, Callable[[list[str]], int]] = {
        "list": list_checkpoints, "verify": verify, "export": export, "diff": diff
    }  # fmt: skip
    if not argv or argv[0] in ("-h", "--help"):
        print(__doc__)
        return 0
    if argv[0] not in commands:
        raise UserError(f"{argv[0]}: must be one of {', '.join(commands)}")
    if not argv[1:]:
        raise UserError(f"{argv[0]}: of which checkpoint or run?")
    return commands[argv[0]](argv[1:])


def list_checkpoints(paths: list[str]) -> int:
    """Prints a line each. Sizes are compared with the manifest, contents not."""
    for path in _all(paths):
        if wrong := next(folders.problems(path, contents=False), None):
            print(f"{path}  DAMAGED: {wrong}")
            continue
        state = folders.read_state(path)
        saved = datetime.fromtimestamp((path / folders.MANIFEST).stat().st_mtime)
        under = f"{state['strategy']} x {state['num_processes']}"
        results = folders.evaluation_of(path)
        print(
            f"{path}  {_size(folders.size_on_disk(path)):>9}  {saved:%Y-%m-%d %H:%M}  {under:<12}  "
            + "  ".join(f"{name} {value:.4g}" for name, value in results.items())
        )
    return 0


def verify(paths: list[str]) -> int:
    """Reads all of each checkpoint."""
    is_whole = True
    for path in _all(paths):
        wrong = list(folders.problems(path))
        is_whole = is_whole and not wrong
        absent = "" if wrong else absent_random_file(path, folders.read_state(path)["num_processes"])
        print(f"{path}  {'; '.join(wrong) or 'whole'}" + (f", but {absent}" if absent else ""))
    return 0 if is_whole else 1


def export(paths: list[str]) -> int:
    """Writes the model, having checked the checkpoint.

    Memory: the model, as the task builds it; its tensors are then read into place.
    """
    source, *rest = paths
    path = next(_all([source]))
    if wrong := next(folders.problems(path), None):
        raise UserError(f"{path}: {wrong}")
    folder = Path(rest[0]) if rest else path.parent.parent / f"model_{path.name}"
    if folder.exists():
        raise UserError(f"{folder}: is there already, name another folder")

    from accelerate.utils import set_seed

    from src.checkpoint.frozen import frozen_norm, require_same_frozen
    from src.checkpoint.tensors import read_model
    from src.config import config_from
    from src.export import export_weights, replacing

    state = folders.read_state(path)
    config = config_from(state["config"])
    config.task.load_data_state(state["from_data"])
    set_seed(config.seed)
    model = config.task.build_model()
    require_same_frozen(path, state["frozen_norm"], frozen_norm(model))
    read_model(path, model)
    with replacing(folder) as unfinished:
        export_weights(config, model, model.state_dict(), folders.evaluation_of(path), unfinished)
    print(folder)
    return 0


def diff(paths: list[str]) -> int:
    """Prints what differs; tensors are compared one by one, by the largest absolute difference of a value."""
    if len(paths) != 2:
        raise UserError("diff: takes two checkpoints")
    first, second = (next(_all([path])) for path in paths)
    for path in (first, second):
        if wrong := next(folders.problems(path, contents=False), None):
            raise UserError(f"{path}: {wrong}")
    lines = [*_differing_facts(first, second), *_differing_tensors(first, second)]
    print("\n".join(lines) or "the same")
    return 1 if lines else 0


def _differing_facts(first: Path, second: Path) -> Iterator[str]:
    then, now = (dict(flatten(folders.read_state(path))) for path in (first, second))
    for name in {**then, **now}:
        if then.get(name) != now.get(name) and not name.endswith(OF_ITS_OWN):
            yield f"{name}  {json.dumps(then.get(name))} -> {json.dumps(now.get(name))}"


def _differing_tensors(first: Path, second: Path) -> Iterator[str]:
    import torch

    from src.checkpoint.tensors import read, saved_tensors

    facts = [saved_tensors(path) for path in (first, second)]
    for name in {**facts[0], **facts[1]}:
        if absent := [str(path) for path, there in zip((first, second), facts, strict=True) if name not in there]:
            yield f"{name}  not in {absent[0]}"
            continue
        a, b = (torch.empty(there[name].size, dtype=there[name].properties.dtype) for there in facts)
        if a.shape != b.shape or a.dtype != b.dtype:
            yield f"{name}  {tuple(a.shape)} {a.dtype} -> {tuple(b.shape)} {b.dtype}"
            continue
        read(first, {name: a})
        read(second, {name: b})
        if not torch.equal(a, b):
            yield f"{name}  differs by up to {(a.double() - b.double()).abs().max():.3g}"


def _all(paths: list[str]) -> Iterator[Path]:
    for path in map(Path, paths):
        found = folders.newest_first(path / "checkpoints") or folders.newest_first(path)
        if not found and not (path / folders.STATE).exists() and not (path / folders.MANIFEST).exists():
            raise UserError(f"{path}: neither a checkpoint nor a folder with any")
        yield from found or [path]


def _size(count: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"


if __name__ == "__main__":
    with exit_codes("checkpoint"):
        sys.exit(main(sys.argv[1:]))
