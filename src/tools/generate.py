"""Complete a prompt with a trained language model, or chat with it, on a GPU if there is one.

Without --prompt it reads lines until Ctrl-D: with a chat template they are a chat, otherwise each line is completed by
itself.
"""

import argparse
import signal
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from accelerate.utils import set_seed
from jinja2 import TemplateError
from transformers import AutoTokenizer, TextStreamer  # pip install -e '.[text]'

from src.checkpoint.load import find_model, is_checkpoint_folder
from src.config.errors import UserError, as_user_error
from src.config.terminal import visible
from src.distributed.process import exit_codes
from src.tasks.text.export import set_eos_token_ids
from src.tasks.text.load import load_exported, max_length
from src.tasks.text.tokenizing import CHAT_TEMPLATE
from src.tools.checkpoints import export_checkpoint

MISTAKES = ValueError, TypeError, ArithmeticError, TemplateError
"""What wrong values of the options, of the model's own settings, and its chat template raise."""


def main(argv: list[str]) -> None:
    """Complete the prompt, or chat."""
    parser = argparse.ArgumentParser("python -m src.tools.generate", description=__doc__)
    parser.add_argument("source", help="a run's output folder, its exported model or adapters, or a checkpoint")
    parser.add_argument("--prompt", help="text to complete or, with a chat template, a message to answer")
    parser.add_argument("--max_new_tokens", type=int, default=256, help="default: 256")
    parser.add_argument("--temperature", type=float, default=0.8, help="0: always the likeliest token; default: 0.8")
    parser.add_argument("--seed", type=int, default=0, help="seed of the sampling; default: 0")
    options = parser.parse_args(argv)
    if options.prompt is not None and not options.prompt.strip():
        raise UserError("--prompt is empty")
    model, tokenizer = load_with_tokenizer(options.source)
    is_chat = tokenizer.chat_template not in (None, CHAT_TEMPLATE)  # the default of models on bytes
    if not options.prompt:
        print("chat" if is_chat else "no chat template: each line is completed by itself", "(Ctrl-D to exit)")
    chat: list[dict[str, str]] = []
    with as_user_error("", MISTAKES):
        set_seed(options.seed)
        while not (options.prompt and chat):
            text = options.prompt or input("> ")
            if not text.strip():
                continue
            chat.append({"role": "user", "content": text})
            if is_chat:
                text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
            tokens = tokenizer(text, add_special_tokens=not is_chat, return_tensors="pt")["input_ids"]
            answer = stream_completion(model, tokenizer, tokens, options.max_new_tokens, options.temperature)
            chat.append({"role": "assistant", "content": answer})


def load_with_tokenizer(source: str) -> tuple[Any, Any]:
    """Return a language model and its tokenizer as a run exported them or, from a checkpoint, would export them. Raise
    a UserError if it is not a language model."""
    folder = find_model(source)
    with tempfile.TemporaryDirectory() as exported:
        if is_checkpoint_folder(folder):
            checkpoint, folder = folder, Path(exported, "model")
            export_checkpoint(checkpoint, folder)
        model = load_exported(folder).to(PartialState().device).eval()
        with as_user_error(f"{source}: no tokenizer, "):
            tokenizer: Any = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
        set_eos_token_ids(model, tokenizer)  # adapters made elsewhere may lack them
        return model, tokenizer


class Printer(TextStreamer):
    """Prints a completion. Control characters, other than line ends, are shown as escapes."""

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        super().on_finalized_text("\n".join(map(visible, text.split("\n"))), stream_end)


def stream_completion(model: Any, tokenizer: Any, tokens: torch.Tensor, max_new_tokens: int, temperature: float) -> str:
    """Print the completion of `tokens`, shape (1, tokens), int64, as it is generated, and return it. Raise a UserError
    if the model's context has no room for it."""
    length, limit = tokens.shape[1], max_length(model.config, tokenizer)
    if length >= limit:
        raise UserError(f"the prompt and the chat so far have {length} tokens, but the model's limit is {limit}")
    output = model.generate(
        tokens.to(model.device),
        attention_mask=torch.ones_like(tokens, device=model.device),
        max_new_tokens=min(max_new_tokens, limit - length),
        streamer=Printer(tokenizer, skip_prompt=True, skip_special_tokens=True),
        do_sample=temperature != 0,
        temperature=temperature or None,
    )
    return str(tokenizer.decode(output[0, length:], skip_special_tokens=True))


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` may close the pipe
    with exit_codes("generate"):
        try:
            main(sys.argv[1:])
        except (EOFError, KeyboardInterrupt):
            print()
