"""Several machines: check that all of them agree before they train together. On a single machine this does nothing.

They communicate through the store that torch's launcher serves on machine 0, before there is a process group.
"""

import json
import os
import socket
import time
import zlib
from datetime import timedelta
from pathlib import Path

import psutil
import torch.distributed as dist

from src.config.config import Config
from src.config.errors import as_user_error, raise_if_any
from src.config.settings import flatten
from src.distributed.accelerator import machine_differences
from src.distributed.process import SIGNALS, num_machines

SET_BY_THE_YAML = "ACCELERATE_", "FSDP_", "PARALLELISM_CONFIG_"
"""Prefixes of environment variables that the launcher sets from the yaml."""


def join(config: Config) -> None:
    """On several machines, wait for each for timeout_minutes, and compare settings, the yaml's variables and the code;
    choose the network interface for Gloo.

    Raises:
        UserError: they differ, or not all of them joined; the same on all machines.
    """
    size = num_machines()
    if size == 1 or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return
    SIGNALS.answer_by(SIGNALS.die_later)  # C++ code, which runs no Python handlers, may wait for a lost machine
    facts = dict(flatten(config.model_dump(mode="json", exclude={"output_dir": True, "task": {"data_dir"}})))
    facts |= {name: value for name, value in os.environ.items() if name.startswith(SET_BY_THE_YAML)}
    code = b"".join(file.read_bytes() for file in sorted(Path(__file__).parents[1].rglob("*.py")))
    facts["src"] = zlib.crc32(code)

    rank = int(os.environ["GROUP_RANK"])
    main, timeout = os.environ["MASTER_ADDR"], timedelta(minutes=config.timeout_minutes)
    store = dist.TCPStore(main, int(os.environ["MASTER_PORT"]), None, is_master=False, timeout=timeout)
    if os.environ["LOCAL_RANK"] == "0":
        store.set(f"machines/{rank}", json.dumps([socket.gethostname(), facts, address_towards(main)]))
    with as_user_error(f"not all {size} machines joined, each with its own machine_rank: ", dist.DistError):
        reports = [json.loads(store.get(f"machines/{other}")) for other in range(size)]
    lines = [*machine_differences(reports)]
    if lines and rank == 0:
        time.sleep(2)  # the store ends with machine 0's launcher, while others still read it
    raise_if_any(lines)
    address = address_towards(main if rank else reports[1][2])  # machine 0 may resolve its own name to its loopback
    for interface, known in psutil.net_if_addrs().items():
        if address in [found.address for found in known]:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)


def address_towards(host: str) -> str:
    """Return the address from which this machine reaches another; nothing is sent."""
    family, _, _, _, there = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(there)
        return probe.getsockname()[0]
