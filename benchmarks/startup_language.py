"""A language model to the first step, as in Accelerate's examples: what the start-up of train.py is compared with.

    python -m benchmarks.startup_language TEXT TOKENIZER LENGTH BATCH ARCHITECTURE

TEXT is a file, TOKENIZER a folder, ARCHITECTURE the model's config, as JSON. As in transformers' run_clm_no_trainer.py,
`datasets` reads and tokenizes the text, and cuts it into sequences of LENGTH; the next time, it reads its cache.
"""

import json
import sys
from itertools import chain
from typing import Any

from accelerate import Accelerator
from datasets import load_dataset
from torch.optim import AdamW
from torch.utils.data import DataLoader
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, default_data_collator


def main(text: str, folder: str, length: int, batch: int, architecture: dict[str, Any]) -> None:
    accelerator = Accelerator(cpu=True)
    tokenizer: Any = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    rows: Any = load_dataset("text", data_files=text)["train"]

    def grouped(lines: dict[str, list[list[int]]]) -> dict[str, list[list[int]]]:
        tokens = [*chain(*lines["input_ids"])]
        sequences = [tokens[i : i + length] for i in range(0, len(tokens) // length * length, length)]
        return {"input_ids": sequences, "labels": sequences}

    tokenized = rows.map(lambda lines: tokenizer(lines["text"]), batched=True, remove_columns=["text"])
    dataset = tokenized.map(grouped, batched=True, remove_columns=tokenized.column_names)
    config = AutoConfig.for_model(**architecture, vocab_size=len(tokenizer), max_position_embeddings=length)
    auto: Any = AutoModelForCausalLM
    model = auto.from_config(config, trust_remote_code=False)
    optimizer = AdamW(model.parameters(), lr=1e-3)
    loader: Any = DataLoader(dataset, batch, shuffle=True, collate_fn=default_data_collator)
    model, optimizer, batches = accelerator.prepare(model, optimizer, loader)
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters")
    model.train()
    for inputs in batches:
        loss = model(**inputs).loss
        accelerator.backward(loss)
        optimizer.step()
        print(f"step 1/ loss {loss.item():.4f}", flush=True)
        break


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), json.loads(sys.argv[5]))
