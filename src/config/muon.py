"""The setting that chooses Muon; src/training/muon.py builds it."""

from typing import Literal

from src.config.groups import Optim
from src.config.run import RunSettings


class OptimOrMuon(Optim):
    """The optimizer, which may be Muon, and its learning rate."""

    name: Literal["adamw", "sgd", "adadelta", "muon"] = "adamw"  # type: ignore[assignment]
    """Optimizer. muon updates the hidden weight matrices and leaves the rest to adamw, at the same rate."""


class MuonSettings(RunSettings):
    """Adds Muon to the optimizers."""

    optim: OptimOrMuon = OptimOrMuon()
