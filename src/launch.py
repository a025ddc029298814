"""The only place that builds an Accelerator, and the guard: what the accelerate yaml asks for is what runs.

Accelerate lets a wrong yaml pass: misspelt FSDP keys are ignored, and on a machine without a GPU each process
believes to be alone and trains a model of its own. Here each of these ends the run, in one line. Without a GPU
every yaml runs as its CPU stand-in: the same processes, on gloo, sharding for real.
"""

import contextlib
import os
import shlex
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import torch
import yaml
from accelerate import Accelerator, PartialState
from accelerate.commands.config.config_args import default_config_file
from accelerate.commands.launch import launch_command_parser
from accelerate.utils import (
    DDPCommunicationHookType,
    DistributedDataParallelKwargs,
    DistributedType,
    FullyShardedDataParallelPlugin,
    GradScalerKwargs,
    InitProcessGroupKwargs,
)
from torch import nn
from torch.optim import Optimizer

from src.process import UserError
from src.config import Config
from src.malloc import keep_freed_memory
from src.settings import nearest, repeated_keys

OVERRIDING = ("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "ACCELERATE_TORCH_DEVICE")
"""Environment variables that Accelerate puts above the script's arguments and the yaml, and its launcher never sets."""
SWITCHES = ("ACCELERATE_USE_", "FSDP_")
"""What only the launcher should set, from the yaml; set in the shell, they add to what the yaml says."""
HOOK = "ddp_comm_hook"
"""Key of the yaml's fsdp_config, as Accelerate's launcher has none for it, and refuses new ones elsewhere."""
HOOKS = ("bf16", "fp16")
"""Of DDPCommunicationHookType: power_sgd keeps a state that checkpoints would have to hold."""


@dataclass(frozen=True)
class Launch:
    """What was asked for and what runs: printed, saved in summary.json and sent to W&B."""

    config_file: str | None
    """The accelerate yaml; None where another launcher than Accelerate's started the processes."""
    requested: dict[str, Any]
    """The yaml's (or command line's) distributed_type, num_processes and mixed_precision."""
    strategy: str
    """single, ddp, fsdp, fsdp_grad_op, fsdp_offload or fsdp_grad_op_offload."""
    num_processes: int
    device: str
    precision: str
    """fp32, bf16, fp16 or fp8; weights and optimizer are fp32 in all of them."""
    backend: str | None
    """Of the collectives: nccl, gloo, ...; None in a single process."""
    comm_hook: str | None
    """What DDP does to gradients on their way to the other processes: bf16, fp16, power_sgd, ...; None: nothing."""
    keeps_memory: bool
    """Whether freed memory stays with the process: see src/malloc.py."""
    note: str | None
    """Where the machine makes it differ from the yaml: why."""

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class _Launcher:
    """The `accelerate launch` process above this one: its arguments, yaml and environment."""

    words: list[str]
    arguments: Any
    config_file: str | None
    config: dict[str, Any]
    repeated: list[str]
    """What the yaml says twice, a line each."""
    environment: dict[str, str]


def build_accelerator(timeout: timedelta = timedelta(minutes=30)) -> tuple[Accelerator, Launch]:
    """Joins the processes that the launcher started.

    Args:
        timeout: how long a process waits for the others in a collective.

    Raises:
        ValueError: what would run is not what was asked for; one line per reason.
    """
    launcher = _find_launcher()
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    local_size = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    wants_cpu = os.environ.get("ACCELERATE_USE_CPU", "").lower() == "true"
    wants_fsdp = os.environ.get("ACCELERATE_USE_FSDP", "").lower() == "true"
    wants_precision = os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
    has_gpu = torch.accelerator.is_available() and not (world_size > 1 and torch.backends.mps.is_available())
    on_cpu = wants_cpu or not has_gpu

    mistakes = list(_mistakes(launcher, world_size, wants_fsdp))
    if not on_cpu and local_size > torch.accelerator.device_count():
        gpus = torch.accelerator.device_count()
        fitting = gpus * (world_size // local_size)
        mistakes.append(
            f"{local_size} processes on this machine, but it has {gpus} GPU(s): add --num_processes={fitting}"
        )
    is_stand_in = on_cpu and not wants_cpu
    precision, note = _precision(launcher, wants_precision, is_stand_in)
    if mistakes:
        raise UserError("\n".join(mistakes))

    if on_cpu:  # AdamW's averages for units that died become subnormal, which take ten times as long to compute with
        torch.set_flush_denormal(True)  # before there are threads: they inherit it
    if launcher and not (launcher.arguments.num_cpu_threads_per_process or "OMP_NUM_THREADS" in launcher.environment):
        cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
        torch.set_num_threads(max(1, cores // local_size))  # the launcher's default is 1
    keeps_memory = on_cpu and keep_freed_memory()
    if on_cpu and wants_fsdp:  # Accelerate shards only what it takes for a GPU job
        PartialState(cpu=True, timeout=timeout)._shared_state["distributed_type"] = DistributedType.MULTI_GPU
    plugin = FullyShardedDataParallelPlugin() if wants_fsdp else None
    if precision != "fp8":
        os.environ.pop("ACCELERATE_FP8_BACKEND", None)  # Accelerate would convert the model all the same
    halves = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.bfloat16}
    if plugin:
        from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy  # half a second

        if on_cpu and isinstance(plugin.cpu_offload, CPUOffloadPolicy):
            plugin.cpu_offload = CPUOffloadPolicy(pin_memory=False)
        if precision in halves:  # Accelerate's default reduces gradients in half precision too
            plugin.mixed_precision_policy = MixedPrecisionPolicy(halves[precision], reduce_dtype=torch.float32)
    no_scaler = GradScalerKwargs(enabled=False)  # src/bad_steps.py takes its place
    hook = (launcher.config.get("fsdp_config") or {}).get(HOOK) if launcher and world_size > 1 else None
    ddp = DistributedDataParallelKwargs(
        comm_hook=DDPCommunicationHookType(hook or "no"),
        gradient_as_bucket_view=True,  # else each gradient is copied out of the bucket that it was reduced in
    )
    handlers = [no_scaler, InitProcessGroupKwargs(timeout=timeout), ddp]
    accelerator = Accelerator(cpu=on_cpu, mixed_precision=precision, fsdp_plugin=plugin, kwargs_handlers=handlers)
    if precision == "fp16" and on_cpu:  # Accelerate would train in fp32 there, and say fp16
        accelerator.native_amp = True

    if accelerator.num_processes != world_size:
        raise UserError(
            f"{world_size} processes were started, but each sees {accelerator.num_processes}: "
            f"refusing to train separate models"
        )
    if wants_fsdp and not accelerator.is_fsdp2:
        raise UserError(f"the yaml asks for FSDP, but Accelerate chose {accelerator.distributed_type}")
    precision = {"no": "fp32"}.get(precision, precision)
    kind = "FSDP" if wants_fsdp else "MULTI_GPU" if world_size > 1 else "NO"
    backend = torch.distributed.get_backend() if torch.distributed.is_initialized() else None
    config_file = launcher.config_file if launcher else None
    if is_stand_in:
        what = f"the CPU stand-in for {config_file}" if config_file else "training on the CPU"
        on = f" on {backend}" if backend else ""
        sharding = ", sharding for real" if wants_fsdp else ""
        note = f"no GPU here: {what}, {world_size} process{'es'[: 2 * (world_size > 1)]}{on}{sharding}, {precision}"
    launch = Launch(
        config_file=config_file,
        requested={
            "distributed_type": (launcher.config if launcher else {}).get("distributed_type", kind),
            "num_processes": world_size,
            "mixed_precision": wants_precision,
        },
        strategy=_strategy(accelerator),
        num_processes=accelerator.num_processes,
        device=accelerator.device.type,
        precision=precision,
        backend=backend,
        comm_hook=hook,
        keeps_memory=keeps_memory,
        note=note,
    )
    return accelerator, launch


def command_to_go_on(config: Config) -> str:
    """What the user typed, but that a run which was to branch off, or to be new, goes on from its own checkpoint."""
    launcher = _find_launcher()
    if launcher:
        command = ["accelerate", "launch", *launcher.words]
    elif "TORCHELASTIC_RUN_ID" in os.environ:
        command = psutil.Process(os.getppid()).cmdline()
    else:
        command = sys.orig_argv
    return shlex.join(command if config.resume == "auto" else [*command, "--resume=auto"])


@contextlib.contextmanager
def local_main_process_first(accelerator: Accelerator) -> Iterator[None]:
    """As accelerator.local_main_process_first, but the others wait as long as it takes: collectives give up after some
    minutes, and to download and tokenise can take hours.
    """
    if accelerator.num_processes == 1:
        yield
        return
    patient: Any = torch.distributed.new_group(backend="gloo", timeout=timedelta(days=7))
    if not accelerator.is_local_main_process:
        torch.distributed.barrier(patient)
    yield
    if accelerator.is_local_main_process:
        torch.distributed.barrier(patient)


def prepare(
    accelerator: Accelerator, model: nn.Module, optimizers: list[Optimizer]
) -> tuple[nn.Module, list[Optimizer]]:
    """`accelerator.prepare`, and under FSDP the proof that blocks were wrapped and not only the whole model.

    Returns:
        The model, and the optimizers without Accelerate's wrapper: it knows about loss scales and accumulation, which
        the loop sees to itself, and looks for a package on the whole of sys.path in each step (docs/upstream.md).

    Raises:
        ValueError: FSDP found no blocks to wrap.
    """
    if accelerator.is_fsdp2:
        from_yaml = accelerator.state.fsdp_plugin.transformer_cls_names_to_wrap
        blocks = from_yaml or getattr(model, "_no_split_modules", None) or []
        classes = {type(module).__name__ for module in model.modules()}
        for block in blocks:
            if block not in classes:
                hint = nearest(block, sorted(classes))
                where = "fsdp_transformer_layer_cls_to_wrap" if from_yaml else "_no_split_modules"
                raise UserError(f"{where} names {block}, which {type(model).__name__} has not{hint}")
    name = type(model).__name__
    # said, as Accelerate would find out by importing DTensor, which takes half a second
    placement = None if accelerator.is_fsdp2 else [True] * (1 + len(optimizers))
    model, *prepared = accelerator.prepare(model, *optimizers, device_placement=placement)
    if accelerator.is_fsdp2 and sharded_units(model) < 2:
        raise UserError(
            f"FSDP wrapped nothing but the root: name the repeating blocks of {name} "
            f"in its _no_split_modules (a list of class names), or in the yaml's fsdp_transformer_layer_cls_to_wrap"
        )
    if accelerator.is_fsdp2 and accelerator.device.type == "cpu":
        from src.gloo import shorten_collectives

        shorten_collectives(model)
    return model, [optimizer.optimizer for optimizer in prepared]


def sharded_units(model: nn.Module) -> int:
    """How many units FSDP gathers and frees one after the other, the root among them; 0 without FSDP."""
    from torch.distributed.fsdp import FSDPModule

    return sum(isinstance(module, FSDPModule) for module in model.modules())


def peak_memory(accelerator: Accelerator) -> list[int]:
    """Bytes at most held by each process: allocated on the GPU, or resident where it trains on the CPU."""
    if accelerator.device.type == "cpu":
        import resource  # not on Windows

        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    else:
        peak = torch.accelerator.max_memory_allocated()
    return accelerator.gather(torch.tensor([peak], device=accelerator.device)).tolist()


def _find_launcher() -> _Launcher | None:
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
        break
    else:
        return None
    arguments = launch_command_parser().parse_args(words)
    file = arguments.config_file or (default_config_file if Path(default_config_file).is_file() else None)
    text = (folder / file).read_text() if file else "{}"
    return _Launcher(words, arguments, file, yaml.safe_load(text), list(repeated_keys(text)), environment)


def _mistakes(launcher: _Launcher | None, world_size: int, wants_fsdp: bool) -> Iterator[str]:
    shell = launcher.environment if launcher else os.environ
    if overriding := [name for name in shell if name in OVERRIDING or (launcher and name.startswith(SWITCHES))]:
        for name in overriding:
            yield f"{name}={shell[name]} is set in the environment and would override the settings: unset it"
        return  # what follows would judge their effect
    for name in ("DEEPSPEED", "MEGATRON_LM", "PARALLELISM_CONFIG"):
        if os.environ.get(f"ACCELERATE_USE_{name}", "").lower() == "true":
            yield f"{name.lower()} is not supported here: take one of accelerate_configs/"
    if launcher:
        yield from (f"{launcher.config_file}: {repeated}" for repeated in launcher.repeated)
        asked = launcher.arguments.num_processes or launcher.config.get("num_processes")
        if asked and int(asked) != world_size:
            yield (
                f"{asked} processes were asked for, but {launcher.config_file} starts {world_size}: "
                f"take a yaml for several, such as accelerate_configs/ddp.yaml"
            )
        if launcher.config.get("distributed_type") == "FSDP" and not wants_fsdp:
            yield f"{launcher.config_file} asks for FSDP, but the command line switched it off: take another yaml"
        if launcher.config.get("use_cpu") and world_size > 1:
            yield f"{launcher.config_file}: use_cpu has no effect on several processes: take it out"
        known = [name for name in vars(launcher.arguments) if name.startswith("fsdp_")]
        fsdp_config = launcher.config.get("fsdp_config") or {}
        if HOOK in fsdp_config and wants_fsdp:
            yield f"{launcher.config_file}: {HOOK} is DDP's, FSDP has none: take it out"
        elif fsdp_config.get(HOOK, HOOKS[0]) not in HOOKS:
            yield f"{launcher.config_file}: {HOOK}={fsdp_config[HOOK]}: must be {' or '.join(HOOKS)}, or be left out"
        for key in fsdp_config.keys() - {HOOK}:
            if (key if key.startswith("fsdp") else f"fsdp_{key}") not in known:
                yield f"{launcher.config_file}: fsdp_config has no key {key}{nearest(key, known)}"
    if wants_fsdp and os.environ.get("FSDP_VERSION") != "2":
        yield "FSDP version 1 is not supported here: set fsdp_version: 2 in the yaml's fsdp_config"
    if wants_fsdp and launcher and "fsdp_sharding_strategy" in (launcher.config.get("fsdp_config") or {}):
        yield "fsdp_sharding_strategy has no effect in FSDP2: set fsdp_reshard_after_forward to true or false instead"
    if os.environ.get("FSDP_ACTIVATION_CHECKPOINTING", "").lower() == "true":
        yield "fsdp_activation_checkpointing computes wrong gradients with dropout: take it out of the yaml"


def _precision(launcher: _Launcher | None, asked: str, is_stand_in: bool) -> tuple[str, str | None]:
    """The mixed precision that runs and, where this machine makes it another than was asked for, why."""
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


def _strategy(accelerator: Accelerator) -> str:
    if not accelerator.is_fsdp2:
        return "ddp" if accelerator.use_distributed else "single"
    from torch.distributed.fsdp import CPUOffloadPolicy

    plugin = accelerator.state.fsdp_plugin
    grad_op = "" if plugin.reshard_after_forward else "_grad_op"
    offload = "_offload" if isinstance(plugin.cpu_offload, CPUOffloadPolicy) else ""
    return f"fsdp{grad_op}{offload}"
