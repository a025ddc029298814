"""Trains one task under the strategy that an accelerate yaml chooses. Read it top to bottom.

accelerate launch --config_file accelerate_configs/fsdp.yaml train.py [--config=FILE.yaml]... [--key.sub=value]...
"""

from __future__ import annotations

import contextlib
import math
import sys
import time
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

from src.config import Config, load_config
from src.process import exit_codes
from src.process import exit_with_launcher
from src.process import SIGNALS

if TYPE_CHECKING:  # torch is imported in the functions: the settings come first, and mistakes in them are fast
    from accelerate import Accelerator
    from torch import nn
    from torch.optim import Optimizer

    from src.data.loading import MicroBatch
    from src.optim import Schedule
    from src.preemption import StopSignal
    from src.progress import Progress, Step
    from src.tasks.base import Examples


def main() -> None:
    exit_with_launcher()
    SIGNALS.catch()
    with exit_codes():
        config = load_config(sys.argv[1:])
    if config.check:
        SIGNALS.release()

    from torch.distributed.elastic.multiprocessing.errors import record

    record(train)(config)  # puts the traceback of the process that failed first into the launcher's table


@exit_codes()
def train(config: Config) -> None:
    from src.late_dynamo import import_dynamo_late

    import_dynamo_late()
    from accelerate.utils import set_seed

    from src.progress import explain
    from src.data.loading import examples_seen, training_steps
    from src.blocks import checkpoint_activations, compile_blocks
    from src.checkpoint.frozen import frozen_norm
    from src.checkpoint.resume import Found, about, find, read_best, restore
    from src.checkpoint.write import Saver
    from src.cuda_graph import capture
    from src.progress import count_evaluation, is_out_of_patience, unknown_metric
    from src.export import export, push
    from src.launch import (
        build_accelerator,
        command_to_go_on,
        local_main_process_first,
        peak_memory,
        prepare,
    )
    from src.mkl import avoid_mkl
    from src.optim import Schedule, build_optimizers
    from src.preemption import StopSignal
    from src.progress import Progress
    from src.tracking import Tracker, figures, stop_at_start

    # ------------------------------------------------------------------------------------------- build and prepare
    task, global_batch_size = config.task, config.global_batch_size
    accelerator, launch = build_accelerator(timedelta(minutes=config.timeout_minutes))
    command = command_to_go_on(config)
    found = Found() if config.check else find(accelerator, config)
    if found.is_finished:
        accelerator.print(
            f"{config.folder} holds this run, finished: nothing to do; more --epochs or --max_steps go on"
        )
        accelerator.wait_for_everyone()
        accelerator.end_training()
        return
    if accelerator.is_main_process and not config.check:
        SIGNALS.answer_by(partial(stop_at_start, config, found, command))
    world_size, is_fp16 = accelerator.num_processes, accelerator.mixed_precision == "fp16"
    with local_main_process_first(accelerator):  # it downloads and tokenises
        train_set, eval_set = task.build_datasets()
    fingerprints = [task.fingerprint(part) for part in (train_set, eval_set)] if accelerator.is_main_process else []
    on_cpu = train_set
    if config.num_workers == 0:
        train_set, eval_set = (task.to_device(dataset, accelerator.device) for dataset in (train_set, eval_set))
    set_seed(config.seed)  # the same weights on all processes
    model = task.build_model()
    tuned = {
        "freed memory is kept": launch.keeps_memory,
        "oneDNN in place of MKL": avoid_mkl(model, launch.device, launch.precision, task.longest_sequence()),
        "data in the GPU's memory": train_set is not on_cpu,
        "CUDA graphs": config.cuda_graphs,
        "compiled": config.compile,
    }
    parameters = sum(p.numel() for p in model.parameters())
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    facts_to_keep = about(config, launch, len(train_set), fingerprints, frozen_norm(model))
    if config.compile:
        compile_blocks(model)
    if config.activation_checkpointing:
        checkpoint_activations(model)
    if config.cuda_graphs and not config.check:  # which looks at each operator
        capture(accelerator, config, model, train_set)
    model, optimizers = prepare(accelerator, model, build_optimizers(config.optim, model, accelerator.is_fsdp2))
    set_seed((config.seed + accelerator.process_index) % 2**32)  # other dropout on each

    steps_per_epoch = -(-len(train_set) // global_batch_size)
    total_steps, schedule_steps = config.steps(steps_per_epoch)
    schedule = Schedule(schedule_steps, steps_per_epoch)
    if config.check:
        from src.check.examine import Subject, examine

        subject = Subject(
            accelerator, launch, config, train_set, eval_set, model, optimizers, schedule, facts_to_keep,
            optimizer_step, evaluate,
        )  # fmt: skip
        is_right = examine(subject)
        accelerator.wait_for_everyone()
        accelerator.end_training()
        sys.exit(0 if is_right else 1)
    eval_every = config.eval_every or steps_per_epoch
    data = {"train": task.describe("train", train_set), "eval": task.describe("eval", eval_set)}
    facts = {
        "model": f"{parameters:,} parameters" + (f", {trained:,} of them trained" if trained < parameters else ""),
        "data": f"{len(train_set):,} examples to train on, {len(eval_set):,} to evaluate on",
        **{part: figures(values) for part, values in data.items() if values},
        "batch": f"{global_batch_size} = {config.micro_batch(world_size)} per micro-batch x {world_size} processes"
        f" x {config.accumulation(world_size)} accumulated",
        "tuned": ", ".join(what for what, is_on in tuned.items() if is_on),
        "steps": f"{total_steps:,} = {total_steps / steps_per_epoch:.4g} epochs of {steps_per_epoch:,}",
    }
    progress = found.progress
    if progress.step > total_steps:
        asked = f"epochs={config.epochs} and max_steps={config.max_steps} make {total_steps}"
        raise ValueError(f"{found.checkpoint} has {progress.step} steps already, and {asked}")
    if found.checkpoint:
        restore(accelerator, config, found, model, optimizers, facts_to_keep)
    if not is_fp16 or found.state.get("precision") not in (None, "fp16"):
        progress.loss_scale = Progress().loss_scale if is_fp16 else 1.0
    with (
        Tracker(config, launch, facts, total_steps, accelerator.is_main_process, found) as tracker,
        StopSignal(accelerator, config) as stop,
    ):
        saver = Saver(accelerator, config, model, optimizers, found.checkpoint, tracker.say)
        windows = training_steps(accelerator, config, train_set, progress.step, total_steps)
        started = time.perf_counter() - progress.seconds
        interval_started = time.perf_counter() - progress.interval_seconds
        is_stopping = False
        model.train()
        while True:
            # ------------------------------------------------------------ between two steps: evaluate, save, stop
            step = progress.step
            is_evaluated = False
            if (step % eval_every == 0 or step == total_steps) and step > progress.evaluated and not is_stopping:
                paused = time.perf_counter()
                evaluation = evaluate(accelerator, config, model, eval_set, stop)
                interval_started += time.perf_counter() - paused
                if evaluation is None:
                    is_stopping = True
                else:
                    is_evaluated = True
                    progress.evaluated, progress.evaluation = step, evaluation[0]
                    tracker.log(step, {"epoch": step / steps_per_epoch, **evaluation[0]}, evaluation[1])
                    count_evaluation(progress, config)
            is_last = step == total_steps or is_out_of_patience(progress, config)
            saver.collect()
            unknown = unknown_metric(progress.evaluation, config) if is_evaluated else None
            is_due = step % config.save_every == 0 or (is_evaluated and config.checkpoint.num_best) or unknown
            if step and (is_due or is_last or is_stopping):
                progress.interval_seconds = time.perf_counter() - interval_started
                progress.seconds = time.perf_counter() - started
                saver.save(progress, facts_to_keep | tracker.position())
            if unknown:
                saver.finish()
                raise ValueError(f"{unknown}; with another one, the same command goes on from step {step}")
            if is_last or is_stopping:
                break
            # ------------------------------------------------------------------------------- one optimizer step
            sums, lr, grad_norm = optimizer_step(
                accelerator, config, model, optimizers, progress, next(windows), schedule, stop
            )
            is_stopping = sums.stop_requests > 0
            if math.isfinite(sums.loss):
                progress.count(sums)
            step = progress.step
            tracker.advance()
            # ---------------------------------------------------------------------------------------------------
            if progress.skipped_in_a_row >= config.max_bad_steps:
                saver.finish()
                raise FloatingPointError(explain(config, is_fp16, saver.newest))
            is_scheduled = step % config.log_every == 0
            if is_scheduled or step == total_steps:
                now = time.perf_counter()
                progress.interval_seconds = now - interval_started
                last_logged = (step - 1) // config.log_every * config.log_every
                examples = examples_seen(step, config, train_set) - examples_seen(last_logged, config, train_set)
                optim_metrics = {"train/lr": lr, "train/grad_norm": grad_norm}
                metrics = {"epoch": step / steps_per_epoch, **optim_metrics, **progress.metrics(examples, is_fp16)}
                progress.train_loss = metrics["train/loss"]
                tracker.log(step, metrics)
                if is_scheduled:  # a longer run than this one would not stop counting here
                    progress.end_interval()
                    interval_started = now

        saver.finish()
        if is_stopping:
            tracker.stop(stop.reason or "another process", progress.step, saver.newest, command)
        else:
            results = progress.evaluation
            if config.checkpoint.export_best:
                results = read_best(accelerator, config, model, tracker.say) or results
            export(accelerator, config, model, results)
            training_seconds = progress.training_seconds + progress.interval_seconds
            tokens = progress.tokens + progress.interval[2]
            tracker.summarize(
                {
                    "step": step,
                    "epoch": step / steps_per_epoch,
                    "train/loss": progress.train_loss,
                    **results,
                    "seconds": time.perf_counter() - started,
                    "samples_per_second": examples_seen(step, config, train_set) / training_seconds,
                    **({"tokens_per_second": tokens / training_seconds} if tokens else {}),
                    "skipped_steps": progress.skipped,
                    "save_pause_seconds": saver.pause_seconds,
                    "parameters": parameters,
                    "trained_parameters": trained,
                    "data": data,
                    "peak_memory_bytes": peak_memory(accelerator),
                    **launch.as_dict(),
                }
            )
    SIGNALS.release()
    accelerator.wait_for_everyone()  # gloo sometimes aborts where one process leaves before the others are done
    if config.push_to_hub and accelerator.is_main_process and not is_stopping:
        push(config)
    accelerator.end_training()


def optimizer_step(
    accelerator: Accelerator,
    config: Config,
    model: nn.Module,
    optimizers: list[Optimizer],
    progress: Progress,
    window: list[MicroBatch],
    schedule: Schedule,
    stop: StopSignal,
) -> Step:
    """Forward and backward over one global batch, of which `window` is this process's part, and the update."""
    from src.progress import accepts
    from src.optim import local_gradients, lr_at, scale_and_clip_, set_lr
    from src.progress import Step
    from src.sums import reduce_step_stats

    task, amounts = config.task, []
    for i, micro_batch in enumerate(window, start=1):
        # FSDP reduces after each micro-batch: it would have to keep whole gradients to do so only at the end
        is_reduced = i == len(window) or accelerator.is_fsdp2
        with contextlib.nullcontext() if is_reduced else accelerator.no_sync(model):
            loss, count = task.loss(model, micro_batch.to(accelerator.device))
            # DDP and FSDP average the gradients: times the number of processes, that is their sum over them
            factor = micro_batch.weight * accelerator.num_processes / config.global_batch_size * progress.loss_scale
            accelerator.backward(loss * factor)
        amounts.append([n * micro_batch.weight for n in (loss.detach(), count, *task.count_tokens(micro_batch.data))])
    gradients = local_gradients(model)
    sums = reduce_step_stats(accelerator, amounts, gradients, stop.is_made)  # waits for the device
    # from the sum / global_batch_size to the mean over what the loss counts
    scale = config.global_batch_size / (max(sums.counted, 1) * progress.loss_scale)
    grad_norm = scale_and_clip_(gradients, scale, math.sqrt(sums.squares), config.optim.max_grad_norm)
    lr = lr_at(progress.updates, config.optim, *schedule)
    set_lr(optimizers, lr)
    is_accepted = accepts(progress, grad_norm, accelerator.mixed_precision == "fp16")
    for optimizer in optimizers:
        if is_accepted:
            optimizer.step()
        optimizer.zero_grad()
    progress.step += 1
    return Step(sums, lr, grad_norm if is_accepted else None)


def evaluate(
    accelerator: Accelerator, config: Config, model: nn.Module, dataset: Examples, stop: StopSignal
) -> tuple[dict[str, float], dict[str, list[dict[str, str]]]] | None:
    """Loss and metrics over each example exactly once, and the task's report; None where told to stop meanwhile."""
    import torch
    from accelerate.utils import broadcast_object_list

    from src.data.loading import evaluation_batches, gather_in_order
    from src.sums import float64_tensor

    model.eval()
    totals = float64_tensor([0.0] * 3, accelerator.device)
    outputs: dict[str, list[Any]] = {}
    for micro_batch in evaluation_batches(accelerator, config, dataset):
        if stop.poll():
            model.train()
            return None
        with torch.no_grad():
            loss, count, batch_outputs = config.task.evaluate(model, micro_batch.to(accelerator.device))
        totals[0] += loss * micro_batch.weight
        totals[1] += count * micro_batch.weight
        totals[2] += micro_batch.examples
        for name, output in batch_outputs.items():
            outputs.setdefault(name, []).append(output[: micro_batch.examples])
    report = config.task.report(model, accelerator.device)
    model.train()
    loss_sum, count, examples = accelerator.reduce(totals, "sum").tolist()
    gathered = {name: gather_in_order(accelerator, torch.cat(o), len(dataset)) for name, o in outputs.items()}
    metrics = [config.task.metrics(gathered) if accelerator.is_main_process else {}]
    broadcast_object_list(metrics)  # all processes decide by them whether to stop
    results = {"loss": loss_sum / count, "examples": int(examples), **metrics[0]}
    return (
        {f"eval/{name}": value for name, value in results.items()},
        {f"eval/{name}": rows for name, rows in report.items()},
    )


if __name__ == "__main__":
    main()
