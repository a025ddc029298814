"""The fixtures that some of these tests share with those of text."""

from tests.text.conftest import made, models, own_folder, trained  # noqa: F401
