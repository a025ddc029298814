"""Safetensors files that the processes write together: each its rows of every tensor, at their place in the file.

Others need more memory: torch.distributed.checkpoint's HuggingFaceStorageWriter copies a process's share twice, and
transformers' save_pretrained gathers the whole model.
"""

import json
from pathlib import Path
from typing import BinaryIO

import torch
from accelerate import Accelerator
from huggingface_hub import split_torch_state_dict_into_shards
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from src.tasks.text.lean import Tensors

DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.int64: "I64", torch.bool: "BOOL"}
"""Names in the format's header: https://github.com/huggingface/safetensors#format"""
LARGEST_FILE = "5GB"


def write_sharded(tensors: Tensors, folder: Path, accelerator: Accelerator) -> None:
    """Write `model.safetensors`, or several files with an index, as `from_pretrained` reads them. Collective.

    Args:
        tensors: the same names on all processes; what is not sharded, the first process writes.
        folder: on a disk that the processes share.
    """
    shapes = {name: torch.empty(tensor.shape, dtype=tensor.dtype, device="meta") for name, tensor in tensors.items()}
    pattern = "model{suffix}.safetensors"
    split = split_torch_state_dict_into_shards(shapes, filename_pattern=pattern, max_shard_size=LARGEST_FILE)
    for file, names in split.filename_to_tensors.items():
        by_size = sorted(names, key=lambda name: (-tensors[name].element_size(), name))  # as safetensors does
        header = _header({name: tensors[name] for name in by_size})
        if accelerator.is_main_process:
            (folder / file).write_bytes(header)
        accelerator.wait_for_everyone()
        start = len(header)
        with (folder / file).open("r+b") as stream:
            for name in by_size:
                _write_part(stream, start, tensors[name].detach(), accelerator.is_main_process)
                start += shapes[name].nbytes
    if accelerator.is_main_process and split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))
    accelerator.wait_for_everyone()


def _header(tensors: Tensors) -> bytes:
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in tensors.items():
        start, end = end, end + tensor.numel() * tensor.element_size()
        entries[name] = {"dtype": DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _write_part(stream: BinaryIO, start: int, tensor: Tensor, is_main: bool) -> None:
    """Write this process's rows of a tensor that starts at this place in the file."""
    if isinstance(tensor, DTensor):
        placed = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
        first_row = placed[1][0]
        start += first_row * (tensor.numel() // tensor.shape[0]) * tensor.element_size()
        tensor = tensor.to_local()
    elif not is_main:
        return
    stream.seek(start)
    stream.write(tensor.cpu().contiguous().flatten().view(torch.uint8).numpy().data)
