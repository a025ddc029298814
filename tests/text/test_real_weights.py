"""The chat model of `make chat` with its real weights, from the package that has them: the promises on a model that
has learned something. Skipped where the package index cannot be reached."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from src.tools.generate import main  # room: tools
from tests.launching import Launch, Run, needs
from tests.text.conftest import Trained
from tests.text.tasks import SMOLLM2, TEXT

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),  # in this process, to read
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning"),  # as in lora.py
]
QUESTION = "What does --check do?"


@pytest.fixture
def chat(trained: Trained) -> Run:
    return trained("chat")


def test_it_learns(chat: Run) -> None:
    assert chat.losses[-1] < chat.losses[0] - 0.5


@needs("src/check")
def test_the_check_finds_no_fault(launch: Launch, shared: Path) -> None:
    assert "all checks passed" in TEXT["chat"].ready(shared).run(launch, "fsdp", "--check").succeeded().stdout


def test_the_loss_over_4_bits_is_that_over_bf16_within_10_percent(trained: Trained) -> None:
    """Before a step, and after it; measured: 6% and 1.5%. Larger models lose less by four bits."""
    few = ("--max_steps=2", "--task.lora.merge=false")
    in_bf16: Any = {"launcher_arguments": ("--mixed_precision=bf16",)}
    bf16, nf4 = (
        trained("chat", "alone", *few, f"--task.lora.base_dtype={dtype}", **in_bf16) for dtype in ("bf16", "nf4")
    )
    assert nf4.losses != bf16.losses
    assert nf4.losses == pytest.approx(bf16.losses, rel=0.1)


def test_what_is_exported_is_what_transformers_and_peft_compute(chat: Run) -> None:
    """The logits of peft's model, of transformers' with the adapters, and of the merged model. Sums of 576 to 1,536
    products of fp32 in 30 layers differ by some 1e-6 of the largest; merged weights by as much."""
    folder = chat.folder / "model"
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    asking = [{"role": "user", "content": QUESTION}]
    tokens = tokenizer.apply_chat_template(asking, add_generation_prompt=True, return_tensors="pt")["input_ids"]
    auto: Any = AutoModelForCausalLM
    models = [
        PeftModel.from_pretrained(auto.from_pretrained(SMOLLM2, dtype=torch.float32), folder),
        auto.from_pretrained(folder, dtype=torch.float32),
        auto.from_pretrained(folder / "merged", dtype=torch.float32),
    ]
    with torch.no_grad():
        first, *others = (model(tokens).logits for model in models)
        base = auto.from_pretrained(SMOLLM2, dtype=torch.float32)(tokens).logits
    assert (base - first).abs().max() > 0.1
    for logits in others:
        assert (logits - first).abs().max() < 1e-4 * first.abs().max()


def test_its_greedy_answer_is_that_of_transformers(  # room: tools
    chat: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Token by token, tuned and as it came."""
    seen: list[int] = []

    class Streamer(transformers.TextStreamer):
        def put(self, value: torch.Tensor) -> None:
            seen.extend(value.flatten().tolist())
            super().put(value)

    monkeypatch.setattr("src.tools.generate.TextStreamer", Streamer)
    for source in (chat.folder / "model", SMOLLM2):
        tokenizer: Any = AutoTokenizer.from_pretrained(source)
        asking = [{"role": "user", "content": QUESTION}]
        asked = tokenizer.apply_chat_template(asking, add_generation_prompt=True, return_tensors="pt", return_dict=True)
        auto: Any = AutoModelForCausalLM
        model = auto.from_pretrained(source, dtype=torch.float32)
        expected = model.generate(**asked, do_sample=False, max_new_tokens=30)[0].tolist()
        seen.clear()
        main([str(source), f"--prompt={QUESTION}", "--temperature=0", "--max_new_tokens=30"])
        assert seen == expected


def test_new_tokens_are_trained_and_exported(trained: Trained) -> None:
    """Their two rows have left the mean of the others, and these are as they were."""
    alone = trained("chat with new tokens")
    auto: Any = AutoModelForCausalLM
    folders = (SMOLLM2, alone.folder / "model/merged")
    base, merged = (
        auto.from_pretrained(folder, dtype=torch.float32).get_input_embeddings().weight for folder in folders
    )
    assert merged[:-2].equal(base)
    assert ((merged[-2:] - base.mean(0)).abs().amax(1) > 1e-3).all()  # three steps of up to 2.5e-3
    tokenizer: Any = AutoTokenizer.from_pretrained(alone.folder / "model")
    assert tokenizer.convert_tokens_to_ids(["<|fact|>", "<|end|>"]) == [49152, 49153]
