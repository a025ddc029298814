"""The setting of data-loading workers; src/training/workers.py starts them."""

from pydantic import NonNegativeInt

from src.config.run import RunSettings
from src.config.settings import ResumeSafe


class WorkerSettings(RunSettings):
    """Adds worker processes that load data."""

    num_workers: ResumeSafe[NonNegativeInt] = 0
    """Data-loading workers per process; 0: load in the process itself."""
