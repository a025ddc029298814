"""Models of transformers for image_classification.py, and timm's, from the Hub or a folder: any that
AutoModelForImageClassification builds. They need the `text` extra of pyproject.toml, timm's also `timm`."""

import copy
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from accelerate import init_empty_weights
from PIL import Image
from torch import Tensor, nn
from torchvision.transforms.v2 import InterpolationMode
from transformers import (
    AutoImageProcessor,
    AutoModelForImageClassification,
    PreTrainedConfig,
    TimmWrapperConfig,
    TimmWrapperImageProcessor,
)
from transformers.initialization import no_init_weights

from src.config.errors import UserError, as_user_error, listed, raise_if_any
from src.requirements import missing_requirements
from src.tasks.base import Cards, Tensors
from src.tasks.text.hub import loading
from src.tasks.text.load import Fit, load_config, read_model


class HubModel:
    """Knows a model's config and labels, and how its processor prepares pictures."""

    def __init__(self, name: str, size: int | None, is_new: bool, remarks: list[str]) -> None:
        """Read the config of the model of this name on the Hub or in this folder; for new weights of `timm/NAME`,
        timm has it. Pictures get this size, if it is given, else that of the processor. Raise a UserError if there is
        no such model, or its processor makes pictures that differ in shape."""
        self.name, self.remarks = name, remarks
        self.is_timm = is_timm(name)
        if self.is_timm:
            raise_if_any(f"task.model={name}: {line}" for line in missing_requirements("timm"))
        with loading("model", name):
            own = timm_config(name) if self.is_timm and is_new and not Path(name).exists() else None
            self.config: Any = own or load_config(name, None, remarks)
            self.processor: Any = timm_processor(self.config, size) if self.is_timm else load_processor(name, size)
            shapes = {tuple(self.pixels(Image.new("RGB", whole)).shape) for whole in ((64, 48), (48, 64))}
        if len(shapes) > 1:
            raise UserError(f"task.model={name}: its processor makes pictures of several shapes: {shapes}")
        ((_, *self.size),) = shapes

    @property
    def labels(self) -> list[str]:
        """Return the labels of the model's head, in the order of their ids."""
        return [str(label) for _, label in sorted(self.config.id2label.items())]

    @property
    def interpolation(self) -> InterpolationMode:
        """Return how the processor resizes."""
        if self.is_timm:
            return InterpolationMode(self.processor.data_config["interpolation"])
        return InterpolationMode[Image.Resampling(self.processor.resample).name]

    def pixels(self, image: Image.Image, is_cropped: bool = False) -> Tensor:
        """Return what the model sees of a picture, shape (3, height, width), fp32: as its processor makes it or, of one
        that `is_cropped` to this shape, all of it."""
        if self.is_timm:
            known = self.processor.data_config | ({"crop_pct": 1.0} if is_cropped else {})
            return import_module("timm.data").create_transform(**known)(image)
        whole: Any = {"do_resize": False, "do_center_crop": False} if is_cropped else {}
        return self.processor(image, return_tensors="pt", **whole).pixel_values[0]

    def build(self, classes: list[str], is_read: bool) -> Any:
        """Return the model, fp32: with the weights of its files, if these are read, and a new head unless theirs knows
        these classes; else with new weights. Raise a UserError if the files are not those of such a model."""
        config = copy.deepcopy(self.config)
        config.id2label, config.label2id = dict(enumerate(classes)), {label: i for i, label in enumerate(classes)}
        with loading("model", self.name):
            if is_read:
                model, fit = read_model(AutoModelForImageClassification, self.name, None, config, None)
                self._accept(model, fit, new=head(config) if classes != self.labels else set())
            else:
                model = AutoModelForImageClassification.from_config(
                    config, dtype=torch.float32, trust_remote_code=False
                )
            if self.is_timm and not is_read:  # whose weights transformers has drawn in another way than timm does
                timm, options = import_module("timm"), config.model_args or {}
                model.timm_model = timm.create_model(config.architecture, num_classes=len(classes), **options)
        model.get_input_embeddings = lambda: None  # Accelerate asks for them, where some models raise
        self._keep_unused(model)
        return model

    def _accept(self, model: Any, fit: Fit, new: set[str]) -> None:
        """Draw the `new` weights. Raise a UserError if others are missing, or some in the files would be ignored. Note
        what is ignored knowingly: parts that the model does not have, such as the text model of SigLIP."""
        absent, unused = (names - new for names in fit)
        absent = {name for name in absent if not name.endswith("num_batches_tracked") and "pooler" not in name}
        base = f"{model.base_model_prefix}."
        parts = {name: name.removeprefix(base).partition(".")[0] for name in unused}
        ignored = {name for name, part in parts.items() if getattr(model.base_model, part, None) is not None}
        where = f"task.model={self.name}: not a checkpoint of {type(model).__name__}: weights"
        mistakes = {"are missing or have another shape": absent, "have no place in it, and would be ignored": ignored}
        raise_if_any(f"{where} {says}: {listed(sorted(names))}" for says, names in mistakes.items() if names)
        if unused:
            self.remarks.append(f"{self.name} has weights that are not used: {listed(sorted(unused))}")
        if new:
            says = f"the data's replace its {len(self.labels)} labels, such as {self.labels[0]}"
            self.remarks.append(f"{self.name} gets a new head: {says}")
        for layer in {name.rpartition(".")[0] for name in new}:
            model.get_submodule(layer).reset_parameters()

    def _keep_unused(self, model: Any) -> None:
        """Make buffers of the weights that have no effect on the logits, such as the token of DINOv2 for what is
        masked: training would stop at weights without a gradient. Raise a UserError if the model refuses pictures of
        this size."""
        names, weights = zip(*model.named_parameters(), strict=True)
        with as_user_error(f"task.size: {self.name} refuses pictures of {' x '.join(map(str, self.size))}: "):
            logits = model.eval()(torch.zeros(1, 3, *self.size)).logits
        gradients = torch.autograd.grad(logits.sum(), weights, allow_unused=True)
        without = {name: weight for name, weight, found in zip(names, weights, gradients, strict=True) if found is None}
        for name, weight in without.items():
            layer, _, own = name.rpartition(".")
            delattr(model.get_submodule(layer), own)
            model.get_submodule(layer).register_buffer(own, weight.detach())
        if without:
            self.remarks.append(f"{self.name} has weights that the logits don't depend on: {listed(without)}")

    @staticmethod
    def norm_with_activation(layer: Any, groups: int | None) -> nn.Module:
        """Return what replaces timm's BatchNorm that an activation follows: GroupNorm with so many groups or, without
        groups, the same with frozen statistics."""
        timm, n = import_module("timm.layers"), layer.num_features
        if groups:
            new = timm.GroupNormAct(n, groups, apply_act=False)
        else:
            new = timm.FrozenBatchNormAct2d(n, layer.eps, apply_act=False)
        new.drop, new.act = layer.drop, layer.act
        return new

    def export(self, model: Any, weights: Tensors, folder: Path) -> Cards:
        """Write the model, and its processor, for `from_pretrained`, pipelines and timm."""
        model.save_pretrained(folder, state_dict=weights)
        self.processor.save_pretrained(folder)
        card = {"library_name": "timm" if self.is_timm else "transformers", "pipeline_tag": "image-classification"}
        return {"": card | ({} if Path(self.name).exists() else {"base_model": self.name})}


def is_timm(name: str) -> bool:
    """Return whether a model is timm's, by its name on the Hub or its config.json."""
    with loading("model", name):
        is_ours = Path(name).exists()
        return "pretrained_cfg" in PreTrainedConfig.get_config_dict(name)[0] if is_ours else name.startswith("timm/")


def timm_config(name: str) -> TimmWrapperConfig:
    """Return the config of timm/NAME, as timm knows it."""
    timm = import_module("timm")
    if not (known := timm.get_pretrained_cfg(name.removeprefix("timm/"))):
        raise ValueError("timm has no such model")
    fields = {"architecture": known.architecture, "num_classes": 2, "pretrained_cfg": known.to_dict()}
    return TimmWrapperConfig.from_dict(fields)


def timm_processor(config: Any, size: int | None) -> TimmWrapperImageProcessor:
    """Return the processor of a timm model; with `size`, of pictures of this width and height, which the config will
    say too. Drop from the config what says once more how many labels there are, and which."""
    if size:
        config.pretrained_cfg["input_size"] = [3, size, size]
    vars(config).pop("label_names", None)
    config.model_args = {name: value for name, value in (config.model_args or {}).items() if name != "num_classes"}
    return TimmWrapperImageProcessor(config.pretrained_cfg, architecture=config.architecture)


def load_processor(name: str, size: int | None) -> Any:
    """Return the processor of a transformers model; with `size`, of pictures of this width and height."""
    processor = AutoImageProcessor.from_pretrained(name, trust_remote_code=False)
    fields = [field for field in ("size", "crop_size") if size and getattr(processor, field, None)]
    sizes = {field: dict.fromkeys(dict(getattr(processor, field)), size) for field in fields}
    return AutoImageProcessor.from_pretrained(name, trust_remote_code=False, **sizes) if size else processor


def head(config: Any) -> set[str]:
    """Return the names of the weights whose shape depends on the number of labels."""
    shapes = []
    for more in (0, 1):
        other = copy.deepcopy(config)
        other.num_labels += more
        with no_init_weights(), init_empty_weights(include_buffers=False):
            model: nn.Module = AutoModelForImageClassification.from_config(other, trust_remote_code=False)
        shapes.append({name: weight.shape for name, weight in model.named_parameters()})
    return {name for name, shape in shapes[0].items() if shapes[1][name] != shape}
