"""Safetensors files that the processes write together: each its rows of every tensor, at their place in the file."""

import json
import os
from pathlib import Path

import torch
from accelerate import Accelerator
from huggingface_hub import split_torch_state_dict_into_shards
from torch import Tensor
from torch.distributed.tensor import DTensor

DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.int64: "I64", torch.bool: "BOOL"}
"""Names in the format's header: https://github.com/huggingface/safetensors#format"""
LARGEST_FILE, LARGEST_WRITE = "5GB", 2**30


def write_sharded(tensors: dict[str, Tensor], folder: Path, accelerator: Accelerator) -> None:
    """Write `model.safetensors`, or several files with an index, as `from_pretrained` reads them. Collective.

    Args:
        tensors: the same names on all processes; what is not sharded, the first process writes.
        folder: on a disk that the processes share.
    """
    split = split_torch_state_dict_into_shards(
        {name: torch.empty(tensor.shape, dtype=tensor.dtype, device="meta") for name, tensor in tensors.items()},
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=LARGEST_FILE,
    )
    for file, names in split.filename_to_tensors.items():
        by_size = sorted(names, key=lambda name: (-tensors[name].element_size(), name))  # aligned, as safetensors does
        header, starts = _layout({name: tensors[name] for name in by_size})
        if accelerator.is_main_process:
            with (folder / file).open("wb") as stream:
                stream.write(header)
                stream.truncate(starts[""])
        accelerator.wait_for_everyone()
        with (folder / file).open("r+b") as stream:
            for name in names:
                _write_part(stream.fileno(), starts[name], tensors[name], accelerator)
    if accelerator.is_main_process and split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
    accelerator.wait_for_everyone()


def _layout(tensors: dict[str, Tensor]) -> tuple[bytes, dict[str, int]]:
    """Return the file's header, and the offset in the file of each tensor by name; of its end under an empty name."""
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offsets, end = {}, 0
    for name, tensor in tensors.items():
        offsets[name], end = end, end + tensor.numel() * tensor.element_size()
        entries[name] = {
            "dtype": DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offsets[name], end],
        }
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    start = 8 + len(text)
    starts = {name: start + offset for name, offset in {**offsets, "": end}.items()}
    return len(text).to_bytes(8, "little") + text, starts


def _write_part(descriptor: int, start: int, tensor: Tensor, accelerator: Accelerator) -> None:
    part = tensor.detach()
    if isinstance(part, DTensor):
        (axis,) = [axis for axis, placement in enumerate(part.placements) if placement.is_shard()]
        index, number = part.device_mesh.get_local_rank(axis), part.device_mesh.size(axis)
        rows = -(-part.shape[0] // number)  # as FSDP splits: the last shares may be smaller
        start += index * rows * (part.numel() // part.shape[0]) * part.element_size()
        part = part.to_local()
    elif not accelerator.is_main_process:
        return
    content = memoryview(part.cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    while content:
        written = os.pwrite(descriptor, content[:LARGEST_WRITE], start)
        content, start = content[written:], start + written
