"""Compare the plan with published measurements of runs. plan/figures.md has the table, and explains its misses.

    python -m plan.benchmarks.published                      all of them, in a table: 13 minutes on one core
    python -m plan.benchmarks.published --only llm.c Qwen    those whose names have one of these words

No GPU is needed, and no weights.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.runs import PROJECT
from plan import show
from plan.gpus import find_gpu
from plan.measure import Setup, environment_for
from plan.search import explore
from src.config.config import load_config
from src.tasks import TASKS
from src.tasks.text.load import new_config
from src.tasks.text.tokenizing import byte_tokenizer

GB, GIB = 1e9, 2**30
NONE, FULL = (False,), (True,)
SELECTIVE = (False, True)
"""Activation checkpointing of some operators or blocks. train.py has it for all or for none, which are its bounds."""
EAGER, COMPILED = (False,), (True,)
UNKNOWN = (False, True)
"""The source does not say whether the model was compiled: the bounds."""
ENDLESS = 10_000
"""GiB of a GPU on which a run that doesn't fit is measured all the same."""
SPARE = 1.2
"""Text that is written per token of a step: a tenth is kept for the evaluation."""


@dataclass(frozen=True)
class Run:
    """A published run, and what comes nearest to it here."""

    name: str
    source: str
    gpus: int
    gpu: str
    """Name in gpus.yaml."""
    yaml: str
    """Accelerate yaml of ours."""
    model: dict[str, Any]
    """The architecture."""
    length: int
    """Tokens of a sequence."""
    micro: int
    """Sequences per forward pass of a process."""
    checkpointing: tuple[bool, ...]
    compiled: tuple[bool, ...]
    accumulation: int = 1
    memory: float | None = None
    """Bytes of a GPU at most; None: not published."""
    counter: str = "allocated"
    """What was counted: allocated or reserved by torch, or unknown."""
    tokens: float | None = None
    """Tokens per second and GPU; None: not published."""
    adapters: tuple[str, ...] = ()
    """Arguments of train.py for adapters, beside weights that are there already; none: all weights are trained."""


def llama(layers: int, hidden: int, intermediate: int, heads: int, kv_heads: int, vocabulary: int) -> dict[str, Any]:
    """Return the architecture of a Llama."""
    return {
        "model_type": "llama",
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocabulary,
    }


def gpt2(layers: int, hidden: int, heads: int, vocabulary: int, **more: Any) -> dict[str, Any]:
    """Return the architecture of a GPT-2 without dropout, whose GELU is a single kernel."""
    shape = {"n_layer": layers, "n_embd": hidden, "n_head": heads, "vocab_size": vocabulary}
    dropout = {"attn_pdrop": 0, "embd_pdrop": 0, "resid_pdrop": 0}
    return {"model_type": "gpt2", "activation_function": "gelu_pytorch_tanh", **shape, **dropout, **more}


LLAMA_1_1B = llama(22, 2048, 5632, 32, 4, 32000)
LLAMA_3_2_3B = llama(28, 3072, 8192, 24, 8, 128256) | {"head_dim": 128, "tie_word_embeddings": True}
LLAMA_2_7B = llama(32, 4096, 11008, 32, 32, 32000)
LLAMA_3_8B = llama(32, 4096, 14336, 32, 8, 128256)
LLAMA_2_13B = llama(40, 5120, 13824, 40, 40, 32000)
LLAMA_2_70B = llama(80, 8192, 28672, 64, 8, 32000)
LLAMA_3_70B = llama(80, 8192, 28672, 64, 8, 128256)
PHI_1_5 = llama(24, 2048, 8192, 32, 32, 51200) | {"model_type": "phi", "hidden_act": "gelu_pytorch_tanh"}
QWEN_7B = llama(32, 4096, 11008, 32, 32, 151936) | {"model_type": "qwen2"}
QWEN_1_8B = llama(24, 2048, 5504, 16, 16, 151936) | {"model_type": "qwen2"}
NANOCHAT_D24 = gpt2(24, 1536, 12, 32768, n_inner=6144, activation_function="relu2", tie_word_embeddings=False)

TITAN = "pytorch/torchtitan"
TITAN_H100 = f"{TITAN} benchmarks/llama3_h100_202412_torchtitan.md"
TITAN_LLAMA_2 = f"{TITAN} docs/performance.md at 395a526"
TITAN_LLAMA_3 = f"{TITAN} docs/performance.md at 9515a14"
FMS = "foundation-model-stack/fms-fsdp README.md at ed74fd5"
LITGPT = "Lightning-AI/litgpt tutorials/resource-tables.md"
TORCHTUNE = "pytorch/torchtune README.md"
QWEN = "QwenLM/Qwen README.md"
LLM_C = "karpathy/llm.c scripts"

ADAPTERS_8 = ("--task.lora.r=8", "--task.lora.target_modules=[q_proj, v_proj]")
ADAPTERS_64 = ("--task.lora.r=64",)


def torchtitan() -> Iterator[Run]:
    """Yield Llamas under FSDP2."""
    for gpus, compiled, memory, tokens in (
        (8, EAGER, 82.4, 5762),
        (8, COMPILED, 77.0, 6667),
        (128, EAGER, 67.0, 5605),
        (128, COMPILED, 62.0, 6514),
    ):
        name = f"torchtitan Llama 3.1 8B{', compiled' if compiled == COMPILED else ''}, H100 96 GB"
        place = (TITAN_H100, gpus, "h100_96gb", "fsdp")
        found: dict[str, Any] = {"memory": memory * GIB, "counter": "reserved", "tokens": tokens}
        yield Run(name, *place, LLAMA_3_8B, 8192, 2, SELECTIVE, compiled, **found)
    for model, says, source, length, micro, checkpointing, tokens in (
        (LLAMA_3_8B, "Llama 3 8B", TITAN_LLAMA_3, 8192, 1, SELECTIVE, 2973),
        (LLAMA_3_70B, "Llama 3 70B", TITAN_LLAMA_3, 8192, 1, FULL, 331),
        (LLAMA_2_13B, "Llama 2 13B", TITAN_LLAMA_2, 4096, 2, NONE, 2162),
        (LLAMA_2_13B, "Llama 2 13B, selective", TITAN_LLAMA_2, 4096, 2, SELECTIVE, 1904),
        (LLAMA_2_70B, "Llama 2 70B, selective", TITAN_LLAMA_2, 4096, 1, SELECTIVE, 355),
        (LLAMA_2_70B, "Llama 2 70B, full", TITAN_LLAMA_2, 4096, 2, FULL, 353),
    ):
        place = (source, 64, "a100", "fsdp")
        yield Run(f"torchtitan {says}, A100", *place, model, length, micro, checkpointing, UNKNOWN, tokens=tokens)


def pretraining() -> Iterator[Run]:
    """Yield models from scratch of other projects."""
    for gpus, gpu, tokens in ((128, "a100", 4550), (96, "h100", 9600)):
        name = f"fms-fsdp 7B, {gpu.upper()}"
        yield Run(name, FMS, gpus, gpu, "hsdp", LLAMA_2_7B, 4096, 2, NONE, COMPILED, tokens=tokens)
    source = "jzhang38/TinyLlama README.md"
    place = (source, 16, "a100_40gb", "fsdp")
    yield Run("TinyLlama 1.1B, A100 40 GB", *place, LLAMA_1_1B, 2048, 8, NONE, COMPILED, tokens=24000)
    for gpu, tokens in (("a100", 218453), ("h100", 468114)):
        place = (f"{LLM_C}/run_gpt2_124M.sh", 8, gpu, "ddp")
        name = f"llm.c GPT-2 124M, {gpu.upper()}"
        yield Run(name, *place, gpt2(12, 768, 12, 50304), 1024, 64, NONE, COMPILED, tokens=tokens)
    place = (f"{LLM_C}/run_gpt2_774M.sh", 8, "a100", "fsdp_grad_op")
    model = gpt2(36, 1280, 20, 50304)
    yield Run("llm.c GPT-2 774M, A100", *place, model, 1024, 32, NONE, COMPILED, accumulation=2, tokens=38551)
    place = (f"{LLM_C}/run_gpt2_1558M.sh", 8, "h100", "fsdp_grad_op")
    model = gpt2(48, 1600, 25, 50304)
    yield Run("llm.c GPT-2 1558M, H100", *place, model, 1024, 16, NONE, COMPILED, accumulation=8, tokens=46811)
    place = ("karpathy/nanoGPT README.md", 8, "a100_40gb", "ddp")
    model = gpt2(12, 768, 12, 50304)
    yield Run("nanoGPT 124M, A100 40 GB", *place, model, 1024, 12, NONE, COMPILED, accumulation=5, tokens=106667)
    place = ("karpathy/nanochat dev/LEADERBOARD.md", 8, "h100", "ddp")
    shape = (NANOCHAT_D24, 2048, 16)
    yield Run("nanochat d24, H100", *place, *shape, NONE, COMPILED, accumulation=2, tokens=99979)


def fine_tuning() -> Iterator[Run]:
    """Yield models that are fine-tuned, whole or by adapters."""
    for says, checkpointing, memory, tokens in (
        ("compiled, chunked loss", NONE, 42.9, 9174),
        ("activation checkpointing too", FULL, 24.9, 7210),
    ):
        place = (TORCHTUNE, 1, "a100", "single_gpu")
        found: dict[str, Any] = {"memory": memory * GIB, "tokens": tokens}
        yield Run(f"torchtune Llama 3.2 3B, {says}", *place, LLAMA_3_2_3B, 4096, 2, checkpointing, COMPILED, **found)
    for model, says, length, micro, memory in (
        (LLAMA_2_7B, "Llama 2 7B", 1304, 1, 21.30),
        (LLAMA_2_7B, "Llama 2 7B", 1304, 2, 29.07),
        (LLAMA_2_13B, "Llama 2 13B", 1304, 1, 38.12),
        (PHI_1_5, "phi-1.5", 1044, 1, 4.82),
        (PHI_1_5, "phi-1.5", 1044, 4, 10.68),
    ):
        name, place = f"LitGPT LoRA {says}, micro-batch {micro}", (LITGPT, 1, "a100_40gb", "single_gpu")
        found = {"accumulation": 128 // micro, "memory": memory * GB, "adapters": ADAPTERS_8}
        yield Run(name, *place, model, length, micro, NONE, EAGER, **found)
    for model, says, length, memory, seconds, adapters in (
        (QWEN_7B, "LoRA Qwen 7B", 2048, 23.8, 5.2, ADAPTERS_64),
        (QWEN_7B, "LoRA Qwen 7B", 8192, 36.6, 21.3, ADAPTERS_64),
        (QWEN_1_8B, "LoRA Qwen 1.8B", 2048, 11.0, 1.7, ADAPTERS_64),
        (QWEN_1_8B, "LoRA Qwen 1.8B", 8192, 21.8, 6.8, ADAPTERS_64),
        (QWEN_1_8B, "Qwen 1.8B", 2048, 43.5, 2.3, ()),
        (QWEN_1_8B, "Qwen 1.8B", 8192, 48.3, 5.6, ()),
    ):
        name, place = f"{says}, {length} tokens", (QWEN, 1, "a100", "single_gpu")
        found = {"memory": memory * GB, "counter": "unknown", "tokens": 8 * length / seconds, "adapters": adapters}
        yield Run(name, *place, model, length, 1, FULL, EAGER, accumulation=8, **found)


RUNS = [*torchtitan(), *pretraining(), *fine_tuning()]


def arguments(run: Run, folder: Path) -> list[str]:
    """Return the arguments of train.py for this run, and write the files that they name into the folder."""
    tokens = run.micro * run.accumulation * run.gpus * run.length
    text = folder / "text.txt"
    text.write_text("a" * int(SPARE * tokens + 20 * run.length))  # a single document: all sequences are full
    model = ["--task.architecture=" + json.dumps(run.model)]
    if run.adapters:
        tokenizer = byte_tokenizer()
        tokenizer.save_pretrained(folder)
        new_config(run.model, tokenizer, run.length).save_pretrained(folder)
        model = [f"--task.model={folder}"]
    return [
        "--task.name=causal_lm",
        f"--task.dataset={text}",
        *model,
        f"--task.sequence_length={run.length}",
        f"--global_batch_size={run.micro * run.accumulation * run.gpus}",
        f"--micro_batch_size={run.micro}",
        f"--output_dir={folder}/run",
        *run.adapters,
    ]


def predict(run: Run) -> list[dict[str, Any]]:
    """Return the plan's figures for the run, with and without each option that the source leaves open."""
    found = []
    gpu = find_gpu(run.gpu)
    with tempfile.TemporaryDirectory() as folder:
        own = arguments(run, Path(folder))
        for is_checkpointed in run.checkpointing:
            words = [*own, f"--activation_checkpointing={str(is_checkpointed).lower()}"]
            words += ["--compile=true"] if run.compiled == COMPILED else []
            config = load_config(words, TASKS)
            setup = Setup(tuple(words), f"accelerate_configs/{run.yaml}.yaml", run.gpus, gpu)
            row = explore(setup)
            is_fitting = row.is_fitting and row.measured is not None and row.measured.micro_batch == run.micro
            if not is_fitting and not row.reason:
                row = explore(replace(setup, gpu=gpu.model_copy(update={"memory_gib": ENDLESS})))
            if row.reason or not row.measured:
                raise RuntimeError(f"{run.name}: {row.reason}")
            for is_compiled in run.compiled:
                # where it is not known, the model is measured without the compiler
                numbers = show.line(row, config.model_copy(update={"compile": is_compiled}))
                allocated, reserved = row.measured.memory["step"]
                memory = {"allocated": allocated, "reserved": reserved, "is_fitting": is_fitting}
                found.append({**memory, "tokens": numbers["tok/s/GPU"]})
    return found


def in_own_process(number: int) -> list[dict[str, Any]]:
    """Predict a run in a process whose GPUs are of its kind: they take the place of CUDA's libraries before these are
    loaded."""
    gpu = find_gpu(RUNS[number].gpu)
    environment = {**os.environ, **environment_for(gpu), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-m", "plan.benchmarks.published", f"--row={number}"]
    done = subprocess.run(command, cwd=PROJECT, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{RUNS[number].name}: {done.stderr[-3000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def span(values: list[float], form: str) -> str:
    """Return the lowest and the highest value, or the only one."""
    ends = [format(min(values), form), format(max(values), form)]
    return " to ".join(dict.fromkeys(ends))


def line(run: Run, found: list[dict[str, Any]]) -> str:
    """Return a run's line of the table."""
    counter = "reserved" if run.counter == "reserved" else "allocated"
    memory = [prediction[counter] for prediction in found]
    tokens = [prediction["tokens"] for prediction in found]
    fits = {prediction["is_fitting"] for prediction in found}
    says = {(True,): "", (False,): ", too much", (False, True): ", or too much"}[tuple(sorted(fits))]
    cells = [
        run.name,
        str(run.gpus),
        f"{run.memory / GB:.1f} {run.counter}" if run.memory else "fits",
        span([number / GB for number in memory], ".1f") + says,
        span([number / run.memory for number in memory], ".2f") if run.memory else "",
        f"{run.tokens:,.0f}" if run.tokens else "",
        span(tokens, ",.0f") if run.tokens else "",
        span([number / run.tokens for number in tokens], ".2f") if run.tokens else "",
    ]
    return f"| {' | '.join(cells)} |"


HEADER = """\
| run | GPUs | memory published, GB | predicted | ratio | tokens/s/GPU published | predicted | ratio |
|---|---|---|---|---|---|---|---|"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=[""], help="words in the names of runs")
    parser.add_argument("--row", type=int, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.row is not None:
        print(json.dumps(predict(RUNS[chosen.row])))
        return
    print(HEADER)
    for number, run in enumerate(RUNS):
        if any(word in run.name for word in chosen.only):
            print(line(run, in_own_process(number)), flush=True)


if __name__ == "__main__":
    main()
