"""Under FSDP no process reads, initializes, holds or writes more of a language model than its share and a tensor.

The processes that are compared are started under an accelerate yaml with this file as their script.
"""

import ctypes
import gc
import os
import sys
import threading
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from accelerate import Accelerator
from accelerate.utils import FullyShardedDataParallelPlugin, set_seed
from safetensors.torch import save_file

import src.checkpoint.export
import src.checkpoint.resume
import src.training.run
from src.checkpoint.write import CheckpointWriter
from src.config.config import config_from
from src.config.errors import UserError
from src.config.groups import Optim
from src.distributed.accelerator import build_accelerator, prepare, sharded_units
from src.tasks import TASKS
from src.tasks.base import TaskState
from src.tasks.text import fine_tuning, loss
from src.tasks.text.causal_lm import CausalLM
from src.tasks.text.text_classification import TextClassification
from src.training.gradients import to_local
from src.training.optim import build_optimizers
from tests.launching import Launch, slow
from tests.text import tiny
from tests.text.tiny import LLAMA

SHAPES: dict[str, dict[str, Any]] = {
    "70M": {"hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 8, "vocab_size": 8_000},
    "400M": {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 26, "vocab_size": 32_000},
}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", LLAMA),
    "tied": ("llama", LLAMA | {"tie_word_embeddings": True}),
    "mixtral": ("mixtral", LLAMA | {"num_local_experts": 4}),
    "one expert": ("mixtral", LLAMA | {"num_local_experts": 1, "num_experts_per_tok": 1}),
    "gpt2": ("gpt2", {"n_embd": 32, "n_layer": 2, "n_head": 4}),
    "gemma3_text": ("gemma3_text", LLAMA | {"head_dim": 8, "sliding_window": 8}),
}
M_MMAP_THRESHOLD = -3  # malloc.h
BF16_BASE = {"r": 2, "base_dtype": "bf16"}


def task_of(model: Path | str, lora: dict[str, Any]) -> Any:
    settings: Any = {"dataset": "none", "model": str(model), "sequence_length": 16, "dropout": 0.0, "lora": lora}
    if not str(model).endswith("bert"):
        return tiny.task(**settings)
    task = tiny.task(TextClassification, **settings)
    task.state.data["labels"] = ["a", "b"]
    return task


def pretrained(name: str, folder: Path, **fields: Any) -> Path:
    """A model in several files of bf16, and the byte tokenizer."""
    kind, own = KINDS[name]
    tiny.saved(kind, folder, torch.bfloat16, "20KB", **own | fields)
    assert len(list(folder.glob("*.safetensors"))) > 2
    return folder


@pytest.mark.parametrize("processes", [2, slow(4)])
def test_each_weight_is_bitwise_as_on_one_process(launch: Launch, models: Path, tmp_path: Path, processes: int) -> None:
    """From one file of fp32 or several of bf16, also under adapters. Decoders have the whole one's loss and gradients,
    and its part of the bytes between steps. Tried without: weights that a process has no row of."""
    folders = [models / "llama", models / "bert", *(pretrained(name, tmp_path / name) for name in KINDS)]
    words = [*map(str, folders)]
    run = launch("fsdp", *words, script="tests/text/test_meta_loading.py", processes=processes).succeeded()
    assert run.stdout.count("equal") == 2 * len(folders) + 2


def test_files_that_are_broken_are_refused_before_anything_is_exchanged(tmp_path: Path) -> None:
    """On each process alike, in the words of one process alone, so none waits for another."""
    folder = pretrained("tied", tmp_path / "model")
    file = min(folder.glob("*.safetensors"))
    save_file({}, file, {"format": "pt"})  # it had the embeddings; tied ones are named too, if neither is there
    missing = "missing or have another shape: lm_head.weight, model.em"
    for says in (missing, "cannot be loaded: ", "cannot be loaded: No such file"):
        for build in (CausalLM.build_model, CausalLM.build_empty_model):
            with pytest.raises(UserError, match=f"^[^\n]*{says}[^\n]*$"):
                build(task_of(folder, {}))
        file.write_bytes(b"cut off") if says == missing else file.unlink(missing_ok=True)


def test_frozen_weights_are_bf16_where_a_gpu_computes_in_it(models: Path) -> None:
    for device, dtype, chosen in (
        ("cuda", torch.bfloat16, "bf16"), ("cuda", torch.float16, "fp32"), ("cpu", torch.bfloat16, "fp32"),
    ):  # fmt: skip
        task = task_of(models / "llama", {"r": 2}).bind(TaskState(device, dtype))
        adapted = task.with_adapters(task.load_model())
        assert adapted.get_input_embeddings().weight.dtype == getattr(
            torch, {"bf16": "bfloat16", "fp32": "float32"}[chosen]
        )
        assert task.state.optimizations == [f"frozen weights in {chosen}"]
        assert task.lora.base_dtype is None  # config.yaml says what the user wrote, on any device
    with pytest.raises(UserError, match="base_dtype=bf16: needs --mixed_precision bf16 before train.py"):
        task_of(models / "llama", BF16_BASE).bind(TaskState())


@pytest.mark.parametrize(("shape", "processes"), [("70M", 2), slow("400M", 4)])
def test_no_process_ever_holds_more_than_its_share_and_a_block(
    launch: Launch, made: Path, tmp_path: Path, shape: str, processes: int
) -> None:
    """Of resident memory at its peak, above what there was before the model. Tried with files that stay open, with
    gradients for all of the optimizer's state at once (at 400M), and with one file for the whole model and a malloc
    that keeps what is freed (at 70M). At 400M, holes in malloc's heap are up to 220 MB, so no tensor is put there."""
    heads = {"num_attention_heads": 16, "num_key_value_heads": 16}
    folder = pretrained("llama", tmp_path / "model", **heads, **SHAPES[shape])
    arguments = (
        "--task.name=causal_lm", f"--task.model={folder}", f"--task.dataset={made}/questions.jsonl",
        "--task.eval_fraction=0.02", "--task.sequence_length=16", f"--global_batch_size={processes}",
    )  # fmt: skip
    lines: list[list[str]] = []
    for steps in ("--max_steps=1", "--max_steps=2"):
        before = f"import tests.text.test_meta_loading as test; test.measure(exactly={shape == '400M'})"
        run = launch("fsdp", *arguments, steps, folder=tmp_path / "run", processes=processes, before=before).succeeded()
        lines += [line.split() for line in run.stdout.splitlines() if line.startswith("memory ")]
    empty = task_of(folder, {}).build_empty_model()
    assert empty
    model = empty[0].hf
    sizes = [4 * sum(p.numel() for p in part.parameters()) for part in (model, model.model.layers[0], model.lm_head)]
    share, block, head = sizes[0] / processes, *sizes[1:]
    rest = 1.5 * block + 100e6
    # parameters and AdamW's state; while a checkpoint is written, a copy of them; of an export, one share more
    most = {"load": share, "save": 6 * share, "export": 4 * share + head, "resume": 3 * share}
    found = [(phase, int(size)) for _, phase, size in lines]
    assert {phase for phase, _ in found} == most.keys()
    for phase, size in found:
        assert size <= most[phase] + rest, phase


def compare(accelerator: Accelerator, folder: str, lora: dict[str, Any]) -> None:
    """Assert that a model of FSDP, built without weights, has those that one process would have."""
    accelerator.state.fsdp_plugin = FullyShardedDataParallelPlugin()  # it remembers the last model's blocks
    task = task_of(folder, lora)
    set_seed(0)
    whole, random = task.build_model(), torch.get_rng_state()
    set_seed(0)
    empty = task.build_empty_model()
    assert empty
    model, fill = empty
    assert torch.equal(torch.get_rng_state(), random), "something else would be drawn next"
    drawn = sum(parameter.numel() for parameter in model.parameters() if not parameter.is_meta)
    assert drawn < 0.1 * sum(parameter.numel() for parameter in model.parameters())
    model = prepare(accelerator, model)
    fill(model, accelerator.device)
    expected = dict(whole.named_parameters(remove_duplicate=False))
    found: dict[str, Any] = dict(model.named_parameters(remove_duplicate=False))
    assert found.keys() == expected.keys()
    for name, parameter in found.items():
        assert torch.equal(parameter.full_tensor(), expected[name]), name
        assert parameter.requires_grad == expected[name].requires_grad, name
        is_frozen = not parameter.requires_grad
        assert (parameter.dtype == torch.bfloat16) == (is_frozen and "base_dtype" in lora), name
    buffers = zip(model.named_buffers(), whole.named_buffers(), strict=True)
    assert all(mine == theirs and torch.equal(a, b) for (mine, a), (theirs, b) in buffers)
    if lora or not isinstance(task, CausalLM):
        return
    assert len(sharded_units(model)) == 5  # two blocks, embedding and head (together, if they are tied), and the rest
    expected_loss = a_loss(whole)
    expected_loss.backward()
    with patch.object(loss, "CHUNK", 5 * 258):  # five tokens at a time
        sharded_loss = a_loss(model)
    accelerator.backward(sharded_loss)
    assert sharded_loss.item() == pytest.approx(expected_loss.item(), rel=1e-5)
    for name, parameter in found.items():
        gradient: Any = expected[name].grad
        assert (parameter.grad.full_tensor() - gradient).norm() <= 1e-5 * gradient.norm(), name
    (optimizer,) = build_optimizers(Optim(), model)
    optimizer.step()
    if folder.endswith("one expert"):  # it is the first process's alone
        return
    share = 1 / accelerator.num_processes + 0.05
    assert held(model, optimizer) <= share * 16 * sum(weight.numel() for weight in whole.parameters())


def held(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """The bytes of this process's parameters, gradients and optimizer state."""
    tensors = [tensor for parameter in model.parameters() for tensor in (parameter, parameter.grad)]
    tensors += [tensor for state in optimizer.state.values() for tensor in state.values()]
    return sum(to_local(tensor).nbytes for tensor in tensors if tensor is not None)


def a_loss(model: torch.nn.Module) -> torch.Tensor:
    """Of two documents in a row."""
    tokens = torch.arange(16)
    return model(index=tokens, targets=tokens.flip(0), input_ids=tokens[None], position_ids=tokens[None] % 8)


def resident(what: str) -> int:
    """This process's memory in bytes, now (VmRSS) or at its peak (VmHWM)."""
    return int(Path("/proc/self/status").read_text().split(f"{what}:")[1].split()[0]) * 1024


def measure(exactly: bool) -> None:
    """Print what each phase of a run adds to its memory at its peak; end it as soon as it has been resumed. `exactly`:
    without what malloc keeps for later, as it gives each tensor back to the kernel."""
    before = 0

    def from_here() -> None:
        for thread in threading.enumerate():  # a thread that wrote a checkpoint holds it a moment longer than it tells
            if thread.name.startswith("AsyncCheckpointExecutor"):
                thread.join()
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)  # what is free counts no more
        Path("/proc/self/clear_refs").write_text("5")  # the peak is now what there is now

    def watch(phase: str, owner: Any, name: str) -> None:
        function = getattr(owner, name)

        def watched(first: Any, *arguments: Any, **more: Any) -> Any:
            if phase != "load":
                from_here()
            if exactly:  # from here on: the run has set its own threshold meanwhile
                ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 1 << 16)
            result = function(first, *arguments, **more)
            if phase == "save":
                first.poll(wait=True)
            os.write(1, f"memory {phase} {resident('VmHWM') - before}\n".encode())
            if phase == "resume" and first.resume.checkpoint:
                first.accelerator.wait_for_everyone()
                os._exit(0)
            return result

        setattr(owner, name, watched)

    def new_model(*arguments: Any) -> Any:
        nonlocal before
        from_here()
        before = resident("VmRSS")
        return build(*arguments)

    build, src.training.run.new_model = src.training.run.new_model, new_model  # type: ignore[assignment]
    watch("load", fine_tuning, "fill_shards")
    watch("save", CheckpointWriter, "save")
    watch("export", src.checkpoint.export, "export_model")
    watch("resume", src.checkpoint.resume, "load_checkpoint")


def main(*folders: str) -> None:
    accelerator, _ = build_accelerator(config_from({"task": {"name": "mnist"}}, TASKS))
    for number, folder in enumerate(folders):
        adapters: list[dict[str, Any]] = [BF16_BASE, {"r": 2}]
        for lora in ({}, *adapters[: 2 if number < 2 else 1]):  # over fp32: of a decoder, of a classifier
            compare(accelerator, folder, lora)
            accelerator.print("equal")
    accelerator.wait_for_everyone()
    accelerator.end_training()


if __name__ == "__main__":
    main(*sys.argv[1:])
