"""Faults that raise no error, each as an edit of the project: what a user's copy of it may come to look like."""

import shutil
from dataclasses import dataclass, field
from pathlib import Path

from tests.launching import PROJECT
from tests.text import tiny


@dataclass(frozen=True)
class Fault:
    """A fault and what --check has to say of it."""

    name: str
    yaml: str
    """What it is run under; some only show with shards, others only with replicas."""
    edits: tuple[tuple[str, str, str], ...]
    """(file, text in it, what stands there instead)."""
    fails: frozenset[str]
    """The checks that fail, and no others."""
    says: str
    """In what they say: the cause."""
    arguments: tuple[str, ...] = ()
    launcher_arguments: tuple[str, ...] = field(default=())


def plant(fault: Fault, folder: Path) -> Path:
    """Returns: a copy of the project with the fault in it."""
    project = folder / "project"
    for name in ("src", "accelerate_configs"):
        shutil.copytree(PROJECT / name, project / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(PROJECT / "train.py", project)
    tiny.questions(project / "questions.jsonl")
    for file, text, instead in fault.edits:
        content = (project / file).read_text()
        assert content.count(text) == 1, f"{file} has changed: {text}"
        (project / file).write_text(content.replace(text, instead))
    return project


CLIPPED = ("--optim.max_grad_norm=1",)
LLAMA = {"model_type": "llama", **tiny.LLAMA}
PACKED = (
    "--task.name=causal_lm", "--task.dataset=questions.jsonl", "--task.sequence_length=64", "--global_batch_size=8",
    *(f"--task.architecture.{name}={value}" for name, value in LLAMA.items()),
)  # fmt: skip
FAULTS = [
    Fault(
        "every process reads the same shard",
        "ddp",
        (("src/data/loading.py", "_load(run, augmented, order,",
          "_load(run, augmented, np.repeat(order[:: run.world_size], run.world_size),"),),
        frozenset({"Data"}),
        "every process reads the same shard",
    ),
    Fault(
        "set_epoch forgotten",
        "fsdp",
        (("src/data/loading.py", "default_rng([config.seed, epoch])", "default_rng([config.seed, 0])"),),
        frozenset({"Data"}),
        "set_epoch was forgotten",
    ),
    Fault(
        "one sample dropped",
        "ddp",
        (("src/data/loading.py", "order[done_in_epoch * config.global_batch_size :]",
          "order[done_in_epoch * config.global_batch_size : -1]"),),
        frozenset({"Data"}),
        "1 left out",
    ),
    Fault(
        "one sample doubled in evaluation",
        "ddp",
        (("src/data/loading.py", "np.arange(len(run.eval_set))", "np.append(np.arange(len(run.eval_set)), 0)"),),
        frozenset({"Data", "Evaluation"}),
        "1 read more than once (0, …)",
    ),
    Fault(
        "the loss averaged per micro-batch, with ragged counts",
        "ddp",
        (("train.py", "accelerator.backward(loss_sum * (batch.weight * loss_factor))",
          "accelerator.backward(loss_sum / num_targets / len(micro_batches))"),
         ("train.py", "unscale = config.global_batch_size / (max(stats.num_targets, 1) * progress.loss_scale)",
          "unscale = 1")),
        frozenset({"Gradients", "Accumulation"}),
        "a mean of means",
        ("--micro_batch_size=4",),
    ),
    Fault(
        "gradients summed, not averaged",
        "fsdp",
        (("train.py", "= accelerator.num_processes / config.", "= accelerator.num_processes**2 / config."),),
        frozenset({"Gradients"}),
        "a sum that was not divided",
    ),
    Fault(
        "gradients not reduced for one parameter",
        "ddp",
        (("src/distributed.py", "    model, *prepared =",
          '    model._ddp_params_and_buffers_to_ignore = ["fc1.bias"]\n    model, *prepared ='),),
        frozenset({"Gradients", "Updates"}),  # and so the replicas drift apart
        "fc1.bias",
    ),
    Fault(
        "a process seeded differently at start",
        "fsdp",  # DDP sends the first process's weights to all
        (("train.py", "new_model(config, launch.device",
          'new_model(config.model_copy(update={"seed": config.seed + accelerator.process_index}), launch.device'),),
        frozenset({"Same start"}),
        "process 1: conv1.weight and 7 more differ",
    ),
    Fault(
        "a parameter group left out of the optimizer",
        "fsdp",
        (("src/optim.py", 'groups = [group for group in (matrices, vectors) if group["params"]]',
          "groups = [matrices]"),),
        frozenset({"Updates"}),
        "4 of 8 trained parameters, not conv1.bias",
    ),
    Fault(
        "a buffer not synchronised",
        "fsdp",  # DDP sends the first process's to all
        (("src/models/mnist_cnn.py", "        self.fc2 = nn.Linear(128, 10)\n",
          "        self.fc2 = nn.Linear(128, 10)\n        self.register_buffer('seen', torch.zeros(()))\n"),
         ("src/models/mnist_cnn.py", "        return self.fc2(x)",
          "        self.seen += images.float().mean() * self.training\n        return self.fc2(x)")),
        frozenset({"Updates"}),
        "seen: differs",
    ),
    Fault(
        "clipping before the gradients are scaled",
        "ddp",
        (("src/optim.py", "    norm *= scale\n", ""),),
        frozenset({"Gradients"}),
        "taken before the gradients were scaled",
        CLIPPED,
    ),
    Fault(
        "clipping by one process's norm",
        "fsdp",
        (("train.py", "math.sqrt(stats.grad_square_sum)", "sum(float(g.square().sum()) for g in gradients) ** 0.5"),),
        frozenset({"Gradients"}),
        "the norm is one process's",
        CLIPPED,
    ),
    Fault(
        "clipping that scales small gradients up",
        "ddp",
        (("src/optim.py", "scale *= min(1.0, max_norm / (norm + 1e-6))", "scale *= max_norm / (norm + 1e-6)"),),
        frozenset({"Gradients"}),
        "clipping that scales small gradients up",
        CLIPPED,
    ),
    Fault(
        "weight decay on norms and biases",
        "fsdp",
        (("src/optim.py", 'if p.ndim < 2], "weight_decay": 0.0', 'if p.ndim < 2], "weight_decay": 0.01'),),
        frozenset({"Updates"}),
        "4 of 8 as they should, not conv1.bias",
    ),
    Fault(
        "positions that go on where packed documents meet",
        "ddp",
        (("src/tasks/causal_lm.py", "position_ids[row, start:] = torch.arange(width - start)", "pass"),),
        frozenset({"Data"}),
        "packed documents see each other",
        PACKED,
    ),
    Fault(
        "an evaluation that is a mean of the batches' means",
        "ddp",
        (("train.py", "totals[0] += loss_sum * batch.weight", "totals[0] += loss_sum / num_targets * batch.weight"),
         ("train.py", "totals[1] += num_targets * batch.weight", "totals[1] += batch.weight")),
        frozenset({"Evaluation"}),
        "a mean of each process's or each batch's",
    ),
    Fault(
        "a process without an evaluation batch",
        "ddp",
        (("src/data/loading.py", "    for (micro_batch,) in _load(",
          "    if run.rank:\n        return\n    for (micro_batch,) in _load("),),
        frozenset({"Data", "Evaluation"}),
        "by process",
    ),
    Fault(
        "an evaluation that fails on the first process alone",
        "ddp",
        (("train.py", "    run.model.eval()\n",
          "    run.model.eval()\n    if run.is_main:\n        raise KeyError('predictions')\n"),),
        frozenset({"Evaluation"}),
        "KeyError: 'predictions'",
    ),
    Fault(
        "the learning rate stepped once per process",
        "ddp",
        (("train.py", "lr_at(progress.updates,", "lr_at(progress.updates * accelerator.num_processes,"),),
        frozenset({"Updates"}),
        "a prepared scheduler steps once per process",
    ),
    Fault(
        "FSDP asked for and DDP run",
        "fsdp",
        (("src/distributed.py", "list(launch_errors(launcher, config, world_size, wants_fsdp))",
          "list(launch_errors(launcher, config, world_size, wants_fsdp)); wants_fsdp = False"),),
        frozenset({"Launch"}),
        "the yaml asks for FSDP, and it was not applied",
    ),
    Fault(
        "DDP asked for and nothing run",
        "ddp",
        (("src/distributed.py", "if accelerator.num_processes != world_size:", "if False:"),
         ("src/distributed.py", "        cpu=on_cpu,", "        cpu=False,")),
        frozenset({"Launch"}),
        "each process trains a model of its own",
    ),
    Fault(
        "only the root wrapped",
        "fsdp",
        (("src/models/mnist_cnn.py", '_no_split_modules = ["Conv2d", "Linear"]', "_no_split_modules = []"),
         ("src/distributed.py", "if accelerator.is_fsdp2 and sharded_units(model) < 2:", "if False:")),
        frozenset({"Launch"}),
        "only the root is wrapped",
    ),
    Fault(
        "the loss in bf16",
        "fsdp",
        (("src/tasks/mnist.py", 'model(batch["images"]).float(), batch["labels"]\n        smoothed',
          'model(batch["images"]), batch["labels"]\n        smoothed'),),
        frozenset({"Precision"}),
        "the loss is computed in half precision",
        launcher_arguments=("--mixed_precision=bf16",),
    ),
    Fault(
        "a checkpoint that forgets the optimizer",
        "fsdp",
        (("src/checkpoint/tensors.py", "for optimizer in optimizers:\n        for parameter, states",
          "for optimizer in ():\n        for parameter, states"),),
        frozenset({"Checkpoint"}),
        "the optimizer's state",
    ),
]  # fmt: skip
MORE = [
    Fault(
        "an epoch that begins anew where a run goes on",
        "ddp",
        (("src/data/loading.py", "        order = order[done_in_epoch * config.global_batch_size :]\n", ""),),
        frozenset({"Data"}),
        "goes on with examples that it has seen",
    ),
    Fault(
        "a schedule that is longer by the number of processes",
        "ddp",
        (("src/run.py", "Schedule(self.config.steps(self.steps_per_epoch)[1],",
          "Schedule(self.config.steps(self.steps_per_epoch)[1] * self.world_size,"),),
        frozenset({"Updates"}),
        "or of another length",
    ),
    Fault(
        "an augmentation that depends on the process",
        "ddp",
        (("src/data/loading.py", "[config.seed, epoch, 1])", "[config.seed, epoch, 1 + run.rank])"),),
        frozenset({"Data"}),
        "an augmentation depends on the process",
        ("--task.rotation=5",),
    ),
    Fault(
        "an evaluation that leaves dropout off",
        "ddp",
        (("train.py", "    run.model.train()\n    loss_sum, num_targets", "    loss_sum, num_targets"),),
        frozenset({"Evaluation"}),
        "evaluate() must end with model.train()",
    ),
    Fault(
        "stand-ins counted in the evaluation",
        "ddp",
        (("train.py", "totals[1] += num_targets * batch.weight", "totals[1] += num_targets"),),
        frozenset({"Evaluation"}),
        "counted padding",
    ),
    Fault(
        "a checkpoint whose optimizer state is put back only where there is some",
        "fsdp",
        (("src/checkpoint/tensors.py", "    parameter.grad = torch.zeros_like(parameter)", "    pass"),),
        frozenset({"Checkpoint"}),
        "the optimizer's state",
    ),
    Fault(
        "the last layer in Muon's group",
        "ddp",
        (("src/optim.py", "if isinstance(m, nn.Linear)][-1:])", "if isinstance(m, nn.Linear)][-1:0])"),),
        frozenset({"Updates"}),
        "not fc2.weight",
        ("--optim.name=muon",),
    ),
    Fault(
        "a checkpoint that forgets the random numbers",
        "ddp",
        (("src/checkpoint/rng.py", "    torch.set_rng_state(", "    bytes("),),
        frozenset({"Checkpoint"}),
        "the random numbers",
    ),
    Fault(
        "each process has data of its own",
        "ddp",
        (("src/data/mnist.py", "order = np.random.default_rng(0)", "order = np.random.default_rng()"),),
        frozenset({"Data", "Evaluation"}),
        "build_datasets makes other data on each process",
    ),
    Fault(
        "the same dropout on every process",
        "ddp",
        (("train.py", "set_seed((config.seed + accelerator.process_index) % 2**32)", "set_seed(config.seed)"),),
        frozenset({"Same start"}),
        "dropout drops the same units on every process",
    ),
    Fault(
        "gradients not cleared",
        "ddp",
        (("train.py", "        optimizer.zero_grad()\n", ""),),
        frozenset({"Gradients", "Accumulation", "Checkpoint"}),  # none of which begin where they should
        "not the gradient of the whole batch's mean loss",
    ),
    Fault(
        "gradients reduced after each micro-batch",
        "ddp",
        (("train.py", "is_reduced = i == len(micro_batches) or accelerator.is_fsdp2", "is_reduced = True"),),
        frozenset({"Cost"}),
        "gradients reduced after each micro-batch",
        ("--micro_batch_size=8",),
    ),
]  # fmt: skip
