"""perf/mfu of language models: the same operations, however many processes share them."""

from pathlib import Path

import pytest

from tests.launching import Launch
from tests.text import tiny

A_PEAK = "import src.tracking.performance; src.tracking.performance.peak_flops = lambda name, precision: 1e12"


def test_the_operations_of_a_step_are_the_same_on_any_number_of_processes(
    launch: Launch, models: Path, tmp_path: Path
) -> None:
    """Of 21 documents, so that one of two processes ends with a dummy batch. Tried without its weight: more there."""
    data = tiny.questions(tmp_path / "data.jsonl", rows=23)
    settings = ["--task.name=causal_lm", f"--task.model={models}/llama", f"--task.dataset={data}", "--max_steps=3"]
    settings += ["--task.packing=false", "--task.sequence_length=128", "--global_batch_size=8", "--micro_batch_size=2"]
    settings += ["--log_every=3"]

    def operations(yaml: str, processes: int) -> float:
        run = launch(yaml, *settings, before=A_PEAK, processes=processes).succeeded()
        record = next(record for record in run.records if "perf/mfu" in record)
        seconds = sum(record.get(f"perf/{name}_seconds", 0.0) for name in ("data", "compute", "waiting"))
        return record["perf/mfu"] * seconds * processes

    assert operations("fsdp", 2) == pytest.approx(operations("cpu", 1))
