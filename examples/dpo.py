"""Direct preference optimization (DPO) of any transformers decoder: `--task.name=dpo`.

Rafailov et al. 2023 (https://arxiv.org/abs/2305.18290): of two answers to a prompt, the policy learns to prefer the
chosen one by more than the reference, a frozen copy of the model that it started from.
"""

import copy
import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from pydantic import PositiveFloat, PositiveInt
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, logsigmoid
from torch.nn.utils.rnn import pad_sequence

from src.config.errors import UserError
from src.tasks.base import Counts
from src.tasks.text.model import Decoder, fsdp_blocks, load_exported
from src.tasks.text.reading import as_text
from src.tasks.text.tokenizing import Chunker


class PolicyAndReference(nn.Module):
    """Holds both models, as DDP and FSDP hook into the forward pass of one module. FSDP shards both once they are
    built."""

    def __init__(self, policy: Any) -> None:
        super().__init__()
        self.policy, self.reference = policy, copy.deepcopy(policy).requires_grad_(False)  # keeps the initial weights
        self._no_split_modules = fsdp_blocks(policy)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        """Return the policy's log probability of each answer minus the reference's, shape (pairs, 2), fp32. Arguments:
        shape (pairs, 2, length), chosen answers first; labels are the next tokens, -100 outside of answers."""
        inputs = {"input_ids": input_ids.flatten(0, 1), "use_cache": False}  # padding comes last, where nothing sees it
        with torch.no_grad():
            reference = self.reference.eval()(**inputs).logits  # no dropout, even after train()
        both, labels = (reference, self.policy(**inputs).logits), labels.flatten(0, 1)
        before, now = (cross_entropy(logits.float().transpose(1, 2), labels, reduction="none") for logits in both)
        return (before - now).sum(1).unflatten(0, (-1, 2))  # each is minus a log probability, or 0 for a label of -100


class Dpo(Decoder):
    """Learns which of two answers to prefer. The dataset's columns are prompt, chosen and rejected, all text."""

    name: Literal["dpo"] = "dpo"
    """The task to train."""
    beta: PositiveFloat = 0.1
    """Penalty on the policy for departing from the reference."""
    sequence_length: PositiveInt = 256
    """Maximum number of tokens that the model sees. Longer answers are truncated."""
    core_name: ClassVar[str] = "policy"
    metric_names: ClassVar[tuple[str, ...]] = ("accuracy", "margin", "chosen_log_ratio", "rejected_log_ratio")

    def validation_errors(self) -> Iterator[str]:
        yield from super().validation_errors()
        if self.lora.r:
            yield "task.lora.r: all weights are trained here, without adapters"

    def finish(self, model: Any) -> PolicyAndReference:
        return PolicyAndReference(model)

    def build_empty_model(self) -> None:
        """Leave it to `build_model`: the reference is a copy of the policy's weights."""

    def build_datasets(self) -> tuple[list[Any], list[Any]]:
        parts = self.usable_parts(self.open_rows(), dict.fromkeys(("prompt", "chosen", "rejected"), as_text))
        length = self.sequence_length
        formats = [{"prompt": "prompt", "completion": answer} for answer in ("chosen", "rejected")]
        chunkers = [Chunker(columns, self._tokenizer, length, train_on_prompts=False) for columns in formats]
        train, evaluation = (
            [*zip(*(c.make_chunks(rows, "answers") for c in chunkers), strict=True)] for (rows,) in parts
        )
        if full := sum(not all(answer["targets"] for answer in pair) for pair in train + evaluation):
            raise UserError(f"task.sequence_length={length}: {full} prompts leave no room for an answer; raise it")
        return train, evaluation

    def fingerprint(self, dataset: list[Any]) -> str:
        return hashlib.sha256(repr(dataset).encode()).hexdigest()

    def collate(self, samples: list[Any]) -> dict[str, Tensor]:
        answers, pads = [answer for pair in samples for answer in pair], {"input_ids": 0, "labels": -100}
        rows = {name: [torch.tensor(answer[name]) for answer in answers] for name in pads}
        return {name: pad_sequence(rows[name], True, pad).unflatten(0, (-1, 2)) for name, pad in pads.items()}

    def count(self, batch: Any) -> Counts:
        return {"targets": len(batch["labels"])}  # the loop divides by the number of pairs

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        return self.evaluate(model, batch)[0]

    def evaluate(self, model: nn.Module, batch: Any) -> tuple[Tensor, dict[str, Tensor]]:
        chosen, rejected = model(**batch).T
        outputs = {"chosen_log_ratio": chosen, "rejected_log_ratio": rejected}
        return -logsigmoid(self.beta * (chosen - rejected)).sum(), outputs

    def metrics(self, outputs: dict[str, Tensor]) -> dict[str, float]:
        chosen, rejected = (outputs[name].double() for name in self.metric_names[2:])
        values = (chosen > rejected).double(), self.beta * (chosen - rejected), chosen, rejected
        return {name: float(value.mean()) for name, value in zip(self.metric_names, values, strict=True)}

    def load_export(self, folder: Path) -> PolicyAndReference:
        model = self.build_model()  # the same seed: its reference is that of the run
        model.policy = load_exported(folder)
        return model
