"""Models and tokenizers of transformers that a run exported: loaded, checked and saved again."""

import warnings
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from peft import PeftConfig, PeftModel
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    logging,
)
from transformers.trainer_utils import align_special_tokens

from src.config.errors import UserError, explained
from src.tasks.base import Tensors
from src.tasks.text.chats import ends_of_turn
from src.tasks.text.new_tokens import grow


def load_exported(folder: Path, **options: Any) -> Any:
    """Return the language model that a run exported, fp32, with adapters if it has any. Raise a UserError if there is
    none. `options` are for `from_pretrained`."""
    logging.set_verbosity_error()  # what is missing is judged below
    logging.disable_progress_bar()
    auto: Any = AutoModelForCausalLM
    source, revision, has_adapters = str(folder), None, (folder / "adapter_config.json").is_file()
    with explained("not a language model, ", (OSError, ValueError)):
        if has_adapters:
            adapted = PeftConfig.from_pretrained(source)
            source, revision = adapted.base_model_name_or_path, adapted.revision
        model, found = auto.from_pretrained(
            source, revision=revision, dtype=torch.float32, output_loading_info=True, **options
        )
        if found["missing_keys"]:
            raise UserError(f"not a language model, it lacks {min(found['missing_keys'])}")
        if has_adapters:
            grow(model, len(AutoTokenizer.from_pretrained(folder)))
            with suppress(OSError):  # adapters of others have none
                model.generation_config = GenerationConfig.from_pretrained(folder)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", FutureWarning)  # as in lora.py
                model = PeftModel.from_pretrained(model, folder)
    return model


def max_length(config: PreTrainedConfig, tokenizer: PreTrainedTokenizerFast) -> int:
    """Return how many tokens the model sees at most; 10^30 if nothing limits them."""
    positions = getattr(config.get_text_config(), "max_position_embeddings", None) or 0
    return min(positions, tokenizer.model_max_length) if positions > 0 else tokenizer.model_max_length


def check_fit(
    sequence_length: int, config: PreTrainedConfig, tokenizer: PreTrainedTokenizerFast, num_new: int = 0
) -> None:
    """Raise a UserError if a sequence is longer than the model can be, or the tokenizer has tokens that the model does
    not know, besides so many new ones."""
    limit, known = max_length(config, tokenizer), config.get_text_config().vocab_size + num_new
    if sequence_length > limit:
        raise UserError(f"task.sequence_length={sequence_length}: the model sees at most {limit} tokens")
    if len(tokenizer) > known:
        where = "task.tokenizer, task.architecture.vocab_size"
        raise UserError(f"the tokenizer has {len(tokenizer)} tokens, but the model knows {known} ({where})")


def set_ends(model: Any, tokenizer: PreTrainedTokenizerFast) -> None:
    """Give a language model the tokenizer's special tokens, and have what it generates end where the chat template ends
    a turn too: a base model, which ends where a text does, would go on with the user's next one."""
    logging.set_verbosity_error()  # it would warn of what it changes
    align_special_tokens(model, tokenizer)
    generation, marks = model.generation_config, ends_of_turn(tokenizer)
    ends = end_tokens(generation)
    if marks and (end := tokenizer.get_vocab()[marks[0]]) not in ends:
        generation.eos_token_id = [*ends, end]


def end_tokens(generation: GenerationConfig) -> list[int]:
    """Return the tokens at each of which generation ends."""
    ends = generation.eos_token_id
    if ends is None:
        return []
    return ends if isinstance(ends, list) else [ends]


def save(model: Any, tokenizer: PreTrainedTokenizerFast, weights: Tensors, folder: Path) -> None:
    """Write what `from_pretrained` reads: config, weights (of a PeftModel, the adapters alone) and tokenizer."""
    logging.disable_progress_bar()
    if model.can_generate():
        set_ends(model, tokenizer)
        model.generation_config.save_pretrained(folder)  # adapters come with none of their own
    model.save_pretrained(folder, state_dict=weights)
    tokenizer.save_pretrained(folder)


def without_adapters(model: PreTrainedModel | PeftModel) -> Any:
    """Return the model itself, where it has adapters with them inside its layers."""
    return model.get_base_model() if isinstance(model, PeftModel) else model


def fsdp_blocks(model: PreTrainedModel) -> list[str]:
    """Return the class names in `_no_split_modules` that FSDP can wrap: those the model has, except for one around the
    input embeddings, which Accelerate wraps by themselves afterwards."""
    embeddings = model.get_input_embeddings()
    around = {type(module).__name__ for module in model.modules() if embeddings in module.modules()}
    usable = {type(module).__name__ for module in model.modules()} - around
    return [name for name in model._no_split_modules or [] if name in usable]
