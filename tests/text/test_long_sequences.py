"""Sequences that several processes share (context parallelism, fsdp_cp.yaml) have the curve, the metrics and the random
numbers of one process, under any strategy before and after; decoders that cannot share them are refused."""

import itertools
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed
from transformers import CONFIG_MAPPING

from src.config.errors import UserError
from src.tasks.base import ContextParallel
from src.tasks.text.attention import document_attention, document_lengths
from src.tasks.text.context_parallel import require_splittable, ulysses_attention
from tests.core.test_parity import assert_same_curve
from tests.faults.runs import assert_same_run, cut_back
from tests.launching import Launch, Rounding, Whole, slow
from tests.text import tiny
from tests.text.conftest import Trained
from tests.text.tasks import TEXT, of, over

TWO = over(1, 2)
FEW: dict[str, Any] = {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts": 4, "num_local_experts": 4,
                       "num_experts_per_tok": 2, "moe_intermediate_size": 16, "first_k_dense_replace": 1,
                       "n_group": 1, "topk_group": 1}  # fmt: skip
LATENT: dict[str, Any] = {"num_key_value_heads": 4, "kv_lora_rank": 16, "q_lora_rank": 16, "qk_nope_head_dim": 16,
                          "qk_rope_head_dim": 8, "v_head_dim": 16}  # fmt: skip
GATED: dict[str, Any] = {"layer_types": ["linear_attention", "full_attention"], "linear_num_value_heads": 4,
                         "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
                         "shared_expert_intermediate_size": 16}  # fmt: skip


def new(kind: str, **fields: Any) -> tuple[str, ...]:
    """Return the arguments for a new model of this kind."""
    return tuple(f"--task.architecture.{name}={value}" for name, value in {"model_type": kind, **fields}.items())


def heads(queries: int, keys: int) -> tuple[str, ...]:
    return new("llama", num_attention_heads=queries, num_key_value_heads=keys, hidden_size=8 * queries)


UNPACKED = ("--task.packing=false", "--max_steps=4")
WINDOWS = new("mistral", sliding_window=9)
CURVES: dict[str, tuple[str, dict[str, Any], tuple[str, ...], str]] = {
    # a task, its processes, further arguments and the strategy's name
    "two groups": ("lm", over(2, 2), (), "fsdp_cp2"),
    "adapters, not packed": ("lm with adapters", TWO, UNPACKED, "fsdp_cp2"),
    "two": ("lm", TWO, (), "fsdp_cp2"),
    "three, of 4 heads": ("lm", over(1, 3), (), "fsdp_cp3"),
    "four": ("lm", over(1, 4), (), "fsdp_cp4"),
    "replicated": ("lm", over(2, 2, 2), (), "hsdp_cp2"),
    "offloaded": ("lm", over(1, 2, 1, "--fsdp_offload_params=true"), (), "fsdp_cp2_offload"),
    "not resharded": ("lm", over(1, 2, 1, "--fsdp_reshard_after_forward=false"), (), "fsdp_cp2_grad_op"),
    "adapters": ("lm with adapters", over(2, 2), (), "fsdp_cp2"),
    "experts": ("experts", TWO, (), "fsdp_cp2"),
    "new tokens, tied": ("new tokens, tied", TWO, (), "fsdp_cp2"),
    "new tokens, untied": ("new tokens, untied", over(2, 2), (), "fsdp_cp2"),
    "not packed": ("scratch", TWO, UNPACKED, "fsdp_cp2"),
    "windows": ("scratch", TWO, WINDOWS, "fsdp_cp2"),
    "windows, not packed": ("scratch", over(1, 4), (*WINDOWS, *UNPACKED), "fsdp_cp4"),
    "windows in some layers": ("scratch", TWO, new("gemma3_text"), "fsdp_cp2"),
    "12 heads, 3 for keys, three": ("scratch", over(1, 3), heads(12, 3), "fsdp_cp3"),
    "12 heads, 3 for keys, four": ("scratch", over(1, 4), heads(12, 3), "fsdp_cp4"),
    "9 heads, 3 for keys, two": ("scratch", TWO, heads(9, 3), "fsdp_cp2"),
    "9 heads, 3 for keys, four": ("scratch", over(1, 4), heads(9, 3), "fsdp_cp4"),
    "4 heads, 1 for keys, four": ("scratch", over(1, 4), heads(4, 1), "fsdp_cp4"),
    "chat": ("chat", TWO, (), "fsdp_cp2"),
}
QUICK = ("two groups", "adapters, not packed")


@pytest.mark.parametrize("case", [name if name in QUICK else slow(name) for name in CURVES])
def test_the_curve_under_context_parallelism_is_that_of_one_process(
    whole: Whole, rounding: Rounding, shared: Path, case: str
) -> None:
    name, how, arguments, strategy = CURVES[case]
    task = of(TEXT[name], *arguments).ready(shared)
    run = task.run(whole, "fsdp_cp", **how)
    assert run.summary["strategy"] == strategy
    assert_same_curve(run, task, whole, rounding)


ONE: tuple[str, dict[str, Any]] = ("alone", {})
DDP, FSDP = ("ddp", {"processes": 2}), ("fsdp", {"processes": 4})
CP, GROUPS = ("fsdp_cp", TWO), ("fsdp_cp", over(2, 2))
PAIRS = [
    pair if pair == (GROUPS, ONE) else slow(*pair) for pair in itertools.permutations((ONE, DDP, FSDP, CP, GROUPS), 2)
]


@pytest.mark.parametrize(("first", "second"), PAIRS)
def test_a_run_resumes_with_context_parallelism_or_without(
    launch: Launch, shared: Path, trained: Trained, first: tuple[str, Any], second: tuple[str, Any]
) -> None:
    alone, saved = trained("lm"), trained("lm", first[0], **first[1])
    source = saved.folder / "checkpoints" / "step_00000008"
    run = TEXT["lm"].ready(shared).run(launch, second[0], f"--resume={source}", **second[1]).succeeded()
    assert run.losses == pytest.approx(alone.losses[8:], rel=1e-5)
    for name in ("eval/loss", "eval/accuracy", "eval/examples"):
        assert run.summary[name] == pytest.approx(alone.summary[name], rel=1e-5)


def test_with_dropout_it_resumes_bit_for_bit(launch: Launch, trained: Trained, shared: Path, tmp_path: Path) -> None:
    """Each process draws the masks of its own part."""
    few: Any = ("fsdp_cp", "--max_steps=4", "--save_every=2", "--log_every=1")
    expected = trained("lm with dropout", *few, **TWO)
    folder = cut_back(expected, tmp_path / "run", 2)
    run = TEXT["lm with dropout"].ready(shared).run(launch, *few, folder=folder, **TWO).succeeded()
    assert "after step 2, from" in run.stdout
    assert_same_run(run, expected)


SPLIT: list[tuple[str, dict[str, Any], str]] = [  # a kind of model, its fields, and why it is refused, if so
    ("llama", {}, ""),
    ("mistral", {"sliding_window": 2}, ""),
    ("gemma3_text", {}, ""),
    ("phi3", {"pad_token_id": None}, ""),
    ("gpt2", {"n_embd": 32, "n_head": 4}, ""),
    ("qwen3_moe", FEW, ""),
    ("mixtral", FEW, ""),
    ("deepseek_v3", FEW | LATENT, ""),
    ("mamba", {}, "its logits differ by "),
    ("qwen3_next", FEW | GATED, "it"),
    ("bloom", {"n_head": 4}, "its logits differ by "),
    ("gpt_oss", FEW, "it fails on a few tokens: per-document attention does not support s_aux"),
    ("gemma2", {}, "it fails on a few tokens: per-document attention does not support softcap"),
]


@pytest.mark.parametrize("packing", [True, False])
@pytest.mark.parametrize(("kind", "fields", "reason"), SPLIT, ids=[kind for kind, *_ in SPLIT])
def test_decoders_that_mix_tokens_outside_attention_are_refused(
    kind: str, fields: dict[str, Any], reason: str, packing: bool
) -> None:
    config = CONFIG_MAPPING[kind](**tiny.LLAMA | {"head_dim": 8, "vocab_size": 64} | fields)
    if not reason:
        require_splittable(config, packing)
        return
    with pytest.raises(UserError) as error:
        require_splittable(config, packing)
    assert str(error.value).startswith(f"{kind}: processes cannot split its sequences (cp_size): {reason}")


def test_values_may_be_of_another_size_than_keys() -> None:
    """Multi-head latent attention has such."""
    query, key, value = torch.randn(2, 4, 8, 16), torch.randn(2, 2, 8, 16), torch.randn(2, 2, 8, 24)
    lengths = document_lengths([3, 11, 16])
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    alone = ContextParallel(0, 1, distributed.group.WORLD.group_name)  # type: ignore[union-attr]
    attentions: tuple[Any, Any] = (document_attention, partial(ulysses_attention, alone))
    options = {"is_varlen": False, **lengths}
    outputs = [attention(torch.nn.Module(), query, key, value, None, **options)[0] for attention in attentions]
    distributed.destroy_process_group()
    torch.testing.assert_close(*outputs, rtol=0, atol=0)
