"""Decoders of transformers: what each can do, found by a trial, and their loss, in little memory."""

import copy
import warnings
from contextlib import suppress
from functools import cached_property, partial
from typing import Any, Literal

import torch
from accelerate.utils import send_to_device
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, PreTrainedConfig

from src.config.errors import cause, explained
from src.tasks.text.attention import BY_LENGTHS, document_lengths, implementations, set_attention
from src.tasks.text.chunked_loss import linear_cross_entropy
from src.tasks.text.flops import Flops, count_flops
from src.tasks.text.pretrained import fsdp_blocks, without_adapters

# it is on the GPU that computes, while offloaded weights are on the CPU until they are gathered
warnings.filterwarnings("ignore", "You are calling .generate.. with the `input_ids` being on a device type different")
ENDS = [3, 8, 14, 16]
"""Where the documents end in the two rows of tokens on which a model is tried."""
ROUNDING = 0.05
"""Relative difference of states in half precision: it is below 0.005; if documents see each other, 0.2 to 0.9."""
CHUNK, CHUNK_ON_GPU = 2**24, 2**27
"""Logits that are computed at once: 64 MiB in fp32; 512 MiB on a GPU, which small products leave idle."""
TILE = 128
"""Rows that a GPU's matrix products compute together: the last of 1,046 rows would leave most of a tile idle."""


class LanguageModel(nn.Module):
    """Computes losses from the logits of a few tokens at a time: with a vocabulary of 100,000, nothing takes as much
    memory as all of them. Knows whether the model `is_causal` and `keeps_documents_apart`.

    `lm` comes from AutoModelForCausalLM, fp32; or is a PeftModel of such a model. Where it may have no weights yet,
    `probe` is a small model of the same class with some, that tells what has to be tried. `attention` is a value of
    task.attention other than auto.
    """

    def __init__(self, lm: Any, probe: "LanguageModel | None" = None, attention: str = "sdpa") -> None:
        super().__init__()
        self.lm = lm
        self._masked, self._takes_lengths = implementations(self.hf), False
        self._no_split_modules = fsdp_blocks(self.hf)
        config = self.hf.config.get_text_config()
        self._vocabulary = self.hf.get_output_embeddings().weight.shape[0]
        self._softcap = getattr(config, "final_logit_softcapping", None)  # Gemma 2
        scale, divisor = getattr(config, "logit_scale", None), getattr(config, "logits_scaling", None)
        self._scale = (scale or 1.0) / (divisor or 1.0)  # Cohere, Granite
        self.hf.get_input_embeddings().register_forward_hook(_in_bf16_under_autocast)
        head = self.hf.get_output_embeddings()
        is_linear = isinstance(head, nn.Linear)  # with adapters it is not
        if is_linear:
            # around it, FSDP gathers the weight
            head.forward = partial(self._head_forward, head)
        if probe is None:
            self.eval()
            kinds = RuntimeError, ValueError, IndexError, TypeError  # its config can be built, but not run
            with explained(f"{type(self.hf).__name__} fails on a few tokens: ", kinds):
                self._probe(is_linear)
        else:
            self.is_causal: bool = probe.is_causal
            self.keeps_documents_apart: bool = probe.keeps_documents_apart
            self._has_known_head: bool = probe._has_known_head and is_linear
            self.unused: list[str] = probe.unused
        if attention != "sdpa":
            self.set_attention(attention)
        for part in self.unused:
            self.hf.base_model.get_submodule(part).requires_grad_(False)
        self.train()

    @property
    def hf(self) -> Any:
        """The PreTrainedModel."""
        return without_adapters(self.lm)

    @cached_property
    def flops(self) -> Flops | None:
        """The operations of a step; None: unknown."""
        return count_flops(self.hf, self.unused)

    def get_input_embeddings(self) -> nn.Module:
        """Return the first layer: Accelerate has FSDP gather it, and the last, by itself."""
        return self.hf.get_input_embeddings()

    def get_output_embeddings(self) -> nn.Module:
        """Return the last layer."""
        return self.hf.get_output_embeddings()

    def set_attention(self, name: str) -> None:
        """Compute losses with this attention in place of the masked one. Raise a ValueError if the class can't."""
        set_attention(self.hf, name)
        self._takes_lengths = name in BY_LENGTHS

    def forward(self, method: Literal["loss", "score", "generate"], *args: Any, **kwargs: Any) -> Any:
        """Call the method of this name: FSDP gathers weights, and Accelerate casts, around `forward` alone."""
        return getattr(self, method)(*args, **kwargs)

    def loss(self, input_ids: Tensor, position_ids: Tensor, index: Tensor, targets: Tensor, **lengths: Any) -> Tensor:
        """Return the loss summed over the targets, shape (), fp32.

        Args:
            input_ids: shape (batch, length), int64; padding at the end, where nothing that counts sees it.
            position_ids: of the same shape; where they start anew, another document begins.
            index: positions with a target, in the flattened batch; shape (targets,), int64.
            targets: the tokens to predict there; of the same shape.
            lengths: those of `document_lengths`, for an attention that takes them.
        """
        states = self._states(input_ids, position_ids, **lengths).flatten(0, 1).index_select(0, index)
        if self._has_known_head:
            return self.hf.get_output_embeddings()(states, targets)
        return F.cross_entropy(states.float(), targets, reduction="sum")  # they are logits

    def score(
        self, input_ids: Tensor, position_ids: Tensor, index: Tensor, targets: Tensor, **lengths: Any
    ) -> tuple[Tensor, Tensor]:
        """Return, for the arguments of `loss`, what each target contributes to it, and 1 if it was the likeliest token,
        else 0; both of shape (targets,), fp32. Without gradients."""
        states = self._states(input_ids, position_ids, **lengths).flatten(0, 1).index_select(0, index)
        losses, correct = [], []
        rows = self._rows_at_once(states)
        for chunk, expected in zip(states.split(rows), targets.split(rows), strict=True):
            logits = self._logits(chunk).float()
            losses.append(F.cross_entropy(logits, expected, reduction="none"))
            correct.append((logits.argmax(-1) == expected).float())
        return torch.cat(losses), torch.cat(correct)

    def generate(self, input_ids: Tensor, **options: Any) -> Tensor:
        """Return `input_ids` with their continuation by transformers' generate, whose cache needs masked attention."""
        chosen = implementations(self.hf)
        self.hf.set_attn_implementation(self._masked)
        try:
            return self.hf.generate(input_ids, **options)
        finally:
            self.hf.set_attn_implementation(chosen)

    def _states(
        self, input_ids: Tensor, position_ids: Tensor, cu_seq_lens: Tensor | None = None, max_length: int | None = None
    ) -> Tensor:
        """Return what the output layer sees; if `_logits` cannot make the logits from that, the logits."""
        inputs = {"input_ids": input_ids, "position_ids": position_ids, "use_cache": False}
        if self._takes_lengths:
            assert cu_seq_lens is not None  # else flash_attention_2 would let documents see each other
            inputs |= {"cu_seq_lens_q": cu_seq_lens, "cu_seq_lens_k": cu_seq_lens}
            inputs |= {"max_length_q": max_length, "max_length_k": max_length}
        return self.hf.base_model(**inputs).last_hidden_state if self._has_known_head else self.hf(**inputs).logits

    def _logits(self, states: Tensor) -> Tensor:
        if not self._has_known_head:
            return states
        logits = self.hf.get_output_embeddings()(states)
        if self._scale != 1:
            logits = logits * self._scale
        return logits if self._softcap is None else (logits / self._softcap).tanh() * self._softcap

    def _head_forward(self, head: nn.Linear, states: Tensor, targets: Tensor | None = None) -> Tensor:
        """Return the last layer's outputs; with targets, the loss."""
        if targets is None:
            return type(head).forward(head, states)
        rows = self._rows_at_once(states)
        return linear_cross_entropy(states, head.weight, head.bias, targets, self._scale, self._softcap, rows)

    def _rows_at_once(self, states: Tensor) -> int:
        rows = (CHUNK_ON_GPU if states.device.type == "cuda" else CHUNK) // self._vocabulary
        return rows // TILE * TILE if rows > TILE else max(1, rows)

    def _probe(self, is_linear: bool) -> None:
        """Try the model on two rows of documents: does no token see the next one, do the documents not see each other,
        are the logits what `_logits` makes of the states, and which parts does text pass through?"""
        rows = self._trial_rows()
        documents = list(zip(*(rows[n].view(1, -1).tensor_split(ENDS[:-1], dim=1) for n in rows), strict=True))
        tokens, positions = documents[1]
        with torch.no_grad():
            self._has_known_head = False
            together, alone = self._states(**rows), [self._states(*document) for document in documents]
            beginning = self._states(tokens[:, :-1], positions[:, :-1])
            self._has_known_head = is_linear
            known = self._logits(self._states(tokens, positions))
        self.is_causal = _equal(alone[1][:, :-1], beginning)
        self.keeps_documents_apart = _equal(together.flatten(0, 1), torch.cat(alone, dim=1)[0])
        self._has_known_head = is_linear and known.shape == alone[1].shape and _equal(known, alone[1])
        self.unused = self._unused_parts(self._states(tokens, positions))

    def _trial_rows(self) -> dict[str, Any]:
        tokens = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6], [5, 3, 5, 8, 9, 7, 9, 3]]) % self._vocabulary
        starts = torch.tensor([[0, 0, 0, 3, 3, 3, 3, 3], [0, 0, 0, 0, 0, 0, 6, 6]])
        return {"input_ids": tokens, "position_ids": torch.arange(8) - starts}

    def refuses(self, attention: str, device: str, dtype: torch.dtype) -> str | None:
        """Return why this model, a small one, can't be trained with this attention on the device in `dtype`; None if it
        can. On rows of several documents it must give the states of masked attention, and gradients."""
        model: LanguageModel = copy.deepcopy(self).eval()
        name = type(self.hf).__name__
        try:
            rows = send_to_device(self._trial_rows() | document_lengths(ENDS), device)
            with torch.autocast(device, dtype, enabled=dtype != torch.float32):
                expected = model.to(device)._states(**rows).float().detach()
                model.set_attention(attention)
                found = model._states(**rows).float().detach()
                model.train()._states(**rows).sum().backward()  # with what training adds, such as dropout
        except Exception as error:  # of any library on the way
            return f"{name} can't use it, {cause(error).split('. ')[0]}"
        difference = float((found - expected).norm() / expected.norm())
        says = f"{name} gives states that differ by {difference:.0%}: documents see each other, or too little"
        return None if difference < ROUNDING else says

    def _unused_parts(self, states: Tensor) -> list[str]:
        """Return the names of the parts that `states` does not depend on, such as a vision tower: to be frozen, as DDP
        would wait for their gradients."""
        states.sum().backward()
        used = {parameter for parameter in self.parameters() if parameter.grad is not None}
        self.zero_grad()
        return [name for name, part in self.hf.base_model.named_children() if used.isdisjoint(part.parameters())]


def small_model(config: PreTrainedConfig) -> LanguageModel:
    """Return a model of the same class with few and narrow layers, one of each kind, for a LanguageModel to know what
    to expect; where the class refuses that, with wider ones. Leaves the random numbers as they were."""
    own = config.get_text_config()
    kinds = vars(own).get("layer_types")  # a mere property follows from other fields
    few = {"num_hidden_layers": len(set(kinds)) if kinds else 2, "vocab_size": 64, "sliding_window": 2}
    heads = getattr(own, "num_attention_heads", None)
    is_head_implied = heads and not vars(own).get("head_dim")
    width = 4 * (own.hidden_size // heads) if is_head_implied else 64  # heads of its own size: kernels refuse some
    narrow = {"hidden_size": width, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    no_special_tokens = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    with torch.random.fork_rng(devices=[]):
        for sizes in (few | narrow, few | narrow | {"head_dim": 16}, few):
            with suppress(Exception):  # narrower than the class allows
                small = copy.deepcopy(config)
                text = small.get_text_config()
                text.update({name: size for name, size in sizes.items() if getattr(text, name, None) is not None})
                text.update(no_special_tokens | ({"layer_types": list(dict.fromkeys(kinds))} if kinds else {}))
                return LanguageModel(AutoModelForCausalLM.from_config(small, dtype=torch.float32))
        return LanguageModel(AutoModelForCausalLM.from_config(copy.deepcopy(config), dtype=torch.float32))


def _in_bf16_under_autocast(_module: nn.Module, _inputs: Any, states: Tensor) -> Tensor:
    """Return the embedding's output in bf16 where the blocks compute in it: what they add to it is then kept and moved
    in half the bytes, as under FSDP. Under fp16 it could overflow."""
    device = states.device.type
    has_autocast = torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)
    return states.bfloat16() if has_autocast and torch.get_autocast_dtype(device) == torch.bfloat16 else states


def _equal(a: Tensor, b: Tensor) -> bool:
    return torch.allclose(a, b, rtol=1e-4, atol=1e-5 * float(b.abs().max()))
