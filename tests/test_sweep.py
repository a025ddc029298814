"""python -m src.tools.sweep: what is drawn, which trials go on, that nothing is lost or done twice. docs/sweeps.md."""

import json
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from src.config.errors import UserError
from src.tools import sweep as sweep_module
from src.tools.sweep import Trial, build_trials, draw, main, read_sweep
from tests.faults.runs import without_times
from tests.launching import PROJECT, QUIET, Launch, Run, Started

DIGITS = ["--task.source=digits", "--epochs=2", "--eval_every=10", "--log_every=5", "--save_every=4", *QUIET]
"""46 steps."""
SWEEP: dict[str, Any] = {
    "program": "train.py",
    "method": "random",
    "metric": {"name": "eval/loss", "goal": "minimize"},
    "parameters": {
        "optim.lr": {"min": 0.0003, "max": 0.03, "distribution": "log_uniform_values"},
        "task.dropout": {"values": [0, 0.1, 0.2]},
        "task.shift": {"min": 0, "max": 3},
        "seed": {"values": [0, 1]},
        "task.rotation": {"min": 0.0, "max": 20.0},
        "task.label_smoothing": {"value": 0},
    },
    "command": ["accelerate", "launch", "--config_file", "accelerate_configs/cpu.yaml", "${program}", "${args}"],
}
HALVING = {"early_terminate": {"type": "hyperband", "min_iter": 1, "eta": 2}}


class Killed(BaseException):
    """Stands for SIGKILL to the sweep."""


def write(folder: Path, **changes: Any) -> str:
    """Write a sweep file, SWEEP with changes, and return its path."""
    file = folder / "sweep.yaml"
    file.write_text(json.dumps({name: value for name, value in (SWEEP | changes).items() if value is not None}))
    return str(file)


def mistakes(*argv: str) -> list[str]:
    with pytest.raises(UserError) as error:
        main(list(argv))
    return str(error.value).splitlines()


def trained(trial: Trial, evaluations: dict[int, float], max_steps: int | None) -> None:
    """Leave in a trial's folder what train.py leaves there."""
    (trial.folder / "checkpoints/step_00000010").mkdir(parents=True, exist_ok=True)
    lines = [json.dumps({"step": step, "eval/loss": value}) + "\n" for step, value in evaluations.items()]
    (trial.folder / "metrics.jsonl").write_text("".join(lines))
    (trial.folder / "summary.json").write_text("{}")
    (trial.folder / "config.yaml").write_text(
        json.dumps(trial.config.model_dump(mode="json") | {"max_steps": max_steps})
    )


@pytest.fixture
def trainings(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[tuple[str, int | None]]]:
    """trainings(values): in place of training, evaluates every 10 of 46 steps to what `values` says of a trial's name
    and step; where it says None, the trial fails. Returns a list that is filled with the trainings."""

    def fixture(values: Callable[[str, int], float | None]) -> list[tuple[str, int | None]]:
        asked: list[tuple[str, int | None]] = []

        def train(trial: Trial, steps: int | None, log: Path) -> int:
            asked.append((trial.folder.name, steps))
            found = {step: values(trial.folder.name, step) for step in [*range(10, (steps or 40) + 1, 10)]}
            if None in found.values():
                return 1
            trained(trial, found | ({} if steps else {46: values(trial.folder.name, 46)}), steps)  # type: ignore[arg-type]
            return 0

        monkeypatch.setattr(sweep_module, "train", train)
        monkeypatch.setattr(sweep_module, "find_spec", lambda _: None)  # no report, which is a process
        return asked

    return fixture


def test_what_is_drawn_depends_on_the_file_alone(tmp_path: Path) -> None:
    """Tried with a generator without a seed."""
    sweep = read_sweep(write(tmp_path))
    eight = draw(sweep, 8)
    assert draw(sweep, 100)[:8] == eight
    many = draw(sweep, 1000)
    rates = [trial["optim.lr"] for trial in many]
    assert 0.0003 <= min(rates) < 0.0004
    assert 400 < sum(rate < 0.003 for rate in rates) < 600, "half of them are below the geometric mean"
    assert {trial["task.dropout"] for trial in many} == {0, 0.1, 0.2}
    assert {trial["task.shift"] for trial in many} == {0, 1, 2, 3}
    assert {trial["seed"] for trial in many} == {0, 1}
    assert {trial["task.label_smoothing"] for trial in many} == {0}
    assert 9 < sum(trial["task.rotation"] for trial in many) / 1000 < 11


def test_a_grid_has_each_combination_once(tmp_path: Path) -> None:
    parameters = {"seed": {"values": [0, 1]}, "task.shift": {"min": 0, "max": 2}}
    sweep = read_sweep(write(tmp_path, method="grid", parameters=parameters))
    grid = [(trial["seed"], trial["task.shift"]) for trial in draw(sweep, None)]
    assert grid == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2)]


def test_every_mistake_in_a_file_gets_a_line(tmp_path: Path) -> None:
    bad: dict[str, Any] = {
        "a": {"min": 1, "max": 1},
        "b": {"values": []},
        "c": {"min": 0.0, "max": 1.0, "distribution": "log_uniform_values"},
        "d": {"min": "1e-4", "max": "1e-2"},
        "e": {"value": 1, "min": 0},
    }
    file = write(tmp_path, parameters=bad)
    lines = mistakes(file, "--trials=2")
    assert [line.removeprefix(f"{file}: ").partition(":")[0] for line in lines] == [
        f"parameters.{name}" for name in bad
    ]
    assert lines[3].endswith("1e-4 is text to W&B, write 0.0001")
    assert mistakes(write(tmp_path, method="bayes", goal=1, metric={"name": "eval/loss", "goal": "min"})) == [
        f"{file}: method: must be 'grid' or 'random'",
        f"{file}: metric.goal: must be 'minimize' or 'maximize'",
        f"{file}: goal: Extra inputs are not permitted",
    ]
    (line,) = mistakes(write(tmp_path, command=["${program}", "${args_json}"]))
    assert line == f"{file}: command: lacks ${{args}}"
    (line,) = mistakes(write(tmp_path, method="grid", parameters={"optim.lr": {"min": 0.1, "max": 0.2}}))
    assert line == "method: grid needs values, or integers min and max, for optim.lr"
    (line,) = mistakes(write(tmp_path))
    assert line == "method: random has no end: add --trials=8"
    Path(file).write_text("parameters: &a {seed: *a}")
    (line,) = mistakes(file)
    assert line.startswith(f"{file}: cannot be read: nested too deeply, or in itself, ")


def test_each_value_reaches_train_py_as_yaml_reads_it(tmp_path: Path) -> None:
    """Tried as Python writes it: None is refused."""
    values: dict[str, Any] = {"max_steps": None, "compile": True, "run_name": "None", "optim.betas": [0.5, 0.9]}
    file = write(tmp_path, method="grid", parameters={name: {"value": value} for name, value in values.items()})
    sweep = read_sweep(file)
    (trial,) = build_trials(sweep, draw(sweep, None), tmp_path, [])
    assert trial.command[-6:-2] == ["--compile=true", "--max_steps=null", "--optim.betas=[0.5, 0.9]", "--run_name=None"]
    assert (trial.config.max_steps, trial.config.compile, trial.config.optim.betas) == (None, True, (0.5, 0.9))
    assert "max_steps=null " in trial.label


def test_settings_are_checked_before_anything_starts(tmp_path: Path) -> None:
    """As train.py does it, with the metric; a mistake that all trials share is told once."""
    parameters = {"optim.rate": {"value": 1}, "task.dropout": {"value": 7}}
    file = write(tmp_path, parameters=parameters, metric={"name": "eval/acuracy"})
    lines = mistakes(file, "--trials=3", f"--folder={tmp_path / 'new'}")
    assert [line.partition(":")[0] for line in lines] == ["--optim.rate=1", "--task.dropout=7"]
    file = write(tmp_path, metric={"name": "eval/acuracy"})
    (line,) = mistakes(file, "--trials=3", f"--folder={tmp_path / 'new'}")
    assert "the evaluation has no such metric, did you mean eval/accuracy?" in line
    assert not (tmp_path / "new").exists()


def test_a_schedule_that_would_shrink_is_refused(tmp_path: Path) -> None:
    """Tried without the check: each rung trained with learning rates of its own."""
    arguments = [write(tmp_path, **HALVING), "--trials=2", f"--folder={tmp_path / 's'}", *DIGITS]
    assert mistakes(*arguments, "--epochs=null", "--max_steps=46") == [
        "early_terminate: cutting a run short keeps its learning rates only if `epochs` spans them all"
    ]


def test_only_the_better_half_goes_on(tmp_path: Path, trainings: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """By the value at the rung, not by what came later. Tried with the worse half, and with the last value."""
    order = {"trial-00": 3, "trial-01": 1, "trial-02": 0, "trial-03": 2}
    asked = trainings(lambda name, step: order[name] + (9 if name == "trial-02" and step > 10 else 0))
    arguments = [write(tmp_path, **HALVING), "--trials=4", f"--folder={tmp_path / 's'}", *DIGITS]
    main(arguments)
    assert asked == [*((name, 10) for name in order), ("trial-02", 20), ("trial-01", 20), ("trial-01", None)]
    table = capsys.readouterr().out.partition("best first:\n")[2].splitlines()
    best = [("trial-01", "46", "1.000"), ("trial-02", "20", "9.000"), ("trial-03", "10", "2.000")]
    assert [tuple(line.split()[:3]) for line in table[1:4]] == best
    asked.clear()
    main(arguments)
    assert asked == [], "all of it has been done"
    first = capsys.readouterr().out.splitlines()[2:6]
    assert [line.split()[:2] for line in first] == [[name, "10"] for name in order], "told as it was then"


def test_a_trial_that_fails_is_told_and_ranked_last(
    tmp_path: Path, trainings: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """And the others go on; the same command tries it again. Tried with a failure that counted as done."""
    values = {"trial-00": None, "trial-01": float("nan"), "trial-02": 2.0}
    asked = trainings(lambda name, step: values[name])
    arguments = [write(tmp_path), "--trials=3", f"--folder={tmp_path / 's'}", *DIGITS]
    main(arguments)
    assert [name for name, _ in asked] == list(values)
    table = capsys.readouterr().out.partition("best first:\n")[2].splitlines()
    assert table[1].split()[:3] == ["trial-02", "46", "2.000"]
    assert table[2].startswith("trial-00")
    assert table[2].endswith(f"FAILED: exit code 1, see {tmp_path}/s/trial-00.log")
    assert table[3].endswith("FAILED: not finite")
    asked.clear()
    values["trial-00"] = 1.0
    main(arguments)
    assert asked == [("trial-00", None)]


def test_a_folder_keeps_its_sweep(tmp_path: Path, trainings: Any) -> None:
    """A longer one goes on with it, one with other settings is refused. Tried without comparing them."""
    asked = trainings(lambda name, step: 1.0)
    arguments = [write(tmp_path, **HALVING), f"--folder={tmp_path / 's'}", *DIGITS]
    main([*arguments, "--trials=2"])
    (line,) = mistakes(*arguments, "--trials=2", "--optim.weight_decay=1", "--optim.momentum=0.5")
    assert line == f"{tmp_path}/s: holds trials with other optim.momentum, optim.weight_decay; choose another --folder"
    asked.clear()
    main([*arguments, "--trials=3"])
    assert asked == [("trial-02", 10)]


def test_the_winners_curve_is_that_of_a_run_in_one_piece(
    tmp_path: Path, launch: Launch, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """To the last bit, over a rung and the death of a trial and of its sweep; nothing is done twice. Tried with rungs
    that set `epochs` to null, which had to be allowed: other learning rates."""
    asked: list[tuple[str, int | None]] = []
    ends: list[Run] = []

    def train(trial: Trial, steps: int | None, log: Path) -> int:
        asked.append((trial.folder.name, steps))
        words = [*trial.command[2:], *([f"--max_steps={steps}"] if steps else [])]
        fault: dict[str, Any] = (
            {"FAULT": "die", "FAULT_STEP": "4"} if len(asked) == 3 else {}
        )  # the one that went on, at step 8
        with Started("cpu", folder=trial.folder, words=words, **fault) as started:
            ends.append(started.result())
        if fault:
            raise Killed
        return ends[-1].exit_code

    monkeypatch.setattr(sweep_module, "train", train)
    steps = ("--epochs=1", "--global_batch_size=128", "--eval_every=4", "--log_every=2", "--save_every=3")
    arguments = [write(tmp_path, **HALVING), "--trials=2", f"--folder={tmp_path / 's'}", *DIGITS, *steps]
    with pytest.raises(Killed):
        main(arguments)
    main(arguments)
    assert [steps for _, steps in asked] == [4, 4, None, None]
    assert asked[2] == asked[3]
    assert "after step 6, from" in ends[-1].stdout, "it went on from a checkpoint, not from the start"
    best = tmp_path / "s" / asked[-1][0]
    assert capsys.readouterr().out.partition("best first:\n")[2].splitlines()[1].startswith(best.name)

    assert (tmp_path / "s/report.html").exists() == (PROJECT / "src/tracking/report.py").exists()
    whole = launch("cpu", f"--config={best / 'config.yaml'}").succeeded()
    assert without_times(Run(0, "", "", best).records) == without_times(whole.records)
    (weights,) = (best / "model").glob("*.safetensors")
    assert weights.read_bytes() == (whole.folder / "model" / weights.name).read_bytes()


TRAINER = """\
import os, pathlib, sys, time

folder = pathlib.Path(next(word for word in sys.argv if word.startswith("--output_dir=")).partition("=")[2])
folder.mkdir(parents=True, exist_ok=True)
launcher = os.getppid()
(folder / "began").touch()
while os.getppid() == launcher:
    time.sleep(0.01)
time.sleep(1)
(folder / "saved").touch()
"""
"""Saves when its launcher is gone, which takes a second."""


def stopped_by(number: signal.Signals, folder: Path) -> Run:
    """Start a sweep whose first trial is TRAINER, send it a signal, and wait for its end."""
    (folder / "trainer.py").write_text(TRAINER)
    launcher = ["sh", "-c", 'python "$0" "$@" & wait', "${program}", "${args}"]
    file = write(folder, command=launcher, program=str(folder / "trainer.py"))
    words = [
        "--config_file",
        "accelerate_configs/cpu.yaml",
        "src/tools/sweep.py",
        file,
        "--trials=2",
        f"--folder={folder}/s",
    ]
    with Started("cpu", folder=folder, words=words) as started:
        started.wait_until((folder / "s/trial-00/began").exists)
        return started.send(number, started.trainers[0]).result()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_sweep_that_is_stopped_stops_its_trial(tmp_path: Path, number: signal.Signals) -> None:
    """It waits until the trial has saved, though a launcher of one process doesn't, and says how to continue. Tried
    without that waiting."""
    ended = stopped_by(number, tmp_path)
    assert (tmp_path / "s/trial-00/saved").exists()
    assert ended.exit_code == 1
    assert f"stopped by {number.name} in {tmp_path}/s/trial-00; to continue: " in ended.stderr
    assert "Traceback" not in ended.stderr
    assert not (tmp_path / "s/trial-01").exists()


def test_a_sweep_that_is_killed_takes_its_trial_along(tmp_path: Path) -> None:
    """The trial saves first. Tried without what the kernel is asked for."""
    stopped_by(signal.SIGKILL, tmp_path)
    end = time.monotonic() + 30
    while not (tmp_path / "s/trial-00/saved").exists():
        assert time.monotonic() < end
        time.sleep(0.01)
