"""The examples: a task is a file. Those on text: text/test_examples.py."""

import json
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image, ImageOps
from torchvision.models import get_model
from torchvision.transforms.functional import pil_to_tensor

from examples import make_digits, make_table
from examples.image_classification import ImageClassification, picture
from examples.tabular_regression import TabularRegression
from src.config.errors import UserError
from tests.launching import Launch, Rounding, Whole, needs, slow
from tests.tasks import Short

STEPS = ("--max_steps=4", "--save_every=2", "--log_every=1", "--optim.lr=1e-5")  # small, as in test_parity.py
BATCH_NORM = "--task.norm=batch"


def example(name: str) -> tuple[str, str]:
    return f"--config=examples/{name}.yaml", f"--task.name={name}"


def digits(folder: Path) -> None:
    """47 pictures to train on: of each third batch, two processes get 8 and 7."""
    make_digits.write(folder)
    for part in ("train", "val"):
        for i, file in enumerate(sorted(folder.glob(f"{part}/*/*.png"))):
            if i % 31:
                file.unlink()


def friedman(folder: Path) -> None:
    """243 rows to train on: of each fourth batch, two processes get 26 and 25."""
    file = folder / "friedman.csv"
    make_table.write(file)
    file.write_text("".join(file.read_text().splitlines(keepends=True)[: 1 + 303]))


PICTURES = (
    *example("image_classification"), "--task.data_dir={folder}", "--task.model=shufflenet_v2_x0_5", "--task.size=64",
    "--global_batch_size=16", *STEPS,
)  # fmt: skip
IMAGES_AND_TABLES = {
    "pictures": Short(PICTURES, digits, saved=2),
    "table": Short((*example("tabular_regression"), "--task.csv={folder}/friedman.csv", *STEPS), friedman, saved=2),
}


@pytest.mark.slow
def test_batch_norm_depends_on_processes_not_on_strategy(whole: Whole, rounding: Rounding, shared: Path) -> None:
    """Its statistics are the first process's for all. Tried without sending them under FSDP: another eval/loss."""
    task = IMAGES_AND_TABLES["pictures"].ready(shared)
    alone, ddp, fsdp = (task.run(whole, yaml, BATCH_NORM) for yaml in ("alone", "ddp", "fsdp"))
    assert ddp.losses[0] != pytest.approx(alone.losses[0], rel=1e-3)
    assert fsdp.losses == pytest.approx(ddp.losses, rel=task.run(rounding, "ddp", BATCH_NORM))
    assert fsdp.summary["eval/loss"] == pytest.approx(ddp.summary["eval/loss"], rel=1e-4)


@needs("src/tools/evaluate.py")
@pytest.mark.parametrize(
    ("what", "norm", "part"),
    [slow("pictures", [BATCH_NORM], "model"), ("table", [], "checkpoints/step_00000004"), ("pictures", [], "model")],
)
def test_its_metrics_are_those_of_the_training(
    whole: Whole, shared: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    what: str, norm: list[str], part: str,
) -> None:  # fmt: skip
    """From what FSDP exported, and from its checkpoint."""
    run = IMAGES_AND_TABLES[what].ready(shared).run(whole, "fsdp", *norm)
    file = tmp_path / "predictions.parquet"
    capsys.readouterr()
    import_module("src.tools.evaluate").main([str(run.folder / part), f"--output={file}"])
    found = json.loads(capsys.readouterr().out)
    assert found == pytest.approx({name: run.summary[name] for name in found}, rel=1e-6)
    assert len(pq.read_table(file)) == found["eval/examples"]


@pytest.mark.slow
def test_each_reaches_the_figures_in_its_config(launch: Launch, tmp_path: Path) -> None:
    make_digits.write(tmp_path)
    make_table.write(tmp_path / "friedman.csv")
    for name, data, figure, low, high in (
        ("image_classification", f"data_dir={tmp_path}", "accuracy", 0.97, 1),
        ("tabular_regression", f"csv={tmp_path}/friedman.csv", "rmse", 0, 1.35),
    ):
        run = launch("cpu", *example(name), f"--task.{data}").succeeded()
        assert low <= run.summary[f"eval/{figure}"] <= high


@needs("src/check")
@pytest.mark.parametrize("what", [slow("pictures"), "table"])
def test_the_check_finds_no_fault(launch: Launch, shared: Path, what: str) -> None:
    IMAGES_AND_TABLES[what].ready(shared).run(launch, "fsdp", "--check").succeeded()


def test_weights_come_from_a_file_and_their_statistics_stay(tmp_path: Path) -> None:
    """All but the head, which is new. Tried without loading them into the frozen layers: a variance of 1."""
    theirs = get_model("resnet18")
    theirs.bn1.running_var.fill_(7.0)
    torch.save(theirs.state_dict(), tmp_path / "resnet.pth")
    task = ImageClassification(weights=str(tmp_path / "resnet.pth"), norm="frozen")
    task.state.data["classes"] = ["cat", "dog"]
    model = task.build_model().train()
    assert model(torch.randn(2, 3, 32, 32)).shape == (2, 2)
    assert model.bn1.running_var.eq(7).all()
    assert torch.equal(model.layer1[0].conv1.weight, theirs.layer1[0].conv1.weight)
    with pytest.raises(UserError, match=r"task.norm=group: weights that were trained with BatchNorm need frozen"):
        task.model_copy(update={"norm": "group"}).build_model()


def test_bad_data_is_one_line(launch: Launch, tmp_path: Path) -> None:
    """All mistakes of a csv at once; a picture in a run, where it is read."""
    (tmp_path / "train/cat").mkdir(parents=True)
    (tmp_path / "train/cat/1.png").write_text("a cat")
    says = f"[Errno 2] No such file or directory: '{tmp_path}/val'"
    pictures = f"task.data_dir (`python -m examples.make_digits` makes data/digits_png): {says}"
    assert refused(ImageClassification(data_dir=str(tmp_path))) == [pictures]
    (tmp_path / "val").symlink_to(tmp_path / "train")
    broken = launch("ddp", *PICTURES, f"--task.data_dir={tmp_path}", "--global_batch_size=2", processes=2)
    assert broken.messages[0].startswith(f"train.py: {tmp_path}/val/cat/1.png: cannot be read: ")
    assert broken.exit_code == 2
    file = tmp_path / "bad.csv"
    file.write_text("a,b,y\n1,x,2\n2,,3\n3,,\n")
    hint = "list columns of categories in task.categories"
    found = ["has no column site", "has fewer than 5 rows", f"b in row 1 is x, not a number; {hint}"]
    found.append(f"y in row 3 is nan, not a number; {hint}")
    expected = [f"{file}: {mistake}" for mistake in found]
    assert refused(TabularRegression(csv=str(file), target="y", categories=["site"])) == expected


def refused(task: Any) -> list[str]:
    with pytest.raises(UserError) as error:
        task.build_datasets()
    return str(error.value).splitlines()


@pytest.fixture
def grey() -> Image.Image:
    """A wide picture whose left half is black and whose right half is light."""
    image = Image.new("L", (12, 8), 200)
    image.paste(0, (0, 0, 6, 8))
    return image


def assert_shown(file: Path, expected: Image.Image) -> None:
    assert pil_to_tensor(picture(str(file))).equal(pil_to_tensor(expected.convert("RGB")))


@pytest.mark.parametrize("mode", ["L", "P", "RGBA", "CMYK", "I;16"])
def test_a_picture_of_any_mode_is_what_a_viewer_shows(grey: Image.Image, tmp_path: Path, mode: str) -> None:
    """As tensors. Tried with convert("RGB"): 16 bits are white."""
    file = tmp_path / ("a.tiff" if mode == "CMYK" else "a.png")
    if mode == "I;16":
        values = np.asarray(grey).astype("<u2") * 257
        made = Image.frombytes(mode, grey.size, values.tobytes())
    else:
        made = grey.quantize() if mode == "P" else grey.convert("RGB").convert(mode)
    made.save(file)
    with Image.open(file) as opened:
        assert opened.mode == mode
    assert_shown(file, grey)


@pytest.mark.parametrize("orientation", [2, 3, 8])
def test_a_picture_is_turned_as_its_camera_says(grey: Image.Image, tmp_path: Path, orientation: int) -> None:
    """Tried without: each is shown as it lies in the file."""
    turns = {2: ImageOps.mirror(grey), 3: grey.rotate(180), 8: grey.rotate(270, expand=True)}  # by EXIF's standard
    exif = Image.Exif()
    exif[0x0112] = orientation
    turns[orientation].save(tmp_path / "a.png", exif=exif)
    assert_shown(tmp_path / "a.png", grey)


@pytest.mark.parametrize("mode", ["P", "RGBA"])
def test_what_is_transparent_is_white(grey: Image.Image, tmp_path: Path, mode: str) -> None:
    """By half, or one colour of a palette. Tried without: it is what its colour would be."""
    if mode == "RGBA":
        made = grey.convert(mode)
        made.putalpha(51)  # a fifth of each
        made.save(tmp_path / "a.png")
        assert_shown(tmp_path / "a.png", grey.point(lambda value: 204 + value // 5))
    else:
        made = grey.quantize()
        made.save(tmp_path / "a.png", transparency=made.getpixel((0, 0)))
        assert_shown(tmp_path / "a.png", grey.point(lambda value: value or 255))


def test_pictures_without_white_and_bombs_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for mode in ("I", "F"):
        Image.new(mode, (4, 4)).save(tmp_path / f"{mode}.tiff")
        with pytest.raises(UserError, match=rf"{mode}\.tiff: cannot be read: its mode {mode} does not say which"):
            picture(f"{tmp_path}/{mode}.tiff")
    Image.new("L", (64, 64)).save(tmp_path / "bomb.png")
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 1000)
    with pytest.raises(UserError, match=r"bomb\.png: cannot be read: Image size \(4096 pixels\) exceeds limit"):
        picture(f"{tmp_path}/bomb.png")


def test_only_an_empty_cell_is_missing(tmp_path: Path) -> None:
    """NA is Namibia, and None a name. Tried with pandas' list of what is missing: no category at all."""
    names = ["NA", "None", "null", "nan", "N/A", ""] * 4
    rows = [f"{name},{i % 6}" for i, name in enumerate(names)]
    (tmp_path / "a.csv").write_text("\n".join(["country,y", *rows]))
    task = TabularRegression(csv=str(tmp_path / "a.csv"), target="y", categories=["country"])
    train, _ = task.build_datasets()
    assert task._known["values"]["country"] == sorted({*names} - {""})
    inputs, _, row = train.tensors
    for one_hot, number in zip(inputs.tolist(), row.tolist(), strict=True):
        assert sum(one_hot) == (names[number] != "")
    (tmp_path / "b.csv").write_text("\n".join(["country,y", *rows[:9], "DE,NA"]))
    with pytest.raises(UserError, match="y in row 10 is NA, not a number"):
        task.model_copy(update={"csv": str(tmp_path / "b.csv")}).build_datasets()


def test_the_content_of_pictures_decides_wherever_the_folder_is(tmp_path: Path) -> None:
    """Tried with paths in the fingerprint: a moved folder differs; with sizes: swapped pictures do not."""
    before = tmp_path / "before"
    for folder in ("train/cat", "train/dog", "val/cat", "val/dog"):
        (before / folder).mkdir(parents=True)
        for number in range(5):
            Image.new("L", (8, 8), 20 * number).save(before / folder / f"{number}.png")

    def fingerprint(folder: Path) -> str:
        task = ImageClassification(data_dir=str(folder))
        return task.fingerprint(task.build_datasets()[0])

    expected = fingerprint(before)
    moved = before.rename(tmp_path / "after")
    assert fingerprint(moved) == expected
    for source, target in (("1.png", "aside"), ("2.png", "1.png"), ("aside", "2.png")):
        (moved / "train/cat" / source).rename(moved / "train/cat" / target)
    assert fingerprint(moved) != expected
