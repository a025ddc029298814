"""Settings: code < yaml < command line, typed, every mistake at once, and nothing heavy imported for an answer."""

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

from src.checkpoint.files import parent_checkpoint
from src.config.config import Config
from src.config.groups import Optim
from src.config.settings import read_yaml, setting_fields, write_yaml
from src.tasks import TASKS
from tests.launching import PROJECT, Launch, mistakes, needs, run_command
from train import run_settings

SETTINGS: list[Any] = [Config[resolve_name(path)] for path in TASKS.values()]  # type: ignore[misc]
"""Of each task."""
needs_wandb, needs_text = needs("src/config/wandb.py"), needs("src/tasks/text/causal_lm.py")
needs_trackers = needs("src/tracking/accelerate_trackers.py")


@pytest.fixture(autouse=True)
def _in_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_the_command_line_beats_the_last_yaml_beats_the_first_beats_the_code() -> None:
    Path("a.yaml").write_text("seed: 1\nepochs: 1\noptim: {lr: 0.1, name: sgd}")
    Path("b.yaml").write_text("epochs: 2\noptim:\n  lr: 0.2")
    config = run_settings(["--config", "a.yaml", "--config=b.yaml", "--optim.lr=0.3"])
    assert (config.seed, config.epochs, config.optim.lr, config.optim.name) == (1, 2, 0.3, "sgd")
    assert run_settings([f"--config={PROJECT}/configs/mnist.yaml"]).model_dump() == run_settings([]).model_dump()


def test_numbers_are_what_they_look_like_and_text_stays_text() -> None:
    """Tried with YAML 1.1: 90 hours, seed 8. What is written to config.yaml reproduces all of it."""
    config = run_settings(["--run_name=007", "--max_steps=1e3", "--global_batch_size=1e2", "--micro_batch_size=null"])
    assert (config.run_name, config.max_steps, config.global_batch_size) == ("007", 1000, 100)
    assert (config.folder, config.forward_batch_size(4)) == (Path("runs/007"), 25)
    assert run_settings(["--early_stopping.metric=null"]).early_stopping.metric is None
    for text in ("lr: 3", "{a: 1}", "a, b: c", "- x", "# x", "None", "2024-02-30", "[" * 200):
        assert run_settings([f"--run_name={text}"]).run_name == text
    Path("b.yaml").write_text("seed: 010\nmax_steps: 1_000\noptim: {lr: 1e-3, max_grad_norm: .5}\nrun_name: '1e3'")
    config = run_settings(["--config=b.yaml"])
    assert (config.seed, config.max_steps, config.optim.lr, config.optim.max_grad_norm) == (10, 1000, 0.001, 0.5)
    Path("c.yaml").write_text(write_yaml(config.model_dump(mode="json")))
    assert run_settings(["--config=c.yaml"]).model_dump() == config.model_dump()


@needs_text
def test_a_task_has_defaults_of_its_own_below_the_yaml_and_the_command_line(capfd: pytest.CaptureFixture[str]) -> None:
    """For a model from scratch, for a pretrained one and for adapters. --help and config.yaml show them. Tried with
    those of MNIST, and with the task's above what the user has given."""
    Path("a.txt").touch()
    Path("model").mkdir()
    Path("b.yaml").write_text("optim: {schedule: linear}\nglobal_batch_size: 8")
    text = ["--task.name=causal_lm", "--task.dataset=a.txt"]
    model = [*text, "--task.model=model"]
    scratch = run_settings([*text, "--task.architecture={model_type: llama}"])
    full = run_settings(model)
    adapted = run_settings([*model, "--task.lora={r: 4}"])
    own = run_settings([*model, "--config=b.yaml", "--optim.lr=1"])
    configs = (scratch, full, adapted, own)
    assert [(c.epochs, c.global_batch_size) for c in configs] == [(1, 64), (3, 16), (3, 16), (3, 8)]
    assert [c.optim.lr for c in configs] == [6e-4, 2e-5, 2e-4, 1.0]
    assert [c.optim.schedule for c in configs] == ["cosine", "cosine", "cosine", "linear"]
    assert {(c.optim.max_grad_norm, c.optim.warmup_steps) for c in configs} == {(1.0, 0.03)}
    assert run_settings([]).optim.model_dump() == Optim().model_dump()
    Path("c.yaml").write_text(write_yaml(full.model_dump(mode="json")))
    assert run_settings(["--config=c.yaml"]).model_dump() == full.model_dump()
    with pytest.raises(SystemExit):
        run_settings([*model, "--help"])
    assert {"  --optim.lr=2e-05", "  --epochs=3"} <= {*capfd.readouterr().out.splitlines()}


@needs_text
def test_fields_of_a_mapping_come_together_in_any_order() -> None:
    """Tried without: the mapping on the command line drops what came before it."""
    Path("a.txt").touch()
    given = ["--task.architecture={model_type: llama, rope: 1:30}", "--task.architecture.layers=010"]
    for arguments in (given, given[::-1]):
        task: Any = run_settings(["--task.name=causal_lm", "--task.dataset=a.txt", *arguments]).task
        assert task.architecture == {"model_type": "llama", "rope": "1:30", "layers": 10}


@pytest.mark.parametrize(
    ("arguments", "files", "lines"),
    [
        ("--config=a.yaml|--config=b.yaml|--optm.lr=1|--lr=1|--seed=-1|--task=mnist|--task.dropout=9|--optim.name=adam|"
         "--global_batch_size=0|verbose|--log_every",
         {"a": "epoch: 3\noptim:\n  lr: fast"}, [
            "verbose: not understood; settings are written --name=value",
            "--config=b.yaml: no such file, did you mean a.yaml?",
            "--task=mnist: task is a group; write, for example, --task.name=…",
            "--seed=-1: must be greater than or equal to 0",
            "--global_batch_size=0: must be greater than 0",
            "--log_every: must be a valid integer, unable to parse string as an integer",
            "--task.dropout=9: must be less than 2",
            "--optim.name=adam: must be 'adamw', 'sgd', 'adadelta' or 'muon'",
            "a.yaml: optim.lr: fast: must be a valid number, unable to parse string as a number",
            "a.yaml: epoch: 3: unknown setting, did you mean epochs?",
            "--lr=1: unknown setting, did you mean optim.lr?",
            "--optm.lr=1: unknown setting, did you mean optim.lr?",
        ]),
        ("--config=my.yaml|--stage=sft|--dry-run|perhaps", {".pre-commit-config": ""}, [
            "--config=my.yaml: no such file",
            "--dry_run=perhaps: must be a valid boolean, unable to interpret input",
            "--stage=sft: unknown setting",
        ]),
        ("--task.name=mnits|--task.source=digits", {}, [
            f"--task.name=mnits: no such task, did you mean mnist? ({', '.join(TASKS)})"]),
        ("--config=a.yaml|--config=b.yaml|--config=.", {"a": "- 1", "b": "\x00"}, [
            "--config=a.yaml: must hold settings, one `name: value` per line",
            "--config=b.yaml: cannot be read as yaml, unacceptable character #x0000: special characters are not "
            'allowed in "<unicode string>", position 0',
            "--config=.: cannot be read as yaml, [Errno 21] Is a directory: '.'",
        ]),
        # as of `--config $UNSET`. Tried without: a run with the defaults
        ("--seed=-1|--config", {}, [
            "--config=: cannot be read as yaml, [Errno 21] Is a directory: '.'",
            "--seed=-1: must be greater than or equal to 0",
        ]),
        ("--config=a.yaml|--max_steps=None", {"a": "max_hours: 1:30\nepochs: yes\nrun_name: [a=b]"}, [
            "a.yaml: run_name: ['a=b']: must be text: write it in quotes",
            "a.yaml: epochs: yes: must be a valid integer, unable to parse string as an integer",
            "--max_steps=None: use null, not None",
            "a.yaml: max_hours: 1:30: must be a valid number, unable to parse string as a number",
        ]),
        # tried without: the second one is dropped in silence
        ("--seed=1|--seed.x=2", {}, ["--seed.x=2: unknown setting, did you mean seed?"]),
        # tried without: it is found out after the first evaluation
        ("--early_stopping.metric=eval/acuracy", {}, [
            "early_stopping.metric=eval/acuracy: the evaluation has no such metric, did you mean eval/accuracy? "
            "(eval/loss, eval/examples, eval/accuracy)",
        ]),
        ("--seed=5000000000|--optim.lr=inf|--epochs=null", {}, [
            "--seed=5000000000: must be less than 4294967296",
            "--optim.lr=inf: must be a finite number",
            "epochs and max_steps are both null: set one of them",
        ]),
        # tried without: the rate goes beyond its peak, to 4/3 of it
        ("--optim.warmup_steps=1.5", {}, [
            "optim.warmup_steps=1.5: must be a whole number of steps or, below 1, a fraction of the schedule"]),
        ("--optim.decay_steps=9", {}, ["optim.decay_steps=9: only applies to optim.schedule=wsd, not one_cycle"]),
        ("--epochs=null|--max_steps=50|--optim.schedule=wsd|--optim.warmup_steps=40|--optim.decay_steps=30", {}, [
            "optim.warmup_steps=40 and optim.decay_steps=30: together 140.0% of the schedule"]),
        pytest.param("--wandb.entity=none|--config=a.yaml|--wandb={mode: offlin}", {"a": "wandb:\n  tags: mine"}, [
            "--wandb={mode: offlin}: must be 'auto', 'online', 'offline' or 'disabled'",
            "--wandb.entity=none: use null, not None",
            "a.yaml: wandb.tags: mine: must be a list: write [mine]",
        ], marks=needs_wandb),
    ],
)  # fmt: skip
def test_every_mistake_is_one_line(arguments: str, files: dict[str, str], lines: list[str]) -> None:
    for name, text in files.items():
        Path(f"{name}.yaml").write_text(text)
    assert mistakes(*arguments.split("|")) == lines


def test_yaml_that_says_a_thing_twice_or_cannot_be_read_is_one_line() -> None:
    """Tried without: the first of the two is dropped, silently; RecursionError, ValueError or KeyError."""
    for text, says in {
        b"optim:\n  lr: 0.1\noptim:\n  name: sgd": '.* found duplicate key "optim"',
        b"\xff\xfe\x00": "'utf-8' codec can't decode byte 0xff",
        b"task: &a {name: *a}": "Circular reference detected",
        b"seed: " + b"[" * 3000 + b"]" * 3000: "maximum recursion depth exceeded",
        b"run_name: 2024-02-30": "day ",
    }.items():
        Path("a.yaml").write_bytes(text)
        (line,) = mistakes("--config=a.yaml")
        assert re.match(f"--config=a.yaml: cannot be read as yaml, {says}", line)
    Path("a.yaml").write_text("seed: 3\noptim:\n  # lr: 1")  # a group of which all lines are commented out
    assert run_settings(["--config=a.yaml"]).seed == 3


def test_a_switch_is_on_by_itself_and_may_have_a_hyphen() -> None:  # room: check
    for written in ("--dry-run", "--dry_run=true"):
        assert run_settings([written]).dry_run
        assert run_settings([written, "--dry-run=false", "--check"]).check
    assert mistakes("--dry-run", "--check") == ["--dry-run and --check cannot be combined"]
    assert mistakes("--dry-run=") == ["--dry_run=: must be a valid boolean, unable to interpret input"]


def test_a_batch_that_does_not_divide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    for processes, arguments, says in (
        (3, (), "3 processes; nearest that are: global_batch_size=63 or 66"),
        (2, ("--micro_batch_size=24",), "24 (micro_batch_size) x 2 processes = 48; nearest that are: "
         "global_batch_size=48 or 96"),
    ):  # fmt: skip
        monkeypatch.setenv("WORLD_SIZE", str(processes))
        assert mistakes(*arguments) == [f"global_batch_size=64: not a multiple of {says}"]


@pytest.mark.parametrize("variable", ["WORLD_SIZE=2", "WORLD_SIZE=", "LOCAL_RANK=x"])
@pytest.mark.parametrize("launcher", ["", "ACCELERATE_DYNAMO_BACKEND= MASTER_ADDR="])
def test_what_another_launch_left_is_named(monkeypatch: pytest.MonkeyPatch, variable: str, launcher: str) -> None:
    """Also under a launcher that has started one process, whose yaml is not to blame. Tried without: tracebacks."""
    set_all(monkeypatch, f"{variable} {launcher}")
    (line,) = mistakes()
    assert line.startswith(f"{variable} is set in the environment, but no launcher has started several processes: ")


def set_all(monkeypatch: pytest.MonkeyPatch, variables: str) -> None:
    for name, _, value in (each.partition("=") for each in variables.split()):
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize("variables", ["RANK=0", "WORLD_SIZE=2 MASTER_ADDR=host RANK=1"])
def test_what_a_launch_needs_in_the_environment_may_be_there(monkeypatch: pytest.MonkeyPatch, variables: str) -> None:
    set_all(monkeypatch, variables)
    run_settings([])


def test_a_sweep_s_trial_without_an_id_is_named(monkeypatch: pytest.MonkeyPatch) -> None:  # room: wandb
    """Tried without: KeyError. An empty variable counts as unset."""
    monkeypatch.setenv("WANDB_SWEEP_ID", "")
    assert run_settings(["--trackers=[]"]).folder == Path("runs/mnist")
    monkeypatch.setenv("WANDB_SWEEP_ID", "x")
    assert mistakes() == [
        "WANDB_SWEEP_ID is set in the environment, but WANDB_RUN_ID is no trial's id, one word: unset it",
    ]


def test_a_spoilt_status_or_config_yaml_is_no_traceback() -> None:
    Path("runs/mnist/checkpoints/step_00000008").mkdir(parents=True)
    for data in (b"\xff\xfe", b"null", b"resume: [a]", b"- a", b"a: &a {b: *a}", b'{"checkpoint": null}'):
        Path("runs/mnist/status.json").write_bytes(data)
        Path("runs/mnist/config.yaml").write_bytes(data)
        assert parent_checkpoint(run_settings([])) in (None, Path("['a']"))


def test_each_trial_of_a_sweep_has_its_own_folder(monkeypatch: pytest.MonkeyPatch) -> None:  # room: wandb
    monkeypatch.setenv("WANDB_SWEEP_ID", "s1")
    monkeypatch.setenv("WANDB_RUN_ID", "r1")
    config = run_settings(["--optim.lr=0.003", "--task.dropout=0.5"])
    assert (config.run_name, config.folder, config.optim.lr) == ("mnist", Path("runs/mnist-r1"), 0.003)


def test_each_experiment_is_valid_and_opens_with_what_it_is_and_its_command() -> None:
    for file in (PROJECT / "configs").glob("*.yaml"):
        for path in map(Path, re.findall("^  dataset: ((?:data|examples)/.*)", file.read_text(), re.MULTILINE)):
            data = path if path.suffix else path / "train.jsonl"
            data.parent.mkdir(parents=True, exist_ok=True)
            data.write_text("which the header says how to get")
        run_settings([f"--config={file}"])
        header = file.read_text().split("\n\n")[0]
        assert re.search("#   (accelerate launch (--quiet )?--config_file |make train)", header), file


@needs_text
@pytest.mark.parametrize("task", ["causal_lm", "text_classification", "token_classification"])
def test_a_task_without_its_libraries_is_one_line(tmp_path: Path, task: str) -> None:
    """Tried without the look in src/tasks/text/__init__.py: a traceback."""
    if task not in TASKS:
        pytest.skip("not in this copy")
    look = "from importlib import metadata as m; find = m.distributions"
    hidden = f"{look}; m.distributions = lambda **of: [] if of == dict(name='transformers') else find(**of)"
    run = "import runpy; runpy.run_path('train.py', None, '__main__')"
    ended = run_command([sys.executable, "-c", f"{hidden}; {run}", f"--task.name={task}"], tmp_path)
    assert ended.exit_code == 2
    (line,) = ended.messages
    assert re.search(r"not installed: transformers: .* -m pip install -e '.*\[text\]'$", line)


def test_help_documents_every_setting_of_the_chosen_task_with_its_default(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        run_settings(["--help", "--task.name=mnist"])
    assert ended.value.code == 0
    shown = capfd.readouterr().out
    assert "--task.source=mnist   (mnist|digits)\n        mnist: 60,000 + 10,000 images" in shown
    assert max(map(len, shown.splitlines())) <= 80
    assert not re.findall(r"^  --.*\n(?:\s*$|  --)", shown, re.MULTILINE), "undocumented"


@pytest.mark.parametrize("task", [name for name, path in TASKS.items() if "ettings:" in path])
def test_help_and_all_mistakes_are_answered_without_torch(tmp_path: Path, task: str) -> None:
    """Those of the command line, the task and the output folder, at once. Tried with torch imported in
    src/checkpoint/files.py, and with the task itself in place of its settings."""
    python = (sys.executable, "-X", "importtime", "train.py", f"--task.name={task}")
    Path("run/model").mkdir(parents=True)
    Path("run/model/weights").touch()
    asked = run_command([*python, "--help"], tmp_path)
    wrong = run_command([*python, "--task.name_=x", "--seed=-1", "verbose", f"--output_dir={tmp_path}/run"], tmp_path)
    assert (asked.exit_code, wrong.exit_code) == (0, 2)
    assert f"--task.name={task}" in asked.stdout
    own = {"text_classification": ["task.model is not set: name a model on the Hub or a local folder"]}
    for line in (
        "verbose: not understood; settings are written --name=value",
        "--seed=-1: must be greater than or equal to 0",
        "--task.name_=x: unknown setting, did you mean task.name?",
        f"output_dir={tmp_path}/run: already holds a run (model), but no checkpoint of it; choose another --run_name "
        "or --output_dir, or move that folder away",
        *own.get(task, []),
    ):
        assert f"train.py: {line}" in wrong.messages
    for run in (asked, wrong):
        assert re.search(r"\| +pydantic$", run.stderr, re.MULTILINE)
        assert not re.search(r"\| +(torch|numpy|transformers|datasets)$", run.stderr, re.MULTILINE)


ROWS = [
    (names, says, value, becomes)
    for file in sorted((PROJECT / "src/config/aliases").glob("*.yaml"))
    for table in read_yaml(file.read_bytes()).values()
    for names, (says, rules) in table.items()
    for value, becomes in rules.items()
]
"""Of src/config/aliases: names of others, what to say, their values, and what they become."""
SFT = (
    "model_name_or_path dataset_name dataset_config dataset_train_split dataset_test_split dataset_streaming "
    "dataset_text_field dataset_num_proc dataset_kwargs model_revision dtype torch_dtype attn_implementation "
    "trust_remote_code use_peft lora_r lora_alpha lora_dropout lora_target_modules lora_modules_to_save "
    "lora_task_type use_rslora use_dora load_in_8bit load_in_4bit bnb_4bit_quant_type use_bnb_nested_quant "
    "chat_template_path eos_token pad_token max_length max_seq_length "
    "packing packing_strategy padding_free pad_to_multiple_of eval_packing "
    "completion_only_loss assistant_only_loss activation_offloading no_gradient_checkpointing no_remove_unused_columns"
)
OLDER = "warmup_ratio logging_dir group_by_length overwrite_output_dir evaluation_strategy no_cuda save_safetensors"
AXOLOTL = (
    "base_model datasets val_set_size adapter sequence_len sample_packing num_epochs optimizer lr_scheduler "
    "evals_per_epoch saves_per_epoch early_stopping_patience train_on_inputs flash_attention "
    "lora_target_linear dataset_prepared_path"
)
COMMAND = (
    "--model_name_or_path m --dataset_name a.txt --per_device_train_batch_size 4 --gradient_accumulation_steps 8 "
    "--learning_rate 2e-4 --num_train_epochs 3.0 --max_steps -1 --use_peft --lora_r 8 "
    "--lora_target_modules q_proj v_proj --load_in_4bit --bf16 --optim adamw_torch_fused "
    "--lr_scheduler_type constant_with_warmup "
    "--warmup_ratio 0.03 --adam_beta2 0.95 --adam_beta1 0.8 --eval_steps 9 --eval_strategy epoch --save_strategy steps "
    "--save_steps 100 --load_best_model_at_end --metric_for_best_model eval_loss "
    "--gradient_checkpointing --report_to none "
    "--seed 42 --output_dir out --max-length 64 --packing False --do_train --neftune_noise_alpha 5 "
    "--push_to_hub"
)


def translation(command: str) -> str:
    """The command that ends the message."""
    *_, above, line = mistakes(*shlex.split(command))
    assert above == "in this project's terms, without what these lines leave out, and with its defaults for the rest:"
    return line


def test_what_others_have_becomes_what_exists_here() -> None:
    """Tried with a misspelt `log_evry`, and with task.packing among the settings of all tasks."""
    known = {name for settings in SETTINGS for name, _, _ in setting_fields(settings)}
    for names, text, _, becomes in ROWS:
        says = re.sub(r"\S+/\S+", "", text)
        settings = {word.partition("=")[0] for word in becomes.split()} - {"launch", "precision", "accumulation"}
        settings |= {*re.findall(r"(?:^use (?=[a-z])|\b(?=(?:task|optim|checkpoint|wandb)\.))([\w.]+\w)", says)}
        assert {re.sub(r"^(task\.architecture)\..*", r"\1", setting) for setting in settings} <= known, names
        for flag in re.findall(r"--(\w+)[ =]", f"{text} {becomes}"):
            assert f"--{flag}" in {o for action in launch_command_parser()._actions for o in action.option_strings}
        for file in re.findall(r"[\w/]+\.(?:yaml|py)\b", f"{text} {becomes}"):
            assert (PROJECT / file).exists(), file


def test_a_row_of_an_optional_part_goes_with_it() -> None:
    """Tried with `report_to` in 5_run.yaml: a copy without trackers names them."""
    rest = (PROJECT / "src/config/aliases/5_run.yaml").read_text()
    for setting in (
        "task.",
        "wandb.",
        "trackers=",
        "push_to_hub=",
        "num_workers=",
        "compile=",
        "activation_checkpointing=",
    ):
        assert setting not in rest


def test_our_own_names_are_ours() -> None:
    """Tried with `ddp_.*` among theirs, which takes ddp_comm_hook."""
    for settings in SETTINGS:
        for name, field, _ in setting_fields(settings):
            for value in ("1", "x", "a/b", str(field.default)):
                said = [row for row in ROWS if row[1]]
                found = [row for row in said if re.fullmatch(f"(?:{row[0]})=(?:{row[2]})", f"{name}={value}")]
                assert not found, name


@needs_text
@pytest.mark.parametrize("form", ["--{}=2e-5", "--{}", "--{} a b"])
def test_each_name_of_others_has_one_line(form: str) -> None:
    """With an equals sign, without a value, with two; with hyphens too. `optim` is a group here."""
    trainer = {field.name for field in dataclasses.fields(import_module("transformers").TrainingArguments)}
    names = trainer - {name.partition(".")[0] for name, _, _ in setting_fields(Config)} | {"optim"}
    names |= {*f"{SFT} {OLDER} {AXOLOTL}".split()}
    words = " ".join(form.format(name.replace("_", "-") if len(name) % 2 else name) for name in names)
    lines = mistakes("--task.name=causal_lm", *words.split())
    for name in names:
        (line,) = (line for line in lines if line.startswith(f"{form.format(name)}: "))
        assert re.search(": (use |pass |not needed: |not available: )", line), line
    assert not [line for line in lines if "unknown setting" in line or "has it)" in line]


@needs_text
def test_a_command_of_others_ends_with_its_translation(monkeypatch: pytest.MonkeyPatch) -> None:
    """All of it, and load_config takes it. The batch is per device x accumulation x processes."""
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    monkeypatch.setenv("WORLD_SIZE", "8")
    monkeypatch.setattr(sys, "argv", ["train.py"])
    Path("a.txt").touch()
    Path("m").mkdir()
    start, _, words = translation(COMMAND).partition(" train.py ")
    assert start.endswith(
        "accelerate launch --config_file accelerate_configs/ddp.yaml --num_processes=8 --mixed_precision=bf16"
    )
    assert words == (
        "--seed=42 --output_dir=out --task.name=causal_lm --task.model=m --task.dataset=a.txt "
        "--task.sequence_length=64 "
        "--task.lora.r=8 --task.lora.alpha=32 --task.lora.dropout=0.05 "
        '\'--task.lora.target_modules=["q_proj", "v_proj"]\' --task.lora.base_dtype=nf4 '
        "--task.packing=False --epochs=3 --micro_batch_size=4 "
        "--optim.lr=2e-4 --optim.name=adamw '--optim.betas=[0.8,0.95]' --optim.schedule=constant "
        "--optim.warmup_steps=0.03 --eval_every=null --save_every=100 --checkpoint.export_best=true "
        "--checkpoint.metric=eval/loss '--trackers=[]' --activation_checkpointing=true --global_batch_size=256"
    )
    config = run_settings(shlex.split(words))
    task: Any = config.task
    assert (config.global_batch_size, config.gradient_accumulation_steps(8), config.eval_every) == (256, 8, None)
    assert (task.lora.target_modules, config.optim.betas, task.packing) == (["q_proj", "v_proj"], (0.8, 0.95), False)


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("--learning_rate=1 --bf16=auto", "--optim.lr=1"),
        ("--max_steps 100 --num_train_epochs 3", "--epochs=null --max_steps=100"),
        ("--max_steps 100 --learning_rate=1 --epochs 2", "--epochs=2 --max_steps=100 --optim.lr=1"),
        ("--max_steps -1 --num_train_epochs 3", "--epochs=3"),
        ("--learning_rate=1 --epochs=null --max_steps 9", "--epochs=null --max_steps=9 --optim.lr=1"),
        ("--per_device_train_batch_size 2", "--micro_batch_size=2 --global_batch_size=2"),
        ("--gradient_accumulation_steps 4", "--micro_batch_size=8 --global_batch_size=32"),
        ("--gradient_accumulation_steps 4 --micro_batch_size 2", "--micro_batch_size=2 --global_batch_size=8"),
        ("--warmup_steps=9 --lr_scheduler_type constant", "--optim.schedule=constant --optim.warmup_steps=0"),
        ("--num_train_epochs 0.5 --optim lion --save_strategy epoch --hub_model_id x", "--save_every=500"),
        ("--lr_scheduler_kwargs '{\"min_lr_rate\": 0.1}' --max_grad_norm 0",
         "--optim.max_grad_norm=null --optim.final_lr_ratio=0.1"),
        pytest.param("--task_name mrpc --model_name_or_path m",
                     "--task.name=text_classification --task.dataset=nyu-mll/glue --task.dataset_config=mrpc "
                     "--task.text_column=sentence1 --task.text_pair_column=sentence2 --task.model=m", marks=needs_text),
        ("--warmup_ratio 0.03 --warmup_steps 100", "--optim.warmup_steps=100"),
        ("--warmup_ratio 0.03 --warmup_steps 0", "--optim.warmup_steps=0.03"),
        ("--warmup_steps 0", "--optim.warmup_steps=0"),
        ("--warmup_ratio 1", "--optim.warmup_steps=0.9999"),
        ("--eval_strategy steps", "--eval_every=500"),
        ("--eval_strategy steps --logging_steps 10", "--log_every=10 --eval_every=10"),
        ("--evaluation_strategy steps --logging_steps 10 --eval_steps 9", "--log_every=10 --eval_every=9"),
        ("--eval_strategy no --eval_steps 10", "--eval_every=1000000000"),
        ("--save_strategy no --save_steps 10", "--save_every=1000000000"),
        ("--save_strategy epoch --save_steps 10", "--save_every=500"),
        ("--save_strategy steps --save_steps 10", "--save_every=10"),
        ("--learning_rate 1 --dry_run False", "--dry_run=False --optim.lr=1"),
        ("--optim.lr=2 --learning_rate=1", "--optim.lr=2"),
        ("--learning_rate=fast --vllm_mode colocate --epochs=x --max_grad_norm 1", "--optim.max_grad_norm=1"),
        ("--config own.yaml --learning_rate=1", "--log_every=7 --optim.lr=1"),
        pytest.param("--report_to wandb tensorboard --wandb_project p",
                     "'--trackers=[\"wandb\", \"tensorboard\"]' --wandb.project=p",
                     marks=[needs_wandb, needs_trackers]),
    ],
)  # fmt: skip
def test_values_of_others_are_converted(theirs: str, ours: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And what has no equivalent is left out, after its line."""
    monkeypatch.setattr(sys, "argv", ["train.py"])
    monkeypatch.setattr(sys, "orig_argv", ["python", "train.py"])
    Path("own.yaml").write_text("log_every: 7")
    words = translation(theirs).split()
    assert words[words.index("train.py") + 1 :] == ours.split()


@pytest.mark.parametrize(
    ("theirs", "launch"),
    [
        ("--learning_rate=1 --fsdp=", ""),
        ("--fsdp= --fsdp_config.fsdp_version=2 --bf16", "--config_file accelerate_configs/ddp.yaml bf16"),
        ("--deepspeed ds.json --bf16 --fp16 false", "fsdp bf16"),
        ("--config deepspeed.yaml", "fsdp bf16"),
        ("--deepspeed ds.json --fp16", "fsdp fp16"),
        ("--fsdp full_shard --fp16", "fsdp fp16"),
        ("--fsdp full_shard", "fsdp"),
        ("--fsdp full_shard --bf16 False", "fsdp no"),
        ("--fsdp full_shard --bf16 False --dtype bfloat16", "fsdp bf16"),
        ("--bf16 False --fp16 True", "--config_file accelerate_configs/ddp.yaml fp16"),
        ("--use_cpu --bf16", "cpu bf16"),
    ],
)
def test_what_accelerate_launch_decides_stands_before_train_py(
    theirs: str, launch: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A yaml and a precision, each once; an empty value asks for nothing."""
    monkeypatch.setattr(sys, "argv", ["train.py"])
    monkeypatch.setattr(sys, "orig_argv", ["python", "train.py"])
    Path("deepspeed.yaml").write_text("deepspeed: zero3.json\nbf16: auto\nfp16:")
    start, _, _ = translation(theirs).partition(" train.py")
    found = re.sub(r"\S*accelerate launch |--num_processes=1 ?|--mixed_precision=|python", "", start)
    assert re.sub(r"--config_file=accelerate_configs/(\w+)\.yaml", r"\1", found).split() == launch.split()


def test_a_misspelt_task_is_named_and_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tried without: KeyError: 'task.model', and a command for the default task."""
    monkeypatch.setattr(sys, "argv", ["train.py"])
    monkeypatch.setattr(sys, "orig_argv", ["python", "train.py"])
    text = "--task.name=mnits --task.model=m --task.dataset=d --learning_rate=1e-4 --epochs=x"
    lines = mistakes(*text.split())
    assert [line.partition(",")[0] for line in lines[:3]] == [
        "--learning_rate=1e-4: use optim.lr",
        "--task.name=mnits: no such task",
        "--epochs=x: must be a valid integer",
    ]
    assert lines[-1].endswith("train.py --task.name=mnits --task.model=m --task.dataset=d --optim.lr=1e-4")


@pytest.mark.parametrize(
    ("arguments", "lines"),
    [
        ("--learning_rate 2e-5 --bf16 --epochs=x --gradient_accumulation_steps=4 --save-steps 500", [
            "--learning_rate=2e-5: use optim.lr",
            "--bf16: pass --mixed_precision=bf16 (or no) to accelerate launch",
            "--epochs=x: must be a valid integer, unable to parse string as an integer",
            "--gradient_accumulation_steps=4: use global_batch_size, which counts all micro-batches of all "
            "processes",
            "--save_steps=500: use save_every, in steps",
        ]),
        # `more` is no value of --fp16, which stands before another option
        ("--fp16 --config=a.yaml more", [
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
        pytest.param("--task.name=causal_lm --task.model=m --dataset_text_field=t --task.dataset=a.txt --lora_r 64", [
            "--dataset_text_field=t: use task.text_column",
            "--lora_r=64: use task.lora.r, the rank of the adapters, which turns them on; TRL ignored lora_r without "
            "use_peft",
        ], marks=needs_text),
        pytest.param("--model_name_or_path m --task_name sst2", [
            "--model_name_or_path=m: use task.model (--task.name=causal_lm or --task.name=text_classification has it)",
            "--task_name=sst2: use --task.name=text_classification with task.dataset=nyu-mll/glue, task.dataset_config "
            "and task.text_column (--task.name=text_classification has it)",
        ], marks=needs_text),
        pytest.param("--task.name=text_classification --model_name_or_path m --dataset_name=a.txt --packing", [
            "--dataset_name=a.txt: use task.dataset",
            "--packing: not needed: the rows of a batch have similar lengths, which leaves little padding",
            "--model_name_or_path=m: use task.model",
        ], marks=needs_text),
    ],
)  # fmt: skip
def test_names_of_others_on_the_command_line_and_in_a_yaml(arguments: str, lines: list[str]) -> None:
    """Among other mistakes. A yaml of axolotl's has many keys without a value. Tried without: `unknown setting`."""
    Path("a.yaml").write_text("num_epochs: 3\nfsdp_config: {fsdp_version: 2}\nadapter:\nflash_attention:")
    Path("a.txt").touch()
    assert sorted(mistakes(*arguments.split())[:-2]) == sorted(lines)


def test_under_accelerate_the_translation_keeps_the_launcher(launch: Launch) -> None:
    """With what precision adds to it. Tried with the words of the process: python train.py."""
    run = launch("ddp", "--learning_rate", "1e-3", "--bf16", processes=2)
    line = run.stderr.splitlines()[-1]
    assert re.match(r"  (\S*/)?accelerate launch --config_file \S+/ddp.yaml .*--mixed_precision=bf16 train.py ", line)
    assert "--optim.lr=1e-3" in line.partition(" train.py ")[2]
    assert run.exit_code == 2


def test_a_value_may_follow_after_a_space() -> None:
    """Tried before: 42: not understood. A list takes all that follow, but text never does."""
    Path("a.yaml").write_text("log_every: 3")
    config = run_settings(shlex.split("--seed 42 --config a.yaml --output-dir out --optim.betas 0.8 0.9 --compile"))
    assert (config.seed, config.log_every, config.output_dir, config.compile) == (42, 3, "out", True)
    assert config.optim.betas == (0.8, 0.9)
    words = "--seed 4 5 --run_name a b --output_dir=a b --dry-run c --log_every --compile no yes"
    assert mistakes(*shlex.split(words)) == [
        "b: not understood; settings are written --name=value",
        "--run_name a b: must be text: write it in quotes",
        "--seed 4 5: must be a valid integer",
        "--log_every: must be a valid integer, unable to parse string as an integer",
        "--dry_run=c: must be a valid boolean, unable to interpret input",
        "--compile no yes: must be a valid boolean",
    ]
    assert mistakes("--run_name", "--max_steps") == [
        "--run_name: must be text: write it in quotes",
        "--max_steps: must be a valid integer, unable to parse string as an integer",
    ]
