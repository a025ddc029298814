"""The tasks that `--task.name` selects from, and where they are defined. To add a task, add a line.

A line names a Task; or its settings, if they stand in a file of their own that imports no torch, so that --help and
mistakes are answered at once. Such settings name their Task in `task_class`.
"""

from pkgutil import resolve_name
from typing import Any

TASKS = {
    "mnist": "src.tasks.mnist_settings:MnistSettings",
    "causal_lm": "src.tasks.text.causal_lm_settings:CausalLMSettings",
    "streamed_lm": "src.tasks.streaming.settings:StreamedLMSettings",
    "text_classification": "src.tasks.text.text_classification_settings:TextClassificationSettings",
    "blank": "examples.blank:Blank",
    "dpo": "examples.dpo:Dpo",
    "token_classification": "examples.token_classification:TokenClassification",
    "image_classification": "examples.image_classification:ImageClassification",
    "tabular_regression": "examples.tabular_regression:TabularRegression",
}


def load_metric(name: str) -> Any:
    """Return a new metric from metrics.py. Importing `evaluate` takes seconds, which this puts off until the
    first evaluation."""
    return resolve_name(f"src.tasks.metrics:{name}")(keep_in_memory=True)
