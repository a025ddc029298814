"""Trackers have what metrics.jsonl has; whatever happens to them, training continues, and one line says so."""

import json
import re
import time
from importlib import import_module
from pathlib import Path
from textwrap import dedent
from typing import Any
from unittest.mock import Mock
from zipfile import ZipFile, is_zipfile

import numpy as np
import pytest
import yaml
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from trackio.sqlite_storage import SQLiteStorage

from src.tracking import guarded as guards
from src.tracking.accelerate_trackers import MLflow
from src.tracking.guarded import Guarded, TrackerPart
from src.tracking.part import Part, Parts
from src.training.progress import Progress
from src.training.state import RunState
from tests.faults.runs import ALL, ORIGIN, assert_same_run, checkpoints, curve, lines, without_times
from tests.launching import BIN, PROJECT, Launch, Run, Whole, mistakes, run_command, slow, wait
from train import run_settings

Sessions = list[list[dict[str, Any]]]
"""What W&B's offline files hold, session by session."""

crash = RuntimeError("a bug\nof theirs")


def hang(*_: object) -> None:
    time.sleep(10_000)


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The lines that are printed."""
    found = list[str]()
    for module in ("guarded", "part"):
        monkeypatch.setattr(f"src.tracking.{module}.say", found.append)
    return found


@pytest.mark.parametrize(
    ("method", "fault", "why", "calls"),
    [
        ("start", hang, "no answer for 0 seconds", "start abandon"),
        ("log", hang, "no answer for 0 seconds", "start log abandon"),
        ("end", hang, "no answer for 0 seconds", "start log log end abandon"),
        ("start", crash, "a bug of theirs", "start abandon"),
        ("end", crash, "a bug of theirs", "start log log end abandon"),
        ("end", None, None, "start log log end"),
    ],
)
def test_a_tracker_that_hangs_or_raises_is_abandoned(
    monkeypatch: pytest.MonkeyPatch, said: list[str], method: str, fault: Any, why: Any, calls: str
) -> None:
    monkeypatch.setattr(guards, "HANG_SECONDS", 0.3)
    tracker, began = Mock(spec=TrackerPart, title="X"), time.monotonic()
    getattr(tracker, method).side_effect = fault
    guarded = Guarded(tracker)
    guarded.start()
    for _ in range(2):
        guarded.log({"step": 1}, {})
    guarded.end(None, None)
    assert time.monotonic() < began + 5
    wait(lambda: " ".join(name for name, _, _ in tracker.method_calls) == calls, 5)
    assert guarded.failure == why
    warning = f"WARNING: X failed ({why}); training continues and is logged to metrics.jsonl"
    assert said == ([warning] if why and method != "start" else [])


def test_a_tracker_that_falls_behind_is_abandoned(monkeypatch: pytest.MonkeyPatch, said: list[str]) -> None:
    """Once as many entries wait as the queue holds; no step waits for it."""
    monkeypatch.setattr(guards, "MAX_WAITING", 3)
    guarded, began = Guarded(Mock(spec=TrackerPart, title="X", **{"log.side_effect": hang})), time.monotonic()
    guarded.start()
    for _ in range(10):
        guarded.log({"step": 1}, {})
    guarded.end(None, None)
    assert time.monotonic() < began + 1
    assert said == ["WARNING: X failed (3 entries wait for it); training continues and is logged to metrics.jsonl"]


def test_a_stopped_run_says_how_to_upload_it(said: list[str]) -> None:
    """Or one that crashed."""
    here, other = (Mock(spec=Part, closing=closing) for closing in ("upload this", ""))
    run = Mock(is_main=True, **{"resume.own_state.return_value": None})
    Parts(run, [Mock(return_value=here), Mock(return_value=other)]).end(None)
    assert said == ["upload this"]


def test_a_copied_run_is_tracked_as_a_new_one(tmp_path: Path) -> None:
    """But not one that was moved, or is reached by another path: else both log into the same run."""
    (original := tmp_path / "a").mkdir()
    (copy := tmp_path / "b").mkdir()
    (link := tmp_path / "link").symlink_to(original)
    for saved_in, folder in ((original, original), (original, link), (tmp_path / "gone", copy), (original, copy)):
        run, notes = Mock(is_main=False), list[str]()
        run.config.folder, run.resume.notes = folder, notes
        run.resume.own_state.return_value = RunState(
            progress=Progress(), origin=ORIGIN, metrics_bytes=0, run_id="theirs", folder=str(saved_in)
        )
        run_id, is_copy = Parts(run, []).run_id, (saved_in, folder) == (original, copy)
        assert re.fullmatch("[0-9a-f]{8}" if is_copy else "theirs", run_id)
        assert notes == [f"trackers get a new run: this one was copied from {original}"] * is_copy


def numbers(run: Run) -> list[dict[str, Any]]:
    """Its records without times and tables: what every tracker has to have."""
    return [{n: v for n, v in record.items() if not isinstance(v, list)} for record in curve(run)]


def test_trackio_and_tensorboard_have_each_record(recorded: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once, but perhaps trackio not the last one before the run was killed."""
    monkeypatch.setattr("trackio.sqlite_storage.TRACKIO_DIR", recorded.folder.parent / "trackio")
    expected = numbers(recorded)
    (name,) = SQLiteStorage.get_runs("accelerate-template")
    found = without_times(SQLiteStorage.get_logs("accelerate-template", name))
    for log in found:
        del log["timestamp"]
    assert [record for record in found if record not in expected] == []
    assert [record for record in expected if record not in found and record["step"] > 8] == []
    events = EventAccumulator(str(recorded.folder / "tensorboard")).Reload()
    for tag in {name for record in expected for name in record} - {"step"}:
        shown = [(event.step, event.value) for event in events.Scalars(tag)]
        assert shown == [(r["step"], float(np.float32(r[tag]))) for r in expected if tag in r]
    closing = [[*lines(recorded, title)][-1] for title in ("trackio", "TB")]
    assert "trackio show --project" in closing[0]
    assert "tensorboard --logdir" in closing[1]


@pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy:DeprecationWarning")  # MLflow's, of SQLAlchemy 2.1
def test_mlflow_has_each_record_and_setting_in_one_run(recorded: Run) -> None:
    """But perhaps not the last ones before the run was killed. What was repeated after it is there twice."""
    client = import_module("mlflow").MlflowClient(f"sqlite:///{recorded.folder.parent}/mlflow.db")
    (experiment,) = client.search_experiments(filter_string="name = 'accelerate-template'")
    (run,) = client.search_runs([experiment.experiment_id])
    assert (run.info.status, run.info.run_name.rpartition("-")[0]) == ("FINISHED", "mnist")
    assert (run.data.params["optim.lr"], run.data.params["launch.num_processes"]) == ("0.003", "2")
    expected = numbers(recorded)
    for tag in {name for record in expected for name in record} - {"step"}:
        logged = {(record["step"], record[tag]) for record in expected if tag in record}
        found = {(metric.step, metric.value) for metric in client.get_metric_history(run.info.run_id, tag)}
        assert {point for point in logged if point[0] > 8} <= found <= logged
    *_, closing = lines(recorded, "MLflow")
    assert closing.endswith(f"--backend-store-uri sqlite:///{recorded.folder.parent}/mlflow.db")


def test_comet_has_each_record_and_setting_under_the_runs_key(recorded: Run) -> None:
    """Offline, what the killed session had logged is lost, as Comet writes the file when a session ends."""
    *_, closing = lines(recorded, "Comet")
    (file,) = (file for file in recorded.folder.glob("comet/*.zip") if is_zipfile(file) and ZipFile(file).namelist())
    assert closing.endswith(f"comet upload {file.parent}/*.zip")
    with ZipFile(file) as archive:
        experiment = json.loads(archive.read("experiment.json"))
        messages = [json.loads(line) for line in archive.read("messages.json").splitlines()]
    (wandb_run,) = {path.name.split("-")[-1] for path in recorded.folder.glob("wandb/offline-run-*")}
    assert (experiment["offline_id"], experiment["resume_strategy"]) == (wandb_run.zfill(32), "get_or_create")
    parameters = {p["paramName"]: p["paramValue"] for m in messages if (p := m["payload"].get("param"))}
    assert (parameters["optim|lr"], parameters["launch|num_processes"]) == (0.003, 2)
    metrics = [m["payload"]["metric"] for m in messages if m["type"] == "metric_msg"]
    for tag in {name for record in numbers(recorded) for name in record} - {"step"}:
        found = [(metric["step"], metric["metricValue"]) for metric in metrics if metric["metricName"] == tag]
        assert found == [(r["step"], r[tag]) for r in numbers(recorded) if tag in r and r["step"] > 8]


@pytest.mark.parametrize(("how", "status"), [((None, "a bug"), "FAILED"), ((None, None), "KILLED")])
def test_mlflow_says_how_a_run_ended(monkeypatch: pytest.MonkeyPatch, how: Any, status: str) -> None:
    """Crashed, or stopped and to be resumed."""
    monkeypatch.setattr("mlflow.end_run", end := Mock())
    MLflow(Mock(), "").end(*how)
    end.assert_called_once_with(status)


LOST = r"Connection lost|\[Errno \d+\] (Connection reset by peer|Broken pipe)"
"""What asyncio or the system says of a service that was killed, whichever notices first."""


@pytest.mark.parametrize(("signal", "why"), [("kill", LOST), slow("suspend", "no answer for 3 seconds")])
def test_a_run_outlives_wandbs_service(launch: Launch, whole: Whole, signal: str, why: str) -> None:
    """It trains as if nothing had happened, its summary says so, and it ends."""
    before = dedent(f"""
        import psutil
        from src.tracking import guarded, wandb
        log = wandb.WandbPart.log
        def stop(self, record, tables):
            log(self, record, tables)
            if record["step"] == 3:
                (service,) = (child for child in psutil.Process().children() if child.name() == "wandb-core")
                service.{signal}()
                if "{signal}" == "suspend":
                    guarded.HANG_SECONDS = 3.0  # from here on: under load a start takes as long
        wandb.WandbPart.log = stop
    """)
    run = launch("cpu", *ALL, wandb="offline", before=before).succeeded()
    (line,) = [line for line in run.stdout.splitlines() if "W&B failed" in line or "Traceback" in line]
    assert re.fullmatch(rf"WARNING: W&B failed \(({why})\); training continues and is logged to metrics.jsonl", line)
    assert re.fullmatch(why, run.summary["tracker_failures"]["W&B"])
    assert_same_run(run, whole("cpu", *ALL))


def read_wandb(run: Run) -> Sessions:
    files = sorted(run.folder.glob("wandb/offline-run-*/*.wandb"))
    shown = [run_command([str(BIN / "wandb"), "leet", "inspect", "--json", str(file)], run.folder) for file in files]
    return [[json.loads(line) for line in done.succeeded().stdout.splitlines()] for done in shown]


@pytest.fixture(scope="module")
def sessions(recorded: Run) -> Sessions:
    return read_wandb(recorded)


def artifacts(rows: list[dict[str, Any]], *kinds: str) -> list[dict[str, Any]]:
    return [row["artifact"] for row in rows if row.get("artifact", {}).get("type") in kinds]


def test_wandb_has_each_record_over_a_kill_and_a_resume(recorded: Run, sessions: Sessions) -> None:
    """With tables and pictures, in one run. The last 32 kB before the kill may be missing."""
    items = [[row["history"]["item"].items() for row in rows if "history" in row] for rows in sessions]
    before, after = ([{n: v for n, v in item if n[0] != "_" and "." not in n} for item in rows] for rows in items)
    *_, last = folders = sorted(recorded.folder.glob("wandb/offline-run-*"))
    assert len({folder.name.split("-")[-1] for folder in folders}) == 1
    expected = numbers(recorded)
    assert without_times(after) == [record for record in expected if record["step"] > 8]
    assert [record for record in without_times(before) if record not in expected] == []
    tables = last.glob("files/media/table/eval/mistakes_*.json")
    table = max(tables, key=lambda file: int(file.name.split("_")[1]))
    shown = json.loads(table.read_text())["data"]
    assert [row[1:] for row in shown] == [list(row.values())[1:] for row in recorded.records[-1]["eval/mistakes"]]


def test_wandb_has_the_pictures_of_each_evaluation_as_media(recorded: Run, sessions: Sessions) -> None:
    """Beside the step, so that a panel of them has a slider."""
    items = [row["history"]["item"] for row in sessions[-1] if "history" in row]
    expected = [record for record in recorded.records if "eval/mistakes" in record and record["step"] > 8]
    found = [item for item in items if item.get("eval/mistakes/image._type") == "images/separated"]
    assert [item["step"] for item in found] == [record["step"] for record in expected]
    for item, record in zip(found, expected, strict=True):
        captions = [", ".join(f"{n} {v}" for n, v in row.items() if n != "image") for row in record["eval/mistakes"]]
        assert item["eval/mistakes/image.captions"] == captions


def test_wandb_has_model_checkpoints_and_code_as_artifacts(recorded: Run, sessions: Sessions) -> None:
    """The first two are references: nothing of them is copied. The task's code is as it was at the start."""
    expected = {f"checkpoints/step_{step:08}": {"latest", f"step-{step}"} for step in checkpoints(recorded.folder)}
    expected["model"] = {"latest"}
    found = artifacts(sessions[-1], "checkpoint", "model")
    for artifact, (name, aliases) in zip(found, expected.items(), strict=True):
        assert {*artifact["aliases"]} == aliases
        files = {path.as_uri(): path.stat().st_size for path in (recorded.folder / name).iterdir()}
        assert {entry["ref"]: int(entry["size"]) for entry in artifact["manifest"]["contents"]} == files
    kept = recorded.folder.parent.glob("**/wandb/**/*")
    assert max(path.stat().st_size for path in kept if path.is_file()) < 1_000_000  # of a model of 5 MB
    (code,) = artifacts(sessions[-1], "code")
    texts = {file["path"]: Path(file["local_path"]).read_text() for file in code["manifest"]["contents"]}
    assert texts.keys() == {"mnist.py", "config.yaml"}
    assert texts["mnist.py"] == (PROJECT / "src/tasks/mnist.py").read_text()
    assert yaml.safe_load(texts["config.yaml"])["task"]["source"] == "digits"


def test_all_sessions_of_a_run_are_uploaded(recorded: Run) -> None:
    """By the command that the run prints."""
    (line,) = lines(recorded, "upload")
    command = f"{line.split(maxsplit=1)[1]} --dry-run"
    offline: dict[str, Any] = {"WANDB_API_KEY": "0" * 40, "WANDB_BASE_URL": "http://127.0.0.1:9"}
    shown = run_command(["sh", "-c", command], recorded.folder, **offline).succeeded()
    assert "Would sync 2 run(s)" in shown.stdout + shown.stderr


def test_what_wandb_would_refuse_is_refused_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Settings and variables: else the run would be trained, and its log lost. Keys are secret."""
    assert mistakes("--task.source=digits", "--wandb.project=a/b", f"--wandb.tags=[{'x' * 65}]") == [
        "--wandb.project=a/b: String should match pattern '^[^/\\\\#?%:]{1,128}$'",
        f"--wandb.tags=[{'x' * 65}]: String should have at most 64 characters",
    ]
    for name, value in {"PROJECT": "a/b", "TAGS": f"a,{'x' * 65}", "API_KEY": f"{'x' * 40}\n", "RUN_ID": "a/b"}.items():
        with monkeypatch.context() as patch:
            patch.setenv(f"WANDB_{name}", value)
            (line,) = mistakes("--task.source=digits")
            assert line.startswith(f"WANDB_{name} is set in the environment, but must be ")
            assert value not in line
            assert run_settings(["--task.source=digits", "--wandb.mode=disabled"])


def test_wandbs_variables_apply_and_empty_ones_are_unset(launch: Launch) -> None:
    """With a wrong key, the run is offline."""
    empty = dict.fromkeys(("WANDB_MODE", "WANDB_PROJECT", "WANDB_RUN_ID", "WANDB_NOTES", "WANDB_BASE_URL"), "")
    own = {"WANDB_TAGS": "one,two", "WANDB_NAME": "mine", "WANDB_SAVE_CODE": "false", "WANDB_API_KEY": "none"}
    run = launch("cpu", "--max_steps=1", wandb="auto", **empty, **own).succeeded()
    (line,) = lines(run, "W&B")
    assert line.split("  ")[-1].startswith("offline (could not go online: WANDB_API_KEY invalid: API key must have 40+")
    (rows,) = read_wandb(run)
    (started,) = (row["run"] for row in rows if "run" in row)
    assert (started["tags"], started["display_name"]) == (["one", "two"], "mine")
    assert (started["project"], "notes" in started) == ("accelerate-template", False)
    assert artifacts(rows, "code") == []


def test_a_full_disk_under_wandbs_own_log_is_silent(launch: Launch) -> None:
    """Not 30 lines on standard error for each of its records."""
    full = "import logging; logging.getLogger('wandb').addHandler(logging.StreamHandler(open('/dev/full', 'w')))"
    debug = "logging.getLogger('wandb').setLevel('DEBUG')"
    run = launch("cpu", "--max_steps=1", wandb="offline", before=f"{full}; {debug}").succeeded()
    assert run.stderr == ""


@pytest.mark.parametrize("file", sorted((PROJECT / "sweeps").glob("*.yaml")), ids=lambda file: file.name)
def test_wandbs_agent_starts_the_runs_of_a_sweep(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With valid settings, and a metric that the task has."""
    monkeypatch.chdir(tmp_path)
    for folder in ("configs", "examples"):
        (tmp_path / folder).symlink_to(PROJECT / folder)
    (tmp_path / "data/tinyshakespeare").mkdir(parents=True)
    (tmp_path / "data/tinyshakespeare/input.txt").write_text("which the header says how to get")
    sweep = yaml.safe_load(file.read_text())
    parameters: dict[str, dict[str, Any]] = sweep["parameters"]
    assert sweep.keys() - {"early_terminate"} == {"program", "name", "method", "metric", "parameters", "command"}
    for parameter in parameters.values():
        assert {*parameter} in ({"values"}, {"min", "max"}, {"min", "max", "distribution"})
        assert parameter.get("min", 0) < parameter.get("max", 1)  # W&B reads 1e-4 as text
    drawn = {name: {"value": of["min"] if "min" in of else of["values"][0]} for name, of in parameters.items()}
    agent = import_module("wandb.sdk.launch.sweeps.utils")  # two seconds, which only this test needs
    words = agent.create_sweep_command_args({"args": drawn})
    words |= {"env": ["/usr/bin/env"], "interpreter": ["python"], "program": [sweep["program"]]}  # as wandb_agent.py
    found = agent.create_sweep_command(sweep["command"])
    command = [text for word in found for text in words.get(word[2:-1], [word])]
    settings = command[command.index("train.py") + 1 :]
    assert {*words["args"]} <= {*settings}
    run_settings([*settings, f"--checkpoint.metric={sweep['metric']['name']}"])
