"""The settings of samples."""

from src.config.settings import ResumeSafe, Settings


class SampleSettings(Settings):
    """Adds samples of what a language model writes."""

    samples: ResumeSafe[list[str] | None] = None
    """Texts that the model continues at each evaluation, with the likeliest tokens; null: the prompts of the first two
    evaluation rows, where prompts are not in the loss; []: none."""
