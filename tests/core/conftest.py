"""A run with all trackers, which tests/core shares."""

from pathlib import Path

import pytest

from tests.conftest import once
from tests.faults.runs import SHORT, killed_and_resumed
from tests.launching import Launch, Run

TRACKED = (
    "--checkpoint.keep_last=9", "--wandb.mode=offline", "--wandb.checkpoints=reference",
    "--trackers=[wandb,trackio,tensorboard,mlflow,comet_ml]",
)  # fmt: skip


@pytest.fixture(scope="session")
def recorded(launch: Launch, shared: Path) -> Run:
    """A run that was killed and launched again, with all trackers. What they keep elsewhere is beside its folder."""
    (home := shared / "recorded").mkdir(exist_ok=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_DATA_HOME", str(home))
        patch.setenv("TRACKIO_DIR", str(home / "trackio"))
        patch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{home}/mlflow.db")
        patch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
        patch.setenv("COMET_START_ONLINE", "false")
        return once(shared, "recorded", lambda folder: killed_and_resumed(launch, "ddp", (*SHORT, *TRACKED), folder))
