"""Started by test_sharding.py under an accelerate yaml: decoders of several families, each against itself unsharded."""

import copy
import json
import os
from typing import Any

import torch
from accelerate.utils import FullyShardedDataParallelPlugin, set_seed

from src.config import Optim, config_from
from src.distributed import build_accelerator, prepare, reduce_step_stats, sharded_units
from src.optim import build_optimizers, local_gradients
from src.tasks.causal_lm import CausalLM
from tests.text.tiny import LLAMA

DECODERS: dict[str, dict[str, Any]] = {
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4},
    "llama": LLAMA,
    "qwen3": LLAMA | {"head_dim": 8, "tie_word_embeddings": True},
    "gemma": LLAMA | {"head_dim": 8},
    "gemma3_text": LLAMA | {"head_dim": 8, "sliding_window": 8},
}


def main() -> None:
    accelerator, _ = build_accelerator(config_from({"task": {"name": "mnist"}}))
    tokens = torch.arange(16)
    batch = (tokens[None], tokens[None] % 8, tokens, tokens.flip(0))  # two packed documents
    results = {}
    for kind, fields in DECODERS.items():
        set_seed(0)
        task = CausalLM(dataset="none", architecture={"model_type": kind, **fields}, sequence_length=16, dropout=0.0)
        whole = task.build_model()
        alone = copy.deepcopy(whole)
        loss = alone("loss", *batch)
        loss.backward()
        norm = torch.stack([p.grad.norm() for p in alone.parameters() if p.grad is not None]).norm()
        accelerator.state.fsdp_plugin = FullyShardedDataParallelPlugin()  # it remembers the last model's blocks
        model, _ = prepare(accelerator, whole, build_optimizers(Optim(), whole))
        sharded_loss = model("loss", *batch)
        accelerator.backward(sharded_loss)
        stats = reduce_step_stats(accelerator, [[0.0] * 4], local_gradients(model.parameters()), False)
        results[kind] = {
            "units": sharded_units(model),
            "is_tied": alone.hf.get_input_embeddings().weight is alone.hf.get_output_embeddings().weight,
            "losses": [sharded_loss.item(), loss.item()],
            "norms": [stats.grad_square_sum**0.5, norm.item()],
        }
    if accelerator.is_main_process:
        os.write(1, (json.dumps(results) + "\n").encode())
    accelerator.wait_for_everyone()
    accelerator.end_training()


if __name__ == "__main__":
    main()
