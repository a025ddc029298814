"""The model of a run without its weights: parameters on the meta device, then uninitialized memory."""

from importlib import import_module
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from src.config.errors import as_user_error


def build_skeleton(task: Any) -> nn.Module:
    """Return the task's model with parameters on the meta device, and 4-bit ones on the GPU. A model that transformers
    builds from a config needs no weights; another is built as for training. Raise a UserError if it cannot be built
    that way."""
    says = "its model reads values that a plan does not have, "
    with register_module_parameter_registration_hook(on_meta), as_user_error(says, RuntimeError):
        if not hasattr(task, "model_from_config"):
            return task.build_model()
        model = task.model_from_config()
    if task.base_dtype == "nf4":
        import_module("plan.four_bits").give_four_bits(model)  # needs bitsandbytes
    # PiSSA and the like read the weights' values, and take no more memory than other adapters
    options = {name: value for name, value in task.lora.options.items() if name != "init_lora_weights"}
    lora = task.lora.model_copy(update={"options": options})
    return task.model_copy(update={"lora": lora}).bind(task.state).wrap(model)


def on_meta(_module: nn.Module, _name: str, parameter: nn.Parameter) -> Any:
    """Return a parameter that a module registers, on the meta device. Tied ones stay tied; Accelerate's
    init_empty_weights unties them."""
    return parameter if parameter.is_meta else nn.Parameter(parameter.detach().to("meta"), parameter.requires_grad)


def allocate(model: nn.Module, device: torch.device) -> None:
    """Allocate memory on this device for parameters on the meta device. Tied parameters stay tied."""
    for parameter in model.parameters():
        if parameter.is_meta:
            filled = torch.empty_like(parameter, device=device)
            torch.utils.swap_tensors(parameter, nn.Parameter(filled, parameter.requires_grad))
