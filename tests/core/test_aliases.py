"""Settings of HF's Trainer, TRL and axolotl get a line each, and the same command in this project's terms."""

import dataclasses
import re
import shlex
import sys
from importlib import import_module
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import pytest
from accelerate.commands.launch import launch_command_parser

from src.config.config import Config
from src.config.settings import read_yaml, setting_fields
from src.tasks import TASKS
from tests.launching import PROJECT, Launch, mistakes, needs
from train import run_settings

SETTINGS: list[Any] = [Config[resolve_name(path)] for path in TASKS.values()]  # type: ignore[misc]
"""Of each task."""
needs_wandb, needs_text = needs("src/config/wandb.py"), needs("src/tasks/text/causal_lm.py")
ROWS = [
    (names, says, value, becomes)
    for file in sorted((PROJECT / "src/config/aliases").glob("*.yaml"))
    for table in read_yaml(file.read_bytes()).values()
    for names, (says, rules) in table.items()
    for value, becomes in rules.items()
]
"""Of src/config/aliases: names of others, what to say, their values, and what they become."""
OF_OTHERS = """
    model_name_or_path dataset_name dataset_config dataset_train_split dataset_test_split dataset_streaming
    dataset_text_field dataset_num_proc dataset_kwargs model_revision dtype torch_dtype attn_implementation
    trust_remote_code use_peft lora_r lora_alpha lora_dropout lora_target_modules lora_modules_to_save lora_task_type
    use_rslora use_dora load_in_8bit load_in_4bit bnb_4bit_quant_type use_bnb_nested_quant chat_template_path eos_token
    pad_token max_length max_seq_length packing packing_strategy padding_free pad_to_multiple_of eval_packing
    completion_only_loss assistant_only_loss activation_offloading no_gradient_checkpointing no_remove_unused_columns
    warmup_ratio logging_dir group_by_length overwrite_output_dir evaluation_strategy no_cuda save_safetensors
    base_model datasets val_set_size adapter sequence_len sample_packing num_epochs optimizer lr_scheduler optim
    evals_per_epoch saves_per_epoch early_stopping_patience train_on_inputs flash_attention lora_target_linear
    dataset_prepared_path peft_init_lora_weights peft_use_dora
"""
"""Settings of TRL, of the Trainer's older versions and of axolotl."""
COMMAND = """
    --model_name_or_path m --dataset_name a.txt --per_device_train_batch_size 4 --gradient_accumulation_steps 8
    --learning_rate 2e-4 --num_train_epochs 3.0 --max_steps -1 --use_peft --lora_r 8 --lora_target_modules q_proj v_proj
    --load_in_4bit --bf16 --optim adamw_torch_fused --lr_scheduler_type constant_with_warmup --warmup_ratio 0.03
    --adam_beta2 0.95 --adam_beta1 0.8 --eval_steps 9 --eval_strategy epoch --save_strategy steps --save_steps 100
    --load_best_model_at_end --metric_for_best_model eval_loss --gradient_checkpointing --report_to none --seed 42
    --output_dir out --max-length 64 --packing False --do_train --neftune_noise_alpha 5 --push_to_hub
"""
OURS = """
    --seed=42 --output_dir=out --task.name=causal_lm --task.model=m --task.dataset=a.txt --task.sequence_length=64
    --task.lora.r=8 --task.lora.alpha=32 --task.lora.dropout=0.05 '--task.lora.target_modules=["q_proj", "v_proj"]'
    --task.lora.base_dtype=nf4 --task.packing=False --epochs=3 --micro_batch_size=4 --optim.lr=2e-4 --optim.name=adamw
    '--optim.betas=[0.8,0.95]' --optim.schedule=constant --optim.warmup_steps=0.03 --eval_every=null
    --save_every=100 --checkpoint.export_best=true --checkpoint.metric=eval/loss '--trackers=[]'
    --activation_checkpointing=true --global_batch_size=256
"""
"""That command in this project's terms. The batch is per device x accumulation x 8 processes."""


@pytest.fixture(autouse=True)
def _by_plain_python_in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["train.py"])
    monkeypatch.setattr(sys, "orig_argv", ["python", "train.py"])


def translation(command: str) -> tuple[str, list[str]]:
    """Return the command that ends the message: the launcher's part, and the words after train.py."""
    *_, above, line = mistakes(*shlex.split(command))
    assert above == "in this project's terms, without what these lines leave out, and with its defaults for the rest:"
    launcher, _, words = line.partition("train.py")
    return launcher, shlex.split(words)


def test_settings_of_others_become_settings_that_exist() -> None:
    known = {name for settings in SETTINGS for name, _, _ in setting_fields(settings)}
    for names, text, _, becomes in ROWS:
        says = re.sub(r"\S+/\S+", "", text)
        settings = {word.partition("=")[0] for word in becomes.split()} - {"launch", "precision", "accumulation"}
        settings |= {*re.findall(r"(?:^use (?=[a-z])|\b(?=(?:task|optim|checkpoint|wandb)\.))([\w.]+\w)", says)}
        settings = {re.sub(r"^(task\.(architecture|lora\.options))\..*", r"\1", setting) for setting in settings}
        assert settings <= known, names
        for flag in re.findall(r"--(\w+)[ =]", f"{text} {becomes}"):
            assert f"--{flag}" in {o for action in launch_command_parser()._actions for o in action.option_strings}
        for file in re.findall(r"[\w/]+\.(?:yaml|py)\b", f"{text} {becomes}"):
            assert (PROJECT / file).exists(), file


def test_our_own_settings_are_taken_for_none_of_others() -> None:
    for settings in SETTINGS:
        for name, field, _ in setting_fields(settings):
            for value in ("1", "x", "a/b", str(field.default)):
                said = [row for row in ROWS if row[1]]
                found = [row for row in said if re.fullmatch(f"(?:{row[0]})=(?:{row[2]})", f"{name}={value}")]
                assert not found, name


@needs_text
@pytest.mark.parametrize("form", ["--{}=2e-5", "--{}", "--{} a b"])
def test_each_name_of_others_has_one_line(form: str) -> None:
    """With an equals sign, without a value, with two; with hyphens too."""
    trainer = {field.name for field in dataclasses.fields(import_module("transformers").TrainingArguments)}
    names = trainer - {name.partition(".")[0] for name, _, _ in setting_fields(Config)} | {*OF_OTHERS.split()}
    words = " ".join(form.format(name.replace("_", "-") if len(name) % 2 else name) for name in names)
    lines = mistakes("--task.name=causal_lm", *words.split())
    for name in names:
        (line,) = (line for line in lines if line.startswith(f"{form.format(name)}: "))
        assert re.search(": (use |pass |not needed: |not available: )", line), line
    assert not [line for line in lines if "unknown setting" in line or "has it)" in line]


@needs_text
def test_a_command_of_others_ends_with_the_same_command_in_our_terms(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which is accepted."""
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    monkeypatch.setenv("WORLD_SIZE", "8")
    Path("a.txt").touch()
    Path("m").mkdir()
    launcher, words = translation(COMMAND)
    assert launcher.endswith("--config_file accelerate_configs/ddp.yaml --num_processes=8 --mixed_precision=bf16 ")
    assert words == shlex.split(OURS)
    config = run_settings(words)
    assert config.gradient_accumulation_steps(8) == 8
    assert config.optim.betas == (0.8, 0.95)


DDP = "--config_file accelerate_configs/ddp.yaml"


@pytest.mark.parametrize(
    ("theirs", "launch", "ours"),
    [
        ("--learning_rate=1 --bf16=auto", f"{DDP} bf16", "--optim.lr=1"),
        ("--optim.lr=2 --learning_rate=1", "", "--optim.lr=2"),
        ("--config own.yaml --learning_rate=1", "", "--log_every=7 --optim.lr=1"),
        ("--max_steps 100 --num_train_epochs 3", "", "--epochs=null --max_steps=100"),
        ("--max_steps 100 --learning_rate=1 --epochs 2", "", "--epochs=2 --max_steps=100 --optim.lr=1"),
        ("--per_device_train_batch_size 2", "", "--micro_batch_size=2 --global_batch_size=2"),
        ("--gradient_accumulation_steps 4", "", "--micro_batch_size=8 --global_batch_size=32"),
        ("--warmup_steps=9 --lr_scheduler_type constant", "", "--optim.schedule=constant --optim.warmup_steps=0"),
        ("--warmup_ratio 0.03 --warmup_steps 100", "", "--optim.warmup_steps=100"),
        ("--warmup_ratio 1", "", "--optim.warmup_steps=0.9999"),
        ("--num_train_epochs 0.5 --optim lion --save_strategy epoch --hub_model_id x", "", "--save_every=500"),
        ("--eval_strategy no --eval_steps 10", "", "--eval_every=1000000000"),
        ("--learning_rate=fast --vllm_mode colocate --max_grad_norm 0", "", "--optim.max_grad_norm=null"),
        ("--fsdp= --fsdp_config.fsdp_version=2 --bf16 --seed=1", f"{DDP} bf16", "--seed=1"),
        ("--deepspeed ds.json --bf16 --fp16 false --seed=1", "fsdp bf16", "--seed=1"),
        ("--fsdp full_shard --fp16 --seed=1", "fsdp fp16", "--seed=1"),
        ("--fsdp full_shard --bf16 False --dtype bfloat16 --seed=1", "fsdp bf16", "--seed=1"),
        ("--bf16 False --fp16 True --seed=1", f"{DDP} fp16", "--seed=1"),
        ("--use_cpu --bf16 --seed=1", "cpu bf16", "--seed=1"),
        pytest.param("--do_regression --dataset_name d --label_column_name score --task.name=text_classification", "",
                     "--task.name=text_classification --task.label_column=score --task.problem=regression "
                     "--task.dataset=d", marks=needs_text),
        pytest.param("--use_peft --use_dora --peft_layers_to_transform=[0,1] --peft_init_lora_weights=gaussian", "",
                     "--task.name=causal_lm --task.lora.r=16 --task.lora.alpha=32 --task.lora.dropout=0.05 "
                     "--task.lora.options.use_dora=true --task.lora.options.init_lora_weights=gaussian "
                     "--task.lora.options.layers_to_transform=[0,1]", marks=needs_text),
        pytest.param("--task_name mrpc --model_name_or_path m", "",
                     "--task.name=text_classification --task.dataset=nyu-mll/glue --task.dataset_config=mrpc "
                     "--task.text_column=sentence1 --task.text_pair_column=sentence2 --task.model=m", marks=needs_text),
    ],
)  # fmt: skip
def test_values_of_others_are_converted_or_left_out(theirs: str, launch: str, ours: str) -> None:
    """Those of the launcher stand before train.py. An empty value asks for nothing."""
    Path("own.yaml").write_text("log_every: 7")
    launcher, words = translation(theirs)
    assert words == ours.split()
    launcher = re.sub(r"\S*accelerate launch |--num_processes=1 ?|--mixed_precision=|python", "", launcher)
    assert re.sub(r"--config_file=accelerate_configs/(\w+)\.yaml", r"\1", launcher).split() == launch.split()


@pytest.mark.parametrize(
    ("arguments", "lines"),
    [
        ("--fp16 --config=a.yaml more", [  # `more` is no value of --fp16, which stands before another option
            "more: not understood; settings are written --name=value",
            "a.yaml: num_epochs: 3: use epochs, a whole number, or null for a schedule that spans max_steps",
            "a.yaml: fsdp_config.fsdp_version: 2: use --config_file accelerate_configs/fsdp.yaml before train.py",
            "--fp16: pass --mixed_precision=fp16 (or no) to accelerate launch",
        ]),
        pytest.param("--model_name_or_path m --lora_target_modules=q_proj", [
            "--model_name_or_path=m: use task.model (--task.name=causal_lm or --task.name=text_classification has it)",
            "--lora_target_modules=q_proj: use task.lora.target_modules, a list; without it, all linear layers but the "
            "output (--task.name=causal_lm or --task.name=text_classification has it)",
            "task.dataset is not set: name a dataset on the Hub, a file or a folder",
            "task.lora.r is not set: without it, the other settings of task.lora have no effect",
        ], marks=needs_text),
    ],
)  # fmt: skip
def test_names_of_others_are_answered_among_other_mistakes(arguments: str, lines: list[str]) -> None:
    """A yaml of axolotl's has many keys without a value."""
    Path("a.yaml").write_text("num_epochs: 3\nfsdp_config: {fsdp_version: 2}\nadapter:\nflash_attention:")
    Path("a.txt").touch()
    assert sorted(mistakes(*arguments.split())[:-2]) == sorted(lines)


def test_under_accelerate_the_translation_keeps_the_launcher(launch: Launch) -> None:
    run = launch("ddp", "--learning_rate", "1e-3", "--bf16", processes=2)
    line = run.stderr.splitlines()[-1]
    assert re.match(r"  (\S*/)?accelerate launch --config_file \S+/ddp.yaml .*--mixed_precision=bf16 train.py ", line)
    assert "--optim.lr=1e-3" in line.partition(" train.py ")[2]
    assert run.exit_code == 2
