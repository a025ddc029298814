"""Settings: code < yaml < command line, typed, every mistake at once, and nothing heavy imported for an answer."""

import re
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest

from src.checkpoint.files import parent_checkpoint
from src.config.settings import write_yaml
from src.tasks import TASKS
from tests.launching import PROJECT, mistakes, needs, run_command
from train import run_settings

needs_wandb, needs_text = needs("src/config/wandb.py"), needs("src/tasks/text/causal_lm.py")
needs_trackers = needs("src/tracking/accelerate_trackers.py")


@pytest.fixture(autouse=True)
def _in_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_the_command_line_beats_later_yamls_beat_earlier_ones_beat_the_code() -> None:
    Path("a.yaml").write_text("seed: 1\nepochs: 1\noptim: {lr: 0.1, name: sgd}")
    Path("b.yaml").write_text("epochs: 2\noptim:\n  lr: 0.2")
    config = run_settings(["--config", "a.yaml", "--config=b.yaml", "--optim.lr=0.3"])
    assert (config.seed, config.epochs, config.optim.lr, config.optim.name) == (1, 2, 0.3, "sgd")
    assert run_settings([f"--config={PROJECT}/configs/mnist.yaml"]).model_dump() == run_settings([]).model_dump()


def test_numbers_are_what_they_look_like_and_text_stays_text() -> None:
    """By YAML 1.2. config.yaml reproduces it."""
    config = run_settings(["--run_name=007", "--max_steps=1e3", "--micro_batch_size=null"])
    assert (config.run_name, config.max_steps, config.forward_batch_size(4)) == ("007", 1000, 16)
    assert run_settings(["--early_stopping.metric=null"]).early_stopping.metric is None
    for text in ("lr: 3", "{a: 1}", "a, b: c", "- x", "# x", "None", "2024-02-30", "[" * 200):
        assert run_settings([f"--run_name={text}"]).run_name == text
    Path("b.yaml").write_text("seed: 010\nmax_steps: 1_000\noptim: {lr: 1e-3, max_grad_norm: .5}\nrun_name: '1e3'")
    config = run_settings(["--config=b.yaml"])
    assert (config.seed, config.max_steps, config.optim.lr, config.optim.max_grad_norm) == (10, 1000, 0.001, 0.5)
    Path("c.yaml").write_text(write_yaml(config.model_dump(mode="json")))
    assert run_settings(["--config=c.yaml"]).model_dump() == config.model_dump()


@needs_text
@pytest.mark.parametrize(
    ("given", "epochs", "batch", "lr", "schedule"),
    [
        ("--task.architecture={model_type: llama}", 1, 64, 6e-4, "cosine"),
        ("--task.model=model", 3, 16, 2e-5, "cosine"),
        ("--task.model=model|--task.lora={r: 4}", 3, 16, 2e-4, "cosine"),
        ("--task.model=model|--config=b.yaml|--optim.lr=1", 3, 8, 1.0, "linear"),
    ],
)
def test_a_tasks_own_defaults_are_below_the_yaml_and_the_command_line(
    capfd: pytest.CaptureFixture[str], given: str, epochs: int, batch: int, lr: float, schedule: str
) -> None:
    """They depend on the model. --help shows them, and config.yaml has them."""
    Path("a.txt").touch()
    Path("model").mkdir()
    Path("b.yaml").write_text("optim: {schedule: linear}\nglobal_batch_size: 8")
    arguments = ["--task.name=causal_lm", "--task.dataset=a.txt", *given.split("|")]
    config = run_settings(arguments)
    assert (config.epochs, config.global_batch_size) == (epochs, batch)
    assert (config.optim.lr, config.optim.schedule) == (lr, schedule)
    Path("c.yaml").write_text(write_yaml(config.model_dump(mode="json")))
    assert run_settings(["--config=c.yaml"]).model_dump() == config.model_dump()
    with pytest.raises(SystemExit):
        run_settings([*arguments, "--help"])
    assert f"  --epochs={epochs}" in capfd.readouterr().out.splitlines()


@needs_text
def test_fields_of_a_mapping_come_together_in_any_order() -> None:
    Path("a.txt").touch()
    given = ["--task.architecture={model_type: llama, rope: 1:30}", "--task.architecture.layers=010"]
    for arguments in (given, given[::-1]):
        task: Any = run_settings(["--task.name=causal_lm", "--task.dataset=a.txt", *arguments]).task
        assert task.architecture == {"model_type": "llama", "rope": "1:30", "layers": 10}


NUMBER = "must be a valid number, unable to parse string as a number"
INTEGER = "must be a valid integer, unable to parse string as an integer"
ARGUMENTS = {
    "verbose": "not understood; settings are written --name=value",
    "--config=b.yaml": "no such file, did you mean a.yaml?",
    "--config=list.yaml": "must hold settings, one `name: value` per line",
    "--config=": "cannot be read as yaml, [Errno 21] Is a directory: '.'",  # `--config=$UNSET`
    "--task=mnist": "task is a group; write, for example, --task.name=…",
    "--seed=-1": "must be greater than or equal to 0",
    "--seed.x=2": "unknown setting, did you mean seed?",
    "--log_every": INTEGER,
    "--max_steps=None": "use null, not None",
    "--dry_run=perhaps": "must be a valid boolean, unable to interpret input",
    "--optim.name=adam": "must be 'adamw', 'sgd', 'adadelta' or 'muon'",
    "--optim.weight_decay=inf": "must be a finite number",
    "--lr=1": "unknown setting, did you mean optim.lr?",
    "--optm.lr=1": "unknown setting, did you mean optim.lr?",
    "--stage=sft": "unknown setting",
}
IN_A_YAML = {
    "epoch: 3": "unknown setting, did you mean epochs?",
    "epochs: yes": INTEGER,
    "max_hours: 1:30": NUMBER,
    "optim.lr: fast": NUMBER,
    "run_name: ['a=b']": "must be text: write it in quotes",
}
CONTRADICTIONS = {
    "--early_stopping.metric=eval/acuracy": ": the evaluation has no such metric, did you mean eval/accuracy? (",
    "--epochs=null": "epochs and max_steps are both null: set one of them",
    "--optim.warmup_steps=1.5": ": must be a whole number of steps or, below 1, a fraction of the schedule",
    "--epochs=null --max_steps=50 --optim.schedule=wsd --optim.warmup_steps=40 --optim.decay_steps=30":
    "optim.warmup_steps=40 and optim.decay_steps=30: together 140.0% of the schedule",
    "--task.name=mnits": f": no such task, did you mean mnist? ({', '.join(TASKS)})",
}  # fmt: skip


def test_every_mistake_is_one_line_and_all_are_reported_at_once() -> None:
    Path("a.yaml").write_text("\n".join(IN_A_YAML))
    Path("list.yaml").write_text("- 1")
    expected = {f"{given}: {why}" for given, why in ARGUMENTS.items()}
    expected |= {f"a.yaml: {given}: {why}" for given, why in IN_A_YAML.items()}
    found = mistakes("--config=a.yaml", *ARGUMENTS)
    assert {*found} == expected
    assert len(found) == len(expected)


@pytest.mark.parametrize(("arguments", "says"), CONTRADICTIONS.items())
def test_contradictory_settings_are_one_line(arguments: str, says: str) -> None:
    (line,) = mistakes(*arguments.split())
    assert says in line


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (b"optim:\n  lr: 0.1\noptim:\n  name: sgd", '.* found duplicate key "optim"'),
        (b"\xff\xfe\x00", "'utf-8' codec can't decode byte 0xff"),
        (b"task: &a {name: *a}", "Circular reference detected"),
        (b"seed: " + b"[" * 3000 + b"]" * 3000, "maximum recursion depth exceeded"),
        (b"run_name: 2024-02-30", "day "),
    ],
)
def test_a_yaml_that_repeats_a_key_or_is_not_readable_is_one_line(text: bytes, says: str) -> None:
    Path("a.yaml").write_bytes(text)
    (line,) = mistakes("--config=a.yaml")
    assert re.match(f"--config=a.yaml: cannot be read as yaml, {says}", line)


def test_a_group_in_a_yaml_may_be_empty() -> None:
    Path("a.yaml").write_text("seed: 3\noptim:\n  # lr: 1")
    assert run_settings(["--config=a.yaml"]).seed == 3


@needs("src/check")
def test_a_switch_is_on_by_itself_and_may_have_a_hyphen() -> None:
    for written in ("--dry-run", "--dry_run=true"):
        assert run_settings([written]).dry_run
        assert run_settings([written, "--dry-run=false", "--check"]).check
    assert mistakes("--dry-run", "--check") == ["--dry-run and --check cannot be combined"]
    assert mistakes("--dry-run=") == ["--dry_run=: must be a valid boolean, unable to interpret input"]


def test_a_batch_that_does_not_divide_is_answered_with_those_that_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    for processes, arguments, says in (
        (3, (), "3 processes; nearest that are: global_batch_size=63 or 66"),
        (2, ("--micro_batch_size=24",), "24 (micro_batch_size) x 2 processes = 48; nearest that are: "
         "global_batch_size=48 or 96"),
    ):  # fmt: skip
        monkeypatch.setenv("WORLD_SIZE", str(processes))
        assert mistakes(*arguments) == [f"global_batch_size=64: not a multiple of {says}"]


@pytest.mark.parametrize(
    ("variables", "left"),
    [
        ("WORLD_SIZE=2", "WORLD_SIZE=2"),
        ("WORLD_SIZE=", "WORLD_SIZE="),
        ("LOCAL_RANK=x", "LOCAL_RANK=x"),
        ("WORLD_SIZE=2 ACCELERATE_DYNAMO_BACKEND= MASTER_ADDR=", "WORLD_SIZE=2"),  # under a launcher of one process
        ("RANK=0", None),
        ("WORLD_SIZE=2 MASTER_ADDR=host RANK=1", None),
    ],
)
def test_a_variable_left_by_another_launch_is_named(
    monkeypatch: pytest.MonkeyPatch, variables: str, left: str | None
) -> None:
    for name, _, value in (each.partition("=") for each in variables.split()):
        monkeypatch.setenv(name, value)
    if left is None:
        run_settings([])
        return
    (line,) = mistakes()
    assert line.startswith(f"{left} is set in the environment, but no launcher has started several processes: ")


@needs_wandb
def test_each_trial_of_a_sweep_has_its_own_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    """An id that leads elsewhere is refused, also where W&B is off. An empty WANDB_SWEEP_ID counts as unset."""
    monkeypatch.setenv("WANDB_SWEEP_ID", "")
    assert run_settings(["--trackers=[]"]).folder == Path("runs/mnist")
    monkeypatch.setenv("WANDB_SWEEP_ID", "s1")
    monkeypatch.setenv("WANDB_RUN_ID", "r1")
    assert run_settings([]).folder == Path("runs/mnist-r1")
    for name in ("/../../x", "a\nb", "a b", ""):
        monkeypatch.setenv("WANDB_RUN_ID", name)
        (line,) = mistakes("--wandb.mode=disabled")
        assert line.startswith("WANDB_SWEEP_ID is set in the environment, but WANDB_RUN_ID is no trial's id, one word")


def test_a_damaged_status_or_config_yaml_is_no_traceback() -> None:
    Path("runs/mnist/checkpoints/step_00000008").mkdir(parents=True)
    for data in (b"\xff\xfe", b"null", b"resume: [a]", b"- a", b"a: &a {b: *a}", b'{"checkpoint": null}'):
        Path("runs/mnist/status.json").write_bytes(data)
        Path("runs/mnist/config.yaml").write_bytes(data)
        assert parent_checkpoint(run_settings([])) in (None, Path("['a']"))


def test_each_config_is_valid_and_its_header_has_the_command() -> None:
    for file in (PROJECT / "configs").glob("*.yaml"):
        for path in map(Path, re.findall("^  dataset: ((?:data|examples)/.*)", file.read_text(), re.MULTILINE)):
            data = path if path.suffix else path / "train.jsonl"
            data.parent.mkdir(parents=True, exist_ok=True)
            data.touch()
        run_settings([f"--config={file}"])
        header = file.read_text().split("\n\n")[0]
        assert re.search("#   (accelerate launch (--quiet )?--config_file |make train)", header), file


@needs_text
def test_a_task_without_its_libraries_is_one_line(tmp_path: Path) -> None:
    look = "from importlib import metadata as m; find = m.distributions"
    hidden = f"{look}; m.distributions = lambda **of: [] if of == dict(name='transformers') else find(**of)"
    run = "import runpy; runpy.run_path('train.py', None, '__main__')"
    ended = run_command([sys.executable, "-c", f"{hidden}; {run}", "--task.name=causal_lm"], tmp_path)
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
    """Those of the command line, the task and the output folder, at once."""
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


def test_a_value_may_follow_after_a_space() -> None:
    """A list takes all words that follow, but text never does."""
    Path("a.yaml").write_text("log_every: 3")
    config = run_settings(shlex.split("--seed 42 --config a.yaml --output-dir out --optim.betas 0.8 0.9 --compile"))
    assert (config.seed, config.log_every, config.output_dir, config.compile) == (42, 3, "out", True)
    assert config.optim.betas == (0.8, 0.9)
    assert mistakes(*shlex.split("--seed 4 5 --run_name a b --output_dir=a b --dry-run c --compile no yes")) == [
        "b: not understood; settings are written --name=value",
        "--run_name a b: must be text: write it in quotes",
        "--seed 4 5: must be a valid integer",
        "--dry_run=c: must be a valid boolean, unable to interpret input",
        "--compile no yes: must be a valid boolean",
    ]
    assert mistakes("--run_name", "--max_steps") == [
        "--run_name: must be text: write it in quotes",
        "--max_steps: must be a valid integer, unable to parse string as an integer",
    ]
