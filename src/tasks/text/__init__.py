"""Language models and text classifiers; they need the `text` extra of pyproject.toml."""

from src.config.errors import raise_if_any
from src.requirements import missing_requirements

raise_if_any(missing_requirements("text"))
