"""Train one task under the strategy chosen by an accelerate yaml: train_step, evaluate, fit, build, main.

accelerate launch --config_file accelerate_configs/fsdp.yaml train.py [--config=FILE.yaml]... [--key.sub=value]...

To change the loss or add a metric, edit `loss` or `metrics` of your task in src/tasks/; to change the update, edit
train_step.
"""

import gc
import sys
from datetime import timedelta

from src.start import begin, run_settings

if __name__ == "__main__":  # the imports below take seconds: answer signals, --help and mistakes first
    settings = begin(sys.argv[1:])

import torch
from accelerate.utils import broadcast, broadcast_object_list
from torch.distributed.elastic.multiprocessing.errors import record

from src.checkpoint.export import export_model, load_best
from src.checkpoint.resume import find_checkpoint, load_checkpoint, origin_of
from src.checkpoint.write import CheckpointWriter
from src.config.config import Config
from src.distributed.accelerator import build_accelerator, set_timeout, shut_down
from src.distributed.process import collect_only_new_objects, exit_codes, num_machines
from src.distributed.stop import StopSignal
from src.parts import AROUND_STEPS, AT_END, AT_START, MODES, PARTS, open_store
from src.tasks.base import Task
from src.tasks.task_checks import require_gradients, require_sum
from src.tracking.part import Parts
from src.tracking.tracker import Tracker
from src.training.batches import CountedSteps, Fetched, MicroBatch, TrainStep, evaluation_batches, training_steps
from src.training.evaluation import Evaluation, evaluate_all, evaluate_batches, gather_in_order, metrics_of
from src.training.gradients import grad_norm, gradient_sync, local_gradients, scale_and_clip_, step_if_finite
from src.training.optim import build_optimizers, extended, lr_at, set_lr
from src.training.phases import in_phase
from src.training.progress import StepResult
from src.training.run import Run, begin_task, build_data, fingerprints_of, on_device, prepare_model, require_rows


def train_step(run: Run, micro_batches: list[MicroBatch], counts: dict[str, float]) -> StepResult:
    """Run forward and backward over this process's shard of one global batch, then update the weights."""
    accelerator, config, progress = run.accelerator, run.config, run.progress

    # ------------------------------------------------------------------------------------------ forward and backward
    # Divide each micro-batch's sum by the targets of the whole global batch. A mean of micro-batch means would give the
    # targets in short ones more weight, as transformers' Trainer did until 2024 (transformers#34191). DDP and FSDP
    # average gradients over the processes: multiply by their number to get the sum back.
    scale = accelerator.num_processes * progress.loss_scale / max(counts["targets"], 1)
    losses = []
    for i, batch in enumerate(micro_batches, start=1):
        with gradient_sync(run, is_last=i == len(micro_batches)):
            # call model(...), not model.forward(...): FSDP gathers a block's weights in forward hooks
            loss = run.task.loss(run.model, batch.data)
            if progress.step == 0:
                require_sum(run.task, loss, batch.data)  # only in the first step, so that the others cost nothing
            # start from the scale: loss * scale would be four more operators. A dummy's is 0, but all must take part
            loss.backward(torch.full_like(loss, scale * batch.weight))
        losses.append(loss.detach() if batch.weight else torch.zeros_like(loss))
    require_gradients(run.model, progress.step)  # of all parameters, which DDP needs

    # ------------------------------------------------------------------------------------------------ norm and clip
    gradients = local_gradients(run.parameters)
    unscale = 1 / progress.loss_scale  # 1 except in fp16
    norm = grad_norm(accelerator, gradients, unscale)
    scale_and_clip_(gradients, unscale, norm, config.optim.max_grad_norm)

    # ------------------------------------------------------------------------------------------------------- update
    lr = lr_at(progress.step, config.optim, *run.schedule)
    set_lr(run.optimizers, lr)
    step_if_finite(run.optimizers, norm)  # on all processes or none; AdamW skips without the host waiting
    progress.step += 1
    return StepResult(counts, lr, losses, norm)


def evaluate(run: Run, stop: StopSignal) -> Evaluation | None:
    """Evaluate each example exactly once. Return the metrics, the outputs that the task's tables are made from, and
    what the model generates; None if the run was stopped meanwhile."""
    task, size = run.task, len(run.eval_set)
    run.model.eval()
    broadcast([*run.model.buffers()])  # running statistics, as process 0 exports them: FSDP leaves each its own
    with in_phase("evaluation", run), torch.no_grad():
        scores = evaluate_batches(task, run.model, evaluation_batches(run), run.device, stop)
        samples = task.generate(run.model, run.eval_set) if scores else []
    run.model.train()
    if scores is None:
        return None
    loss_sum, targets, examples = run.accelerator.reduce(scores.totals, "sum").tolist()
    # all outputs, each example once, in the dataset's order: F1, for example, is no mean over examples
    outputs = {n: gather_in_order(run, o, min(size, task.kept_outputs.get(n, size))) for n, o in scores.outputs.items()}
    num_examples = int(examples) // run.cp_size
    metrics = metrics_of(task, loss_sum / targets, num_examples, outputs) if run.is_main else {}
    (metrics,) = broadcast_object_list([metrics])  # all must agree on early stopping and on the best checkpoints
    return Evaluation(metrics, outputs, samples)


def fit(run: Run) -> bool:
    """Train to the last step or until early stopping. Return False if the run was stopped, after saving it."""
    config, progress = run.config, run.progress
    # parts are W&B, the report and other optional code that follows the run
    with open_store(run.accelerator, config) as store, Parts(run, PARTS) as parts, Tracker(run, parts) as tracker:
        gc.collect()  # what building the run has left, which the next line would keep
        collect_only_new_objects()
        stop = StopSignal(run.accelerator, config)
        checkpoints = CheckpointWriter(run, store)
        steps = CountedSteps(training_steps(run, progress.step), stop)
        fetched: Fetched = steps
        take_step: TrainStep = train_step
        for wrap in AROUND_STEPS:
            fetched, take_step = wrap(run, fetched, take_step)
        is_stopping, first = False, progress.step + 1
        progress.start_clock()
        run.model.train()
        while True:
            # ----------------------------------------------------------- between two steps: evaluate, save, stop
            if run.is_evaluation_due() and not is_stopping:
                progress.tick()
                evaluation = evaluate_all(evaluate, run, stop)
                is_stopping = evaluation is None
                if evaluation:
                    progress.add_evaluation(evaluation.metrics, config.early_stopping)
                    tracker.log_evaluation(evaluation)
                progress.tick(is_training=False)
            error = progress.metric_error(config)
            is_last = progress.step == run.total_steps or progress.is_out_of_patience(config.early_stopping)
            is_ending = is_stopping or is_last or error is not None
            checkpoints.poll()  # report on the one being written, once it is done
            # a checkpoint always holds the evaluation of its step: evaluate first, save second
            if progress.step and (is_ending or run.is_save_due()):
                progress.tick()
                checkpoints.save(tracker.sync(), parts.run_id)
            if error:
                checkpoints.close()
                raise error
            if is_ending:
                break
            # -------------------------------------------------------------------------------- one optimizer step
            micro_batches, counts = next(fetched)
            result = take_step(run, micro_batches, counts)
            if progress.step == first:  # all have loaded and compiled: from now on, one that takes long hangs
                run.accelerator.wait_for_everyone()
                set_timeout(run.accelerator, timedelta(minutes=config.timeout_minutes), stop.group)
            is_stopping = steps.is_stop_requested()
            progress.add_step(result)
            tracker.advance()
            # reading a loss makes the host wait for the device: do so only where its value is needed
            reads_losses = is_stopping or run.needs_sync()
            if reads_losses and progress.read_steps(run.accelerator, run.is_fp16, config.max_bad_steps):
                checkpoints.close()
                progress.give_up(config, run.is_fp16, checkpoints.newest)
            if run.is_logged():
                tracker.log_training(result)

        checkpoints.close()
        if is_stopping:
            tracker.log_stop(stop.reason or "another process", checkpoints.newest)
        else:
            evaluated = load_best(run, store)
            with in_phase("export", run):
                export_model(run, evaluated)
            parts.end(tracker.write_summary(evaluated, checkpoints.pause_seconds))
    return not is_stopping


@in_phase("load")
def build(config: Config[Task]) -> Run | None:
    """Join the processes, build data, model and optimizers, and load the checkpoint to resume from. Return None if the
    run in this output folder has already finished."""
    # ------------------------------------------------------------------- processes, and what the run resumes from
    accelerator, launch = build_accelerator(config)
    with open_store(accelerator, config) as store:
        resume = find_checkpoint(store)
    if resume.is_finished:
        accelerator.print(f"{config.folder}: this run has finished; {resume.progress.end_note(config.early_stopping)}")
        shut_down(accelerator)
        return None

    # ------------------------------------------------------------------------------------------------------- data
    config = begin_task(config, launch, resume)
    train_set, eval_set = build_data(config, accelerator)
    describe = config.task.describe
    fingerprints = fingerprints_of(config.task, (train_set, eval_set), accelerator)

    # --------------------------------------------------------------------------------------- model and optimizers
    model, metadata = prepare_model(config, accelerator, launch)
    # after sharding, which replaces the parameters
    optimizers = extended(config, model, build_optimizers(config.optim, model))

    # --------------------------------------------------------------------------------------------------- the run
    run = Run(
        config=config,
        accelerator=accelerator,
        launch=launch,
        resume=resume,
        model=model,
        optimizers=optimizers,
        progress=resume.progress,
        train_set=on_device(config, train_set, accelerator.device),
        eval_set=on_device(config, eval_set, accelerator.device),
        origin=origin_of(config, launch, accelerator, model, train_set, fingerprints),
        metadata=metadata | {"data": {"train": describe("train", train_set), "eval": describe("eval", eval_set)}},
    )
    load_checkpoint(run)
    require_rows(run)
    return run


@record  # shows the first failure's traceback in the launcher's table
@exit_codes()
def main(settings: Config | None = None) -> None:
    config = run_settings(sys.argv[1:], settings)
    collect_only_new_objects()  # nothing was collected since the imports began
    for act in AT_START:
        act(config)
    run = build(config)
    if run is None:  # it has finished
        return
    if config.mode != "train":  # --check or --dry-run
        is_right = MODES[config.mode](run, train_step, evaluate)
        shut_down(run.accelerator)
        if not is_right:
            raise SystemExit(1)
        return
    with in_phase("step", run):
        is_done = fit(run)
    shut_down(run.accelerator)
    if is_done and run.is_main:
        for act in AT_END:
            act(config)
    if not is_done and num_machines() > 1:
        # stopped: after exit code 0, the launcher of a multi-machine run waits for minutes and reports success
        raise SystemExit(1)


if __name__ == "__main__":
    main(settings)
