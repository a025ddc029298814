"""A pretrained model of any of 16 kinds, however it is stored, has the loss that transformers gives it, on one process,
under DDP and FSDP; or all of them refuse it in the same line.

The processes that are compared are started under an accelerate yaml with this file as their script.
"""

import json
import shutil
import sys
from collections.abc import Callable
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.utils import FullyShardedDataParallelPlugin, compare_versions
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, BitsAndBytesConfig, Llama4ForConditionalGeneration
from transformers.utils.quantization_config import Mxfp4Config

from src.config.config import config_from
from src.config.errors import UserError
from src.distributed.accelerator import RunSetup, build_accelerator
from src.tasks import TASKS
from src.tasks.base import TaskState, Tensors
from src.tasks.text import load
from src.tasks.text.text_classification import TextClassification
from src.tasks.text.tokenizing import byte_tokenizer
from src.training.run import begin_task, prepare_model
from src.training.state import ResumePoint
from tests.launching import Launch
from tests.text import tiny

Change = Callable[[Tensors], Tensors]
TOKENS = torch.randint(256, (2, 24), generator=torch.Generator().manual_seed(0))
"""A row for each of two processes."""
WIDE = tiny.LLAMA | {"initializer_range": 0.1}  # so that a loss shows what the weights are
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", WIDE),
    "tied": ("llama", WIDE | {"tie_word_embeddings": True}),
    "with biases": ("qwen2", WIDE),
    "experts": ("mixtral", WIDE | EXPERTS),
    "fused experts": ("qwen3_moe", WIDE | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}),
    "windows": ("gemma3_text", WIDE | {"head_dim": 8, "sliding_window": 8}),
    "fused projections": ("phi3", WIDE | {"pad_token_id": 0}),
    "a head with a bias": ("phi", WIDE),
    "learnt positions": ("gpt2", {"n_embd": 32, "n_layer": 2, "n_head": 4, "initializer_range": 0.1}),
    "shared norms": ("cohere", WIDE),
    "scaled": ("granite", WIDE | {"logits_scaling": 3.0}),
    "post-norms": ("olmo2", WIDE),
    "rotated in part": ("glm", WIDE | {"head_dim": 8}),
    "without positions": ("smollm3", WIDE),
    "parallel": ("gpt_neox", {name: value for name, value in WIDE.items() if name != "num_key_value_heads"}),
    "sinks": ("gpt_oss", WIDE | EXPERTS | {"head_dim": 8, "intermediate_size": 32}),
}
FIRST = "model.layers.0.mlp.down_proj.weight"


# ------------------------------------------------------------------------------------------------------------- models
def to_fp8(scale_name: str, shape: tuple[int, ...]) -> Change:
    """Store linear layers as fp8, each with a scale of this name and shape."""

    def change(weights: Tensors) -> Tensors:
        stored = dict(weights)
        for name, weight in weights.items():
            if "proj" in name:
                scale = weight.abs().max() / 448
                stored |= {name: (weight / scale).to(torch.float8_e4m3fn), f"{name}{scale_name}": scale.expand(shape)}
        return stored

    return change


def to_mxfp4(weights: Tensors) -> Tensors:
    """Store experts as mxfp4: blocks of 32 numbers, two in a byte, and the exponent of each block's scale."""
    stored = dict(weights)
    halves = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    values = torch.cat([halves, -halves])  # of the 16 numbers of four bits
    for name in [name for name in weights if name.endswith("_proj") and "experts" in name]:
        blocks = stored.pop(name).transpose(1, 2).unflatten(-1, (-1, 32))
        digits = ((blocks / 2.0**-4)[..., None] - values).abs().argmin(-1).to(torch.uint8)
        stored[f"{name}_blocks"] = digits[..., ::2] | digits[..., 1::2] << 4
        stored[f"{name}_scales"] = torch.full(blocks.shape[:-1], 127 - 4, dtype=torch.uint8)
    return stored


def with_more(*names: str) -> Change:
    return lambda weights: weights | {name: torch.zeros(32) for name in names}


def without(name: str, change: Change = dict) -> Change:
    return lambda weights: {other: weight for other, weight in change(weights).items() if not other.endswith(name)}


def with_head(weights: Tensors) -> Tensors:
    head = torch.randn(258, 32, generator=torch.Generator().manual_seed(1)) / 10
    return weights | {"lm_head.weight": head}


def with_same_head(weights: Tensors) -> Tensors:
    return weights | {"lm_head.weight": weights["model.embed_tokens.weight"].clone()}


BLOCKS = {"quant_method": "fp8", "weight_block_size": [128, 128], "modules_to_not_convert": ["lm_head"]}
COPIES: dict[str, tuple[str, Change, dict[str, Any]]] = {
    "fp8": ("128 wide", to_fp8("_scale_inv", (1, 1)), {"quantization_config": BLOCKS}),
    "mxfp4": ("sinks", to_mxfp4, {"quantization_config": {"quant_method": "mxfp4"}}),
    "tied but for its head": ("tied", with_head, {}),
    "tied, with the same head twice": ("tied", with_same_head, {}),
    "old buffers": ("llama", with_more("model.layers.0.self_attn.rotary_emb.inv_freq"), {}),
    "old masks": ("learnt positions", with_more("transformer.h.1.attn.masked_bias", "transformer.h.1.attn.bias"), {}),
    "modelopt": ("128 wide", to_fp8("_scale", (1,)), {"quantization_config": {"quant_method": "modelopt"}}),
    "fp8 without a word": ("128 wide", to_fp8("_scale", (1,)), {}),
    "fp8 without scales": ("128 wide", without("_scale", to_fp8("_scale", (1,))), {}),
    "fp8, a scale lost": ("fp8", without(f"{FIRST}_scale_inv"), {}),
    "fewer layers": ("llama", dict, {"num_hidden_layers": 1}),
    "more layers": ("llama", dict, {"num_hidden_layers": 3}),
    "more biases": ("llama", with_more("model.layers.1.self_attn.q_proj.bias"), {}),
    "another head": ("llama", with_more("v_head.weight"), {}),
}
"""Models that are copied from others, with changes to their weights and to their config."""
NOT_ITS = "task.model={}: not a checkpoint of LlamaForCausalLM: weights "
IGNORED = f"{NOT_ITS}have no place in it, and would be ignored: *: "
QUANTIZED = f"{NOT_ITS}are quantized, but nothing says how: "
REFUSED = {
    "modelopt": "task.model={}: cannot be loaded: its weights are quantized (modelopt): use the model that they were *",
    "fp8 without a word": f"{QUANTIZED}{FIRST}, *\n{IGNORED}{FIRST}_scale, *",
    "fp8 without scales": f"{QUANTIZED}{FIRST}, *",
    "fp8, a scale lost": f"{QUANTIZED}{FIRST}",
    "fewer layers": f"{IGNORED}model.layers.1.input_layernorm.weight, *",
    "more layers": f"{NOT_ITS}are missing or have another shape: model.layers.2.input_layernorm.weight, *",
    "more biases": f"{IGNORED}model.layers.1.self_attn.q_proj.bias",
    "another head": f"{IGNORED}v_head.weight",
    "4 bits": "task.model={}: its weights are in 4 bits: train adapters (lora.r, base_dtype=nf4; no olora) *",
}
"""Patterns of what they are refused with, a line for each mistake."""
needs_quantization = pytest.mark.skipif(
    compare_versions("transformers", "<", "5.24"), reason="before transformers 5.24, quantized weights are refused"
)
ADAPTED = ("llama", "tied", "experts", "fp8", "tied but for its head")
"""Models that get new adapters too, which change nothing."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with one model of each kind and of each way to store it."""
    folder = tmp_path_factory.mktemp("models")
    for name, (kind, fields) in KINDS.items():
        tiny.saved(kind, folder / name, **fields)
    tiny.saved("llama", folder / "in bf16, in several files", torch.bfloat16, "20KB", **WIDE)
    tiny.saved("llama", folder / "128 wide", **WIDE | {"hidden_size": 128, "intermediate_size": 128})
    for name, (of, change, config) in COPIES.items():
        shutil.copytree(folder / of, folder / name)
        file = folder / name / "model.safetensors"
        weights = {name: weight.contiguous() for name, weight in change(load_file(file)).items()}
        save_file(weights, file, {"format": "pt"})
        tiny.write({str(folder / name / "config.json"): config})
    shutil.copytree(folder / "128 wide", folder / "4 bits")
    four_bits = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
    model: Any = AutoModelForCausalLM.from_pretrained(folder / "128 wide", quantization_config=four_bits)
    model.save_pretrained(folder / "4 bits")
    return folder


def decoder(model: Path, **settings: Any) -> Any:
    return tiny.task(model=str(model), dataset="team/none", sequence_length=16, packing=False, **settings)


def plain_loss(path: Path) -> float:
    """Return the mean over all next tokens, as transformers computes it."""
    options = {"quantization_config": Mxfp4Config(dequantize=True)} if path.name == "mxfp4" else {}
    model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, **options)
    with torch.no_grad():
        return model(input_ids=TOKENS, labels=TOKENS).loss.item()


# -------------------------------------------------------------------------------------------------------------- tests
@needs_quantization
def test_the_first_loss_is_transformers_own_or_one_line_refuses(launch: Launch, folder: Path) -> None:
    losses = {}
    for yaml, processes in (("cpu", 1), ("ddp", 2), ("fsdp", 2)):
        run = launch(yaml, str(folder), script="tests/text/test_pretrained.py", processes=processes).succeeded()
        losses[yaml] = json.loads(run.stdout.splitlines()[-1])
    found: dict[str, list[Any]] = {name: [of[name] for of in losses.values()] for name in losses["cpu"]}
    expected = {path.name: plain_loss(path) for path in folder.iterdir() if path.name not in REFUSED}
    assert len(expected) == 24
    for name, values in found.items():
        if name in REFUSED:
            pattern = REFUSED[name].replace("{}", str(folder / name))
            assert len({*values}) == 1
            assert fnmatchcase(values[0], pattern), values[0]
            assert values[0].count("\n") == pattern.count("\n")
        else:  # in sums of up to 2**10 products in fp32, rounding accumulates to a few units of 2**-24
            assert values == pytest.approx([expected[name.removesuffix(", adapters")]] * 3, rel=1e-6), name
    assert expected["mxfp4"] == pytest.approx(expected["sinks"], rel=0.05)
    assert expected["fp8"] == pytest.approx(expected["128 wide"], rel=3e-3)


def test_weights_that_are_not_used_are_noted(folder: Path, tmp_path: Path) -> None:
    """Such as the head that a classifier replaces, and what a multimodal model has for pictures."""
    text = WIDE | EXPERTS | {"vocab_size": 258, "head_dim": 8, "intermediate_size_mlp": 64, "pad_token_id": 0}
    vision = {"hidden_size": 32, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 4,
              "image_size": 28, "patch_size": 14, "vision_output_dim": 32, "projector_input_dim": 32,
              "projector_output_dim": 32}  # fmt: skip
    sizes: Any = {"text_config": text | {"bos_token_id": None, "eos_token_id": None}, "vision_config": vision}
    config: Any = AutoConfig.for_model("llama4", **sizes)
    Llama4ForConditionalGeneration(config).save_pretrained(tmp_path / "llama4")
    byte_tokenizer().save_pretrained(tmp_path / "llama4")
    classifier = tiny.task(TextClassification, dataset="team/none", model=str(folder / "llama"))
    classifier.state.data["labels"] = ["a", "b"]
    for task, names in (
        (classifier, "lm_head.weight"),
        (decoder(tmp_path / "llama4"), "multi_modal_projector.linear_1.weight, vision_model.class_embedding, "),
    ):
        task.load_model()
        (remark,) = task.state.remarks
        assert remark.startswith(f"{task.model} has weights that are not used: {names}")


@needs_quantization
@pytest.mark.parametrize(
    ("name", "lora", "place", "within"),
    [
        ("fp8", {}, "", 0.0),
        ("tied but for its head", {}, "", 0.0),
        ("4 bits", {"r": 2, "merge": True}, "merged", 2**-8),  # what 4 bits stand for is rounded to bf16
    ],
)
def test_the_export_has_the_loss_of_what_was_loaded(
    folder: Path, tmp_path: Path, name: str, lora: dict[str, Any], place: str, within: float
) -> None:
    """Whatever the config said of its weights, they are plain, and the head is not tied to other ones."""
    dtype = torch.bfloat16 if lora else torch.float32
    task = decoder(folder / name, lora=lora).bind(TaskState(dtype=dtype))
    model = task.build_model()
    task.export(model, model.state_dict(), tmp_path)
    config = json.loads((tmp_path / place / "config.json").read_text())
    assert "quantization_config" not in config
    assert not config["tie_word_embeddings"]
    assert plain_loss(tmp_path / place) == pytest.approx(plain_loss(folder / name), rel=within, abs=0)
    compute_dtypes = {layer.compute_dtype for layer in model.modules() if hasattr(layer, "compute_dtype")}
    assert compute_dtypes == ({torch.bfloat16} if lora else set())


def test_quantized_weights_are_refused_by_a_transformers_that_exports_others(
    monkeypatch: pytest.MonkeyPatch, folder: Path
) -> None:
    monkeypatch.setattr(load, "compare_versions", lambda *_: True)
    line = f"^task.model={folder / 'fp8'}: cannot be loaded: its weights are quantized, which needs transformers 5.24"
    with pytest.raises(UserError, match=line):
        decoder(folder / "fp8").bind(TaskState()).build_model()
    decoder(folder / "llama").bind(TaskState()).build_model()


@needs_quantization
@pytest.mark.parametrize(
    ("name", "lora", "reason"),
    [
        ("4 bits", {"base_dtype": "bf16"}, "its weights are in 4 bits: train adapters"),
        ("4 bits", {"options": {"init_lora_weights": "olora"}}, "its weights are in 4 bits: train adapters"),
        ("fp8", {"base_dtype": "nf4"}, "cannot be loaded: The model is quantized with FineGrainedFP8Config"),
    ],
)
def test_another_quantization_than_the_files_is_refused(
    folder: Path, name: str, lora: dict[str, Any], reason: str
) -> None:
    """OLoRA would quantize what it leaves of the weights once more."""
    task = decoder(folder / name, lora={"r": 2, **lora})
    with pytest.raises(UserError, match=f"^task.model={folder / name}: {reason}"):
        task.bind(TaskState(dtype=torch.bfloat16)).build_model()


# ----------------------------------------------------------------------------------------------------- in the processes
def first_loss(accelerator: Accelerator, launch: RunSetup, task: dict[str, Any]) -> float | str:
    """Return the loss as a run would compute it, over all processes; or why there is none."""
    if accelerator.is_fsdp2:
        accelerator.state.fsdp_plugin = FullyShardedDataParallelPlugin()  # it remembers the last model's blocks
    try:
        config = begin_task(config_from({"task": task}, TASKS), launch, ResumePoint())
        model, _ = prepare_model(config, accelerator, launch)
    except UserError as error:
        return str(error)
    rows = TOKENS[accelerator.process_index :: accelerator.num_processes]
    index = torch.arange(rows.numel()).view_as(rows)[:, :-1].flatten()
    positions = torch.arange(rows.shape[1]).expand_as(rows)
    loss = model(index=index, targets=rows[:, 1:].flatten(), input_ids=rows, position_ids=positions)
    return accelerator.reduce(loss.detach().double()).item() / TOKENS[:, 1:].numel()


def main(models: str) -> None:
    accelerator, launch = build_accelerator(config_from({"task": {"name": "mnist"}}, TASKS))
    found: dict[str, float | str] = {}
    for folder in sorted(Path(models).iterdir()):
        task: dict[str, Any] = {"name": "causal_lm", "dataset": "team/none", "model": str(folder), "dropout": 0.0,
                                "sequence_length": 32, "packing": False}  # fmt: skip
        found[folder.name] = first_loss(accelerator, launch, task)
        if folder.name in ADAPTED:
            found[f"{folder.name}, adapters"] = first_loss(accelerator, launch, task | {"lora": {"r": 2}})
    accelerator.print(json.dumps(found))
    accelerator.wait_for_everyone()
    accelerator.end_training()


if __name__ == "__main__":
    main(*sys.argv[1:])
