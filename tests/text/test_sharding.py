"""What FSDP is for: each process holds its share of parameters, gradients and optimizer state, and no more.

The processes that are compared are started under an accelerate yaml with this file as their script.
"""

import copy
import json
import os
import sys
from collections.abc import Iterable
from typing import Any
from unittest.mock import patch

import pytest
import torch
from accelerate import Accelerator
from accelerate.utils import FullyShardedDataParallelPlugin, set_seed
from torch.distributed.tensor import DTensor

from src.config.config import config_from
from src.config.groups import Optim
from src.distributed.accelerator import build_accelerator, prepare, sharded_units
from src.tasks import TASKS
from src.tasks.text import language_model as causal_lm
from src.tasks.text.causal_lm import CausalLM
from src.training.gradients import grad_square_sum, local_gradients
from src.training.optim import build_optimizers
from tests.launching import Launch, slow
from tests.text.tiny import LLAMA

SHAPES: dict[str, dict[str, Any]] = {
    "10M": {"hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 9, "vocab_size": 10_000},
    "100M": {"hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 11, "vocab_size": 30_000},
}
HEADS = {"model_type": "llama", "num_attention_heads": 4, "num_key_value_heads": 4, "tie_word_embeddings": True}
DECODERS: dict[str, dict[str, Any]] = {
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4},
    "llama": LLAMA,
    "gemma3_text": LLAMA | {"head_dim": 8, "sliding_window": 8},
}


def printed(launch: Launch, yaml: str, processes: int, what: str) -> list[dict[str, Any]]:
    """What the processes print as JSON, a line each."""
    run = launch(yaml, what, script="tests/text/test_sharding.py", processes=processes).succeeded()
    return [json.loads(line) for line in run.stdout.splitlines()]


@pytest.mark.parametrize(("shape", "processes"), [("10M", 2), slow("10M", 4), slow("100M", 4)])
def test_fsdp_holds_half_on_two_processes_and_a_quarter_on_four(launch: Launch, shape: str, processes: int) -> None:
    def held(yaml: str, processes: int) -> list[int]:
        counts = printed(launch, yaml, processes, shape)
        assert [count["strategy"] for count in counts] == [yaml] * processes
        assert all(count["count"] == pytest.approx(int(shape[:-1]) * 1e6, rel=0.05) for count in counts)
        return [count["bytes"] for count in counts]  # of each process, after a step

    whole, shares = max(held("ddp", 2)), held("fsdp", processes)
    assert max(shares) <= (1 / processes + 0.05) * whole
    assert sum(shares) >= 0.99 * whole


def test_decoders_are_sharded_by_their_own_blocks_tied_embeddings_included(launch: Launch) -> None:
    """Each against itself unsharded, which computes the loss of all tokens at once."""
    results = {result["kind"]: result for result in printed(launch, "fsdp", 2, "decoders")}
    assert [kind for kind, result in results.items() if result["is_tied"]] == ["gpt2", "gemma3_text"]
    for result in results.values():
        assert result["units"] == 5  # two blocks, embedding and head (together, if they are tied), and the rest
        for found, expected in (result["losses"], result["norms"]):
            assert found == pytest.approx(expected, rel=1e-5)


# ------------------------------------------------------------------------------------------- in each of the processes
def size(tensors: Iterable[torch.Tensor]) -> int:
    """Of their memory, each piece once: FSDP's shards of a block are views of one."""
    local = [t.to_local() if isinstance(t, DTensor) else t for t in tensors]
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in local}.values())


def bytes_after_a_step(accelerator: Accelerator, shape: str) -> dict[str, int]:
    """Of all tensors that this process holds from one step to the next."""
    task = CausalLM(dataset="none", architecture=HEADS | SHAPES[shape], sequence_length=8)
    model: torch.nn.Module = task.build_model()
    count = sum(p.numel() for p in model.parameters())
    model = prepare(accelerator, model)
    (optimizer,) = build_optimizers(Optim(), model)
    tokens = torch.arange(8)
    accelerator.backward(model("loss", tokens, tokens, input_ids=tokens[None], position_ids=tokens[None]))
    optimizer.step()
    states = [value for state in optimizer.state.values() for value in state.values() if torch.is_tensor(value)]
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    return {"count": count, "bytes": size(model.parameters()) + size(gradients) + size(states)}


def sharded_and_whole(accelerator: Accelerator, kind: str) -> dict[str, Any]:
    """Loss and norm of the gradients of a decoder, sharded and not."""
    tokens = torch.arange(16)
    packed = {"input_ids": tokens[None], "position_ids": tokens[None] % 8}  # two documents
    set_seed(0)
    architecture = {"model_type": kind, **DECODERS[kind]}
    whole = CausalLM(dataset="none", architecture=architecture, sequence_length=16, dropout=0.0).build_model()
    alone = copy.deepcopy(whole)
    loss = alone("loss", tokens, tokens.flip(0), **packed)
    loss.backward()
    norm = torch.stack([p.grad.norm() for p in alone.parameters() if p.grad is not None]).norm()
    accelerator.state.fsdp_plugin = FullyShardedDataParallelPlugin()  # it remembers the last model's blocks
    model = prepare(accelerator, whole)
    with patch.object(causal_lm, "CHUNK", 5 * alone.hf.config.vocab_size):  # five tokens at a time
        sharded_loss = model("loss", tokens, tokens.flip(0), **packed)
    accelerator.backward(sharded_loss)
    squares = accelerator.reduce(grad_square_sum(local_gradients(model.parameters())), "sum")
    return {
        "kind": kind,
        "units": sharded_units(model),
        "is_tied": alone.hf.get_input_embeddings().weight is alone.hf.get_output_embeddings().weight,
        "losses": [sharded_loss.item(), loss.item()],
        "norms": [squares.sqrt().item(), norm.item()],
    }


def main(what: str) -> None:
    accelerator, launch = build_accelerator(config_from({"task": {"name": "mnist"}}, TASKS))
    if what in SHAPES:
        lines = [{"strategy": launch.strategy, **bytes_after_a_step(accelerator, what)}]
    else:
        results = [sharded_and_whole(accelerator, kind) for kind in DECODERS]
        lines = results if accelerator.is_main_process else []
    for line in lines:
        os.write(1, (json.dumps(line) + "\n").encode())  # in one piece: all processes write
    accelerator.wait_for_everyone()
    accelerator.end_training()


if __name__ == "__main__":
    main(sys.argv[1])
