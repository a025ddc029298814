"""Names of settings in HF's Trainer, TRL and axolotl, to point users to ours."""

THEIRS = {
    "optim.lr": "learning_rate",
    "optim.name, such as adamw": "optim optimizer",
    "optim.weight_decay": "weight_decay",
    "optim.max_grad_norm": "max_grad_norm",
    "optim.schedule": "lr_scheduler_type lr_scheduler",
    "optim.warmup_steps, below 1 a fraction of the schedule": "warmup_steps warmup_ratio",
    "epochs": "num_train_epochs num_epochs",
    "micro_batch_size": "per_device_train_batch_size per_device_eval_batch_size",
    "global_batch_size, which counts all micro-batches of all processes": "gradient_accumulation_steps",
    "--mixed_precision bf16 before train.py, or fp16": "bf16 fp16 mixed_precision torch_dtype dtype",
    "--config_file accelerate_configs/fsdp.yaml before train.py": "deepspeed fsdp fsdp_config",
    "activation_checkpointing": "gradient_checkpointing",
    "num_workers": "dataloader_num_workers",
    "log_every": "logging_steps",
    "eval_every, in steps, or null for each epoch": "eval_steps eval_strategy evals_per_epoch",
    "save_every, in steps": "save_steps save_strategy saves_per_epoch",
    "checkpoint.keep_last": "save_total_limit",
    "checkpoint.export_best": "load_best_model_at_end",
    "resume": "resume_from_checkpoint",
    "trackers, a list": "report_to",  # room: trackers wandb
}
"""Their names by ours, whose first word is a setting or an argument of the launcher."""
OURS = {name: ours for ours, names in THEIRS.items() for name in names.split()}
"""Our name by each of theirs."""
THEIRS_OF_TEXT = {  # room: text
    "task.model": "model_name_or_path base_model",
    "task.dataset": "dataset_name datasets train_file",
    "task.eval_fraction": "val_set_size",
    "task.sequence_length": "max_length max_seq_length sequence_len",
    "task.packing": "packing sample_packing",
    "task.train_on_prompts, false by default": "train_on_inputs assistant_only_loss completion_only_loss",
    "task.attention, best left at auto": "attn_implementation flash_attention",
    "task.lora.r, the rank of the adapters": "lora_r use_peft adapter",
    "task.lora.alpha": "lora_alpha",
    "task.lora.dropout": "lora_dropout",
    "task.lora.target_modules, a list": "lora_target_modules",
    "task.lora.base_dtype, nf4 for 4 bits": "load_in_4bit load_in_8bit",
}
OURS |= {  # room: text
    name: f"{ours} (--task.name=causal_lm has it)" for ours, names in THEIRS_OF_TEXT.items() for name in names.split()
}
