"""Load a trained model outside of its run, from an export or a checkpoint."""

from pathlib import Path

from accelerate.utils import set_seed
from torch import nn

from src.checkpoint.compatibility import read_state, require_same_frozen
from src.checkpoint.files import MANIFEST, STATE, list_checkpoints, saved_settings
from src.checkpoint.integrity import require_intact
from src.checkpoint.tensors import frozen_norm, load_tensors
from src.config.config import Config, config_from
from src.config.errors import UserError
from src.tasks import TASKS
from src.tasks.base import Task
from src.training.optim import extended
from src.training.run import ADJUSTMENTS


def find_model(source: str) -> Path:
    """Return the folder of a model: `source` itself if it is an export or a checkpoint; in a run's output folder, its
    export or else its newest checkpoint. Raise a UserError if there is none, or the checkpoint is damaged."""
    path = Path(source)
    for place in (path / "model", *list_checkpoints(path / "checkpoints"), path):
        if is_checkpoint_folder(place):
            require_intact(place)
        if any(place.glob("*.safetensors")):
            return place
    raise UserError(f"{source}: neither a run's output folder, nor a model, nor a checkpoint")


def is_checkpoint_folder(path: Path) -> bool:
    """Return whether a model's folder is a checkpoint rather than an export."""
    return (path / MANIFEST).exists() or (path / STATE).exists()


def config_of(path: Path) -> Config[Task]:
    """Return the settings that the model was trained with. Raise a UserError if they are not with it."""
    saved = read_state(path).origin.settings if is_checkpoint_folder(path) else saved_settings(path.absolute().parent)
    if not saved:
        raise UserError(f"{path}: there is no config.yaml beside it, as in a run's output folder")
    return config_from(saved, TASKS)


def load_trained_model(path: Path, config: Config[Task]) -> nn.Module:
    """Return the model in fp32 on the CPU. A checkpoint is read in place, without a second copy in memory."""
    set_seed(config.seed)
    config.task.state.is_trained = True
    if not is_checkpoint_folder(path):
        return config.task.load_export(path)
    origin = read_state(path).origin
    config.task.state.data = origin.data_state
    config.task.state.has_frozen = origin.frozen_norm > 0
    model = config.task.build_model()
    for adjust in ADJUSTMENTS:
        adjust(model, config)
    require_same_frozen(path, origin.frozen_norm, frozen_norm(model))
    load_tensors(path, model, averages := extended(config, model, []))
    for average in averages:
        average.exchange()
    return model
