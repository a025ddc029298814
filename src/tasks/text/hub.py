"""The Hugging Face Hub: whether it answers, and one line about what cannot be loaded from there or from a folder."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

from huggingface_hub import constants
from huggingface_hub.errors import LocalEntryNotFoundError
from huggingface_hub.utils import get_session

from src.config.errors import RunError, UserError, cause

HUB_TIMEOUT = 5
"""Seconds that the Hub may take to answer."""


@cache
def can_reach_hub() -> bool:
    """Return whether the Hub answers. If not, work offline from now on, with what was fetched before: its client would
    try six times for each file, for half a minute."""
    if not constants.HF_HUB_OFFLINE:
        try:
            get_session().head(constants.ENDPOINT, timeout=HUB_TIMEOUT)
        except Exception:  # the client may use either of two libraries, each with its own errors
            constants.HF_HUB_OFFLINE = True
    return not constants.HF_HUB_OFFLINE


@contextmanager
def loading(setting: str, name: str | None) -> Iterator[None]:
    """Turn any failure to load what `task.<setting>` names, locally or on the Hub, into a one-line UserError, unless it
    is an error of ours already."""
    if name and "://" not in name and not Path(name).exists():
        can_reach_hub()
    try:
        yield
    except (UserError, RunError):
        raise
    except Exception as error:  # transformers, datasets, safetensors, torch and the Hub's client raise many kinds
        reason = f"cannot be loaded: {cause(error).split('. ')[0][:300]}"
        if "trust_remote_code" in str(error):
            reason = "needs to run code of its own, which is not allowed here; use one that transformers supports"
        elif isinstance(error.__cause__, LocalEntryNotFoundError):
            reason = f"the Hub cannot be reached; give a folder that has it, --task.{setting}=FOLDER"
        raise UserError(f"task.{setting}={name}: {reason}") from error
