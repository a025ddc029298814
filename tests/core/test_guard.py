"""What the yaml asks for is what runs, or nothing does: one line, exit code 2, no traceback, no file."""

import ast
import importlib.metadata
import shutil
import signal
import subprocess
import sys
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from src import requirements
from src.distributed.accelerator import choose_precision
from src.distributed.launcher import unusable_gpu
from src.requirements import missing_requirements
from tests.launching import BIN, PROJECT, QUIET, Launch, Run, needs, run_command, slow

FSDP = yaml.safe_load((PROJECT / "accelerate_configs/fsdp.yaml").read_text())
ONE_GPU = "import torch.accelerator as a; a.is_available = lambda: True; a.device_count = lambda: 1"
WITHOUT_FSDP = """
import os, accelerate, src.distributed.accelerator
def without_fsdp(cpu, **_):
    del os.environ['ACCELERATE_USE_FSDP']
    return accelerate.Accelerator(cpu=cpu)
src.distributed.accelerator.Accelerator = without_fsdp
"""
APART = """
import accelerate, src.distributed.accelerator
src.distributed.accelerator.Accelerator = lambda cpu, **_: accelerate.Accelerator()
"""
WITHOUT_YAML = ["--num_processes=2", "--num_machines=1", "--mixed_precision=no", "--dynamo_backend=no"]
WITHOUT_YAML += ["--num_cpu_threads_per_process=1", "train.py"]
NO_MODEL = "from src.tasks.mnist import Mnist; Mnist.build_model = None"
BLOCKS = "from src.tasks.mnist import MnistCnn; MnistCnn._no_split_modules = []"


def with_layer(code: str) -> str:
    """Code by which MNIST's CNN gets another layer."""
    return f"""
import torch
from torch import nn
from src.tasks.mnist import MnistCnn
build = MnistCnn.__init__
def with_layer(self, *arguments, **named):
    build(self, *arguments, **named)
    {code}
MnistCnn.__init__ = with_layer
"""


def rows(number: int) -> str:
    """Code by which so many examples are left to train on."""
    return f"""
from src.tasks.mnist import Digits, Mnist
read = Mnist.build_datasets
def cut(self):
    train, evaluation = read(self)
    return Digits(train.images[:{number}], train.labels[:{number}]), evaluation
Mnist.build_datasets = cut
"""


def refused(run: Run, code: int = 2) -> str:
    """The one line that ends `run`, first on standard error, with nothing written."""
    assert run.exit_code == code, run.stdout
    (message,) = run.messages
    shown = [line for line in run.stderr.splitlines() if "Warning" not in line]
    assert shown[0] == message
    assert 'train.py", line' not in run.stderr, "a traceback"
    assert not run.folder.exists()
    return message.removeprefix("train.py: ")


@pytest.mark.parametrize(
    ("config", "arguments", "more", "says"),
    [
        ("fsdp", [], {"launcher_arguments": ("--parallelism_config_cp_size=2",)}, "--parallelism_config_cp_size: "
         "*/fsdp.yaml has no parallelism_config; use accelerate_configs/fsdp_cp.yaml"),
        ("fsdp", ["--ddp_comm_hook=bf16"], {}, "ddp_comm_hook=bf16 is for DDP, not FSDP: remove it"),
        ("ddp", ["--cuda_graphs=true"], {}, "cuda_graphs=true needs one NVIDIA GPU, *"),
        ("ddp", [], {"processes": 3}, "global_batch_size=64: not a multiple of 3 processes*"),
        ("cpu", ["--epochs=2", "--optim.schedule=wsd", "--optim.warmup_steps=40", "--optim.decay_steps=30"],
         {"before": NO_MODEL}, "optim.warmup_steps=40 and optim.decay_steps=30: together 152.2% of the schedule"),
        ("cpu", [], {"processes": 2}, "2 processes were requested, but */accelerate_configs/cpu.yaml starts 1: use "
         "a yaml for several*"),
        ("", [], {"words": WITHOUT_YAML}, "2 processes were requested, but accelerate launch starts 1: use a yaml*"),
        ("ddp", [], {"before": ONE_GPU}, "2 processes on this machine, but it has 1 GPU(s): set --num_processes"),
        ("ddp", [], {"before": APART}, "2 processes were started, but each sees 1: refusing to train separate models"),
        ("fsdp", [], {"before": WITHOUT_FSDP}, "the yaml asks for FSDP, but Accelerate chose *"),
        ("fsdp", [], {"before": BLOCKS}, "FSDP would gather the whole model at once: name its repeating blocks in "
         "_no_split_modules*"),
        ("fsdp", [], {"before": with_layer("self.scale = nn.Parameter(torch.ones(()))")}, "FSDP: fully_shard doesn't "
         "support scalar parameters. Change scale to a 1D tensor *"),
        ("ddp", [], {"before": rows(0)}, "the training set is empty"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused(launch: Launch, config: str, arguments: list[str], more: Any, says: str) -> None:
    found = refused(launch(config, "--max_steps=1", *arguments, **more))
    assert fnmatchcase(found, says), found


def fsdp(**changes: object) -> dict[str, Any]:
    return FSDP | {"fsdp_config": FSDP["fsdp_config"] | changes}


def mesh(**sizes: int) -> dict[str, Any]:
    return FSDP | {"parallelism_config": {f"parallelism_config_{name}_size": size for name, size in sizes.items()}}


@pytest.mark.parametrize("real", [False, slow(True)])
@pytest.mark.parametrize(
    ("settings", "text", "says"),
    [
        (fsdp(fsdp_ofload_params=True), "", "{file}: fsdp_config has no key fsdp_ofload_params, did you mean "
         "fsdp_offload_params?"),
        (fsdp(fsdp_transformer_layer_cls_to_wrap="Linea"), "", "FSDP: Could not find the transformer layer class "
         "Linea in the model."),
        (fsdp(fsdp_activation_checkpointing=True), "", "fsdp_activation_checkpointing computes wrong gradients with "
         "dropout*"),
        (fsdp(fsdp_auto_wrap_policy="NO_WRAP"), "", "fsdp_auto_wrap_policy: NO_WRAP gathers the whole model at once*"),
        (fsdp(fsdp_auto_wrap_policy="SIZE_BASED_WRAP", fsdp_min_num_params=100_000_000), "", "FSDP would gather the "
         "whole model at once: *"),
        (fsdp(fsdp_auto_wrap_policy="BY_SIZE"), "", "accelerate: Invalid auto wrap policy: BY_SIZE. Must be one of *"),
        ({"num_processes": 2, "distributed_type": "MEGATRON_LM"}, "", "Megatron-LM is not supported: use one of "
         "accelerate_configs/"),
        ({"num_processes": 1, "distributed_type": "NO", "dynamo_config": {"dynamo_backend": "EAGER"}}, "",
         "dynamo_config is not supported*"),
        # tried without: it trains by the second one alone
        (fsdp(), "fsdp_config: {fsdp_version: 2}", "{file}: *found duplicate key \"fsdp_config\" *"),
        # tried without: RecursionError, in the search for keys that are repeated
        ({"num_processes": 2, "distributed_type": "FSDP"}, "fsdp_config: &a {fsdp_version: 2, more: *a}",
         "{file}: Circular reference detected"),
        (mesh(tp=2), "", "parallelism_config: tp_size is not supported: fsdp_cp.yaml splits sequences, fsdp.yaml "
         "weights: docs/accelerate.md explains why"),
        (mesh(sp=2), "", "parallelism_config: sp_size is not supported: fsdp_cp.yaml splits sequences*"),
        (mesh(dp_shard=3), "", "parallelism_config: dp_replicate_size x dp_shard_size x cp_size is 3 and must equal "
         "the number of processes, 2: change one"),
        (mesh(dp_replicate=2), "", "accelerate: FSDP is enabled but the parallelism config has no dimension for *"),
        (mesh(cp=2), "", "task.name=mnist: cp_size needs FSDP, and a task that can split sequences: remove it"),
    ],
)  # fmt: skip
def test_a_yaml_that_asks_for_what_cannot_be_is_refused(
    launch: Launch, tmp_path: Path, settings: dict[str, Any], text: str, says: str, real: bool
) -> None:
    """Also under the real launcher, which train.py then ends by a signal."""
    file = tmp_path / "mine.yaml"
    file.write_text(yaml.safe_dump(settings) + text)
    found = refused(launch(file, "--max_steps=1", real=real), -signal.SIGUSR1 if real else 2)
    assert fnmatchcase(found, says.format(file=file)), found


OLD = {
    "fsdp_version": 1, "fsdp_sharding_strategy": "FULL_SHARD", "fsdp_reshard_after_forward": "SHARD_GRAD_OP",
    "fsdp_backward_prefetch": "NO_PREFETCH", "fsdp_forward_prefetch": True, "fsdp_use_orig_params": False,
    "fsdp_sync_module_states": True,
}  # fmt: skip


def test_a_yaml_of_fsdp_1_is_translated_whole(launch: Launch, tmp_path: Path) -> None:
    """What to write for each of its keys, at once."""
    file = tmp_path / "old.yaml"
    file.write_text(yaml.safe_dump(FSDP | {"fsdp_config": OLD}))
    run = launch(file)
    assert run.exit_code == 2
    assert not run.folder.exists()
    version, *others = (line.removeprefix("train.py: ") for line in run.messages)
    assert version.startswith("FSDP version 1 is not supported: in the yaml's fsdp_config, set fsdp_version: 2; ")
    assert all(key in version for key in OLD)
    assert others == [
        "SHARD_GRAD_OP is a strategy of FSDP 1: write fsdp_reshard_after_forward: false instead",
        "fsdp_backward_prefetch is for FSDP 1: leave it out, as FSDP 2 always prefetches as BACKWARD_PRE does",
        "fsdp_forward_prefetch is for FSDP 1: leave it out",
        "fsdp_use_orig_params is for FSDP 1: leave it out, as FSDP 2 always keeps the original parameters",
    ]


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("sharding_strategy", "SHARD_GRAD_OP", "write fsdp_reshard_after_forward: false instead"),
        ("sharding_strategy", 2, "write fsdp_reshard_after_forward: false instead"),  # as accelerate config once wrote
        ("sharding_strategy", "NO_SHARD", "use accelerate_configs/ddp.yaml instead"),
        ("sharding_strategy", "HYBRID_SHARD", "and a parallelism_config as in accelerate_configs/hsdp.yaml"),
        ("sharding_strategy", "HYBRID_SHARD_ZERO2", "and a parallelism_config as in accelerate_configs/hsdp.yaml"),
        ("reshard_after_forward", "SHARD_GRAD_OP", "write fsdp_reshard_after_forward: false instead"),
        ("reshard_after_forward", "FULL_SHARD", "write fsdp_reshard_after_forward: true instead"),
        ("backward_prefetch", "BACKWARD_POST", "leave it out*"),
        ("forward_prefetch", True, "leave it out"),
        ("use_orig_params", False, "leave it out*"),
    ],
)
def test_a_key_of_fsdp_1_is_not_ignored(launch: Launch, key: str, value: object, says: str) -> None:
    """Under version 2, where Accelerate ignores it, unless it asks for what runs. Tried without: it trained."""
    found = refused(launch("fsdp", launcher_arguments=(f"--fsdp_{key}={value}",)))
    assert fnmatchcase(found, f"* FSDP 1*{says}")


def test_a_key_of_fsdp_1_that_asks_for_what_runs_may_stay(launch: Launch, tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    same: dict[str, object] = {"fsdp_sharding_strategy": "FULL_SHARD", "fsdp_backward_prefetch": "BACKWARD_PRE"}
    same |= {"fsdp_forward_prefetch": False, "fsdp_use_orig_params": True, "fsdp_sync_module_states": True}
    file.write_text(yaml.safe_dump(fsdp(**same)))
    launch(file, "--dry-run").succeeded()


NO_BLOCKS = """
import src.training.run as r
prepare = r.prepare
def without_blocks(accelerator, model):
    model._no_split_modules = []
    return prepare(accelerator, model)
r.prepare = without_blocks
"""


@needs("src/tasks/text")
@pytest.mark.parametrize(
    ("changes", "before", "says"),
    [
        ({}, "", None),
        ({}, NO_BLOCKS, "FSDP gathers 0.1 of 0.1 MB of weights at once, more than any block has: *"),
        ({"fsdp_auto_wrap_policy": "SIZE_BASED_WRAP", "fsdp_min_num_params": 100_000_000}, "", "FSDP gathers *"),
    ],
)
def test_a_language_model_without_blocks_is_said_to_be_gathered_whole(  # room: template
    launch: Launch, shared: Path, tmp_path: Path, changes: dict[str, object], before: str, says: str | None
) -> None:
    """Its embeddings, last norm and head are always units of their own. Tried counting units: three, so all is well."""
    from tests.text.tasks import TEXT

    file = tmp_path / "mine.yaml"
    file.write_text(yaml.safe_dump(fsdp(**changes)))
    run = TEXT["lm"].ready(shared).run(launch, file, "--dry-run", before=before).succeeded()
    found = [line.strip() for line in run.stdout.splitlines() if "FSDP gathers" in line]
    assert len(found) == bool(says)
    assert not says or fnmatchcase(found[0], says)


NORM = "self.fc2 = nn.Sequential(nn.BatchNorm1d(128), self.fc2)"
NORM_OF_PICTURES = "self.conv1 = nn.Sequential(nn.BatchNorm2d(1), self.conv1)"
FROZEN = f"{NORM}; self.fc2[0].train = lambda mode=True: self.fc2[0]; self.fc2[0].training = False"


@pytest.mark.parametrize(
    ("config", "code", "is_said"), [("ddp", NORM, True), ("cpu", NORM, False), ("ddp", FROZEN, False)]
)
def test_batch_norm_on_several_processes_is_said(launch: Launch, config: str, code: str, is_said: bool) -> None:
    run = launch(config, "--dry-run", before=with_layer(code)).succeeded()
    says = "  BatchNorm normalizes over the examples of its own process, so the curve depends on the number of "
    assert is_said == any(line.startswith(says) for line in run.stdout.splitlines())


def test_batch_norm_is_evaluated_as_it_is_exported_under_any_strategy(launch: Launch) -> None:
    """With the first process's statistics, which DDP sends to all. Tried without sending them: off by 7e-5 under FSDP,
    and by 1e-8, a few roundings, with them."""
    how = ("--max_steps=8", "--global_batch_size=8", "--optim.lr=1e-5")
    ddp, fsdp = (launch(config, *how, before=with_layer(NORM)).succeeded() for config in ("ddp", "fsdp"))
    assert fsdp.summary["eval/loss"] == pytest.approx(ddp.summary["eval/loss"], rel=1e-6)


SPARE = "self.spare = nn.Linear(2, 2)"


@pytest.mark.parametrize(
    ("config", "before", "says"),
    [
        ("ddp", with_layer(SPARE), "DDP needs a gradient of each trained parameter, but the loss does not depend on "
         "spare.weight, spare.bias: remove them, or set their requires_grad to False"),
        ("cpu", with_layer(SPARE), None),
        ("ddp", with_layer(f"{SPARE}.requires_grad_(False)"), None),
        ("ddp", with_layer(NORM) + rows(64 + 3), "BatchNorm cannot normalize a single row, *"),
        ("fsdp", with_layer(NORM) + rows(64 + 1), "BatchNorm cannot normalize a single row, *"),  # and a dummy
        ("ddp", with_layer(NORM) + rows(64 + 4), None),
        ("cpu", with_layer(NORM_OF_PICTURES) + rows(64 + 1), None),
    ],
)  # fmt: skip
def test_what_would_fail_later_is_refused_in_the_first_step(
    launch: Launch, config: str, before: str, says: str | None
) -> None:
    """Tried without: torch's tracebacks, in step 2 and at the end of the epoch."""
    run = launch(config, "--max_steps=2", before=before)
    assert run.exit_code == (2 if says else 0), run.stdout + run.stderr
    assert not says or fnmatchcase(run.messages[0], f"train.py: {says}")
    assert "Traceback" not in run.stderr


def test_a_precision_that_is_not_one(tmp_path: Path) -> None:
    """accelerate launch says so itself."""
    command = [sys.executable, "train.py", "--task.source=digits", f"--output_dir={tmp_path}/run", *QUIET]
    run = run_command(command, tmp_path / "run", ACCELERATE_MIXED_PRECISION="banana")
    assert refused(run) == "ACCELERATE_MIXED_PRECISION must be no, bf16, fp16 or fp8"


@pytest.mark.parametrize(
    ("config", "variable"),
    [
        ("cpu", {"ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "4"}),
        ("ddp", {"ACCELERATE_USE_FSDP": "true"}),
        ("fsdp", {"FSDP_IGNORED_MODULES": "fc1"}),
    ],
)
def test_a_variable_that_overrides_the_settings(launch: Launch, config: str, variable: dict[str, str]) -> None:
    (name,) = variable
    assert fnmatchcase(refused(launch(config, **variable)), f"{name}* is set *and would override the *: unset it")


def test_a_gpu_without_bf16_trains_in_fp32_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.is_bf16_supported", lambda including_emulation: False)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda: "Tesla T4")
    assert choose_precision(None, "bf16", is_cpu_fallback=False) == ("no", "Tesla T4 has no bf16: training in fp32")


@pytest.mark.slow
def test_torchrun_works_without_an_accelerate_yaml(tmp_path: Path) -> None:
    command = [str(BIN / "torchrun"), "--standalone", "--nproc_per_node=2", "train.py", "--task.source=digits"]
    command += ["--max_steps=2", f"--output_dir={tmp_path}/run", *QUIET]
    run = run_command(command, tmp_path / "run").succeeded()
    assert (run.summary["strategy"], run.summary["num_processes"]) == ("ddp", 2)
    assert "no accelerate yaml" in run.stdout


def test_the_others_wait_as_long_as_the_first_process_takes(launch: Launch, tmp_path: Path) -> None:
    """To download and tokenise, longer than collectives do; Accelerate's own local_main_process_first fails here."""
    (tmp_path / "script.py").write_text("""
import os, time
from datetime import timedelta
from accelerate import Accelerator, InitProcessGroupKwargs
from src.distributed.accelerator import local_main_process_first

accelerator = Accelerator(cpu=True, kwargs_handlers=[InitProcessGroupKwargs(timeout=timedelta(seconds=2))])
with local_main_process_first(accelerator):
    time.sleep(3 * accelerator.is_main_process)
    os.write(1, b"%d" % accelerator.process_index)
accelerator.wait_for_everyone()
accelerator.end_training()
""")
    assert launch("ddp", script=str(tmp_path / "script.py")).succeeded().stdout == "01"


TOO_OLD = "The NVIDIA driver on your system is too old (found version 12020). Please update your GPU driver"
NO_GPU = "Found no NVIDIA driver on your system. Please check that you have an NVIDIA GPU"


@pytest.mark.parametrize(
    ("cuda", "error", "tool", "says"),
    [
        ("13.0", NO_GPU, None, None),
        ("13.0", TOO_OLD, None, TOO_OLD),
        (None, "Torch not compiled with CUDA enabled", None, None),
        (None, "", "/usr/bin/nvidia-smi", "this machine has an NVIDIA GPU, but torch * is built without CUDA: *"),
    ],
)
def test_a_gpu_torch_cannot_use(
    monkeypatch: pytest.MonkeyPatch, cuda: str | None, error: str, tool: str | None, says: str | None
) -> None:
    """Tried without it: a night on the CPU."""

    def init() -> None:
        raise RuntimeError(error)

    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    monkeypatch.setattr("torch.cuda.init", init)
    monkeypatch.setattr("shutil.which", lambda _: tool)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    found = unusable_gpu()
    assert found is None if says is None else found and fnmatchcase(found, says)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # hidden on purpose
    assert unusable_gpu() is None


REAL, FOUND = importlib.metadata.version, importlib.metadata.distributions


def install(monkeypatch: pytest.MonkeyPatch, **versions: str | None) -> None:
    """Let these libraries be of these versions; None: not installed."""

    def version(name: str) -> str:
        found = versions.get(name, REAL(name))
        if found is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return found

    def distributions(**of: Any) -> Any:
        return [] if versions.get(of.get("name", ""), "") is None else FOUND(**of)

    monkeypatch.setattr(importlib.metadata, "version", version)
    monkeypatch.setattr(importlib.metadata, "distributions", distributions)


def test_an_environment_that_is_half_there_is_one_line_before_anything_is_imported() -> None:
    """An interpreter without any library. Tried without the look: a traceback."""
    assert missing_requirements() == []
    ended = subprocess.run([sys.executable, "-S", "train.py"], cwd=PROJECT, capture_output=True, text=True)
    assert ended.returncode == 2
    (line,) = ended.stderr.splitlines()
    assert line.startswith("not installed: torch, torchvision, accelerate, datasets, ")
    assert line.endswith(f"{sys.executable} -m pip install -e '{PROJECT}'")


@pytest.mark.parametrize(
    ("versions", "says"),
    [
        ({"evaluate": None, "tqdm": None}, "not installed: evaluate, tqdm: "),
        ({"torch": "2.10.0+cu128"}, "torch 2.10.0+cu128 is installed, and torch>=2.11 is needed: "),
        ({"torch": "2.11.0a0"}, "torch 2.11.0a0 is installed, and torch>=2.11 is needed: "),
        # NVIDIA's images have pre-releases; tried without `prereleases`: refused
        ({"torch": "2.12.0a0+0123456.nv26.06"}, None),
    ],
)
def test_what_is_missing_or_too_old(monkeypatch: pytest.MonkeyPatch, versions: Any, says: str | None) -> None:
    install(monkeypatch, **versions)
    found = missing_requirements()
    assert len(found) == bool(says)
    assert not says or found[0].startswith(says)


def test_what_is_missing_is_in_the_environment_of_the_project_if_there_is_one(tmp_path: Path) -> None:
    """Which is then named, so that nobody installs all of it again, by an older Python too. Tried without the look: a
    `pip install`."""
    (tmp_path / "src").mkdir()
    for file in ("src/__init__.py", "src/requirements.py", "requirements.txt"):
        shutil.copy(PROJECT / file, tmp_path / file)
    (tmp_path / ".venv/bin").mkdir(parents=True)
    (tmp_path / ".venv/bin/activate").touch()
    older = "import sys; sys.version_info = (3, 9, 2); import src"
    for how in ("import src", older):
        done = subprocess.run([sys.executable, "-S", "-c", how], cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 2
        (line,) = done.stderr.splitlines()
        assert line.startswith("not installed: torch, " if how != older else "Python 3.11 or newer is needed, ")
        assert line.endswith(f": run `. .venv/bin/activate` first, as this is {sys.executable}")
    (tmp_path / ".venv/bin/python").symlink_to(sys.executable)  # the one that lacks it
    done = subprocess.run([".venv/bin/python", "-S", "-c", "import src"], cwd=tmp_path, capture_output=True, text=True)
    assert "run `make setup` or, in an environment of your own, " in done.stderr


def test_requirements_are_read_in_any_form(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Those that a user adds. Tried with names that a bound follows at once: only the last is seen."""
    monkeypatch.setattr(requirements, "PROJECT", tmp_path)
    file = tmp_path / "requirements.txt"
    file.write_text("torch\n-e .\n# pandas>=999\nno-such  # yet\nnor[this] >= 1\nnor-that>=1\n")
    (line,) = missing_requirements()
    assert line.startswith("not installed: no-such, nor, nor-that: ")
    file.write_text("torch >= 999  # of next year\nnumpy~=999.0\npsutil!=7\naccelerate[testing]>=1\n")
    install(monkeypatch, psutil="7")
    named = [line.partition(" is needed: ")[0].partition(", and ")[2] for line in missing_requirements()]
    assert named == ["torch >= 999", "numpy~=999.0", "psutil!=7"]


@needs("src/tasks/text")
@pytest.mark.parametrize("version", ["5.16.1", "6.0.0"])
def test_so_is_a_transformers_that_is_not_asked_for(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    install(monkeypatch, transformers=version)
    assert missing_requirements() == []  # what has nothing to do with texts goes on
    (line,) = missing_requirements("text")
    assert line.startswith(f"transformers {version} is installed, and transformers>=5.17,<6 is needed: ")
    assert line.endswith(f"pip install -e '{PROJECT}[text]'")


def test_an_older_python_can_read_the_line_about_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """By its grammar. train.py imports src/__init__.py first, and that one this."""
    for file in ("train.py", "src/__init__.py", "src/requirements.py"):
        ast.parse((PROJECT / file).read_text(), feature_version=(3, 8))
    monkeypatch.setattr(sys, "version_info", (3, 10, 4))
    (line,) = missing_requirements()
    assert line.startswith("Python 3.11 or newer is needed, and this is ")
