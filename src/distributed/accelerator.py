"""The processes of a run: build the Accelerator, prepare the model, and gather facts about all processes.

Without a GPU every yaml runs on the CPU instead: the same processes, on gloo, sharding for real.
"""

import contextlib
import os
import resource
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from accelerate import Accelerator, PartialState
from accelerate.utils import (
    DDPCommunicationHookType,
    DistributedDataParallelKwargs,
    DistributedType,
    FullyShardedDataParallelPlugin,
    GradScalerKwargs,
    InitProcessGroupKwargs,
    gather_object,
)
from joblib import cpu_count
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy
from torch.optim import SGD

from src.config.config import Config
from src.config.environment import LaunchEnv, processes
from src.config.errors import UserError, as_user_error, raise_if_any
from src.distributed.cpu import tune_for_cpu
from src.distributed.launcher import ParentLauncher, find_launcher, launch_errors, refuse_another_strategy
from src.distributed.process import SIGNALS
from src.tasks.base import ContextParallel, Task

for harmless in (
    "Slicing a flattened dim",  # Accelerate does, for HSDP
    r"`?torch\.distributed\.all_gather_into_tensor",  # its gather does, on NCCL
    # of weights with one input channel, which are also channels-last; for other weights the warning matters
    r"(?s)Grad strides do not match bucket view strides.*sizes\(\) = \[\d+, 1, ",
    "CUDA initialization",  # launcher.py explains it in one line
):
    warnings.filterwarnings("ignore", harmless)
COMPUTE_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.bfloat16}
BLOCKS = "_no_split_modules (a list of class names), or fsdp_transformer_layer_cls_to_wrap in the yaml"
"""Where a user names the modules that FSDP gathers one by one."""
TUNERS: dict[str, Callable[[nn.Module, bool], list[str]]] = {
    # (model, whether FSDP will shard it) -> what was done
    "cpu": tune_for_cpu,
}
"""By device type, a function that speeds up a model before it is wrapped or sharded."""
FIRST_MINUTES = 30.0
"""How long processes wait for each other at least, until the first step is done: loading and compiling take time."""


@dataclass(frozen=True, kw_only=True)
class RunSetup:
    """The requested setup and the actual one: printed, saved in summary.json and logged to W&B."""

    config_file: str | None
    """The accelerate yaml; None if another launcher, or none, started the processes."""
    requested_precision: str
    """mixed_precision from the yaml or the command line; all else is as requested, or the run is refused."""
    strategy: str
    """single, ddp, fsdp or hsdp; the latter two may be followed by _cp and its size, _grad_op and _offload."""
    num_processes: int
    device: str
    precision: str
    """fp32, bf16, fp16 or fp8; weights and optimizer state are always fp32."""
    backend: str | None
    """Collectives library: nccl, gloo, …; None for a single process."""
    comm_hook: str | None
    """Dtype that DDP all-reduces gradients in: bf16 or fp16; None: their own."""
    note: str | None
    """Why the actual setup differs from the yaml; None if it does not."""


def build_accelerator(config: Config[Task]) -> tuple[Accelerator, RunSetup]:
    """Join the processes that the launcher started.

    Raises:
        UserError: the run would differ from what was asked for; one line per reason.
    """
    SIGNALS.answer_by(SIGNALS.die_later)  # C++ code, which runs no Python handlers, may wait for a lost process
    launcher, asked = find_launcher(), LaunchEnv()
    are_apples = asked.world_size > 1 and torch.backends.mps.is_available()  # MPS has no collectives
    on_cpu = asked.cpu or are_apples or not torch.accelerator.is_available()
    is_cpu_fallback = on_cpu and not asked.cpu
    precision, note = choose_precision(launcher, asked.precision, is_cpu_fallback)
    if config.mode == "check" and precision != "no":
        precision, note = "no", f"--check compares in fp32; the run itself uses {precision}"
    raise_if_any(launch_errors(launcher, config, asked, on_cpu))

    _set_up_cpu(launcher, on_cpu, asked.local_world_size)
    if precision != "fp8":
        os.environ.pop("ACCELERATE_FP8_BACKEND", None)  # else Accelerate would still convert the model
    timeout = first_timeout(config)
    comm_hook = config.ddp_comm_hook if asked.world_size > 1 else None
    handlers = [
        GradScalerKwargs(enabled=False),  # Progress.update_loss_scale replaces it
        InitProcessGroupKwargs(timeout=timeout),
        DistributedDataParallelKwargs(
            comm_hook=DDPCommunicationHookType(comm_hook or "no"),
            gradient_as_bucket_view=True,  # else DDP copies each gradient out of its bucket
        ),
    ]
    with as_user_error("accelerate: ", ValueError):  # such as a value of the yaml that it doesn't know
        accelerator = Accelerator(
            cpu=on_cpu,
            mixed_precision=precision,
            fsdp_plugin=_fsdp_plugin(precision, on_cpu, timeout) if asked.fsdp else None,
            kwargs_handlers=handlers,
        )
    if precision == "fp16" and on_cpu:  # else Accelerate trains in fp32 but reports fp16
        accelerator.native_amp = True
    refuse_another_strategy(accelerator, asked)
    set_timeout(accelerator, timeout)  # the groups of a mesh have torch's default

    config_file = launcher.config_file if launcher else None
    backend = torch.distributed.get_backend() if torch.distributed.is_initialized() else None
    precision = "fp32" if precision == "no" else precision
    if is_cpu_fallback:
        stand_in = f"the CPU stand-in for {config_file}" if config_file else "training on the CPU"
        started = f"{processes(asked.world_size)}{f' on {backend}' if backend else ''}"
        reason = "Apple's GPU serves one process alone" if are_apples else "no GPU here"
        note = f"{reason}: {stand_in}, {started}{', sharding for real' if asked.fsdp else ''}, {precision}"
    return accelerator, RunSetup(
        config_file=config_file,
        requested_precision=asked.precision,
        strategy=_strategy(accelerator),
        num_processes=accelerator.num_processes,
        device=accelerator.device.type,
        precision=precision,
        backend=backend,
        comm_hook=comm_hook,
        note=note,
    )


def first_timeout(config: Config) -> timedelta:
    """Return how long collectives wait for a process until the first step is done."""
    return timedelta(minutes=max(config.timeout_minutes, FIRST_MINUTES))


def set_timeout(accelerator: Accelerator, timeout: timedelta, *more: Any) -> None:
    """Set how long collectives wait for a process, in the accelerator's groups and in `more`."""
    mesh = accelerator.torch_device_mesh
    own = (*mesh.get_all_groups(), mesh["dp_shard_cp"].get_group()) if mesh else ()
    for group in filter(None, (torch.distributed.group.WORLD, *own, *more)):
        group.set_timeout(timeout)


def choose_precision(launcher: ParentLauncher | None, asked: str, is_cpu_fallback: bool) -> tuple[str, str | None]:
    """Return the mixed precision to use (no, bf16, fp16, fp8) and, if the hardware lacks the `asked` one, a note."""
    if is_cpu_fallback and launcher and not launcher.arguments.mixed_precision:
        return "no", None  # a yaml's precision is meant for GPUs; --mixed_precision on the command line for this run
    if not torch.cuda.is_available():
        return asked, None
    gpu = torch.cuda.get_device_name()
    if asked in ("bf16", "fp8") and not torch.cuda.is_bf16_supported(including_emulation=False):
        return "no", f"{gpu} has no {asked}: training in fp32"
    if asked == "fp8" and torch.version.cuda and torch.cuda.get_device_capability() < (8, 9):
        return "bf16", f"{gpu} has no fp8: training in bf16"
    return asked, None


def _set_up_cpu(launcher: ParentLauncher | None, on_cpu: bool, local_world_size: int) -> None:
    """Set this process's floating-point mode and number of threads, before any thread starts: threads inherit the
    mode."""
    if on_cpu:  # AdamW's averages for dead units become subnormal, and those are ten times slower
        torch.set_flush_denormal(True)
    if launcher and not (launcher.arguments.num_cpu_threads_per_process or "OMP_NUM_THREADS" in launcher.environment):
        # else the launcher's default, 1, would apply; of the cores, a container may have a share
        torch.set_num_threads(max(1, cpu_count() // local_world_size))


def _fsdp_plugin(precision: str, on_cpu: bool, timeout: timedelta) -> FullyShardedDataParallelPlugin:
    if on_cpu:  # Accelerate only shards what looks like a GPU job
        PartialState(cpu=True, timeout=timeout)._shared_state["distributed_type"] = DistributedType.MULTI_GPU
    plugin = FullyShardedDataParallelPlugin()
    if on_cpu and isinstance(plugin.cpu_offload, CPUOffloadPolicy):
        plugin.cpu_offload = CPUOffloadPolicy(pin_memory=False)
    if precision in COMPUTE_DTYPES:  # Accelerate's default reduces gradients in half precision too
        plugin.mixed_precision_policy = MixedPrecisionPolicy(COMPUTE_DTYPES[precision], reduce_dtype=torch.float32)
    return plugin


def _strategy(accelerator: Accelerator) -> str:
    if not accelerator.is_fsdp2:
        return "ddp" if accelerator.use_distributed else "single"
    plugin = accelerator.state.fsdp_plugin
    cp_size = context_parallel(accelerator).size
    cp = f"_cp{cp_size}" if cp_size > 1 else ""
    grad_op = "" if plugin.reshard_after_forward else "_grad_op"
    offload = "_offload" if isinstance(plugin.cpu_offload, CPUOffloadPolicy) else ""
    return f"{'hsdp' if num_replicas(accelerator) > 1 else 'fsdp'}{cp}{grad_op}{offload}"


def sum_dtype(device: torch.device) -> torch.dtype:
    """Return the dtype for sums of losses and counts: float64, or float32 on MPS, which has no float64."""
    # the order of summation differs with the number of processes; in float64 that is far below a loss's rounding
    return torch.float32 if device.type == "mps" else torch.float64


def num_replicas(accelerator: Accelerator) -> int:
    """Return how many processes hold the same gradients: all under DDP, one under FSDP, the replicas under HSDP."""
    if not accelerator.is_fsdp2:
        return accelerator.num_processes
    return accelerator.parallelism_config.dp_replicate_size if accelerator.parallelism_config else 1


def context_parallel(accelerator: Accelerator) -> ContextParallel:
    """Return this process's place in the group of neighbours that share its sequences. FSDP shards over them too."""
    mesh = accelerator.torch_device_mesh
    if not mesh or "cp" not in mesh.mesh_dim_names:
        return ContextParallel()
    group = mesh["cp"]
    return ContextParallel(group.get_local_rank(), group.size(), group.get_group().group_name)


@contextlib.contextmanager
def local_main_process_first(accelerator: Accelerator) -> Iterator[None]:
    """Do as accelerator.local_main_process_first, but without its timeout: collectives time out after minutes, while
    downloading and tokenizing can take hours."""
    if accelerator.num_processes == 1:
        yield
        return
    patient: Any = torch.distributed.new_group(backend="gloo", timeout=timedelta(days=7))
    if not accelerator.is_local_main_process:
        torch.distributed.barrier(patient)
    yield
    if accelerator.is_local_main_process:
        torch.distributed.barrier(patient)
    accelerator.wait_for_everyone()  # in the group that is left, so that nobody is waiting in the other one
    torch.distributed.destroy_process_group(patient)


def prepare(accelerator: Accelerator, model: nn.Module) -> nn.Module:
    """Return the model, wrapped or sharded by Accelerate. Under FSDP, make sure that more than the root was wrapped.
    Optimizers are built afterwards, and not prepared: Accelerate's wrapper would handle loss scaling and accumulation,
    which the loop does itself.

    Raises:
        UserError: FSDP found no blocks to wrap, the model has none of that name, or it has a scalar parameter.
    """
    if not accelerator.is_fsdp2:
        return accelerator.prepare(model)
    if accelerator.parallelism_config:
        # else its hooks drop attention masks and refuse sliding windows
        accelerator.parallelism_config.cp_size = 1
    with as_user_error("FSDP: ", ValueError):
        model, _ = accelerator.prepare(model, SGD([next(model.parameters())]))  # it requires an optimizer
    if len(sharded_units(model)) < 2:
        raise UserError(f"FSDP would gather the whole model at once: name its repeating blocks in {BLOCKS}")
    return model


def sharded_units(model: nn.Module) -> list[Any]:
    """Return the FSDP units, the root first; none without FSDP. Accelerate makes units of a language model's
    embeddings, last norm and head without being asked."""
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def peak_memory(accelerator: Accelerator) -> list[int]:
    """Return each process's peak memory in bytes: allocated on the GPU, or resident on the CPU."""
    if accelerator.device.type == "cpu":
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    else:
        peak = torch.accelerator.max_memory_allocated()
    return gather_object([peak])


def machine_differences(reports: list[Any]) -> Iterator[str]:
    """Yield a line for each machine that differs from the first. Each reports its host name and facts by name."""
    name, first, *_ = reports[0]
    for number, (host, own, *_) in enumerate(reports):
        if other := [key for key in first | own if own.get(key) != first.get(key)]:
            here, there = (", ".join(f"{key} {has.get(key)}" for key in other) for has in (own, first))
            yield f"machine {number} ({host}) has {here}; machine 0 ({name}) has {there}"


def shut_down(accelerator: Accelerator) -> None:
    """Leave the process group once all processes are done: gloo may abort if one of them leaves earlier."""
    SIGNALS.release()
    accelerator.wait_for_everyone()
    accelerator.end_training()
