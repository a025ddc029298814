"""Show what is about to run: the startup summary and, with --dry-run, the first examples."""

from typing import Any

from src.config.config import Config
from src.config.environment import processes
from src.config.groups import Optim
from src.config.settings import flatten, write_yaml
from src.config.terminal import say
from src.training.batches import epoch_order, epoch_seed
from src.training.run import Run

MAX_CHARACTERS = 4000
"""Most characters of an example that a dry run shows."""
SHOWN = "name", "lr", "schedule", "warmup_steps", "max_grad_norm", "weight_decay"
"""Settings of the optimizer in the startup summary."""


def print_summary(run: Run, trackers: dict[str, str]) -> None:
    """Print what is about to run. `trackers`: where each tracker logs the run, by its title."""
    launch, config, size = run.launch, run.config, run.task.dataset_size
    backend = f" on {launch.backend}" if launch.backend else ""
    if launch.comm_hook:
        backend += f" (gradients all-reduced in {launch.comm_hook})"
    rows = {
        "strategy": f"{launch.strategy}, {processes(launch.num_processes)}{backend}, {launch.device}, "
        f"{launch.precision} ({launch.config_file or 'no accelerate yaml'})",
        "model": _model(run),
        "data": f"{size(run.train_set)} to train on, {size(run.eval_set)} to evaluate on",
        **{part: _in_one_line(figures) for part, figures in run.metadata["data"].items()},
        "batch": f"{config.global_batch_size:,} = {config.forward_batch_size(run.data_size):,} per micro-batch x "
        f"{processes(run.world_size, run.cp_size)} x {config.gradient_accumulation_steps(run.data_size):,} accumulated",
        "optimized": ", ".join(run.metadata["optimizations"]),
        "optimizer": _optimizer(config),
        "steps": f"{run.total_steps:,} = {run.total_steps / run.steps_per_epoch:.4g} epochs of {run.steps_per_epoch:,}",
        "output": str(config.folder),
        **trackers,
        "resume": run.resume.summary,
    }
    remarks = run.metadata["remarks"] + run.resume.notes
    if run.steps_per_epoch == 1:
        remarks.append(f"one step per epoch: global_batch_size={config.global_batch_size:,} takes all training data")
    name = config.run_name if config.run_name == config.task.name else f"{config.run_name}: {config.task.name}"
    say(
        *filter(None, [launch.note, name]),
        *(f"  {title:<10} {text}" for title, text in rows.items() if text),
        *(f"  {remark}" for remark in remarks),
    )


def _optimizer(config: Config) -> str:
    """Return the settings of the optimizer that matter most, with * after each default."""
    own = config.task.run_defaults(dict(flatten(config.model_dump())))
    values, defaults = dict(config.optim), {f"optim.{name}": value for name, value in Optim()} | own
    settings = (
        f"{name}={write_yaml(values[name], is_in_one_line=True).splitlines()[0]}"
        f"{'*' * (values[name] == defaults[f'optim.{name}'])}"
        for name in SHOWN
    )
    return f"{', '.join(settings)}  (* the default)"


def _model(run: Run) -> str:
    parameters, trained = run.metadata["parameters"], run.metadata["trained_parameters"]
    text = f"{parameters:,} parameters"
    if trained < parameters:
        text += f", {trained:,} of them trained"
    if run.metadata["built_whole"]:
        text += "; each process built the whole model first"
    return text


def _in_one_line(figures: dict[str, float]) -> str:
    """Return the figures that are not 0 as one line of text: integers are counts, floats are fractions."""
    return ", ".join(
        f"{name.replace('_', ' ')} {value:{'.1%' if isinstance(value, float) else ','}}"
        for name, value in figures.items()
        if value
    )


def dry_run(run: Run, *_: Any) -> bool:
    """Print what the run would do and the first two examples of its next step. Write nothing. Return True."""
    if run.is_main:
        print_summary(run, {})
        step, total = run.progress.step, run.total_steps
        epoch, done = divmod(step, run.steps_per_epoch)
        dataset = run.task.augmented(run.train_set, epoch_seed(run.config, epoch, 1))
        for index in epoch_order(run, epoch, done)[:2]:
            example = shown(run.task.preview(dataset, int(index)))
            say("", f"training example {index}, in step {step + 1}:", *example.split("\n"))
        every = f"every {run.config.eval_every or run.steps_per_epoch:,}, saving every {run.config.save_every:,}"
        say("", f"dry run: {total - step:,} of {total:,} steps to take, evaluating {every}", "nothing was written")
    return True


def shown(text: str) -> str:
    """Return the beginning of a text."""
    left_out = len(text) - MAX_CHARACTERS
    return text if left_out <= 0 else f"{text[:MAX_CHARACTERS]}\n… and {left_out:,} more characters"
