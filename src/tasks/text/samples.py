"""Continuations of prompts, for the record."""

from typing import Any

import torch
from transformers import PreTrainedTokenizerFast


def continuation(
    model: Any,
    tokenizer: PreTrainedTokenizerFast,
    prompt: str,
    is_chat: bool,
    limit: int,
    sample_tokens: int,
    temperature: float,
    device: torch.device,
) -> str:
    """Return how a LanguageModel, which sees at most `limit` tokens, continues the prompt, or answers it in a chat.
    Every process must call it."""
    chat = [{"role": "user", "content": prompt}]
    encoded: Any = tokenizer.apply_chat_template(chat, add_generation_prompt=True) if is_chat else tokenizer(prompt)
    tokens = encoded["input_ids"] or [tokenizer.eos_token_id or 0]
    input_ids = torch.tensor([tokens[-(limit - 1) :]], device=device)
    sampling = {"temperature": temperature, "top_k": 0} if temperature else {}
    # training draws what it would without this, and the compiler does not see how the texts grow token by token
    gpus = [device] if device.type == "cuda" else []  # else torch warns where there are several
    with torch.random.fork_rng(gpus), torch.no_grad(), torch.compiler.set_stance("force_eager"):
        torch.manual_seed(0)
        output = model(
            "generate",
            input_ids,
            attention_mask=torch.ones_like(input_ids),
            max_new_tokens=min(sample_tokens, limit - input_ids.shape[1]),
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id or tokenizer.eos_token_id or 0,
            synced_gpus=torch.distributed.is_initialized(),  # FSDP: until all processes are done
            do_sample=bool(sampling),
            **sampling,
        )
    return str(tokenizer.decode(output[0, input_ids.shape[1] :], skip_special_tokens=True))
