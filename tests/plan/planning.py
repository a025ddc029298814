"""Setups of the plan, measured together in a process that takes the null GPU for an H100, as the tool does."""

import json
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

from torch.distributed.tensor import DTensor

import train
from plan.gpus import find_gpu
from plan.measure import Setup, environment_for
from plan.search import explore
from plan.work import Work
from src.config.config import load_config
from src.distributed.accelerator import shut_down
from src.distributed.stop import StopSignal
from src.tasks import TASKS
from src.training.batches import CountedSteps, training_steps
from tests.launching import PROJECT, SECONDS, clean_environment
from train import build, run_settings, train_step

H100 = find_gpu("h100")
SHAPE = {"model_type": "llama", "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4,
         "num_attention_heads": 4, "num_key_value_heads": 2}  # fmt: skip
"""Of a Llama of 2.8 million parameters."""


def llama(text: str, length: int = 512, batch: int = 8, **shape: object) -> tuple[str, ...]:
    """Arguments of train.py for a small Llama on a file of text."""
    sizes = [f"--task.architecture.{name}={value}" for name, value in (SHAPE | shape).items()]
    batches = [f"--task.sequence_length={length}", f"--global_batch_size={batch}"]
    return ("--task.name=causal_lm", f"--task.dataset={text}", *batches, *sizes)


def setup(yaml: str, gpus: int, arguments: Iterable[str], cp_size: int = 1) -> Setup:
    return Setup(tuple(arguments), yaml if "/" in yaml else f"accelerate_configs/{yaml}.yaml", gpus, H100, cp_size)


def measured(*setups: Setup) -> list[dict[str, Any]]:
    """The results of `explore` for each, as JSON."""
    program = "from tests.plan.planning import main; main()"
    content = json.dumps([asdict(setup) | {"gpu": setup.gpu.model_dump()} for setup in setups])
    how: dict[str, Any] = {"cwd": PROJECT, "env": clean_environment(**environment_for(H100)), "timeout": SECONDS}
    done = subprocess.run([sys.executable, "-c", program], input=content, capture_output=True, text=True, **how)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    rows, setups = [], json.load(sys.stdin)
    load_config(setups[0]["arguments"], TASKS)  # imports the task, which the processes of all setups have from here on
    for fields in setups:
        fields |= {"gpu": type(H100).model_validate(fields["gpu"]), "arguments": tuple(fields["arguments"])}
        row = explore(Setup(**fields))
        rows.append({"is_fitting": row.is_fitting, "measured": asdict(row.measured) if row.measured else row.reason})
    print(json.dumps(rows))


def print_held_and_sent(arguments: list[str]) -> None:
    """Take a step of a run on CPUs; print the bytes that its first process holds, by kind, and that it sends."""
    run = build(run_settings(arguments))
    assert run
    found: dict[str, Any] = {}
    step_if_finite = train.step_if_finite

    def size(tensors: Iterable[Any]) -> int:
        return sum((t.to_local() if isinstance(t, DTensor) else t).nbytes for t in tensors)

    def recorded(optimizers: Any, norm: Any) -> None:
        parameters = [p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]]
        found.update(parameters=size(parameters), gradients=size(p.grad for p in parameters))
        step_if_finite(optimizers, norm)
        states = [state for optimizer in optimizers for state in optimizer.state.values()]
        found["optimizer"] = size(value for state in states for value in state.values())

    train.step_if_finite = recorded
    micro_batches, counts = next(CountedSteps(training_steps(run, 0), StopSignal(run.accelerator, run.config)))
    with Work("cpu", run.world_size) as work:
        train_step(run, micro_batches, counts)
    if run.is_main:
        print(json.dumps(found | {"sent": work.counts["sent within"]}))
    shut_down(run.accelerator)


if __name__ == "__main__":
    print_held_and_sent(sys.argv[1:])
