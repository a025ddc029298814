"""Whether a kind of decoder trains as it should, found by a small model of that kind before the large one is there."""

import copy
from contextlib import suppress
from typing import Any

import torch
from accelerate.utils import send_to_device
from transformers import AutoModelForCausalLM, PreTrainedConfig

from src.config.errors import UserError, cause
from src.tasks.text.attention import document_lengths
from src.tasks.text.language_model import LanguageModel

TOKENS = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6], [5, 3, 5, 8, 9, 7, 9, 3]])
"""Two rows of documents; packed ones have lengths of 3, 5, 6 and 2."""
ROUNDING = 0.05
"""Relative difference of logits in half precision: it is below 0.005; if documents see each other, 0.2 to 0.9."""


def require_decoder(config: PreTrainedConfig, packing: bool) -> None:
    """Raise a UserError if models of this kind cannot be trained: they fail, see the tokens that they have to predict
    or other documents of their row, or their logits are not those that a LanguageModel makes."""
    if says := failure(config, "sdpa", packing, "cpu", torch.float32):
        hint = " (packed documents may see each other: try --task.packing=false)" if packing else ""
        raise UserError(f"{config.model_type} cannot be trained here: {says}{hint}")


def require_splittable(config: PreTrainedConfig, packing: bool) -> None:
    """Raise a UserError if processes can't share the sequences of such models, which mix tokens elsewhere than in their
    attention, or attend in a way that `attention_by_document` can't."""
    if says := failure(config, "in_halves", packing, "cpu", torch.float32):
        raise UserError(f"{config.model_type}: processes cannot share its sequences (cp_size): {says}")


def failure(config: PreTrainedConfig, attention: str, packing: bool, device: str, dtype: torch.dtype) -> str | None:
    """Return why models of this kind can't be trained with this attention on the device in `dtype`; None if they can.

    Each token's logits in a row of several documents must be those that transformers computes with masks, of its own
    document alone, up to that token. And there must be gradients. Leaves the CPU's random numbers as they were.
    """
    name = type(config).__name__.removesuffix("Config")
    lengths = [3, 5, 6, 2] if packing else [8, 8]
    tokens = TOKENS.view(4, 4) if attention == "in_halves" else TOKENS
    positions = torch.cat([torch.arange(length) for length in lengths]).view_as(tokens)
    ends = torch.tensor(lengths).cumsum(0).tolist()
    is_half = dtype != torch.float32
    try:
        with torch.random.fork_rng(devices=[]), torch.autocast(device, dtype, enabled=is_half):
            lm = small_model(config).to(device).eval()
            inputs: Any = {"input_ids": tokens, "position_ids": positions, **document_lengths(ends)}
            inputs = send_to_device(inputs, device)
            documents = inputs["input_ids"].flatten().split(lengths)
            alone = torch.cat([lm(document[None, :-1], use_cache=False).logits[0] for document in documents])
            model = LanguageModel(lm, attention)
            together = model.logits(**inputs).flatten(0, 1).split(lengths)
            model.train().logits(**inputs).sum().backward()  # with what training adds, such as dropout
    except Exception as error:  # of any library on the way
        return f"{name} fails on a few tokens, {cause(error).split('. ')[0]}"
    found, expected = torch.cat([logits[:-1] for logits in together]).float(), alone.float()
    difference = ((found - expected).norm() / expected.norm()).item()
    says = f"{name} gives logits that differ by {difference:.0%} from a document's alone"
    return says if not difference < (ROUNDING if is_half else 1e-5) else None  # rounding makes it 1e-6


def small_model(config: PreTrainedConfig) -> Any:
    """Return a model of the same class with few and narrow layers, one of each kind; where the class refuses that, with
    wider ones."""
    own = config.get_text_config()
    kinds = vars(own).get("layer_types")  # a mere property follows from other fields
    few: dict[str, Any] = {"num_hidden_layers": 2, "vocab_size": 64, "sliding_window": 2, "attention_chunk_size": 2}
    few |= dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    if kinds:
        few |= {"num_hidden_layers": len(set(kinds)), "layer_types": list(dict.fromkeys(kinds))}
    heads = getattr(own, "num_attention_heads", None)
    is_grouped = getattr(own, "num_key_value_heads", heads) != heads
    head = getattr(own, "head_dim", None) or own.hidden_size // (heads or 4)  # of its own size: kernels refuse some
    narrow = {"hidden_size": 4 * head, "intermediate_size": 64}
    narrow |= {"num_attention_heads": 4, "num_key_value_heads": 2 if is_grouped else 4}
    with suppress(Exception):  # narrower than the class allows
        small = _of_sizes(config, few | narrow)
        small(TOKENS, use_cache=False)
        return small
    return _of_sizes(config, few)


def _of_sizes(config: PreTrainedConfig, sizes: dict[str, Any]) -> Any:
    config = copy.deepcopy(config)
    text = config.get_text_config()
    text.update({name: size for name, size in sizes.items() if getattr(text, name, None) is not None})
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32)
