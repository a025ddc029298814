"""What every task must do: learn, train on two processes as on one, resume bit for bit, export what it trained.

A task's tests are a subclass, in a file of their own, which says what a short run is and writes its data.
"""

from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from accelerate.utils import set_seed
from safetensors.torch import load_file

from src.config.errors import UserError
from src.start import run_settings
from src.tasks.base import TaskState, samples
from tests.launching import Launch, Run, mistakes

STOP = """
import os, signal
from src.training.progress import Progress
add_step = Progress.add_step
def stopping(progress, result):
    add_step(progress, result)
    if progress.step == 3:
        os.kill(os.getpid(), signal.SIGTERM)
Progress.add_step = stopping
"""
"""Sends SIGTERM to each process in its third step, as a batch system does."""


class TaskTests:
    """The tests of a task. Its subclass has them all, and may add its own."""

    settings: ClassVar[str]
    """Those of a short run without dropout; {folder} stands for the folder that `write` fills."""
    learns: ClassVar[str] = "--max_steps=60 --optim.lr=3e-3"
    """Further settings, with which the evaluation loss falls by a fifth."""
    mistake: ClassVar[tuple[str, str]] = "--global_bach_size=16", "unknown setting, did you mean global_batch_size?"
    """A setting that is wrong, and what is said of it."""

    @staticmethod
    def write(folder: Path) -> None:
        """Write a few rows, as the task reads them; nothing if it needs none."""

    @classmethod
    def words(cls, folder: Path) -> tuple[str, ...]:
        """Write the data into a folder, and return the settings of a short run on them."""
        cls.write(folder)
        words = f"{cls.settings} --log_every=1 --optim.warmup_steps=0".split()
        return tuple(word.replace("{folder}", str(folder)) for word in words)

    def task(self, folder: Path) -> Any:
        """Return the task on its data in this folder, of which a test may have changed some."""
        return run_settings([word.replace("{folder}", str(folder)) for word in self.settings.split()]).task

    def require_refusal(self, folder: Path, file: str, line: str, says: str) -> None:
        """Write the data, with this line at the end of a file of theirs, and see them refused with such a message."""
        self.write(folder)
        with (folder / file).open("a") as rows:
            rows.write(f"{line}\n")
        with pytest.raises(UserError, match=says):
            self.task(folder).build_datasets()

    @pytest.fixture(scope="class")
    @classmethod
    def short(cls, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
        """Return the settings of a short run."""
        return cls.words(tmp_path_factory.mktemp("rows"))

    @pytest.fixture(scope="class")
    @classmethod
    def alone(cls, launch: Launch, short: tuple[str, ...]) -> Run:
        """Return a run on one process."""
        return launch("cpu", *short).succeeded()

    @pytest.fixture(scope="class", params=["ddp", "fsdp"])
    @classmethod
    def split(cls, request: pytest.FixtureRequest, launch: Launch, short: tuple[str, ...]) -> Run:
        """Return the same run on two processes."""
        return launch(request.param, *short, processes=2).succeeded()

    def test_it_learns(self, launch: Launch, short: tuple[str, ...]) -> None:
        first, *_, last = evaluations(launch("cpu", *short, *self.learns.split()).succeeded())
        assert last["eval/loss"] < 0.8 * first["eval/loss"]

    def test_two_processes_train_as_one_does(self, alone: Run, split: Run) -> None:
        """Only the order of sums differs, and rounding with it."""
        assert split.summary["num_processes"] == 2
        assert split.losses == pytest.approx(alone.losses, rel=1e-5)
        assert norms(split) == pytest.approx(norms(alone), rel=1e-4)
        for found, expected in zip(evaluations(split), evaluations(alone), strict=True):
            assert found == pytest.approx(expected, rel=1e-4)

    def test_a_stopped_run_resumes_bit_for_bit(self, launch: Launch, short: tuple[str, ...], split: Run) -> None:
        yaml = split.summary["strategy"]
        stopped = launch(yaml, *short, processes=2, before=STOP).succeeded()
        assert stopped.status["status"] == "preempted"
        resumed = launch(yaml, *short, processes=2, folder=stopped.folder).succeeded()
        assert curve(resumed) == curve(split)
        first, second = (load_file(run.folder / "model/model.safetensors") for run in (split, resumed))
        assert all(first[name].equal(second[name]) for name in {*first, *second})

    def test_the_export_scores_each_example_once_as_the_run_did(self, short: tuple[str, ...], split: Run) -> None:
        """All examples in one batch, by hand."""
        set_seed(0)
        task = run_settings([*short, f"--output_dir={split.folder}-again"]).task.bind(TaskState())
        _, examples = task.build_datasets()
        model = task.load_export(split.folder / "model").eval()
        batch = task.collate(samples(examples, [*range(len(examples))]))
        with torch.no_grad():
            loss, _ = task.evaluate(model, batch)
        assert split.summary["eval/examples"] == len(examples)
        assert split.summary["eval/loss"] == pytest.approx(loss.item() / task.count(batch)["targets"], rel=1e-5)

    def test_a_wrong_setting_is_one_line(self, short: tuple[str, ...]) -> None:
        setting, message = self.mistake
        assert mistakes(*short, setting) == [f"{setting}: {message}"]


def evaluations(run: Run) -> list[dict[str, float]]:
    return [
        {name: value for name, value in record.items() if isinstance(value, float) and name.startswith("eval/")}
        for record in run.records
        if "eval/loss" in record
    ]


def norms(run: Run) -> list[float]:
    return [record["train/grad_norm"] for record in run.records if "train/grad_norm" in record]


def curve(run: Run) -> list[dict[str, Any]]:
    """Return the log without the times."""
    return [{name: value for name, value in r.items() if not name.startswith("perf/")} for r in run.records]
