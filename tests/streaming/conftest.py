"""The fixtures that these tests share with those of text."""

from tests.text.conftest import _is_in_own_folder, made, models, own_folder, trained  # noqa: F401
