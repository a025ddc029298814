"""The fixtures of all tests: `launch` runs train.py (tests/launching.py says how), `whole` and `rounding` use it."""

import hashlib
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock

from tests.launching import WARM, Launch, Run, Whole, launched

ONE_ULP = """
import torch, src.training.run
build = src.training.run.new_model
def nudged(*arguments):
    model, *facts = build(*arguments)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1 + torch.finfo(torch.float32).eps)
    return model, *facts
src.training.run.new_model = nudged
"""
"""Makes each weight at the start one or two units in its last place larger."""

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
    """launch("fsdp", "--epochs=1", processes=2): run train.py under accelerate_configs/fsdp.yaml, on warm ranks.

    Args:
        folder: of the run; a new one by default.
        real: use `accelerate launch` itself.
        before: Python code that each process executes before train.py.
        launcher_arguments: such as "--mixed_precision=bf16".
        project: a copy of the project, with changes, to run in place of it.
        script: another one than train.py, in the project.

    Arguments in capitals are environment variables. tests/launching.py explains them all.
    """

    def launch(config: str | Path, *arguments: str, folder: Path | None = None, **more: Any) -> Run:
        folder = folder or tmp_path_factory.mktemp("launch") / "run"
        return launched(config, *arguments, folder=folder, **more)

    return launch


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Path:
    """A folder that all of pytest's processes share, but not a pytest that one of them calls."""
    base = tmp_path_factory.getbasetemp()
    return base if worker_id == "master" else base.parent


def once(shared: Path, name: str, make: Callable[[Path], Run]) -> Run:
    """Return the run that `make` does in a folder; only the first of pytest's processes to ask for it does it."""
    folder, output = shared / name / "run", shared / f"{name}.json"
    with FileLock(shared / f"{name}.lock"):
        if not output.exists():
            done = make(folder)
            output.write_text(json.dumps([done.stdout, done.stderr]))
    stdout, stderr = json.loads(output.read_text())
    return Run(0, stdout, stderr, folder)


@pytest.fixture(scope="session")
def whole(launch: Launch, shared: Path) -> Callable[..., Run]:
    """whole("ddp", "--max_steps=30"): a run that is not interrupted. All tests that ask for the same one get the same
    folder, so leave it as it is. Further arguments are those of `launch`."""

    def run(yaml: str, *arguments: str, **more: Any) -> Run:
        given = {name: value for name, value in sorted(more.items()) if value}
        name = hashlib.sha256(repr((yaml, arguments, given)).encode()).hexdigest()[:16]
        return once(shared, name, lambda folder: launch(yaml, *arguments, folder=folder, **given).succeeded())

    return run


@pytest.fixture(scope="session")
def rounding(whole: Whole) -> Callable[..., float]:
    """rounding("cpu", "--max_steps=30"): the relative difference allowed between two such runs that sum in different
    orders.

    It is measured: the largest change of `name` in this run when each weight starts one ulp larger, times 10, as other
    changes make up to six times as much. At least 1e-5, as rounding alone may add up to that. The arguments
    are those of `whole`.
    """

    def bound(yaml: str, *arguments: str, name: str = "train/loss", **more: Any) -> float:
        runs = [whole(yaml, *arguments, before=before, **more) for before in ("", ONE_ULP)]
        curves = [[record[name] for record in run.records if name in record] for run in runs]
        drift = max(abs(nudged / number - 1) for number, nudged in zip(*curves, strict=True))
        assert drift < 1e-3, "chaotic, so that a comparison shows nothing: take fewer steps or a lower rate"
        return max(1e-5, 10 * drift)

    return bound
