"""The run's record: metrics.jsonl, the terminal, and what else records it. The main process alone writes it."""

import contextlib
import json
import os
import shlex
import time
from pathlib import Path
from typing import Any

from tqdm import tqdm

from src.checkpoint.folder import parent_checkpoint, saved_settings
from src.checkpoint.format import write_json, write_text
from src.checkpoint.status import write_done, write_status, write_stopped, write_unfinished
from src.config.errors import naming
from src.config.settings import write_yaml
from src.config.terminal import bar, say, unread
from src.distributed.accelerator import peak_memory
from src.tasks.base import Table
from src.tracking.recorders import Recorders
from src.tracking.report import report_line
from src.tracking.summary import print_summary
from src.training.batches import examples_seen
from src.training.evaluation import Evaluation
from src.training.progress import StepResult
from src.training.run import Run


class Tracker:
    """Keeps the run's record. As a context manager, it marks a run that raises as crashed."""

    def __init__(self, run: Run) -> None:
        self._run, self.folder = run, run.config.folder
        self._first = run.progress.step
        self._summary: dict[str, Any] | None = None
        self._started = time.perf_counter()
        self._is_noted = False  # room: status
        if run.is_main:
            self._open_record()
            self._write_settings()
        self._elsewhere = Recorders(run, self.say)  # room: trackers wandb
        if run.is_main:
            where: dict[str, str] = {}
            where |= self._elsewhere.where  # room: trackers wandb
            print_summary(run, where)
            self._bar = bar(initial=self._first, total=run.total_steps, smoothing=0.05, leave=True)
            self._facts = ""
            self._skipped = run.progress.skipped

    def _open_record(self) -> None:
        """Cut metrics.jsonl back to what it was at the checkpoint that the run goes on from."""
        resume = self._run.resume
        recorded = resume.state.metrics_bytes if resume.state and resume.is_own(self._run.config) else 0
        self._metrics = (self.folder / "metrics.jsonl").open("ab+")
        size = self._metrics.seek(0, os.SEEK_END)
        self._recorded = self._metrics.seek(min(recorded, size))
        # an evaluation that came too late for its step's checkpoint is kept, or replaced by a new one
        line = self._metrics.readline()
        is_of_this_step = line.startswith(b'{"step": %d, ' % self._first) and line.endswith(b"\n")
        self._metrics.truncate(self._recorded + (len(line) if is_of_this_step else 0))

    def _write_settings(self) -> None:
        """Write the run's settings, and remove the summary of an earlier end."""
        config, resume = self._run.config, self._run.resume
        is_continued = resume.is_own(config)
        parent = saved_settings(self.folder).get("resume") if is_continued else parent_checkpoint(config)
        settings = config.model_dump(mode="json") | {"resume": str(parent or config.resume)}
        if "{run_name}" not in config.output_dir:
            del settings["output_dir"]  # reused under another name, it would lead to this run's folder
        write_text(self.folder / "config.yaml", write_yaml(settings))
        write_unfinished(self.folder, resume.checkpoint if is_continued else None)  # room: status
        (self.folder / "summary.json").unlink(missing_ok=True)

    def advance(self) -> None:
        """Move the progress bar by one step."""
        if self._run.is_main:
            is_due = self._run.is_evaluation_due()
            self._bar.set_description_str("evaluating" if is_due else self._facts, refresh=is_due)
            self._bar.update()

    def log_training(
        self,
        result: StepResult,
        measured: dict[str, float],  # room: performance
    ) -> None:
        """Record the means over the interval that ends with this step or with the run, and what else was measured."""
        run, progress = self._run, self._run.progress
        progress.tick()
        step, every = progress.step, run.config.log_every
        num_examples = examples_seen(run, step) - examples_seen(run, (step - 1) // every * every)
        metrics: dict[str, Any] = {
            "epoch": step / run.steps_per_epoch,
            "train/lr": result.lr,
            "train/grad_norm": result.grad_norm,
            **progress.training_metrics(num_examples, run.is_fp16),
        }
        progress.train_loss = metrics["train/loss"]
        if run.is_log_due():  # not at the run's end: a longer run's interval would go on
            progress.end_interval()
        if not run.is_main:
            return
        metrics |= measured  # room: performance
        self._record(metrics, {})
        if progress.skipped > self._skipped and not run.is_fp16:  # in fp16 that is how the loss scale is found
            self.say(f"WARNING: steps skipped so far, as their gradients were not finite: {progress.skipped}")
        self._skipped = progress.skipped
        self._show(metrics)

    def _show(self, metrics: dict[str, Any]) -> None:
        """Show an interval's loss and speed in the bar, or in a line where there is none."""
        step, total = self._run.progress.step, self._run.total_steps
        unit = "tokens" if "perf/tokens_per_second" in metrics else "samples"
        speed = f"{metrics[f'perf/{unit}_per_second']:,.0f} {unit}/s"
        loss = "not finite" if metrics["train/loss"] is None else f"{metrics['train/loss']:.4f}"
        self._facts = f"loss {loss}  {speed}"
        if self._bar.disable:
            seconds_per_step = (time.perf_counter() - self._started) / (step - self._first)
            eta = tqdm.format_interval(seconds_per_step * (total - step))
            self.say(f"step {step:>6}/{total}  loss {loss}  lr {metrics['train/lr']:.2e}  {speed}  eta {eta}")

    def log_evaluation(self, evaluation: Evaluation) -> None:
        """Record an evaluation made after the latest step."""
        run, step = self._run, self._run.progress.step
        if not run.is_main:
            return
        tables: dict[str, Table] = {}
        tables |= run.task.tables(evaluation.outputs, run.eval_set)  # room: tables
        numbers = {"epoch": step / run.steps_per_epoch, **evaluation.metrics}
        self._record(numbers, {f"eval/{name}": rows for name, rows in tables.items()})
        self.say(f"step {step:>6}/{run.total_steps}  {_evaluation_line(evaluation.metrics)}")

    def log_report(self, found: dict[str, float], tables: dict[str, Table]) -> dict[str, float]:  # room: tables
        """Record what Task.report returned. Return the metrics by the names that the record has them under."""
        metrics = {f"eval/{name}": value for name, value in found.items()}
        if self._run.is_main and (metrics or tables):
            self._record(metrics, {f"eval/{name}": rows for name, rows in tables.items()})
        return metrics

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint keeps so that the record can continue from there."""
        if not self._run.is_main:
            return {}
        self._bar.set_description_str("saving")
        with naming(self.folder / "metrics.jsonl"):
            os.fsync(self._metrics.fileno())
        state: dict[str, Any] = {"metrics_bytes": self._metrics.seek(0, os.SEEK_END)}
        state["wandb_id"] = self._elsewhere.run_id  # room: trackers wandb
        return state

    def log_stop(self, reason: str, checkpoint: Path | None) -> None:  # room: status
        """Record that the run was told to stop, and how to continue it."""
        if not self._run.is_main:
            return
        self._bar.close()
        write_stopped(self.folder, reason, self._run.progress.step, checkpoint, self._run.resume_command)

    def write_summary(self, evaluation: dict[str, float], save_pause_seconds: float) -> None:
        """Write summary.json, with the seconds that saves kept the loop waiting, and print the closing block.
        Collective."""
        run, progress, peaks = self._run, self._run.progress, peak_memory(self._run.accelerator)
        if not run.is_main:
            return
        progress.tick()
        training_seconds = progress.training_seconds + progress.interval_seconds
        speeds = {"samples_per_second": examples_seen(run, progress.step) / training_seconds}
        if tokens := progress.tokens + progress.interval_tokens:  # room: text
            speeds["tokens_per_second"] = tokens / training_seconds
        self._summary = {
            "step": progress.step,
            "epoch": progress.step / run.steps_per_epoch,
            "train/loss": progress.train_loss,
            **evaluation,
            "seconds": progress.seconds,
            **speeds,
            "skipped_steps": progress.skipped,
            "save_pause_seconds": save_pause_seconds,
            **run.facts,
            "peak_memory_bytes": peaks,
            **vars(run.launch),
        }
        write_done(self.folder, progress.step)  # room: status
        write_json(self.folder / "summary.json", self._summary)
        self._say_done(evaluation)

    def _say_done(self, evaluation: dict[str, float]) -> None:
        """Print what came out of the run, and what to do next."""
        folder = shlex.quote(str(self.folder))
        lines = [
            f"done in {tqdm.format_interval(self._run.progress.seconds)}: {_evaluation_line(evaluation)}",
            f"  model      {folder}/model",
            f"  record     {self.folder}/summary.json, metrics.jsonl, config.yaml",
            report_line(self.folder),  # room: report
        ]
        if self._run.task.name == "causal_lm":  # room: generate+text
            lines.append(f"  talk       python -m src.tools.generate {folder}")
        if self._run.task.name != "causal_lm":  # room: evaluate
            lines.append(f"  evaluate   python -m src.tools.evaluate {folder}")
        lines += self._elsewhere.closing_lines()  # room: trackers wandb
        self._bar.set_description_str(self._facts)
        self._bar.close()
        self.say(*lines)

    def say(self, *lines: str) -> None:
        """Print lines, on the main process."""
        if not self._run.is_main:
            return
        say(*lines)
        if unread and not self._is_noted:  # room: status
            self._is_noted = True
            write_status(self.folder)

    def _record(self, metrics: dict[str, Any], tables: dict[str, Table]) -> None:
        """Append a record, named train/…, eval/… or perf/…, to metrics.jsonl, and hand it on."""
        record = {"step": self._run.progress.step, **metrics}
        with naming(self.folder / "metrics.jsonl"):
            if record["step"] == self._first:  # replace what is there of it
                self._metrics.truncate(self._recorded)
            self._metrics.write(json.dumps(record | tables).encode() + b"\n")
            self._metrics.flush()
            self._recorded = self._metrics.tell()
        self._elsewhere.log(record, tables)  # room: trackers wandb

    def __enter__(self) -> "Tracker":
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _traceback: object) -> None:
        if self._run.is_main:
            self._bar.close()
            with contextlib.suppress(OSError):  # what could not be written has been reported
                self._metrics.close()
        failures = self._elsewhere.finish(error, self._summary)  # room: trackers wandb
        if self._summary and failures:  # room: trackers wandb
            summary = self._summary | {"tracker_failures": failures}
            write_json(self.folder / "summary.json", summary)


def _evaluation_line(metrics: dict[str, Any]) -> str:
    return "  ".join(f"{n} {v:.4f}" if isinstance(v, float) else f"{n} {v:,}" for n, v in metrics.items())
