"""Pictures with models of transformers and timm: tiny ones, in folders."""

from pathlib import Path
from typing import Any

import pytest
import timm
from timm.models import save_for_hf
from transformers import AutoModelForImageClassification, ViTConfig, ViTImageProcessor

from tests.task_tests import TaskTests
from tests.tasks.test_image_classification import TestImageClassification as Torchvision

TINY: dict[str, Any] = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64, "image_size": 32,
    "patch_size": 8,
}  # fmt: skip
SETTINGS = "--task.name=image_classification --task.data_dir={folder} --max_steps=5 --global_batch_size=16"


class TestViT(TaskTests):
    settings = f"{SETTINGS} --task.model={{folder}}/vit --optim.lr=1e-4"
    learns = "--max_steps=30 --optim.lr=3e-3"
    mistake = "--task.weights=a.pth", "is for torchvision's models: name a folder with them as task.model"

    @staticmethod
    def write(folder: Path) -> None:
        Torchvision.write(folder)
        AutoModelForImageClassification.from_config(ViTConfig(**TINY)).save_pretrained(folder / "vit")
        ViTImageProcessor(size={"height": 32, "width": 32}).save_pretrained(folder / "vit")


class TestTimm(TaskTests):
    settings = f"{SETTINGS} --task.model={{folder}}/timm --task.size=32 --task.norm=frozen --optim.lr=1e-6"
    learns = "--max_steps=30 --optim.lr=3e-3"

    @staticmethod
    def write(folder: Path) -> None:
        Torchvision.write(folder)
        save_for_hf(timm.create_model("test_efficientnet"), folder / "timm", safe_serialization=True)
