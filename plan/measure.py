"""Run a few steps of the run itself as process 0 of any number, on GPUs that aren't there: memory, work, host time.

All other processes are assumed identical, and weights are uninitialized memory.
"""

import gc
import os
import re
import time
from bisect import bisect
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils.launch import prepare_multi_gpu_env
from torch.distributed.fsdp import CPUOffloadPolicy

from plan.gpus import Gpu
from plan.model import allocate, build_skeleton
from plan.null_gpu import NullGpu, join_alone, null_environment
from plan.work import Work
from src.checkpoint.tensors import rank_state_dict, run_tensors
from src.config.config import Config, load_config
from src.config.errors import UserError
from src.distributed.accelerator import build_accelerator, prepare
from src.distributed.stop import StopSignal
from src.parts import AT_START
from src.tasks import TASKS
from src.tasks.base import Task
from src.training.batches import CountedSteps, MicroBatch, evaluation_batches, training_steps
from src.training.evaluation import evaluate_batches
from src.training.gradients import to_local
from src.training.held import tensors_of
from src.training.optim import build_optimizers, extended
from src.training.progress import Progress
from src.training.run import ADJUSTMENTS, TRANSFORMS, Run, begin_task, build_data
from src.training.state import ResumePoint
from train import train_step

NO_LIMIT = 100_000
"""GiB of a GPU on which everything fits."""
MAX_PER_MACHINE = 16
"""Most GPUs that the null GPU simulates."""
KERNELS = ("launch", "gemm", "conv", "triton", "graph_launch")
"""null_gpu.c's names for kernel launches."""

Peaks = dict[str, tuple[int, int]]
"""Peak bytes, allocated and reserved, by phase: load, step, evaluation, save."""


@dataclass(frozen=True)
class Setup:
    """A run under one accelerate yaml, on a number of GPUs."""

    arguments: tuple[str, ...]
    """Arguments of train.py."""
    yaml: str
    gpus: int
    gpu: Gpu
    cp_size: int = 1
    """GPUs that share each sequence."""
    added: str = ""
    """The last setting among the arguments that the plan has switched on, as the run doesn't fit without."""

    @property
    def name(self) -> str:
        """Return the yaml's name and, if GPUs share sequences, how many; and what the plan has switched on."""
        shared_by = str(self.cp_size) if self.cp_size > 1 else ""
        return f"{Path(self.yaml).stem}{shared_by}{' +' * bool(self.added)}{self.added}"


@dataclass(kw_only=True)
class Measured:
    """The measurements of a Setup. Bytes are counted on one process."""

    strategy: str
    micro_batch: int
    """Examples per forward pass: the run's own number if that fits, else the largest that does; 1 if none does."""
    largest: int
    """The largest micro-batch that fits and divides each process's part of the global batch; 0: none does."""
    accumulation: int
    """Micro-batches per step."""
    model_flops: float
    """Floating-point operations per step, over all processes, as Task.flops counts them; 0: unknown."""
    tokens: float = 0
    """Tokens per step, over all processes, without padding; 0 if the data are not text."""
    total_steps: int
    memory: Peaks
    parts: dict[str, int]
    """The step's bytes by kind: parameters, gradients, optimizer."""
    work: dict[str, float]
    """Counts of Work for a step, and its `kernels` and `host_seconds` on this machine."""
    optimizations: list[str]
    """The choices made for this device and dtype."""


def environment_for(gpu: Gpu) -> dict[str, str]:
    """Return the environment variables that have a new process measure runs on this GPU."""
    return null_environment(
        MAX_PER_MACHINE, NULL_GPU_GIB=str(NO_LIMIT), NULL_GPU_NAME=gpu.name, NULL_GPU_CAPABILITY=gpu.capability
    )


def launcher_arguments(setup: Setup) -> list[str]:
    """Return the arguments of `accelerate launch` that are the same on all machines."""
    words = ["--config_file", setup.yaml, "--num_processes", str(setup.gpus)]
    machines = setup.gpus // setup.gpu.gpus_per_machine
    if machines > 1:
        words += ["--num_machines", str(machines)]
    sizes = {}
    if "hsdp" in setup.yaml:
        sizes = {"dp_replicate": machines, "dp_shard": setup.gpus // machines}
    if setup.cp_size > 1:
        sizes = {"dp_shard": setup.gpus // setup.cp_size, "cp": setup.cp_size}
    return [*words, *(f"--parallelism_config_{name}_size={size}" for name, size in sizes.items())]


def has_config_alone(task: Any) -> bool:
    """Return whether the task trains a language model whose folder has a config but no tokenizer."""
    if getattr(task, "tokenizer", "the model's"):
        return False
    files = " ".join(file.name for file in Path(task.model or os.devnull).glob("*"))
    return "config.json" in files and not re.search("token|vocab|spiece", files)


def build_without_values(config: Config[Task]) -> Run:
    """Build the run as train.py does, but with uninitialized weights and no output folder."""
    for act in AT_START:
        act(config)
    accelerator, launch = build_accelerator(config)
    if launch.strategy.endswith("offload"):  # pinning would copy, and fill the host's memory
        accelerator.state.fsdp_plugin.cpu_offload = CPUOffloadPolicy(pin_memory=False)
    config = begin_task(config, launch, ResumePoint())
    train_set, eval_set = build_data(config, accelerator)
    model = build_skeleton(config.task)
    for adjust in ADJUSTMENTS:
        adjust(model, config)
    for transform in TRANSFORMS:
        transform(model, config, accelerator)
    if not accelerator.is_fsdp2:
        allocate(model, accelerator.device)
    model = prepare(accelerator, model)
    allocate(model, torch.device("cpu") if launch.strategy.endswith("offload") else accelerator.device)
    optimizers = extended(config, model, build_optimizers(config.optim, model))
    return Run(
        config=config,
        accelerator=accelerator,
        launch=launch,
        resume=ResumePoint(),
        model=model,
        optimizers=optimizers,
        progress=Progress(),
        train_set=train_set,
        eval_set=eval_set,
        origin=None,  # type: ignore[arg-type]  # nothing is saved
        metadata={},  # nothing is reported
    )


def measure(setup: Setup, share: float) -> Measured:
    """Measure the run's first process, and find the micro-batches that fit into this share of the GPU's memory. Call it
    in a process of its own: it changes global state for good.

    Raises:
        torch.OutOfMemoryError: micro-batches fit by the sum of their bytes, but not once memory is fragmented.
    """
    # the environment that Accelerate's launcher, and below torch's beneath it, give process 0
    words = [*launcher_arguments(setup), "--machine_rank=0", "--main_process_ip=127.0.0.1", "--main_process_port=0"]
    launched, *_ = _validate_launch_command(launch_command_parser().parse_args([*words, "train.py"]))
    os.environ |= prepare_multi_gpu_env(launched)
    # this process alone bootstraps NCCL's communicators, however many others there are
    os.environ["TORCH_NCCL_RANKS_PER_ROOT"] = str(setup.gpus)
    os.environ["TERM"] = "dumb"  # no bars below the plan's own
    gc.disable()  # reference cycles keep memory of DDP's first steps until a collection happens to run: count it
    gc.freeze()  # explicit collections skip the objects that exist by now
    torch.backends.cuda.enable_cudnn_sdp(False)  # the null GPU has no cuDNN; flash attention takes as much memory
    if launched.use_fsdp or launched.multi_gpu:
        os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": str(setup.gpus), "TORCHELASTIC_RUN_ID": "none"}
        os.environ["LOCAL_WORLD_SIZE"] = str(min(setup.gpus, setup.gpu.gpus_per_machine))
        join_alone(setup.gpus)
    config = load_config([*setup.arguments], TASKS)
    if has_config_alone(config.task):
        config = load_config([*setup.arguments, "--task.tokenizer=bytes"], TASKS)
    return Trial(build_without_values(config), setup.gpu).measured(share)


def peak_bytes() -> tuple[int, int]:
    """Return the peak bytes, allocated and reserved, since the last call."""
    most = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
    torch.cuda.reset_peak_memory_stats()
    return most


def highest(memory: Peaks) -> int:
    """Return the bytes that have to fit: the most that any phase allocates."""
    allocated, _ = max(memory.values())
    return allocated


class Trial:
    """Takes steps of a run, with micro-batches of various sizes."""

    def __init__(self, run: Run, gpu: Gpu) -> None:
        self._run, self._gpu = run, gpu
        self._is_offloaded = run.launch.strategy.endswith("offload")
        # computed, as a step clears them
        self._gradients = sum(to_local(weight).nbytes for weight in run.parameters if weight.requires_grad)
        # DDP's second step makes new buckets, and torch keeps the first ones until its watchdog, which wakes up every
        # 0.1 s, sees that they were reduced: on a GPU usually not before the forward pass has ended, but here at any
        # time. So wait until they are freed, and add their bytes.
        self._kept = self._gradients if run.launch.strategy == "ddp" else 0
        self._load = peak_bytes()

    def measured(self, share: float) -> Measured:
        """Return the measurements, as `measure` does."""
        run, data_size = self._run, self._run.data_size
        own = run.config.forward_batch_size(data_size)
        largest = self._largest(share)
        if largest:
            torch.cuda.set_per_process_memory_fraction((self._gpu.capacity - self._kept) / (NO_LIMIT << 30))
            self._memory(largest)
            # compiled operators are counted eagerly, which takes more memory
            torch.cuda.set_per_process_memory_fraction(1.0)
        size = min(own, max(largest, 1))
        memory, accumulation = self._memory(size), len(self._micro_batches)
        parts = {name: sum(tensor.nbytes for tensor in tensors) for name, tensors in tensors_of(run).items()}
        parts["gradients"] = self._gradients
        model, batch = run.accelerator.unwrap_model(run.model), self._micro_batches[0].data
        return Measured(
            strategy=run.launch.strategy,
            micro_batch=size,
            largest=largest,
            accumulation=accumulation,
            model_flops=run.task.flops(model, batch) * accumulation * run.world_size,
            tokens=self._counts.get("tokens", 0.0) * run.world_size,
            total_steps=run.total_steps,
            memory=memory,
            parts=parts,
            work=self._work(),
            optimizations=run.task.state.optimizations,
        )

    def _largest(self, share: float) -> int:
        """Return the largest micro-batch whose bytes add up to at most this share of the memory; 0 if none does."""
        data_size, config, there = self._run.data_size, self._run.config, len(self._run.train_set)
        needed = config.forward_batch_size(data_size) * data_size  # examples in a forward pass, over all processes
        if there < needed:
            raise UserError(
                f"the training data have {there:,} examples, but micro-batches take {needed:,} at once: "
                "plan with more examples or smaller micro-batches"
            )
        batch = config.global_batch_size // data_size
        sizes = [size for size in range(1, batch + 1) if batch % size == 0 and size * data_size <= there]
        fitting = bisect(sizes, share * self._gpu.capacity, key=lambda size: highest(self._memory(size)))
        return max(sizes[:fitting], default=0)

    def _memory(self, size: int) -> Peaks:
        """Return the peak bytes of each phase with micro-batches of this size."""
        run = self._run
        run.accelerator.free_memory()
        run.config = run.config.model_copy(update={"micro_batch_size": size})
        stop = StopSignal(run.accelerator, run.config)
        self._micro_batches, self._counts = next(CountedSteps(training_steps(run, 0), stop))
        # a second micro-batch's gradients come on top of the first one's; with offload the host would really add them
        micro_batches = self._micro_batches[: 1 if self._is_offloaded else 2]
        peak_bytes()
        self._take(micro_batches)
        if self._kept:
            time.sleep(1)  # for the watchdog, which not all versions of torch can wake up
        self._take(micro_batches)  # now with the optimizer's state
        allocated, reserved = peak_bytes()
        memory = {"load": self._load, "step": (allocated + self._kept, reserved + self._kept)}
        evaluate_batches(run.task, run.model.eval(), islice(evaluation_batches(run), 2), run.device, stop)
        run.model.train()
        memory["evaluation"] = peak_bytes()
        rank_state_dict(run_tensors(run.model, run.optimizers), run.rank, run.world_size)  # as a save copies them
        memory["save"] = peak_bytes()
        return memory

    def _take(self, micro_batches: list[MicroBatch]) -> None:
        """Take a step; with offload, all of it but the update, which is the host's."""
        run = self._run
        if not self._is_offloaded:
            train_step(run, micro_batches, self._counts)
            return
        for batch in micro_batches:
            run.task.loss(run.model, batch.data).backward()
        run.model.zero_grad()

    def _work(self) -> dict[str, float]:
        """Return the work of a step: of its first micro-batch, plus the increment of a second for each further one."""
        total = len(self._micro_batches)
        one = more = self._work_of(1)
        if total > 1 and not self._is_offloaded:
            more = {name: number - one[name] for name, number in self._work_of(2).items()}
        return {name: one[name] + (total - 1) * number for name, number in more.items()}

    def _work_of(self, number: int) -> dict[str, float]:
        """Return the work of a step of `number` micro-batches."""
        micro_batches, null, seconds = self._micro_batches[:number], NullGpu(), []
        for _ in range(3):
            null.reset()
            started = time.perf_counter()
            self._take(micro_batches)
            seconds.append(time.perf_counter() - started)
        kernels = sum(count for name, count in null.counts().items() if name in KERNELS)
        with Work("cuda", self._gpu.gpus_per_machine) as work:
            self._take(micro_batches)
        work.counts |= {"kernels": kernels, "host_seconds": min(seconds)}
        return work.counts
