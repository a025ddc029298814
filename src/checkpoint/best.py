"""The best checkpoints: which they are, and the export of the best one."""

from collections.abc import Callable

from accelerate.utils import broadcast_object_list

from src.checkpoint.folder import list_checkpoints
from src.checkpoint.format import step_of
from src.checkpoint.integrity import first_valid
from src.checkpoint.rotation import best_first
from src.checkpoint.tensors import load_tensors
from src.training.run import Run


def load_best(run: Run, say: Callable[[str], None]) -> dict[str, float] | None:
    """Load the weights of the best checkpoint into the model, say so, and return its evaluation; None if there is no
    valid checkpoint that was evaluated. Collective."""
    mirror, evaluations = run.resume.mirror, run.progress.evaluations
    own = mirror.candidates() if mirror else list_checkpoints(run.config.folder / "checkpoints")
    (candidates,) = broadcast_object_list([best_first(own, run.config.checkpoint, evaluations)])
    best, damaged = first_valid(run.accelerator, candidates, mirror)
    for path, why in damaged.items():
        say(f"WARNING: {path}: {why}")
    if best is None:
        say("WARNING: no checkpoint of a step that was evaluated: exporting the last weights, not the best")
        return None
    say(f"exporting the best of the checkpoints, {best}")
    load_tensors(best, run.model)
    return evaluations[step_of(best)]
