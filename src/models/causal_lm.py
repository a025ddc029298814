"""A causal language model of transformers as the loop calls it: tokens and targets in, the summed loss out."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from src.process import UserError
from src.models.pretrained import fsdp_blocks

CHUNK, CHUNK_ON_GPU = 2**24, 2**27
"""Logits that are computed at once: 64 MiB in fp32; 512 MiB on a GPU, which small products leave idle."""


class LanguageModel(nn.Module):
    """Computes the loss inside its forward pass, where FSDP has gathered the output layer, and from the logits of a few
    tokens at a time: with a vocabulary of 100,000, nothing takes as much memory as all of them.
    """

    def __init__(self, lm: Any, has_adapter: bool = False) -> None:
        """
        Args:
            lm: of AutoModelForCausalLM, fp32, on the CPU; inside a PeftModel where `has_adapter`.
        """
        super().__init__()
        self.lm = lm
        self._has_adapter = has_adapter
        self._no_split_modules = fsdp_blocks(self.hf)
        config = self.hf.config.get_text_config()
        self._vocabulary = self.hf.get_output_embeddings().weight.shape[0]
        self._softcap = getattr(config, "final_logit_softcapping", None)  # Gemma 2
        scale, divisor = getattr(config, "logit_scale", None), getattr(config, "logits_scaling", None)
        self._scale = (scale or 1.0) / (divisor or 1.0)  # Cohere, Granite
        self.eval()
        try:
            self.is_causal, self.keeps_documents_apart, self._has_known_head = self._probe()
        except (RuntimeError, ValueError, IndexError, TypeError) as error:  # its config builds, but does not run
            reason = " ".join(str(error).split())[:200]
            raise UserError(f"{type(self.hf).__name__} fails on eight tokens: {reason}") from error
        self._freeze_what_text_does_not_pass()
        self.train()

    @property
    def hf(self) -> Any:
        """The PreTrainedModel."""
        return self.lm.get_base_model() if self._has_adapter else self.lm

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor | None = None,
        index: Tensor | None = None,
        targets: Tensor | None = None,
        per_sequence: bool = False,
        generate: dict[str, Any] | None = None,
    ) -> Any:
        """
        Args:
            input_ids: shape (batch, length), int64; padding at the end, where nothing that counts sees it.
            position_ids: of the same shape; where they start anew, another document begins.
            index: of what has a target, in the flattened batch; shape (targets,), int64.
            targets: the tokens to predict there; shape (targets,), int64.
            per_sequence: return what each sequence contributes. Without gradients.
            generate: only continue `input_ids`, with these arguments of transformers' generate.

        Returns:
            The loss summed over the targets, shape (), fp32. With `per_sequence`: that of each sequence, fp32, and how
            many of its targets were the likeliest token, both of shape (batch,). With `generate`: the tokens.
        """
        if generate is not None:
            return self.hf.generate(input_ids, **generate)
        assert index is not None
        assert targets is not None
        states = self._states(input_ids, position_ids).flatten(0, 1).index_select(0, index)
        if not per_sequence:
            return self._loss(states, targets)
        losses, correct = [], []
        for part, expected in zip(*self._chunks(states, targets), strict=True):
            logits = self._logits(part).float()
            losses.append(F.cross_entropy(logits, expected, reduction="none"))
            correct.append((logits.argmax(-1) == expected).float())
        rows, sums = index // input_ids.shape[1], states.new_zeros(2, len(input_ids), dtype=torch.float32)
        return sums[0].index_add(0, rows, torch.cat(losses)), sums[1].index_add(0, rows, torch.cat(correct))

    def _states(self, input_ids: Tensor, position_ids: Tensor | None) -> Tensor:
        """What the output layer sees, or where that is not all there is between it and the logits: the logits."""
        if self._has_known_head:
            output = self.hf.base_model(input_ids=input_ids, position_ids=position_ids, use_cache=False)
            return output.last_hidden_state
        return self.hf(input_ids=input_ids, position_ids=position_ids, use_cache=False).logits

    def _logits(self, states: Tensor) -> Tensor:
        if not self._has_known_head:
            return states
        logits = self.hf.get_output_embeddings()(states) * self._scale
        return logits if self._softcap is None else (logits / self._softcap).tanh() * self._softcap

    def _loss(self, states: Tensor, targets: Tensor) -> Tensor:
        def of(states: Tensor, targets: Tensor) -> Tensor:
            return F.cross_entropy(self._logits(states).float(), targets, reduction="sum")

        parts = self._chunks(states, targets)
        if len(parts[0]) == 1 or not self._has_known_head:
            return of(states, targets)
        head = self.hf.get_output_embeddings()
        is_half = states.dtype != torch.float32 or torch.is_autocast_enabled(states.device.type)
        is_linear = type(head) is nn.Linear and self._softcap is None and self._scale == 1
        linear_cross_entropy = getattr(F, "linear_cross_entropy", None)  # torch >= 2.14
        if linear_cross_entropy and is_linear and not is_half:  # in half precision it sums up in half precision too
            options = nn.LinearCrossEntropyOptions(batch_chunk_size=len(parts[0][0]))
            return linear_cross_entropy(
                states, head.weight, targets, linear_bias=head.bias, reduction="sum", options=options
            )
        return torch.stack([checkpoint(of, *part, use_reentrant=False) for part in zip(*parts, strict=True)]).sum()

    def _chunks(self, states: Tensor, targets: Tensor) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        size = max(1, (CHUNK_ON_GPU if states.device.type == "cuda" else CHUNK) // self._vocabulary)
        return states.split(size), targets.split(size)

    def _freeze_what_text_does_not_pass(self) -> None:
        """The vision tower of Gemma 3, say: DDP would wait for its gradients."""
        states = self._states(torch.tensor([[3, 1, 4, 1]]) % self._vocabulary, None)
        nodes, passed, parameters = [states.grad_fn], set(), set()
        while nodes:
            node = nodes.pop()
            if node is not None and node not in passed:
                passed.add(node)
                parameters.add(getattr(node, "variable", None))
                nodes.extend(next_node for next_node, _ in node.next_functions)
        for part in self.hf.base_model.children():
            if not any(parameter in parameters for parameter in part.parameters()):
                part.requires_grad_(False)

    @torch.no_grad()
    def _probe(self) -> tuple[bool, bool, bool]:
        """Tries the model on two documents of four tokens: does no token see the next one, does the second document not
        see the first, and are the logits what `_logits` makes of the states?"""
        tokens = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6]]) % self._vocabulary
        positions = torch.arange(4).repeat(2)[None]
        self._has_known_head = False
        both, second = self._states(tokens, positions)[:, 4:], self._states(tokens[:, 4:], positions[:, 4:])
        beginning = self._states(tokens[:, 4:7], positions[:, 4:7])
        self._has_known_head = True
        known = self._logits(self._states(tokens[:, 4:], positions[:, 4:]))
        has_known_head = known.shape == second.shape and _equal(known, second)
        return _equal(second[:, :3], beginning), _equal(both, second), has_known_head


def _equal(a: Tensor, b: Tensor) -> bool:
    return torch.allclose(a, b, rtol=1e-4, atol=1e-5 * float(b.abs().max()))
