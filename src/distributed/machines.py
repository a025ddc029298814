"""Several machines: they are alike before they train together. On a single machine nothing here does anything.

They talk through the store that torch's launcher serves on machine 0, before there is a process group.
"""

import functools
import hashlib
import json
import os
import socket
import sys
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
from src.config.errors import UserError, explained
from src.config.settings import flatten
from src.distributed.accelerator import LIBRARIES

SET_BY_THE_YAML = ("ACCELERATE_", "FSDP_", "PARALLELISM_CONFIG_")
"""Prefixes of environment variables."""
Facts = dict[str, str]
"""What has to be the same on all machines, by name."""


def are_several() -> bool:
    """Return whether torch's launcher has started this run on several machines."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" and os.environ["GROUP_WORLD_SIZE"] != "1"


def alike(read: Callable[[list[str]], Config]) -> Callable[[list[str]], Config]:
    """Decorate what reads the settings: on several machines, compare them, the code and the libraries.

    Raises:
        UserError: a machine has mistakes in its settings or isn't as machine 0 is; the same on all.
    """

    @functools.wraps(read)
    def read_on_all(argv: list[str]) -> Config:
        if not are_several():
            return read(argv)
        try:
            config = read(argv)
        except UserError as error:
            join({"mistakes": str(error)}, Config.model_fields["timeout_minutes"].default)
            raise
        settings = flatten(config.model_dump(mode="json", exclude={"output_dir": True, "task": {"data_dir"}}))
        join(facts_here() | {name: str(value) for name, value in settings}, config.timeout_minutes)
        return config

    return read_on_all


def facts_here() -> Facts:
    """Return the versions of the libraries, the files of the project, and what the yaml has set."""
    project = Path(__file__).parent.parent.parent
    facts = {name: version(name) for name in LIBRARIES if find_spec(name)} | {"python": sys.version.split()[0]}
    for file in [*project.glob("*.py"), *project.glob("src/**/*.py"), *project.glob("examples/*.py")]:
        facts[str(file.relative_to(project))] = hashlib.sha256(file.read_bytes()).hexdigest()[:8]
    return facts | {name: os.environ[name] for name in os.environ if name.startswith(SET_BY_THE_YAML)}


def join(facts: Facts, minutes: float) -> None:
    """Wait for all machines, so many minutes for each; choose the network interface that Gloo uses.

    Raises:
        UserError: they differ, or not all came.
    """
    rank, size = int(os.environ["GROUP_RANK"]), int(os.environ["GROUP_WORLD_SIZE"])
    main, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    server = dist.TCPStore(main, port, None, is_master=False, timeout=timedelta(minutes=minutes))
    store = dist.PrefixStore(f"machines/{os.environ['TORCHELASTIC_RESTART_COUNT']}", server)
    if os.environ["LOCAL_RANK"] == "0":
        own = [socket.gethostname(), address_towards(main), facts]
        there = json.loads(store.compare_set(f"facts/{rank}", "", json.dumps(own)))
        if there[:2] != own[:2]:
            raise UserError(f"machine_rank={rank} is taken twice: by {there[0]} and {own[0]}")
    with explained(f"not all {size} machines came within timeout_minutes={minutes:g}: ", dist.DistError):
        told = [json.loads(store.get(f"facts/{other}")) for other in range(size)]
    if lines := differences([name for name, _, _ in told], [facts for _, _, facts in told]):
        time.sleep(0 if rank else 2)  # the store ends with machine 0's launcher, and others still read it
        raise UserError("\n".join(lines))
    other = main if rank else told[1][1]  # machine 0 may know its own name as its loopback
    address = address_towards(other)
    for interface, known in psutil.net_if_addrs().items():
        if address in [found.address for found in known]:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)


def require_same_data(fingerprints: list[str]) -> None:
    """Compare the data of the machines. Collective.

    Args:
        fingerprints: of the data to train and to evaluate on, from the first process on each machine; else empty.

    Raises:
        UserError: a machine has other data than the first; the same on all.
    """
    if not are_several():
        return
    told = [own for own in gather_object([(socket.gethostname(), fingerprints)]) if own[1]]
    kinds = ("data to train on", "data to evaluate on")
    facts = [dict(zip(kinds, own, strict=True)) for _, own in told]
    if lines := differences([host for host, _ in told], facts):
        raise UserError("\n".join(lines))


def differences(hosts: list[str], facts: list[Facts]) -> list[str]:
    """Return a line for each mistake in the settings, or else for each machine that isn't as the first one is."""
    return list(dict.fromkeys(_differences([f"machine {i} ({host})" for i, host in enumerate(hosts)], facts)))


def _differences(names: list[str], facts: list[Facts]) -> Iterator[str]:
    mistakes = [own.get("mistakes", "").splitlines() for own in facts]
    for name, own, lines in zip(names, facts, mistakes, strict=True):
        for line in lines:
            yield line if all(line in said for said in mistakes) else f"{name}: {line}"
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
