"""Configs of models that are trained from scratch, from the name of an architecture and any of its fields."""

import contextlib
from typing import Any

from ruamel.yaml.error import YAMLError
from transformers import CONFIG_MAPPING, AutoConfig, PreTrainedConfig, PreTrainedTokenizerFast
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from src.config.errors import UserError, explained, refuse
from src.config.settings import nearest, read_yaml


def typed(value: Any) -> Any:
    """Return values from the command line, which are text, as YAML reads them."""
    if isinstance(value, str):
        with contextlib.suppress(YAMLError):
            value = read_yaml(value)
    if isinstance(value, dict):
        return {name: typed(inner) for name, inner in value.items()}
    return value


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
