"""A run's model outside of the run: where it is, under which settings it was trained, how it is loaded."""

from pathlib import Path

from accelerate.utils import set_seed
from torch import nn

from src.checkpoint.folder import list_checkpoints, saved_settings
from src.checkpoint.format import MANIFEST, STATE, read_state
from src.checkpoint.integrity import require_whole
from src.checkpoint.same_run import require_same_frozen
from src.checkpoint.tensors import frozen_norm, load_tensors
from src.config.config import Config, config_from
from src.config.errors import UserError
from src.tasks import TASKS


def find_model(source: str) -> Path:
    """Return the folder `model` of a run's output folder or, without one, its newest checkpoint; or `source` itself, if
    it is such a folder. Raise a UserError if there is none, or the checkpoint is damaged."""
    path = Path(source)
    for place in (path / "model", *list_checkpoints(path / "checkpoints"), path):
        if is_checkpoint(place):
            require_whole(place)
        if any(place.glob("*.safetensors")):
            return place
    raise UserError(f"{source}: neither a run's output folder, nor a model, nor a checkpoint")


def is_checkpoint(path: Path) -> bool:
    """Return whether a folder that has a model is a checkpoint, not an export."""
    return (path / MANIFEST).exists() or (path / STATE).exists()


def config_of(path: Path) -> Config:
    """Return the settings of the run that the model is of; raise a UserError if they are not beside it."""
    saved = read_state(path).origin.settings if is_checkpoint(path) else saved_settings(path.absolute().parent)
    if not saved:
        raise UserError(f"{path}: there is no config.yaml beside it, as in a run's output folder")
    return config_from(saved, TASKS)


def load_model(path: Path, config: Config) -> nn.Module:
    """Return the model, fp32, on the CPU. A checkpoint takes the memory of one: the tensors are read in place."""
    set_seed(config.seed)
    config.task.state.is_trained = True
    if not is_checkpoint(path):
        return config.task.load_export(path)
    origin = read_state(path).origin
    config.task.state.data = origin.data_state
    model = config.task.build_model()
    require_same_frozen(path, origin.frozen_norm, frozen_norm(model))
    load_tensors(path, model)
    return model
