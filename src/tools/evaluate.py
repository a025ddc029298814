"""Evaluate a trained model as its training did: print the metrics, and write the prediction for each example.

To evaluate on other data, give the task's settings: --task.dataset=other.tsv uses all of it, unless it has an
evaluation split. The model computes in fp32, on a GPU if there is one. To compute in bf16, as it was trained:
accelerate launch --mixed_precision bf16 -m src.tools.evaluate
"""

import argparse
import json
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import torch
from accelerate import Accelerator
from PIL import Image, ImageOps
from pyarrow import parquet

from src.checkpoint.load import config_of, find_model, load_model
from src.config.config import Config
from src.config.errors import UserError, explained
from src.config.settings import flatten, read_arguments, validate
from src.distributed.process import exit_codes
from src.tasks.mnist import Digits
from src.training.alone import evaluate_alone
from src.training.evaluation import metrics_of

MODEL_SETTINGS = ("model", "revision", "dropout", "lora", "architecture", "tokenizer")
"""Settings of tasks, and groups of them, that would make another model."""


def main(argv: list[str]) -> None:
    """Evaluate the model, or predict pictures, as the arguments ask for."""
    parser = argparse.ArgumentParser("python -m src.tools.evaluate", description=__doc__, allow_abbrev=False)
    parser.add_argument("source", help="a run's output folder, its model, or a checkpoint")
    parser.add_argument("pictures", nargs="*", help="of digits, to predict instead of evaluating")
    parser.add_argument("--output", type=Path, help="FILE.parquet to write; predictions.parquet beside the model")
    options, settings = parser.parse_known_args(argv)
    path = find_model(options.source)
    config = _with_settings(config_of(path), settings)
    task, pictures = config.task, options.pictures
    if pictures and task.name != "mnist":
        raise UserError(f"{pictures[0]}: only the task mnist predicts pictures, not {task.name}")
    output = options.output or (None if pictures else path.with_name("predictions.parquet"))
    if output and output.exists():
        raise UserError(f"{output}: exists already; name another file by --output=")
    accelerator = Accelerator()
    model = accelerator.prepare_model(load_model(path, config), evaluation_mode=True).eval()
    dataset = _read_pictures(pictures) if pictures else task.build_datasets()[1]
    loss, outputs = evaluate_alone(task, model, dataset, config.micro_batch(1), accelerator.device)
    columns = task.predictions(outputs, dataset)
    if pictures:
        del columns["label"]  # it is not known
        for row, name in enumerate(pictures):
            print(name, json.dumps({column: values[row] for column, values in columns.items()}))
    else:
        print(json.dumps(metrics_of(task, loss, len(dataset), outputs), indent=2))
    if output:
        output.parent.mkdir(parents=True, exist_ok=True)
        parquet.write_table(pa.table(columns), output)
        print(f"predictions: {output}", file=sys.stderr)


def _read_pictures(files: list[str]) -> Digits:
    """Return pictures of digits as MNIST has them, light on black, whatever their size and colours; all labels
    are 0. Raise a UserError if a file is not a picture."""
    images = []
    for file in files:
        with explained(f"{file}: cannot be read as a picture, ", OSError), Image.open(file) as picture:
            paper = Image.new("RGBA", picture.size, "white")  # where the picture is transparent
            grey = Image.alpha_composite(paper, picture.convert("RGBA")).convert("L")
        pixels = np.asarray(grey)
        border = np.concatenate([pixels[0], pixels[-1], pixels[:, 0], pixels[:, -1]])
        grey = ImageOps.invert(grey) if np.median(border) > 127 else grey
        images.append(torch.from_numpy(np.array(ImageOps.pad(grey, (28, 28)))))
    return Digits(torch.stack(images), torch.zeros(len(files), dtype=torch.int64))


def _with_settings(config: Config, arguments: list[str]) -> Config:
    """Return `config` with other settings of its task. Raise a UserError if they have mistakes, one per line, or would
    change the model."""
    mistakes: list[str] = []
    values, written = read_arguments(arguments, mistakes)
    for name, how in written.items():
        group, setting, *_ = [*name.split("."), ""]
        if group != "task" or setting in MODEL_SETTINGS:
            mistakes.append(f"{how}: does not say which data to evaluate on, as other settings of the task do")
    saved = dict(flatten(config.model_dump(mode="json")))
    if "task.dataset" in values and "task.eval_from" in saved:
        saved["task.eval_from"] = "all"
    new, bad = validate(type(config), saved | values, written, mistakes)
    assert isinstance(new, Config)
    mistakes.extend(new.task.validation_errors() if not bad else [])
    if mistakes:
        raise UserError("\n".join(mistakes))
    return new


if __name__ == "__main__":
    with exit_codes("evaluate"):
        main(sys.argv[1:])
