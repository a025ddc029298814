"""The trained model as others load it."""

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path

from safetensors import SafetensorError
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from src.checkpoint.format import share, unfinished
from src.config.config import Config
from src.config.errors import RunError, cause
from src.training.run import Run


def export_model(run: Run) -> None:
    """Write the folder `model`, replacing one from a shorter run. Collective: under FSDP each process has a shard."""
    accelerator, model, folder = run.accelerator, run.accelerator.unwrap_model(run.model), run.config.folder / "model"
    with replacing(folder) if run.is_main else contextlib.nullcontext(unfinished(folder.resolve())) as incomplete:
        accelerator.wait_for_everyone()
        if accelerator.is_fsdp2 and run.task.export_sharded(model, incomplete, accelerator):  # room: text
            return
        weights = accelerator.get_state_dict(run.model)
        if run.is_main:
            export_weights(run.config, model, weights, incomplete)


@contextlib.contextmanager
def replacing(folder: Path) -> Iterator[Path]:
    """Yield a folder to write into. It takes the place of `folder` when it is complete, and is deleted if it never is.
    Raise a RunError if it cannot be written."""
    place = folder.resolve()  # a link may lead to another disk
    incomplete = unfinished(place)
    try:
        shutil.rmtree(incomplete, ignore_errors=True)
        incomplete.mkdir(parents=True)
        yield incomplete
        for file in incomplete.rglob("*.safetensors"):
            share(file)
        shutil.rmtree(place, ignore_errors=True)
        incomplete.rename(place)
    except (OSError, SafetensorError) as error:
        reason = f"{folder} cannot be written, {cause(error)}"
        raise RunError(f"{reason}: fix that, and run the same command again") from error
    finally:
        shutil.rmtree(incomplete, ignore_errors=True)


def export_weights(config: Config, model: nn.Module, weights: dict[str, Tensor], folder: Path) -> None:
    """Write the task's export of these weights. `model` is as Task.export takes it."""
    config.task.export(model, {name: _unwrapped(weight.cpu()) for name, weight in weights.items()}, folder)


def _unwrapped(weight: Tensor) -> Tensor:
    """Return the weight without what safetensors refuses to save: torchao's wrapper around an fp8 weight, and the
    larger buffer that FSDP gathers an uneven weight into."""
    if is_traceable_wrapper_subclass(weight):
        weight = getattr(weight, weight.__tensor_flatten__()[0][0])
    return weight.clone() if weight.nbytes < weight.untyped_storage().nbytes() else weight
