"""What FSDP is for: each process holds its share of parameters, gradients and optimizer state, and no more."""

import json
from typing import Any

import pytest

from tests.launching import Launch


def launched(launch: Launch, script: str, yaml: str, processes: int) -> list[dict[str, Any]]:
    """What `script` prints under an accelerate yaml: JSON, a line each."""
    run = launch(yaml, script=script, processes=processes).succeeded()
    return [json.loads(line) for line in run.stdout.splitlines()]


def held_bytes(launch: Launch, yaml: str, processes: int) -> list[int]:
    """Of each process, for a model of 100M parameters after a step."""
    counts = launched(launch, "tests/text/count_bytes.py", yaml, processes)
    assert [count["strategy"] for count in counts] == [yaml] * processes
    assert all(95e6 < count["count"] < 105e6 for count in counts)
    return [count["parameters"] + count["gradients"] + count["optimizer"] for count in counts]


def test_fsdp_holds_half_on_two_processes_and_a_quarter_on_four(launch: Launch) -> None:
    whole = max(held_bytes(launch, "ddp", 2))
    halves, quarters = (held_bytes(launch, "fsdp", processes) for processes in (2, 4))
    assert max(halves) <= 0.55 * whole
    assert max(quarters) <= 0.30 * whole
    assert sum(halves) >= 0.99 * whole
    assert sum(quarters) >= 0.99 * whole


def test_decoders_are_sharded_by_their_own_blocks_tied_embeddings_included(launch: Launch) -> None:
    (results,) = launched(launch, "tests/text/sharded_decoders.py", "fsdp", 2)
    assert [kind for kind, result in results.items() if result["is_tied"]] == ["gpt2", "qwen3", "gemma", "gemma3_text"]
    for result in results.values():
        assert result["units"] == 3  # two blocks and the rest
        for found, expected in (result["losses"], result["norms"]):
            assert found == pytest.approx(expected, rel=1e-5)
