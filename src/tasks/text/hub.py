"""The Hub: whether it can be reached, and one line for a model, tokenizer or dataset that cannot be loaded."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

from huggingface_hub import constants
from huggingface_hub.errors import LocalEntryNotFoundError
from huggingface_hub.utils import get_session

from src.config.errors import RunError, UserError, cause

SECONDS = 5
"""How long the Hub may take to answer."""


@cache
def can_reach_hub() -> bool:
    """Return whether the Hub answers. If it does not, work offline from now on, with what was fetched before: its
    client would ask six times for each file, for half a minute."""
    if not constants.HF_HUB_OFFLINE:
        try:
            get_session().head(constants.ENDPOINT, timeout=SECONDS)
        except Exception:  # the client's library, of which there are two, raises errors of its own
            constants.HF_HUB_OFFLINE = True
    return not constants.HF_HUB_OFFLINE


@contextmanager
def loading(setting: str, name: str | None) -> Iterator[None]:
    """Turn any failure to load what `task.<setting>` names, here or on the Hub, into a UserError of one line, unless it
    is in our own words already."""
    if name and "://" not in name and not Path(name).exists():
        can_reach_hub()
    try:
        yield
    except (UserError, RunError):
        raise
    except Exception as error:  # transformers, datasets, safetensors, torch and the Hub's client raise many kinds
        reason = f"cannot be loaded, {cause(error).split('. ')[0][:300]}"
        if "trust_remote_code" in str(error):
            reason = "wants to run code of its own, which is not allowed here; use one that transformers has"
        elif isinstance(error.__cause__, LocalEntryNotFoundError):
            reason = f"the Hub cannot be reached; give a folder that has it, --task.{setting}=FOLDER"
        raise UserError(f"task.{setting}={name}: {reason}") from error
