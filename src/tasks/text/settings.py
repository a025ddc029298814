"""The settings that text tasks share: what to read, which model to train, and how. Checking them takes neither torch
nor transformers."""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, PositiveInt

from src.config.groups import TaskSettings
from src.config.optim import Fraction
from src.config.settings import ResumeSafe, SafeReopens, Settings, Values, nearest, read_yaml
from src.tasks.text.files import EXTENSIONS, path_error

DEFAULTS: dict[str, Values] = read_yaml(Path(__file__).with_name("defaults.yaml").read_bytes())
"""Defaults of a run, by what of its model is trained."""
OPTIONS: Values = read_yaml(Path(__file__).with_name("lora_options.yaml").read_bytes())
"""For each field of peft's LoraConfig, a regular expression for what is allowed, and why nothing else is."""
HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")
"""Matches the name of a dataset or a model on the Hub."""


class Lora(Settings):
    """Configures LoRA (Hu et al. 2021, https://arxiv.org/abs/2106.09685): small matrices are trained instead of the
    weights."""

    r: PositiveInt | None = None
    """Rank of the adapters; null: no adapters, all weights are trained."""
    alpha: PositiveInt = 16
    """What the adapters add to a layer's output is scaled by alpha / r."""
    dropout: Fraction = 0.0
    """Dropout rate on the adapters' input."""
    target_modules: list[str] = []
    """Names of the layers that get adapters, such as q_proj; empty: all linear layers except the output."""
    exclude_modules: str | None = None
    r"""A regular expression: layers whose name matches get no adapters; .*\.\d\..* excludes blocks 0 to 9. Below the
    first adapters there is no backward pass, and no activations are kept."""
    base_dtype: ResumeSafe[Literal["nf4", "bf16", "fp32"] | None] = None
    """Dtype of the frozen weights; null: bf16 if a GPU computes in it, else fp32. nf4: 4 bits, on one device or under
    DDP; embedding and output are bf16. Adapters and a classifier's head are fp32."""
    merge: SafeReopens[bool] = False
    """Also export the model with the adapters merged into its weights, to model/merged. A classifier's always are."""
    options: Values = {}
    """Other fields of peft's LoraConfig, such as {use_rslora: true}; docs/transformers.md lists them."""


class TextSettings(TaskSettings):
    """Settings of a transformers model that is trained on text."""

    dataset: str = ""
    """A dataset on the Hub, a file (.txt, .jsonl, .json, .csv, .tsv, .parquet), or a folder of such files whose names
    tell their split: train, and validation, dev or test; here or at a URL such as s3://bucket/folder. A .txt file is
    one document; in a .tsv, quotes are plain text."""
    dataset_config: str | None = None
    """Configuration (subset) of a dataset on the Hub."""
    column_names: list[str] = []
    """Names of the columns of a .csv or .tsv file without a header."""
    train_split: Annotated[str, Field(min_length=1)] = "train"
    """Split to train on."""
    eval_split: str | None = None
    """Split to evaluate on; null: validation, dev or test if there is one, else a part of train_split."""
    eval_fraction: Annotated[float, Field(gt=0, lt=1)] = 0.1
    """Fraction of train_split that is held out for evaluation if there is no split for it."""
    eval_from: Literal["random", "last", "all"] = "random"
    """Which rows are held out: random ones, the same in each run, or the last ones. A single document is always cut
    near its end. all: none, and all rows are evaluated on, as src.tools.evaluate does with other data."""
    eval_datasets: dict[Annotated[str, Field(pattern=r"^[\w-]+$")], str] = {}
    """Further evaluation sets: {math: math.jsonl, code: FOLDER} adds eval/loss_math and, if the task has an accuracy,
    eval/accuracy_math, and those of code. Each is a file, a folder or a dataset on the Hub: all of its validation, dev
    or test split is read or, if there is none, of train."""
    bad_rows: Literal["refuse", "skip"] = "refuse"
    """What to do with rows that cannot be read, whose text or label is missing or of the wrong type, or whose chat the
    template cannot write. refuse: name the first and stop; skip: leave them out and count them."""
    model: str | None = None
    """A model on the Hub, or a local folder, to start from. Weights are loaded as fp32; its code is never run."""
    revision: str | None = None
    """Branch, tag or commit of a model on the Hub."""
    dropout: Fraction | None = None
    """Value for all of the model's dropout rates; null: as in its config."""
    sequence_length: PositiveInt
    """Maximum number of tokens that the model sees."""
    lora: Lora = Lora()
    """Low-rank adapters."""

    @classmethod
    def run_defaults(cls, given: Mapping[str, Any]) -> Values:
        if given.get("task.architecture.model_type"):
            return DEFAULTS["from_scratch"]
        return DEFAULTS["adapters" if given.get("task.lora.r") else "fine_tuning"]

    @property
    def dataset_names(self) -> list[str]:
        """Return the names of all datasets that are trained on."""
        return [self.dataset]

    def validation_errors(self) -> Iterator[str]:
        yield from super().validation_errors()
        named = [("dataset", name) for name in self.dataset_names]
        named += [(f"eval_datasets.{name}", dataset) for name, dataset in self.eval_datasets.items()]
        for setting, dataset in named:
            path = Path(dataset)
            is_hub_name = path.suffix.lower() not in EXTENSIONS and HUB_NAME.fullmatch(dataset)
            if not dataset:
                yield f"task.{setting} is not set: name a dataset on the Hub, a file or a folder"
            elif path.exists():
                if error := path_error(path):
                    yield f"task.{setting}={path}: {error}"
            elif not is_hub_name and "://" not in dataset:
                yield f"task.{setting}={path}: no such file or folder"
        if self.eval_split == self.train_split and self.eval_from != "all":
            says = "is the training split; leave it unset to hold out a part of that for evaluation"
            yield f"task.eval_split={self.eval_split}: {says}"
        if not self.lora.r and self.lora != Lora():
            yield "task.lora.r is not set: without it, the other settings of task.lora have no effect"
        for name, value in self.lora.options.items():
            allowed, why = OPTIONS.get(name, ["", f"none of peft's that was tried here{nearest(name, [*OPTIONS])}"])
            if not re.fullmatch(allowed, f"{value!r} {self.lora}"):  # some values don't go with other settings
                yield f"task.lora.options.{name}: {why}"
        folder = Path(str(self.model))
        if not HUB_NAME.fullmatch(str(self.model)) and not folder.is_dir():
            yield f"task.model={self.model}: no such folder"
        if (folder / "adapter_config.json").exists():
            hint = "name the model that they belong to, or one that they were merged into (task.lora.merge=true)"
            yield f"task.model={self.model}: holds adapters, not a model; {hint}"


class DecoderSettings(TextSettings):
    """Settings of a transformers decoder, from scratch or fine-tuned."""

    architecture: dict[str, Any] = {}
    """What to train from scratch, instead of task.model: model_type as transformers names it (llama, gpt2, qwen3, …),
    and any fields of its config."""
    tokenizer: str | None = None
    """A model whose tokenizer to use, or `bytes`; null: task.model's own, or bytes if trained from scratch."""

    def validation_errors(self) -> Iterator[str]:
        yield from super().validation_errors()
        if bool(self.model) == bool(self.architecture):
            yield "task.model, task.architecture: set one of them, to fine-tune a model or to train one from scratch"
        if self.lora.r and not self.model:
            yield "task.lora adapts an existing model: set task.model, not task.architecture"
