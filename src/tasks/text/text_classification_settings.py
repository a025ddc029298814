"""The settings of `--task.name=text_classification`."""

from collections.abc import Iterator
from typing import ClassVar, Literal

from pydantic import PositiveInt

from src.tasks.text.settings import TextSettings


class TextClassificationSettings(TextSettings):
    """Settings of the classification of texts, or pairs of texts."""

    name: Literal["text_classification"] = "text_classification"
    """The task to train."""
    text_column: str = "text"
    """Column of texts."""
    text_pair_column: str | None = None
    """Column of second texts, to classify pairs."""
    label_column: str = "label"
    """Column of labels, names or numbers. A head that names the data's keeps its own; otherwise, the training data's
    are all that exist."""
    sequence_length: PositiveInt = 256
    """Maximum number of tokens that the model sees. Longer texts are truncated."""
    task_class: ClassVar[str] = "src.tasks.text.text_classification:TextClassification"
    metric_names: ClassVar[tuple[str, ...]] = ("accuracy", "f1", "matthews_correlation")

    def validation_errors(self) -> Iterator[str]:
        yield from super().validation_errors()
        if not self.model:
            yield "task.model is not set: name a model on the Hub or a local folder"
