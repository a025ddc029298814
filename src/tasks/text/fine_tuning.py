"""The tasks that train a transformers model on text, from scratch or fine-tuned, with or without adapters."""

import contextlib
import copy
import math
import re
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Self

import psutil
import torch
from accelerate import Accelerator
from accelerate.utils import get_int_from_env
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedTokenizerFast

from src.config.errors import UserError, as_user_error, listed, raise_if_any
from src.tasks.base import Cards, FillWeights, TaskState, Tensors
from src.tasks.text.adapters import add_adapters, base_model, require_four_bits
from src.tasks.text.export import drop_settings_without_effect, gather, is_only_renamed, save, save_sharded
from src.tasks.text.hub import loading
from src.tasks.text.load import (
    Fit,
    StoredTensor,
    check_length,
    empty_pretrained,
    fill_shards,
    fsdp_blocks,
    load_config,
    load_tokenizer,
    quantization_of,
    read_generation_config,
    read_model,
    stored_tensors,
    weight_files,
    with_dropout,
    without_scales,
)
from src.tasks.text.text_task import TextTask


class FineTuning(TextTask):
    """Trains a transformers model on text."""

    auto_class: ClassVar[Any] = AutoModelForCausalLM
    """transformers' class that builds the model from its config."""
    pipeline_tag: ClassVar[str] = "text-generation"
    """The Hub's name for what the model does."""
    hf_name: ClassVar[str] = ""
    """Name of the transformers model inside the trained module."""
    has_new_head: ClassVar[bool] = False
    """Whether the layers after the base model, and a pooler, are new if the checkpoint has none that fit. Then adapters
    are not exported on their own: they would not tell the head's labels."""
    _trained_rows: dict[str, list[int]] | None = None
    """Rows of new tokens to train alongside adapters, by layer."""

    def bind(self, state: TaskState) -> Self:
        # under a mask, gradients of cuDNN's attention may be NaN if length % 128 is 64 (pytorch issue 196678)
        torch.backends.cuda.enable_cudnn_sdp(False)
        task = super().bind(state)
        if self.lora.base_dtype in ("nf4", "bf16") and not task._has_bf16:
            setting = f"task.lora.base_dtype={self.lora.base_dtype}"
            raise UserError(f"{setting}: needs --mixed_precision bf16 before train.py")
        return task

    @property
    def _has_bf16(self) -> bool:
        """Return whether frozen weights may be in bf16 or 4 bits: not if the run trains in fp32. But --check computes
        in fp32 whatever a run does, and a trained model is loaded in any dtype."""
        state = self.state
        return state.dtype == torch.bfloat16 or state.is_check or state.is_trained

    @property
    def base_dtype(self) -> str | None:
        """Return the dtype of the frozen weights under adapters: nf4, bf16 or fp32; None without adapters."""
        if not self.lora.r:
            return None
        if quantization_of(self._config).get("load_in_4bit"):
            return "nf4"
        is_bf16 = self.state.device == "cuda" and self.state.dtype == torch.bfloat16
        return self.lora.base_dtype or ("bf16" if is_bf16 else "fp32")

    # ------------------------------------------------------------------------------------------- config and tokenizer
    @property
    def _config(self) -> PreTrainedConfig:
        """Return the config of the trained model."""
        return self._own_config

    @cached_property
    def _own_config(self) -> PreTrainedConfig:
        """Return the config as the model's folder has it, but for dropout."""
        config = self._load_config()
        check_length(self.sequence_length, config, self._tokenizer, self.state.remarks)
        return with_dropout(config, self.dropout)

    def _load_config(self) -> PreTrainedConfig:
        """Return the model's config. Raise a UserError if there is none, it is damaged, it asks to run code, or the
        weights can't be trained as they are stored."""
        with loading("model", self.model):
            config = load_config(str(self.model), self.revision, self.state.remarks)
        can_train = self.lora.r and self.lora.base_dtype in (None, "nf4") and self._has_bf16
        # olora would take its part out of them, and quantize the rest anew, which no export would have
        can_train = can_train and self.lora.options.get("init_lora_weights") != "olora"
        if quantization_of(config).get("load_in_4bit") and not can_train:
            hint = "train adapters (lora.r, base_dtype=nf4; no olora) with --mixed_precision bf16, or another model"
            raise UserError(f"task.model={self.model}: its weights are in 4 bits: {hint}")
        return config

    @cached_property
    def _tokenizer(self) -> PreTrainedTokenizerFast:
        """Return the tokenizer of the trained model."""
        return load_tokenizer("model", self.model, self.revision)

    # -------------------------------------------------------------------------------------------------------- building
    def build_model(self) -> Any:
        if self.model and self.base_dtype != "nf4":  # 4-bit weights are loaded one tensor at a time
            with loading("model", self.model):
                needed = sum(4 * math.prod(tensor.shape) for tensor in self._stored.values())
            needed *= get_int_from_env(["LOCAL_WORLD_SIZE"], 1)
            # the kernel would kill processes without a word
            if needed > (limit := memory_limit()):
                says = f"its weights take {needed / 1e9:.1f} GB in all processes, which may use {limit / 1e9:.1f} GB"
                raise UserError(f"task.model={self.model}: {says}: use a smaller model, or fsdp.yaml")
        return self.wrap(self.load_model())

    def build_empty_model(self) -> tuple[Any, FillWeights] | None:
        if self.base_dtype == "nf4":
            require_four_bits(is_sharded=True)
        with loading("model", self.model):
            # quantized weights, only `from_pretrained` can read; and new adapters may start from the weights' values
            is_whole = quantization_of(self._config) or self.lora.options.keys() & {"use_dora", "init_lora_weights"}
            if not self._stored or is_whole or not (built := empty_pretrained(self.model_from_config, self._stored)):
                return None
            model, fit = built
            if model.can_generate():
                read_generation_config(model, str(self.model), self.revision)
            self._accept(model, fit)

        def fill(trained: Any, device: torch.device) -> None:
            own = base_model(self.hf_model(trained))
            with loading("model", self.model):
                fill_shards(own, self._stored, device)
            own.tie_weights()

        return self.wrap(model), fill

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

    def model_from_config(self) -> Any:
        """Return a new transformers model of this config, fp32, with random weights."""
        config = copy.deepcopy(self._config)  # the model stores its attention there
        return self.auto_class.from_config(config, dtype=torch.float32, trust_remote_code=False)

    @cached_property
    def _stored(self) -> dict[str, StoredTensor]:
        """Return the weights in the model's files by name, if these are safetensors; the Hub is asked once."""
        return stored_tensors(weight_files(str(self.model), self.revision))

    def _accept(self, model: Any, fit: Fit) -> None:
        """Raise a UserError if the model lacks weights, or if some in the files would be ignored or read as other
        numbers than they stand for. Note what is ignored knowingly."""
        buffers = dict(model.named_buffers())  # transformers computes them
        base, (absent, unused) = f"{model.base_model_prefix}.", fit
        # GPT-2's masked_bias is a number that it masked with
        ignored = {name for name in unused - absent if name not in buffers and not name.endswith(".masked_bias")}
        if self.has_new_head or self._config.get_text_config() is not self._config:
            # the head that a classifier replaces, or what a multimodal checkpoint has for other inputs than text
            parts = {name: name.removeprefix(base).partition(".")[0] for name in ignored}
            ignored = {name for name, part in parts.items() if getattr(model.base_model, part, None)}
        if self.has_new_head:
            absent = {name for name in absent if name.startswith(base) and "pooler" not in name}
        hint = "name a copy of it without them, or mend its config.json"
        mistakes = {
            "are missing or have another shape": absent,
            "are quantized, but nothing says how": without_scales(self._stored, bool(quantization_of(self._config))),
            f"have no place in it, and would be ignored: {hint}": ignored,
        }
        where = f"task.model={self.model}: not a checkpoint of {type(model).__name__}: weights"
        raise_if_any(f"{where} {says}: {listed(sorted(names))}" for says, names in mistakes.items() if names)
        if unused:
            self.state.remarks.append(f"{self.model} has weights that are not used: {listed(sorted(unused))}")
        if model.can_generate() and (dropped := drop_settings_without_effect(model.generation_config)):
            self.state.remarks.append(f"generation settings without effect are left out: {', '.join(dropped)}")

    def with_adapters(self, model: Any) -> Any:
        """Return the model with new adapters, if the settings ask for them."""
        if not self.lora.r:
            return model
        self.state.optimizations.append(f"frozen weights in {self.base_dtype}")
        base_dtype = None if self.state.is_check else self.base_dtype  # it computes in fp32, with 4-bit weights too
        return add_adapters(self.lora, model, self.revision, base_dtype, self.has_new_head, self._trained_rows)

    def wrap(self, model: Any) -> Any:
        """Return the module to train, built around transformers' model, with new adapters if the settings ask for
        them."""
        model._no_split_modules = fsdp_blocks(model)
        return self.with_adapters(model)

    def hf_model(self, trained: Any) -> Any:
        """Return the transformers model, with its adapters, inside the trained module."""
        return trained.get_submodule(self.hf_name)

    # ---------------------------------------------------------------------------------------------------------- export
    def export(self, model: Any, weights: Tensors, folder: Path) -> Cards:
        exported, prefix = self.hf_model(model), self.hf_name and f"{self.hf_name}."
        own = {name: weights[prefix + name] for name in exported.state_dict()}
        for place, library in self._libraries().items():
            if self.lora.r and library == "transformers":
                exported = self._merged(own)
                own = exported.state_dict()
            save(exported, self._tokenizer, own, folder / place)
        return self._cards()

    def _libraries(self) -> dict[str, str]:
        """Return the library that loads each model of an export, by its folder. With adapters, it holds them alone
        (peft) and, on request, the whole model into which they are merged; only that if they are a classifier's,
        or began as a part of the weights, as PiSSA's do: on the weights in the files, they are another model."""
        if not self.lora.r or self.has_new_head or self.lora.options.get("init_lora_weights") in ("pissa", "olora"):
            return {"": "transformers"}
        return {"": "peft", "merged": "transformers"} if self.lora.merge else {"": "peft"}

    def _merged(self, weights: Tensors) -> Any:
        """Return the model as it was loaded, with these adapters merged into its weights."""
        loaded = self.load_model()
        if self.base_dtype == "nf4":
            loaded = loaded.dequantize(torch.bfloat16)
        adapted = self.with_adapters(loaded)
        trained = {name: weights[name] for name, parameter in adapted.named_parameters() if parameter.requires_grad}
        adapted.load_state_dict(trained, strict=False)
        return adapted.merge_and_unload()

    def export_sharded(self, model: Any, folder: Path, accelerator: Accelerator) -> Cards | None:
        exported, libraries = self.hf_model(model), self._libraries()
        # peft would merge DoRA's shards with wrong lengths
        is_whole = "use_dora" in self.lora.options or (self.lora.r and self._trained_rows)
        if "transformers" in libraries.values() and (is_whole or not is_only_renamed(base_model(exported))):
            return None
        for place, library in libraries.items():
            if library == "peft":
                adapters = {name: gather(p, accelerator) for name, p in exported.named_parameters() if p.requires_grad}
                if accelerator.is_main_process:
                    save(exported, self._tokenizer, adapters, folder / place)
            else:
                exported = exported.merge_and_unload() if self.lora.r else exported
                save_sharded(exported, self._tokenizer, folder / place, accelerator)
        return self._cards()

    def _cards(self) -> Cards:
        card: dict[str, Any] = {"pipeline_tag": self.pipeline_tag}
        if self.model and not Path(self.model).exists():
            card["base_model"] = self.model
        if on_the_hub := [name for name in self.dataset_names if "://" not in name and not Path(name).exists()]:
            card["datasets"] = on_the_hub
        return {place: card | {"library_name": library} for place, library in self._libraries().items()}


def memory_limit(root: Path = Path("/")) -> int:
    """Return how many bytes of memory this process may use: all of the machine's, which is what psutil knows, or fewer
    in a container or a job, by its cgroup (version 1 or 2) and those above it."""
    limits = [psutil.virtual_memory().total]
    with contextlib.suppress(OSError):  # systems without cgroups
        for controller, group in re.findall(r"(?m)^\d+:(memory)?:/(.*)$", (root / "proc/self/cgroup").read_text()):
            folder = root / "sys/fs/cgroup" / controller / group
            for above in (folder, *folder.parents):
                with contextlib.suppress(OSError, ValueError):  # a group that is not visible here, or has no limit: max
                    limits.append(int((above / ("memory.limit_in_bytes" if controller else "memory.max")).read_text()))
    return min(limits)
