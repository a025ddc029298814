"""Checks 7 and 8, Evaluation and Checkpoint: the run's own evaluation gives what one process finds over the same
examples; saved and restored, the run continues identically, to the last bit."""

import math
import shutil
import warnings
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch.utils.data import Subset

from src.check.findings import EXACT, Row, finding, finding_alike, gather, norm
from src.check.reference import evaluate_by_hand
from src.check.start import reading_indices
from src.check.subject import Subject, checksum
from src.checkpoint.resume import find_checkpoint
from src.checkpoint.rng import random_state
from src.checkpoint.tensors import run_tensors
from src.checkpoint.write import CheckpointWriter
from src.config.groups import Checkpoint
from src.training.batches import EVALUATION_FACTOR, evaluation_batches
from src.training.gradients import to_local
from src.training.progress import mean_loss
from src.training.run import Run

MOST_EXAMPLES = 9_999
"""Most examples to evaluate, as every process goes through all of them."""
STEPS = 2
"""Steps to take after the checkpoint: the optimizer's state shows in the second one's loss."""
NOT_DETERMINISTIC = " does not have a deterministic implementation"
"""What torch says after the name of an operator."""

CHANGED = (
    "training goes on from something else: evaluate() must end with model.train(), put weights back that it swaps "
    "(EMA), leave the optimizer's state alone, and draw random numbers from a generator of its own"
)
FEWER_BATCHES = (
    "a process has fewer batches than others, which wait for it: without an example left, it has to compute on a dummy "
    "batch of weight 0"
)
WRONG_MEAN = (
    "a mean of each process's or each batch's mean, or counted padding: sum and count over all examples, or compute it "
    "from all of them, gathered in order"
)
FORGOTTEN = (
    "the checkpoint forgets something: the optimizer's state (the second loss differs, not the first), the random "
    "numbers or the position in the data"
)


def check_evaluation(subject: Subject) -> Iterator[Row]:
    """Evaluate with noise on the weights. All processes compute the whole set by hand, as a model may be collective."""
    run, count = subject.run, len(subject.run.eval_set)
    share = EVALUATION_FACTOR * run.world_size  # examples of a batch, at a micro-batch size of one
    size = max(1, min(run.config.micro_batch(run.world_size), count // (3 * share)))  # several batches
    length = min(count, MOST_EXAMPLES)
    length -= (length - 1) % (size * share)  # the last batch is one example: the others compute on a dummy
    dataset: Any = Subset(run.eval_set, range(length))  # type: ignore[arg-type]
    shortened = replace(subject.at(0, micro_batch_size=size), eval_set=dataset)
    num_batches = sum(1 for _ in evaluation_batches(reading_indices(shortened)))
    batches = finding_alike("batches", str(num_batches), FEWER_BATCHES, num_batches > 0)
    yield batches
    if batches["result"] == "fail":
        return
    meanwhile: list[dict[str, Any]] = []  # empty if the task calls a part of the model only

    def look(*_: Any) -> None:
        meanwhile.append(_state(subject))
        hook.remove()

    subject.copy_to_reference()
    with subject.perturbed():
        run.model.train()
        before = _state(subject)
        hook = subject.unwrapped.register_forward_pre_hook(look, prepend=True)  # before FSDP gathers the weights
        evaluation = subject.evaluate(shortened, subject.stop)
        hook.remove()
        after = _state(subject)
        by_hand = evaluate_by_hand(run.task, subject.reference, dataset, size)
    assert evaluation  # as no one asks it to stop
    found, expected = evaluation.metrics, gather(by_hand)[0]
    examples = found["eval/examples"]
    cause = "examples are counted twice, as padding, or left out"
    yield finding(f"examples, of {count:,}", f"{examples:,}", f"{length:,}", examples == length, cause)
    changed = ", ".join(name for name in before if after[name] != before[name])
    measured = f"changed: {changed}" if changed else ", ".join(before)
    yield finding("afterwards", measured, "as before", not changed, CHANGED)
    cause = WRONG_MEAN
    if any(state["mode"][0] for state in meanwhile):
        cause = "dropout and the like are on: evaluate() must begin with model.eval()"
    elif any(state["weights"] != before["weights"] for state in meanwhile):
        cause = "the metrics are those of other weights, such as an average of them (EMA)"
    for name in sorted(expected.keys() - {"examples"}):
        here, there = found.get(f"eval/{name}", math.nan), expected[name]
        is_close = math.isclose(here, there, rel_tol=EXACT, abs_tol=EXACT) or (math.isnan(here) and math.isnan(there))
        yield finding(name, f"{here:.6g}, by hand {there:.6g}", f"within {EXACT:g}", is_close, cause)


def _state(subject: Subject) -> dict[str, Any]:
    """Return what an evaluation must leave as it was, by name: the mode of each module, and as norms, for which nothing
    is copied, this process's part of the weights and of the optimizers' state."""
    states = [value for of in subject.run.optimizers for state in of.state.values() for value in state.values()]
    return {
        "mode": [module.training for module in subject.unwrapped.modules()],
        "weights": norm(map(to_local, subject.run.parameters)),
        "optimizer": norm(map(to_local, states)),
        "random numbers": {**random_state(subject.run.device), "python": None, "numpy": None},  # imports draw from them
    }


def check_checkpoint(subject: Subject) -> Iterator[Row]:
    """Save, take two steps, restore, and take them again; the folder for it, in the output folder, is then deleted."""
    run, on_cpu = subject.run, subject.run.device.type == "cpu"
    if subject.drifted():
        yield finding("not examined", "the replicas differ, and a checkpoint has one of them")
        return
    refusing = None if on_cpu else _without_deterministic_algorithm(subject)
    if refusing:
        yield finding("not examined", f"{refusing} is not reproducible on this device, so no two steps are the same")
        return
    folder, messages = run.config.folder / "tmp_check", list[str]()
    saved = subject.at(STEPS, output_dir=str(folder), checkpoint=Checkpoint(), resume="auto", check=False)
    saved.metadata = run.metadata | {"config": saved.config.model_dump(mode="json")}
    if run.is_main:
        shutil.rmtree(folder, ignore_errors=True)  # left by an examination that was killed
        folder.mkdir(parents=True)
    run.accelerator.wait_for_everyone()
    # else the order of atomic additions shows; with warn_only=True, that of flash attention's backward pass still would
    torch.use_deterministic_algorithms(not on_cpu)
    subject.seed()
    try:
        writer = CheckpointWriter(saved, messages.append)
        writer.save({})
        writer.close()
        if writer.newest is None:
            cause = "a checkpoint can't be written to the output folder"
            yield finding("saved", messages[-1], "saved", False, cause)
            return
        losses, left = _continue(subject, saved)
        resume = find_checkpoint(run.accelerator, saved.config)
        for optimizer in run.optimizers:
            optimizer.state.clear()  # as in a new process
        restored = replace(saved, resume=resume, progress=resume.progress)
        subject.restore(restored)
        losses_again, left_again = _continue(subject, restored)
        run.accelerator.wait_for_everyone()
    finally:
        torch.use_deterministic_algorithms(False)
        if run.is_main:
            shutil.rmtree(folder, ignore_errors=True)
    measured, is_same = f"{losses}; restored {losses_again}", losses == losses_again
    yield finding("losses of the next two steps", measured, "the same, bitwise", is_same, FORGOTTEN)
    measured, is_same = f"checksum {left}; restored {left_again}", left == left_again
    yield finding("weights, optimizer after them", measured, "the same, bitwise", is_same, "as above")


def _without_deterministic_algorithm(subject: Subject) -> str | None:
    """Return an operator in a step for which torch has no deterministic algorithm; None if there is none. Take the
    step. Collective."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        _continue(subject, subject.at(0))
    torch.use_deterministic_algorithms(False)
    parts = [str(warning.message).partition(NOT_DETERMINISTIC) for warning in caught]
    everywhere = gather([name for name, says, _ in parts if says])
    return next((name for names in everywhere for name in names), None)


def _continue(subject: Subject, run: Run) -> tuple[str, str]:
    """Return the losses of the next steps, and the checksum of what they leave on this process."""
    steps = subject.micro_batches(run.progress.step)
    losses = [str(mean_loss(run.accelerator, subject.step(run, next(steps)))) for _ in range(STEPS)]
    return ", ".join(losses), checksum(sorted(run_tensors(run.model, run.optimizers).items()))
