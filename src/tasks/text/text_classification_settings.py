"""The settings of `--task.name=text_classification`."""

from collections.abc import Iterator
from typing import Any, ClassVar, Literal

from pydantic import PositiveInt

from src.config.settings import flatten
from src.tasks.text.settings import TextSettings

METRICS = {
    "single_label_classification": ("accuracy", "f1", "matthews_correlation"),
    "multi_label_classification": ("accuracy", "f1_micro", "f1_macro"),
    "regression": ("pearson",),  # eval/loss is the mean squared error
}
"""What each problem is scored by."""


class TextClassificationSettings(TextSettings):
    """Settings of the classification of texts, or pairs of texts."""

    name: Literal["text_classification"] = "text_classification"
    """The task to train."""
    text_column: str = "text"
    """Column of texts."""
    text_pair_column: str | None = None
    """Column of second texts, to classify pairs."""
    label_column: str = "label"
    """Column of labels. A head that names the data's keeps its own; otherwise, the training data's
    are all that exist."""
    problem: Literal["single_label_classification", "multi_label_classification", "regression"] = (
        "single_label_classification"
    )
    """What a row's label is, as transformers' problem_type: a label, a list of labels (JSON in a .csv), or a number."""
    class_weights: Any = None
    """Weights of the labels in the loss, such as {spam: 4, ham: 1}; balanced: the rarer a label is in the training
    data, the higher; null: all count the same."""
    sequence_length: PositiveInt = 256
    """Maximum number of tokens that the model sees. Longer texts are truncated."""
    task_class: ClassVar[str] = "src.tasks.text.text_classification:TextClassification"

    @property
    def metric_names(self) -> tuple[str, ...]:  # type: ignore[override]
        return METRICS[self.problem]

    def validation_errors(self) -> Iterator[str]:
        yield from super().validation_errors()
        if not self.model:
            yield "task.model is not set: name a model on the Hub or a local folder"
        weights = self.class_weights
        is_right = weights in (None, "balanced")
        if isinstance(weights, dict):
            # settings keep the parts of a name with dots as mappings within mappings
            shares = dict(flatten(weights)).values()
            is_right = bool(shares) and all(type(share) in (int, float) and 1e-30 < share < 1e30 for share in shares)
        if not is_right:
            yield f"task.class_weights={weights}: must be balanced, or weights above 0, such as {{spam: 4, ham: 1}}"
        if weights and self.problem == "regression":
            yield "task.class_weights: a regression has no labels to weigh"
