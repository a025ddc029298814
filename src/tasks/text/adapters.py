"""What adapts a model: LoRA, frozen weights in 4 bits, and embeddings of new tokens."""

import os
import re
import warnings
from copy import deepcopy
from importlib import import_module
from textwrap import shorten
from typing import Any

import torch
from tokenizers import AddedToken
from transformers import BitsAndBytesConfig, PreTrainedModel, PreTrainedTokenizerFast

from src.config.errors import UserError, cause, listed, raise_if_any
from src.config.settings import flatten
from src.requirements import missing_requirements
from src.tasks.text.settings import Lora

warnings.filterwarnings("ignore", "`is_gradient_checkpointing`", FutureWarning)  # peft 0.21 still uses this name


def add_adapters(
    lora: Lora,
    model: Any,
    revision: str | None = None,
    base_dtype: str | None = None,
    has_new_head: bool = False,
    trained_rows: dict[str, list[int]] | None = None,
) -> Any:
    """Return a PreTrainedModel, of this revision on the Hub, with new adapters. Its own weights are frozen in
    `base_dtype`, except for a classifier's head, which gets no adapters, and `trained_rows`, rows of layers by names.
    Raise a UserError if `lora.target_modules` names layers that do not exist, cannot be adapted, or are tied and to be
    merged, or if the head would be quantized."""
    peft: Any = import_module("peft")  # takes 0.6 s, mostly for bitsandbytes
    # the layers after the base model, and a pooler, may be new: they are trained as they are
    new = rf"(?!{model.base_model_prefix}\.).*|.*\bpooler\b.*" if has_new_head else None
    is_new = re.compile(new or "(?!)").fullmatch
    if any(hasattr(layer, "quant_state") for name, layer in model.named_modules() if is_new(name)):
        says = f"bitsandbytes would quantize the head of {type(model).__name__}, which is trained"
        raise UserError(f"task.lora.base_dtype=nf4: {says}: use task.lora.base_dtype=bf16")
    name = model.name_or_path
    # settings keep the parts of a name with dots as mappings within mappings
    patterns = {option: dict(flatten(lora.options.get(option, {}))) for option in ("rank_pattern", "alpha_pattern")}
    trained = [weight for name, weight in model.named_parameters() if is_new(name)]
    with warnings.catch_warnings():
        # that some keys match nothing is an error below; and no adapters are converted
        warnings.filterwarnings("ignore", "The following|Using Rank-Stabilized LoRA with rank_pattern")
        merges = lora.merge or has_new_head
        warnings.filterwarnings("error" if merges else "ignore", "Model has `tie_word_embeddings=True`")
        try:
            config = peft.LoraConfig(
                # the adapters have to load from any folder
                base_model_name_or_path=os.path.abspath(name) if os.path.isdir(name) else name,
                revision=revision,
                task_type="SEQ_CLS" if has_new_head else "CAUSAL_LM",
                r=lora.r,
                lora_alpha=lora.alpha,
                lora_dropout=lora.dropout,
                target_modules=lora.target_modules or "all-linear",
                exclude_modules="|".join(filter(None, [lora.exclude_modules, new])) or None,
                trainable_token_indices=trained_rows,
                **deepcopy(lora.options | patterns),  # peft adds to them
            )
            adapted = peft.PeftModel(model, config)
        except UserWarning as error:
            says = "adapters of a layer that shares its weights with another are added to both when they are merged"
            raise UserError(f"task.lora.target_modules: {says}; leave it out, or set merge=false") from error
        except Exception as error:  # of any kind: peft checks few of its settings
            raise UserError(
                f"task.lora.target_modules, exclude_modules, options: {shorten(cause(error), 200)}"
            ) from error
    parts = patterns | {
        "layers_to_transform": [rf"{block}\..*" for block in lora.options.get("layers_to_transform", [])],
        "target_modules": lora.target_modules,
    }
    raise_if_any(
        f"task.lora: {option}: {part} matches no layer with adapters, or none but an earlier one's"
        for option, keys in parts.items()
        for part in keys
        if part not in {peft.utils.other.get_pattern_key(keys, layer) for layer in adapted.targeted_module_names}
    )
    for layer in adapted.modules():
        if any(weight.is_meta and weight.requires_grad for weight in layer.parameters(recurse=False)):
            layer.to_empty(device="cpu", recurse=False)
    for layer in adapted.modules():
        # again, as peft loses the values on the meta device
        if hasattr(layer, "reset_lora_parameters") and "init_lora_weights" not in lora.options:
            layer.reset_lora_parameters("default", init_lora_weights=True)
    for weight in trained:
        weight.requires_grad = True
    for weight in adapted.parameters() if base_dtype in ("bf16", "nf4") else ():
        if weight.is_floating_point() and not weight.requires_grad:
            weight.data = weight.data.bfloat16()
    return adapted


def base_model(model: Any) -> Any:
    """Return the model itself; if it has adapters, they stay inside its layers."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


# ---------------------------------------------------------------------------------------------------------- four bits
def require_four_bits(is_sharded: bool) -> None:
    """Raise a UserError if weights can't be kept in 4 bits, because of FSDP or what is installed."""
    setting = "task.lora.base_dtype=nf4"
    raise_if_any(f"{setting}: {line}" for line in missing_requirements("nf4"))
    if is_sharded:
        # FSDP would gather the bytes without the scales that they are read with
        hint = "use accelerate_configs/ddp.yaml or single_gpu.yaml, or task.lora.base_dtype=bf16"
        raise UserError(f"{setting}: FSDP cannot shard 4-bit weights (bitsandbytes issue 1945); {hint}")


def four_bits(compute_dtype: torch.dtype) -> BitsAndBytesConfig:
    """Return how weights are quantized for `task.lora.base_dtype=nf4`."""
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=compute_dtype,
    )


# --------------------------------------------------------------------------------------------------------- new tokens
def add_tokens(tokenizer: PreTrainedTokenizerFast, tokens: list[str]) -> None:
    """Add special tokens to the tokenizer. Raise a UserError if it has one of them already."""
    if known := listed(sorted(tokenizer.get_vocab().keys() & tokens)):
        raise UserError(f"task.new_tokens: {known}: the tokenizer has it already; leave it out")
    tokenizer.add_tokens([AddedToken(token, special=True, normalized=False) for token in tokens])


def add_embeddings(model: Any, tokenizer: Any, tokens: list[str]) -> dict[str, list[int]]:
    """Add rows for these tokens, which the tokenizer has, to the model's first and last layer; return the rows by
    layer.

    A row starts as the mean of the rows of all tokens before, so that its token is neither likely nor unlikely (Hewitt
    2021, https://www.cs.columbia.edu/~johnhew/vocab-expansion.html).
    """
    resize_embeddings(model, len(tokenizer))
    rows = tokenizer.convert_tokens_to_ids(tokens)
    layers: list[Any] = [model.get_input_embeddings(), model.get_output_embeddings()]
    for weight in {layer.weight for layer in layers}:
        with torch.no_grad():
            weight[rows] = weight[: min(rows)].mean(0)
    return {name: rows for name, layer in model.named_modules() if layer in layers}


def resize_embeddings(model: PreTrainedModel, num_tokens: int) -> None:
    """Add rows to the model's first and last layer if it has fewer than there are tokens; many models have some to
    spare."""
    embedding: Any = model.get_input_embeddings()
    if embedding.num_embeddings < num_tokens:
        model.resize_token_embeddings(num_tokens, mean_resizing=False)
