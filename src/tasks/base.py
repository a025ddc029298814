"""The interface of a task: settings that know how to build a model and data, and how to score them."""

import copy
import json
from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple, Protocol, Self

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import recursively_apply
from huggingface_hub import load_torch_model, save_torch_state_dict
from pydantic import PrivateAttr
from torch import Tensor, nn
from torch.utils.data import default_collate

from src.config.errors import as_user_error
from src.config.groups import TaskSettings


class Examples(Protocol):
    """Describes a map-style dataset: `[index]` returns an example, and `__getitems__(indices)`, where defined, a whole
    batch. A small dataset may have `to(device)`, which returns it in the device's memory, so that no batch needs to be
    copied."""

    def __len__(self) -> int: ...


DATA_STATE = "data_state.json"
"""Name of the file in an export that holds `TaskState.data`."""
PICTURE = "data:image/png;base64,"
"""Prefix of a table cell that holds a picture."""
Indices = np.ndarray | range
"""Indices into a dataset, int64: an array, or a range, which takes no memory."""
Table = list[dict[str, Any]]
"""Rows with the same keys and JSON values."""
Columns = dict[str, list[Any]]
"""Columns of a table by name, all of the same length."""
Counts = dict[str, float]
"""Counts of a batch, a step or a run, by name."""
Metrics = dict[str, float]
"""Results of an evaluation, by name."""
Tables = dict[str, Table]
"""Tables by name."""
Tensors = dict[str, Tensor]
"""Tensors by name."""


Cards = dict[str, dict[str, Any]]
"""Model card fields, those of huggingface_hub.ModelCardData such as license or tags, by the model's folder within the
export; "" is the export itself."""
FillWeights = Callable[[Any, torch.device], None]
"""Fills a model's parameters in place, on this device."""


class ContextParallel(NamedTuple):
    """Holds this process's place in a group of processes that split each sequence; by default, it is alone."""

    rank: int = 0
    size: int = 1
    group: Any = ""
    """The group's name in torch.distributed."""


ALONE = ContextParallel()


@dataclass
class TaskState:
    """Holds what a run finds out for its task. Each run's task has a state of its own: see `Task.bind`."""

    device: str = "cpu"
    """Type of the device that the run trains on, such as cuda."""
    dtype: torch.dtype = torch.float32
    """Dtype that it computes in."""
    is_check: bool = False
    """Whether --check compares the run in fp32, whatever it trains in."""
    cp: ContextParallel = ALONE
    """The processes that split each sequence. With several, `collate` returns this process's part of each example, and
    what `loss`, `evaluate` and `count` return must sum over the group to the values for whole examples."""
    is_trained: bool = False
    """Whether the trained weights of a checkpoint or an export will replace those of `build_model`."""
    has_frozen: bool = False
    """Whether the replaced ones are only a part, as checkpoints lack weights that the settings freeze. Unless it is
    true, or the task freezes weights itself, `build_model` need not read any if `is_trained`."""
    data: dict[str, Any] = field(default_factory=dict)
    """What `build_datasets` learns from the training data and `build_model` needs, such as labels, as JSON. Checkpoints
    and exports keep it, so that the model can be built without the data. If it is set before `build_datasets` is
    called, the model has been trained already: keep it."""
    date: str = field(default_factory=lambda: datetime.now().isoformat(" ", "seconds"), compare=False)
    """When the run began, in local time, the same on all processes: for data that name the day. A resumed run has what
    its checkpoint holds as `date` in `data`."""
    optimizations: list[str] = field(default_factory=list)
    """What was chosen for this device and dtype, for the start-up summary."""
    remarks: list[str] = field(default_factory=list)
    """What the user should know about the model or the data, for the start-up summary: a line each."""


class Task(TaskSettings):
    """Defines what to train, on what data, and how to score it.

    Subclass it in a file of its own, and list that file in src/tasks/__init__.py. Fields are the task's settings
    (`--task.<field>`), and frozen. What a run finds out goes into `self.state`, or into a private attribute if neither
    a checkpoint nor a copy of the task needs it. Methods are called on every process, except that `fingerprint` is
    called on the first process of each machine, and `metrics`, `tables`, `preview`, `export` and `predictions` on the
    main process alone.
    """

    next_step: ClassVar[tuple[str, str]] = "evaluate", "src.tools.evaluate"
    """What to do first with a trained model: a verb, and the program that does it."""
    splits_sequences: ClassVar[bool] = False
    """Whether several processes can split each example, which is a sequence: see `TaskState.cp`."""
    kept_outputs: ClassVar[dict[str, int]] = {}
    """For outputs of `evaluate` that are too large to keep for all examples, such as masks to show: of how many of the
    evaluation set's first examples to keep them, by name. Only these reach the main process. Others are kept whole."""

    eval_sets: ClassVar[Any] = {}
    """Further sets to evaluate on, by name: the loss and the accuracy on each are metrics too, eval/loss_NAME and
    eval/accuracy_NAME. A cached property may build them: it is first read after `build_datasets`."""

    _state: TaskState = PrivateAttr(default_factory=TaskState)

    @property
    def state(self) -> TaskState:
        """Return what the run has found out."""
        return self._state

    def bind(self, state: TaskState) -> Self:
        """Return this task for a run, with this state. A task whose settings depend on the device chooses them here.
        Raise a UserError if they ask for something that the device or dtype cannot do."""
        task = self.model_copy()
        task._state = state
        return task

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """Return a new object with the same settings but for these, and with a copy of the state. Cached properties and
        private attributes start anew."""
        values = {name: getattr(self, name) for name in type(self).model_fields} | dict(update or {})
        copied: Any = type(self).model_construct(_fields_set=self.model_fields_set, **values)
        copied._state = copy.deepcopy(self._state)
        return copied

    # ------------------------------------------------------------------------------------------------------ required

    @abstractmethod
    def build_model(self) -> nn.Module:
        """Return the model, fp32, on the CPU; the same seed must give the same weights. For FSDP, set
        `_no_split_modules` on it to the class names of its repeating blocks, as transformers does."""

    @abstractmethod
    def build_datasets(self) -> tuple[Examples, Examples]:
        """Return the training set and the evaluation set. The first process of each machine runs first, so that the
        others find what it downloaded or cached. Raise a UserError that says in one line what is wrong with the
        data."""

    @abstractmethod
    def count(self, batch: Any) -> Counts:
        """Return the counts of a batch from `collate`: `targets` is how many examples or tokens `loss` sums over. The
        loop divides by their total over all processes and micro-batches. For text, add `tokens` and, with padding,
        `padded_tokens`. Add whatever the log should sum over the run, under names such as `train/tokens_wiki`. Return
        the same names for each batch, with 0 where there is nothing to count."""

    @abstractmethod
    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        """Return the loss summed over the batch's targets; shape (), fp32.

        The loop divides by their total over all processes and micro-batches: never average here. (A run's first step
        rejects a mean where autograd reveals it, --check any mean.) Compute the loss from `logits.float()`: FSDP
        returns logits in its compute dtype. Prefer a norm over a single example: BatchNorm would see only
        one process's examples, or a dummy batch.
        """

    # --------------------------------------------------------------------------------------------------------- usual

    def evaluate(self, model: nn.Module, batch: Any) -> tuple[Tensor, Tensors]:
        """Return what `loss` returns, and the tensors that `metrics` needs, by name; shape (examples, ...)."""
        return self.loss(model, batch), {}

    def metrics(self, outputs: Tensors) -> Metrics:
        """Return the metrics over the whole evaluation set, by name. `outputs` come from `evaluate`, each example
        exactly once, in the dataset's order, on the CPU; those in `kept_outputs`, of the first examples alone."""
        return {}

    def tables(self, outputs: Tensors, dataset: Any) -> Tables:
        """Return tables to log at each evaluation, by name, such as the worst mistakes; one without rows is left out.
        `outputs` are as for `metrics`; `dataset` is the evaluation set."""
        return {}

    def generate(self, model: nn.Module, dataset: Any) -> Table:
        """Return what the model writes by itself, to show at each evaluation, in rows of two texts: what it is given,
        and how it continues. Called on all processes, as calling the model may be collective, in evaluation mode and
        without gradients; draw no random numbers. `dataset` is the evaluation set."""
        return []

    def predictions(self, outputs: Tensors, dataset: Any) -> Columns:
        """Return the columns of predictions.parquet, with a row per example: by default, all outputs but those in
        `kept_outputs`. Arguments are as for `tables`."""
        return {name: values.tolist() for name, values in outputs.items() if name not in self.kept_outputs}

    def collate(self, samples: list[Any]) -> Any:
        """Return a batch of what the dataset returned: nested tensors whose first dimension is the examples."""
        return default_collate(samples)

    def fingerprint(self, dataset: Any) -> str:
        """Return a string that changes when the examples or their order do; empty: unknown. A run refuses to resume on
        different data."""
        return ""

    def augmented(self, train: Any, seed: list[int]) -> Examples:
        """Return `train` as one epoch sees it. Draw from `seed` (the run's and the epoch's) and the example's index
        alone, ideally when the example is fetched: it is then the same on any number of processes."""
        return train

    # ---------------------------------------------------------------------------------------------------------- rest

    def describe(self, part: Literal["train", "eval"], dataset: Any) -> dict[str, float]:
        """Return statistics of a dataset by name, for summary.json and the terminal: counts, and fractions as
        floats."""
        return {}

    def dataset_size(self, dataset: Any) -> str:
        """Say how large a dataset is, for the terminal."""
        return f"{len(dataset):,} examples"

    def order(self, train: Any, random: np.random.Generator, global_batch_size: int) -> Indices:
        """Return the order of an epoch: indices into `train`, each once. Draw from `random` alone, which is the same on
        any number of processes."""
        return random.permutation(len(train))

    def documents(self, sample: Any) -> list[Any]:
        """Split an example of packed documents, which must not see each other, into one example per document."""
        return [sample]

    def preview(self, dataset: Any, index: int) -> str:
        """Return an example from `augmented` as the model sees it, as lines of text. If only a part of it contributes
        to the loss, enclose that in ⟦ ⟧."""
        batch = self.collate(samples(dataset, [index]))
        return json.dumps(recursively_apply(_in_words, batch), indent=2, default=str)

    def flops(self, model: Any, batch: Any) -> float:
        """Return the floating-point operations of a batch's forward and backward pass, for perf/mfu; 0.0: unknown.
        `model` is as `build_model` returned it, or sharded. Don't wait for the device."""
        return 0.0

    def build_empty_model(self) -> tuple[nn.Module, FillWeights] | None:
        """Return the model with parameters on the meta device, for FSDP to shard, and a function that then fills them
        with the values of `build_model`; None if every process can hold the whole model, as `build_model` returns
        it."""
        return None

    def export(self, model: nn.Module, weights: Tensors, folder: Path) -> Cards:
        """Write the files that others load, and return the model cards. `model` may be sharded; `weights` is its whole
        state dict, on the CPU."""
        save_torch_state_dict(weights, folder)  # model.safetensors, split into several files if it is large
        if self.state.data:
            (folder / DATA_STATE).write_text(json.dumps(self.state.data))
        return {"": {}}

    def export_sharded(self, model: Any, folder: Path, accelerator: Accelerator) -> Cards | None:
        """Do what `export` does, but from a sharded model that no process has to hold whole. Return None, before
        writing anything, if that is not possible. Collective."""
        return None

    def load_export(self, folder: Path) -> nn.Module:
        """Return the model that `export` wrote, fp32, on the CPU, and restore the state that an evaluation needs."""
        says = f"{folder}: not as a run exports it: "
        if (folder / DATA_STATE).is_file():
            with as_user_error(says, (ValueError, RecursionError)):
                self.state.data = json.loads((folder / DATA_STATE).read_bytes())
        self.state.is_trained = True
        model = self.build_model()
        with as_user_error(says):
            load_torch_model(model, folder, strict=True)
        return model


def num_weights(parameter: nn.Parameter) -> int:
    """Return the number of weights in a parameter: a 4-bit one packs several into each element."""
    quantized = getattr(parameter, "quant_state", None)
    return quantized.shape.numel() if quantized else parameter.numel()


def samples(dataset: Any, indices: list[int]) -> Any:
    """Return these examples from the dataset, for Task.collate."""
    # the protocol of torch's DataLoader: one call returns the whole batch if the dataset supports that
    fetch_batch = getattr(dataset, "__getitems__", None)
    return fetch_batch(indices) if fetch_batch else [dataset[i] for i in indices]


def _in_words(batch: Tensor) -> Any:
    """Describe a tensor that holds one example: by its value if that is a single number, else by dtype, shape and
    range."""
    if batch.numel() < 2:
        return batch.squeeze().tolist()
    return f"{batch.dtype} {tuple(batch.shape[1:])}, {batch.min():.6g} to {batch.max():.6g}"
