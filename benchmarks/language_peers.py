"""What language models are compared with: the Trainer of transformers, and a plain Accelerate loop.

    python -m benchmarks.language_peers sequential|random|group_by_length|plain

Started in a folder of its own, next to plan.json and the data. Each writes run/metrics.jsonl as train.py does, with a
loss and a time per interval, and work.json at the end.
"""

import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from accelerate import Accelerator
from torch import Tensor
from torch.optim import AdamW
from torch.utils.data import DataLoader

from benchmarks.language import SEED, WEIGHT_DECAY, Plan, tokenised
from src.tasks.text.byte_tokenizer import byte_tokenizer


def new_llama(shape: dict[str, Any], length: int) -> transformers.LlamaForCausalLM:
    """Return one in fp32, on the CPU, without a key-value cache, which of the peers only Trainer would switch off."""
    tokenizer = byte_tokenizer()
    ids = {name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    fields: dict[str, Any] = {"vocab_size": len(tokenizer), "max_position_embeddings": length, **shape, **ids}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(use_cache=False, **fields))
    assert model.config._attn_implementation == "sdpa"
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    return model


class CountingCollator(transformers.DataCollatorForSeq2Seq):
    """Pads to a batch's longest document; `tokens` are those that another one follows, `targets` are to be learnt."""

    tokens = targets = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        batch = super().__call__(*args, **kwargs)
        self.tokens += int((batch["attention_mask"].sum(1) - 1).sum())
        self.targets += int((batch["labels"][:, 1:] != -100).sum())
        return batch


class Peer:
    """A fresh model, and what a training of it did: counted in the model, so that no loop can be wrong about it."""

    def __init__(self) -> None:
        self.plan = plan = Plan(**json.loads(Path("../plan.json").read_text()))
        assert torch.cuda.is_available() == plan.is_cuda
        transformers.set_seed(SEED)
        self.model = new_llama(plan.shape, plan.length)
        self.model.model.layers[0].mlp.down_proj.register_forward_hook(self._count)
        self.dataset: Any
        if Path("../sequences.npy").exists():
            rows = torch.from_numpy(np.load("../sequences.npy"))
            self.dataset = [{"input_ids": row, "labels": row} for row in rows]
        else:
            self.dataset = tokenised(Path(".."))
        self.tokens = self.steps = self.passes = 0
        self.loss: Any = 0.0
        self.dtype, self.device = torch.float32, "cpu"
        Path("run").mkdir()

    def loader(self) -> Any:
        return DataLoader(self.dataset, batch_size=self.plan.micro, pin_memory=self.plan.is_cuda)

    def optimizer(self) -> AdamW:
        """Return train.py's: vectors don't decay."""
        parameters = list(self.model.parameters())
        matrices = {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": WEIGHT_DECAY}
        vectors = {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0}
        return AdamW([matrices, vectors], lr=self.plan.lr, fused=True)

    def count(self, loss: Tensor) -> None:
        """Call it after each pass, in a loop that doesn't record by itself."""
        self.passes += 1
        self.steps = self.passes // self.plan.passes
        self.loss += loss.detach()
        per_record = self.plan.interval * self.plan.passes
        if self.passes % per_record == 0:
            self.record(self.loss.item() / per_record)
            self.loss = 0.0

    def record(self, loss: float) -> None:
        """Write the mean loss of an interval, and when it ended: the GPU has to arrive there too."""
        if self.plan.is_cuda:
            torch.cuda.synchronize()
        with Path("run/metrics.jsonl").open("a") as file:
            file.write(json.dumps({"train/loss": loss, "time": time.time()}) + "\n")

    def finish(self, **counted: int) -> None:
        """Write work.json."""
        work = {
            "parameters": sum(p.numel() for p in self.model.parameters() if p.requires_grad),
            "steps": self.steps,
            "tokens": self.tokens,
            "device": self.device,
            "precision": {torch.float32: "fp32", torch.bfloat16: "bf16"}[self.dtype],
        }
        Path("work.json").write_text(json.dumps(work | counted))

    def _count(self, module: Any, inputs: Any, output: Tensor) -> None:
        self.tokens += output.shape[:2].numel()
        self.dtype, self.device = output.dtype, output.device.type


def train_trainer(strategy: str, peer: Peer) -> None:
    """Train with its defaults but for what the plan says, on sequences in our order or on padded documents."""

    class Record(transformers.TrainerCallback):
        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
            if "loss" in logs:
                peer.steps = state.global_step
                peer.record(float(logs["loss"]))  # rounded to four digits or so

    plan, has_documents = peer.plan, strategy != "sequential"
    collator = CountingCollator(byte_tokenizer())
    arguments = transformers.TrainingArguments(
        output_dir="trainer",
        use_cpu=not plan.is_cuda,
        bf16=plan.precision == "bf16",
        per_device_train_batch_size=plan.micro,
        gradient_accumulation_steps=plan.passes,
        train_sampling_strategy=strategy,
        num_train_epochs=plan.epochs,
        optim="adamw_torch_fused",
        learning_rate=plan.lr,
        weight_decay=WEIGHT_DECAY,
        lr_scheduler_type="constant",
        max_grad_norm=0,
        logging_strategy="epoch" if has_documents else "steps",
        logging_steps=plan.interval,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        seed=SEED,
    )
    extra: dict[str, Any] = {"data_collator": collator, "processing_class": byte_tokenizer()} if has_documents else {}
    transformers.Trainer(peer.model, arguments, train_dataset=peer.dataset, callbacks=[Record()], **extra).train()
    counted = {"tokens": collator.tokens, "targets": collator.targets, "padded_tokens": peer.tokens}
    peer.finish(**(counted if has_documents else {}))


def train_plain(peer: Peer) -> None:
    """Train as transformers' run_clm_no_trainer.py does."""
    on_cpu, precision, passes = not peer.plan.is_cuda, peer.plan.precision.replace("fp32", "no"), peer.plan.passes
    accelerator = Accelerator(cpu=on_cpu, mixed_precision=precision, gradient_accumulation_steps=passes)
    optimizer: Any = peer.optimizer()
    scheduler: Any = transformers.get_scheduler("constant", optimizer)
    model: Any = peer.model
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, peer.loader(), scheduler)
    model.train()
    for batch in loader:
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        peer.count(loss)
    peer.finish()


if __name__ == "__main__":
    if sys.argv[1] == "plain":
        train_plain(Peer())
    else:
        train_trainer(sys.argv[1], Peer())
