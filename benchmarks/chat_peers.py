"""What a packed `make chat` is compared with: transformers' Trainer and TRL's SFTTrainer, as their docs have them.

    PYTHON -m benchmarks.chat_peers trainer|trl PLAN

Started in a folder of its own, next to data/train.jsonl; PLAN is JSON. It needs torch, transformers, datasets and peft,
and trl: nothing of this project. Every `every` steps it prints the real tokens and the loss of those steps, and at the
end what it did in all.

Both have their defaults (8 chats per step, padded to the longest; AdamW; gradients clipped), except for fp32 and
recomputed activations, which SFTTrainer would have, and the loss, which only the assistant's turns enter, as here: trl
by `assistant_only_loss`, Trainer by the mask that `apply_chat_template` returns.
"""

import json
import resource
import sys
from collections import Counter
from importlib import import_module
from typing import Any

import torch
from datasets import Dataset, load_dataset
from peft import LoraConfig, get_peft_model
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DataCollatorForSeq2Seq,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

TEMPLATE = """\
{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' }}{% if message.role == 'assistant' %}\
{% generation %}{{ message.content + '<|im_end|>\n' }}{% endgeneration %}{% else %}\
{{ message.content + '<|im_end|>\n' }}{% endif %}{% endfor %}"""
"""chatml, as configs/chat_lora.yaml has it, with the assistant's turns marked."""


class Recorder(TrainerCallback):
    """Counts what the model is given and returns, so that no trainer can be wrong about it."""

    def __init__(self, every: int) -> None:
        self.every, self.total, self.interval = every, Counter[str](), Counter[str]()

    def watch(self, model: Any) -> None:
        model.register_forward_hook(self._count, with_kwargs=True)
        self.parameters = sum(weight.numel() for weight in model.parameters() if weight.requires_grad)
        assert {weight.dtype for weight in model.parameters()} == {torch.float32}

    def _count(self, module: Any, args: Any, inputs: dict[str, Any], output: Any) -> None:
        targets = int((inputs["labels"][:, 1:] != -100).sum())
        self.interval["tokens"] += int(inputs["attention_mask"].sum())
        self.interval["padded_tokens"] += inputs["input_ids"].numel()
        self.interval["targets"] += targets
        self.interval["loss"] += output.loss.item() * targets

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step % self.every == 0:
            mean = self.interval["loss"] / self.interval["targets"]
            print(f"tokens {self.interval['tokens']} loss {mean}", flush=True)
            self.total += self.interval
            self.interval.clear()

    def tell(self, steps: int) -> None:
        self.total += self.interval
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        print("work", json.dumps({"steps": steps, "peak": peak, "parameters": self.parameters, **self.total}))


def train_by_trainer(plan: dict[str, Any], chats: Dataset, tokenizer: Any, recorder: Recorder) -> Trainer:
    """Tokenize by the chat template, pad each batch, and train with Trainer's defaults."""

    def tokenized(row: dict[str, Any]) -> dict[str, Any]:
        encoded = tokenizer.apply_chat_template(row["messages"], return_dict=True, return_assistant_tokens_mask=True)
        mask = encoded.pop("assistant_masks")
        labels = [token if is_target else -100 for token, is_target in zip(encoded["input_ids"], mask, strict=True)]
        return {**encoded, "labels": labels}

    model = AutoModelForCausalLM.from_pretrained(plan["model"], dtype=torch.float32, trust_remote_code=False)
    return Trainer(
        get_peft_model(model, LoraConfig(**plan["lora"])),
        TrainingArguments(use_cpu=True, **arguments(plan)),
        train_dataset=chats.map(tokenized, remove_columns=chats.column_names),
        data_collator=DataCollatorForSeq2Seq(tokenizer),
        callbacks=[recorder],
    )


def train_by_trl(plan: dict[str, Any], chats: Dataset, tokenizer: Any, recorder: Recorder) -> Trainer:
    """Give the chats to SFTTrainer."""
    trl: Any = import_module("trl")  # of another environment
    options = {"bf16": False, "gradient_checkpointing": False, "assistant_only_loss": True}
    return trl.SFTTrainer(
        plan["model"],
        trl.SFTConfig(use_cpu=True, **options, **arguments(plan)),
        train_dataset=chats,
        processing_class=tokenizer,
        peft_config=LoraConfig(**plan["lora"]),
        callbacks=[recorder],
    )


def arguments(plan: dict[str, Any]) -> dict[str, Any]:
    """Return those that aren't defaults."""
    quiet = {"output_dir": "trainer", "save_strategy": "no", "report_to": "none", "disable_tqdm": True}
    rate = {"learning_rate": plan["lr"], "lr_scheduler_type": "constant"}
    return {"num_train_epochs": 1, "per_device_train_batch_size": plan["batch"], **rate, **quiet}


def main(name: str, words: str) -> None:
    plan = json.loads(words)
    tokenizer = AutoTokenizer.from_pretrained(plan["model"], trust_remote_code=False)
    tokenizer.chat_template = TEMPLATE
    chats: Any = load_dataset("json", data_files="../data/train.jsonl", split="train")
    recorder = Recorder(plan["every"])
    train = {"trainer": train_by_trainer, "trl": train_by_trl}[name]
    trainer = train(plan, chats, tokenizer, recorder)
    recorder.watch(trainer.model)
    trainer.train()
    recorder.tell(trainer.state.global_step)


if __name__ == "__main__":
    main(*sys.argv[1:])
