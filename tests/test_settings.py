"""Settings: code < yaml < command line, typed, every mistake at once, and nothing heavy imported for an answer."""

import itertools
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from src.config import Config, load_config
from tests.conftest import PROJECT


def mistakes(*argv: str) -> list[str]:
    with pytest.raises(ValueError, match=".") as error:
        load_config(list(argv))
    return str(error.value).splitlines()


@pytest.fixture(autouse=True)
def _in_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_the_command_line_beats_the_last_yaml_beats_the_first_beats_the_code() -> None:
    Path("a.yaml").write_text("seed: 1\nepochs: 1\noptim: {lr: 0.1, name: sgd}")
    Path("b.yaml").write_text("epochs: 2\noptim:\n  lr: 0.2")
    config = load_config(["--config", "a.yaml", "--config=b.yaml", "--optim.lr=0.3"])
    assert (config.seed, config.epochs, config.optim.lr, config.optim.name) == (1, 2, 0.3, "sgd")
    assert config.log_every == 50


def test_scientific_notation_is_a_number_on_the_command_line_and_in_yaml() -> None:
    Path("a.yaml").write_text("optim:\n  lr: 1e-4\nmax_steps: 1e3")
    config = load_config(["--config=a.yaml", "--global_batch_size=1e2", "--optim.weight_decay=1e-2"])
    assert (config.optim.lr, config.max_steps, config.global_batch_size) == (1e-4, 1000, 100)
    assert config.optim.weight_decay == 0.01


def test_text_stays_text_and_null_empties() -> None:
    config = load_config(["--run_name=007", "--max_steps=null", "--wandb.tags=[a, b]", "--wandb.entity=7e10"])
    assert (config.run_name, config.max_steps, config.wandb.tags) == ("007", None, ["a", "b"])
    assert config.wandb.entity == "7e10"
    assert config.folder == Path("runs/007")


def test_every_mistake_is_one_line_with_the_nearest_name_and_where_it_was_written() -> None:
    Path("a.yaml").write_text("epoch: 3\noptim:\n  lr: fast")
    assert mistakes(
        "--config=a.yaml", "--config=b.yaml", "--optm.lr=1", "--lr=1", "--seed=-1", "--task=mnist", "--task.dropout=9",
        "--optim.name=adam", "--global_batch_size=0", "verbose", "--log_every", "--output_dir=/proc/version/x",
    ) == [
        "verbose: not understood, settings are written --name=value",
        "--log_every: not understood, settings are written --name=value",
        "--config=b.yaml: no such file, did you mean a.yaml?",
        "a.yaml: epoch: 3: unknown setting, did you mean epochs?",
        "--optm.lr=1: unknown setting, did you mean optim.lr?",
        "--lr=1: unknown setting, did you mean optim.lr?",
        "--task=mnist: task is a group, write for example --task.name=mnist",
        "--seed=-1: must be greater than or equal to 0",
        "--global_batch_size=0: must be greater than 0",
        "--task.dropout=9: must be less than 2",
        "--optim.name=adam: must be 'adamw', 'sgd', 'adadelta' or 'muon'",
        "a.yaml: optim.lr: fast: must be a valid number, unable to parse string as a number",
        "output_dir=/proc/version/x: /proc/version is a file, not a folder; choose another --output_dir",
    ]  # fmt: skip


def test_an_unknown_task_is_named_with_those_there_are() -> None:
    assert mistakes("--task.name=mnits", "--task.source=digits") == [
        "--task.name=mnits: no such task, did you mean mnist? (causal_lm, mnist, text_classification)"
    ]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("a: [1", "a.yaml: not yaml, see line 1"),
        ("- 1", "a.yaml: must hold settings, one `name: value` a line"),
        ("1: 2", "a.yaml: must hold settings, one `name: value` a line"),
        ("\x00", "a.yaml: not yaml"),
    ],
)
def test_a_file_that_is_not_settings_in_yaml(text: str, says: str) -> None:
    Path("a.yaml").write_text(text)
    assert mistakes("--config=a.yaml") == [f"--config={says}"]


def test_a_folder_or_binary_file_as_config() -> None:
    Path("b.yaml").write_bytes(b"\xff\xfe\x00")
    assert mistakes("--config=.", "--config=b.yaml") == [
        "--config=.: cannot be read, Is a directory",
        "--config=b.yaml: cannot be read, it is not text",
    ]


@pytest.mark.parametrize(
    ("processes", "arguments", "says"),
    [
        (3, (), "64: not a multiple of 3 processes; nearest that are: global_batch_size=63 or 66"),
        (
            2,
            ("--micro_batch_size=24",),
            "64: not a multiple of 24 (micro_batch_size) x 2 processes = 48; "
            "nearest that are: global_batch_size=48 or 96, micro_batch_size=16 or 32",
        ),
        (
            2,
            ("--micro_batch_size=64",),
            "64: not a multiple of 64 (micro_batch_size) x 2 processes = 128; "
            "nearest that are: global_batch_size=128, micro_batch_size=32",
        ),
    ],
)
def test_a_batch_that_does_not_divide_is_refused_with_the_nearest_that_do(
    monkeypatch: pytest.MonkeyPatch, processes: int, arguments: tuple[str, ...], says: str
) -> None:
    monkeypatch.setenv("WORLD_SIZE", str(processes))
    assert mistakes(*arguments) == [f"global_batch_size={says}"]


def test_accumulation_follows_from_the_global_batch() -> None:
    config = load_config(["--global_batch_size=64", "--micro_batch_size=8"])
    assert [config.accumulation(world_size) for world_size in (1, 2, 4, 8)] == [8, 4, 2, 1]
    assert load_config([]).micro_batch(4) == 16


def test_a_run_needs_an_end() -> None:
    assert mistakes("--epochs=null") == ["epochs and max_steps are both null: set one of them"]


@pytest.mark.parametrize("name", ["config.yaml", "metrics.jsonl", "summary.json", "model", "wandb"])
def test_a_folder_that_holds_a_run_is_refused_and_untouched(name: str) -> None:
    held = Path("runs/mnist") / name
    held.parent.mkdir(parents=True)
    held.write_text("precious")
    assert mistakes() == [
        f"output_dir=runs/mnist: holds a run already ({name}), but no checkpoint of it; choose another --run_name or "
        f"--output_dir, or move that folder away"
    ]
    assert held.read_text() == "precious"


def test_each_trial_of_a_sweep_has_its_own_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_SWEEP_ID", "s1")
    monkeypatch.setenv("WANDB_RUN_ID", "r1")
    config = load_config(["--optim.lr=0.003", "--task.dropout=0.5"])
    assert (config.run_name, config.folder, config.optim.lr) == ("mnist", Path("runs/mnist-r1"), 0.003)


def test_an_output_folder_that_cannot_be_written() -> None:
    """/proc is one even for root, who runs CI and may write anywhere else."""
    (line,) = mistakes("--output_dir=/proc/a/b")
    assert line.startswith("output_dir=/proc/a/b: cannot write in /proc, ")
    assert line.endswith("; choose another --output_dir")


def test_numbers_out_of_reach_are_refused() -> None:
    assert mistakes("--seed=5000000000", "--optim.lr=inf", "--task.name=[a]") == [
        "--task.name=[a]: no such task (causal_lm, mnist, text_classification)",
        "--seed=5000000000: must be less than 4294967296",
        "--optim.lr=inf: must be a finite number",
    ]


def test_config_yaml_reproduces_the_settings() -> None:
    config = load_config(["--optim.lr=3e-3", "--task.source=digits", "--wandb.tags=[x]", "--max_steps=3"])
    Path("config.yaml").write_text(yaml.safe_dump(config.model_dump(mode="json")))
    assert load_config(["--config=config.yaml"]).model_dump() == config.model_dump()


def test_no_config_is_configs_mnist_yaml() -> None:
    assert load_config([f"--config={PROJECT}/configs/mnist.yaml"]).model_dump() == load_config([]).model_dump()


@pytest.mark.parametrize("file", sorted((PROJECT / "configs").glob("*.yaml")), ids=lambda file: file.name)
def test_each_experiment_is_valid_and_opens_with_what_it_is_and_its_command(file: Path) -> None:
    Path("data/tinyshakespeare").mkdir(parents=True)
    Path("data/tinyshakespeare/input.txt").write_text("which the header says how to get")
    assert isinstance(load_config([f"--config={file}"]), Config)
    header = file.read_text().split("\n\n")[0]
    assert header.startswith("# ")
    assert "#   accelerate launch --config_file accelerate_configs/" in header or "#   make train" in header


def test_help_documents_every_setting_of_the_chosen_task_with_its_default() -> None:
    shown = subprocess.run(
        [sys.executable, PROJECT / "train.py", "--help", "--task.name=mnist"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    for line in (
        "--optim.lr=0.003\n        Peak learning rate.",
        "--task.source=mnist   (mnist | digits)\n        mnist: 60,000 + 10,000 images",
        "--max_steps=null\n        Optimizer steps to take",
    ):
        assert line in shown
    documented = shown.splitlines()
    for line, documentation in itertools.pairwise(documented):
        assert not line.startswith("  --") or documentation.strip(), f"undocumented: {line}"


@pytest.mark.parametrize("argument", ["--help", "--nonsense=1"])
def test_an_answer_comes_before_anything_heavy_is_imported(argument: str) -> None:
    code = (
        "import runpy, sys\n"
        f"sys.argv = ['train.py', {argument!r}]\n"
        f"try: runpy.run_path({str(PROJECT / 'train.py')!r}, run_name='__main__')\n"
        "except SystemExit: pass\n"
        "print(sorted({'torch', 'accelerate', 'numpy', 'wandb', 'evaluate'} & set(sys.modules)), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=PROJECT)
    assert done.stderr.splitlines()[-1] == "[]"
