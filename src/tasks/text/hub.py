"""One line for a model, tokenizer or dataset that cannot be loaded."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from huggingface_hub.errors import LocalEntryNotFoundError

from src.config.errors import UserError, cause


@contextmanager
def loading(setting: str, name: str | None, kind: str = "model") -> Iterator[None]:
    """Turn any failure to load what `task.<setting>` names, here or on the Hub, into a UserError of one line."""
    try:
        yield
    except Exception as error:  # transformers, datasets, safetensors, torch and the Hub's client raise many kinds
        reason = f"cannot be loaded, {cause(error).split('. ')[0][:300]}"
        if "trust_remote_code" in str(error):
            reason = "wants to run code of its own, which is not allowed here; use one that transformers has"
        is_offline = any(isinstance(e, LocalEntryNotFoundError | ConnectionError) for e in (error, error.__cause__))
        if is_offline and not Path(str(name)).exists():
            download = f"hf download --repo-type {kind} {name}"
            reason += f"; offline, download it first with `{download}` and set HF_HUB_OFFLINE=1"
        raise UserError(f"task.{setting}={name}: {reason}") from error
