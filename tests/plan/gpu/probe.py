"""Steps of a run on the null GPU, as rank 0 of any number, and the kernels, waits and allocations they ask for."""

import collections
import ctypes
import json
import os
import subprocess
import sys
import tempfile
import traceback
from dataclasses import dataclass
from pathlib import Path

from plan.null_gpu import WAITS, NullGpu, join_alone, null_environment
from tests.launching import PROJECT, QUIET, clean_environment

FSDP = {
    "ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
    "FSDP_RESHARD_AFTER_FORWARD": "true", "FSDP_CPU_RAM_EFFICIENT_LOADING": "false",
}  # fmt: skip
"""What Accelerate's launcher makes of fsdp.yaml."""


@dataclass(frozen=True)
class Probe:
    steps: list[dict[str, int]]
    """Of each step, how often each thing happened, by the names that null_gpu.c gives them."""
    places: dict[str, int]
    """Where in this project the last step waited for the device, as `sync_stream src/training/x.py`, and how often."""
    kernels: dict[str, int]
    """Kernels and collectives of the last step, by name; of a collective with the bytes of one rank's part."""
    evaluation: dict[str, int]
    peak: float
    """GB that torch's allocator had given out at most, and reserved, in the steps."""
    reserved: float
    optimizations: list[str]
    host_milliseconds: float
    """Median time of the last half of the steps: the host's, as the device takes none."""

    def waits(self, step: int = -1) -> int:
        return sum(self.steps[step].get(kind, 0) for kind in WAITS)


def steps_of(*arguments: str, steps: int = 5, processes: int = 0, cp_size: int = 1, **environment: str) -> Probe:
    """Take steps of train.py's run with these arguments in bf16; under FSDP as rank 0 of `processes`, if any, of which
    `cp_size` share each sequence."""
    added = null_environment(max(processes, 1)) | {"ACCELERATE_MIXED_PRECISION": "bf16", "STEPS": str(steps)}
    if processes:
        sizes = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": processes, "LOCAL_WORLD_SIZE": processes}
        added |= FSDP | {"TORCHELASTIC_RUN_ID": "none"} | {name: str(value) for name, value in sizes.items()}
    if cp_size > 1:
        mesh = {"CP": cp_size, "DP_SHARD": processes // cp_size}
        added |= {f"PARALLELISM_CONFIG_{name}_SIZE": str(size) for name, size in mesh.items()}
        added["ACCELERATE_USE_PARALLELISM_CONFIG"] = "true"
    with tempfile.TemporaryDirectory() as folder:
        output = [f"--output_dir={folder}/run", *QUIET]
        if "--task.name=causal_lm" in arguments:
            text = Path(folder, "text.txt")
            text.write_text("to be or not to be, that is the question. " * 8000)
            output.append(f"--task.dataset={text}")
        command = [sys.executable, "-m", "tests.plan.gpu.probe", f"{folder}/probe.json", *output, *arguments]
        env = clean_environment(**added | environment)
        done = subprocess.run(command, cwd=PROJECT, env=env, capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, done.stdout + done.stderr
        return Probe(**json.loads(Path(folder, "probe.json").read_text()))


# --------------------------------------------------------------------------------------------- in a process of its own
def main(result: str, *arguments: str) -> None:
    import statistics
    import time

    import torch

    import train
    from src.distributed.stop import StopSignal
    from src.tracking.performance import measure
    from src.training.batches import CountedSteps, evaluation_batches, training_steps
    from src.training.cuda_graph import capture
    from train import run_settings

    gpu = NullGpu()
    null, kinds, counts = gpu.library, gpu.kinds, gpu.counts
    places: collections.Counter[str] = collections.Counter()

    @ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p)
    def note(kind: int, _: bytes) -> None:
        if kinds[kind] in WAITS:
            own = [f.filename for f in traceback.extract_stack() if f.filename.startswith(f"{PROJECT}/src")]
            places[f"{kinds[kind]} {Path(own[-1]).relative_to(PROJECT) if own else '?'}"] += 1

    if size := int(os.environ.get("WORLD_SIZE", "0")):  # the others are not there
        join_alone(size)
    run = train.build(run_settings([*arguments]))
    assert run
    found, milliseconds = [], []
    stop = StopSignal(run.accelerator, run.config)
    counted = CountedSteps(training_steps(run, 0), stop)
    steps, take_step = measure(run, *capture(run, counted, train.train_step))
    run.model.train()
    for left in reversed(range(int(os.environ["STEPS"]))):
        null.null_gpu_reset()
        if not left:  # it takes longer than what it notes
            null.null_gpu_set_callback(note)
        started = time.perf_counter()
        take_step(run, *next(steps))
        milliseconds.append(1e3 * (time.perf_counter() - started))
        null.null_gpu_set_callback(None)
        found.append(counts())
    null.null_gpu_write_kernels(f"{result}.kernels".encode())
    peak, reserved = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
    null.null_gpu_reset()
    with torch.no_grad():
        for batch in evaluation_batches(run):
            run.task.evaluate(run.model.eval(), batch.data)
    rows = [line.split("\t") for line in Path(f"{result}.kernels").read_text().splitlines()]
    seen = {
        "steps": found, "places": places, "kernels": {name: int(count) for count, name in rows},
        "evaluation": counts(), "peak": peak / 1e9, "reserved": reserved / 1e9,
        "optimizations": run.metadata["optimizations"],
        "host_milliseconds": statistics.median(milliseconds[len(milliseconds) // 2 :]),
    }  # fmt: skip
    Path(result).write_text(json.dumps(seen))
    os._exit(0)  # the other ranks would be waited for


if __name__ == "__main__":  # python -m tests.plan.gpu.probe 1000 --config=configs/mnist_fast.yaml: what steps_of sees
    if "STEPS" in os.environ:
        main(*sys.argv[1:])
    print(steps_of(*sys.argv[2:], steps=int(sys.argv[1])))
