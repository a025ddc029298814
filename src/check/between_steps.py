"""Checks 7 and 8, Evaluation and Checkpoint: the run's own evaluation gives what one process finds over the same
examples; saved and restored, the run continues identically, to the last bit."""

import math
import shutil
import warnings
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch.utils.data import Subset

from src.check.advice import ADVICE
from src.check.findings import EXACT, Row, finding, finding_alike, gather, norm
from src.check.reference import evaluate
from src.check.start import reading_indices
from src.check.subject import Subject, autocast, checksum
from src.checkpoint.resume import find_checkpoint
from src.checkpoint.rng import random_state
from src.checkpoint.tensors import run_tensors
from src.checkpoint.write import CheckpointWriter
from src.config.config import Checkpoint
from src.training.batches import EVALUATION_FACTOR, evaluation_batches
from src.training.gradients import to_local
from src.training.progress import mean_loss
from src.training.run import Run

MOST_EXAMPLES = 9_999
"""Most examples to evaluate, as every process goes through all of them."""
METRIC_IN_HALF, FEW = 2e-2, 3
"""How much a metric may differ in half precision, and how many examples near the boundary may change sides."""
STEPS = 2
"""Steps to take after the checkpoint: the optimizer's state shows in the second one's loss."""


def check_evaluation(subject: Subject) -> Iterator[Row]:
    """Evaluate with noise on the weights. All processes compute the whole set by hand, as a model may be collective."""
    row, run, count = partial(finding, "Evaluation"), subject.run, len(subject.run.eval_set)
    share = EVALUATION_FACTOR * run.world_size  # examples of a batch, at a micro-batch size of one
    size = max(1, min(run.config.micro_batch(run.world_size), count // (3 * share)))  # several batches
    length = min(count, MOST_EXAMPLES)
    length -= (length - 1) % (size * share)  # the last batch is one example: the others compute on a dummy
    dataset = Subset(run.eval_set, range(length)) if length < count else run.eval_set  # type: ignore[arg-type]
    config = run.config.model_copy(update={"micro_batch_size": size})
    shortened = subject.at(0, config=config, eval_set=dataset)
    num_batches = sum(1 for _ in evaluation_batches(reading_indices(shortened)))
    batches = finding_alike("Evaluation", "batches", str(num_batches), "as many on each", num_batches > 0)
    yield batches
    if batches["result"] == "fail":
        return
    subject.copy_to_reference()
    states: list[dict[str, Any]] = []  # before; meanwhile, unless the task calls a part of the model only; afterwards

    def look(*_: Any) -> None:
        if len(states) == 1:
            states.append(_state(subject))

    with subject.perturbed():
        run.model.train()
        states.append(_state(subject))
        hook = subject.unwrapped.register_forward_pre_hook(look, prepend=True)  # before FSDP gathers the weights
        evaluation = subject.evaluate(shortened, subject.stop)
        hook.remove()
        states.append(_state(subject))
        with autocast(subject.reference, subject.autocast_dtype) as model:
            by_hand = evaluate(run.task, model, dataset, size)
    assert evaluation  # as no one asks it to stop
    found, expected = evaluation.metrics, gather(by_hand)[0]
    examples = found["eval/examples"]
    yield row(f"examples, of {count:,}", f"{examples:,}", f"{length:,}", examples == length)
    before, *meanwhile, after = states
    changed = ", ".join(name for name in before if after[name] != before[name])
    yield row("afterwards", f"changed: {changed}" if changed else ", ".join(before), "as before", not changed)
    cause, causes = "", ADVICE["Evaluation"]
    for state in meanwhile:
        is_swapped = state["weights"] != before["weights"]
        cause = causes["in training mode"] if state["mode"][0] else causes["other weights"] if is_swapped else ""
    for name in sorted(expected.keys() - {"examples"}):
        bound = max(METRIC_IN_HALF, 0 if name == "loss" else FEW / length) if subject.is_half else EXACT
        here, there = found.get(f"eval/{name}", math.nan), expected[name]
        is_close = math.isclose(here, there, rel_tol=bound, abs_tol=bound) or (math.isnan(here) and math.isnan(there))
        yield row(name, f"{here:.6g}, by hand {there:.6g}", f"within {bound:g}", is_close, cause)


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
    row, run, messages = partial(finding, "Checkpoint"), subject.run, list[str]()
    if subject.drifted():
        yield row("not examined", "the replicas differ, and a checkpoint has one of them")
        return
    folder = run.config.folder / "tmp_check"
    settings = {"output_dir": str(folder), "checkpoint": Checkpoint(), "resume": "auto", "check": False}
    config = run.config.model_copy(update=settings)
    saved = subject.at(STEPS, config=config, metadata=run.metadata | {"config": config.model_dump(mode="json")})
    if run.is_main:
        shutil.rmtree(folder, ignore_errors=True)  # left by an examination that was killed
        folder.mkdir(parents=True)
    run.accelerator.wait_for_everyone()
    refusing = _without_deterministic_algorithm(subject) if run.device.type != "cpu" else []
    if refusing:
        yield row("not examined", f"{refusing[0]} is not reproducible on this device, so no two steps are the same")
        return
    # else the order of atomic additions shows; with warn_only=True, that of flash attention's backward pass still would
    torch.use_deterministic_algorithms(run.device.type != "cpu")
    subject.seed()
    try:
        writer = CheckpointWriter(saved, messages.append)
        writer.save({})
        writer.close()
        if writer.newest is None:
            yield row("saved", messages[-1], "saved", False)
            return
        losses, left = _continue(subject, saved)
        resume = find_checkpoint(run.accelerator, config)
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
    measured = f"{losses}; restored {losses_again}"
    yield row("losses of the next two steps", measured, "the same, bitwise", losses == losses_again)
    measured = f"checksum {left}; restored {left_again}"
    yield row("weights, optimizer after them", measured, "the same, bitwise", left == left_again)


def _without_deterministic_algorithm(subject: Subject) -> list[str]:
    """Return what torch says of the operators in a step for which it has no deterministic algorithm. Takes the step."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        _continue(subject, subject.at(0))
    torch.use_deterministic_algorithms(False)
    says = " does not have a deterministic implementation"
    found = {text.partition(says)[0] for warning in caught if says in (text := str(warning.message))}
    return sorted({name for names in gather(found) for name in names})


def _continue(subject: Subject, run: Run) -> tuple[str, str]:
    """Return the losses of the next steps, and the checksum of what they leave on this process."""
    steps = subject.micro_batches(run.progress.step)
    losses = [str(mean_loss(run.accelerator, subject.step(run, next(steps)))) for _ in range(STEPS)]
    left = checksum([tensor for _, tensor in sorted(run_tensors(run.model, run.optimizers).items())])
    return ", ".join(losses), left
