"""What makes a CPU faster: where it is chosen, and that the model stays the same function."""

import pytest
import torch

from src.distributed.cpu import Dropout


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


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
