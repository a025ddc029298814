"""Sequences of documents: how a language model is given them, and attends within them."""

import torch

from src.tasks.text.attention import document_lengths
from src.tasks.text.causal_lm_settings import CausalLMSettings
from src.tasks.text.decoder import Decoder
from src.tasks.text.packing import Chunk, batch_tensors
from src.tasks.text.rows import Batch
from src.tasks.text.trial import unsupported_reason


class PackedSequences(CausalLMSettings, Decoder):
    """Makes batches of packed documents, and keeps these apart."""

    def choose_attention(self) -> str:
        """Return the name of the attention that suits the device and the data, and note it."""
        state, attention, note = self.state, "sdpa", ""
        # the mask of a long sequence would take more memory than anything else
        has_use = self.packing or state.cp.size > 1
        if self.attention == "auto" and has_use and state.device == "cuda" and state.dtype != torch.float32:
            if reason := unsupported_reason(self._config, "varlen", self.packing, state.device, state.dtype):
                note = f" (not varlen: {reason})"
            else:
                attention = "varlen"
        state.optimizations.append(f"{attention} attention{note}")
        return attention

    def collate(self, samples: list[list[Chunk]]) -> Batch:
        lengths = [[len(chunk["input_ids"]) for chunk in sample] for sample in samples]
        sizes = [*map(sum, lengths)]
        width = max(self.sequence_length if self.packing else 1, *sizes)
        width += -width % self.state.cp.size
        inputs, ends = batch_tensors(samples, width, self._tokenizer.pad_token_id or 0)
        return {
            "inputs": inputs | document_lengths(ends),
            "tokens": sum(sizes),
            "pairs": sum(n * (n + 1) // 2 for row in lengths for n in row),
        }
