"""Continue a prompt with a trained language model, or chat with it, on a GPU if there is one.

Without --prompt it reads lines until Ctrl-D: a chat with its history if there is a chat template, otherwise each line
is continued by itself.
"""

import signal
import sys

if __name__ == "__main__":  # during the imports, which take seconds, Ctrl-C has nothing to clean up
    signal.signal(signal.SIGINT, signal.SIG_DFL)

import argparse
import tempfile
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from accelerate.utils import set_seed
from torch import Tensor
from transformers import AutoTokenizer, TextStreamer  # pip install -e '.[text]'

from src.checkpoint.export import export_weights
from src.checkpoint.load import config_of, find_model, is_checkpoint_folder, load_trained_model
from src.config.errors import UserError, explained
from src.distributed.process import exit_codes
from src.tasks.text.model import load_exported, max_length, set_ends
from src.tasks.text.tokenizing import CHAT_TEMPLATE


def main(argv: list[str]) -> None:
    """Continue the prompt, or chat, as the arguments ask for."""
    parser = argparse.ArgumentParser("python -m src.tools.generate", description=__doc__)
    parser.add_argument("source", help="a run's output folder, a model or adapters that it exported, or a checkpoint")
    parser.add_argument("--prompt", help="text to continue; where there is a chat template, a message to answer")
    parser.add_argument("--max_new_tokens", type=int, default=256, help="most tokens to generate; 256")
    parser.add_argument("--temperature", type=float, default=0.8, help="0: the likeliest token each time; 0.8")
    parser.add_argument("--seed", type=int, default=0, help="of what is drawn; 0")
    options = parser.parse_args(argv)
    if options.prompt is not None and not options.prompt.strip():
        raise UserError("--prompt is empty")
    model, tokenizer = load(options.source)
    is_chat = tokenizer.chat_template not in (None, CHAT_TEMPLATE)  # any model on bytes has that one
    if not options.prompt:
        print("a chat" if is_chat else "no chat template: each line is continued by itself", "(Ctrl-D ends it)")
    chat: list[dict[str, str]] = []
    with explained("", ValueError):  # of the options' values
        set_seed(options.seed)
        while not (options.prompt and chat):
            text = options.prompt or input("> ")
            if not text.strip():
                continue
            chat.append({"role": "user", "content": text})
            if is_chat:
                text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
            tokens = tokenizer(text, add_special_tokens=not is_chat, return_tensors="pt")["input_ids"]
            answer = generate(model, tokenizer, tokens, options.max_new_tokens, options.temperature)
            chat.append({"role": "assistant", "content": answer})


def load(source: str) -> tuple[Any, Any]:
    """Return a language model and its tokenizer: as a run exported them or, from a checkpoint, would export them. Raise
    a UserError if it is no language model."""
    folder = find_model(source)
    with tempfile.TemporaryDirectory() as exported:
        if is_checkpoint_folder(folder):
            config = config_of(folder)
            trained = load_trained_model(folder, config)
            folder = Path(exported)
            export_weights(config.task, trained, trained.state_dict(), folder)
        model = load_exported(folder).to(PartialState().device).eval()
        with explained(f"{source}: no tokenizer, ", (OSError, ValueError)):
            tokenizer: Any = AutoTokenizer.from_pretrained(folder)
        set_ends(model, tokenizer)  # adapters of others say none
        return model, tokenizer


def generate(model: Any, tokenizer: Any, tokens: Tensor, max_new_tokens: int, temperature: float) -> str:
    """Print the continuation of `tokens`, shape (1, tokens), int64, as it comes, and return it. Raise a UserError if
    there is no room for any."""
    length, limit = tokens.shape[1], max_length(model.config, tokenizer)
    if length >= limit:
        raise UserError(
            f"{length} tokens, with all that was said before, and the model sees at most {limit}: write less"
        )
    output = model.generate(
        tokens.to(model.device),
        attention_mask=torch.ones_like(tokens, device=model.device),
        max_new_tokens=min(max_new_tokens, limit - length),
        streamer=TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True),
        do_sample=temperature != 0,
        temperature=temperature or None,
    )
    return str(tokenizer.decode(output[0, length:], skip_special_tokens=True))


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # who reads the output may have enough of it
    with exit_codes("generate"):
        try:
            main(sys.argv[1:])
        except (EOFError, KeyboardInterrupt):
            print()
