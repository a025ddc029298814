"""The settings of samples."""

from src.config.settings import ResumeSafe
from src.tasks.text.settings import DecoderSettings


class SampleSettings(DecoderSettings):
    """Adds samples of what a language model writes."""

    samples: ResumeSafe[list[str] | None] = None
    """Texts that the model continues at each evaluation, with the likeliest tokens; null: the prompts of the first two
    evaluation rows, where prompts are not in the loss; []: none."""
