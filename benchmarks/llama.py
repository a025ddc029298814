"""What the peers of the language model benchmarks train: a Llama of transformers from scratch, with AdamW."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from src.data.byte_tokenizer import byte_tokenizer

if TYPE_CHECKING:  # who only compares them would wait for these imports
    from torch.optim import AdamW
    from transformers import LlamaForCausalLM

WEIGHT_DECAY = 0.01


def new_llama(shape: dict[str, int], length: int) -> LlamaForCausalLM:
    """With the byte tokenizer's vocabulary where `shape` names none; fp32, on the CPU, without a key-value cache, which
    of the peers only Trainer would switch off itself."""
    from transformers import LlamaConfig, LlamaForCausalLM

    tokenizer = byte_tokenizer()
    ids = {name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    fields: dict[str, Any] = {"vocab_size": len(tokenizer), "max_position_embeddings": length, **shape, **ids}
    model = LlamaForCausalLM(LlamaConfig(use_cache=False, **fields))
    assert model.config._attn_implementation == "sdpa"
    assert str(model.dtype) == "torch.float32"
    return model


def new_adamw(model: LlamaForCausalLM, lr: float) -> AdamW:
    """As train.py has it: vectors don't decay."""
    from torch.optim import AdamW

    parameters = list(model.parameters())
    matrices = {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": WEIGHT_DECAY}
    vectors = {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0}
    return AdamW([matrices, vectors], lr=lr, fused=True)


def counting_collator() -> Any:
    """Pads to the longest document of a batch; `tokens` are those that another one follows, `targets` to be learnt."""
    from transformers import DataCollatorForSeq2Seq

    class Counter(DataCollatorForSeq2Seq):
        tokens = targets = 0

        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            batch = super().__call__(*args, **kwargs)
            self.tokens += int((batch["attention_mask"].sum(1) - 1).sum())
            self.targets += int((batch["labels"][:, 1:] != -100).sum())
            return batch

    return Counter(byte_tokenizer())


def record(folder: Path, loss: float) -> None:
    """As train.py records the mean loss of an interval."""
    with (folder / "run" / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"train/loss": loss}) + "\n")
