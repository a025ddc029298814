"""The random number generators of one process, as JSON: what dropout and a task's own code draw from."""

import base64
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import torch


def random_file(rank: int) -> str:
    """Counted from 1, as DCP counts its shards."""
    return f"rng_{rank + 1:05d}.json"


def absent_random_file(checkpoint: Path, num_processes: int) -> str:
    """What is missing, and what that means; empty: nothing is."""
    absent = [file for rank in range(num_processes) if not (file := checkpoint / random_file(rank)).exists()]
    return f"{absent[0]} is missing: dropout goes on with other random numbers" if absent else ""


def random_state(device: torch.device) -> dict[str, Any]:
    state: dict[str, Any] = {"torch": _encode(torch.get_rng_state()), "python": random.getstate()}
    numpy_state = np.random.get_state(legacy=False)
    state["numpy"] = numpy_state | {"state": {k: np.asarray(v).tolist() for k, v in numpy_state["state"].items()}}
    if device.type != "cpu":
        state[device.type] = _encode(torch.get_device_module(device).get_rng_state())
    return state


def restore_random_state(file: Path, device: torch.device) -> None:
    """Raises: FileNotFoundError."""
    state = json.loads(file.read_text())
    torch.set_rng_state(_decode(state["torch"]))
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    numpy_state = state["numpy"]["state"]
    np.random.set_state(
        state["numpy"] | {"state": numpy_state | {"key": np.asarray(numpy_state["key"], dtype=np.uint32)}}
    )
    if device.type in state:
        torch.get_device_module(device).set_rng_state(_decode(state[device.type]))


def _encode(state: torch.Tensor) -> str:
    return base64.b64encode(state.numpy().tobytes()).decode()


def _decode(text: str) -> torch.Tensor:
    return torch.tensor(list(base64.b64decode(text)), dtype=torch.uint8)
