"""Slurm jobs that are signalled, preempted, cancelled or fail, on a real slurmctld and three slurmd."""

import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.launching import BIN, PROJECT, QUIET, Run, Whole, wait
from tests.machines.hosts import FREEZER, Network, why_not

REASON = why_not("slurmctld", "slurmd", "sbatch", "munged")
pytestmark = [pytest.mark.machines, pytest.mark.skipif(REASON is not None, reason=str(REASON))]
SETTINGS = ("--max_steps=80", "--log_every=1")
SINGLE = "accelerate_configs/cpu.yaml"
STUB = """\
#!/bin/bash
# in place of accelerate: one node fails, and makes the other stop, before there is anything to save
if [ "$SLURM_NODEID" = 1 ]; then
    until [ -e started ]; do sleep 0.1; done
    touch failed
    exit 3
fi
touch started
until [ -e failed ]; do sleep 0.1; done
sleep 1
echo '{"status": "preempted", "checkpoint": null}' > "$STATUS"
exit 1
"""
HOSTS = {"control": "10.87.21.100", "node1": "10.87.21.1", "node2": "10.87.21.2", "node3": "10.87.21.3"}
CONF = """\
ClusterName=test
SlurmctldHost=control({control})
SlurmUser=root
# cred_expire: seconds before a requeued job starts again; 120 by default
AuthInfo=socket={folder}/munge.socket,cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n
SlurmctldLogFile={folder}/control.log
SlurmdLogFile={folder}/%n.log
SlurmctldPidFile={folder}/control.pid
SlurmdPidFile={folder}/%n.pid
ProctrackType=proctrack/{tracking}
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
SchedulerParameters=sched_interval=1,bf_interval=1
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
NodeName=node[1-3] NodeAddr=10.87.21.[1-3] CPUs=2
PartitionName=normal Nodes=ALL Default=YES
PartitionName=graceful Nodes=ALL GraceTime=60
PartitionName=urgent Nodes=ALL PriorityTier=2 PreemptMode=OFF
"""


class Cluster(Network):
    """Three nodes of two CPUs each."""

    def __init__(self, folder: Path) -> None:
        names = "".join(f"{address} {name}\n" for name, address in HOSTS.items()) + "127.0.0.1 localhost\n"
        super().__init__(folder, HOSTS, dict.fromkeys(HOSTS, names))
        self.folder, key = folder, folder / "munge.key"
        self._environment = {"SLURM_CONF": str(folder / "slurm.conf"), "PATH": f"{BIN}:{os.environ['PATH']}"}
        self._environment |= {"GLOO_SOCKET_IFNAME": "eth0"}  # else gloo may choose lo, which leads to no other host
        key.write_bytes(os.urandom(128))
        key.chmod(0o600)
        tracking = "cgroup" if FREEZER.is_dir() else "linuxproc"
        (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\nCgroupAutomount=no\n")
        (folder / "slurm.conf").write_text(CONF.format(folder=folder, tracking=tracking, **HOSTS))
        kinds = {"key": "key-file", "socket": "socket", "log": "log-file", "pid": "pid-file", "seed": "seed-file"}
        files = (f"--{option}={folder}/munge.{end}" for end, option in kinds.items())
        self.hosts["control"]("munged", "--force", *files)
        self("slurmctld", "-i")
        for name in list(HOSTS)[1:]:
            self.hosts[name]("slurmd", **self._environment)
        self.wait_until(lambda: self("sinfo", "--noheader", "--format=%t").split() == ["idle"])

    def __call__(self, *command: str, **environment: str) -> str:
        """Run a command on the host of the controller. Return what it printed."""
        return self.hosts["control"](*command, **self._environment, **environment)

    def job(self, number: str) -> dict[str, str]:
        """Return what the controller says of a job."""
        return dict(re.findall(r"(\w+)=(\S*)", self("scontrol", "show", "job", number)))

    def wait_until(self, condition: Callable[[], object]) -> None:
        wait(condition, say=lambda: {file.name: file.read_text()[-3000:] for file in self.folder.glob("*.log")})


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster(tmp_path_factory.mktemp("slurm")) as cluster:
        yield cluster


@dataclass
class Job:
    """A job that trains in `folder`."""

    cluster: Cluster
    number: str
    folder: Path

    def __getitem__(self, what: str) -> str:
        return self.cluster.job(self.number).get(what, "")

    @property
    def log(self) -> str:
        file = self.cluster.folder / f"{self.number}.log"
        return file.read_text() if file.exists() else ""

    @property
    def run(self) -> Run:
        return Run(0, "", "", self.folder)

    def wait_for(self, text: str) -> None:
        self.cluster.wait_until(lambda: text in self.log)

    def ended(self) -> str:
        """Return its state, when it has ended."""
        self.cluster.wait_until(lambda: self["JobState"] not in ("PENDING", "RUNNING", "COMPLETING"))
        return self["JobState"]


def submit(cluster: Cluster, folder: Path, *settings: str, options: tuple[str, ...] = (), **more: str) -> Job:
    """Submit launchers/slurm.sbatch, to train on the digits."""
    words = ["launchers/slurm.sbatch", "--task.source=digits", f"--output_dir={folder}", *QUIET, *settings]
    own = ["--parsable", f"--output={cluster.folder}/%j.log"]
    return Job(cluster, cluster("sbatch", *own, *options, *words, **more).strip(), folder)


def test_a_job_that_is_asked_to_save_resumes_exactly(cluster: Cluster, tmp_path: Path, whole: Whole) -> None:
    """Slurm signals all processes of the step. A finished run is not trained again."""
    job = submit(cluster, tmp_path / "run", *SETTINGS, options=("--nodes=2",))
    job.wait_for("step      5/")
    cluster("scancel", "--signal=TERM", job.number)
    assert job.ended() == "COMPLETED", job.log
    assert (job["Restarts"], job["NumNodes"]) == ("1", "2")
    assert "by SIGTERM; to resume" in job.log
    assert job.run.losses == whole("ddp", *SETTINGS, processes=2).losses
    records = job.run.records
    again = submit(cluster, job.folder, *SETTINGS, YAML=SINGLE)
    assert again.ended() == "COMPLETED"
    assert "this run has finished" in again.log
    assert job.run.records == records


def test_a_job_that_fails_is_not_started_again(cluster: Cluster, tmp_path: Path) -> None:
    """Even if it has been stopped before, or one node's failure makes another one stop."""
    for name in ("failing", "lost"):
        (tmp_path / name).mkdir()
    (tmp_path / "failing/status.json").write_text('{"status": "preempted", "checkpoint": null}')
    failing = submit(cluster, tmp_path / "failing", "--task.source=mnist", "--task.data_dir=/nowhere")
    mistaken = submit(cluster, tmp_path / "mistaken", "--max_step=3")

    stub, launcher = tmp_path / "stub", tmp_path / "stub/.venv/bin/accelerate"
    launcher.parent.mkdir(parents=True)
    launcher.write_text(STUB)
    launcher.chmod(0o755)
    for name in ("train.py", "src"):
        (stub / name).symlink_to(PROJECT / name)
    lost = submit(cluster, tmp_path / "lost", options=("--nodes=2", f"--chdir={stub}"))

    for job, code in ((failing, "1:0"), (mistaken, "2:0"), (lost, "3:0")):
        assert (job.ended(), job["Restarts"], job["ExitCode"]) == ("FAILED", "0", code), job.log
    assert "/nowhere" in failing.log
    assert mistaken.log == "slurm.sbatch: --max_step=3: unknown setting, did you mean max_steps?\n"
    assert lost.run.status["status"] == "preempted"


@pytest.mark.slow
@pytest.mark.parametrize("partition", ["normal", "graceful"])
def test_a_preempted_job_saves_and_resumes(cluster: Cluster, tmp_path: Path, whole: Whole, partition: str) -> None:
    """It has 30 seconds to save (KillWait), or the partition's GraceTime."""
    job = submit(cluster, tmp_path / "run", *SETTINGS, options=("--nodes=2", "--exclusive", f"--partition={partition}"))
    job.wait_for("step      5/")
    quick = ("--output=/dev/null", "--wrap=sleep 1")
    urgent = cluster("sbatch", "--parsable", "--partition=urgent", "--nodes=3", "--exclusive", *quick)
    assert job.ended() == "COMPLETED", job.log
    assert job["Restarts"] == "1"
    assert cluster.job(urgent.strip())["JobState"] == "COMPLETED"
    assert job.run.losses == whole("ddp", *SETTINGS, processes=2).losses


@pytest.mark.slow
def test_a_job_saves_before_its_time_ends_and_ends_when_cancelled(cluster: Cluster, tmp_path: Path) -> None:
    """With a single process too, whose launcher would not wait for it."""
    endless = ("--epochs=100000", "--log_every=1")
    job = submit(cluster, tmp_path / "run", *endless, options=("--time=10", "--signal=TERM@60"), YAML=SINGLE)
    job.wait_for("step      5/")
    cluster("scontrol", "update", f"JobId={job.number}", "EndTime=now+90")
    cluster.wait_until(lambda: job["Restarts"] == "1")
    assert job.log.count("by SIGTERM; to resume") == 1
    cluster("scontrol", "update", f"JobId={job.number}", "TimeLimit=10")
    job.wait_for("resume     after step")
    cluster("scancel", job.number)
    assert job.ended() == "CANCELLED"
    assert job["Restarts"] == "1"
    assert job.log.count("by SIGTERM; to resume") == 2
