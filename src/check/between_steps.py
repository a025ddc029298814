"""Evaluation and Checkpoint: check that the run's evaluation agrees with a single process's over the same examples, and
that the run resumes from a checkpoint bit for bit."""

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.utils.data import Subset

from src.check.context import CheckContext, checksum
from src.check.findings import EXACT, Row, finding, none_differ, relative_error, worst
from src.check.start import AT_ONCE, evaluating_less, spread
from src.checkpoint.files import discard
from src.checkpoint.resume import find_checkpoint, load_checkpoint
from src.checkpoint.rng import random_state
from src.checkpoint.store import Store
from src.checkpoint.tensors import run_tensors
from src.checkpoint.write import CheckpointWriter
from src.config.groups import Checkpoint
from src.tasks.base import samples
from src.training.evaluation import evaluate_on_one_process, metrics_of
from src.training.phases import in_phase
from src.training.progress import mean_loss
from src.training.run import Run

STEPS = 2
"""Steps to take after the checkpoint: a wrong optimizer state shows in the second one's loss."""
NOT_DETERMINISTIC = " does not have a deterministic implementation"
"""Torch's message after the name of an operator."""


def check_evaluation(context: CheckContext) -> Iterator[Row]:
    """Evaluate with noise on the weights. Each process evaluates everything by hand, as the model may be collective."""
    run, task, less = context.run, context.run.task, evaluating_less(context)
    with in_phase("evaluation", run):  # in which averages may stand for the weights
        context.perturb()
    run.model.train()
    before = _state(context)
    evaluation = context.evaluate(less, context.stop)
    after = _state(context)
    assert evaluation  # nothing stops it
    changed = [name for name in before if after[name] != before[name]]
    yield none_differ("state afterwards", changed, f"{', '.join(before)}: as before")
    by_hand = partial(evaluate_on_one_process, context.task, context.reference.eval(), device=run.device)
    loss, outputs = by_hand(less.eval_set, AT_ONCE)
    for name, expected in metrics_of(task, loss, len(less.eval_set), outputs).items():
        found = evaluation.metrics.get(name, math.nan)
        is_close = bool(np.isclose(found, expected, rtol=EXACT, atol=EXACT, equal_nan=True))
        yield finding(name, f"{found:.6g}", f"{expected:.6g} by hand", is_close)
    indices = spread(run.train_set, 32)
    together: Any = Subset(run.train_set, indices)  # type: ignore[arg-type]
    alone, kind = together, "examples"
    packed = max(samples(run.train_set, indices), key=lambda example: len(task.documents(example)))
    if len(documents := task.documents(packed)) > 1:
        together, alone, kind = [packed], documents, "packed documents"
    found, _ = by_hand(together, AT_ONCE)
    expected, _ = by_hand(alone, 1)
    yield worst("loss of examples alone", {f"{len(alone)} {kind}": relative_error(found, expected)}, EXACT)


def _state(context: CheckContext) -> dict[str, Any]:
    """Return what an evaluation must leave unchanged, by name: each module's mode, the random state and, instead of
    copies, checksums of this process's weights and optimizer state."""
    return {
        "mode": [module.training for module in context.unwrapped.modules()],
        "weights": checksum(context.run.parameters),
        "optimizer": checksum([[*optimizer.state.values()] for optimizer in context.run.optimizers]),
        # imports draw from Python's and numpy's
        "random numbers": random_state(context.run.device) | {"python": None, "numpy": None},
    }


def check_checkpoint(context: CheckContext) -> Iterator[Row]:
    """Save, take two steps, restore, and take them again. Delete the checkpoint, which is in the output folder."""
    run = context.run
    folder = run.config.folder / "tmp_check"
    # a run of fewer steps would not resume from a checkpoint of its end
    steps = max(2 * STEPS, run.total_steps)
    saved = context.at(
        STEPS, output_dir=str(folder), checkpoint=Checkpoint(), resume="auto", check=False, max_steps=steps
    )
    if run.is_main:
        discard(folder)  # of an earlier check that was killed
    run.accelerator.wait_for_everyone()
    # else results depend on the order of atomic additions; with warn_only=True flash attention's backward still would
    torch.use_deterministic_algorithms(run.device.type != "cpu")
    context.seed()
    try:
        store = Store(run.accelerator, saved.config)
        writer = CheckpointWriter(saved, store)
        writer.save(metrics_bytes=0, run_id="")
        writer.close()
        left = _continue(context, saved)
        resume = find_checkpoint(store)
        for optimizer in run.optimizers:
            optimizer.state.clear()  # as in a new process
        restored = replace(saved, resume=resume, progress=resume.progress)
        load_checkpoint(restored)
        again = _continue(context, restored)
        yield finding("losses and weights after resuming", again, left, again == left)
    except RuntimeError as error:
        operator, found, _ = str(error).partition(NOT_DETERMINISTIC)
        if not found:
            raise
        yield finding("not checked", operator, "has no deterministic implementation here", True)
    finally:
        torch.use_deterministic_algorithms(False)
        if run.is_main:
            discard(folder)


def _continue(context: CheckContext, run: Run) -> str:
    """Take the next steps. Return their losses and a checksum of this process's weights and optimizer state."""
    results = [context.step(run, context.micro_batches(run.progress.step)) for _ in range(STEPS)]
    losses = ", ".join(str(mean_loss(run.accelerator, result)) for result in results)
    left = checksum(sorted(run_tensors(run.model, run.optimizers).items()))
    return f"{losses}, checksum {left}, step {run.progress.step}"
