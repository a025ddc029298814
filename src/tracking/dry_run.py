"""What a run says with --dry-run: what it would do, and what it would see first."""

import os
import re
import sys
from typing import Any

from src.config.terminal import say
from src.tracking.summary import print_summary
from src.training.batches import epoch_order, epoch_seed
from src.training.run import Run

MOST_CHARACTERS = 4000
"""Characters of an example that are shown at most."""


def dry_run(run: Run, *_: Any) -> bool:
    """Print what the run would do, and the first two examples of its next step. Nothing is written. Return True."""
    if run.is_main:
        print_summary(run, {})
        step = run.progress.step
        epoch, done = divmod(step, run.steps_per_epoch)
        dataset = run.task.augmented(run.train_set, epoch_seed(run.config, epoch, 1))
        for index in epoch_order(run, epoch, done)[:2]:
            say(
                f"\nexample {index} of the training data, in step {step + 1}:",
                shown(run.task.preview(dataset, int(index))),
            )
        figures = run.facts["data"]["train"]
        if {"targets", "tokens"} <= figures.keys():
            share = f"{figures['targets'] / figures['tokens']:.1%}"
            say(shown(f"\n⟦like this⟧: contributes to the loss, as do {share} of all tokens in the training data"))
        left = f"{run.total_steps - step} of {run.total_steps} steps to take"
        every = f"an evaluation every {run.config.eval_every or run.steps_per_epoch}"
        say("", f"dry run: {left}, {every}, a checkpoint every {run.config.save_every}; nothing was written")
    return True


def shown(text: str) -> str:
    """Return the beginning of a text, what is within ⟦ ⟧ in green where a terminal has colours, and nothing else that
    would control it."""
    text = re.sub("[\x00-\x08\x0b-\x1f\x7f-\x9f]", "\ufffd", text)
    left_out = len(text) - MOST_CHARACTERS
    if left_out > 0:
        text = text[:MOST_CHARACTERS]
        text += f"{'⟧' * (text.count('⟦') - text.count('⟧'))}\n… and {left_out:,} more characters"
    if sys.stdout.isatty() and os.environ.get("TERM") != "dumb" and not os.environ.get("NO_COLOR"):
        text = text.replace("⟦", "\033[32m").replace("⟧", "\033[0m")
    return text
