"""What the environment says of the processes of a run, and what it should not say."""

import os
from collections.abc import Iterator

TELLING = (
    "WORLD_SIZE", "LOCAL_WORLD_SIZE", "RANK", "LOCAL_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK",
    "PMI_SIZE", "PMI_RANK", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_RANK",
)  # fmt: skip
"""Variables by which launchers, those of MPI too, tell a process, and Accelerate, of the others."""


def world_size() -> int:
    """Return the number of processes that the launcher has started; one without a launcher."""
    return _size("WORLD_SIZE")


def cp_size() -> int:
    """Return how many processes share each sequence (context parallelism), by the yaml; one by default."""
    return _size("PARALLELISM_CONFIG_CP_SIZE")


def _size(name: str) -> int:
    value = os.environ.get(name, "")
    return max(1, int(value)) if value.isdigit() else 1


def leftovers() -> Iterator[str]:
    """Yield a line for each variable that tells of other processes, though no launcher has started any; and for a
    trial of a sweep without its agent."""
    if "WANDB_SWEEP_ID" in os.environ and "WANDB_RUN_ID" not in os.environ:
        yield f"WANDB_SWEEP_ID={os.environ['WANDB_SWEEP_ID']} is set in the environment, without WANDB_RUN_ID: unset it"
    if "TORCHELASTIC_RUN_ID" in os.environ:  # torch's launcher, which sets what Accelerate reads first
        return
    # without a launcher, a pod may be told of the others by WORLD_SIZE, RANK and the address at which they meet
    is_told = "MASTER_ADDR" in os.environ and "ACCELERATE_DYNAMO_BACKEND" not in os.environ
    for name in TELLING:
        alone = "1" if name.endswith("SIZE") else "0"
        value = os.environ.get(name, alone)
        if value != alone and not (is_told and value.isdigit()):
            yield (
                f"{name}={value} is set in the environment, but no launcher has started several processes: unset it, "
                "or start them by accelerate launch with a yaml for several, such as accelerate_configs/ddp.yaml"
            )


def processes(number: int, cp_size: int = 1) -> str:
    """Return `1 process` or `4 processes`; where `cp_size` of them share each sequence, `2 groups of 2 processes`."""
    if cp_size > 1:
        groups = number // cp_size
        return f"{groups} group{'s' if groups > 1 else ''} of {processes(cp_size)}"
    return f"{number} process{'es' if number > 1 else ''}"
