"""Classification of texts, or pairs of texts, with any transformers encoder: `--task.name=text_classification`."""

import copy
import json
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable
from functools import cached_property, partial
from itertools import chain, compress
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from datasets import Dataset, concatenate_datasets
from pydantic import PrivateAttr
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy, mse_loss
from transformers import AutoModelForSequenceClassification, PreTrainedConfig, PreTrainedTokenizerFast

from src.config.errors import UserError, listed, reraised_as
from src.config.settings import flatten
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
LOSSES: dict[str, Any] = {
    "single_label_classification": (cross_entropy, "weight"),
    "multi_label_classification": (binary_cross_entropy_with_logits, "pos_weight"),
    "regression": (mse_loss, "weight"),
}
"""The loss of each problem, and the name of its argument for the weights of the labels."""


class TextClassification(TextClassificationSettings, FineTuning):
    """Classifies texts, or pairs of texts."""

    auto_class = AutoModelForSequenceClassification
    has_new_head = True
    pipeline_tag = "text-classification"
    _texts: Dataset = PrivateAttr()
    _written: list[str] = PrivateAttr(default_factory=list)
    """The labels as the data write them, in the order of their ids."""

    def build_datasets(self) -> tuple[Dataset, Dataset]:
        texts = [name for name in (self.text_column, self.text_pair_column) if name]
        columns: Encoders = {**dict.fromkeys(texts, require_text), self.label_column: partial(label_json, self.problem)}
        train, evaluation = self.usable_parts(self.open_rows(), columns)
        if self.problem != "regression":
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
        known, target = self._own_config.get_text_config().vocab_size, partial(target_of, self.problem, self._written)
        fixed: Any = {"tokenizer": self._tokenizer, "max_length": self.sequence_length, "num_known": known}
        inputs = cached_map(rows, partial(model_inputs, target=target, **fixed), f"tokenizing {desc}")
        return inputs.add_column("row", range(len(rows)))

    def _learn_labels(self, train: Dataset, evaluation: Dataset) -> None:
        """Set the labels that the model knows, in the order of their ids: those that it was trained on or that its head
        names, which the data may write in another case or as ids; or, if the data have none of these, the training
        data's. Raise a UserError if there are fewer than two, or the data have others."""
        where, remarks = f"task.label_column={self.label_column}", self.state.remarks
        new = sorted_labels({*names_in(train[self.label_column])})
        found = {*new, *names_in(evaluation[self.label_column])}
        if len(new) < 2 and not self._labels:  # sklearn would score a single column of 0 and 1 as two labels
            raise UserError(f"{where}: the training rows have fewer than two labels: {listed(new) or 'none'}")
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
        if self.class_weights and not self.state.data.get("class_weights"):
            self._learn_weights(train)

    def _learn_weights(self, train: Dataset) -> None:
        """Set the weight of each label in the loss. Raise a UserError if one has none, or there are others. A balanced
        label needs a row that has it and one that does not."""
        weights: Any = self.class_weights
        if isinstance(weights, dict):
            weights = dict(flatten(weights))
        else:
            counts, total = Counter(names_in(train[self.label_column])), len(train)
            labels = zip(self._labels, map(counts.get, self._written), strict=True)
            # scikit-learn's n / (k * n_label); for several labels, torch's pos_weight: negatives / positives
            is_single = self.problem == "single_label_classification"
            weights = {name: total / len(self._labels) / n if is_single else total / n - 1 for name, n in labels if n}
            self.state.remarks.append(f"task.class_weights: {listed(f'{n} {w:.3g}' for n, w in weights.items())}")
        if weights.keys() != {*self._labels} or 0 in weights.values():
            has, known = listed(f"{n} {w:.3g}" for n, w in weights.items()), listed(self._labels)
            raise UserError(f"task.class_weights: each label needs one above 0: has {has}; the labels are {known}")
        self.state.data["class_weights"] = [weights[label] for label in self._labels]

    def split(self, rows: Dataset, dataset: str) -> tuple[Dataset, Dataset]:
        train, evaluation = super().split(rows, dataset)
        known = {*names_in(train[self.label_column])}
        is_known = np.array([known.issuperset(names_in([label])) for label in evaluation[self.label_column]])
        if self.problem == "regression" or self.eval_from != "random" or not is_known.any():
            return train, evaluation
        # a row with a label of its own is trained on, as the model has to know it
        alone, others = (evaluation.select(np.flatnonzero(rows)) for rows in (~is_known, is_known))
        return concatenate_datasets([train, alone]), others

    def fingerprint(self, dataset: Dataset) -> str:
        return table_checksum(dataset, ["input_ids", "label"])

    def describe(self, part: Literal["train", "eval"], dataset: Dataset) -> dict[str, float]:
        labels = map(self._named, dataset["label"][:])
        counts = Counter(chain.from_iterable(labels) if self.problem == "multi_label_classification" else labels)
        return {
            "tokens": sum(dataset["length"][:]),
            "truncated": sum(dataset["truncated"][:]),
            "skipped_rows": self._skipped_rows[part],
            "labels": len(counts),
            **{f"label {label}": count for label, count in counts.most_common(MAX_COUNTS)},
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
        padded = self._tokenizer.pad(samples, padding_side="right", return_tensors="pt", verbose=False)
        return {
            "inputs": {name: padded[name] for name in self._tokenizer.model_input_names if name in padded},
            "labels": padded["label"],
            "tokens": int(padded["length"].sum()),
            "weights": (weights := self.state.data.get("class_weights")) and torch.tensor(weights),
        }

    @property
    def _config(self) -> PreTrainedConfig:
        config = copy.deepcopy(self._own_config)
        config.id2label = dict(enumerate(self._labels or ["LABEL_0"]))
        config.label2id = {label: i for i, label in config.id2label.items()}
        config.problem_type = self.problem
        config.class_weights = self.state.data.get("class_weights")  # to evaluate the export
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
        if config.problem_type not in (None, self.problem):
            hint = f"not {self.problem}: set task.problem, or remove problem_type from a copy"
            raise UserError(f"task.model={self.model}: its config.json says {config.problem_type}, {hint}")
        return config

    @cached_property
    def _tokenizer(self) -> PreTrainedTokenizerFast:
        tokenizer = super()._tokenizer
        tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
        return tokenizer

    def count(self, batch: Batch) -> Counts:
        return {
            "targets": batch["labels"].numel(),
            "tokens": batch["tokens"],
            "padded_tokens": batch["inputs"]["input_ids"].numel(),
        }

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        return self.evaluate(model, batch)[0]

    def evaluate(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Tensors]:
        logits, labels = model(**batch["inputs"]).logits.float(), batch["labels"]
        outputs = {"predictions": logits, "references": labels}
        if labels.ndim == 1:
            outputs |= {"predictions": logits.argmax(1), "probabilities": logits.softmax(1)}
        elif self.problem != "regression":
            outputs |= {"predictions": (logits > 0).float(), "probabilities": logits.sigmoid()}
        loss, weight = LOSSES[self.problem]
        return loss(logits, labels, reduction="sum", **{weight: batch["weights"]}), outputs

    def metrics(self, outputs: Tensors) -> dict[str, float]:
        labels = {name: outputs[name] for name in ("predictions", "references")}
        if self.problem == "regression":
            # in fp64, sums of fp32 are exact: numbers that are all the same have no correlation, NaN, not rounding's
            pairs = torch.cat([*labels.values()], 1).T.double()
            return {"pearson": torch.corrcoef(pairs)[0, 1].item() if pairs.shape[1] > 1 else math.nan}
        if self.problem == "multi_label_classification":
            return load_metric("SetAccuracy").compute(**labels, f1_micro="micro", f1_macro="macro")
        average = "binary" if len(self._labels) == 2 else "macro"
        return {**load_metric("Accuracy").compute(**labels, f1=average), **load_metric("Matthews").compute(**labels)}

    def tables(self, outputs: Tensors, dataset: Any) -> dict[str, Table]:
        def show(index: int) -> dict[str, str]:
            texts = zip(("text", "text_pair"), self._texts[index].values(), strict=False)
            return {name: text[:MAX_CELL] for name, text in texts}

        return label_tables(outputs, self._labels, show) if self.problem == "single_label_classification" else {}

    def preview(self, dataset: Dataset, index: int) -> str:
        row = dataset[index]
        return f"{self._tokenizer.decode(row['input_ids'])}\nlabel: {self._named(row['label'])}"

    def load_export(self, folder: Path) -> Any:
        # adapters have been merged into the weights
        exported = self.model_copy(update={"model": str(folder), "revision": None, "lora": Lora()})
        names: Any = exported._own_config.id2label
        weights = getattr(exported._own_config, "class_weights", None)
        self.state.data = exported.state.data = {"labels": [*names.values()], "class_weights": weights}
        # the data are read with the export's tokenizer and config, not with those of task.model
        self._tokenizer, self._own_config = exported._tokenizer, exported._own_config
        return exported.build_model()

    def predictions(self, outputs: Tensors, dataset: Any) -> dict[str, list[Any]]:
        columns = label_columns(outputs, self._labels, self._named)
        columns["label"] = [*map(self._named, dataset["label"][:])]  # not rounded to fp32
        return {"row": dataset["row"][:], **self._texts[:], **columns}

    def _named(self, label: Any) -> Any:
        """Return what stands for a label of the dataset, or a prediction: a name, names, or a number."""
        if self.problem == "regression":
            return label[0]
        return [*compress(self._labels, label)] if isinstance(label, list) else self._labels[label]


def label_json(problem: str, value: Any) -> str:
    """Return a label of this problem as JSON: a list of names, as `label_text` returns them, or of a finite number. A
    text may be a number, or the JSON of a list. Raise a ValueError if it is none of these, or has a name twice."""
    if problem == "regression":
        number = float(str(value).replace("_", " "))  # Python would read 1_000
        if not abs(number) <= float(np.finfo(np.float32).max):
            raise ValueError(f"is no finite number in fp32: {number}")
        return json.dumps([number])
    values = [value]
    if problem == "multi_label_classification":
        with reraised_as(ValueError, 'is not a list of distinct labels, such as ["a", "b"]: '):
            values = json.loads(value) if isinstance(value, str) else value
            if not isinstance(values, list) or len({*map(label_text, values)}) < len(values):
                raise ValueError(values)
    return json.dumps([*map(label_text, values)])


def names_in(labels: Iterable[str]) -> list[str]:
    """Return the names in labels from `label_json`."""
    return [name for label in labels for name in json.loads(label)]


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
    rows: Rows, target: Callable[[str], Any], tokenizer: PreTrainedTokenizerFast, max_length: int, num_known: int
) -> Rows:
    """Return a model's inputs for rows of a text, or a pair of texts, and a label; and as `label` its target, the
    `length` in tokens, and whether the text was `truncated`. Raise a UserError if the model, which knows so many
    tokens, does not know one of them."""
    *texts, written = rows.values()
    encoded = tokenizer(*texts, truncation=True, max_length=max_length)
    require_known(np.concatenate(encoded["input_ids"]), tokenizer, num_known)
    tokenizer.backend_tokenizer.no_truncation()  # remembered, it would change the fingerprint
    return {
        **encoded,
        "label": [*map(target, written)],
        "length": [len(ids) for ids in encoded["input_ids"]],
        "truncated": [bool(encoding.overflowing) for encoding in encoded.encodings or []],
    }


def target_of(problem: str, labels: list[str], label: str) -> Any:
    """Return what a label from `label_json` is to the loss: its place among all labels, 0.0 or 1.0 for each of these,
    or a number; the latter as a list."""
    values = json.loads(label)
    if problem == "regression":
        return values
    if problem == "multi_label_classification":
        return [float(label in values) for label in labels]
    return labels.index(*values)
