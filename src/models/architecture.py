"""A model of transformers with fresh weights, from the name of its architecture and fields of its config."""

from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoConfig, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerFast
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from src.process import UserError
from src.settings import nearest


def new_config(
    architecture: dict[str, Any], tokenizer: PreTrainedTokenizerFast, sequence_length: int
) -> PreTrainedConfig:
    """`architecture`: model_type and any of its config's fields; vocabulary, special tokens and positions fit the
    tokenizer and the sequences where it doesn't name them.

    Raises:
        ValueError: no such architecture, fields that it hasn't, or values that it refuses.
    """
    fields = dict(architecture)
    kind = fields.pop("model_type")
    if kind not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES or kind not in CONFIG_MAPPING:
        raise UserError(
            f"task.architecture.model_type={kind}: transformers has no such causal language model"
            f"{nearest(kind, list(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES))}"
        )
    default = AutoConfig.for_model(kind)
    known = [name for name in {**default.to_dict(), **default.attribute_map} if not name.startswith("_")]
    if unknown := [name for name in fields if name not in known]:
        lines = [f"task.architecture.{name}: {kind} has no such field{nearest(name, known)}" for name in unknown]
        raise UserError("\n".join(lines))
    fields.setdefault("vocab_size", len(tokenizer))
    positions = default.attribute_map.get("max_position_embeddings", "max_position_embeddings")  # n_positions in GPT-2
    if positions in known and "max_position_embeddings" not in fields:
        fields.setdefault(positions, sequence_length)
    for token in ("bos_token_id", "eos_token_id", "pad_token_id"):
        fields.setdefault(token, getattr(tokenizer, token))
    try:
        return AutoConfig.for_model(kind, **fields)
    except Exception as error:  # transformers checks fields with errors of several kinds
        raise UserError(f"task.architecture: {kind} refuses it, {' '.join(str(error).split())}") from error


def new_model(auto_class: Any, config: PreTrainedConfig) -> PreTrainedModel:
    """Raises:
    ValueError: the config's fields don't fit each other.
    """
    try:
        return auto_class.from_config(config, dtype=torch.float32)
    except Exception as error:  # of many kinds, too
        raise UserError(
            f"task.architecture: {config.model_type} refuses it, {' '.join(str(error).split())}"
        ) from error
