"""Search for settings with Optuna, in runs of train.py: `python -m examples.optuna_sweep runs/search 8 --epochs=2`."""

import subprocess
import sys
import time
from pathlib import Path

import optuna  # pip install -e '.[sweeps]'
from optuna.storages import RDBStorage

from src.checkpoint.files import read_json
from src.config.config import read_config
from src.distributed.process import SIGNALS, end_with_parent, exit_codes
from src.tasks import TASKS
from src.tracking.records import read_records

METRIC, GOAL = "eval/accuracy", optuna.study.StudyDirection.MAXIMIZE
RANGES = {"optim.lr": (3e-4, 3e-2), "optim.weight_decay": (1e-3, 1e-1)}  # drawn on a logarithmic scale
Retry = optuna.storages.RetryHeartbeatStaleTrialCallback
RETRY_FAILED = [lambda study, trial: None if trial.value is not None else Retry(max_retry=1)(study, trial)]


def train(trial: optuna.Trial, folder: Path, settings: list[str]) -> float:
    """Train to the end, or until Optuna prunes it. Return the model's metric; NaN, a failure to Optuna, without one."""
    trial.set_user_attr("folder", name := trial.user_attrs.get("folder", f"trial-{trial.number:02}"))
    own = [f"--{setting}={trial.suggest_float(setting, *bounds, log=True)}" for setting, bounds in RANGES.items()]
    command = [sys.executable, "train.py", *settings, *own, f"--run_name={name}", f"--output_dir={folder / name}"]
    last_step = -1
    with subprocess.Popen(command, preexec_fn=end_with_parent) as process:
        while process.poll() is None:
            time.sleep(0.5)
            for record in read_records(folder / name / "metrics.jsonl"):
                if METRIC in record and record["step"] > last_step:
                    trial.report(record[METRIC], last_step := record["step"])
            if SIGNALS.name or trial.should_prune():
                process.terminate()  # it saves first
                raise SystemExit("stopped; the same command resumes") if SIGNALS.name else optuna.TrialPruned
    return float("nan") if process.returncode else read_json(folder / name / "summary.json").get(METRIC, float("nan"))


def main(argv: list[str]) -> None:
    """Run or resume the search in the folder argv[0], of argv[1] trials, all of them with the settings in argv[2:]."""
    folder, trials, settings = Path(argv[0]), int(argv[1]), [*argv[2:], f"--checkpoint.metric={METRIC}"]
    read_config(settings, TASKS)  # refuses all mistakes in them, and a metric that the task doesn't have
    folder.mkdir(parents=True, exist_ok=True)
    storage = RDBStorage(f"sqlite:///{folder}/study.db", heartbeat_interval=1, heartbeat_stale_trial_callback=Retry())
    name = f"{GOAL.name} {RANGES} {settings}"
    if {*optuna.get_all_study_names(storage)} - {name}:
        sys.exit(f"{folder}: has a search with another goal, other ranges or settings; name another folder")
    study = optuna.create_study(storage=storage, study_name=name, direction=GOAL, load_if_exists=True)
    time.sleep(3)  # by now, a trial that was killed has missed its heartbeats, so that Optuna queues it again
    missing = trials - sum(trial.value is not None for trial in study.trials)
    SIGNALS.catch()
    study.optimize(lambda trial: train(trial, folder, settings), missing, callbacks=RETRY_FAILED)
    best = study.best_trials or sys.exit("no trial has finished; the same command goes on")
    print(f"best model: {folder / best[0].user_attrs['folder']}/model, {METRIC} {best[0].value:.4g}")


if __name__ == "__main__":
    with exit_codes("optuna_sweep"):
        main(sys.argv[1:])
