"""A tag for each word, such as the names in a sentence, with any encoder: `--task.name=token_classification`.

Everything else is as in text_classification. Tags are IOB2: B- begins a name, I- continues it, O is outside. Metrics
count whole names, as in CoNLL-2003 (Tjong Kim Sang and De Meulder, https://arxiv.org/abs/cs/0306050).
"""

import json
import re
from textwrap import shorten
from typing import Any, ClassVar, Literal

import numpy as np
from datasets import Dataset, concatenate_datasets
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, pad
from transformers import AutoModelForTokenClassification, DataCollatorForTokenClassification

from src.config.errors import UserError, listed
from src.tasks.base import Counts
from src.tasks.text.load import require_known
from src.tasks.text.rows import as_json
from src.tasks.text.text_classification import TextClassification, as_written
from src.tasks.text.text_task import PART_NAMES

MAX_MISTAKES = 24
"""Rows of the table of mistakes."""


class TokenClassification(TextClassification):
    """Finds the names in sentences, and their kinds."""

    name: Literal["token_classification"] = "token_classification"  # type: ignore[assignment]
    """The task to train."""
    text_column: str = "tokens"
    """Column of sentences, lists of words."""
    label_column: str = "tags"
    """Column of tags, a list with one for each word."""
    text_pair_column: None = None
    """Sentences don't come in pairs here."""
    problem: Literal["single_label_classification"] = "single_label_classification"
    """What transformers calls it: each word has one tag."""
    class_weights: None = None
    """All tags count the same here."""
    metric_names: ClassVar[tuple[str, ...]] = ("precision", "recall", "f1")
    auto_class: ClassVar[Any] = AutoModelForTokenClassification
    pipeline_tag: ClassVar[str] = "token-classification"

    def build_datasets(self) -> tuple[Dataset, Dataset]:
        columns = dict.fromkeys((self.text_column, self.label_column), as_list)
        train, evaluation = (self._sentences(rows) for rows in self.usable_parts(self.open_rows(), columns))
        kinds = sorted({tag[2:] for _, tags in train for tag in tags if re.match("[BI]-", tag)})
        new = ["O", *(f"{place}-{kind}" for kind in kinds for place in "BI")]
        self._name_tags({tag for _, tags in train + evaluation for tag in tags}, new)
        mistakes: list[str] = []
        for where, sentences in zip(PART_NAMES.values(), (train, evaluation), strict=True):
            fits = [0 < len(words) == len(tags) and {*tags} <= {*self._written} for words, tags in sentences]
            if not all(fits):
                words, tags = sentences[fits.index(False)]
                tagged, labels = (shorten(" ".join(names), 200, placeholder=" …") for names in (tags, self._labels))
                says = f"row {fits.index(False) + 1} of {where} has {len(words)} words, tagged {tagged}"
                says += f": give each one of {labels}"
                mistakes.append(f"{says} ({fits.count(False)} of {len(fits)} rows do not fit)")
        if mistakes:
            raise UserError(*(f"task.dataset={self.dataset}: {mistake}" for mistake in mistakes))
        return self._tokenize(train), self._tokenize(evaluation)

    def _name_tags(self, found: set[str], new: list[str]) -> None:
        """Set the tags that the model knows, in the order of their ids: those that it was trained on, or that its head
        names, whatever their case in the data; or, if these have none of a head's but O, new ones. Raise a UserError if
        they have only some of a head's."""
        head: Any = self._own_config.id2label
        names = self._labels or [str(head[i]) for i in sorted(head)]
        written = as_written(names, found)
        if not self._labels:
            others = listed(sorted(found - {*written}))
            if not found & {*written} - {"O"}:
                names, written = new, new
            elif others:
                says = f"{others} is in the data, but not among the model's labels: {listed(names)}"
                hint = "rename it, or remove id2label from its config.json to begin with new ones"
                raise UserError(f"task.label_column={self.label_column}: {says}; {hint}")
        if renamed := listed(f"{a} is read as {b}" for a, b in zip(written, names, strict=True) if a != b):
            self.state.remarks.append(f"task.label_column={self.label_column}: {renamed}")
        self.state.data["labels"], self._written = names, written

    def split(self, rows: Dataset, dataset: str) -> tuple[Dataset, Dataset]:
        train, evaluation = super(TextClassification, self).split(rows, dataset)
        known = {tag for tags in train[self.label_column] for tag in map(str, json.loads(tags))}
        is_known = np.array([known.issuperset(map(str, json.loads(tags))) for tags in evaluation[self.label_column]])
        if self.eval_from == "random" and is_known.any():
            # a sentence with a tag of its own is trained on, as the model has to know it
            train = concatenate_datasets([train, evaluation.select(np.flatnonzero(~is_known))])
            evaluation = evaluation.select(np.flatnonzero(is_known))
        return train, evaluation

    def _sentences(self, rows: Dataset) -> list[tuple[list[str], list[str]]]:
        both = zip(rows[self.text_column], rows[self.label_column], strict=True)
        return [(json.loads(words), [*map(str, json.loads(tags))]) for words, tags in both]

    def _tokenize(self, sentences: list[tuple[list[str], list[str]]]) -> Dataset:
        rows, options = [], {"is_split_into_words": True, "truncation": True, "max_length": self.sequence_length}
        for words, tags in sentences:
            encoded = self._tokenizer([f" {word}" for word in words], **options)  # byte-level ones expect the space
            require_known(np.array(encoded["input_ids"]), self._tokenizer, self._own_config.vocab_size)
            ids = {word: self._written.index(tag) for word, tag in enumerate(tags)}
            names = [self._labels[i] for i in ids.values()]
            labels = [ids.pop(word, -100) for word in encoded.word_ids()]  # -100 after the first piece: no target
            seen = [
                word for word in range(len(words)) if word not in ids
            ]  # the others have no token: zero-width, or truncated
            row = {"input_ids": encoded["input_ids"], "label": labels, "length": len(labels)}
            rows.append(row | {"words": words, "tags": names, "seen": seen, "truncated": bool(encoded[0].overflowing)})
        return Dataset.from_list(rows)

    def describe(self, part: Literal["train", "eval"], dataset: Dataset) -> dict[str, float]:
        return {"tokens": sum(dataset["length"][:]), "truncated": sum(dataset["truncated"][:])}

    def collate(self, samples: list[dict[str, Any]]) -> dict[str, Any]:
        rows = [{"input_ids": sample["input_ids"], "labels": sample["label"]} for sample in samples]
        inputs = DataCollatorForTokenClassification(self._tokenizer)(rows)
        labels, tokens = inputs.pop("labels"), sum(sample["length"] for sample in samples)
        return {"inputs": dict(inputs), "labels": labels, "tokens": tokens}

    def preview(self, dataset: Dataset, index: int) -> str:
        row = dataset[index]
        pieces = zip(self._tokenizer.convert_ids_to_tokens(row["input_ids"]), row["label"], strict=True)
        return " ".join(f"{piece}/{self._labels[label]}" if label >= 0 else piece for piece, label in pieces)

    def count(self, batch: dict[str, Any]) -> Counts:
        return super().count(batch) | {"targets": int((batch["labels"] >= 0).sum())}

    def loss(self, model: nn.Module, batch: dict[str, Any]) -> Tensor:
        return self.evaluate(model, batch)[0]

    def evaluate(self, model: nn.Module, batch: dict[str, Any]) -> tuple[Tensor, dict[str, Tensor]]:
        logits, labels = model(**batch["inputs"]).logits.float().transpose(1, 2), batch["labels"]
        outputs = {"predictions": logits.argmax(1).where(labels >= 0, labels), "references": labels}
        room = (0, self.sequence_length - labels.shape[1])  # a batch is as wide as its longest sentence
        outputs = {name: pad(ids, room, value=-100) for name, ids in outputs.items()}
        return cross_entropy(logits, labels, reduction="sum"), outputs

    def metrics(self, outputs: dict[str, Tensor]) -> dict[str, float]:
        found, expected = (self._names(self._tags(outputs[name])) for name in ("predictions", "references"))
        sizes = len(found), len(expected), (len(found) + len(expected)) / 2
        return {name: len(found & expected) / max(n, 1) for name, n in zip(self.metric_names, sizes, strict=True)}

    def _names(self, sentences: list[list[str]]) -> set[tuple[int, int, int, str]]:
        """Return sentence, first and last word, and kind of each name. An I- that continues no name begins one."""
        found = set()
        for sentence, tags in enumerate(map(" ".join, sentences)):
            for name in re.finditer(r"[BI]-(\S+)(?: I-\1(?!\S))*", tags):
                found.add((sentence, tags.count(" ", 0, name.start()), tags.count(" ", 0, name.end()), name[1]))
        return found

    def _tags(self, labels: Tensor) -> list[list[str]]:
        """Return the tags of the words that the model sees."""
        return [[self._labels[i] for i in row[row >= 0].tolist()] for row in labels]

    def _predicted(self, outputs: dict[str, Tensor], dataset: Any) -> list[list[str]]:
        """Return a tag for each word: O for those that the model does not see."""
        rows = []
        for words, seen, tags in zip(
            dataset["words"], dataset["seen"], self._tags(outputs["predictions"]), strict=True
        ):
            by_word = dict(zip(seen, tags, strict=True))
            rows.append([by_word.get(word, "O") for word in range(len(words))])
        return rows

    def tables(self, outputs: dict[str, Tensor], dataset: Any) -> dict[str, Any]:
        found, expected = self._names(self._predicted(outputs, dataset)), self._names(dataset["tags"][:])
        rows, sentences = [], dataset["words"][:]
        for i, first, last, kind in sorted(found ^ expected)[:MAX_MISTAKES]:
            name, mistake = sentences[i][first : last + 1], "spurious" if (i, first, last, kind) in found else "missed"
            rows.append({"name": " ".join(name), "kind": kind, "mistake": mistake, "sentence": " ".join(sentences[i])})
        return {"mistakes": rows} if rows else {}

    def predictions(self, outputs: dict[str, Tensor], dataset: Any) -> dict[str, list[Any]]:
        predictions = self._predicted(outputs, dataset)
        return {"words": dataset["words"][:], "predictions": predictions, "references": dataset["tags"][:]}


def as_list(value: Any) -> str:
    """Return a list as JSON. Raise a ValueError for anything else."""
    if not isinstance(value, list):
        raise ValueError(f"is {type(value).__name__}, not a list")
    return as_json(value)
