"""What the tasks on decoders share: a model from scratch, by its architecture, in place of a pretrained one."""

import contextlib
from collections.abc import Iterator
from functools import cached_property
from typing import Annotated, Any

from pydantic import BeforeValidator, PositiveInt
from ruamel.yaml.error import YAMLError
from transformers import CONFIG_MAPPING, AutoConfig, PreTrainedConfig, PreTrainedTokenizerFast
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from src.config.errors import UserError, explained, refuse
from src.config.settings import nearest, read_yaml
from src.tasks.text.byte_tokenizer import byte_tokenizer
from src.tasks.text.fine_tuning import FineTuning
from src.tasks.text.pretrained import check_fit


def typed(value: Any) -> Any:
    """Return values from the command line, which are text, as YAML reads them."""
    if isinstance(value, str):
        with contextlib.suppress(YAMLError):
            value = read_yaml(value)
    if isinstance(value, dict):
        return {name: typed(inner) for name, inner in value.items()}
    return value


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

    def check_config(self) -> None:
        """Raise a UserError, before the work begins, if the model has no config, or it does not fit the tokenizer and
        the sequences."""
        _ = self._config

    def num_new_tokens(self) -> int:
        """Return how many of the tokenizer's tokens the pretrained model gets rows for."""
        return 0

    def new_tokenizer(self) -> PreTrainedTokenizerFast:
        """Return the tokenizer that the settings name."""
        name = self.tokenizer or (None if self.model else "bytes")
        return byte_tokenizer() if name == "bytes" else self.load_tokenizer(name)


def new_config(
    architecture: dict[str, Any], tokenizer: PreTrainedTokenizerFast, sequence_length: int
) -> PreTrainedConfig:
    """Return a config of `architecture`: model_type and any of its config's fields. Vocabulary, special tokens and
    positions fit the tokenizer and the sequences unless it names them. Raise a UserError if there is no such
    architecture, it has no such fields, or it refuses their values."""
    fields = dict(architecture)
    kind = str(fields.pop("model_type", None))
    if kind not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES or kind not in CONFIG_MAPPING:
        close = nearest(kind, list(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES))
        raise UserError(f"task.architecture.model_type={kind}: transformers has no such causal language model{close}")
    default = AutoConfig.for_model(kind)
    known = [name for name in {**default.to_dict(), **default.attribute_map} if not name.startswith("_")]
    unknown = [name for name in fields if name not in known]
    refuse(f"task.architecture.{name}: {kind} has no such field{nearest(name, known)}" for name in unknown)
    fields.setdefault("vocab_size", len(tokenizer))
    positions = default.attribute_map.get("max_position_embeddings", "max_position_embeddings")  # n_positions in GPT-2
    if positions in known and "max_position_embeddings" not in fields:
        fields.setdefault(positions, sequence_length)
    for token in ("bos_token_id", "eos_token_id", "pad_token_id"):
        fields.setdefault(token, getattr(tokenizer, token))
    with explained(f"task.architecture: {kind} refuses it, "):
        return AutoConfig.for_model(kind, **fields)
