"""One line for a model, tokenizer or dataset that cannot be loaded."""

from collections.abc import Iterator
from contextlib import contextmanager

from huggingface_hub.errors import LocalEntryNotFoundError

from src.config.errors import UserError, cause


@contextmanager
def loading(setting: str, name: str | None) -> Iterator[None]:
    """Turn any failure to load what `task.<setting>` names, here or on the Hub, into a UserError of one line."""
    try:
        yield
    except Exception as error:  # transformers, datasets, safetensors, torch and the Hub's client raise many kinds
        reason = f"cannot be loaded, {cause(error).split('. ')[0][:300]}"
        if "trust_remote_code" in str(error):
            reason = "wants to run code of its own, which is not allowed here; use one that transformers has"
        elif isinstance(error.__cause__, LocalEntryNotFoundError):
            reason = f"the Hub cannot be reached; give a folder that has it, --task.{setting}=FOLDER"
            if setting == "model":
                reason += " (make chat MODEL=FOLDER)"
        raise UserError(f"task.{setting}={name}: {reason}") from error
