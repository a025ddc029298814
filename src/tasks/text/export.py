"""What a run exports: files that `from_pretrained` reads, of a model that is whole or sharded."""

import json
import re
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel, PreTrainedTokenizerFast
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, revert_weight_conversion

from src.tasks.base import Tensors
from src.tasks.text.chats import ends_of_turn

ENDS: list[Callable[[PreTrainedTokenizerFast], list[str]]] = [
    # functions that return the tokens that end a turn: the first of them also ends generation
    ends_of_turn,
]


def save(model: Any, tokenizer: PreTrainedTokenizerFast, weights: Tensors, folder: Path) -> None:
    """Write config, weights (for a PeftModel, the adapters alone) and tokenizer."""
    if model.can_generate():
        set_eos_token_ids(model, tokenizer)
        model.generation_config.save_pretrained(folder)  # saving adapters leaves it out
    model.save_pretrained(folder, state_dict=weights)
    tokenizer.save_pretrained(folder)


def set_eos_token_ids(model: Any, tokenizer: PreTrainedTokenizerFast) -> None:
    """Give a language model the tokenizer's special tokens, and also end generation where the chat template ends a
    turn: a base model, which stops only at the end of a text, would continue with the user's next turn."""
    # imported here: it takes a second and 50 MB where peft is installed
    import_module("transformers.trainer_utils").align_special_tokens(model, tokenizer)
    generation = model.generation_config
    known = generation.eos_token_id  # one, several or none
    eos_token_ids = [known] if isinstance(known, int) else known or []
    for find in ENDS:
        for mark in find(tokenizer)[:1]:
            if (end := tokenizer.get_vocab()[mark]) not in eos_token_ids:
                eos_token_ids = generation.eos_token_id = [*eos_token_ids, end]


def drop_settings_without_effect(generation: Any) -> list[str]:
    """Unset what has no effect in a GenerationConfig, such as a temperature without sampling: transformers would not
    save it. Return the names."""
    try:
        generation.validate(strict=True)
    except ValueError as error:
        names = re.findall(r"^- `(\w+)`: ", str(error), re.MULTILINE)
        for name in names:
            setattr(generation, name, None)
        return names
    return []


# ----------------------------------------------------------------------------------------------------------- sharded
def is_only_renamed(model: PreTrainedModel) -> bool:
    """Return whether saving changes nothing but names: for some models, it splits or joins experts."""
    changes = get_model_conversion_mapping(model, add_legacy=False)
    return not any(isinstance(change, WeightConverter) for change in changes)


def save_sharded(model: Any, tokenizer: PreTrainedTokenizerFast, folder: Path, accelerator: Accelerator) -> None:
    """Write a sharded PreTrainedModel that `is_only_renamed`. Collective."""
    weights = {name: weight for name, weight in model.state_dict().items() if name not in model.all_tied_weights_keys}
    if accelerator.is_main_process:
        save(model, tokenizer, {}, folder)
    write_gathered(revert_weight_conversion(model, weights), folder, accelerator)


SMALLEST_FILE, LARGEST_FILE = 10**8, 5 * 10**9
"""In bytes: a smaller model is written as one file, and no file is larger, unless a single tensor is."""


def write_gathered(tensors: Tensors, folder: Path, accelerator: Accelerator) -> None:
    """Write `model.safetensors`, or several files with an index, on the first process, which gathers one file's tensors
    at a time. Collective; `tensors` have the same names on all processes."""
    shapes = {name: torch.empty(tensor.shape, dtype=tensor.dtype, device="meta") for name, tensor in tensors.items()}
    # about one file per process: besides its own shard, the first process gathers no more than another one holds
    shard = sum(shape.nbytes for shape in shapes.values()) // accelerator.num_processes
    split = split_torch_state_dict_into_shards(shapes, max_shard_size=min(max(shard, SMALLEST_FILE), LARGEST_FILE))
    for file, names in split.filename_to_tensors.items():
        gathered = {name: gather(tensors[name], accelerator) for name in names}
        if accelerator.is_main_process:
            save_file(gathered, folder / file, {"format": "pt"})
        del gathered  # before the next file's tensors are gathered
    if accelerator.is_main_process and split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))


def gather(tensor: Tensor, accelerator: Accelerator) -> Any:
    """Return the whole of a tensor, sharded or not, on the CPU; None on all processes but the first. Collective."""
    tensor = tensor.detach().to(accelerator.device)
    whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return whole.cpu() if accelerator.is_main_process else None
