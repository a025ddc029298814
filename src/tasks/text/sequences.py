"""Sequences of documents: how a language model is given them, and attends within them."""

from functools import cached_property
from typing import ClassVar

import torch
from pydantic import PrivateAttr
from transformers import PreTrainedTokenizerFast

from src.config.errors import UserError, listed
from src.tasks.text.adapters import add_tokens
from src.tasks.text.attention import document_lengths
from src.tasks.text.causal_lm_settings import CausalLMSettings
from src.tasks.text.decoder import Decoder
from src.tasks.text.packing import Chunk, batch_tensors
from src.tasks.text.rows import Batch, Encoders, Split, require_text
from src.tasks.text.tokenizing import Columns
from src.tasks.text.trial import unsupported_reason


class PackedSequences(CausalLMSettings, Decoder):
    """Chooses the columns to read, makes batches of packed documents, and keeps these apart."""

    usual_columns: ClassVar[tuple[Columns, ...]] = {"prompt": "prompt", "completion": "completion"}, {"text": "text"}
    """Columns with usual names, by role. The first that a dataset has are read if the settings name none."""
    _columns: Columns = PrivateAttr(default_factory=dict)

    @cached_property
    def _tokenizer(self) -> PreTrainedTokenizerFast:
        tokenizer = super()._tokenizer
        if self.new_tokens:
            add_tokens(tokenizer, self.new_tokens)
        return tokenizer

    def choose_columns(self, split: Split, names: list[str]) -> Encoders:
        """Choose the columns of a split to train on, among these names, and return their encoders."""
        choices = [[*usual] for usual in reversed(self.usual_columns)]
        asked = {role: column for choice in choices for role in choice if (column := getattr(self, f"{role}_column"))}
        found = (usual for usual in self.usual_columns if {*usual.values()} <= {*names})
        self._columns = asked or next(found, {})
        if [*self._columns] not in choices:
            hints = (" and ".join(f"--task.{role}_column" for role in choice) for choice in choices)
            hint = ", or ".join(dict.fromkeys(hints))
            raise UserError(f"which of the dataset's columns ({listed(names)}) to train on? Set {hint}")
        return dict.fromkeys(self._columns.values(), require_text)

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
        return self.batch_of(samples, self.sequence_length if self.packing else 1)

    def batch_of(self, samples: list[list[Chunk]], width: int) -> Batch:
        """Return a batch of these samples, in rows of at least this width."""
        lengths = [[len(chunk["input_ids"]) for chunk in sample] for sample in samples]
        sizes = [*map(sum, lengths)]
        width = max(width, *sizes)
        width += -width % self.state.cp.size
        inputs, ends = batch_tensors(samples, width, self._tokenizer.pad_token_id or 0)
        return {
            "inputs": inputs | document_lengths(ends),
            "tokens": sum(sizes),
            "sizes": sizes,  # of the rows, without padding
            "pairs": sum(n * (n + 1) // 2 for row in lengths for n in row),
        }
