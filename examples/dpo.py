"""Direct preference optimization (DPO) of any transformers decoder: `--task.name=dpo`.

Rafailov et al. 2023 (https://arxiv.org/abs/2305.18290): of two answers to a prompt, the policy learns to prefer the
chosen one by more than the reference, a frozen copy of the model that it started from.
"""

import copy
import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from datasets import Dataset
from pydantic import PositiveFloat, PositiveInt
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, logsigmoid
from torch.nn.utils.rnn import pad_sequence

from src.config.errors import UserError
from src.config.settings import Values
from src.tasks.base import Counts
from src.tasks.text.chats import Chat, as_tools, encode_chat, encode_messages
from src.tasks.text.decoder import Decoder
from src.tasks.text.load import fsdp_blocks, load_exported
from src.tasks.text.rows import as_json, require_text
from src.tasks.text.text_task import PART_NAMES
from src.tasks.text.tokenizing import Chunker

Answer = dict[str, str | None]
"""An answer with what it answers: prompt and completion, or messages and tools as `encode_chat` reads them."""


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


@dataclass(frozen=True)
class TextOrChat:
    """Returns a text, or a list of messages, as JSON. Raises a ValueError for anything else, and for messages that an
    answer has to end if they do not."""

    template: str
    is_answer: bool

    def __call__(self, value: Any) -> str:
        if not isinstance(value, list):
            return as_json(require_text(value))
        messages = encode_messages(value, self.template)
        if self.is_answer and json.loads(messages)[-1]["role"].lower() != "assistant":
            raise ValueError("does not end with a turn of the assistant")
        return messages


def answers_of(row: dict[str, str | None]) -> tuple[Answer, Answer]:
    """Return the chosen and the rejected answer of a row of TextOrChat's values. Raise a ValueError that says why the
    row is none of those that `Dpo` reads."""
    prompt, chosen, rejected = (json.loads(row.get(name) or "null") for name in ("prompt", "chosen", "rejected"))
    if not isinstance(chosen, list) and not isinstance(rejected, list):
        if not isinstance(prompt, str):
            raise ValueError("has texts to choose from, but no text as a prompt")
        return {"prompt": prompt, "completion": chosen}, {"prompt": prompt, "completion": rejected}
    if not (isinstance(chosen, list) and isinstance(rejected, list)):
        raise ValueError("has a text and a list of messages to choose from")
    chats: list[Chat] = [chosen, rejected]
    if isinstance(prompt, list):
        size = len(prompt)
        chats = [chat if chat[:size] == prompt else prompt + chat for chat in chats]
    else:  # the last message of each is its answer, even if they are the same
        pairs = zip(chosen[:-1], rejected[:-1], strict=False)
        size = len([*takewhile(lambda pair: pair[0] == pair[1], pairs)])
        if not size:
            raise ValueError("has two chats that begin with different messages, so there is no prompt")
        if prompt and not any(prompt.strip() in message["content"] for message in chosen[:size]):
            raise ValueError("has a prompt that is in neither chat")
    if any(chat[size]["role"].lower() in ("system", "developer", "user") for chat in chats):
        raise ValueError("has answers to different prompts: not both begin with a turn of the assistant, or of a tool")
    # turns of weight 0 are not learnt from
    weighted = ([message | {"weight": 0} for message in chat[:size]] + chat[size:] for chat in chats)
    one, other = ({"messages": as_json(chat), "tools": row.get("tools")} for chat in weighted)
    return one, other


class Dpo(Decoder):
    """Learns which of two answers to prefer.

    The dataset's columns are prompt, chosen and rejected: texts, or lists of messages. Like TRL, it also reads chosen
    and rejected as whole chats, without a prompt or with its text: what both begin with is the prompt. A `tools` column
    beside lists of messages describes the tools that they may call. Only turns of the assistant are learnt from.
    """

    name: Literal["dpo"] = "dpo"
    """The task to train."""
    beta: PositiveFloat = 0.1
    """Penalty on the policy for departing from the reference."""
    sequence_length: PositiveInt = 256
    """Maximum number of tokens that the model sees. Longer answers are truncated."""
    hf_name: ClassVar[str] = "policy"
    metric_names: ClassVar[tuple[str, ...]] = ("accuracy", "margin", "chosen_log_ratio", "rejected_log_ratio")

    def validation_errors(self) -> Iterator[str]:
        yield from super().validation_errors()
        if self.lora.r:
            yield "task.lora.r: all weights are trained here, without adapters"

    def load_model(self) -> Any:
        model = super().load_model().eval()
        tokens = torch.arange(8)[None]
        with torch.no_grad():
            alone, followed = (model(input_ids=tokens[:, :size], use_cache=False).logits[:, :7] for size in (7, 8))
        if not (alone - followed).norm() < 1e-4 * alone.norm():  # rounding makes it 1e-6
            kind = model.config.model_type
            raise UserError(f"{kind} sees the tokens that it has to predict, as an encoder does: name a decoder")
        return model

    def wrap(self, model: Any) -> PolicyAndReference:
        return PolicyAndReference(model)

    def build_empty_model(self) -> None:
        """Leave it to `build_model`: the reference is a copy of the policy's weights."""

    @classmethod
    def run_defaults(cls, given: Mapping[str, Any]) -> Values:
        defaults = super().run_defaults(given)
        if given.get("task.architecture.model_type"):
            return defaults
        return defaults | {"epochs": 1, "optim.lr": 1e-6}  # as in TRL: at a higher rate, it forgets what it knew

    def build_datasets(self) -> tuple[list[Any], list[Any]]:
        opened = self.open_rows()
        encode, length = partial(TextOrChat, str(self._tokenizer.chat_template)), self.sequence_length
        columns: dict[str, Any] = {name: encode(is_answer=True) for name in ("chosen", "rejected")}
        if "prompt" in opened.train.column_names:
            columns["prompt"] = encode(is_answer=False)
        parts = self.usable_parts(opened, columns | {"tools": as_tools})
        train, evaluation = (self._pairs(rows, where) for rows, where in zip(parts, PART_NAMES.values(), strict=True))
        if full := sum(not all(answer["targets"] for answer in pair) for pair in train + evaluation):
            raise UserError(f"task.sequence_length={length}: {full} prompts leave no room for an answer; raise it")
        return train, evaluation

    def _pairs(self, rows: Dataset, where: str) -> list[Any]:
        """Return the chunks of each row's chosen and rejected answer."""
        pairs = []
        for number, row in enumerate(rows, start=1):
            try:
                pairs.append(answers_of(row))
            except ValueError as error:
                raise UserError(f"task.dataset={self.dataset}: row {number} of {where} {error}") from None
        formats = {tuple(answer) for answer, _ in pairs}
        if len(formats) > 1:
            raise UserError(
                f"task.dataset={self.dataset}: some rows of {where} are texts, and others lists of messages"
            )
        answers = [[*of_all] for of_all in zip(*pairs, strict=True)]
        columns = {name: name for name in formats.pop()}
        if "messages" in columns:
            if not self._tokenizer.chat_template:
                raise UserError("the tokenizer has no chat template: name a model that was trained on chats")
            write = partial(encode_chat, columns=columns, tokenizer=self._tokenizer, train_on_prompts=False)
            answers = [[{"chat": write(answer)} for answer in of_all] for of_all in answers]
            columns = {"chat": "chat"}
        known = self._config.get_text_config().vocab_size
        chunker = Chunker(columns, self._tokenizer, self.sequence_length, train_on_prompts=False, num_known=known)
        return [*zip(*(chunker.make_chunks(Dataset.from_list(rows), "answers") for rows in answers), strict=True)]

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
