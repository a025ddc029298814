"""Which label has a text, or a pair? With any encoder of transformers: `--task.name=text_classification`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field, PositiveInt, PrivateAttr

from src.process import UserError
from src.data.text import Kind, TextSource, table_checksum
from src.models.lora import Lora
from src.models.pretrained import ModelSource, fsdp_blocks, save
from src.tasks.base import Task

if TYPE_CHECKING:
    import numpy as np
    from datasets import Dataset
    from torch import Tensor, nn
    from transformers import PreTrainedConfig, PreTrainedTokenizerFast


SHOWN = 20
"""Labels that the start of a run counts, the most frequent ones."""


class TextClassification(TextSource, ModelSource, Task):
    """Which label has it?"""

    name: Literal["text_classification"] = "text_classification"
    """The task to train."""
    text_column: str = "text"
    """Column of texts."""
    text_pair_column: str | None = None
    """Column of second texts, where it is pairs that have a label."""
    label_column: str = "label"
    """Column of labels, names or numbers. Those of the training data are the ones there are."""
    sequence_length: PositiveInt = 256
    """Tokens that the model sees at most. Longer texts are cut off."""
    label_smoothing: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Share of the training target that all labels have in common; the evaluation's loss is without."""
    lora: Lora = Lora()
    """Low-rank adapters."""
    pad_token: str | None = None
    """A token to pad with where the tokenizer has none of its own."""
    metric_names: ClassVar[tuple[str, ...]] = ("accuracy", "f1", "matthews_correlation")
    _labels: list[str] = PrivateAttr(default_factory=list)

    def validation_errors(self) -> Iterator[str]:
        yield from self.source_mistakes()
        yield from self.model_mistakes()
        yield from self.lora.validation_errors()
        if not self.model:
            yield "task.model is not set: name a model on the Hub or a local folder"
        if self.text_pair_column == self.text_column:
            yield f"task.text_pair_column={self.text_pair_column}: is task.text_column already"

    # -------------------------------------------------------------------------------------------------------- data
    def build_datasets(self) -> tuple[Dataset, Dataset]:
        texts = [self.text_column] + ([self.text_pair_column] if self.text_pair_column else [])
        columns: dict[str, Kind] = {**dict.fromkeys(texts, "text"), self.label_column: "label"}
        train, evaluation = self.load_rows()
        train = self.usable(train, "train", columns)
        if evaluation is None:
            train, evaluation = self.split(train)
        else:
            evaluation = self.usable(evaluation, "eval", columns)
        self._labels, train_ids, eval_ids = self._label_ids(train, evaluation)

        import numpy as np

        from src.data.classification import tokenised

        tokenizer, length = self._tokenizer, self.sequence_length
        train = tokenised(train.select_columns(texts), train_ids, tokenizer, length, "training data")
        evaluation = tokenised(evaluation.select_columns(texts), eval_ids, tokenizer, length, "evaluation data")
        by_length = np.argsort(evaluation.with_format("numpy")["length"][:], kind="stable")
        return train, evaluation.select(by_length)  # batches of similar lengths need less padding

    def _label_ids(self, train: Dataset, evaluation: Dataset) -> tuple[list[str], list[int], list[int]]:
        """The names of the labels, and the labels of both parts as positions in that list."""
        from src.data.classification import in_order, label_names

        labels = label_names([train, evaluation], self.label_column)
        names = in_order(labels[0])
        known: dict[Any, Any] = self._config.label2id or {}
        if set(names) == set(known):  # a head that knows them keeps its order
            names = sorted(names, key=known.__getitem__)
        where = f"task.label_column={self.label_column}"
        if len(names) < 2:
            raise UserError(f"{where}: all rows to train on have the same label, {names[0]}")
        if unseen := sorted(set(labels[1]) - set(names)):
            raise UserError(
                f"{where}: {', '.join(unseen)} is in the data to evaluate on, but not in the data to train on "
                f"({', '.join(names)})"
            )
        position = {name: i for i, name in enumerate(names)}
        train_ids, eval_ids = ([position[label] for label in part] for part in labels)
        return names, train_ids, eval_ids

    def data_state(self) -> dict[str, Any]:
        return {"labels": self._labels}

    def load_data_state(self, from_data: dict[str, Any]) -> None:
        self._labels = from_data["labels"]

    def fingerprint(self, dataset: Dataset) -> str:
        return table_checksum(dataset, ["input_ids", "label"])

    def describe(self, part: Literal["train", "eval"], dataset: Dataset) -> dict[str, float]:
        columns = dataset.select_columns(["length", "truncated", "label"]).with_format("numpy")[:]
        counts = Counter(columns["label"].tolist())
        return {
            "tokens": int(columns["length"].sum()),
            "truncated": int(columns["truncated"].sum()),
            "skipped_rows": self.skipped_rows[part],
            "labels": len(counts),
            **{f"label {self._labels[label]}": count for label, count in counts.most_common(SHOWN)},
        }

    def order(self, train: Dataset, random: np.random.Generator, global_batch_size: int) -> np.ndarray:
        from src.data.classification import length_grouped

        return length_grouped(train.with_format("numpy")["length"][:], random, global_batch_size)

    def collate(self, samples: list[dict[str, Any]]) -> dict[str, Any]:
        import torch

        width = max(sample["length"] for sample in samples)
        pads = {"input_ids": self._tokenizer.pad_token_id, "token_type_ids": 0, "attention_mask": 0}
        inputs = {name: torch.full((len(samples), width), pads[name]) for name in samples[0] if name in pads}
        for row, sample in enumerate(samples):
            for name, values in inputs.items():
                values[row, : sample["length"]] = torch.tensor(sample[name])
        labels = torch.tensor([sample["label"] for sample in samples])
        return {"inputs": inputs, "labels": labels, "tokens": sum(sample["length"] for sample in samples)}

    def count_tokens(self, batch: dict[str, Any]) -> tuple[int, int]:
        return batch["tokens"], batch["inputs"]["input_ids"].numel()

    # ------------------------------------------------------------------------------------------------------- model
    def longest_sequence(self) -> int:
        return self.sequence_length

    def build_model(self) -> nn.Module:
        from transformers import AutoModelForSequenceClassification

        config = self._config
        config.num_labels = len(self._labels)
        config.id2label = dict(enumerate(self._labels))
        config.label2id = {label: i for i, label in enumerate(self._labels)}
        config.problem_type = "single_label_classification"
        config.pad_token_id = self._tokenizer.pad_token_id
        classes = AutoModelForSequenceClassification._model_mapping
        if type(config) not in classes:
            raise UserError(
                f"task.model={self.model}: transformers has no text classifier of kind {config.model_type}"
            )
        model_class: Any = classes[type(config)]
        head = rf"^(?!{model_class.base_model_prefix}\.)|pooler"  # is new where the checkpoint has none
        model: Any = self.load_model(AutoModelForSequenceClassification, config, may_lack=head)
        blocks = fsdp_blocks(model)
        if self.lora.r:
            model = self.lora.adapted(model, "SEQ_CLS", self.revision)
        model._no_split_modules = blocks
        return model

    @cached_property
    def _config(self) -> PreTrainedConfig:
        config = self.with_dropout(self.load_config())
        self.check_fit(self.sequence_length, config, self._tokenizer)
        return config

    @cached_property
    def _tokenizer(self) -> PreTrainedTokenizerFast:
        tokenizer = self.load_tokenizer()
        if self.pad_token and self.pad_token not in tokenizer.get_vocab():
            raise UserError(f"task.pad_token={self.pad_token}: the tokenizer has no such token")
        if self.pad_token:
            tokenizer.pad_token = self.pad_token
        if tokenizer.pad_token_id is None:
            hint = f"such as --task.pad_token='{tokenizer.eos_token}'" if tokenizer.eos_token else "one of its tokens"
            raise UserError(f"task.model={self.model}: its tokenizer has no pad token; set task.pad_token, {hint}")
        return tokenizer

    # --------------------------------------------------------------------------------------------- loss and scores
    def loss(self, model: nn.Module, batch: dict[str, Any]) -> tuple[Tensor, int]:
        from torch.nn.functional import cross_entropy

        logits, labels = model(**batch["inputs"]).logits.float(), batch["labels"]
        return cross_entropy(logits, labels, reduction="sum", label_smoothing=self.label_smoothing), len(labels)

    def evaluate(self, model: nn.Module, batch: dict[str, Any]) -> tuple[Tensor, int, dict[str, Tensor]]:
        from torch.nn.functional import cross_entropy

        logits, labels = model(**batch["inputs"]).logits.float(), batch["labels"]
        outputs = {"predictions": logits.argmax(1), "references": labels}
        return cross_entropy(logits, labels, reduction="sum"), len(labels), outputs

    def metrics(self, outputs: dict[str, Tensor]) -> dict[str, float]:
        from src.tasks.metrics import F1, Accuracy, Matthews

        f1 = F1().compute(**outputs, labels=len(self._labels))
        return {**Accuracy().compute(**outputs), **f1, **Matthews().compute(**outputs)}

    # ------------------------------------------------------------------------------------------------------ export
    def export(self, model: Any, weights: dict[str, Tensor], folder: Path) -> None:
        if self.lora.r:  # adapters alone would not say which labels there are
            adapted: Any = self.build_model()
            adapted.load_state_dict(weights)
            model = adapted.merge_and_unload()
            weights = model.state_dict()
        save(model, self._tokenizer, weights, folder)

    def card(self) -> dict[str, Any]:
        return {"pipeline_tag": "text-classification", **self.model_card(), **self.source_card()}
