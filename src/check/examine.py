"""The ten checks, one after the other, and what is told of them."""

import importlib.metadata
import os
import sys
import time
import traceback
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import torch

from src.check import accumulation, checkpoint, cost, data, evaluation, findings, launch, start, steps
from src.check.findings import Finding
from src.check.subject import Reference, Subject
from src.process import lost_peers
from src.wandb_logger import WandbRun


def examine(subject: Subject) -> bool:
    """Prints the table, writes check.json and the W&B run. Collective.

    Returns:
        Whether all is well: the same on all processes.
    """
    started = time.perf_counter()
    is_main, config = os.environ.get("RANK", "0") == "0", subject.config  # also where each believes to be alone
    if is_main:
        print(f"{config.run_name}: examining {subject.launch.strategy} x {subject.world_size}", flush=True)
    allows_tf32, torch.backends.cudnn.allow_tf32 = torch.backends.cudnn.allow_tf32, False  # 10 bits hide small faults
    reference = Reference(subject)
    checks: dict[str, Callable[[], Iterator[Finding]]] = {
        "Launch": lambda: launch.examine(subject, reference),
        "Data": lambda: data.examine(subject, reference),
        "Same start": lambda: start.examine(subject, reference),
        "Gradients and Updates": lambda: steps.examine(subject, reference),
        "Accumulation": lambda: accumulation.examine(subject, reference),
        "Evaluation": lambda: evaluation.examine(subject, reference),
        "Checkpoint": lambda: checkpoint.examine(subject),
        "Precision and Cost": lambda: cost.examine(subject, reference),
    }
    found: list[Finding] = []
    for name, check in checks.items():
        if found and not found[0].is_passed:
            break  # each process would examine a run of its own
        if name == "Precision and Cost":
            torch.backends.cudnn.allow_tf32 = allows_tf32
        try:
            rows = zip(*subject.gather(list(check())), strict=False)
        except Exception as error:  # in the parts of the run that are examined, too
            if not lost_peers(error):
                traceback.print_exc()
            if not is_main:
                sys.exit(1)
            says = "another process failed" if lost_peers(error) else f"{type(error).__name__}: {error}"
            found.append(Finding(name, "examined", says, "without an error", False, "see the traceback"))
            _report(subject, found, started)
            sys.exit(1)  # the others may be waiting in any collective
        found += [next((row for row in of_all if not row.is_passed), of_all[0]) for of_all in rows]
    if is_main:
        _report(subject, found, started)
    return all(finding.is_passed for finding in found)


def _report(subject: Subject, found: list[Finding], started: float) -> None:
    config, seconds = subject.config, time.perf_counter() - started
    failed = sorted({finding.check for finding in found if not finding.is_passed})
    print("\n".join(findings.table(found)), flush=True)
    versions = {name: importlib.metadata.version(name) for name in ("torch", "accelerate")}
    about: dict[str, Any] = {"seconds": seconds, "launch": subject.launch.as_dict(), "versions": versions}
    content = findings.as_dict(found, about | {"config": config.model_dump(mode="json")})
    file = findings.write(content, config.folder)
    run = WandbRun(config, subject.launch.as_dict(), print, job_type="check", id=uuid.uuid4().hex[:8])
    run.tell(lambda run: findings.record(run, content))
    run.finish(exit_code=1 if failed else 0)
    verdict = f"FAILED: {', '.join(failed)}" if failed else "all checks passed"
    print(f"{verdict}, in {seconds:.0f} s; {file}", flush=True)
