"""The examples on pictures and tables: what they read is what is there, or one line names what is wrong."""

import math
import os
import struct
import warnings
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import pandas as pd
import pytest
import torch
from PIL import EpsImagePlugin, Image, ImageOps, features
from torchvision.models import get_model
from torchvision.transforms.functional import pil_to_tensor

from examples import make_digits, make_table
from examples.image_classification import ImageClassification, read_picture
from examples.tabular_regression import TabularRegression
from src.config.errors import UserError
from src.config.terminal import BIN
from src.training.evaluation import evaluate_on_one_process
from tests.curves import Short
from tests.launching import Launch, Rounding, Whole
from train import run_settings

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
    """Its statistics are the first process's for all."""
    task = IMAGES_AND_TABLES["pictures"].ready(shared)
    alone, ddp, fsdp = (task.run(whole, yaml, BATCH_NORM) for yaml in ("alone", "ddp", "fsdp"))
    assert ddp.losses[0] != pytest.approx(alone.losses[0], rel=1e-3)
    assert fsdp.losses == pytest.approx(ddp.losses, rel=task.run(rounding, "ddp", BATCH_NORM))
    assert fsdp.summary["eval/loss"] == pytest.approx(ddp.summary["eval/loss"], rel=1e-4)


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


def test_weights_are_trained_at_a_lower_rate_by_default() -> None:
    assert run_settings(["--task.name=image_classification"]).optim.lr == 3e-3
    assert run_settings(["--task.name=image_classification", "--task.weights=DEFAULT"]).optim.lr == 1e-4


def test_weights_come_from_a_file_and_their_statistics_stay(tmp_path: Path) -> None:
    """All but the head, which is new."""
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
    """All mistakes of a csv at once; a picture in a run, before it trains."""
    (tmp_path / "train/cat").mkdir(parents=True)
    (tmp_path / "train/cat/1.png").write_text("a cat")
    says = f"[Errno 2] No such file or directory: '{tmp_path}/val'"
    pictures = f"task.data_dir (`{BIN}python -m examples.make_digits` makes data/digits_png): {says}"
    assert refused(ImageClassification(data_dir=str(tmp_path))) == [pictures]
    (tmp_path / "val").symlink_to(tmp_path / "train")
    broken = launch("ddp", *PICTURES, f"--task.data_dir={tmp_path}", "--global_batch_size=2", processes=2)
    assert broken.messages[0].startswith(f"train.py: {tmp_path}/val/cat/1.png: cannot be read: ")
    assert broken.exit_code == 2
    hint = "list columns of categories in task.categories"
    found = ["has no column site", "has fewer than 5 rows", f"b in row 1 is x, not a finite number; {hint}"]
    found.append(f"y in row 3 is nan, not a finite number; {hint}")
    assert mistakes(tmp_path, "a,b,y\n1,x,2\n2,,3\n3,,\n", ["site"]) == found


def test_a_csvs_columns_have_names_once_and_finite_scales(tmp_path: Path) -> None:
    """Nor is one without a finite scale."""
    table = pd.DataFrame({"x": [1.5e308, -1.5e308, 0, 1, 2, 3], "y": range(6)})
    nameless = "has a column without a name, such as row numbers: name it, or leave it out (index=False)"
    assert mistakes(tmp_path, table.to_csv()) == [nameless]
    assert mistakes(tmp_path, table[["x", "y", "y"]].to_csv(index=False)) == ["has several columns y"]
    too_large = "has numbers that are too large to have a standard deviation"
    assert mistakes(tmp_path, table.to_csv(index=False)) == [f"x {too_large}"]
    assert mistakes(tmp_path, table.rename(columns={"x": "y", "y": "x"}).to_csv(index=False)) == [f"y {too_large}"]
    (tmp_path / "a.csv").write_text("x,y,\n" + "1,2,\n" * 6)  # a comma at each end is no column
    train, _ = TabularRegression(csv=f"{tmp_path}/a.csv", categories=[]).build_datasets()
    assert train.tensors[0].shape[1] == 2


def test_categories_that_no_training_row_has_are_counted(tmp_path: Path) -> None:
    for name, sites in (("a", ["0", "1", "2"]), ("b", ["0.0", "1", ""])):
        rows = [f"{i},{sites[i % 3]},{i}" for i in range(12)]
        (tmp_path / f"{name}.csv").write_text("\n".join(["x,site,y", *rows]))
    same, other = (TabularRegression(csv=f"{tmp_path}/a.csv", eval_csv=f"{tmp_path}/{name}.csv") for name in "ab")
    for task in (same, other):
        task.build_datasets()
    assert same.state.remarks == []
    says = "site: 4 of 12 evaluation rows have a value that no training row has, such as 0.0"
    assert other.state.remarks == [says]


def mistakes(folder: Path, csv: str, categories: Sequence[str] = ()) -> list[str]:
    """The lines that refuse this table, without its name."""
    file = folder / "bad.csv"
    file.write_text(csv)
    lines = refused(TabularRegression(csv=str(file), target="y", categories=[*categories]))
    assert all(line.startswith(f"{file}: ") for line in lines)
    return [line.removeprefix(f"{file}: ") for line in lines]


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
    assert pil_to_tensor(read_picture(str(file))).equal(pil_to_tensor(expected.convert("RGB")))


@pytest.mark.parametrize("mode", ["L", "P", "RGBA", "CMYK", "I;16"])
def test_a_picture_of_any_mode_is_what_a_viewer_shows(grey: Image.Image, tmp_path: Path, mode: str) -> None:
    """As tensors."""
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
    turns = {2: ImageOps.mirror(grey), 3: grey.rotate(180), 8: grey.rotate(270, expand=True)}  # by EXIF's standard
    exif = Image.Exif()
    exif[0x0112] = orientation
    turns[orientation].save(tmp_path / "a.png", exif=exif)
    assert_shown(tmp_path / "a.png", grey)


@pytest.mark.parametrize("mode", ["P", "RGBA"])
def test_what_is_transparent_is_white(grey: Image.Image, tmp_path: Path, mode: str) -> None:
    """By half, or one colour of a palette."""
    if mode == "RGBA":
        made = grey.convert(mode)
        made.putalpha(51)  # a fifth of each
        made.save(tmp_path / "a.png")
        assert_shown(tmp_path / "a.png", grey.point(lambda value: 204 + value // 5))
    else:
        made = grey.quantize()
        made.save(tmp_path / "a.png", transparency=made.getpixel((0, 0)))
        assert_shown(tmp_path / "a.png", grey.point(lambda value: value or 255))


def test_pictures_without_a_white_and_bombs_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for mode in ("I", "F"):
        Image.new(mode, (4, 4)).save(tmp_path / f"{mode}.tiff")
        with pytest.raises(UserError, match=rf"{mode}\.tiff: cannot be read: its mode {mode} does not say which"):
            read_picture(f"{tmp_path}/{mode}.tiff")
    Image.new("L", (64, 64)).save(tmp_path / "bomb.png")
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 1000)
    with pytest.raises(UserError, match=r"bomb\.png: cannot be read: Image size \(4096 pixels\) exceeds limit"):
        read_picture(f"{tmp_path}/bomb.png")


EPS = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n%%EndComments\nshowpage\n%%EOF\n"


def png(width: int, height: int) -> bytes:
    """A black picture of 1 bit per pixel."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 1, 0, 0, 0, 0)
    rows = zlib.compress(bytes(1 + -(-width // 8)) * height, 9)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (EPS, "cannot identify image file"),
        (png(13_000, 13_000), "Image size (169000000 pixels) exceeds limit of 150000000 pixels"),
    ],
    ids=["a program for Ghostscript", "21 kB that become a gigabyte"],
)
def test_a_picture_starts_no_program_and_fills_no_memory(
    cats_and_dogs: Path, content: bytes, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever its name says; in a data worker, and before training."""
    (tmp_path / "gs").write_text(f"#!/bin/sh\ntouch {tmp_path}/it_ran\n")
    (tmp_path / "gs").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(EpsImagePlugin, "gs_binary", None)  # as found before
    file = cats_and_dogs / "train/dog/3.png"
    file.write_bytes(content)
    assert file.stat().st_size < 30_000
    task = ImageClassification(data_dir=str(cats_and_dogs))
    warnings.simplefilter("default")  # as in a run
    for read in (lambda: read_picture(str(file)), lambda: task.fingerprint(task.build_datasets()[0])):
        with pytest.raises(UserError) as error:
            read()
        assert str(error.value).startswith(f"{file}: cannot be read: {says}")
    assert not (tmp_path / "it_ran").exists()


@pytest.fixture
def cats_and_dogs(tmp_path: Path) -> Path:
    """A folder of pictures in train and val: five grey ones of each class."""
    folder = tmp_path / "pets"
    for name in ("train/cat", "train/dog", "val/cat", "val/dog"):
        (folder / name).mkdir(parents=True)
        for number in range(5):
            Image.new("L", (8, 8), 20 * number).save(folder / name / f"{number}.png")
    return folder


def test_every_file_is_a_picture_or_counted_as_left_out(cats_and_dogs: Path, grey: Image.Image) -> None:
    cat = cats_and_dogs / "train/cat"
    added = [".gif", ".GIF", ".jfif", ".jpg", ".tga", *([".avif"] if features.check("avif") else [])]
    for suffix in added:
        grey.convert("RGB").save(cat / f"a{suffix}")
    frames = [grey.convert("RGB"), grey.convert("RGB").rotate(180)]
    frames[0].save(cat / "moving.gif", save_all=True, append_images=frames[1:])
    for name in ("train/.ipynb_checkpoints/1.png", "train/cat/.trash/2.png", "train/1.png", "train/cat/._1.png"):
        (cats_and_dogs / name).parent.mkdir(exist_ok=True)
        grey.save(cats_and_dogs / name)
    for name in ("notes.txt", "more.TXT", "film.mpg", "README"):
        (cat / name).touch()
    task = ImageClassification(data_dir=str(cats_and_dogs), size=8)
    train, val = task.build_datasets()
    assert (len(train), len(val), task.state.data["classes"]) == (10 + len(added) + 1, 10, ["cat", "dog"])
    kinds = "2 .txt, 1 .mpg, 1 README, 1 hidden, 1 in .ipynb_checkpoints, 1 in .trash, 1 in no class"
    (remark,) = task.state.remarks
    where, _, found = remark.partition(": left out ")
    assert (where, sorted(found.split(", "))) == (str(cats_and_dogs / "train"), sorted(kinds.split(", ")))
    assert_shown(cat / "moving.gif", frames[0])


@pytest.mark.parametrize("content", [b"", b"<html>", slice(0, 60)])
def test_a_broken_picture_is_found_before_training(cats_and_dogs: Path, content: Any) -> None:
    """Whose beginning is not one, or whose png is cut short."""
    file = cats_and_dogs / "train/dog/3.png"
    file.write_bytes(file.read_bytes()[content] if isinstance(content, slice) else content)
    task = ImageClassification(data_dir=str(cats_and_dogs))
    with pytest.raises(UserError, match=f"^{file}: cannot be read: "):
        task.fingerprint(task.build_datasets()[0])


def test_only_an_empty_cell_is_missing(tmp_path: Path) -> None:
    """NA is Namibia, and None a name."""
    names = ["NA", "None", "null", "nan", "N/A", ""] * 4
    rows = [f"{name},{i % 6}" for i, name in enumerate(names)]
    (tmp_path / "a.csv").write_text("\n".join(["country,y", *rows]))
    task = TabularRegression(csv=str(tmp_path / "a.csv"), target="y", categories=["country"])
    train, _ = task.build_datasets()
    assert task._known["values"]["country"] == sorted({*names} - {""})
    inputs, *_, row = train.tensors
    for one_hot, number in zip(inputs.tolist(), row.tolist(), strict=True):
        assert sum(one_hot) == (names[number] != "")
    (tmp_path / "b.csv").write_text("\n".join(["country,y", *rows[:9], "DE,NA"]))
    with pytest.raises(UserError, match="y in row 10 is NA, not a finite number"):
        task.model_copy(update={"csv": str(tmp_path / "b.csv")}).build_datasets()


HOSTILE: dict[str, Callable[[Any], Any]] = {
    # of standard normal numbers
    "plain": lambda z: z,
    "constant": lambda z: np.full_like(z, 14.62),
    "nearly constant": lambda z: 14.62 + 1e-9 * z,
    "once another": lambda z: np.where(z == z.max(), 14.72, 14.62),
    "Unix seconds": lambda z: np.floor(1.7e9 + 40 * z),
    "huge": lambda z: 1e150 * z,
    "tiny": lambda z: 1e-150 * z,
    "with empty cells": lambda z: np.where(z < -1, np.nan, z),
}
"""Columns that are hard to scale, by name."""


def scale_by_hand(values: Any, known: Any) -> tuple[float, float, float]:
    """The mean and std of these known numbers, with exact sums, and how far rounding may put what is scaled by them."""
    known = known[~np.isnan(known)]
    mean = math.fsum(known) / len(known)
    std = math.sqrt(math.fsum((known - mean) ** 2) / len(known)) if known.max() > known.min() else 1.0
    # a sum of n numbers: n roundings of the largest; once for the mean, once for what it is taken from
    return mean, std, 2 * len(known) * np.finfo(float).eps * np.nanmax(np.abs(values)) / std


def test_tables_are_scaled_and_scored_in_float64(tmp_path: Path) -> None:
    for seed in range(50):
        random = np.random.default_rng(seed)
        kinds = [*random.choice([*HOSTILE], 4), random.choice([*HOSTILE][:-1])]  # no cell of the target is empty
        columns = {f"{i}": HOSTILE[kind](random.standard_normal(90)) for i, kind in enumerate(kinds)}
        pd.DataFrame({**columns, "one": "same"}).to_csv(tmp_path / "a.csv", index=False)
        task = TabularRegression(csv=f"{tmp_path}/a.csv", target="4", categories=["one"])
        train, held_out = task.build_datasets()
        rows = train.tensors[-1].numpy(), held_out.tensors[-1].numpy()
        assert sorted(np.concatenate(rows)) == [*range(90)]
        for i, (name, values) in enumerate(columns.items()):
            mean, std, bound = scale_by_hand(values, values[rows[0]])
            for dataset, row in zip((train, held_out), rows, strict=True):
                assert name == "4" or dataset.tensors[0][:, 4 + i].tolist() == np.isnan(values[row]).tolist()
                found = dataset.tensors[1] if name == "4" else dataset.tensors[0][:, i]
                expected = np.nan_to_num((values[row] - mean) / std)
                assert found.numpy() == pytest.approx(expected, rel=2**-24, abs=bound), (seed, kinds[i])

        # mean, std and bound are those of the last column, the target
        def model(inputs: Any) -> Any:
            return inputs[:, :1] / 3 + inputs[:, 1:2]

        _, outputs = evaluate_on_one_process(task, cast("Any", model), held_out, 7, torch.device("cpu"))
        references, guesses = columns["4"][rows[1]], model(held_out.tensors[0])[:, 0].double().numpy() * std + mean
        saved, rounding = task.predictions(outputs, held_out), bound * std
        assert saved["references"] == references.tolist()
        assert saved["predictions"] == pytest.approx(guesses, rel=1e-15, abs=rounding), (seed, kinds)
        errors = np.square(guesses - references)
        rmse, spread = math.sqrt(errors.mean()), references.std()
        scored = task.metrics(outputs)
        assert scored["rmse"] == pytest.approx(rmse, rel=1e-14, abs=rounding), (seed, kinds)
        if references.max() > references.min():
            # d(1 - (rmse / spread)^2), with both off by the rounding
            ratio, step = rmse / spread, rounding / spread
            assert scored["r2"] == pytest.approx(1 - ratio**2, rel=1e-13, abs=4 * (1 + ratio) ** 2 * step), (
                seed,
                kinds,
            )
        else:
            assert scored["r2"] == (errors.max() == 0)


def test_the_fingerprint_is_of_the_pictures_not_their_paths(cats_and_dogs: Path) -> None:

    def fingerprint(folder: Path) -> str:
        task = ImageClassification(data_dir=str(folder))
        return task.fingerprint(task.build_datasets()[0])

    expected = fingerprint(cats_and_dogs)
    moved = cats_and_dogs.rename(cats_and_dogs.with_name("after"))
    assert fingerprint(moved) == expected
    for source, target in (("1.png", "aside"), ("2.png", "1.png"), ("aside", "2.png")):
        (moved / "train/cat" / source).rename(moved / "train/cat" / target)
    assert fingerprint(moved) != expected
