"""The fixtures that the plan's tests share with the others."""

from tests.conftest import _warm_ranks, launch, pytest_configure, shared, whole  # noqa: F401
