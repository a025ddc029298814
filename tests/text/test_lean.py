"""Under FSDP no process reads, initializes or writes more of a language model than its share and a tensor.

The processes whose memory is measured are started under an accelerate yaml with this file as their script.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, LlamaForCausalLM

from src.models.lean import NewWeights, empty
from tests.launching import Launch
from tests.text.tiny import LLAMA, SIZES, llama

MIB = 2**20
LARGE = {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 26, "num_attention_heads": 16}
"""400 million parameters, with a vocabulary of 32,000."""
KINDS: dict[str, dict[str, Any]] = {
    "llama": LLAMA,
    "qwen3": LLAMA | {"head_dim": 8, "tie_word_embeddings": True},
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4},
    "gpt_neox": SIZES,
    "opt": {
        "hidden_size": 32,
        "ffn_dim": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "word_embed_proj_dim": 32,
    },
    "mixtral": LLAMA | {"num_local_experts": 2},
}


@pytest.mark.parametrize("kind", KINDS)
def test_the_parts_of_new_weights_make_up_what_one_process_draws(kind: str) -> None:
    special = {f"{name}_token_id": 1 for name in ("bos", "eos", "pad")}
    config = AutoConfig.for_model(kind, **KINDS[kind], **special, vocab_size=101)  # which 3 doesn't divide

    def build() -> Any:
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32)

    torch.manual_seed(0)
    whole, random = build(), torch.get_rng_state()
    drawn = []
    for rank in range(3):
        torch.manual_seed(0)
        weights = NewWeights(rank, 3)
        with weights:
            model = empty(build)
        drawn.append(weights.parts(model))
        assert torch.equal(torch.get_rng_state(), random)  # what is drawn next is the same too
        assert all(torch.equal(a, b) for a, b in zip(model.buffers(), whole.buffers(), strict=True))
    for name, parameter in whole.named_parameters():
        assert torch.equal(torch.cat([parts[name] for parts in drawn]), parameter), name


def test_a_model_whose_weights_are_in_several_files_of_half_precision(launch: Launch, tmp_path: Path) -> None:
    """Read, trained and written by two processes as by one."""
    model = LlamaForCausalLM.from_pretrained(llama(tmp_path / "llama"), dtype=torch.bfloat16)
    model.save_pretrained(tmp_path / "llama", max_shard_size="20KB")
    assert len(list((tmp_path / "llama").glob("*.safetensors"))) > 2
    (tmp_path / "llama" / "model.safetensors").unlink()
    (tmp_path / "text.txt").write_text("to be or not to be, that is the question. " * 80)
    lm = ("task.name=causal_lm", f"task.model={tmp_path / 'llama'}", f"task.dataset={tmp_path / 'text.txt'}",
          "task.sequence_length=32", "task.eval_fraction=0.2", "global_batch_size=4", "max_steps=5", "log_every=1",
          "optim.lr=1e-3")  # fmt: skip
    arguments = [f"--{setting}" for setting in lm]
    one, two = (launch(yaml, *arguments, processes=count).succeeded() for yaml, count in (("cpu", 1), ("fsdp", 2)))
    assert two.losses == pytest.approx(one.losses, rel=1e-5)
    exported = [load_file(run.folder / "model" / "model.safetensors") for run in (one, two)]
    assert exported[0].keys() == exported[1].keys()
    for name, weight in exported[0].items():
        assert torch.allclose(exported[1][name], weight, atol=1e-5), name
    assert LlamaForCausalLM.from_pretrained(two.folder / "model").num_parameters() == model.num_parameters()


# ------------------------------------------------------------------------------------------- in each of the processes
def resident(what: str = "VmRSS") -> int:
    """This process's memory in MiB, now or (VmHWM) at its peak."""
    status = Path("/proc/self/status").read_text()
    return int(status.split(f"{what}:")[1].split()[0]) // 1024
