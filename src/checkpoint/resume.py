"""Which checkpoint a run continues from, and putting the run back to where it was."""

import atexit
import contextlib
import dataclasses
import fcntl
import importlib.metadata
import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from accelerate.utils import broadcast_object_list, gather_object, set_seed
from torch import nn
from torch.optim import Optimizer

from src.process import UserError
from src.checkpoint import folders
from src.checkpoint.frozen import require_same_frozen
from src.checkpoint.rng import absent_random_file, random_file, restore_random_state
from src.checkpoint.output_folder import folder_errors, saved_settings
from src.config import Config, steps_of
from src.launch import Launch
from src.progress import Progress
from src.settings import flatten
from src.process import SIGNALS

OF_THE_END = (
    "epochs", "max_steps", "early_stopping", "push_to_hub", "task.lora.merge", "checkpoint.export_best",
    "checkpoint.metric", "checkpoint.mode",
)  # fmt: skip
"""Settings, or groups, of which a change makes a finished run go on, or export its model anew."""
PATIENCE_SECONDS = 40
"""What a launcher gives its processes to end, and a little more."""


@dataclass(frozen=True)
class Found:
    """What there is to continue from."""

    checkpoint: Path | None = None
    """None: the run starts at its beginning."""
    state: dict[str, Any] = field(default_factory=dict)
    """Its state.json."""
    notes: list[str] = field(default_factory=list)
    """What the user should know about the choice, a line each."""
    is_finished: bool = False
    """There is nothing left to do."""

    @property
    def progress(self) -> Progress:
        return Progress(**self.state.get("progress", {}))

    @property
    def summary(self) -> str:
        """In a line; empty where there is no checkpoint."""
        if self.checkpoint is None:
            return ""
        return (
            f"after step {self.progress.step:,}, from {self.checkpoint}, "
            f"saved under {self.state['strategy']} x {self.state['num_processes']}"
        )

    def is_own(self, config: Config) -> bool:
        """Whether it is of the run in this output folder, not of another that this one branches off from."""
        own = config.folder / "checkpoints"  # which may be a link to another disk
        return self.checkpoint is not None and self.checkpoint.parent.resolve() == own.resolve()


def about(config: Config, launch: Launch, examples: int, fingerprints: list[str], frozen_norm: float) -> dict[str, Any]:
    """What a checkpoint says about the run it is of.

    Args:
        examples: to train on.
        fingerprints: of the data to train and to evaluate on, where this process writes it and compares it.
        frozen_norm: of the model before it was prepared.
    """
    return {
        "config": config.model_dump(mode="json"),
        "from_data": config.task.data_state(),
        "examples": examples,
        "data": fingerprints,
        "frozen_norm": frozen_norm,
        "strategy": launch.strategy,
        "precision": launch.precision,
        "num_processes": launch.num_processes,
        "versions": {name: importlib.metadata.version(name) for name in ("torch", "accelerate", "transformers")},
    }


def find(accelerator: Accelerator, config: Config) -> Found:
    """The newest valid checkpoint of the output folder, or else the one that it is to branch off from. All processes
    look together.

    Raises:
        ValueError: none is valid, or continuing from it would make another run of it.
    """
    own = config.folder / "checkpoints"
    if accelerator.is_main_process:
        _lock(config.folder)
        if own.is_symlink() and own.exists():
            _lock(own)  # two runs must not write into one
        if mistakes := list(folder_errors(config)):  # the one that held the lock may have changed what is there
            raise UserError("\n".join(mistakes))
        folders.sweep(own)
    if config.resume == "never":
        return Found()
    candidates = folders.newest_first(own) + ([config.parent_checkpoint] if config.parent_checkpoint else [])
    checkpoint, damaged = _first_whole(accelerator, candidates)
    if checkpoint is None:
        if not damaged:
            is_begun = (config.folder / "metrics.jsonl").exists()
            return Found(notes=[f"starting over: {config.folder} has no checkpoint yet"] if is_begun else [])
        lines = [f"{path}: {why}" for path, why in damaged.items()]
        advice = f"move {config.folder} away to start over" if own.exists() else "choose another --resume"
        raise UserError("\n".join([*lines, f"no valid checkpoint to continue from: {advice}"]))
    seen = [(folders.read_state(checkpoint), _has_ended(config))]
    broadcast_object_list(seen)  # by the main process: file systems tell machines news at different times
    state, has_ended = seen[0]
    found = Found(checkpoint, state, [f"passed over and set aside: {path}, {why}" for path, why in damaged.items()])
    if accelerator.is_main_process and found.is_own(config):
        _require_whole_record(config, found)
    _check_changes(config, found)
    watched, watches = state["config"]["early_stopping"], config.early_stopping.model_dump(mode="json")
    if (watched["metric"], watched["mode"]) != (watches["metric"], watches["mode"]):
        state["progress"] |= {"best": None, "evaluations_without_gain": 0}
    if accelerator.is_main_process:
        for path in damaged:  # of this run: the one to branch off from is the last candidate
            folders.set_aside(path)
    return dataclasses.replace(found, is_finished=has_ended and found.is_own(config))


def restore(
    accelerator: Accelerator,
    config: Config,
    found: Found,
    model: nn.Module,
    optimizers: list[Optimizer],
    now: dict[str, Any],
) -> None:
    """Weights, optimizer state and random numbers, in place. Collective.

    Args:
        model, optimizers: as prepared; no step taken yet.
        now: of `about`.

    Raises:
        ValueError: the checkpoint is of another model, or of other data.
    """
    assert found.checkpoint
    then = found.state
    require_same_frozen(found.checkpoint, then["frozen_norm"], now["frozen_norm"])
    if not config.checkpoint.accept_changes:
        _require_same_data(found.checkpoint, then, now)
    differing = {name: (then["versions"][name], now["versions"][name]) for name in now["versions"]}
    differing["precision"] = (then["precision"], now["precision"])
    if changes := ", ".join(f"{name} {old} -> {new}" for name, (old, new) in differing.items() if old != new):
        found.notes.append(f"changed since: {changes}: what follows differs by rounding")
    from src.checkpoint import tensors  # DCP takes half a second to import

    tensors.restore(found.checkpoint, model, optimizers)
    set_seed((config.seed + found.progress.step + accelerator.process_index) % 2**32)
    if then["num_processes"] != now["num_processes"]:
        return  # each process's dropout is its own: there is no continuing it on another number of them
    if absent := absent_random_file(found.checkpoint, now["num_processes"]):
        found.notes.append(f"WARNING: {absent}")
    else:
        restore_random_state(found.checkpoint / random_file(accelerator.process_index), accelerator.device)


def read_best(
    accelerator: Accelerator, config: Config, model: nn.Module, say: Callable[[str], None]
) -> dict[str, float] | None:
    """Puts the weights of the best checkpoint into the model, and says so. Collective.

    Returns:
        Its evaluation; None where no checkpoint was evaluated, or could be saved.
    """
    own = folders.newest_first(config.folder / "checkpoints")
    best, damaged = _first_whole(accelerator, folders.best_first(own, config))
    for path, why in damaged.items():
        say(f"WARNING: {path}: {why}")
    if best is None:
        say("WARNING: no checkpoint of a step that was evaluated: exporting the last weights, not the best")
        return None
    say(f"exporting the best of the checkpoints, {best}")
    from src.checkpoint import tensors

    tensors.read_model(best, model)
    return folders.evaluation_of(best)


def _first_whole(accelerator: Accelerator, candidates: list[Path]) -> tuple[Path | None, dict[Path, str]]:
    """The first that is whole of those that the main process sees, and what is wrong with the ones before. Collective:
    each process reads its share of the files."""
    damaged: dict[Path, str] = {}
    for checkpoint in gather_object([candidates])[0]:
        share = accelerator.process_index, accelerator.num_processes
        if not (problems := gather_object(list(folders.problems(checkpoint, share=share)))):
            return checkpoint, damaged
        damaged[checkpoint] = problems[0]
    return None, damaged


def _lock(folder: Path) -> None:
    """Waits until no other process of this machine writes into this run; held until this one ends.

    Raises:
        ValueError: one still does.
    """
    if not folder.exists():
        atexit.register(_delete_if_empty, folder)
    for second in range(PATIENCE_SECONDS):
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if SIGNALS.name:  # status.json is the other one's
                SIGNALS.die()
            if second == 0:
                print(f"{folder}: another process still writes this run, waiting for it to end", flush=True)
        except OSError:  # not on this file system
            return
        else:
            if folder.exists() and os.path.samestat(os.fstat(descriptor), folder.stat()):
                return  # else the other one, refused, deleted the folder that was locked
        os.close(descriptor)
        time.sleep(1)
    raise UserError(f"output_dir={folder}: another process writes this run; stop it, or choose another --run_name")


def _has_ended(config: Config) -> bool:
    """Tell whether the run has come to the end that is asked for now, and its model is there."""
    then, now = (dict(flatten(values)) for values in (saved_settings(config.folder), config.model_dump(mode="json")))
    prefixes = tuple(f"{name}." for name in OF_THE_END)
    is_there = (config.folder / "summary.json").exists() and (config.folder / "model").exists()
    return is_there and all(then.get(n) == now.get(n) for n in {*then, *now} if f"{n}.".startswith(prefixes))


def _delete_if_empty(folder: Path) -> None:
    """A run that is refused leaves nothing behind."""
    with contextlib.suppress(OSError):
        folder.rmdir()


def _require_whole_record(config: Config, found: Found) -> None:
    """Raises: ValueError: metrics.jsonl, which the run would go on writing, is not the one that it wrote."""
    record = config.folder / "metrics.jsonl"
    content, saved = record.read_bytes() if record.exists() else b"", found.state["metrics_bytes"]
    if saved and content[saved - 1 : saved] != b"\n" and not config.checkpoint.accept_changes:
        was = f"{len(content):,} bytes, and had {saved:,}" if len(content) < saved else "other lines than"
        raise UserError(
            f"{record} has {was} when {found.checkpoint} was saved: bring it back, branch off with another --run_name "
            f"and --resume={found.checkpoint}, or continue all the same with --checkpoint.accept_changes=true"
        )


def _require_same_data(checkpoint: Path, then: dict[str, Any], now: dict[str, Any]) -> None:
    """Raises: ValueError: the data are not those that the checkpoint was trained on."""
    changes = []
    if then["examples"] != now["examples"]:
        changes.append(f"{then['examples']:,} examples to train on -> {now['examples']:,}")
    for name, value in now["from_data"].items():
        if name in then["from_data"] and then["from_data"][name] != value:
            changes.append(f"{name} {json.dumps(then['from_data'][name])} -> {json.dumps(value)}")
    parts = zip(("to train on", "to evaluate on"), then.get("data", []), now["data"], strict=False)
    changed = [part for part, before, after in parts if before != after]
    if changed and not changes:
        changes.append(f"other text, images or labels {' and '.join(changed)}")
    if changes:
        raise UserError(
            f"{checkpoint} is of a run with other data: {'; '.join(changes)}: bring them back, choose another "
            f"--run_name, or continue all the same with --checkpoint.accept_changes=true"
        )


def _check_changes(config: Config, found: Found) -> None:
    """Notes the settings that changed.

    Raises:
        ValueError: some would make another run of it, and nobody asked for that.
    """
    saved, examples = found.state["config"], found.state["examples"]
    extent, others = config.changes_since(saved)
    _, before = steps_of(saved["max_steps"], saved["epochs"], -(-examples // saved["global_batch_size"]))
    _, after = config.steps(-(-examples // config.global_batch_size))
    pairs = {**extent, **others}.items()
    changes = ", ".join(f"{name} {json.dumps(old)} -> {json.dumps(new)}" for name, (old, new) in pairs)
    if extent and after < before:
        others |= extent
        changes += f" (the learning rate's schedule then spans {after} steps, not {before})"
    if others and not config.checkpoint.accept_changes:
        raise UserError(
            f"{found.checkpoint} is of a run with other settings: {changes}; set them back, choose another --run_name, "
            f"or continue all the same with --checkpoint.accept_changes=true"
        )
    if changes:
        found.notes.append(f"changed since: {changes}")
