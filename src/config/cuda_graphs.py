"""The setting of CUDA graphs; src/training/cuda_graph.py captures and replays them."""

from src.config.run import RunSettings
from src.config.settings import ResumeSafe


class CudaGraphSettings(RunSettings):
    """Adds replaying steps as CUDA graphs."""

    cuda_graphs: ResumeSafe[bool] = False
    """Replay each step as a CUDA graph: for small models on one NVIDIA GPU."""
