"""What FSDP is for: each process holds its share of parameters, gradients and optimizer state, and no more."""

import json
from pathlib import Path

from tests.conftest import BIN, PROJECT, run_command


def held_bytes(tmp_path: Path, yaml: str, processes: int) -> list[int]:
    """Of each process, for a model of 100M parameters after a step."""
    config = PROJECT / "accelerate_configs" / f"{yaml}.yaml"
    command = [str(BIN / "accelerate"), "launch", "--config_file", str(config), "--main_process_port=0"]
    command += [f"--num_processes={processes}", "-m", "tests.count_bytes"]
    run = run_command(command, tmp_path).succeeded()
    counts = [json.loads(line) for line in run.stdout.splitlines()]
    assert [count["strategy"] for count in counts] == [yaml] * processes
    assert all(95e6 < count["count"] < 105e6 for count in counts)
    return [count["parameters"] + count["gradients"] + count["optimizer"] for count in counts]


def test_fsdp_holds_half_on_two_processes_and_a_quarter_on_four(tmp_path: Path) -> None:
    whole = max(held_bytes(tmp_path, "ddp", 2))
    halves, quarters = (held_bytes(tmp_path, "fsdp", processes) for processes in (2, 4))
    print([held / whole for held in halves], [held / whole for held in quarters])
    assert max(halves) <= 0.55 * whole
    assert max(quarters) <= 0.30 * whole
    assert sum(halves) >= 0.99 * whole
    assert sum(quarters) >= 0.99 * whole
