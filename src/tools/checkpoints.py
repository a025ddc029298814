"""Look after checkpoints: python -m src.tools.checkpoints list|verify|export|diff PATH...

list PATH...            what is there: step, size, what saved it, how it was evaluated
verify PATH...          whether each is whole: sizes and checksums; exit code 1 if one is not
export PATH [FOLDER]    the model as a run exports it, on one CPU; FOLDER: model_step_... beside `checkpoints`
diff PATH PATH          settings, progress and tensors that differ; exit code 1 if any do

PATH is a checkpoint (step_...), or a run's output folder: all of its checkpoints, for `export` the newest.
"""

import json
import sys
from collections.abc import Iterator
from dataclasses import asdict
from datetime import datetime
from pathlib import Path

import torch

from src.checkpoint.export import export_weights, replacing
from src.checkpoint.folder import list_checkpoints
from src.checkpoint.format import MANIFEST, STATE, evaluation_of, problems, read_state
from src.checkpoint.hub import write_card
from src.checkpoint.load import config_of, load_model
from src.checkpoint.rng import absent_random_file
from src.checkpoint.tensors import read, saved_tensors
from src.config.errors import UserError
from src.config.settings import flatten
from src.distributed.process import exit_codes

RUN_SPECIFIC = ("seconds", "output_dir", "run_name", "wandb_id", "metrics_bytes")
"""What differs even between two runs that are the same."""


def list_(paths: list[str]) -> int:
    """Print a line for each. Sizes are compared with the manifest, contents are not."""
    for path in _checkpoints(paths):
        if wrong := next(problems(path, contents=False), None):
            print(f"{path}  DAMAGED: {wrong}")
            continue
        state = read_state(path)
        size = sum(file.stat().st_size for file in path.iterdir()) / 1e6
        saved = datetime.fromtimestamp((path / MANIFEST).stat().st_mtime)
        under = f"{state.strategy} x {state.num_processes}"
        evaluated = "  ".join(f"{name} {value:.4g}" for name, value in evaluation_of(path).items())
        print(f"{path}  {size:>9,.1f} MB  {saved:%Y-%m-%d %H:%M}  {under:<12}  {evaluated}")
    return 0


def verify(paths: list[str]) -> int:
    """Read all of each checkpoint and print whether it is whole; return 1 if any is not."""
    is_damaged = False
    for path in _checkpoints(paths):
        wrong = "; ".join(problems(path))
        is_damaged |= bool(wrong)
        absent = "" if wrong else absent_random_file(path, read_state(path).num_processes)
        print(f"{path}  {wrong or 'whole'}" + (f", but {absent}" if absent else ""))
    return int(is_damaged)


def export(paths: list[str]) -> int:
    """Check the checkpoint and write its model."""
    source, *named = paths
    if len(named) > 1:
        raise UserError("export: takes one checkpoint, and one folder to write")
    path = _whole(source, contents=True)
    folder = Path(*named) if named else path.parent.parent / f"model_{path.name}"
    if folder.exists():
        raise UserError(f"{folder}: exists already; name another folder")
    config = config_of(path)
    model = load_model(path, config)
    with replacing(folder) as unfinished:
        export_weights(config, model, model.state_dict(), unfinished)
        write_card(config, evaluation_of(path), unfinished)  # room: hub
    print(folder)
    return 0


def diff(paths: list[str]) -> int:
    """Print what differs; tensors are compared one by one, by the largest absolute difference of a value."""
    if len(paths) != 2:
        raise UserError("diff: takes two checkpoints")
    first, second = (_whole(path, contents=False) for path in paths)
    lines = list(_differences(first, second))
    print("\n".join(lines) or "the same")
    return 1 if lines else 0


def _differences(first: Path, second: Path) -> Iterator[str]:
    then, now = (dict(flatten(asdict(read_state(path)))) for path in (first, second))
    for name in {**then, **now}:
        if then.get(name) != now.get(name) and not name.endswith(RUN_SPECIFIC):
            yield f"{name}  {json.dumps(then.get(name))} -> {json.dumps(now.get(name))}"
    facts = [saved_tensors(path) for path in (first, second)]
    for name in {**facts[0], **facts[1]}:
        kinds = [f"{tuple(of[name].size)} {of[name].properties.dtype}" if name in of else "not there" for of in facts]
        if kinds[0] != kinds[1]:
            yield f"{name}  {kinds[0]} -> {kinds[1]}"
            continue
        a, b = (torch.empty(of[name].size, dtype=of[name].properties.dtype) for of in facts)
        read(first, {name: a})
        read(second, {name: b})
        if not torch.equal(a, b):
            yield f"{name}  differs by up to {(a.double() - b.double()).abs().max():.3g}"


def _checkpoints(paths: list[str]) -> Iterator[Path]:
    for path in map(Path, paths):
        found = list_checkpoints(path / "checkpoints") or list_checkpoints(path)
        if not found and not (path / STATE).exists() and not (path / MANIFEST).exists():
            raise UserError(f"{path}: neither a checkpoint nor a folder with any")
        yield from found or [path]


def _whole(source: str, contents: bool) -> Path:
    path = next(_checkpoints([source]))
    if wrong := next(problems(path, contents), None):
        raise UserError(f"{path}: {wrong}")
    return path


COMMANDS = {"list": list_, "verify": verify, "export": export, "diff": diff}


def main(argv: list[str]) -> int:
    """Run a command; return its exit code. Raise a UserError if it makes no sense, or may not read its files."""
    if not argv or argv[0] in ("-h", "--help"):
        print(__doc__)
        return 0
    command, *paths = argv
    if command not in COMMANDS:
        raise UserError(f"{command}: must be one of {', '.join(COMMANDS)}")
    if not paths:
        raise UserError(f"{command}: name a checkpoint or a run's output folder")
    try:
        return COMMANDS[command](paths)
    except PermissionError as error:
        raise UserError(f"{error.filename}: {error.strerror}") from error


if __name__ == "__main__":
    with exit_codes("checkpoint"):
        sys.exit(main(sys.argv[1:]))
