"""Attention without a mask keeps documents apart as the masked one does, or is not used. The kernel is a stand-in."""

import copy
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention.varlen import varlen_attn
from transformers import AutoConfig
from transformers.models.granite.modeling_granite import GraniteForCausalLM

from src.config.errors import UserError
from src.tasks.base import TaskState
from src.tasks.text import causal_lm, loss
from src.tasks.text.loss import LanguageModel, failure, require_decoder
from tests.text import tiny
from tests.text.test_language_model import SMALL, build, gradients

KINDS: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {},
    "gpt2": {},
    "mistral": SMALL | {"sliding_window": 4},
    "gemma3_text": {},  # windows in some layers
}


HALF, FULL = torch.bfloat16, torch.float32


def kernel(
    query: Tensor, key: Tensor, value: Tensor, cu_seq_q: Tensor, cu_seq_k: Tensor, max_q: int, max_k: int, *,
    scale: float | None = None, window_size: tuple[int, int] = (-1, -1), enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    """What torch's varlen_attn computes, of all documents at once."""
    assert window_size[1] == 0
    assert (cu_seq_q.dtype, cu_seq_k.dtype) == (torch.int32, torch.int32)
    assert int(cu_seq_q[-1]) == len(query)
    assert int(cu_seq_q.diff().max()) <= max_q == max_k
    places = torch.arange(len(query))
    documents = torch.bucketize(places, cu_seq_q, right=True)
    behind = places[:, None] - places
    mask = (documents[:, None] == documents) & (behind >= 0) & ((behind <= window_size[0]) | (window_size[0] < 0))
    q, k, v = (t.transpose(0, 1) for t in (query, key, value))
    is_grouped = enable_gqa or not loss.HAS_GQA_SWITCH  # torch 2.11's kernel takes fewer heads of keys unasked
    output = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=is_grouped)
    return output.transpose(0, 1)


def mixing(query: Tensor, key: Tensor, value: Tensor, *_: Any, **options: Any) -> Tensor:
    """A kernel to which each row is a single document, as to transformers' flash attention if it isn't told of them."""
    rows = torch.tensor([0, len(query) // 2, len(query)], dtype=torch.int32)
    return kernel(query, key, value, rows, rows, len(query), len(query), **options)


def unwindowed(*tensors: Any, window_size: tuple[int, int], **options: Any) -> Tensor:
    return kernel(*tensors, window_size=(-1, 0), **options)


@pytest.fixture(autouse=True)
def _kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the place of torch's."""
    monkeypatch.setattr(loss, "varlen_attn", kernel)


def collated(*rows: list[int]) -> dict[str, Any]:
    """The model's inputs for rows of documents with these lengths."""
    draw = np.random.default_rng(0)

    def chunk(size: int) -> dict[str, Any]:
        ids, labels = draw.integers(1, 64, (2, size), dtype=np.int32)
        return {"input_ids": ids, "labels": np.where(np.arange(size) % 3, labels, -100)}

    batch: Any = tiny.task(sequence_length=24).collate([[chunk(size) for size in row] for row in rows])
    return batch["inputs"]


@pytest.mark.parametrize("kind", KINDS)
def test_loss_and_gradients_are_those_of_masked_attention(kind: str) -> None:
    """Tried with windows a token wider, without `scale` (gemma3_text), and with a mask made for it all the same."""
    inputs = collated([5, 9, 7], [16, 8], [1])  # with padding, none, and much
    masked = build(kind, **KINDS[kind] | {"vocab_size": 300})
    expected, wanted = gradients(masked, inputs)
    model = LanguageModel(copy.deepcopy(masked.lm), "varlen")
    total, found = gradients(model, inputs)
    torch.testing.assert_close(total, expected, rtol=1e-5, atol=0)
    for gradient, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(gradient, other, rtol=1e-5, atol=1e-5)
    scores = model("score", **inputs)[0]
    torch.testing.assert_close(scores.sum(), expected, rtol=1e-5, atol=0)


# ------------------------------------------------------------------------------------- what it can't do it doesn't do
def refusal(kind: str, dtype: torch.dtype = torch.float32, **fields: Any) -> str:
    return str(failure(AutoConfig.for_model(kind, **fields), "varlen", True, "cpu", dtype))


def test_a_model_that_asks_for_more_than_the_kernel_has_is_refused() -> None:
    assert "varlen attention does not support softcap" in refusal("gemma2")
    assert "varlen attention does not support s_aux" in refusal("gpt_oss")  # sinks
    assert "varlen attention does not support dropout" in refusal("llama", attention_dropout=0.1)
    assert "logits that differ by" in refusal("bloom")  # its class has attention of its own


@pytest.mark.parametrize("kind", ["llama", "gemma3_text"])
@pytest.mark.parametrize("dtype", [FULL, HALF, torch.float16])
def test_a_model_is_taken_if_documents_stay_apart(
    monkeypatch: pytest.MonkeyPatch, kind: str, dtype: torch.dtype
) -> None:
    """Tried with a small model whose windows are the large one's: one without windows passes too."""
    assert refusal(kind, dtype) == "None"
    for wrong in [mixing, *([unwindowed] if kind == "gemma3_text" else [])]:
        monkeypatch.setattr(loss, "varlen_attn", wrong)
        assert "logits that differ by" in refusal(kind, dtype)


@pytest.mark.parametrize(
    ("kind", "says"), [("opt", "OPT gives logits that differ by"), ("mamba", "Mamba gives .* try --task.packing=false")]
)
def test_a_kind_of_model_that_would_be_trained_on_the_wrong_thing_is_refused(kind: str, says: str) -> None:
    with pytest.raises(UserError, match=f"^{kind} cannot be trained here: {says}"):
        require_decoder(AutoConfig.for_model(kind), packing=True)
    require_decoder(AutoConfig.for_model("mamba"), packing=False)


def test_logits_that_are_not_those_of_the_last_layer_are_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tried without the comparison: the loss is another one, silently."""
    config, forward = AutoConfig.for_model("granite"), GraniteForCausalLM.forward
    require_decoder(config, packing=True)

    def halved(*arguments: Any, **options: Any) -> Any:
        output: Any = forward(*arguments, **options)
        output.logits = output.logits / 2
        return output

    monkeypatch.setattr(GraniteForCausalLM, "forward", halved)
    with pytest.raises(UserError, match="granite cannot be trained here: Granite gives logits"):
        require_decoder(config, packing=True)


@pytest.mark.parametrize(
    ("settings", "device", "dtype", "chosen"),
    [
        ({}, "cuda", HALF, "varlen"),
        ({}, "cuda", FULL, "sdpa"),
        ({}, "cpu", HALF, "sdpa"),
        ({"packing": False}, "cuda", HALF, "sdpa"),
        ({"attention": "sdpa"}, "cuda", HALF, "sdpa"),
    ],
)
def test_the_attention_is_chosen_by_device_dtype_and_packing(
    monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], device: str, dtype: torch.dtype, chosen: str
) -> None:
    """Tried after cuDNN's attention is switched off: under a mask its gradients may be NaN."""
    torch.backends.cuda.enable_cudnn_sdp(True)
    seen: list[bool] = []
    monkeypatch.setattr(causal_lm, "failure", lambda *_: seen.append(torch.backends.cuda.cudnn_sdp_enabled()))
    task = tiny.task(**settings).begin(TaskState(device, dtype))
    assert task.build_model().hf.config._attn_implementation == chosen
    assert task.state.notes == [f"{chosen} attention"]
    assert not any(seen)


def test_auto_falls_back_on_masks_and_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel itself, on a device that it doesn't know: this one."""
    monkeypatch.setattr(loss, "varlen_attn", varlen_attn)
    monkeypatch.setattr(causal_lm, "failure", lambda config, *_: failure(config, "varlen", True, "cpu", HALF))
    task = tiny.task().begin(TaskState("cuda", HALF))
    task.build_model()
    (summary,) = task.state.notes
    assert summary.startswith("sdpa attention (not varlen: Llama fails on a few tokens: Could not run 'aten::_flash")


# --------------------------------------------------------------------------------------------------------- libraries
def test_an_export_names_no_attention_which_from_pretrained_would_look_for(tmp_path: Path) -> None:
    model = LanguageModel(build("mistral", **SMALL, sliding_window=4).lm, "varlen")
    assert model.hf.config._attn_implementation == "varlen"
    model.hf.save_pretrained(tmp_path)
    assert "varlen" not in (tmp_path / "config.json").read_text()


def test_cudnn_attention_is_switched_off_in_all_threads() -> None:
    """The backward pass runs in threads of its own."""
    found = []
    for is_on in (True, False):
        torch.backends.cuda.enable_cudnn_sdp(is_on)
        thread = Thread(target=lambda: found.append(torch.backends.cuda.cudnn_sdp_enabled()))
        thread.start()
        thread.join()
    assert found == [True, False]
