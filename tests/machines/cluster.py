"""A Slurm cluster on this machine: Debian's slurmctld, and a slurmd per node, each node a host of its own.

A host is a set of Linux namespaces (network, name, processes, mounts) with an address of its own. It ends with its
first process, and so does all that runs in it. This needs root, and a machine that permits it.
"""

import os
import re
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from tests.launching import BIN, PROJECT, SECONDS, clean_environment

HOSTS = {"control": "10.87.21.100", "node1": "10.87.21.1", "node2": "10.87.21.2", "node3": "10.87.21.3"}
FREEZER = Path("/sys/fs/cgroup/freezer")
"""Where Linux shows control groups of version 1, if it has them. In those, as most clusters do, Slurm keeps a step's
processes, and passes signals only to those that srun started; without them it signals all of them."""
PROGRAMS = ("slurmctld", "slurmd", "sbatch", "munged", "ip", "nsenter", "unshare", "setpriv")
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


def why_not() -> str | None:
    """Return why this machine can't be a cluster; None if it can."""
    if absent := [program for program in PROGRAMS if shutil.which(program) is None]:
        return f"{', '.join(absent)}: not installed (Debian: slurm-wlm, munge, iproute2)"
    if os.geteuid():
        return "only root can make hosts of one machine"
    tried = subprocess.run(["unshare", "--net", "ip", "link", "add", "type", "bridge"], capture_output=True, text=True)
    return f"no hosts can be made of this machine: {tried.stderr.strip()}" if tried.returncode else None


class Host:
    """A host of this machine, on a network of its own."""

    def __init__(self, name: str, names: Path) -> None:
        namespaces = ("--net", "--uts", "--ipc", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc")
        self._group = FREEZER / f"{names.parent.name}-{os.getpid()}-{name}"
        setup = f"mount --bind '{names}' /etc/hosts; hostname {name}; ip link set lo up; echo ready; "
        if FREEZER.is_dir():
            self._group.mkdir()
            setup = f"mount --bind '{self._group}' {FREEZER}; {setup}"
        setup += "sleep infinity & wait"  # a shell that waits buries the orphans of its host
        command = ["setpriv", "--pdeathsig=KILL", "unshare", *namespaces, "bash", "-ec", setup]
        self._holder = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self._holder.stdout
        assert self._holder.stdout.readline() == "ready\n"
        self.pid = Path(f"/proc/{self._holder.pid}/task/{self._holder.pid}/children").read_text().split()[0]

    def __call__(self, *command: str, **environment: str) -> str:
        """Run a command there, in the project's folder. Return what it printed."""
        return run("nsenter", f"--target={self.pid}", "--all", f"--wd={PROJECT}", *command, **environment)

    def close(self) -> None:
        self._holder.kill()
        self._holder.communicate()
        for group in sorted(self._group.glob("**/"), reverse=True):  # it is one of these, if it is there
            end = time.monotonic() + 30
            while (group / "tasks").read_text() and time.monotonic() < end:  # its last processes are still dying
                time.sleep(0.05)
            group.rmdir()


def run(*command: str, **environment: str) -> str:
    """Run a command of this machine's. Return what it printed."""
    env = clean_environment(**environment)
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=SECONDS)
    assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
    return done.stdout


class Cluster:
    """Three nodes of two CPUs each; as a context manager, it leaves nothing behind."""

    def __init__(self, folder: Path) -> None:
        self.folder, self._hosts = folder, dict[str, Host]()
        self._environment = {"SLURM_CONF": str(folder / "slurm.conf"), "PATH": f"{BIN}:{os.environ['PATH']}"}
        self._environment |= {"GLOO_SOCKET_IFNAME": "eth0"}  # else gloo may choose lo, which leads to no other host

    def __enter__(self) -> "Cluster":
        names, key = self.folder / "hosts", self.folder / "munge.key"
        names.write_text("".join(f"{address} {name}\n" for name, address in HOSTS.items()) + "127.0.0.1 localhost\n")
        key.write_bytes(os.urandom(128))
        key.chmod(0o600)
        tracking = "cgroup" if FREEZER.is_dir() else "linuxproc"
        (self.folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\nCgroupAutomount=no\n")
        (self.folder / "slurm.conf").write_text(CONF.format(folder=self.folder, tracking=tracking, **HOSTS))
        self._hosts = {name: Host(name, names) for name in HOSTS}
        control = self._hosts["control"]
        bridge = ("nsenter", f"--target={control.pid}", "--net", "ip")
        run(*bridge, "link", "add", "eth0", "type", "bridge")
        for name, host in self._hosts.items():
            if host is not control:
                run(*bridge, "link", "add", name, "type", "veth", "peer", "name", "eth0", "netns", host.pid)
                run(*bridge, "link", "set", name, "master", "eth0", "up")
            host("ip", "address", "add", f"{HOSTS[name]}/24", "dev", "eth0")
            host("ip", "link", "set", "eth0", "up")
        kinds = {"key": "key-file", "socket": "socket", "log": "log-file", "pid": "pid-file", "seed": "seed-file"}
        control("munged", "--force", *(f"--{option}={self.folder}/munge.{end}" for end, option in kinds.items()))
        self("slurmctld", "-i")
        for name in list(HOSTS)[1:]:
            self._hosts[name]("slurmd", **self._environment)
        self.wait_until(lambda: self("sinfo", "--noheader", "--format=%t").split() == ["idle"])
        return self

    def __call__(self, *command: str, **environment: str) -> str:
        """Run a command on the host of the controller. Return what it printed."""
        return self._hosts["control"](*command, **self._environment, **environment)

    def __exit__(self, *_: object) -> None:
        for host in self._hosts.values():
            host.close()

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

    def wait_until(self, condition: Callable[[], object], seconds: float = SECONDS) -> None:
        end = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < end, {file.name: file.read_text()[-3000:] for file in self.folder.glob("*.log")}
            time.sleep(0.1)
