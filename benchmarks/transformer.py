"""Is the transformer trained at least as fast as by Trainer, Lightning, Fabric and a plain Accelerate loop? On the CPU.

    pip install -r benchmarks/requirements.txt
    python -m benchmarks.transformer

A Llama of 10.8 million parameters, 8 sequences of 256 tokens per step, one process with 2 threads. Ours is train.py
under `accelerate launch`, in bf16 also with --compile=true (its layers, one by one; the peers stay eager). The peers
are the `Trainer` of transformers, the `Trainer` of Lightning, a loop on Lightning Fabric, and a loop on Accelerate as
transformers' run_clm_no_trainer.py has it. Ours is compared with whichever of them has the best median; the others are
printed too.

All sides are in processes of their own, and all but one of them are stopped (SIGSTOP). Each starts, trains its first
interval of 4 steps, which is not counted (compiling, first allocations), and then one interval per round, in turn: a
pair is measured within seconds. A speed is the tokens of an interval over the time from a process's go-ahead until it
has written the interval's record. Starting, evaluation, saving and export are not in it.

Equal work, each asserted: the same config and number of parameters, fp32 weights, matrix products in the same precision
(bf16: by autocast), the same number of steps and of tokens, and the mean training loss of every interval within 1%,
which it is only with the same first weights, the same sequences in the same order, and the same optimizer: fused AdamW
at a constant learning rate, no clipping, no dropout, no decay of vectors. Different, since it is how each is written:
ours packs documents (all sequences are full here, so there is nothing to pack) and learns from 256 targets per
sequence, the others from 255, since the model shifts the labels; ours and Trainer compute the gradients' norm at each
step. The peers' model keeps no key-value cache, which only Trainer would switch off itself.

Where the time goes: nearly all of a step is matrix products and attention; of 370 ms in bf16, 172 and 114. A loop adds
little, and frameworks lie within 3% of each other. What makes ours faster are the products: on AMD's CPUs with AVX-512
by oneDNN in place of MKL (src/mkl.py), which halves the time of products in fp32 and of attention in bf16. The
gradients' norm and their scaling take 7 ms.
"""

import json
import random
import statistics
import tempfile
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks import pairs
from benchmarks.llama import WEIGHT_DECAY, new_adamw, new_llama, record
from benchmarks.pairs import Comparison, in_turn
from benchmarks.turns import CORES, SEED, launch, sides
from src.data.byte_tokenizer import byte_tokenizer

if TYPE_CHECKING:  # the processes that train import these; this one would wait for them to no end
    from torch import Tensor
    from torch.optim import AdamW

LENGTH, BATCH, INTERVAL, ROUNDS = 256, 8, 4, 3
SHAPE = {
    "hidden_size": 384,
    "intermediate_size": 1024,
    "num_hidden_layers": 6,
    "num_attention_heads": 6,
    "num_key_value_heads": 6,
}
LR = 1e-3


# -------------------------------------------------------------------------------------------------------------- data
def generated(size: int, source: random.Random) -> str:
    """`size` bytes of words that a model can learn: a few are frequent, most are rare."""
    words = ["".join(source.choices("etaoinshrdlu", k=source.randint(1, 8))) for _ in range(1000)]
    return " ".join(source.choices(words, weights=[1 / rank for rank in range(1, 1001)], k=size))[:size]


def prepare(folder: Path) -> None:
    """Writes a text that makes exactly the batches that are needed, and its sequences as the peers read them."""
    text = generated((1 + ROUNDS) * INTERVAL * BATCH * LENGTH - 1, random.Random(SEED))  # a token in front begins it
    (folder / "data").mkdir(parents=True)
    (folder / "data" / "train.txt").write_text(text)
    (folder / "data" / "validation.txt").write_text(text[: BATCH * LENGTH - 1])
    sequences = np.array(byte_tokenizer()(text, verbose=False)["input_ids"]).reshape(-1, LENGTH)
    order = np.random.default_rng([SEED, 0]).permutation(len(sequences))  # as src/batches.py has it
    np.save(folder / "sequences.npy", sequences[order])


# -------------------------------------------------------------------------------------------------------------- ours
def train_ours(precision: str, is_compiled: bool, folder: Path) -> None:
    settings = {
        "epochs": 1,
        "global_batch_size": BATCH,
        "log_every": INTERVAL,
        "compile": is_compiled,
        "task.name": "causal_lm",
        "task.dataset": folder.parent / "data",
        "task.sequence_length": LENGTH,
        "task.architecture.model_type": "llama",
        **{f"task.architecture.{name}": value for name, value in SHAPE.items()},
        "optim.lr": LR,
        "optim.weight_decay": WEIGHT_DECAY,
        "optim.schedule": "constant",
        "optim.warmup_steps": 0,
    }
    summary = launch(settings, precision, folder)
    assert summary["data"]["train"]["padding"] == 0
    work = {
        "parameters": summary["trained_parameters"],
        "steps": summary["step"],
        "tokens": round(summary["epoch"] * summary["data"]["train"]["tokens"]),
        "device": summary["device"],
        "precision": summary["precision"],
    }
    (folder / "work.json").write_text(json.dumps(work))


# ------------------------------------------------------------------------------------------------------------- peers
class Peer:
    """What each peer starts from, and what is taken down of its training."""

    def __init__(self, folder: Path) -> None:
        import torch
        from transformers import set_seed

        torch.set_num_threads(CORES)
        set_seed(SEED)
        self.model = new_llama(SHAPE, LENGTH)
        self.model.register_forward_hook(self._look, with_kwargs=True)
        self.model.model.layers[0].mlp.down_proj.register_forward_hook(self._look_inside)
        sequences = torch.from_numpy(np.load(folder.parent / "sequences.npy"))
        self.dataset: Any = [{"input_ids": sequence, "labels": sequence} for sequence in sequences]
        self.folder = folder
        self.tokens, self.steps, self.loss = 0, 0, torch.zeros(())
        self.dtype, self.device = "", ""

    def optimizer(self) -> "AdamW":
        return new_adamw(self.model, LR)

    def count(self, loss: "Tensor") -> None:
        """After each step, in a loop that doesn't do it itself."""
        self.steps += 1
        self.loss += loss.detach()
        if self.steps % INTERVAL == 0:
            self.record(self.loss.item() / INTERVAL)
            self.loss.zero_()

    def record(self, loss: float) -> None:
        """After each interval, with its mean."""
        record(self.folder, loss)

    def finish(self) -> None:
        assert {str(p.dtype) for p in self.model.parameters()} == {"torch.float32"}
        work = {
            "parameters": sum(p.numel() for p in self.model.parameters() if p.requires_grad),
            "steps": self.steps,
            "tokens": self.tokens,
            "device": self.device,
            "precision": {"torch.float32": "fp32", "torch.bfloat16": "bf16"}[self.dtype],
        }
        (self.folder / "work.json").write_text(json.dumps(work))

    def _look(self, module: Any, inputs: Any, arguments: dict[str, Any], output: Any) -> None:
        self.tokens += arguments["input_ids"].numel()

    def _look_inside(self, module: Any, inputs: Any, output: "Tensor") -> None:
        self.dtype, self.device = str(output.dtype), output.device.type


def train_trainer(precision: str, folder: Path) -> None:
    from transformers import Trainer, TrainerCallback, TrainingArguments

    class Record(TrainerCallback):
        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
            if "loss" in logs:
                peer.steps = state.global_step
                peer.record(logs["loss"])

    peer = Peer(folder)
    arguments = TrainingArguments(
        output_dir=str(folder / "trainer"),
        use_cpu=True,
        bf16=precision == "bf16",
        per_device_train_batch_size=BATCH,
        train_sampling_strategy="sequential",
        num_train_epochs=1,
        optim="adamw_torch_fused",
        learning_rate=LR,
        weight_decay=WEIGHT_DECAY,
        lr_scheduler_type="constant",
        max_grad_norm=0,
        logging_steps=INTERVAL,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        seed=SEED,
    )
    Trainer(peer.model, arguments, train_dataset=peer.dataset, callbacks=[Record()]).train()
    peer.finish()


def train_lightning(precision: str, folder: Path) -> None:
    import lightning
    from torch.utils.data import DataLoader

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = peer.model

        def training_step(self, batch: dict[str, "Tensor"], batch_idx: int) -> "Tensor":
            return self.model(**batch).loss

        def configure_optimizers(self) -> "AdamW":
            return peer.optimizer()

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            peer.count(outputs["loss"])

    peer = Peer(folder)
    trainer = lightning.Trainer(
        accelerator="cpu",
        precision="bf16-mixed" if precision == "bf16" else "32-true",
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Module(), DataLoader(peer.dataset, batch_size=BATCH))
    peer.finish()


def train_fabric(precision: str, folder: Path) -> None:
    from lightning.fabric import Fabric
    from torch.utils.data import DataLoader

    peer = Peer(folder)
    fabric = Fabric(accelerator="cpu", devices=1, precision="bf16-mixed" if precision == "bf16" else "32-true")
    fabric.launch()
    model, optimizer = fabric.setup(peer.model, peer.optimizer())
    loader: Any = fabric.setup_dataloaders(DataLoader(peer.dataset, batch_size=BATCH))
    model.train()
    for batch in loader:
        optimizer.zero_grad()
        loss = model(**batch).loss
        fabric.backward(loss)
        optimizer.step()
        peer.count(loss)
    peer.finish()


def train_plain(precision: str, folder: Path) -> None:
    from accelerate import Accelerator
    from torch.utils.data import DataLoader
    from transformers import get_scheduler

    peer = Peer(folder)
    accelerator = Accelerator(cpu=True, mixed_precision=precision.replace("fp32", "no"), gradient_accumulation_steps=1)
    loader: Any = DataLoader(peer.dataset, batch_size=BATCH)
    optimizer: Any = peer.optimizer()
    scheduler: Any = get_scheduler("constant", optimizer)
    model: Any = peer.model
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
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


PEERS = {"Trainer": train_trainer, "Lightning": train_lightning, "Fabric": train_fabric, "plain": train_plain}


# ----------------------------------------------------------------------------------------------------------- compare
def compare(precision: str, ours: dict[str, float], folder: Path) -> Iterable[Comparison]:
    """Each of ours, by name with what it is to reach, against the best of the peers."""
    trainings: dict[str, Callable[[Path], None]] = {
        **{name: partial(train_ours, precision, name.endswith("compiled")) for name in ours},
        **{name: partial(train, precision) for name, train in PEERS.items()},
    }
    prepare(folder)
    with sides(trainings, folder) as started:
        seconds = in_turn(ROUNDS, *(side.turn for side in started))
        did = [side.finish() for side in started]
        losses = [side.losses for side in started]
    for name, work, found in zip(trainings, did, losses, strict=True):
        assert work == did[0], f"not the same work: {did[0]}, {name} {work}"
        same = [abs(a / b - 1) < 0.01 for a, b in zip(losses[0], found, strict=True)]
        assert all(same), f"not the same losses: {losses[0]}, {name} {found}"
    speeds = {
        name: [INTERVAL * BATCH * LENGTH / s for s in taken] for name, taken in zip(trainings, seconds, strict=True)
    }
    medians = {name: statistics.median(of_side) for name, of_side in speeds.items()}
    print(f"{precision}, {did[0]['parameters']:,} parameters, losses {losses[0]}")
    for name, median in medians.items():
        ratios = ", ".join(f"{own} {medians[own] / median:.3f} times as fast" for own in ours if own != name)
        print(f"  {name:<14} {median:8,.0f} tokens/s ({min(speeds[name]):,.0f} to {max(speeds[name]):,.0f})  {ratios}")
    best = max(PEERS, key=medians.__getitem__)
    for own, target in ours.items():
        question = f"transformer {precision}{' compiled' * own.endswith('compiled')}, best peer"
        yield Comparison(question, "tokens/s", speeds[own], speeds[best], target, is_gain=True, is_speed=True)


def measure(data_dir: str) -> list[Comparison]:
    """
    Args:
        data_dir: not used: the text is generated.
    """
    with tempfile.TemporaryDirectory() as folder:
        return [
            *compare("bf16", {"ours": 1.05, "ours-compiled": 1.05}, Path(folder, "bf16")),
            *compare("fp32", {"ours": 1.0}, Path(folder, "fp32")),
        ]


if __name__ == "__main__":
    pairs.main(measure, __doc__)
