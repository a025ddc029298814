"""The setting of the upload to the Hub; src/checkpoint/hub.py uploads."""

import re
from collections.abc import Iterator

from huggingface_hub import constants, get_token

from src.config.run import RunSettings
from src.config.settings import SafeReopens
from src.config.terminal import BIN


class HubSettings(RunSettings):
    """Adds the upload of the model."""

    push_to_hub: SafeReopens[str | None] = None
    """Hub repository, USER/NAME, to upload the model to at the end; private if new; null: none."""

    def validation_errors(self) -> Iterator[str]:
        yield from super().validation_errors()
        if repository := self.push_to_hub:
            if not re.fullmatch(r"[\w.-]+/[\w.-]+", repository):
                yield f"push_to_hub={repository}: must be USER/NAME"
            elif constants.HF_HUB_OFFLINE:
                yield f"push_to_hub={repository}: HF_HUB_OFFLINE is set; unset it, or remove push_to_hub"
            elif get_token() is None:
                yield f"push_to_hub={repository}: no credentials; run `{BIN}hf auth login`"
