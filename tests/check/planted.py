"""Faults that raise no error, each as an edit of the project: what a user's copy of it may come to look like."""

import shutil
from pathlib import Path

from tests.launching import PROJECT

Edit = tuple[str, str, str]
"""A file, text in it, and what stands there instead."""


class Fault:
    """A fault and what --check has to say of it."""

    def __init__(
        self,
        name: str,
        yaml: str,
        fails: set[str],
        says: str,
        *edits: Edit,
        arguments: tuple[str, ...] = (),
        launcher_arguments: tuple[str, ...] = (),
    ) -> None:
        """Args:
        yaml: what it is run under; some only show with shards, others only with replicas.
        fails: the checks that fail, and no others.
        says: in what they say: the cause.
        """
        self.name, self.yaml, self.fails, self.says, self.edits = name, yaml, fails, says, edits
        self.arguments, self.launcher_arguments = arguments, launcher_arguments


def plant(fault: Fault, folder: Path) -> Path:
    """Return a copy of the project with the fault in it, and with a model that takes a tenth of the time."""
    project = folder / "project"
    for name in ("src", "accelerate_configs"):
        shutil.copytree(PROJECT / name, project / name, ignore=shutil.ignore_patterns("*.pyc.*"))  # half-written
    shutil.copy(PROJECT / "train.py", project)
    for file, text, instead in (*fault.edits, *SMALLER):
        content = (project / file).read_text()
        assert content.count(text) == 1, f"{file} has changed: {text}"
        (project / file).write_text(content.replace(text, instead))
    return project


SMALLER: tuple[Edit, ...] = (
    ("src/tasks/mnist.py", "nn.Conv2d(1, 32, 3)", "nn.Conv2d(1, 8, 3)"),
    ("src/tasks/mnist.py", "nn.Conv2d(32, 64, 3)", "nn.Conv2d(8, 16, 3)"),
    ("src/tasks/mnist.py", "nn.Linear(9216, 128)", "nn.Linear(2304, 32)"),
    ("src/tasks/mnist.py", "nn.Linear(128, 10)", "nn.Linear(32, 10)"),
)


def at_the_end_of_evaluation(statement: str) -> Edit:
    line = "    report = task.report(run.model, run.device)\n"
    return "train.py", line, f"{line}    {statement}\n"


CLIPPED = ("--optim.max_grad_norm=1",)
FAULTS = [
    Fault(
        "every process reads the same shard", "ddp", {"Data"}, "every process reads the same shard",
        ("src/training/batches.py", "_load(run, augmented, order,",
         "_load(run, augmented, np.repeat(order[:: run.world_size], run.world_size),"),
    ),
    Fault(
        "set_epoch forgotten", "fsdp", {"Data"}, "set_epoch was forgotten",
        ("src/training/batches.py", "default_rng([config.seed, epoch])", "default_rng([config.seed, 0])"),
    ),
    Fault(
        "one sample dropped", "ddp", {"Data"}, "1 left out",
        ("src/training/batches.py", "order[done_in_epoch * config.global_batch_size :]",
         "order[done_in_epoch * config.global_batch_size : -1]"),
    ),
    Fault(
        "one sample doubled in evaluation", "ddp", {"Data", "Evaluation"}, "1 read more than once (0, …)",
        ("src/training/batches.py", "np.arange(len(run.eval_set))", "np.append(np.arange(len(run.eval_set)), 0)"),
    ),
    Fault(
        "the loss averaged per micro-batch, with ragged counts", "ddp", {"Gradients"},
        "a mean of means",
        ("train.py", "accelerator.backward(loss_sum * (batch.weight * loss_factor))",
         "accelerator.backward(loss_sum / n / len(micro_batches))"),
        arguments=("--micro_batch_size=4",),
    ),
    Fault(
        "gradients summed, not averaged", "fsdp", {"Gradients"}, "a sum that was not divided",
        ("train.py", "= accelerator.num_processes / divisor", "= accelerator.num_processes**2 / divisor"),
    ),
    Fault(
        "gradients not reduced for one parameter", "ddp", {"Gradients", "Updates"},  # and so the replicas drift apart
        "fc1.bias",
        ("src/distributed/accelerator.py", "        return accelerator.prepare(model)",
         '        model._ddp_params_and_buffers_to_ignore = ["fc1.bias"]\n        return accelerator.prepare(model)'),
    ),
    Fault(
        "a process seeded differently at start", "fsdp", {"Same start"},  # DDP sends the first process's weights to all
        "conv1.weight and 7 more differ, on process 1",
        ("train.py", "new_model(config, launch.device",
         'new_model(config.model_copy(update={"seed": config.seed + accelerator.process_index}), launch.device'),
    ),
    Fault(
        "a parameter group left out of the optimizer", "fsdp", {"Updates"}, "4 of 8 as they should, not conv1.bias",
        (
            "src/training/optim.py",
            'groups = [group for group in (matrices, vectors) if group["params"]]', "groups = [matrices]",
        ),
    ),
    Fault(
        "a buffer not synchronised", "fsdp", {"Updates"},  # DDP sends the first process's to all
        "seen: differs",
        ("src/tasks/mnist.py", "        self.fc2 = nn.Linear(128, 10)\n",
         "        self.fc2 = nn.Linear(128, 10)\n        self.register_buffer('seen', torch.zeros(()))\n"),
        ("src/tasks/mnist.py", "        return self.fc2(x)",
         "        self.seen += images.float().mean() * self.training\n        return self.fc2(x)"),
    ),
    Fault(
        "clipping before the gradients are scaled", "ddp", {"Gradients"}, "taken before the gradients were scaled",
        ("train.py", "gradients).mul_(unscale)", "gradients).mul_(counts.targets)"),
        arguments=CLIPPED,
    ),
    Fault(
        "clipping by one process's norm", "fsdp", {"Gradients"}, "the norm is one process's",
        ("src/distributed/accelerator.py", "squares = accelerator.reduce(squares", "_ = accelerator.reduce(squares"),
        arguments=CLIPPED,
    ),
    Fault(
        "clipping that scales small gradients up", "ddp", {"Gradients"}, "clipping that scales small gradients up",
        ("src/training/optim.py", ".clamp(max=1.0)", ""),
        arguments=CLIPPED,
    ),
    Fault(
        "weight decay on norms and biases", "fsdp", {"Updates"}, "4 of 8 as they should, not conv1.bias",
        ("src/training/optim.py", 'if p.ndim < 2], "weight_decay": 0.0', 'if p.ndim < 2], "weight_decay": 0.01'),
    ),
    Fault(
        "an evaluation that is a mean of the batches' means", "ddp", {"Evaluation"},
        "a mean of each process's or each batch's",
        ("train.py", "totals[0] += loss_sum * batch.weight", "totals[0] += loss_sum / num_targets * batch.weight"),
        ("train.py", "totals[1] += num_targets * batch.weight", "totals[1] += batch.weight"),
    ),
    Fault(
        "a process without an evaluation batch", "ddp", {"Data", "Evaluation"}, "by process",
        ("src/training/batches.py", "    for (batch,) in bar(",
         "    if run.rank:\n        return\n    for (batch,) in bar("),
    ),
    Fault(
        "an evaluation that fails on the first process alone", "ddp", {"Evaluation"}, "KeyError: 'predictions'",
        ("train.py", "    run.model.eval()\n",
         "    run.model.eval()\n    if run.is_main:\n        raise KeyError('predictions')\n"),
    ),
    Fault(
        "the learning rate stepped once per process", "ddp", {"Updates"}, "a prepared scheduler steps once per process",
        ("train.py", "lr_at(progress.step,", "lr_at(progress.step * accelerator.num_processes,"),
    ),
    Fault(
        "FSDP asked for and DDP run", "fsdp", {"Launch"}, "what the yaml asks for was not applied",
        ("src/distributed/accelerator.py", "errors += launch_errors(launcher, config, world_size, wants_fsdp)",
         "errors += launch_errors(launcher, config, world_size, wants_fsdp); wants_fsdp = False"),
    ),
    Fault(
        "DDP asked for and nothing run", "ddp", {"Launch"}, "each process trains a model of its own",
        ("src/distributed/accelerator.py", "if accelerator.num_processes != world_size:", "if False:"),
        ("src/distributed/accelerator.py", "        cpu=on_cpu,", "        cpu=False,"),
    ),
    Fault(
        "only the root wrapped", "fsdp", {"Launch"}, "only the root is wrapped",
        ("src/tasks/mnist.py", '_no_split_modules = ["Conv2d", "Linear"]', "_no_split_modules = []"),
        ("src/distributed/accelerator.py", "if sharded_units(model) < 2:", "if False:"),
    ),
    Fault(
        "the loss in bf16", "fsdp", {"Precision"}, "the loss is computed in half precision",
        ("src/tasks/mnist.py", 'model(batch["images"]).float(), batch["labels"]\n        smoothed',
         'model(batch["images"]), batch["labels"]\n        smoothed'),
        launcher_arguments=("--mixed_precision=bf16",),
    ),
    Fault(
        "a checkpoint that forgets the optimizer", "fsdp", {"Checkpoint"}, "the optimizer's state",
        ("src/checkpoint/tensors.py", "for optimizer in optimizers:\n        for parameter, states",
         "for optimizer in ():\n        for parameter, states"),
    ),
]  # fmt: skip
ALONE = [
    Fault(
        "a mean over the micro-batches", "cpu", {"Gradients"}, "a mean of means",
        ("train.py", "accelerator.backward(loss_sum * (batch.weight * loss_factor))",
         "accelerator.backward(loss_sum * (batch.weight * loss_factor / len(micro_batches)))"),
    ),
    Fault(
        "all micro-batches forgotten but the last", "cpu", {"Gradients"}, "a mean of means",
        ("train.py", "            loss_sum, n = task.loss(run.model, batch.data)",
         "            run.model.zero_grad()\n            loss_sum, n = task.loss(run.model, batch.data)"),
    ),
    Fault(
        "another rate at the last step of each epoch", "cpu", {"Updates"}, "the schedule is ahead of the steps",
        ("train.py", "lr = lr_at(progress.step, config.optim, *run.schedule)",
         "lr = lr_at(progress.step, config.optim, *run.schedule) * (1 + (progress.step % run.steps_per_epoch == 89))"),
    ),
    Fault(
        "another rate at the first step of epoch 3", "cpu", {"Updates"}, "step 181",
        ("train.py", "lr = lr_at(progress.step, config.optim, *run.schedule)",
         "lr = lr_at(progress.step, config.optim, *run.schedule) * (1 + (progress.step == 180))"),
    ),
    Fault(
        "a schedule that is a step ahead", "cpu", {"Updates"}, "the schedule is ahead of the steps",
        ("train.py", "lr_at(progress.step,", "lr_at(progress.step + 1,"),
    ),
    Fault(
        "an epoch's last update left out", "cpu", {"Gradients", "Updates"}, "inf (step 90)",
        ("train.py", "    step_if_finite(run.optimizers, norm)",
         "    is_last = (progress.step + 1) % run.steps_per_epoch == 0\n"
         "    run.model.zero_grad() if is_last else step_if_finite(run.optimizers, norm)"),
    ),
    Fault(
        "an epoch's last gradient forgotten", "cpu", {"Gradients"}, "step 90",
        ("train.py", "    gradients = local_gradients(run.parameters)",
         "    gradients = local_gradients(run.parameters)\n    if (progress.step + 1) % run.steps_per_epoch == 0:\n"
         "        torch._foreach_zero_(gradients)"),
    ),
    Fault(
        "betas ignored", "cpu", {"Updates"}, "betas (0.9, 0.999), not (0.8, 0.9)",
        ("src/training/optim.py", "betas=config.betas, ", ""),
        arguments=("--optim.betas=[0.8,0.9]",),
    ),
    Fault(
        "another eps", "cpu", {"Updates"}, "eps 0.0001, not 1e-08",
        ("src/training/optim.py", "betas=config.betas, ", "betas=config.betas, eps=1e-4, "),
    ),
    Fault(
        "weight decay ignored", "cpu", {"Updates"}, "conv1.weight: weight_decay 0.0, not 0.01",
        (
            "src/training/optim.py",
            'p.ndim >= 2], "weight_decay": config.weight_decay}', 'p.ndim >= 2], "weight_decay": 0.0}',
        ),
    ),
    Fault(
        "momentum ignored", "cpu", {"Updates"}, "momentum 0, not 0.9",
        ("src/training/optim.py", "lr=config.lr, momentum=config.momentum, fused", "lr=config.lr, fused"),
        arguments=("--optim.name=sgd",),
    ),
    Fault(
        "Nesterov's momentum", "cpu", {"Updates"}, "nesterov True, not False",
        ("src/training/optim.py", "momentum=config.momentum, fused", "momentum=config.momentum, nesterov=True, fused"),
        arguments=("--optim.name=sgd",),
    ),
    Fault(
        "Muon at a rate of its own", "cpu", {"Updates"}, "adjust_lr_fn None, not match_rms_adamw",
        ("src/training/optim.py", 'adjust_lr_fn="match_rms_adamw"', "adjust_lr_fn=None"),
        arguments=("--optim.name=muon",),
    ),
    Fault(
        "an order that repeats from epoch 3 on", "cpu", {"Data"}, "an earlier one comes again",
        ("src/training/batches.py", "default_rng([config.seed, epoch])", "default_rng([config.seed, epoch % 2])"),
    ),
    Fault(
        "an augmentation that is the same from epoch 3 on", "cpu", {"Data"}, "an augmentation depends on",
        ("src/training/batches.py", "[config.seed, epoch, 1])", "[config.seed, min(epoch, 1), 1])"),
        arguments=("--task.rotation=5",),
    ),
    Fault(
        "an augmentation without the seed", "cpu", {"Data"}, "an augmentation depends on",
        ("src/training/batches.py", "[config.seed, epoch, 1])", "[0, epoch, 1])"),
        arguments=("--task.rotation=5", "--seed=1"),
    ),
    Fault(
        "an evaluation that leaves weights changed", "cpu", {"Evaluation"}, "changed: weights",
        at_the_end_of_evaluation("torch._foreach_mul_(run.parameters, 0.999)"),
    ),
    Fault(
        "an evaluation that clears the optimizer's state", "cpu", {"Evaluation"}, "changed: optimizer",
        at_the_end_of_evaluation("run.optimizers[0].state.clear()"),
    ),
    Fault(
        "an evaluation that draws the training's random numbers", "cpu", {"Evaluation"}, "changed: random numbers",
        at_the_end_of_evaluation("torch.rand(())"),
    ),
    Fault(
        "an evaluation that leaves a layer's dropout off", "cpu", {"Evaluation"}, "changed: mode",
        ("train.py", "    run.model.train()\n    loss_sum, num_targets",
         "    run.model.train()\n    run.model.dropout1.eval()\n    loss_sum, num_targets"),
    ),
    Fault(
        "dropout in the evaluation", "cpu", {"Evaluation"}, "dropout and the like are on",
        ("train.py", "    run.model.eval()\n", ""),
    ),
    Fault(
        "other weights in the evaluation", "cpu", {"Evaluation"}, "other weights, such as an average",
        ("train.py", "    run.model.eval()\n", "    run.model.eval()\n    kept = [p.clone() for p in run.parameters]\n"
         "    torch._foreach_mul_(run.parameters, 0.9)\n"),
        at_the_end_of_evaluation("torch._foreach_copy_(run.parameters, kept)"),
    ),
    Fault(
        "an evaluation without the last batch", "cpu", {"Evaluation"}, "left out",
        ("train.py", "in evaluation_batches(run):", "in list(evaluation_batches(run))[:-1]:"),
    ),
    Fault(
        "a step added to a checkpoint's", "cpu", {"Checkpoint"}, "the position in the data",
        ("train.py", "        load_checkpoint(run)", "        load_checkpoint(run)\n        run.progress.step += 1"),
    ),
    Fault(
        "a mean loss", "cpu", {"Accumulation"}, "Task.loss returns a mean in place of the sum",
        ("src/tasks/mnist.py", "return smoothed, len(labels)", "return smoothed / len(labels), len(labels)"),
    ),
]  # fmt: skip
"""Faults that a single process shows: tests/check/examine.py plants them one after the other in one run of 90 steps an
epoch."""
MORE = [
    Fault(
        "an epoch that begins anew where a run goes on", "ddp", {"Data"}, "goes on with examples that it has seen",
        ("src/training/batches.py", "        order = order[done_in_epoch * config.global_batch_size :]\n", ""),
    ),
    Fault(
        "a schedule that is longer by the number of processes", "ddp", {"Updates"}, "of another form or length",
        ("src/training/run.py", "Schedule(self.config.steps(self.steps_per_epoch)[1],",
         "Schedule(self.config.steps(self.steps_per_epoch)[1] * self.world_size,"),
    ),
    Fault(
        "an augmentation that depends on the process", "ddp", {"Data"}, "an augmentation depends on the process",
        ("src/training/batches.py", "[config.seed, epoch, 1])", "[config.seed, epoch, 1 + run.rank])"),
        arguments=("--task.rotation=5",),
    ),
    Fault(
        "an evaluation that leaves dropout off", "ddp", {"Evaluation"}, "evaluate() must end with model.train()",
        ("train.py", "    run.model.train()\n    loss_sum, num_targets", "    loss_sum, num_targets"),
    ),
    Fault(
        "stand-ins counted in the evaluation", "ddp", {"Evaluation"}, "counted padding",
        ("train.py", "totals[1] += num_targets * batch.weight", "totals[1] += num_targets"),
    ),
    Fault(
        "a checkpoint whose optimizer state is put back only where there is some", "fsdp", {"Checkpoint"},
        "the optimizer's state",
        ("src/checkpoint/tensors.py", "    parameter.grad = torch.zeros_like(parameter)", "    pass"),
    ),
    Fault(
        "the last layer in Muon's group", "ddp", {"Updates"}, "not fc2.weight",
        ("src/training/optim.py", "if isinstance(m, nn.Linear)][-1:])", "if isinstance(m, nn.Linear)][-1:0])"),
        arguments=("--optim.name=muon",),
    ),
    Fault(
        "a checkpoint that forgets the random numbers", "ddp", {"Checkpoint"}, "the random numbers",
        ("src/checkpoint/rng.py", "    torch.set_rng_state(", "    bytes("),
    ),
    Fault(
        "each process has data of its own", "ddp", {"Data", "Evaluation"},
        "build_datasets makes other data on each process",
        ("src/tasks/mnist.py", "order = np.random.default_rng(0)", "order = np.random.default_rng()"),
    ),
    Fault(
        "the same dropout on every process", "ddp", {"Same start"}, "dropout drops the same units on every process",
        ("train.py", "set_seed((config.seed + accelerator.process_index) % 2**32)", "set_seed(config.seed)"),
    ),
    Fault(
        "gradients not cleared", "ddp", {"Checkpoint", "Gradients"},  # they begin where they should not
        "not the gradient of the whole batch's mean loss",
        ("src/training/optim.py", "        optimizer.zero_grad()\n", ""),
    ),
    Fault(
        "gradients reduced after each micro-batch", "ddp", {"Cost"}, "gradients reduced after each micro-batch",
        ("train.py", "is_reduced = i == len(micro_batches) or", "is_reduced = True or"),
        arguments=("--micro_batch_size=8",),
    ),
]  # fmt: skip
