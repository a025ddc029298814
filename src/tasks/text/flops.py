"""The floating-point operations that a decoder's training step needs, from its weights and its config."""

from collections.abc import Iterable
from dataclasses import dataclass

from torch import nn
from transformers import PreTrainedModel

from src.tasks.base import num_weights


@dataclass(frozen=True)
class Flops:
    """Operations of the matrix products in a forward and a backward pass; what is computed twice counts once. For the
    model FLOPs utilization of Chowdhery et al. 2022 (https://arxiv.org/abs/2204.02311, appendix B), but with only those
    pairs of tokens that attention needs."""

    per_token: int
    per_target: int
    """In the output layer: only tokens with a target pass it."""
    per_pair: int
    """For each pair of a token and one that it sees, itself included, in all layers."""

    def total(self, tokens: int, targets: int, pairs: int) -> int:
        """Return the operations for so many of each."""
        return self.per_token * tokens + self.per_target * targets + self.per_pair * pairs


def count_flops(model: PreTrainedModel) -> Flops | None:
    """Return the operations of a decoder; None if they are not known: it has layers other than full attention and
    matrices that every token passes, such as windows, state spaces or experts.

    A matrix takes two operations per weight in the forward pass, two for the gradient of its input, and two for its own
    unless it is frozen. Nothing counts that text does not pass through.
    """
    config, decoder = model.config.get_text_config(), model.get_decoder()
    heads, kinds = getattr(config, "num_attention_heads", None), getattr(config, "layer_types", None) or ()
    special = "sliding_window", "num_experts_per_tok"
    is_plain = not any(getattr(config, name, None) for name in special) and {*kinds} <= {"full_attention"}
    if not heads or not is_plain or any(weight.ndim > 2 for weight in decoder.parameters()):
        return None
    width = getattr(config, "head_dim", None) or config.hidden_size // heads
    per_pair = 12 * config.num_hidden_layers * heads * width
    return Flops(_of_matrices(decoder.modules()), _of_matrices(model.get_output_embeddings().modules()), per_pair)


def _of_matrices(modules: Iterable[nn.Module]) -> int:
    layers = [module for module in modules if not isinstance(module, nn.Embedding)]
    matrices = [weight for layer in layers for weight in layer.parameters(recurse=False) if weight.ndim == 2]
    return sum((6 if weight.requires_grad else 4) * num_weights(weight) for weight in matrices)
