"""Classification of texts, or pairs of texts, with any transformers encoder: `--task.name=text_classification`."""

import copy
import re
from collections import Counter
from collections.abc import Iterable
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from datasets import Dataset, concatenate_datasets
from pydantic import PrivateAttr
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers import AutoModelForSequenceClassification, PreTrainedConfig, PreTrainedTokenizerFast

from src.config.errors import UserError, listed
from src.tasks import load_metric
from src.tasks.base import Counts, Indices, Table, Tensors
from src.tasks.tables import label_columns, label_tables
from src.tasks.text.fine_tuning import FineTuning
from src.tasks.text.load import require_known
from src.tasks.text.rows import Batch, Encoders, Rows, cached_map, label_text, require_text, table_checksum
from src.tasks.text.settings import Lora
from src.tasks.text.text_classification_settings import TextClassificationSettings

MAX_COUNTS = 20
"""Labels whose counts are shown at the start of a run, the most frequent ones."""
MAX_CELL = 200
"""Characters of a text that a table shows."""
NUMBER = re.compile(r"(LABEL_)?-?[0-9]+(\.[0-9]*)?([eE][-+]?[0-9]+)?")
"""A label that is a number, or that transformers made of one."""
MEGA_BATCH = 50
"""Batches that are sorted by length together, as in transformers' LengthGroupedSampler."""


class TextClassification(TextClassificationSettings, FineTuning):
    """Classifies texts, or pairs of texts."""

    auto_class = AutoModelForSequenceClassification
    has_new_head = True
    pipeline_tag = "text-classification"
    _texts: Dataset = PrivateAttr()
    _written: list[str] = PrivateAttr()
    """The labels as the data write them, in the order of their ids."""

    def build_datasets(self) -> tuple[Dataset, Dataset]:
        texts = [name for name in (self.text_column, self.text_pair_column) if name]
        columns: Encoders = {**dict.fromkeys(texts, require_text), self.label_column: label_text}
        train, evaluation = self.usable_parts(self.open_rows(), columns)
        self._learn_labels(train, evaluation)
        labelled = self._labelled(evaluation, "evaluation data")
        by_length = np.argsort(labelled["length"][:], kind="stable")
        self._texts = evaluation.remove_columns(self.label_column).select(by_length)
        # batches of similar lengths need less padding
        return self._labelled(train, "training data"), labelled.select(by_length)

    @property
    def _labels(self) -> list[str]:
        """Return the labels that the model knows; none before the data are read."""
        return self.state.data.get("labels", [])

    def _labelled(self, rows: Dataset, desc: str) -> Dataset:
        """Return a table of the rows as model inputs, with row numbers as `row`; on a second call, from the cache."""
        known, length = self._own_config.get_text_config().vocab_size, self.sequence_length
        fixed = {"labels": self._written, "tokenizer": self._tokenizer, "max_length": length, "num_known": known}
        inputs = cached_map(rows, partial(model_inputs, **fixed), f"tokenizing {desc}")
        return inputs.add_column("row", range(len(rows)))

    def _learn_labels(self, train: Dataset, evaluation: Dataset) -> None:
        """Set the labels that the model knows, in the order of their ids: those that it was trained on or that its head
        names, which the data may write in another case or as ids; or, if the data have none of these, the training
        data's. Raise a UserError if there are fewer than two, or the data have others."""
        where, remarks = f"task.label_column={self.label_column}", self.state.remarks
        new = sorted_labels({*train[self.label_column]})
        found = {*new, *evaluation[self.label_column]}
        if len(new) < 2 and not self._labels:
            raise UserError(f"{where}: all training rows have the same label, {new[0]}")
        head: Any = self._own_config.id2label
        # LABEL_0 is transformers' name for a label without one
        names = self._labels or [str(head[i]) for i in sorted(head) if head[i] != f"LABEL_{i}"]
        written = as_written(names, found)
        if found.isdisjoint(written):
            if new == [*map(str, range(len(names)))]:
                written = new
            elif not self._labels:
                if names:
                    remarks.append(f"{where}: the data's replace the model's, as none is the same: {listed(names)}")
                names = written = new
        if unseen := listed(sorted(found - {*written})):
            says = f"{unseen} is in the data ({listed(sorted(found))}), but not among these labels: {listed(names)}"
            whose = "the training data's" if names is new else "the model's (without its id2label, it gets new ones)"
            raise UserError(f"{where}: {says}, {whose}")
        if renamed := listed(f"{a} is read as {b}" for a, b in zip(written, names, strict=True) if a != b):
            remarks.append(f"{where}: {renamed}")
        self.state.data["labels"], self._written = names, written

    def split(self, rows: Dataset, dataset: str) -> tuple[Dataset, Dataset]:
        train, evaluation = super().split(rows, dataset)
        known = {*train[self.label_column]}
        is_known = np.array([label in known for label in evaluation[self.label_column]])
        if self.eval_from != "random" or not is_known.any():
            return train, evaluation
        # a row with a label of its own is trained on, as the model has to know it
        alone, others = (evaluation.select(np.flatnonzero(rows)) for rows in (~is_known, is_known))
        return concatenate_datasets([train, alone]), others

    def fingerprint(self, dataset: Dataset) -> str:
        return table_checksum(dataset, ["input_ids", "label"])

    def describe(self, part: Literal["train", "eval"], dataset: Dataset) -> dict[str, float]:
        counts = Counter(dataset["label"][:])
        return {
            "tokens": sum(dataset["length"][:]),
            "truncated": sum(dataset["truncated"][:]),
            "skipped_rows": self._skipped_rows[part],
            "labels": len(counts),
            **{f"label {self._labels[label]}": count for label, count in counts.most_common(MAX_COUNTS)},
        }

    def order(self, train: Any, random: np.random.Generator, global_batch_size: int) -> Indices:
        """Group texts of similar lengths into batches, which need less padding, and shuffle these. The last batch may
        be smaller."""
        lengths = train.with_format("numpy")["length"][:]
        order = random.permutation(len(lengths))
        group = np.arange(len(order)) // (MEGA_BATCH * global_batch_size)
        order = order[np.lexsort((-lengths[order], group))]
        whole = len(order) // global_batch_size * global_batch_size
        batches = random.permutation(order[:whole].reshape(-1, global_batch_size))
        return np.concatenate([batches.reshape(-1), order[whole:]])

    def collate(self, samples: list[Any]) -> Batch:
        names = (name for name in self._tokenizer.model_input_names if name in samples[0])
        columns = {name: [sample[name] for sample in samples] for name in names}
        inputs = self._tokenizer.pad(columns, padding_side="right", return_tensors="pt", verbose=False)
        return {
            "inputs": dict(inputs),
            "labels": torch.tensor([sample["label"] for sample in samples]),
            "tokens": sum(sample["length"] for sample in samples),
        }

    @property
    def _config(self) -> PreTrainedConfig:
        config = copy.deepcopy(self._own_config)
        config.id2label = dict(enumerate(self._labels))
        config.label2id = {label: i for i, label in enumerate(self._labels)}
        config.problem_type = "single_label_classification"
        config.pad_token_id = self._tokenizer.pad_token_id
        config.use_cache = False  # a decoder's cache would get the keys again when activations are recomputed
        return config

    def wrap(self, model: Any) -> Any:
        # T5 and BART tie the embeddings of encoder and decoder to a third: as one module they are in one FSDP unit, as
        # a weight must be (accelerate issue 4171 is about tied inputs and outputs)
        model.set_input_embeddings(model.get_input_embeddings())
        return super().wrap(model)

    def _load_config(self) -> PreTrainedConfig:
        config = super()._load_config()
        if config.problem_type in ("regression", "multi_label_classification"):
            hint = "which this task is not: a row has one label (to change that, remove problem_type from a copy)"
            raise UserError(f"task.model={self.model}: its config.json says {config.problem_type}, {hint}")
        return config

    @cached_property
    def _tokenizer(self) -> PreTrainedTokenizerFast:
        tokenizer = super()._tokenizer
        tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
        return tokenizer

    def count(self, batch: Batch) -> Counts:
        return {
            "targets": int((batch["labels"] >= 0).sum()),
            "tokens": batch["tokens"],
            "padded_tokens": batch["inputs"]["input_ids"].numel(),
        }

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        return self.evaluate(model, batch)[0]

    def evaluate(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Tensors]:
        logits, labels = model(**batch["inputs"]).logits.float(), batch["labels"]
        outputs = {"predictions": logits.argmax(1), "references": labels, "probabilities": logits.softmax(1)}
        return cross_entropy(logits, labels, reduction="sum"), outputs

    def metrics(self, outputs: Tensors) -> dict[str, float]:
        labels = {name: outputs[name] for name in ("predictions", "references")}
        return {
            **load_metric("Accuracy").compute(**labels),
            **load_metric("F1").compute(**labels, labels=len(self._labels)),
            **load_metric("Matthews").compute(**labels),
        }

    def tables(self, outputs: Tensors, dataset: Any) -> dict[str, Table]:
        def show(index: int) -> dict[str, str]:
            texts = zip(("text", "text_pair"), self._texts[index].values(), strict=False)
            return {name: text[:MAX_CELL] for name, text in texts}

        return label_tables(outputs, self._labels, show)

    def preview(self, dataset: Dataset, index: int) -> str:
        row = dataset[index]
        return f"{self._tokenizer.decode(row['input_ids'])}\nlabel: {self._labels[row['label']]}"

    def load_export(self, folder: Path) -> Any:
        # adapters have been merged into the weights
        exported = self.model_copy(update={"model": str(folder), "revision": None, "lora": Lora()})
        names: Any = exported._own_config.id2label
        self.state.data["labels"] = exported.state.data["labels"] = [*names.values()]
        # the data are read with the export's tokenizer and config, not with those of task.model
        self._tokenizer, self._own_config = exported._tokenizer, exported._own_config
        return exported.build_model()

    def predictions(self, outputs: Tensors, dataset: Any) -> dict[str, list[Any]]:
        return {"row": dataset["row"][:], **self._texts[:], **label_columns(outputs, self._labels)}


def sorted_labels(labels: Iterable[str]) -> list[str]:
    """Return the labels, sorted: numbers by value, names alphabetically."""
    names = sorted(labels)  # 1 and 01 in the same order on every process
    are_numbers = all(map(NUMBER.fullmatch, names))
    return sorted(names, key=lambda name: float(name.removeprefix("LABEL_"))) if are_numbers else names


def as_written(names: list[str], found: set[str]) -> list[str]:
    """Return these names as the data write them, in which these labels were found: maybe in another case, or with other
    white space."""
    folded = {_fold(label): label for label in sorted(found)}
    return [name if name in found else folded.get(_fold(name), name) for name in names]


def _fold(label: str) -> str:
    return "".join(label.split()).casefold()


def model_inputs(
    rows: Rows, labels: list[str], tokenizer: PreTrainedTokenizerFast, max_length: int, num_known: int
) -> Rows:
    """Return a model's inputs for rows of a text, or a pair of texts, and one of these labels, in this order; and as
    `label` its place among them, the `length` in tokens, and whether the text was `truncated`. Raise a UserError if the
    model, which knows so many tokens, does not know one of them."""
    *texts, written = rows.values()
    encoded = tokenizer(*texts, truncation=True, max_length=max_length)
    require_known(np.concatenate(encoded["input_ids"]), tokenizer, num_known)
    tokenizer.backend_tokenizer.no_truncation()  # remembered, it would change the fingerprint
    return {
        **encoded,
        "label": [labels.index(label) for label in written],
        "length": [len(ids) for ids in encoded["input_ids"]],
        "truncated": [bool(encoding.overflowing) for encoding in encoded.encodings or []],
    }
