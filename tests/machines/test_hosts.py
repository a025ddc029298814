"""Several machines, played by one (see hosts.py): they train as one would, and what goes wrong has one line.

The hosts share the disk, as machines with a shared file system do.
"""

import re
import socket
import time
from pathlib import Path
from typing import Any

import pytest

from src.distributed.machines import differences
from tests.faults.runs import SHORT, assert_same_run, checkpoints
from tests.launching import Launch, Rounding, Run, Whole, slow
from tests.machines.hosts import Hosts, Running, missing, words
from tests.test_parity import DIGITS, assert_same_curve

needs_hosts = pytest.mark.skipif(missing() is not None, reason=str(missing()))


def started(hosts: Hosts, yaml: str, folder: Path, *arguments: str, **more: Any) -> list[Running]:
    """A run on all hosts, one process each. `more`: of the launcher, or in capitals environment variables."""
    variables = {name: more.pop(name) for name in list(more) if name.isupper()}
    return [
        hosts.launch(
            host,
            words(yaml, host, folder, *arguments, machines=hosts.number, **more),
            folder.with_name(f"{folder.name}-{host}"),
            **variables,
        )
        for host in range(1, hosts.number + 1)
    ]


def ended(runs: list[Running]) -> list[Run]:
    return [run.result() for run in runs]


def finished(runs: list[Running], folder: Path) -> Run:
    """The run on the first host; the others have none of its files."""
    first, *_ = [run.succeeded() for run in ended(runs)]
    return Run(0, first.stdout, first.stderr, folder)


@needs_hosts
@pytest.mark.parametrize(("yaml", "processes"), [("multi_node_ddp", 2), slow("multi_node_fsdp", 2), slow("hsdp", 4)])
def test_two_hosts_give_the_curve_of_one_process(
    whole: Whole, rounding: Rounding, tmp_path: Path, yaml: str, processes: int
) -> None:
    """Gloo's interface is chosen: without, it takes the loopback, and each waits for the other until the timeout."""
    with Hosts(2) as hosts:
        run = finished(started(hosts, yaml, tmp_path / "run", *DIGITS, num_processes=processes), tmp_path / "run")
    assert (run.summary["strategy"], run.summary["num_processes"]) == (yaml.removeprefix("multi_node_"), processes)
    assert_same_curve(run, 359, whole, rounding, *DIGITS)


@needs_hosts
def test_a_host_with_other_settings_is_refused_by_all_in_the_same_words(tmp_path: Path) -> None:
    with Hosts(2) as hosts:
        folder = tmp_path / "run"
        others = ("--optim.lr=0.1", f"--output_dir={tmp_path}/elsewhere")
        runs = [
            hosts.launch(1, words("multi_node_ddp", 1, folder), tmp_path / "1"),
            hosts.launch(2, words("multi_node_ddp", 2, folder, *others), tmp_path / "2"),
        ]
        for run in ended(runs):
            assert run.exit_code == 1, run.stderr
            assert run.messages == [
                "train.py: machine 1 (host2) has optim.lr 0.1; machine 0 (host1) has optim.lr 0.003"
            ]
            assert "exitcode  : 2" in run.stderr
            assert 'train.py", line' not in run.stderr, "a traceback"
    assert not folder.exists()


@needs_hosts
def test_after_a_host_died_the_run_goes_on_exactly_with_one_host_fewer(
    launch: Launch, whole: Whole, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    with Hosts(2) as hosts:
        runs = started(hosts, "multi_node_ddp", folder, *SHORT)
        runs[0].wait_for("step     12/")
        hosts.kill(2)
        run = runs[0].result()
    assert run.exit_code == 1
    assert checkpoints(folder) == [8]
    resumed = launch("ddp", *SHORT, folder=folder, processes=2).succeeded()
    assert resumed.records[-1]["step"] == 30
    assert_same_run(resumed, whole("ddp", *SHORT))


@needs_hosts
@pytest.mark.slow
def test_after_a_cut_link_all_end_within_the_timeout_and_a_relaunch_goes_on_exactly(
    whole: Whole, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    with Hosts(2) as hosts:
        runs = started(hosts, "multi_node_ddp", folder, *SHORT, "--timeout_minutes=0.3")
        runs[0].wait_for("step     12/")
        hosts.cut(2)
        cut = time.monotonic()
        first, second = ended(runs)
        assert time.monotonic() - cut < 18 + 60  # the rest: a grace period, and a launcher's end on a busy machine
    assert (first.exit_code, second.exit_code) == (1, 1)
    with Hosts(2) as hosts:
        resumed = finished(started(hosts, "multi_node_ddp", folder, *SHORT), folder)
    assert_same_run(resumed, whole("ddp", *SHORT))


@needs_hosts
@pytest.mark.slow
def test_a_main_process_whose_name_is_its_own_loopback(tmp_path: Path) -> None:
    """As Debian's installer writes into /etc/hosts."""
    names = {1: "127.0.0.1 localhost\n127.0.1.1 host1\n", 2: "127.0.0.1 localhost\n10.77.0.1 host1\n127.0.1.1 host2\n"}
    with Hosts(2, names=names) as hosts:
        runs = started(hosts, "multi_node_ddp", tmp_path / "run", "--max_steps=2", main_process_ip="host1")
        finished(runs, tmp_path / "run")


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
    kind = "has data to train on [0-9a-f]+"
    assert re.fullmatch(rf"train\.py: machine 1 \({here}\) {kind}; machine 0 \({here}\) {kind}", line)
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_what_differs_is_named_on_one_line_per_machine() -> None:
    first, other = {"torch": "2.15.0", "FSDP_VERSION": "2"}, {"torch": "2.14.0", "extra": "1"}
    assert list(differences([["a", first], ["b", first], ["c", other]])) == [
        "machine 2 (c) has torch 2.14.0, FSDP_VERSION None, extra 1; "
        "machine 0 (a) has torch 2.15.0, FSDP_VERSION 2, extra None"
    ]
