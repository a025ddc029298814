"""Sharding's price: how much longer a step takes under FSDP than under DDP, and how much less memory it holds.

    python -m benchmarks.sharding

A Llama of 97.5 million parameters in fp32, two processes of one thread each on gloo: fsdp.yaml, which gathers a block's
parameters in the forward and again in the backward pass, and fsdp_grad_op.yaml, which gathers them once, both against
ddp.yaml. Each starts once, trains two steps that don't count, in which memory is touched for the first time, and then
they take turns, a step each, the others being stopped: a step's time is that of a turn.

Equal work, which is asserted: the same number of parameters, 8 sequences of 128 tokens a step without padding, in the
same order, fused AdamW at a constant learning rate; the losses of all steps within 1e-4, which they are only with the
same first weights.

Bytes are those of the tensors that a process holds from one step to the next, parameters, gradients and AdamW's state,
as tests/test_sharding.py has them counted (tests/count_bytes.py, started under the same yaml): resident memory would
also show what glibc keeps. They are no times, so that one count is enough.

Where the time goes: DDP reduces while the backward pass computes. FSDP on the CPU gathers each block's parameters one
block ahead, 25 times, waits for its gradients 13 times, up to 28 MB, 8 and 11 ms each, and copies into and out of their
buffers. Gathered only when needed, with a wait for the slower process each time, the ratios were 1.28 and 1.11; gloo's
own collectives take 15 and 25 ms (src/gloo.py). Page faults were as much again, until memory was kept (src/malloc.py).
"""

import json
import random
import re
import tempfile
from functools import partial
from pathlib import Path

from benchmarks import pairs
from benchmarks.pairs import Comparison, in_turn
from benchmarks.runs import arguments, launch_command, launched
from benchmarks.turns import Side, sides

PROCESSES, BATCH, LENGTH = 2, 8, 128
ROUNDS, WARM_UP = 8, 2
PARAMETERS = 97.5e6
LLAMA = {
    "model_type": "llama", "hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 12,
    "num_attention_heads": 12, "num_key_value_heads": 12, "vocab_size": 16_384, "tie_word_embeddings": True,
}  # fmt: skip


def write_data(folder: Path) -> None:
    """A text of more than the steps' sequences, and one sequence to evaluate on."""
    source = random.Random(0)
    folder.mkdir()
    for name, sequences in (("train", (WARM_UP + ROUNDS + 5) * BATCH), ("validation", 1)):
        size = sequences * LENGTH - 1  # of bytes: a token in front begins the document
        (folder / f"{name}.txt").write_text("".join(source.choices("etaoin shrdlu", k=size)))


def train(yaml: str, folder: Path) -> None:
    settings = {
        "output_dir": folder / "run",
        "global_batch_size": BATCH,
        "epochs": 1,
        "log_every": 1,
        "wandb.mode": "disabled",
        "task.name": "causal_lm",
        "task.dataset": folder.parent / "data",
        "task.sequence_length": LENGTH,
        "task.architecture": json.dumps(LLAMA),
        "optim.lr": 1e-3,
        "optim.schedule": "constant",
        "optim.warmup_steps": 0,
    }
    launched([*launch_command(yaml, PROCESSES), "train.py", *arguments(settings)], is_shown=True)


def assert_equal_work(started: list[Side]) -> None:
    expected = started[0].losses
    for side in started:
        log = (side.folder / "log").read_text()
        (parameters,) = re.findall(r"model +([\d,]+) parameters", log)
        assert abs(int(parameters.replace(",", "")) / PARAMETERS - 1) < 0.01
        assert f"strategy   {side.folder.name} " in log
        assert "2 processes on gloo, cpu, fp32" in log
        assert "padding 0.0%" in log
        drift = max(abs(a / b - 1) for a, b in zip(side.losses, expected, strict=True))
        assert drift < 1e-4, f"{side.folder.name}: losses {drift:.0e} away from DDP's"


def bytes_held(yaml: str) -> float:
    """By the process that holds most."""
    lines = launched([*launch_command(yaml, PROCESSES), "-m", "tests.count_bytes"]).splitlines()
    counts = [json.loads(line) for line in lines]
    assert [count["strategy"] for count in counts] == [yaml] * PROCESSES
    return max(count["parameters"] + count["gradients"] + count["optimizer"] for count in counts)


def measure(data_dir: str) -> list[Comparison]:
    yamls = ["ddp", "fsdp", "fsdp_grad_op"]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_data(folder / "data")
        with sides({yaml: partial(train, yaml) for yaml in yamls}, folder) as started:
            for side in started:
                for _ in range(WARM_UP - 1):
                    side.turn()
            ddp, fsdp, grad_op = in_turn(ROUNDS, *(side.turn for side in started))
            assert_equal_work(started)
    sizes = {yaml: [bytes_held(yaml) / 1e6] for yaml in yamls}
    what = "against ddp, 97.5M Llama, fp32, x2"
    return [
        Comparison(f"sharding: step, fsdp {what}", "s", fsdp, ddp, 1.2, is_gain=False),
        Comparison(f"sharding: bytes, fsdp {what}", "MB", sizes["fsdp"], sizes["ddp"], 0.505, is_gain=False),
        Comparison(f"sharding: step, grad-op {what}", "s", grad_op, ddp, 1.12, is_gain=False),
        Comparison(f"sharding: bytes, grad-op {what}", "MB", sizes["fsdp_grad_op"], sizes["ddp"], 0.505, is_gain=False),
    ]


if __name__ == "__main__":
    pairs.main(measure, __doc__)
