"""python -m src.tools.checkpoints: what there is, whether it is whole, its export."""

import re
import shutil
from pathlib import Path

import pytest

from src.tools.checkpoints import main
from tests.faults.runs import ALL
from tests.launching import Launch, Run, Tool, Whole


@pytest.fixture
def tool(capsys: pytest.CaptureFixture[str]) -> Tool:
    return Tool("checkpoint", main, capsys)


@pytest.fixture
def run(whole: Whole, tmp_path: Path) -> Run:
    """With checkpoints of steps 4, 8, 12 and 14, and one's random numbers lost."""
    folder = Path(shutil.copytree(whole("ddp", *ALL).folder, tmp_path / "run"))
    (folder / "checkpoints/step_00000004/rng_00002.json").unlink()
    return Run(0, "", "", folder)


def test_list(launch: Launch, run: Run) -> None:
    """By its command: without a warning."""
    done = launch("cpu", "list", str(run.folder), script="src/tools/checkpoints.py").succeeded()
    assert done.stderr == ""
    for step, line in zip((14, 12, 8, 4), listed := done.stdout.splitlines(), strict=True):
        assert re.match(rf"\S*/step_{step:08d} .*14.[45] MB.*ddp x 2", line)
    assert f"eval/accuracy {run.summary['eval/accuracy']:.4g}" in listed[0]
    assert "eval" not in listed[1]


def test_verify(tool: Tool, run: Run, tmp_path: Path) -> None:
    *lines, last = tool("verify", run.folder).succeeded().stdout.splitlines()
    assert not re.search("DAMAGED|missing", str(lines))
    assert last.endswith("rng_00002.json is missing: dropout resumes with other random numbers")
    copy = shutil.copytree(run.folder / "checkpoints/step_00000014", tmp_path / "step_00000014")
    shard = copy / "shard-00002-model-00001-of-00001.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1] + b"!")
    assert tool("list", copy).exit_code == 0
    found = tool("verify", copy)
    assert (found.exit_code, found.stdout) == (1, f"{copy}  DAMAGED: {shard.name} has changed since it was saved\n")


def test_export_is_what_the_run_exported(tool: Tool, run: Run, tmp_path: Path) -> None:
    folder = run.folder / "model_step_00000014"
    assert tool("export", run.folder).succeeded().stdout == f"{folder}\n"
    for name in ("model.safetensors", "README.md"):
        assert (folder / name).read_bytes() == (run.folder / "model" / name).read_bytes()
    again = tool("export", run.folder)
    assert (again.exit_code, again.stderr) == (2, f"checkpoint: {folder}: already exists; choose another folder\n")
    tool("export", run.folder / "checkpoints/step_00000012", f"--output={tmp_path}/older").succeeded()
    older = tmp_path / "older/model.safetensors"
    assert older.read_bytes() != (folder / older.name).read_bytes()


def test_what_is_no_checkpoint_is_one_line(tool: Tool) -> None:
    says = "checkpoint: nowhere: neither a checkpoint nor a folder with checkpoints\n"
    assert tool("list", "nowhere").stderr == says
