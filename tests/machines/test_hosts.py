"""Several machines, played by one (see hosts.py), which share its disk: they train as one would."""

import re
import socket
import time
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

    def start(self, *arguments: Any, **launcher: Any) -> list[Started]:
        return [self.launch(host, *arguments, **launcher) for host in (1, 2)]

    def finish(self, *arguments: Any, **launcher: Any) -> Run:
        """That of the first host; the other has none of its files."""
        first, _ = [started.result().succeeded() for started in self.start(*arguments, **launcher)]
        return first


@needs_hosts
@pytest.mark.parametrize(("yaml", "processes"), [("multi_node_ddp", 2), slow("multi_node_fsdp", 2), slow("hsdp", 4)])
def test_two_hosts_give_the_curve(whole: Whole, rounding: Rounding, tmp_path: Path, yaml: str, processes: int) -> None:
    """Gloo's interface is chosen: without, it takes the loopback, and each waits for the other until the timeout."""
    with Two(tmp_path) as hosts:
        run = hosts.finish(yaml, tmp_path / "run", *DIGITS, num_processes=processes)
    assert (run.summary["strategy"], run.summary["num_processes"]) == (yaml.removeprefix("multi_node_"), processes)
    assert_same_curve(run, TASKS["digits"], whole, rounding)


@needs_hosts
def test_a_host_with_other_settings_is_refused_by_all_in_the_same_words(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    others = ("--optim.lr=0.1", f"--output_dir={tmp_path}/elsewhere")
    with Two(tmp_path) as hosts:
        runs = [hosts.launch(1, "multi_node_ddp", folder), hosts.launch(2, "multi_node_ddp", folder, *others)]
        for run in [started.result() for started in runs]:
            assert run.exit_code == 1, run.stderr
            says = "train.py: machine 1 (host2) has optim.lr 0.1; machine 0 (host1) has optim.lr 0.003"
            assert run.messages == [says]
            assert "exitcode  : 2" in run.stderr
            assert 'train.py", line' not in run.stderr, "a traceback"
    assert not folder.exists()


@needs_hosts
def test_after_a_host_died_the_run_resumes_exactly_on_the_other(launch: Launch, whole: Whole, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with Two(tmp_path) as hosts:
        first, _ = hosts.start("multi_node_ddp", folder, *SHORT)
        first.wait_for("step     12/")
        hosts.hosts["host2"].close()
        left = first.result()
    assert left.exit_code == 1
    says = "run the same command on all machines; they resume from the newest checkpoint"
    assert left.messages == [f"train.py: a process on another machine was lost: {says}"]
    assert 'train.py", line' not in left.stderr, "a traceback"
    assert checkpoints(folder) == [8]
    assert_same_run(launch("ddp", *SHORT, folder=folder).succeeded(), whole("ddp", *SHORT))


@needs_hosts
@pytest.mark.slow
def test_after_a_cut_link_all_end_within_the_timeout_and_a_relaunch_is_exact(whole: Whole, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with Two(tmp_path) as hosts:
        first, second = hosts.start("multi_node_ddp", folder, *SHORT, "--timeout_minutes=0.3")
        first.wait_for("step     12/")
        hosts.bridge("set", "host2", "down")
        cut = time.monotonic()
        assert (first.result().exit_code, second.result().exit_code) == (1, 1)
        assert time.monotonic() - cut < 18 + 60  # the rest: a grace period, and a launcher's end on a busy machine
    with Two(tmp_path) as hosts:
        assert_same_run(hosts.finish("multi_node_ddp", folder, *SHORT), whole("ddp", *SHORT))


@needs_hosts
@pytest.mark.slow
def test_a_main_process_whose_name_is_its_own_loopback(tmp_path: Path) -> None:
    """As Debian's installer writes into /etc/hosts."""
    with Two(tmp_path, "127.0.1.1 host1\n", "10.77.0.1 host1\n127.0.1.1 host2\n") as hosts:
        hosts.finish("multi_node_ddp", tmp_path / "run", "--max_steps=2", main_process_ip="host1")


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
"""Two processes of this machine stand for two machines, which train.py finds by the store that the launcher serves."""


def test_a_machine_with_other_data_is_refused_by_all_in_the_same_words(launch: Launch, tmp_path: Path) -> None:
    """Each image of digit d is labelled 9 - d on the second. Tried without: it trains, on both kinds of labels."""
    where = ("--num_machines=2", "--machine_rank=0", "--main_process_ip=127.0.0.1")
    run = launch("ddp", *SHORT, folder=tmp_path / "run", before=TWO_MACHINES, launcher_arguments=where, processes=2)
    assert run.exit_code == 2, run.stderr
    here = re.escape(socket.gethostname())
    (line,) = set(run.messages)
    kind = "has training data [0-9a-f]+"
    assert re.fullmatch(rf"train\.py: machine 1 \({here}\) {kind}; machine 0 \({here}\) {kind}", line)
    assert not (tmp_path / "run" / "metrics.jsonl").exists()
