"""The guard: what the accelerate yaml asks for is what runs.

Accelerate lets a wrong yaml pass: misspelt FSDP keys are ignored, and on a machine without a GPU each process believes
it is alone and trains a model of its own. Here each of these ends the run, in one line.
"""

import os
import warnings
from collections.abc import Iterator

import torch
from accelerate import Accelerator

from src.config.config import Config
from src.config.errors import UserError
from src.config.settings import nearest
from src.distributed.launcher import Asked, Launcher, is_set

OVERRIDING = ("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "ACCELERATE_TORCH_DEVICE")
"""Environment variables that Accelerate puts above the script's arguments and the yaml, and its launcher never sets."""
MESH = ("DP_REPLICATE", "DP_SHARD", "TP", "CP", "SP")
SWITCHES = ("ACCELERATE_USE_", "FSDP_", "PARALLELISM_CONFIG_")
"""Prefixes of what only the launcher should set, from the yaml; set in the shell, they add to what the yaml says."""


def refuse_wrong_launch(launcher: Launcher | None, config: Config, asked: Asked, on_cpu: bool, precision: str) -> None:
    """Raise a UserError if what would run is not what was asked for; one line per reason.

    Args:
        on_cpu: whether the processes will train on the CPU.
        precision: the mixed precision that will run.
    """
    errors = [] if asked.cpu else list(driver_errors())
    errors += launch_errors(launcher, config, asked.world_size, asked.fsdp)
    if config.cuda_graphs:  # room: cuda_graphs
        is_cuda = not on_cpu and torch.cuda.is_available()
        errors += graph_errors(config, is_cuda, asked.world_size, precision)
    gpus = torch.accelerator.device_count()
    if not on_cpu and asked.local_world_size > gpus:
        add = f"add --num_processes={gpus * (asked.world_size // asked.local_world_size)}"
        errors.append(f"{asked.local_world_size} processes on this machine, but it has {gpus} GPU(s): {add}")
    if errors:
        raise UserError("\n".join(errors))


def refuse_another_strategy(accelerator: Accelerator, asked: Asked) -> None:
    """Raise a UserError if Accelerate has joined the processes in another way than was asked for."""
    if accelerator.num_processes != asked.world_size:
        alone = f"each sees {accelerator.num_processes}: refusing to train separate models"
        raise UserError(f"{asked.world_size} processes were started, but {alone}")
    if asked.fsdp and not accelerator.is_fsdp2:
        raise UserError(f"the yaml asks for FSDP, but Accelerate chose {accelerator.distributed_type}")


def launch_errors(launcher: Launcher | None, config: Config, world_size: int, wants_fsdp: bool) -> Iterator[str]:
    """Yield what is wrong with the yaml, the launcher and the environment, one line each."""
    shell = launcher.environment if launcher else os.environ
    if overriding := [name for name in shell if name in OVERRIDING or (launcher and name.startswith(SWITCHES))]:
        for name in overriding:
            yield f"{name}={shell[name]} is set in the environment and would override the settings: unset it"
        return  # what follows would judge their effect
    for name in ("DEEPSPEED", "MEGATRON_LM"):
        if is_set(f"ACCELERATE_USE_{name}"):
            yield f"{name.lower()} is not supported here: use one of accelerate_configs/"
    if is_set("ACCELERATE_USE_PARALLELISM_CONFIG"):
        replicas, shards, *others = (int(os.environ.get(f"PARALLELISM_CONFIG_{axis}_SIZE", "1")) for axis in MESH)
        if shards == 1 or max(others) > 1:
            yield "parallelism_config: only dp_replicate_size and dp_shard_size are supported here, the latter above 1"
        elif replicas * shards != world_size:
            product = f"dp_replicate_size={replicas} x dp_shard_size={shards}"
            yield f"parallelism_config: {product} is not {world_size} processes: set the machines and the GPUs of each"
    if wants_fsdp and os.environ.get("FSDP_VERSION") != "2":
        yield "FSDP version 1 is not supported here: set fsdp_version: 2 in the yaml's fsdp_config"
    if is_set("FSDP_ACTIVATION_CHECKPOINTING"):
        yield "fsdp_activation_checkpointing computes wrong gradients with dropout: take it out of the yaml"
    if wants_fsdp and config.ddp_comm_hook:
        yield f"ddp_comm_hook={config.ddp_comm_hook} is DDP's, FSDP has none: take it out"
    if launcher:
        yield from _yaml_errors(launcher, world_size, wants_fsdp)


def _yaml_errors(launcher: Launcher, world_size: int, wants_fsdp: bool) -> Iterator[str]:
    file, asked = launcher.config_file, launcher.arguments.num_processes or launcher.config.get("num_processes")
    if asked and int(asked) != world_size:
        machines = launcher.arguments.num_machines or launcher.config.get("num_machines", 1)
        several = "use a yaml for several, such as accelerate_configs/ddp.yaml"
        advice = f"take a multiple of the {machines} machines" if int(machines) > 1 else several
        yield f"{asked} processes were asked for, but {file} starts {world_size}: {advice}"
    if launcher.config.get("distributed_type") == "FSDP" and not wants_fsdp:
        yield f"{file} asks for FSDP, but the command line switched it off: use another yaml"
    if launcher.config.get("use_cpu") and world_size > 1:
        yield f"{file}: use_cpu has no effect with several processes: take it out"
    known = [name for name in vars(launcher.arguments) if name.startswith(("fsdp_", "parallelism_config_"))]
    for key in (launcher.config.get("parallelism_config") or {}).keys() - {*known}:
        yield f"{file}: parallelism_config has no key {key}{nearest(key, known)}"
    for key in launcher.config.get("fsdp_config") or {}:
        if key == "ddp_comm_hook":
            yield f"{file}: {key} is a setting of train.py now: take it out, and add --{key}=bf16 to the command"
        elif key == "fsdp_sharding_strategy" and wants_fsdp:
            yield f"{key} has no effect in FSDP2: set fsdp_reshard_after_forward to true or false instead"
        elif (key if key.startswith("fsdp") else f"fsdp_{key}") not in known:
            yield f"{file}: fsdp_config has no key {key}{nearest(key, known)}"


def driver_errors() -> Iterator[str]:
    """Yield that the NVIDIA driver is too old for torch, which would only warn, and train on the CPU."""
    with warnings.catch_warnings():
        warnings.filterwarnings("error", ".*driver on your system is too old")
        try:
            torch.cuda.is_available()
        except UserWarning:
            built_for = f"torch {torch.__version__} is built for CUDA {torch.version.cuda}"
            advice = "update the driver, install a torch for an older CUDA, or use accelerate_configs/cpu.yaml"
            yield f"the NVIDIA driver is too old, {built_for}: {advice}"


def graph_errors(config: Config, is_cuda: bool, world_size: int, precision: str) -> Iterator[str]:
    """Yield why a step can't be recorded as a CUDA graph, one line each."""
    if not is_cuda or world_size > 1:
        yield "cuda_graphs=true is for one process on one NVIDIA GPU: use single_gpu.yaml, or leave it out"
    if config.accumulation(world_size) > 1:
        yield "cuda_graphs=true cannot accumulate gradients: leave micro_batch_size out"
    if precision == "fp16":
        yield "cuda_graphs=true would repeat one loss scale in each step: use bf16, or leave it out"
    if config.optim.name == "muon":
        yield "cuda_graphs=true cannot record muon, which asks the device for its learning rate: use adamw"
