"""Peers as in benchmarks/language_peers.py: the Trainer of Lightning, and a loop on Lightning Fabric.

python -m benchmarks.lightning_peers trainer|fabric
"""

import sys
from typing import Any

import lightning
from lightning.fabric import Fabric
from torch import Tensor
from torch.optim import AdamW

from benchmarks.language_peers import Peer

PRECISIONS: dict[str, Any] = {"bf16": "bf16-mixed", "fp32": "32-true"}


def train_trainer(peer: Peer) -> None:
    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = peer.model

        def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
            return self.model(**batch).loss

        def configure_optimizers(self) -> AdamW:
            return peer.optimizer()

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            peer.count(outputs["loss"])

    trainer = lightning.Trainer(
        accelerator="cpu",
        precision=PRECISIONS[peer.plan.precision],
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Module(), peer.loader())
    peer.finish()


def train_fabric(peer: Peer) -> None:
    fabric = Fabric(accelerator="cpu", devices=1, precision=PRECISIONS[peer.plan.precision])
    fabric.launch()
    model, optimizer = fabric.setup(peer.model, peer.optimizer())
    loader: Any = fabric.setup_dataloaders(peer.loader())
    model.train()
    for batch in loader:
        optimizer.zero_grad()
        loss = model(**batch).loss
        fabric.backward(loss)
        optimizer.step()
        peer.count(loss)
    peer.finish()


if __name__ == "__main__":
    {"trainer": train_trainer, "fabric": train_fabric}[sys.argv[1]](Peer())
