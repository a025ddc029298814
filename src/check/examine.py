"""The ten checks, one after the other, and what is told of them."""

import importlib.metadata
import os
import time
from typing import Any

import torch

from src.check import accumulation, checkpoint, cost, data, evaluation, findings, launch, start, steps
from src.check.subject import Reference, Subject
from src.tracking import start_wandb


def examine(subject: Subject) -> bool:
    """Prints the table, writes check.json and the W&B run. Collective.

    Returns:
        Whether all is well: the same on all processes.
    """
    started = time.perf_counter()
    is_main, config = os.environ.get("RANK", "0") == "0", subject.config  # also where each believes to be alone
    if is_main:
        print(f"{config.run_name}: examining {subject.launch.strategy} x {subject.world_size}", flush=True)
    torch.backends.cudnn.allow_tf32 = False  # 10 bits: more than most faults, between batches of two sizes
    reference = Reference(subject)
    found = list(launch.examine(subject, reference))
    if found[0].is_passed:  # else each process would examine a run of its own
        found += data.examine(subject)
        found += start.examine(subject, reference)
        found += steps.examine(subject, reference)
        found += accumulation.examine(subject, reference)
        found += evaluation.examine(subject, reference)
        found += checkpoint.examine(subject)
        found += cost.examine(subject, reference)
    failed = sorted(set().union(*subject.gather({finding.check for finding in found if not finding.is_passed})))
    seconds = time.perf_counter() - started
    if is_main:
        print("\n".join(findings.table(found)), flush=True)
        versions = {name: importlib.metadata.version(name) for name in ("torch", "accelerate")}
        about: dict[str, Any] = {"seconds": seconds, "launch": subject.launch.as_dict(), "versions": versions}
        content = findings.as_dict(found, about | {"config": config.model_dump(mode="json")})
        file = findings.write(content, config.folder)
        run, _ = start_wandb(config, subject.launch, job_type="check")
        if run:
            findings.record(run, content)
        verdict = f"FAILED: {', '.join(failed)}" if failed else "all checks passed"
        print(f"{verdict}, in {seconds:.0f} s; {file}", flush=True)
    return not failed
