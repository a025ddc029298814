"""Models of transformers that FSDP shards before they have weights: no process holds more than its share and a tensor.

`empty` builds one without weights. Accelerate shards it. Then `load` reads this process's part of a checkpoint's files,
or `fill` puts in its part of new weights, which `NewWeights` has kept.
"""

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from accelerate import init_empty_weights
from safetensors import safe_open
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import convert_and_load_state_dict_in_model, revert_weight_conversion
from transformers.modeling_utils import LoadStateDictConfig
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, cached_file
from transformers.utils.hub import get_checkpoint_shard_files

from src.process import UserError


def empty(build: Callable[[], PreTrainedModel]) -> PreTrainedModel:
    """Return the model that `build` makes: its parameters on the meta device, its buffers as they are to be."""
    with init_empty_weights(include_buffers=False):
        model = build()
    model.tie_weights()
    return model


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
        is_change = name == "__setitem__" or (name.endswith("_") and not name.endswith("__"))
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

    def parts(self, model: nn.Module) -> dict[str, Tensor]:
        """Return this process's rows of each new parameter by name, of tied ones once.

        Raises:
            UserError: some that are trained were not initialized in place.
        """
        self._keep_part()
        known = {name: parameter in self._parts for name, parameter in model.named_parameters()}
        if absent := [n for n, p in model.named_parameters() if p.requires_grad and not known[n]]:
            raise UserError(f"{type(model).__name__} does not initialize {absent[0]} in place")
        return {name: self._parts[p] for name, p in model.named_parameters() if known[name]}


def fill(model: nn.Module, parts: dict[str, Tensor], device: torch.device) -> None:
    """Put the parts, which are freed, into a sharded model without weights."""
    for name in list(parts):
        _set(model, name, model.get_parameter(name), parts.pop(name).to(device))


def _set(model: nn.Module, name: str, parameter: Any, part: Tensor) -> None:
    sharded = DTensor.from_local(
        part,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )
    path, _, last = name.rpartition(".")
    setattr(model.get_submodule(path), last, nn.Parameter(sharded, parameter.requires_grad))


def weight_files(source: str, revision: str | None) -> list[str]:
    """Return the safetensors files of a model, here or on the Hub; empty if it has none."""
    optional: dict[str, Any] = {"revision": revision, "_raise_exceptions_for_missing_entries": False}
    if whole := cached_file(source, SAFE_WEIGHTS_NAME, **optional):
        return [whole]
    index = cached_file(source, SAFE_WEIGHTS_INDEX_NAME, **optional)
    return get_checkpoint_shard_files(source, index, revision=revision)[0] if index else []


def load(model: PreTrainedModel, files: list[str], device: torch.device) -> list[str]:
    """Read this process's part of the weights into a sharded model without any, as transformers would: with its renames
    and conversions, in the model's dtype. Return the names of those that are missing or of another shape."""
    with ExitStack() as stack:
        opened = [stack.enter_context(safe_open(file, framework="pt")) for file in files]
        slices = {name: file.get_slice(name) for file in opened for name in file.keys()}  # noqa: SIM118  # a file is no dictionary
        renames: Any = get_model_conversion_mapping(model)
        how = LoadStateDictConfig(device_map={"": device}, weight_mapping=renames)
        without_adapters: Any = _WithoutAdapters(model)
        found, _ = convert_and_load_state_dict_in_model(without_adapters, slices, how)
    absent = {*found.missing_keys, *(name for name, *_ in found.mismatched_keys)}
    for target, source in model.all_tied_weights_keys.items():
        absent -= {target} if source not in absent else set()
    model.tie_weights()
    return sorted(absent)


class _WithoutAdapters:
    """A model as it was before it got adapters: the names of its weights, and where to set them."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def state_dict(self) -> dict[str, Tensor]:
        weights = self._model.state_dict(keep_vars=True).items()
        return {name.replace(".base_layer.", "."): weight for name, weight in weights if ".lora_" not in name}

    def get_submodule(self, path: str) -> nn.Module:
        module = self._model.get_submodule(path)
        return getattr(module, "base_layer", module)


def saved_weights(model: PreTrainedModel) -> dict[str, Tensor] | None:
    """Return the weights without adapters by their names in a checkpoint, tied ones once; None if saving does more than
    rename them: it splits or joins the experts of some models."""
    weights = _WithoutAdapters(model).state_dict()
    stand_ins = {name: torch.empty(0) for name in weights if name not in model.all_tied_weights_keys}
    names = {id(stand_in): name for name, stand_in in stand_ins.items()}
    try:
        saved = revert_weight_conversion(model, stand_ins)
    except Exception:  # stand-ins have no experts to split
        return None
    if {id(stand_in) for stand_in in saved.values()} != names.keys():
        return None
    return {name: weights[names[id(stand_in)]] for name, stand_in in saved.items()}
