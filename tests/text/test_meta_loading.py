"""Under FSDP no process reads, initializes, holds or writes more of a language model than its share and a tensor, and
its weights are those of one process.

The processes that are compared are started under an accelerate yaml with this file as their script.
"""

import ctypes
import gc
import os
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.utils import FullyShardedDataParallelPlugin, set_seed
from safetensors.torch import save_file
from torch import Tensor

import src.checkpoint.export
import src.checkpoint.resume
import src.training.run
from src.checkpoint.write import CheckpointWriter
from src.config.config import config_from
from src.config.errors import UserError
from src.config.groups import Optim
from src.distributed.accelerator import build_accelerator, prepare
from src.tasks import TASKS
from src.tasks.base import TaskState
from src.tasks.text import fine_tuning
from src.tasks.text.causal_lm import CausalLM
from src.tasks.text.text_classification import TextClassification
from src.training.gradients import to_local
from src.training.optim import build_optimizers
from tests.launching import Launch, slow
from tests.text import tiny
from tests.text.tiny import LLAMA

SCRIPT = "tests/text/test_meta_loading.py"
LARGE = {"hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 8, "vocab_size": 8_000}
LARGE |= {"num_attention_heads": 16, "num_key_value_heads": 16}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", LLAMA),
    "tied": ("llama", LLAMA | {"tie_word_embeddings": True}),
    "mixtral": ("mixtral", LLAMA | {"num_local_experts": 4}),
    "one expert": ("mixtral", LLAMA | {"num_local_experts": 1, "num_experts_per_tok": 1}),
    "gpt2": ("gpt2", {"n_embd": 32, "n_layer": 2, "n_head": 4}),
    "gemma3_text": ("gemma3_text", LLAMA | {"head_dim": 8, "sliding_window": 8}),
}
BF16_BASE = {"r": 2, "base_dtype": "bf16"}


def task_of(model: Path | str, lora: dict[str, Any]) -> Any:
    settings: Any = {"dataset": "none", "model": str(model), "sequence_length": 16, "dropout": 0.0, "lora": lora}
    if not str(model).endswith("bert"):
        return tiny.task(**settings)
    task = tiny.task(TextClassification, **settings)
    task.state.data["labels"] = ["a", "b"]
    return task


def pretrained(name: str, folder: Path, **fields: Any) -> Path:
    """Return a model in several files of bf16, with the byte tokenizer."""
    kind, own = KINDS[name]
    tiny.saved(kind, folder, torch.bfloat16, "20KB", **own | fields)
    assert len(list(folder.glob("*.safetensors"))) > 2
    return folder


@pytest.mark.parametrize("processes", [2, slow(4)])
def test_each_process_holds_its_share_of_one_processs_weights(
    launch: Launch, models: Path, tmp_path: Path, processes: int
) -> None:
    """From one file of fp32 or several of bf16, also under adapters."""
    folders = [models / "llama", models / "bert", *(pretrained(name, tmp_path / name) for name in KINDS)]
    run = launch("fsdp", *map(str, folders), script=SCRIPT, processes=processes).succeeded()
    assert run.stdout.count("equal") == 3 * len(folders)


def test_broken_files_are_refused_alike_before_anything_is_exchanged(tmp_path: Path) -> None:
    """In the words of one process, so none waits for another."""
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
    task = task_of(models / "llama", {"r": 2})
    half, full = torch.bfloat16, torch.float32
    for device, dtype, chosen in (("cuda", half, half), ("cuda", torch.float16, full), ("cpu", half, full)):
        bound = task.bind(TaskState(device, dtype))
        assert bound.with_adapters(bound.load_model()).get_input_embeddings().weight.dtype == chosen
        assert bound.lora.base_dtype is None  # config.yaml keeps what the user wrote, on any device
    with pytest.raises(UserError, match="base_dtype=bf16: needs --mixed_precision bf16 before train.py"):
        task_of(models / "llama", BF16_BASE).bind(TaskState())


def test_no_process_ever_holds_more_than_its_share_and_a_block(launch: Launch, made: Path, tmp_path: Path) -> None:
    """Of resident memory at its peak, above what there was before the model."""
    folder = pretrained("llama", tmp_path / "model", **LARGE)
    arguments = (
        "--task.name=causal_lm", f"--task.model={folder}", f"--task.dataset={made}/questions.jsonl",
        "--task.eval_fraction=0.02", "--task.sequence_length=16", "--global_batch_size=2",
    )  # fmt: skip
    found: list[tuple[str, int]] = []
    for steps in ("--max_steps=1", "--max_steps=2"):
        before = "import tests.text.test_meta_loading as test; test.measure()"
        run = launch("fsdp", *arguments, steps, folder=tmp_path / "run", processes=2, before=before).succeeded()
        lines = [line.split() for line in run.stdout.splitlines() if line.startswith("memory ")]
        found += [(phase, int(size)) for _, phase, size in lines]
    model = task_of(folder, {}).build_empty_model()[0].hf
    parts = (model, model.model.layers[0], model.lm_head)
    size, block, head = (4 * sum(parameter.numel() for parameter in part.parameters()) for part in parts)
    share, rest = size / 2, 1.5 * block + 100e6
    # parameters and AdamW's state; while a checkpoint is written, a copy of them; of an export, one share more
    most = {"load": share, "save": 6 * share, "export": 4 * share + head, "resume": 3 * share}
    assert {phase for phase, _ in found} == most.keys()
    for phase, peak in found:
        assert peak <= most[phase] + rest, phase


# ----------------------------------------------------------------------------------------------------- in the processes
def compare(accelerator: Accelerator, folder: str, lora: dict[str, Any]) -> None:
    """Assert that a model of FSDP, built without weights, has those of one process, and that this one holds its share
    of them, their gradients and AdamW's state."""
    accelerator.state.fsdp_plugin = FullyShardedDataParallelPlugin()  # it remembers the last model's blocks
    task = task_of(folder, lora)
    set_seed(0)
    whole, random = task.build_model(), torch.get_rng_state()
    set_seed(0)
    model, fill = task.build_empty_model()
    assert torch.equal(torch.get_rng_state(), random), "something else would be drawn next"
    model = prepare(accelerator, model)
    fill(model, accelerator.device)
    expected = dict(whole.named_parameters(remove_duplicate=False))
    found: dict[str, Any] = dict(model.named_parameters(remove_duplicate=False))
    assert found.keys() == expected.keys()
    for name, parameter in found.items():
        assert torch.equal(parameter.full_tensor(), expected[name]), name
        assert parameter.requires_grad == expected[name].requires_grad, name
        is_bf16 = "base_dtype" in lora and not parameter.requires_grad
        assert parameter.dtype == (torch.bfloat16 if is_bf16 else torch.float32), name
    buffers = zip(model.named_buffers(), whole.named_buffers(), strict=True)
    assert all(mine == theirs and torch.equal(a, b) for (mine, a), (theirs, b) in buffers)
    if lora or folder.endswith(("bert", "one expert")):  # the expert is the first process's alone
        return
    tokens = torch.arange(16)
    loss = model(index=tokens, targets=tokens.flip(0), input_ids=tokens[None], position_ids=tokens[None] % 8)
    accelerator.backward(loss)
    (optimizer,) = build_optimizers(Optim(), model)
    optimizer.step()
    held = [tensor for parameter in model.parameters() for tensor in (parameter, parameter.grad)]
    held += [tensor for state in optimizer.state.values() for tensor in state.values()]
    share = 1 / accelerator.num_processes + 0.05
    sizes = [to_local(tensor).nbytes for tensor in held if tensor is not None]
    assert sum(sizes) <= share * 16 * sum(parameter.numel() for parameter in whole.parameters())


def resident(what: str) -> int:
    """Return this process's memory in bytes, now (VmRSS) or at its peak (VmHWM)."""
    return int(Path("/proc/self/status").read_text().split(f"{what}:")[1].split()[0]) * 1024


def measure() -> None:
    """Print what each phase of a run adds to its memory at its peak; end it as soon as it has been resumed."""
    before = 0
    held: list[Tensor] = []

    def leave_holes() -> int:
        """Leave 262 MB of the heap free between blocks in use, in holes that are too small for what a save copies.
        Return the bytes in use."""
        blocks = [torch.ones(2**17) for _ in range(1000)]
        held.extend(blocks[::2])
        return sum(block.nbytes for block in held)

    def from_here() -> None:
        for thread in threading.enumerate():  # one that wrote a checkpoint holds it a moment longer than it tells
            if thread.name.startswith("AsyncCheckpointExecutor"):
                thread.join()
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)  # what is free counts no more
        Path("/proc/self/clear_refs").write_text("5")  # the peak is now what there is now

    def watch(phase: str, owner: Any, name: str) -> None:
        function = getattr(owner, name)

        def watched(first: Any, *arguments: Any, **more: Any) -> Any:
            nonlocal before
            if phase != "load":
                from_here()
            if phase == "save":
                before += leave_holes()
            result = function(first, *arguments, **more)
            if phase == "save":
                first.poll(wait=True)
            os.write(1, f"memory {phase} {resident('VmHWM') - before}\n".encode())
            before -= sum(block.nbytes for block in held)
            held.clear()
            if phase == "resume" and first.resume.checkpoint:
                first.accelerator.wait_for_everyone()
                os._exit(0)
            return result

        setattr(owner, name, watched)

    def new_model(*arguments: Any) -> Any:
        nonlocal before
        assert os.environ["THP_MEM_ALLOC_ENABLE"] == "1"  # else memory that is given back is slow to get again
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
    for folder in folders:
        for lora in ({}, BF16_BASE, {"r": 2}):
            compare(accelerator, folder, lora)
            accelerator.print("equal")
    accelerator.wait_for_everyone()
    accelerator.end_training()


if __name__ == "__main__":
    main(*sys.argv[1:])
