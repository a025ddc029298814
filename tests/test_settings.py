"""Settings: code < yaml < command line, typed, every mistake at once, and nothing heavy imported for an answer."""

import re
import sys
from pathlib import Path
from typing import Any

import pytest
from accelerate.commands.launch import launch_command_parser

from src.checkpoint.files import parent_checkpoint
from src.config.aliases import OURS, THEIRS, THEIRS_OF_TEXT
from src.config.config import _config_class
from src.config.settings import setting_fields, write_yaml
from src.tasks import SETTINGS, TASKS
from tests.launching import PROJECT, mistakes, needs, run_command
from train import run_settings

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
    for text in ("lr: 3", "{a: 1}", "a, b: c", "- x", "# x", "None", "2024-02-30", "[" * 200):
        assert run_settings([f"--run_name={text}"]).run_name == text
    Path("b.yaml").write_text("seed: 010\nmax_steps: 1_000\noptim: {lr: 1e-3, max_grad_norm: .5}\nrun_name: '1e3'")
    config = run_settings(["--config=b.yaml"])
    assert (config.seed, config.max_steps, config.optim.lr, config.optim.max_grad_norm) == (10, 1000, 0.001, 0.5)
    Path("c.yaml").write_text(write_yaml(config.model_dump(mode="json")))
    assert run_settings(["--config=c.yaml"]).model_dump() == config.model_dump()


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
            "--log_every: not understood; settings are written --name=value",
            "--config=b.yaml: no such file, did you mean a.yaml?",
            "--seed=-1: must be greater than or equal to 0",
            "--global_batch_size=0: must be greater than 0",
            "--task=mnist: task is a group; write, for example, --task.name=…",
            "--optim.name=adam: must be 'adamw', 'sgd', 'adadelta' or 'muon'",
            "a.yaml: optim.lr: fast: must be a valid number, unable to parse string as a number",
            "a.yaml: epoch: 3: unknown setting, did you mean epochs?",
            "--optm.lr=1: unknown setting, did you mean optim.lr?",
            "--lr=1: unknown setting, did you mean optim.lr?",
            "--task.dropout=9: must be less than 2",
        ]),
        ("--task.name=mnits|--task.source=digits", {}, [
            f"--task.name=mnits: no such task, did you mean mnist? ({', '.join(TASKS)})"]),
        ("--config=a.yaml|--config=b.yaml|--config=.", {"a": "- 1", "b": "\x00"}, [
            "--config=a.yaml: must hold settings, one `name: value` per line",
            "--config=b.yaml: cannot be read as yaml, unacceptable character #x0000: special characters are not "
            'allowed in "<unicode string>", position 0',
            "--config=.: cannot be read as yaml, [Errno 21] Is a directory: '.'",
        ]),
        ("--config=a.yaml|--max_steps=None", {"a": "max_hours: 1:30\nepochs: yes\nrun_name: [a=b]"}, [
            "a.yaml: run_name: ['a=b']: must be text: write it in quotes",
            "a.yaml: epochs: yes: must be a valid integer, unable to parse string as an integer",
            "--max_steps=None: write null for none",
            "a.yaml: max_hours: 1:30: must be a valid number, unable to parse string as a number",
        ]),
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
        pytest.param("--wandb.entity=none|--config=a.yaml", {"a": "wandb:\n  tags: mine"}, [
            "--wandb.entity=none: write null for none",
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
    assert mistakes("--dry-run", "--check") == ["--check and --dry-run cannot be combined: choose one"]
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


def test_variables_of_wandb_that_cannot_be_are_named(monkeypatch: pytest.MonkeyPatch) -> None:  # room: wandb
    """Tried without: KeyError; trained unrecorded."""
    monkeypatch.setenv("WANDB_SWEEP_ID", "x")
    monkeypatch.setenv("WANDB_MODE", "ofline")
    assert mistakes() == [
        "WANDB_SWEEP_ID is set in the environment, but WANDB_RUN_ID is no trial's id, one word: unset it",
        "WANDB_MODE is set in the environment, but must be online, offline or disabled",
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
def test_a_text_task_without_its_libraries_is_one_line_that_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tried without `explained`: a traceback; and with a dot before the class in the map: it is said to be missing."""
    monkeypatch.setitem(sys.modules, "transformers", None)
    for name in {"causal_lm", "text_classification", "token_classification"} & TASKS.keys():
        monkeypatch.delitem(sys.modules, TASKS[name].partition(":")[0], raising=False)
        (line,) = mistakes(f"--task.name={name}")
        assert re.search(r"`pip install -e '\.\[text\]'`\): .*transformers", line)


def test_help_documents_every_setting_of_the_chosen_task_with_its_default(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        run_settings(["--help", "--task.name=mnist"])
    assert ended.value.code == 0
    shown = capfd.readouterr().out
    assert "--task.source=mnist   (mnist|digits)\n        mnist: 60,000 + 10,000 images" in shown
    assert max(map(len, shown.splitlines())) <= 80
    assert not re.findall(r"^  --.*\n(?:\s*$|  --)", shown, re.MULTILINE), "undocumented"


@pytest.mark.parametrize("task", SETTINGS)
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


def test_each_name_of_others_leads_to_what_exists_here() -> None:
    """Tried with a misspelt `log_evry`."""
    known = {option for action in launch_command_parser()._actions for option in action.option_strings}
    known |= {name for task in TASKS for name, _, _ in setting_fields(_config_class(task, TASKS))}
    assert {re.split("[ ,]", ours)[0] for ours in OURS.values()} <= known
    has_it = " (--task.name=causal_lm has it)"
    assert [ours for ours in OURS.values() if ours.startswith("task.") != ours.endswith(has_it)] == []
    for file in re.findall(r"\S+\.yaml", " ".join(OURS.values())):
        assert (PROJECT / file).exists()


@pytest.mark.parametrize("form", ["--{name}=2e-5", "--{name}", "--{other} -1 --{name}", "--{other} a b"])
def test_each_name_of_others_is_refused_in_one_line(form: str) -> None:
    """With an equals sign or a word of its own, hyphens, values or none. Tried without passing over the value."""
    words = " ".join(form.format(name=name, other=name.replace("_", "-")) for name in OURS)
    value = "2e-5" if "=" in form else "…"
    assert sorted(mistakes(*words.split())) == sorted(f"--{name}={value}: use {ours}" for name, ours in OURS.items())


def test_each_name_of_others_is_one_thing_here() -> None:
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
def test_names_of_others_on_the_command_line_and_in_a_yaml(arguments: str, lines: list[str]) -> None:
    """Among other mistakes. A yaml of axolotl's has many keys without a value."""
    Path("a.yaml").write_text("num_epochs: 3\nfsdp_config: {fsdp_version: 2}\nadapter:")
    assert sorted(mistakes(*arguments.split())) == sorted(lines)
