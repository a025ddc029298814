"""`train.py --check`: verify on the user's own machine that the run is right.

The run's own data path, optimizer step, evaluation and checkpoints are compared with reference.py, which does the same
by hand. docs/check.md says what each of the seven checks finds. Each process needs memory for an unwrapped copy of the
model with its gradients and optimizer state.
"""

from collections.abc import Iterator
from textwrap import wrap

import torch

from src.check.between_steps import check_checkpoint, check_evaluation
from src.check.context import CheckContext, Evaluate
from src.check.findings import Row, cause, gather, lines, worst_process
from src.check.start import check_data, check_launch, check_start
from src.check.steps import check_cost, check_steps
from src.checkpoint.files import write_json
from src.training.batches import TrainStep
from src.training.run import Run

CHECKS = {
    "Launch": check_launch,
    "Data": check_data,
    "Same start": check_start,
    "Steps": check_steps,
    "Cost": check_cost,
    "Evaluation": check_evaluation,  # leaves noise on the weights
    "Checkpoint": check_checkpoint,
}


def run_checks(run: Run, train_step: TrainStep, evaluate: Evaluate) -> bool:
    """Check the run before its first step, with train.py's own functions. Print the findings and write them to
    check.json. Return whether all checks passed. Collective."""
    torch.backends.cudnn.conv.fp32_precision = "ieee"  # type: ignore[attr-defined]  # TF32's 10 bits would hide small faults
    config, file = run.config, run.config.folder / "check.json"
    run.tell(*filter(None, (f"{config.run_name}: checking {run.launch.strategy} x {run.world_size}", run.launch.note)))
    rows = []
    for row in examine(CheckContext(run, train_step, evaluate)):
        rows.append(row)
        for line in lines(row):
            run.tell(*wrap(line, 80, subsequent_indent=" " * 18))
    failed = [row["check"] for row in rows if row["means"]]
    if run.is_main:
        config.folder.mkdir(parents=True, exist_ok=True)
        write_json(file, {"passed": not failed, "checks": rows, "config": config.model_dump(mode="json")})
        run.tell(f"FAILED: {failed[0]}; see {file}" if failed else f"all checks passed; see {file}")
    return not failed


def examine(context: CheckContext) -> Iterator[Row]:
    """Yield the findings of the checks in turn. Stop after the first check that fails, as later ones would only show
    its consequences. Collective."""
    for name, check in CHECKS.items():
        everywhere = gather([{"check": name} | row for row in check(context)])
        rows = [*map(worst_process, zip(*everywhere, strict=True))]
        failed = [row for row in rows if row["means"]]
        for row in failed[:1]:
            setup = f"x {context.run.world_size} {context.run.config.optim} {context.run.metadata['remarks']}"
            row["means"] = cause([row, *rows], setup)
        yield from rows
        if failed:
            return
