"""What benchmarks/gpu.py starts in processes of its own: what train.py is compared with, and the ladder of sizes.

    python -m benchmarks.gpu_peers trainer|plain|padded FOLDER
    accelerate launch --config_file accelerate_configs/fsdp.yaml --num_processes 1 -m benchmarks.gpu_peers ladder FOLDER

Each reads FOLDER/plan.json, written by benchmarks/gpu.py, and writes FOLDER/<name>.json, the ladder a line per size.
"""

from __future__ import annotations

import gc
import json
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import numpy as np
import torch

from benchmarks.llama import WEIGHT_DECAY, counting_collator, new_adamw, new_llama

if TYPE_CHECKING:
    from torch import Tensor

LR, SEED = 1e-4, 0


@dataclass(frozen=True)
class Plan:
    """The same for train.py and for what it is compared with."""

    shape: dict[str, int]
    """Fields of LlamaConfig."""
    length: int
    """Tokens of a sequence."""
    micro: int
    """Sequences, or padded documents, per forward pass."""
    accumulation: int
    """Forward passes per step."""
    interval: int
    """Steps between two records of the loss; the ladder's steps."""
    epochs: int = 1
    is_cuda: bool = True
    sizes: tuple[int, ...] = ()
    """Of the ladder: numbers of layers to train. The first two show how memory grows, and so what the largest will be;
    the others are left out where they are larger."""
    most: int = 0
    """Layers that the ladder must not go beyond, because of the CPU's memory."""
    ends_at: float = 0.0
    """When the ladder has to be done, in time.time()'s seconds."""


class Watch:
    """A fresh model, and what a training of it did: counted in the model, so that no loop can be wrong about it."""

    def __init__(self, plan: Plan) -> None:
        from transformers import set_seed

        assert torch.cuda.is_available() == plan.is_cuda
        set_seed(SEED)
        self.model = new_llama(plan.shape, plan.length)
        self.model.register_forward_pre_hook(self._count, with_kwargs=True)
        self.model.model.layers[0].mlp.down_proj.register_forward_hook(self._look_inside)
        self.plan = plan
        self.tokens, self.steps = 0, 0
        self.ends: list[float] = []
        self.losses: list[float] = []
        self.dtype, self.device = torch.float32, "cpu"

    def take_time(self) -> None:
        """The GPU is behind the CPU: it has to arrive here too."""
        if self.plan.is_cuda:
            torch.cuda.synchronize()
        self.ends.append(time.perf_counter())

    def work(self) -> dict[str, Any]:
        return {
            "parameters": sum(p.numel() for p in self.model.parameters() if p.requires_grad),
            "steps": self.steps,
            "tokens": self.tokens,
            "device": self.device,
            "precision": {torch.float32: "fp32", torch.bfloat16: "bf16"}[self.dtype],
        }

    def _count(self, module: Any, inputs: Any, arguments: dict[str, Any]) -> None:
        self.tokens += arguments["input_ids"].numel()

    def _look_inside(self, module: Any, inputs: Any, output: Tensor) -> None:
        self.dtype, self.device = output.dtype, output.device.type


def sequences(folder: Path) -> Any:
    rows = torch.from_numpy(np.load(folder / "sequences.npy"))
    return [{"input_ids": row, "labels": row} for row in rows]


def write(folder: Path, name: str, **found: Any) -> None:
    (folder / f"{name}.json").write_text(json.dumps(found))


def trainer_arguments(plan: Plan, folder: Path, **fields: Any) -> Any:
    from transformers import TrainingArguments

    return TrainingArguments(
        output_dir=str(folder / "trainer"),
        use_cpu=not plan.is_cuda,
        bf16=True,
        per_device_train_batch_size=plan.micro,
        gradient_accumulation_steps=plan.accumulation,
        num_train_epochs=plan.epochs,
        optim="adamw_torch_fused",
        learning_rate=LR,
        weight_decay=WEIGHT_DECAY,
        lr_scheduler_type="constant",
        max_grad_norm=0,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        seed=SEED,
        **fields,
    )


# -------------------------------------------------------------------------------------------------- full sequences
def trainer(plan: Plan, folder: Path) -> None:
    """The Trainer of transformers: its defaults, but for the order of the data, which is ours."""
    from torch.utils.data import SequentialSampler
    from transformers import Trainer, TrainerCallback

    class InOrder(Trainer):
        def _get_train_sampler(self, *_: Any) -> SequentialSampler:
            return SequentialSampler(self.train_dataset)  # type: ignore[arg-type]

    class Record(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            watch.steps = state.global_step
            if state.global_step % plan.interval == 0:
                watch.take_time()

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
            if "loss" in logs:
                watch.losses.append(float(logs["loss"]))  # rounded to four digits or so

    watch = Watch(plan)
    arguments = trainer_arguments(plan, folder, logging_steps=plan.interval)
    InOrder(watch.model, arguments, train_dataset=sequences(folder), callbacks=[Record()]).train()
    write(folder, "trainer", work=watch.work(), losses=watch.losses, speeds=speeds(watch))


def plain(plan: Plan, folder: Path) -> None:
    """A loop on Accelerate as transformers' run_clm_no_trainer.py has it."""
    from accelerate import Accelerator
    from torch.utils.data import DataLoader
    from transformers import get_scheduler

    watch = Watch(plan)
    accelerator = Accelerator(
        cpu=not plan.is_cuda, mixed_precision="bf16", gradient_accumulation_steps=plan.accumulation
    )
    optimizer: Any = new_adamw(watch.model, LR)
    scheduler: Any = get_scheduler("constant", optimizer)
    loader: Any = DataLoader(sequences(folder), batch_size=plan.micro, pin_memory=plan.is_cuda)
    model: Any = watch.model
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    model.train()
    total, passes = torch.zeros((), device=accelerator.device), plan.interval * plan.accumulation
    for batch in loader:
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        total += loss.detach()
        if accelerator.sync_gradients:
            watch.steps += 1
            if watch.steps % plan.interval == 0:
                watch.take_time()
                watch.losses.append(total.item() / passes)
                total.zero_()
    write(folder, "plain", work=watch.work(), losses=watch.losses, speeds=speeds(watch))


def speeds(watch: Watch) -> list[float]:
    """Tokens per second of each interval but the first."""
    plan = watch.plan
    tokens = plan.interval * plan.accumulation * plan.micro * plan.length
    return [tokens / seconds for seconds in np.diff(watch.ends).tolist()]


# ------------------------------------------------------------------------------------------------ padded documents
def padded(plan: Plan, folder: Path) -> None:
    """The Trainer of transformers, batches padded to their longest document, in random order, as it does by default."""
    from transformers import Trainer, TrainerCallback

    from benchmarks.packing import tokenised

    class Clock(TrainerCallback):
        def on_epoch_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            watch.take_time()

        def on_epoch_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            watch.take_time()
            watch.steps = state.global_step

    watch = Watch(plan)
    documents: Any = tokenised(folder)
    collator = counting_collator()
    arguments = trainer_arguments(plan, folder, logging_strategy="epoch")
    Trainer(watch.model, arguments, data_collator=collator, train_dataset=documents, callbacks=[Clock()]).train()
    work = watch.work() | {"tokens": collator.tokens, "targets": collator.targets}
    seconds = np.diff(watch.ends).tolist()[::2]  # of the epochs, not of what is between them
    epoch = collator.tokens / plan.epochs
    write(folder, "padded", work=work, padded_tokens=watch.tokens, speeds=[epoch / s for s in seconds[1:]])


# ---------------------------------------------------------------------------------------------------------- ladder
def ladder(plan: Plan, folder: Path) -> None:
    """Trains sizes one after the other under the yaml of the launcher, with train.py's own step: build, prepare, three
    steps; no data set, checkpoint and export, which would take most of the time."""
    from src.launch import build_accelerator

    accelerator, launch = build_accelerator()
    free = torch.cuda.mem_get_info()[0] if plan.is_cuda else 10_000_000
    trained: list[dict[str, Any]] = []

    def climb(layers: int, is_largest: bool = False) -> bool:
        """Returns: whether it trained."""
        slowest = max((rung["took"] / rung["layers"] for rung in trained[1:]), default=0.0)  # the first one imports
        rung: dict[str, Any] = {"layers": layers, "is_largest": is_largest, "precision": launch.precision}
        rung["strategy"] = launch.strategy
        if time.time() + 1.2 * slowest * layers > plan.ends_at:
            rung["no_time"] = True
        else:
            rung |= train_layers(accelerator, plan, folder, layers)
        if "seconds" in rung:
            trained.append(rung)
        with (folder / "ladder.json").open("a") as file:
            file.write(json.dumps(rung) + "\n")
        return "seconds" in rung

    for layers in plan.sizes[:2]:
        assert climb(layers), "not even the smallest sizes"
    first, second = trained
    per_layer = (second["peak"] - first["peak"]) / (second["layers"] - first["layers"])
    fitting = first["layers"] + int((0.95 * free - first["peak"]) / max(per_layer, 1))  # 95%: there are always gaps
    largest = min(fitting, plan.most)
    for layers in sorted(set(plan.sizes[2:])):
        if second["layers"] < layers < largest:
            climb(layers)
    for layers in (largest, round(largest * 0.95), round(largest * 0.88)):
        if climb(layers, is_largest=True):
            break


def train_layers(accelerator: Any, plan: Plan, folder: Path, layers: int) -> dict[str, Any]:
    """Returns: its parameters, the GPU's peak memory, and seconds per step; `out_of_memory` where it doesn't fit."""
    started = time.time()
    try:
        result = three_steps(accelerator, plan, folder, layers)
    except torch.OutOfMemoryError:
        result = {"out_of_memory": True}
    from src.optim import parameters_of

    parameters_of.cache_clear()  # it keeps the last model
    accelerator.free_memory()
    gc.collect()
    if plan.is_cuda:
        torch.cuda.empty_cache()
    return result | {"took": time.time() - started}


def three_steps(accelerator: Any, plan: Plan, folder: Path, layers: int) -> dict[str, Any]:
    from src.batches import MicroBatch
    from src.config import load_config
    from src.launch import prepare
    from src.optim import Schedule, build_optimizers
    from src.progress import Progress
    from train import optimizer_step

    shape = plan.shape | {"num_hidden_layers": layers}
    settings = {
        "global_batch_size": plan.micro,
        "output_dir": folder / "none",
        "task.name": "causal_lm",
        "task.dataset": folder / "data",
        "task.sequence_length": plan.length,
        "task.architecture": json.dumps({"model_type": "llama", **shape}),
        "optim.lr": LR,
        "optim.schedule": "constant",
        "optim.warmup_steps": 0,
    }
    config = load_config([f"--{name}={value}" for name, value in settings.items()])
    if plan.is_cuda:
        torch.cuda.reset_peak_memory_stats()
    model = build(config.task)
    parameters = sum(p.numel() for p in model.parameters())
    model, optimizers = prepare(accelerator, model, build_optimizers(config.optim, model, accelerator.is_fsdp2))
    tokens = torch.randint(3, 256, (plan.micro, plan.length))
    batch = {
        "input_ids": tokens,
        "position_ids": torch.arange(plan.length).repeat(plan.micro, 1),
        "index": torch.arange(tokens.numel()),
        "targets": tokens.flatten().roll(-1),
        "tokens": tokens.numel(),
    }
    progress, stop, ends = Progress(loss_scale=1.0), SimpleNamespace(is_made=False), [time.perf_counter()]
    model.train()
    for _ in range(plan.interval):
        window = [MicroBatch(batch, plan.micro)]
        optimizer_step(accelerator, config, model, optimizers, progress, window, Schedule(100, 100), stop)  # type: ignore[arg-type]
        if plan.is_cuda:
            torch.cuda.synchronize()
        ends.append(time.perf_counter())
    assert progress.updates == plan.interval, "a step was skipped: AdamW's state may be missing"
    peak = torch.cuda.max_memory_allocated() if plan.is_cuda else 16 * parameters  # --smoke: something that grows
    seconds = statistics.median(np.diff(ends).tolist()[1:])  # the first one allocates
    return {"parameters": parameters, "peak": peak, "seconds": seconds}


def build(task: Any) -> Any:
    """The task's model, with other first weights: to draw billions of normal numbers takes a CPU a minute. A million of
    them, again and again, do for three steps."""
    from transformers.initialization import no_init_weights

    from src.models import architecture

    def new_model(*arguments: Any) -> Any:
        with no_init_weights():
            model = usual(*arguments)
        block = torch.randn(2**20) * 0.02
        for parameter in model.parameters():
            flat = parameter.data.view(-1)
            if parameter.ndim < 2:
                flat.fill_(1.0)  # of norms
                continue
            for part in flat.split(len(block)):
                part.copy_(block[: len(part)])
        return model

    usual = architecture.new_model
    with patch.object(architecture, "new_model", new_model):
        return task.build_model()


if __name__ == "__main__":
    side, where = {f.__name__: f for f in (trainer, plain, padded, ladder)}[sys.argv[1]], Path(sys.argv[2])
    side(Plan(**json.loads((where / "plan.json").read_text())), where)
