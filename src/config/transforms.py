"""The settings of activation checkpointing and compilation; src/training/transforms.py applies them to a model."""

from collections.abc import Iterator

from src.config.run import RunSettings
from src.config.settings import ResumeSafe


class TransformSettings(RunSettings):
    """Adds activation checkpointing and compilation."""

    activation_checkpointing: ResumeSafe[bool] = False
    """Recompute activations in the backward pass instead of storing them: less memory, about 33% slower."""
    activation_offload: ResumeSafe[bool] = False
    """Keep what activation_checkpointing recomputes from, the blocks' inputs, in the host's memory: less on the GPU."""
    compile: ResumeSafe[bool] = False
    """Compile the model, a transformer block by block. The first steps take about a minute longer."""

    def validation_errors(self) -> Iterator[str]:
        yield from super().validation_errors()
        if self.activation_offload and (self.compile or not self.activation_checkpointing):
            yield "activation_offload=true needs activation_checkpointing=true, and compile=false"
