"""Decoders of transformers and their loss, in little memory."""

from contextlib import nullcontext
from functools import cached_property, partial
from typing import Any, Literal

import torch
from peft.utils import TrainableTokensWrapper
from torch import Tensor, nn
from torch.nn import functional as F

from src.tasks.text.chunked_loss import linear_cross_entropy
from src.tasks.text.flops import Flops, count_flops
from src.tasks.text.pretrained import fsdp_blocks, without_adapters

CHUNK, CHUNK_ON_GPU = 2**24, 3 * 2**24
"""Logits that are computed at once: 64 MiB in fp32; 192 MiB on a GPU, which small products leave idle."""
TILE = 128
"""Rows that a GPU's matrix products compute together: the last of 1,046 rows would leave most of a tile idle."""


class LanguageModel(nn.Module):
    """Computes losses from the logits of a few tokens at a time: with a vocabulary of 100,000, nothing takes as much
    memory as all of them.

    `lm` comes from AutoModelForCausalLM, fp32, of a kind that `trial.failure` has nothing against; or is a PeftModel of
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
        with_new_rows = isinstance(head, TrainableTokensWrapper)  # its weight has them
        # with adapters it is not plain
        self._is_plain_head = with_new_rows or (type(head) is nn.Linear and head.bias is None)
        # Accelerate finds out whether layers are tied by their weights, which peft makes anew each time
        self._has_tied_rows = with_new_rows and head.token_adapter.tied_adapter is not None
        if self._is_plain_head:
            # around it, FSDP gathers the weight
            head.forward = partial(self._head_forward, head)
        used = {*self.hf.get_decoder().parameters(), *head.parameters()}
        for parameter in {*self.hf.parameters()} - used:  # such as a vision tower: DDP would wait for its gradients
            parameter.requires_grad_(False)
        self._attention = attention
        self._takes_lengths = attention != "sdpa"
        if self._takes_lengths:
            self.hf.set_attn_implementation(attention)

    @property
    def hf(self) -> Any:
        """Return the PreTrainedModel."""
        return without_adapters(self.lm)

    @cached_property
    def flops(self) -> Flops | None:
        """Return the operations of a step; None if they are unknown."""
        return count_flops(self.hf)

    def get_input_embeddings(self) -> nn.Module | None:
        """Return the first layer, which Accelerate has FSDP gather by itself; None: with the model's other parts."""
        return None if self._has_tied_rows else self.hf.get_input_embeddings()

    def get_output_embeddings(self) -> nn.Module | None:
        """Return the last layer, to be gathered with the norm before it."""
        return None if self._has_tied_rows else self.hf.get_output_embeddings()

    def forward(self, method: Literal["loss", "score", "generate"], **inputs: Any) -> Any:
        """Call the method of this name: FSDP gathers weights, and Accelerate casts, around `forward` alone."""
        return getattr(self, f"_{method}")(**inputs)

    def _loss(self, index: Tensor, targets: Tensor, **inputs: Any) -> Tensor:
        """Return the loss summed over the targets, shape (), fp32.

        Args:
            index: positions with a target, in the flattened batch; shape (targets,), int64.
            targets: the tokens to predict there; of the same shape.
            inputs: those of `logits`.
        """
        states = self._states(**inputs).flatten(0, 1).index_select(0, index)
        if self._is_plain_head:
            return self.hf.get_output_embeddings()(states, targets)
        return F.cross_entropy(self._logits(states).float(), targets, reduction="sum")

    def _score(self, index: Tensor, targets: Tensor, **inputs: Any) -> tuple[Tensor, Tensor]:
        """Return what each target contributes to the loss, and 1 if it was the likeliest token, else 0; both of shape
        (targets,), fp32. Without gradients. The arguments are those of `_loss`."""
        states = self._states(**inputs).flatten(0, 1).index_select(0, index)
        losses, correct = [], []
        rows = self._rows_at_once(states)
        for chunk, expected in zip(states.split(rows), targets.split(rows), strict=True):
            logits = self._logits(chunk).float()
            losses.append(F.cross_entropy(logits, expected, reduction="none"))
            correct.append((logits.argmax(-1) == expected).float())
        return torch.cat(losses), torch.cat(correct)

    def _generate(self, with_adapters: bool, **options: Any) -> Tensor:
        """Return what `generate` of transformers does with these options, of the model with its adapters or without."""
        if self._takes_lengths:  # of documents, of which there are none here
            self.hf.set_attn_implementation("sdpa")
        adapters = nullcontext() if with_adapters else self.lm.disable_adapter()
        with adapters, torch.compiler.set_stance("force_eager"):  # each length would be compiled anew
            tokens = self.lm.generate(**options)
        if self._takes_lengths:
            self.hf.set_attn_implementation(self._attention)
        return tokens

    def logits(self, **inputs: Any) -> Tensor:
        """Return the logits of all tokens.

        Args:
            inputs: `input_ids`, shape (batch, length), int64; padding at the end, where nothing that counts sees it.
                `position_ids`, of the same shape; where they start anew, another document begins. What
                `document_lengths` returns, for an attention that takes it.
        """
        return self._logits(self._states(**inputs))

    def _states(self, input_ids: Tensor, position_ids: Tensor, **lengths: Any) -> Tensor:
        """Return what the output layer sees."""
        inputs = {"input_ids": input_ids, "position_ids": position_ids, "use_cache": False}
        if self._takes_lengths:  # of queries and of keys, which are the same
            inputs |= {f"{name}_{of}": length for name, length in lengths.items() for of in "qk"}
        return self.hf.base_model(**inputs).last_hidden_state

    def _logits(self, states: Tensor) -> Tensor:
        return self._finished(self.hf.get_output_embeddings()(states))

    def _finished(self, logits: Tensor) -> Tensor:
        """Return the logits as the model changes them after its last layer."""
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
    """Return the embedding's output in bf16 where the blocks compute in it: what they add to it is then kept and moved
    in half the bytes, as under FSDP. Under fp16 it could overflow."""
    device = states.device.type
    is_bf16 = torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device) == torch.bfloat16
    return states.bfloat16() if is_bf16 else states
