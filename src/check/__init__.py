"""`train.py --check`: proves on the user's own machine that the run is right, with the run's own parts.

Its data path, its step, its evaluation and its checkpoints are compared with reference.py, which does the same by
hand; docs/check.md says what the nine checks find. Each process needs memory for an unwrapped copy of the model, its
gradients and its optimizer's state.
"""

import importlib.metadata
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator

import torch

from src.check.between_steps import check_checkpoint, check_evaluation
from src.check.cost import check_cost
from src.check.findings import Row, finding, gather, table
from src.check.start import check_data, check_launch, check_start
from src.check.steps import check_accumulation, check_steps
from src.check.subject import Evaluate, Restore, Subject
from src.checkpoint.format import write_json
from src.config.errors import UserError
from src.config.terminal import say
from src.distributed.process import lost_peers
from src.tracking.report import report_line
from src.training.batches import TrainStep
from src.training.run import Run

CHECKS: dict[str, Callable[[Subject], Iterator[Row]]] = {
    "Launch": check_launch,
    "Data": check_data,
    "Same start": check_start,
    "Gradients": check_steps,  # and Updates
    "Accumulation": check_accumulation,
    "Evaluation": check_evaluation,
    "Checkpoint": check_checkpoint,
    "Cost": check_cost,
}


def run_checks(run: Run, train_step: TrainStep, evaluate: Evaluate, restore: Restore) -> bool:
    """Examine the run before its first step, with train.py's own functions; print the table, and write check.json and a
    W&B run. Return whether all is well. Collective."""
    started = time.perf_counter()
    is_main = os.environ.get("RANK", "0") == "0"  # even if each believes it is alone
    if is_main:
        say(f"{run.config.run_name}: examining {run.launch.strategy} x {run.world_size}")
    convolutions = torch.backends.cudnn.conv  # type: ignore[attr-defined]
    chosen, convolutions.fp32_precision = convolutions.fp32_precision, "ieee"  # TF32's 10 bits hide small faults
    subject = Subject(run, train_step, evaluate, restore)
    rows: list[Row] = []
    for name in CHECKS:
        if rows and rows[0]["result"] == "fail":
            break  # each process would examine a run of its own
        if name == "Cost":
            convolutions.fp32_precision = chosen
        try:
            everywhere = gather(examine(subject, name))
        except UserError:  # of the task
            raise
        except Exception as error:  # also of the parts of the run that are examined
            measured = "another process failed"
            if not lost_peers(error):
                traceback.print_exc()
                measured = f"{type(error).__name__}: {error}"
            if is_main:
                cause = "see the traceback"
                rows.append(finding("examined", measured, "without an error", False, cause, name))
                _report(run, rows, time.perf_counter() - started)
            sys.exit(1)  # the others may be waiting in any collective
        rows += map(_worst, zip(*everywhere, strict=False))
    if is_main:
        _report(run, rows, time.perf_counter() - started)
    return all(row["result"] != "fail" for row in rows)


def examine(subject: Subject, name: str) -> list[Row]:
    """Return what a check finds on this process. Collective."""
    return [row | {"check": row["check"] or name} for row in CHECKS[name](subject)]


def _worst(rows: tuple[Row, ...]) -> Row:
    """Return the row of the first process that failed, naming those that did unless all did; else the first one's."""
    failed = [rank for rank, row in enumerate(rows) if row["result"] == "fail"]
    if not failed:
        return rows[0]
    row = rows[failed[0]]
    if len(failed) < len(rows):
        row["measured"] += f", on process {', '.join(map(str, failed))}"
    return row


def _report(run: Run, rows: list[Row], seconds: float) -> None:
    config, file = run.config, run.config.folder / "check.json"
    failed = sorted({row["check"] for row in rows if row["result"] == "fail"})
    say(*table(rows))
    versions = {name: importlib.metadata.version(name) for name in ("torch", "accelerate")}
    about = {"launch": run.launch.as_dict(), "versions": versions, "config": config.model_dump(mode="json")}
    config.folder.mkdir(parents=True, exist_ok=True)
    write_json(file, {"passed": not failed, "checks": rows, "seconds": seconds, **about})
    verdict = f"FAILED: {', '.join(failed)}" if failed else "all checks passed"
    say(f"{verdict}, in {seconds:.0f} s; {file}")
    say(report_line(config.folder))  # room: report
