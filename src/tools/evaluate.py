"""Evaluate a trained model as its training did: print the metrics, and write the prediction for each example.

To evaluate on other data, pass settings of the task: --task.dataset=other.tsv evaluates on all of it, or on its
evaluation split. The model computes in fp32, on a GPU if there is one. To compute in bf16, as in training:
accelerate launch --mixed_precision bf16 -m src.tools.evaluate
"""

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
from accelerate import Accelerator
from pyarrow import parquet
from pydantic import create_model

from src.checkpoint.load import config_of, find_model, load_trained_model
from src.config.config import Config
from src.config.errors import UserError, raise_if_any
from src.config.settings import Settings, flatten, read_arguments, validate
from src.config.terminal import say
from src.distributed.accelerator import TUNERS
from src.distributed.process import exit_codes
from src.tasks.base import Task
from src.training.evaluation import evaluate_on_one_process, metrics_of

MODEL_SETTINGS = "model", "revision", "dropout", "lora", "architecture", "tokenizer"
"""Settings of tasks, and groups of settings, that would change the model."""


def main(argv: list[str]) -> None:
    """Evaluate the model that the arguments name."""
    parser = argparse.ArgumentParser("python -m src.tools.evaluate", description=__doc__, allow_abbrev=False)
    parser.add_argument("source", help="a run's output folder, its model, or a checkpoint")
    parser.add_argument("--output", type=Path, help="default: predictions.parquet beside the model")
    options, settings = parser.parse_known_args(argv)
    path = find_model(options.source)
    config = _with_settings(config_of(path), settings)
    task = config.task
    output = options.output or path.with_name("predictions.parquet")
    if os.path.lexists(output):
        raise UserError(f"{output}: already exists; choose another file with --output")
    accelerator = Accelerator()
    model = load_trained_model(path, config)
    if tune := TUNERS.get(accelerator.device.type):
        tune(model, False)  # as in training, or sums would be rounded in another order
    model = accelerator.prepare_model(model, evaluation_mode=True).eval()
    _, dataset = task.build_datasets()
    say(*task.state.remarks, file=sys.stderr)
    loss, outputs = evaluate_on_one_process(task, model, dataset, config.forward_batch_size(1), accelerator.device)
    print(json.dumps(metrics_of(task, loss, len(dataset), outputs), indent=2))
    output.parent.mkdir(parents=True, exist_ok=True)
    parquet.write_table(pa.table(task.predictions(outputs, dataset)), output)
    say(f"predictions: {output}", file=sys.stderr)


def _with_settings(config: Config[Task], arguments: list[str]) -> Config[Task]:
    """Return `config` with other settings of its task. Raise a UserError if they have mistakes (one per line) or would
    change the model."""
    mistakes: list[str] = []
    values, written = read_arguments(arguments, mistakes)
    for name, how in written.items():
        group, _, setting = name.partition(".")
        if group != "task" or setting.partition(".")[0] in MODEL_SETTINGS:
            mistakes.append(f"{how}: only settings of the task that choose the data can be changed here")
    saved = dict(flatten({"task": config.task.model_dump(mode="json")}))
    if "task.dataset" in values and "task.eval_from" in saved:
        saved.pop("task.sources", None)  # of a mixture
        saved["task.eval_from"] = "all"
    of_task = {name: value for name, value in values.items() if name.startswith("task.")}
    alone = create_model("TaskAlone", __base__=Settings, task=(type(config.task), ...))
    new: Any = validate(alone, saved | of_task, written, mistakes)[0]
    raise_if_any(mistakes)
    return config.model_copy(update={"task": new.task})


if __name__ == "__main__":
    with exit_codes("evaluate"):
        main(sys.argv[1:])
