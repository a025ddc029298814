"""Transformers models that FSDP shards before they have weights: no process holds more than its shard and one tensor.

`empty_pretrained` builds a model without weights, and Accelerate shards it. Then `load` reads this process's shards
from a checkpoint's files. The few weights that no file has, such as a classifier's new head, are drawn on every
process, all alike.
"""

import math
import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from accelerate import init_empty_weights
from safetensors import safe_open
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import convert_and_load_state_dict_in_model, revert_weight_conversion
from transformers.initialization import no_init_weights
from transformers.modeling_utils import LoadStateDictConfig
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, cached_file
from transformers.utils.hub import get_checkpoint_shard_files
from transformers.utils.loading_report import LoadStateDictInfo

from src.tasks.base import Tensors

ORIGINAL_HEAD, TRAINED_HEAD = ".original_module.", ".modules_to_save.default."
"""peft's names for a classifier's head as it was, and for its copy, which is trained without adapters."""


class Fit(NamedTuple):
    """Holds how the weights in a checkpoint's files fit a model, as sets of names."""

    absent: set[str]
    """The model's weights that the files lack or have in another shape."""
    unused: set[str]
    """The files' weights that the model has no place for, except for those that transformers ignores by their names."""


def fit_of(found: dict[str, Any]) -> Fit:
    """Return how the files fit, from what `from_pretrained` returns with `output_loading_info`."""
    misshapen = {name for name, *_ in found["mismatched_keys"]}
    return Fit(found["missing_keys"] | misshapen, found["unexpected_keys"] | misshapen)


def empty_pretrained(build: Callable[[], PreTrainedModel], files: list[str]) -> tuple[PreTrainedModel, Fit] | None:
    """Return the model that `build` makes, with parameters on the meta device and buffers with their values; and how
    the files fit it. Of the files, only the headers are read. None if the files have two weights that the config ties:
    `from_pretrained` compares their values."""
    with no_init_weights(), init_empty_weights(include_buffers=False):
        model = build()
    model.tie_weights()
    shapes = {name: torch.empty(part.get_shape(), device="meta") for name, part in _slices(files).items()}
    found = _convert(model, shapes, torch.device("meta"))
    model.mark_tied_weights_as_initialized(found)
    model._adjust_missing_and_unexpected_keys(found)
    fit = fit_of(found.to_dict())
    for target, source in model.all_tied_weights_keys.items():
        if not fit.absent & {target, source}:
            return None
        if source not in fit.absent:
            fit.absent.remove(target)
    return model, fit


def without_scales(files: list[str], reads_scales: bool) -> set[str]:
    """Return the names of weights in 8 bits whose scale the files lack or, without `reads_scales`, nobody reads."""
    slices = _slices(files)
    small = {name for name, part in slices.items() if part.dtype.startswith(("F8", "I8"))}
    scaled = {name.rpartition(".")[0] for name in slices if reads_scales and "scale" in name}
    return {name for name in small if name.rpartition(".")[0] not in scaled}


def draw_weights(model: PreTrainedModel, names: set[str]) -> None:
    """Draw these weights of a model on the meta device, on the CPU, as `from_pretrained` would."""
    for name in names:
        _set(model, name, torch.empty_like(model.get_parameter(name), device="cpu"))
    model.tie_weights()
    model.initialize_weights()


def _set(model: nn.Module, name: str, values: Tensor) -> None:
    model.load_state_dict({name: values}, strict=False, assign=True)


def start_heads(model: nn.Module) -> None:
    """Initialize each layer that is trained as a copy, such as a classifier's head under LoRA, from the original."""
    for name, _ in list(model.named_parameters()):
        if TRAINED_HEAD in name:
            original = model.get_parameter(name.replace(TRAINED_HEAD, ORIGINAL_HEAD))
            _set(model, name, original.detach().clone())


def weight_files(source: str, revision: str | None) -> list[str]:
    """Return the safetensors files of a model, local or on the Hub; empty if it has none."""
    optional: dict[str, Any] = {"revision": revision, "_raise_exceptions_for_missing_entries": False}
    if whole := cached_file(source, SAFE_WEIGHTS_NAME, **optional):
        return [whole]
    index = cached_file(source, SAFE_WEIGHTS_INDEX_NAME, **optional)
    return get_checkpoint_shard_files(source, index, revision=revision)[0] if index else []


def bytes_in_fp32(files: list[str]) -> int:
    """Return the bytes that all weights in these files take as fp32."""
    return sum(4 * math.prod(weight.get_shape()) for weight in _slices(files).values())


def fill_shards(model: PreTrainedModel, files: list[str], device: torch.device) -> None:
    """Read this process's shards of the weights into a sharded model without weights, as transformers would: with its
    renames and conversions, in the model's dtype."""
    # in threads, transformers would read all experts before it joins the first ones: twice the share
    os.environ.setdefault("HF_DEACTIVATE_ASYNC_LOAD", "1")
    if device.type == "cpu":
        device = torch.device("cpu")  # Accelerate's is cpu:0, to which torch would copy each weight once more

    def moved(_module: nn.Module, _name: str, parameter: nn.Parameter) -> Any:
        # transformers moves offloaded shards to the mesh's device
        return nn.Parameter(parameter.detach().to(device), parameter.requires_grad)

    with register_module_parameter_registration_hook(moved):
        _convert(_WithoutAdapters(model), _slices(files), device)
    # with fewer rows, such as experts, than processes, some processes have none: transformers reads nothing for them
    parameters: dict[str, Any] = dict(model.named_parameters())
    for name, parameter in parameters.items():
        if parameter.is_meta and parameter.to_local().numel() == 0:
            _set(model, name, torch.empty_like(parameter, device=device))


def _convert(model: Any, weights: dict[str, Any], device: torch.device) -> LoadStateDictInfo:
    renames: Any = get_model_conversion_mapping(model)
    how = LoadStateDictConfig(device_map={"": device}, weight_mapping=renames)
    return convert_and_load_state_dict_in_model(model, weights, how)[0]


@dataclass
class _Slice:
    """Reads a tensor, opening its file each time: what is read from a file that stays open counts as this process's
    memory."""

    file: str
    name: str
    shape: list[int]
    dtype: str
    """As safetensors calls it."""

    def get_shape(self) -> list[int]:
        return self.shape

    def __getitem__(self, index: Any) -> Tensor:
        with safe_open(self.file, framework="pt") as opened:
            return opened.get_slice(self.name)[index].clone()  # a view would keep the whole tensor in memory


def _slices(files: list[str]) -> dict[str, Any]:
    slices = {}
    for file in files:
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118  # it is not a dict
                part = opened.get_slice(name)
                slices[name] = _Slice(file, name, part.get_shape(), part.get_dtype())
    return slices


class _WithoutAdapters:
    """Shows a model as it was before it got adapters: the names of its weights, and where to set them."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def state_dict(self) -> Tensors:
        return _own_weights(self._model, ORIGINAL_HEAD)

    def get_submodule(self, path: str) -> nn.Module:
        module: Any = self._model.get_submodule(path)
        while own := getattr(module, "base_layer", getattr(module, "original_module", None)):
            module = own
        return module


def _own_weights(model: nn.Module, head: str) -> Tensors:
    """Return the weights without adapters, by their original names, with the given one of a classifier's two heads."""
    weights = model.state_dict(keep_vars=True)
    names = {name: name.replace("base_layer.", "").replace(head, ".") for name in weights}
    others = ".lora_", ORIGINAL_HEAD, TRAINED_HEAD
    return {new: weights[name] for name, new in names.items() if not any(other in new for other in others)}


def saved_weights(model: PreTrainedModel) -> Tensors | None:
    """Return the weights without adapters, by their names in a checkpoint, tied ones once; None if saving does more
    than rename them: for some models, it splits or joins experts."""
    weights = _own_weights(model, TRAINED_HEAD)
    stand_ins = {name: torch.empty(0) for name in weights if name not in model.all_tied_weights_keys}
    names = {id(stand_in): name for name, stand_in in stand_ins.items()}
    with suppress(Exception):  # stand-ins have no experts to split, and joined ones have no name
        saved = revert_weight_conversion(model, stand_ins)
        return {name: weights[names[id(stand_in)]] for name, stand_in in saved.items()}
    return None
