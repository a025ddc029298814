"""oneDNN in place of MKL: where it is chosen, and that the model stays the same function."""

from collections.abc import Callable, Iterator
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention as attention
from torch.profiler import profile

from src import mkl

ZEN = {"cpu_name": "AMD EPYC", "avx512_bf16": True}


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    yield
    torch.backends.cuda.enable_flash_sdp(True)
    torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(False)


def avoid(
    monkeypatch: pytest.MonkeyPatch, model: nn.Module, precision: str, longest: int | None = None, **others: Any
) -> bool:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: others.get("cpu", ZEN))
    return mkl.avoid_mkl(model, others.get("device", "cpu"), precision, longest)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(
    "other",
    [
        {"device": "cuda"},
        {"cpu": {"cpu_name": "Intel Xeon", "avx512_bf16": True}},
        {"cpu": {"cpu_name": "AMD Ryzen 7 5800X", "avx512_bf16": False}},
        {"cpu": {"neon": True}},
    ],
)
def test_only_amds_cpus_with_avx512_need_it(
    monkeypatch: pytest.MonkeyPatch, precision: str, other: dict[str, Any]
) -> None:
    assert not avoid(monkeypatch, nn.Linear(2, 2), precision, mkl.LONGEST, **other)
    assert torch.backends.cuda.flash_sdp_enabled()
    assert avoid(monkeypatch, nn.Linear(2, 2), precision, mkl.LONGEST)


@pytest.mark.parametrize(("precision", "longest"), [("bf16", mkl.LONGEST + 1), ("bf16", None), ("fp32", 1)])
def test_attention_keeps_torchs_kernel_where_products_gain_nothing(
    monkeypatch: pytest.MonkeyPatch, precision: str, longest: int | None
) -> None:
    assert not avoid(monkeypatch, nn.ReLU(), precision, longest)
    assert torch.backends.cuda.flash_sdp_enabled()


@pytest.mark.parametrize("kind", ["causal", "whole", "masked"])
def test_attention_is_the_same_function_within_the_rounding_of_bf16(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    torch.manual_seed(0)
    exact = [torch.randn(2, 4, 64, 32, dtype=torch.float64) for _ in range(4)]
    inputs = [tensor.bfloat16().requires_grad_() for tensor in exact[:3]]
    options: dict[str, Any] = {"is_causal": kind == "causal"}
    if kind == "masked":
        options["attn_mask"] = torch.rand(2, 1, 64, 64) < 0.5
        options["attn_mask"][:, :, :8] = False  # padding sees nothing at all

    def computed(inputs: list[Tensor]) -> list[Tensor]:
        query, key, value = inputs
        output = attention(query, key, value, **options)
        gradients = torch.autograd.grad(output, inputs, exact[3].bfloat16().to(output.dtype))
        return [tensor.double() for tensor in (output, *gradients)]

    expected = computed([tensor.detach().double().requires_grad_() for tensor in inputs])
    fused = computed(inputs)
    assert avoid(monkeypatch, nn.ReLU(), "bf16", 64)
    by_products = computed(inputs)
    assert not torch.equal(by_products[0], fused[0])  # it is another way
    for found, wanted in zip(by_products, expected, strict=True):
        assert found.isfinite().all()
        assert (found - wanted).abs().max() <= 4 * torch.finfo(torch.bfloat16).eps * wanted.abs().max()


@pytest.mark.parametrize("shape", [(96,), (40, 96), (2, 20, 96), (2, 2, 10, 96)])
@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("is_compiled", [False, True])
def test_a_linear_layer_is_the_same_function_within_the_rounding_of_fp32(
    monkeypatch: pytest.MonkeyPatch, shape: tuple[int, ...], has_bias: bool, is_compiled: bool
) -> None:
    torch.manual_seed(0)
    assert_same(monkeypatch, nn.Linear(96, 64, has_bias), torch.randn(shape), len(shape) > 1, is_compiled)


@pytest.mark.parametrize("frozen", ["weight", "bias"])
def test_a_frozen_parameter_gets_no_gradient(monkeypatch: pytest.MonkeyPatch, frozen: str) -> None:
    torch.manual_seed(0)
    layer = nn.Linear(96, 64)
    layer.get_parameter(frozen).requires_grad_(False)
    assert_same(monkeypatch, layer, torch.randn(40, 96))
    assert layer.get_parameter(frozen).grad is None


@pytest.mark.parametrize("change", [lambda x: x.t().contiguous().t(), lambda x: x[:1].expand(40, 96), lambda x: x[::2]])
def test_strides_don_t_matter(monkeypatch: pytest.MonkeyPatch, change: Any) -> None:
    torch.manual_seed(0)
    assert_same(monkeypatch, nn.Linear(96, 64), change(torch.randn(40, 96)))


def products(events: profile) -> int:
    """How many oneDNN computed."""
    return sum(event.count for event in events.key_averages() if event.key == "train::product")


def assert_same(
    monkeypatch: pytest.MonkeyPatch,
    layer: nn.Linear,
    inputs: Tensor,
    is_large: bool = True,
    is_compiled: bool = False,
) -> None:
    """Outputs and all gradients, and that oneDNN computed them where the layer is large enough."""
    exact = deepcopy(layer).double()
    monkeypatch.setattr(mkl, "FEWEST", inputs.numel() * 64)
    assert avoid(monkeypatch, layer, "fp32")

    def computed(layer: Callable[..., Tensor], inputs: Tensor) -> list[Tensor]:
        inputs = inputs.detach().requires_grad_()
        output = layer(inputs)
        output.square().sum().backward()
        return [tensor.double() for tensor in (output, inputs.grad) if tensor is not None]

    def gradients(layer: nn.Module) -> list[Tensor]:
        return [p.grad.double() for p in layer.parameters() if p.grad is not None]

    called = torch.compile(layer) if is_compiled else layer
    computed(called, inputs)  # compiles
    layer.zero_grad()
    with profile() as events:
        found = computed(called, inputs) + gradients(layer)
    assert products(events) == (2 + layer.weight.requires_grad if is_large else 0)
    wanted = computed(exact, inputs.double()) + gradients(exact)
    assert len(found) == len(wanted)
    for one, other in zip(found, wanted, strict=True):
        assert (one - other).abs().max() <= 1e-6 * other.abs().max()


def test_a_small_layer_stays_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = nn.Linear(96, 64)
    expected = layer(torch.ones(40, 96))
    assert avoid(monkeypatch, layer, "fp32")
    with profile() as events:
        assert torch.equal(layer(torch.ones(40, 96)), expected)
    assert products(events) == 0
