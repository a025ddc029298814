"""A few steps of the run itself as process 0 of any number, on GPUs that aren't there: memory, work and host time.

All other processes are taken to do as this one does, and weights are memory that nothing fills.
"""

import gc
import os
import time
from bisect import bisect
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import torch
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils.launch import prepare_multi_gpu_env
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy

from null_gpu import NullGpu, join_alone, null_environment
from src.checkpoint.tensors import rank_state_dict, run_tensors
from src.config.config import Config, load_config
from src.config.errors import UserError
from src.distributed.accelerator import build_accelerator, prepare
from src.distributed.stop import StopSignal
from src.tasks import TASKS
from src.tasks.base import build_skeleton
from src.tools.plan.gpus import Gpu
from src.tools.plan.work import Work
from src.training.batches import CountedSteps, MicroBatch, evaluation_batches, training_steps
from src.training.evaluation import evaluate_batches
from src.training.gradients import to_local
from src.training.optim import build_optimizers
from src.training.out_of_memory import tensors_of
from src.training.progress import Progress
from src.training.run import Run, begin_task, build_data
from src.training.state import ResumePoint
from src.training.transforms import transform
from train import train_step

NO_LIMIT = 100_000
"""GiB of a GPU on which everything fits."""
MOST_PER_MACHINE = 16
"""GPUs that the null GPU stands for at most."""
LONG = 20
"""Seconds of reading data that a plan tells of."""
KERNELS = ("launch", "gemm", "conv", "triton", "graph_launch")
"""Names that null_gpu.c gives to what computes."""

Peaks = dict[str, tuple[int, int]]
"""Bytes that were allocated and reserved at most, by phase: load, step, evaluation, save."""


@dataclass(frozen=True)
class Setup:
    """What is measured: a run, as an accelerate yaml starts it on so many GPUs."""

    arguments: tuple[str, ...]
    """Those of train.py."""
    yaml: str
    gpus: int
    gpu: Gpu
    cp_size: int = 1
    """GPUs that share each sequence."""
    change: str = ""
    """What was changed for it to fit."""

    @property
    def name(self) -> str:
        """Return the yaml's name and, if GPUs share sequences, how many."""
        return Path(self.yaml).stem + (str(self.cp_size) if self.cp_size > 1 else "")


@dataclass(kw_only=True)
class Measured:
    """What was found out about a Setup; bytes are of one process."""

    strategy: str
    micro_batch: int
    """Examples per forward pass: as the settings say if that fits, else as many as fit; if none do, 1."""
    largest: int
    """The largest micro-batch that fits and divides a process's share of the global batch; 0: none does."""
    accumulation: int
    """Micro-batches per step."""
    model_flops: float
    """Operations that a step needs, over all processes, as Task.flops counts them; 0: not known."""
    tokens: float = 0
    """Of a step, over all processes, without padding; 0 if it is not text."""
    total_steps: int
    memory: Peaks
    parts: dict[str, int]
    """The step's bytes by what they hold: parameters, gradients, optimizer, and the rest: activations."""
    work: dict[str, float]
    """Of a step: what Work counts, `kernels`, and `host_seconds` on this machine."""
    notes: list[str]


def environment_for(gpu: Gpu) -> dict[str, str]:
    """Return what a process needs in its environment, before it loads CUDA's libraries, to measure runs on this GPU."""
    return null_environment(
        MOST_PER_MACHINE, NULL_GPU_GIB=str(NO_LIMIT), NULL_GPU_NAME=gpu.name, NULL_GPU_CAPABILITY=gpu.capability
    )


def launcher_arguments(setup: Setup) -> list[str]:
    """Return those of `accelerate launch` that are the same on all machines."""
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


def launcher_environment(setup: Setup) -> dict[str, str]:
    """Return what Accelerate's launcher puts into the environment of process 0, and torch's beneath it."""
    words = [*launcher_arguments(setup), "--machine_rank=0", "--main_process_ip=127.0.0.1", "--main_process_port=0"]
    arguments, *_ = _validate_launch_command(launch_command_parser().parse_args([*words, "train.py"]))
    environment = prepare_multi_gpu_env(arguments)
    if arguments.use_fsdp or arguments.multi_gpu:
        environment |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": str(setup.gpus), "TORCHELASTIC_RUN_ID": "none"}
        environment["LOCAL_WORLD_SIZE"] = str(min(setup.gpus, setup.gpu.gpus_per_machine))
    return environment


def build(config: Config) -> Run:
    """Do as `build` in train.py, with a model that has no values, and without the folder of the run."""
    accelerator, launch = build_accelerator(config)
    if launch.strategy.endswith("offload"):  # pinning copies, and would fill the memory of the host
        accelerator.state.fsdp_plugin.cpu_offload = CPUOffloadPolicy(pin_memory=False)
    config = begin_task(config, launch)
    started = time.perf_counter()
    train_set, eval_set = build_data(config, accelerator)
    seconds = time.perf_counter() - started
    model = build_skeleton(config.task)
    transform(model, config, accelerator)
    if not accelerator.is_fsdp2:
        fill(model, accelerator.device)
    model = prepare(accelerator, model)
    fill(model, torch.device("cpu") if launch.strategy.endswith("offload") else accelerator.device)
    optimizers = build_optimizers(config.optim, model)
    if seconds > LONG:
        config.task.state.notes.append(
            f"reading the data takes {seconds:.0f} s, for each line below: plan from a sample of them"
        )
    return Run(
        config=config,
        accelerator=accelerator,
        launch=launch,
        store=None,
        resume=ResumePoint(),
        model=model,
        optimizers=optimizers,
        progress=Progress(),
        train_set=train_set,
        eval_set=eval_set,
        origin=None,  # type: ignore[arg-type]  # nothing is saved
        facts={"tuned": config.task.state.notes},
    )


def fill(model: nn.Module, device: torch.device) -> None:
    """Give parameters on the meta device memory on this one; tied ones stay so."""
    for parameter in model.parameters():
        if parameter.is_meta:
            filled = torch.empty_like(parameter, device=device)
            torch.utils.swap_tensors(parameter, nn.Parameter(filled, parameter.requires_grad))


def measure(setup: Setup, share: float) -> Measured:
    """Return what the run asks of its first process, and which micro-batches fit into this share of the GPU's memory.
    Call it in a process of its own, which it changes for good.

    Raises:
        torch.OutOfMemoryError: they fit by their sum, but not once torch's allocator has cut the memory into blocks.
    """
    # NCCL's communicators are joined through this process alone, however many others there are
    os.environ["TORCH_NCCL_RANKS_PER_ROOT"] = str(setup.gpus)
    os.environ["TERM"] = "dumb"  # no bars below the plan's own
    os.environ |= launcher_environment(setup)
    gc.disable()  # cycles keep memory of DDP's first steps until Python happens to look for them: count it
    gc.freeze()  # of what is there by now, nothing has to be looked for
    torch.backends.cuda.enable_cudnn_sdp(False)  # the null GPU has none; flash attention takes as much memory
    config = load_config([*setup.arguments], TASKS)
    if "WORLD_SIZE" in os.environ:
        join_alone(setup.gpus)
    return Trial(build(config), setup.gpu).measured(share)


def peak() -> tuple[int, int]:
    """Return the bytes that were allocated and reserved at most since this was last asked."""
    most = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
    torch.cuda.reset_peak_memory_stats()
    return most


def highest(memory: Peaks) -> int:
    """Return the bytes that have to fit: what is allocated at most, in any phase."""
    allocated, _ = max(memory.values())
    return allocated


class Trial:
    """Steps of a run, with micro-batches of one size after the other."""

    def __init__(self, run: Run, gpu: Gpu) -> None:
        self._run, self._gpu = run, gpu
        self._is_offloaded = run.launch.strategy.endswith("offload")
        # a step clears them
        self._gradients = sum(to_local(weight).nbytes for weight in run.parameters if weight.requires_grad)
        # DDP's second step makes new buckets, and torch keeps the first ones until its watchdog, which looks every
        # 0.1 s, finds that they were reduced: on a GPU, as a rule, not before the forward pass has ended, but here
        # whenever the host happens to be so far. So that is waited for, and their bytes are added.
        self._kept = self._gradients if run.launch.strategy == "ddp" else 0
        self._load = peak()

    def measured(self, share: float) -> Measured:
        """Return what `measure` does."""
        run, data_size = self._run, self._run.data_size
        own = run.config.forward_batch_size(data_size)
        largest = self._largest(share)
        if largest:
            torch.cuda.set_per_process_memory_fraction((self._gpu.capacity - self._kept) / (NO_LIMIT << 30))
            self._memory(largest)
            # what is compiled is counted eagerly, which takes more
            torch.cuda.set_per_process_memory_fraction(1.0)
        size = min(own, max(largest, 1))
        memory, accumulation = self._memory(size), len(self._micro_batches)
        parts = {name: sum(tensor.nbytes for tensor in tensors) for name, tensors in tensors_of(run).items()}
        parts["gradients"] = self._gradients
        parts["activations"] = memory["step"][0] - (0 if self._is_offloaded else sum(parts.values()))
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
            notes=run.facts["tuned"],
        )

    def _largest(self, share: float) -> int:
        """Return the largest micro-batch that fits into this share of the memory, by its sum; 0 if none does."""
        data_size, config, there = self._run.data_size, self._run.config, len(self._run.train_set)
        needed = config.forward_batch_size(data_size) * data_size  # what all processes pass through the model at once
        if there < needed:
            raise UserError(
                f"the training data have {there:,} examples, and micro-batches take {needed:,} at once: "
                "plan with as many, or smaller micro-batches"
            )
        batch = config.global_batch_size // data_size
        sizes = [size for size in range(1, batch + 1) if batch % size == 0 and size * data_size <= there]
        fitting = bisect(sizes, share * self._gpu.capacity, key=lambda size: highest(self._memory(size)))
        return max(sizes[:fitting], default=0)

    def _memory(self, size: int) -> Peaks:
        """Return the peaks of each phase with micro-batches of this size."""
        run = self._run
        run.accelerator.free_memory()
        run.config = run.config.model_copy(update={"micro_batch_size": size})
        stop = StopSignal(run.accelerator, run.config)
        self._micro_batches, self._counts = next(CountedSteps(training_steps(run, 0), stop))
        # a second micro-batch's gradients come on top of the first one's; offloaded, the host would really add them up
        micro_batches = self._micro_batches[: 1 if self._is_offloaded else 2]
        peak()
        self._take(micro_batches)
        if self._kept:
            time.sleep(1)  # the watchdog has looked by then: not all versions of torch can be told to
        self._take(micro_batches)  # with the optimizer's state, which is there by now
        allocated, reserved = peak()
        memory = {"load": self._load, "step": (allocated + self._kept, reserved + self._kept)}
        evaluate_batches(run.task, run.model.eval(), islice(evaluation_batches(run), 2), run.device, stop)
        run.model.train()
        memory["evaluation"] = peak()
        rank_state_dict(run_tensors(run.model, run.optimizers), run.rank, run.world_size)  # for its peak alone
        memory["save"] = peak()
        return memory

    def _take(self, micro_batches: list[MicroBatch]) -> None:
        """Take a step, or, if the optimizer works in the host's memory, all of it but the update."""
        run = self._run
        if not self._is_offloaded:
            train_step(run, micro_batches, self._counts)
            return
        for batch in micro_batches:
            run.accelerator.backward(run.task.loss(run.model, batch.data) * batch.weight)
        run.model.zero_grad()

    def _work(self) -> dict[str, float]:
        """Return what a step asks for: for its first micro-batch, and as often as there are more, what a second
        one adds."""
        total = len(self._micro_batches)
        one = self._work_of(1)
        if total == 1 or self._is_offloaded:
            return {name: total * number for name, number in one.items()}
        two = self._work_of(2)
        return {name: one[name] + (total - 1) * (number - one[name]) for name, number in two.items()}

    def _work_of(self, number: int) -> dict[str, float]:
        """Return what a step of so many micro-batches asks for."""
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
