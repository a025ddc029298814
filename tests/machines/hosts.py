"""Hosts on one machine: sets of Linux namespaces (network, name, processes, mounts), each with an address on one
network. A host ends with its first process, and so does all that runs in it. This needs root."""

import contextlib
import os
import shutil
import subprocess
from pathlib import Path

from tests.launching import PROJECT, SECONDS, clean_environment, wait

FREEZER = Path("/sys/fs/cgroup/freezer")
"""Control groups of version 1, if there are any: where Slurm then keeps a step's processes, as most clusters do."""


def why_not(*programs: str) -> str | None:
    """Return why this machine, with these programs, cannot play several; None if it can."""
    if absent := [each for each in ("ip", "nsenter", "unshare", "setpriv", *programs) if shutil.which(each) is None]:
        return f"{', '.join(absent)}: not installed (Debian: iproute2, util-linux, slurm-wlm, munge)"
    if os.geteuid():
        return "only root can make hosts of one machine"
    tried = subprocess.run(["unshare", "--net", "ip", "link", "add", "type", "bridge"], capture_output=True, text=True)
    return f"no hosts can be made of this machine: {tried.stderr.strip()}" if tried.returncode else None


def run(*command: str, **environment: str) -> str:
    """Run a command on this machine. Return its output."""
    env = clean_environment(**environment)
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=SECONDS)
    assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
    return done.stdout


class Host:
    """A host of this machine, with a file as its /etc/hosts, and a network of its own."""

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
        self._output = self._holder.stdout
        assert self._output.readline() == "ready\n"
        self.pid = Path(f"/proc/{self._holder.pid}/task/{self._holder.pid}/children").read_text().split()[0]
        self.enter = ("nsenter", f"--target={self.pid}", "--all", f"--wd={PROJECT}")
        """Before a command, makes it run on this host, in the project's folder."""

    def __call__(self, *command: str, **environment: str) -> str:
        """Run a command on this host. Return its output."""
        return run(*self.enter, *command, **environment)

    def close(self) -> None:
        """Fail as by a power failure, though connections are closed."""
        self._holder.kill()
        self._holder.wait()
        self._output.close()
        for group in sorted(self._group.glob("**/"), reverse=True):
            wait(lambda: not (group / "tasks").read_text(), 30)  # noqa: B023  # its last processes are dying
            group.rmdir()


class Network(contextlib.ExitStack):
    """Hosts by name, with these addresses and lines of /etc/hosts. The first one is the bridge between them."""

    def __init__(self, folder: Path, addresses: dict[str, str], names: dict[str, str]) -> None:
        super().__init__()
        self.hosts: dict[str, Host] = {}
        for name, address in addresses.items():
            file = folder / f"hosts-{name}"
            file.write_text(names[name])
            host = self.hosts[name] = Host(name, file)
            self.callback(host.close)
            if len(self.hosts) == 1:
                self.bridge("add", "eth0", "type", "bridge")
            else:
                self.bridge("add", name, "type", "veth", "peer", "name", "eth0", "netns", host.pid)
                self.bridge("set", name, "master", "eth0", "up")
            host("ip", "address", "add", f"{address}/24", "dev", "eth0")
            host("ip", "link", "set", "eth0", "up")

    def bridge(self, *words: str) -> None:
        """Call `ip link` on the bridge, where each host's cable has its name."""
        first, *_ = self.hosts.values()
        run("nsenter", f"--target={first.pid}", "--net", "ip", "link", *words)
