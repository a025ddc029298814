"""What tests share: `launch` runs train.py, and what stands on it."""

import hashlib
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock

from tests.curves import ONE_ULP
from tests.faults.runs import SHORT, killed_and_resumed
from tests.launching import WARM, Launch, Run, Whole, launched

if "TESTS_USE_GPUS" not in os.environ:  # tests are the same on a machine that has one
    os.environ["CUDA_VISIBLE_DEVICES"] = ""


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("filterwarnings", "ignore:torch.distributed is disabled")  # DCP's, in this process


@pytest.fixture(scope="session", autouse=True)
def _warm_ranks() -> Iterator[None]:
    yield
    WARM.close()


@pytest.fixture(scope="session")
def launch(tmp_path_factory: pytest.TempPathFactory) -> Launch:
    """launch("fsdp", "--epochs=1", processes=2): train.py under accelerate_configs/fsdp.yaml.

    Its processes are forked from one that has imported everything, with the environment that Accelerate's launcher
    works out from the yaml, and believe that it is above them. `real=True` is for what tests the launcher itself: it
    calls it as a user does. Further arguments:

        folder: of the run; a new one by default.
        before: Python code that each process executes first, such as a fault.
        launcher_arguments: such as "--mixed_precision=bf16".
        project: a copy of the project, with changes, to run in place of it.
        script: another one than train.py, in the project.
        in capitals: environment variables.
    """

    def launch(config: str | Path, *arguments: str, folder: Path | None = None, **more: Any) -> Run:
        folder = folder or tmp_path_factory.mktemp("launch") / "run"
        return launched(config, *arguments, folder=folder, **more)

    return launch


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Path:  # room: template
    """A folder that all of pytest's processes share, and no other pytest that one of them calls."""
    base = tmp_path_factory.getbasetemp()
    return base if worker_id == "master" else base.parent


def once(shared: Path, name: str, make: Callable[[Path], Run]) -> Run:  # room: template
    """What `make` does in a folder, done by the first of pytest's processes that asks for it."""
    folder, output = shared / name / "run", shared / f"{name}.json"
    with FileLock(shared / f"{name}.lock"):
        if not output.exists():
            done = make(folder)
            output.write_text(json.dumps([done.stdout, done.stderr]))
    stdout, stderr = json.loads(output.read_text())
    return Run(0, stdout, stderr, folder)


@pytest.fixture(scope="session")
def whole(launch: Launch, shared: Path) -> Callable[..., Run]:  # room: template
    """whole("ddp", "--max_steps=30"): the run in one piece. Whoever asks for the same one, in whichever of pytest's
    processes, gets the same folder, so leave it as it is. Further arguments are those of `launch`."""

    def run(yaml: str, *arguments: str, **more: Any) -> Run:
        given = {name: value for name, value in sorted(more.items()) if value}
        name = hashlib.sha256(repr((yaml, arguments, given)).encode()).hexdigest()[:16]
        return once(shared, name, lambda folder: launch(yaml, *arguments, folder=folder, **given).succeeded())

    return run


@pytest.fixture(scope="session")
def rounding(whole: Whole) -> Callable[..., float]:  # room: template
    """rounding("cpu", "--max_steps=30"): how far apart, relatively, two such runs may be that sum in different orders.

    What training makes of rounding, 1e-7, is measured: the largest change of `name` in this run, `whole`, when each
    weight starts one ulp larger, times 10, as other changes make up to six times as much. Where nothing grows, 1e-5 is
    what docs/promises.md promises. The arguments are those of `whole`.
    """

    def bound(yaml: str, *arguments: str, name: str = "train/loss", **more: Any) -> float:
        runs = [whole(yaml, *arguments, before=before, **more) for before in ("", ONE_ULP)]
        curves = [[record[name] for record in run.records if name in record] for run in runs]
        drift = max(abs(nudged / number - 1) for number, nudged in zip(*curves, strict=True))
        assert drift < 1e-3, "chaotic, so a comparison tells nothing: take fewer steps or a lower rate"
        return max(1e-5, 10 * drift)

    return bound


@pytest.fixture(scope="session")
def recorded(launch: Launch, shared: Path) -> Run:  # room: template+wandb template+trackers
    """A run that was killed and launched again, with all trackers. What they keep elsewhere is beside its folder."""
    arguments, trackers = [*SHORT, "--checkpoint.keep_last=9"], list[str]()
    arguments += ["--wandb.mode=offline", "--wandb.checkpoints=reference"]  # room: wandb
    trackers += ["wandb"]  # room: wandb
    trackers += ["trackio", "tensorboard"]  # room: trackers
    arguments += [f"--trackers=[{','.join(trackers)}]"]
    (home := shared / "recorded").mkdir(exist_ok=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_DATA_HOME", str(home))
        patch.setenv("TRACKIO_DIR", str(home / "trackio"))
        return once(shared, "recorded", lambda folder: killed_and_resumed(launch, "ddp", (*arguments,), folder))
