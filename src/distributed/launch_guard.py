"""The guard: what the accelerate yaml asks for is what runs.

Accelerate lets a wrong yaml pass: misspelt FSDP keys are ignored, and on a machine without a GPU each process believes
it is alone and trains a model of its own. Here each of these ends the run, in one line.
"""

import os
import shlex
import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
import yaml
from accelerate.commands.config.config_args import default_config_file
from accelerate.commands.launch import launch_command_parser

from src.config.config import Config
from src.config.errors import explained
from src.config.settings import nearest, read_yaml

OVERRIDING = ("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "ACCELERATE_TORCH_DEVICE")
"""Environment variables that Accelerate puts above the script's arguments and the yaml, and its launcher never sets."""
MESH = ("DP_REPLICATE", "DP_SHARD", "TP", "CP", "SP")
SWITCHES = ("ACCELERATE_USE_", "FSDP_", "PARALLELISM_CONFIG_")
"""Prefixes of what only the launcher should set, from the yaml; set in the shell, they add to what the yaml says."""


@dataclass(frozen=True)
class Launcher:
    """The `accelerate launch` process above this one: its arguments, yaml and environment."""

    words: list[str]
    arguments: Any
    config_file: str | None
    config: dict[str, Any]
    repeated_keys: list[str]
    """A line for each key that the yaml repeats."""
    environment: dict[str, str]


def find_launcher() -> Launcher | None:
    """Return Accelerate's launcher; None if another one, or none, started this process."""
    try:
        parent = psutil.Process(os.getppid())
        command, environment, folder = parent.cmdline(), parent.environ(), Path(parent.cwd())
    except psutil.Error:
        return None
    names = [Path(word).name for word in command]
    for start, name in enumerate(names):
        if name == "accelerate" and names[start + 1 : start + 2] == ["launch"]:
            words = command[start + 2 :]
        elif name in ("accelerate-launch", "accelerate.commands.launch"):
            words = command[start + 1 :]
        else:
            continue
        arguments = launch_command_parser().parse_args(words)
        file = arguments.config_file or (default_config_file if Path(default_config_file).is_file() else None)
        with explained(f"{file}: ", yaml.YAMLError):
            config, repeated = read_yaml((folder / file).read_text() if file else "{}")
        return Launcher(words, arguments, file, config, repeated, environment)
    return None


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
    yield from (f"{file}: {repeated}" for repeated in launcher.repeated_keys)
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


def choose_precision(launcher: Launcher | None, asked: str, is_stand_in: bool) -> tuple[str, str | None]:
    """Return the mixed precision that runs (no, bf16, fp16, fp8) and, if this machine forces another one than was asked
    for, why."""
    if is_stand_in and launcher and not launcher.arguments.mixed_precision:
        return "no", None  # the yaml means its GPUs; --mixed_precision on the command line means this run
    if not torch.cuda.is_available():
        return asked, None
    has_bf16, gpu = torch.cuda.is_bf16_supported(including_emulation=False), torch.cuda.get_device_name()
    if asked in ("bf16", "fp8") and not has_bf16:
        return "no", f"{gpu} has no {asked}: training in fp32"
    if asked == "fp8" and torch.version.cuda and torch.cuda.get_device_capability() < (8, 9):
        return "bf16", f"{gpu} has no fp8: training in bf16"
    return asked, None


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


def resume_command(config: Config) -> str:
    """Return what the user typed, with --resume=auto added if the run was to branch off or start anew, so that it
    continues from its own checkpoint."""
    launcher = find_launcher()
    if launcher:
        command = ["accelerate", "launch", *launcher.words]
    elif "TORCHELASTIC_RUN_ID" in os.environ:
        command = psutil.Process(os.getppid()).cmdline()
    else:
        command = sys.orig_argv
    return shlex.join(command if config.resume == "auto" else [*command, "--resume=auto"])


def is_set(name: str) -> bool:
    """Return whether the launcher has set this switch."""
    return os.environ.get(name, "").lower() == "true"
