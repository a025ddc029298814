"""What the yaml asks for is what runs, or nothing does: one line, exit code 2, no traceback, no file."""

import sys
from pathlib import Path

import pytest
import yaml

from src.launch_guard import choose_precision
from tests.launching import BIN, PROJECT, Launch, Run, run_command

FSDP = yaml.safe_load((PROJECT / "accelerate_configs" / "fsdp.yaml").read_text())


def refused(run: Run) -> str:
    """The one line that ends `run`, first on standard error, with nothing written."""
    assert run.exit_code != 0, run.stdout
    (message,) = run.messages
    shown = [line for line in run.stderr.splitlines() if "Warning" not in line]
    assert shown[0] == message
    assert 'train.py", line' not in run.stderr, "a traceback"
    assert not run.folder.exists()
    return message.removeprefix("train.py: ")


def fsdp_yaml(folder: Path, **changes: object) -> Path:
    file = folder / "mine.yaml"
    file.write_text(yaml.safe_dump(FSDP | {"fsdp_config": FSDP["fsdp_config"] | changes}))
    return file


def test_the_exit_code_is_2(tmp_path: Path) -> None:
    command = [sys.executable, "train.py", "--sed=1", f"--output_dir={tmp_path}/run"]
    run = run_command(command, tmp_path / "run")
    assert (run.exit_code, run.stderr) == (2, "train.py: --sed=1: unknown setting, did you mean seed?\n")


@pytest.mark.parametrize(("processes", "real"), [(2, True), (4, False)])
def test_one_message_for_all_processes(launch: Launch, processes: int, real: bool) -> None:
    assert (
        refused(launch("ddp", "--sed=1", processes=processes, real=real))
        == "--sed=1: unknown setting, did you mean seed?"
    )


def test_a_batch_that_processes_cannot_share(launch: Launch) -> None:
    assert refused(launch("ddp", processes=3)).startswith("global_batch_size=64: not a multiple of 3 processes")


def test_data_that_cannot_be_read_is_one_message_too(launch: Launch, tmp_path: Path) -> None:
    for name in (
        "train-images-idx3-ubyte",
        "train-labels-idx1-ubyte",
        "t10k-images-idx3-ubyte",
        "t10k-labels-idx1-ubyte",
    ):
        (tmp_path / name).write_bytes(b"\0\0\x08\x03\0")
    says = refused(launch("fsdp", "--task.source=mnist", f"--task.data_dir={tmp_path}"))
    assert says.startswith(f"{tmp_path}/train-images-idx3-ubyte: truncated or not an IDX file of images (5 bytes)")


def test_a_yaml_that_starts_one_process_where_several_are_asked_for(launch: Launch) -> None:
    says = refused(launch("cpu", processes=2))
    assert says.startswith("2 processes were asked for, but ")
    assert says.endswith("cpu.yaml starts 1: take a yaml for several, such as accelerate_configs/ddp.yaml")


def test_a_misspelt_fsdp_key(launch: Launch, tmp_path: Path) -> None:
    file = fsdp_yaml(tmp_path, fsdp_ofload_params=True)
    says = refused(launch(file, real=True))
    assert says == f"{file}: fsdp_config has no key fsdp_ofload_params, did you mean fsdp_offload_params?"


def test_a_group_that_the_yaml_has_twice(launch: Launch, tmp_path: Path) -> None:
    """Tried without: it trains by the second one alone."""
    file = fsdp_yaml(tmp_path)
    file.write_text(file.read_text() + "fsdp_config: {fsdp_version: 2}\n")
    assert refused(launch(file)).startswith(f"{file}: fsdp_config is there 2 times, in line ")


def test_a_communication_hook_under_fsdp(launch: Launch, tmp_path: Path) -> None:
    file = fsdp_yaml(tmp_path, ddp_comm_hook="bf16")
    assert refused(launch(file)) == f"{file}: ddp_comm_hook is DDP's, FSDP has none: take it out"


def test_a_communication_hook_that_there_is_not(launch: Launch, tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("distributed_type: MULTI_GPU\nnum_processes: 2\nfsdp_config: {ddp_comm_hook: int8}")
    says = "ddp_comm_hook=int8: must be bf16 or fp16, or be left out"
    assert refused(launch(file)) == f"{file}: {says}"


def test_fsdp1s_sharding_strategy(launch: Launch, tmp_path: Path) -> None:
    says = refused(launch(fsdp_yaml(tmp_path, fsdp_sharding_strategy="SHARD_GRAD_OP")))
    assert says.startswith("fsdp_sharding_strategy has no effect in FSDP2: set fsdp_reshard_after_forward")


def test_fsdp_switched_off_on_the_command_line(launch: Launch) -> None:
    says = refused(launch("fsdp", processes=1, launcher_arguments=("--cpu",)))
    assert says.endswith("fsdp.yaml asks for FSDP, but the command line switched it off: take another yaml")


def test_use_cpu_for_several_processes(launch: Launch, tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("distributed_type: MULTI_GPU\nnum_processes: 2\nuse_cpu: true")
    assert refused(launch(file)) == f"{file}: use_cpu has no effect on several processes: take it out"


def test_fsdp_version_1(launch: Launch, tmp_path: Path) -> None:
    says = refused(launch(fsdp_yaml(tmp_path, fsdp_version=1)))
    assert says == "FSDP version 1 is not supported here: set fsdp_version: 2 in the yaml's fsdp_config"


def test_blocks_in_the_yaml_that_the_model_has_not(launch: Launch, tmp_path: Path) -> None:
    says = refused(launch(fsdp_yaml(tmp_path, fsdp_transformer_layer_cls_to_wrap="Linea")))
    assert says == "fsdp_transformer_layer_cls_to_wrap names Linea, which MnistCnn has not, did you mean Linear?"


def test_fsdps_own_activation_checkpointing(launch: Launch, tmp_path: Path) -> None:
    says = refused(launch(fsdp_yaml(tmp_path, fsdp_activation_checkpointing=True)))
    assert says.startswith("fsdp_activation_checkpointing computes wrong gradients with dropout")


@pytest.mark.parametrize(
    ("yaml", "name", "value"),
    [
        ("cpu", "ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "4"),
        ("ddp", "ACCELERATE_USE_FSDP", "true"),
        ("fsdp", "FSDP_IGNORED_MODULES", "fc1"),
        ("cpu", "ACCELERATE_TORCH_DEVICE", "cpu"),
        ("ddp", "ACCELERATE_USE_CPU", "true"),
    ],
)
def test_a_variable_that_overrides_the_settings(launch: Launch, yaml: str, name: str, value: str) -> None:
    says = refused(launch(yaml, real=name == "FSDP_IGNORED_MODULES", **{name: value}))
    assert says == f"{name}={value} is set in the environment and would override the settings: unset it"


@pytest.mark.parametrize(
    ("blocks", "says"),
    [
        ("[]", "FSDP wrapped nothing but the root: name the repeating blocks of MnistCnn in its _no_split_modules"),
        ("['Conv2D']", "_no_split_modules names Conv2D, which MnistCnn has not, did you mean Conv2d?"),
    ],
)
def test_fsdp_that_wraps_only_the_root(launch: Launch, blocks: str, says: str) -> None:
    code = f"from src.models.mnist_cnn import MnistCnn; MnistCnn._no_split_modules = {blocks}"
    assert refused(launch("fsdp", "--max_steps=1", before=code)).startswith(says)


def test_processes_that_do_not_see_each_other(launch: Launch) -> None:
    code = "import accelerate, src.distributed; src.distributed.Accelerator = lambda cpu, **_: accelerate.Accelerator()"
    says = refused(launch("ddp", "--max_steps=1", before=code))
    assert says == "2 processes were started, but each sees 1: refusing to train separate models"


def test_more_processes_than_gpus(launch: Launch) -> None:
    code = "import torch.accelerator as a; a.is_available = lambda: True; a.device_count = lambda: 1"
    says = refused(launch("ddp", "--max_steps=1", before=code))
    assert says == "2 processes on this machine, but it has 1 GPU(s): add --num_processes=1"


@pytest.mark.parametrize("yaml", ["cpu", "ddp"])
def test_cuda_graphs_without_a_gpu(launch: Launch, yaml: str) -> None:
    says = refused(launch(yaml, "--cuda_graphs=true"))
    assert says == "cuda_graphs=true is for one process on one NVIDIA GPU: take single_gpu.yaml, or leave it out"


def test_a_gpu_without_bf16_trains_in_fp32_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.is_bf16_supported", lambda including_emulation: False)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda: "Tesla T4")
    assert choose_precision(None, "bf16", is_stand_in=False) == ("no", "Tesla T4 has no bf16: training in fp32")


def test_fsdp_silently_dropped(launch: Launch) -> None:
    code = (
        "import os, accelerate, src.distributed\n"
        "def without_fsdp(cpu, **_):\n"
        "    del os.environ['ACCELERATE_USE_FSDP']\n"
        "    return accelerate.Accelerator(cpu=cpu)\n"
        "src.distributed.Accelerator = without_fsdp"
    )
    says = refused(launch("fsdp", "--max_steps=1", before=code))
    assert says.startswith("the yaml asks for FSDP, but Accelerate chose ")


def test_a_bug_keeps_its_traceback(launch: Launch) -> None:
    code = "import src.optim, torch; src.optim.set_lr = lambda *_: torch.zeros(2).view(3)"
    run = launch("ddp", "--max_steps=1", before=code)
    assert run.exit_code != 0
    assert run.messages == []
    assert "RuntimeError: shape '[3]' is invalid" in run.stderr


def test_torchrun_works_without_an_accelerate_yaml(tmp_path: Path) -> None:
    command = [str(BIN / "torchrun"), "--standalone", "--nproc_per_node=2", "train.py", "--task.source=digits"]
    command += ["--max_steps=2", f"--output_dir={tmp_path}/run", "--wandb.mode=disabled"]
    run = run_command(command, tmp_path / "run").succeeded()
    assert (run.summary["strategy"], run.summary["num_processes"]) == ("ddp", 2)
    assert "not started by an accelerate yaml" in run.stdout


def test_plain_python_is_one_process(tmp_path: Path) -> None:
    command = [sys.executable, "train.py", "--task.source=digits", "--max_steps=2", "--wandb.mode=disabled"]
    run = run_command([*command, f"--output_dir={tmp_path}/run"], tmp_path / "run").succeeded()
    assert (run.summary["strategy"], run.summary["num_processes"]) == ("single", 1)


@pytest.mark.parametrize("file", sorted((PROJECT / "accelerate_configs").glob("*.yaml")), ids=lambda file: file.stem)
def test_each_yaml_opens_with_when_to_use_it_and_its_command(file: Path) -> None:
    lines = file.read_text().splitlines()
    assert lines[0].startswith("# ")
    assert any(line.startswith(f"#   accelerate launch --config_file accelerate_configs/{file.name}") for line in lines)


def test_the_others_wait_as_long_as_the_first_process_takes(launch: Launch, tmp_path: Path) -> None:
    """To download and tokenise, longer than collectives do; Accelerate's own local_main_process_first fails here."""
    (tmp_path / "script.py").write_text("""
import os, time
from datetime import timedelta
from accelerate import Accelerator, InitProcessGroupKwargs
from src.distributed import local_main_process_first

accelerator = Accelerator(cpu=True, kwargs_handlers=[InitProcessGroupKwargs(timeout=timedelta(seconds=2))])
with local_main_process_first(accelerator):
    time.sleep(5 * accelerator.is_main_process)
    os.write(1, b"%d" % accelerator.process_index)
accelerator.wait_for_everyone()
accelerator.end_training()
""")
    assert launch("ddp", script=str(tmp_path / "script.py")).succeeded().stdout == "01"
