"""Several machines: alike before they train together; one that is lost or slow is named. A single one is left alone.

They talk through the store that torch's launcher serves on machine 0: before a process group exists, after it broke.
"""

import contextlib
import functools
import hashlib
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import psutil
import torch.distributed as dist
from accelerate.utils import gather_object

from src.config.config import Config
from src.config.errors import RunError, UserError, cause, explained
from src.config.settings import flatten
from src.config.terminal import say
from src.distributed.accelerator import LIBRARIES
from src.distributed.process import GRACE_SECONDS, SIGNALS, lost_peers

SILENT, SLOW = 3.0, 20.0
"""Seconds without a sign of life, one a second, after which a machine is lost if the run broke; milliseconds to machine
0 and back that are slow: within a data centre it is less than one."""


def facts_here() -> dict[str, str]:
    """Return what has to be the same on all machines, by name: libraries, code, what the yaml has set."""
    project = Path(__file__).parent.parent.parent
    facts = {name: version(name) for name in LIBRARIES if find_spec(name)} | {"python": sys.version.split()[0]}
    for file in [*project.glob("*.py"), *project.glob("src/**/*.py"), *project.glob("examples/*.py")]:
        facts[str(file.relative_to(project))] = hashlib.sha256(file.read_bytes()).hexdigest()[:8]
    of_the_yaml = ("ACCELERATE_", "FSDP_", "PARALLELISM_CONFIG_")
    return facts | {name: os.environ[name] for name in os.environ if name.startswith(of_the_yaml)}


def differences(names: list[str], facts: list[dict[str, str]]) -> Iterator[str]:
    """Yield a line for each mistake in the settings, or else for each machine that isn't as the first one is."""
    mistakes = [own.get("mistakes", "").splitlines() for own in facts]
    for name, own, lines in zip(names, facts, mistakes, strict=True):
        yield from (line if all(line in said for said in mistakes) else f"{name}: {line}" for line in lines)
        other = [key for key in facts[0] | own if own.get(key) != facts[0].get(key)]
        if other and not any(mistakes):
            here, there = (", ".join(f"{key} {has.get(key)}" for key in other) for has in (own, facts[0]))
            yield f"{name} has {here}; {names[0]} has {there}"


def address_towards(host: str) -> str:
    """Return this machine's address on the way to another one; nothing is sent."""
    family, _, _, _, there = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(there)
        return probe.getsockname()[0]


class Machines:
    """The machines of this run, as the first process on each knows them."""

    def __init__(self) -> None:
        self.names: list[str] = []
        """Such as `machine 1 (host2)`, by rank; empty on a single machine."""
        self._hosts: list[str] = []
        self._heard: list[tuple[bytes, float]] = []  # each one's last sign of life, and when it came
        self._slow: set[str] = set()
        self._left = threading.Event()

    def alike(self, read: Callable[[list[str]], Config]) -> Callable[[list[str]], Config]:
        """Decorate what reads the settings; on several machines, wait for all first, and watch them from then on.

        Raises:
            UserError: a machine has mistakes in its settings or isn't as machine 0 is; the same on all.
        """

        @functools.wraps(read)
        def read_on_all(argv: list[str]) -> Config:
            if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True" or os.environ["GROUP_WORLD_SIZE"] == "1":
                return read(argv)
            facts = facts_here()
            try:
                config = read(argv)
            except UserError as error:
                self.join({"mistakes": str(error)}, 60 * Config.model_fields["timeout_minutes"].default)
                raise
            settings = flatten(config.model_dump(mode="json", exclude={"output_dir": True, "task": {"data_dir"}}))
            self.join(facts | {name: str(value) for name, value in settings}, 60 * config.timeout_minutes)
            return config

        return read_on_all

    def join(self, facts: dict[str, str], limit: float) -> None:
        """Wait for all machines, `limit` seconds for each; raise a UserError if they differ; choose Gloo's interface;
        watch the others from then on."""
        rank, size, port = (int(os.environ[name]) for name in ("GROUP_RANK", "GROUP_WORLD_SIZE", "MASTER_PORT"))
        main, restarts = os.environ["MASTER_ADDR"], os.environ["TORCHELASTIC_RESTART_COUNT"]
        server = dist.TCPStore(main, port, None, is_master=False, timeout=timedelta(seconds=limit))
        self._store = dist.PrefixStore(f"machines/{restarts}", server)
        is_first = os.environ["LOCAL_RANK"] == "0"
        if is_first:
            own = [socket.gethostname(), address_towards(main), facts]
            self._store.set(f"beat/{rank}", "")
            there = json.loads(self._store.compare_set(f"facts/{rank}", "", json.dumps(own)))
            if there[:2] != own[:2]:
                raise UserError(f"machine_rank={rank} is taken twice: by {there[0]} and {own[0]}")
        with explained(f"not all {size} machines came within timeout_minutes={limit / 60:g}: ", dist.DistError):
            told = [json.loads(self._store.get(f"facts/{other}")) for other in range(size)]
        hosts, addresses, facts_of_all = map(list, zip(*told, strict=True))
        names = [f"machine {number} ({host})" for number, host in enumerate(hosts)]
        if lines := dict.fromkeys(differences(names, facts_of_all)):
            time.sleep(0 if rank else 2)  # the store ends with machine 0's launcher, and others still read it
            raise UserError("\n".join(lines))
        self.names, self._hosts = names, hosts
        address = address_towards(main if rank else addresses[1])  # machine 0 may know its own name as its loopback
        for interface, known in psutil.net_if_addrs().items():
            if address in [other.address for other in known]:
                os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
        if is_first:
            self._heard = [(b"", time.monotonic())] * size
            self._watcher = threading.Thread(target=self._watch, args=(rank, limit), daemon=True)
            self._watcher.start()

    def require_same_data(self, fingerprints: list[str]) -> None:
        """Raise a UserError if a machine has other data than the first; the same on all. Collective: `fingerprints`, of
        the data to train and to evaluate on, come from the first process on each machine, from others nothing."""
        told = gather_object([fingerprints]) if self.names else []
        facts = [dict(zip(("data to train on", "data to evaluate on"), own, strict=True)) for own in told if own]
        if lines := list(differences(self.names, facts)):
            raise UserError("\n".join(lines))

    def metrics(self) -> dict[str, float]:
        """Return how many milliseconds a message takes from each machine to machine 0 and back; warn of slow ones."""
        trips = {i: float(beat.split()[1]) for i, (beat, _) in enumerate(self._heard) if i and b" " in beat}
        # of five: the start, which keeps the processor busy, delays the first ones
        slow = {self.names[i] for i, trip in trips.items() if trip > SLOW and self._heard[i][0].endswith(b" 5")}
        slow = {self.names[0]} if 1 < len(slow) == len(trips) else slow  # all ways lead there
        if slow - self._slow:
            say(f"WARNING: slow: {', '.join(slow)}: a message takes {max(trips.values()):.0f} ms there and back")
        self._slow |= slow
        return {f"perf/round_trip_ms/{self._hosts[rank]}": trip for rank, trip in trips.items()}

    @contextlib.contextmanager
    def named(self) -> Iterator[None]:
        """Raise a RunError in place of what only says that another process is gone: name the machine that was lost, or
        the interface that Gloo failed on."""
        try:
            yield
        except RuntimeError as error:
            if not self.names or SIGNALS.name or not (lost_peers(error) or isinstance(error, dist.DistError)):
                raise
            SIGNALS.release()
            time.sleep(GRACE_SECONDS * (1 if self._heard else 2))
            says = self._lost() if self._heard else "said by the first process on this machine"
            if says is None and not dist.is_initialized():
                interface = os.environ.get("GLOO_SOCKET_IFNAME")
                says = f"the machines can't connect by {interface}: set GLOO_SOCKET_IFNAME ({cause(error)})"
            if says is None:
                raise
            raise RunError(says) from None
        self._left.set()
        if self._heard:
            self._watcher.join(GRACE_SECONDS)  # it tells the others that this machine is done

    def _lost(self) -> str | None:
        """Return what to say of machines that are not heard any more; None if all are."""
        newest = max(when for _, when in self._heard)
        silent = [name for name, (_, at) in zip(self.names, self._heard, strict=True) if at < newest - SILENT]
        silent = silent or self.names[: time.monotonic() - newest > SILENT]
        return f"lost {' and '.join(silent)}: its own output says why, unless it was cut off" if silent else None

    def _watch(self, rank: int, limit: float) -> None:
        beats, trips = [f"beat/{other}" for other in range(len(self.names))], list[float]()
        is_over = False
        while not is_over:
            is_over = self._left.wait(1)
            with contextlib.suppress(RuntimeError):  # machine 0 can't be reached, and so nobody is heard
                began = time.perf_counter()
                self._store.wait(beats)
                trips = [*trips[-4:], 1e3 * (time.perf_counter() - began)]
                # the least: a slow way is slow each time, while a busy processor delays some
                self._store.set(beats[rank], "left" if is_over else f"{time.time()} {min(trips):.2f} {len(trips)}")
                told, now = self._store.multi_get(beats), time.monotonic()
                self._heard = [old if old[0] == b else (b, now) for old, b in zip(self._heard, told, strict=True)]
            if any(time.monotonic() - when > limit for beat, when in self._heard if beat != b"left"):
                say(f"train.py: {self._lost()}", file=sys.stderr)
                os._exit(1)


MACHINES = Machines()
