"""What this project relies on, or protects from, in libraries: if one fails, look at the code it names first."""

import sys
from pathlib import Path

import torch
from accelerate.utils import FullyShardedDataParallelPlugin
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.fsdp import MixedPrecisionPolicy

from tests.launching import QUIET, run_command


def test_accelerate_keeps_our_precision_policy_of_fsdp() -> None:
    """src/distributed/accelerator.py: with Accelerate's own, gradients are reduced in bf16."""
    ours = MixedPrecisionPolicy(torch.bfloat16, torch.float32, torch.float32)
    for policy, reduced in ((None, torch.bfloat16), (ours, torch.float32)):
        plugin = FullyShardedDataParallelPlugin(fsdp_version=2)
        plugin.mixed_precision_policy = policy
        plugin.set_mixed_precision("bf16")
        assert plugin.mixed_precision_policy.reduce_dtype == reduced


def test_a_failed_save_of_dcp_is_not_an_exception() -> None:
    """`except Exception` does not catch it: src/checkpoint/write.py names it."""
    assert not issubclass(CheckpointException, Exception)


def test_torch_computes_with_subnormal_numbers_unless_told_otherwise(tmp_path: Path) -> None:
    """src/distributed/accelerator.py: why all threads take them for zero."""
    count = "\nprint((torch.full((1_000_000,), 1e-38) / 100).count_nonzero().item())\n"
    code = f"""
import torch
from src.distributed.accelerator import build_accelerator
from train import run_settings
torch.set_num_threads(2){count}build_accelerator(run_settings([])){count}
"""
    assert run_command([sys.executable, "-c", code], tmp_path).succeeded().stdout == "1000000\n0\n"


def test_nothing_heavy_is_imported_before_the_first_step(tmp_path: Path) -> None:
    """Nor what only an evaluation, a checkpoint or a download needs."""
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
    heavy |= {"trackio", "tensorboard", "mlflow", "comet_ml", "matplotlib", "torchvision"}
    assert not heavy & set(run.stdout.splitlines())
