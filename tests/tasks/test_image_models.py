"""Pictures with models of transformers and timm: tiny ones, in folders."""

import importlib.metadata
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from timm.models import save_for_hf
from torch import Tensor
from transformers import (
    AutoImageProcessor,
    AutoModelForImageClassification,
    BitImageProcessor,
    ConvNextConfig,
    ConvNextImageProcessor,
    Dinov2Config,
    ResNetConfig,
    SiglipConfig,
    SiglipImageProcessor,
    SiglipModel,
    ViTConfig,
    ViTImageProcessor,
    pipeline,
)

from examples import image_weights
from examples.image_classification import ImageClassification, read_picture
from src.checkpoint.load import config_of, load_trained_model
from src.config.errors import UserError
from tests.launching import PROJECT, Launch, run_command
from tests.task_tests import TaskTests
from tests.tasks.test_image_classification import TestImageClassification as Torchvision
from tests.text.hub import serving
from train import run_settings

TINY: dict[str, Any] = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64, "image_size": 32,
    "patch_size": 8,
}  # fmt: skip
STAGES: dict[str, Any] = {"depths": [1, 2], "hidden_sizes": [8, 8], "num_stages": 2}
TEXT = {**TINY, "vocab_size": 50, "projection_size": 32, "bos_token_id": 0, "eos_token_id": 1}
SQUARE, EDGE = {"height": 32, "width": 32}, {"shortest_edge": 36}
KINDS: dict[str, tuple[Any, Any]] = {
    "vit": (ViTConfig(**TINY), ViTImageProcessor(size=SQUARE)),
    "dinov2": (Dinov2Config(**TINY), BitImageProcessor(size=EDGE, crop_size=SQUARE)),
    "siglip": (SiglipConfig(vision_config=TINY, text_config=TEXT), SiglipImageProcessor(size=SQUARE)),
    "convnext": (ConvNextConfig(**STAGES), ConvNextImageProcessor(size={"shortest_edge": 32})),
    "resnet": (ResNetConfig(**STAGES, embedding_size=8), ConvNextImageProcessor(size={"shortest_edge": 32})),
}
"""Models of transformers. A checkpoint of SigLIP has a text model too."""
COLOURS = {0: "red", 1: "blue"}
"""Labels in another order than that of their names."""


def saved(kind: str, folder: Path, **fields: Any) -> Path:
    """Write a model with fresh weights, one of KINDS or else of timm, and its processor, as on the Hub."""
    torch.manual_seed(0)
    if kind not in KINDS:
        model = timm.create_model(kind)
        for norm in (layer for layer in model.modules() if isinstance(layer, torch.nn.BatchNorm2d)):
            norm.running_mean.normal_()  # type: ignore[union-attr]
        save_for_hf(model, str(folder), model_config=fields, safe_serialization=True)
        return folder
    config, processor = KINDS[kind]
    config = type(config).from_dict(config.to_dict() | fields)
    build = SiglipModel if kind == "siglip" else AutoModelForImageClassification.from_config
    build(config).save_pretrained(folder)
    processor.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return a function from the kind of a model to a folder with one."""
    folder = tmp_path_factory.mktemp("models")
    return lambda kind: folder / kind if (folder / kind).exists() else saved(kind, folder / kind)


@pytest.fixture(scope="module")
def colours(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Pictures, red ones and blue ones; one is wide, and of one colour, however it is cropped."""
    folder = tmp_path_factory.mktemp("colours")
    Torchvision.write(folder)
    Image.new("RGB", (60, 40), (90, 120, 150)).save(folder / "train/blue/0.png")
    return folder


def task_on(colours: Path, model: Path | str, **settings: Any) -> Any:
    """Return the task, which has read its data."""
    task = ImageClassification(data_dir=str(colours), model=str(model), **settings)
    task.build_datasets()
    return task


def logits(model: Any, task: Any, picture: Path) -> Tensor:
    with torch.no_grad():
        return model.eval()(task._hub.pixels(read_picture(str(picture)))[None]).logits


SETTINGS = "--task.name=image_classification --task.data_dir={folder} --max_steps=5 --global_batch_size=16"


class TestViT(TaskTests):
    settings = f"{SETTINGS} --task.model={{folder}}/vit --optim.lr=1e-4"
    learns = "--max_steps=30 --optim.lr=3e-3"

    @staticmethod
    def write(folder: Path) -> None:
        Torchvision.write(folder)
        saved("vit", folder / "vit")


class TestTimm(TaskTests):
    settings = f"{SETTINGS} --task.model={{folder}}/timm --task.size=32 --task.norm=frozen --optim.lr=1e-6"
    learns = "--max_steps=30 --optim.lr=3e-3"

    @staticmethod
    def write(folder: Path) -> None:
        Torchvision.write(folder)
        saved("test_efficientnet", folder / "timm")


@pytest.mark.parametrize("kind", ["vit", "dinov2", "convnext", "test_vit"])
def test_a_model_sees_what_its_processor_makes(kind: str, stored: Callable[[str], Path], colours: Path) -> None:
    """Squeezed, or cropped at its centre. Cropped at random, a picture gets the same size, mean and std."""
    task = task_on(colours, stored(kind))
    train, _ = task.build_datasets()
    (wide,) = (i for i, (file, _) in enumerate(train.samples) if file.endswith("blue/0.png"))
    processor = AutoImageProcessor.from_pretrained(stored(kind))
    for index in (wide, len(train) - 1):
        expected = processor(read_picture(train.samples[index][0]), return_tensors="pt").pixel_values[0]
        assert train[index][0].equal(expected)
    torch.testing.assert_close(task.augmented(train, [0])[wide][0], train[wide][0])


@pytest.mark.parametrize("kind", ["siglip", "dinov2", "convnext", "resnet", "test_vit"])
def test_each_kind_of_model_trains_and_its_export_sees_the_same(
    kind: str, launch: Launch, stored: Callable[[str], Path], colours: Path
) -> None:
    """Loaded by a pipeline, which tells the classes, and from a checkpoint, which lacks the frozen embeddings. SigLIP
    and DINOv2 have weights that the logits don't depend on."""
    words = f"--task.data_dir={colours} --task.model={stored(kind)} --task.norm=frozen --max_steps=3 --optim.lr=1e-3"
    frozen = ("--optim.groups=[{match: .*embed.*, frozen: true}]", "--seed=5")
    run = launch("fsdp", "--task.name=image_classification", *words.split(), *frozen, processes=2).succeeded()
    checkpoint = run.folder / "checkpoints/step_00000003"
    again = load_trained_model(checkpoint, config_of(checkpoint)).eval()
    name = pipeline("image-classification", str(run.folder / "model"))
    task = run_settings(["--task.name=image_classification", *words.split()]).task
    model = task.load_export(run.folder / "model")
    _, evaluation = task.build_datasets()
    names, probabilities = task.state.data["classes"], []
    for file, _ in evaluation.samples:
        expected = logits(model, task, file)[0].softmax(0)
        assert logits(again, task, file)[0].softmax(0).equal(expected)
        found = {guess["label"]: guess["score"] for guess in name(read_picture(file))}
        assert found == pytest.approx(dict(zip(names, expected.tolist(), strict=True)), rel=1e-5)
        probabilities.append(expected)
    losses = [-p[label].log() for p, label in zip(probabilities, evaluation.targets, strict=True)]
    assert run.summary["eval/loss"] == pytest.approx(torch.stack(losses).mean().item(), rel=1e-4)


def test_an_export_of_timm_is_read_by_timm_with_its_labels(colours: Path, tmp_path: Path) -> None:
    """And has the size that the pictures had, not what the model had before."""
    model = saved("test_efficientnet", tmp_path / "timm", label_names=[f"n{i}" for i in range(1000)])
    task = task_on(colours, model, size=48, norm="frozen")
    built, folder, photo = task.build_model(), tmp_path / "export", colours / "val/red/1.png"
    assert task.export(built, built.state_dict(), folder)[""]["library_name"] == "timm"
    theirs = timm.create_model(f"local-dir:{folder}", pretrained=True).eval()
    seen = timm.data.create_transform(**timm.data.resolve_model_data_config(theirs))(read_picture(str(photo)))
    assert seen.shape == (3, 48, 48)
    torch.testing.assert_close(theirs(seen[None]), logits(built, task, photo))
    again = AutoModelForImageClassification.from_pretrained(folder)
    assert again.config.id2label == {0: "blue", 1: "red"}
    torch.testing.assert_close(logits(again, task, photo), logits(built, task, photo))


def test_a_head_that_knows_the_classes_is_kept_in_its_order(colours: Path, tmp_path: Path) -> None:
    folder = saved("vit", tmp_path / "vit", id2label=COLOURS)
    task = task_on(colours, folder)
    train, _ = task.build_datasets()
    assert task.state.data["classes"] == ["red", "blue"]
    assert {(Path(file).parent.name, label) for (file, _), label in zip(train.samples, train.targets, strict=True)} == {
        ("red", 0),
        ("blue", 1),
    }
    theirs = AutoModelForImageClassification.from_pretrained(folder)
    photo = colours / "val/red/1.png"
    assert logits(task.build_model(), task, photo).equal(logits(theirs, task, photo))
    assert task.state.remarks == []


@pytest.mark.parametrize("labels", [{0: "cat", 1: "dog"}, {i: f"a{i}" for i in range(7)}])
def test_a_head_of_other_classes_is_new_and_nothing_else(labels: Any, colours: Path, tmp_path: Path) -> None:
    """Though it may have the same shape."""
    task = task_on(colours, saved("vit", tmp_path / "vit", id2label=labels))
    theirs = AutoModelForImageClassification.from_pretrained(tmp_path / "vit")
    before, after = theirs.state_dict(), task.build_model().state_dict()
    assert after["classifier.weight"].shape == (2, 32)
    changed = [name for name in after if not after[name].equal(before[name])]
    assert changed == ["classifier.weight", "classifier.bias"]
    (remark,) = task.state.remarks
    says = f"gets a new head: the data's replace its {len(labels)} labels, such as {labels[0]}"
    assert remark == f"{tmp_path}/vit {says}"


def test_weights_are_all_used_or_refused(colours: Path, tmp_path: Path) -> None:
    """But for those of a part that a classifier does not have."""
    task = task_on(colours, saved("vit", tmp_path / "vit"))
    file = tmp_path / "vit/model.safetensors"
    weights = load_file(file)
    layer = "vit.layernorm.bias"
    says = f"^task.model={tmp_path}/vit: not a checkpoint of ViTForImageClassification: weights "
    save_file({name: weight for name, weight in weights.items() if name != layer}, file, {"format": "pt"})
    with pytest.raises(UserError, match=f"{says}are missing or have another shape: {layer}$"):
        task.build_model()
    save_file(weights | {f"{layer}s": torch.ones(2)}, file, {"format": "pt"})
    with pytest.raises(UserError, match=f"{says}have no place in it, and would be ignored: {layer}s$"):
        task.build_model()
    save_file(weights | {"decoder.bias": torch.ones(2)}, file, {"format": "pt"})
    task.build_model()
    assert f"{tmp_path}/vit has weights that are not used: decoder.bias" in task.state.remarks


@pytest.mark.parametrize("kind", ["resnet", "test_resnet", "test_efficientnet"])
def test_a_norm_is_replaced_and_its_activation_stays(
    kind: str, stored: Callable[[str], Path], colours: Path, tmp_path: Path
) -> None:
    """With frozen statistics, a model gives the same logits; with GroupNorm, no config.json tells of it."""
    batch, frozen = (task_on(colours, stored(kind), norm=norm) for norm in ("batch", "frozen"))
    theirs, ours = batch.build_model(), frozen.build_model()
    ours.load_state_dict(theirs.state_dict(), strict=False)
    photo = colours / "val/red/1.png"
    torch.testing.assert_close(logits(ours, frozen, photo), logits(theirs, batch, photo))
    assert not any(isinstance(layer, torch.nn.BatchNorm2d) for layer in ours.modules())
    with pytest.raises(UserError, match=r"task.norm=group: weights that were trained with BatchNorm need frozen"):
        task_on(colours, stored(kind)).build_model()
    group = task_on(colours, stored(kind), weights="")
    new = group.build_model()
    activations = [
        [name for name, layer in model.named_modules() if type(layer).__module__.endswith("activation")]
        for model in (new, theirs)
    ]
    assert activations[0] == activations[1] != []
    folder = tmp_path / "export"
    folder.mkdir()
    group.export(new, new.state_dict(), folder)
    assert not (folder / "config.json").exists()
    assert group.state.remarks == ["only evaluate reads the export: no config.json tells that GroupNorm is in it"]
    again = task_on(colours, stored(kind), weights="").load_export(folder)
    assert logits(again, group, photo).equal(logits(new, group, photo))


def test_timms_models_from_scratch_begin_as_timm_draws_them(colours: Path) -> None:
    """No file is read, and the Hub is not asked."""
    task = task_on(colours, "timm/test_efficientnet", weights="", size=32)
    models: list[Any] = [task.build_model().timm_model, timm.create_model("test_efficientnet")]
    weights = [(model.conv_stem.weight.std() / 0.1).item() for model in models]
    assert weights[0] == pytest.approx(weights[1], rel=0.2)
    assert task._hub.processor.data_config["mean"] == (0.485, 0.456, 0.406)


def test_a_checkpoints_weights_are_read_instead_of_the_files(colours: Path, tmp_path: Path) -> None:
    task = task_on(colours, saved("vit", tmp_path / "vit"))
    (tmp_path / "vit/model.safetensors").unlink()
    task.state.is_trained = True
    assert task.build_model().classifier.weight.shape == (2, 32)


def test_a_model_is_named_as_on_the_hub(launch: Launch, stored: Callable[[str], Path], tmp_path: Path) -> None:
    """Through the Hub's client, from a stand-in for the Hub."""
    Torchvision.write(tmp_path / "colours")
    words = ("--task.name=image_classification", f"--task.data_dir={tmp_path}/colours", "--max_steps=1")
    with serving({"timm/test_vit.r160_in1k": stored("test_vit")}, tmp_path / "home") as environment:
        run = launch("cpu", *words, "--task.model=timm/test_vit.r160_in1k", real=True, **environment).succeeded()
    assert "base_model: timm/test_vit.r160_in1k" in (run.folder / "model/README.md").read_text()


def test_what_cannot_be_a_model_is_one_line(
    stored: Callable[[str], Path], colours: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = run_settings, ["--task.name=image_classification", "--task.model=a/b", "--task.weights=a.pth"]
    text = "task.weights=a.pth: is for torchvision's models: name a folder with them as task.model"
    assert refusal(*weights) == text
    for model, says in (
        ("resnet81", "task.model=resnet81, task.weights=, task.norm=group: Unknown model resnet81"),
        ("timm/resnet81", "task.model=timm/resnet81: cannot be loaded: timm has no such model"),
        ("no/where", "task.model=no/where: the Hub cannot be reached; give a folder that has it, --task.model=FOLDER"),
    ):
        assert refusal(lambda model: task_on(colours, model, weights="").build_model(), model) == says
    says = f"task.size: {stored('vit')} refuses pictures of 48 x 48: "
    assert refusal(lambda size: task_on(colours, stored("vit"), size=size).build_model(), 48).startswith(says)
    monkeypatch.setattr(importlib.metadata, "distributions", lambda **_: [])
    says = f"task.model={stored('test_vit')}: not installed: timm: run "
    assert refusal(lambda kind: task_on(colours, stored(kind)), "test_vit").startswith(says)


def refusal(call: Callable[[Any], Any], given: Any) -> str:
    """Return the one line that this is refused with."""
    with pytest.raises(UserError) as error:
        call(given)
    (line,) = str(error.value).splitlines()
    return line


def test_a_model_of_torchvision_needs_neither_transformers_nor_timm() -> None:
    code = (
        "import sys; from examples.image_classification import ImageClassification; task = ImageClassification();"
        "task.state.data['classes'] = ['cat', 'dog']; task.build_model();"
        "print({'transformers', 'timm'} & {*sys.modules})"
    )
    assert run_command([sys.executable, "-c", code], PROJECT).succeeded().stdout == "set()\n"


def test_converted_weights_have_timms_shapes_in_timms_order(tmp_path: Path) -> None:
    """Under other names; another order is refused."""
    own = timm.create_model("tf_efficientnet_lite0").state_dict()
    renamed = {f"_{name}": weight for name, weight in own.items()}
    torch.save(renamed, tmp_path / "lite.pth")
    image_weights.convert(tmp_path / "lite.pth", tmp_path / "lite")
    found = load_file(tmp_path / "lite/model.safetensors")
    assert all(found[name].equal(weight) for name, weight in own.items())
    assert json.loads((tmp_path / "lite/config.json").read_text())["architecture"] == "tf_efficientnet_lite0"
    torch.save(dict(reversed(renamed.items())), tmp_path / "lite.pth")
    says = "^lite.pth: _classifier.bias is where timm's conv_stem.weight should be, and has another shape$"
    with pytest.raises(UserError, match=says):
        image_weights.convert(tmp_path / "lite.pth", tmp_path / "other")
