"""The log of a run: metrics.jsonl and the terminal. Only the main process writes it."""

import contextlib
import os
import shlex
import subprocess
from pathlib import Path

from tqdm import tqdm

from src.checkpoint.files import json_text, parent_checkpoint, planted, saved_settings, write_json, write_text
from src.checkpoint.status import write_status, write_stopped, write_unfinished
from src.config.errors import naming, raise_if_any
from src.config.settings import write_yaml
from src.config.terminal import bar, masked
from src.distributed.accelerator import peak_memory
from src.tasks.base import Metrics, Tables
from src.tracking.part import Entry, Parts
from src.tracking.summary import print_summary
from src.training.batches import examples_seen
from src.training.evaluation import Evaluation, evaluation_line
from src.training.progress import StepResult
from src.training.run import Run

SHOWN = 160
"""Characters of a longer prompt that the terminal shows: the last ones."""


class Tracker(contextlib.AbstractContextManager["Tracker"]):
    """Writes the run's log, and passes it on to the parts."""

    def __init__(self, run: Run, parts: Parts) -> None:
        """Open the log, and print what is about to run."""
        self._run, self._parts, self.folder = run, parts, run.config.folder
        self._skipped, self._status = run.progress.skipped, ""
        if run.is_main:
            # there may be secrets in a server's URL
            trackers = {title: masked(text) for title, text in parts.where.items() if text}
            self._session = {"date": run.task.state.date, "commit": _commit(), "trackers": trackers}
            self._begin()
            print_summary(run, parts.where)
        self._bar = bar(initial=run.progress.step, total=run.total_steps, smoothing=0.05, leave=True)

    def _begin(self) -> None:
        """Open metrics.jsonl, truncated to its length at the checkpoint that the run resumes from. Write the run's
        settings, and remove the summary of an earlier session."""
        config, resume = self._run.config, self._run.resume
        own = resume.own_state(config)
        raise_if_any(planted(file := self.folder / "metrics.jsonl"))
        self._metrics = file.open("a", buffering=1)  # writes whole lines
        size = self._metrics.seek(0, os.SEEK_END)
        self._metrics.truncate(min(size, own.metrics_bytes if own else 0))
        parent = saved_settings(self.folder).get("resume") if own else parent_checkpoint(config)
        settings = config.model_dump(mode="json") | {"resume": str(parent or config.resume)}
        if "{run_name}" not in config.output_dir:
            del settings["output_dir"]  # a run with these settings and another name must not write into this folder
        write_text(self.folder / "config.yaml", write_yaml(settings))
        write_unfinished(self.folder, resume.checkpoint if own else None)
        (self.folder / "summary.json").unlink(missing_ok=True)

    def advance(self) -> None:
        """Move the progress bar by one step."""
        is_due = self._run.is_evaluation_due()
        self._bar.set_description_str("evaluating" if is_due else self._status, refresh=is_due)
        self._bar.update()

    def log_training(self, result: StepResult) -> None:
        """Log the means over the interval that ends with this step or with the run, and what else was measured."""
        run, progress = self._run, self._run.progress
        progress.tick()
        num_examples = examples_seen(run, progress.step) - examples_seen(run, progress.interval_start)
        metrics: Entry = {
            "epoch": progress.step / run.steps_per_epoch,
            "train/lr": result.lr,
            "train/grad_norm": result.finite_norm,
            **progress.training_metrics(num_examples, run.is_fp16),
        }
        progress.train_loss = metrics["train/loss"]
        if run.is_log_due():  # not at the run's end: if it is extended, the interval continues
            progress.end_interval()
        if progress.skipped > self._skipped and not run.is_fp16:  # in fp16 it is part of finding the loss scale
            run.tell(f"WARNING: steps skipped so far because of non-finite gradients: {progress.skipped}")
        self._skipped = progress.skipped
        self._show(metrics)
        self._log(metrics | result.measured, {})

    def _show(self, metrics: Entry) -> None:
        """Show an interval's loss and speed in the bar, or in a line if there is no bar."""
        step, total = self._run.progress.step, self._run.total_steps
        unit = "tokens" if "perf/tokens_per_second" in metrics else "samples"
        speed = f"{metrics[f'perf/{unit}_per_second']:,.0f} {unit}/s"
        loss = "non-finite" if metrics["train/loss"] is None else f"{metrics['train/loss']:.4f}"
        self._status = f"loss {loss}  {speed}"
        if self._bar.disable:
            eta = tqdm.format_interval(self._run.progress.seconds / step * (total - step))
            self._run.tell(f"step {step:>6,}/{total:,}  loss {loss}  lr {metrics['train/lr']:.2e}  {speed}  eta {eta}")

    def log_evaluation(self, evaluation: Evaluation) -> None:
        """Log an evaluation made after the latest step."""
        run, step = self._run, self._run.progress.step
        if run.is_main:
            tables = run.task.tables(evaluation.outputs, run.eval_set) | {"samples": evaluation.samples}
            run.tell(f"step {step:>6,}/{run.total_steps:,}  {evaluation_line(evaluation.metrics)}")
            for given, made in map(dict.values, evaluation.samples):
                run.tell(f"  {'…' * (len(given) > SHOWN)}{given[-SHOWN:]}⟦{made}⟧")
            self._log({"epoch": step / run.steps_per_epoch, **evaluation.metrics}, tables)

    def sync(self) -> int:
        """Flush metrics.jsonl to disk. Return its length, where a resumed run continues it; 0 on other processes."""
        if not self._run.is_main:
            return 0
        self._bar.set_description_str("saving")
        with naming(self.folder / "metrics.jsonl"):
            os.fsync(self._metrics.fileno())
        return self._metrics.seek(0, os.SEEK_END)

    def log_stop(self, reason: str, checkpoint: Path | None) -> None:
        """Write that the run was stopped, and how to resume it."""
        self._bar.close()
        if self._run.is_main:
            write_stopped(self.folder, reason, self._run.progress.step, checkpoint, self._run.resume.command)

    def write_summary(self, evaluation: Metrics, save_pause_seconds: float) -> Entry:
        """Write summary.json and print the closing block. Return the summary. Collective.

        Args:
            save_pause_seconds: seconds for which saves have paused training.
        """
        run, progress, peaks = self._run, self._run.progress, peak_memory(self._run.accelerator)
        if not run.is_main:
            return {}
        progress.tick()
        training_seconds = progress.training_seconds + progress.interval_seconds
        speeds = {"samples_per_second": examples_seen(run, progress.step) / training_seconds}
        if tokens := progress.all_counts().get("tokens"):
            speeds["tokens_per_second"] = tokens / training_seconds
        summary = {
            "step": progress.step,
            "epoch": progress.step / run.steps_per_epoch,
            "train/loss": progress.train_loss,
            **evaluation,
            "seconds": progress.seconds,
            **speeds,
            "skipped_steps": progress.skipped,
            "save_pause_seconds": save_pause_seconds,
            **run.metadata,
            "peak_memory_bytes": peaks,
            **vars(run.launch),
            **self._session,
        }
        write_json(self.folder / "summary.json", summary)
        write_status(self.folder, {"status": "done", "step": progress.step})
        self._bar.set_description_str(self._status)
        self._bar.close()
        early = run.config.early_stopping
        run.tell(
            f"done in {tqdm.format_interval(progress.seconds)}: {evaluation_line(evaluation)}",
            *[progress.end_note(early)] * progress.is_out_of_patience(early),
            f"  model      {shlex.quote(str(self.folder / 'model'))}",
            f"  log        {self.folder}/metrics.jsonl, summary.json, config.yaml",
        )
        return summary

    def _log(self, metrics: Entry, tables: Tables) -> None:
        """Append a line to metrics.jsonl on the main process, which alone has parts, and have them log it too."""
        entry = {"step": self._run.progress.step, **metrics}
        tables = {f"eval/{name}": rows for name, rows in tables.items() if rows}
        if self._run.is_main:
            with naming(self.folder / "metrics.jsonl"):
                self._metrics.write(json_text(entry | tables) + "\n")
            self._parts.log(entry, tables)

    def __exit__(self, *_: object) -> None:
        self._bar.close()
        if self._run.is_main:
            with contextlib.suppress(OSError):  # a failed write has been reported
                self._metrics.close()


def _commit() -> str | None:
    """Return the git commit of this code, with -dirty if a file of it has changed since; None if it has none."""
    git = f"git -C {shlex.quote(str(Path(__file__).parent))} describe --always --dirty --exclude='*' 2>{os.devnull}"
    has_none, commit = subprocess.getstatusoutput(git)
    return None if has_none else commit
