"""Next-token prediction with any decoder of transformers, from scratch or fine-tuned: `--task.name=causal_lm`."""

import copy
import math
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from functools import cached_property, partial
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
import torch
from accelerate import Accelerator
from datasets import Dataset
from pydantic import BeforeValidator, NonNegativeFloat, PositiveInt, PrivateAttr
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedTokenizerFast

from src.config.errors import UserError, cause, explained
from src.config.settings import ResumeSafe, flatten
from src.tasks.base import Table, Task
from src.tasks.text.architecture import new_config, typed
from src.tasks.text.attention import BY_LENGTHS, activate_kernel, document_lengths
from src.tasks.text.byte_tokenizer import byte_tokenizer
from src.tasks.text.documents import Chunker, RowFormat, cut_texts
from src.tasks.text.flops import causal_pairs
from src.tasks.text.language_model import LanguageModel, small_model
from src.tasks.text.lean import NewWeights, empty
from src.tasks.text.packing import Sequences, batch_tensors, pack, unpacked
from src.tasks.text.pretrained import ModelSource, check_fit, load_exported, max_length, save, save_merged, save_sharded
from src.tasks.text.source import TextSource, cached_map, table_checksum

NO_ROUTER_LOSS = (
    "the auxiliary loss of a mixture of experts is not added here: it depends on the whole batch's routing, and would "
    "differ with the number of processes"
)
BUCKETS = 16
"""Of positions, and of documents' lengths, that tables of the loss have a row for."""


class CausalLM(TextSource, ModelSource, Task):
    """Predicts the next token of text, prompts or chats."""

    name: Literal["causal_lm"] = "causal_lm"
    """The task to train."""
    architecture: Annotated[dict[str, Any], BeforeValidator(typed)] = {}
    """What to train from scratch, in place of task.model: model_type as transformers names it (llama, gpt2, qwen3, …),
    and any field of its config."""
    tokenizer: str | None = None
    """A model whose tokenizer is used, or `bytes`; null: task.model's own, or bytes if trained from scratch."""
    chat_template: str | None = None
    """A Jinja file with a chat template; null: the tokenizer's own."""
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
    """Learn prompts and the other roles' turns too, not only completions and the assistant's turns."""
    sequence_length: PositiveInt = 1024
    """Tokens that the model sees at once. Longer text makes several sequences, longer prompts and chats are cut off."""
    packing: bool = True
    """Put several short documents into one sequence. They don't see each other."""
    attention: ResumeSafe[Literal["auto", "varlen", "flash_attention_2", "flex", "sdpa"]] = "auto"
    """How packed documents are kept apart: sdpa by a mask, the others without one, on a GPU. auto: varlen in half
    precision on a GPU, if the model can, else sdpa."""
    sample_prompts: ResumeSafe[list[str]] = []
    """Prompts to continue at each evaluation, for the record."""
    sample_tokens: ResumeSafe[PositiveInt] = 64
    """Most tokens to generate for each prompt."""
    sample_temperature: ResumeSafe[NonNegativeFloat] = 0.8
    """Temperature to sample at; 0: the likeliest token each time."""
    metric_names: ClassVar[tuple[str, ...]] = ("perplexity", "bits_per_byte", "accuracy")
    _row_format: RowFormat = PrivateAttr(default_factory=RowFormat)
    _attention: str = PrivateAttr("sdpa")

    def validation_errors(self) -> Iterator[str]:
        yield from self.source_errors()
        yield from self.model_errors()
        if bool(self.model) == bool(self.architecture):
            yield "task.model or task.architecture: set one, to start from that model, or to train that from scratch"
        elif self.architecture and not isinstance(self.architecture.get("model_type"), str):
            yield "task.architecture.model_type is not set: name an architecture of transformers, such as llama"
        for name, value in flatten(self.architecture):
            if value and re.search("output_router_logits|(aux|z)_loss|moe_loss", name):
                yield f"task.architecture.{name}={value}: {NO_ROUTER_LOSS}; leave it out to train without"
        if self.lora.r and not self.model:
            yield "task.lora adapts an existing model: set task.model, not task.architecture"
        if (self.prompt_column is None) != (self.completion_column is None):
            yield "task.prompt_column and task.completion_column: set both"
        if sum(c is not None for c in (self.text_column, self.prompt_column, self.messages_column)) > 1:
            yield "task.text_column, task.prompt_column and task.messages_column: the rows are of one kind, set one"
        if self.attention == "flash_attention_2" and find_spec("flash_attn") is None:
            yield "task.attention=flash_attention_2: needs the package flash-attn; or set task.attention=auto"
        try:
            self._read_chat_template()
        except (OSError, UnicodeDecodeError) as error:
            name = " ".join(str(self.chat_template).split())  # a template itself, by mistake, has several lines
            says = "no such file" if isinstance(error, FileNotFoundError) else f"cannot be read, {cause(error)}"
            yield f"task.chat_template={name}: {says}"

    def prepare_for(self, device: str, dtype: torch.dtype) -> list[str]:
        chosen_before = super().prepare_for(device, dtype)  # the trial below computes attention too
        suits_varlen = device == "cuda" and dtype != torch.float32 and self.packing
        chosen = self.attention if self.attention != "auto" else "varlen" if suits_varlen else "sdpa"
        refusal = self._refusal(chosen, device, dtype) if chosen != "sdpa" else None
        kernel = ""
        if chosen == "varlen" and not refusal:
            kernel = f" by {activate_kernel(lambda: not self._refusal(chosen, device, dtype))}"
        if refusal and self.attention != "auto":
            raise UserError(f"task.attention={chosen}: {refusal}; or set task.attention=auto")
        self._attention = "sdpa" if refusal else chosen
        reason = f" (not varlen: {refusal})" if refusal else ""
        return [*chosen_before, f"{self._attention} attention{kernel or reason}"]

    def _refusal(self, attention: str, device: str, dtype: torch.dtype) -> str | None:
        if device != "cuda":
            return "needs a GPU"
        if attention in BY_LENGTHS and dtype == torch.float32:
            return "needs half precision, --mixed_precision bf16 before train.py"
        return self._small_model.refuses(attention, device, dtype)

    def reference(self) -> "CausalLM":
        return self.model_copy(update={"attention": "sdpa"})

    def build_model(self) -> LanguageModel:
        return LanguageModel(self._build_lm(), self._small_model, self._attention)

    def build_empty_model(self, rank: int, world_size: int) -> LanguageModel | None:
        weights, lm = NewWeights(rank, world_size), None
        if self.model:
            lm = self.empty_model(AutoModelForCausalLM, self._config, weights)
        else:
            with weights, suppress(UserError):
                lm = empty(self._new_lm)
        if lm is None or not (self.model or weights.parts(lm).keys() == dict(lm.named_parameters()).keys()):
            return None  # it computes with weights, or makes them by other means, when it is built, as Mamba does
        with weights:
            model = LanguageModel(self._with_adapters(lm), self._small_model, self._attention)
        self._new_weights = weights.parts(model.lm)
        return model

    def load_weights(self, model: LanguageModel, device: torch.device) -> None:
        super().load_weights(model.lm, device)

    def _build_lm(self) -> Any:
        lm = self.load_model(AutoModelForCausalLM, self._config) if self.model else self._new_lm()
        return self._with_adapters(lm)

    def _with_adapters(self, lm: Any) -> Any:
        return self.lora.add_adapters(lm, "CAUSAL_LM", self.revision) if self.lora.r else lm

    def _new_lm(self) -> Any:
        with explained(f"task.architecture: {self._config.model_type} refuses it, "):
            config = copy.deepcopy(self._config)  # the model's attention is noted there
            return AutoModelForCausalLM.from_config(config, dtype=torch.float32)

    @cached_property
    def _small_model(self) -> LanguageModel:
        model = small_model(self._config)
        if not model.is_causal:
            raise UserError(f"{self._config.model_type} sees the tokens that it has to predict: it is no decoder")
        if self.packing and not model.keeps_documents_apart:
            raise UserError(f"{self._config.model_type} lets packed documents see each other: set --task.packing=false")
        return model

    @cached_property
    def _config(self) -> PreTrainedConfig:
        if self.model:
            config = self.load_config()
        else:
            config = self.with_dropout(new_config(self.architecture, self._tokenizer, self.sequence_length))
        if getattr(config.get_text_config(), "output_router_logits", False):
            says = f"its config asks for it by output_router_logits, but {NO_ROUTER_LOSS}"
            raise UserError(f"task.model={self.model}: {says}; set that to false in its config.json to train without")
        check_fit(self.sequence_length, config, self._tokenizer)
        return config

    @property
    def _bucket_width(self) -> int:
        return -(-self.sequence_length // BUCKETS)

    @cached_property
    def _window(self) -> int | None:
        return getattr(self._config.get_text_config(), "sliding_window", None)

    @cached_property
    def _tokenizer(self) -> PreTrainedTokenizerFast:
        name = self.tokenizer or (None if self.model else "bytes")
        tokenizer = byte_tokenizer() if name == "bytes" else self.load_tokenizer(name)
        tokenizer.chat_template = self._read_chat_template() or tokenizer.chat_template
        return tokenizer

    def _read_chat_template(self) -> str | None:
        return Path(self.chat_template).read_text(encoding="utf-8") if self.chat_template else None

    def build_datasets(self) -> tuple[Sequences, Sequences]:
        rows = self.load_rows()
        self._row_format = self._find_row_format(rows[0].column_names)
        train, evaluation = self.usable_parts(*rows, self._row_format.columns)
        if self._row_format.messages and not self._tokenizer.chat_template:
            raise UserError("the tokenizer has no chat template: set --task.chat_template to a Jinja file with one")
        _ = self._config  # sequence_length is checked before the work begins
        return self._sequences(train, "training data"), self._sequences(evaluation, "evaluation data")

    def _find_row_format(self, names: list[str]) -> RowFormat:
        chats = [name for name in ("messages", "conversations") if name in names]
        if self.text_column or self.prompt_column or self.messages_column:
            found = RowFormat(self.text_column, self.prompt_column, self.completion_column, self.messages_column)
        elif chats:
            found = RowFormat(messages=chats[0])
        elif "prompt" in names and "completion" in names:
            found = RowFormat(prompt="prompt", completion="completion")
        elif "text" in names or len(names) == 1:
            found = RowFormat(text="text" if "text" in names else names[0])
        else:
            hint = "--task.text_column, or --task.prompt_column and --task.completion_column, or --task.messages_column"
            raise UserError(
                f"task.dataset={self.dataset}: which of its columns {', '.join(names)} to learn? Set {hint}"
            )
        return replace(found, tools="tools") if found.messages and "tools" in names else found

    def split(self, rows: Dataset) -> tuple[Dataset, Dataset]:
        column = self._row_format.text
        if column is None or len(rows) > 1 or self.eval_from == "all":
            return super().split(rows)
        length = len(rows[0][column])
        cut = round(length * (1 - self.eval_fraction))
        if not 0 < cut < length:
            raise UserError(f"task.dataset={self.dataset}: too short to keep a part of it for evaluation")
        train = cached_map(rows, partial(cut_texts, column=column, part=slice(cut)), "cutting the text")
        return train, cached_map(rows, partial(cut_texts, column=column, part=slice(cut, None)), "cutting the text")

    def _sequences(self, rows: Dataset, part: str) -> Sequences:
        length = self.sequence_length
        chunks = Chunker(self._row_format, self._tokenizer, length, self.train_on_prompts).make_chunks(rows, part)
        if not chunks.with_format("numpy")["targets"][:].any():
            says = f"no row has a completion, or a turn of the assistant, within sequence_length={length}"
            raise UserError(f"task.dataset={self.dataset}: the {part} has nothing to predict: {says}")
        return pack(chunks, length) if self.packing else unpacked(chunks)

    def fingerprint(self, dataset: Sequences) -> str:
        return table_checksum(dataset.chunks, ["input_ids", "labels"])

    def describe(self, part: Literal["train", "eval"], dataset: Sequences) -> dict[str, float]:
        return dataset.describe(self.sequence_length) | {"skipped_rows": self._skipped_rows[part]}

    def collate(self, samples: list[list[dict[str, Any]]]) -> dict[str, Any]:
        lengths = [[len(chunk["input_ids"]) for chunk in sample] for sample in samples]
        width = self.sequence_length if self.packing else max(map(sum, lengths))
        inputs, ends = batch_tensors(samples, width, self._tokenizer.pad_token_id or 0)
        return {
            "inputs": inputs | document_lengths(ends),
            "bytes": torch.tensor([sum(int(chunk["bytes"]) for chunk in sample) for sample in samples]),
            "tokens": sum(map(sum, lengths)),
            "attention_pairs": sum(causal_pairs(n) for row in lengths for n in row),
            "window_pairs": sum(causal_pairs(n, self._window) for row in lengths for n in row),
        }

    def documents(self, sample: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
        return [[chunk] for chunk in sample]

    def count_tokens(self, batch: dict[str, Any]) -> tuple[int, int]:
        return batch["tokens"], batch["inputs"]["input_ids"].numel()

    def count_targets(self, batch: dict[str, Any]) -> int:
        return len(batch["inputs"]["targets"])

    def flops(self, model: LanguageModel, batch: dict[str, Any]) -> float:
        counts = (batch["tokens"], len(batch["inputs"]["targets"]), batch["attention_pairs"], batch["window_pairs"])
        return model.flops.total(*counts) if model.flops else 0.0

    def loss(self, model: Any, batch: dict[str, Any]) -> Tensor:
        return model("loss", **batch["inputs"])

    def evaluate(self, model: Any, batch: dict[str, Any]) -> tuple[Tensor, dict[str, Tensor]]:
        inputs, index = batch["inputs"], batch["inputs"]["index"]
        nats, correct = model("score", **inputs)
        values = torch.stack([nats, torch.ones_like(nats), correct], 1)
        positions, lengths = inputs["position_ids"].flatten(), inputs["cu_seq_lens"].diff().long()
        own_lengths = lengths.repeat_interleave(lengths, output_size=len(positions))  # without it, the host waits
        outputs = {"bytes": batch["bytes"]}
        for name, places in (("by_position", positions), ("by_length", own_lengths - 1)):
            cells = index // inputs["input_ids"].shape[1] * BUCKETS + places[index] // self._bucket_width
            sums = values.new_zeros(len(batch["bytes"]) * BUCKETS, 3).index_add(0, cells, values)
            outputs[name] = sums.view(-1, BUCKETS, 3)
        return nats.sum(), outputs

    def metrics(self, outputs: dict[str, Tensor]) -> dict[str, float]:
        nats, targets, correct = outputs["by_position"].double().sum((0, 1)).tolist()
        return {
            "perplexity": math.exp(min(nats / targets, 700.0)),
            "bits_per_byte": nats / math.log(2) / max(outputs["bytes"].sum().item(), 1),
            "accuracy": correct / targets,
        }

    def tables(self, outputs: dict[str, Tensor], dataset: Any) -> dict[str, Table]:
        width = self._bucket_width
        ends = range(width, width * BUCKETS + 1, width)
        return {
            "loss_by_position": _rows("position", [f"{end - width}-{end - 1}" for end in ends], outputs["by_position"]),
            "loss_by_length": _rows("tokens", [f"<= {end}" for end in ends], outputs["by_length"]),
        }

    def predictions(self, outputs: dict[str, Tensor], dataset: Sequences) -> dict[str, list[Any]]:
        sequences = dataset.__getitems__(list(range(len(dataset))))
        texts = [self._tokenizer.decode(np.concatenate([c["input_ids"] for c in chunks])) for chunks in sequences]
        nats, targets, correct = outputs["by_position"].sum(1).T
        columns = {"targets": targets.long(), "loss": nats / targets, "accuracy": correct / targets}
        return {"text": texts} | {name: column.tolist() for name, column in columns.items()}

    def report(self, model: Any, device: torch.device) -> dict[str, Table]:
        samples = [{"prompt": p, "continuation": self._continuation(model, p, device)} for p in self.sample_prompts]
        return {"samples": samples} if samples else {}

    def _continuation(self, model: Any, prompt: str, device: torch.device) -> str:
        tokenizer = self._tokenizer
        if self._row_format.messages:
            chat = [{"role": "user", "content": prompt}]
            encoded: Any = tokenizer.apply_chat_template(chat, add_generation_prompt=True)
        else:
            encoded = tokenizer(prompt)
        tokens = encoded["input_ids"] or [tokenizer.eos_token_id or 0]
        limit = max_length(self._config, tokenizer)
        input_ids = torch.tensor([tokens[-(limit - 1) :]], device=device)
        sampling = {"temperature": self.sample_temperature, "top_k": 0} if self.sample_temperature else {}
        # training draws what it would without this, and the compiler does not see how the texts grow token by token
        gpus = [device] if device.type == "cuda" else []  # else torch warns where there are several
        with torch.random.fork_rng(gpus), torch.no_grad(), torch.compiler.set_stance("force_eager"):
            torch.manual_seed(0)
            output = model(
                "generate",
                input_ids,
                attention_mask=torch.ones_like(input_ids),
                max_new_tokens=min(self.sample_tokens, limit - input_ids.shape[1]),
                eos_token_id=tokenizer.eos_token_id,
                pad_token_id=tokenizer.pad_token_id or tokenizer.eos_token_id or 0,
                synced_gpus=torch.distributed.is_initialized(),  # FSDP: until all processes are done
                do_sample=bool(sampling),
                **sampling,
            )
        return str(tokenizer.decode(output[0, input_ids.shape[1] :], skip_special_tokens=True))

    def export(self, model: Any, weights: dict[str, Tensor], folder: Path) -> None:
        weights = {name.removeprefix("lm."): weight for name, weight in weights.items()}
        save(model.lm, self._tokenizer, weights, folder)
        if self.lora.merge:
            save_merged(self._build_lm(), self._tokenizer, weights, folder / "merged")

    def load_export(self, folder: Path) -> LanguageModel:
        lm = load_exported(folder)
        check_fit(self.sequence_length, lm.config, self._tokenizer)
        return LanguageModel(lm, self._small_model, self._attention)

    def export_sharded(self, model: Any, folder: Path, accelerator: Accelerator) -> bool:
        has_adapters = self.lora.r is not None
        target = folder / "merged" if has_adapters else folder
        if (self.lora.merge or not has_adapters) and not save_sharded(model.lm, self._tokenizer, target, accelerator):
            return False
        if has_adapters:
            adapters = {n: p.full_tensor().cpu() for n, p in model.lm.named_parameters() if p.requires_grad}
            if accelerator.is_main_process:
                save(model.lm, self._tokenizer, adapters, folder)
        return True

    def card(self) -> dict[str, Any]:
        adapter = {"library_name": "peft"} if self.lora.r else {}
        return {"pipeline_tag": "text-generation", **self.model_card(), **self.source_card(), **adapter}


def _rows(column: str, names: list[str], sums: Tensor) -> Table:
    rows = zip(names, sums.double().sum(0).tolist(), strict=True)
    return [{column: name, "targets": int(count), "loss": nats / count} for name, (nats, count, _) in rows if count]
