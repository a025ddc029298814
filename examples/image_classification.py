"""Pictures in folders, train/<class>/… and val/<class>/…, and any classifier of torchvision that has one output."""

import io
import json
import math
from base64 import b64encode
from copy import copy
from hashlib import sha256
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from huggingface_hub import load_state_dict_from_file
from PIL import ImageOps
from pydantic import PositiveInt, PrivateAttr
from torch import Tensor, nn
from torchvision import datasets, models, ops
from torchvision.transforms import v2

from src.process import UserError, explained
from src.tasks import load_metric
from src.tasks.base import PICTURE, Table, Task
from src.tasks.tables import label_columns, label_tables


class Pictures(datasets.ImageFolder):
    """Reads a picture when it is asked for. What its transforms draw depends on the seed and the index alone."""

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        with torch.random.fork_rng(devices=[]), explained(f"{self.samples[index][0]}: cannot be read, ", OSError):
            torch.default_generator.manual_seed(int(np.random.default_rng([*self.seed, index]).integers(2**63)))
            return super().__getitem__(index)

    def seen(self, seed: list[int], *transforms: v2.Transform) -> "Pictures":
        pictures, normalize = copy(self), v2.Normalize([0.485, 0.456, 0.406], [0.229, 0.224, 0.225])  # as the weights
        to_tensor = v2.PILToTensor(), v2.ToDtype(torch.float32, scale=True), normalize
        pictures.seed, pictures.transform = seed, v2.Compose([*transforms, *to_tensor])
        return pictures


class ImageClassification(Task):
    """Tells what a picture shows."""

    name: Literal["image_classification"] = "image_classification"
    """The task to train."""
    data_dir: str = "data/digits_png"
    """Folder with train/<class>/… and val/<class>/…."""
    model: str = "resnet18"
    """A classifier of torchvision."""
    weights: str | None = None
    """What to begin with: a state dict (.safetensors, .pth) or torchvision's, such as DEFAULT; null: from scratch."""
    norm: Literal["group", "frozen", "batch"] = "group"
    """What BatchNorm becomes: group from scratch, frozen where there are weights; batch: itself (docs/examples.md)."""
    size: PositiveInt = 224
    """Width and height of what the model sees, in pixels."""
    flip: bool = True
    """Mirror half of the training pictures."""
    metric_names: ClassVar[tuple[str, ...]] = ("accuracy",)
    _classes: list[str] = PrivateAttr(default_factory=list)

    def build_datasets(self) -> tuple[Pictures, Pictures]:
        where, hint = f"task.data_dir={self.data_dir}", "`python -m examples.make_data` makes data/digits_png"
        with explained(f"{where}: not train/<class>/… and val/<class>/… ({hint}), ", OSError):
            parts = [Pictures(Path(self.data_dir, part)) for part in ("train", "val")]
        self._classes = self._classes or parts[0].classes
        if odd := {*self._classes}.symmetric_difference(parts[1].classes):
            raise UserError(f"{where}: the training data and val do not both have {min(odd)}")
        train, val = (part.seen([0], v2.Resize(self.size), v2.CenterCrop(self.size)) for part in parts)
        return train, val

    def augmented(self, train: Any, seed: list[int]) -> Any:
        return train.seen(seed, v2.RandomResizedCrop(self.size, (0.5, 1.0)), v2.RandomHorizontalFlip(self.flip / 2))

    def fingerprint(self, dataset: Any) -> str:
        files = [(str(Path(file).relative_to(dataset.root)), Path(file).stat().st_size) for file, _ in dataset.samples]
        return sha256(repr(files).encode()).hexdigest()

    def data_state(self) -> dict[str, Any]:
        return {"classes": self._classes}

    def load_data_state(self, state: dict[str, Any]) -> None:
        self._classes = state["classes"]

    def build_model(self) -> Any:
        weights = self.weights or ""
        with explained(f"task.model={self.model}, task.weights={self.weights}: "):
            model = models.get_model(self.model, weights=None if Path(weights).is_file() else self.weights)
            if Path(weights).is_file():
                model.load_state_dict(load_state_dict_from_file(weights, safe=False))
        layers = [*model.named_modules()]
        own = [type(layer).__name__ for _, layer in layers if type(layer).__module__.startswith(models.__name__)]
        model._no_split_modules = sorted({name for name in own if own.count(name) > 1})  # torchvision's, repeated
        for name, layer in layers:
            if isinstance(layer, nn.BatchNorm2d) and self.norm != "batch":
                n, is_frozen = layer.num_features, self.norm == "frozen"
                new = ops.FrozenBatchNorm2d(n, layer.eps) if is_frozen else nn.GroupNorm(math.gcd(32, n), n)
                new.load_state_dict(layer.state_dict(), strict=False)
                model.set_submodule(name, new)
        name, head = [(name, layer) for name, layer in layers if isinstance(layer, nn.Linear)][-1]
        model.set_submodule(name, nn.Linear(head.in_features, len(self._classes)))
        return model

    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, int]:
        loss, examples, _ = self.evaluate(model, batch)
        for buffer in model.buffers() if self.norm == "batch" and torch.distributed.is_initialized() else ():
            torch.distributed.broadcast(buffer, 0)  # all get the first process's statistics: DDP does so, FSDP does not
        return loss, examples

    def evaluate(self, model: nn.Module, batch: Any) -> tuple[Tensor, int, dict[str, Tensor]]:
        logits, labels = model(batch[0]).float(), batch[1]
        outputs = {"predictions": logits.argmax(1), "references": labels, "probabilities": logits.softmax(1)}
        return nn.functional.cross_entropy(logits, labels, reduction="sum"), len(labels), outputs

    def metrics(self, outputs: dict[str, Tensor]) -> dict[str, float]:
        return load_metric("Accuracy").compute(predictions=outputs["predictions"], references=outputs["references"])

    def tables(self, outputs: dict[str, Tensor], dataset: Any) -> dict[str, Table]:
        def show(index: int) -> dict[str, str]:
            png = io.BytesIO()
            ImageOps.fit(dataset.loader(dataset.samples[index][0]), (self.size, self.size)).save(png, "png")
            return {"image": PICTURE + b64encode(png.getvalue()).decode()}

        return label_tables(outputs, self._classes, show)

    def predictions(self, outputs: dict[str, Tensor], dataset: Any) -> dict[str, list[Any]]:
        return {"file": [file for file, _ in dataset.samples], **label_columns(outputs, self._classes)}

    def export(self, model: nn.Module, weights: dict[str, Tensor], folder: Path) -> None:
        super().export(model, weights, folder)
        (folder / "classes.json").write_text(json.dumps(self._classes))

    def load_export(self, folder: Path) -> nn.Module:
        self._classes, self.weights = json.loads((folder / "classes.json").read_text()), None
        return super().load_export(folder)
