"""The loss of a transformers decoder in little memory, and how many operations it takes."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from src.tasks.base import num_weights
from src.tasks.text.adapters import base_model
from src.tasks.text.load import fsdp_blocks

CHUNK, CHUNK_ON_GPU = 2**24, 3 * 2**24
"""Logits that are computed at once: 64 MiB in fp32; 192 MiB on a GPU, which small products would leave idle."""
TILE = 128
"""Rows that a GPU's matrix products compute together: the last of 1,046 rows would leave most of a tile idle."""


class LanguageModel(nn.Module):
    """Computes losses from the logits of a few tokens at a time: with a vocabulary of 100,000, all logits at once would
    take more memory than anything else.

    `lm` comes from AutoModelForCausalLM, fp32, and is of a kind that `require_decoder` accepts, or is a PeftModel of
    such a model. `attention` is "sdpa", the model's own with masks, or the name of one that takes documents' lengths.
    `flops` is what `count_flops` returns.
    """

    def __init__(self, lm: Any, attention: str = "sdpa") -> None:
        super().__init__()
        self.lm = lm
        hf, config, head = self.hf, self.hf.config.get_text_config(), self.hf.get_output_embeddings()
        self._no_split_modules = fsdp_blocks(hf)
        self._softcap = getattr(config, "final_logit_softcapping", None)  # Gemma 2
        self._scale = getattr(config, "logit_scale", None) or 1.0  # Cohere
        self._scale /= getattr(config, "logits_scaling", None) or 1.0  # Granite
        hf.get_input_embeddings().register_forward_hook(_in_bf16_under_autocast)
        has_new_rows = hasattr(head, "token_adapter")  # peft puts them into the weight
        # Accelerate compares weights to see whether layers are tied, and peft makes new ones on each access
        self._has_tied_rows = has_new_rows and head.token_adapter.tied_adapter is not None
        if has_new_rows or (type(head) is nn.Linear and head.bias is None):
            # FSDP gathers the weight around a call of this very layer, and does so by a subclass, too; a layer around
            # it would rename its weights in checkpoints
            head.__class__ = type("HeadWithLoss", (LossHead, type(head)), {})
        used = {*hf.get_decoder().parameters(), *head.parameters()}
        for parameter in {*hf.parameters()} - used:  # such as a vision tower: DDP would wait for its gradients
            parameter.requires_grad_(False)
        self.flops = count_flops(hf)
        self._takes_lengths = attention != "sdpa"
        if self._takes_lengths:
            hf.set_attn_implementation(attention)

    @property
    def hf(self) -> Any:
        """Return the PreTrainedModel."""
        return base_model(self.lm)

    def get_input_embeddings(self) -> nn.Module | None:
        """Return the first layer, which Accelerate has FSDP gather separately; None: with the model's other parts."""
        return None if self._has_tied_rows else self.hf.get_input_embeddings()

    def get_output_embeddings(self) -> nn.Module | None:
        """Return the last layer, to be gathered separately too."""
        return None if self._has_tied_rows else self.hf.get_output_embeddings()

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        index: Tensor,
        targets: Tensor | None = None,
        is_scoring: bool = False,
        **lengths: Any,
    ) -> Tensor:
        """Return the loss summed over the targets, shape (), fp32. For scoring, an evaluation without gradients, return
        what each target contributes to it, and 1 if it was the likeliest token, else 0; shape (2, targets), fp32.
        Without targets, return the logits, shape (positions, vocabulary).

        Args:
            input_ids: shape (batch, length), int64, padded at the end, where nothing that counts sees it.
            position_ids: of the same shape; they restart with each document.
            index: positions with a target, in the flattened batch; shape (targets,), int64.
            targets: the tokens to predict there; of the same shape.
            is_scoring: whether to score each target.
            lengths: what `document_lengths` returns, for an attention that takes it.
        """
        options = lengths if self._takes_lengths else {}
        output = self.hf.base_model(input_ids=input_ids, position_ids=position_ids, use_cache=False, **options)
        states = output.last_hidden_state.flatten(0, 1).index_select(0, index)
        if targets is None:
            return self._logits(states)
        if is_scoring:
            return self._score(states, targets)
        head = self.hf.get_output_embeddings()
        if isinstance(head, LossHead):
            return head(states, targets, self._to_logits, self._rows_at_once(states))
        return F.cross_entropy(self._logits(states).float(), targets, reduction="sum")  # has a bias or adapters

    def _score(self, states: Tensor, targets: Tensor) -> Tensor:
        rows, scores = self._rows_at_once(states), []
        for chunk, expected in zip(states.split(rows), targets.split(rows), strict=True):
            logits = self._logits(chunk).float()
            losses = F.cross_entropy(logits, expected, reduction="none")
            scores.append(torch.stack([losses, (logits.argmax(-1) == expected).float()]))
        return torch.cat(scores, 1)

    def _logits(self, states: Tensor) -> Tensor:
        return self._to_logits(self.hf.get_output_embeddings()(states))

    def _to_logits(self, outputs: Tensor) -> Tensor:
        """Apply the model's own scaling and capping to the outputs of its last layer."""
        if self._scale != 1:
            outputs = outputs * self._scale
        return outputs if self._softcap is None else (outputs / self._softcap).tanh() * self._softcap

    def _rows_at_once(self, states: Tensor) -> int:
        rows = (CHUNK_ON_GPU if states.is_cuda else CHUNK) // self.hf.config.get_text_config().vocab_size
        return rows // TILE * TILE or rows


def _in_bf16_under_autocast(_module: nn.Module, _inputs: Any, states: Tensor) -> Tensor:
    """Return the embedding's output in bf16 if the blocks compute in it: the sum that they add to is then kept and
    moved in half the bytes, as under FSDP. Under fp16 it could overflow."""
    return states.bfloat16() if _compute_dtype(states) == torch.bfloat16 else states


def _compute_dtype(tensor: Tensor) -> torch.dtype:
    """Return the dtype of autocast on the tensor's device; without autocast, the tensor's."""
    device = tensor.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else tensor.dtype


class LossHead(nn.Module):
    """Lets an output layer without bias compute the loss as well, so that FSDP gathers the weight around it."""

    weight: Tensor

    def forward(self, states: Tensor, targets: Tensor | None = None, *options: Any) -> Tensor:
        """Return the layer's outputs; with targets, what `linear_cross_entropy` returns with these options."""
        if targets is None:
            return super().forward(states)
        return linear_cross_entropy(states, self.weight, targets, *options)


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, states: Tensor, weight: Tensor, targets: Tensor, to_logits: Callable[..., Tensor], rows: int
    ) -> Tensor:
        device = states.device.type
        dtype = _compute_dtype(states)
        kept = dtype if device == "cuda" else torch.float32  # a CPU's half-precision products have half-precision sums
        exact: dict[str, Any] = {} if kept == torch.float32 else {"out_dtype": torch.float32}

        def rounded(tensor: Tensor) -> Tensor:
            return tensor.to(dtype).to(kept)

        states_grad = torch.empty_like(states)
        weight_grad = torch.zeros_like(weight, dtype=torch.float32) if ctx.needs_input_grad[1] else None
        loss = states.new_zeros((), dtype=torch.float32)
        with torch.autocast(device, enabled=False):
            weight = rounded(weight)
            chunks = (tensor.split(rows) for tensor in (states, targets, states_grad))
            for chunk, expected, chunk_grad in zip(*chunks, strict=True):
                inputs = rounded(chunk)
                outputs = torch.mm(inputs, weight.t(), **exact).requires_grad_()
                with torch.enable_grad():
                    chunk_loss = F.cross_entropy(to_logits(outputs), expected, reduction="sum")
                loss += chunk_loss.detach()
                gradient = rounded(torch.autograd.grad(chunk_loss, outputs)[0])
                chunk_grad.copy_(torch.mm(gradient, weight, **exact))
                if weight_grad is not None:
                    torch.addmm(weight_grad, gradient.t(), inputs, out=weight_grad, **exact)
                del outputs, chunk_loss, gradient  # before the next ones are made
        ctx.save_for_backward(states_grad, weight_grad)
        return loss

    @staticmethod
    def backward(ctx: Any, factor: Tensor) -> tuple[Tensor | None, ...]:
        gradients = (None if gradient is None else gradient.mul_(factor) for gradient in ctx.saved_tensors)
        return *gradients, None, None, None  # autograd casts them to the dtypes of the inputs


linear_cross_entropy: Callable[..., Tensor] = _LinearCrossEntropy.apply
"""Return the cross-entropy summed over the targets; shape (), fp32.

Factors of products are rounded to the dtype of autocast, or else of the states; sums are kept in fp32, including that
of the weight's gradient over all chunks.

Args:
    states: inputs of the layer, shape (targets, width).
    weight: shape (vocabulary, width).
    targets: shape (targets,), int64.
    to_logits: turns the layer's outputs into logits, fp32.
    rows: the number of targets whose logits are computed at once.
"""


def count_flops(model: Any) -> tuple[int, int, int] | None:
    """Return the operations of a decoder's matrix products in a forward and a backward pass: for each token; for each
    target, as only these pass through the output layer; and for each pair of a token and one that it attends to, itself
    included, over all layers. None: unknown, because it has layers other than full attention and matrices that every
    token passes through, such as windows, state spaces or experts.

    A matrix takes two operations per weight in the forward pass, two for the gradient of its input, and two for its own
    gradient unless it is frozen. What is recomputed counts once; layers that text does not pass through don't count.
    For the model FLOPs utilization of Chowdhery et al. 2022 (https://arxiv.org/abs/2204.02311, appendix B), except that
    only the pairs of tokens that attention needs count.
    """
    config, decoder = model.config.get_text_config(), model.get_decoder()
    heads, kinds = getattr(config, "num_attention_heads", None), getattr(config, "layer_types", None) or ()
    special = any(getattr(config, name, None) for name in ("sliding_window", "num_experts_per_tok"))
    if not heads or special or {*kinds} - {"full_attention"} or any(weight.ndim > 2 for weight in decoder.parameters()):
        return None
    width = getattr(config, "head_dim", None) or config.hidden_size // heads
    per_pair = 12 * config.num_hidden_layers * heads * width
    return _matrix_flops(decoder), _matrix_flops(model.get_output_embeddings()), per_pair


def _matrix_flops(part: nn.Module) -> int:
    return sum(
        (6 if weight.requires_grad else 4) * num_weights(weight)
        for layer in part.modules()
        for weight in layer.parameters(recurse=False)
        if weight.ndim == 2 and not isinstance(layer, nn.Embedding)
    )
