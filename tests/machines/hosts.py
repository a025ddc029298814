"""Hosts on one machine: network namespaces, each with an address and a host name of its own, joined by veth pairs to a
bridge in one more. In each, the real `accelerate launch` runs."""

import contextlib
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import psutil

from tests.launching import BIN, PROJECT, QUIET, SECONDS, Run, clean_environment

MTU = 9000
PORT = 29500


def missing() -> str | None:
    """Why this machine cannot play several; None if it can."""
    if os.geteuid():
        return "needs root, for network namespaces"
    if not all(map(shutil.which, ("ip", "unshare"))):
        return "needs ip (iproute2) and unshare (util-linux)"
    name = f"try-{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True)
    if made.returncode:
        return f"needs network namespaces: {made.stderr.strip()}"
    inside = ["ip", "-n", name, "link", "add", "name", "near", "type", "veth", "peer", "name", "far"]
    joined = subprocess.run(inside, capture_output=True, text=True)
    subprocess.run(["ip", "netns", "del", name], check=True)
    return f"needs veth pairs: {joined.stderr.strip()}" if joined.returncode else None


class Hosts:
    """host1, host2, …, with the addresses 10.77.0.1, …; as a context manager it leaves nothing behind.

    Args:
        names: lines of /etc/hosts by host.
    """

    def __init__(self, number: int, names: dict[int, str] | None = None) -> None:
        self.number, self._names = number, names or {}
        self._started: list[subprocess.Popen[bytes]] = []

    def name(self, host: int) -> str:
        """Of a namespace; 0 is the switch's."""
        return f"hosts-{os.getpid()}-{host}"

    def ip(self, host: int, words: str) -> None:
        subprocess.run(["ip", "-n", self.name(host), *words.split()], check=True)

    def __enter__(self) -> "Hosts":
        try:
            for host in range(self.number + 1):
                subprocess.run(["ip", "netns", "add", self.name(host)], check=True)
                self.ip(host, "link set lo up")
            self.ip(0, "link add bridge type bridge")
            self.ip(0, f"link set bridge mtu {MTU} up")
            for host in range(1, self.number + 1):
                self._connect(host)
        except BaseException:
            self.__exit__()
            raise
        return self

    def _connect(self, host: int) -> None:
        self.ip(0, f"link add name near type veth peer name port{host}")
        self.ip(0, f"link set near mtu {MTU} netns {self.name(host)} name eth0")
        self.ip(0, f"link set port{host} mtu {MTU} master bridge up")
        self.ip(host, f"addr add 10.77.0.{host}/24 dev eth0")
        self.ip(host, "link set eth0 up")
        own = Path("/etc/netns", self.name(host))  # `ip netns exec` lays its files over those in /etc
        own.mkdir(parents=True)
        (own / "hosts").write_text(self._names.get(host, "127.0.0.1 localhost\n"))

    def cut(self, host: int) -> None:
        """Take the host's cable out, as one does at the switch."""
        self.ip(0, f"link set port{host} down")

    def processes(self, host: int) -> list[psutil.Process]:
        found = subprocess.run(["ip", "netns", "pids", self.name(host)], capture_output=True, text=True).stdout
        there = []
        for pid in found.split():
            with contextlib.suppress(psutil.NoSuchProcess):
                there.append(psutil.Process(int(pid)))
        return there

    def kill(self, host: int) -> None:
        """SIGKILL to all that runs there, as when its power fails, though its connections are closed then."""
        while processes := self.processes(host):
            for process in processes:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            time.sleep(0.01)

    def __exit__(self, *_: object) -> None:
        for host in range(self.number + 1):
            self.kill(host)
            subprocess.run(["ip", "netns", "del", self.name(host)], check=False)
            shutil.rmtree(Path("/etc/netns", self.name(host)), ignore_errors=True)
        for process in self._started:
            process.wait()

    def launch(self, host: int, words: list[str], folder: Path, project: Path = PROJECT, **variables: str) -> "Running":
        """`accelerate launch` there, in the background; its output goes to files beside `folder`."""
        command = ["ip", "netns", "exec", self.name(host), "unshare", "--uts", "sh", "-c"]
        command += [f'hostname host{host} && exec "$@"', "sh", str(BIN / "accelerate"), "launch", *words]
        running = Running(command, folder, project, clean_environment(PYTHONUNBUFFERED="1", **variables))
        self._started.append(running.launcher)
        return running


class Running:
    """A launcher that runs on a host."""

    def __init__(self, command: list[str], folder: Path, project: Path, environment: dict[str, str]) -> None:
        self.folder = folder
        folder.parent.mkdir(parents=True, exist_ok=True)
        self._files = [folder.with_suffix(suffix) for suffix in (".out", ".err")]
        with self._files[0].open("w") as out, self._files[1].open("w") as err:
            self.launcher = subprocess.Popen(
                command,
                cwd=project,
                env=environment,
                stdout=out,
                stderr=err,
                start_new_session=True,
                preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
            )

    @property
    def output(self) -> str:
        return "".join(file.read_text() for file in self._files)

    def wait_for(self, text: str) -> "Running":
        """Until it has printed `text`."""
        end = time.monotonic() + SECONDS
        while text not in self.output:
            assert self.launcher.poll() is None, self.output
            assert time.monotonic() < end, self.output
            time.sleep(0.05)
        return self

    def result(self, seconds: float = SECONDS) -> Run:
        """When the launcher has ended."""
        try:
            code = self.launcher.wait(seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still running after {seconds} seconds: {self.output}") from None
        out, err = (file.read_text() for file in self._files)
        return Run(code, out, err, self.folder)


def words(yaml: str, host: int, folder: Path, *arguments: str, machines: int = 2, **launcher: Any) -> list[str]:
    """What follows `accelerate launch` on a host: one process there, on the digits."""
    own: dict[str, Any] = {"num_processes": machines, "num_machines": machines, "machine_rank": host - 1}
    own |= {"main_process_ip": "10.77.0.1", "main_process_port": PORT, **launcher}
    file = PROJECT / "accelerate_configs" / f"{yaml}.yaml"
    options = [f"--{name}={value}" for name, value in own.items()]
    script = ["train.py", f"--output_dir={folder}", "--task.source=digits", *QUIET]
    return ["--config_file", str(file), *options, *script, *arguments]
