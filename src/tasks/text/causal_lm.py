"""Next-token prediction with any decoder of transformers, from scratch or fine-tuned: `--task.name=causal_lm`."""

import math
from functools import cached_property, partial
from itertools import chain, groupby
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from accelerate import Accelerator
from datasets import Dataset
from pydantic import PositiveInt
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from src.config.errors import UserError, explained
from src.config.settings import ResumeSafe
from src.tasks.base import ContextParallel, Counts, Table, Tensors
from src.tasks.text.attention import document_lengths
from src.tasks.text.chats import CHATML, ChatEncoder, as_tools, ends_of_turn
from src.tasks.text.context_parallel import own_part, register, require_known_positions
from src.tasks.text.decoder import Decoder
from src.tasks.text.documents import Chunker, Columns, find_columns, split_text
from src.tasks.text.four_bit import keep_layout, loading_options
from src.tasks.text.language_model import LanguageModel
from src.tasks.text.new_tokens import add_rows, add_tokens
from src.tasks.text.packing import Batch, Chunk, Sequences, batch_tensors, pack, unpacked
from src.tasks.text.pretrained import check_fit, load_exported, save, set_ends
from src.tasks.text.questions import Question, ask, read_questions
from src.tasks.text.streaming.blocks import Mixture
from src.tasks.text.streaming.sources import by_source
from src.tasks.text.trial import failure, require_decoder, require_splittable
from src.tasks.text.values import Encoders, as_is, as_text

SUMS = ("nats", "targets", "correct")
"""Sums of an evaluation over a sequence: the loss, the number of targets, and of those that were the likeliest."""


class CausalLM(Decoder):
    """Predicts the next token of text, prompts or chats."""

    name: Literal["causal_lm"] = "causal_lm"
    """The task to train."""
    chat_template: str | None = None
    """A Jinja file with a chat template, or chatml, a usual one; null: the tokenizer's own."""
    new_tokens: list[str] = []
    """Tokens to add to the tokenizer, such as <|im_start|>. Their rows in the first and the last layer are trained,
    beside adapters too."""
    text_column: str | None = None
    """Column of raw text. If none of these four is set, the columns that are there decide."""
    prompt_column: str | None = None
    """Column of prompts, together with completion_column."""
    completion_column: str | None = None
    """Column of what is to follow the prompts."""
    messages_column: str | None = None
    """Column of chats: lists of messages with role and content (and tool_calls), or ShareGPT's from and value. A column
    `tools` beside it describes what they may call."""
    train_on_prompts: bool = False
    """Prompts and the other roles' turns contribute to the loss too, not only completions and the assistant's turns."""
    sequence_length: PositiveInt = 1024
    """Tokens that the model sees at once. Longer text makes several sequences, longer prompts and chats are cut off."""
    packing: bool = True
    """Put several short documents into one sequence. They don't see each other."""
    questions: ResumeSafe[str | None] = None
    """A .jsonl file of questions, each with the facts that a right answer names, literally:
    {"question": "Which flag …?", "facts": ["--check"]}. They are answered at the end, without the adapters too."""
    attention: ResumeSafe[Literal["auto", "sdpa"]] = "auto"
    """How packed documents are kept apart: sdpa by a mask. auto: by torch's varlen kernel, which needs none, in half
    precision on a GPU, if the model can, else by a mask."""
    metric_names: ClassVar[tuple[str, ...]] = ("perplexity", "accuracy")
    next_step: ClassVar[tuple[str, str]] = "talk", "src.tools.generate"
    splits_sequences: ClassVar[bool] = True
    _cp: ContextParallel = ContextParallel()
    _columns: Columns = {}
    _attention: str = "sdpa"
    _questions: list[Question] = []

    def prepare_for(self, device: str, dtype: torch.dtype) -> list[str]:
        chosen_before = super().prepare_for(device, dtype)  # the trial below computes attention too
        self._attention, note = "sdpa", ""
        # a mask of a long sequence would take as much memory as nothing else does
        has_use = self.packing or self._cp.size > 1
        if self.attention == "auto" and has_use and device == "cuda" and dtype != torch.float32:
            if refusal := failure(self._config, "varlen", self.packing, device, dtype):
                note = f" (not varlen: {refusal})"
            else:
                self._attention = "varlen"
        chosen = f"{self._attention} attention{note}"
        if self._cp.size > 1:
            require_known_positions(self._config)
            require_splittable(self._config, self.packing)
            self._attention = register(self._attention, self._cp)
            chosen += f", across {self._cp.size} processes"
        return [*chosen_before, chosen]

    def split_sequences(self, cp: ContextParallel) -> None:
        self._cp = cp

    def load_model(self) -> Any:
        model = super().load_model()
        if self.new_tokens:
            self._trained_rows = add_rows(model, self._tokenizer, self.new_tokens)
        return model

    def build_empty_model(self) -> Any:
        if self.new_tokens:
            return None  # their rows start from those of all other tokens, which no process would have
        return super().build_empty_model()

    def reference(self) -> "CausalLM":
        whole = self.model_copy(update={"attention": "sdpa"})
        whole.split_sequences(ContextParallel())
        return whole

    def finish(self, model: Any) -> LanguageModel:
        require_decoder(self._config, self.packing)
        set_ends(model, self._tokenizer)  # of what answers questions
        return LanguageModel(self.with_adapters(model), self._attention)

    def num_new_tokens(self) -> int:
        return len(self.new_tokens)

    def core(self, model: LanguageModel) -> Any:
        return model.lm

    @cached_property
    def _tokenizer(self) -> PreTrainedTokenizerFast:
        tokenizer = self.new_tokenizer()
        if self.new_tokens:
            add_tokens(tokenizer, self.new_tokens)
        if self.chat_template == "chatml":
            tokenizer.chat_template = CHATML
        elif self.chat_template:
            with explained("task.chat_template: cannot be read, ", (OSError, UnicodeDecodeError)):
                tokenizer.chat_template = Path(self.chat_template).read_text(encoding="utf-8")
        marks = ends_of_turn(tokenizer) if self.chat_template else []
        if marks and tokenizer.eos_token not in marks:
            tokenizer.eos_token = marks[0]
        return tokenizer

    def build_datasets(self) -> tuple[Sequences, Sequences]:
        rows = self.open_rows()
        asked = {role: getattr(self, f"{role}_column") for role in ("text", "prompt", "completion", "messages")}
        self._columns = find_columns(asked, rows[0].column_names)
        encoders: Encoders = {"messages": ChatEncoder(str(self._tokenizer.chat_template)), "tools": as_tools}
        columns: Encoders = {column: encoders.get(role, as_text) for role, column in self._columns.items()}
        train, evaluation = self.usable_parts(*rows, columns)
        if "messages" in self._columns and not self._tokenizer.chat_template:
            tokens = ", with --task.new_tokens='[<|im_start|>, <|im_end|>]' if the model has no such tokens"
            hint = f"set --task.chat_template to a Jinja file with one, or to chatml{tokens}"
            raise UserError(f"the tokenizer has no chat template: {hint}")
        self.check_config()
        self._questions = self._read_questions()
        if isinstance(train, Mixture):  # room: streaming
            return self._stream(train, columns), self._sequences(evaluation, "evaluation data")
        return self._sequences(train, "training data"), self._sequences(evaluation, "evaluation data")

    @property
    def _chunker(self) -> Chunker:
        return Chunker(self._columns, self._tokenizer, self.sequence_length, self.train_on_prompts)

    def split(self, rows: Dataset) -> tuple[Dataset, Dataset]:
        column = self._columns.get("text")
        if column is None or len(rows) > 1 or self.eval_from == "all":
            return super().split(rows)
        return split_text(rows, column, 1 - self.eval_fraction)

    def _sequences(self, rows: Any, part: str) -> Sequences:
        length = self.sequence_length
        make_chunks = partial(self._chunker.make_chunks, desc=part)
        if isinstance(rows, list):  # room: streaming
            make_chunks = partial(by_source, make_chunks=make_chunks)
        chunks = make_chunks(rows)
        if not any(chunks["targets"][:]):
            says = f"no row has a completion, or a turn of the assistant, within sequence_length={length}"
            raise UserError(f"task.dataset={self.dataset}: the {part} has nothing to predict: {says}")
        return pack(chunks, length) if self.packing else unpacked(chunks)

    def _stream(self, mixture: Mixture, columns: Encoders) -> Any:  # room: streaming
        if not self.packing and "text" in self._columns:
            raise UserError("task.packing=false: streamed text makes any number of sequences, so pack it, packing=true")
        capacity = self.sequence_length if self.packing else None
        if not self.streaming:  # what is loaded has been encoded
            columns = dict.fromkeys(columns, as_is)
        return self.stream(mixture, columns, self._chunker, capacity)

    def _read_questions(self) -> list[Question]:
        if not self.questions:
            return []
        if not self._tokenizer.chat_template:
            raise UserError("task.questions: the tokenizer has no chat template; set --task.chat_template")
        return read_questions(self.questions, self._tokenizer)

    def report(self, model: Any, device: torch.device) -> tuple[dict[str, float], dict[str, Table]]:
        if not self._questions:
            return super().report(model, device)
        return ask(model, self._tokenizer, self._questions, device, bool(self.lora.r))

    def fingerprint(self, dataset: Sequences) -> str:
        return dataset.fingerprint()

    def describe(self, part: Literal["train", "eval"], dataset: Sequences) -> dict[str, float]:
        return dataset.describe(self.sequence_length) | {"skipped_rows": self._skipped_rows[part]}

    def collate(self, samples: list[list[Chunk]]) -> Batch:
        lengths = [[len(chunk["input_ids"]) for chunk in sample] for sample in samples]
        sizes = [*map(sum, lengths)]
        width = max(self.sequence_length if self.packing else 1, *sizes)
        width += -width % self._cp.size
        inputs, ends = batch_tensors(samples, width, self._tokenizer.pad_token_id or 0)
        batch = {
            "inputs": inputs | document_lengths(ends),
            "tokens": sum(sizes),
            "pairs": sum(n * (n + 1) // 2 for row in lengths for n in row),
            **self.counts_by_source([*chain.from_iterable(samples)], "labels"),  # room: streaming
        }
        return own_part(batch, sizes, self._cp) if self._cp.size > 1 else batch

    def documents(self, sample: list[Chunk]) -> list[list[Chunk]]:
        return [[chunk] for chunk in sample]

    def preview(self, dataset: Sequences, index: int) -> str:
        (chunks,) = dataset.__getitems__([index])
        labels = np.concatenate([chunk["labels"] for chunk in chunks])
        targets = (labels != -100).sum()
        share = f"{targets:,} of them ({targets / len(labels):.1%})"
        text = f"{len(labels):,} tokens, {share} contribute to the loss"
        for number, chunk in enumerate(chunks, start=1):
            text += f"\n──── document {number} of {len(chunks)} ────\n"
            # each label is the token after: the last one is not read, and shown only if it contributes
            pairs = zip([*chunk["input_ids"], chunk["labels"][-1]], [-100, *chunk["labels"]], strict=True)
            for contributes, run in groupby(pairs, lambda pair: pair[1] != -100):
                words = str(self._tokenizer.decode([token for token, _ in run if token != -100]))
                text += f"⟦{words}⟧" if contributes else words
        return text

    def count(self, batch: Batch) -> Counts:
        inputs = batch["inputs"]
        return {
            "targets": len(inputs["targets"]),
            "tokens": batch["tokens"],
            "padded_tokens": inputs["input_ids"].numel(),
            **batch.get("counts", {}),
        }

    def flops(self, model: LanguageModel, batch: Batch) -> float:
        counts = batch["tokens"], len(batch["inputs"]["targets"]), batch["pairs"]
        return model.flops.total(*counts) if model.flops else 0.0

    def loss(self, model: Any, batch: Batch) -> Tensor:
        return model("loss", **batch["inputs"])

    def evaluate(self, model: Any, batch: Batch) -> tuple[Tensor, Tensors]:
        inputs = batch["inputs"]
        nats, correct = model("score", **inputs)
        values = torch.stack([nats, torch.ones_like(nats), correct], 1)
        rows = inputs["index"] // inputs["input_ids"].shape[1]
        sums = values.new_zeros(len(inputs["input_ids"]), 3).index_add(0, rows, values)
        return nats.sum(), {
            **dict(zip(SUMS, sums.unbind(1), strict=True)),
            **self.sums_by_source(batch, nats, rows, len(sums)),  # room: streaming
        }

    def metrics(self, outputs: Tensors) -> dict[str, float]:
        nats, targets, correct = (outputs[name].double().sum().item() for name in SUMS)
        return {
            "perplexity": math.exp(min(nats / targets, 700.0)),
            "accuracy": correct / targets,
            **self.losses_by_source(outputs),  # room: streaming
        }

    def export(self, model: Any, weights: Tensors, folder: Path) -> None:
        weights = {name.removeprefix("lm."): weight for name, weight in weights.items()}
        save(model.lm, self._tokenizer, weights, folder)
        if self.lora.merge:
            self.export_merged(weights, folder / "merged")

    def load_export(self, folder: Path) -> LanguageModel:
        lm = load_exported(folder, **loading_options(self.lora.base_dtype))
        keep_layout(lm)
        check_fit(self.sequence_length, lm.config, self._tokenizer)
        return LanguageModel(lm, self._attention)

    def export_sharded(self, model: Any, folder: Path, accelerator: Accelerator) -> bool:
        if not self.lora.r:
            return super().export_sharded(model, folder, accelerator)
        merged = folder / "merged"
        if self.lora.merge and (self.new_tokens or not super().export_sharded(model, merged, accelerator)):
            return False
        adapters = {n: p.full_tensor().cpu() for n, p in model.lm.named_parameters() if p.requires_grad}
        if accelerator.is_main_process:
            save(model.lm, self._tokenizer, adapters, folder)
        return True

    def cards(self) -> dict[str, dict[str, Any]]:
        whole = super().cards()[""]
        exported = whole | ({"library_name": "peft"} if self.lora.r else {})
        return {"": exported, "merged": whole} if self.lora.merge else {"": exported}
