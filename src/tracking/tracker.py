"""The run's record: metrics.jsonl, the terminal and Weights & Biases, all written by the main process alone."""

import contextlib
import json
import os
import shlex
import time
import uuid  # room: trackers
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import yaml
from tqdm import tqdm

from src.checkpoint.folder import parent_checkpoint, saved_settings
from src.checkpoint.format import write_json, write_text
from src.config.config import Config
from src.config.errors import cause, naming
from src.config.terminal import bar, fit, say
from src.distributed.accelerator import Launch, peak_memory, processes
from src.tasks.base import Table
from src.tracking.accelerate_trackers import start_trackers  # room: trackers
from src.tracking.artifacts import start_wandb  # room: wandb
from src.tracking.report import report_line  # room: report
from src.training.batches import examples_seen
from src.training.progress import StepResult
from src.training.run import Evaluation, Run, startup_summary
from src.training.state import ResumePoint


def start_loggers(
    config: Config, launch: Launch, say: Callable[[str], None], origin: dict[str, Any], **arguments: Any
) -> list[Any]:
    """Return what records the run besides metrics.jsonl.

    Args:
        say: tells the user, once, that a logger failed.
        origin: what the run started from: fingerprints of its data; the parent's id and step if it branched off.
        arguments: of the W&B run: dir, id, resume, job_type; `machine`, if it is another than the first one.
    """
    arguments["config"] = config.model_dump(mode="json") | {"launch": launch.as_dict()} | origin
    loggers: list[Any] = []
    loggers += start_wandb(config, say, name=config.run_name, **arguments)  # room: wandb
    if "dir" in arguments:  # not in a check  # room: trackers
        known = [logger.id for logger in loggers] + [arguments.get("id")]  # room: trackers
        run_id = next(filter(None, known), None) or uuid.uuid4().hex[:8]  # room: trackers
        loggers += start_trackers(config, say, run_id, **arguments)  # room: trackers
    return loggers


class Tracker:
    """Keeps the run's record; as a context manager, marks a run that raises as crashed."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._summary: dict[str, Any] | None = None
        self._started = time.perf_counter()
        self.folder = run.config.folder
        self._loggers: list[Any] = []
        if not run.is_main:
            if run.accelerator.is_local_main_process:
                machine = int(os.environ.get("GROUP_RANK", run.rank))
                self._loggers = start_loggers(run.config, run.launch, say, {}, machine=machine)
            return
        config, resume = run.config, run.resume
        is_continued = resume.is_own(config)
        saved = resume.state if is_continued else None
        recorded, wandb_id = (saved.metrics_bytes, saved.wandb_id) if saved else (0, None)
        self._first = run.progress.step
        self._metrics = (self.folder / "metrics.jsonl").open("ab+")
        self._recorded = self._metrics.seek(min(recorded, self._metrics.seek(0, os.SEEK_END)))
        # an evaluation that came too late for its step's checkpoint is kept, or replaced by a new one
        line = self._metrics.readline()
        if not (line.startswith(b'{"step": %d, ' % self._first) and line.endswith(b"\n")):
            line = b""
        self._metrics.truncate(self._recorded + len(line))
        parent = saved_settings(self.folder).get("resume") if is_continued else parent_checkpoint(config)
        settings = config.model_dump(mode="json") | {"resume": str(parent or config.resume)}
        if "{run_name}" not in config.output_dir:
            del settings["output_dir"]  # reused under another name, it would lead to this run's folder
        write_text(self.folder / "config.yaml", yaml.safe_dump(settings, sort_keys=False))
        newest = str(resume.checkpoint) if is_continued else None
        # so it stays if the run is killed
        write_json(self.folder / "status.json", {"status": "unfinished", "checkpoint": newest})
        (self.folder / "summary.json").unlink(missing_ok=True)  # of an earlier end
        identity: dict[str, Any] = {"id": wandb_id, "resume": "allow" if wandb_id else None}
        origin: dict[str, Any] = {"data": run.metadata["data"]}
        if resume.state and not is_continued:
            origin["parent"] = {"id": resume.state.wandb_id, "step": self._first, "checkpoint": str(resume.checkpoint)}
        self._loggers = start_loggers(config, run.launch, self.say, origin, dir=self.folder, **identity)
        _print_summary(run, {logger.title: logger.where for logger in self._loggers})
        self._bar = bar(initial=self._first, total=run.total_steps, smoothing=0.05, leave=True)
        self._facts = ""
        self._skipped = run.progress.skipped

    def advance(self) -> None:
        """Move the progress bar by one step."""
        if self._run.is_main:
            is_due = self._run.is_evaluation_due()
            self._bar.set_description_str("evaluating" if is_due else self._facts, refresh=is_due)
            self._bar.update()

    def log_training(self, result: StepResult, measured: dict[str, float] | None = None) -> None:
        """Record the means over the interval that ends with this step or with the run, and what else was measured."""
        run, progress = self._run, self._run.progress
        progress.tick()
        step, every = progress.step, run.config.log_every
        num_examples = examples_seen(run, step) - examples_seen(run, (step - 1) // every * every)
        metrics: dict[str, Any] = {"epoch": step / run.steps_per_epoch, "train/lr": result.lr}
        metrics |= {"train/grad_norm": result.grad_norm, **progress.training_metrics(num_examples, run.is_fp16)}
        progress.train_loss = metrics["train/loss"]
        if run.is_log_due():  # not at the run's end: a longer run's interval would go on
            progress.end_interval()
        if not run.is_main:
            return
        self._record(metrics | (measured or {}), {})
        if progress.skipped > self._skipped and not run.is_fp16:  # in fp16 that is how the loss scale is found
            self.say(f"WARNING: steps skipped so far, as their gradients were not finite: {progress.skipped}")
        self._skipped = progress.skipped
        unit = "tokens" if "perf/tokens_per_second" in metrics else "samples"
        speed = f"{metrics[f'perf/{unit}_per_second']:,.0f} {unit}/s"
        loss = "not finite" if metrics["train/loss"] is None else f"{metrics['train/loss']:.4f}"
        self._facts = f"loss {loss}  {speed}"
        if self._bar.disable:
            seconds_per_step = (time.perf_counter() - self._started) / (step - self._first)
            eta = tqdm.format_interval(seconds_per_step * (run.total_steps - step))
            text = f"loss {loss}  lr {metrics['train/lr']:.2e}  {speed}  eta {eta}"
            say(f"step {step:>6}/{run.total_steps}  {text}")

    def log_evaluation(self, evaluation: Evaluation) -> None:
        """Record an evaluation made after the latest step."""
        run, step = self._run, self._run.progress.step
        if not run.is_main:
            return
        tables = evaluation.report | run.task.tables(evaluation.outputs, run.eval_set)
        self._record(
            {"epoch": step / run.steps_per_epoch, **evaluation.metrics},
            {f"eval/{name}": rows for name, rows in tables.items()},
        )
        self.say(f"step {step:>6}/{run.total_steps}  {_evaluation_line(evaluation.metrics)}")
        for row in tables.get("samples", []):
            self.say("  " + _printable(" | ".join(row.values())))

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint keeps so that the record can continue from there."""
        if not self._run.is_main:
            return {}
        self._bar.set_description_str("saving")
        with naming(self.folder / "metrics.jsonl"):
            os.fsync(self._metrics.fileno())
        wandb_id = next((logger.id for logger in self._loggers if logger.id), None)
        return {"metrics_bytes": self._metrics.seek(0, os.SEEK_END), "wandb_id": wandb_id}

    def write_stopped(self, reason: str, checkpoint: Path | None) -> None:
        """Write status.json: that the run was told to stop, and how to continue it."""
        if not self._run.is_main:
            return
        self._bar.close()
        _write_stopped(self.folder, reason, self._run.progress.step, checkpoint, self._run.resume_command)
        for logger in self._loggers:
            logger.mark_stopped()

    def write_summary(self, evaluation: dict[str, float], saving: dict[str, float]) -> None:
        """Write summary.json, with figures about `saving`, and print the closing block. Collective."""
        run, progress, peaks = self._run, self._run.progress, peak_memory(self._run.accelerator)
        if not run.is_main:
            return
        progress.tick()
        training_seconds = progress.training_seconds + progress.interval_seconds
        tokens = progress.tokens + progress.interval[2]
        self._summary = {
            "step": progress.step,
            "epoch": progress.step / run.steps_per_epoch,
            "train/loss": progress.train_loss,
            **evaluation,
            "seconds": progress.seconds,
            "samples_per_second": examples_seen(run, progress.step) / training_seconds,
            **({"tokens_per_second": tokens / training_seconds} if tokens else {}),
            "skipped_steps": progress.skipped,
            **saving,
            **run.facts,
            "peak_memory_bytes": peaks,
            **run.launch.as_dict(),
        }
        write_json(self.folder / "status.json", {"status": "done", "step": progress.step})
        write_json(self.folder / "summary.json", self._summary)
        for logger in self._loggers:
            logger.summarize(self._summary)
        folder = shlex.quote(str(self.folder))
        lines = [
            fit(f"done in {tqdm.format_interval(progress.seconds)}: {_evaluation_line(evaluation)}"),
            f"  model      {folder}/model",
            fit(f"  record     {self.folder}/summary.json, metrics.jsonl, config.yaml"),
            report_line(self.folder),  # room: report
        ]
        if run.task.name == "causal_lm":  # room: generate+text
            lines.append(f"  talk       python -m src.tools.generate {folder}")  # room: generate+text
        if run.task.name != "causal_lm":  # room: evaluate
            lines.append(f"  evaluate   python -m src.tools.evaluate {folder}")  # room: evaluate
        lines += [logger.closing_line() for logger in self._loggers]
        self._bar.set_description_str(self._facts)
        self._bar.close()
        say(*filter(None, lines))

    def say(self, line: str) -> None:
        """Print a line, on the main process."""
        if self._run.is_main:
            say(fit(line))

    def _record(self, metrics: dict[str, Any], tables: dict[str, Table]) -> None:
        """Append a record, named train/…, eval/… or perf/…, to metrics.jsonl, and hand it to the loggers."""
        record = {"step": self._run.progress.step, **metrics}
        with naming(self.folder / "metrics.jsonl"):
            if record["step"] == self._first:  # replace what is there of it
                self._metrics.truncate(self._recorded)
            self._metrics.write(json.dumps(record | tables).encode() + b"\n")
            self._metrics.flush()
        for logger in self._loggers:
            logger.log(record, tables)

    def __enter__(self) -> "Tracker":
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _traceback: object) -> None:
        if self._run.is_main:
            self._bar.close()
            with contextlib.suppress(OSError):  # what could not be written has been reported
                self._metrics.close()
            if error:
                crash = f"step {self._run.progress.step}: {type(error).__name__}: {cause(error)}"
                for logger in self._loggers:
                    logger.alert(crash)
        for logger in self._loggers:
            logger.finish(exit_code=1 if error or (self._run.is_main and not self._summary) else 0)
        failures = {logger.title: logger.failure for logger in self._loggers if logger.failure}
        if self._summary and failures:
            write_json(self.folder / "summary.json", self._summary | {"tracker_failures": failures})


def dry_run(run: Run) -> bool:
    """Print the start-up summary, and what the run would do. Return False: it has not got to its end."""
    if run.is_main:
        _print_summary(run, {})
        config, left = run.config, run.total_steps - run.progress.step
        course = f"an evaluation every {config.eval_every or run.steps_per_epoch}"
        saves = f"a checkpoint every {config.save_every}"
        say(fit(f"dry run: {left} of {run.total_steps} steps to take, {course}, {saves}; nothing was written"))
    return False


def stop_at_start(config: Config, resume: ResumePoint, command: str, reason: str) -> NoReturn:
    """End a process that was told to stop before the first step: there is nothing to save."""
    _write_stopped(config.folder, reason, resume.progress.step, resume.checkpoint, command)
    os._exit(0)  # whatever it is in the middle of


def _write_stopped(folder: Path, reason: str, step: int, checkpoint: Path | None, command: str) -> None:
    newest = str(checkpoint) if checkpoint else None
    status = {"status": "preempted", "reason": reason, "step": step, "checkpoint": newest, "command": command}
    write_json(folder / "status.json", status)
    when = f"after step {step}" if step else "before the first step"
    say(f"stopped {when} by {reason}; to continue: {command}")


def _print_summary(run: Run, loggers: dict[str, str]) -> None:
    launch, config, resume = run.launch, run.config, run.resume
    backend = f" on {launch.backend}" if launch.backend else ""
    backend += f" (gradients: {launch.comm_hook})" if launch.comm_hook else ""
    rows = {
        "strategy": f"{launch.strategy}, {processes(launch.num_processes)}{backend}, {launch.device}, "
        f"{launch.precision} ({launch.config_file or 'not started by an accelerate yaml'})",
        **startup_summary(run),
        "output": str(config.folder),
        **loggers,
        "resume": resume.summary,
    }
    head = [launch.note, ": ".join(dict.fromkeys((config.run_name, config.task.name)))]
    lines = [f"  {title:<10} {text}" for title, text in rows.items() if text]
    lines = [*filter(None, head), *lines, *(f"  {note}" for note in resume.notes)]
    say(*map(fit, lines))


def _printable(text: str) -> str:
    text = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
    return text if len(text) <= 110 else text[:109] + "…"


def _evaluation_line(metrics: dict[str, Any]) -> str:
    return "  ".join(f"{n} {v:.4f}" if isinstance(v, float) else f"{n} {v:,}" for n, v in metrics.items())
