"""A run does what the yaml asks for, or one line says why not, with exit code 2, no traceback and no file."""

import ast
import importlib.metadata
import re
import shutil
import subprocess
import sys
from fnmatch import fnmatchcase
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from src import requirements
from src.distributed.accelerator import choose_precision
from src.distributed.launcher import unusable_gpu
from src.requirements import missing_requirements
from tests.launching import BIN, PROJECT, QUIET, Launch, Run, needs, run_command

FSDP = yaml.safe_load((PROJECT / "accelerate_configs/fsdp.yaml").read_text())
ONE_GPU = "import torch.accelerator as a; a.is_available = lambda: True; a.device_count = lambda: 1"
OTHERS = "import os, accelerate as a, src.distributed.accelerator as d; d.Accelerator = lambda cpu, **_: "
APART = f"{OTHERS} a.Accelerator()"
WITHOUT_FSDP = f"{OTHERS} os.environ.pop('ACCELERATE_USE_FSDP') and a.Accelerator(cpu=cpu)"
NO_BLOCKS = "from src.tasks.mnist import MnistCnn; MnistCnn._no_split_modules = []"


def with_layer(code: str) -> str:
    """Return code that adds a layer to MNIST's CNN."""
    return f"""
from src.tasks.mnist import MnistCnn, nn, torch
build = MnistCnn.__init__
def with_layer(self, *arguments, **named):
    build(self, *arguments, **named)
    {code}
MnistCnn.__init__ = with_layer
"""


def rows(number: int) -> str:
    """Return code that leaves this many examples to train on."""
    return f"""
from src.tasks.mnist import Digits, Mnist
read = Mnist.build_datasets
def cut(self):
    train, evaluation = read(self)
    return Digits(train.images[:{number}], train.labels[:{number}]), evaluation
Mnist.build_datasets = cut
"""


def refused(run: Run) -> str:
    """Return the one line that ended the run, the first on standard error, with nothing written."""
    assert run.exit_code == 2, run.stdout
    (message,) = run.messages
    assert next(line for line in run.stderr.splitlines() if "Warning" not in line) == message
    assert 'train.py", line' not in run.stderr, "a traceback"
    assert not run.folder.exists()
    return message.removeprefix("train.py: ")


@pytest.mark.parametrize(
    ("config", "arguments", "more", "says"),
    [
        ("fsdp", [], {"launcher_arguments": ("--parallelism_config_cp_size=2",)}, "--parallelism_config_cp_size: "
         "*/fsdp.yaml has no parallelism_config; use a yaml that has one"),
        ("fsdp", ["--ddp_comm_hook=bf16"], {}, "ddp_comm_hook=bf16 is for DDP, not FSDP: remove it"),
        ("ddp", ["--cuda_graphs=true"], {}, "cuda_graphs=true needs one NVIDIA GPU, *"),
        ("ddp", [], {"processes": 3}, "global_batch_size=64: not a multiple of 3 processes*"),
        ("cpu", ["--epochs=2", "--optim.schedule=wsd", "--optim.warmup_steps=40", "--optim.decay_steps=30"],
         {}, "optim.warmup_steps=40 and optim.decay_steps=30: together 152.2% of the schedule"),
        ("cpu", [], {"processes": 2}, "2 processes were requested, but */cpu.yaml starts 1: use a yaml for several*"),
        ("ddp", [], {"before": ONE_GPU}, "2 processes on this machine, but it has 1 GPU(s): set --num_processes"),
        ("ddp", [], {"before": APART}, "2 processes were started, but each sees 1: refusing to train separate models"),
        ("fsdp", [], {"before": WITHOUT_FSDP}, "the yaml asks for FSDP, but Accelerate chose *"),
        ("fsdp", [], {"before": NO_BLOCKS}, "FSDP would gather the whole model at once: name its repeating blocks*"),
        ("fsdp", [], {"before": with_layer("self.scale = nn.Parameter(torch.ones(()))")}, "FSDP: fully_shard doesn't "
         "support scalar parameters. Change scale to a 1D tensor *"),
        ("ddp", [], {"before": rows(0)}, "the training set is empty"),
        ("cpu", [], {"ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "4"}, "ACCELERATE_GRADIENT_* is set *would override*"),
        ("ddp", [], {"ACCELERATE_USE_FSDP": "true"}, "ACCELERATE_USE_FSDP=true is set *would override the yaml*"),
        ("fsdp", [], {"FSDP_IGNORED_MODULES": "fc1"}, "FSDP_IGNORED_MODULES=fc1 is set *would override the yaml*"),
    ],
)  # fmt: skip
def test_what_cannot_run_as_asked_is_refused(
    launch: Launch, config: str, arguments: list[str], more: Any, says: str
) -> None:
    found = refused(launch(config, "--max_steps=1", *arguments, **more))
    assert fnmatchcase(found, says), found


def fsdp(**changes: object) -> dict[str, Any]:
    return FSDP | {"fsdp_config": FSDP["fsdp_config"] | changes}


def mesh(**sizes: int) -> dict[str, Any]:
    return FSDP | {"parallelism_config": {f"parallelism_config_{name}_size": size for name, size in sizes.items()}}


@pytest.mark.parametrize(
    ("settings", "text", "says"),
    [
        (fsdp(fsdp_ofload_params=True), "", "{file}: fsdp_config has no key fsdp_ofload_params, did you mean "
         "fsdp_offload_params?"),
        (fsdp(fsdp_transformer_layer_cls_to_wrap="Linea"), "", "FSDP: Could not find the transformer layer class *"),
        (fsdp(fsdp_activation_checkpointing=True), "", "fsdp_activation_checkpointing computes wrong gradients with *"),
        (fsdp(fsdp_auto_wrap_policy="NO_WRAP"), "", "fsdp_auto_wrap_policy: NO_WRAP gathers the whole model at once*"),
        (fsdp(fsdp_auto_wrap_policy="SIZE_BASED_WRAP", fsdp_min_num_params=100_000_000), "", "FSDP would gather the *"),
        (fsdp(fsdp_auto_wrap_policy="BY_SIZE"), "", "accelerate: Invalid auto wrap policy: BY_SIZE. Must be one of *"),
        (FSDP | {"distributed_type": "MEGATRON_LM"}, "", "Megatron-LM is not supported: use one of *"),
        ({"num_processes": 1, "distributed_type": "NO", "dynamo_config": {"dynamo_backend": "EAGER"}}, "",
         "dynamo_config is not supported*"),
        (FSDP | {"mixed_precision": "fp8", "fp8_config": {"backend": "TE"}}, "", "fp8_config: only torchao's fp8 is *"),
        (fsdp(), "fsdp_config: {fsdp_version: 2}", "{file}: *found duplicate key \"fsdp_config\" *"),
        ({"num_processes": 2, "distributed_type": "FSDP"}, "fsdp_config: &a {fsdp_version: 2, more: *a}",
         "{file}: Circular reference detected"),
        (mesh(tp=2), "", "parallelism_config: tp_size is not supported: *"),
        (mesh(sp=2), "", "parallelism_config: sp_size is not supported: *"),
        (mesh(dp_shard=3), "", "parallelism_config: dp_replicate_size x dp_shard_size x cp_size is 3 and must equal *"),
        (mesh(dp_replicate=2), "", "accelerate: FSDP is enabled but the parallelism config has no dimension for *"),
        (mesh(cp=2), "", "task.name=mnist: cp_size needs FSDP, and a task that can split sequences: remove it"),
    ],
)  # fmt: skip
def test_a_yaml_that_asks_for_what_is_not_supported_is_refused(
    launch: Launch, tmp_path: Path, settings: dict[str, Any], text: str, says: str
) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(yaml.safe_dump(settings) + text)
    found = refused(launch(file, "--max_steps=1"))
    assert fnmatchcase(found, says.format(file=file)), found


OLD = {"version": 1, "sharding_strategy": "HYBRID_SHARD", "reshard_after_forward": "SHARD_GRAD_OP"}
OLD |= {"backward_prefetch": "NO_PREFETCH", "forward_prefetch": True, "use_orig_params": False}
SAME = {"sharding_strategy": "FULL_SHARD", "backward_prefetch": "BACKWARD_PRE", "use_orig_params": True}


@pytest.mark.parametrize(
    ("keys", "lines"), [(OLD, 6), ({"sharding_strategy": 2}, 1), ({"sharding_strategy": "NO_SHARD"}, 1), (SAME, 0)]
)
def test_keys_of_fsdp_1_are_answered_all_at_once(
    launch: Launch, tmp_path: Path, keys: dict[str, object], lines: int
) -> None:
    """Accelerate ignores them. Those that ask for what FSDP 2 does may stay."""
    file = tmp_path / "mine.yaml"
    file.write_text(yaml.safe_dump(fsdp(**{f"fsdp_{key}": value for key, value in keys.items()})))
    run = launch(file, "--dry-run")
    assert run.exit_code == (2 if lines else 0)
    assert len(run.messages) == lines
    assert all(re.search(r"FSDP (version )?1\b.*: (in|write|use|leave) ", line) for line in run.messages)


@needs("src/tasks/text")
@pytest.mark.parametrize("has_blocks", [True, False])
def test_a_language_model_that_fsdp_gathers_whole_gets_a_line(
    launch: Launch, shared: Path, tmp_path: Path, has_blocks: bool
) -> None:
    """Its embeddings, last norm and head are always FSDP units of their own."""
    changes = {} if has_blocks else {"fsdp_auto_wrap_policy": "SIZE_BASED_WRAP", "fsdp_min_num_params": 100_000_000}
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(fsdp(**changes)))
    task = import_module("tests.text.tasks").TEXT["lm"].ready(shared)
    run = task.run(launch, tmp_path / "mine.yaml", "--dry-run").succeeded()
    assert ("FSDP gathers 0.1 of 0.1 MB of weights at once, more than any block has: " in run.stdout) != has_blocks


NORM = "self.fc2 = nn.Sequential(nn.BatchNorm1d(128), self.fc2)"
NORM_OF_PICTURES = "self.conv1 = nn.Sequential(nn.BatchNorm2d(1), self.conv1)"
FROZEN = f"{NORM}; self.fc2[0].train = lambda mode=True: self.fc2[0]; self.fc2[0].training = False"
SPARE = "self.spare = nn.Linear(2, 2)"


@pytest.mark.parametrize(
    ("config", "code", "warns"), [("ddp", NORM, True), ("cpu", NORM, False), ("ddp", FROZEN, False)]
)
def test_batch_norm_on_several_processes_gets_a_line(launch: Launch, config: str, code: str, warns: bool) -> None:
    run = launch(config, "--dry-run", before=with_layer(code)).succeeded()
    assert ("\n  BatchNorm normalizes over the examples of its own process, so the curve " in run.stdout) == warns


def test_batch_norm_is_evaluated_as_it_is_exported(launch: Launch) -> None:
    """FSDP leaves each process its own statistics: those of the first are broadcast. Else the losses are 7e-5 apart."""
    arguments = ("--max_steps=8", "--global_batch_size=8", "--optim.lr=1e-5")
    ddp, fsdp = (launch(config, *arguments, before=with_layer(NORM)).succeeded() for config in ("ddp", "fsdp"))
    assert fsdp.summary["eval/loss"] == pytest.approx(ddp.summary["eval/loss"], rel=1e-6)


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
    """Torch would end it in step 2, or at the end of the epoch."""
    run = launch(config, "--max_steps=2", before=before)
    assert run.exit_code == (2 if says else 0), run.stdout + run.stderr
    assert not says or fnmatchcase(run.messages[0], f"train.py: {says}")
    assert "Traceback" not in run.stderr


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


TAKES_LONG = """
import time
from datetime import timedelta
from accelerate import Accelerator, InitProcessGroupKwargs
from src.distributed.accelerator import local_main_process_first

accelerator = Accelerator(cpu=True, kwargs_handlers=[InitProcessGroupKwargs(timeout=timedelta(seconds=2))])
with local_main_process_first(accelerator):
    time.sleep(3 * accelerator.is_main_process)
    print(accelerator.process_index, end="")
accelerator.end_training()
"""


def test_the_others_wait_longer_for_the_first_than_collectives_do(launch: Launch, tmp_path: Path) -> None:
    """Downloading and tokenizing may take hours; Accelerate's own local_main_process_first times out."""
    (tmp_path / "script.py").write_text(TAKES_LONG)
    assert launch("ddp", script=str(tmp_path / "script.py")).succeeded().stdout == "01"


# ------------------------------------------------------------ what is installed

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
def test_a_gpu_that_torch_cannot_use_gets_a_line(
    monkeypatch: pytest.MonkeyPatch, cuda: str | None, error: str, tool: str | None, says: str | None
) -> None:
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


def without_libraries(folder: Path, *words: str, python: str = sys.executable) -> str:
    """Return the one line by which an interpreter without libraries ends."""
    ended = subprocess.run([python, "-S", *words], cwd=folder, capture_output=True, text=True)
    assert ended.returncode == 2
    (line,) = ended.stderr.splitlines()
    return line


def test_missing_libraries_are_one_line_before_anything_is_imported() -> None:
    assert missing_requirements() == []
    line = without_libraries(PROJECT, "train.py")
    assert line.startswith("not installed: torch, torchvision, accelerate, datasets, ")
    assert line.endswith(f"{sys.executable} -m pip install -e '{PROJECT}'")


def test_missing_libraries_are_in_the_projects_environment_if_it_has_one(tmp_path: Path) -> None:
    (tmp_path / "src").mkdir()
    for file in ("src/__init__.py", "src/requirements.py", "requirements.txt"):
        shutil.copy(PROJECT / file, tmp_path / file)
    (tmp_path / ".venv/bin").mkdir(parents=True)
    (tmp_path / ".venv/bin/activate").touch()
    line = without_libraries(tmp_path, "-c", "import src")
    assert line.startswith("not installed: torch, ")
    assert line.endswith(f": run `. .venv/bin/activate` first, as this is {sys.executable}")
    (tmp_path / ".venv/bin/python").symlink_to(sys.executable)  # the one that lacks it
    line = without_libraries(tmp_path, "-c", "import src", python=".venv/bin/python")
    assert "run `make setup` or, in an environment of your own, " in line


def test_an_older_python_can_read_the_line_about_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    for file in ("train.py", "src/__init__.py", "src/requirements.py"):
        ast.parse((PROJECT / file).read_text(), feature_version=(3, 8))
    monkeypatch.setattr(sys, "version_info", (3, 10, 4))
    (line,) = missing_requirements()
    assert line.startswith("Python 3.11 or newer is needed, and this is ")


VERSION, DISTRIBUTIONS = importlib.metadata.version, importlib.metadata.distributions


def install(monkeypatch: pytest.MonkeyPatch, **versions: str | None) -> None:
    """Have these libraries installed in these versions; None: not installed."""

    def distributions(**of: Any) -> Any:
        return [] if versions.get(of["name"], "") is None else DISTRIBUTIONS(**of)

    monkeypatch.setattr(importlib.metadata, "version", lambda name: versions.get(name) or VERSION(name))
    monkeypatch.setattr(importlib.metadata, "distributions", distributions)


@pytest.mark.parametrize(
    ("required", "versions", "says"),
    [
        ("evaluate\ntorch\ntqdm", {"evaluate": None, "tqdm": None}, "not installed: evaluate, tqdm: "),
        ("-e .\n# pandas>=999\nno-such  # yet\nnor[this] >= 1", {}, "not installed: no-such, nor: "),
        ("torch>=2.11", {"torch": "2.10.0+cu128"}, "torch 2.10.0+cu128 is installed, and torch>=2.11 is needed: "),
        ("torch>=2.11", {"torch": "2.11.0a0"}, "torch 2.11.0a0 is installed, and torch>=2.11 is needed: "),
        ("torch>=2.11", {"torch": "2.12.0a0+0123456.nv26.06"}, None),  # NVIDIA's images have pre-releases
        ("torch >= 999  # of next year", {"torch": "3"}, "torch 3 is installed, and torch >= 999 is needed: "),
        ("psutil!=7\naccelerate[testing]>=1", {"psutil": "7"}, "psutil 7 is installed, and psutil!=7 is needed: "),
    ],
)
def test_a_library_that_is_missing_or_of_a_wrong_version_is_one_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, required: str, versions: Any, says: str | None
) -> None:
    (tmp_path / "requirements.txt").write_text(required)
    monkeypatch.setattr(requirements, "PROJECT", tmp_path)
    install(monkeypatch, **versions)
    found = missing_requirements()
    assert len(found) == bool(says)
    assert not says or found[0].startswith(says)


@needs("src/tasks/text")
@pytest.mark.parametrize("version", ["5.16.1", "6.0.0"])
def test_a_transformers_that_is_too_old_or_new_concerns_text_alone(
    monkeypatch: pytest.MonkeyPatch, version: str
) -> None:
    install(monkeypatch, transformers=version)
    assert missing_requirements() == []
    (line,) = missing_requirements("text")
    assert line.startswith(f"transformers {version} is installed, and transformers>=5.17,<6 is needed: ")
    assert line.endswith(f"pip install -e '{PROJECT}[text]'")
