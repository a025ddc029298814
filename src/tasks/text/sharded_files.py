"""Safetensors files of a sharded model, gathered a file at a time: transformers' save_pretrained gathers all of it."""

import json
from pathlib import Path

import torch
from accelerate import Accelerator
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors.torch import save_file
from torch.distributed.tensor import DTensor

from src.tasks.base import Tensors

SMALLEST_FILE, LARGEST_FILE = 10**8, 5 * 10**9
"""In bytes: a smaller model is one file, and no file is larger, unless one tensor is."""


def write_gathered(tensors: Tensors, folder: Path, accelerator: Accelerator) -> None:
    """Write `model.safetensors`, or several files with an index, as `from_pretrained` reads them; on the first process,
    which gathers a file's tensors. Collective; `tensors` have the same names on all processes."""
    shapes = {name: torch.empty(tensor.shape, dtype=tensor.dtype, device="meta") for name, tensor in tensors.items()}
    # about a file for each process: beside its own share, the first one gathers no more than another
    share = sum(shape.nbytes for shape in shapes.values()) // accelerator.num_processes
    split = split_torch_state_dict_into_shards(shapes, max_shard_size=min(max(share, SMALLEST_FILE), LARGEST_FILE))
    for file, names in split.filename_to_tensors.items():
        _write_file(folder / file, {name: tensors[name] for name in names}, accelerator)
    if accelerator.is_main_process and split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        (folder / "model.safetensors.index.json").write_bytes(json.dumps(index, indent=2).encode())


def _write_file(file: Path, tensors: Tensors, accelerator: Accelerator) -> None:
    """Gather these tensors on the first process, and write them there. Collective."""
    # in a function of its own: `whole` would otherwise keep the last tensor of the file before in memory
    gathered = {}
    for name, tensor in tensors.items():
        tensor = tensor.detach().to(accelerator.device)
        whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        if accelerator.is_main_process:
            gathered[name] = whole.cpu()
    if accelerator.is_main_process:
        save_file(gathered, file, {"format": "pt"})
