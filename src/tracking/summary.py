"""What a run says at its start: what is about to run."""

from src.config.environment import processes
from src.config.terminal import say
from src.training.run import Run


def print_summary(run: Run, recorders: dict[str, str]) -> None:
    """Print what is about to run. `recorders`: where each of them records the run, by its title."""
    launch, config = run.launch, run.config
    backend = f" on {launch.backend}" if launch.backend else ""
    if launch.comm_hook:
        backend += f" (gradients: {launch.comm_hook})"
    started_by = launch.config_file or "not started by an accelerate yaml"
    rows = {
        "strategy": f"{launch.strategy}, {processes(launch.num_processes)}{backend}, {launch.device}, "
        f"{launch.precision} ({started_by})",
        "model": _model(run),
        "data": f"{len(run.train_set):,} examples to train on, {len(run.eval_set):,} to evaluate on",
        **{part: in_one_line(figures) for part, figures in run.facts["data"].items()},
        "batch": f"{config.global_batch_size} = {config.forward_batch_size(run.data_size)} per micro-batch x "
        f"{processes(run.world_size, run.cp_size)} x {config.gradient_accumulation_steps(run.data_size)} accumulated",
        "tuned": ", ".join(run.facts["tuned"]),
        "steps": f"{run.total_steps:,} = {run.total_steps / run.steps_per_epoch:.4g} epochs of {run.steps_per_epoch:,}",
        "output": str(config.folder),
        **recorders,
        "resume": run.resume.summary,
    }
    name = config.run_name if config.run_name == config.task.name else f"{config.run_name}: {config.task.name}"
    say(
        *filter(None, [launch.note, name]),
        *(f"  {title:<10} {text}" for title, text in rows.items() if text),
        *(f"  {note}" for note in run.resume.notes),
    )


def _model(run: Run) -> str:
    parameters, trained = run.facts["parameters"], run.facts["trained_parameters"]
    text = f"{parameters:,} parameters"
    if trained < parameters:
        text += f", {trained:,} of them trained"
    if run.facts["built_whole"]:
        text += "; each process built all of it first"
    return text


def in_one_line(figures: dict[str, float]) -> str:
    """Return figures by name as one line of text; integers are counts, floats are shares."""
    return ", ".join(
        f"{name.replace('_', ' ')} " + (f"{value:.1%}" if isinstance(value, float) else f"{value:,}")
        for name, value in figures.items()
    )
