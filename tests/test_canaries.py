"""What this project relies on, or protects from, in the libraries.

A canary that fails says that a library changed: look at the code it names before changing the canary.
"""

import sys
from pathlib import Path
from typing import Any
from unittest import mock

import datasets
import numpy as np
import pytest
import torch
import yaml
from accelerate import Accelerator
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils import FullyShardedDataParallelPlugin
from accelerate.utils.launch import prepare_multi_gpu_env
from torch import nn
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor._ops import _pointwise_ops
from torch.utils.data import DataLoader, Dataset, TensorDataset

from tests import launching
from tests.launching import QUIET, Run, needs, run_command

SAY = "import os; say = lambda *words: os.write(1, (' '.join(map(str, words)) + chr(10)).encode())\n"  # in one piece
LEAVE = """
import torch
if torch.distributed.is_initialized():
    torch.distributed.barrier()  # neither process leaves while the other one still connects
"""
FSDP2 = {"fsdp_version": 2}
ALONE = "from accelerate import Accelerator; a = Accelerator(); say(a.distributed_type, a.num_processes)"


def launched(folder: Path, code: str, **config: object) -> Run:
    """Runs `code` under an accelerate yaml, without this project."""
    (folder / "script.py").write_text(SAY + code + LEAVE)
    (folder / "config.yaml").write_text(yaml.safe_dump({"num_processes": 2, "mixed_precision": "no", **config}))
    return launching.launched(folder / "config.yaml", folder=folder, script=str(folder / "script.py")).succeeded()


@pytest.mark.parametrize(
    ("code", "says", "config"),
    [
        # src/distributed/accelerator.py: why it builds with cpu=True and counts the processes
        (ALONE, "DistributedType.NO 1", {"distributed_type": "MULTI_GPU", "use_cpu": True}),
        (ALONE, "DistributedType.NO 1", {"distributed_type": "FSDP", "use_cpu": True, "fsdp_config": FSDP2}),
        # src/distributed/launch_guard.py: why it reads the yaml again
        ("say(os.environ['FSDP_VERSION'])", "1", {"distributed_type": "FSDP", "fsdp_config": {"fsdp_vresion": 2}}),
        # accelerate_configs/fsdp*.yaml: why they say so
        (
            "say(os.environ['FSDP_CPU_RAM_EFFICIENT_LOADING'])",
            "true",
            {"distributed_type": "FSDP", "fsdp_config": FSDP2},
        ),
    ],
    ids=["alone", "alone with FSDP", "a misspelt key is ignored", "RAM-efficient loading is on"],
)
def test_what_each_process_gets_of_a_yaml(tmp_path: Path, code: str, says: str, config: dict[str, object]) -> None:
    assert launched(tmp_path, code, **config).stdout.splitlines() == [says, says]


def said(folder: Path, code: str, **variables: Any) -> str:
    """By a process of its own."""
    (folder / "script.py").write_text(code)
    script = str(folder / "script.py")
    return launching.launched("cpu", folder=folder, script=script, **variables).succeeded().stdout.strip()


def test_the_launcher_gives_each_process_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """src/distributed/accelerator.py: why it sets the number of threads."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    words = ["--multi_gpu", "--num_processes=2", "--main_process_port=0", "script.py"]
    arguments, *_ = _validate_launch_command(launch_command_parser().parse_args(words))
    assert prepare_multi_gpu_env(arguments)["OMP_NUM_THREADS"] == "1"


def test_the_launchers_parser_knows_the_fsdp_keys() -> None:
    """src/distributed/launch_guard.py: where the known keys come from."""
    names = {action.dest for action in launch_command_parser()._actions}
    assert {"fsdp_version", "fsdp_auto_wrap_policy", "fsdp_offload_params", "config_file", "num_processes"} <= names
    assert "num_cpu_threads_per_process" in names


def test_a_mixed_precision_policy_of_ours_is_kept() -> None:
    """src/distributed/accelerator.py: gradients are reduced in fp32."""
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2)
    plugin.set_mixed_precision("bf16")
    assert plugin.mixed_precision_policy.reduce_dtype == torch.bfloat16  # what it would be
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2)
    plugin.mixed_precision_policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, torch.float32)
    plugin.set_mixed_precision("bf16")
    assert plugin.mixed_precision_policy.reduce_dtype == torch.float32


def test_iterating_a_loader_draws_from_the_global_generator() -> None:
    """src/training/batches.py: why the loader has a generator of its own."""

    def draws(generator: torch.Generator | None) -> bool:
        before = torch.get_rng_state()
        list(DataLoader(TensorDataset(torch.zeros(2)), generator=generator))
        return not torch.equal(before, torch.get_rng_state())

    assert draws(None)
    assert not draws(torch.Generator())


def test_a_loader_asks_for_whole_batches() -> None:
    """src/training/batches.py, src/tasks/mnist.py: `__getitems__`."""

    class Whole(Dataset):
        def __getitems__(self, indices: list[int]) -> list[int]:
            return indices

    loader = DataLoader(Whole(), batch_sampler=[[3, 1], [2]], collate_fn=lambda batch: batch)
    assert list(loader) == [[3, 1], [2]]


def test_backward_divides_by_nothing() -> None:
    """train.py: the loop scales by itself."""
    weight = nn.Parameter(torch.tensor(1.0))
    Accelerator(cpu=True).backward(weight * 3)
    assert weight.grad == 3


@needs("src/tracking/wandb.py")
def test_wandb_login_answers_without_a_prompt(tmp_path: Path) -> None:
    """src/tracking/wandb.py: how it decides for offline."""
    assert said(tmp_path, "import wandb; print(wandb.login(prompt=False, verify=False))", HOME=str(tmp_path)) == "False"


@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.SGD])
def test_fused_optimizers_run_on_the_cpu(optimizer: type[torch.optim.Optimizer]) -> None:
    """src/training/optim.py: fused=True everywhere."""
    weight = nn.Parameter(torch.ones(3))
    weight.grad = torch.ones(3)
    optimizer([weight], lr=0.1, fused=True).step()  # type: ignore[call-arg]
    assert (weight < 1).all()


def test_fused_sgd_cannot_step_sharded_parameters() -> None:
    """src/training/optim.py: why it is not fused under FSDP, as AdamW is."""
    source = Path(_pointwise_ops.__file__).read_text()
    assert "_fused_adamw_" in source
    assert "_fused_sgd_" not in source


def test_torchs_norm_on_the_cpu_is_imprecise() -> None:
    """src/training/optim.py: why it sums up squares."""
    values = torch.randn(1_179_648, generator=torch.Generator().manual_seed(0))
    exact = values.double().norm()
    assert abs(nn.utils.get_total_norm([values]).double() / exact - 1) > 1e-5
    assert abs(values.square().sum().double().sqrt() / exact - 1) < 1e-7


def test_a_failed_save_of_dcp_is_no_exception() -> None:
    """`except Exception` does not catch it: src/checkpoint/write.py names it."""
    assert not issubclass(CheckpointException, Exception)


def test_fused_sgd_reads_momentum_that_a_left_out_first_step_has_not_written() -> None:
    """step_if_finite in src/training/optim.py waits for that step (docs/figures.md)."""
    weight = nn.Parameter(torch.zeros(4))
    optimizer: Any = torch.optim.SGD([weight], lr=1.0, momentum=0.9, fused=True)
    torch.use_deterministic_algorithms(True)  # fills new memory with NaN
    for found_inf in (1.0, 0.0):
        weight.grad, optimizer.found_inf = torch.ones(4), torch.tensor(found_inf)
        optimizer.step()
    torch.use_deterministic_algorithms(False)
    assert weight.isnan().all()


def test_datasets_encodes_each_number_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    encoded = mock.Mock(side_effect=lambda schema, value, **_: value)
    monkeypatch.setattr("datasets.features.features.encode_nested_example", encoded)
    datasets.Features({"labels": datasets.Value("int64")}).encode_batch({"labels": np.arange(50)})
    assert encoded.call_count == 50


def test_torch_computes_with_subnormal_numbers(tmp_path: Path) -> None:
    """src/distributed/accelerator.py: why it has all threads take them for zero."""
    build = """
from src.config.config import config_from
from src.distributed.accelerator import build_accelerator
from src.tasks import TASKS
build_accelerator(config_from({'task': {'name': 'mnist'}}, TASKS))
"""
    count = "print((torch.full((1_000_000,), 1e-38) / 100).count_nonzero().item())"
    for code, says in (("", "1000000"), (build, "0")):
        assert said(tmp_path, f"import torch; torch.set_num_threads(2)\n{code}\n{count}") == says


def test_nothing_heavy_is_imported_before_the_first_step(tmp_path: Path) -> None:
    """Nor anything that only an evaluation, a checkpoint or a download needs. Tried with torchvision's readers of
    MNIST's files."""
    code = f"""
import sys, train, src.training.batches
def stop(*_): print(*sys.modules, sep=chr(10)); sys.exit(7)
src.training.batches.fetch = stop
sys.argv[1:] = ["--task.source=digits", *{QUIET}, "--output_dir={tmp_path}/run"]
train.main()
"""
    run = run_command([sys.executable, "-c", code], tmp_path)
    assert run.exit_code == 7, run.stderr
    heavy = {"evaluate", "datasets", "sklearn", "transformers.modeling_utils", "peft", "pandas", "scipy", "wandb"}
    heavy |= {"trackio", "tensorboard", "matplotlib", "torchvision"}
    assert not heavy & set(run.stdout.splitlines())
