"""examples/optuna_sweep.py: a search that is stopped, killed or half failed resumes."""

import json
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import optuna
import pytest

from examples import optuna_sweep
from src.config.errors import UserError
from tests.launching import PROJECT, QUIET, clean_environment, run_command, wait

pytestmark = pytest.mark.filterwarnings("ignore::optuna.exceptions.ExperimentalWarning")  # the heartbeats

TRAINER = """\
import json, pathlib, signal, sys, time

given = dict(word.removeprefix("--").split("=") for word in sys.argv[1:])
folder = pathlib.Path(given["output_dir"])
folder.mkdir(parents=True, exist_ok=True)
signal.signal(signal.SIGTERM, lambda *_: sys.exit((folder / "saved").touch()))
number, times = int(folder.name[-2:]), folder / "times"
times.write_text((times.read_text() if times.exists() else "") + "x")
if number in FAILS and len(times.read_text()) <= FAILS[number]:
    sys.exit(1)
with (folder / "metrics.jsonl").open("a") as record:
    record.write(json.dumps({"step": 10, "eval/accuracy": 1 - number / 10}) + "\\n")
time.sleep(SECONDS)
(folder / "summary.json").write_text(json.dumps({"eval/accuracy": 1 - number / 10}))
"""
"""Each trial is worse than the one before. FAILS has, by the trial's number, how many times it fails."""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(optuna_sweep, "time", SimpleNamespace(sleep=lambda seconds: time.sleep(seconds / 20)))
    monkeypatch.setattr(optuna_sweep.SIGNALS, "catch", lambda: None)
    return tmp_path


def train_by(folder: Path, fails: dict[int, int] | None = None, seconds: float = 0) -> None:
    (folder / "train.py").write_text(f"FAILS, SECONDS = {fails or {}}, {seconds}\n{TRAINER}")


def trials(folder: Path) -> list[tuple[str, str]]:
    """The folder and the state of each trial of the study."""
    (study,) = optuna.get_all_study_summaries(storage := f"sqlite:///{folder}/study.db")
    found = optuna.load_study(study_name=study.study_name, storage=storage).trials
    return [(trial.user_attrs.get("folder", ""), trial.state.name) for trial in found]


@pytest.mark.slow
def test_a_killed_search_resumes_its_trial_and_names_the_best(tmp_path: Path) -> None:
    words = ("--task.source=digits", "--max_steps=30", "--save_every=4", "--eval_every=8", *QUIET)
    command = [sys.executable, "-m", "examples.optuna_sweep", str(tmp_path / "search"), "2", *words]
    first = tmp_path / "search/trial-00"
    with subprocess.Popen(command, cwd=PROJECT, env=clean_environment(), stdout=subprocess.PIPE) as search:
        wait(lambda: [*first.glob("checkpoints/step_*")] or search.poll() is not None)
        search.kill()
        assert b"step_00000004" in search.communicate()[0], "until the trial has ended too"
    assert json.loads((first / "status.json").read_text())["status"] == "preempted"
    done = run_command(command, tmp_path).succeeded()
    assert done.stdout.count("\n  resume     after step ") == 1
    scores = {file.parent: json.loads(file.read_text()) for file in tmp_path.glob("search/*/summary.json")}
    assert sorted(path.name for path in scores) == ["trial-00", "trial-02"]
    best = max(scores, key=lambda path: scores[path]["eval/accuracy"])
    assert done.stdout.splitlines()[-1].startswith(f"best model: {best}/model, eval/accuracy 0.")
    assert trials(tmp_path / "search") == [("trial-00", "FAIL"), ("trial-00", "COMPLETE"), ("trial-02", "COMPLETE")]


def test_a_failed_trial_is_retried_once_and_does_not_end_the_search(folder: Path) -> None:
    """In its folder; one that fails twice is given up."""
    train_by(folder, fails={0: 1, 2: 2})
    optuna_sweep.main(["search", "5"])
    assert trials(folder / "search") == [
        *[("trial-00", "FAIL"), ("trial-00", "COMPLETE")],
        *[("trial-02", "FAIL"), ("trial-02", "FAIL"), ("trial-04", "COMPLETE")],
    ]
    optuna_sweep.main(["search", "2"])
    assert len(trials(folder / "search")) == 5, "two have finished"
    train_by(folder, fails={0: 9})
    with pytest.raises(SystemExit, match="no trial has finished; the same command goes on"):
        optuna_sweep.main(["others", "1"])


def test_a_trial_that_is_pruned_or_stopped_saves_first(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train_by(folder, seconds=5)
    monkeypatch.setattr(optuna.pruners.MedianPruner, "prune", lambda _, study, trial: trial.last_step == 10)
    with pytest.raises(SystemExit, match="no trial has finished"):
        optuna_sweep.main(["search", "1"])
    assert trials(folder / "search") == [("trial-00", "PRUNED")]
    assert (folder / "search/trial-00/saved").exists()
    monkeypatch.setattr(optuna_sweep.SIGNALS, "name", "SIGTERM")
    with pytest.raises(SystemExit, match="stopped; the same command resumes"):
        optuna_sweep.main(["stopped", "1"])
    assert trials(folder / "stopped") == [("trial-00", "RUNNING")], "until its heartbeat is missed"


def test_mistakes_are_refused_before_the_first_trial(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train_by(folder)
    monkeypatch.setattr(optuna_sweep, "METRIC", "eval/acuracy")
    with pytest.raises(
        UserError, match=r"^--sed=1: unknown .*\n.*metric=eval/acuracy: .* did you mean eval/accuracy\?"
    ):
        optuna_sweep.main(["search", "1", "--sed=1"])
    assert not (folder / "search").exists()
    monkeypatch.setattr(optuna_sweep, "METRIC", "eval/accuracy")
    optuna_sweep.main(["search", "1"])
    refused = "search: has a search with another goal, other ranges or settings; name another folder"
    with pytest.raises(SystemExit, match=refused):
        optuna_sweep.main(["search", "1", "--epochs=3"])
    for name, other in (("GOAL", optuna.study.StudyDirection.MINIMIZE), ("RANGES", {"optim.lr": (1e-4, 1e-2)})):
        with monkeypatch.context() as patch:
            patch.setattr(optuna_sweep, name, other)
            with pytest.raises(SystemExit, match=refused):
                optuna_sweep.main(["search", "1"])
    assert trials(folder / "search") == [("trial-00", "COMPLETE")]
