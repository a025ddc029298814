"""The settings of activation checkpointing and compilation; src/training/transforms.py applies them to a model."""

from src.config.run import RunSettings
from src.config.settings import ResumeSafe


class TransformSettings(RunSettings):
    """Adds activation checkpointing and compilation."""

    activation_checkpointing: ResumeSafe[bool] = False
    """Recompute activations in the backward pass instead of storing them: less memory, about 33% slower."""
    compile: ResumeSafe[bool] = False
    """Compile the model, a transformer block by block. The first steps take about a minute longer."""
