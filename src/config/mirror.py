"""The setting of the checkpoints' mirror."""

from src.config.groups import Checkpoint
from src.config.run import RunSettings
from src.config.settings import ResumeSafe


class MirroredCheckpoint(Checkpoint):
    """Configures which checkpoints to keep, which one to export, and where to copy them."""

    mirror: str | None = None
    """Folder or fsspec URL (s3://…, hf://…) to copy checkpoints to, under run_name; null: none."""


class MirrorSettings(RunSettings):
    """Adds the place that checkpoints are copied to."""

    checkpoint: ResumeSafe[MirroredCheckpoint] = MirroredCheckpoint()
