"""Names that users of HF's Trainer, TRL and axolotl know: one line each says what it is called here."""

import re
from pathlib import Path

import pytest
from accelerate.commands.launch import launch_command_parser

from src.config.aliases import OURS, THEIRS, THEIRS_OF_TEXT
from src.config.config import _config_class
from src.config.settings import setting_fields
from src.tasks import TASKS
from tests.launching import PROJECT, mistakes, needs

needs_text = needs("src/tasks/text/causal_lm.py")


def test_each_names_what_exists_here() -> None:
    """Tried with a misspelt `log_evry`."""
    known = {option for action in launch_command_parser()._actions for option in action.option_strings}
    known |= {name for task in TASKS for name, _, _ in setting_fields(_config_class(task, TASKS))}
    assert {re.split("[ ,]", ours)[0] for ours in OURS.values()} <= known
    has_it = " (--task.name=causal_lm has it)"
    assert [ours for ours in OURS.values() if ours.startswith("task.") != ours.endswith(has_it)] == []
    for file in re.findall(r"\S+\.yaml", " ".join(OURS.values())):
        assert (PROJECT / file).exists()


@pytest.mark.parametrize(
    "form", ["--{name}=2e-5", "--{name}", "--{name} 2e-5", "--{other} -1 --{name}", "--{other} a b"]
)
def test_each_is_refused_in_one_line(form: str) -> None:
    """With an equals sign or a word of its own, hyphens, values or none. Tried without passing over the value."""
    words = " ".join(form.format(name=name, other=name.replace("_", "-")) for name in OURS)
    value = "2e-5" if "=" in form else "…"
    assert sorted(mistakes(*words.split())) == sorted(f"--{name}={value}: use {ours}" for name, ours in OURS.items())


def test_each_of_them_is_one_thing_here() -> None:
    """Tried with one behind two settings: the later one would win, silently."""
    names = " ".join(THEIRS.values()).split()
    names += " ".join(THEIRS_OF_TEXT.values()).split()  # room: text
    assert len(names) == len(OURS)


@pytest.mark.parametrize(
    ("arguments", "lines"),
    [
        ("--learning_rate 2e-5 --bf16 --epochs=x --gradient_accumulation_steps=4 --save-steps 500", [
            "--learning_rate=…: use optim.lr",
            "--bf16=…: use --mixed_precision bf16 before train.py, or fp16",
            "--epochs=x: must be a valid integer, unable to parse string as an integer",
            "--gradient_accumulation_steps=4: use global_batch_size, which counts all micro-batches of all "
            "processes",
            "--save_steps=…: use save_every, in steps",
        ]),
        ("--optim adamw_torch --optim.lr=1e-3 --lr_scheduler_type=cosine", [
            "--optim=…: use optim.name, such as adamw",
            "--lr_scheduler_type=cosine: use optim.schedule",
        ]),
        # tried without: `more` is passed over, as what follows one of theirs
        ("--fp16 --config a.yaml more", [
            "more: not understood; settings are written --name=value",
            "a.yaml: num_epochs: 3: use epochs",
            "a.yaml: fsdp_config.fsdp_version: 2: use --config_file accelerate_configs/fsdp.yaml before "
            "train.py",
            "--fp16=…: use --mixed_precision bf16 before train.py, or fp16",
        ]),
        pytest.param("--model_name_or_path Qwen/Qwen3-0.6B --lora_target_modules=q_proj", [
            "--model_name_or_path=…: use task.model (--task.name=causal_lm has it)",
            "--lora_target_modules=q_proj: use task.lora.target_modules, a list (--task.name=causal_lm has it)",
        ], marks=needs_text),
    ],
)  # fmt: skip
def test_on_the_command_line_and_in_a_yaml_among_other_mistakes(
    arguments: str, lines: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A yaml of axolotl's has many keys without a value."""
    monkeypatch.chdir(tmp_path)
    Path("a.yaml").write_text("num_epochs: 3\nfsdp_config: {fsdp_version: 2}\nadapter:")
    assert sorted(mistakes(*arguments.split())) == sorted(lines)
