"""The trained model as others load it: the last weights or the best, exported, with a card, and uploaded."""

import contextlib
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from accelerate.utils import broadcast_object_list
from huggingface_hub import HfApi, ModelCard, ModelCardData, constants
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from src.checkpoint.format import share, step_of, unfinished
from src.checkpoint.integrity import first_valid
from src.checkpoint.rotation import best_first
from src.checkpoint.tensors import load_tensors
from src.config.config import Config
from src.config.errors import RunError, cause
from src.config.settings import write_yaml
from src.config.terminal import say
from src.tasks.base import Cards, Metrics, Tables, Task, Tensors
from src.training.run import Run


class Exported(NamedTuple):
    """What is known of an exported model."""

    metrics: Metrics
    """Those of the evaluation of its weights, and of its task's report."""
    reported: Metrics
    """Those of its task's report alone."""
    tables: Tables
    """Those of its task's report."""


def export_model(run: Run, say: Callable[[str], None]) -> Exported:
    """Write the folder `model`: the last weights or, if the settings ask for it, the best, and a card. Replace one from
    a shorter run. Collective: under FSDP each process has a shard."""
    evaluated = run.progress.evaluation
    if run.config.checkpoint.export_best:
        evaluated = _load_best(run, say) or evaluated
    run.model.eval()
    found, tables = run.task.report(run.model, run.device)
    reported = {f"eval/{name}": value for name, value in found.items()}
    exported = Exported(evaluated | reported, reported, tables)

    accelerator, model, folder = run.accelerator, run.accelerator.unwrap_model(run.model), run.config.folder / "model"
    with replacing(folder) if run.is_main else contextlib.nullcontext(unfinished(folder.resolve())) as incomplete:
        accelerator.wait_for_everyone()
        cards = run.task.export_sharded(model, incomplete, accelerator) if accelerator.is_fsdp2 else None
        if cards is None:
            weights = accelerator.get_state_dict(run.model)
            if run.is_main:
                cards = export_weights(run.task, model, weights, incomplete)
        if run.is_main:
            write_cards(run.config, cards or {}, exported.metrics, incomplete)
    return exported


def _load_best(run: Run, say: Callable[[str], None]) -> Metrics | None:
    """Load the weights of the best checkpoint into the model, say so, and return its evaluation; None if there is no
    valid checkpoint that was evaluated. Collective."""
    evaluations = run.progress.evaluations
    candidates = best_first(run.store.candidates(), run.config.checkpoint, evaluations)
    # as the main process sees them
    (candidates,) = broadcast_object_list([candidates])
    best, damaged = first_valid(run.accelerator, candidates, run.store)
    for path, why in damaged.items():
        say(f"WARNING: {path}: {why}")
    if best is None:
        say("WARNING: no checkpoint of a step that was evaluated: exporting the last weights, not the best")
        return None
    say(f"exporting the best of the checkpoints, {best}")
    load_tensors(best, run.model)
    return evaluations[step_of(best)]


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


def export_weights(task: Task, model: nn.Module, weights: Tensors, folder: Path) -> Cards:
    """Write the task's export of these weights, and return what its cards say. `model` is as Task.export takes it."""
    return task.export(model, {name: _unwrapped(weight.cpu()) for name, weight in weights.items()}, folder)


def _unwrapped(weight: Tensor) -> Tensor:
    """Return the weight without what safetensors refuses to save: torchao's wrapper around an fp8 weight, and the
    larger buffer that FSDP gathers an uneven weight into."""
    if is_traceable_wrapper_subclass(weight):
        weight = getattr(weight, weight.__tensor_flatten__()[0][0])
    return weight.clone() if weight.nbytes < weight.untyped_storage().nbytes() else weight


def write_cards(config: Config, cards: Cards, metrics: Metrics, folder: Path) -> None:
    """Write README.md, the card of each model in this folder, with the metrics of its weights."""
    settings = write_yaml(config.model_dump(mode="json", exclude={"wandb", "output_dir"}))
    rows = "\n".join(f"| {name} | {value:.6g} |" for name, value in metrics.items() if isinstance(value, int | float))
    text = (
        f"# {config.run_name}\n\nTrained by `train.py` as `{config.task.name}`.\n\n"
        f"## Results\n\nOn the evaluation data, at the end:\n\n| metric | value |\n|---|---|\n{rows}\n\n"
        f"## Settings\n\nThe data are named under `task`.\n\n```yaml\n{settings}```\n"
    )
    for part, fields in (cards or {"": {}}).items():
        metadata = ModelCardData(**{"tags": [config.task.name], **fields}).to_yaml()
        ModelCard(f"---\n{metadata}\n---\n\n{text}").save(folder / part / "README.md")


def push_to_hub(config: Config) -> None:
    """Upload the exported folder to config.push_to_hub, without the further models in it, which need repositories of
    their own; exit with code 1 if that fails: all else is saved."""
    folder, repository = config.folder / "model", config.push_to_hub
    assert repository
    further = [card.parent.name for card in folder.glob("*/README.md")]
    excluded = [f"{part}/*" for part in further]
    constants.HF_HUB_OFFLINE = False  # set if the Hub was away at the start, and it may be back
    try:
        api = HfApi()
        api.create_repo(repository, private=True, exist_ok=True)
        api.upload_folder(
            repo_id=repository, folder_path=folder, commit_message=config.run_name, ignore_patterns=excluded
        )
    except Exception as error:  # from the Hub, its client or the network: in any case, the run is saved
        options = "".join(f" --exclude '{pattern}'" for pattern in excluded)
        hint = f"the run is complete, upload its model with `hf upload {repository} {folder} --private{options}`"
        sys.exit(f"train.py: push_to_hub={repository}: {cause(error)}; {hint}")
    say(f"  Hub        {repository}")
    for part in further:
        command = f"hf upload {repository}-{part} {folder / part} --private"
        say(f"             without {part}, which `{command}` uploads")
