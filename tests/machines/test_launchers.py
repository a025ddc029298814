"""What is in launchers/: mistakes are named, other programs accept it, and its command trains."""

import os
import re
import shlex
import signal
import socket
import sys
import threading
from importlib import import_module
from pathlib import Path
from typing import Any

import kubernetes_validate
import psutil
import pytest
import yaml
from torch.distributed import TCPStore

from launchers import machine
from tests.launching import BIN, PROJECT, QUIET, Launch, Run, Tool, Whole, clean_environment, run_command, wait
from train import run_settings

pytestmark = pytest.mark.machines
SERVICE, JOB = yaml.safe_load_all((PROJECT / "launchers/kubernetes.yaml").read_text())
POD = JOB["spec"]["template"]["spec"]
CONTAINER = POD["containers"][0]
SKY = yaml.safe_load((PROJECT / "launchers/skypilot.yaml").read_text())


@pytest.fixture
def port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


@pytest.fixture
def starts(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Tool:
    """starts("--num_machines=2", …): how machine.py ends; with exit code 0, the words that it gives the launcher."""

    def become_launcher(_: str, command: list[str]) -> None:
        print(*command[1:])
        sys.exit()

    monkeypatch.setattr(os, "execv", become_launcher)
    return Tool("machine.py", lambda words: machine.main([*words, "train.py", "--epochs=1"]), capsys)


def two(port: int, rank: int, **others: Any) -> list[str]:
    """Return the words for one of two machines, with some replaced."""
    words = {"num_machines": 2, "num_processes": 4, "main_process_ip": "127.0.0.1", "main_process_port": port}
    given = {"config_file": PROJECT / "accelerate_configs/ddp.yaml", **words, "machine_rank": rank, **others}
    return [f"--{name}={value}" for name, value in given.items()]


def test_each_mistake_in_the_words_is_named(starts: Tool, port: int, tmp_path: Path) -> None:
    """All at once. A mesh must have as many processes as the yaml, or the words in its place, say."""
    mistakes = starts("--num_machines=2", "--num_processes=3").stderr
    named = re.findall("machine.py: (.*?)[:=]", mistakes)
    assert named == ["num_processes", "machine_rank", "main_process_ip is missing", "main_process_port is missing"]
    assert "machine.py: machine_rank=2 must be from 0 to 1" in starts(*two(port, rank=2)).stderr
    assert "machine.py: no/such.yaml: [Errno 2]" in starts(*two(port, rank=1, config_file="no/such.yaml")).stderr
    with socket.create_server(("127.0.0.1", port)):
        assert f"main_process_port={port} is in use" in starts(*two(port, rank=0)).stderr
    starts("--num_processes=2").succeeded()

    mesh = {"parallelism_config_dp_replicate_size": 2, "parallelism_config_dp_shard_size": 3}
    hsdp = tmp_path / "hsdp.yaml"
    hsdp.write_text(yaml.safe_dump({"distributed_type": "FSDP", "num_processes": 4, "parallelism_config": mesh}))
    mistake = starts(f"--config_file={hsdp}").stderr
    assert "dp_replicate_size=2 x dp_shard_size=3 is not num_processes=4" in mistake
    starts(f"--config_file={hsdp}", "--parallelism_config_dp_shard_size=2").succeeded()
    starts(*two(port, rank=0, config_file=hsdp, num_processes=6)).succeeded()


def test_a_main_machine_that_is_absent_is_named_after_the_timeout(starts: Tool, port: int) -> None:
    """Also by itself: in Kubernetes its name comes late."""
    run = starts("--timeout=1", *two(port, rank=1))
    assert run.exit_code == 1
    assert f"machine.py: waited 1 s for the main process at 127.0.0.1:{port}: [Errno 111]" in run.stderr
    for rank in (0, 1):
        absent = two(port, rank=rank, main_process_ip="no-such-machine.invalid")
        assert "no-such-machine.invalid" in starts("--timeout=0", *absent).stderr


def test_it_waits_for_the_main_machine_without_joining_its_store(starts: Tool, port: int) -> None:
    """Torch's store counts who connects, and here waits for one other. It must not be taken for that."""
    stores: list[TCPStore] = []
    main = threading.Timer(1.5, lambda: stores.append(TCPStore("127.0.0.1", port, world_size=2, is_master=True)))
    main.start()
    run = starts("--timeout=60", *two(port, rank=1))
    assert run.stdout.startswith("-m accelerate.commands.launch --config_file=")
    assert run.stdout.endswith("--machine_rank=1 train.py --epochs=1\n")
    main.join(0.2)
    assert not stores
    TCPStore("127.0.0.1", port, world_size=2, is_master=False).set("key", "value")
    main.join()
    assert stores[0].get("key") == b"value"


@pytest.mark.parametrize("version", ["1.29", kubernetes_validate.latest_version()])
def test_the_job_fits_the_published_schema_and_itself(version: str) -> None:
    for resource in (SERVICE, JOB):
        kubernetes_validate.validate(resource, version, strict=True)
    job, env = JOB["spec"], {variable["name"]: variable.get("value") for variable in CONTAINER["env"]}
    assert job["completions"] == job["parallelism"] == int(env["MACHINES"])
    assert int(env["PROCESSES"]) == job["completions"] * CONTAINER["resources"]["limits"]["nvidia.com/gpu"]
    main = f"{JOB['metadata']['name']}-0.{SERVICE['metadata']['name']}"  # as Kubernetes names the pod of index 0
    assert f"--main_process_ip {main} " in CONTAINER["args"][0]
    assert POD["subdomain"] == SERVICE["metadata"]["name"]
    assert SERVICE["spec"]["selector"] == {"batch.kubernetes.io/job-name": JOB["metadata"]["name"]}
    assert int(env["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"]) < POD["terminationGracePeriodSeconds"]
    assert {mount["name"] for mount in CONTAINER["volumeMounts"]} == {volume["name"] for volume in POD["volumes"]}
    assert job["podFailurePolicy"]["rules"][1]["onExitCodes"]["containerName"] == CONTAINER["name"]


def test_a_stop_is_no_success_on_several_machines(launch: Launch) -> None:
    """A Job would not restart a pod whose process ended with 0."""
    stopped = launch("cpu", "--max_hours=1e-9", GROUP_WORLD_SIZE="2")
    assert (stopped.exit_code, stopped.status["status"]) == (1, "preempted")
    assert launch("cpu", "--dry-run", GROUP_WORLD_SIZE="2").exit_code == 0


def pods(folder: Path, port: int) -> list[psutil.Popen]:
    """Start the command of the Job's two pods on this machine, with a process each."""
    script = CONTAINER["args"][0].replace("train-0.train", "127.0.0.1").replace("29500", str(port)).rstrip()
    script = script.replace("configs/mnist.yaml", "configs/digits.yaml")  # which needs no download
    script += f" --output_dir={folder} --max_steps=60 --log_every=1 {' '.join(QUIET)}"
    environments = [clean_environment(MACHINES="2", PROCESSES="2", JOB_COMPLETION_INDEX=index) for index in "01"]
    return [psutil.Popen([*CONTAINER["command"], script], cwd=PROJECT, env=env) for env in environments]


@pytest.mark.slow
def test_a_preempted_pod_ends_all_and_restarted_they_resume(tmp_path: Path, port: int, whole: Whole) -> None:
    """Both save, and both end in failure, so that the Job starts both again."""
    run = Run(1, "", "", tmp_path / "run")
    first, second = pods(run.folder, port)
    wait(lambda: (run.folder / "metrics.jsonl").exists() and len(run.losses) > 9)
    second.send_signal(signal.SIGTERM)
    assert (first.wait(200), second.wait(200)) == (1, 1)
    assert run.status["step"] < 60
    assert [pod.wait(300) for pod in pods(run.folder, port)] == [0, 0]
    assert run.summary["num_processes"] == 2
    expected = whole("ddp", "--config=configs/digits.yaml", "--max_steps=60", "--log_every=1", processes=2)
    assert run.losses == expected.losses


def test_skypilots_task_fits_its_schema() -> None:
    """Where SkyPilot is installed: it wants other versions of what the project needs."""
    schemas = pytest.importorskip("sky.utils.schemas")
    validate = import_module("jsonschema").validate
    validate(SKY, schemas.get_task_schema())
    validate(SKY["resources"], schemas.get_resources_schema())
    validate(SKY["file_mounts"]["/bucket"], schemas.get_storage_schema())


def test_skypilots_machines_start_one_run(starts: Tool, tmp_path: Path, port: int) -> None:
    """Each with its number, on all GPUs, with valid settings. At the end, the first copies the log and the model."""
    gpus = SKY["resources"]["accelerators"].split(":")[1]
    shared = {"SKYPILOT_NUM_NODES": "2", "SKYPILOT_NODE_IPS": "127.0.0.1\n10.0.0.2", "SKYPILOT_NUM_GPUS_PER_NODE": gpus}
    for rank in ("0", "1"):
        (folder := tmp_path / rank / "runs/mnist/checkpoints").mkdir(parents=True)
        (folder.parent / "metrics.jsonl").touch()
        script = SKY["run"].replace("/bucket", str(bucket := tmp_path / rank / "bucket")).replace("29500", str(port))
        command = ["bash", "-c", script.replace(".venv/bin/python", "echo")]
        run = run_command(command, tmp_path, cwd=tmp_path / rank, SKYPILOT_NODE_RANK=rank, **shared).succeeded()
        assert [path.name for path in bucket.rglob("*")] == ["runs", "mnist", "metrics.jsonl"] * (rank == "0")
        _, timeout, *words = shlex.split(run.stdout)
        launch, settings = words[: words.index("train.py")], words[words.index("train.py") + 1 :]
        assert run_settings(settings).checkpoint.mirror == f"{bucket}/checkpoints"
        assert launch[launch.index("--num_processes") + 1] == "16"
        assert launch[launch.index("--machine_rank") + 1] == rank
        assert rank == "1" or starts(timeout, *launch).succeeded()


def hf_jobs(folder: Path, *settings: str, **environment: Any) -> Run:
    """Run launchers/hf_jobs.sh with the real `hf jobs run`, which submits nothing here, and with a folder as bucket."""
    (programs := folder / "programs").mkdir()
    (hf := programs / "hf").write_text(f"""#!/bin/sh
case "$1 $2" in
    "jobs run") shift 2; exec {BIN}/hf jobs run --dry-run "$@" ;;
    "buckets cp") mkdir -p {folder}/bucket/code && cp "$3" "{folder}/bucket/code/${{4##*/}}" ;;
esac
""")
    hf.chmod(0o755)
    script = (PROJECT / "launchers/hf_jobs.sh").read_text().replace("$PWD/.venv/bin:", f"{programs}:{BIN}:")
    return run_command(["bash", "-c", script, "hf_jobs.sh", *settings], folder, HOME=str(folder), **environment)


def test_hugging_faces_program_accepts_the_job_and_it_trains(tmp_path: Path) -> None:
    """With the files that git has here and the settings as they were written; no secret is shown. The log is copied."""
    settings, secrets = ["--config=configs/digits.yaml", "--run_name=a b"], {"WANDB_API_KEY": "k", "HF_TOKEN": "hf_k"}
    done = hf_jobs(tmp_path, *settings, BUCKET="me/runs", FLAVOR="l4x4", TIMEOUT="12h", **secrets)
    shown = done.succeeded().stdout
    for line in (r"flavor +l4x4", r"timeout +12h", r"secrets +HF_TOKEN=\*\*\*\n +WANDB_API_KEY=\*\*\*\n"):
        assert re.search(line, shown)
    (command,) = re.findall(r"(?s)command +(.*)\n +flavor", shown)
    words = shlex.split(re.sub("/(bucket|app)\\b", rf"{tmp_path}/\1", command))

    (uv := tmp_path / "programs/uv").write_text(f"""#!/bin/sh
mkdir -p .venv/bin runs/mnist/checkpoints && touch runs/mnist/metrics.jsonl
printf '#!/bin/sh\nexec {BIN}/python "$@"' > .venv/bin/python
printf '#!/bin/sh\nprintf "%%s\\n" "$@"; exit 3' > .venv/bin/accelerate
chmod +x .venv/bin/*
""")
    uv.chmod(0o755)
    path = f"{uv.parent}:{os.environ['PATH']}"
    job = run_command(words, tmp_path, PATH=path, YAML="accelerate_configs/ddp.yaml")
    assert job.exit_code == 3
    *launch, script, mirror, config, name = job.stdout.splitlines()
    assert launch == ["launch", "--config_file", "accelerate_configs/ddp.yaml", "--num_processes", "1"]
    assert (script, config, name) == ("train.py", "--config=configs/digits.yaml", "--run_name=a b")
    assert run_settings([mirror, config]).checkpoint.mirror == f"{tmp_path}/bucket/checkpoints"
    assert (tmp_path / "app/train.py").read_text() == (PROJECT / "train.py").read_text()
    assert [path.name for path in (tmp_path / "bucket/runs").rglob("*")] == ["mnist", "metrics.jsonl"]


def test_a_mistake_is_named_before_a_job_is_paid_for(tmp_path: Path) -> None:
    for number, (setting, given, line) in enumerate([
        ("--epochs=1", {}, "hf_jobs.sh: set BUCKET, such as BUCKET=me/runs"),
        ("--epochs=no", {"BUCKET": "me/runs"}, "hf_jobs.sh: --epochs=no: must be a valid integer"),
    ]):  # fmt: skip
        (folder := tmp_path / str(number)).mkdir()
        run = hf_jobs(folder, setting, **given)
        assert (run.exit_code, run.stdout, [*folder.glob("bucket")]) == (2, "", [])
        assert run.stderr.startswith(line)
