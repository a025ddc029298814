"""What a task is: settings that know how to build a model and data, and how to score them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol

from src.settings import Settings

if TYPE_CHECKING:  # settings are checked, and --help answers, before torch is imported
    import numpy as np
    import torch
    from torch import Tensor, nn


class Examples(Protocol):
    """A map-style dataset: `[index]` gives an example or, where it has one, `__getitems__(indices)` a whole batch."""

    def __len__(self) -> int: ...


class Task(Settings, ABC):
    """Subclass it in a file of its own and import that file in `src/tasks/__init__.py`.

    The fields are the task's settings (`--task.<field>`); `name` picks it. All methods but `metrics` and `export`
    are called on every process. Derive from this class directly.
    """

    name: str
    """The task to train."""
    metric_names: ClassVar[tuple[str, ...] | None] = None
    """What `metrics` returns, for settings that name one of them to be checked at the start; None: not known before."""

    def mistakes(self) -> Iterator[str]:
        """What no single field can tell: settings that contradict each other, files that are not there; one line each.

        Called before anything is loaded.
        """
        yield from ()

    @abstractmethod
    def build_model(self) -> nn.Module:
        """The model, fp32, on the CPU. Same seed, same weights.

        For FSDP, `_no_split_modules` on it lists the class names of its repeating blocks, as transformers does.
        """

    @abstractmethod
    def build_datasets(self) -> tuple[Examples, Examples]:
        """What to train on and what to evaluate on.

        The first process of each machine goes first: the others find what it downloaded or cached.

        Raises:
            ValueError: in one line, what is wrong with the user's data and what to do.
        """

    def longest_sequence(self) -> int | None:
        """Tokens that attention goes over at once, at most; None where there is no attention. On some CPUs it is
        computed in another way where they are few."""
        return None

    def from_data(self) -> dict[str, Any]:
        """What `build_datasets` found out and `build_model` needs, as JSON. Checkpoints keep it: the model can then be
        built without the data."""
        return {}

    def recall(self, from_data: dict[str, Any]) -> None:
        """Takes the place of `build_datasets`.

        Args:
            from_data: what the method of this name returned.
        """

    def fingerprint(self, dataset: Any) -> str:
        """Return what tells a dataset from one with other examples, in another order too; empty: nothing does. A run
        does not go on with other data than it began with."""
        return ""

    def describe(self, part: Literal["train", "eval"], dataset: Any) -> dict[str, float]:
        """Figures about a dataset, by name, for summary.json and the terminal: counts, and shares as floats."""
        return {}

    def order(self, train: Any, random: np.random.Generator, global_batch_size: int) -> np.ndarray:
        """The order of an epoch: indices into `train`, each once. Drawn from `random` alone, so that it is the same on
        any number of processes."""
        return random.permutation(len(train))

    def augmented(self, train: Any, seed: list[int]) -> Examples:
        """`train` as one epoch sees it. Randomness comes from `seed`, the run's and the epoch's, and the index alone,
        so that it is the same on any number of processes. Called on all of them, before the epoch starts: best computed
        when an example is asked for."""
        return train

    def on_device(self, dataset: Any, device: torch.device) -> Examples:
        """The dataset in the device's memory, where it fits there easily: no batch is then copied. Called where the
        process loads its data itself (num_workers=0)."""
        return dataset

    def model_input(self, batch: Any) -> Tensor | None:
        """What `loss` calls the model with, if that is a single tensor, for cuda_graphs."""
        return None

    def collate(self, samples: list[Any]) -> Any:
        """A batch, nested tensors with the examples first, from what the dataset returned."""
        from torch.utils.data import default_collate

        return default_collate(samples)

    def documents(self, sample: Any) -> list[Any]:
        """Return what the dataset returned for an example as several, where it packs documents that are not to see each
        other: one for each."""
        return [sample]

    def tokens(self, batch: Any) -> tuple[int, int]:
        """For text: the tokens in a batch of `collate`, without the padding and with it. Known without the device."""
        return 0, 0

    @abstractmethod
    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, Tensor | int]:
        """Returns: the loss summed over what it counts (examples, tokens), in fp32, and that count.

        The loop divides by the count over all processes and micro-batches: never average here. Take the loss of
        `logits.float()`: FSDP hands them over in the dtype it computes in. BatchNorm would see each process's
        examples alone, and a stand-in where one has none: better a norm that looks at one example.
        """

    def evaluate(self, model: nn.Module, batch: Any) -> tuple[Tensor, Tensor | int, dict[str, Tensor]]:
        """Returns: `loss`, and what `metrics` needs, by name: tensors of shape (examples, ...)."""
        return *self.loss(model, batch), {}

    def metrics(self, outputs: dict[str, Tensor]) -> dict[str, float]:
        """The metrics of the whole evaluation set, by name.

        Args:
            outputs: from `evaluate`, each example exactly once, in the dataset's order, on the CPU.
        """
        return {}

    def report(self, model: Any, device: torch.device) -> dict[str, list[dict[str, str]]]:
        """Tables of text to record at each evaluation, by name: rows of equal keys, such as a prompt and its
        continuation. Every process calls the model, on `device`, equally often."""
        return {}

    def export(self, model: nn.Module, weights: dict[str, Tensor], folder: Path) -> None:
        """Writes what others load. Called on the main process only; `model` may be sharded, `weights` are whole.

        Args:
            model: as `build_model` returned it, or FSDP left it.
            weights: its state dict, on the CPU.
        """
        from huggingface_hub import save_torch_state_dict

        save_torch_state_dict(weights, folder)  # model.safetensors, in several parts where it is large

    def card(self) -> dict[str, Any]:
        """Metadata for the model card: fields of huggingface_hub.ModelCardData, such as license, tags or base_model."""
        return {}
