"""Copies of checkpoints elsewhere: a run goes on from them, exactly, on a fresh disk or on machines that share none."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import boto3
import pytest
from accelerate import Accelerator
from moto.server import ThreadedMotoServer

from src.checkpoint.resume import find_checkpoint
from src.config import load_config
from src.process import UserError
from tests.faults.runs import assert_same_run, lines
from tests.launching import QUIET, Launch, Run, Whole

TINY = ("--max_steps=14", "--log_every=1", "--save_every=4", "--eval_every=14", "--global_batch_size=8")
"""Stopped in step 13, it has copied the checkpoint of step 8 (the next save waits for that), and perhaps step 12's."""
STOP: dict[str, Any] = {"FAULT": "die", "FAULT_STEP": "13"}
FREE = ("--task.dropout=0",)
MACHINE = """
import os, sys
group = (int(os.environ["GROUP_RANK"]) + {turned}) % {machines}
os.makedirs(f"{folder}/machine{{group}}", exist_ok=True)
os.chdir(f"{folder}/machine{{group}}")
from fsspec.implementations.local import LocalFileSystem
def counted(name, size):
    original = getattr(LocalFileSystem, name)
    def call(self, path, *arguments, **named):
        found = original(self, path, *arguments, **named)
        with open("fetched", "a") as log:
            log.write(f"{{size(found, path)}}\\n") if path.endswith(".safetensors") else None
        return found
    setattr(LocalFileSystem, name, call)
counted("cat_file", lambda found, path: len(found))
counted("get_file", lambda found, path: os.stat(path).st_size)
"""
"""Each machine has a folder of its own, in which it counts the bytes of shards that it fetches."""


def mirrored(mirror: Path) -> list[int]:
    """The steps whose manifest is there."""
    return sorted(int(path.parent.name.removeprefix("step_")) for path in mirror.glob("mnist/step_*/manifest.json"))


def on_machines(
    launch: Launch, yaml: str, folder: Path, *arguments: str, machines: int = 2, turned: int = 0, **more: Any
) -> Run:
    """A run on machines without a shared disk, of one process each, whose ranks are turned by so many."""
    for log in folder.glob("machine*/fetched"):
        log.unlink()
    return launch(
        yaml,
        *TINY,
        f"--checkpoint.mirror={folder}/mirror",
        *arguments,
        "--output_dir=run",
        folder=folder / f"machine{turned}" / "run",
        before=MACHINE.format(folder=folder, turned=turned, machines=machines),
        launcher_arguments=(f"--num_machines={machines}", "--machine_rank=0", "--main_process_ip=127.0.0.1"),
        processes=machines,
        **more,
    )


def fetched(folder: Path) -> int:
    """Bytes of shards that any machine fetched."""
    return sum(int(line) for log in folder.glob("machine*/fetched") for line in log.read_text().splitlines())


def test_a_run_goes_on_from_another_disk_and_exports_the_best_which_only_the_mirror_has(
    launch: Launch, whole: Whole, tmp_path: Path
) -> None:
    """To be told from the last, the best is that of the highest loss. Tried without the mirror's among the candidates
    for the best: the last is exported."""
    best = (*TINY, "--eval_every=4", "--checkpoint.keep_last=1", "--checkpoint.export_best=true",
            "--checkpoint.mode=max")  # fmt: skip
    mirror = f"--checkpoint.mirror={tmp_path}/mirror"
    assert launch("cpu", *best, mirror, folder=tmp_path / "first" / "run", **STOP).exit_code != 0
    assert 8 in mirrored(tmp_path / "mirror")
    run = launch("cpu", *best, mirror, folder=tmp_path / "second" / "run").succeeded()
    fetched = [line.rpartition("_")[2] for line in lines(run, f"fetched from {tmp_path}/mirror/mnist/step_")]
    assert fetched in (["00000008", "00000004"], ["00000012", "00000004"])
    assert mirrored(tmp_path / "mirror") == [4, 14]
    assert_same_run(run, whole("cpu", *best))
    assert run.summary["eval/loss"] == run.records[4]["eval/loss"]
    assert mistakes_at_start(tmp_path / "third", mirror, "--resume=never") == [
        f"output_dir={tmp_path}/third: holds a run already (checkpoint.mirror); choose another --run_name or "
        "--output_dir, or move that folder away"
    ]
    assert not list((tmp_path / "third").iterdir())


def mistakes_at_start(folder: Path, *arguments: str) -> list[str]:
    """What a start with this output folder is refused with."""
    config = load_config([f"--output_dir={folder}", "--task.source=digits", *QUIET, *arguments])
    with pytest.raises(UserError) as error:
        find_checkpoint(Accelerator(cpu=True), config)
    return str(error.value).splitlines()


def test_a_mirror_that_cannot_be_written_is_refused_at_the_start(tmp_path: Path) -> None:
    """Tried without: a traceback."""
    (tmp_path / "file").touch()
    for mirror, says in (
        (f"{tmp_path}/file/mirror", "Not a directory"),
        ("gcs://bucket/folder", "Please install gcsfs to access Google Storage: pip install gcsfs"),
        ("ftpp://host/folder", "Protocol not known: ftpp"),
    ):
        (line,) = mistakes_at_start(tmp_path / "run", f"--checkpoint.mirror={mirror}")
        assert line.startswith(f"checkpoint.mirror={mirror}: ")
        assert says in line
    assert not (tmp_path / "run").exists()


@pytest.fixture
def s3() -> Iterator[dict[str, str]]:
    """A server with one bucket, `bucket`. Yields the variables by which processes find it."""
    server = ThreadedMotoServer("127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    found = {"AWS_ENDPOINT_URL": f"http://{host}:{port}", "AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "x"}
    boto3.client("s3", endpoint_url=found["AWS_ENDPOINT_URL"], region_name="us-east-1",
                 aws_access_key_id="x", aws_secret_access_key="x").create_bucket(Bucket="bucket")  # fmt: skip
    yield found | {"AWS_DEFAULT_REGION": "us-east-1", "no_proxy": "*"}
    server.stop()


def test_machines_go_on_exactly_from_s3(launch: Launch, whole: Whole, tmp_path: Path, s3: dict[str, str]) -> None:
    """Each with its share of the tensors, as the ranks are turned. A bucket that is not there is refused."""
    mirror = "--checkpoint.mirror=s3://bucket/runs"
    everywhere: dict[str, Any] = dict(s3)
    none = on_machines(launch, "ddp", tmp_path, "--checkpoint.mirror=s3://none/runs", machines=1, **everywhere)
    assert none.exit_code == 2
    (line,) = none.messages
    assert line == "train.py: checkpoint.mirror=s3://none/runs: The specified bucket does not exist"
    assert on_machines(launch, "fsdp", tmp_path, *FREE, mirror, **everywhere, **STOP).exit_code != 0
    run = on_machines(launch, "fsdp", tmp_path, *FREE, mirror, turned=1, **everywhere).succeeded()
    assert next(lines(run, "fetched from s3://bucket/runs/mnist/step_"))
    assert_same_run(run, whole("fsdp", *TINY, *FREE, processes=2))


def test_machines_without_a_shared_disk_go_on_exactly(launch: Launch, whole: Whole, tmp_path: Path) -> None:
    """Also where the second one is now the first: each then fetches its share and no more. And without the second.
    Tried with fetching whole shards: twice as much is fetched, and all of it where none is needed."""
    expected = whole("fsdp", *TINY, *FREE, processes=2)
    assert on_machines(launch, "fsdp", tmp_path, *FREE, **STOP).exit_code != 0
    (newest,) = mirrored(tmp_path / "mirror")[-1:]
    assert newest in (8, 12)
    size = sum(shard.stat().st_size for shard in tmp_path.glob(f"mirror/mnist/step_{newest:08d}/shard-*"))
    turned, fewer = (Path(shutil.copytree(tmp_path, f"{tmp_path}-{name}")) for name in ("turned", "fewer"))
    assert_same_run(on_machines(launch, "fsdp", tmp_path, *FREE).succeeded(), expected)
    assert fetched(tmp_path) < 0.01 * size  # headers
    assert_same_run(on_machines(launch, "fsdp", turned, *FREE, turned=1).succeeded(), expected)
    assert fetched(turned) == pytest.approx(size, rel=0.01)  # by both together
    alone = on_machines(launch, "fsdp", fewer, *FREE, machines=1).succeeded()
    assert fetched(fewer) == pytest.approx(size / 2, rel=0.01)
    assert alone.losses == pytest.approx(expected.losses, rel=1e-5)


def test_so_they_do_under_ddp(launch: Launch, whole: Whole, tmp_path: Path) -> None:
    """With dropout."""
    assert on_machines(launch, "ddp", tmp_path, **STOP).exit_code != 0
    assert not list(tmp_path.glob("machine*/run/checkpoints/step_*/manifest.json"))  # only the mirror has it whole
    run = on_machines(launch, "ddp", tmp_path, turned=1).succeeded()
    assert_same_run(run, whole("ddp", *TINY, processes=2))
    assert mirrored(tmp_path / "mirror") == [12, 14]
    parts = {path.name for path in tmp_path.glob("machine*/run/checkpoints/*")}
    assert parts == {"step_00000008", "step_00000012", "step_00000014"}  # the oldest goes with the next save


def test_killed_at_any_moment_of_a_copy_the_newest_whole_one_is_found(
    launch: Launch, whole: Whole, tmp_path: Path
) -> None:
    """And nothing of the others is left once a copy is complete. What is damaged here is taken from the mirror; what is
    damaged there is passed over. A copy that fails later is a warning. Tried with the manifest first: it counts."""
    state = whole("ddp", *TINY, processes=2).folder / "checkpoints" / "step_00000012" / "state.json"
    run = launch("cpu", str(tmp_path), str(state), script="tests/mirror_kills.py").succeeded()
    (line,) = lines(run, "killed ")
    _, kills, _, _, *steps = line.split()
    assert int(kills) >= 20
    assert set(steps) == {"2", "3"}
    (warning,) = lines(run, "WARNING: ")
    assert warning.startswith(f"WARNING: {tmp_path}/run/checkpoints/step_00000002 is not in the mirror: ")
