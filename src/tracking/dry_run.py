"""What a run says with --dry-run: what it would do."""

from src.config.terminal import say
from src.tracking.summary import print_summary
from src.training.run import Run


def dry_run(run: Run) -> None:
    """Print what the run would do. Nothing is written."""
    if run.is_main:
        print_summary(run, {})
        config, left = run.config, run.total_steps - run.progress.step
        course = (
            f"an evaluation every {config.eval_every or run.steps_per_epoch}, a checkpoint every {config.save_every}"
        )
        say(f"dry run: {left} of {run.total_steps} steps to take, {course}; nothing was written")
