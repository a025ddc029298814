"""Sequences that several processes share (context parallelism, fsdp_cp.yaml): the curve, the metrics and the random
numbers of one process alone, under any strategy before and after.

What --check finds of it: test_check.py. Streamed mixtures: test_streaming.py. Answers: test_questions.py."""

import itertools
import random
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from src.tasks.base import ContextParallel
from src.tasks.text.causal_lm import CausalLM
from tests.faults.runs import assert_same_run, checkpoints, cut_back
from tests.launching import Launch, Run, Started, slow
from tests.test_parity import TASKS
from tests.text.conftest import Trained
from tests.text.tasks import TEXT, over

PACKED: tuple[str, ...] = ()
UNPACKED = ("--task.packing=false",)
WINDOWS = ("--task.architecture.model_type=mistral", "--task.architecture.sliding_window=9")


def heads(queries: int, keys: int) -> tuple[str, ...]:
    sizes = {"num_attention_heads": queries, "num_key_value_heads": keys, "hidden_size": 8 * queries}
    return tuple(f"--task.architecture.{name}={size}" for name, size in sizes.items())


def evaluated(run: Run) -> dict[str, float]:
    return {name: value for name, value in run.summary.items() if name.startswith("eval/")}


@pytest.mark.parametrize(
    ("task", "how", "arguments", "strategy"),
    [
        ("lm", over(1, 2), PACKED, "fsdp_cp2"),
        ("lm", over(2, 2), PACKED, "fsdp_cp2"),
        slow("lm", over(1, 3), PACKED, "fsdp_cp3"),
        slow("lm", over(1, 4), PACKED, "fsdp_cp4"),
        slow("lm", over(2, 2, 2), PACKED, "hsdp_cp2"),
        slow("lm", over(1, 2, 1, "--fsdp_offload_params=true"), PACKED, "fsdp_cp2_offload"),
        slow("lm", over(1, 2, 1, "--fsdp_reshard_after_forward=false"), PACKED, "fsdp_cp2_grad_op"),
        ("lm with adapters", over(1, 2), UNPACKED, "fsdp_cp2"),
        slow("lm with adapters", over(2, 2), PACKED, "fsdp_cp2"),
        slow("experts", over(1, 2), PACKED, "fsdp_cp2"),
        slow("new tokens, tied", over(1, 2), PACKED, "fsdp_cp2"),
        slow("new tokens, untied", over(2, 2), PACKED, "fsdp_cp2"),
        slow("scratch", over(1, 2), UNPACKED, "fsdp_cp2"),
        slow("scratch", over(1, 2), WINDOWS, "fsdp_cp2"),
        slow("scratch", over(1, 4), (*WINDOWS, *UNPACKED), "fsdp_cp4"),
        slow("scratch", over(1, 3), heads(12, 3), "fsdp_cp3"),
        slow("scratch", over(1, 4), heads(12, 3), "fsdp_cp4"),
        slow("scratch", over(1, 2), heads(9, 3), "fsdp_cp2"),
        slow("scratch", over(1, 4), heads(9, 3), "fsdp_cp4"),
        slow("scratch", over(1, 4), heads(4, 1), "fsdp_cp4"),
        slow("scratch", over(1, 2), ("--task.architecture.model_type=gemma3_text",), "fsdp_cp2"),
        slow("chat", over(1, 2), PACKED, "fsdp_cp2"),
    ],
)
def test_the_curve_is_that_of_one_process(
    trained: Trained, task: str, how: dict[str, Any], arguments: tuple[str, ...], strategy: str
) -> None:
    """With accumulation, clipping, masked prompts and recomputed activations. Of 4 heads with 2 for keys, 3 processes
    compute two each, some of them made up; 4 get each key twice."""
    run, alone = trained(task, "fsdp_cp", *arguments, **how), trained(task, "alone", *arguments)
    assert run.summary["strategy"] == strategy
    assert run.losses == pytest.approx(alone.losses, rel=1e-5)
    assert evaluated(run) == pytest.approx(evaluated(alone), rel=1e-5)


@pytest.mark.slow
def test_groups_of_one_process_are_fsdp_to_the_last_bit(trained: Trained) -> None:
    assert_same_run(trained("lm", "fsdp_cp", **over(2, 1)), trained("lm", "fsdp"))


def test_the_start_says_who_shares_what(trained: Trained) -> None:
    run = trained("lm", "fsdp_cp", **over(2, 2))
    assert "  strategy   fsdp_cp2, 4 processes on gloo, cpu, fp32 (" in run.stdout
    assert "  batch      8 = 2 per micro-batch x 2 groups of 2 processes x 2 accumulated\n" in run.stdout
    assert "sdpa attention, across 2 processes" in run.stdout


ONE, DDP, FSDP = ("cpu", {"processes": 1}), ("ddp", {"processes": 2}), ("fsdp", {"processes": 4})
CP, GROUPS = ("fsdp_cp", over(1, 2)), ("fsdp_cp", over(2, 2))
QUICK = [(GROUPS, ONE), (ONE, CP)]
PAIRS = [
    pytest.param(first, second, marks=() if (first, second) in QUICK else pytest.mark.slow)
    for first, second in itertools.permutations((ONE, DDP, FSDP, CP, GROUPS), 2)
]


@pytest.mark.parametrize(("first", "second"), PAIRS)
def test_a_run_resumes_under_any_other_strategy(
    launch: Launch, shared: Path, trained: Trained, first: tuple[str, Any], second: tuple[str, Any]
) -> None:
    task, alone = TEXT["lm"].ready(shared), trained("lm")
    saved = trained("lm", first[0], **first[1]) if first != ONE else alone
    source = saved.folder / "checkpoints" / "step_00000008"
    run = task.run(launch, second[0], f"--resume={source}", **second[1]).succeeded()
    assert run.losses == pytest.approx(alone.losses[8:], rel=1e-5)
    assert evaluated(run) == pytest.approx(evaluated(alone), rel=1e-5)
    assert f"saved under {saved.summary['strategy']} x {saved.summary['num_processes']}" in run.stdout


@pytest.mark.slow
def test_killed_ten_times_it_resumes_to_the_last_bit(launch: Launch, shared: Path, tmp_path: Path) -> None:
    """With dropout: each process draws the masks of its own part."""
    task, folder, draw = TASKS["lm with dropout"].ready(shared), tmp_path / "run", random.Random(0)
    often = (*task.arguments, *task.split, "--max_steps=40", "--save_every=1")
    for _ in range(10):
        before = checkpoints(folder)
        with Started("fsdp_cp", *often, folder=folder, **over(2, 2)) as started:
            started.wait_until(lambda: checkpoints(folder) > before)  # noqa: B023
            time.sleep(draw.uniform(0, 0.3))
            assert started.exit_code is None
    run = launch("fsdp_cp", *often, folder=folder, **over(2, 2)).succeeded()
    assert_same_run(run, launch("fsdp_cp", *often, **over(2, 2)).succeeded())


def test_with_dropout_it_resumes_to_the_last_bit(
    launch: Launch, trained: Trained, shared: Path, tmp_path: Path
) -> None:
    expected = trained("lm with dropout", "fsdp_cp", **over(1, 2))
    folder = cut_back(expected, tmp_path / "run", 8)
    run = TEXT["lm with dropout"].ready(shared).run(launch, "fsdp_cp", folder=folder, **over(1, 2)).succeeded()
    assert_same_run(run, expected)


@pytest.mark.parametrize(("size", "packing"), [(2, True), (3, True), (4, False)])
def test_the_parts_of_a_batch_add_up_to_it(made: Path, size: int, packing: bool) -> None:
    """Each token and each target is in one part, and the labels are those of the tokens after them, wherever these
    are."""
    whole = CausalLM(
        dataset=f"{made}/questions.jsonl", model=f"{made}/models/llama", sequence_length=64, packing=packing
    )
    dataset, _ = whole.build_datasets()
    samples = dataset.__getitems__([*range(5)])
    parts = []
    for rank in range(size):
        task = whole.model_copy()
        task.state.cp = ContextParallel(rank, size)
        parts.append(task.collate(samples))
    expected = whole.collate(samples)
    width = expected["inputs"]["input_ids"].shape[1]
    for name in ("input_ids", "position_ids"):
        joined = torch.cat([part["inputs"][name] for part in parts], 1)
        assert torch.equal(joined[:, :width], expected["inputs"][name])
    labels = torch.full((5, joined.shape[1]), -100)
    for rank, part in enumerate(parts):
        own = torch.full(part["inputs"]["input_ids"].shape, -100)
        own.view(-1)[part["inputs"]["index"]] = part["inputs"]["targets"]
        labels[:, rank * own.shape[1] : (rank + 1) * own.shape[1]] = own
    due = torch.full((5, width), -100)
    due.view(-1)[expected["inputs"]["index"]] = expected["inputs"]["targets"]
    assert torch.equal(labels[:, :width], due)
    assert sum(part["tokens"] for part in parts) == expected["tokens"]
    assert sum(part["pairs"] for part in parts) == pytest.approx(expected["pairs"])
