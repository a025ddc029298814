"""Which decoders can be trained, found by a trial of a small model of the same class."""

import copy
from typing import Any

import torch
from accelerate.utils import send_to_device
from transformers import AutoModelForCausalLM, PreTrainedConfig

from src.config.errors import UserError, cause
from src.tasks.text.attention import document_lengths
from src.tasks.text.loss import LanguageModel
from src.tasks.text.packing import batch_tensors

DOCUMENTS = [3, 1, 4], [1, 5, 9, 2, 6], [5, 3, 5, 8, 9, 7], [9, 3]
"""The tokens of the trial; packed, two documents fill a row of 8."""
ORIGINAL = "original_max_position_embeddings"
"""The length that rotary embeddings were first trained on: above it, some kinds become other ones for a whole batch."""
ROUNDING = 0.05
"""Relative difference of logits that is allowed in half precision: rounding makes less than 0.005; documents that see
each other, 0.2 to 0.9."""


def require_decoder(config: PreTrainedConfig, packing: bool, sequence_length: int) -> None:
    """Raise a UserError if models of this kind cannot be trained: they fail, see the tokens that they have to predict
    or other documents of their row or batch, or have other logits than a LanguageModel computes."""
    config = copy.deepcopy(config)
    text: Any = config.get_text_config()
    hint = " (packed documents may see each other: try --task.packing=false)" if packing else ""
    rope = getattr(text, "rope_parameters", None) or {}
    original = getattr(text, ORIGINAL, None) or rope.get(ORIGINAL) or sequence_length
    if sequence_length > original:
        text.original_max_position_embeddings = 4  # some of the trial's documents are longer
        hint = f" (longer ones may change how those beside them are read: try --task.sequence_length={original})"
    if reason := unsupported_reason(config, "sdpa", packing):
        raise UserError(f"{config.model_type} cannot be trained here: {reason}{hint}")


def unsupported_reason(
    config: PreTrainedConfig, attention: str, packing: bool, device: str = "cpu", dtype: torch.dtype = torch.float32
) -> str | None:
    """Return why models of this kind can't be trained with this attention on the device in `dtype`; None if they can.

    In a row of several documents, or beside a longer row, each token's logits must be those that transformers computes
    with masks, from its own document alone, up to that token. And there must be gradients. The CPU's random state stays
    as it was.
    """
    chunks = [{"input_ids": ids, "labels": [*ids[1:], -100]} for ids in DOCUMENTS]
    inputs, ends = batch_tensors([chunks[:2], chunks[2:]] if packing else [[chunk] for chunk in chunks], 8, 0)
    if attention == "by_document":
        # in rows of their halves, sequences are whole to this attention alone, as they are to two processes
        inputs |= {name: inputs[name].view(-1, 4) for name in ("input_ids", "position_ids")}
    inputs = send_to_device(inputs | document_lengths(ends), device)
    targets = inputs.pop("targets")
    is_half = dtype != torch.float32
    try:
        with torch.random.fork_rng(devices=[]), torch.autocast(device, dtype, enabled=is_half):
            lm = small_model(config).to(device).eval()
            # without the last token, which none before it may see
            alone = [lm(torch.tensor([ids[:-1]], device=device), use_cache=False).logits[0] for ids in DOCUMENTS]
            model = LanguageModel(lm, attention)
            found, expected = model(**inputs).float(), torch.cat(alone).float()
            model.train()(targets=targets, **inputs).backward()  # with what training adds, such as dropout
    except Exception as error:  # from any library on the way
        return f"it fails on a few tokens: {cause(error).split('. ')[0]}"
    difference = (torch.dist(found, expected) / expected.norm()).item()
    if difference < (ROUNDING if is_half else 1e-5):  # rounding makes it 1e-6
        return None
    return f"its logits differ by {100 * difference:.2g}% from those of a document alone"


def small_model(config: PreTrainedConfig, is_narrow: bool = True) -> Any:
    """Return a model of the same class with few and narrow layers, one of each kind; if the class rejects that, with
    layers of their own width."""
    own = copy.deepcopy(config)
    text = own.get_text_config()
    sizes: dict[str, Any] = {
        "num_hidden_layers": 2,
        "vocab_size": 64,
        "sliding_window": 2,
        "attention_chunk_size": 2,
        "bos_token_id": 0,
        "eos_token_id": 0,
        "pad_token_id": 0,
    }
    if kinds := [*dict.fromkeys(vars(text).get("layer_types") or ())]:  # a property would follow from other fields
        sizes |= {"num_hidden_layers": len(kinds), "layer_types": kinds}
    if is_narrow:
        heads = getattr(text, "num_attention_heads", None) or 4
        has_groups = getattr(text, "num_key_value_heads", heads) != heads
        sizes |= {
            # heads have their own size, as kernels reject some
            "hidden_size": 4 * (getattr(text, "head_dim", None) or text.hidden_size // heads),
            "intermediate_size": 64,
            "num_attention_heads": 4,
            "num_key_value_heads": 2 if has_groups else 4,
        }
    try:
        text.update({name: size for name, size in sizes.items() if getattr(text, name, None) is not None})
        model = AutoModelForCausalLM.from_config(own, dtype=torch.float32, trust_remote_code=False)
        model(torch.tensor(DOCUMENTS[:1]), use_cache=False)
    except Exception:  # from any library on the way
        if is_narrow:
            return small_model(config, is_narrow=False)
        raise
    return model
