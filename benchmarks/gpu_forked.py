"""Runs of train.py on one GPU that start within a second: they are forked from this process.

It has imported what they need (`warm` of tests/launching.py), and must not touch the GPU: CUDA can't be used in a
process that was forked after that.
"""

import json
import math
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from transformers.utils import is_bitsandbytes_available, is_torchao_available

import train
from benchmarks.runs import arguments, launch
from src import parts
from src.tracking.report import Report
from src.training.batches import MicroBatch
from src.training.run import Run
from tests.launching import end, rank_environments

HIDDEN = {name for name in ("bitsandbytes", "torchao") if find_spec(name)}
"""Libraries that touch the GPU when they are imported. What is imported here, transformers and peft among others, finds
them missing; what is forked from here has them."""
sys.modules.update(dict.fromkeys(HIDDEN))  # type: ignore[arg-type]  # None: it can't be imported

Act = Callable[[Run, list[MicroBatch], Callable[[], Any], dict[str, Any]], Any]
"""What is done in place of a step: it is given the run, the step's micro-batches, what takes the step, and a dictionary
for what it finds out."""


@dataclass(frozen=True)
class Forked:
    """A run of train.py that has ended."""

    folder: Path
    found: dict[str, Any]
    """What its acts have found out, and the most bytes that were `allocated` and `reserved`; empty: it was killed."""

    @cached_property
    def records(self) -> list[dict[str, Any]]:
        """Those of the training."""
        lines = map(json.loads, (self.folder / "metrics.jsonl").read_text().splitlines())
        return [line for line in lines if "train/loss" in line]

    @property
    def losses(self) -> list[float]:
        """By step; of a step that was repeated after a kill, the last. NaN where it was non-finite."""
        by_step = {record["step"]: record["train/loss"] for record in self.records}
        return [math.nan if loss is None else loss for loss in by_step.values()]

    @property
    def summary(self) -> dict[str, Any]:
        return json.loads((self.folder / "summary.json").read_text())


def run_forked(
    folder: Path,
    yaml: str,
    settings: dict[str, Any],
    precision: str | None = None,
    acts: Mapping[int, Act] | None = None,
    begin: Callable[[], object] = lambda: None,
    deadline: float = float("inf"),
) -> Forked:
    """Train into this folder, as one process under the yaml; resume a run that is there.

    Args:
        precision: the mixed precision, instead of the yaml's.
        acts: by the number of steps that were taken before.
        begin: called first in the new process.
        deadline: in the seconds of time.monotonic.

    Raises:
        RuntimeError, TimeoutError: those of `fork`.
    """

    def work() -> dict[str, Any]:
        words = launch(yaml, precision=precision or "")
        _, _, (environment,) = rank_environments([*words[words.index("accelerate.commands.launch") + 1 :], "train.py"])
        os.environ |= environment
        found: dict[str, Any] = {}
        take_step = train.train_step

        def take_or_act(run: Run, micro_batches: list[MicroBatch], counts: Any) -> Any:
            take = partial(take_step, run, micro_batches, counts)
            act = (acts or {}).get(run.progress.step)
            return act(run, micro_batches, take, found) if act else take()

        train.train_step = take_or_act
        parts.PARTS.remove(Report)  # the figures of a report would take most of so short a run
        sys.argv = ["train.py", *arguments({**settings, "output_dir": folder})]
        begin()
        train.main()
        return found | peaks()

    return Forked(folder, fork(work, folder.with_suffix(".log"), deadline) or {})


def peaks() -> dict[str, int]:
    """Return the most bytes that torch's allocator has given out and reserved."""
    if not torch.cuda.is_initialized():
        return {}
    return {"allocated": torch.cuda.max_memory_allocated(), "reserved": torch.cuda.max_memory_reserved()}


def fork(work: Callable[[], Any], log: Path, deadline: float = float("inf")) -> Any:
    """Return what `work` returns in a process of its own, as JSON; None if it was killed, or ended by sys.exit(0). Its
    output goes to `log`.

    Raises:
        RuntimeError: it failed; with its last line.
        TimeoutError: it took until the deadline, and was killed.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    answer = log.with_suffix(".answer")
    answer.unlink(missing_ok=True)
    pid = os.fork()
    if not pid:
        _work_and_leave(work, log, answer)
    while (ended := os.waitpid(pid, os.WNOHANG)) == (0, 0):
        if time.monotonic() > deadline:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            raise TimeoutError("no time left")
        time.sleep(0.005)
    code = os.waitstatus_to_exitcode(ended[1])
    if code == -signal.SIGKILL:
        return None
    if code:
        lines = [line.strip() for line in log.read_text(errors="replace").splitlines()]
        raise RuntimeError(f"exit code {code}: {next(filter(None, reversed(lines)), 'it has said nothing')}")
    return json.loads(answer.read_text()) if answer.exists() else None


def _work_and_leave(work: Callable[[], Any], log: Path, answer: Path) -> None:
    failure: BaseException | None = None
    for name in HIDDEN:
        del sys.modules[name]
    is_bitsandbytes_available.cache_clear()
    is_torchao_available.cache_clear()
    try:
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(output, sys.stdout.fileno())
        os.dup2(output, sys.stderr.fileno())
        answer.write_text(json.dumps(work()))
    except BaseException as error:
        failure = error
    try:
        end(failure)
    finally:  # don't return into the code that this process was forked from
        os._exit(1)
