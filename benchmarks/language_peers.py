"""What language models are compared with: the Trainer of transformers, and a plain loop on Accelerate.

    python -m benchmarks.language_peers trainer|plain|saves

Started in a folder of its own, next to plan.json and the data. Each writes run/metrics.jsonl as train.py does, with a
loss and a time per interval, and work.json at the end.
"""

import json
import os
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from accelerate import Accelerator, PartialState
from accelerate.utils import DistributedType
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader

from benchmarks.language import SAVES, SEED, WEIGHT_DECAY, Plan
from src.tasks.text.tokenizing import byte_tokenizer

IS_SHARDED = "ACCELERATE_USE_FSDP" in os.environ


def new_llama(plan: Plan) -> transformers.LlamaForCausalLM:
    """Return one in fp32, on the CPU, without a key-value cache, which of the peers only Trainer would switch off."""
    tokenizer = byte_tokenizer()
    ids = {name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    fields: Any = {"vocab_size": len(tokenizer), "max_position_embeddings": plan.length, **plan.shape, **ids}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(use_cache=False, **fields))
    assert model.config._attn_implementation == "sdpa"
    return model


class Peer:
    """A fresh model, and what a training of it did: counted in the model, so that no loop can be wrong about it."""

    def __init__(self) -> None:
        self.plan = plan = Plan(**json.loads(Path("../plan.json").read_text()))
        self.processes, self.is_main = int(os.environ.get("WORLD_SIZE", "1")), os.environ.get("RANK", "0") == "0"
        assert torch.cuda.is_available() == plan.is_cuda
        self.passes_per_step = plan.batch // (plan.micro * self.processes)
        transformers.set_seed(SEED)
        self.model = new_llama(plan)
        self.model.model.layers[0].mlp.down_proj.register_forward_hook(self._count)
        self.dataset: Any = [{"input_ids": row, "labels": row} for row in torch.from_numpy(np.load("../sequences.npy"))]
        self.tokens, self.dtype, self.device = 0, torch.float32, "cpu"
        Path("run").mkdir(exist_ok=True)

    def _count(self, module: Any, inputs: Any, output: Tensor) -> None:
        self.tokens += output.shape[:2].numel()
        self.dtype, self.device = output.dtype, output.device.type

    def record(self, loss: float) -> None:
        """Write the mean loss of an interval, and when it ended: the GPU has to arrive there too. `peak` is the most
        bytes of the GPU that torch's allocator has given out."""
        if self.plan.is_cuda:
            torch.cuda.synchronize()
        line = {"train/loss": loss, "time": time.time(), "peak": torch.cuda.max_memory_allocated()}
        if self.is_main:
            with Path("run/metrics.jsonl").open("a") as file:
                file.write(json.dumps(line) + "\n")

    def finish(self, steps: int) -> None:
        """Write work.json. Make sure that the model was sharded if it should have been."""
        assert all(isinstance(p, DTensor) == IS_SHARDED for p in self.model.parameters())
        parameters = sum(p.numel() for p in self.model.parameters() if p.requires_grad)
        precision = {torch.float32: "fp32", torch.bfloat16: "bf16"}[self.dtype]
        work = {"parameters": parameters, "step": steps, "device": self.device, "precision": precision}
        if self.is_main:
            Path("work.json").write_text(json.dumps(work | {"tokens": self.tokens * self.processes}))


def train_by_trainer(peer: Peer) -> None:
    """Train with its defaults but for what the plan says, on sequences in our order."""

    class Record(transformers.TrainerCallback):
        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
            if "loss" in logs:
                peer.record(float(logs["loss"]))  # rounded to four digits or so

    plan = peer.plan
    optim: dict[str, Any] = {"optim": "adamw_torch_fused", "learning_rate": plan.lr, "lr_scheduler_type": "constant"}
    optim |= {"weight_decay": WEIGHT_DECAY, "max_grad_norm": 0}
    optim |= {"per_device_train_batch_size": plan.micro, "gradient_accumulation_steps": peer.passes_per_step}
    optim |= {"train_sampling_strategy": "sequential", "num_train_epochs": 1, "seed": SEED}
    quiet = {"logging_steps": plan.interval, "save_strategy": "no", "report_to": "none", "disable_tqdm": True}
    how: Any = {"use_cpu": not plan.is_cuda, "bf16": plan.precision == "bf16"} | optim | quiet
    arguments = transformers.TrainingArguments("trainer", **how)
    assert arguments.device.type == ("cuda" if plan.is_cuda else "cpu")
    sharded_on_cpu()  # once more, as finding out the device has made Accelerate forget it
    trainer = transformers.Trainer(peer.model, arguments, train_dataset=peer.dataset, callbacks=[Record()])
    trainer.train()
    peer.finish(trainer.state.global_step)


def train_by_plain_loop(peer: Peer) -> None:
    """Train as one would who reads Accelerate's documentation, with train.py's optimizer: vectors don't decay."""
    plan, passes = peer.plan, peer.passes_per_step
    mixed = plan.precision.replace("fp32", "no")
    accelerator = Accelerator(cpu=not plan.is_cuda, mixed_precision=mixed, gradient_accumulation_steps=passes)
    matrices, vectors = ([p for p in peer.model.parameters() if (p.ndim >= 2) == is_matrix] for is_matrix in (1, 0))
    groups = [{"params": matrices, "weight_decay": WEIGHT_DECAY}, {"params": vectors, "weight_decay": 0.0}]
    optimizer: Any = AdamW(groups, lr=plan.lr, fused=True)
    loader: Any = DataLoader(peer.dataset, batch_size=plan.micro, pin_memory=plan.is_cuda)
    model, optimizer, loader = accelerator.prepare(peer.model, optimizer, loader)
    model.train()
    scheduler: Any = accelerator.prepare(LambdaLR(optimizer, lambda _: 1.0))
    loss_sum: Any = 0.0
    per_record = plan.interval * passes
    for done, batch in enumerate(loader, start=1):
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        loss_sum += loss.detach()
        if done % per_record == 0:
            peer.record(accelerator.gather(loss_sum).mean().item() / per_record)
            loss_sum = torch.zeros_like(loss_sum)
    peer.finish(len(loader) // passes)


def save_states(peer: Peer) -> None:
    """Take a step, then print the milliseconds that each of some saves takes."""
    accelerator = Accelerator(cpu=True)
    model, optimizer = accelerator.prepare(peer.model, AdamW(peer.model.parameters()))
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    for _ in range(SAVES + 1):
        started = time.perf_counter()
        accelerator.save_state("saved")
        print(f"(paused {1e3 * (time.perf_counter() - started):.0f} ms)", flush=True)
        shutil.rmtree("saved")


def sharded_on_cpu() -> None:
    """Let Accelerate shard on a CPU where the launcher asks for FSDP: it only does for what looks like a GPU job."""
    if IS_SHARDED:
        PartialState(cpu=True)._shared_state["distributed_type"] = DistributedType.MULTI_GPU


if __name__ == "__main__":
    sharded_on_cpu()
    {"trainer": train_by_trainer, "plain": train_by_plain_loop, "saves": save_states}[sys.argv[1]](Peer())
