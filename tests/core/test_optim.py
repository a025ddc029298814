"""Optimizers by name, the learning rate as a function of the step, exact scaling and clipping."""

import copy
import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer
from transformers import get_wsd_schedule

from src.config.groups import Optim
from src.tasks.mnist import MnistCnn
from src.training.cuda_graph import undo_unless_finite
from src.training.gradients import local_gradients, local_norm, scale_and_clip_, step_if_finite
from src.training.optim import build_optimizers, lr_at
from src.training.progress import Progress

NAMES = ("adamw", "sgd", "adadelta", "muon")


def ours(steps: int, steps_per_epoch: int = 10, **settings: object) -> list[float]:
    config = Optim.model_validate({"lr": 0.5, "warmup_steps": 0, **settings})
    return [lr_at(step, config, steps, steps_per_epoch) for step in range(steps)]


def test_schedules_are_the_textbooks() -> None:
    per_epoch = [0.5 * 0.7**epoch for epoch in range(5) for _ in range(10)]
    assert ours(50, schedule="step", decay_factor=0.7) == pytest.approx(per_epoch)
    cosine = [0.05 + 0.45 * (1 + math.cos(math.pi * step / 50)) / 2 for step in range(50)]
    assert ours(50, schedule="cosine", final_lr_ratio=0.1) == pytest.approx(cosine)
    assert ours(4, schedule="constant") == [0.5] * 4
    assert ours(4, schedule="linear", final_lr_ratio=0.2) == pytest.approx([0.5, 0.4, 0.3, 0.2])
    for warmup in (5, 0.1):  # in steps, or as a share
        rates = ours(50, schedule="constant", warmup_steps=warmup)
        assert rates[:6] == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.5, 0.5])
    rates = ours(1000, schedule="one_cycle", warmup_steps=0.3)
    assert rates[0] == pytest.approx(0.02, rel=0.01)
    assert max(rates) == rates[299] == 0.5
    assert rates[-1] < 1e-5


@pytest.mark.parametrize(("warmup", "decay"), [(0, 0.2), (7, 13), (0.3, 0.7)])
@pytest.mark.parametrize("final", [0.0, 0.1])
def test_wsd_is_transformers_schedule_at_every_step(warmup: float, decay: float, final: float) -> None:
    """But for the warm-up, in which theirs is a step behind."""
    wsd: dict[str, Any] = {"schedule": "wsd", "warmup_steps": warmup, "decay_steps": decay, "final_lr_ratio": final}
    rises, falls = (round(50 * steps) if steps < 1 else int(steps) for steps in (warmup, decay))
    optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.5)
    theirs, from_0 = (
        get_wsd_schedule(optimizer, rises, falls, num_training_steps=50, min_lr_ratio=ratio).lr_lambdas[0]
        for ratio in (final, 0.0)
    )
    expected = [0.5 * (theirs(step) if step >= rises else from_0(step + 1)) for step in range(50)]
    assert ours(50, **wsd) == pytest.approx(expected)


def test_muon_takes_the_hidden_matrices_only() -> None:
    """All, or none. A single row is no matrix: under FSDP, Muon would fail there."""
    muon, rest = build_optimizers(Optim(name="muon"), MnistCnn())
    assert [p.shape for group in muon.param_groups for p in group["params"]] == [(128, 9216)]
    assert sum(len(group["params"]) for group in rest.param_groups) == 7
    hidden, row, end = (nn.Linear(8, width, bias=False) for width in (8, 1, 8))
    frozen = copy.deepcopy(end).requires_grad_(False)
    for parts, takes in (((hidden, end), [True, False]), ((row, end), [False]), ((hidden, frozen), [True])):
        found = build_optimizers(Optim(name="muon"), nn.Sequential(*parts))
        assert [isinstance(optimizer, torch.optim.Muon) for optimizer in found] == takes


def test_gradients_are_clipped_as_torch_clips_them() -> None:
    ours, theirs = ([nn.Parameter(torch.zeros(3, 4)), nn.Parameter(torch.zeros(5))] for _ in range(2))
    for a, b in zip(ours, theirs, strict=True):
        b.grad = torch.randn_like(b)
        a.grad = b.grad * 7
    gradients = local_gradients(ours)
    norm = local_norm(gradients) / 7
    scale_and_clip_(gradients, 1 / 7, norm, max_norm=0.5)
    torch.testing.assert_close(norm.float(), nn.utils.clip_grad_norm_(theirs, 0.5))
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a.grad, b.grad)


BAD = [(math.nan, 1.0, 2.0), (1.0, math.nan, 2.0)]


def recorded_step(optimizers: list[Optimizer], value: torch.Tensor) -> None:
    """As a recorded graph takes it: undone where it must not be."""
    for optimizer in optimizers:
        if optimizer.state and not optimizer.defaults.get("fused"):
            undo_unless_finite(optimizer)
        optimizer.found_inf = (~value.isfinite()).float()  # type: ignore[attr-defined]
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize(
    ("name", "bad", "step"), [*itertools.product(NAMES, BAD, [step_if_finite]), ("adadelta", BAD[1], recorded_step)]
)
def test_non_finite_gradients_leave_no_trace(name: str, bad: tuple[float, ...], step: Callable[..., object]) -> None:
    """Else the weights would become NaN."""
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 2))
    twin = copy.deepcopy(model)
    torch.use_deterministic_algorithms(True)  # which fills new memory with NaN
    for values, of in (((1.0, 2.0), twin), (bad, model)):
        optimizers = build_optimizers(Optim.model_validate({"name": name}), of)
        for value in values:
            torch.stack([value * parameter.sum() for parameter in of.parameters()]).sum().backward()
            step(optimizers, torch.tensor(value, dtype=torch.float64))
    torch.use_deterministic_algorithms(False)
    for found, expected in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(found, expected)


def test_the_loss_scale_halves_at_overflow_and_doubles_after_2000_steps() -> None:
    progress = Progress()
    skipped = []
    for norm in (3.0, math.inf, math.nan, 3.0):
        progress.update_loss_scale(norm, is_fp16=True)
        skipped.append(progress.skipped)
    assert (progress.loss_scale, skipped) == (2.0**14, [0, 1, 2, 2])
    for _ in range(1998):
        progress.update_loss_scale(3.0, is_fp16=True)
    assert progress.loss_scale == 2.0**14
    progress.update_loss_scale(3.0, is_fp16=True)
    assert (progress.loss_scale, progress.skipped) == (2.0**15, 2)
