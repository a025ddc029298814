"""Inspect and export checkpoints: python -m src.tools.checkpoints list|verify|export PATH...

`list` shows each checkpoint, `verify` also compares checksums, `export` writes the model as a run would, on one CPU.
PATH is a checkpoint (step_...) or a run's output folder, which stands for all its checkpoints; `export` takes the
newest. The exit code is 1 if a checkpoint is damaged.
"""

import argparse
import sys
from datetime import datetime
from pathlib import Path

from src.checkpoint.compatibility import read_state
from src.checkpoint.export import export_weights, replacing, write_cards
from src.checkpoint.files import MANIFEST, list_checkpoints
from src.checkpoint.integrity import problems, require_intact
from src.checkpoint.load import config_of, is_checkpoint_folder, load_trained_model
from src.config.errors import UserError
from src.config.terminal import say
from src.distributed.process import exit_codes
from src.training.evaluation import evaluation_line


def print_line(path: Path, contents: bool) -> bool:
    """Print lines about a checkpoint. Return whether its files have the right sizes and, if `contents`, checksums."""
    if wrong := "; ".join(problems(path, contents)):
        say(f"{path}  DAMAGED: {wrong}")
        return False
    state = read_state(path)
    size = sum(file.lstat().st_size for file in path.iterdir()) / 1e6
    saved = datetime.fromtimestamp((path / MANIFEST).stat().st_mtime)
    say(
        f"{path}  {size:,.1f} MB  {saved:%Y-%m-%d %H:%M}  {state.origin.strategy} x {state.origin.num_processes}",
        f"  {evaluation_line(evaluation_of(path)) or 'without metrics'}",
    )
    return True


def evaluation_of(checkpoint: Path) -> dict[str, float]:
    """Return the metrics of the evaluation at this checkpoint; empty if there was none."""
    progress = read_state(checkpoint).progress
    return progress.evaluations.get(progress.step, {})


def export_checkpoint(path: Path, folder: Path) -> None:
    """Write the model of a checkpoint as a run would export it, on one CPU. Raise a UserError if the folder exists."""
    if folder.exists():
        raise UserError(f"{folder}: already exists; choose another folder")
    config = config_of(path)
    model = load_trained_model(path, config)
    with replacing(folder) as unfinished:
        cards = export_weights(config.task, model, model.state_dict(), unfinished)
        write_cards(config, cards, evaluation_of(path), unfinished)


def find(source: Path) -> list[Path]:
    """Return the checkpoints at a PATH, the newest first. Raise a UserError if there are none."""
    found = list_checkpoints(source / "checkpoints") or list_checkpoints(source)
    if not found and not is_checkpoint_folder(source):
        raise UserError(f"{source}: neither a checkpoint nor a folder with checkpoints")
    return found or [source]


def main(argv: list[str]) -> int:
    """Run the command. Return 1 if a checkpoint is damaged, otherwise 0."""
    parser = argparse.ArgumentParser("python -m src.tools.checkpoints", description=__doc__)
    parser.add_argument("command", choices=["list", "verify", "export"])
    parser.add_argument("paths", nargs="+", type=Path, metavar="PATH")
    parser.add_argument("--output", type=Path, help="folder for `export`; default: model_step_... in the run's")
    options = parser.parse_args(argv)
    checkpoints = [path for source in options.paths for path in find(source)]
    if options.command == "export":
        newest = checkpoints[0]
        folder = options.output or newest.parent.parent / f"model_{newest.name}"
        require_intact(newest)
        export_checkpoint(newest, folder)
        say(f"{folder}")
        return 0
    are_intact = [print_line(path, options.command == "verify") for path in checkpoints]
    return 0 if all(are_intact) else 1


if __name__ == "__main__":
    with exit_codes("checkpoint"):
        sys.exit(main(sys.argv[1:]))
