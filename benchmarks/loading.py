"""How weights get onto the shards of FSDP: train.py's way (ours), and those that torch and transformers have.

    python -m benchmarks.loading [WAY ...] [--models MODEL ...]

On two gloo processes under fsdp.yaml in fp32: small models of several kinds, all in one pair of processes, and Llamas
and Mixtrals of 400 and 300 MB, each in a fresh pair for each way. They are in several files of bf16, and each process
has a copy of its own, as on a machine of its own. A line for each holds:

- other, of: how many weights and buffers are not bitwise those of `build_model`, which one process loads by
  `from_pretrained`; unsharded: how many parameters each process holds all of;
- anon: the peak of anonymous memory, which the kernel can't take back, while it loads, relative to the process's share
  of the weights in fp32; resident: with pages of files, which it can. The larger of both processes; for large models;
- read: what they read from the disk, relative to the files; cpu: seconds of the slower one.
"""

import argparse
import gc
import os
import re
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import torch
from accelerate import Accelerator
from accelerate.utils import FullyShardedDataParallelPlugin, gather_object, set_seed
from safetensors import safe_open
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMaskedLM
from transformers.distributed import DistributedConfig

from benchmarks.runs import Side, launch
from src.config.config import config_from
from src.distributed.accelerator import build_accelerator, prepare
from src.tasks import TASKS
from src.tasks.text.adapters import base_model
from src.tasks.text.causal_lm import CausalLM
from src.tasks.text.load import weight_files
from src.tasks.text.text_classification import TextClassification
from src.tasks.text.tokenizing import byte_tokenizer

TINY = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
BIG = {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 12, "num_attention_heads": 16}
MODELS: dict[str, dict[str, Any]] = {
    "llama": TINY,
    "llama tied": TINY | {"tie_word_embeddings": True},
    "llama adapters": TINY,
    "mixtral": TINY | {"num_local_experts": 4, "num_key_value_heads": 2},
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4},
    "gemma3_text": TINY | {"head_dim": 8, "num_key_value_heads": 2},
    "bert": TINY,
    "bert adapters": TINY,
    "llama big": BIG | {"vocab_size": 32_000},
    "mixtral big": BIG | {"num_local_experts": 4, "num_hidden_layers": 4, "num_key_value_heads": 8},
}


# -------------------------------------------------------------------------------- the ways, in each of the processes
def ours(task: Any, accelerator: Accelerator) -> Any:
    empty, fill = task.build_empty_model()
    model = prepare(accelerator, empty)
    fill(model, accelerator.device)
    return model


def whole(task: Any, accelerator: Accelerator) -> Any:
    """Every process loads all weights, and keeps its shards."""
    return prepare(accelerator, task.build_model())


def mapped(task: Any, accelerator: Accelerator) -> Any:
    """So too, but in the type of the files, which are mapped into memory: cast when they are sharded."""
    model = task.auto_class.from_pretrained(
        task.model, config=task._config, dtype="auto", ignore_mismatched_sizes=True, trust_remote_code=False
    )
    return prepare(accelerator, task.wrap(model)).float()


def broadcast(task: Any, accelerator: Accelerator, tensors_at_once: int = 1) -> Any:
    """The first process reads, set_model_state_dict broadcasts."""
    model = prepare(accelerator, task.build_empty_model()[0])
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True, strict=False)
    names, tensors = names_in_files(model), list(tensors_in(task))
    for start in range(0, len(tensors), tensors_at_once):
        some = {}
        for file, name in tensors[start : start + tensors_at_once] if accelerator.is_main_process else ():
            with safe_open(file, framework="pt") as opened:
                some[names.get(name, name)] = opened.get_tensor(name).float()
        set_model_state_dict(model, some, options=options)
    return model


def broadcast_all(task: Any, accelerator: Accelerator) -> Any:
    return broadcast(task, accelerator, 10**9)


def dcp(task: Any, accelerator: Accelerator) -> Any:
    """torch.distributed.checkpoint reads slices of the files."""
    model = prepare(accelerator, task.build_empty_model()[0])
    for name, parameter in list(model.named_parameters()):
        if parameter.is_meta:
            empty = {name: torch.empty_like(parameter, device=accelerator.device)}
            model.load_state_dict(empty, strict=False, assign=True)
    weights, names = model.state_dict(), names_in_files(model)
    known = {name: weights[names[name]] for _, name in tensors_in(task) if name in names}
    planner = checkpoint.DefaultLoadPlanner(allow_partial_load=True)
    checkpoint.load(known, storage_reader=checkpoint.HuggingFaceStorageReader(task.model), planner=planner)
    return model


def distributed_config(task: Any, accelerator: Accelerator) -> Any:
    """from_pretrained shards, by FSDP too; Accelerate is given what it returns."""
    how: dict[str, Any] = {"dtype": torch.float32, "ignore_mismatched_sizes": True}
    how["distributed_config"] = DistributedConfig(fsdp_size=accelerator.num_processes)
    model = task.auto_class.from_pretrained(task.model, config=task._config, **how, trust_remote_code=False)
    return prepare(accelerator, task.wrap(model))


def tensors_in(task: Any) -> Iterator[tuple[str, str]]:
    for file in weight_files(task.model, None):
        with safe_open(file, framework="pt") as opened:
            names = list(opened.keys())
        yield from ((file, name) for name in names)


def names_in_files(model: Any) -> dict[str, str]:
    """Return the names of the model's weights by those that they have without adapters."""
    own = [name for name in model.state_dict() if ".lora_" not in name]
    return {re.sub(r"^lm\.|base_model\.model\.|base_layer\.", "", name): name for name in own}


WAYS = {way.__name__: way for way in (ours, whole, mapped, broadcast, broadcast_all, dcp, distributed_config)}


def measure(ways: str, kinds: str, folder: str) -> None:
    """Measure these as one of the two; the first writes a line for each."""
    accelerator, _ = build_accelerator(config_from({"task": {"name": "mnist"}}, TASKS))
    for kind in kinds.split(","):
        for way in ways.split(","):
            accelerator.state.fsdp_plugin = FullyShardedDataParallelPlugin()  # it remembers the last model's blocks
            own = Path(folder, str(accelerator.process_index), kind)
            one, two = gather_object([measured(WAYS[way], kind, own, accelerator)])
            accelerator.print("FOUND", kind, "|", way, "|", {name: max(one[name], two[name]) for name in one})
    accelerator.wait_for_everyone()
    accelerator.end_training()


def task_of(kind: str, folder: Path) -> Any:
    settings: dict[str, Any] = {"dataset": "none", "model": str(folder), "sequence_length": 16, "dropout": 0.0}
    settings["lora"] = {"r": 2} if "adapters" in kind else {}
    if not kind.startswith("bert"):
        return CausalLM(**settings)
    task: Any = TextClassification(**settings)
    task.state.data["labels"] = ["a", "b"]
    return task


def measured(way: Any, kind: str, folder: Path, accelerator: Accelerator) -> dict[str, Any]:
    for file in folder.iterdir():
        with file.open() as opened:
            os.fsync(opened.fileno())
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    task = task_of(kind, folder)
    set_seed(0)
    process, peak, is_done = psutil.Process(), [0, 0], threading.Event()
    gc.collect()
    accelerator.wait_for_everyone()
    before, read, cpu = process.memory_info(), process.io_counters().read_bytes, time.process_time()

    def watch() -> None:
        while not is_done.wait(0.001):
            now = process.memory_info()
            peak[0] = max(peak[0], now.rss - now.shared - before.rss + before.shared)
            peak[1] = max(peak[1], now.rss - before.rss)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        model = way(task, accelerator)
        base_model(task.hf_model(model)).tie_weights()
    except Exception as error:  # both processes have it
        return {"error": f"{type(error).__name__}: {error}"[:200]}
    finally:
        is_done.set()
        watcher.join()
    cpu, read = time.process_time() - cpu, process.io_counters().read_bytes - read
    set_seed(0)
    whole = task.build_model()
    expected = dict(whole.named_parameters(remove_duplicate=False)) | dict(whole.named_buffers())
    found = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers())
    unsharded = [n for n, p in model.named_parameters() if not isinstance(p, DTensor)]
    other = []
    for name, value in expected.items():
        mine = found.get(name)
        if isinstance(mine, DTensor):
            mine = None if mine.is_meta else mine.full_tensor()
        if mine is None or mine.is_meta or mine.dtype != value.dtype or not torch.equal(mine, value):
            other.append(name)
    share = 4 * sum(p.numel() for p in whole.parameters()) / accelerator.num_processes
    size = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    counts = {"of": len(expected), "other": len(other), "unsharded": len(unsharded)}
    ratios = {"anon": peak[0] / share, "resident": peak[1] / share, "read": read / size, "cpu": cpu}
    return counts | {name: round(value, 2) for name, value in ratios.items()}


# ----------------------------------------------------------------------------------------------- in the parent process
def write_model(kind: str, folder: Path) -> None:
    tokenizer = byte_tokenizer()
    special = {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("bos", "eos", "pad")}
    auto: Any = AutoModelForMaskedLM if kind.startswith("bert") else AutoModelForCausalLM
    fields = {"vocab_size": len(tokenizer), "max_position_embeddings": 256, **special} | MODELS[kind]
    model = auto.from_config(
        AutoConfig.for_model(kind.split()[0], **fields), dtype=torch.bfloat16, trust_remote_code=False
    )
    model.save_pretrained(folder, max_shard_size="50MB" if "big" in kind else "20KB")
    tokenizer.save_pretrained(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("ways", nargs="*", default=list(WAYS), metavar="WAY", help=", ".join(WAYS))
    parser.add_argument("--models", nargs="*", default=list(MODELS))
    chosen = parser.parse_args()
    small = [kind for kind in chosen.models if "big" not in kind]
    big = [kind for kind in chosen.models if "big" in kind]
    with tempfile.TemporaryDirectory() as folder:
        for kind in chosen.models:
            write_model(kind, Path(folder, "0", kind))
        shutil.copytree(Path(folder, "0"), Path(folder, "1"))
        runs = [(",".join(chosen.ways), ",".join(small))] if small else []
        for ways, kinds in [*runs, *((way, kind) for kind in big for way in chosen.ways)]:
            command = [*launch("fsdp", 2), "-m", "benchmarks.loading", "--process", ways, kinds, folder]
            side = Side(command, Path(folder, "work"))
            side.run()
            print("\n".join(line for line in side.log.splitlines() if line.startswith("FOUND")), flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--process"]:
        measure(*sys.argv[2:])
    else:
        main()
