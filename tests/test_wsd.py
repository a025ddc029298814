"""optim.schedule=wsd: the learning rate of transformers' get_wsd_schedule, and mistakes in its lengths."""

import pytest
from torch import nn
from torch.optim import SGD
from transformers import get_wsd_schedule

from src.config.groups import Optim
from src.training.optim import lr_at
from tests.launching import Launch, mistakes
from train import run_settings


@pytest.mark.parametrize(("warmup", "decay"), [(0, 0.2), (7, 13), (0.3, 0.7), (0.1, 0), (0, 50)])
@pytest.mark.parametrize("final", [0.0, 0.1])
def test_it_is_transformers_at_every_step(warmup: float, decay: float, final: float) -> None:  # room: text
    """But for the warm-up, which is that of all schedules here: it does not waste the first step on a rate of 0. Theirs
    is a step behind, and starts from the final rate. Tried with a linear decay, and with one that ends a step early."""
    config = Optim(lr=0.5, schedule="wsd", warmup_steps=warmup, decay_steps=decay, final_lr_ratio=final)
    rises, falls = (round(50 * steps) if steps < 1 else int(steps) for steps in (warmup, decay))
    optimizer = SGD(nn.Linear(1, 1).parameters(), lr=0.5)
    theirs, from_0 = (
        get_wsd_schedule(optimizer, rises, falls, num_training_steps=50, min_lr_ratio=ratio).lr_lambdas[0]
        for ratio in (final, 0.0)
    )
    for step in range(50):
        expected = theirs(step) if step >= rises else from_0(step + 1)
        assert lr_at(step, config, 50, 10) == pytest.approx(0.5 * expected), step


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ("--optim.decay_steps=9", "optim.decay_steps=9: only applies to optim.schedule=wsd, not one_cycle"),
        (
            "--optim.schedule=wsd --optim.decay_steps=0.8",
            "optim.warmup_steps=0.3 and optim.decay_steps=0.8: together 110.0% of the schedule",
        ),
        (
            "--epochs=null --max_steps=50 --optim.schedule=wsd --optim.warmup_steps=40 --optim.decay_steps=30",
            "optim.warmup_steps=40 and optim.decay_steps=30: together 140.0% of the schedule",
        ),
    ],
)
def test_a_mistake_is_one_line_before_anything_is_loaded(arguments: str, line: str) -> None:
    assert mistakes(*arguments.split()) == [line]


def test_shares_may_fill_the_schedule_and_config_yaml_may_be_used_again() -> None:
    """Where each default is written out."""
    run_settings(["--optim.schedule=wsd", "--optim.warmup_steps=0.1", "--optim.decay_steps=0.9"])
    run_settings(["--optim.schedule=cosine", "--optim.decay_steps=0.2"])


def test_a_length_that_only_the_data_tell_is_refused_before_the_model_is_built(launch: Launch) -> None:
    """Tried without: it trains, at a rate that jumps where the decay begins in the warm-up."""
    arguments = ("--epochs=2", "--optim.schedule=wsd", "--optim.warmup_steps=40", "--optim.decay_steps=30")
    run = launch("cpu", *arguments, before="from src.tasks.mnist import Mnist; Mnist.build_model = None")
    assert run.exit_code == 2
    line = "optim.warmup_steps=40 and optim.decay_steps=30: together 152.2% of the schedule"
    assert run.messages == [f"train.py: {line}"]
