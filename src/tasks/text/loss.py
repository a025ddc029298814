"""The loss of a transformers decoder in little memory, and attention that keeps packed documents apart.

transformers itself uses a mask of shape (batch, 1, length, length), which each layer reads and keeps. torch's kernel
for documents of any length needs none. The attention functions here take the ends of documents instead.
"""

import copy
import inspect
from collections.abc import Callable
from contextlib import suppress
from functools import cached_property, partial
from typing import Any

import torch
from accelerate.utils import send_to_device
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from src.config.errors import UserError, cause
from src.tasks.base import num_weights
from src.tasks.text.adapters import base_model
from src.tasks.text.load import fsdp_blocks

IGNORED_KWARGS = {"cu_seq_lens_k", "max_length_k", "position_ids", "is_causal"}
"""Arguments of attention functions that do not change a decoder's attention within a document."""

HAS_GQA_SWITCH = "enable_gqa" in inspect.signature(varlen_attn).parameters
"""torch 2.11 has no such switch: its kernel takes fewer heads of keys and values without it."""


def document_lengths(ends: list[int]) -> dict[str, Any]:
    """Return `cu_seq_lens`, where in the flattened batch each document begins and the last one ends, of shape
    (documents + 1,), int32; and `max_length`, an int that no document exceeds. `ends` is where each one ends, padding
    being a document too.

    A compiler would specialize on the longest length and on the number of documents: both are rounded up to a power of
    two, so that they take few values. The documents that this adds have no tokens.
    """
    edges = torch.tensor([0, *ends], dtype=torch.int32)
    cu_seq_lens = torch.full((_power_of_two(len(ends)) + 1,), ends[-1], dtype=torch.int32)
    cu_seq_lens[: len(edges)] = edges
    return {"cu_seq_lens": cu_seq_lens, "max_length": _power_of_two(int(edges.diff().max()))}


def _power_of_two(least: int) -> int:
    return 1 << (least - 1).bit_length()


def document_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    *,
    cu_seq_lens_q: Tensor,
    max_length_q: int,
    is_varlen: bool,
    **options: Any,
) -> tuple[Tensor, None]:
    """Return each token's attention to itself and to those before it in its document, for AttentionInterface.

    Args:
        query: shape (batch, heads, length, head size). `key` and `value` may have fewer heads.
        sliding_window: the most tokens that a token attends to, itself included; None: all.
        cu_seq_lens_q, max_length_q: as from `document_lengths`.
        is_varlen: use torch's varlen kernel, on all documents at once; otherwise the usual one, on one document at a
            time, in any dtype and with dropout. Then only sliding windows need a mask, and on a GPU the host waits for
            the lengths.

    Returns:
        Shape (batch, length, heads, head size), in the dtype of `value`: under autocast, rotary embeddings may have
        turned the others into fp32.

    Raises:
        ValueError: the model asks for more than the kernel can do.
    """
    asked = {"attention_mask": attention_mask, **options, "dropout": dropout if is_varlen and dropout else None}
    set_options = {name for name, value in asked.items() if value is not None and value is not False}
    if unknown := sorted(set_options - IGNORED_KWARGS):
        kernel = "varlen" if is_varlen else "per-document"
        raise ValueError(f"{kernel} attention does not support {' and '.join(unknown)}")
    q, k, v = (t.transpose(1, 2).flatten(0, 1).to(value.dtype) for t in (query, key, value))
    is_grouped = query.shape[1] != key.shape[1]
    if is_varlen:
        lengths = (cu_seq_lens_q, cu_seq_lens_q, max_length_q, max_length_q)
        window = (-1 if sliding_window is None else sliding_window - 1, 0)
        # claiming groups where there are none may select another kernel for the backward pass
        grouped: dict[str, Any] = {"enable_gqa": is_grouped} if HAS_GQA_SWITCH else {}
        output: Any = varlen_attn(q, k, v, *lengths, scale=scaling, window_size=window, **grouped)
    else:
        sizes = [size for size in cu_seq_lens_q.diff().tolist() if size]
        outputs = []
        for document in zip(q.split(sizes), k.split(sizes), v.split(sizes), strict=True):
            q, k, v = (t.transpose(0, 1).unsqueeze(0) for t in document)
            mask, length = None, q.shape[2]
            if sliding_window is not None and sliding_window < length:
                mask = torch.ones(length, length, dtype=torch.bool, device=q.device).tril().triu(1 - sliding_window)
            attended = F.scaled_dot_product_attention(
                q, k, v, mask, dropout, is_causal=mask is None, scale=scaling, enable_gqa=is_grouped
            )
            outputs.append(attended.squeeze(0).transpose(0, 1))
        output = torch.cat(outputs)
    return output.unflatten(0, (query.shape[0], query.shape[2])), None


varlen_attention = partial(document_attention, is_varlen=True)
attention_by_document = partial(document_attention, is_varlen=False)


AttentionInterface.register("varlen", varlen_attention)  # without an AttentionMaskInterface no mask is made
AttentionInterface.register("by_document", attention_by_document)


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, states: Tensor, weight: Tensor, targets: Tensor, finished: Callable[[Tensor], Tensor], rows: int
    ) -> Tensor:
        device = states.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else states.dtype

        def rounded(tensor: Tensor) -> Tensor:  # on a CPU, half-precision products have half-precision sums
            return tensor.to(dtype) if device == "cuda" else tensor.to(dtype).float()

        states_grad = torch.empty_like(states)
        weight_grad = torch.zeros_like(weight, dtype=torch.float32) if ctx.needs_input_grad[1] else None
        loss = states.new_zeros((), dtype=torch.float32)
        with torch.autocast(device, enabled=False):
            weight = rounded(weight)
            exact: dict[str, Any] = {} if weight.dtype == torch.float32 else {"out_dtype": torch.float32}
            for start in range(0, len(states), rows):
                part = slice(start, start + rows)
                inputs = rounded(states[part])
                outputs = torch.mm(inputs, weight.t(), **exact).requires_grad_()
                with torch.enable_grad():
                    chunk_loss = F.cross_entropy(finished(outputs), targets[part], reduction="sum")
                loss += chunk_loss.detach()
                gradient = rounded(torch.autograd.grad(chunk_loss, outputs)[0])
                states_grad[part] = torch.mm(gradient, weight, **exact)
                if weight_grad is not None:
                    torch.addmm(weight_grad, gradient.t(), inputs, out=weight_grad, **exact)
                del outputs, chunk_loss, gradient  # before the next ones are made
        ctx.save_for_backward(states_grad, weight_grad)
        return loss

    @staticmethod
    def backward(ctx: Any, factor: Tensor) -> tuple[Tensor | None, ...]:
        states, weight = (None if gradient is None else gradient.mul_(factor) for gradient in ctx.saved_tensors)
        return states, weight, None, None, None  # autograd casts them to the dtypes of the inputs


linear_cross_entropy: Callable[..., Tensor] = _LinearCrossEntropy.apply
"""Return the cross-entropy summed over the targets; shape (), fp32.

Factors of products are rounded to the dtype of autocast, or else of the states; sums are kept in fp32, including that
of the weight's gradient over all chunks.

Args:
    states: inputs of the layer, shape (targets, width).
    weight: shape (vocabulary, width).
    targets: shape (targets,), int64.
    finished: turns the layer's outputs into logits, fp32.
    rows: the number of targets whose logits are computed at once.
"""


def count_flops(model: PreTrainedModel) -> tuple[int, int, int] | None:
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
    special = "sliding_window", "num_experts_per_tok"
    is_plain = not any(getattr(config, name, None) for name in special) and {*kinds} <= {"full_attention"}
    if not heads or not is_plain or any(weight.ndim > 2 for weight in decoder.parameters()):
        return None
    width = getattr(config, "head_dim", None) or config.hidden_size // heads
    per_pair = 12 * config.num_hidden_layers * heads * width
    return _of_matrices(decoder), _of_matrices(model.get_output_embeddings()), per_pair


def _of_matrices(part: nn.Module) -> int:
    layers = [module for module in part.modules() if not isinstance(module, nn.Embedding)]
    matrices = [weight for layer in layers for weight in layer.parameters(recurse=False) if weight.ndim == 2]
    return sum((6 if weight.requires_grad else 4) * num_weights(weight) for weight in matrices)


CHUNK, CHUNK_ON_GPU = 2**24, 3 * 2**24
"""Logits that are computed at once: 64 MiB in fp32; 192 MiB on a GPU, which small products would leave idle."""
TILE = 128
"""Rows that a GPU's matrix products compute together: the last of 1,046 rows would leave most of a tile idle."""


class LanguageModel(nn.Module):
    """Computes losses from the logits of a few tokens at a time: with a vocabulary of 100,000, all logits at once would
    take more memory than anything else.

    `lm` comes from AutoModelForCausalLM, fp32, and is of a kind for which `failure` returns None, or is a PeftModel of
    such a model. `attention` is "sdpa", the model's own with masks, or the name of one that takes documents' lengths.
    """

    def __init__(self, lm: Any, attention: str = "sdpa") -> None:
        super().__init__()
        self.lm = lm
        self._no_split_modules = fsdp_blocks(self.hf)
        config, head = self.hf.config.get_text_config(), self.hf.get_output_embeddings()
        self._softcap = getattr(config, "final_logit_softcapping", None)  # Gemma 2
        scale, divisor = getattr(config, "logit_scale", None), getattr(config, "logits_scaling", None)
        self._scale = (scale or 1.0) / (divisor or 1.0)  # Cohere, Granite
        self.hf.get_input_embeddings().register_forward_hook(_in_bf16_under_autocast)
        with_new_rows = hasattr(head, "token_adapter")  # its weight includes them
        # with adapters it is not plain
        self._is_plain_head = with_new_rows or (type(head) is nn.Linear and head.bias is None)
        # Accelerate compares weights to see whether layers are tied, and peft makes new ones on each access
        self._has_tied_rows = with_new_rows and head.token_adapter.tied_adapter is not None
        if self._is_plain_head:
            # FSDP gathers the weight around this call
            head.forward = partial(self._head_forward, head)
        used = {*self.hf.get_decoder().parameters(), *head.parameters()}
        for parameter in {*self.hf.parameters()} - used:  # such as a vision tower: DDP would wait for its gradients
            parameter.requires_grad_(False)
        self._takes_lengths = attention != "sdpa"
        if self._takes_lengths:
            self.hf.set_attn_implementation(attention)

    @property
    def hf(self) -> Any:
        """Return the PreTrainedModel."""
        return base_model(self.lm)

    @cached_property
    def flops(self) -> tuple[int, int, int] | None:
        """Return the operations per token, target and pair, as from `count_flops`."""
        return count_flops(self.hf)

    def get_input_embeddings(self) -> nn.Module | None:
        """Return the first layer, which Accelerate has FSDP gather separately; None: with the model's other parts."""
        return None if self._has_tied_rows else self.hf.get_input_embeddings()

    def get_output_embeddings(self) -> nn.Module | None:
        """Return the last layer, to be gathered with the norm before it."""
        return None if self._has_tied_rows else self.hf.get_output_embeddings()

    def forward(self, index: Tensor, targets: Tensor, is_scoring: bool = False, **inputs: Any) -> Any:
        """Return the loss summed over the targets, shape (), fp32; for scoring, an evaluation without gradients, what
        each target contributes to it, and 1 if it was the likeliest token, else 0; both of shape (targets,), fp32.

        Args:
            index: positions with a target, in the flattened batch; shape (targets,), int64.
            targets: the tokens to predict there; of the same shape.
            inputs: as for `logits`.
        """
        states = self._states(**inputs).flatten(0, 1).index_select(0, index)
        if is_scoring:
            return self._score(states, targets)
        if self._is_plain_head:
            return self.hf.get_output_embeddings()(states, targets)
        return F.cross_entropy(self._logits(states).float(), targets, reduction="sum")

    def _score(self, states: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        losses, correct = [], []
        rows = self._rows_at_once(states)
        for chunk, expected in zip(states.split(rows), targets.split(rows), strict=True):
            logits = self._logits(chunk).float()
            losses.append(F.cross_entropy(logits, expected, reduction="none"))
            correct.append((logits.argmax(-1) == expected).float())
        return torch.cat(losses), torch.cat(correct)

    def logits(self, **inputs: Any) -> Tensor:
        """Return the logits of all tokens.

        Args:
            inputs: `input_ids`, shape (batch, length), int64, padded at the end, where nothing that counts sees it;
            `position_ids`, of the same shape, which restart with each document; and what `document_lengths` returns,
            for an attention that takes it.
        """
        return self._logits(self._states(**inputs))

    def _states(self, input_ids: Tensor, position_ids: Tensor, **lengths: Any) -> Tensor:
        """Return the inputs of the output layer."""
        inputs = {"input_ids": input_ids, "position_ids": position_ids, "use_cache": False}
        if self._takes_lengths:  # of queries and of keys, which are the same
            inputs |= {f"{name}_{of}": length for name, length in lengths.items() for of in "qk"}
        return self.hf.base_model(**inputs).last_hidden_state

    def _logits(self, states: Tensor) -> Tensor:
        return self._finished(self.hf.get_output_embeddings()(states))

    def _finished(self, logits: Tensor) -> Tensor:
        """Apply the model's own scaling and capping to the outputs of its last layer."""
        if self._scale != 1:
            logits = logits * self._scale
        return logits if self._softcap is None else (logits / self._softcap).tanh() * self._softcap

    def _head_forward(self, head: nn.Linear, states: Tensor, targets: Tensor | None = None) -> Tensor:
        """Return the last layer's outputs; with targets, the loss."""
        if targets is None:
            return type(head).forward(head, states)
        return linear_cross_entropy(states, head.weight, targets, self._finished, self._rows_at_once(states))

    def _rows_at_once(self, states: Tensor) -> int:
        vocabulary = self.hf.config.get_text_config().vocab_size
        rows = (CHUNK_ON_GPU if states.device.type == "cuda" else CHUNK) // vocabulary
        return rows // TILE * TILE if rows > TILE else max(1, rows)


def _in_bf16_under_autocast(_module: nn.Module, _inputs: Any, states: Tensor) -> Tensor:
    """Return the embedding's output in bf16 if the blocks compute in it: the sum that they add to is then kept and
    moved in half the bytes, as under FSDP. Under fp16 it could overflow."""
    device = states.device.type
    is_bf16 = torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device) == torch.bfloat16
    return states.bfloat16() if is_bf16 else states


TOKENS = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6], [5, 3, 5, 8, 9, 7, 9, 3]])
"""Two rows of documents; packed documents have lengths of 3, 5, 6 and 2, others of 8 and 3."""
ORIGINAL = "original_max_position_embeddings"
"""The length that rotary embeddings were first trained on: above it, some kinds become other ones for a whole batch."""
ROUNDING = 0.05
"""Relative difference of logits that is allowed in half precision: rounding makes less than 0.005; documents that see
each other, 0.2 to 0.9."""


def require_decoder(config: PreTrainedConfig, packing: bool, sequence_length: int) -> None:
    """Raise a UserError if models of this kind cannot be trained: they fail, see the tokens that they have to predict
    or other documents of their row or batch, or have other logits than a LanguageModel computes."""
    config = copy.deepcopy(config)
    hint = "packed documents may see each other: try --task.packing=false" if packing else ""
    text: Any = config.get_text_config()
    for rope in (vars(text), getattr(text, "rope_parameters", None) or {}):
        if sequence_length > (original := rope.get(ORIGINAL) or sequence_length):
            rope[ORIGINAL] = 4  # of the trial's documents, some are longer
            hint = f"longer ones may change how those beside them are read: try --task.sequence_length={original}"
    if says := failure(config, "sdpa", packing):
        raise UserError(f"{config.model_type} cannot be trained here: {says}{hint and f' ({hint})'}")


def require_splittable(config: PreTrainedConfig, packing: bool) -> None:
    """Raise a UserError if processes can't split the sequences of such models, because these mix tokens outside of
    their attention, or attend in a way that `attention_by_document` can't."""
    if says := failure(config, "by_document", packing):
        raise UserError(f"{config.model_type}: processes cannot split its sequences (cp_size): {says}")


def failure(
    config: PreTrainedConfig, attention: str, packing: bool, device: str = "cpu", dtype: torch.dtype = torch.float32
) -> str | None:
    """Return why models of this kind can't be trained with this attention on the device in `dtype`; None if they can.

    In a row of several documents, or beside a longer row, each token's logits must be those that transformers computes
    with masks, from its own document alone, up to that token. And there must be gradients. The CPU's random state stays
    as it was.
    """
    lengths = [3, 5, 6, 2] if packing else [8, 3, 5]  # the last five are padding
    # in rows of their halves, sequences are whole to this attention alone, as they are to two processes
    tokens = TOKENS.view(4, 4) if attention == "by_document" else TOKENS
    positions = torch.cat([torch.arange(length) for length in (lengths if packing else [8, 8])]).view_as(tokens)
    ends = torch.tensor(lengths).cumsum(0).tolist()
    is_half = dtype != torch.float32
    try:
        with torch.random.fork_rng(devices=[]), torch.autocast(device, dtype, enabled=is_half):
            lm = small_model(config).to(device).eval()
            inputs: Any = {"input_ids": tokens, "position_ids": positions, **document_lengths(ends)}
            inputs = send_to_device(inputs, device)
            documents = inputs["input_ids"].flatten().split(lengths)[: 4 if packing else 2]
            alone = torch.cat([lm(document[None, :-1], use_cache=False).logits[0] for document in documents])
            model = LanguageModel(lm, attention)
            together = model.logits(**inputs).flatten(0, 1).split(lengths)[: len(documents)]
            model.train().logits(**inputs).sum().backward()  # with what training adds, such as dropout
    except Exception as error:  # from any library on the way
        return f"it fails on a few tokens: {cause(error).split('. ')[0]}"
    found, expected = torch.cat([logits[:-1] for logits in together]).float(), alone.float()
    difference = ((found - expected).norm() / expected.norm()).item()
    says = f"its logits differ by {100 * difference:.2g}% from those of a document alone"
    return says if not difference < (ROUNDING if is_half else 1e-5) else None  # rounding makes it 1e-6


def small_model(config: PreTrainedConfig) -> Any:
    """Return a model of the same class with few and narrow layers, one of each kind; if the class rejects that, with
    layers of their own width."""
    own = config.get_text_config()
    few: dict[str, Any] = {"num_hidden_layers": 2, "vocab_size": 64, "sliding_window": 2, "attention_chunk_size": 2}
    few |= dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    if kinds := dict.fromkeys(vars(own).get("layer_types") or ()):  # a property would follow from other fields
        few |= {"num_hidden_layers": len(kinds), "layer_types": [*kinds]}
    heads = getattr(own, "num_attention_heads", None) or 4
    is_grouped = getattr(own, "num_key_value_heads", heads) != heads
    head = getattr(own, "head_dim", None) or own.hidden_size // heads  # its own size, as kernels reject some
    narrow = {"hidden_size": 4 * head, "intermediate_size": 64}
    narrow |= {"num_attention_heads": 4, "num_key_value_heads": 2 if is_grouped else 4}
    with suppress(Exception):  # narrower than the class allows
        small = _of_sizes(config, few | narrow)
        small(TOKENS, use_cache=False)
        return small
    return _of_sizes(config, few)


def _of_sizes(config: PreTrainedConfig, sizes: dict[str, Any]) -> Any:
    config = copy.deepcopy(config)
    text = config.get_text_config()
    text.update({name: size for name, size in sizes.items() if getattr(text, name, None) is not None})
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32, trust_remote_code=False)
