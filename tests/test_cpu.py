"""What makes a CPU faster: where it is chosen, and that the model stays the same function."""

from collections.abc import Callable, Iterator
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.profiler import profile

from src.training.cpu import mkl, tune_for_cpu
from src.training.cpu.dropout import Dropout
from tests.launching import slow

ZEN = {"cpu_name": "AMD EPYC", "avx512_bf16": True}


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def tuned(monkeypatch: pytest.MonkeyPatch, model: nn.Module, precision: str, cpu: dict[str, Any] = ZEN) -> list[str]:
    """What of MKL was avoided."""
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: cpu)
    return [what for what in tune_for_cpu(model, precision) if "MKL" in what]


@pytest.mark.parametrize(
    "other",
    [
        {"cpu_name": "Intel Xeon", "avx512_bf16": True}, {"cpu_name": "AMD Ryzen 7 5800X", "avx512_bf16": False},
        {"neon": True},
    ],
)  # fmt: skip
def test_only_amds_cpus_with_avx512_need_it(monkeypatch: pytest.MonkeyPatch, other: Any) -> None:
    assert not tuned(monkeypatch, nn.Sequential(nn.Linear(2, 2)), "fp32", other)
    assert not tuned(monkeypatch, nn.Sequential(nn.Linear(2, 2)), "bf16")
    assert tuned(monkeypatch, nn.Sequential(nn.Linear(2, 2)), "fp32")


LARGE = torch.randn(40, 96)


@pytest.mark.parametrize(
    ("inputs", "compiler"),
    [
        (LARGE[0], None), (LARGE, None), (LARGE.view(2, 2, 10, 96), None), (LARGE.t().contiguous().t(), None),
        (LARGE[:1].expand(40, 96), None), (LARGE[::2], "aot_eager"), slow(LARGE, "inductor"),
    ],
    ids=["small", "large", "four dimensions", "transposed", "expanded", "every second", "compiled"],
)  # fmt: skip
def test_a_linear_layer_is_the_same_function_within_the_rounding_of_fp32(
    monkeypatch: pytest.MonkeyPatch, inputs: Tensor, compiler: str | None
) -> None:
    layers = [nn.Linear(96, 64, has_bias) for has_bias in (False, True, True, True)]
    layers[1].weight.requires_grad_(False)
    layers[2].bias.requires_grad_(False)
    for layer in layers:
        assert_same(monkeypatch, layer, inputs, compiler)


def assert_same(monkeypatch: pytest.MonkeyPatch, layer: nn.Linear, inputs: Tensor, compiler: str | None) -> None:
    """Outputs and all gradients, and that oneDNN computed them where the layer is large enough."""
    exact = deepcopy(layer).double()
    monkeypatch.setattr(mkl, "FEWEST", inputs.numel() * 64)
    assert tuned(monkeypatch, layer, "fp32")

    def computed(layer: Callable[..., Tensor], parameters: Iterator[nn.Parameter], inputs: Tensor) -> list[Tensor]:
        wanted = [inputs.detach().requires_grad_(), *(p for p in parameters if p.requires_grad)]
        output = layer(wanted[0])
        return [output, *torch.autograd.grad(output.square().sum(), wanted)]

    called = torch.compile(layer, backend=compiler) if compiler else layer
    computed(called, layer.parameters(), inputs)  # compiles
    with profile() as events:
        found = computed(called, layer.parameters(), inputs)
    products = sum(event.count for event in events.key_averages() if event.key == "cpu::mm")
    assert products == (2 + layer.weight.requires_grad if inputs.ndim > 1 else 0)
    # Of the backward pass too, each sum has at most 96 terms, and what goes into it was such a sum: in the worst case
    # all roundings, of half of eps at most, add up. (Six of bf16's bits would be 1e-2.)
    for one, other in zip(found, computed(exact, exact.parameters(), inputs.double()), strict=True):
        assert (one - other).abs().max() <= 2 * 96 * torch.finfo(torch.float32).eps / 2 * other.abs().max()


@pytest.mark.parametrize(("p", "dtype"), [(0.25, torch.float32), (0.3, torch.bfloat16)])  # multiples of 1/256, and not
def test_dropout_has_the_distribution_of_torchs(p: float, dtype: torch.dtype) -> None:
    ones = torch.ones(1001, dtype=dtype, requires_grad=True)
    dropout = Dropout(p)
    outputs = [dropout(ones) for _ in range(400)]
    sent = torch.stack(outputs).detach().double()
    assert set(sent.unique().tolist()) == {0.0, torch.tensor(1 / (1 - p), dtype=dtype).item()}
    kept = (sent != 0).double()
    sigma = (p * (1 - p)) ** 0.5
    assert abs(kept.mean() - (1 - p)) < 4 * sigma / kept.numel() ** 0.5
    for along in (0, 1):  # a unit is not dropped more often than another, nor more of them in one draw
        variance = kept.mean(along).var() * kept.shape[along] / sigma**2
        assert abs(variance - 1) < 5 * (2 / kept.shape[1 - along]) ** 0.5
    for offset in (1, 4, 8):  # neighbours share words of random bits, but no bits
        pairs = torch.cov(torch.stack([kept[:, :-offset].flatten(), kept[:, offset:].flatten()]))[0, 1]
        assert abs(pairs) < 4 * sigma**2 / kept.numel() ** 0.5
    (gradient,) = torch.autograd.grad(outputs[0].sum(), ones)
    assert torch.equal(gradient, outputs[0].detach())
    assert torch.equal(dropout.eval()(ones), ones)
