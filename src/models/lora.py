"""Low-rank adapters: settings, and what they do to a model and its export."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, PositiveInt

from src.process import UserError
from src.settings import Settings

if TYPE_CHECKING:  # settings are checked, and --help answers, before peft is imported
    from peft import PeftModel
    from transformers import PreTrainedConfig, PreTrainedModel


class Lora(Settings):
    """LoRA (Hu et al. 2021, https://arxiv.org/abs/2106.09685): small matrices are trained in place of the weights."""

    r: PositiveInt | None = None
    """Their rank; null: no adapters, all weights are trained."""
    alpha: PositiveInt = 16
    """What their product is multiplied by, divided by r."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Of their input."""
    target_modules: list[str] = []
    """Names of the layers that get them, such as q_proj; empty: all linear layers but the output."""
    merge: bool = False
    """Also export the model with the adapters added to its weights, into model/merged. A classifier always is."""

    def validation_errors(self) -> Iterator[str]:
        """Settings without effect."""
        if not self.r and self != Lora():
            yield "task.lora.r is not set, without which the other settings of task.lora do nothing"

    def adapted(
        self, model: PreTrainedModel, task_type: Literal["CAUSAL_LM", "SEQ_CLS"], revision: str | None
    ) -> PeftModel:
        """`model` with fresh adapters, its own weights frozen, but for a classifier's head.

        Args:
            revision: of `model`, which the adapters are saved with.

        Raises:
            ValueError: target_modules names layers that it hasn't.
        """
        from peft import LoraConfig, get_peft_model

        assert self.r
        layers = [name for name, _ in model.named_modules()]
        absent = [n for n in self.target_modules if not any(f".{layer}".endswith(f".{n}") for layer in layers)]
        if absent:
            raise UserError(f"task.lora.target_modules: the model has no layer {' nor '.join(absent)}")
        settings = LoraConfig(
            r=self.r,
            lora_alpha=self.alpha,
            lora_dropout=self.dropout,
            target_modules=self.target_modules or "all-linear",
            task_type=task_type,
        )
        try:
            with warnings.catch_warnings():  # peft asks transformers by a name that is going away
                warnings.simplefilter("ignore", FutureWarning)
                return get_peft_model(model, settings, revision=revision)
        except ValueError as error:
            raise UserError(f"task.lora.target_modules: {' '.join(str(error).split())}") from error

    def save_merged(
        self, load_model: Callable[[Any, PreTrainedConfig], PreTrainedModel], config: PreTrainedConfig, folder: Path
    ) -> None:
        """Adds the adapters in `folder` to the model that they were trained on, and saves it in folder/merged."""
        from peft import PeftModel
        from transformers import AutoModelForCausalLM

        adapted: Any = PeftModel.from_pretrained(load_model(AutoModelForCausalLM, config), str(folder))
        adapted.merge_and_unload().save_pretrained(folder / "merged")
