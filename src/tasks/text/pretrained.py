"""Models and tokenizers of transformers, from the Hub or a local folder: loaded, checked and saved again."""

import json
import re
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
from accelerate import Accelerator
from peft import PeftModel
from pydantic import Field, PrivateAttr
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    logging,
)

from src.config.errors import UserError, explained
from src.config.settings import Settings
from src.tasks.text.hub import loading
from src.tasks.text.lean import NewWeights, empty_pretrained, fill, load, saved_weights, weight_files
from src.tasks.text.lora import Lora
from src.tasks.text.sharded_files import write_sharded

NO_NF4 = (
    "task.lora.base_dtype=nf4: FSDP cannot shard weights of 4 bits yet, it loses what bitsandbytes needs to read them "
    "(https://github.com/huggingface/accelerate/issues/3874); use bf16"
)


class ModelSource(Settings):
    """Settings that tasks on transformers share, and the loading of their model and tokenizer."""

    model: str | None = None
    """A model on the Hub, a local folder, or wandb:entity/project/name:alias, to start from. Weights are loaded as
    fp32; code in it is never run."""
    revision: str | None = None
    """Branch, tag or commit of a model on the Hub."""
    dropout: Annotated[float, Field(ge=0, lt=1)] | None = None
    """Sets all of the model's dropout rates; null: as its config has them."""
    lora: Lora = Lora()
    """Low-rank adapters."""
    _new_weights: dict[str, Tensor] = PrivateAttr(default_factory=dict)

    def model_errors(self) -> Iterator[str]:
        """Yield what is wrong with the settings, one line each, found without loading anything."""
        if not self.lora.r and self.lora != Lora():
            yield "task.lora.r is not set: without it the other settings of task.lora do nothing"
        if self.lora.base_dtype == "nf4":
            yield NO_NF4
        if not self.model:
            return
        path = Path(self.model)
        if (path / "adapter_config.json").is_file():
            yield f"task.model={path}: has adapters only; use the merged model (task.lora.merge=true exports it)"
        elif path.is_dir() and not (path / "config.json").is_file():
            yield f"task.model={path}: the folder has no config.json, so it is not a transformers model"
        elif not path.is_dir() and not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", self.model):
            yield f"task.model={path}: no such folder"

    def prepare_for(self, device: str, dtype: torch.dtype) -> list[str]:
        """Have no attention computed by cuDNN: under a mask its gradients may be NaN, if length % 128 is 64 (pytorch
        issue 196678). Choose the type of frozen weights."""
        torch.backends.cuda.enable_cudnn_sdp(False)
        is_bf16 = dtype == torch.bfloat16
        if self.lora.r and self.lora.base_dtype is None:
            self.lora.base_dtype = "bf16" if device == "cuda" and is_bf16 else "fp32"
        if self.lora.base_dtype == "bf16" and not is_bf16:
            raise UserError("task.lora.base_dtype=bf16: needs --mixed_precision bf16 before train.py")
        return [f"frozen weights in {self.lora.base_dtype}"] if self.lora.r else []

    def load_config(self) -> PreTrainedConfig:
        """Return the model's config. Raise a UserError if there is none, it is damaged, or it asks to run code."""
        with loading("model", self.model):
            config = AutoConfig.from_pretrained(str(self.model), revision=self.revision, trust_remote_code=False)
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

    def load_model(self, auto_class: Any, config: PreTrainedConfig, new_head: bool = False) -> PreTrainedModel:
        """Return the model with its weights, fp32. With `new_head`, the layers after the base model, and a pooler, are
        initialised if the checkpoint has none, or some of another shape. Raise a UserError if it cannot be found, is
        damaged, or is another kind of model."""
        logging.set_verbosity_error()  # what is missing is judged below
        logging.disable_progress_bar()
        with loading("model", self.model):
            model, loaded = auto_class.from_pretrained(
                self.model,
                revision=self.revision,
                config=config,
                dtype=torch.float32,
                trust_remote_code=False,
                ignore_mismatched_sizes=True,
                output_loading_info=True,
            )
        absent = sorted({*loaded["missing_keys"], *(key for key, *_ in loaded["mismatched_keys"])})
        self._require_all(model, absent, new_head)
        return model

    def empty_model(
        self, auto_class: Any, config: PreTrainedConfig, weights: NewWeights, new_head: bool = False
    ) -> PreTrainedModel | None:
        """Return the model of `load_model`, its parameters on the meta device, the new ones drawn into `weights`; None
        if it has no safetensors files."""
        logging.disable_progress_bar()
        with loading("model", self.model):
            source = str(self.model)
            files = weight_files(source, self.revision)
            if not files:
                return None
            build = partial(auto_class.from_config, config, dtype=torch.float32)
            model, absent = empty_pretrained(build, files)
            with suppress(OSError):  # where there is none, it follows from the config
                if model.can_generate():
                    model.generation_config = GenerationConfig.from_pretrained(source, revision=self.revision or "main")
        self._require_all(model, absent, new_head)
        with weights:
            model.initialize_weights()
        return model

    def _require_all(self, model: PreTrainedModel, absent: list[str], new_head: bool) -> None:
        base = f"{model.base_model_prefix}."
        absent = [name for name in absent if not new_head or (name.startswith(base) and "pooler" not in name)]
        if absent:
            says = f"{len(absent)} of its weights are missing or of another shape"
            names = ", ".join(absent[:3]) + (", …" if len(absent) > 3 else "")
            raise UserError(f"task.model={self.model}: not a checkpoint of {type(model).__name__}, {says} ({names})")

    def load_weights(self, model: Any, device: torch.device) -> None:
        """Read this process's part of the weights into a sharded model of `empty_model`, with adapters or without, and
        put in the new ones. Raise a UserError if a file is damaged or missing."""
        own = without_adapters(model)
        if self.model:
            with loading("model", self.model):
                load(own, weight_files(self.model, self.revision), device)
        fill(model, self._new_weights, device)
        own.tie_weights()

    def load_tokenizer(self, name: str | None = None) -> PreTrainedTokenizerFast:
        """Return the model's tokenizer, or that of the model `name`. Raise a UserError if there is none, or it does not
        say where in the text its tokens are."""
        setting, source, revision = ("tokenizer", name, None) if name else ("model", self.model, self.revision)
        with loading(setting, source):
            tokenizer = AutoTokenizer.from_pretrained(source, revision=revision, trust_remote_code=False)
        if not tokenizer.is_fast:
            hint = "use a model with a tokenizer of the tokenizers library (tokenizer.json)"
            raise UserError(f"{source}: {type(tokenizer).__name__} does not say where its tokens are in a text; {hint}")
        if len(tokenizer) <= len(tokenizer.all_special_tokens):  # what transformers makes if there are no files at all
            raise UserError(f"task.{setting}={source}: it has no tokenizer")
        return tokenizer  # type: ignore[return-value]  # is_fast says so


def load_exported(folder: Path) -> Any:
    """Return the language model that a run exported, fp32, with adapters if it has any. Raise a UserError if there is
    none."""
    logging.set_verbosity_error()  # what is missing is judged below
    logging.disable_progress_bar()
    adapters: Path = folder / "adapter_config.json"
    auto: Any = AutoModelForCausalLM
    with explained("not a language model, ", (OSError, ValueError)):
        revision = json.loads(adapters.read_text())["revision"] if adapters.is_file() else None  # of what they adapt
        model, found = auto.from_pretrained(folder, revision=revision, dtype=torch.float32, output_loading_info=True)
    if found["missing_keys"]:
        raise UserError(f"not a language model, it lacks {min(found['missing_keys'])}")
    return model


def max_length(config: PreTrainedConfig, tokenizer: PreTrainedTokenizerFast) -> int:
    """Return how many tokens the model sees at most; 10^30 if nothing limits them."""
    positions = getattr(config.get_text_config(), "max_position_embeddings", None) or 0
    return min(positions, tokenizer.model_max_length) if positions > 0 else tokenizer.model_max_length


def check_fit(sequence_length: int, config: PreTrainedConfig, tokenizer: PreTrainedTokenizerFast) -> None:
    """Raise a UserError if a sequence is longer than the model can be, or there are tokens that it does not know."""
    limit, known = max_length(config, tokenizer), config.get_text_config().vocab_size
    if sequence_length > limit:
        raise UserError(f"task.sequence_length={sequence_length}: the model sees at most {limit} tokens")
    if len(tokenizer) > known:
        where = "task.tokenizer, task.architecture.vocab_size"
        raise UserError(f"the tokenizer has {len(tokenizer)} tokens, but the model knows {known} ({where})")


def save(model: Any, tokenizer: PreTrainedTokenizerFast, weights: dict[str, Tensor], folder: Path) -> None:
    """Write what `from_pretrained` reads: config, weights (of a PeftModel, the adapters alone) and tokenizer."""
    logging.disable_progress_bar()
    model.save_pretrained(folder, state_dict=weights)
    tokenizer.save_pretrained(folder)


def save_merged(model: PeftModel, tokenizer: PreTrainedTokenizerFast, weights: dict[str, Tensor], folder: Path) -> None:
    """Load `weights` into `model`, add its adapters to its own weights, and write the result."""
    model.load_state_dict(weights)
    merged = model.merge_and_unload()
    save(merged, tokenizer, merged.state_dict(), folder)


def save_sharded(
    model: PreTrainedModel | PeftModel, tokenizer: PreTrainedTokenizerFast, folder: Path, accelerator: Accelerator
) -> bool:
    """Write a sharded model as `save` does, with its adapters added to its weights; return False, before anything is
    written, if its weights would have to be converted. Collective."""
    own = without_adapters(model)
    weights = saved_weights(own)
    if weights is None:
        return False
    if isinstance(model, PeftModel):
        model.merge_adapter()
    if accelerator.is_main_process:
        save(own, tokenizer, {}, folder)
    write_sharded(weights, folder, accelerator)
    return True


def without_adapters(model: PreTrainedModel | PeftModel) -> Any:
    """Return the model itself, where it has adapters with them inside its layers."""
    return model.get_base_model() if isinstance(model, PeftModel) else model


def fsdp_blocks(model: PreTrainedModel) -> list[str]:
    """Return the class names in `_no_split_modules` that FSDP can wrap: those the model has, except for one around the
    input embeddings, which Accelerate wraps by themselves afterwards."""
    embeddings = model.get_input_embeddings()
    around = {type(module).__name__ for module in model.modules() if embeddings in module.modules()}
    usable = {type(module).__name__ for module in model.modules()} - around
    return [name for name in model._no_split_modules or [] if name in usable]
