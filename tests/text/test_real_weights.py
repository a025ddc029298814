"""The chat model of `make chat` with its real weights, from the package that has them: the promises on a model that
has learned something. Skipped where the package index cannot be reached."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from filelock import FileLock
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from examples.weights import MODELS, WEIGHTS, fetch
from src.config.errors import UserError
from src.tools.generate import main  # room: generate
from tests.faults.runs import assert_equal, curve, cut_back, whole_tensors
from tests.launching import PROJECT, Launch, Run, Whole, needs

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),  # in this process, to read
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning"),  # as in lora.py
]
STEPS = (
    "--max_steps=10", "--save_every=5", "--log_every=1", "--global_batch_size=2", "--task.sequence_length=96",
    "--task.lora.merge=true", "--optim.warmup_steps=0", "--optim.schedule=constant",
)  # fmt: skip
QUESTION = "What does --check do?"


@pytest.fixture(scope="session")
def smollm2(made: Path) -> Path:
    """SmolLM2-135M-Instruct, where `make chat` keeps it."""
    weights = WEIGHTS["chat"]
    folder = PROJECT / MODELS / Path(weights.name).name
    with FileLock(made / "smollm2.lock"):  # others of pytest's processes may want it too
        if not folder.exists():
            try:
                fetch(weights, folder)
            except UserError as error:
                pytest.skip(str(error))
    return folder


@pytest.fixture(scope="session")
def arguments(smollm2: Path) -> tuple[str, ...]:
    """Of ten steps as `make chat` takes them, on fewer tokens."""
    config = PROJECT / "configs/chat_lora.yaml"
    return ("--task.name=causal_lm", f"--config={config}", f"--task.model={smollm2}", "--task.questions=null", *STEPS)


@pytest.fixture
def trained(whole: Whole, arguments: tuple[str, ...]) -> Run:
    return whole("cpu", *arguments)


@pytest.mark.parametrize("yaml", ["ddp", "fsdp"])
def test_two_processes_see_the_curve_of_one(whole: Whole, trained: Run, arguments: tuple[str, ...], yaml: str) -> None:
    """Within the promised 1e-5."""
    run = whole(yaml, *arguments)
    assert len(trained.losses) == 10
    assert run.losses == pytest.approx(trained.losses, rel=1e-5)
    assert trained.losses[-1] < trained.losses[0] - 0.5


def test_killed_and_resumed_to_the_last_bit(
    launch: Launch, whole: Whole, arguments: tuple[str, ...], tmp_path: Path
) -> None:
    run = whole("fsdp", *arguments)
    again = launch("fsdp", *arguments, folder=cut_back(run, tmp_path / "run", 5)).succeeded()
    assert "after step 5, from" in again.stdout
    assert curve(again) == curve(run)
    last = "checkpoints/step_00000010"  # the adapters, and the optimizer's state
    assert_equal(whole_tensors(again.folder / last), whole_tensors(run.folder / last))


@needs("src/check")
def test_the_check_finds_no_fault(launch: Launch, arguments: tuple[str, ...]) -> None:
    assert "all checks passed" in launch("fsdp", "--check", *arguments).succeeded().stdout


def test_the_loss_over_4_bits_is_that_over_bf16_within_10_percent(whole: Whole, arguments: tuple[str, ...]) -> None:
    """Before a step, and after it; measured: 6% and 1.5%. Larger models lose less by four bits."""
    few = (*arguments, "--max_steps=2", "--task.lora.merge=false")
    in_bf16: Any = {"launcher_arguments": ("--mixed_precision=bf16",)}
    bf16, nf4 = (whole("cpu", *few, f"--task.lora.base_dtype={dtype}", **in_bf16) for dtype in ("bf16", "nf4"))
    assert nf4.losses != bf16.losses
    assert nf4.losses == pytest.approx(bf16.losses, rel=0.1)


def test_what_is_exported_is_what_transformers_and_peft_compute(trained: Run, smollm2: Path) -> None:
    """The logits of peft's model, of transformers' with the adapters, and of the merged model. Sums of 576 to 1,536
    products of fp32 in 30 layers differ by some 1e-6 of the largest; merged weights by as much."""
    folder = trained.folder / "model"
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    chat = [{"role": "user", "content": QUESTION}]
    tokens = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt")["input_ids"]
    auto: Any = AutoModelForCausalLM
    models = [
        PeftModel.from_pretrained(auto.from_pretrained(smollm2, dtype=torch.float32), folder),
        auto.from_pretrained(folder, dtype=torch.float32),
        auto.from_pretrained(folder / "merged", dtype=torch.float32),
    ]
    with torch.no_grad():
        first, *others = (model(tokens).logits for model in models)
        base = auto.from_pretrained(smollm2, dtype=torch.float32)(tokens).logits
    assert (base - first).abs().max() > 0.1
    for logits in others:
        assert (logits - first).abs().max() < 1e-4 * first.abs().max()


def test_its_greedy_answer_is_that_of_transformers(  # room: generate
    trained: Run, smollm2: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Token by token, tuned and as it came."""
    seen: list[int] = []

    class Streamer(transformers.TextStreamer):
        def put(self, value: torch.Tensor) -> None:
            seen.extend(value.flatten().tolist())
            super().put(value)

    monkeypatch.setattr("src.tools.generate.TextStreamer", Streamer)
    for source in (trained.folder / "model", smollm2):
        tokenizer: Any = AutoTokenizer.from_pretrained(source)
        chat = [{"role": "user", "content": QUESTION}]
        asked = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
        auto: Any = AutoModelForCausalLM
        model = auto.from_pretrained(source, dtype=torch.float32)
        expected = model.generate(**asked, do_sample=False, max_new_tokens=30)[0].tolist()
        seen.clear()
        main([str(source), f"--prompt={QUESTION}", "--temperature=0", "--max_new_tokens=30"])
        assert seen == expected


def test_new_tokens_are_trained_and_exported(whole: Whole, arguments: tuple[str, ...], smollm2: Path) -> None:
    """The same under FSDP. Their two rows have left the mean of the others, and these are as they were."""
    few = (*arguments, "--max_steps=3", "--task.new_tokens=['<|fact|>', '<|end|>']")
    alone, sharded = (whole(yaml, *few) for yaml in ("cpu", "fsdp"))
    assert sharded.losses == pytest.approx(alone.losses, rel=1e-5)
    auto: Any = AutoModelForCausalLM
    folders = (smollm2, alone.folder / "model/merged")
    base, merged = (
        auto.from_pretrained(folder, dtype=torch.float32).get_input_embeddings().weight for folder in folders
    )
    assert merged[:-2].equal(base)
    assert ((merged[-2:] - base.mean(0)).abs().amax(1) > 1e-3).all()  # three steps of up to 2.5e-3
    tokenizer: Any = AutoTokenizer.from_pretrained(alone.folder / "model")
    assert tokenizer.convert_tokens_to_ids(["<|fact|>", "<|end|>"]) == [49152, 49153]
