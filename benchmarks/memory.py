"""Memory: a Llama of 284 million parameters from a folder, under FSDP x4: two steps, an evaluation, the checkpoint and
the export, against a loop on Accelerate that does the same.

    python -m benchmarks.memory

The peak of the process that needs most. A quarter of the fp32 weights are 0.28 GB: a process holds as much again for
gradients, and twice as much for AdamW's state; while a checkpoint is written, a copy of weights and state; and about 1
GB of libraries. The loop loads the model in each process, as in Accelerate's documentation, where it is sharded; and it
copies nothing, so that its saves halt it. Asserted: as many parameters, of which each process trains its share.
"""

import json
import re
import resource
from pathlib import Path
from shutil import rmtree
from typing import Any

from benchmarks import pairs
from benchmarks.language import Plan, write_text
from benchmarks.pairs import Comparison, in_turn
from benchmarks.runs import Side, launch, own, train_py

ROUNDS, PROCESSES, LENGTH, MOST_GB = 2, 4, 64, 2.75
LLAMA: dict[str, Any] = {"hidden_size": 1152, "intermediate_size": 3072, "num_hidden_layers": 20}
LLAMA |= {"num_attention_heads": 12, "num_key_value_heads": 4}
PARAMETERS = 283_757_184


def write_model(folder: Path) -> Path:
    """Write the model as a bf16 file, with the byte tokenizer."""
    import torch

    from benchmarks.language_peers import new_llama
    from src.tasks.text.tokenizing import byte_tokenizer

    model: Any = new_llama(Plan(LLAMA, LENGTH, batch=1))
    model.to(torch.bfloat16).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


def by_accelerate(words: list[str]) -> None:
    """Train, save and export as one would who reads Accelerate's documentation; print the largest process's peak."""
    from benchmarks.language_peers import sharded_on_cpu

    sharded_on_cpu()
    import numpy as np
    import torch
    import transformers
    from accelerate import Accelerator
    from accelerate.utils import gather_object
    from torch.utils.data import DataLoader

    accelerator = Accelerator(cpu=True)
    auto: Any = transformers.AutoModelForCausalLM
    model = auto.from_pretrained(words[0], dtype=torch.float32, use_cache=False, trust_remote_code=False)
    assert model.num_parameters() == PARAMETERS
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    rows = torch.from_numpy(np.load("../sequences.npy"))
    model, optimizer, batches = accelerator.prepare(model, optimizer, DataLoader(rows, 1))  # type: ignore[arg-type]
    held = sum(parameter.to_local().numel() for parameter in model.parameters())
    assert held < PARAMETERS / PROCESSES * 1.01
    model.train()
    for _, batch in zip(range(2), batches, strict=False):
        accelerator.backward(model(batch, labels=batch).loss)
        optimizer.step()
        optimizer.zero_grad()
    accelerator.save_state("state")
    weights = accelerator.get_state_dict(model)
    if accelerator.is_main_process:
        accelerator.unwrap_model(model).save_pretrained("model", state_dict=weights)
    accelerator.wait_for_everyone()
    peaks = gather_object([resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024])
    accelerator.print(f"peaks {json.dumps(peaks)}", flush=True)
    accelerator.end_training()


def measure(_: Path, folder: Path) -> list[Comparison]:
    model = write_model(folder / "llama")
    write_text(folder, 8 * PROCESSES, LENGTH)
    settings = {"task.name": "causal_lm", "task.model": model, "task.dataset": folder / "data", "max_steps": 2}
    settings |= {"task.sequence_length": LENGTH, "global_batch_size": PROCESSES}

    def ours() -> float:
        side = Side(train_py(settings, "fsdp", PROCESSES, "fp32"), folder / "ours").run()
        summary = side.output.summary
        assert (summary["parameters"], summary["step"]) == (PARAMETERS, 2)
        rmtree(side.folder)
        return max(summary["peak_memory_bytes"]) / 1e9

    def theirs() -> float:
        side = Side([*launch("fsdp", PROCESSES, "fp32"), *own("memory", "by_accelerate", model)[1:]], folder / "theirs")
        (peaks,) = re.findall(r"^peaks (.*)$", side.run().log, re.MULTILINE)
        rmtree(side.folder)
        return max(json.loads(peaks)) / 1e9

    mine, peers = in_turn(ROUNDS, ours, theirs)
    limit = [MOST_GB] * ROUNDS
    question = "peak memory: Llama of 284M from a folder, FSDP x4"
    return [
        Comparison(f"{question}, Accelerate's loop", "GB", mine, peers, 1, is_gain=False),
        Comparison(f"{question}, {MOST_GB} GB", "GB", mine, limit, 1, is_gain=False),
    ]


if __name__ == "__main__":
    pairs.main(measure, __doc__, {"by_accelerate": by_accelerate})
