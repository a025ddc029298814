"""Language models and text classifiers; they need the `text` extra of pyproject.toml."""

from src.config.errors import refuse
from src.config.requirements import lacking

refuse(lacking("text"))
