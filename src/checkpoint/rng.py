"""Save and restore the random number generators of a process, which dropout and a task's own code draw from."""

import random
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
from pydantic import Field, TypeAdapter

from src.checkpoint.files import Json, read_object, reading

PythonState = tuple[int, tuple[int, ...], float | None]
NumpyState = tuple[str, list[int], Annotated[int, Field(ge=0, le=624)], int, float]
"""Name, words, the next word's index, which numpy takes as it is and would read behind the words, and a spare draw."""
PYTHON, NUMPY = TypeAdapter(PythonState), TypeAdapter(NumpyState)


def random_file(rank: int) -> str:
    """Return the name of a process's file. It counts from 1, as DCP's shards do."""
    return f"rng_{rank + 1:05d}.json"


def random_state(device: torch.device) -> dict[str, Any]:
    """Return the state of each generator by name (a GPU's by device type), ready for JSON."""
    name, words, *position = np.random.get_state()
    state: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": [name, np.asarray(words).tolist(), *position],
        "torch": _hex(torch.get_rng_state()),
    }
    if device.type != "cpu":
        state[device.type] = _hex(torch.get_device_module(device).get_rng_state())
    return state


def random_states(file: Path) -> tuple[PythonState, NumpyState, Json]:
    """Return the state of Python's and numpy's generators, and the others' by name, in hexadecimal. Raise a DamageError
    if the generators would not take them."""
    with reading(file):
        states = read_object(file)
        python, numpy = PYTHON.validate_python(states["python"]), NUMPY.validate_python(states["numpy"])
        random.Random().setstate(python)
        np.random.RandomState().set_state(numpy)
        torch.Generator().set_state(_from_hex(states["torch"]))
    return python, numpy, states


def restore_random_state(file: Path, device: torch.device) -> None:
    """Restore the generators from a JSON file written from `random_state`."""
    python, numpy, others = random_states(file)
    random.setstate(python)
    np.random.set_state(numpy)
    torch.set_rng_state(_from_hex(others["torch"]))
    if device.type in others:
        with reading(file):
            torch.get_device_module(device).set_rng_state(_from_hex(others[device.type]))


def _hex(state: torch.Tensor) -> str:
    return state.numpy().tobytes().hex()


def _from_hex(state: str) -> torch.Tensor:
    return torch.frombuffer(bytearray.fromhex(state), dtype=torch.uint8)
