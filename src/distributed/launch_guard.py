"""The guard: what the accelerate yaml asks for is what runs.

Accelerate lets a wrong yaml pass: misspelt FSDP keys are ignored, and on a machine without a GPU each process believes
it is alone and trains a model of its own. Here each of these ends the run, in one line.
"""

import ctypes
import math
import os
from collections.abc import Iterator

import torch
from accelerate import Accelerator

from src.config.config import Config
from src.config.errors import UserError
from src.config.settings import nearest
from src.distributed.launcher import Asked, Launcher, is_set

OVERRIDING = ("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "ACCELERATE_TORCH_DEVICE")
"""Environment variables that Accelerate puts above the script's arguments and the yaml, and its launcher never sets."""
SWITCHES = ("ACCELERATE_USE_", "FSDP_", "PARALLELISM_CONFIG_")
"""Prefixes of what only the launcher should set, from the yaml; set in the shell, they add to what the yaml says."""


def refuse_another_strategy(accelerator: Accelerator, asked: Asked) -> None:
    """Raise a UserError if Accelerate has joined the processes in another way than was asked for."""
    if accelerator.num_processes != asked.world_size:
        alone = f"each sees {accelerator.num_processes}: refusing to train separate models"
        raise UserError(f"{asked.world_size} processes were started, but {alone}")
    if asked.fsdp and not accelerator.is_fsdp2:
        raise UserError(f"the yaml asks for FSDP, but Accelerate chose {accelerator.distributed_type}")


def unusable_gpu() -> str | None:
    """Return why torch can't use the NVIDIA GPU that this machine seems to have; None if it has none, it is hidden, or
    its driver is new enough."""
    known = ctypes.c_int()
    try:
        ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(known))
    except OSError:  # no driver
        return None
    major, minor = divmod(known.value, 1000)
    driver, built_for = f"{major}.{minor // 10}", torch.version.cuda
    is_new_enough = built_for and major >= int(built_for.partition(".")[0])  # minor versions mix
    if is_new_enough or os.environ.get("CUDA_VISIBLE_DEVICES") == "":
        return None
    there = f"the driver of the NVIDIA GPU knows CUDA {driver}, and this torch {torch.__version__}"
    if not built_for:
        return f"{there} is built without CUDA: install one that has it"
    return f"{there} needs {built_for}: update the driver, or install a torch for CUDA {driver} or older"


def launch_errors(
    launcher: Launcher | None, config: Config, asked: Asked, on_cpu: bool, precision: str
) -> Iterator[str]:
    """Yield why what would run is not what was asked for, one line per reason: what overrides the settings or, if
    nothing does, what the devices of this machine cannot run, and what is wrong with the launcher and its yaml.

    Args:
        on_cpu: whether the processes will train on the CPU.
        precision: the mixed precision that will run.
    """
    shell = launcher.environment if launcher else os.environ
    overriding = [name for name in shell if name in OVERRIDING or (launcher and name.startswith(SWITCHES))]
    for name in overriding:
        yield f"{name}={shell[name]} is set in the environment and would override the settings: unset it"
    if overriding:
        return  # the others would judge its effect
    if on_cpu and not asked.cpu and (reason := unusable_gpu()):
        yield f"{reason}; accelerate_configs/cpu.yaml trains on the CPU"
    gpus = torch.accelerator.device_count()
    if not on_cpu and asked.local_world_size > gpus:
        yield f"{asked.local_world_size} processes on this machine, but it has {gpus} GPU(s): set --num_processes"
    if config.cuda_graphs:
        is_alone = asked.world_size == config.gradient_accumulation_steps(1) == 1
        is_cuda = not on_cpu and torch.cuda.is_available()
        if not (is_alone and is_cuda) or precision == "fp16" or config.optim.name == "muon":
            yield "cuda_graphs=true is for one NVIDIA GPU, without accumulation, fp16 or muon"
    if is_set("ACCELERATE_USE_DEEPSPEED"):
        yield "deepspeed is not supported here: use one of accelerate_configs/"
    yield from _mesh_errors(config, asked)
    if asked.fsdp and os.environ.get("FSDP_VERSION") != "2":
        yield "FSDP version 1 is not supported here: set fsdp_version: 2 in the yaml's fsdp_config"
    if is_set("FSDP_ACTIVATION_CHECKPOINTING"):
        yield "fsdp_activation_checkpointing computes wrong gradients with dropout: take it out of the yaml"
    if os.environ.get("ACCELERATE_DYNAMO_BACKEND", "NO").upper() != "NO":
        yield "dynamo_config is not supported here, as it renames the weights: set --compile=true after train.py"
    if asked.fsdp and config.ddp_comm_hook:
        yield f"ddp_comm_hook={config.ddp_comm_hook} is DDP's, FSDP has none: take it out"
    if not launcher:
        return
    file, wanted = launcher.config_file, launcher.arguments.num_processes or launcher.config.get("num_processes")
    if wanted and int(wanted) != asked.world_size:
        yield (
            f"{wanted} processes were asked for, but {file or 'accelerate launch'} starts {asked.world_size}: "
            "use a yaml for several, such as accelerate_configs/ddp.yaml, or a multiple of the machines"
        )
    for section, prefix in (("fsdp_config", "fsdp_"), ("parallelism_config", "parallelism_config_")):
        known = [name for name in vars(launcher.arguments) if name.startswith(prefix)]
        for key in launcher.config.get(section) or {}:
            if prefix + key.removeprefix(prefix) not in known:
                yield f"{file}: {section} has no key {key}{nearest(key, known)}"
    if launcher.arguments.parallelism_config_cp_size != asked.cp_size and not launcher.config.get("parallelism_config"):
        yield f"--parallelism_config_cp_size: {file} has no parallelism_config; use accelerate_configs/fsdp_cp.yaml"


def _mesh_errors(config: Config, asked: Asked) -> Iterator[str]:
    """Yield what is wrong with the sizes in the yaml's parallelism_config, one line each."""
    axes = ("dp_replicate", "dp_shard", "cp", "tp", "sp")
    sizes = {f"{axis}_size": os.environ.get(f"PARALLELISM_CONFIG_{axis.upper()}_SIZE", "1") for axis in axes}
    instead = {
        "tp_size": "fsdp_cp.yaml splits sequences, fsdp.yaml weights: docs/accelerate.md says why",
        "sp_size": "it is DeepSpeed's; cp_size splits sequences by the same all-to-all",
    }
    for name, hint in instead.items():
        if sizes.pop(name) != "1":
            yield f"parallelism_config: {name} is not supported here: {hint}"
    if math.prod(map(int, sizes.values())) not in (1, asked.world_size):
        product = " x ".join(f"{name} {size}" for name, size in sizes.items())
        yield f"parallelism_config: {product} must be the number of processes, {asked.world_size}: change one"
    if sizes["dp_replicate_size"] != "1" and sizes["dp_shard_size"] == "1":
        yield "parallelism_config: dp_replicate_size is for HSDP, which shards too: set dp_shard_size to more than 1"
    if asked.cp_size == 1:
        return
    if not asked.fsdp:
        yield "parallelism_config: cp_size is FSDP's, which shards over these processes too: use fsdp_cp.yaml"
    if not config.task.splits_sequences:
        yield f"task.name={config.task.name}: no sequences to split over processes: take cp_size out of the yaml"
