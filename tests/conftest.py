"""What the tests share: `launch`, which runs train.py as a user does, and the real MNIST where it is at hand."""

import fcntl
import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

PROJECT = Path(__file__).parent.parent
MNIST = PROJECT.parent / "shared" / "data" / "mnist"
BIN = Path(sys.executable).parent

needs_mnist = pytest.mark.skipif(not MNIST.is_dir(), reason=f"needs the real MNIST in {MNIST}")


@dataclass(frozen=True)
class Run:
    """A finished `accelerate launch … train.py …`."""

    exit_code: int
    stdout: str
    stderr: str
    folder: Path

    @property
    def messages(self) -> list[str]:
        """What train.py told a user who erred."""
        return [line for line in self.stderr.splitlines() if line.startswith("train.py: ")]

    @property
    def records(self) -> list[dict[str, Any]]:
        """metrics.jsonl."""
        return [json.loads(line) for line in (self.folder / "metrics.jsonl").read_text().splitlines()]

    @property
    def losses(self) -> list[float]:
        """The training losses, in the order of their steps."""
        return [record["train/loss"] for record in self.records if "train/loss" in record]

    @property
    def summary(self) -> dict[str, Any]:
        return json.loads((self.folder / "summary.json").read_text())

    def succeeded(self) -> "Run":
        assert self.exit_code == 0, self.stdout + self.stderr
        return self


Launch = Callable[..., Run]


def run_command(command: list[str], folder: Path, cwd: Path = PROJECT, **environment: str) -> Run:
    """Runs it with one thread per process, as two cores are all that CI has, without credentials or GPUs."""
    env = clean_environment(**environment)
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=300)
    return Run(done.returncode, done.stdout, done.stderr, folder)


def clean_environment(**more: str) -> dict[str, str]:
    env = {name: value for name, value in os.environ.items() if not name.startswith(("WANDB_", "ACCELERATE_", "FSDP_"))}
    return env | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "NETRC": os.devnull} | more


def launch_command(
    config: str | Path,
    *arguments: str,
    folder: Path,
    processes: int | None = None,
    launcher_arguments: tuple[str, ...] = (),
    wandb: str = "disabled",
    project: Path = PROJECT,
    script: str = "train.py",
) -> list[str]:
    """`accelerate launch` with one of accelerate_configs/; on the digits, unless the arguments name a task."""
    yaml = project / "accelerate_configs" / f"{config}.yaml" if isinstance(config, str) else config
    command = [str(BIN / "accelerate"), "launch", "--config_file", str(yaml), "--main_process_port", "0"]
    command += [f"--num_processes={processes}"] if processes else []
    command += [*launcher_arguments, script, f"--output_dir={folder}", f"--wandb.mode={wandb}"]
    command += [] if "--task.name=" in str(arguments) else ["--task.source=digits"]
    return [*command, *arguments]


@pytest.fixture(scope="session")
def launch(tmp_path_factory: pytest.TempPathFactory) -> Launch:
    """launch("fsdp", "--epochs=1", processes=2): train.py on the digits under accelerate_configs/fsdp.yaml."""

    def launch(
        config: str | Path,
        *arguments: str,
        folder: Path | None = None,
        processes: int | None = None,
        launcher_arguments: tuple[str, ...] = (),
        wandb: str = "disabled",
        project: Path = PROJECT,
        script: str = "train.py",
        **environment: str,
    ) -> Run:
        folder = folder or tmp_path_factory.mktemp("launch") / "run"
        command = launch_command(
            config,
            *arguments,
            folder=folder,
            processes=processes,
            launcher_arguments=launcher_arguments,
            wandb=wandb,
            project=project,
            script=script,
        )
        return run_command(command, folder, project, **environment)

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
