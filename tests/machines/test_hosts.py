"""Several machines that share a disk train as one would; if they differ, or one is lost, all say so and end."""

import re
import socket
from pathlib import Path
from typing import Any

import pytest

from tests.core.test_parity import DIGITS, TASKS, assert_same_curve
from tests.faults.runs import SHORT, assert_same_run, checkpoints
from tests.launching import Launch, Rounding, Run, Started, Whole, launch_words, slow
from tests.machines.hosts import Network, why_not

pytestmark = pytest.mark.machines
needs_hosts = pytest.mark.skipif(why_not() is not None, reason=str(why_not()))


class Two(Network):
    """host1 and host2, which know no names but their own, with a process each."""

    def __init__(self, folder: Path, first: str = "", second: str = "") -> None:
        known = {"host1": f"127.0.0.1 localhost\n{first}", "host2": f"127.0.0.1 localhost\n{second}"}
        super().__init__(folder, {"host1": "10.77.0.1", "host2": "10.77.0.2"}, known)

    def launch(self, host: int, yaml: str, folder: Path, *arguments: str, **launcher: Any) -> Started:
        own = {"num_machines": 2, "machine_rank": host - 1, "main_process_ip": "10.77.0.1"}
        options = [f"--{name}={value}" for name, value in (own | {"main_process_port": 29500} | launcher).items()]
        words = launch_words(yaml, *arguments, folder=folder, processes=2, launcher_arguments=tuple(options))
        within = self.hosts[f"host{host}"].enter
        return self.enter_context(Started(yaml, words=words, folder=folder, real=True, within=within))

    def finish(self, *arguments: Any, **launcher: Any) -> Run:
        """Run on both hosts to the end. Return the run of the first."""
        both = [self.launch(host, *arguments, **launcher) for host in (1, 2)]
        first, _ = [started.result().succeeded() for started in both]
        return first


@needs_hosts
@pytest.mark.parametrize(("yaml", "processes"), [("multi_node_ddp", 2), slow("multi_node_fsdp", 2), slow("hsdp", 4)])
def test_two_hosts_have_the_curve(whole: Whole, rounding: Rounding, tmp_path: Path, yaml: str, processes: int) -> None:
    """Gloo is given the interface; by itself it would take the loopback."""
    with Two(tmp_path) as hosts:
        run = hosts.finish(yaml, tmp_path / "run", *DIGITS, num_processes=processes)
    assert (run.summary["strategy"], run.summary["num_processes"]) == (yaml.removeprefix("multi_node_"), processes)
    assert_same_curve(run, TASKS["digits"], whole, rounding)


@needs_hosts
@pytest.mark.slow
def test_the_main_process_may_resolve_its_own_name_to_its_loopback(tmp_path: Path) -> None:
    """As Debian's installer writes into /etc/hosts."""
    with Two(tmp_path, "127.0.1.1 host1\n", "10.77.0.1 host1\n127.0.1.1 host2\n") as hosts:
        hosts.finish("multi_node_ddp", tmp_path / "run", "--max_steps=2", main_process_ip="host1")


@needs_hosts
def test_a_host_with_other_settings_is_refused_by_all(tmp_path: Path) -> None:
    folder, others = tmp_path / "run", ("--optim.lr=0.1", f"--output_dir={tmp_path}/elsewhere")
    with Two(tmp_path) as hosts:
        both = [hosts.launch(1, "multi_node_ddp", folder), hosts.launch(2, "multi_node_ddp", folder, *others)]
        for run in [started.result() for started in both]:
            assert run.exit_code == 1, run.stderr
            says = "train.py: machine 1 (host2) has optim.lr 0.1; machine 0 (host1) has optim.lr 0.003"
            assert run.messages == [says]
            assert "exitcode  : 2" in run.stderr
            assert 'train.py", line' not in run.stderr, "a traceback"
    assert not folder.exists()


@needs_hosts
def test_after_a_host_died_the_run_resumes_exactly(launch: Launch, whole: Whole, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with Two(tmp_path) as hosts:
        first, _ = (hosts.launch(host, "multi_node_ddp", folder, *SHORT) for host in (1, 2))
        first.wait_for("step     12/")
        hosts.hosts["host2"].close()
        left = first.result()
    assert left.exit_code == 1
    says = "run the same command on all machines; they resume from the newest checkpoint"
    assert left.messages == [f"train.py: a process on another machine was lost: {says}"]
    assert 'train.py", line' not in left.stderr, "a traceback"
    assert checkpoints(folder) == [8]
    assert_same_run(launch("ddp", *SHORT, folder=folder).succeeded(), whole("ddp", *SHORT))


TWO_MACHINES = """
import dataclasses, os, torch
os.environ |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0", "GROUP_WORLD_SIZE": "2"}
if os.environ["RANK"] == "0":
    address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    torch.stand_in_for_the_launcher = torch.distributed.TCPStore(*address, is_master=True, wait_for_workers=False)
else:
    from src.tasks.mnist import Mnist
    build = Mnist.build_datasets
    def with_labels_reversed(task):
        train, evaluation = build(task)
        return dataclasses.replace(train, labels=9 - train.labels), evaluation
    Mnist.build_datasets = with_labels_reversed
"""
"""Makes two processes two machines, which train.py finds by the store that the launcher serves."""


def test_a_machine_with_other_data_is_refused_by_all(launch: Launch, tmp_path: Path) -> None:
    """Each image of digit d is labelled 9 - d on the second one."""
    where = ("--num_machines=2", "--machine_rank=0", "--main_process_ip=127.0.0.1")
    run = launch("ddp", *SHORT, folder=tmp_path / "run", before=TWO_MACHINES, launcher_arguments=where, processes=2)
    assert run.exit_code == 2, run.stderr
    (line,) = set(run.messages)
    here, data = re.escape(socket.gethostname()), "has training data [0-9a-f]+"
    assert re.fullmatch(rf"train\.py: machine 1 \({here}\) {data}; machine 0 \({here}\) {data}", line)
    assert not (tmp_path / "run" / "metrics.jsonl").exists()
