"""perf/mfu of language models: the same operations, however many processes share them."""

import pytest

from tests.text.conftest import Trained

A_PEAK = "import src.tracking.performance; src.tracking.performance.peak_flops = lambda name, precision: 1e12"


def test_the_operations_of_a_step_are_the_same_on_any_number_of_processes(trained: Trained) -> None:
    """Of 107 documents, so that one of two processes ends with a dummy batch. Tried without its weight: more there."""
    settings = (
        "--task.packing=false", "--task.eval_fraction=0.11", "--global_batch_size=106", "--micro_batch_size=53",
        "--max_steps=2", "--log_every=2",
    )  # fmt: skip

    def operations(yaml: str, processes: int) -> float:
        records = trained("lm", yaml, *settings, before=A_PEAK).records
        record = next(record for record in records if "perf/mfu" in record)
        seconds = sum(record.get(f"perf/{name}_seconds", 0.0) for name in ("data", "compute", "waiting"))
        return record["perf/mfu"] * seconds * processes

    assert operations("fsdp", 2) == pytest.approx(operations("alone", 1))
