"""Rates per part of a model, frozen parts, and a moving average of the weights: in steps, evaluations and exports."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from src.config.config import Config
from src.config.errors import UserError
from src.start import run_settings
from src.tasks.mnist import MnistCnn
from src.tools import evaluate
from src.training.gradients import step_if_finite
from src.training.optim import build_optimizers, extended, set_lr
from src.training.rates import freeze
from tests.core.test_parity import DIGITS, PARTS
from tests.faults.runs import TINY, cut_back, weights, whole_tensors
from tests.launching import Launch, Whole, mistakes

BIASES = "{match: .*bias, frozen: true}"
BLOCKS = ["conv1", "conv2", "fc1", "fc2"]


def settings(*arguments: str) -> Config[Any]:
    return run_settings(["--task.source=digits", "--run_name=parts", *arguments])


def rates(model: nn.Module, *arguments: str) -> dict[str, float]:
    """Return the rate of each parameter in a step at a rate of 1; of a frozen one, 0."""
    config = settings(*arguments)
    freeze(model, config)
    optimizers = extended(config, model, build_optimizers(config.optim, model))
    set_lr(optimizers, 1.0)
    found = {p: group["lr"] for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]}
    return {name: found.get(parameter, 0.0) for name, parameter in model.named_parameters()}


# ------------------------------------------------------------------------------------------------------------- rates
@pytest.mark.parametrize("optimizer", ["adamw", "sgd", "muon"])
def test_the_first_group_that_matches_gives_a_part_its_rate(optimizer: str) -> None:
    groups = f"--optim.groups=[{{match: conv1.*}}, {BIASES}, {{match: conv.*, lr_scale: 0.1}}]"
    found = rates(MnistCnn(), f"--optim.name={optimizer}", groups)
    assert found == {
        "conv1.weight": 1, "conv1.bias": 1, "conv2.weight": 0.1, "conv2.bias": 0,
        "fc1.weight": 1, "fc1.bias": 0, "fc2.weight": 1, "fc2.bias": 0,
    }  # fmt: skip


def test_each_block_before_the_deepest_has_a_lower_rate() -> None:
    """Of what surrounds them, embeddings come before all, norm and head after all. Groups scale what is left."""
    found = rates(MnistCnn(), "--optim.layer_decay=0.5", "--optim.groups=[{match: fc2.*, lr_scale: 10}]")
    assert [found[f"{name}.bias"] for name in BLOCKS] == [0.125, 0.25, 0.5, 10]
    model = nn.Sequential(nn.Embedding(3, 4), MnistCnn(), nn.Sequential(nn.Linear(2, 2), MnistCnn()), nn.Linear(1, 1))
    model._no_split_modules = ["MnistCnn", "Conv2d"]  # type: ignore[assignment]  # the latter are within blocks
    found = rates(model, "--optim.layer_decay=0.5")
    assert [found["0.weight"], found["1.conv2.bias"], found["2.0.bias"], found["2.1.fc1.bias"]] == [0.25, 0.5, 0.5, 1]
    assert found["3.bias"] == 1


def test_the_startup_summary_has_the_weights_and_the_rate_of_each_group(whole: Whole) -> None:
    run = whole("ddp", *DIGITS, *PARTS, "--micro_batch_size=8")
    for line in ("conv1.*: 320 weights at 3.75e-07", ".*bias: 202 weights frozen", ".*: 1,179,648 weights at 1.5e-05"):
        assert f"  {line}\n" in run.stdout
    assert run.summary["trained_parameters"] == run.summary["parameters"] - 202


def test_groups_without_effect_are_mistakes() -> None:
    model = MnistCnn()
    groups = "[{match: conv1.*}, {match: conv1.weight, frozen: true}, {match: cnv2.*}, {match: .*, frozen: true}]"
    with pytest.raises(UserError) as error:
        freeze(model.requires_grad_(False), settings(f"--optim.groups={groups}", "--optim.layer_decay=0.5"))
    assert len(error.value.args) == 5
    with pytest.raises(UserError) as error:
        freeze(MnistCnn(), settings(f"--optim.groups={groups}"))
    assert error.value.args == tuple(
        f"optim.groups: {name} matches no parameter left; one is fc2.bias" for name in ("conv1.weight", "cnv2.*")
    )
    with pytest.raises(UserError, match="names no repeating blocks in _no_split_modules"):
        freeze(nn.Linear(2, 2), settings("--optim.layer_decay=0.5"))
    with pytest.raises(UserError, match="all parameters are frozen"):
        freeze(MnistCnn(), settings("--optim.groups=[{match: .*, frozen: true}]"))


def test_all_mistakes_in_a_group_are_one_line() -> None:
    wrong = "[{match: conv(, lr_scale: -1}, {mach: a}, {match: b, frozen: true, lr_scale: 2}]"
    (line,) = mistakes(f"--optim.groups={wrong}")
    for part in (
        "match: must be a valid regular",
        "lr_scale: must be greater",
        "mach: unknown",
        "match: Field req",
    ):
        assert part in line
    both = mistakes("--optim.groups=[{match: b, frozen: true, lr_scale: 2}]", "--ema.evaluate=false")
    assert [line.partition(":")[0] for line in both] == ["optim.groups", "ema.decay is not set"]


# ----------------------------------------------------------------------------------------------------------- averages
def test_the_average_is_that_of_torch() -> None:
    """But for a step that was skipped on a CPU, which leaves both as they are."""
    config, model = settings("--ema.decay=0.9", "--optim.lr=0.1"), nn.Linear(3, 2)
    optimizers = extended(config, model, build_optimizers(config.optim, model))
    expected = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    for value in (1.0, 2.0, torch.nan, 3.0):
        (value * model(torch.ones(3)).square().sum()).backward()
        step_if_finite(optimizers, torch.tensor(value))
        if value == value:
            expected.update_parameters(model)
    before = copy.deepcopy(model.state_dict())
    optimizers[-1].exchange()
    for name, average in expected.module.state_dict().items():
        assert torch.equal(model.state_dict()[name], average)
        assert not torch.equal(before[name], average)
    optimizers[-1].exchange()
    assert all(torch.equal(before[name], weight) for name, weight in model.state_dict().items())


@pytest.mark.parametrize("evaluates", [True, False])
def test_the_average_is_what_is_evaluated_and_exported(
    launch: Launch, whole: Whole, capsys: pytest.CaptureFixture[str], tmp_path: Path, evaluates: bool
) -> None:
    """Unless ema.evaluate is false. Checkpoints have both, and a checkpoint evaluates like its run."""
    arguments = (*DIGITS, *PARTS, "--micro_batch_size=8")
    run = whole("ddp", *arguments) if evaluates else launch("ddp", *arguments, "--ema.evaluate=false").succeeded()
    saved = whole_tensors(run.folder / "checkpoints/step_00000050")
    for name, weight in weights(run).items():
        if name in ("conv2.weight", "fc1.weight"):
            average, last = saved[f"optimizer.{name}.average"], saved[f"model.{name}"]
            assert not torch.equal(average, last)
            assert torch.equal(weight, average if evaluates else last)
    for source in ("model", "checkpoints/step_00000050"):
        evaluate.main([str(run.folder / source), f"--output={tmp_path / source}.parquet"])
        assert f'"eval/accuracy": {run.summary["eval/accuracy"]}' in capsys.readouterr().out


def test_an_average_that_begins_later_begins_with_the_weights(launch: Launch, whole: Whole, tmp_path: Path) -> None:
    """Of the checkpoint, not of the model before it was loaded."""
    before = whole("cpu", *TINY)
    folder = cut_back(before, tmp_path / "run", 12)
    more = ("--ema.decay=0.999", "--checkpoint.accept_changes=true", "--max_steps=13")
    run = launch("cpu", *TINY, *more, folder=folder).succeeded()
    saved = whole_tensors(run.folder / "checkpoints/step_00000013")
    assert torch.equal(saved["optimizer.fc1.weight.average"], saved["model.fc1.weight"])


def test_the_best_average_is_exported(launch: Launch) -> None:
    """Here the worst, which is not the last."""
    best = ("--checkpoint.export_best=true", "--checkpoint.mode=max", "--checkpoint.keep_last=9")
    run = launch("cpu", *TINY, *best, "--ema.decay=0.5").succeeded()
    expected = whole_tensors(run.folder / "checkpoints/step_00000008")["optimizer.fc1.weight.average"]
    assert torch.equal(weights(run)["fc1.weight"], expected)
