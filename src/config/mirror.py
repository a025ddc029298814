"""The setting of the checkpoints' mirror."""

from src.config.groups import Checkpoint
from src.config.run import RunSettings
from src.config.settings import ResumeSafe


class MirroredCheckpoint(Checkpoint):
    """Which checkpoints to keep, which one to export, and where to copy them."""

    mirror: str | None = None
    """Folder or fsspec URL (s3://…, hf://…) to copy checkpoints to, under run_name; null: none."""


class MirrorSettings(RunSettings):
    """Where to copy checkpoints."""

    checkpoint: ResumeSafe[MirroredCheckpoint] = MirroredCheckpoint()
