"""What the tasks on transformers share: settings of the model, its loading with weights or without, its export."""

import copy
import re
from abc import abstractmethod
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import psutil
import torch
from accelerate import Accelerator
from accelerate.utils import get_int_from_env
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

from src.config.errors import UserError
from src.config.groups import Fraction
from src.tasks.base import Indices, Task, Tensors, parameters_on
from src.tasks.text.four_bit import give_four_bits, keep_layout, loading_options, require_four_bits
from src.tasks.text.hub import loading
from src.tasks.text.lean import bytes_in_fp32, empty_pretrained, load, saved_weights, start_heads, weight_files
from src.tasks.text.lora import Lora
from src.tasks.text.pretrained import fsdp_blocks, save, without_adapters
from src.tasks.text.sharded_files import write_gathered
from src.tasks.text.source import TextSource
from src.tasks.text.streaming.settings import Streaming
from src.tasks.text.streaming.stream import Stream


class FineTuning(
    Streaming,  # room: streaming
    TextSource,
    Task,
):
    """Trains a model of transformers on text."""

    auto_class: ClassVar[Any] = AutoModelForCausalLM
    """transformers' class that builds the model from its config."""
    adapters_for: ClassVar[str] = "CAUSAL_LM"
    """peft's name for the kind of model."""
    pipeline_tag: ClassVar[str] = "text-generation"
    """The Hub's name for what the model does."""
    has_new_head: ClassVar[bool] = False
    """Whether the layers after the base model, and a pooler, are new where the checkpoint has none that fit."""
    model: str | None = None
    """A model on the Hub, a local folder, or wandb:entity/project/name:alias, to start from. Weights are loaded as
    fp32; code in it is never run."""
    revision: str | None = None
    """Branch, tag or commit of a model on the Hub."""
    dropout: Fraction | None = None
    """Sets all of the model's dropout rates; null: as its config has them."""
    lora: Lora = Lora()
    """Low-rank adapters."""
    _trained_rows: dict[str, list[int]] | None = None
    """Rows of new tokens to train beside adapters, by layer."""

    @property
    @abstractmethod
    def _config(self) -> PreTrainedConfig:
        """Return the config of the model that is trained."""

    @property
    @abstractmethod
    def _tokenizer(self) -> PreTrainedTokenizerFast:
        """Return the tokenizer that it is trained with."""

    def augmented(self, train: Any, seed: list[int]) -> Any:  # room: streaming
        if isinstance(train, Stream):
            run_seed, epoch, *_ = seed
            return replace(train, seed=run_seed, epoch=epoch)
        return super().augmented(train, seed)

    def order(self, train: Any, random: np.random.Generator, global_batch_size: int) -> Indices:  # room: streaming
        if isinstance(train, Stream):
            return range(len(train))  # each window is shuffled already
        return super().order(train, random, global_batch_size)

    def validation_errors(self) -> Iterator[str]:
        yield from self.source_errors()
        if not self.lora.r and self.lora != Lora():
            yield "task.lora.r is not set: without it the other settings of task.lora do nothing"
        if self.model and not Path(self.model).is_dir() and not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", self.model):
            yield f"task.model={self.model}: no such folder"
        if Path(str(self.model), "adapter_config.json").exists():
            hint = "name the model that they belong to, or one that they were merged into (task.lora.merge=true)"
            yield f"task.model={self.model}: holds adapters, not a model; {hint}"

    def prepare_for(self, device: str, dtype: torch.dtype) -> list[str]:
        """Have no attention computed by cuDNN: under a mask its gradients may be NaN, if length % 128 is 64 (pytorch
        issue 196678). Choose the type of frozen weights."""
        torch.backends.cuda.enable_cudnn_sdp(False)
        is_bf16 = dtype == torch.bfloat16
        if self.lora.r and self.lora.base_dtype is None:
            self.lora.base_dtype = "bf16" if device == "cuda" and is_bf16 else "fp32"
        if self.lora.base_dtype in ("bf16", "nf4") and not is_bf16:
            raise UserError(
                f"task.lora.base_dtype={self.lora.base_dtype}: needs --mixed_precision bf16 before train.py"
            )
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

    def build_model(self) -> Any:
        if self.model and self.lora.base_dtype != "nf4":  # of which a tensor at a time is loaded
            self._require_memory()
        return self.finish(self.load_model())

    def build_empty_model(self) -> Any:
        if self.lora.base_dtype == "nf4":
            require_four_bits(is_sharded=True)
        logging.disable_progress_bar()
        with loading("model", self.model):
            source = str(self.model)
            files = weight_files(source, self.revision) if self.model else []
            if not files:
                return None
            model, absent = empty_pretrained(self.new_model, files)
            with suppress(OSError):  # where there is none, it follows from the config
                if model.can_generate():
                    model.generation_config = GenerationConfig.from_pretrained(source, revision=self.revision or "main")
        self._require_all(model, absent)
        return self.finish(model)

    def build_skeleton(self) -> Any:  # room: plan
        with parameters_on(torch.device("meta")):
            model = self.new_model()
        if self.lora.base_dtype == "nf4":
            give_four_bits(model)
        return self.finish(model)

    def finish(self, model: Any) -> Any:
        """Return what is trained, made of transformers' model."""
        model._no_split_modules = fsdp_blocks(model)
        return self.with_adapters(model)

    def core(self, model: Any) -> Any:
        """Return transformers' model, with its adapters, inside of what is trained."""
        return model

    def with_adapters(self, model: Any) -> Any:
        """Return the model with new adapters, if the settings ask for them."""
        if not self.lora.r:
            return model
        options = {"task_type": self.adapters_for, "trainable_token_indices": self._trained_rows}
        return self.lora.add_adapters(model, self.revision, **options)

    def new_model(self) -> Any:
        """Return transformers' model of this config, fp32, with weights that it draws."""
        config = copy.deepcopy(self._config)  # the model's attention is noted there
        return self.auto_class.from_config(config, dtype=torch.float32)

    def load_model(self) -> Any:
        """Return transformers' model with its weights, fp32. Raise a UserError if it cannot be found, is damaged, or is
        another kind of model."""
        logging.set_verbosity_error()  # what is missing is judged below
        logging.disable_progress_bar()
        with loading("model", self.model):
            model, loaded = self.auto_class.from_pretrained(
                self.model,
                revision=self.revision,
                config=self._config,
                dtype=torch.float32,
                trust_remote_code=False,
                ignore_mismatched_sizes=True,
                output_loading_info=True,
                **loading_options(self.lora.base_dtype),
            )
        keep_layout(model)
        self._require_all(model, {*loaded["missing_keys"], *(key for key, *_ in loaded["mismatched_keys"])})
        return model

    def _require_memory(self) -> None:
        """Raise a UserError if the weights take more memory than this process, or all of this machine's, can have: the
        kernel would kill them without a word."""
        with loading("model", self.model):
            needed = bytes_in_fp32(weight_files(str(self.model), self.revision))
        memory, processes = psutil.virtual_memory(), get_int_from_env(["LOCAL_WORLD_SIZE"], 1)
        if needed > memory.available or needed * processes > memory.total:
            says = f"its weights take {needed / 1e9:.1f} GB per process, {processes} on this machine"
            free = f"{memory.available / 1e9:.1f} of {memory.total / 1e9:.1f} GB are free"
            raise UserError(f"task.model={self.model}: {says}, and {free}; take a smaller model, or fsdp.yaml")

    def _require_all(self, model: PreTrainedModel, absent: set[str]) -> None:
        if self.has_new_head:
            base = f"{model.base_model_prefix}."
            absent = {name for name in absent if name.startswith(base) and "pooler" not in name}
        if absent:
            says = f"{len(absent)} of its weights are missing or of another shape"
            names = ", ".join(sorted(absent)[:3]) + (", …" if len(absent) > 3 else "")
            raise UserError(f"task.model={self.model}: not a checkpoint of {type(model).__name__}, {says} ({names})")

    def load_weights(self, model: Any, device: torch.device) -> None:
        """Read this process's part of the weights into a sharded model of `build_empty_model`, with adapters or
        without. Raise a UserError if a file is damaged or missing."""
        own = without_adapters(self.core(model))
        with loading("model", self.model):
            load(own, weight_files(str(self.model), self.revision), device)
        start_heads(own)
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

    def export_merged(self, weights: Tensors, folder: Path) -> None:
        """Write the model with the adapters in `weights` added to its own weights, those in 4 bits as the bf16 numbers
        that they stand for."""
        model = self.load_model()
        if self.lora.base_dtype == "nf4":
            model = model.dequantize(torch.bfloat16)
        adapted = self.with_adapters(model)
        trained = {name: weights[name] for name, parameter in adapted.named_parameters() if parameter.requires_grad}
        adapted.load_state_dict(trained, strict=False)
        merged = adapted.merge_and_unload()
        save(merged, self._tokenizer, merged.state_dict(), folder)

    def export_sharded(self, model: Any, folder: Path, accelerator: Accelerator) -> bool:
        core = self.core(model)
        weights = saved_weights(own := without_adapters(core))
        if weights is None:
            return False
        if self.lora.r:
            core.merge_adapter()
        if accelerator.is_main_process:
            save(own, self._tokenizer, {}, folder)
        write_gathered(weights, folder, accelerator)
        return True

    def cards(self) -> dict[str, dict[str, Any]]:
        card: dict[str, Any] = {"library_name": "transformers", "pipeline_tag": self.pipeline_tag}
        if self.model and not Path(self.model).exists():
            card["base_model"] = self.model
        if not Path(self.dataset).exists() and "://" not in self.dataset:
            card["datasets"] = [self.dataset]
        return {"": card}
