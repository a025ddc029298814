"""Write the memory and speed of usual sizes of Llama on 1, 8 and 64 GPUs, as the plan has them, into plan/figures.md.

    python -m plan.benchmarks.sizes

Some minutes on two cores; no GPU is needed, and no weights.
"""

import json
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import LlamaConfig

from benchmarks.runs import PROJECT
from src.tasks.text.tokenizing import byte_tokenizer

PAGE = PROJECT / "plan/figures.md"
TABLE = re.compile(r"(?<=<!-- sizes -->\n).*?(?=<!-- /sizes -->)", re.DOTALL)
LENGTH = 4096
GPUS = {1: "single_gpu", 8: "fsdp", 64: "fsdp"}
"""The yaml for each number of GPUs."""


@dataclass(frozen=True)
class Size:
    """A shape of Llama."""

    name: str
    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    vocabulary: int
    is_tied: bool = False


SIZES = [
    Size("135M (SmolLM2)", 30, 576, 1536, 9, 3, 49152, is_tied=True),
    Size("1.2B (Llama 3.2)", 16, 2048, 8192, 32, 8, 128256, is_tied=True),
    Size("3.2B (Llama 3.2)", 28, 3072, 8192, 24, 8, 128256, is_tied=True),
    Size("8B (Llama 3.1)", 32, 4096, 14336, 32, 8, 128256),
    Size("70B (Llama 3.1)", 80, 8192, 28672, 64, 8, 128256),
]
GOALS = {"all weights": [], "LoRA": ["--task.lora.r=16"]}


def plan(size: Size, goal: list[str], folder: Path) -> dict[int, dict[str, Any]]:
    """Return plan.json's entry for each number of GPUs."""
    model = folder / "model"
    config = LlamaConfig(
        num_hidden_layers=size.layers,
        hidden_size=size.hidden,
        intermediate_size=size.intermediate,
        num_attention_heads=size.heads,
        num_key_value_heads=size.kv_heads,
        vocab_size=size.vocabulary,
        tie_word_embeddings=size.is_tied,
        max_position_embeddings=LENGTH,
    )
    config.save_pretrained(model)
    byte_tokenizer().save_pretrained(model)
    text = folder / "text.txt"
    text.write_text("to be or not to be, that is the question. " * 10_000)
    found = {}
    for gpus, yaml in GPUS.items():
        output = folder / f"{gpus}"
        words = ["--gpus", str(gpus), "--yamls", yaml, "--output", str(output), "--"]
        words += ["--task.name=causal_lm", f"--task.model={model}", f"--task.dataset={text}", *goal]
        words += [f"--task.sequence_length={LENGTH}", f"--global_batch_size={gpus}", "--activation_checkpointing=true"]
        command = [sys.executable, "-m", "plan", *words]
        subprocess.run(command, cwd=PROJECT, check=True, stdout=subprocess.DEVNULL)
        (entry, *_) = json.loads((output / "causal_lm" / "plan.json").read_text())
        found[gpus] = entry
    return found


def cells(entry: dict[str, Any]) -> list[str]:
    """Return memory and speed."""
    line = entry["line"]
    memory = f"{line['GB']:.1f}"
    speed = f"{line['tok/s/GPU']:,.0f}"
    return [memory, speed if entry["is_fitting"] else "none"]


def main() -> None:
    """Write the table."""
    lines = ["| model | trained | " + " | ".join(f"{n} GPU{'s' * (n > 1)}: GB | tokens/s" for n in GPUS) + " |"]
    lines.append("|---|---|" + "--:|" * 2 * len(GPUS))
    for size in SIZES:
        for goal, arguments in GOALS.items():
            with tempfile.TemporaryDirectory() as folder:
                found = plan(size, arguments, Path(folder))
            row = [size.name, goal, *(cell for entry in found.values() for cell in cells(entry))]
            lines.append("| " + " | ".join(row) + " |")
            print(lines[-1], flush=True)
    table = "".join(f"{line}\n" for line in lines)
    PAGE.write_text(TABLE.sub(table, PAGE.read_text()))


if __name__ == "__main__":
    main()
