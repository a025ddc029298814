"""The loss from the last states: as exact in half precision as products of it allow, lean on memory, nothing twice."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker
from torch.nn import functional as F

from src.tasks.text.loss import CHUNK_ON_GPU, linear_cross_entropy

TOKENS, WIDTH, VOCABULARY = 1216, 128, 2048


def layer(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """States, weight and targets; the logits are about as large as those of a new model."""
    generator = torch.Generator().manual_seed(0)
    states = torch.randn(TOKENS, WIDTH, generator=generator).to(dtype).requires_grad_()
    weight = (torch.randn(VOCABULARY, WIDTH, generator=generator) / 16).to(dtype).requires_grad_()
    return states, weight, torch.randint(0, VOCABULARY, (TOKENS,), generator=generator)


def relative_error(found: Any, expected: Any) -> float:
    return float((found.float() - expected).norm() / expected.norm())


@pytest.mark.parametrize("chunks", [1, 19, 64])
@pytest.mark.parametrize(("is_autocast", "bound"), [(True, 1e-3), (False, 2e-3)])
def test_in_bf16_the_gradients_are_those_of_fp32_however_many_chunks_there_are(
    is_autocast: bool, bound: float, chunks: int
) -> None:
    """Of the same rounded states and weight: 4e-4 off, by the rounded gradient of the logits. FSDP has weights, and so
    gradients, of bf16: they are rounded once, which alone is 1.7e-3. Tried with sums over the chunks in bf16: 5e-3 in
    19, 7e-3 in 64."""
    states, weight, targets = layer(torch.float32 if is_autocast else torch.bfloat16)
    rounded = [tensor.detach().bfloat16().float().requires_grad_() for tensor in (states, weight)]
    expected = F.cross_entropy(F.linear(*rounded), targets, reduction="sum")
    expected.backward()
    with torch.autocast("cpu", torch.bfloat16, enabled=is_autocast):
        loss = linear_cross_entropy(states, weight, targets, lambda logits: logits, TOKENS // chunks)
    loss.backward()
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0)
    assert relative_error(states.grad, rounded[0].grad) < bound
    assert relative_error(weight.grad, rounded[1].grad) < bound


@pytest.mark.parametrize("is_frozen", [False, True])
def test_a_gpu_needs_less_than_a_gigabyte_for_150_thousand_words_and_16_thousand_tokens(is_frozen: bool) -> None:
    """Besides states and weight, and their gradients, of which the weight's is summed in fp32: 0.8 GB of logits. Tried
    with two chunks' at once: 1.6 GB. In fp32 on a fake CPU: fake tensors on a GPU have no backward pass."""
    tokens, width, words = 16_384, 1024, 150_000
    with FakeTensorMode():
        states = torch.empty(tokens, width, requires_grad=True)
        weight = torch.empty(words, width, requires_grad=not is_frozen)
        targets = torch.empty(tokens, dtype=torch.int64)
        with MemTracker() as tracker:
            loss = linear_cross_entropy(states, weight, targets, lambda logits: logits, CHUNK_ON_GPU // words)
    left, peak = (tracker.get_tracker_snapshot(when)[states.device]["Total"] for when in ("current", "peak"))
    of_gradients = 4 * states.numel() + (0 if is_frozen else 4 * weight.numel())
    given = sum(tensor.nbytes for tensor in (states, weight, targets))
    assert left == pytest.approx(given + of_gradients, rel=1e-3)  # what is left for the backward pass
    assert peak - given - of_gradients < 1e9
    assert loss.dtype == torch.float32
