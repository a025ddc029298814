"""Low-rank adapters: their settings, and how a model gets them."""

import os
import re
import warnings
from typing import Any, Literal

from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora import LoraLayer
from pydantic import PositiveInt
from transformers import PreTrainedModel

from src.config.errors import UserError, explained
from src.config.groups import Fraction
from src.config.settings import ResumeSafe, SafeReopens, Settings
from src.tasks.text.lean import ORIGINAL_HEAD


class Lora(Settings):
    """LoRA (Hu et al. 2021, https://arxiv.org/abs/2106.09685): small matrices are trained in place of the weights."""

    r: PositiveInt | None = None
    """Rank of the adapters; null: no adapters, all weights are trained."""
    alpha: PositiveInt = 16
    """Scale of what the adapters add to a layer's output: alpha / r."""
    dropout: Fraction = 0.0
    """Dropout rate of the adapters' input."""
    target_modules: list[str] = []
    """Names of the layers that get adapters, such as q_proj; empty: all linear layers except the output."""
    exclude_modules: str | None = None
    r"""A regular expression: layers with such a name get no adapters; .*\.\d\..* leaves out blocks 0 to 9. Below the
    first adapters there is no backward pass, and nothing is kept for one."""
    base_dtype: ResumeSafe[Literal["nf4", "bf16", "fp32"] | None] = None
    """Type in which the frozen weights are kept; null: bf16 if a GPU computes in it, else fp32. nf4: 4 bits, on one
    device or under DDP; embedding and output are bf16. Adapters, and a classifier's head, are fp32."""
    merge: SafeReopens[bool] = False
    """Also export the model with the adapters added to its weights, into model/merged. A classifier's always are."""

    def add_adapters(self, model: PreTrainedModel, revision: str | None, **options: Any) -> PeftModel:
        """Return `model`, of this revision on the Hub, with new adapters. Its own weights are frozen, except for a
        classifier's head and what `options`, fields of peft's LoraConfig, ask for. Raise a UserError if
        `target_modules` names layers that it does not have, that cannot be adapted, or that are tied and to be
        merged."""
        assert self.r
        layers = [name for name, _ in model.named_modules()]
        absent = [n for n in self.target_modules if not any(f".{layer}".endswith(f".{n}") for layer in layers)]
        if absent:
            raise UserError(f"task.lora.target_modules: the model has no layer {' nor '.join(absent)}")
        config = LoraConfig(
            r=self.r,
            lora_alpha=self.alpha,
            lora_dropout=self.dropout,
            target_modules=self.target_modules or "all-linear",
            exclude_modules=self.exclude_modules,
            **options,
        )
        if os.path.isdir(source := str(model.name_or_path)):  # which the adapters note, to be loaded in any folder
            model.name_or_path = os.path.abspath(source)
        says = "task.lora.target_modules, exclude_modules: "
        with explained(says, (ValueError, TypeError, re.error)), warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # peft still uses a name that transformers has deprecated
            warnings.filterwarnings("ignore", "Model has `tie_word_embeddings=True`")  # refused below, if it matters
            adapted = get_peft_model(model, config, revision=revision)
        adapters = {name for name, layer in adapted.get_base_model().named_modules() if isinstance(layer, LoraLayer)}
        tied = {name.removesuffix(".weight") for pair in model.all_tied_weights_keys.items() for name in pair}
        if (self.merge or options["task_type"] != "CAUSAL_LM") and (both := sorted(tied & adapters)):
            says = f"{both[0]} shares its weights with another layer, to which its adapters would be added too"
            raise UserError(f"task.lora.target_modules: {says} when they are merged; leave it out, or set merge=false")
        for layer in adapted.modules():
            if any(weight.is_meta and weight.requires_grad for weight in layer.parameters(recurse=False)):
                layer.to_empty(device="cpu", recurse=False)
        for layer in adapted.modules():  # again, as peft loses the values where the model is on the meta device
            if isinstance(layer, LoraLayer):
                layer.reset_lora_parameters("default", init_lora_weights=True)
        for name, parameter in adapted.named_parameters():
            is_kept = not parameter.is_floating_point() or parameter.requires_grad or ORIGINAL_HEAD in name
            if self.base_dtype in ("bf16", "nf4") and not is_kept:
                parameter.data = parameter.data.bfloat16()
        return adapted
