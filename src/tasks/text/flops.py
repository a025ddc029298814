"""The floating-point operations that a decoder's training step needs, from its weights and its config."""

from torch import nn
from transformers import PreTrainedModel

Flops = tuple[float, float, float]
"""Operations for each token, each target (only tokens with one pass the output layer), and each pair of a token and one
that it attends to."""


def causal_pairs(length: int) -> int:
    """Return how many pairs of a token and one that it attends to, itself included, a document has."""
    return length * (length + 1) // 2


def count_flops(model: PreTrainedModel, unused: list[str]) -> Flops | None:
    """Return the operations of a decoder's matrix products in a forward and a backward pass; None if they are not
    known: it has layers other than attention and matrices, such as state spaces, or its config doesn't say how many
    experts a token passes. What is computed twice counts once, as in the model FLOPs utilization of Chowdhery et al.
    2022 (https://arxiv.org/abs/2204.02311, appendix B).

    A matrix takes two operations per weight in the forward pass, two for the gradient of its input, and two for its own
    unless it is frozen. Of experts, only the chosen ones count; sliding windows count as full attention. `unused` are
    parts that text does not pass through.
    """
    config = model.config.get_text_config()
    chosen = getattr(config, "num_experts_per_tok", None)
    kinds = {*(getattr(config, "layer_types", None) or [])}
    modules = {*model.modules()} - {m for part in unused for m in model.base_model.get_submodule(part).modules()}
    if not kinds <= {"full_attention", "sliding_attention"} or any(isinstance(m, nn.Conv1d) for m in modules):
        return None
    head = {*model.get_output_embeddings().modules()}
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
    per_pair = 0.0
    for layer in getattr(config, "per_layer_config", [config] * config.num_hidden_layers):
        heads = getattr(layer, "num_attention_heads", None)
        if not heads:
            return None
        width = getattr(layer, "head_dim", None) or layer.hidden_size // heads
        key, value = getattr(layer, "qk_head_dim", None), getattr(layer, "v_head_dim", None)  # DeepSeek's differ
        per_pair += 6 * heads * ((key or width) + (value or width))
    return per_token, per_target, per_pair
