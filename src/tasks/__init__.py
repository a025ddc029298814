"""The tasks that `--task.name` picks from, and where they are. To add one, add its line."""

import logging
from importlib import import_module
from typing import Any

logging.getLogger("torch.utils._pytree").setLevel(logging.ERROR)  # transformers imports torchao, which is out of date
TASKS = {
    "causal_lm": "src.tasks.text.causal_lm.CausalLM",
    "mnist": "src.tasks.mnist.Mnist",
    "text_classification": "src.tasks.text.text_classification.TextClassification",
    "image_classification": "examples.image_classification.ImageClassification",
    "tabular_regression": "examples.tabular_regression.TabularRegression",
}
TASKS |= {"dpo": "examples.dpo.Dpo", "token_classification": "examples.token_classification.TokenClassification"}


def load_metric(name: str) -> Any:
    """Return a new metric of src/tasks/metrics.py. Importing `evaluate` takes seconds, for which the first evaluation
    waits, not the start."""
    return getattr(import_module("src.tasks.metrics"), name)()
