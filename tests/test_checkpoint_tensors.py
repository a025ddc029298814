"""Which process saves which tensor."""

import torch
from torch import nn

from src.checkpoint.tensors import rank_state_dict, run_tensors


def test_each_tensor_is_saved_by_one_process_and_buffers_by_the_first() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(5, 3)).sum().backward()
    optimizer.step()
    tensors = run_tensors(model, [optimizer])
    assert len(tensors) == 6 + 3 + 6 * 3
    shares = [set(rank_state_dict(tensors, rank, 3)) for rank in range(3)]
    assert set.union(*shares) == set(tensors)
    assert sum(map(len, shares)) == len(tensors)
    assert {f"model.1.{name}" for name, _ in model[1].named_buffers()} <= shares[0]
