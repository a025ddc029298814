"""What the tests share: `launch`, which runs train.py, and `whole`, which gives them uninterrupted runs."""

import fcntl
import hashlib
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.launching import WARM, Launch, Run, launched


@pytest.fixture(scope="session", autouse=True)
def _warm_ranks() -> Iterator[None]:
    yield
    WARM.close()


@pytest.fixture(scope="session")
def launch(tmp_path_factory: pytest.TempPathFactory) -> Launch:
    """launch("fsdp", "--epochs=1", processes=2): train.py on the digits under accelerate_configs/fsdp.yaml.

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
def whole(launch: Launch, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Run]:
    """whole("ddp", "--max_steps=30"): the run in one piece. Whoever asks for the same one, in whichever of pytest's
    processes, gets the same folder, so leave it as it is."""
    base = tmp_path_factory.getbasetemp()
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base

    def run(yaml: str, *arguments: str, processes: int | None = None) -> Run:
        name = hashlib.sha256(repr((yaml, arguments, processes)).encode()).hexdigest()[:16]
        folder, output = shared / f"whole-{name}" / "run", shared / f"whole-{name}.json"
        with (shared / f"whole-{name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not output.exists():
                done = launch(yaml, *arguments, folder=folder, processes=processes).succeeded()
                output.write_text(json.dumps([done.stdout, done.stderr]))
        stdout, stderr = json.loads(output.read_text())
        return Run(0, stdout, stderr, folder)

    return run
