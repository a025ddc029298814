"""Optimizers by name, the learning rate as a function of the step, exact scaling and clipping."""

import copy
import math
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LRScheduler, StepLR

from src.config.groups import Optim
from src.tasks.mnist import MnistCnn
from src.training.gradients import _step_or_undo, grad_square_sum, local_gradients, scale_and_clip_, step_if_finite
from src.training.optim import build_optimizers, lr_at, set_lr


def torch_schedule(make: Callable[..., LRScheduler], steps: int, **arguments: float) -> list[float]:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.5)
    scheduler = make(optimizer, **arguments)
    rates = []
    for _ in range(steps):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return rates


def ours(steps: int, steps_per_epoch: int = 10, **settings: object) -> list[float]:
    config = Optim.model_validate({"lr": 0.5, "warmup_steps": 0, **settings})
    return [lr_at(step, config, steps, steps_per_epoch) for step in range(steps)]


def test_schedules_are_torchs_or_the_textbooks() -> None:
    per_epoch = torch_schedule(StepLR, 50, step_size=10, gamma=0.7)
    assert ours(50, schedule="step", decay_factor=0.7) == pytest.approx(per_epoch)
    cosine = torch_schedule(CosineAnnealingLR, 50, T_max=50, eta_min=0.05)
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


@pytest.mark.parametrize("name", ["adamw", "sgd", "adadelta", "muon"])
def test_each_optimizer_learns_and_decays_no_vectors(name: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 1))
    config = Optim.model_validate({"name": name, "lr": 0.5 if name == "adadelta" else 0.02, "weight_decay": 0.1})
    optimizers = build_optimizers(config, model)
    inputs = torch.randn(64, 8)
    losses = []
    for _ in range(100):
        loss = (model(inputs).squeeze() - inputs.sum(1)).square().mean()
        loss.backward()
        set_lr(optimizers, config.lr)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    assert sum(len(group["params"]) for group in groups) == 6
    for group in groups:
        assert group["weight_decay"] == (0.1 if group["params"][0].ndim > 1 else 0)


def test_muon_takes_the_hidden_matrices_only() -> None:
    """All of them with adapters, or none. Tried without: "optimizer got an empty parameter list". A single row is no
    matrix to it: FSDP leaves some processes nothing of one, and Muon fails there."""
    muon, rest = build_optimizers(Optim(name="muon"), MnistCnn())
    assert [p.shape for group in muon.param_groups for p in group["params"]] == [(128, 9216)]
    assert sum(len(group["params"]) for group in rest.param_groups) == 7
    hidden, row, end = (nn.Linear(8, width, bias=False) for width in (8, 1, 8))
    frozen = copy.deepcopy(end).requires_grad_(False)
    for parts, takes in (((hidden, end), [True, False]), ((row, end), [False]), ((hidden, frozen), [True])):
        found = build_optimizers(Optim(name="muon"), nn.Sequential(*parts))
        assert [isinstance(optimizer, torch.optim.Muon) for optimizer in found] == takes


def test_clipping_is_torchs() -> None:
    ours, theirs = ([nn.Parameter(torch.zeros(3, 4)), nn.Parameter(torch.zeros(5))] for _ in range(2))
    for a, b in zip(ours, theirs, strict=True):
        b.grad = torch.randn_like(b)
        a.grad = b.grad * 7
    gradients = local_gradients(ours)
    norm = grad_square_sum(gradients).sqrt() / 7
    scale_and_clip_(gradients, 1 / 7, norm, max_norm=0.5)
    torch.testing.assert_close(norm.float(), nn.utils.clip_grad_norm_(theirs, 0.5))
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a.grad, b.grad)


@pytest.mark.parametrize("bad", [(math.nan, 1.0, 2.0), (1.0, math.nan, 2.0)])
@pytest.mark.parametrize("name", ["adamw", "sgd", "adadelta", "muon"])
def test_a_step_whose_gradients_are_not_finite_leaves_no_trace(name: str, bad: tuple[float, ...]) -> None:
    """Tried without found_inf, and without the question: the weights become NaN. Tried without waiting for fused SGD's
    first step: it reads momentum that nobody has written."""
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 2))
    twin = copy.deepcopy(model)
    torch.use_deterministic_algorithms(True)  # which fills new memory with NaN
    for steps, of in (((1.0, 2.0), twin), (bad, model)):
        optimizers = build_optimizers(Optim.model_validate({"name": name}), of)
        for value in steps:
            for parameter in of.parameters():
                parameter.grad = torch.full_like(parameter, value)
            step_if_finite(optimizers, torch.tensor(value, dtype=torch.float64))
            assert all(parameter.grad is None for parameter in of.parameters())
    torch.use_deterministic_algorithms(False)
    for found, expected in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(found, expected)


@pytest.mark.parametrize("is_finite", [True, False])
def test_a_recorded_step_is_undone_where_gradients_are_not_finite(is_finite: bool) -> None:
    """Weights and state are as before, to the last bit. Tried without the state: it has NaN in it."""
    model = nn.Linear(4, 2)
    optimizers = build_optimizers(Optim(name="adadelta"), model)
    twin, twins_optimizers = copy.deepcopy((model, optimizers))
    for value in (1.0, 2.0 if is_finite else math.nan, 3.0):
        for of, (optimizer,) in ((model, optimizers), (twin, twins_optimizers)):
            for parameter in of.parameters():
                parameter.grad = torch.full_like(parameter, value)
            if of is model and optimizer.state:
                _step_or_undo(optimizer, torch.tensor(math.isfinite(value)))
            elif math.isfinite(value):
                optimizer.step()
    for found, expected in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(found, expected)
        for name, state in optimizers[0].state[found].items():
            assert torch.equal(state, twins_optimizers[0].state[expected][name]), name
