"""The setting that chooses Muon; src/training/muon.py builds it."""

from typing import Literal

from src.config.optim import OptimSettings


class MuonSettings(OptimSettings):
    """Adds Muon to the optimizers."""

    name: Literal["adamw", "sgd", "adadelta", "muon"] = "adamw"  # type: ignore[assignment]
    """Optimizer. muon updates the hidden weight matrices and leaves the rest to adamw, at the same rate."""
