"""What a run leaves for others: the model as others load it, and a card that says how it came about."""

import contextlib
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

from huggingface_hub import HfApi, ModelCard, ModelCardData
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from src.checkpoint.format import unfinished
from src.config.config import Config
from src.config.errors import RunError, cause
from src.config.settings import write_yaml
from src.config.terminal import say
from src.training.run import Run


def export_model(run: Run, metrics: dict[str, float]) -> None:
    """Write the folder `model`, replacing one from a shorter run, with the metrics of its weights on its card.
    Collective: under FSDP each process has a shard."""
    accelerator, model, folder = run.accelerator, run.accelerator.unwrap_model(run.model), run.config.folder / "model"
    with replacing(folder) if run.is_main else contextlib.nullcontext(unfinished_place(folder)) as incomplete:
        accelerator.wait_for_everyone()
        is_written_by_all = accelerator.is_fsdp2 and run.resume.is_disk_shared
        if is_written_by_all and run.task.export_sharded(model, incomplete, accelerator):
            if run.is_main:
                _card(run.config, metrics).save(incomplete / "README.md")
            return
        weights = accelerator.get_state_dict(run.model)
        if run.is_main:
            export_weights(run.config, model, weights, metrics, incomplete)


@contextlib.contextmanager
def replacing(folder: Path) -> Iterator[Path]:
    """Yield a folder to write into. It takes the place of `folder` when it is complete, and is deleted if it never is.
    Raise a RunError if it cannot be written."""
    place, incomplete = folder.resolve(), unfinished_place(folder)
    try:
        shutil.rmtree(incomplete, ignore_errors=True)
        incomplete.mkdir(parents=True)
        yield incomplete
        shutil.rmtree(place, ignore_errors=True)
        incomplete.rename(place)
    except (OSError, SafetensorError) as error:
        reason = f"{folder} cannot be written, {cause(error)}"
        raise RunError(f"{reason}: fix that, and run the same command again") from error
    finally:
        shutil.rmtree(incomplete, ignore_errors=True)


def unfinished_place(path: Path) -> Path:
    """Return where a folder or file is written until it is complete: beside it, on another disk if it is a link to
    there."""
    return unfinished(path.resolve())


def export_weights(
    config: Config, model: nn.Module, weights: dict[str, Tensor], metrics: dict[str, float], folder: Path
) -> None:
    """Write the task's export and its card, with the metrics of these weights. `model` is as Task.export takes it."""
    config.task.export(model, {name: _unwrapped(weight.cpu()) for name, weight in weights.items()}, folder)
    _card(config, metrics).save(folder / "README.md")


def push_to_hub(config: Config) -> None:
    """Upload the exported folder to config.push_to_hub; exit with code 1 if that fails: all else is saved."""
    folder = config.folder / "model"
    assert config.push_to_hub
    try:
        api = HfApi()
        api.create_repo(config.push_to_hub, private=True, exist_ok=True)
        api.upload_folder(repo_id=config.push_to_hub, folder_path=folder, commit_message=config.run_name)
    except Exception as error:  # from the Hub, its client or the network: in any case, the run is saved
        hint = f"the run is complete, upload its model with `hf upload {config.push_to_hub} {folder}`"
        sys.exit(f"train.py: push_to_hub={config.push_to_hub}: {cause(error)}; {hint}")
    say(f"  Hub        {config.push_to_hub}")


def _unwrapped(weight: Tensor) -> Tensor:
    """Return the weight without what safetensors refuses to save: torchao's wrapper around an fp8 weight, and the
    larger buffer that FSDP gathers an uneven weight into."""
    if is_traceable_wrapper_subclass(weight):
        weight = getattr(weight, weight.__tensor_flatten__()[0][0])
    return weight.clone() if weight.nbytes < weight.untyped_storage().nbytes() else weight


def _card(config: Config, metrics: dict[str, float]) -> ModelCard:
    task = config.task
    metadata = ModelCardData(**{"tags": [task.name], **task.card()}).to_yaml()
    settings = write_yaml(config.model_dump(mode="json", exclude={"wandb", "output_dir"}))
    rows = "\n".join(f"| {name} | {value:.6g} |" for name, value in metrics.items() if isinstance(value, int | float))
    return ModelCard(
        f"---\n{metadata}\n---\n\n# {config.run_name}\n\nTrained by `train.py` as `{task.name}`.\n\n"
        f"## Results\n\nOn the evaluation data, at the end:\n\n| metric | value |\n|---|---|\n{rows}\n\n"
        f"## Settings\n\nThe data are named under `task`.\n\n```yaml\n{settings}```\n"
    )
