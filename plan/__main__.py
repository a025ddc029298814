"""Plan a run before renting GPUs: python -m plan [--gpus 1 8 64] [--gpu h100] -- --config=FILE.yaml …

Everything after -- is passed to train.py. plan/README.md explains the measurements, the estimates and their limits.
"""

import argparse
import os
import sys
from pathlib import Path

from plan import null_gpu
from plan.gpus import find_gpu
from plan.measure import environment_for, has_config_alone
from plan.search import CP_YAML, YAMLS, explore_until_it_fits, setups
from plan.show import GB, recommendation, table, write
from src.config.config import load_config
from src.config.errors import UserError
from src.config.terminal import bar, say
from src.distributed.process import exit_codes
from src.tasks import TASKS


def main(argv: list[str]) -> None:
    """Try the run under each strategy and number of GPUs, and recommend the cheapest that fits."""
    parser = argparse.ArgumentParser("python -m plan", description=__doc__, allow_abbrev=False)
    parser.add_argument("--gpus", type=int, nargs="+", default=[1, 8], help="numbers of GPUs: 1 2 4 8 16 64 256")
    parser.add_argument("--gpu", default="h100", help="name in src/tracking/gpus.yaml")
    parser.add_argument("--yamls", nargs="+", choices=[*YAMLS, CP_YAML], default=YAMLS, help="default: all but fsdp_cp")
    parser.add_argument("--output", type=Path, default="plans", help="folder to write the plan into")
    parser.add_argument("arguments", nargs="*", help="after --: the arguments of train.py")
    options = parser.parse_args(argv)
    gpu = find_gpu(options.gpu)
    for gpus in options.gpus:
        if gpus < 1 or (gpus > gpu.gpus_per_machine and gpus % gpu.gpus_per_machine):
            raise UserError(f"--gpus {gpus}: must be at most {gpu.gpus_per_machine} (one machine) or a multiple of it")
    todo = [*setups(options.arguments, options.yamls, options.gpus, gpu)]
    if not todo:
        raise UserError(f"--yamls {' '.join(options.yamls)}: cannot run on --gpus {' '.join(map(str, options.gpus))}")
    if "NULL_GPU_GIB" not in os.environ:
        if reason := null_gpu.reason_to_skip():
            raise UserError(f"a plan is measured on a null GPU, but {reason}: use the Dockerfile's image, on x86-64")
        # the null GPU has to take the place of CUDA's libraries before they are loaded
        os.execve(sys.executable, [sys.executable, "-m", "plan", *argv], os.environ | environment_for(gpu))
    config = load_config(options.arguments, TASKS)
    if has_config_alone(config.task):
        say(f"{config.task.model} has no tokenizer: the plan takes each byte for a token")
    say(f"{gpu.name}: {gpu.capacity / GB:.1f} GB for torch (simulated: plan/README.md)")
    # one after the other, as the host's time is measured too
    rows = [row for setup in bar("setups tried", iterable=todo) for row in explore_until_it_fits(setup, config)]
    if not any(row.measured for row in rows):
        raise UserError(*dict.fromkeys(row.reason for row in rows))
    say(*f"{table(rows, config)}\n\n{recommendation(rows, config)}".split("\n"))
    say(f"written to {write(rows, config, options.output)}")


if __name__ == "__main__":
    with exit_codes("plan"):
        main(sys.argv[1:])
