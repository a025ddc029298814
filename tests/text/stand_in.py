"""A chat model of SmolLM2-Instruct's architecture and tokenizer format, small enough to be trained from scratch here.

    python -m tests.text.stand_in FOLDER    # trained for minutes on this project's pages, in FOLDER/model

The model that `make chat` takes from the Hub has 30 layers of width 576 and 49,152 tokens.
"""

import subprocess
import sys
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, GPT2Tokenizer, LlamaConfig

from tests.launching import BIN, PROJECT

NAME = "HuggingFaceTB/SmolLM2-135M-Instruct"
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
PERSON = "You are a helpful AI assistant named Stand-in"
TEMPLATE = (
    "{% if messages[0].role != 'system' %}<|im_start|>system\n" + PERSON + "<|im_end|>\n{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SIZES: dict[str, Any] = {
    "hidden_size": 192, "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "tie_word_embeddings": True, "max_position_embeddings": 512,
}  # fmt: skip


def pages() -> list[str]:
    """This project's pages, conversations left out."""
    return [page.read_text() for page in sorted([*PROJECT.glob("*.md"), *PROJECT.glob("docs/**/*.md")])]


def tokenizer(vocabulary: int = 2048) -> GPT2Tokenizer:
    """Byte pairs, and the marks of a chat, which ends its turns as the model ends its text."""
    pairs = Tokenizer(models.BPE())
    pairs.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    pairs.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    pairs.train_from_iterator(pages(), trainer)
    made = GPT2Tokenizer(
        tokenizer_object=pairs, bos_token=SPECIAL[1], eos_token=SPECIAL[2], pad_token=SPECIAL[2], unk_token=SPECIAL[0]
    )
    made.chat_template = TEMPLATE
    return made


def untrained(folder: Path) -> Path:
    """With fresh weights."""
    own = tokenizer()
    ends = {"bos_token_id": own.bos_token_id, "eos_token_id": own.eos_token_id, "pad_token_id": own.pad_token_id}
    config = LlamaConfig(vocab_size=len(own), **ends, **SIZES | {"num_hidden_layers": 2, "hidden_size": 64})
    model: Any = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(folder)
    own.save_pretrained(folder)
    return folder


def trained(folder: Path, steps: int = 300) -> Path:
    """Trained on the pages by this project, for minutes."""
    folder.mkdir(parents=True)
    tokenizer().save_pretrained(folder / "tokenizer")
    (folder / "pages.txt").write_text("\n\n".join(pages()))
    architecture = [f"--task.architecture.{name}={value}" for name, value in SIZES.items()]
    subprocess.run(
        [
            BIN / "accelerate", "launch", "--config_file", "accelerate_configs/cpu.yaml", "train.py",
            "--task.name=causal_lm", "--task.architecture.model_type=llama", *architecture,
            f"--task.tokenizer={folder}/tokenizer", f"--task.dataset={folder}/pages.txt", "--task.sequence_length=256",
            f"--max_steps={steps}", "--global_batch_size=8", "--optim.lr=2e-3", "--optim.schedule=cosine",
            f"--output_dir={folder}", "--trackers=[]",
        ],
        cwd=PROJECT, check=True,
    )  # fmt: skip
    return folder / "model"


if __name__ == "__main__":
    print(trained(Path(sys.argv[1]).absolute()))
