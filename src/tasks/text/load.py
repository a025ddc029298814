"""What loads: a model's config, tokenizer and weights, whole or, for FSDP, shard by shard."""

import os
import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import PartialState, init_empty_weights
from accelerate.utils import compare_versions
from safetensors import safe_open
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    logging,
)
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import convert_and_load_state_dict_in_model
from transformers.initialization import no_init_weights
from transformers.modeling_utils import LoadStateDictConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils import cached_file
from transformers.utils.hub import get_checkpoint_shard_files

from src.config.errors import UserError, as_user_error, raise_if_any
from src.config.settings import nearest
from src.tasks.text.adapters import four_bits, require_four_bits, resize_embeddings
from src.tasks.text.hub import loading

logging.set_verbosity_error()  # what is missing or does not fit is judged here
logging.disable_progress_bar()

DEQUANTIZED = ("fp8", "mxfp4")
"""Formats of quantized weights (`quant_method` in config.json) that transformers dequantizes as it loads them."""


# ------------------------------------------------------------------------------------------------ config and tokenizer
def load_config(source: str, revision: str | None, remarks: list[str]) -> PreTrainedConfig:
    """Return a model's config, changed so that `from_pretrained` dequantizes weights. Attention is chosen elsewhere:
    add to `remarks` that the config asks for one. Raise a ValueError if the weights are quantized in a way that can't
    be read here."""
    config: Any = AutoConfig.from_pretrained(source, revision=revision, trust_remote_code=False)
    if asked := config._attn_implementation:
        remarks.append(f"{source}: its config.json asks for {asked} attention, which is ignored")
        config._attn_implementation = None
    quantization = quantization_of(config)
    method = quantization.get("quant_method")
    if method in DEQUANTIZED:
        quantization["dequantize"] = True
    elif quantization and not quantization.get("load_in_4bit"):
        raise ValueError(f"its weights are quantized ({method}): use the model that they were quantized from")
    if quantization and compare_versions("transformers", "<", "5.24"):  # exports had another loss
        raise ValueError("its weights are quantized, which needs transformers 5.24: install that")
    return config


def quantization_of(config: PreTrainedConfig) -> dict[str, Any]:
    """Return what the config says about the quantization of the weights in the files; empty if they are not."""
    return getattr(config, "quantization_config", None) or {}


def new_config(
    architecture: dict[str, Any], tokenizer: PreTrainedTokenizerFast, sequence_length: int
) -> PreTrainedConfig:
    """Return a config of `architecture`: model_type and any fields of its config. Vocabulary, special tokens and
    positions fit the tokenizer and the sequences, unless it sets them. Raise a UserError if there is no such
    architecture, it has no such fields, or it rejects their values."""
    fields = dict(architecture)
    kind = str(fields.pop("model_type", None))
    if kind not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        raise UserError(
            f"task.architecture.model_type={kind}: transformers has no such causal language model"
            f"{nearest(kind, list(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES))}"
        )
    default = AutoConfig.for_model(kind)
    other_names = default.attribute_map  # in GPT-2, max_position_embeddings is another name of n_positions
    known = [name for name in (*default.to_dict(), *other_names) if not name.startswith("_")]
    raise_if_any(
        f"task.architecture.{name}: {kind} has no such field{nearest(name, known)}"
        for name in fields
        if name not in known
    )
    fitting = {name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    fitting["vocab_size"] = len(tokenizer)
    if "max_position_embeddings" in known:
        fitting["max_position_embeddings"] = sequence_length
    with as_user_error(f"task.architecture: {kind} rejects it: "):
        given = {other_names.get(name, name): value for name, value in (fitting | fields).items()}
        return AutoConfig.for_model(kind, **given)


def with_dropout(config: PreTrainedConfig, rate: float | None) -> PreTrainedConfig:
    """Return a config with all its dropout rates set to this one, if there is one. Leave layerdrop alone: processes
    would skip different layers."""
    for name, value in vars(config).items() if rate is not None else ():
        if isinstance(value, PreTrainedConfig):
            with_dropout(value, rate)
        elif re.search("(?<!layer)drop(out|$)", name) and not isinstance(value, bool | str):
            setattr(config, name, rate)
    return config


def load_tokenizer(setting: str, source: str | None, revision: str | None = None) -> PreTrainedTokenizerFast:
    """Return the tokenizer of the model that `task.<setting>` names. Raise a UserError if there is none, or not one of
    the tokenizers library, which reports the positions of its tokens in the text."""
    tokenizer: Any = None
    with loading(setting, source), suppress(ValueError):
        tokenizer = AutoTokenizer.from_pretrained(source, revision=revision, trust_remote_code=False)
    # what transformers makes if there are no files at all has special tokens alone; T5's has a token for spaces
    if not (tokenizer and tokenizer.is_fast and len(tokenizer) > len(tokenizer.all_special_tokens) + 1):
        raise UserError(
            f"task.{setting}={source}: has no tokenizer that can be read: a language model may have another one's "
            "(task.tokenizer)"
        )
    return tokenizer


def max_length(config: PreTrainedConfig, tokenizer: PreTrainedTokenizerFast) -> int:
    """Return the maximum number of tokens that the model sees: its positions or, if nothing limits these, what the
    tokenizer says, 10^30 if it says nothing."""
    text = config.get_text_config()
    positions = getattr(text, "max_position_embeddings", None) or 0
    if positions <= 0:
        return tokenizer.model_max_length
    if not getattr(text, "rope_parameters", None):  # positions are learnt
        with torch.device("meta"), suppress(ValueError):  # AutoModel does not know a few decoders
            for name, layer in AutoModel.from_config(text, trust_remote_code=False).named_modules():
                if "position" in name and isinstance(layer, nn.Embedding) and layer.padding_idx is not None:
                    positions -= layer.padding_idx + 1  # RoBERTa's first token has the position after padding's
    return positions


def check_length(
    sequence_length: int, config: PreTrainedConfig, tokenizer: PreTrainedTokenizerFast, remarks: list[str]
) -> None:
    """Raise a UserError if sequences are longer than the model supports. Add to `remarks` if they are longer than the
    tokenizer's own limit, which is not used."""
    limit, said = max_length(config, tokenizer), tokenizer.model_max_length
    if sequence_length > limit:
        raise UserError(f"task.sequence_length={sequence_length}: the model sees at most {limit} tokens")
    if sequence_length > said:
        remarks.append(f"tokenizer_config.json has model_max_length={said}: the model's {limit} are used")


def require_known(ids: np.ndarray, tokenizer: PreTrainedTokenizerFast, num_known: int) -> None:
    """Raise a UserError if a model that knows so many tokens does not know one of these, shape (tokens,), or the one
    for padding."""
    largest = int(max(ids.max(initial=0), tokenizer.pad_token_id or 0))
    if largest >= num_known:
        raise UserError(
            f"the token {tokenizer.convert_ids_to_tokens(largest)} has the id {largest}, but the model knows "
            f"{num_known} tokens (task.tokenizer, task.architecture.vocab_size)"
        )


# --------------------------------------------------------------------------------------------------- the whole model
Fit = tuple[set[str], set[str]]
"""How the weights in a checkpoint's files fit a model, as names: those that the files lack or have in another shape;
and those in the files that the model has no place for, except for those that transformers ignores by their names."""


def fit_of(found: dict[str, Any]) -> Fit:
    """Return how the files fit, from what `from_pretrained` returns with `output_loading_info`."""
    misshapen = {name for name, *_ in found["mismatched_keys"]}
    return found["missing_keys"] | misshapen, found["unexpected_keys"] | misshapen


def read_model(
    auto_class: Any, source: str, revision: str | None, config: PreTrainedConfig, four_bit_compute: torch.dtype | None
) -> tuple[Any, Fit]:
    """Return the model with the weights of its files, fp32, and how the files fit it. With `four_bit_compute`, linear
    layers, except for the output, are in 4 bits and compute in this dtype. Tensors are quantized one at a time, on the
    device that will hold them, unless they are in 4 bits in the files: on a CPU, 8 billion weights take minutes."""
    options: dict[str, Any] = {}
    if four_bit_compute:
        require_four_bits(is_sharded=False)
        options["device_map"] = {"": PartialState().device}
        stored = quantization_of(config)
        if stored.get("load_in_4bit"):
            stored["bnb_4bit_compute_dtype"] = four_bit_compute
        else:
            options["quantization_config"] = four_bits(four_bit_compute)
    model, found = auto_class.from_pretrained(
        source,
        revision=revision,
        config=config,
        dtype=torch.float32,
        trust_remote_code=False,
        ignore_mismatched_sizes=True,
        output_loading_info=True,
        **options,
    )
    # on a CPU with AVX512-BF16, bitsandbytes 0.50 would reorder the weights in an evaluation, for kernels without a
    # backward pass, and gradients would stop there from then on
    for layer in model.modules():
        if hasattr(layer, "support_avx512bf16_for_cpu"):
            layer.support_avx512bf16_for_cpu = False
    head = model.get_output_embeddings()
    if head and head.weight is not model.get_input_embeddings().weight:
        model.config.tie_word_embeddings = False  # whatever it said: the files have both
    return model, fit_of(found)


def load_exported(folder: Path, base_dtype: str | None = None) -> Any:
    """Return the language model that a run exported, fp32, with its adapters if it has any; `base_dtype` is that of
    frozen weights. Raise a UserError if there is none."""
    source, revision, has_adapters = str(folder), None, (folder / "adapter_config.json").is_file()
    with as_user_error("not a language model: "):
        if has_adapters:
            peft: Any = import_module("peft")
            adapted = peft.PeftConfig.from_pretrained(source)
            source, revision = adapted.base_model_name_or_path, adapted.revision
        config = load_config(source, revision, [])
        compute = torch.bfloat16 if base_dtype == "nf4" else None
        model, (absent, _) = read_model(AutoModelForCausalLM, source, revision, config, compute)
        if absent:
            raise ValueError(f"it lacks {min(absent)}")
        if has_adapters:
            resize_embeddings(model, len(AutoTokenizer.from_pretrained(folder, trust_remote_code=False)))
            read_generation_config(model, str(folder))
            model = peft.PeftModel.from_pretrained(model, folder)
    return model


def read_generation_config(model: Any, source: str, revision: str | None = None) -> None:
    """Give a model the settings of generation that are in these files; without any, it keeps its own."""
    with suppress(OSError):
        model.generation_config = GenerationConfig.from_pretrained(source, revision=revision or "main")


# ------------------------------------------------------------------------------------------ the files with the weights
@dataclass
class StoredTensor:
    """Reads a tensor, opening its file each time: what is read from a file that stays open counts as this process's
    memory."""

    file: str
    name: str
    shape: list[int]
    dtype: str
    """As safetensors calls it."""

    def get_shape(self) -> list[int]:
        """Return the shape, as transformers asks for it."""
        return self.shape

    def __getitem__(self, index: Any) -> Tensor:
        with safe_open(self.file, framework="pt") as opened:
            return opened.get_slice(self.name)[index].clone()  # a view would keep the whole tensor in memory


def stored_tensors(files: list[str]) -> dict[str, StoredTensor]:
    """Return the tensors in safetensors files by name. Only the headers are read."""
    stored = {}
    for file in files:
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118  # it is not a dict
                part = opened.get_slice(name)
                stored[name] = StoredTensor(file, name, part.get_shape(), part.get_dtype())
    return stored


def weight_files(source: str, revision: str | None) -> list[str]:
    """Return the safetensors files of a model, local or on the Hub; empty if it has none."""
    optional: dict[str, Any] = {"revision": revision, "_raise_exceptions_for_missing_entries": False}
    if whole := cached_file(source, "model.safetensors", **optional):
        return [whole]
    index = cached_file(source, "model.safetensors.index.json", **optional)
    return get_checkpoint_shard_files(source, index, revision=revision)[0] if index else []


def without_scales(stored: dict[str, StoredTensor], reads_scales: bool) -> set[str]:
    """Return the names of weights in 8 bits whose scale the files lack or, without `reads_scales`, nobody reads."""
    small = {name for name, tensor in stored.items() if tensor.dtype.startswith(("F8", "I8"))}
    scaled = {name.rpartition(".")[0] for name in stored if reads_scales and "scale" in name}
    return {name for name in small if name.rpartition(".")[0] not in scaled}


# ------------------------------------------------------------------------------------------------------ shard by shard
def fsdp_blocks(model: PreTrainedModel) -> list[str]:
    """Return the class names in `_no_split_modules` that FSDP can wrap: those that the model has, except for one around
    the input embeddings, which Accelerate wraps separately afterwards."""
    embeddings = model.get_input_embeddings()
    usable = {type(module).__name__ for module in model.modules() if embeddings not in module.modules()}
    return [name for name in model._no_split_modules or [] if name in usable]


def empty_pretrained(
    build: Callable[[], PreTrainedModel], stored: dict[str, StoredTensor]
) -> tuple[PreTrainedModel, Fit] | None:
    """Return the model that `build` makes, for FSDP to shard, and how the files fit it. Parameters are on the meta
    device; but buffers have their values, as do the few weights that no file has, such as a classifier's new head,
    which are drawn as `from_pretrained` would. None if the files have two weights that the config ties:
    `from_pretrained` compares their values."""
    with no_init_weights(), init_empty_weights(include_buffers=False):
        model = build()
    model.tie_weights()
    shapes = {name: torch.empty(tensor.shape, device="meta") for name, tensor in stored.items()}
    found = _convert(model, shapes, torch.device("meta"))
    model.mark_tied_weights_as_initialized(found)
    model._adjust_missing_and_unexpected_keys(found)
    absent, unused = fit_of(found.to_dict())
    for target, source in model.all_tied_weights_keys.items():
        if not absent & {target, source}:
            return None
        if source not in absent:
            absent.remove(target)
    for name in absent:
        _set(model, name, torch.empty_like(model.get_parameter(name), device="cpu"))
    model.tie_weights()
    model.initialize_weights()
    return model, (absent, unused)


def fill_shards(model: Any, stored: dict[str, StoredTensor], device: torch.device) -> None:
    """Read this process's shards of the weights into a sharded model without weights, with or without adapters, as
    transformers would: with its renames and conversions, in the model's dtype."""
    # in threads, transformers would read all experts before it joins the first ones: twice the share
    os.environ.setdefault("HF_DEACTIVATE_ASYNC_LOAD", "1")
    if device.type == "cpu":
        device = torch.device("cpu")  # Accelerate's is cpu:0, to which torch would copy each weight once more

    def moved(_module: nn.Module, _name: str, parameter: nn.Parameter) -> Any:
        # transformers moves offloaded shards to the mesh's device
        return nn.Parameter(parameter.detach().to(device), parameter.requires_grad)

    # while they are filled, layers take the place of their adapters, so that weights have their original names
    adapted = {name: layer for name, layer in model.named_modules() if hasattr(layer, "base_layer")}
    for name, layer in reversed(adapted.items()):  # experts have one adapter inside another
        model.set_submodule(name, layer.base_layer)
    with register_module_parameter_registration_hook(moved):
        _convert(model, stored, device)
    for name, layer in adapted.items():
        model.set_submodule(name, layer)
    # with fewer rows, such as experts, than processes, some processes have none: transformers reads nothing for them
    for name, parameter in [*model.named_parameters()]:
        if parameter.is_meta and parameter.to_local().numel() == 0:
            _set(model, name, torch.empty_like(parameter, device=device))


def _convert(model: PreTrainedModel, weights: dict[str, Any], device: torch.device) -> Any:
    renames: Any = get_model_conversion_mapping(model)
    how = LoadStateDictConfig(device_map={"": device}, weight_mapping=renames)
    return convert_and_load_state_dict_in_model(model, weights, how)[0]


def _set(model: nn.Module, name: str, values: Tensor) -> None:
    model.load_state_dict({name: values}, strict=False, assign=True)
