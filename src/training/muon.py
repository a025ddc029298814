"""Muon, an optimizer of weight matrices: `optim.name=muon`."""

from torch import nn
from torch.optim import Muon, Optimizer

from src.config.groups import Optim


def build_muon(config: Optim, model: nn.Module) -> list[Optimizer]:
    """Return the optimizer of the model's hidden matrices, if it has any; adamw gets the other parameters."""
    hidden = hidden_matrices(model)
    if not hidden:
        return []
    return [
        Muon(
            [p for p in model.parameters() if p in hidden],
            lr=config.lr,
            weight_decay=config.weight_decay,
            momentum=config.momentum,
            # scale updates to adamw's size, so that both can use one learning rate
            adjust_lr_fn="match_rms_adamw",
        )
    ]


def hidden_matrices(model: nn.Module) -> set[nn.Parameter]:
    """Return the trained weight matrices between the embeddings and the last layer, which Muon is meant for (Jordan et
    al. 2024, https://kellerjordan.github.io/posts/muon/)."""
    modules = [*model.modules()]
    ends: list[nn.Module] = [module for module in modules if isinstance(module, nn.Embedding)]
    # the output layer, in which each class or token has its own row
    ends += [module for module in modules if isinstance(module, nn.Linear)][-1:]
    # peft wraps a layer (`base_layer`) and the weights trained beside it, such as the rows of new tokens
    at_ends = {p for module in modules if getattr(module, "base_layer", module) in ends for p in module.parameters()}
    matrices = {p for p in model.parameters() if p.requires_grad and p.ndim == 2}
    # a matrix with a single row or column is a vector
    return {p for p in matrices if min(p.shape) > 1} - at_ends
