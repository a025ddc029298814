"""The tasks that train a transformers decoder, from scratch or fine-tuned."""

from functools import cached_property

from transformers import PreTrainedConfig, PreTrainedTokenizerFast

from src.config.errors import UserError
from src.tasks.text.fine_tuning import FineTuning
from src.tasks.text.load import load_tokenizer, new_config
from src.tasks.text.settings import DecoderSettings
from src.tasks.text.tokenizing import byte_tokenizer


class Decoder(DecoderSettings, FineTuning):
    """Trains a transformers decoder, from scratch or fine-tuned."""

    def _load_config(self) -> PreTrainedConfig:
        if self.model:
            config = super()._load_config()
        else:
            config = new_config(self.architecture, self._tokenizer, self.sequence_length)
        if getattr(config.get_text_config(), "output_router_logits", False):
            raise UserError(
                f"{config.model_type}: output_router_logits is true, but the auxiliary loss of a mixture of experts "
                "would depend on the number of processes: set it to false"
            )
        return config

    @cached_property
    def _tokenizer(self) -> PreTrainedTokenizerFast:
        if self.model and not self.tokenizer:
            return super()._tokenizer
        name = self.tokenizer or "bytes"
        return byte_tokenizer() if name == "bytes" else load_tokenizer("tokenizer", name)
