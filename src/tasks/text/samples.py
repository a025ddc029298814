"""Samples of what a language model has learnt to write: continuations of a few prompts, at each evaluation."""

from itertools import islice
from typing import Any

from accelerate.utils import gather_object, send_to_device

from src.config.errors import UserError
from src.tasks.base import Table
from src.tasks.text.export import ENDS
from src.tasks.text.sequences import PackedSequences
from src.tasks.text.tokenizing import missing_ends

MAX_NEW = 32
"""Tokens of a continuation, at most. Each takes a forward pass over all that are before it: there is no cache."""


class Samples(PackedSequences):
    """Continues prompts at each evaluation."""

    def choose_attention(self) -> str:
        self._own_prompts()  # refuse them before training
        return super().choose_attention()

    def generate(self, model: Any, dataset: Any) -> Table:
        if any(dataset is other for other in self.eval_sets.values()):
            return []  # once in each evaluation is enough
        prompts, tokenizer, rows = self._own_prompts(), self._tokenizer, []
        if self.samples is None:
            first = islice(getattr(dataset, "dataset", dataset).chunks, 2)  # --check evaluates on a subset
            # the first label that counts is the token after the prompt; in text alone, it is that of the first token
            prompts = [c["input_ids"][: n + 1].tolist() for c in first if (n := (c["labels"] == -100).argmin())]
        ends = {tokenizer.eos_token, *(mark for find in ENDS for mark in find(tokenizer)[:1])}
        for prompt in prompts:
            tokens = [*prompt]
            for _ in range(min(MAX_NEW, self.sequence_length - len(prompt))):
                chunk = {"input_ids": tokens, "labels": [-100] * (len(tokens) - 1) + [0]}
                batch = send_to_device(self.batch_of([[chunk]], 1), self.state.device)
                logits = model(**batch["inputs"] | {"targets": None})
                # Rounding may differ between processes: the first one decides. Of those that share a sequence, that is
                # the one that has its last token.
                tokens += gather_object(logits.argmax(-1).tolist())[:1]
                if tokenizer.convert_ids_to_tokens(tokens[-1]) in ends:
                    break
            given, text = map(tokenizer.decode, (prompt, tokens))  # alone, new ones may lose their first space
            rows.append({"prompt": given, "continuation": text[len(given) :]})
        return rows

    def _own_prompts(self) -> list[list[int]]:
        """Return the tokens of the texts in the settings, as documents begin. Raise a UserError that names one that is
        empty or too long."""
        prompts = []
        for text in self.samples or ():
            tokens = missing_ends(text, self._tokenizer)[0] + self._tokenizer.encode(text, add_special_tokens=False)
            if not text or len(tokens) >= self.sequence_length:
                says = f"must have 1 to {self.sequence_length - 1} tokens (task.sequence_length)"
                raise UserError(f"task.samples: {text[:40]!r} {says}")
            prompts.append(tokens)
        return prompts
