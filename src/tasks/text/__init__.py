"""Language models and classifiers of texts; they need the extra `text` of pyproject.toml."""

from src.config.errors import refuse
from src.config.requirements import lacking

refuse(lacking("text"))
