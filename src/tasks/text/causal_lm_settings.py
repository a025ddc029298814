"""The settings of `--task.name=causal_lm`."""

from typing import ClassVar, Literal

from pydantic import PositiveInt

from src.config.settings import ResumeSafe
from src.tasks.text.chat_settings import ChatSettings
from src.tasks.text.sample_settings import SampleSettings
from src.tasks.text.settings import DecoderSettings


class CausalLMSettings(
    ChatSettings,
    SampleSettings,
    DecoderSettings,
):
    """Settings of next-token prediction."""

    name: Literal["causal_lm"] = "causal_lm"
    """The task to train."""
    new_tokens: list[str] = []
    """Tokens to add to the tokenizer, such as <|im_start|>. Their rows in the first and last layer are trained,
    alongside adapters too."""
    text_column: str | None = None
    """Column of raw text. If none of these columns is set, the names of the dataset's columns decide."""
    prompt_column: str | None = None
    """Column of prompts, texts or lists of messages; needs completion_column too."""
    completion_column: str | None = None
    """Column of completions, which follow the prompts."""
    train_on_prompts: bool = False
    """Include prompts and other roles' turns in the loss, not only completions and the assistant's turns."""
    sequence_length: PositiveInt = 1024
    """Tokens that the model sees at once. Longer text is split into several sequences; longer prompts and chats are
    truncated."""
    packing: bool = True
    """Pack several short documents into one sequence. They don't see each other."""
    attention: ResumeSafe[Literal["auto", "sdpa"]] = "auto"
    """How packed documents are kept apart. sdpa: by a mask. auto: by torch's varlen kernel, which needs no mask, in
    half precision on a GPU if the model supports it; otherwise by a mask."""
    task_class: ClassVar[str] = "src.tasks.text.causal_lm:CausalLM"
    metric_names: ClassVar[tuple[str, ...]] = ("perplexity", "accuracy")
