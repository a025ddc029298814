"""Models and tokenizers of transformers, from the Hub or a local folder: loaded, checked and saved again."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import torch
from huggingface_hub.errors import LocalEntryNotFoundError
from peft import PeftModel
from pydantic import Field
from torch import Tensor
from transformers import AutoConfig, AutoTokenizer, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerFast, logging

from src.models.lean import load, weight_files
from src.models.lora import Lora
from src.process import UserError, cause
from src.settings import Settings


class ModelSource(Settings):
    """Settings that tasks on transformers share, and the loading of their model and tokenizer."""

    model: str | None = None
    """A model on the Hub or a local folder, to start from. Weights are loaded as fp32; code in it is never run."""
    revision: str | None = None
    """Branch, tag or commit of a model on the Hub."""
    dropout: Annotated[float, Field(ge=0, lt=1)] | None = None
    """Sets all of the model's dropout rates; null: as its config has them."""
    lora: Lora = Lora()
    """Low-rank adapters."""

    def model_errors(self) -> Iterator[str]:
        """Yield what is wrong with the settings, one line each, found without loading anything."""
        if not self.lora.r and self.lora != Lora():
            yield "task.lora.r is not set: without it the other settings of task.lora do nothing"
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
        issue 196678)."""
        torch.backends.cuda.enable_cudnn_sdp(False)
        return []

    def load_config(self) -> PreTrainedConfig:
        """Return the model's config. Raise a UserError if there is none, it is damaged, or it asks to run code."""
        with _loading("model", self.model):
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
        with _loading("model", self.model):
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
        base = f"{model.base_model_prefix}."
        self.require_all(type(model), [n for n in absent if not new_head or (n.startswith(base) and "pooler" not in n)])
        return model

    def require_all(self, kind: type[PreTrainedModel], absent: list[str]) -> None:
        """Raise a UserError if weights of a model of this class are absent."""
        if absent:
            says = f"{len(absent)} of its weights are missing or of another shape"
            names = ", ".join(absent[:3]) + (", …" if len(absent) > 3 else "")
            raise UserError(f"task.model={self.model}: not a checkpoint of {kind.__name__}, {says} ({names})")

    def weight_files(self) -> list[str]:
        """Return the model's safetensors files; empty if it has none. Raise a UserError if they cannot be read."""
        with _loading("model", self.model):
            return weight_files(str(self.model), self.revision)

    def load_shards(self, model: PreTrainedModel, device: torch.device) -> list[str]:
        """Read this process's part of the weights into a sharded model without any. Return the names of those that are
        absent. Raise a UserError if a file is damaged or missing."""
        files = self.weight_files()
        with _loading("model", self.model):
            return load(model, files, device)

    def load_tokenizer(self, name: str | None = None) -> PreTrainedTokenizerFast:
        """Return the model's tokenizer, or that of the model `name`. Raise a UserError if there is none, or it does not
        say where in the text its tokens are."""
        setting, source, revision = ("tokenizer", name, None) if name else ("model", self.model, self.revision)
        with _loading(setting, source):
            tokenizer = AutoTokenizer.from_pretrained(source, revision=revision, trust_remote_code=False)
        if not tokenizer.is_fast:
            hint = "use a model with a tokenizer of the tokenizers library (tokenizer.json)"
            raise UserError(f"{source}: {type(tokenizer).__name__} does not say where its tokens are in a text; {hint}")
        if len(tokenizer) <= len(tokenizer.all_special_tokens):  # what transformers makes if there are no files at all
            raise UserError(f"task.{setting}={source}: it has no tokenizer")
        return tokenizer  # type: ignore[return-value]  # is_fast says so

    def model_card(self) -> dict[str, Any]:
        """Return metadata for the model card."""
        is_on_hub = self.model and not Path(self.model).exists()
        return {"library_name": "transformers", **({"base_model": self.model} if is_on_hub else {})}


@contextmanager
def _loading(setting: str, name: str | None) -> Iterator[None]:
    """Turn any failure to load what `task.<setting>` names into a UserError of one line."""
    try:
        yield
    except Exception as error:  # transformers, safetensors, torch and the Hub's client raise many kinds
        says = cause(error).split(". ")[0][:300]
        if "trust_remote_code" in str(error):
            reason = "wants to run code of its own, which is not allowed here; use one that transformers has"
        elif Path(str(name)).is_dir():
            reason = f"cannot be loaded, {says}"
        else:
            reason = f"no such folder here, and not available on the Hub ({says})"
            if any(isinstance(e, LocalEntryNotFoundError | ConnectionError) for e in (error, error.__cause__)):
                reason += f"; offline, download it first with `hf download {name}` and set HF_HUB_OFFLINE=1"
        raise UserError(f"task.{setting}={name}: {reason}") from error


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


def fsdp_blocks(model: PreTrainedModel) -> list[str]:
    """Return the class names in `_no_split_modules` that FSDP can wrap: those the model has, except for one around the
    input embeddings, which Accelerate wraps by themselves afterwards."""
    embeddings = model.get_input_embeddings()
    around = {type(module).__name__ for module in model.modules() if embeddings in module.modules()}
    usable = {type(module).__name__ for module in model.modules()} - around
    return [name for name in model._no_split_modules or [] if name in usable]
