"""The floating-point operations that a decoder's training step needs, from its weights and its config."""

from dataclasses import dataclass

from torch import nn
from transformers import PreTrainedModel

FULL, SLIDING = "full_attention", "sliding_attention"


@dataclass(frozen=True)
class Flops:
    """Operations of the matrix products in a forward and a backward pass; what is computed twice counts once. For the
    model FLOPs utilization of Chowdhery et al. 2022 (https://arxiv.org/abs/2204.02311, appendix B), but with only those
    pairs of tokens that attention needs."""

    per_token: float
    per_target: float
    """In the output layer: only tokens with a target pass it."""
    per_pair: float
    """For each pair of a token and one that it sees, itself included, in all layers with full attention."""
    per_window_pair: float
    """The same in all layers with sliding windows."""

    def total(self, tokens: int, targets: int, pairs: int, window_pairs: int) -> float:
        """Return the operations for so many of each."""
        linear = self.per_token * tokens + self.per_target * targets
        return linear + self.per_pair * pairs + self.per_window_pair * window_pairs


def causal_pairs(length: int, window: int | None = None) -> int:
    """Return how many pairs of a token and one that it sees, itself included, a document has."""
    seen = min(length, window or length)
    return seen * (seen + 1) // 2 + (length - seen) * seen


def count_flops(model: PreTrainedModel) -> Flops | None:
    """Return the operations of a decoder; None if they are not known: it has layers other than attention and matrices,
    such as state spaces, or its config doesn't say how many experts a token passes.

    A matrix takes two operations per weight in the forward pass, two for the gradient of its input, and two for its own
    unless it is frozen. Of experts, only the chosen ones count, and nothing that text does not pass through.
    """
    config = model.config.get_text_config()
    window, chosen = (getattr(config, name, None) for name in ("sliding_window", "num_experts_per_tok"))
    kinds = getattr(config, "layer_types", None) or [SLIDING if window else FULL] * config.num_hidden_layers
    head = {*model.get_output_embeddings().modules()}
    modules = head | {*model.get_decoder().modules()}
    if not {*kinds} <= {FULL, SLIDING} or any(isinstance(module, nn.Conv1d) for module in modules):
        return None
    per_token = per_target = 0.0
    for module in modules:
        for name, weight in () if isinstance(module, nn.Embedding) else module.named_parameters(recurse=False):
            if weight.ndim < 2 or name.endswith("bias"):
                continue
            if weight.ndim > 2 and chosen is None:
                return None
            share = 1.0 if chosen is None or weight.ndim == 2 else chosen / len(weight)
            flops = (6 if weight.requires_grad else 4) * weight.numel() * share
            if module in head:
                per_target += flops
            else:
                per_token += flops
    pairs = {FULL: 0.0, SLIDING: 0.0}
    for layer, kind in zip(getattr(config, "per_layer_config", [config] * len(kinds)), kinds, strict=True):
        heads = getattr(layer, "num_attention_heads", None)
        if not heads:
            return None
        width = getattr(layer, "head_dim", None) or layer.hidden_size // heads
        key, value = getattr(layer, "qk_head_dim", None), getattr(layer, "v_head_dim", None)  # DeepSeek's differ
        pairs[kind] += 6 * heads * ((key or width) + (value or width))
    return Flops(per_token, per_target, pairs[FULL], pairs[SLIDING])
