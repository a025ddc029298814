"""Models of transformers that FSDP shards before they have weights: no process holds more than its share and a tensor.

`empty` builds one without weights. Accelerate shards it. Then `load` reads this process's part of a checkpoint's files,
or `fill` puts in its part of new weights, which `NewWeights` has kept.
"""

from collections.abc import Callable
from typing import Any

import torch
from accelerate import init_empty_weights
from safetensors import safe_open
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import convert_and_load_state_dict_in_model, revert_weight_conversion
from transformers.initialization import no_init_weights
from transformers.modeling_utils import LoadStateDictConfig
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, cached_file
from transformers.utils.hub import get_checkpoint_shard_files
from transformers.utils.loading_report import LoadStateDictInfo

Tensors = dict[str, Tensor]
"""Tensors by name."""
ORIGINAL_HEAD, TRAINED_HEAD = ".original_module.", ".modules_to_save.default."
"""peft's names for a classifier's head, which is trained as it is, and what it was before."""


def empty(build: Callable[[], PreTrainedModel]) -> PreTrainedModel:
    """Return the model that `build` makes: its parameters on the meta device, its buffers as they are to be."""
    with init_empty_weights(include_buffers=False):
        model = build()
    model.tie_weights()
    return model


def empty_pretrained(build: Callable[[], PreTrainedModel], files: list[str]) -> tuple[PreTrainedModel, set[str]]:
    """Return the model that `build` makes as `empty` does, and the names of its weights that the files, of which the
    headers are read, lack or have in another shape. `initialize_weights` draws those, as `from_pretrained` would."""
    with no_init_weights():
        model = empty(build)
    shapes = {name: torch.empty(part.get_shape(), device="meta") for name, part in _slices(files).items()}
    found = _convert(model, shapes, torch.device("meta"))
    model.mark_tied_weights_as_initialized(found)
    model._adjust_missing_and_unexpected_keys(found)
    absent = {*found.missing_keys, *(name for name, *_ in found.mismatched_keys)}
    for target, source in model.all_tied_weights_keys.items():
        absent -= {target} if source not in absent else set()
    model.tie_weights()
    return model, absent


class NewWeights(TorchFunctionMode):
    """A context in which parameters on the meta device draw what they would draw on the CPU, one at a time, and of each
    a process keeps the rows that FSDP gives it: the values of one process from the same seed."""

    def __init__(self, rank: int, world_size: int) -> None:
        super().__init__()
        self._rank, self._world_size = rank, world_size
        self._parts: dict[nn.Parameter, Tensor] = {}
        self._parameter: nn.Parameter | None = None  # the one that was touched last, and all of its values
        self._whole = torch.empty(0)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if not args and "tensor" in kwargs:  # the functions of torch.nn.init hand over all by name
            args = (kwargs.pop("tensor"),)
        parameter, name = args[0] if args else None, getattr(func, "__name__", "")
        is_change = name == "__setitem__" or (name.endswith("_") and not name.endswith(("__", "requires_grad_")))
        if not (isinstance(parameter, nn.Parameter) and parameter.is_meta and (is_change or name == "__getitem__")):
            return func(*args, **kwargs)
        if parameter is not self._parameter:
            self._keep_part()
            self._parameter, self._whole = parameter, torch.empty_like(parameter, device="cpu", requires_grad=False)
        with torch.no_grad():
            values = func(self._whole, *args[1:], **kwargs)
        return parameter if is_change else values  # of __getitem__ a view: an embedding's row is set to zero by it

    def _keep_part(self) -> None:
        if self._parameter is not None:
            parts = self._whole.chunk(self._world_size)
            part = parts[self._rank] if self._rank < len(parts) else self._whole[:0]
            self._parts[self._parameter] = part.clone()
            self._parameter, self._whole = None, torch.empty(0)

    def parts(self, model: nn.Module) -> Tensors:
        """Return this process's rows of each parameter that was drawn, by name, of tied ones once."""
        self._keep_part()
        return {name: self._parts[p] for name, p in model.named_parameters() if p in self._parts}


def fill(model: nn.Module, parts: Tensors, device: torch.device) -> None:
    """Put the parts, which are freed, into a sharded model without weights, and start what is trained in place of a
    layer, as a classifier's head is under LoRA, from that layer."""
    for name in list(parts):
        parameter = model.get_parameter(name)
        _set(model, name, parameter, parts.pop(name).to(device, parameter.dtype))
    for name, parameter in list(model.named_parameters()):
        if TRAINED_HEAD in name:
            original: Any = model.get_parameter(name.replace(TRAINED_HEAD, ORIGINAL_HEAD))
            _set(model, name, parameter, original.to_local().clone())


def _set(model: nn.Module, name: str, parameter: Any, part: Tensor) -> None:
    sharded: Tensor = DTensor.from_local(
        part,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )
    sharded = sharded.to(part.device)  # an offloaded shard belongs to the CPU: from_local moves it to the mesh's device
    path, _, last = name.rpartition(".")
    setattr(model.get_submodule(path), last, nn.Parameter(sharded, parameter.requires_grad))


def weight_files(source: str, revision: str | None) -> list[str]:
    """Return the safetensors files of a model, here or on the Hub; empty if it has none."""
    optional: dict[str, Any] = {"revision": revision, "_raise_exceptions_for_missing_entries": False}
    if whole := cached_file(source, SAFE_WEIGHTS_NAME, **optional):
        return [whole]
    index = cached_file(source, SAFE_WEIGHTS_INDEX_NAME, **optional)
    return get_checkpoint_shard_files(source, index, revision=revision)[0] if index else []


def load(model: PreTrainedModel, files: list[str], device: torch.device) -> None:
    """Read this process's part of the weights into a sharded model without any, as transformers would: with its renames
    and conversions, in the model's dtype."""

    def keep_on_device(_module: nn.Module, _name: str, parameter: nn.Parameter) -> Any:
        """Return the parameter where it belongs: transformers moves offloaded shards to the mesh's device."""
        return nn.Parameter(parameter.detach().to(device), parameter.requires_grad)

    hook = register_module_parameter_registration_hook(keep_on_device)
    try:
        _convert(_WithoutAdapters(model), _slices(files), device)
    finally:
        hook.remove()


def _convert(model: Any, weights: dict[str, Any], device: torch.device) -> LoadStateDictInfo:
    renames: Any = get_model_conversion_mapping(model)
    how = LoadStateDictConfig(device_map={"": device}, weight_mapping=renames)
    return convert_and_load_state_dict_in_model(model, weights, how)[0]


class _Slice:
    """A tensor in a file that each read opens: what was read of one that stays open counts as this process's memory."""

    def __init__(self, file: str, name: str, shape: list[int]) -> None:
        self._file, self._name, self._shape = file, name, shape

    def get_shape(self) -> list[int]:
        return self._shape

    def __getitem__(self, index: Any) -> Tensor:
        with safe_open(self._file, framework="pt") as opened:
            return opened.get_slice(self._name)[index].clone()  # of a view, the whole tensor would stay in memory


def _slices(files: list[str]) -> dict[str, Any]:
    slices = {}
    for file in files:
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118  # it is no dictionary
                slices[name] = _Slice(file, name, opened.get_slice(name).get_shape())
    return slices


class _WithoutAdapters:
    """A model as it was before it got adapters: the names of its weights, and where to set them."""

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
    """Return the weights without adapters by the names that they had before, with one of a classifier's two heads."""
    weights = model.state_dict(keep_vars=True)
    names = {name: name.replace("base_layer.", "").replace(head, ".") for name in weights}
    others = ".lora_", ORIGINAL_HEAD, TRAINED_HEAD
    return {new: weights[name] for name, new in names.items() if not any(other in new for other in others)}


def saved_weights(model: PreTrainedModel) -> Tensors | None:
    """Return the weights without adapters by their names in a checkpoint, tied ones once; None if saving does more than
    rename them: it splits or joins the experts of some models."""
    weights = _own_weights(model, TRAINED_HEAD)
    stand_ins = {name: torch.empty(0) for name in weights if name not in model.all_tied_weights_keys}
    names = {id(stand_in): name for name, stand_in in stand_ins.items()}
    try:
        saved = revert_weight_conversion(model, stand_ins)
    except Exception:  # stand-ins have no experts to split
        return None
    if {id(stand_in) for stand_in in saved.values()} != names.keys():
        return None
    return {name: weights[names[id(stand_in)]] for name, stand_in in saved.items()}
