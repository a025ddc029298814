"""What the tasks on decoders share: a model from scratch, by its architecture, in place of a pretrained one."""

from collections.abc import Iterator
from functools import cached_property
from typing import Annotated, Any

from pydantic import BeforeValidator, PositiveInt
from transformers import PreTrainedConfig, PreTrainedTokenizerFast

from src.config.errors import UserError, explained
from src.tasks.text.architecture import new_config, typed
from src.tasks.text.byte_tokenizer import byte_tokenizer
from src.tasks.text.fine_tuning import FineTuning
from src.tasks.text.pretrained import check_fit


class Decoder(FineTuning):
    """Trains a decoder of transformers, from scratch or fine-tuned."""

    architecture: Annotated[dict[str, Any], BeforeValidator(typed)] = {}
    """What to train from scratch, in place of task.model: model_type as transformers names it (llama, gpt2, qwen3, …),
    and any field of its config."""
    tokenizer: str | None = None
    """A model whose tokenizer is used, or `bytes`; null: task.model's own, or bytes if trained from scratch."""
    sequence_length: PositiveInt
    """Tokens that the model sees at once."""

    def validation_errors(self) -> Iterator[str]:
        yield from super().validation_errors()
        if bool(self.model) == bool(self.architecture):
            yield "task.model or task.architecture: set one, to start from that model, or to train that from scratch"
        if self.lora.r and not self.model:
            yield "task.lora adapts an existing model: set task.model, not task.architecture"

    def load_model(self) -> Any:
        if self.model:
            return super().load_model()
        with explained(f"task.architecture: {self._config.model_type} refuses it, "):
            return self.new_model()

    @cached_property
    def _config(self) -> PreTrainedConfig:
        if self.model:
            config = self.load_config()
        else:
            config = self.with_dropout(new_config(self.architecture, self._tokenizer, self.sequence_length))
        if getattr(config.get_text_config(), "output_router_logits", False):
            says = "the auxiliary loss of a mixture of experts would differ with the number of processes"
            raise UserError(f"{config.model_type}: output_router_logits is true, but {says}: set it to false")
        check_fit(self.sequence_length, config, self._tokenizer, self.num_new_tokens())
        return config

    def num_new_tokens(self) -> int:
        """Return how many of the tokenizer's tokens the pretrained model gets rows for."""
        return 0

    def new_tokenizer(self) -> PreTrainedTokenizerFast:
        """Return the tokenizer that the settings name."""
        name = self.tokenizer or (None if self.model else "bytes")
        return byte_tokenizer() if name == "bytes" else self.load_tokenizer(name)
