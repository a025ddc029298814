"""Pictures in train/<class>/… and val/<class>/…, and a classifier of torchvision, transformers or timm."""

import io
import math
import os
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from copy import copy
from functools import cached_property, partial
from hashlib import sha256
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, Literal

import numpy as np
from huggingface_hub import load_state_dict_from_file
from PIL import Image, ImageOps
from pydantic import PositiveInt
from torch import Tensor, default_generator, nn, random
from torch.nn.modules.batchnorm import _BatchNorm
from torchvision import datasets, models, ops
from torchvision.transforms import v2

from src.config.errors import UserError, as_user_error, listed
from src.config.settings import ResumeSafe, Values
from src.config.terminal import BIN
from src.tasks import load_metric
from src.tasks.base import Cards, Counts, Table, Task, Tensors
from src.tasks.tables import label_columns, label_tables, picture

FORMATS = "AVIF", "BMP", "GIF", "JPEG", "JPEG2000", "PNG", "PPM", "TGA", "TIFF", "WEBP"
"""What a file may be, whatever its name says: for others, Pillow would start programs, such as Ghostscript."""
SUFFIXES = {suffix for suffix, kind in Image.registered_extensions().items() if kind in FORMATS}
"""Of the files that are pictures."""
BROKEN = OSError, ValueError, SyntaxError, Image.DecompressionBombError
"""What Pillow raises for files that it cannot read."""
LIBRARIES = "torchvision.models", "transformers.models", "timm.models"
"""Where models' own layers are defined."""
Image.MAX_IMAGE_PIXELS = 75_000_000  # Pillow refuses twice as many, 150 megapixels: 20 kB can become a gigabyte
warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # of more than half of them


def read_picture(file: str) -> Image.Image:
    """Return a picture as a viewer shows it: rotated as EXIF says, 16 bits reduced to 8, transparency on white; of
    several frames, the first. Raise a UserError that names the file if it cannot be read, or the range of its numbers
    is unknown."""
    with as_user_error(f"{file}: cannot be read: ", BROKEN):
        with Image.open(file, formats=FORMATS) as opened:
            kind, image = opened.format, ImageOps.exif_transpose(opened)
        if image.mode.startswith("I;16") or (image.mode == "I" and kind in ("PNG", "PPM")):
            eight_bits = np.asarray(image) / 257  # convert() would clip at 255
            image = Image.fromarray(eight_bits.round().astype(np.uint8))
        if image.mode in ("I", "F"):
            raise ValueError(f"its mode {image.mode} does not say which number is white: save it with 8 or 16 bits")
        if not image.has_transparency_data:
            return image.convert("RGB")
        image = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", image.size, "white"), image).convert("RGB")


def shown(file: str) -> str:
    """Return the name of a file as text, with bytes that are not UTF-8 as \\xNN."""
    return os.fsencode(file).decode(errors="backslashreplace")


def standardized(image: Image.Image) -> Tensor:
    """Return what a model of torchvision sees of a picture: shape (3, height, width), fp32."""
    pixels = v2.functional.pil_to_tensor(image) / 255
    return v2.functional.normalize(pixels, [0.485, 0.456, 0.406], [0.229, 0.224, 0.225])


def is_on_hub(model: str) -> bool:
    """Return whether this names a model on the Hub or a folder, rather than one of torchvision."""
    return "/" in model or Path(model, "config.json").is_file()


class Pictures(datasets.ImageFolder):
    seed: list[int] = []  # of the run and the epoch, if anything is drawn

    def find_classes(self, directory: str | Path) -> tuple[list[str], dict[str, int]]:
        classes = [name for name in super().find_classes(directory)[0] if not name.startswith(".")]
        return classes, {name: i for i, name in enumerate(classes)}

    def left_out(self) -> str:
        """Return how many files of which kind are no examples, such as `3 .txt, 2 in .ipynb_checkpoints`."""
        used, kinds = {file for file, _ in self.samples}, Counter[str]()
        for folder, _, names in os.walk(self.root, followlinks=True):
            *_, hidden = "", *(part for part in Path(folder).relative_to(self.root).parts if part.startswith("."))
            for name in names:
                if hidden:
                    kinds[f"in {hidden}"] += 1
                elif name.startswith("."):
                    kinds["hidden"] += 1
                elif Path(folder) == Path(self.root):
                    kinds["in no class"] += 1
                elif os.path.join(folder, name) not in used:
                    kinds[Path(name).suffix.lower() or name] += 1
        return listed(f"{number:,} {kind}" for kind, number in kinds.most_common())

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        """Return a picture, shape (3, height, width), fp32, and its label. Random choices depend on seed and index
        alone."""
        with random.fork_rng(devices=[]):
            default_generator.manual_seed(int(np.random.default_rng([*self.seed, index]).integers(2**63)))
            return super().__getitem__(index)[0], self.targets[index]


class ImageClassification(Task):
    """Classifies pictures."""

    name: Literal["image_classification"] = "image_classification"
    """The task to train."""
    data_dir: ResumeSafe[str] = "data/digits_png"
    """Folder with train/<class>/… and val/<class>/…."""
    model: str = "resnet18"
    """A classifier of torchvision, such as resnet18; or of transformers or timm: a folder, or a name on the Hub such as
    facebook/dinov2-base or timm/resnet50.a1_in1k."""
    weights: str | None = None
    """What to start from: DEFAULT, the model's own; for torchvision's, also another name of theirs or a state dict
    (.safetensors, .pth); empty: from scratch. Default: DEFAULT for a folder or a name on the Hub, else from scratch."""
    norm: Literal["group", "frozen", "batch"] = "group"
    """What replaces BatchNorm: group from scratch, frozen with weights; batch: nothing, so that the curve depends on
    the number of processes."""
    size: PositiveInt | None = None
    """Width and height of what the model sees, in pixels. Default: those of the model's processor, or 224."""
    flip: bool = True
    """Mirror half of the training pictures."""
    _is_read_by_others: bool = True

    def validation_errors(self) -> Iterator[str]:
        yield from super().validation_errors()
        if is_on_hub(self.model) and self.weights not in (None, "", "DEFAULT"):
            yield f"task.weights={self.weights}: is for torchvision's models: name a folder with them as task.model"

    @property
    def _start(self) -> str:
        """Return the weights to start from."""
        default = "DEFAULT" if is_on_hub(self.model) else ""
        return default if self.weights is None else self.weights

    @cached_property
    def _hub(self) -> Any:
        """Return where the model and its processor come from, if it is not one of torchvision."""
        if is_on_hub(self.model):
            kind = resolve_name("examples.image_classification_hub:HubModel")  # imports transformers
            return kind(self.model, self.size, not self._start, self.state.remarks)
        return None

    def build_datasets(self) -> tuple[Pictures, Pictures]:
        size, hub = self.size or 224, self._hub
        square: Callable[[Any], Tensor] = v2.Compose([v2.Resize(size), v2.CenterCrop(size), standardized])
        hint = f"task.data_dir (`{BIN}python -m examples.make_digits` makes data/digits_png): "
        with as_user_error(hint, (OSError, ValueError)):
            train, val = (
                Pictures(
                    Path(self.data_dir, part),
                    hub.pixels if hub else square,
                    loader=read_picture,
                    is_valid_file=self._is_picture,
                )
                for part in ("train", "val")
            )
        names = [*map(shown, train.classes)]
        if hub and {*hub.labels} == {*names}:
            names = hub.labels  # in the order of its head
        classes = self.state.data.setdefault("classes", names)
        for part in (train, val):
            if odd := {*classes}.symmetric_difference(map(shown, part.classes)):
                raise UserError(f"task.data_dir={self.data_dir}: train and val do not both have the class {min(odd)}")
            part.targets = [classes.index(shown(part.classes[label])) for label in part.targets]
        lines = {part.root: part.left_out() for part in (train, val)}
        self.state.remarks += [f"{folder}: left out {files}" for folder, files in lines.items() if files]
        return train, val

    def _is_picture(self, file: str) -> bool:  # macOS's ._1.png is hidden, and not a picture
        return Path(file).suffix.lower() in SUFFIXES and "/." not in str(Path(file).relative_to(self.data_dir))

    def augmented(self, train: Any, seed: list[int]) -> Any:
        hub, size = self._hub, self.size or 224
        how = {"size": hub.size, "interpolation": hub.interpolation} if hub else {"size": size}
        crop, flip = v2.RandomResizedCrop(scale=(0.5, 1.0), **how), v2.RandomHorizontalFlip(0.5 if self.flip else 0.0)
        epoch = copy(train)  # the files are not listed again
        epoch.seed = seed
        epoch.transform = v2.Compose([crop, flip, partial(hub.pixels, is_cropped=True) if hub else standardized])
        return epoch

    def fingerprint(self, dataset: Any) -> str:
        digest = sha256()
        for file, _ in dataset.samples:
            content = Path(file).read_bytes()
            with as_user_error(f"{file}: cannot be read: ", BROKEN):  # now, rather than after hours
                Image.open(io.BytesIO(content), formats=FORMATS).verify()
            digest.update(f"{Path(file).relative_to(dataset.root)} {sha256(content).hexdigest()}\n".encode())
        return digest.hexdigest()

    @classmethod
    def run_defaults(cls, given: Mapping[str, Any]) -> Values:
        weights, model = given.get("task.weights"), str(given.get("task.model", ""))
        has_weights = is_on_hub(model) if weights is None else weights
        return {"optim.lr": 1e-4, "optim.max_grad_norm": 1.0} if has_weights else {}

    def build_model(self) -> Any:
        is_read = self.state.has_frozen or not self.state.is_trained
        weights, classes, hub = self._start if is_read else "", self.state.data["classes"], self._hub
        where = f"task.model={self.model}, task.weights={self._start}, task.norm={self.norm}: "
        if hub:
            model = hub.build(classes, is_read=bool(weights))
        else:
            with as_user_error(where):
                model = self._of_torchvision(weights, len(classes))
        with as_user_error(where):
            self._replace_norms(model)
        own = [type(layer).__name__ for layer in model.modules() if type(layer).__module__.startswith(LIBRARIES)]
        repeated = {name for name in own if own.count(name) > 1}
        known = repeated.intersection(getattr(model, "_no_split_modules", None) or ())
        model._no_split_modules = sorted(known or repeated)  # blocks, for FSDP to shard
        return model

    def _of_torchvision(self, weights: str, num_classes: int) -> nn.Module:
        """Return the model, with these weights and a new head."""
        state = load_state_dict_from_file(weights, safe=False) if Path(weights).is_file() else None
        model = models.get_model(self.model, weights=None if state else weights or None)
        if state:
            model.load_state_dict(state)
        name, head = [(name, layer) for name, layer in model.named_modules() if isinstance(layer, nn.Linear)][-1]
        model.set_submodule(name, nn.Linear(head.in_features, num_classes))
        return model

    def _replace_norms(self, model: nn.Module) -> None:
        """Put what `norm` says in the place of each BatchNorm. Raise a ValueError if that can't be."""
        norms = [(name, layer) for name, layer in model.named_modules() if isinstance(layer, _BatchNorm)]
        if not norms or self.norm == "batch":
            return
        if self._start and self.norm == "group":
            raise ValueError("weights that were trained with BatchNorm need frozen or batch")
        if other := next((type(layer).__name__ for _, layer in norms if not isinstance(layer, nn.BatchNorm2d)), ""):
            raise ValueError(f"its {other} can't be replaced: it needs batch")
        for name, layer in norms:
            n: Any = layer.num_features
            groups = math.gcd(32, n) if self.norm == "group" else None
            if hasattr(layer, "act"):  # timm's
                new = self._hub.norm_with_activation(layer, groups)
            else:
                new = nn.GroupNorm(groups, n) if groups else ops.FrozenBatchNorm2d(n, layer.eps)
            new.load_state_dict(layer.state_dict(), strict=False)
            model.set_submodule(name, new)
        if self._hub and self.norm == "group":
            self._is_read_by_others = False
            self.state.remarks.append("only evaluate reads the export: no config.json tells that GroupNorm is in it")

    def count(self, batch: Any) -> Counts:
        return {"targets": len(batch[1])}

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        return self.evaluate(model, batch)[0]

    def evaluate(self, model: nn.Module, batch: Any) -> tuple[Tensor, dict[str, Tensor]]:
        found, labels = model(batch[0]), batch[1]
        logits = getattr(found, "logits", found).float()
        outputs = {"predictions": logits.argmax(1), "references": labels, "probabilities": logits.softmax(1)}
        return nn.functional.cross_entropy(logits, labels, reduction="sum"), outputs  # not the mean

    def metrics(self, outputs: dict[str, Tensor]) -> dict[str, float]:
        return load_metric("Accuracy").compute(predictions=outputs["predictions"], references=outputs["references"])

    def tables(self, outputs: dict[str, Tensor], dataset: Any) -> dict[str, Table]:
        def show(index: int) -> dict[str, str]:
            file, _ = dataset.samples[index]
            image = read_picture(file)
            image.thumbnail((64, 64))
            return {"image": picture(image), "file": shown(file)}

        return label_tables(outputs, self.state.data["classes"], show)

    def export(self, model: Any, weights: Tensors, folder: Path) -> Cards:
        if self._hub and self._is_read_by_others:
            return self._hub.export(model, weights, folder)
        return super().export(model, weights, folder)

    def load_export(self, folder: Path) -> Any:
        if not Path(folder, "config.json").is_file():
            return super().load_export(folder)
        exported = self.model_copy(update={"model": str(folder), "weights": None})
        self._hub = exported._hub  # pictures get the size that they had, whatever size is set
        self.state.data["classes"] = exported.state.data["classes"] = self._hub.labels
        return exported.build_model()

    def predictions(self, outputs: dict[str, Tensor], dataset: Any) -> dict[str, list[Any]]:
        return {
            "file": [shown(file) for file, _ in dataset.samples],
            **label_columns(outputs, self.state.data["classes"]),
        }
