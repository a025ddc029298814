"""Whole runs, started as a user starts them: their accuracy, their files, what they print and what W&B gets."""

import json
import re
import shlex
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from src.tasks.mnist import MnistCnn
from tests.launching import BIN, PROJECT, WANDB, Launch, Rounding, Run, Whole, needs, run_command, slow

HAS_REPORT = (PROJECT / "src/tracking/report.py").exists()
MEASURED = {
    "perf/data_seconds", "perf/compute_seconds", "perf/step_seconds", "perf/own_seconds", "perf/own_seconds_max",
    "perf/peak_memory_bytes",
}  # fmt: skip
MEASURED = MEASURED if (PROJECT / "src/tracking/performance.py").exists() else set()
GPU_YAMLS = [
    ("fsdp", 2, "fsdp"), ("fsdp", 1, "fsdp"), ("ddp_bf16_hook", 2, "ddp"), slow("single_gpu", 1, "single"),
    slow("ddp", 2, "ddp"), slow("ddp", 1, "single"), slow("fsdp_grad_op", 2, "fsdp_grad_op"),
    slow("fsdp_offload", 2, "fsdp_offload"), slow("fsdp_offload", 1, "fsdp_offload"), slow("fsdp_fp8", 2, "fsdp"),
]  # fmt: skip
needs_wandb = needs("src/tracking/wandb.py")


@pytest.fixture
def digits(whole: Whole) -> Run:
    """A short version of `make train`."""
    arguments = ("--config=configs/digits.yaml", "--epochs=5", "--eval_every=69", "--log_every=23")
    return whole("cpu", *arguments, wandb="auto")


def test_the_digits_are_learnt_and_the_run_writes_exactly_its_files(digits: Run) -> None:
    assert digits.losses[0] > 2 * digits.losses[-1]
    files = {"config.yaml", "metrics.jsonl", "summary.json", "status.json", "checkpoints", "model"}
    files |= {"wandb"} if WANDB else set()
    files |= {"report.html"} if HAS_REPORT else set()
    assert {path.name for path in digits.folder.iterdir()} == files
    assert {path.name for path in (digits.folder / "model").iterdir()} == {"model.safetensors", "README.md"}
    summary = digits.summary
    facts = {"step": 115, "epoch": 5, "parameters": 1_199_882, "strategy": "single", "num_processes": 1}
    facts |= {"device": "cpu", "eval/examples": 359, "train/loss": digits.losses[-1]}
    assert facts.items() <= summary.items()
    assert summary["eval/accuracy"] >= 0.97
    assert summary["eval/loss"] < 0.3
    assert [peak > 2**20 for peak in summary["peak_memory_bytes"]] == [True]
    assert 0 < 5 * 1438 / summary["samples_per_second"] < summary["seconds"]
    assert digits.stderr == ""


def test_each_record_is_a_json_object_with_its_step_first(digits: Run) -> None:
    assert all(next(iter(record)) == "step" for record in digits.records)
    training = {record["step"]: set(record) for record in digits.records if "train/loss" in record}
    names = {"step", "epoch", "train/loss", "train/lr", "train/grad_norm", "perf/samples_per_second", *MEASURED}
    assert training == dict.fromkeys(range(23, 116, 23), names)
    assert [record["step"] for record in digits.records if "eval/loss" in record] == [69, 115]


def wandb_records(run: Run) -> tuple[str, list[int]]:
    """Return what W&B's own program reads in its log, and the exit codes in it."""
    (file,) = run.folder.glob("wandb/offline-run-*/*.wandb")
    shown = run_command([str(BIN / "wandb"), "leet", "inspect", "--json", str(file)], run.folder).succeeded().stdout
    records = [json.loads(line) for line in shown.splitlines()]
    return json.dumps(records), [record["exit"].get("exit_code", 0) for record in records if "exit" in record]


@needs_wandb
def test_wandb_offline_holds_config_strategy_history_and_success(digits: Run) -> None:
    text, exit_codes = wandb_records(digits)
    for expected in ("train/loss", "eval/accuracy", "digits", "requested", "accelerate_configs/cpu.yaml"):
        assert expected in text
    assert exit_codes == [0]


@pytest.mark.parametrize(("yaml", "processes", "strategy"), GPU_YAMLS)
def test_each_yaml_runs_without_a_gpu_and_says_so(launch: Launch, yaml: str, processes: int, strategy: str) -> None:
    hook = ["--ddp_comm_hook=bf16"] if yaml == "ddp_bf16_hook" else []  # as the yaml's header says
    run = launch(yaml, "--max_steps=2", "--optim.max_grad_norm=0.1", *hook, processes=processes).succeeded()
    first = run.stdout.splitlines()[processes > 1]  # several processes say first that they are starting
    assert first.startswith("no GPU here: the CPU stand-in for ")
    assert f"{yaml}.yaml, {processes} process" in first
    assert ("sharding for real" in first) == yaml.startswith("fsdp")
    facts = {"strategy": strategy, "num_processes": processes, "precision": "fp32"}
    facts |= {"comm_hook": "bf16" if hook else None, "requested_precision": "fp8" if yaml == "fsdp_fp8" else "bf16"}
    assert facts.items() <= run.summary.items()
    assert len(run.summary["peak_memory_bytes"]) == processes
    assert sorted(load_file(run.folder / "model" / "model.safetensors")) == sorted(MnistCnn().state_dict())
    assert run.stderr == ""


def test_muon_takes_the_same_steps_offloaded(launch: Launch, whole: Whole, rounding: Rounding) -> None:
    arguments = ("--optim.name=muon", "--optim.lr=3e-4", "--optim.schedule=constant", "--optim.warmup_steps=0",
                 "--task.dropout=0", "--max_steps=5", "--log_every=1")  # fmt: skip
    alone = whole("cpu", *arguments)
    assert alone.losses[-1] < alone.losses[0] - 0.02
    within = rounding("cpu", *arguments)  # torch's Muon computes in bf16
    assert launch("fsdp_offload", *arguments).succeeded().losses == pytest.approx(alone.losses, rel=within)


def test_bf16_on_request_computes_in_bf16_and_keeps_weights_in_fp32(launch: Launch) -> None:
    arguments = ("--max_steps=5", "--log_every=1", "--task.dropout=0", "--optim.schedule=constant")
    half = launch("fsdp", *arguments, launcher_arguments=("--mixed_precision=bf16",)).succeeded()
    full = launch("cpu", *arguments).succeeded()
    assert (half.summary["precision"], full.summary["precision"]) == ("bf16", "fp32")
    assert half.losses != pytest.approx(full.losses, rel=1e-5)
    assert half.losses == pytest.approx(full.losses, rel=2 * torch.finfo(torch.bfloat16).eps)
    weights = load_file(half.folder / "model" / "model.safetensors")
    assert {weight.dtype for weight in weights.values()} == {torch.float32}


def test_a_bug_keeps_its_traceback_and_is_reported_as_a_crash(launch: Launch) -> None:
    run = launch("cpu", before="import src.training.optim; src.training.optim.set_lr = None", wandb="auto")
    assert run.exit_code == 1
    assert "TypeError: 'NoneType' object is not callable" in run.stderr
    assert run.messages == []
    assert not (run.folder / "summary.json").exists()
    if WANDB:
        recorded, exit_codes = wandb_records(run)
        assert exit_codes == [1]
        alert = '"text": "step 0: TypeError: \'NoneType\' object is not callable", "title": "mnist: crash"'
        assert alert in recorded


@needs_wandb
def test_wandb_online_without_a_network_falls_back_to_offline(launch: Launch) -> None:
    account = {"WANDB_API_KEY": "0" * 40, "WANDB_BASE_URL": "http://127.0.0.1:9", "WANDB_INIT_TIMEOUT": "1"}
    # silent: else wandb.login asks the server for 5 seconds whose key this is
    run = launch("cpu", "--max_steps=2", wandb="auto", WANDB_SILENT="true", **account).succeeded()
    assert "W&B        offline (could not go online: " in run.stdout
    assert list(run.folder.glob("wandb/offline-run-*"))


@needs_wandb
@pytest.mark.parametrize(("mode", "variable"), [("auto", "disabled"), ("disabled", "online")])
def test_wandb_is_switched_off_by_its_variable_or_by_our_setting(launch: Launch, mode: str, variable: str) -> None:
    run = launch("cpu", "--max_steps=1", wandb=mode, WANDB_MODE=variable).succeeded()
    assert "W&B" not in run.stdout
    assert not (run.folder / "wandb").exists()


def test_config_yaml_repeats_the_run_by_plain_python_in_a_terminal(launch: Launch, tmp_path: Path) -> None:
    """Under another run_name alone, although the first run had an output_dir of its own."""
    first = launch("cpu", "--config=configs/digits.yaml", "--max_steps=3", "--log_every=1").succeeded()
    command = [sys.executable, f"{PROJECT}/train.py", f"--config={first.folder}/config.yaml", "--run_name=again"]
    shell = f"stty cols 140 rows 40; exec {shlex.join(command)}"
    in_terminal = f"import os, pty, sys; sys.exit(os.waitstatus_to_exitcode(pty.spawn(['sh', '-c', {shell!r}])))"
    run = run_command([sys.executable, "-c", in_terminal], tmp_path / "runs" / "again", cwd=tmp_path).succeeded()
    assert run.losses == first.losses
    assert (run.summary["strategy"], run.summary["num_processes"]) == ("single", 1)
    assert re.search(r"100%.* 3/3 .*loss \d.*samples/s", run.stdout)
    assert run.stdout.count("done in") == 1
