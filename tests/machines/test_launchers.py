"""launchers/machine.py and launchers/kubernetes.yaml: mistakes are named, and their command trains."""

import os
import re
import signal
import socket
import sys
import threading
from pathlib import Path
from typing import Any

import kubernetes_validate
import psutil
import pytest
import yaml
from torch.distributed import TCPStore

from launchers import machine
from tests.launching import PROJECT, QUIET, Launch, Run, Tool, Whole, clean_environment, wait

pytestmark = pytest.mark.machines
SERVICE, JOB = yaml.safe_load_all((PROJECT / "launchers/kubernetes.yaml").read_text())
POD = JOB["spec"]["template"]["spec"]
CONTAINER = POD["containers"][0]


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
