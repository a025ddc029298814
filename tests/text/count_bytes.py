"""Started by test_sharding.py under an accelerate yaml: one step of a Llama of 100M parameters, then the bytes of all
tensors that this process holds from one step to the next."""

import json
import os
from collections.abc import Iterable

import torch
from torch.distributed.tensor import DTensor

from src.config import Optim, config_from
from src.distributed import build_accelerator, prepare
from src.optim import build_optimizers
from src.tasks.causal_lm import CausalLM


def size(tensors: Iterable[torch.Tensor]) -> int:
    """Of their memory, each piece once: FSDP's shards of a block are views of one."""
    local = [t.to_local() if isinstance(t, DTensor) else t for t in tensors]
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in local}.values())


def main() -> None:
    accelerator, launch = build_accelerator(config_from({"task": {"name": "mnist"}}))
    architecture = {
        "model_type": "llama", "hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 11,
        "num_attention_heads": 12, "num_key_value_heads": 12, "vocab_size": 30_000, "tie_word_embeddings": True,
    }  # fmt: skip
    model: torch.nn.Module = CausalLM(dataset="none", architecture=architecture, sequence_length=8).build_model()
    parameters = sum(p.numel() for p in model.parameters())
    model, (optimizer,) = prepare(accelerator, model, build_optimizers(Optim(), model))
    tokens = torch.arange(8)
    accelerator.backward(model("loss", tokens[None], tokens[None], tokens, tokens))
    optimizer.step()
    held = {
        "parameters": size(model.parameters()),
        "gradients": size(p.grad for p in model.parameters() if p.grad is not None),
        "optimizer": size(v for state in optimizer.state.values() for v in state.values() if torch.is_tensor(v)),
    }
    line = {"count": parameters, "strategy": launch.strategy, **held}
    os.write(1, (json.dumps(line) + "\n").encode())  # in one piece: all processes write
    accelerator.wait_for_everyone()
    accelerator.end_training()


if __name__ == "__main__":
    main()
