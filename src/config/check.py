"""The setting of --check."""

from src.config.run import RunSettings
from src.config.settings import ResumeSafe


class CheckSettings(RunSettings):
    """Adds `--check`, which checks the run instead of training."""

    check: ResumeSafe[bool] = False
    """Check that this run would be correct, instead of training; `--check` is enough: docs/check.md."""

    @property
    def mode(self) -> str:
        """Return `check` if it is asked for."""
        return "check" if self.check else super().mode
