"""Export the trained model, with the last or the best weights and a model card."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

from huggingface_hub import ModelCard, ModelCardData
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from src.checkpoint.files import discard, incomplete_path, make_readable, new_folder, planted, step_of
from src.checkpoint.store import Store
from src.checkpoint.tensors import load_tensors
from src.config.config import Config
from src.config.errors import as_run_error, raise_if_any
from src.config.settings import write_yaml
from src.config.terminal import masked
from src.tasks.base import Cards, Metrics, Task, Tensors
from src.training.run import Run


def export_model(run: Run, evaluated: Metrics) -> None:
    """Write the model, and a model card with the evaluation of its weights, into the folder `model`, replacing an
    earlier export. Collective: under FSDP each process has a shard."""
    run.model.eval()
    accelerator, model, folder = run.accelerator, run.accelerator.unwrap_model(run.model), run.config.folder / "model"
    with replacing(folder) if run.is_main else contextlib.nullcontext(incomplete_path(folder.resolve())) as incomplete:
        accelerator.wait_for_everyone()
        cards = run.task.export_sharded(model, incomplete, accelerator) if accelerator.is_fsdp2 else None
        if cards is None:
            weights = accelerator.get_state_dict(run.model)
            if run.is_main:
                cards = export_weights(run.task, model, weights, incomplete)
        if run.is_main:
            assert cards is not None
            write_cards(run.config, cards, evaluated, incomplete)


def load_best(run: Run, store: Store) -> Metrics:
    """Load the weights to export if they are not the last ones: with export_best, those of the best checkpoint. If no
    valid checkpoint was evaluated, keep the last ones. Return the evaluation of these weights. Collective."""
    if not run.config.checkpoint.export_best:
        return run.progress.evaluation
    evaluations = run.progress.evaluations
    found = store.checkpoints() if run.is_main else []  # only the main process's answer counts
    path, _ = store.first_valid(store.best_first(found, evaluations))
    if path is None:
        run.tell("WARNING: no intact checkpoint of a step that was evaluated: exporting the last weights, not the best")
        return run.progress.evaluation
    run.tell(f"exporting the best of the intact checkpoints, {path}")
    load_tensors(path, run.model, run.optimizers)
    return evaluations[step_of(path)]


@contextlib.contextmanager
def replacing(folder: Path) -> Iterator[Path]:
    """Yield a folder to write into. It replaces `folder` on success and is deleted on failure. Raise a RunError if it
    cannot be written."""
    place = folder.resolve()  # a link may lead to another disk
    incomplete = incomplete_path(place)
    try:
        with as_run_error(f"{folder} cannot be written, ", (OSError, SafetensorError)):
            raise_if_any(planted(folder))
            new_folder(incomplete)
            yield incomplete
            make_readable(incomplete)
            discard(place)
            incomplete.rename(place)
    finally:
        discard(incomplete)


def export_weights(task: Task, model: nn.Module, weights: Tensors, folder: Path) -> Cards:
    """Write the task's export of these weights, and return what its cards say. `model` is as Task.export takes it."""
    return task.export(model, {name: _unwrapped(weight.cpu()) for name, weight in weights.items()}, folder)


def _unwrapped(weight: Tensor) -> Tensor:
    """Return the weight without what safetensors cannot save: torchao's wrapper of an fp8 weight, or the larger buffer
    into which FSDP gathered an uneven weight."""
    if is_traceable_wrapper_subclass(weight):
        weight = getattr(weight, weight.__tensor_flatten__()[0][0])
    return weight.clone() if weight.nbytes < weight.untyped_storage().nbytes() else weight


def write_cards(config: Config, cards: Cards, metrics: Metrics, folder: Path) -> None:
    """Write README.md, the model card, for each model in this folder, with the metrics of its weights."""
    settings = write_yaml(config.model_dump(mode="json", exclude={"wandb", "output_dir"}))
    template = str(Path(__file__).with_name("card.jinja"))
    for part, fields in cards.items():
        data = ModelCardData(**{"tags": [config.task.name], **fields})
        card = ModelCard.from_template(data, template, config=config, metrics=metrics, settings=settings)
        card.content = masked(card.content)
        card.save(folder / part / "README.md")
