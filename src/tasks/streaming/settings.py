"""The settings of streamed and mixed language modelling. Checking them takes neither torch nor transformers."""

from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar, Literal

from pydantic import NonNegativeFloat, PositiveFloat, PositiveInt

from src.config.settings import ResumeSafe, Settings
from src.tasks.text.causal_lm_settings import CausalLMSettings


class MixtureSource(Settings):
    """Names one dataset of a mixture, and how much of it to take."""

    dataset: str = ""
    dataset_config: str | None = None
    weight: NonNegativeFloat = 1.0
    max_epochs: PositiveInt = 1


class StreamedLMSettings(CausalLMSettings):
    """Settings of next-token prediction on rows that are tokenized during training."""

    task_class: ClassVar[str] = "src.tasks.streaming.streamed_lm:StreamedLM"

    name: Literal["streamed_lm"] = "streamed_lm"  # type: ignore[assignment]
    """The task to train."""
    streaming: bool = True
    """Read files during training; false: load them first. Evaluation data are loaded first in any case."""
    sources: list[MixtureSource] = []
    """Datasets to mix, instead of task.dataset: [{dataset: A, weight: 3}, {dataset: B, weight: 1, max_epochs: 2}]. Rows
    are drawn in proportion to the weights. An epoch has each row max_epochs times, 1 by default: once a source is used
    up, the others take over its share."""
    shuffle_window: PositiveInt = 10_000
    """Rows that are shuffled and packed together, on average: windows have about the same number of bytes. Groups of
    rows are shuffled first."""
    cache_gb: ResumeSafe[PositiveFloat] = 20.0
    """Gigabytes of disk space that tokenized rows may take, for the next epoch and other processes."""

    @property
    def parts(self) -> list[MixtureSource]:
        """Return the sources of the mixture; if there is none, the dataset as the only one."""
        return self.sources or [MixtureSource(dataset=self.dataset, dataset_config=self.dataset_config)]

    @property
    def source_names(self) -> list[str]:
        """Return the names of a mixture's sources: the last part of each dataset's path, with a number unless it is
        unique. Empty if there is no mixture."""
        stems = [Path(source.dataset).stem for source in self.sources]
        return [stem if stems.count(stem) == 1 else f"{stem}_{number}" for number, stem in enumerate(stems, start=1)]

    @property
    def dataset_names(self) -> list[str]:
        return [part.dataset for part in self.parts]

    def validation_errors(self) -> Iterator[str]:
        yield from super().validation_errors()
        if self.sources and self.dataset:
            yield "task.dataset and task.sources: set one, a single dataset or a mixture"
        for source in self.sources:
            if not source.weight:
                yield f"task.sources: {source.dataset} has a weight of 0: remove it, or give it a weight"
        for name in self.source_names:
            if name in self.eval_datasets:
                yield f"task.eval_datasets.{name}: eval/loss_{name} is the loss on one of task.sources: rename it"
