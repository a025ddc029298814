"""A few steps of the run itself as process 0 of any number, on GPUs that aren't there: memory, work and host time.

All other processes are taken to do as this one does, and weights are memory that nothing fills.
"""

import bisect
import contextlib
import gc
import os
import time
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

import psutil
import torch
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils.launch import prepare_multi_gpu_env
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy

from null_gpu import WAITS, NullGpu, join_alone, null_environment
from src.checkpoint.tensors import rank_state_dict, run_tensors
from src.config.config import Config, load_config
from src.config.errors import UserError
from src.distributed.accelerator import build_accelerator, prepare
from src.distributed.stop import StopSignal
from src.tasks import TASKS
from src.tools.plan.gpus import Gpu
from src.training.batches import CountedSteps, MicroBatch, evaluation_batches, training_steps
from src.training.evaluation import evaluate_batches
from src.training.gradients import local_gradients
from src.training.optim import build_optimizers
from src.training.out_of_memory import tensors_of
from src.training.progress import Progress
from src.training.run import Run, build_data
from src.training.state import ResumePoint
from src.training.transforms import transform
from src.training.work import Work
from train import train_step

NO_LIMIT = 100_000
"""GiB of a GPU on which everything fits."""
MOST_PER_MACHINE = 16
"""GPUs that the null GPU stands for at most."""
LONG = 20
"""Seconds of reading data that a plan tells of."""
KERNELS = ("launch", "gemm", "conv", "triton", "graph_launch")
"""Names that null_gpu.c gives to what computes."""


@dataclass(frozen=True)
class Setup:
    """What is measured: a run, as an accelerate yaml starts it on so many GPUs."""

    arguments: tuple[str, ...]
    """Those of train.py."""
    yaml: str
    gpus: int
    gpu: Gpu
    is_limited: bool = True
    """Whether to be out of memory where a GPU would be, or to find out how much would be needed."""
    micro_batch: int | None = None
    """Examples per forward pass; None: as the settings say."""

    def with_arguments(self, more: list[str]) -> "Setup":
        """Return the same with more arguments for train.py."""
        return replace(self, arguments=(*self.arguments, *more))


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
    tokens: float
    """Of a step, over all processes, without padding; 0 if it is not text."""
    total_steps: int
    memory: dict[str, tuple[int, int]]
    """Bytes that were allocated and reserved at most, by phase: load, step, evaluation, save."""
    parts: dict[str, int]
    """Bytes by what they hold: parameters, gradients, optimizer, activations, which a forward pass keeps."""
    host_bytes: int
    work: dict[str, float] = field(default_factory=dict)
    """Of a step: what Work counts, `kernels`, `waits` for the device, and `host_seconds` on this machine."""
    notes: list[str] = field(default_factory=list)


def environment_for(gpu: Gpu) -> dict[str, str]:
    """Return what a process needs in its environment, before it loads CUDA's libraries, to measure runs on this GPU."""
    return null_environment(
        MOST_PER_MACHINE, NULL_GPU_GIB=str(NO_LIMIT), NULL_GPU_NAME=gpu.name, NULL_GPU_CAPABILITY=gpu.capability
    )


def launcher_environment(yaml: str, gpus: int, per_machine: int) -> dict[str, str]:
    """Return what Accelerate's launcher puts into the environment of process 0, and torch's beneath it."""
    machines = max(1, gpus // per_machine)
    words = [f"--config_file={yaml}", f"--num_processes={gpus}", f"--num_machines={machines}", "--machine_rank=0"]
    words += ["--main_process_ip=127.0.0.1", "--main_process_port=0"]
    if "hsdp" in yaml:
        sizes = {"replicate": machines, "shard": gpus // machines}
        words += [f"--parallelism_config_dp_{name}_size={size}" for name, size in sizes.items()]
    arguments, *_ = _validate_launch_command(launch_command_parser().parse_args([*words, "train.py"]))
    environment = prepare_multi_gpu_env(arguments)
    if arguments.use_fsdp or arguments.multi_gpu:
        sizes = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": gpus, "LOCAL_WORLD_SIZE": min(gpus, per_machine)}
        environment |= {name: str(size) for name, size in sizes.items()}
    return environment


def build(config: Config) -> Run:
    """Do as `build` in train.py, with a model that has no values, and without the folder of the run."""
    accelerator, launch = build_accelerator(config)
    if launch.strategy.endswith("offload"):  # pinning copies, and would fill the memory of the host
        accelerator.state.fsdp_plugin.cpu_offload = CPUOffloadPolicy(pin_memory=False)
    started = time.perf_counter()
    train_set, eval_set = build_data(config.task, accelerator)
    seconds = time.perf_counter() - started
    tuned = config.task.prepare_for("cuda", torch.bfloat16 if launch.precision == "bf16" else torch.float32)
    model = config.task.build_skeleton()
    transform(model, config, accelerator)  # room: compile
    if not accelerator.is_fsdp2:
        fill(model, accelerator.device)
    model = prepare(accelerator, model)
    fill(model, torch.device("cpu") if launch.strategy.endswith("offload") else accelerator.device)
    optimizers = build_optimizers(config.optim, model)
    if seconds > LONG:
        tuned.append(f"reading the data takes {seconds:.0f} s, for each line below: plan from a sample of them")
    facts = {"tuned": tuned}
    return Run(
        config, accelerator, launch, ResumePoint(), model, optimizers, Progress(), train_set, eval_set, {}, facts
    )


def fill(model: nn.Module, device: torch.device) -> None:
    """Give parameters on the meta device memory on this one, and tied ones the same."""
    made: dict[nn.Parameter, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.is_meta:
                if parameter not in made:
                    made[parameter] = nn.Parameter(torch.empty_like(parameter, device=device), parameter.requires_grad)
                setattr(module, name, made[parameter])


def measure(setup: Setup) -> Measured:
    """Return what the run asks of its first process. Call it in a process of its own, which it changes for good."""
    # NCCL's communicators are joined through this process alone, however many others there are
    os.environ["TORCH_NCCL_RANKS_PER_ROOT"] = str(setup.gpus)
    os.environ |= launcher_environment(setup.yaml, setup.gpus, setup.gpu.gpus_per_machine)
    gc.disable()  # cycles keep memory of DDP's first steps until Python happens to look for them: count it
    torch.backends.cuda.enable_cudnn_sdp(False)  # the null GPU has none; flash attention takes as much memory
    config = load_config([*setup.arguments], TASKS)
    if "WORLD_SIZE" in os.environ:
        join_alone(setup.gpus)
    return Trial(build(config), setup).measured()


def require_examples(there: int, needed: int) -> None:
    """Raise a UserError if there are fewer examples than all processes pass through the model at once."""
    if there < needed:
        hint = "plan with as many, or smaller micro-batches"
        raise UserError(f"the training data have {there:,} examples, and micro-batches take {needed:,} at once: {hint}")


def divisors(number: int) -> list[int]:
    """Return the whole numbers that divide `number`, the smallest first."""
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]


def peak() -> tuple[int, int]:
    """Return the bytes that were allocated and reserved at most since the peaks were reset."""
    return torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()


def highest(memory: dict[str, tuple[int, int]]) -> int:
    """Return the bytes that have to fit: what is allocated at most, in any phase."""
    return max(allocated for allocated, _ in memory.values())


class Trial:
    """Steps of a run, with micro-batches of one size after the other."""

    def __init__(self, run: Run, setup: Setup) -> None:
        self._run, self._setup = run, setup
        self._is_offloaded = run.launch.strategy.endswith("offload")
        # the second micro-batch's gradients come on top of the first one's; the host would really add them up
        self._most = 1 if self._is_offloaded else 2
        self._null = NullGpu()
        self._gradients = self._kept = self._before = 0
        for optimizer in run.optimizers:
            optimizer.register_step_pre_hook(self._note_gradients)
        run.model.register_forward_hook(self._note_activations)
        self._load = peak()
        self._host = psutil.Process().memory_info().rss

    def measured(self) -> Measured:
        """Measure the run with its own micro-batches, then find the largest that fit. Within the limits of a GPU, these
        are tried one by one, and what is out of memory ends it.

        Raises:
            torch.OutOfMemoryError: its own do not fit.
        """
        run, setup = self._run, self._setup
        self._limit()
        share = run.config.global_batch_size // run.world_size
        sizes = [size for size in divisors(share) if size * run.world_size <= len(run.train_set)]
        own = setup.micro_batch or run.config.micro_batch(run.world_size)
        require_examples(len(run.train_set), own * run.world_size)
        memory, parts = self._memory(own), self._parts()
        torch.cuda.set_per_process_memory_fraction(1.0)  # what is compiled is counted eagerly, which takes more
        work = self._work(share // own)
        self._limit()
        flops = 0.0
        first, model = self._micro_batches[0].data, run.accelerator.unwrap_model(run.model)  # room: performance
        flops = run.task.flops(model, first) * share // own * run.world_size  # room: performance
        tokens = 0.0
        tokens = self._counts.tokens * run.world_size  # room: text
        measured = Measured(
            strategy=run.launch.strategy,
            micro_batch=own,
            largest=own,
            accumulation=share // own,
            model_flops=flops,
            tokens=tokens,
            total_steps=run.total_steps,
            memory=memory,
            parts=parts,
            host_bytes=self._host + max(self._saved, parts["parameters"]),
            work=work,
            notes=run.facts["tuned"],
        )
        if not setup.is_limited:
            smaller = [size for size in sizes if size < own]
            # the first that is too large
            end = bisect.bisect_left(smaller, True, key=lambda size: highest(self._memory(size)) > setup.gpu.capacity)
            measured.largest = smaller[end - 1] if end else 0
            return measured
        with contextlib.suppress(torch.OutOfMemoryError):
            for size in sizes[sizes.index(own) + 1 :]:
                self._memory(size)
                measured.largest = size
        return measured

    def _memory(self, size: int) -> dict[str, tuple[int, int]]:
        """Return the peaks of each phase with micro-batches of this size."""
        run = self._run
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        self._begin(size)
        for _ in range(2):  # the optimizer's state is there from the second one on
            self._take(self._micro_batches[: self._most])
        memory = {"load": self._load, "step": peak()}
        torch.cuda.reset_peak_memory_stats()
        batches = islice(evaluation_batches(run), 2)
        evaluate_batches(run.task, run.model.eval(), batches, run.device, self._stop)
        run.model.train()
        memory["evaluation"] = peak()
        torch.cuda.reset_peak_memory_stats()
        self._saved = sum(t.nbytes for t in self._tensors_to_save())
        memory["save"] = peak()
        return memory

    def _limit(self) -> None:
        if self._setup.is_limited:
            torch.cuda.set_per_process_memory_fraction(self._setup.gpu.capacity / (NO_LIMIT << 30))

    def _begin(self, size: int) -> None:
        run = self._run
        run.config = run.config.model_copy(update={"micro_batch_size": size})
        self._stop = StopSignal(run.accelerator, run.config)
        self._micro_batches, self._counts = next(CountedSteps(training_steps(run, 0), self._stop))

    def _take(self, micro_batches: list[MicroBatch]) -> None:
        """Take a step, or, if the optimizer works in the host's memory, all of it but the update."""
        run = self._run
        self._before, self._kept, self._gradients = torch.cuda.memory_allocated(), 0, 0
        if not self._is_offloaded:
            train_step(run, micro_batches, self._counts)
            return
        for batch in micro_batches:
            run.accelerator.backward(run.task.loss(run.model, batch.data) * batch.weight)
        self._note_gradients()
        run.model.zero_grad()

    def _note_gradients(self, *_: Any) -> None:
        size = sum(gradient.nbytes for gradient in local_gradients(self._run.parameters))
        self._gradients = max(self._gradients, size)  # a second optimizer finds none of the first one's

    def _note_activations(self, *_: Any) -> None:
        if torch.is_grad_enabled():
            self._kept = self._kept or torch.cuda.memory_allocated() - self._before

    def _tensors_to_save(self) -> list[Tensor]:
        run = self._run
        return [*rank_state_dict(run_tensors(run.model, run.optimizers), run.rank, run.world_size).values()]

    def _parts(self) -> dict[str, int]:
        parts = {name: sum(t.nbytes for t in of) for name, of in tensors_of(self._run).items()}
        # an optimizer's step clears the gradients
        return parts | {"gradients": self._gradients, "activations": self._kept}

    def _work(self, accumulation: int) -> dict[str, float]:
        """Return what a step of so many micro-batches asks for: the first one, and as often as there are more, what a
        second one adds."""
        first = self._work_of(self._micro_batches[:1])
        if accumulation == 1:
            return first
        if self._most == 1:
            return {name: accumulation * number for name, number in first.items()}
        both = self._work_of(self._micro_batches[:2])
        return {name: first.get(name, 0) + (accumulation - 1) * (both[name] - first.get(name, 0)) for name in both}

    def _work_of(self, micro_batches: list[MicroBatch]) -> dict[str, float]:
        seconds = []
        for _ in range(3):
            self._null.reset()
            started = time.perf_counter()
            self._take(micro_batches)
            seconds.append(time.perf_counter() - started)
        numbers = self._null.counts()
        with Work("cuda", self._setup.gpu.gpus_per_machine) as work:
            self._take(micro_batches)
        kernels = sum(numbers.get(name, 0) for name in KERNELS)
        waits = sum(numbers.get(name, 0) for name in WAITS)
        return {**work.counts, "kernels": kernels, "waits": waits, "host_seconds": min(seconds)}
