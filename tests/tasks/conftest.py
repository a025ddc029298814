"""The fixtures that some of these tests share with those of text; and which tests `make test` leaves out."""

import pytest

from tests.text.conftest import made, models, own_folder, trained  # noqa: F401

SLOW = (
    "TestMnist", "TestCausalLM", "TestTextClassification", "TestImageClassification", "TestTokenClassification",
    "TestTimm",
)  # fmt: skip
"""Tests of tasks whose curves tests/core/test_parity.py compares, and which tests/faults/test_resume.py resumes."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if any(name in item.nodeid for name in SLOW):
            item.add_marker(pytest.mark.slow)
