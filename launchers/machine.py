"""python launchers/machine.py [--timeout=600] WORDS: check WORDS, wait for rank 0, become `accelerate launch WORDS`."""

import math
import os
import socket
import sys
import time
from collections.abc import Iterator
from typing import Any

import yaml
from accelerate.commands.launch import default_config_file, launch_command_parser
from accelerate.utils.other import is_port_in_use

sys.path.insert(0, ".")  # the project's root, where the command is run
from src.config.errors import RunError, as_user_error, cause, raise_if_any
from src.config.settings import read_yaml
from src.distributed.process import exit_codes

KEYS = ("num_machines", "num_processes", "machine_rank", "main_process_ip", "main_process_port")
MESH = [f"parallelism_config_{name}_size" for name in ("dp_replicate", "dp_shard", "cp")]


def mistakes(machines: int, processes: int, rank: int, ip: str, port: int, *mesh: int) -> Iterator[str]:
    """Yield a line for each mistake that would otherwise end in a traceback or a hang."""
    if mesh and math.prod(mesh) != processes:
        replicas, shards, parts = mesh
        product = f"dp_replicate_size={replicas} x dp_shard_size={shards}" + (f" x cp_size={parts}" * (parts > 1))
        yield f"{product} is not num_processes={processes}: change one"
    if machines == 1:
        return
    if (processes or 1) % machines:
        yield f"num_processes={processes} is not a multiple of num_machines={machines}: it counts all machines"
    if rank not in range(machines):
        yield f"machine_rank={rank} must be from 0 to {machines - 1}: pass a different --machine_rank on each machine"
    for name in [name for name, value in ((KEYS[3], ip), (KEYS[4], port)) if not value]:
        yield f"{name} is missing: pass --{name} of the machine with rank 0, the same on all machines"
    if rank == 0 and port and is_port_in_use(port):
        yield f"main_process_port={port} is in use on this machine: choose another one, the same on all machines"


@exit_codes("machine.py")
def main(words: list[str]) -> None:
    timeout = int(words.pop(0)[10:]) if "".join(words[:1]).removeprefix("--timeout=").isdigit() else 600
    given = vars(launch_command_parser().parse_args(words))
    file = given["config_file"] or (default_config_file if os.path.isfile(default_config_file) else os.devnull)
    with as_user_error(f"{file}: ", (OSError, yaml.YAMLError)), open(file) as text:
        config: Any = read_yaml(text.read()) or {}
    mesh = (config.get("parallelism_config") or {}) | {key: given[key] for key in MESH if given[key] != 1}
    machines, processes, rank, ip, port = (config.get(key) if given[key] is None else given[key] for key in KEYS)
    raise_if_any(mistakes(machines or 1, processes, rank, ip, port, *[mesh.get(k, 1) for k in MESH if mesh]))
    end = time.monotonic() + timeout
    while machines and machines > 1:  # in Kubernetes even the main machine's own name resolves only after its start
        try:
            socket.getaddrinfo(ip, port) if rank == 0 else socket.create_connection((ip, port), 5).close()
            break
        except OSError as error:
            if time.monotonic() > end:
                raise RunError(f"waited {timeout} s for the main process at {ip}:{port}: {cause(error)}") from error
            time.sleep(1)
    os.execv(sys.executable, [sys.executable, "-m", "accelerate.commands.launch", *words])


if __name__ == "__main__":
    main(sys.argv[1:])
