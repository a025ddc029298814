"""Safetensors files of a sharded model, which one process writes, a gathered tensor at a time.

Others need more memory: torch.distributed.checkpoint's HuggingFaceStorageWriter copies a process's share twice, and
transformers' save_pretrained gathers the whole model.
"""

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from huggingface_hub import split_torch_state_dict_into_shards
from torch.distributed.tensor import DTensor

from src.tasks.text.lean import Tensors

DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.int64: "I64", torch.bool: "BOOL"}
"""Names in the format's header: https://github.com/huggingface/safetensors#format"""
LARGEST_FILE = "5GB"


def write_sharded(tensors: Tensors, folder: Path, accelerator: Accelerator) -> None:
    """Write `model.safetensors`, or several files with an index, as `from_pretrained` reads them. Collective: `tensors`
    have the same names on all processes."""
    shapes = {name: torch.empty(tensor.shape, dtype=tensor.dtype, device="meta") for name, tensor in tensors.items()}
    pattern = "model{suffix}.safetensors"
    split = split_torch_state_dict_into_shards(shapes, filename_pattern=pattern, max_shard_size=LARGEST_FILE)
    is_main = accelerator.is_main_process
    for file, names in split.filename_to_tensors.items():
        by_size = sorted(names, key=lambda name: -tensors[name].element_size())  # aligned, as safetensors does
        with (folder / file).open("wb") if is_main else nullcontext() as stream:
            if stream:
                stream.write(_header({name: tensors[name] for name in by_size}))
            for name in by_size:
                whole: Any = tensors[name].detach().to(accelerator.device)  # shards may be offloaded
                whole = whole.full_tensor() if isinstance(whole, DTensor) else whole
                if stream:
                    stream.write(whole.cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    if is_main and split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))
    accelerator.wait_for_everyone()


def _header(tensors: Tensors) -> bytes:
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in tensors.items():
        start, end = end, end + tensor.numel() * tensor.element_size()
        entries[name] = {"dtype": DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text
