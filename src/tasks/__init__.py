"""The tasks that `--task.name` picks from. To add one, import it here."""

from src.tasks.base import Task
from src.tasks.causal_lm import CausalLM  # noqa: F401
from src.tasks.mnist import Mnist  # noqa: F401
from src.tasks.text_classification import TextClassification  # noqa: F401

TASKS: dict[str, type[Task]] = {task.model_fields["name"].default: task for task in Task.__subclasses__()}
