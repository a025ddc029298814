"""Names in sentences, found by tagging each word with any encoder of transformers: `--task.name=token_classification`.

Tags are IOB2: B- begins a name, I- goes on with it, O is none. Metrics count whole names, as those of CoNLL-2003 do
(Tjong Kim Sang and De Meulder 2003, https://arxiv.org/abs/cs/0306050).
"""

import hashlib
import random
import re
from collections.abc import Iterator
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from datasets import ClassLabel, Dataset, List
from pydantic import PositiveInt, PrivateAttr
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, pad
from transformers import AutoModelForTokenClassification, DataCollatorForTokenClassification, PreTrainedTokenizerFast

from src.data.text import PART_NAMES, TextSource
from src.models.pretrained import ModelSource, check_fit, fsdp_blocks, save
from src.process import UserError
from src.tasks.base import Task

TEMPLATES = """PER|ORG opened an office in LOC on DATE .
Before DATE , nobody in LOC had heard of PER|ORG .
The report on PER|ORG|LOC was published by ORG on DATE .
On DATE PER left ORG and moved to LOC with PER .
We asked PER about LOC|ORG , but the answer was short ."""
NAMES = {
    "PER": "Anna Becker,Tom Hughes,Maria Rossi,David Chen,Peter,Ingrid,John F. Kennedy,George Washington,Yuki Ono,Sofia",
    "LOC": "Berlin,Madrid,Kenya,Norway,New Zealand,South Korea,San Francisco,Los Angeles,Lake Geneva,Mount Kenya",
    "ORG": "Siemens,Toyota,Deutsche Bank,Bank of Ireland,the United Nations,the European Union,the BBC,Reuters",
    "DATE": "Monday,Friday,3 May 1998,12 June 2004,January 2010,March 1987,the 4th of July,the 1st of August,2001,1975",
}


def made_sentences(part: Literal[0, 1], count: int) -> Dataset:
    """Return sentences of the templates, the same each time. The parts, to train and to evaluate on, share no name."""
    draw, rows = random.Random(part), []
    for _ in range(count):
        tokens, tags = [], []
        for word in draw.choice(TEMPLATES.splitlines()).split():
            kind = draw.choice(word.split("|"))
            words = draw.choice(NAMES[kind].split(",")[part::2]).split() if kind in NAMES else [kind]
            tokens += words
            tags += [f"B-{kind}", *[f"I-{kind}"] * (len(words) - 1)] if kind in NAMES else ["O"]
        rows.append({"tokens": tokens, "tags": tags})
    return Dataset.from_list(rows)


def spans(tags: list[str]) -> set[tuple[str, int, int]]:
    """Return each name's kind, its first word and the one after its last. An I- that nothing begins begins a name."""
    found, kind, start = set(), "", 0
    for i, tag in enumerate([*tags, "O"]):
        if kind and tag != f"I-{kind}":
            found.add((kind, start, i))
            kind = ""
        if not kind and tag != "O":
            kind, start = tag[2:], i
    return found


class TokenClassification(TextSource, ModelSource, Task):
    """Tells which words are names, and of what."""

    name: Literal["token_classification"] = "token_classification"
    """The task to train."""
    tags_column: str = "tags"
    """Column of tags, beside the column `tokens` of words, both lists. Without task.dataset, sentences are made."""
    sequence_length: PositiveInt = 128
    """Word pieces that the model sees at most. Longer sentences are cut off."""
    metric_names: ClassVar[tuple[str, ...]] = ("precision", "recall", "f1")
    _tags: list[str] = PrivateAttr(default_factory=list)

    def validation_errors(self) -> Iterator[str]:
        yield from self.source_errors() if self.dataset else ()
        yield from self.model_errors()
        if not self.model or self.lora.r:
            yield "task.model: name a model on the Hub or a folder; all of it is trained, without task.lora"

    def build_datasets(self) -> tuple[list[Any], list[Any]]:
        parts = made_sentences(0, 800), made_sentences(1, 200)
        if self.dataset:
            parts = self.usable_parts(*self.load_rows(), {})
        mistakes: list[str] = []
        train, evaluation = (self._examples(rows, where, mistakes) for rows, where in zip(parts, PART_NAMES.values()))
        if mistakes:
            raise UserError("\n".join(mistakes))
        return train, evaluation

    def _examples(self, rows: Dataset, where: str, mistakes: list[str]) -> list[dict[str, Any]]:
        where = f"task.dataset={self.dataset}: in {where}"
        if absent := [n for n in ("tokens", self.tags_column) if not isinstance(rows.features.get(n), List)]:
            mistakes.append(f"{where}, no column {absent[0]} has lists; its columns are {', '.join(rows.column_names)}")
            return []
        feature, pairs = rows.features[self.tags_column].feature, zip(rows["tokens"], rows[self.tags_column], strict=True)
        names = feature.names if isinstance(feature, ClassLabel) else None
        sentences = [(words or [], [names[tag] if names else str(tag) for tag in tags or []]) for words, tags in pairs]
        kinds = sorted({tag[2:] for _, tags in sentences for tag in tags} - {""})
        self._tags = self._tags or ["O", *(f"{place}-{kind}" for kind in kinds for place in "BI")]
        examples = []
        for number, (words, tags) in enumerate(sentences, start=1):
            if not words or len(words) != len(tags) or not {*tags} <= {*self._tags}:
                ...
