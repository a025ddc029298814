"""What the tasks that train one model of transformers share: how it is built, with weights or without, and exported."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from accelerate import Accelerator

from src.tasks.base import Task
from src.tasks.text.lean import NewWeights
from src.tasks.text.pretrained import ModelSource, save_sharded
from src.tasks.text.source import TextSource


class FineTuning(TextSource, ModelSource, Task):
    """Trains a model of transformers on text."""

    auto_class: ClassVar[Any]
    """transformers' class that builds the model from its config."""
    adapters_for: ClassVar[Literal["CAUSAL_LM", "SEQ_CLS"]]
    """peft's name for the kind of model."""
    has_new_head: ClassVar[bool] = False
    """Whether the last layers may be new."""
    pipeline_tag: ClassVar[str]
    """The Hub's name for what the model does."""
    _config: ClassVar[Any]
    """The model's config, and below its tokenizer: a property of each task."""
    _tokenizer: ClassVar[Any]

    def validation_errors(self) -> Iterator[str]:
        yield from self.source_errors()
        yield from self.model_errors()

    def build_model(self) -> Any:
        return self.finish(self.build_whole())

    def build_whole(self) -> Any:
        """Return transformers' model with its weights."""
        return self.load_model(self.auto_class, self._config, self.has_new_head)

    def build_empty_model(self, rank: int, world_size: int) -> Any:
        weights = NewWeights(rank, world_size)
        model = self.build_empty(weights)
        if model is None:
            return None
        with weights:
            finished = self.finish(model)
        self._new_weights = weights.parts(self.core(finished))
        return finished

    def build_empty(self, weights: NewWeights) -> Any:
        """Return transformers' model without weights, new ones drawn into `weights`; None if that is not possible."""
        return self.empty_model(self.auto_class, self._config, weights, self.has_new_head)

    def finish(self, model: Any) -> Any:
        """Return what is trained, made of transformers' model."""
        return self.with_adapters(model)

    def core(self, model: Any) -> Any:
        """Return transformers' model, with its adapters, inside of what is trained."""
        return model

    def load_weights(self, model: Any, device: torch.device) -> None:
        super().load_weights(self.core(model), device)

    def with_adapters(self, model: Any) -> Any:
        """Return the model with new adapters, if the settings ask for them."""
        return self.lora.add_adapters(model, self.adapters_for, self.revision) if self.lora.r else model

    def count_tokens(self, batch: dict[str, Any]) -> tuple[int, int]:
        return batch["tokens"], batch["inputs"]["input_ids"].numel()

    def export_sharded(self, model: Any, folder: Path, accelerator: Accelerator) -> bool:
        return save_sharded(self.core(model), self._tokenizer, folder, accelerator)

    def card(self) -> dict[str, Any]:
        card: dict[str, Any] = {"library_name": "transformers", "pipeline_tag": self.pipeline_tag}
        if self.model and not Path(self.model).exists():
            card["base_model"] = self.model
        if not Path(self.dataset).exists():
            card["datasets"] = [self.dataset]
        return card
