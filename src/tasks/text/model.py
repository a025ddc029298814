"""Transformers models: loaded or made from scratch, with or without adapters, in 4 bits or fp32, and exported."""

import copy
import json
import os
import re
import warnings
from abc import abstractmethod
from contextlib import suppress
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar, Self

import psutil
import torch
from accelerate import Accelerator, PartialState
from accelerate.utils import get_int_from_env
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors.torch import save_file
from tokenizers import AddedToken
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoTokenizer,
    BitsAndBytesConfig,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    logging,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.trainer_utils import align_special_tokens

from src.config.errors import UserError, as_user_error, cause, listed, raise_if_any
from src.config.settings import nearest
from src.requirements import missing_requirements
from src.tasks.base import Cards, FillWeights, TaskState, Tensors
from src.tasks.text.chats import ends_of_turn
from src.tasks.text.files import loading
from src.tasks.text.meta_loading import (
    ORIGINAL_HEAD,
    Fit,
    bytes_in_fp32,
    draw_weights,
    empty_pretrained,
    fill_shards,
    fit_of,
    saved_weights,
    start_heads,
    weight_files,
    without_scales,
)
from src.tasks.text.reading import TextTask
from src.tasks.text.settings import DecoderSettings, Lora
from src.tasks.text.tokenizing import byte_tokenizer

logging.set_verbosity_error()  # what is missing or does not fit is judged here
logging.disable_progress_bar()


def add_adapters(
    lora: Lora, model: PreTrainedModel, revision: str | None, base_dtype: str | None = None, **options: Any
) -> Any:
    """Return `model`, of this revision on the Hub, with new adapters. Its own weights are frozen in `base_dtype`,
    except for a classifier's head and what `options`, fields of peft's LoraConfig, ask for. Raise a UserError if
    `lora.target_modules` names layers that do not exist, cannot be adapted, or are tied and to be merged."""
    peft: Any = import_module("peft")  # takes 0.6 s, mostly for bitsandbytes
    layers = [f".{name}" for name, _ in model.named_modules()]
    absent = [name for name in lora.target_modules if not any(layer.endswith(f".{name}") for layer in layers)]
    if absent:
        raise UserError(f"task.lora.target_modules: the model has no layer {' nor '.join(absent)}")
    config = peft.LoraConfig(
        r=lora.r,
        lora_alpha=lora.alpha,
        lora_dropout=lora.dropout,
        target_modules=lora.target_modules or "all-linear",
        exclude_modules=lora.exclude_modules,
        **options,
    )
    if os.path.isdir(source := str(model.name_or_path)):  # the adapters record it, and have to load from any folder
        model.name_or_path = os.path.abspath(source)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # peft still uses a name that transformers has deprecated
        merges = lora.merge or options["task_type"] != "CAUSAL_LM"
        warnings.filterwarnings("error" if merges else "ignore", "Model has `tie_word_embeddings=True`")
        try:
            adapted = peft.get_peft_model(model, config, revision=revision)
        except (ValueError, TypeError, re.error) as error:
            raise UserError(f"task.lora.target_modules, exclude_modules: {cause(error)[:200]}") from error
        except UserWarning as error:
            says = "adapters of a layer that shares its weights with another are added to both when they are merged"
            raise UserError(f"task.lora.target_modules: {says}; leave it out, or set merge=false") from error
    for layer in adapted.modules():
        if any(weight.is_meta and weight.requires_grad for weight in layer.parameters(recurse=False)):
            layer.to_empty(device="cpu", recurse=False)
    for layer in adapted.modules():
        if hasattr(layer, "reset_lora_parameters"):  # again, as peft loses the values on the meta device
            layer.reset_lora_parameters("default", init_lora_weights=True)
    for name, parameter in adapted.named_parameters():
        is_kept = not parameter.is_floating_point() or parameter.requires_grad or ORIGINAL_HEAD in name
        if base_dtype in ("bf16", "nf4") and not is_kept:
            parameter.data = parameter.data.bfloat16()
    return adapted


def require_four_bits(is_sharded: bool) -> None:
    """Raise a UserError if weights can't be kept in 4 bits, because of FSDP or what is installed."""
    setting = "task.lora.base_dtype=nf4"
    raise_if_any(f"{setting}: {line}" for line in missing_requirements("nf4"))
    if is_sharded:
        # FSDP would gather the bytes without the scales that they are read with
        hint = "use accelerate_configs/ddp.yaml or single_gpu.yaml, or task.lora.base_dtype=bf16"
        raise UserError(f"{setting}: FSDP cannot shard 4-bit weights (bitsandbytes issue 1945); {hint}")


DEQUANTIZED = ("fp8", "mxfp4")
"""Formats of quantized weights (`quant_method` in config.json) that transformers dequantizes as it loads them."""


def quantization_of(config: PreTrainedConfig) -> dict[str, Any]:
    """Return what the config says about the quantization of the weights in the files; empty if they are not."""
    return getattr(config, "quantization_config", None) or {}


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
    return config


def four_bits(compute_dtype: torch.dtype) -> BitsAndBytesConfig:
    """Return how weights are quantized for `task.lora.base_dtype=nf4`."""
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=compute_dtype,
    )


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


def add_tokens(tokenizer: PreTrainedTokenizerFast, tokens: list[str]) -> None:
    """Add special tokens to the tokenizer. Raise a UserError if it has one of them already."""
    if known := listed(sorted(tokenizer.get_vocab().keys() & tokens)):
        raise UserError(f"task.new_tokens: {known}: the tokenizer has it already; leave it out")
    tokenizer.add_tokens([AddedToken(token, special=True, normalized=False) for token in tokens])


def add_rows(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, tokens: list[str]) -> dict[str, list[int]]:
    """Add rows for these tokens, which the tokenizer has, to the model's first and last layer; return the rows by
    layer, as peft takes them: for tied layers, only the first.

    A row starts as the mean of the rows of all tokens before, so that its token is neither likely nor unlikely (Hewitt
    2021, https://www.cs.columbia.edu/~johnhew/vocab-expansion.html).
    """
    grow(model, len(tokenizer))
    vocabulary = tokenizer.get_vocab()
    rows = [vocabulary[token] for token in tokens]
    ends: dict[Any, str] = {}
    names = {module: name for name, module in model.named_modules()}
    layers: list[Any] = [model.get_input_embeddings(), model.get_output_embeddings()]
    for layer in layers:
        with torch.no_grad():
            layer.weight[rows] = layer.weight[: min(rows)].mean(0)
        ends.setdefault(layer.weight, names[layer])
    return dict.fromkeys(ends.values(), rows)


def grow(model: PreTrainedModel, num_tokens: int) -> None:
    """Add rows to the model's first and last layer if it has fewer than there are tokens; many models have some to
    spare."""
    embedding: Any = model.get_input_embeddings()
    if embedding.num_embeddings < num_tokens:
        model.resize_token_embeddings(num_tokens, mean_resizing=False)


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
        model, fit = read_model(AutoModelForCausalLM, source, revision, config, compute)
        if fit.absent:
            raise UserError(f"not a language model: it lacks {min(fit.absent)}")
        if has_adapters:
            grow(model, len(AutoTokenizer.from_pretrained(folder, trust_remote_code=False)))
            with suppress(OSError):  # adapters from elsewhere have none
                model.generation_config = GenerationConfig.from_pretrained(folder)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", FutureWarning)  # as in add_adapters
                model = peft.PeftModel.from_pretrained(model, folder)
    return model


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


def check_fit(sequence_length: int, config: PreTrainedConfig, tokenizer: PreTrainedTokenizerFast) -> list[str]:
    """Return what the user should know. Raise a UserError if sequences are longer than the model supports."""
    limit, said = max_length(config, tokenizer), tokenizer.model_max_length
    if sequence_length > limit:
        raise UserError(f"task.sequence_length={sequence_length}: the model sees at most {limit} tokens")
    is_less = sequence_length > said
    return [f"tokenizer_config.json has model_max_length={said}: the model's {limit} are used"] * is_less


def set_ends(model: Any, tokenizer: PreTrainedTokenizerFast) -> None:
    """Give a language model the tokenizer's special tokens, and also end generation where the chat template ends a
    turn: a base model, which stops only at the end of a text, would continue with the user's next turn."""
    align_special_tokens(model, tokenizer)
    generation, marks = model.generation_config, ends_of_turn(tokenizer)
    known = generation.eos_token_id  # one, several or none
    ends = [known] if isinstance(known, int) else known or []
    if marks and (end := tokenizer.get_vocab()[marks[0]]) not in ends:
        generation.eos_token_id = [*ends, end]


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


def save(model: Any, tokenizer: PreTrainedTokenizerFast, weights: Tensors, folder: Path) -> None:
    """Write what `from_pretrained` reads: config, weights (for a PeftModel, the adapters alone) and tokenizer."""
    if model.can_generate():
        set_ends(model, tokenizer)
        model.generation_config.save_pretrained(folder)  # saving adapters leaves it out
    model.save_pretrained(folder, state_dict=weights)
    tokenizer.save_pretrained(folder)


def without_adapters(model: Any) -> Any:
    """Return the model itself; if it has adapters, they stay inside its layers."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def fsdp_blocks(model: PreTrainedModel) -> list[str]:
    """Return the class names in `_no_split_modules` that FSDP can wrap: those that the model has, except for one around
    the input embeddings, which Accelerate wraps separately afterwards."""
    embeddings = model.get_input_embeddings()
    usable = {type(module).__name__ for module in model.modules() if embeddings not in module.modules()}
    return [name for name in model._no_split_modules or [] if name in usable]


SMALLEST_FILE, LARGEST_FILE = 10**8, 5 * 10**9
"""In bytes: a smaller model is written as one file, and no file is larger, unless a single tensor is."""


def write_gathered(tensors: Tensors, folder: Path, accelerator: Accelerator) -> None:
    """Write `model.safetensors`, or several files with an index, as `from_pretrained` reads them, on the first process,
    which gathers one file's tensors at a time. Collective; `tensors` have the same names on all processes."""
    shapes = {name: torch.empty(tensor.shape, dtype=tensor.dtype, device="meta") for name, tensor in tensors.items()}
    # about one file per process: besides its own shard, the first process gathers no more than another one holds
    shard = sum(shape.nbytes for shape in shapes.values()) // accelerator.num_processes
    split = split_torch_state_dict_into_shards(shapes, max_shard_size=min(max(shard, SMALLEST_FILE), LARGEST_FILE))
    for file, names in split.filename_to_tensors.items():
        _write_file(folder / file, {name: tensors[name] for name in names}, accelerator)
    if accelerator.is_main_process and split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        (folder / "model.safetensors.index.json").write_bytes(json.dumps(index, indent=2).encode())


def _write_file(file: Path, tensors: Tensors, accelerator: Accelerator) -> None:
    """Gather these tensors on the first process, and write them there. Collective."""
    # in a function of its own: `whole` would otherwise keep the previous file's last tensor in memory
    gathered = {}
    for name, tensor in tensors.items():
        tensor = tensor.detach().to(accelerator.device)
        whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        if accelerator.is_main_process:
            gathered[name] = whole.cpu()
    if accelerator.is_main_process:
        save_file(gathered, file, {"format": "pt"})


class FineTuning(TextTask):
    """Trains a transformers model on text."""

    auto_class: ClassVar[Any] = AutoModelForCausalLM
    """transformers' class that builds the model from its config."""
    pipeline_tag: ClassVar[str] = "text-generation"
    """The Hub's name for what the model does."""
    core_name: ClassVar[str] = ""
    """Name of the transformers model inside the trained module."""
    has_new_head: ClassVar[bool] = False
    """Whether the layers after the base model, and a pooler, are new if the checkpoint has none that fit. Then adapters
    are not exported on their own: they would not tell the head's labels."""
    _trained_rows: dict[str, list[int]] | None = None
    """Rows of new tokens to train alongside adapters, by layer."""

    @property
    @abstractmethod
    def _config(self) -> PreTrainedConfig:
        """Return the config of the trained model."""

    @property
    @abstractmethod
    def _tokenizer(self) -> PreTrainedTokenizerFast:
        """Return the tokenizer of the trained model."""

    def bind(self, state: TaskState) -> Self:
        # under a mask, gradients of cuDNN's attention may be NaN if length % 128 is 64 (pytorch issue 196678)
        torch.backends.cuda.enable_cudnn_sdp(False)
        has_bf16 = state.dtype == torch.bfloat16 or state.is_check  # --check computes in fp32, whatever a run does
        if self.lora.base_dtype not in (None, "fp32") and not has_bf16:
            setting = f"task.lora.base_dtype={self.lora.base_dtype}"
            raise UserError(f"{setting}: needs --mixed_precision bf16 before train.py")
        return super().bind(state)

    @property
    def base_dtype(self) -> str | None:
        """Return the dtype of the frozen weights under adapters: nf4, bf16 or fp32; None without adapters."""
        if not self.lora.r:
            return None
        if quantization_of(self._config).get("load_in_4bit"):
            return "nf4"
        is_bf16 = self.state.device == "cuda" and self.state.dtype == torch.bfloat16
        return self.lora.base_dtype or ("bf16" if is_bf16 else "fp32")

    def load_model_config(self) -> PreTrainedConfig:
        """Return the model's config. Raise a UserError if there is none, it is damaged, it asks to run code, or the
        weights can't be trained as they are stored."""
        with loading("model", self.model):
            config = load_config(str(self.model), self.revision, self.state.remarks)
        state = self.state
        has_bf16 = state.dtype == torch.bfloat16 or state.is_check or state.is_trained
        can_train = self.lora.r and self.lora.base_dtype in (None, "nf4") and has_bf16
        if quantization_of(config).get("load_in_4bit") and not can_train:
            hint = "train adapters (task.lora.r, base_dtype=nf4) with --mixed_precision bf16, or an unquantized model"
            raise UserError(f"task.model={self.model}: its weights are in 4 bits: {hint}")
        return self.with_dropout(config)

    def with_dropout(self, config: PreTrainedConfig) -> PreTrainedConfig:
        """Return `config` with all its dropout rates set, if the settings ask for it. Leave layerdrop alone: processes
        would skip different layers."""
        for name, value in vars(config).items() if self.dropout is not None else ():
            if isinstance(value, PreTrainedConfig):
                self.with_dropout(value)
            elif re.search("(?<!layer)drop(out|$)", name) and not isinstance(value, bool | str):
                setattr(config, name, self.dropout)
        return config

    def build_model(self) -> Any:
        if self.base_dtype != "nf4":  # these are loaded one tensor at a time
            with loading("model", self.model):
                needed = bytes_in_fp32(self._files) * get_int_from_env(["LOCAL_WORLD_SIZE"], 1)
            if needed > (total := psutil.virtual_memory().total):  # the kernel would kill processes without a word
                says = f"its weights take {needed / 1e9:.1f} GB in all processes; this machine has {total / 1e9:.1f} GB"
                raise UserError(f"task.model={self.model}: {says}: use a smaller model, or fsdp.yaml")
        return self.finish(self.load_model())

    def build_empty_model(self) -> tuple[Any, FillWeights] | None:
        if self.base_dtype == "nf4":
            require_four_bits(is_sharded=True)
        with loading("model", self.model):
            # quantized weights, only `from_pretrained` can read
            is_plain = self._files and not quantization_of(self._config)
            if not is_plain or not (built := empty_pretrained(self.model_from_config, self._files)):
                return None
            model, fit = built
            draw_weights(model, fit.absent)
            with suppress(OSError):  # if there is none, it follows from the config
                if model.can_generate():
                    revision = self.revision or "main"
                    model.generation_config = GenerationConfig.from_pretrained(str(self.model), revision=revision)
        self._accept(model, fit)
        return self.finish(model), self._load_weights

    @cached_property
    def _files(self) -> list[str]:
        """Return the files with the weights, if they are safetensors; the Hub is asked once."""
        return weight_files(self.model, self.revision) if self.model else []

    def finish(self, model: Any) -> Any:
        """Return the module to train, built around transformers' model."""
        model._no_split_modules = fsdp_blocks(model)
        return self.with_adapters(model)

    def _core(self, model: Any) -> Any:
        """Return the transformers model, with its adapters, inside the trained module."""
        return model.get_submodule(self.core_name)

    def with_adapters(self, model: Any) -> Any:
        """Return the model with new adapters, if the settings ask for them."""
        if not self.lora.r:
            return model
        self.state.optimizations.append(f"frozen weights in {self.base_dtype}")
        kind = "SEQ_CLS" if self.has_new_head else "CAUSAL_LM"
        options = {"task_type": kind, "trainable_token_indices": self._trained_rows}
        base_dtype = None if self.state.is_check else self.base_dtype  # it computes in fp32, with 4-bit weights too
        return add_adapters(self.lora, model, self.revision, base_dtype, **options)

    def model_from_config(self) -> Any:
        """Return a new transformers model of this config, fp32, with random weights."""
        config = copy.deepcopy(self._config)  # the model stores its attention there
        return self.auto_class.from_config(config, dtype=torch.float32, trust_remote_code=False)

    def load_model(self) -> Any:
        """Return the transformers model, fp32: pretrained or, without `model`, new. Raise a UserError if it cannot be
        found, is damaged, or is another kind of model."""
        if not self.model:
            with as_user_error(f"task.architecture: {self._config.model_type} rejects it: "):
                return self.model_from_config()
        compute = self.state.dtype if self.base_dtype == "nf4" else None
        with loading("model", self.model):
            model, fit = read_model(self.auto_class, self.model, self.revision, self._config, compute)
        self._accept(model, fit)
        return model

    def _accept(self, model: PreTrainedModel, fit: Fit) -> None:
        """Raise a UserError if the model lacks weights, or if some in the files would be ignored or read as other
        numbers than they stand for. Note what is ignored knowingly."""
        absent = fit.absent
        if self.has_new_head:
            base = f"{model.base_model_prefix}."
            absent = {name for name in absent if name.startswith(base) and "pooler" not in name}
        buffers = {name for name, _ in model.named_buffers()}  # transformers computes them
        mistakes = {
            "are missing or have another shape": absent,
            "are quantized, but nothing says how": without_scales(self._files, bool(quantization_of(self._config))),
            "have no place in it, and would be ignored: name a copy of it without them, or mend its config.json": {
                name for name in fit.unused - fit.absent - buffers if not self._is_replaced(model, name)
            },
        }
        where = f"task.model={self.model}: not a checkpoint of {type(model).__name__}: weights"
        raise_if_any(f"{where} {says}: {listed(sorted(names))}" for says, names in mistakes.items() if names)
        if fit.unused:
            self.state.remarks.append(f"{self.model} has weights that are not used: {listed(sorted(fit.unused))}")
        if model.can_generate() and (dropped := drop_settings_without_effect(model.generation_config)):
            self.state.remarks.append(f"generation settings without effect are left out: {', '.join(dropped)}")

    def _is_replaced(self, model: PreTrainedModel, name: str) -> bool:
        """Return whether a weight in the files belongs to a part that the trained model is meant not to have: the head
        that a classifier replaces, or what a multimodal checkpoint has for other inputs than text."""
        part, *_ = name.removeprefix(f"{model.base_model_prefix}.").split(".")
        has_others = self.has_new_head or self._config.get_text_config() is not self._config
        is_left_out = has_others and not getattr(model.base_model, part, None)
        return is_left_out or name.endswith(".masked_bias")  # a number that GPT-2 masked with

    def _load_weights(self, model: Any, device: torch.device) -> None:
        """Read this process's shards of the weights into a sharded model from `build_empty_model`, with or without
        adapters. Raise a UserError if a file is damaged or missing."""
        own = without_adapters(self._core(model))
        with loading("model", self.model):
            fill_shards(own, self._files, device)
        start_heads(own)
        own.tie_weights()

    def load_tokenizer(self, name: str | None = None) -> PreTrainedTokenizerFast:
        """Return the model's tokenizer, or that of the model `name`. Raise a UserError if there is none, or not one of
        the tokenizers library, which reports the positions of its tokens in the text."""
        setting, source, revision = ("tokenizer", name, None) if name else ("model", self.model, self.revision)
        tokenizer: Any = None
        with loading(setting, source), suppress(ValueError):
            tokenizer = AutoTokenizer.from_pretrained(source, revision=revision, trust_remote_code=False)
        # what transformers makes if there are no files at all has special tokens alone; T5's has a token for spaces
        if not (tokenizer and tokenizer.is_fast and len(tokenizer) > len(tokenizer.all_special_tokens) + 1):
            hint = "a language model may have another one's (task.tokenizer)"
            raise UserError(f"task.{setting}={source}: has no tokenizer that can be read: {hint}")
        return tokenizer

    def export(self, model: Any, weights: Tensors, folder: Path) -> Cards:
        prefix = f"{self.core_name}." if self.core_name else ""
        own = {name.removeprefix(prefix): weight for name, weight in weights.items() if name.startswith(prefix)}
        if not (self.lora.r and self.has_new_head):
            save(self._core(model), self._tokenizer, own, folder)
        whole = self._place_of_whole(folder)
        if whole and self.lora.r:
            loaded = self.load_model()
            if self.base_dtype == "nf4":
                loaded = loaded.dequantize(torch.bfloat16)
            adapted = self.with_adapters(loaded)
            trained = {name: own[name] for name, parameter in adapted.named_parameters() if parameter.requires_grad}
            adapted.load_state_dict(trained, strict=False)
            merged = adapted.merge_and_unload()
            save(merged, self._tokenizer, merged.state_dict(), whole)
        return self._cards()

    def _place_of_whole(self, folder: Path) -> Path | None:
        """Return the folder in an export that holds the whole model, with adapters merged into its weights; None if the
        adapters are exported alone."""
        if not self.lora.r or self.has_new_head:
            return folder
        return folder / "merged" if self.lora.merge else None

    def export_sharded(self, model: Any, folder: Path, accelerator: Accelerator) -> Cards | None:
        core = self._core(model)
        own = without_adapters(core)
        if whole := self._place_of_whole(folder):
            weights = saved_weights(own)
            if weights is None or (self.lora.r and self._trained_rows):
                return None
            if self.lora.r:
                core.merge_adapter()
            if accelerator.is_main_process:
                save(own, self._tokenizer, {}, whole)
            write_gathered(weights, whole, accelerator)
        if self.lora.r and not self.has_new_head:
            adapters = {n: p.full_tensor().cpu() for n, p in core.named_parameters() if p.requires_grad}
            if accelerator.is_main_process:
                save(core, self._tokenizer, adapters, folder)
        return self._cards()

    def _cards(self) -> Cards:
        card: dict[str, Any] = {"library_name": "transformers", "pipeline_tag": self.pipeline_tag}
        if self.model and not Path(self.model).exists():
            card["base_model"] = self.model
        if on_the_hub := [name for name in self.dataset_names if "://" not in name and not Path(name).exists()]:
            card["datasets"] = on_the_hub
        if not self.lora.r or self.has_new_head:
            return {"": card}
        return {"": card | {"library_name": "peft"}} | ({"merged": card} if self.lora.merge else {})


class Decoder(DecoderSettings, FineTuning):
    """Trains a transformers decoder, from scratch or fine-tuned."""

    @cached_property
    def _config(self) -> PreTrainedConfig:
        if self.model:
            config = self.load_model_config()
        else:
            config = self.with_dropout(new_config(self.architecture, self._tokenizer, self.sequence_length))
        if getattr(config.get_text_config(), "output_router_logits", False):
            says = "the auxiliary loss of a mixture of experts would depend on the number of processes"
            raise UserError(f"{config.model_type}: output_router_logits is true, but {says}: set it to false")
        self.state.remarks += check_fit(self.sequence_length, config, self._tokenizer)
        return config

    @cached_property
    def _tokenizer(self) -> PreTrainedTokenizerFast:
        name = self.tokenizer or (None if self.model else "bytes")
        return byte_tokenizer() if name == "bytes" else self.load_tokenizer(name)


def new_config(
    architecture: dict[str, Any], tokenizer: PreTrainedTokenizerFast, sequence_length: int
) -> PreTrainedConfig:
    """Return a config of `architecture`: model_type and any fields of its config. Vocabulary, special tokens and
    positions fit the tokenizer and the sequences, unless it sets them. Raise a UserError if there is no such
    architecture, it has no such fields, or it rejects their values."""
    fields = dict(architecture)
    kind = str(fields.pop("model_type", None))
    if kind not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        close = nearest(kind, list(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES))
        raise UserError(f"task.architecture.model_type={kind}: transformers has no such causal language model{close}")
    default = AutoConfig.for_model(kind)
    known = [name for name in {**default.to_dict(), **default.attribute_map} if not name.startswith("_")]
    unknown = [name for name in fields if name not in known]
    raise_if_any(f"task.architecture.{name}: {kind} has no such field{nearest(name, known)}" for name in unknown)
    fields.setdefault("vocab_size", len(tokenizer))
    positions = default.attribute_map.get("max_position_embeddings", "max_position_embeddings")  # n_positions in GPT-2
    if positions in known and "max_position_embeddings" not in fields:
        fields.setdefault(positions, sequence_length)
    for token in ("bos_token_id", "eos_token_id", "pad_token_id"):
        fields.setdefault(token, getattr(tokenizer, token))
    with as_user_error(f"task.architecture: {kind} rejects it: "):
        return AutoConfig.for_model(kind, **fields)
