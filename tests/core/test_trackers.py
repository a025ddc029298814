"""Trackers have what metrics.jsonl has; whatever happens to them, the training goes on, and is told once."""

import json
import re
import time
from importlib import import_module
from pathlib import Path
from textwrap import dedent
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import yaml
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from trackio.sqlite_storage import SQLiteStorage

from src.tracking import guarded as parts
from src.tracking.guarded import Guarded, TrackerPart
from src.tracking.part import Part, Parts
from src.training.progress import Progress
from src.training.state import RunState
from tests.faults.runs import ALL, ORIGIN, assert_same_run, checkpoints, curve, lines, without_times
from tests.launching import BIN, PROJECT, Launch, Run, Whole, mistakes, run_command, slow
from train import run_settings

PARAMETERS: list[dict[str, Any]] = [  # room: wandb
    {"values": list},
    {"min": int, "max": int},
    {"min": float, "max": float},
    {"min": float, "max": float, "distribution": "log_uniform_values"},
]
"""The forms of a parameter that sweeps/ uses. W&B reads 1e-4 as text: a number is written as 0.0001."""

crash = RuntimeError("a bug\nof theirs")


def numbers(run: Run) -> list[dict[str, Any]]:
    """Its records without times and tables: what every tracker has to have."""
    return [{n: v for n, v in record.items() if not isinstance(v, list)} for record in curve(run)]


def hang(*_: object) -> None:
    time.sleep(10_000)


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
def test_a_faulty_one_is_left(monkeypatch: pytest.MonkeyPatch, method: str, fault: Any, why: Any, calls: str) -> None:
    """Tried without the thread: it waits forever."""
    monkeypatch.setattr(parts, "HANG_SECONDS", 0.3)
    recorder, said, began = Mock(spec=TrackerPart, title="X"), list[str](), time.monotonic()
    getattr(recorder, method).side_effect = fault
    monkeypatch.setattr(parts, "say", said.append)
    guarded = Guarded(recorder)
    guarded.start()
    for _ in range(2):
        guarded.log({"step": 1}, {})
        time.sleep(0.4 if method == "log" else 0)
    guarded.end(None, None)
    assert time.monotonic() < began + 5
    time.sleep(0.1)
    assert guarded.failure == why
    assert " ".join(name for name, _, _ in recorder.method_calls) == calls
    warning = f"WARNING: X failed ({why}); training continues and is logged to metrics.jsonl"
    assert said == ([warning] if why and method != "start" else [])


def test_one_that_falls_behind_is_left_without_anyone_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once as many entries wait as the queue holds. Tried with an unbounded queue: it fills the memory, and is told of
    at the end."""
    monkeypatch.setattr(parts, "MAX_WAITING", 3)
    said = list[str]()
    monkeypatch.setattr(parts, "say", said.append)
    recorder, began = Mock(spec=TrackerPart, title="X"), time.monotonic()
    recorder.log.side_effect = hang
    guarded = Guarded(recorder)
    guarded.start()
    for _ in range(10):
        guarded.log({"step": 1}, {})
    assert said == ["WARNING: X failed (3 entries wait for it); training continues and is logged to metrics.jsonl"]
    guarded.end(None, None)
    assert time.monotonic() < began + 1
    assert len(said) == 1


def test_they_have_each_record(recorded: Run, monkeypatch: pytest.MonkeyPatch) -> None:  # room: trackers
    """But perhaps trackio the killed session's last. Tried without `purge_step`: TensorBoard has steps twice."""
    monkeypatch.setattr("trackio.sqlite_storage.TRACKIO_DIR", recorded.folder.parent / "trackio")
    expected = numbers(recorded)
    (name,) = SQLiteStorage.get_runs("accelerate-template")
    found = without_times(SQLiteStorage.get_logs("accelerate-template", name))
    for log in found:
        del log["timestamp"]
    assert [record for record in found if record not in expected] == []
    assert [record for record in expected if record not in found and record["step"] > 8] == []
    settings: Any = SQLiteStorage.get_run_config("accelerate-template", name)
    assert settings["task"]["source"] == "digits"
    events = EventAccumulator(str(recorded.folder / "tensorboard")).Reload()
    for tag in {name for record in expected for name in record} - {"step"}:
        shown = [(event.step, event.value) for event in events.Scalars(tag)]
        assert shown == [(r["step"], float(np.float32(r[tag]))) for r in expected if tag in r]
    closing = [[*lines(recorded, title)][-1] for title in ("trackio", "TB")]
    assert "trackio show --project" in closing[0]
    assert "tensorboard --logdir" in closing[1]


LOST = r"Connection lost|\[Errno \d+\] (Connection reset by peer|Broken pipe)"  # room: wandb
"""What is said of a service that was killed: by asyncio or by the system, whichever notices first."""


@pytest.mark.parametrize(("signal", "why"), [("kill", LOST), slow("suspend", "no answer for 3 seconds")])
def test_a_wandb_service_that_dies_or_hangs(launch: Launch, whole: Whole, signal: str, why: str) -> None:  # room: wandb
    """The run goes on, its summary says so, and it ends. Tried without `abandon`: the process does not end."""
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


@pytest.fixture(scope="module")
def sessions(recorded: Run) -> list[list[dict[str, Any]]]:  # room: wandb
    """What W&B's offline files hold of the run, session by session."""
    found = []
    for file in sorted(recorded.folder.glob("wandb/offline-run-*/*.wandb")):
        command = [str(BIN / "wandb"), "leet", "inspect", "--json", str(file)]
        shown = run_command(command, recorded.folder).succeeded().stdout
        found.append([json.loads(line) for line in shown.splitlines()])
    return found


def test_it_has_each_record_over_a_kill_and_a_resume(recorded: Run, sessions: Any) -> None:  # room: wandb
    """Tables and pictures too, but the last 32 kB of a killed run. Tried without the id in a checkpoint: two runs."""
    items = [[row["history"]["item"].items() for row in rows if "history" in row] for rows in sessions]
    before, after = ([{n: v for n, v in item if n[0] != "_" and "." not in n} for item in rows] for rows in items)
    assert recorded.summary["trackers"]["W&B"].startswith("offline")
    *_, last = folders = sorted(recorded.folder.glob("wandb/offline-run-*"))
    assert len({folder.name.split("-")[-1] for folder in folders}) == 1
    expected = numbers(recorded)
    assert without_times(after) == [record for record in expected if record["step"] > 8]
    assert [record for record in without_times(before) if record not in expected] == []
    tables = last.glob("files/media/table/eval/mistakes_*.json")
    table = max(tables, key=lambda file: int(file.name.split("_")[1]))
    shown = json.loads(table.read_text())["data"]
    assert [row[1:] for row in shown] == [list(row.values())[1:] for row in recorded.records[-1]["eval/mistakes"]]
    assert json.dumps(sessions[-1]).count(".png") >= len(shown)


def test_its_pictures_are_media_too(recorded: Run, sessions: Any) -> None:  # room: wandb
    """A list for each evaluation, beside the step, so that a panel of them has a slider. Tried without: in tables
    alone, of which a workspace shows the last one."""
    items = [row["history"]["item"] for row in sessions[-1] if "history" in row]
    expected = [record for record in recorded.records if "eval/mistakes" in record and record["step"] > 8]
    found = [item for item in items if "eval/mistakes/image._type" in item]
    assert [item["step"] for item in found] == [record["step"] for record in expected]
    for item, record in zip(found, expected, strict=True):
        assert item["eval/mistakes/image._type"] == "images/separated"
        captions = [", ".join(f"{n} {v}" for n, v in row.items() if n != "image") for row in record["eval/mistakes"]]
        assert item["eval/mistakes/image.captions"] == captions


def test_it_has_the_model_and_the_checkpoints_as_artifacts(recorded: Run, sessions: Any) -> None:  # room: wandb
    """By reference: nothing of them is copied. Tried with `copy`: no references."""
    expected = {f"checkpoints/step_{step:08}": {"latest", f"step-{step}"} for step in checkpoints(recorded.folder)}
    expected["model"] = {"latest"}
    artifacts = [row["artifact"] for row in sessions[-1] if "artifact" in row]
    artifacts = [artifact for artifact in artifacts if artifact["type"] in ("checkpoint", "model")]
    for artifact, (name, aliases) in zip(artifacts, expected.items(), strict=True):
        assert {*artifact["aliases"]} == aliases
        files = {path.as_uri(): path.stat().st_size for path in (recorded.folder / name).iterdir()}
        assert {entry["ref"]: int(entry["size"]) for entry in artifact["manifest"]["contents"]} == files
    kept = recorded.folder.parent.glob("**/wandb/**/*")
    assert max(path.stat().st_size for path in kept if path.is_file()) < 1_000_000  # of a model of 5 MB


REFUSED = "is set in the environment, but must be "  # room: wandb


def test_what_wandb_would_refuse_is_refused_first(monkeypatch: pytest.MonkeyPatch) -> None:  # room: wandb
    """By the rules in its own settings. Tried without: the run is trained, and its log lost."""
    assert mistakes("--task.source=digits", "--wandb.project=a/b", f"--wandb.tags=[{'x' * 65}]") == [
        "--wandb.project=a/b: String should match pattern '^[^/\\\\#?%:]{1,128}$'",
        f"--wandb.tags=[{'x' * 65}]: String should have at most 64 characters",
    ]
    for name, value in {"PROJECT": "a/b", "TAGS": f"a,{'x' * 65}", "API_KEY": f"{'x' * 40}\n", "RUN_ID": "a/b"}.items():
        with monkeypatch.context() as patch:
            patch.setenv(f"WANDB_{name}", value)
            (line,) = mistakes("--task.source=digits")
            assert line.startswith(f"WANDB_{name} {REFUSED}")
            assert value not in line  # keys are secret
            assert run_settings(["--task.source=digits", "--wandb.mode=disabled"])
            settings = import_module("wandb").Settings()
            with pytest.raises(Exception, match="(?i)project|tag|key|run id|run_id"):
                settings.update_from_env_vars({f"WANDB_{name}": value})


def test_wandbs_own_variables(launch: Launch) -> None:  # room: wandb
    """Those that are empty are as unset; with a key that is none, the run is offline. Tried with what the settings lack
    passed as it is: no tags, another name, and train.py is uploaded."""
    empty = dict.fromkeys(("WANDB_MODE", "WANDB_PROJECT", "WANDB_RUN_ID", "WANDB_NOTES", "WANDB_BASE_URL"), "")
    own = {"WANDB_TAGS": "one,two", "WANDB_NAME": "mine", "WANDB_SAVE_CODE": "false", "WANDB_API_KEY": "none"}
    run = launch("cpu", "--max_steps=1", wandb="auto", **empty, **own).succeeded()
    (line,) = lines(run, "W&B")
    assert line.split("  ")[-1].startswith("offline (could not go online: WANDB_API_KEY invalid: API key must have 40+")
    (file,) = run.folder.glob("wandb/offline-run-*/*.wandb")
    shown = run_command([str(BIN / "wandb"), "leet", "inspect", "--json", str(file)], run.folder).succeeded().stdout
    rows = [json.loads(row) for row in shown.splitlines()]
    (started,) = (row["run"] for row in rows if "run" in row)
    assert (started["tags"], started["display_name"]) == (["one", "two"], "mine")
    assert (started["project"], "notes" in started) == ("accelerate-template", False)
    assert "code" not in [row["artifact"]["type"] for row in rows if "artifact" in row]


def test_it_has_the_code_of_the_task_and_the_settings(recorded: Run, sessions: Any) -> None:  # room: wandb
    """As they were at the start. Tried without: train.py alone."""
    (code,) = (row["artifact"] for row in sessions[-1] if row.get("artifact", {}).get("type") == "code")
    texts = {file["path"]: Path(file["local_path"]).read_text() for file in code["manifest"]["contents"]}
    assert texts.keys() == {"mnist.py", "config.yaml"}
    assert texts["mnist.py"] == (PROJECT / "src/tasks/mnist.py").read_text()
    assert yaml.safe_load(texts["config.yaml"])["task"]["source"] == "digits"


def test_all_sessions_of_a_run_are_uploaded(recorded: Run) -> None:  # room: wandb
    """As W&B reads the command; it puts them in order. Tried with the last one's folder: one."""
    (line,) = lines(recorded, "upload")
    command = f"{line.split(maxsplit=1)[1]} --dry-run"
    shown = run_command(
        ["sh", "-c", command], recorded.folder, WANDB_API_KEY="0" * 40, WANDB_BASE_URL="http://127.0.0.1:9"
    ).succeeded()
    assert "Would sync 2 run(s)" in shown.stdout + shown.stderr


def test_it_is_said_how_to_upload_a_run_that_was_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or has crashed, but not of one that is lost. Tried with a summary asked for: nothing is said."""
    said = list[str]()
    monkeypatch.setattr("src.tracking.part.say", said.append)
    here, lost = (Mock(spec=Part, closing=closing) for closing in ("upload this", ""))
    run = Mock(is_main=True, **{"resume.own_state.return_value": None})
    Parts(run, [Mock(return_value=here), Mock(return_value=lost)]).end(None)
    assert said == ["upload this"]


def test_a_copy_of_a_run_gets_an_id_of_its_own(tmp_path: Path) -> None:
    """But not a run that was moved, is reached by another path, or went on elsewhere. Tried without: both log into the
    same run, and the copy's curve overwrites the original's."""
    (original := tmp_path / "a").mkdir()
    (copy := tmp_path / "b").mkdir()
    (tmp_path / "link").symlink_to(original)

    def resumed(saved_in: Path, folder: Path) -> tuple[str, list[str]]:
        run, notes = Mock(is_main=False), list[str]()
        run.config.folder, run.resume.notes = folder, notes
        run.resume.own_state.return_value = RunState(
            progress=Progress(), origin=ORIGIN, metrics_bytes=0, run_id="theirs", folder=str(saved_in)
        )
        return Parts(run, []).run_id, notes

    for saved_in, folder in ((original, original), (original, tmp_path / "link"), (tmp_path / "gone", copy)):
        assert resumed(saved_in, folder) == ("theirs", [])
    run_id, notes = resumed(original, copy)
    assert re.fullmatch("[0-9a-f]{8}", run_id)
    assert notes == [f"trackers get a new run: this one was copied from {original}"]


def test_a_full_disk_under_wandbs_own_log_is_silent(launch: Launch) -> None:  # room: wandb
    """It is another's loss. Tried without: 30 lines on standard error for each of its records."""
    full = (
        "import errno, logging\n"
        "class Full:\n"
        "    def write(self, _):\n"
        "        raise OSError(errno.ENOSPC, 'No space left on device')\n"
        "logging.getLogger('wandb').addHandler(logging.StreamHandler(Full()))\n"
        "logging.getLogger('wandb').setLevel('DEBUG')\n"
    )
    run = launch("cpu", "--max_steps=1", wandb="offline", before=full).succeeded()
    assert run.stderr == ""


@pytest.mark.parametrize("file", sorted((PROJECT / "sweeps").glob("*.yaml")), ids=lambda file: file.name)
def test_wandb_takes_a_sweep_and_its_agent_starts_runs(  # room: wandb
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the keys that W&B documents, with valid settings and a metric that the task has. W&B's own schema, in the
    package sweeps, needs numpy < 2. Tried with a key misspelt, 1e-4, `${args}` left out, and an unknown setting."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "configs").symlink_to(PROJECT / "configs")
    (tmp_path / "data/tinyshakespeare").mkdir(parents=True)
    (tmp_path / "data/tinyshakespeare/input.txt").write_text("which the header says how to get")
    sweep = yaml.safe_load(file.read_text())
    metric, halving, parameters = sweep["metric"], sweep.pop("early_terminate", None), sweep["parameters"]
    assert sweep.keys() == {"program", "name", "method", "metric", "parameters", "command"}
    assert sweep["method"] in ("grid", "random", "bayes")
    assert (metric.keys(), metric["goal"] in ("minimize", "maximize")) == ({"name", "goal"}, True)
    if halving:
        assert halving == {"type": "hyperband", "min_iter": 1, "eta": halving["eta"]}
        assert halving["eta"] > 1
    for parameter in parameters.values():
        form = {key: value if key == "distribution" else type(value) for key, value in parameter.items()}
        assert form in PARAMETERS
        assert parameter.get("min", 0) < parameter.get("max", 1)
    drawn = {name: {"value": of["min"] if "min" in of else of["values"][0]} for name, of in parameters.items()}
    agent = import_module("wandb.sdk.launch.sweeps.utils")  # two seconds, which only this test needs
    words = agent.create_sweep_command_args({"args": drawn})
    words |= {"env": ["/usr/bin/env"], "interpreter": ["python"], "program": [sweep["program"]]}  # as wandb_agent.py
    found = agent.create_sweep_command(sweep["command"])
    command = [text for word in found for text in words.get(word[2:-1], [word])]
    settings = command[command.index("train.py") + 1 :]
    assert {*words["args"]} <= {*settings}
    run_settings([*settings, f"--checkpoint.metric={metric['name']}"])
