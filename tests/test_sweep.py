"""python -m src.tools.sweep: what is drawn, which trials go on, that nothing is lost or done twice. docs/sweeps.md."""

import json
import signal
from importlib import import_module
from pathlib import Path
from typing import Any

import optuna
import pytest
import yaml

from src.config.errors import UserError
from src.tools.sweep import command_of, finished, main, open_study, read_sweep, settings_of
from tests.launching import PROJECT, Started, wait
from train import run_settings

TRAINER = """\
import json, os, pathlib, signal, sys, time

given = dict(word.removeprefix("--").split("=") for word in sys.argv[1:])
folder = pathlib.Path(given["output_dir"])
folder.mkdir(parents=True, exist_ok=True)
signal.signal(signal.SIGTERM, lambda *_: (time.sleep(0.3), (folder / "saved").touch(), os._exit(0)))
(folder / "began").touch()
if given["optim.lr"] == "bad":
    sys.exit(1)
with (folder / "metrics.jsonl").open("a") as record:
    for step in (10, 20, 30):
        record.write(json.dumps({"step": step, "eval/loss": float(given["optim.lr"])}) + "\\n")
        record.flush()
        time.sleep(float(given["sleep"]))
(folder / "ended").touch()
"""
"""Records its learning rate as its loss, three times, and saves when it is told to stop."""
SWEEP: dict[str, Any] = {
    "program": "trainer.py",
    "method": "grid",
    "metric": {"name": "eval/loss", "goal": "minimize"},
    "parameters": {"optim.lr": {"values": [0.1, 0.2, 0.3]}, "sleep": {"value": 0.0}},
    "command": ["python", "${program}", "${args}"],
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("src.tools.sweep.POLL_SECONDS", 0.02)
    (tmp_path / "trainer.py").write_text(TRAINER)
    return tmp_path


def write(folder: Path, **changes: Any) -> str:
    """Write a sweep file, SWEEP with changes, and return its path."""
    file = folder / "sweep.yaml"
    file.write_text(json.dumps(SWEEP | changes))
    return str(file)


def study_of(file: str) -> optuna.Study:
    return open_study(read_sweep(file), Path("runs/sweep"))


def trials(file: str) -> dict[str, str]:
    return {trial.user_attrs["folder"]: trial.state.name for trial in study_of(file).trials}


def test_a_grid_has_each_combination_once_and_names_the_best(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = write(folder, parameters=SWEEP["parameters"] | {"seed": {"min": 0, "max": 1}})
    main([file])
    header, *table, best = capsys.readouterr().out.splitlines()
    assert header.split() == ["value", "folder", "optim.lr", "seed", "sleep", "state"]
    assert [line.split()[0] for line in table] == ["0.1", "0.1", "0.2", "0.2", "0.3", "0.3"]
    name = table[0].split()[1]
    assert best == f"best model: runs/sweep/{name}/model"
    assert (folder / f"runs/sweep/{name}/metrics.jsonl").read_text().endswith('"eval/loss": 0.1}\n')
    main([file])
    assert len(list(folder.glob("runs/sweep/trial-*.log"))) == 6, "all of it has been done"
    sweep = read_sweep(file)
    assert len({json.dumps(settings_of(sweep, number)) for number in range(6)}) == 6
    with pytest.raises(UserError, match="sweep has 6 trials: --array=0-5"):
        settings_of(sweep, 6)


@pytest.mark.parametrize("method", ["random", "bayes"])
def test_numbers_are_drawn_from_ranges_others_in_each_session(folder: Path, method: str) -> None:
    """Tried with one seed for all sessions: the same."""
    numbers = {"min": 0.0003, "max": 0.03, "distribution": "log_uniform_values"}
    sweep = read_sweep(write(folder, method=method, parameters={"optim.lr": numbers}))
    drawn = []
    for _ in range(12):
        study = open_study(sweep, Path("runs/drawn"))
        trial = study.ask()
        trial.set_user_attr("folder", "x")
        drawn += [float(sweep.choose(trial)["optim.lr"])]
        study.tell(trial, drawn[-1])
    assert 0.0003 <= min(drawn) < max(drawn) <= 0.03
    assert len(set(drawn)) == 12
    assert sum(lr < 0.003 for lr in drawn) > 2, "half are below the geometric mean"


def test_with_halving_the_worse_are_stopped_and_save(folder: Path) -> None:
    """Those that come first go on. Tried without `should_prune`: all come to their end."""
    halving = {"type": "hyperband", "min_iter": 1, "eta": 2}
    best_first = {"name": "eval/loss", "goal": "maximize"}
    parameters = SWEEP["parameters"] | {"sleep": {"value": 0.5}}
    file = write(folder, parameters=parameters, early_terminate=halving, metric=best_first)
    main([file])
    found = trials(file)
    assert {*found.values()} == {"COMPLETE", "PRUNED"}
    for name, state in found.items():
        ends = ((folder / "runs/sweep" / name / end).exists() for end in ("saved", "ended"))
        assert [*ends] == [state == "PRUNED", state == "COMPLETE"]


def test_a_trial_that_fails_does_not_end_the_sweep_and_is_tried_again(folder: Path) -> None:
    """Tried with a failure that counts as done."""
    file = write(folder, parameters=SWEEP["parameters"] | {"optim.lr": {"values": ["bad", 0.2]}})
    main([file])
    assert sorted(trials(file).values()) == ["COMPLETE", "WAITING"]
    mended = TRAINER.replace('== "bad"', '== "worse"').replace('float(given["op', 'len(given["op')
    (folder / "trainer.py").write_text(mended)
    main([file])
    assert len({trial.user_attrs["folder"] for trial in finished(study_of(file))}) == 2


def test_mistakes_of_a_file_get_a_line_each(folder: Path) -> None:
    bad = {"a": {"min": "1e-4", "max": 1}, "b": {"values": [1], "distribution": "normal"}, "c": 3}
    file = write(folder, parameters=bad, method="genetic", goal=1)
    with pytest.raises(UserError, match=rf"^{file}: .*(\n{file}: .*){{5}}$"):
        read_sweep(file)
    with pytest.raises(UserError, match="method: random never ends by itself: add --trials=8"):
        main([write(folder, method="random", parameters={"optim.lr": {"min": 0.1, "max": 0.9}})])


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_sweep_that_is_stopped_or_killed_stops_its_trial_and_resumes_it(folder: Path, number: signal.Signals) -> None:
    """Tried without waiting until it has saved, and without what the kernel is asked for when the sweep is killed."""
    slow = SWEEP["parameters"] | {"sleep": {"value": 100}}
    file = write(folder, parameters=slow, program=str(folder / "trainer.py"), name=str(folder / "s"))
    words = ["--config_file", "accelerate_configs/cpu.yaml", "src/tools/sweep.py", file]
    trial = folder / "s/trial-00"
    with Started("cpu", folder=folder, words=words) as sweep:
        sweep.wait_until((trial / "began").exists)
        ended = sweep.send(number, sweep.trainers[0]).result()
        if number == signal.SIGTERM:
            assert (trial / "saved").exists()
            assert ended.exit_code == 1
            assert f"stopped by SIGTERM in {trial}; to resume: " in ended.stderr
            assert "Traceback" not in ended.stderr
            study = open_study(read_sweep(file), folder / "s")
            (waiting,) = study.get_trials(states=(optuna.trial.TrialState.WAITING,))
            assert waiting.user_attrs == {"folder": "trial-00"}
        wait((trial / "saved").exists, 30)


@pytest.mark.parametrize("file", sorted((PROJECT / "sweeps").glob("*.yaml")), ids=lambda file: file.name)
def test_wandbs_agent_starts_the_same_runs(folder: Path, file: Path) -> None:  # room: wandb
    """With settings that are valid. Tried with ${args} left out of a file, and with a setting that is unknown."""
    (folder / "configs").symlink_to(PROJECT / "configs")
    (folder / "data/tinyshakespeare").mkdir(parents=True)
    (folder / "data/tinyshakespeare/input.txt").write_text("which the header says how to get")
    sweep = read_sweep(str(file))
    settings = sweep.choose(optuna.create_study(sampler=sweep.sampler()).ask())
    ours = command_of(sweep, settings, Path("runs/s/trial-00"), [])
    content = yaml.safe_load(file.read_text())
    theirs = import_module("wandb.sdk.launch.sweeps.utils")  # two seconds, which only this test needs
    words = theirs.create_sweep_command_args({"args": {name: {"value": value} for name, value in settings.items()}})
    words |= {"env": ["/usr/bin/env"], "interpreter": ["python"], "program": [content["program"]]}  # as wandb_agent.py
    found = theirs.create_sweep_command(content["command"])
    command = [text for word in found for text in words.get(word[2:-1], [word])]
    assert {*ours} - {*command} == {"--run_name=s-trial-00", "--output_dir=runs/s/trial-00"}
    assert {*command} <= {*ours}
    run_settings(command[command.index("train.py") + 1 :])
