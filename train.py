"""Trains one task under the strategy that an accelerate yaml chooses. Read it top to bottom.

accelerate launch --config_file accelerate_configs/fsdp.yaml train.py [--config=FILE.yaml]... [--key.sub=value]...
"""

from __future__ import annotations

import contextlib
import sys
import time
from typing import TYPE_CHECKING, Any

from src.config import Config, load_config
from src.exit_codes import exit_codes

if TYPE_CHECKING:  # torch is imported in the functions: the settings come first, and mistakes in them are fast
    from accelerate import Accelerator
    from torch import nn

    from src.tasks.base import Examples


def main() -> None:
    with exit_codes():
        config = load_config(sys.argv[1:])

    from torch.distributed.elastic.multiprocessing.errors import record

    record(train)(config)  # puts the traceback of the process that failed first into the launcher's table


@exit_codes()
def train(config: Config) -> None:
    from accelerate.utils import set_seed

    from src.batches import examples_seen, training_windows, zeros
    from src.blocks import checkpoint_activations, compile_blocks
    from src.export import export, push
    from src.launch import build_accelerator, first_on_each_machine, peak_memory, prepare
    from src.loss_scale import LossScale
    from src.optim import build_optimizers, lr_at, scale_and_clip, set_lr
    from src.tracking import Tracker, figures

    # ------------------------------------------------------------------------------------------- build and prepare
    task, global_batch_size = config.task, config.global_batch_size
    accelerator, launch = build_accelerator()
    world_size = accelerator.num_processes
    with first_on_each_machine(accelerator):  # it downloads and tokenises
        train_set, eval_set = task.build_datasets()
    set_seed(config.seed)  # the same weights on all processes
    model = task.build_model()
    parameters = sum(p.numel() for p in model.parameters())
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    if config.compile:
        compile_blocks(model)
    if config.activation_checkpointing:
        checkpoint_activations(model)
    model, optimizers = prepare(accelerator, model, build_optimizers(accelerator, config.optim, model))
    set_seed(config.seed, device_specific=True)  # other dropout on each

    steps_per_epoch = -(-len(train_set) // global_batch_size)
    total_steps, schedule_steps = config.steps(steps_per_epoch)
    eval_every = config.eval_every or steps_per_epoch
    data = {"train": task.describe("train", train_set), "eval": task.describe("eval", eval_set)}
    facts = {
        "model": f"{parameters:,} parameters" + (f", {trained:,} of them trained" if trained < parameters else ""),
        "data": f"{len(train_set):,} examples to train on, {len(eval_set):,} to evaluate on",
        **{part: figures(values) for part, values in data.items() if values},
        "batch": f"{global_batch_size} = {config.micro_batch(world_size)} per micro-batch x {world_size} processes"
        f" x {config.accumulation(world_size)} accumulated",
        "steps": f"{total_steps:,} = {total_steps / steps_per_epoch:.4g} epochs of {steps_per_epoch:,}",
    }
    with Tracker(config, launch, facts, total_steps, accelerator.is_main_process) as tracker:
        interval = zeros(accelerator, 4)  # loss sum, count, tokens without and with padding, since the last record
        started = interval_started = time.perf_counter()
        training_seconds = all_tokens = 0.0
        updates = 0  # steps that were not skipped: what the schedule counts
        loss_scale = LossScale(enabled=accelerator.mixed_precision == "fp16")
        model.train()
        for step, window in enumerate(training_windows(accelerator, config, train_set, total_steps), start=1):
            # ------------------------------------------------------------------------------- one optimizer step
            totals = zeros(accelerator, 4)
            for i, micro_batch in enumerate(window, start=1):
                # FSDP reduces after each micro-batch: it would have to keep whole gradients to do so only at the end
                is_reduced = i == len(window) or accelerator.is_fsdp2
                with contextlib.nullcontext() if is_reduced else accelerator.no_sync(model):
                    loss, count = task.loss(model, micro_batch.to(accelerator.device))
                    # DDP and FSDP average the gradients: times world_size, that is their sum over the processes
                    factor = micro_batch.weight * world_size / global_batch_size * loss_scale.value
                    accelerator.backward(loss * factor)
                for k, amount in enumerate((loss.detach(), count, *task.tokens(micro_batch.data))):
                    totals[k] += amount * micro_batch.weight
            totals = accelerator.reduce(totals, "sum")
            interval += totals
            log_now = step % config.log_every == 0 or step == total_steps
            grad_norm = scale_and_clip(  # from the sum / global_batch_size to the mean over what the loss counts
                accelerator,
                model,
                global_batch_size / (totals[1].clamp(min=1) * loss_scale.value),
                config.optim.max_grad_norm,
                want_norm=log_now or loss_scale.enabled,
            )
            lr = lr_at(updates, config.optim, schedule_steps, steps_per_epoch)
            set_lr(optimizers, lr)
            is_accepted = loss_scale.accepts(grad_norm)
            updates += is_accepted
            for optimizer in optimizers:
                if is_accepted:
                    optimizer.step()
                optimizer.zero_grad()
            tracker.advance()
            # ---------------------------------------------------------------------------------------------------
            if log_now:
                # waits for the device, as nothing above does, but for FSDP offload and fp16
                loss_sum, count, tokens, padded = interval.tolist()
                now = time.perf_counter()
                seconds, interval_started = now - interval_started, now
                training_seconds += seconds
                examples = examples_seen(step, config, train_set)
                last_logged = (step - 1) // config.log_every * config.log_every
                metrics = {
                    "epoch": step / steps_per_epoch,
                    "train/loss": loss_sum / max(count, 1),
                    "train/lr": lr,
                    "train/grad_norm": grad_norm.item(),
                    "perf/samples_per_second": (examples - examples_seen(last_logged, config, train_set)) / seconds,
                }
                if tokens:
                    all_tokens += tokens
                    metrics |= {"perf/tokens_per_second": tokens / seconds, "perf/padding": 1 - tokens / padded}
                if loss_scale.enabled:
                    metrics |= {"train/loss_scale": loss_scale.value, "train/skipped_steps": loss_scale.skipped}
                tracker.log(step, metrics)
                interval.zero_()
            if step % eval_every == 0 or step == total_steps:
                interval.tolist()  # training ends here, also on the device
                paused = time.perf_counter()
                evaluation, tables = evaluate(accelerator, config, model, eval_set)
                tracker.log(step, {"epoch": step / steps_per_epoch, **evaluation}, tables)
                interval_started += time.perf_counter() - paused

        export(accelerator, config, model, evaluation)
        tracker.summarize(
            {
                "step": total_steps,
                "epoch": total_steps / steps_per_epoch,
                "train/loss": metrics["train/loss"],
                **evaluation,
                "seconds": time.perf_counter() - started,
                "samples_per_second": examples / training_seconds,
                **({"tokens_per_second": all_tokens / training_seconds} if all_tokens else {}),
                **({"skipped_steps": loss_scale.skipped} if loss_scale.enabled else {}),
                "parameters": parameters,
                "trained_parameters": trained,
                "data": data,
                "peak_memory_bytes": peak_memory(accelerator),
                **launch.as_dict(),
            }
        )
    accelerator.wait_for_everyone()  # gloo sometimes aborts where one process leaves before the others are done
    if config.push_to_hub and accelerator.is_main_process:
        push(config)
    accelerator.end_training()


def evaluate(
    accelerator: Accelerator, config: Config, model: nn.Module, dataset: Examples
) -> tuple[dict[str, float], dict[str, list[dict[str, str]]]]:
    """Loss and metrics over each example exactly once, the metrics on the main process only; and the task's report."""
    import torch

    from src.batches import evaluation_batches, gather_in_order, zeros

    model.eval()
    totals = zeros(accelerator, 3)
    outputs: dict[str, list[Any]] = {}
    for micro_batch in evaluation_batches(accelerator, config, dataset):
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
    metrics = config.task.metrics(gathered) if accelerator.is_main_process else {}
    results = {"loss": loss_sum / count, "examples": int(examples), **metrics}
    return (
        {f"eval/{name}": value for name, value in results.items()},
        {f"eval/{name}": rows for name, rows in report.items()},
    )


if __name__ == "__main__":
    main()
