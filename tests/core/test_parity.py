"""The same curve under every strategy: every training loss within 1e-5, relative, of that on one process."""

from pathlib import Path

import pytest
import torch

from tests.curves import Short, cells
from tests.launching import MNIST, Launch, Rounding, Run, Whole
from tests.tasks.test_examples import IMAGES_AND_TABLES
from tests.tasks.test_text_examples import PAIRS_AND_TAGS
from tests.text.tasks import TEXT

# 1,438 digits make 22 windows of 64 and one of 30, of which two of four processes get 7: with micro-batches of 1, their
# last is empty. 50 steps pass two such ends of an epoch. (The shift stays on: it must not depend on processes.)
# At the default rate, a ReLU that rounding flipped in step 48 changed MNIST's eval/loss by 2e-5, on one processor.
DIGITS = ("--max_steps=50", "--log_every=1", "--task.dropout=0", "--optim.lr=3e-5", "--optim.max_grad_norm=1")
PARTS = (
    "--optim.groups=[{match: conv1.*, lr_scale: 0.1}, {match: .*bias, frozen: true}]", "--optim.layer_decay=0.5",
    "--ema.decay=0.9",
)  # fmt: skip
NORM = "train/grad_norm"
"""A ReLU that rounding flips changes it at once, a loss later: it drifts by 6e-6 here."""


def real_mnist(_: Path) -> None:
    if not MNIST.is_dir():
        pytest.skip(f"needs the real MNIST in {MNIST}")


TASKS = {
    "digits": Short(DIGITS, split=("--micro_batch_size=8",), within=None),
    "digits, not accumulated": Short(DIGITS, within=None),
    "digits, one by one": Short(DIGITS, split=("--micro_batch_size=1",), within=None),
    "digits by parts, averaged": Short((*DIGITS, *PARTS), split=("--micro_batch_size=8",), within=None),
    "mnist": Short((*DIGITS, f"--task.data_dir={MNIST}", "--task.source=mnist"), real_mnist, within=None),
    **TEXT,
    **IMAGES_AND_TABLES,
    **PAIRS_AND_TAGS,
}
TABLE = """
                          cpu  ddp  ddp-4 fsdp fsdp-4 fsdp_grad_op fsdp_offload hsdp
digits                    slow slow fast  slow slow   slow         slow         slow
digits, not accumulated   -    -    -     fast -      -            -            -
digits, one by one        -    -    slow  -    -      -            -            -
digits by parts, averaged -    fast -     slow slow   fast         slow         slow
mnist                     -    slow slow  slow slow   slow         slow         -
lm                        -    fast -     fast -      -            slow         fast
experts                   -    -    -     fast -      -            -            -
lm with adapters          -    slow -     fast -      -            -            -
lm with DoRA              -    slow -     fast -      -            -            -
lm with PiSSA             -    slow -     slow -      -            -            -
new tokens, tied          -    slow -     fast -      slow         slow         slow
new tokens, untied        -    -    -     fast -      -            -            -
lm in 4 bits              -    fast -     -    -      -            -            -
classifier                -    slow -     fast -      -            -            -
classifier with adapters  -    -    -     slow -      -            -            -
classifier with a decoder -    -    -     fast -      -            -            -
classifier, weighed       -    slow -     -    -      -            -            -
several labels            -    -    -     fast -      -            -            -
numbers                   -    slow -     slow -      -            -            -
chat                      -    slow -     slow -      -            -            -
chat with new tokens      -    -    -     slow -      -            -            -
pictures                  -    slow -     slow -      -            -            -
table                     -    slow -     slow -      -            -            -
pairs                     -    slow -     slow -      -            -            -
tags                      -    slow -     slow -      -            -            -
"""
"""A new task: test_add_task.py. Streamed mixtures: streaming/test_streaming.py."""


def norms(run: Run) -> list[float]:
    return [record[NORM] for record in run.records if NORM in record]


def assert_same_curve(run: Run, task: Short, whole: Whole, rounding: Rounding) -> None:
    alone, within = task.run(whole, "alone"), task.within or task.run(rounding, "alone")
    assert len(alone.losses) == run.summary["step"]
    assert run.losses == pytest.approx(alone.losses, rel=within)
    found, expected = ({n: v for n, v in r.summary.items() if n.startswith("eval/")} for r in (run, alone))
    assert found == pytest.approx(expected, rel=within)
    if task.within is None:
        assert norms(run)[:10] == pytest.approx(norms(alone)[:10], rel=task.run(rounding, "alone", name=NORM))
        assert found["eval/accuracy"] == expected["eval/accuracy"]


@pytest.mark.parametrize(("name", "yaml", "processes"), cells(TABLE))
def test_each_task_has_the_curve_of_one_process_under_every_strategy(
    whole: Whole, rounding: Rounding, shared: Path, name: str, yaml: str, processes: int
) -> None:
    """And its metrics; with accumulation, clipping and ragged windows."""
    task = TASKS[name].ready(shared)
    run = task.run(whole, yaml, processes=processes)
    assert run.summary["strategy"] == yaml.replace("cpu", "single")
    assert processes in (0, run.summary["num_processes"])
    assert_same_curve(run, task, whole, rounding)


@pytest.mark.slow
def test_all_reducing_gradients_in_bf16_adds_its_rounding(launch: Launch, whole: Whole, rounding: Rounding) -> None:
    """More than what fp32's own rounding makes of the norms, and less than the eight bits of bf16."""
    alone, run = whole("cpu", *DIGITS), launch("ddp_bf16_hook", "--ddp_comm_hook=bf16", *DIGITS).succeeded()
    assert norms(run) != pytest.approx(norms(alone), rel=rounding("cpu", *DIGITS, name=NORM))
    assert run.losses == pytest.approx(alone.losses, rel=torch.finfo(torch.bfloat16).eps)
