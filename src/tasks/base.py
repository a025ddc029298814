"""What a task is: settings that know how to build a model and data, and how to score them."""

import copy
import json
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple, Protocol, Self

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import recursively_apply
from huggingface_hub import load_torch_model, save_torch_state_dict
from pydantic import PrivateAttr
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.utils.data import default_collate

from src.config.errors import explained
from src.config.settings import Settings


class Examples(Protocol):
    """A map-style dataset: `[index]` gives an example or, where it has one, `__getitems__(indices)` a whole batch. A
    small one may have `to(device)`, which returns it in the device's memory: no batch is then copied."""

    def __len__(self) -> int: ...


DATA_STATE = "data_state.json"
"""File in an export: `TaskState.data`."""
PICTURE = "data:image/png;base64,"
"""Beginning of a table's cell that is a picture."""
Indices = np.ndarray | range
"""Indices into a dataset, int64: an array, or a range of them, which takes no memory."""
Table = list[dict[str, Any]]
"""Rows with the same keys, as JSON."""
Counts = dict[str, float]
"""What is counted of a batch, a step or a run, by name."""
Metrics = dict[str, float]
"""Results of an evaluation by name."""
Tables = dict[str, Table]
"""Tables by name."""
Tensors = dict[str, Tensor]
"""Tensors by name."""


Cards = dict[str, dict[str, Any]]
"""What model cards say, fields of huggingface_hub.ModelCardData such as license or tags, by the folder of the model in
the export: "" for that of the export itself."""
FillWeights = Callable[[Any, torch.device], None]
"""Fills a model's parameters on this device, in place."""


class ContextParallel(NamedTuple):
    """This process's place in a group of processes that share each sequence; by default it is alone."""

    rank: int = 0
    size: int = 1
    group: Any = ""
    """The name of the group, by which torch.distributed knows it."""


ALONE = ContextParallel()


@dataclass
class TaskState:
    """What a run finds out and tells its task. Each run's task has its own: see `Task.begin`."""

    device: str = "cpu"
    """The kind of device that computes."""
    dtype: torch.dtype = torch.float32
    """What it computes in."""
    cp: ContextParallel = ALONE
    """The processes that share each sequence. With several, `collate` returns this process's part of each example, and
    what `loss`, `evaluate` and `count` return adds up, over the group, to that of whole examples."""
    has_weights: bool = True
    """Whether `build_model` reads weights. In a plan it doesn't: parameters are on the meta device."""
    is_trained: bool = False
    """Whether the trained weights of a checkpoint or an export will replace those of `build_model`."""
    data: dict[str, Any] = field(default_factory=dict)
    """What `build_datasets` finds in the training data and `build_model` needs, such as labels, as JSON. Checkpoints
    and exports keep it, so that the model can be built without these data. If it is there before `build_datasets`, the
    model has been trained: keep to it."""
    notes: list[str] = field(default_factory=list)
    """What `build_model` chose for this device and dtype, for the start-up summary."""


class StatefulSettings(Settings):
    """Settings, which are frozen, and beside them what a run finds out: an object of each copy's own."""

    _state: TaskState = PrivateAttr(default_factory=TaskState)

    @property
    def state(self) -> TaskState:
        """Return what the run has found out."""
        return self._state

    def begin(self, state: TaskState) -> Self:
        """Return the task of a run: these settings, those that depend on the device chosen, with this state. Raise a
        UserError if they ask for what the device or dtype cannot do."""
        task = self.model_copy(deep=True)
        task._state = state
        return task

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """Return a copy with these settings changed. It shares no state, and caches nothing yet."""
        copied = super().model_copy(update=update, deep=deep)
        copied._state = copy.deepcopy(self._state)
        for cached in vars(copied).keys() - type(self).model_fields.keys():
            del vars(copied)[cached]
        return copied


class Task(StatefulSettings):
    """What to train, on what, and how to score it: settings, and what is done with them.

    Subclass it in a file of its own, and name that file in src/tasks/__init__.py. The fields are the task's settings
    (`--task.<field>`), and frozen. What a run finds out goes into `self.state`. Methods are called on every process,
    except that `fingerprint` is called on the first of each machine, and `metrics`, `tables`, `preview`, `export` and
    `predictions` on the main process alone.
    """

    name: str
    """The task to train."""
    metric_names: ClassVar[tuple[str, ...] | None] = None
    """Names that `metrics` returns, so that settings that name one are checked at the start; None: not known then."""
    next_step: ClassVar[tuple[str, str]] = "evaluate", "src.tools.evaluate"
    """What to do with a trained model first: a word, and the program for it."""
    splits_sequences: ClassVar[bool] = False
    """Whether several processes can share each example, which is a sequence: see `TaskState.cp`."""
    # ------------------------------------------------------------------------------------------------------ required

    @abstractmethod
    def build_model(self) -> nn.Module:
        """Return the model, fp32, on the CPU. Same seed, same weights. For FSDP, `_no_split_modules` on it lists the
        class names of its repeating blocks, as transformers does."""

    @abstractmethod
    def build_datasets(self) -> tuple[Examples, Examples]:
        """Return the training set and the evaluation set. The first process of each machine goes first: the others find
        what it downloaded or cached. Raise a UserError that says in one line what is wrong with the data."""

    @abstractmethod
    def count(self, batch: Any) -> Counts:
        """Return what is counted in a batch of `collate`: as `targets`, how many (examples, tokens) `loss` sums over.
        The loop divides by their number over all processes and micro-batches. Of text, also `tokens` and, with padding,
        `padded_tokens`; and whatever the log should sum over the run, by names such as `train/tokens_wiki`. Each batch
        has the same names, with 0 where there is nothing to count."""

    @abstractmethod
    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        """Return the loss summed over the batch's targets; shape (), fp32.

        The loop divides by their number over all processes and micro-batches: never average here. (A run's first step
        refuses a mean where autograd tells, --check any.) Take the loss of `logits.float()`: FSDP returns them in the
        dtype it computes in. Prefer a norm that looks at one example: BatchNorm would see those of one process, or a
        dummy batch.
        """

    # --------------------------------------------------------------------------------------------------------- usual

    def evaluate(self, model: nn.Module, batch: Any) -> tuple[Tensor, Tensors]:
        """Return what `loss` returns, and what `metrics` needs by name: tensors of shape (examples, ...)."""
        return self.loss(model, batch), {}

    def metrics(self, outputs: Tensors) -> Metrics:
        """Return the metrics of the whole evaluation set by name. `outputs` are those of `evaluate`, each example
        exactly once, in the dataset's order, on the CPU."""
        return {}

    def tables(self, outputs: Tensors, dataset: Any) -> Tables:
        """Return tables to log at each evaluation, by name, such as the worst mistakes. The arguments are those of
        `metrics`, and the evaluation set."""
        return {}

    def predictions(self, outputs: Tensors, dataset: Any) -> dict[str, list[Any]]:
        """Return the columns of predictions.parquet, a row for each example. The arguments are those of `tables`."""
        return {name: values.tolist() for name, values in outputs.items()}

    def collate(self, samples: list[Any]) -> Any:
        """Return a batch, nested tensors with the examples first, from what the dataset returned."""
        return default_collate(samples)

    def fingerprint(self, dataset: Any) -> str:
        """Return a string that changes when the examples or their order do; empty: unknown. A run refuses to resume on
        different data."""
        return ""

    def augmented(self, train: Any, seed: list[int]) -> Examples:
        """Return `train` as one epoch sees it. Draw from `seed` (the run's and the epoch's) and the example's index
        alone, best when the example is asked for: it is then the same on any number of processes."""
        return train

    # ---------------------------------------------------------------------------------------------------------- rest

    def describe(self, part: Literal["train", "eval"], dataset: Any) -> dict[str, float]:
        """Return figures about a dataset by name, for summary.json and the terminal: counts, and shares as floats."""
        return {}

    def order(self, train: Any, random: np.random.Generator, global_batch_size: int) -> Indices:
        """Return the order of an epoch: indices into `train`, each once. Draw from `random` alone: it is the same on
        any number of processes."""
        return random.permutation(len(train))

    def documents(self, sample: Any) -> list[Any]:
        """Split an example that packs documents, which must not see each other, into one example for each."""
        return [sample]

    def preview(self, dataset: Any, index: int) -> str:
        """Return an example of `augmented` as the model sees it, in lines of text; if not all of it contributes to the
        loss, what does within ⟦ ⟧."""
        batch = self.collate(samples(dataset, [index]))
        return json.dumps(recursively_apply(_in_words, batch), indent=2, default=str)

    def flops(self, model: Any, batch: Any) -> float:
        """Return the floating-point operations that the forward and backward pass of a batch need, for perf/mfu; 0.0:
        unknown. `model` is as `build_model` returned it, or sharded; don't wait for the device."""
        return 0.0

    def report(self, model: Any, device: torch.device) -> tuple[Metrics, Tables]:
        """Return metrics and tables by name that need the trained model, such as what it generates. Called once, after
        the last evaluation. Every process must call the model, on `device`, equally often."""
        return {}, {}

    def build_empty_model(self) -> tuple[nn.Module, FillWeights] | None:
        """Return the model with parameters on the meta device, for FSDP to shard, and what then fills them with the
        values of `build_model`; None if every process can hold all of it, as `build_model` returns it."""
        return None

    def export(self, model: nn.Module, weights: Tensors, folder: Path) -> Cards:
        """Write what others load, and return what its model card says. `model` may be sharded; `weights` are whole: its
        state dict, on the CPU."""
        save_torch_state_dict(weights, folder)  # model.safetensors, in several parts if it is large
        if self.state.data:
            (folder / DATA_STATE).write_bytes(json.dumps(self.state.data).encode())
        return {}

    def export_sharded(self, model: Any, folder: Path, accelerator: Accelerator) -> Cards | None:
        """Write what `export` would, and return what it does, from a sharded model: no process has to hold all of it.
        Return None, before anything is written, if that is not possible. Collective."""
        return None

    def load_export(self, folder: Path) -> nn.Module:
        """Return the model that `export` wrote, fp32, on the CPU; restore the state that an evaluation needs."""
        if (folder / DATA_STATE).exists():
            self.state.data = json.loads((folder / DATA_STATE).read_bytes())
        model = self.build_model()
        load_torch_model(model, folder, strict=True)
        return model


@contextmanager
def parameters_on(device: torch.device) -> Iterator[None]:
    """Have modules register their parameters on this device. Tied ones stay one, which Accelerate's init_empty_weights
    makes two on the meta device."""

    def moved(_module: nn.Module, _name: str, parameter: nn.Parameter) -> Any:
        if parameter.device == device or not parameter.is_floating_point():  # such as weights in 4 bits
            return parameter
        return nn.Parameter(parameter.detach().to(device), parameter.requires_grad)

    hook = register_module_parameter_registration_hook(moved)
    try:
        yield
    finally:
        hook.remove()


def build_skeleton(task: Task) -> nn.Module:
    """Return the task's model with parameters on the meta device, reading no weights: to plan a run. Raise a UserError
    if it cannot be built so."""
    task.state.has_weights = False
    on_meta = parameters_on(torch.device("meta"))
    with on_meta, explained("its model reads values that a plan does not have, ", RuntimeError):
        return task.build_model()


def num_weights(parameter: nn.Parameter) -> int:
    """Return how many weights a parameter has: one in 4 bits holds several in each of its numbers."""
    quantized = getattr(parameter, "quant_state", None)
    return quantized.shape.numel() if quantized else parameter.numel()


def samples(dataset: Any, indices: list[int]) -> Any:
    """Return these examples as the dataset has them, for Task.collate."""
    # the protocol of torch's DataLoader: one call gives the whole batch where the dataset can do that
    fetch_batch = getattr(dataset, "__getitems__", None)
    return fetch_batch(indices) if fetch_batch else [dataset[i] for i in indices]


def _in_words(batch: Tensor) -> Any:
    """Return what a tensor holds of the only example in it: a number, or what says of which kind many are."""
    if batch.numel() < 2:
        return batch.squeeze().tolist()
    return f"{batch.dtype} {tuple(batch.shape[1:])}, {batch.min():.6g} to {batch.max():.6g}"
