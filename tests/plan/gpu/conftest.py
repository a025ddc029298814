"""What the tests on GPUs that are not there share: `gpu`, which runs train.py on emulated ones."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.launching import Launch, WarmRanks
from tests.plan.gpu.build import emulated_environment, reason_to_skip


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if reason := reason_to_skip():
        for item in items:
            if Path(__file__).parent in item.path.parents:
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session")
def gpu(launch: Launch) -> Iterator[Launch]:
    """gpu("ddp", "--epochs=1", processes=2): as `launch`, on four emulated GPUs, in fp32 unless launcher_arguments say
    otherwise. Warnings of its processes end on standard error."""
    environment = emulated_environment(4)
    ranks = WarmRanks(**environment)

    def run(*arguments: Any, launcher_arguments: tuple[str, ...] = ("--mixed_precision=no",), **more: Any) -> Any:
        how = {"ranks": ranks, "launcher_arguments": launcher_arguments}
        return launch(*arguments, **how, **environment | more)

    yield run
    ranks.close()
