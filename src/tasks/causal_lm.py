"""Next-token prediction with any decoder of transformers, from scratch or fine-tuned: `--task.name=causal_lm`."""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import yaml
from pydantic import NonNegativeFloat, PositiveInt, PrivateAttr, field_validator

from src.process import UserError
from src.data.text import TextSource, table_checksum
from src.models.lora import Lora
from src.models.pretrained import ModelSource, save
from src.settings import Yaml, flatten
from src.tasks.base import Task

if TYPE_CHECKING:
    import torch
    from datasets import Dataset
    from torch import Tensor
    from transformers import PreTrainedConfig, PreTrainedTokenizerFast

    from src.data.documents import Format
    from src.data.packing import Sequences
    from src.models.causal_lm import LanguageModel


ROUTERS_LOSS = re.compile("output_router_logits|(aux|z)_loss|moe_loss")
"""Fields of a config that are about it."""
NO_ROUTERS_LOSS = (
    "the auxiliary loss of a mixture of experts is not added here: it is one of the whole batch's routing, and would "
    "be another on each number of processes"
)


class CausalLM(TextSource, ModelSource, Task):
    """What comes next?"""

    name: Literal["causal_lm"] = "causal_lm"
    """The task to train."""
    architecture: dict[str, Any] = {}
    """Trains from scratch, in place of task.model: model_type as transformers names it (llama, gpt2, qwen3, …), and
    any field of its config."""
    tokenizer: str | None = None
    """A model whose tokenizer is used, or `bytes`; null: task.model's own, or bytes where trained from scratch."""
    chat_template: str | None = None
    """A Jinja file with a chat template; null: the tokenizer's own."""
    text_column: str | None = None
    """Column of raw text. Which columns are there decides where none of these four is set."""
    prompt_column: str | None = None
    """Column of prompts, together with completion_column."""
    completion_column: str | None = None
    """Column of what is to follow the prompts."""
    messages_column: str | None = None
    """Column of chats: lists of messages with role and content (and tool_calls), or ShareGPT's from and value. A column
    `tools` beside it describes what they may call."""
    learn_all: bool = False
    """Learn prompts and the other roles' turns too, not only completions and the assistant's turns."""
    sequence_length: PositiveInt = 1024
    """Tokens that the model sees at once. Longer text makes several sequences, longer prompts and chats are cut off."""
    packing: bool = True
    """Put several short documents into one sequence. They don't see each other."""
    sample_prompts: list[str] = []
    """Continued at each evaluation, for the record."""
    sample_tokens: PositiveInt = 64
    """Tokens to continue them by."""
    sample_temperature: NonNegativeFloat = 0.8
    """0: the likeliest token each time."""
    lora: Lora = Lora()
    """Low-rank adapters."""
    metric_names: ClassVar[tuple[str, ...]] = ("perplexity", "bits_per_byte", "accuracy")
    _is_chat: bool = PrivateAttr(False)

    @field_validator("architecture", mode="before")
    @classmethod
    def _with_types(cls, fields: Any) -> Any:
        return _typed(fields) if isinstance(fields, dict) else fields

    def validation_errors(self) -> Iterator[str]:
        yield from self.source_mistakes()
        yield from self.model_mistakes()
        if bool(self.model) == bool(self.architecture):
            yield "task.model or task.architecture: set one, to start from that model, or to train that from scratch"
        elif self.architecture and not isinstance(self.architecture.get("model_type"), str):
            yield "task.architecture.model_type is not set: name an architecture of transformers, such as llama"
        for name, value in flatten(self.architecture):
            if value and ROUTERS_LOSS.search(name):
                yield f"task.architecture.{name}={value}: {NO_ROUTERS_LOSS}; leave it out to train without"
        yield from self.lora.validation_errors()
        if self.lora.r and not self.model:
            yield "task.lora adapts a model that there is: set task.model, not task.architecture"
        if (self.prompt_column is None) != (self.completion_column is None):
            yield "task.prompt_column and task.completion_column: set both"
        if sum(c is not None for c in (self.text_column, self.prompt_column, self.messages_column)) > 1:
            yield "task.text_column, task.prompt_column and task.messages_column: the rows are of one kind, set one"
        if self.chat_template and not Path(self.chat_template).is_file():
            yield f"task.chat_template={self.chat_template}: no such file"
        elif self.chat_template:
            try:
                Path(self.chat_template).read_text(encoding="utf-8")
            except UnicodeDecodeError:
                yield f"task.chat_template={self.chat_template}: is not UTF-8"

    # ------------------------------------------------------------------------------------------------------- model
    def longest_sequence(self) -> int:
        return self.sequence_length

    def build_model(self) -> LanguageModel:
        from transformers import AutoModelForCausalLM

        from src.models.architecture import new_model
        from src.models.causal_lm import LanguageModel

        if self.model:
            lm: Any = self.load_model(AutoModelForCausalLM, self._config)
        else:
            lm = new_model(AutoModelForCausalLM, self._config)
        if self.lora.r:
            lm = self.lora.adapted(lm, "CAUSAL_LM", self.revision)
        model = LanguageModel(lm, has_adapter=bool(self.lora.r))
        if not model.is_causal:
            raise UserError(f"{self._config.model_type} sees the tokens that it has to predict: it is no decoder")
        if self.packing and not model.keeps_documents_apart:
            raise UserError(
                f"{self._config.model_type} lets packed documents see each other: set --task.packing=false"
            )
        return model

    @cached_property
    def _config(self) -> PreTrainedConfig:
        from src.models.architecture import new_config

        if self.model:
            config = self.with_dropout(self.load_config())
        else:
            config = self.with_dropout(new_config(self.architecture, self._tokenizer, self.sequence_length))
        if getattr(config.get_text_config(), "output_router_logits", False):
            raise UserError(
                f"task.model={self.model}: its config asks for it by output_router_logits, but {NO_ROUTERS_LOSS}; "
                f"set that to false in its config.json to train without"
            )
        self.check_fit(self.sequence_length, config, self._tokenizer)
        return config

    @cached_property
    def _tokenizer(self) -> PreTrainedTokenizerFast:
        from src.data.byte_tokenizer import byte_tokenizer

        name = self.tokenizer or (None if self.model else "bytes")
        tokenizer = byte_tokenizer() if name == "bytes" else self.load_tokenizer(name)
        if self.chat_template:
            tokenizer.chat_template = Path(self.chat_template).read_text(encoding="utf-8")
        return tokenizer

    # -------------------------------------------------------------------------------------------------------- data
    def build_datasets(self) -> tuple[Sequences, Sequences]:
        train, evaluation = self.load_rows()
        form = self._format(train)
        self._is_chat = form.messages is not None
        train = self.usable(train, "train", form.columns)
        if evaluation is not None:
            evaluation = self.usable(evaluation, "eval", form.columns)
        elif form.text and len(train) == 1:
            train, evaluation = self._cut(train, form.text)
        else:
            train, evaluation = self.split(train)
        if form.messages and not self._tokenizer.chat_template:
            raise UserError("the tokenizer has no chat template: set --task.chat_template to a Jinja file with one")
        _ = self._config  # sequence_length is checked before the work begins
        return self._sequences(train, form, "training data"), self._sequences(evaluation, form, "evaluation data")

    def _format(self, rows: Dataset) -> Format:
        from src.data.documents import Format

        if self.text_column:
            return Format(text=self.text_column)
        if self.prompt_column:
            return Format(prompt=self.prompt_column, completion=self.completion_column)
        names = rows.column_names
        tools = "tools" if "tools" in names else None
        if self.messages_column:
            return Format(messages=self.messages_column, tools=tools)
        if chats := [name for name in ("messages", "conversations") if name in names]:
            return Format(messages=chats[0], tools=tools)
        if "prompt" in names and "completion" in names:
            return Format(prompt="prompt", completion="completion")
        if "text" in names or len(names) == 1:
            return Format(text="text" if "text" in names else names[0])
        raise UserError(
            f"task.dataset={self.dataset}: which of its columns {', '.join(names)} to learn? Set "
            f"--task.text_column, or --task.prompt_column and --task.completion_column, or --task.messages_column"
        )

    def _cut(self, rows: Dataset, column: str) -> tuple[Dataset, Dataset]:
        from src.data.documents import cut_out

        length = len(rows[0][column])
        cut = round(length * (1 - self.eval_fraction))
        if not 0 < cut < length:
            raise UserError(f"task.dataset={self.dataset}: too short to keep a part of it for evaluation")
        return cut_out(rows, column, 0, cut), cut_out(rows, column, cut, length)

    def _sequences(self, rows: Dataset, form: Format, what: str) -> Sequences:
        from src.data.documents import pieces
        from src.data.packing import packed, unpacked

        table = pieces(rows, form, self._tokenizer, self.sequence_length, self.learn_all, what)
        if not table.with_format("numpy")["targets"][:].any():
            raise UserError(
                f"task.dataset={self.dataset}: the {what} has nothing to predict: no row has a completion, or a turn "
                f"of the assistant, within sequence_length={self.sequence_length}"
            )
        return packed(table, self.sequence_length) if self.packing else unpacked(table)

    def fingerprint(self, dataset: Sequences) -> str:
        return table_checksum(dataset.pieces, ["input_ids", "labels"])

    def describe(self, part: Literal["train", "eval"], dataset: Sequences) -> dict[str, float]:
        return dataset.describe(self.sequence_length) | {"skipped_rows": self.skipped_rows[part]}

    def collate(self, samples: list[list[dict[str, Any]]]) -> dict[str, Any]:
        import torch

        lengths = [sum(len(piece["input_ids"]) for piece in sample) for sample in samples]
        width = self.sequence_length if self.packing else max(lengths)
        input_ids = torch.full((len(samples), width), self._tokenizer.pad_token_id or 0)
        position_ids = torch.arange(width).repeat(len(samples), 1)
        labels = torch.full((len(samples), width), -100)
        for row, sample in enumerate(samples):
            start = 0
            for piece in sample:
                end = start + len(piece["input_ids"])
                input_ids[row, start:end] = torch.from_numpy(piece["input_ids"])
                labels[row, start:end] = torch.from_numpy(piece["labels"])
                position_ids[row, start:] -= position_ids[row, start].item()
                start = end
        index = (labels.flatten() != -100).nonzero().squeeze(1)
        return {
            "input_ids": input_ids,
            "position_ids": position_ids,
            "index": index,
            "targets": labels.flatten()[index],
            "bytes": torch.tensor([sum(int(piece["bytes"]) for piece in sample) for sample in samples]),
            "tokens": sum(lengths),
        }

    def documents(self, sample: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
        return [[piece] for piece in sample]

    def count_tokens(self, batch: dict[str, Any]) -> tuple[int, int]:
        return batch["tokens"], batch["input_ids"].numel()

    # ---------------------------------------------------------------------------------------------- loss and scores
    def loss(self, model: Any, batch: dict[str, Any]) -> tuple[Tensor, int]:
        return model(**_inputs(batch)), len(batch["targets"])

    def evaluate(self, model: Any, batch: dict[str, Any]) -> tuple[Tensor, int, dict[str, Tensor]]:
        nats, correct = model(**_inputs(batch), per_sequence=True)
        targets = (batch["index"] // batch["input_ids"].shape[1]).bincount(minlength=len(nats))
        outputs = {"nats": nats, "correct": correct, "targets": targets, "bytes": batch["bytes"]}
        return nats.sum(), len(batch["targets"]), outputs

    def metrics(self, outputs: dict[str, Tensor]) -> dict[str, float]:
        nats, correct, targets, size = (
            outputs[n].double().sum().item() for n in ("nats", "correct", "targets", "bytes")
        )
        return {
            "perplexity": math.exp(min(nats / targets, 700.0)),
            "bits_per_byte": nats / math.log(2) / max(size, 1),
            "accuracy": correct / targets,
        }

    def report(self, model: Any, device: torch.device) -> dict[str, list[dict[str, str]]]:
        samples = [{"prompt": p, "continuation": self._continuation(model, p, device)} for p in self.sample_prompts]
        return {"samples": samples} if samples else {}

    def _continuation(self, model: Any, prompt: str, device: torch.device) -> str:
        import torch

        tokenizer = self._tokenizer
        if self._is_chat:
            chat = [{"role": "user", "content": prompt}]
            text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
            tokens = tokenizer(text, add_special_tokens=False)["input_ids"]
        else:
            tokens = tokenizer(prompt)["input_ids"] or [tokenizer.eos_token_id or 0]
        limit = (
            getattr(self._config.get_text_config(), "max_position_embeddings", None) or len(tokens) + self.sample_tokens
        )
        tokens = tokens[-(limit - 1) :]
        sampling = {"do_sample": True, "temperature": self.sample_temperature, "top_k": 0}
        with torch.random.fork_rng(), torch.no_grad():  # training draws what it would without
            torch.manual_seed(0)
            input_ids = torch.tensor([tokens], device=device)
            arguments = {
                "attention_mask": torch.ones_like(input_ids),
                "max_new_tokens": min(self.sample_tokens, limit - len(tokens)),
                "eos_token_id": tokenizer.eos_token_id,
                "pad_token_id": tokenizer.pad_token_id or tokenizer.eos_token_id or 0,
                "synced_gpus": torch.distributed.is_initialized(),  # FSDP: until all processes are done
                **(sampling if self.sample_temperature else {"do_sample": False}),
            }
            output = model(input_ids, generate=arguments)
        return str(tokenizer.decode(output[0, len(tokens) :], skip_special_tokens=True))

    # ------------------------------------------------------------------------------------------------------- export
    def export(self, model: Any, weights: dict[str, Tensor], folder: Path) -> None:
        weights = {name.removeprefix("lm."): weight for name, weight in weights.items()}
        save(model.lm, self._tokenizer, weights, folder)
        if self.lora.merge:
            self.lora.save_merged(self.load_model, self._config, folder)
            self._tokenizer.save_pretrained(folder / "merged")

    def card(self) -> dict[str, Any]:
        adapter = {"library_name": "peft"} if self.lora.r else {}
        return {"pipeline_tag": "text-generation", **self.model_card(), **self.source_card(), **adapter}


def _inputs(batch: dict[str, Any]) -> dict[str, Tensor]:
    return {name: batch[name] for name in ("input_ids", "position_ids", "index", "targets")}


def _typed(value: Any) -> Any:
    """From the command line, values are text: read as YAML, but for 1e-5, which YAML takes for text."""
    if isinstance(value, dict):
        return {name: _typed(inner) for name, inner in value.items()}
    if not isinstance(value, str):
        return value
    read: Any = value
    with contextlib.suppress(yaml.YAMLError):
        read = yaml.load(value, Loader=Yaml)  # it is a safe one
    with contextlib.suppress(ValueError):
        read = float(read) if isinstance(read, str) else read
    return read
