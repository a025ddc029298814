"""What makes a CPU faster: where it is chosen, and that the model stays the same function."""

import platform
import sys
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.profiler import profile

from src.training.cpu import mkl, tune_for_cpu
from src.training.cpu.dropout import Dropout
from tests.launching import run_command

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


@pytest.mark.parametrize("shape", [(96,), (40, 96), (2, 20, 96), (2, 2, 10, 96)])
@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("compiler", [None, "aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_a_linear_layer_is_the_same_function_within_the_rounding_of_fp32(
    monkeypatch: pytest.MonkeyPatch, shape: tuple[int, ...], has_bias: bool, compiler: str | None
) -> None:
    assert_same(monkeypatch, nn.Linear(96, 64, has_bias), torch.randn(shape), len(shape) > 1, compiler)


@pytest.mark.parametrize("frozen", ["weight", "bias"])
def test_a_frozen_parameter_gets_no_gradient(monkeypatch: pytest.MonkeyPatch, frozen: str) -> None:
    layer = nn.Linear(96, 64)
    layer.get_parameter(frozen).requires_grad_(False)
    assert_same(monkeypatch, layer, torch.randn(40, 96))
    assert layer.get_parameter(frozen).grad is None


@pytest.mark.parametrize("change", [lambda x: x.t().contiguous().t(), lambda x: x[:1].expand(40, 96), lambda x: x[::2]])
def test_strides_don_t_matter(monkeypatch: pytest.MonkeyPatch, change: Any) -> None:
    assert_same(monkeypatch, nn.Linear(96, 64), change(torch.randn(40, 96)))


def products(events: profile) -> int:
    """How many oneDNN computed."""
    return sum(event.count for event in events.key_averages() if event.key == "cpu::mm")


def assert_same(
    monkeypatch: pytest.MonkeyPatch,
    layer: nn.Linear,
    inputs: Tensor,
    is_large: bool = True,
    compiler: str | None = None,
) -> None:
    """Outputs and all gradients, and that oneDNN computed them where the layer is large enough."""
    exact = deepcopy(layer).double()
    monkeypatch.setattr(mkl, "FEWEST", inputs.numel() * 64)
    assert tuned(monkeypatch, layer, "fp32")

    def computed(layer: Callable[..., Tensor], inputs: Tensor) -> list[Tensor]:
        inputs = inputs.detach().requires_grad_()
        output = layer(inputs)
        output.square().sum().backward()
        return [tensor.double() for tensor in (output, inputs.grad) if tensor is not None]

    def gradients(layer: nn.Module) -> list[Tensor]:
        return [p.grad.double() for p in layer.parameters() if p.grad is not None]

    called = torch.compile(layer, backend=compiler) if compiler else layer
    computed(called, inputs)  # compiles
    layer.zero_grad()
    with profile() as events:
        found = computed(called, inputs) + gradients(layer)
    assert products(events) == (2 + layer.weight.requires_grad if is_large else 0)
    wanted = computed(exact, inputs.double()) + gradients(exact)
    assert len(found) == len(wanted)
    # Of the backward pass too, each sum has at most 96 terms, and what goes into it was such a sum: in the worst case
    # all roundings, of half of eps at most, add up. (Six of bf16's bits would be 1e-2.)
    for one, other in zip(found, wanted, strict=True):
        assert (one - other).abs().max() <= 2 * 96 * torch.finfo(torch.float32).eps / 2 * other.abs().max()


def test_a_small_layer_stays_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = nn.Linear(96, 64)
    expected = layer(torch.ones(40, 96))
    assert tuned(monkeypatch, layer, "fp32")
    with profile() as events:
        assert torch.equal(layer(torch.ones(40, 96)), expected)
    assert products(events) == 0


@pytest.mark.parametrize("p", [0.25, 0.5, 0.05, 0.3])  # multiples of 1/256, and not
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dropout_has_the_distribution_of_torchs(p: float, dtype: torch.dtype) -> None:
    ones, draws = torch.ones(1001, dtype=dtype, requires_grad=True), 400
    dropout = Dropout(p)
    outputs = [dropout(ones) for _ in range(draws)]
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
    assert torch.equal(nn.Dropout(p).eval()(ones), dropout.eval()(ones))


def test_dropout_follows_the_layout_of_what_it_drops() -> None:
    images = torch.ones(3, 4, 5, 6)
    for x in (images.to(memory_format=torch.channels_last), images.transpose(1, 3), images[:, :, ::2]):
        torch.manual_seed(0)
        dropped = Dropout(0.5)(x)
        assert dropped.stride() == torch.empty_like(x).stride()
        assert 0 < dropped.count_nonzero() < x.numel()


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="counts the new pages that glibc takes")
def test_glibc_gives_large_blocks_back(tmp_path: Path) -> None:
    """src/training/cpu/malloc.py: why it keeps them."""
    code = """
import resource, torch
from src.training.cpu.malloc import keep_freed_memory
def new_pages():
    for _ in range(20): torch.ones(10_000_000)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(5): torch.ones(10_000_000)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
print(new_pages(), keep_freed_memory(), new_pages())
"""
    given_back, is_kept, kept = run_command([sys.executable, "-c", code], tmp_path).succeeded().stdout.split()
    assert is_kept == "True"
    assert int(given_back) > 10_000
    assert int(kept) < 1_000
