"""Trains under a strategy, killing all processes at random moments and starting them again, until the run is finished.

python tests/faults/kill_often.py FOLDER STRATEGY PROCESSES KILLS SEED

Everything is imported once, and the processes are forked from here: what a launcher would start, without the seconds
that each start costs. In turn, a kill comes at any moment of the start, soon after a step, and when a save has just
begun. Prints {"kills": …, "in_saves": …}: how many there were, and how many left an unpublished folder behind.
"""

import contextlib
import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

sys.path.insert(0, str(Path(__file__).parents[2]))

import train

ARGUMENTS = [
    "--task.source=digits", "--wandb.mode=disabled", "--global_batch_size=16", "--max_steps=500", "--log_every=1",
    "--save_every=4", "--eval_every=50",
]  # fmt: skip


def start(folder: Path, strategy: str, processes: int) -> list[int]:
    """Returns: the process ids, by rank."""
    port = random.SystemRandom().randrange(20_000, 30_000)  # below those that the system gives to clients
    sys.argv = ["train.py", f"--output_dir={folder}", *ARGUMENTS]
    sys.stdout.flush()
    pids = []
    for rank in range(processes):
        if pid := os.fork():
            pids.append(pid)
            continue
        if processes > 1:
            os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            os.environ |= {"WORLD_SIZE": str(processes), "LOCAL_WORLD_SIZE": str(processes)}
            os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        if strategy == "fsdp":
            os.environ |= {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "FSDP_RESHARD_AFTER_FORWARD": "true"}
            os.environ |= {"FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP"}
        log = os.open(folder.parent / "kill_often.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(log, 1)
        os.dup2(log, 2)
        try:
            train.main()
        except SystemExit as end:
            os._exit(int(bool(end.code)))
        except BaseException:
            sys.excepthook(*sys.exc_info())
            os._exit(1)
        os._exit(0)
    return pids


def main(folder: Path, strategy: str, processes: int, kills: int, seed: int) -> None:
    draw = random.Random(seed)
    record = folder / "metrics.jsonl"
    in_saves = 0
    started = 1.0  # seconds from a start to its first step, by the last one that got there
    for kill in range(kills):
        left, recorded = unfinished(folder), modified(record)
        began = time.monotonic()
        pids = start(folder, strategy, processes)
        match kill % 3:
            case 0:
                time.sleep(draw.uniform(0, started))
            case 1:
                wait_until(pids, lambda: modified(record) > recorded)  # noqa: B023
                started = time.monotonic() - began
                time.sleep(draw.uniform(0, 0.15))
            case 2:
                wait_until(pids, lambda: unfinished(folder) - left)  # noqa: B023
                time.sleep(draw.uniform(0, 0.02))
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        if any(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) != -signal.SIGKILL for pid in pids):
            raise SystemExit(f"ended by itself before kill {kill}")
        in_saves += bool(unfinished(folder) - left)
    codes = [os.waitpid(pid, 0)[1] for pid in start(folder, strategy, processes)]
    if any(codes):
        raise SystemExit("the last start failed")
    print(json.dumps({"kills": kills, "in_saves": in_saves}))


def modified(file: Path) -> int:
    return file.stat().st_mtime_ns if file.exists() else 0


def unfinished(folder: Path) -> set[tuple[str, int]]:
    """The unpublished folders, by name and inode."""
    found = set()
    for path in folder.glob("checkpoints/tmp_*"):
        with contextlib.suppress(FileNotFoundError):
            found.add((path.name, path.stat().st_ino))
    return found


def wait_until(pids: list[int], condition: Callable[[], Any]) -> None:
    end = time.monotonic() + 60
    while not condition():
        if time.monotonic() > end or not all(psutil.pid_exists(pid) for pid in pids):
            raise SystemExit("waited in vain")
        time.sleep(0.001)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], *map(int, sys.argv[3:]))
