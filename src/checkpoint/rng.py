"""Save and restore the random number generators of a process, which dropout and a task's own code draw from."""

import random
from pathlib import Path

import numpy as np
import torch

from src.checkpoint.files import Json, read_json, reading


def random_file(rank: int) -> str:
    """Return the name of a process's file. It counts from 1, as DCP's shards do."""
    return f"rng_{rank + 1:05d}.json"


def random_state(device: torch.device) -> Json:
    """Return the state of each generator by name (a GPU's by device type), ready for JSON."""
    name, words, *position = np.random.get_state()
    state: Json = {
        "python": random.getstate(),
        "numpy": [name, np.asarray(words).tolist(), *position],
        "torch": _hex(torch.get_rng_state()),
    }
    if device.type != "cpu":
        state[device.type] = _hex(torch.get_device_module(device).get_rng_state())
    return state


def restore_random_state(file: Path, device: torch.device) -> None:
    """Restore the generators from a JSON file written from `random_state`. Raise a RunError if it is not one."""
    state = read_json(file)
    with reading(file):
        version, words, gauss = state["python"]
        random.setstate((version, tuple(words), gauss and float(gauss)))
        if not 0 <= state["numpy"][2] <= 624:  # the next word: numpy would read behind them
            raise ValueError("numpy has no such word")
        np.random.set_state(state["numpy"])
        torch.set_rng_state(_from_hex(state["torch"]))
        if device.type in state:
            torch.get_device_module(device).set_rng_state(_from_hex(state[device.type]))


def _hex(state: torch.Tensor) -> str:
    return state.numpy().tobytes().hex()


def _from_hex(state: str) -> torch.Tensor:
    return torch.frombuffer(bytearray.fromhex(state), dtype=torch.uint8)
