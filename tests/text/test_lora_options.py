"""Options of peft's own (task.lora.options): each is allowed or refused with a reason, and what is allowed trains,
exports and merges as adapters do. Curves under DDP and FSDP: core/test_parity.py; resuming: faults/test_resume.py."""

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoModelForCausalLM

from src.tasks.base import TaskState
from src.tasks.text.fine_tuning import FineTuning
from src.tasks.text.load import load_exported
from src.tasks.text.settings import OPTIONS
from tests.text import tiny

FIELDS = {field.name for field in dataclasses.fields(peft.LoraConfig)}
PARTS = {"q_proj": 8, ".*.layers.0.mlp.(up|down)_proj": 2}
QUERIES = {"target_modules": ["q_proj"], "merge": True}
ALLOWED: dict[str, dict[str, Any]] = {
    "rsLoRA": {"options": {"use_rslora": True}},
    "DoRA": {"options": {"use_dora": True}, "dropout": 0.1},
    "gaussian": {"options": {"init_lora_weights": "gaussian"}},
    "orthogonal": {"options": {"init_lora_weights": "orthogonal"}},
    "PiSSA": {"options": {"init_lora_weights": "pissa"}},
    "PiSSA, rank above the layers'": {"options": {"init_lora_weights": "pissa"}, "r": 40},
    "OLoRA": {"options": {"init_lora_weights": "olora"}},
    "patterns": {"options": {"rank_pattern": PARTS, "alpha_pattern": PARTS}},
    "blocks": {**QUERIES, "options": {"layers_to_transform": [1], "layers_pattern": "layers"}},
    "several": {"options": {"use_rslora": True, "use_dora": True, "init_lora_weights": "pissa", "rank_pattern": PARTS}},
}
TOKENS = torch.randint(0, 256, (3, 16), generator=torch.Generator().manual_seed(1))


def adapted(model: Path, **lora: Any) -> Any:
    """Return a task that trains adapters of this model."""
    return tiny.task(model=str(model), sequence_length=16, lora={"r": 4, "merge": True, **lora})


def logits(model: Any) -> Tensor:
    """Return the logits that a model in evaluation mode has."""
    with torch.no_grad():
        return model.eval()(TOKENS).logits.float()


def trained(task: Any) -> Any:
    """Return the task's model after some steps with dropout."""
    torch.manual_seed(0)
    model = task.build_model().train()
    optimizer = torch.optim.AdamW([weight for weight in model.parameters() if weight.requires_grad], lr=1e-2)
    for _ in range(8):
        found = model.lm(TOKENS).logits[:, :-1]
        F.cross_entropy(found.flatten(0, 1), TOKENS[:, 1:].flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def difference(found: Tensor, expected: Tensor) -> float:
    """Return the norm of what differs, as a part of the expected norm."""
    return ((found - expected).norm() / expected.norm()).item()


def test_each_field_of_peft_is_allowed_or_has_a_reason_against_it() -> None:
    """A field that a new version of peft brings is none that was tried, and refused until it is in lora_options.yaml;
    older versions lack some."""
    assert OPTIONS.keys() >= FIELDS
    assert {name for name, (allowed, _) in OPTIONS.items() if allowed} <= FIELDS
    assert {option for lora in ALLOWED.values() for option in lora["options"]} == {
        name for name, (allowed, _) in OPTIONS.items() if allowed
    }
    for name, (allowed, reason) in OPTIONS.items():
        re.compile(allowed)
        assert re.match("must be " if allowed else "use task|not needed: |not available: ", reason), name


@pytest.mark.parametrize("name", ALLOWED)
def test_adapters_and_merged_weights_are_the_trained_model(models: Path, tmp_path: Path, name: str) -> None:
    """On the weights in the files: PiSSA and OLoRA change theirs, so that they are only exported merged."""
    task, base = adapted(models / "spread", **ALLOWED[name]), AutoModelForCausalLM.from_pretrained(models / "spread")
    # fp32: merging rounds each weight once more, to 2**-24, in each of 14 layers; a layer's products, of 32 or 64
    # terms, are summed in another order; what is taken out of the weights and added again rounds as often
    within = 14 * 64 * 2**-24 / 8
    assert difference(logits(task.build_model().lm), expected := logits(base)) < within
    model = trained(task)
    assert difference(found := logits(model.lm), expected) > 0.05
    task.export(model, model.state_dict(), tmp_path)
    exports = [tmp_path / place for place in task._libraries()]
    for folder in exports:
        assert difference(logits(load_exported(folder)), found) < within, folder


def test_what_began_as_a_part_of_the_weights_is_exported_merged(models: Path) -> None:
    for start, libraries in (("pissa", {""}), ("olora", {""}), ("gaussian", {"", "merged"})):
        task: FineTuning = adapted(models / "llama", options={"init_lora_weights": start})
        assert task._libraries().keys() == libraries


def test_ranks_and_blocks_are_those_of_the_options(models: Path) -> None:
    def ranks(**lora: Any) -> dict[str, int]:
        weights = adapted(models / "llama", **lora).build_model().named_parameters()
        return {name.split("layers.")[1].split(".lora")[0]: len(p) for name, p in weights if "lora_A" in name}

    found = ranks(**ALLOWED["patterns"])
    assert len(found) == 14
    assert {name: rank for name, rank in found.items() if rank != 4} == {
        "0.self_attn.q_proj": 8, "1.self_attn.q_proj": 8, "0.mlp.up_proj": 2, "0.mlp.down_proj": 2,
    }  # fmt: skip
    assert ranks(**ALLOWED["blocks"]) == {"1.self_attn.q_proj": 4}


@pytest.mark.parametrize("option", [{"use_dora": True}, {"use_rslora": True}, {"rank_pattern": {"q_proj": 8}}])
def test_over_4_bits_merged_weights_are_the_trained_model(models: Path, tmp_path: Path, option: dict[str, Any]) -> None:
    task = adapted(models / "spread", base_dtype="nf4", options=option).bind(TaskState(dtype=torch.bfloat16))
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
        model = trained(task)
        found = logits(model.lm)
        task.export(model, model.state_dict(), tmp_path)
        for folder, base_dtype in ((tmp_path, "nf4"), (tmp_path / "merged", None)):
            # bf16 rounds the inputs and the output of each of 14 layers to 2**-9
            assert difference(logits(load_exported(folder, base_dtype)), found) < 14 * 2**-9
    assert json.loads((tmp_path / "adapter_config.json").read_text()).items() >= option.items()
