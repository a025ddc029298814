"""What this project relies on, or protects from, in libraries: if one fails, look at the code it names first."""

import sys
from pathlib import Path

import pytest
import torch
import yaml
from accelerate.utils import FullyShardedDataParallelPlugin
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.fsdp import MixedPrecisionPolicy

from tests import launching
from tests.launching import QUIET, Run, needs, run_command

SAY = "import os; say = lambda *words: os.write(1, (' '.join(map(str, words)) + chr(10)).encode())\n"  # in one piece
LEAVE = """
import torch
if torch.distributed.is_initialized():
    torch.distributed.barrier()  # neither process leaves while the other one still connects
"""
ALONE = "from accelerate import Accelerator; a = Accelerator(); say(a.distributed_type, a.num_processes)"


def run_script(folder: Path, code: str, config: str | Path = "cpu", **variables: str) -> Run:
    script = folder / "script.py"
    script.write_text(code)
    return launching.launched(config, folder=folder, script=str(script), **variables).succeeded()


def launched(folder: Path, code: str, **config: object) -> Run:
    file = folder / "config.yaml"
    file.write_text(yaml.safe_dump({"num_processes": 2, "mixed_precision": "no", **config}))
    return run_script(folder, SAY + code + LEAVE, file)


@pytest.mark.parametrize(
    ("code", "says", "config"),
    [
        # src/distributed/accelerator.py: why it builds with cpu=True and counts the processes
        (ALONE, "DistributedType.NO 1", {"use_cpu": True, "fsdp_config": {"fsdp_version": 2}}),
        # src/distributed/launcher.py: why it reads the yaml again
        ("say(os.environ['FSDP_VERSION'])", "1", {"fsdp_config": {"fsdp_vresion": 2}}),
    ],
    ids=["alone", "a misspelt key is ignored"],
)
def test_what_each_process_gets_of_a_yaml(tmp_path: Path, code: str, says: str, config: dict[str, object]) -> None:
    assert launched(tmp_path, code, distributed_type="FSDP", **config).stdout.splitlines() == [says, says]


def test_the_mesh_of_context_parallelism(tmp_path: Path) -> None:
    """src/distributed/accelerator.py: its names, and hooks that drop masks: why `prepare` hides cp_size from it."""
    code = """
import os, torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin, PartialState
PartialState(cpu=True)._shared_state["distributed_type"] = "MULTI_GPU"
a = Accelerator(cpu=True, fsdp_plugin=FullyShardedDataParallelPlugin())
mesh = a.torch_device_mesh
class Attention(torch.nn.Linear):
    def forward(self, x, attention_mask, is_causal=False):
        self.seen = attention_mask, is_causal
        return super().forward(x)
class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.self_attn = Attention(2, 2)
    def forward(self, x):
        return self.self_attn(x, attention_mask=x)
seen = []
for a.parallelism_config.cp_size in (2, 1):
    model = Model()
    model, _ = a.prepare(model, torch.optim.SGD(model.parameters()))
    model(torch.ones(1, 2))
    seen.append(model.self_attn.seen[0] is None)
ranks = torch.distributed.get_process_group_ranks(mesh["dp_shard_cp"].get_group())
say(mesh.mesh_dim_names, mesh["cp"].size(), ranks, seen)
"""
    config = {"fsdp_version": 2, "fsdp_cpu_ram_efficient_loading": False, "fsdp_auto_wrap_policy": "NO_WRAP"}
    sizes = {"parallelism_config_cp_size": 2}
    run = launched(tmp_path, code, distributed_type="FSDP", fsdp_config=config, parallelism_config=sizes)
    assert run.stdout.splitlines() == ["('cp',) 2 [0, 1] [True, False]"] * 2


def test_a_mixed_precision_policy_of_ours_is_kept() -> None:
    """src/distributed/accelerator.py: gradients are reduced in fp32."""
    ours = MixedPrecisionPolicy(torch.bfloat16, torch.float32, torch.float32)
    for policy, reduced in ((None, torch.bfloat16), (ours, torch.float32)):  # without ours, in bf16
        plugin = FullyShardedDataParallelPlugin(fsdp_version=2)
        plugin.mixed_precision_policy = policy
        plugin.set_mixed_precision("bf16")
        assert plugin.mixed_precision_policy.reduce_dtype == reduced


@needs("src/tracking/wandb.py")
def test_wandb_login_answers_without_a_prompt(tmp_path: Path) -> None:
    """src/tracking/wandb.py: how it decides for offline."""
    code = "import wandb; print(wandb.login(prompt=False, verify=False))"
    assert run_script(tmp_path, code, HOME=str(tmp_path)).stdout == "False\n"


def test_a_failed_save_of_dcp_is_no_exception() -> None:
    """`except Exception` does not catch it: src/checkpoint/write.py names it."""
    assert not issubclass(CheckpointException, Exception)


def test_torch_computes_with_subnormal_numbers(tmp_path: Path) -> None:
    """src/distributed/accelerator.py: why it has all threads take them for zero."""
    count = "\nprint((torch.full((1_000_000,), 1e-38) / 100).count_nonzero().item())\n"
    code = f"""
import torch
from src.distributed.accelerator import build_accelerator
from train import run_settings
torch.set_num_threads(2){count}build_accelerator(run_settings([])){count}
"""
    assert run_script(tmp_path, code).stdout == "1000000\n0\n"


def test_nothing_heavy_is_imported_before_the_first_step(tmp_path: Path) -> None:
    """Nor what only an evaluation, a checkpoint or a download needs. Tried with torchvision's readers of MNIST."""
    code = f"""
import sys, train, src.training.batches
def stop(*_): print(*sys.modules, sep=chr(10)); sys.exit(7)
src.training.batches.fetch_batch = stop
sys.argv[1:] = ["--task.source=digits", *{QUIET}, "--output_dir={tmp_path}/run"]
train.main()
"""
    run = run_command([sys.executable, "-c", code], tmp_path)
    assert run.exit_code == 7, run.stderr
    heavy = {"evaluate", "datasets", "sklearn", "transformers.modeling_utils", "peft", "pandas", "scipy", "wandb"}
    heavy |= {"trackio", "tensorboard", "matplotlib", "torchvision"}
    assert not heavy & set(run.stdout.splitlines())
