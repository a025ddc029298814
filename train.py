"""Train one task under the strategy that an accelerate yaml chooses: build, fit, train_step, evaluate.

accelerate launch --config_file accelerate_configs/fsdp.yaml train.py [--config=FILE.yaml]... [--key.sub=value]...

To change the loss or add a metric: `loss` and `metrics` of your task in src/tasks/. To change the update: train_step.
"""

from src.config.errors import RunError, UserError
from src.distributed.process import SIGNALS, collecting_new_objects, end_with_launcher, exit_codes

if __name__ == "__main__":  # a signal may come, or the launcher die, during the seconds of imports below
    end_with_launcher()
    SIGNALS.catch()

import sys

import torch
from accelerate.utils import broadcast_object_list, get_int_from_env, set_seed
from torch.distributed.elastic.multiprocessing.errors import record

from src.check import run_checks
from src.checkpoint.best import load_best
from src.checkpoint.export import export_model
from src.checkpoint.hub import push_to_hub, write_card
from src.checkpoint.occupied import folder_errors
from src.checkpoint.resume import checkpoint_metadata, find_checkpoint, load_checkpoint
from src.checkpoint.status import stop_at_start
from src.checkpoint.tensors import frozen_norm
from src.checkpoint.write import CheckpointWriter
from src.config.config import Config, load_config
from src.distributed.accelerator import build_accelerator, context_parallel, leave, prepare
from src.distributed.launcher import resume_command
from src.distributed.machines import join
from src.distributed.stop import StopSignal
from src.tasks import TASKS
from src.tasks.returned import require_sum
from src.tracking.dry_run import dry_run
from src.tracking.performance import Performance
from src.tracking.tracker import Tracker
from src.tracking.wandb import fetch_artifacts
from src.training.batches import CountedSteps, MicroBatch, TrainStep, evaluation_batches, training_steps
from src.training.cuda_graph import RecordedStep
from src.training.evaluation import Evaluation, evaluate_batches, gather_in_order, metrics_of
from src.training.gradients import float64_zeros, grad_norm, local_gradients, reducing, scale_and_clip_, step_if_finite
from src.training.optim import build_optimizers, lr_at, set_lr
from src.training.out_of_memory import explains_memory
from src.training.progress import StepCounts, StepResult
from src.training.run import Run, build_data, describe_data, fingerprints_of, new_model, on_device
from src.training.transforms import transform


def main() -> None:
    # `record` puts the traceback of what failed first into the launcher's table
    record(train_or_check)(sys.argv[1:])


@exit_codes()
@explains_memory()  # room: plan
def train_or_check(argv: list[str]) -> None:
    config = run_settings(argv)
    SIGNALS.answer_by(SIGNALS.die_later)  # in C++, waiting for a process that may be lost
    join(config)  # room: machines
    run = build(config)
    if run is None:  # it has already finished
        return
    if config.check:  # room: check
        is_right = run_checks(run, train_step, evaluate, load_checkpoint)
        leave(run.accelerator)
        sys.exit(0 if is_right else 1)
    if config.dry_run:  # room: dry_run
        dry_run(run)
        leave(run.accelerator)
        return
    is_done = fit(run)
    leave(run.accelerator)
    if is_done and config.push_to_hub and run.is_main:  # room: hub
        push_to_hub(config)
    num_machines = get_int_from_env(["GROUP_WORLD_SIZE"], 1)
    if not is_done and num_machines > 1:
        # stopped: after exit code 0, launchers of several machines wait for minutes and report success
        sys.exit(1)


def run_settings(argv: list[str]) -> Config:
    """Return the settings of the run; raise a UserError with all their mistakes."""
    return load_config(
        argv,
        TASKS,
        also=folder_errors,  # room: safeguards
        fetch=fetch_artifacts,  # room: wandb
    )


def build(config: Config) -> Run | None:
    """Join the processes, build data, model and optimizers, and load the checkpoint to continue from. Return None if
    the run in this output folder is finished."""
    # ------------------------------------------------------------------- processes, and what the run continues from
    accelerator, launch = build_accelerator(config)
    command = resume_command(config)  # room: status
    resume = find_checkpoint(accelerator, config)
    if resume.is_finished:
        says = "holds this run, finished: nothing to do; raise --epochs or --max_steps"
        accelerator.print(f"{config.folder} {says}")
        leave(accelerator)
        return None
    if not config.saves:  # room: check dry_run
        SIGNALS.release()
    if config.saves and accelerator.is_main_process:  # room: status
        SIGNALS.answer_by(lambda signal: stop_at_start(config, resume, command, signal))

    # ------------------------------------------------------------------------------------------------------- data
    datasets = build_data(config, accelerator)
    fingerprints = fingerprints_of(config.task, datasets, accelerator)  # room: machines safeguards trackers wandb
    train_set, eval_set = (on_device(config, dataset, accelerator.device) for dataset in datasets)
    config.task.split_sequences(context_parallel(accelerator))

    # --------------------------------------------------------------------------------------- model and optimizers
    model, facts = new_model(
        config,
        launch.device,  # room: cpu text
        launch.precision,
        accelerator.is_fsdp2,  # room: cpu text
    )
    transform(model, config, accelerator)  # room: compile
    model = prepare(accelerator, model)
    if any(parameter.is_meta for parameter in model.parameters()):  # room: text
        # built without weights and sharded since: each process fills its own shards
        device = accelerator.device
        if launch.strategy.endswith("offload"):
            device = torch.device("cpu")
        config.task.load_weights(model, device)
    optimizers = build_optimizers(config.optim, model)  # after sharding, which replaces the parameters

    # --------------------------------------------------------------------------------------------------- the run
    metadata = checkpoint_metadata(
        config,
        launch,
        len(train_set),  # room: safeguards
        fingerprints,  # room: machines safeguards trackers wandb
        frozen_norm(model, accelerator),  # room: text examples
    )
    # The model came from one seed; from here on each process draws random numbers, such as dropout masks, of its own.
    # (numpy takes no seed from 2**32 on.) The checkpoint comes after, as it restores those of its step.
    set_seed((config.seed + accelerator.process_index) % 2**32)
    progress = resume.progress
    run = Run(config, accelerator, launch, resume, model, optimizers, progress, train_set, eval_set, metadata, facts)
    run.resume_command = command  # room: status
    describe_data(run)  # room: text
    load_checkpoint(run)
    return run


def fit(run: Run) -> bool:
    """Train to the last step. Return whether it got there; if not, it was told to stop and has saved."""
    config, progress = run.config, run.progress
    performance = Performance(run)  # room: performance
    with Tracker(run) as tracker, collecting_new_objects():
        stop = StopSignal(run.accelerator, config)
        checkpoints = CheckpointWriter(run, tracker.say)
        steps = CountedSteps(training_steps(run, progress.step), stop)
        is_stopping = False
        take_step: TrainStep = train_step
        if config.cuda_graphs:  # room: cuda_graphs
            take_step = RecordedStep(run, train_step)
        progress.start_clock()
        run.model.train()
        while True:
            # ----------------------------------------------------------- between two steps: evaluate, save, stop
            if run.is_evaluation_due() and not is_stopping:
                is_stopping = not evaluate_and_log(run, stop, tracker)
            is_ending = is_stopping or progress.step == run.total_steps
            unknown = progress.unknown_metrics(config)  # room: best
            is_ending = is_ending or bool(unknown) or progress.is_out_of_patience(config.early_stopping)  # room: best
            checkpoints.poll()  # reports on the one being written once it is done
            # a checkpoint always holds the evaluation of its step: evaluate first, save second
            if progress.step and (is_ending or run.is_save_due()):
                progress.tick()
                checkpoints.save(tracker.state())
            if unknown:  # room: best
                checkpoints.close()
                hint = f"with another one, the same command continues from step {progress.step}"
                raise UserError(f"{unknown[0]}; {hint}")
            if is_ending:
                break
            # -------------------------------------------------------------------------------- one optimizer step
            performance.begin_step()  # room: performance
            micro_batches, counts = next(steps)
            performance.begin_computing(micro_batches)  # room: performance
            result = take_step(run, micro_batches, counts)
            performance.end_step()  # room: performance
            is_stopping = steps.is_stop_requested()
            progress.add_step(result)
            progress.count(run.task.counters(), steps.more)  # room: streaming
            tracker.advance()
            # reading a loss makes the host wait for the device: only where its value is needed
            if is_stopping or run.is_read_due():
                has_failed = progress.read_steps(run.accelerator, run.is_fp16, config.max_bad_steps)
                if has_failed:
                    checkpoints.close()
                    raise RunError(progress.explain_bad_steps(config, run.is_fp16, checkpoints.newest))
            if run.is_log_due() or progress.step == run.total_steps:
                tracker.log_training(
                    result,
                    performance.metrics(),  # room: performance
                )

        checkpoints.poll(wait=True)
        if is_stopping:  # room: status
            tracker.log_stop(stop.reason or "another process", checkpoints.newest)
        checkpoints.close()
        if not is_stopping:
            finish(run, tracker, checkpoints)
    return not is_stopping


def evaluate_and_log(run: Run, stop: StopSignal, tracker: Tracker) -> bool:
    """Evaluate after the latest step. Return whether that was done; if not, the run was told to stop meanwhile."""
    progress = run.progress
    progress.tick()
    evaluation = evaluate(run, stop)
    if evaluation:
        progress.evaluations[progress.step] = evaluation.metrics
        progress.count_improvement(evaluation.metrics, run.config.early_stopping)  # room: best
        tracker.log_evaluation(evaluation)
    progress.tick(is_training=False)
    return evaluation is not None


def finish(run: Run, tracker: Tracker, checkpoints: CheckpointWriter) -> None:
    """Export the model, and write down what came out of the run."""
    metrics = run.progress.evaluation
    if run.config.checkpoint.export_best:  # room: best
        metrics = load_best(run, tracker.say) or metrics
    run.model.eval()  # room: tables
    metrics = metrics | tracker.log_report(*run.task.report(run.model, run.device))  # room: tables
    export_model(run)
    if run.is_main:  # room: hub
        write_card(run.config, metrics, run.config.folder / "model")
    tracker.write_summary(metrics, checkpoints.pause_seconds)


def train_step(run: Run, micro_batches: list[MicroBatch], counts: StepCounts) -> StepResult:
    """Run forward and backward over this process's part of one global batch, then update the weights.

    The loss is the mean over the targets (examples, tokens) of the *global* batch. The host doesn't wait for the
    device, unless an optimizer cannot skip a step by itself.
    """
    accelerator, config, progress = run.accelerator, run.config, run.progress

    # ------------------------------------------------------------------------------------------ forward and backward
    # The sum over a micro-batch, divided by the targets in all of them, on all processes. A mean of micro-batch means
    # would give a target in a short one more weight, as transformers' Trainer did until 2024 (transformers#34191).
    # DDP and FSDP average the gradients over the processes: times their number, the mean is the sum again.
    scale = accelerator.num_processes * progress.loss_scale / max(counts.targets, 1)
    loss_sum = float64_zeros((), run.device)
    for i, batch in enumerate(micro_batches, start=1):
        with reducing(run, is_last=i == len(micro_batches)):
            # model(...), never model.forward(...): FSDP gathers a block's weights in hooks of its call
            loss = run.task.loss(run.model, batch.data)
            if progress.step == 0:  # room: examine
                require_sum(run.task, loss, batch.data)  # in the first step, so that the others cost nothing
            # a dummy batch has weight 0, but goes through the backward pass as well, which is collective
            accelerator.backward(loss * (scale * batch.weight))
        if batch.weight:
            loss_sum += loss.detach()

    # ------------------------------------------------------------------------------------------------ norm and clip
    gradients = local_gradients(run.parameters)
    unscale = 1 / progress.loss_scale  # 1, but in fp16
    norm = grad_norm(accelerator, gradients).mul_(unscale)
    scale_and_clip_(gradients, unscale, norm, config.optim.max_grad_norm)

    # ------------------------------------------------------------------------------------------------------- update
    lr = lr_at(progress.step, config.optim, *run.schedule)
    set_lr(run.optimizers, lr)
    step_if_finite(run.optimizers, norm)  # the same on all processes
    progress.step += 1
    return StepResult(counts, lr, loss_sum, norm)


def evaluate(run: Run, stop: StopSignal) -> Evaluation | None:
    """Return loss and metrics over each example exactly once, and what the task's tables are made from. Return None if
    the run was told to stop meanwhile."""
    accelerator, task = run.accelerator, run.task
    run.model.eval()
    scores = evaluate_batches(task, run.model, evaluation_batches(run), run.device, stop)
    run.model.train()
    if scores is None:
        return None
    loss_sum, targets, examples = accelerator.reduce(scores.totals, "sum").tolist()
    # every example once, in the dataset's order: metrics that are no mean over examples, such as F1, need all at once
    outputs = {name: gather_in_order(run, output, len(run.eval_set)) for name, output in scores.outputs.items()}
    metrics = {}
    if run.is_main:
        metrics = metrics_of(task, loss_sum / targets, int(examples) // run.cp_size, outputs)
    # all processes must decide alike on early stopping and the best checkpoints
    (metrics,) = broadcast_object_list([metrics])
    return Evaluation(
        metrics,
        outputs,  # room: tables
    )


if __name__ == "__main__":
    main()
