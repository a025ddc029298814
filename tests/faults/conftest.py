"""What the fault tests compare with."""

import functools
from collections.abc import Callable

import pytest

from tests.conftest import Launch, Run


@pytest.fixture(scope="session")
def whole(launch: Launch) -> Callable[..., Run]:
    """whole("ddp", "--max_steps=30"): the run in one piece; the same one for whoever asks, so leave it as it is."""

    @functools.cache
    def run(yaml: str, *arguments: str, processes: int | None = None) -> Run:
        return launch(yaml, *arguments, processes=processes).succeeded()

    return run
