"""Does the next step's batch cost time, if it is made while a device computes? The device is a pause of 10 ms.

    python -m benchmarks.prefetch

A step's batch is 4 sequences of 4,096 tokens, packed from 13 documents each. It is made by `in_background` of
src/training/batches.py, as on a GPU, against batches that are there already: what it takes longer is what the device
would wait. The second row is against making each batch when its turn has come. Not measured: pinning and copying.
"""

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks import pairs
from benchmarks.pairs import Comparison, in_turn
from benchmarks.runs import arguments
from src.checkpoint.folder import run_settings
from src.training.batches import fetch, in_background

LENGTH, DOCUMENTS, SEQUENCES, STEPS, ROUNDS, DEVICE_SECONDS = 4096, 13, 4, 50, 7, 0.01


def measure(_data_dir: Path, folder: Path) -> list[Comparison]:
    text = "x" * (LENGTH // DOCUMENTS - 2)  # a token is a byte, and each document has one more at its beginning and end
    rows = [json.dumps({"text": text}) for _ in range(2 * SEQUENCES * DOCUMENTS)]
    (folder / "train.jsonl").write_text("\n".join(rows))
    settings = {"task.name": "causal_lm", "task.dataset": folder / "train.jsonl", "task.sequence_length": LENGTH}
    task = run_settings(arguments(settings | {"task.architecture.model_type": "llama", "output_dir": folder})).task
    sequences: Any = task.build_datasets()[0]
    indices = list(range(SEQUENCES))
    assert [len(packed) for packed in sequences.__getitems__(indices)] == [DOCUMENTS] * SEQUENCES

    def batches() -> Iterator[Any]:
        return (fetch(task, sequences, indices) for _ in range(STEPS))

    def ms_per_step(steps: Iterator[Any]) -> float:
        next(steps)
        started = time.perf_counter()
        for _ in steps:
            time.sleep(DEVICE_SECONDS)
        return 1000 * (time.perf_counter() - started) / (STEPS - 1)

    background, ready, inline = in_turn(
        ROUNDS,
        lambda: ms_per_step(in_background(batches())),
        lambda: ms_per_step(iter([*batches()])),
        lambda: ms_per_step(batches()),
    )
    return [
        Comparison("prefetch: batches made in the background, made before", "ms/step", background, ready, 1.02, False),
        Comparison("prefetch: in the background, in turn", "ms/step", background, inline, 1.1, is_gain=True),
    ]


if __name__ == "__main__":
    pairs.main(measure, __doc__)
