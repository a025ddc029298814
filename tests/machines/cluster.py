"""A Slurm cluster on this machine: Debian's slurmctld, and a slurmd per node, each node a host of its own."""

import os
import re
from collections.abc import Callable
from pathlib import Path

from tests.launching import BIN, wait
from tests.machines.hosts import FREEZER, Network

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
NodeName=node1 NodeAddr={node1} CPUs=2
NodeName=node2 NodeAddr={node2} CPUs=2
NodeName=node3 NodeAddr={node3} CPUs=2
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

    def submit(self, *words: str, **environment: str) -> str:
        """Submit launchers/slurm.sbatch with these options and settings. Return the job's number."""
        own = [f"--output={self.folder}/%j.log"]
        return self("sbatch", "--parsable", *own, *words, **environment).strip()

    def job(self, number: str) -> dict[str, str]:
        """Return what the controller says of a job."""
        return dict(re.findall(r"(\w+)=(\S*)", self("scontrol", "show", "job", number)))

    def log(self, number: str) -> str:
        """Return what a job has printed."""
        file = self.folder / f"{number}.log"
        return file.read_text() if file.exists() else ""

    def wait_until(self, condition: Callable[[], object]) -> None:
        wait(condition, say=lambda: {file.name: file.read_text()[-3000:] for file in self.folder.glob("*.log")})
