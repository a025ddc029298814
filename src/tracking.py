"""The run's record: metrics.jsonl, Weights & Biases and the terminal, all written by the main process alone."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn

import yaml
from tqdm import tqdm

from src.checkpoint.format import write_json, write_text
from src.checkpoint.resume import Found
from src.checkpoint.output_folder import saved_settings
from src.config import Config
from src.launch import Launch
from src.wandb_logger import WandbRun


class Tracker:
    """Opens the run's record and its W&B run; as a context manager, ends a run that raises as crashed."""

    def __init__(
        self, config: Config, launch: Launch, facts: dict[str, Any], total_steps: int, is_main: bool, found: Found
    ) -> None:
        """Args:
        facts: what the start-up summary says besides the launch, by title.
        found: what the run continues from.
        """
        self.folder = config.folder
        self.is_main = is_main
        self.total_steps = total_steps
        self._started = time.perf_counter()
        self._summary: dict[str, Any] | None = None
        self._is_stopped = False
        if not is_main:
            return
        is_continued = found.is_own(config)
        self._metrics = (self.folder / "metrics.jsonl").open("a")
        self._start = found.progress.step
        self._recorded = min(found.state["metrics_bytes"] if is_continued else 0, self._recorded_bytes())
        self._metrics.truncate(self._recorded + self._recorded_since())
        origin = saved_settings(self.folder).get("resume") if is_continued else config.parent_checkpoint
        settings = config.model_dump(mode="json") | {"resume": str(origin or config.resume)}
        if "{run_name}" not in config.output_dir:
            del settings["output_dir"]  # fed back under another name, it would lead to this run
        write_text(self.folder / "config.yaml", yaml.safe_dump(settings, sort_keys=False))
        for of_an_earlier_end in ("status.json", "summary.json"):
            (self.folder / of_an_earlier_end).unlink(missing_ok=True)
        self.wandb_id = found.state.get("wandb_id") if is_continued else None
        resume = "allow" if self.wandb_id else None
        self._wandb = WandbRun(config, launch.as_dict(), self.say, id=self.wandb_id, resume=resume, dir=self.folder)
        if self._wandb.run:
            self.wandb_id = self._wandb.run.id
            self._wandb.tell(lambda run: (self.folder / "wandb" / "run_id").write_text(run.id))
        asked = f"asked for by {launch.config_file}" if launch.config_file else "not started by an accelerate yaml"
        processes = f"{launch.num_processes} process" + ("es" if launch.num_processes > 1 else "")
        backend = f" on {launch.backend}" if launch.backend else ""
        backend += f" (gradients: {launch.comm_hook})" if launch.comm_hook else ""
        if launch.note:
            print(launch.note)
        print(f"{config.run_name}: {config.task.name}")
        strategy = f"{launch.strategy} ({asked}), {processes}{backend}, {launch.device}, {launch.precision}"
        rows = {"strategy": strategy, **facts, "output": str(self.folder), "W&B": self._wandb.where}
        rows["resume"] = found.summary
        for title, text in rows.items():
            if text:
                print(f"  {title:<10} {text}")
        for note in found.notes:
            print(f"  {note}")
        sys.stdout.flush()
        self._bar = tqdm(
            initial=self._start,
            total=total_steps,
            unit="step",
            dynamic_ncols=True,
            disable=not sys.stderr.isatty(),
            smoothing=0.05,
        )

    def log(
        self, step: int, metrics: dict[str, float | None], tables: dict[str, list[dict[str, str]]] | None = None
    ) -> None:
        """Records metrics named train/…, eval/… or perf/…, after optimizer step `step` (counted from 1).

        Args:
            tables: of text, by a name of the same kind; rows with the same keys.
        """
        if not self.is_main:
            return
        record = {"step": step, **metrics}
        tables = tables or {}
        try:
            if step == self._start:  # in place of what there was of it
                self._metrics.truncate(self._recorded)
            self._metrics.write(json.dumps(record | tables) + "\n")
            self._metrics.flush()
        except OSError as error:
            error.filename = str(self.folder / "metrics.jsonl")
            raise
        self._wandb.log(record, tables)
        if "train/loss" in metrics:
            unit = "tokens" if "perf/tokens_per_second" in metrics else "samples"
            speed = f"{metrics[f'perf/{unit}_per_second']:,.0f} {unit}/s"
            loss = "not finite" if metrics["train/loss"] is None else f"{metrics['train/loss']:.4f}"
            says = f"loss {loss}  lr {metrics['train/lr']:.2e}  {speed}"
            if self._bar.disable:
                left = (time.perf_counter() - self._started) / (step - self._start) * (self.total_steps - step)
                print(f"step {step:>6}/{self.total_steps}  {says}  eta {tqdm.format_interval(left)}", flush=True)
            else:
                self._bar.set_postfix_str(says, refresh=False)
        else:
            self.say(f"step {step:>6}/{self.total_steps}  {_evaluation(metrics)}")
            for row in (row for rows in tables.values() for row in rows):
                self.say("  " + _one_line(" | ".join(row.values())))

    def _recorded_since(self) -> int:
        """Bytes of an evaluation that came after the last step, but not into its checkpoint: whoever asked for an end
        before it, and then for more steps, would lose it."""
        with (self.folder / "metrics.jsonl").open("rb") as record:
            record.seek(self._recorded)
            line = record.readline()
        is_whole = line.endswith(b"\n")
        return len(line) if is_whole and line.startswith(f'{{"step": {self._start}, '.encode()) else 0

    def advance(self) -> None:
        """Moves the progress bar by one step."""
        if self.is_main:
            self._bar.update()

    def position(self) -> dict[str, Any]:
        """What a checkpoint keeps, so that the record goes on from there."""
        if not self.is_main:
            return {}
        os.fsync(self._metrics.fileno())
        return {"metrics_bytes": self._recorded_bytes(), "wandb_id": self.wandb_id}

    def stop(self, reason: str, step: int, checkpoint: Path | None, command: str) -> None:
        """Writes status.json: the run was told to end, and how to go on."""
        if not self.is_main:
            return
        write_stopped(self.folder, reason, step, checkpoint, command)
        self._bar.close()
        self._wandb.tell(lambda run: run.mark_preempting())
        self._is_stopped = True
        print(f"stopped after step {step} by {reason}; to go on: {command}", flush=True)

    def summarize(self, summary: dict[str, Any]) -> None:
        """Writes summary.json and the closing block."""
        if not self.is_main:
            return
        write_json(self.folder / "status.json", {"status": "done", "step": summary["step"]})
        write_json(self.folder / "summary.json", summary)
        self._summary = summary
        self._wandb.tell(lambda run: run.summary.update(summary))
        self._bar.close()
        print(f"done in {tqdm.format_interval(summary['seconds'])}: {_evaluation(summary)}")
        print(f"  model      {self.folder / 'model'}")
        print(f"  record     {self.folder}/summary.json, metrics.jsonl, config.yaml")
        run = None if self._wandb.failure else self._wandb.run
        if run and run.offline:
            print(f"  upload     wandb sync {shlex.quote(str(Path(run.settings.sync_dir)))}")
        elif run:
            print(f"  W&B        {run.url}")
        sys.stdout.flush()

    def say(self, line: str) -> None:
        """Prints a line, on the main process."""
        if not self.is_main:
            return
        if self._bar.disable:
            print(line, flush=True)
        else:
            self._bar.write(line)

    def _recorded_bytes(self) -> int:
        return os.fstat(self._metrics.fileno()).st_size

    def __enter__(self) -> Tracker:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if self.is_main:
            self._bar.close()
            with contextlib.suppress(OSError):  # what it could not write has been told
                self._metrics.close()
            self._wandb.finish(exit_code=1 if kind or self._is_stopped else 0)
            if self._summary and self._wandb.failure:
                write_json(self.folder / "summary.json", self._summary | {"wandb_failure": self._wandb.failure})


def write_stopped(folder: Path, reason: str, step: int, checkpoint: Path | None, command: str) -> None:
    """Writes status.json for a run that was told to end."""
    status = {
        "status": "preempted",
        "reason": reason,
        "step": step,
        "checkpoint": str(checkpoint) if checkpoint else None,
        "command": command,
    }
    write_json(folder / "status.json", status)


def stop_at_start(config: Config, found: Found, command: str, reason: str) -> NoReturn:
    """Ends a process that was told to before the first step: there is nothing to save."""
    write_stopped(config.folder, reason, found.progress.step, found.checkpoint, command)
    print(f"stopped before the first step by {reason}; to go on: {command}", flush=True)
    os._exit(0)  # whatever it is in the middle of


def figures(values: dict[str, float]) -> str:
    """Counts and, as floats, shares, by name, in one line."""
    return ", ".join(
        f"{name.replace('_', ' ')} " + (f"{value:.1%}" if isinstance(value, float) else f"{value:,}")
        for name, value in values.items()
    )


def _one_line(text: str, width: int = 110) -> str:
    text = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
    return text if len(text) <= width else text[: width - 1] + "…"


def _evaluation(metrics: dict[str, Any]) -> str:
    found = {name: value for name, value in metrics.items() if name.startswith("eval/")}
    return "  ".join(
        f"{name} {value:.4f}" if isinstance(value, float) else f"{name} {value:,}" for name, value in found.items()
    )
