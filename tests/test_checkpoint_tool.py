"""python -m src.tools.checkpoints: what there is, whether it is whole, its export, what differs."""

import shutil
import sys
from pathlib import Path

import pytest

from src.tools.checkpoints import main
from tests.faults.runs import EACH_STEP, weights
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
    (folder / "checkpoints" / "step_00000022" / "rng_00002.json").unlink()
    return Run(0, "", "", folder)


def test_list(run: Run) -> None:
    """By its command: without a warning."""
    command = [sys.executable, "-W", "error", "-m", "src.tools.checkpoints", "list", str(run.folder)]
    listed = run_command(command, Path()).succeeded().stdout.splitlines()
    assert [line.split()[0].rpartition("/")[2] for line in listed] == [f"step_{step:08d}" for step in range(30, 21, -1)]
    assert "14.5 MB" in listed[0]
    assert "fsdp x 2" in listed[0]
    assert f"eval/accuracy {run.summary['eval/accuracy']:.4g}" in listed[0]
    assert "eval" not in listed[1]


def test_verify(tool: Tool, run: Run, tmp_path: Path) -> None:
    *lines, last = tool("verify", run.folder).succeeded().stdout.splitlines()
    assert [line.rpartition("  ")[2] for line in lines] == ["whole"] * 8
    assert last.endswith("rng_00002.json is missing: dropout goes on with other random numbers")
    copy = tmp_path / "step_00000030"
    shutil.copytree(run.folder / "checkpoints" / "step_00000030", copy)
    shard = copy / "shard-00002-model-00001-of-00001.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1] + b"!")
    found = tool("verify", copy)
    assert found.exit_code == 1
    assert found.stdout == f"{copy}  {shard.name} has changed since it was saved\n"


def test_export_is_what_the_run_exported(tool: Tool, run: Run, tmp_path: Path) -> None:
    exported = tool("export", run.folder).succeeded()
    folder = run.folder / "model_step_00000030"
    assert exported.stdout == f"{folder}\n"
    for name in ("model.safetensors", "README.md"):
        assert (folder / name).read_bytes() == (run.folder / "model" / name).read_bytes()
    again = tool("export", run.folder)
    assert (again.exit_code, again.stderr) == (2, f"checkpoint: {folder}: exists already; name another folder\n")
    tool("export", run.folder / "checkpoints" / "step_00000024", tmp_path / "model").succeeded()
    older = weights(Run(0, "", "", tmp_path))
    assert all(not older[name].equal(weight) for name, weight in weights(run).items())


def test_diff(tool: Tool, run: Run) -> None:
    last, before = (run.folder / "checkpoints" / f"step_000000{step}" for step in (30, 24))
    same = tool("diff", last, last)
    assert (same.exit_code, same.stdout) == (0, "the same\n")
    differing = tool("diff", before, last)
    assert differing.exit_code == 1
    assert "progress.step  24 -> 30\n" in differing.stdout
    assert "model.fc1.weight  differs by up to " in differing.stdout
    assert "optimizer.fc1.weight.step  differs by up to 6\n" in differing.stdout
    assert "config" not in differing.stdout


def test_spoilt_files_are_one_line(tool: Tool, run: Run, tmp_path: Path) -> None:
    """What is said of checkpoints does not hang on the record. Tried without: tracebacks."""
    folder = Path(shutil.copytree(run.folder, tmp_path / "run"))
    listed = tool("list", folder).stdout
    with (folder / "metrics.jsonl").open("a") as record:
        record.write('garbage "eval/\n{"eval/": \n')
    assert tool("list", folder).stdout == listed
    last, before = (folder / "checkpoints" / f"step_000000{step}" for step in (30, 24))
    (last / "state.json").unlink()
    refused = tool("diff", before, last)
    assert (refused.exit_code, refused.stderr) == (2, f"checkpoint: {last}: state.json is missing\n")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["lst", "x"], "lst: must be one of list, verify, export, diff"),
        (["list"], "list: name a checkpoint or a run's output folder"),
        (["list", "nowhere"], "nowhere: neither a checkpoint nor a folder with any"),
        (["diff", "nowhere"], "diff: takes two checkpoints"),
        (["export", "nowhere", "a", "b"], "export: takes one checkpoint, and one folder to write"),
    ],
)
def test_mistakes_are_one_line(tool: Tool, arguments: list[str], says: str) -> None:
    refused = tool(*arguments)
    assert (refused.exit_code, refused.stderr) == (2, f"checkpoint: {says}\n")


def test_what_is_another_users_is_one_line(tool: Tool, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Root may read everything, so it is stood for. Tried without: a traceback."""

    def refuse(path: Path, *_: object) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "glob", refuse)
    refused = tool("list", run.folder)
    assert (refused.exit_code, refused.stderr) == (2, f"checkpoint: {run.folder}/checkpoints: Permission denied\n")
