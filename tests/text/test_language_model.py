"""Any decoder of transformers as the loop calls it: documents of a row stay apart, with masks or with varlen attention
(whose kernel is a stand-in); the loss is exact, in little memory; and model FLOPs match torch's count."""

import copy
from functools import partial
from operator import mul
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM

from src.config.errors import UserError
from src.tasks.base import TaskState
from src.tasks.text import attention, loss, sequences
from src.tasks.text.adapters import add_adapters
from src.tasks.text.loss import LanguageModel, linear_cross_entropy
from src.tasks.text.settings import Lora
from src.tasks.text.trial import require_decoder, unsupported_reason
from src.training.transforms import checkpoint_and_compile
from tests.launching import mistakes, slow
from tests.text import tiny

HALF, FULL = torch.bfloat16, torch.float32
SPECIAL = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
SMALL: dict[str, Any] = {**tiny.LLAMA, **SPECIAL, "vocab_size": 64, "head_dim": 8}
DECODERS: dict[str, dict[str, Any]] = {
    "gpt2": {**SPECIAL, "n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 64},
    "llama": SMALL,
    "qwen3": SMALL | {"tie_word_embeddings": True},
    "gemma2": SMALL | {"sliding_window": 4},
    "gemma3_text": SMALL | {"sliding_window": 4},
    "mistral": SMALL | {"sliding_window": 4},
    "granite": SMALL | {"logits_scaling": 3.0},
    "phi": SMALL,  # its head has a bias
}


def build(kind: str, dropout: float = 0.0, **fields: Any) -> LanguageModel:
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **DECODERS.get(kind, {}) | fields)
    if kind == "gpt2":
        config.resid_pdrop = config.embd_pdrop = config.attn_pdrop = dropout
    return LanguageModel(AutoModelForCausalLM.from_config(config, dtype=torch.float32))


def batch() -> dict[str, Tensor]:
    """Return a row of three documents, of which every third token has no target."""
    draw = torch.Generator().manual_seed(1)
    index = torch.tensor([i for i in range(24) if i % 3])
    tokens, targets = (torch.randint(1, 64, shape, generator=draw) for shape in ((1, 24), index.shape))
    return {"input_ids": tokens, "position_ids": torch.arange(8).repeat(3)[None], "index": index, "targets": targets}


def trained(model: torch.nn.Module) -> list[Tensor]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def gradients(model: LanguageModel, inputs: dict[str, Tensor]) -> tuple[Tensor, list[Tensor]]:
    torch.manual_seed(2)  # the same dropout
    total = model(**inputs)
    return total.detach(), list(torch.autograd.grad(total, trained(model)))


def transformed(model: torch.nn.Module, **settings: bool) -> None:
    """Transform a model in place as train.py does."""
    off = dict.fromkeys(("compile", "activation_checkpointing", "activation_offload", "cuda_graphs"), False)
    config: Any = SimpleNamespace(**(off | settings), forward_batch_size=lambda processes: 1)
    accelerator = SimpleNamespace(num_processes=1, torch_device_mesh=None, device=torch.device("cpu"))
    checkpoint_and_compile(model, config, accelerator)


# -------------------------------------------------------------------------------------------------- loss and memory
@pytest.mark.parametrize("kind", [*DECODERS, "a head with adapters"])
@pytest.mark.parametrize("chunk", [64 * 5, 2**24])  # five tokens at once; all
def test_the_loss_is_that_of_the_models_logits_computed_in_chunks(
    monkeypatch: pytest.MonkeyPatch, kind: str, chunk: int
) -> None:
    monkeypatch.setattr(loss, "CHUNK", chunk)
    computed: list[Tensor] = []
    model = build("llama" if "adapters" in kind else kind)
    if "adapters" in kind:
        model = LanguageModel(add_adapters(Lora(r=2, target_modules=["q_proj", "lm_head"]), model.hf))
    for name, parameter in model.named_parameters():
        if "lora" in name or "bias" in name:  # they begin with zeros
            torch.nn.init.normal_(parameter, std=0.1)
    inputs = batch()
    logits = model.lm(input_ids=inputs["input_ids"], position_ids=inputs["position_ids"], use_cache=False).logits
    logits = logits[0][inputs["index"]]
    each = F.cross_entropy(logits, inputs["targets"], reduction="none")
    cross_entropy = F.cross_entropy

    def recorded(logits: Tensor, *arguments: Any, **options: Any) -> Tensor:
        computed.append(logits)
        return cross_entropy(logits, *arguments, **options)

    monkeypatch.setattr(F, "cross_entropy", recorded)
    total, found = gradients(model, inputs)
    assert kind in ("phi", "a head with adapters") or max(map(torch.numel, computed)) <= chunk
    torch.testing.assert_close(total, each.sum(), rtol=1e-6, atol=0)
    for gradient, other in zip(found, torch.autograd.grad(each.sum(), trained(model)), strict=True):
        torch.testing.assert_close(gradient, other, rtol=1e-4, atol=1e-5)
    nats, correct = model(**inputs, is_scoring=True)
    torch.testing.assert_close(nats, each, rtol=1e-5, atol=1e-6)
    assert correct.equal((logits.argmax(1) == inputs["targets"]).float())


@pytest.mark.parametrize("chunks", [1, 19, 64])
@pytest.mark.parametrize(("is_autocast", "bound"), [(True, 1e-3), (False, 2e-3)])
def test_in_bf16_gradients_are_those_of_fp32_in_any_chunks(is_autocast: bool, bound: float, chunks: int) -> None:
    """They are 4e-4 off; FSDP's are in bf16, which alone makes 1.7e-3."""
    torch.manual_seed(0)
    dtype = FULL if is_autocast else HALF
    drawn = torch.randn(1216, 128), torch.randn(2048, 128) / 16
    states, weight = (tensor.to(dtype).requires_grad_() for tensor in drawn)
    targets = torch.randint(0, 2048, (1216,))
    rounded = [tensor.detach().bfloat16().float().requires_grad_() for tensor in (states, weight)]
    expected = F.cross_entropy(F.linear(*rounded), targets, reduction="sum")
    expected.backward()
    with torch.autocast("cpu", HALF, enabled=is_autocast):
        total = linear_cross_entropy(states, weight, targets, lambda logits: logits, 1216 // chunks)
    total.backward()
    torch.testing.assert_close(total, expected, rtol=1e-6, atol=0)
    pairs: Any = zip((states.grad, weight.grad), (tensor.grad for tensor in rounded), strict=True)
    for found, wanted in pairs:
        assert (found.float() - wanted).norm() / wanted.norm() < bound


# ---------------------------------------------------------------------------------- recomputed and compiled blocks
@pytest.mark.filterwarnings("default")  # the compiler sets its own aside, unless they are errors
@pytest.mark.parametrize("compiled", [False, slow(True)])
def test_recomputed_activations_use_the_same_dropout(monkeypatch: pytest.MonkeyPatch, compiled: bool) -> None:
    """The loss falls along its gradients by what they say; with other masks, by 0.57 of that."""
    monkeypatch.setenv("TORCHINDUCTOR_DEBUG_COMPILE", "1")  # compiles without optimizing, in half the time
    model = build("gpt2", dropout=0.5, n_layer=3)
    transformed(model, compile=compiled, activation_checkpointing=True)
    _, found = gradients(model, batch())
    step = 0.05 / sum(gradient.square().sum().item() for gradient in found)
    losses = []
    for steps in (1, -2):  # to either side
        with torch.no_grad():
            for parameter, gradient in zip(model.parameters(), found, strict=True):
                parameter.add_(gradient, alpha=steps * step)
        losses.append(gradients(model, batch())[0].item())
    assert losses[0] - losses[1] == pytest.approx(2 * 0.05, rel=0.01)


@pytest.mark.parametrize("kind", DECODERS)
def test_only_the_inputs_of_blocks_go_to_the_host(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """Once each, and no mask; copies of them make the same gradients, to the bit, with dropout."""
    moved: list[Tensor] = []

    def to_host(tensor: Tensor) -> Tensor:
        if tensor.numel():  # torch 2.11 also keeps an empty one
            moved.append(tensor)
        return tensor.clone()

    hooks = partial(saved_tensors_hooks, to_host, Tensor.clone)
    monkeypatch.setattr(torch.autograd.graph, "save_on_cpu", lambda pin_memory: hooks())
    found = []
    for is_offloaded in (False, True):
        torch.manual_seed(0)
        model = build(kind, **{"dropout": 0.5} if kind == "gpt2" else {}).train()
        transformed(model, activation_checkpointing=True, activation_offload=is_offloaded)
        total, each = gradients(model, batch())
        found.append([total, *each])
    for plain, offloaded in zip(*found, strict=True):
        assert plain.equal(offloaded)
    assert {tensor.shape for tensor in moved} == {(1, 24, 32)}
    assert len(moved) == model.hf.config.num_hidden_layers


def test_offloading_what_is_not_kept_is_refused() -> None:
    for more in ("", "--activation_checkpointing=true --compile=true"):
        (line,) = mistakes("--activation_offload=true", *more.split())
        assert line == "activation_offload=true needs activation_checkpointing=true, and compile=false"


# ------------------------------------------------------------------------------------------------------ model FLOPs
def counted(model: LanguageModel, length: int) -> tuple[int, float]:
    """Return torch's count of a step, and ours of all pairs of tokens, as torch computes what a mask hides."""
    tokens, positions = torch.randint(64, (2, length)), torch.arange(length).expand(2, -1)
    index = torch.tensor([i for i in range(2 * length) if i % 3])
    model.hf.set_attn_implementation("eager")
    with FlopCounterMode(display=False) as counter:
        model(tokens, positions, index, index % 64).backward()
    assert model.flops
    return counter.get_total_flops(), sum(map(mul, model.flops, (2 * length, len(index), 2 * length**2)))


@pytest.mark.parametrize("length", [8, 128])  # most are in matrices; in attention
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_model_flops_are_those_that_torch_counts(kind: str, length: int) -> None:
    torchs, ours = counted(build(kind), length)
    # until version 5.20 or so, transformers computed Llama's rotary angles by a product of matrices: 2 sequences of
    # positions, (length, 1), by the frequencies of half a head, (1, 4)
    rotary = 2 * 2 * length * 1 * 4 if kind == "llama" else 0
    assert ours in (pytest.approx(torchs, rel=1e-6), pytest.approx(torchs - rotary, rel=1e-6))


def test_model_flops_leave_out_gradients_of_frozen_weights() -> None:
    lm = add_adapters(Lora(r=4), build("llama", num_hidden_layers=16).hf)
    torchs, ours = counted(LanguageModel(lm), 16)
    assert ours == pytest.approx(torchs, rel=0.02)  # that of the first layer's input is counted too


@pytest.mark.parametrize("kind", ["mamba", "lfm2", "gemma3_text", "mixtral"])  # states, convolutions, windows, experts
def test_models_of_other_layers_have_no_count_of_flops(kind: str) -> None:
    fields: dict[str, Any] = {"layer_types": ["conv", "full_attention"]} if kind == "lfm2" else {}
    assert build(kind, **SMALL | {"hidden_size": 64} | fields).flops is None


# ---------------------------------------------------------------------------------------------------- varlen attention
def kernel(
    query: Tensor, key: Tensor, value: Tensor, cu_seq_q: Tensor, cu_seq_k: Tensor, max_q: int, max_k: int, *,
    scale: float | None = None, window_size: tuple[int, int] = (-1, -1), enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    """Return what torch's varlen_attn computes."""
    assert cu_seq_q.dtype == cu_seq_k.dtype == torch.int32
    assert int(cu_seq_q.diff().max()) <= max_q == max_k
    documents = torch.bucketize(torch.arange(len(query)), cu_seq_q, right=True)
    behind = torch.arange(len(query))[:, None] - torch.arange(len(query))
    mask = (documents[:, None] == documents) & (behind >= 0) & ((behind <= window_size[0]) | (window_size[0] < 0))
    q, k, v = (t.transpose(0, 1) for t in (query, key, value))
    is_grouped = enable_gqa or not attention.HAS_GQA_SWITCH  # torch 2.11's kernel takes fewer heads of keys unasked
    return F.scaled_dot_product_attention(q, k, v, mask, scale=scale, enable_gqa=is_grouped).transpose(0, 1)


def mixing(query: Tensor, key: Tensor, value: Tensor, *_: Any, **options: Any) -> Tensor:
    """Take each row for a single document, as transformers' flash attention does if it isn't told of them."""
    rows = torch.tensor([0, len(query) // 2, len(query)], dtype=torch.int32)
    return kernel(query, key, value, rows, rows, len(query), len(query), **options)


def unwindowed(*tensors: Any, window_size: tuple[int, int], **options: Any) -> Tensor:
    return kernel(*tensors, window_size=(-1, 0), **options)


@pytest.fixture(autouse=True)
def _kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Put the stand-in in the place of torch's kernel."""
    monkeypatch.setattr(attention, "varlen_attn", kernel)


def collated(*rows: list[int]) -> dict[str, Any]:
    """Return the model's inputs for rows of documents with these lengths."""
    draw = np.random.default_rng(0)

    def chunk(size: int) -> dict[str, Any]:
        ids, labels = draw.integers(1, 64, (2, size), dtype=np.int32)
        return {"input_ids": ids, "labels": np.where(np.arange(size) % 3, labels, -100)}

    return tiny.task(sequence_length=24).collate([[chunk(size) for size in row] for row in rows])["inputs"]


@pytest.mark.parametrize("kind", ["llama", "qwen3", "gpt2", "mistral", "gemma3_text"])
def test_varlen_attention_has_the_loss_and_gradients_of_masked(kind: str) -> None:
    inputs = collated([5, 9, 7], [16, 8], [1])  # with padding, none, and much
    masked = build(kind, vocab_size=300)
    expected, wanted = gradients(masked, inputs)
    model = LanguageModel(copy.deepcopy(masked.lm), "varlen")
    total, found = gradients(model, inputs)
    torch.testing.assert_close(total, expected, rtol=1e-5, atol=0)
    for gradient, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(gradient, other, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(model(**inputs, is_scoring=True)[0].sum(), expected, rtol=1e-5, atol=0)


def refusal(kind: str, dtype: torch.dtype = FULL, **fields: Any) -> str:
    return str(unsupported_reason(AutoConfig.for_model(kind, **fields), "varlen", True, "cpu", dtype))


def test_varlen_is_refused_for_what_its_kernel_lacks() -> None:
    assert "varlen attention does not support softcap" in refusal("gemma2")
    assert "varlen attention does not support s_aux" in refusal("gpt_oss")  # sinks
    assert "varlen attention does not support dropout" in refusal("llama", attention_dropout=0.1)
    assert "logits differ by" in refusal("bloom")  # its class has attention of its own


@pytest.mark.parametrize("kind", ["llama", "gemma3_text"])
@pytest.mark.parametrize("dtype", [FULL, HALF, torch.float16])
def test_varlen_is_used_only_if_documents_stay_apart(
    monkeypatch: pytest.MonkeyPatch, kind: str, dtype: torch.dtype
) -> None:
    assert refusal(kind, dtype) == "None"
    for wrong in [mixing, *([unwindowed] if kind == "gemma3_text" else [])]:
        monkeypatch.setattr(attention, "varlen_attn", wrong)
        assert "logits differ by" in refusal(kind, dtype)


@pytest.mark.parametrize(
    ("settings", "device", "dtype", "reason", "chosen"),
    [
        ({}, "cuda", HALF, None, "varlen attention"),
        ({}, "cuda", HALF, "why", "sdpa attention (not varlen: why)"),
        ({}, "cuda", FULL, None, "sdpa attention"),
        ({}, "cpu", HALF, None, "sdpa attention"),
        ({"packing": False}, "cuda", HALF, None, "sdpa attention"),
        ({"attention": "sdpa"}, "cuda", HALF, None, "sdpa attention"),
    ],
)
def test_attention_is_chosen_by_device_dtype_packing_and_a_trial(
    monkeypatch: pytest.MonkeyPatch, settings: Any, device: str, dtype: torch.dtype, reason: str | None, chosen: str
) -> None:
    monkeypatch.setattr(sequences, "unsupported_reason", lambda *_: reason)
    torch.backends.cuda.enable_cudnn_sdp(True)
    task = tiny.task(**settings).bind(TaskState(device, dtype))
    assert task.build_model().hf.config._attn_implementation == chosen.split()[0]
    assert task.state.optimizations == [chosen]
    assert not torch.backends.cuda.cudnn_sdp_enabled()  # under a mask, cuDNN's gradients may be NaN


def test_an_export_names_no_attention_that_others_lack(tmp_path: Path) -> None:
    model = LanguageModel(build("mistral").lm, "varlen")
    assert model.hf.config._attn_implementation == "varlen"
    model.hf.save_pretrained(tmp_path)
    assert "varlen" not in (tmp_path / "config.json").read_text()


# ----------------------------------------------------------------------------------------- models that are refused
@pytest.mark.parametrize(
    ("kind", "says"), [("opt", "its logits differ by"), ("mamba", "its logits .* try --task.packing=false")]
)
def test_a_model_that_reads_documents_otherwise_is_refused(kind: str, says: str) -> None:
    with pytest.raises(UserError, match=f"^{kind} cannot be trained here: {says}"):
        require_decoder(AutoConfig.for_model(kind), packing=True, sequence_length=8)
    require_decoder(AutoConfig.for_model("mamba"), packing=False, sequence_length=8)


@pytest.mark.parametrize("packing", [True, False])
def test_long_documents_that_change_those_beside_them_are_refused(packing: bool) -> None:
    """Rotary embeddings of longrope change above the original length, in a row or in a batch; yarn's never do."""
    extended = {"original_max_position_embeddings": 64, "rope_theta": 1e4, "factor": 4.0}
    longrope = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [1.1, 4.0, 20.0, 60.0]}
    phi3 = AutoConfig.for_model("phi3", **SMALL, rope_parameters=extended | longrope, max_position_embeddings=256)
    phi3.original_max_position_embeddings = 64
    with pytest.raises(UserError, match=r"^phi3 cannot be trained here: .*\(longer .*try --task.sequence_length=64\)$"):
        require_decoder(phi3, packing, sequence_length=65)
    require_decoder(phi3, packing, sequence_length=64)
    yarn = AutoConfig.for_model("llama", **SMALL, rope_parameters=extended | {"rope_type": "yarn"})
    require_decoder(yarn, packing, sequence_length=256)
