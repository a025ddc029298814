"""python -m src.tools.checkpoints: what there is, whether it is whole, its export."""

import re
import shutil
import sys
from pathlib import Path

import pytest

from src.tools.checkpoints import main
from tests.faults.runs import EACH_STEP
from tests.launching import Run, Tool, Whole, run_command

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # in this process, to read


@pytest.fixture
def tool(capsys: pytest.CaptureFixture[str]) -> Tool:
    return Tool("checkpoint", main, capsys)


@pytest.fixture(scope="module")
def run(whole: Whole, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """With checkpoints of steps 22 to 30, and one's random numbers lost."""
    folder = tmp_path_factory.mktemp("tool") / "run"
    shutil.copytree(whole("fsdp", *EACH_STEP).folder, folder)
    (folder / "checkpoints/step_00000022/rng_00002.json").unlink()
    return Run(0, "", "", folder)


def test_list(run: Run) -> None:
    """By its command: without a warning."""
    command = [sys.executable, "-W", "error", "-m", "src.tools.checkpoints", "list", str(run.folder)]
    listed = run_command(command, Path()).succeeded().stdout.splitlines()
    for step, line in zip(range(30, 21, -1), listed, strict=True):
        assert re.match(rf"\S*/step_{step:08d} .*14.[45] MB.*fsdp x 2", line)
    assert f"eval/accuracy {run.summary['eval/accuracy']:.4g}" in listed[0]
    assert "eval" not in listed[1]


def test_verify(tool: Tool, run: Run, tmp_path: Path) -> None:
    *lines, last = tool("verify", run.folder).succeeded().stdout.splitlines()
    assert not re.search("DAMAGED|missing", str(lines))
    assert last.endswith("rng_00002.json is missing: dropout resumes with other random numbers")
    copy = shutil.copytree(run.folder / "checkpoints/step_00000030", tmp_path / "step_00000030")
    shard = copy / "shard-00002-model-00001-of-00001.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1] + b"!")
    assert tool("list", copy).exit_code == 0
    found = tool("verify", copy)
    assert (found.exit_code, found.stdout) == (1, f"{copy}  DAMAGED: {shard.name} has changed since it was saved\n")


def test_export_is_what_the_run_exported(tool: Tool, run: Run, tmp_path: Path) -> None:
    folder = run.folder / "model_step_00000030"
    assert tool("export", run.folder).succeeded().stdout == f"{folder}\n"
    for name in ("model.safetensors", "README.md"):
        assert (folder / name).read_bytes() == (run.folder / "model" / name).read_bytes()
    again = tool("export", run.folder)
    assert (again.exit_code, again.stderr) == (2, f"checkpoint: {folder}: already exists; choose another folder\n")
    tool("export", run.folder / "checkpoints/step_00000024", f"--output={tmp_path}/older").succeeded()
    older = tmp_path / "older/model.safetensors"
    assert older.read_bytes() != (folder / older.name).read_bytes()


def test_what_is_no_checkpoint_is_one_line(tool: Tool) -> None:
    says = "checkpoint: nowhere: neither a checkpoint nor a folder with checkpoints\n"
    assert tool("list", "nowhere").stderr == says
