"""The plan of a run against the run: on a CPU, by --check, on the null GPU with a GPU's memory, and by hand."""

import json
import os
import platform
import re
import signal
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock

from plan import null_gpu, search
from plan.__main__ import main
from plan.estimate import seconds_of
from plan.gpus import Gpu, find_gpu
from plan.measure import Measured, Setup, environment_for, highest
from plan.null_gpu import null_environment
from plan.search import Row, explore, setups
from plan.show import recommendation, table
from src.config.config import load_config
from src.config.errors import UserError, raise_if_any
from src.tasks import TASKS
from tests.launching import BIN, PROJECT, QUIET, Launch, needs, run_command, slow
from tests.plan.planning import H100, SHAPE, llama, measured, setup

needs_text = needs("src/tasks/text/causal_lm.py")
needs_null_gpu = pytest.mark.skipif(bool(null_gpu.reason_to_skip()), reason=str(null_gpu.reason_to_skip()))
DIGITS = ("--task.source=digits", "--global_batch_size=8", "--micro_batch_size=1", *QUIET)
Plan = Callable[..., Any]
PLAN = (f"{BIN}/python", "-m", "plan", "--gpus", "1", "--yamls", "single_gpu")
WITH_A_TABLE = """
import pathlib, sys
from plan import __main__, gpus

gpus.TABLE = pathlib.Path(sys.argv[1])
__main__.main(sys.argv[2:])
"""
"""The plan, with another table of GPUs."""
RECORD_SIZES = """
import json, os, src.training.gradients
from torch.distributed.tensor import DTensor

step = src.training.gradients.step_if_finite

def size(tensors):
    return sum((t.to_local() if isinstance(t, DTensor) else t).nbytes for t in tensors)

def recorded(optimizers, norm):
    parameters = [p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]]
    sizes = {"parameters": size(parameters), "gradients": size(p.grad for p in parameters)}
    step(optimizers, norm)
    states = [state for optimizer in optimizers for state in optimizer.state.values()]
    sizes["optimizer"] = size(value for state in states for value in state.values())
    if os.environ["RANK"] == "0":
        open(os.environ["SIZES"], "w").write(json.dumps(sizes))

src.training.gradients.step_if_finite = recorded
"""
"""Code with which the first process of a run records how many bytes of tensors it holds."""


UNCOUNTED = """
import torch, train
evaluate_batches = train.evaluate_batches
train.evaluate_batches = lambda *arguments: evaluate_batches(*arguments)._replace(totals=torch.ones(3))
train.metrics_of = lambda *_: {"eval/loss": 1.0}
train.main()
"""
"""train.py on the null GPU, where no kernel counts what is evaluated."""


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    file = tmp_path_factory.mktemp("text") / "text.txt"
    file.write_text("to be or not to be, that is the question. " * 8000)
    return str(file)


DIGITS_ON = [("single_gpu", 1), ("ddp", 2), ("fsdp", 2), ("ddp", 3)]


def of_digits(folder: Path, yaml: str, gpus: int) -> Setup:
    """The digits in fp32, as a CPU trains, on machines of two GPUs."""
    file = folder / f"{yaml}.yaml"
    given = (PROJECT / "accelerate_configs" / file.name).read_text()
    file.write_text(given.replace("mixed_precision: bf16", 'mixed_precision: "no"'))
    return replace(setup(str(file), gpus, DIGITS), gpu=H100.model_copy(update={"gpus_per_machine": 2}))


@pytest.fixture
def plan(shared: Path, tmp_path: Path, text: str) -> Callable[[str, int], Any]:
    """The measurements under a yaml, on so many GPUs. `make test` makes all of its own in one process."""
    asked = {}
    if (PROJECT / "src/tasks/text").exists():
        short, long = (llama(text, length, batch, num_key_value_heads=4) for length, batch in ((512, 4), (2048, 1)))
        asked["fsdp", 4, "lm"] = setup("fsdp", 4, short)
        asked["fsdp_cp", 4, "lm"] = setup("fsdp_cp", 4, long, cp_size=4)
    asked |= {(*on, "digits"): of_digits(tmp_path, *on) for on in DIGITS_ON}
    asked["ddp", 2, "many"] = setup("ddp", 2, [word.replace("batch_size=8", "batch_size=2048") for word in DIGITS])

    def found(yaml: str, gpus: int, task: str = "digits") -> Any:
        if (yaml, gpus, task) not in asked:
            return measured(of_digits(tmp_path, yaml, gpus))[0]["measured"]
        with FileLock(shared / "plans.lock"):
            if not (file := shared / "plans.json").exists():
                file.write_text(json.dumps(measured(*asked.values())))
        return json.loads(file.read_text())[[*asked].index((yaml, gpus, task))]["measured"]

    return found


@needs_text
@needs_null_gpu
def test_what_processes_that_share_sequences_hold_and_send_by_hand(plan: Plan) -> None:
    """As with a sequence to itself a fourth as long; three quarters of what it has are sent there and back, in bf16."""
    short, long = plan("fsdp", 4, "lm"), plan("fsdp_cp", 4, "lm")
    assert (long["strategy"], long["micro_batch"], long["tokens"]) == ("fsdp_cp4", 1, short["tokens"])
    assert highest(long["memory"]) == pytest.approx(highest(short["memory"]), rel=0.05)
    assert long["work"]["awaited sent within"] == 4 * 2 * (3 + 1) * 512 * 256 * 2 * 3 / 4
    assert long["work"]["awaited collectives within"] == 4 * 2 * 2
    for name in ("sent within", "collectives within"):
        assert long["work"][name] - long["work"][f"awaited {name}"] == short["work"][name]


@needs_text
@needs_null_gpu
@pytest.mark.slow
def test_the_8b_of_a_table(text: str) -> None:
    shape = {"hidden_size": 4096, "intermediate_size": 14_336, "num_hidden_layers": 32, "num_attention_heads": 32}
    shape |= {"num_key_value_heads": 8, "vocab_size": 128_256}
    (row,) = measured(setup("fsdp", 8, llama(text, length=4096, batch=8, **shape)))
    page = (PROJECT / "docs/transformers.md").read_text()
    (allocated,) = re.findall(r"^\| 8B, 8 GPUs \| 1 \| ([\d.]+) ", page, re.MULTILINE)
    assert row["measured"]["memory"]["step"][0] / 1e9 == pytest.approx(float(allocated), rel=0.01)


@needs_null_gpu
@pytest.mark.parametrize(
    ("yaml", "processes"),
    [("ddp", 2), ("fsdp", 2), slow("fsdp", 4), slow("fsdp_grad_op", 2), slow("fsdp_offload", 2), slow("hsdp", 4)],
)
def test_a_run_holds_what_the_plan_says(launch: Launch, tmp_path: Path, plan: Plan, yaml: str, processes: int) -> None:
    """Parameters, gradients and, but for offload, optimizer state of its first process, within 1%."""
    sizes = tmp_path / "sizes.json"
    launch(yaml, *DIGITS, "--max_steps=1", processes=processes, before=RECORD_SIZES, SIZES=str(sizes)).succeeded()
    found, planned = json.loads(sizes.read_text()), plan(yaml, processes)
    for name in ("parameters", "gradients", *(() if yaml == "fsdp_offload" else ("optimizer",))):
        assert planned["parts"][name] == pytest.approx(found[name], rel=0.01), name


@needs_null_gpu
@pytest.mark.parametrize(("yaml", "processes"), [("ddp", 2), slow("fsdp", 2), slow("hsdp", 4)])
def test_processes_send_what_a_run_sends(launch: Launch, tmp_path: Path, plan: Plan, yaml: str, processes: int) -> None:
    arguments = [*DIGITS, f"--output_dir={tmp_path}/run"]
    run = launch(yaml, *arguments, script="tests/plan/planning.py", processes=processes).succeeded()
    (sent,) = re.findall(r"([\d.]+) MB sent", run.stdout)
    work = plan(yaml, processes)["work"]
    megabytes = (work["sent within"] + work.get("sent between", 0)) / 1e6
    assert megabytes == pytest.approx(float(sent), abs=0.001)


@needs_null_gpu
def test_what_a_plan_says_of_the_data(plan: Plan) -> None:
    """That a batch doesn't divide, and of a step of 2,048 digits that there are 1,438."""
    assert plan("single_gpu", 1)["optimizations"] == []
    says = "global_batch_size=8: not a multiple of 1 (micro_batch_size) x 3 processes = 3"
    assert str(plan("ddp", 3)).startswith(says)
    assert (plan("ddp", 2, "many")["largest"], plan("ddp", 2, "many")["accumulation"]) == (512, 719)


@needs_null_gpu
def test_the_plan_that_is_printed(tmp_path: Path) -> None:
    run = run_command([*PLAN, f"--output={tmp_path}", "--", *DIGITS], tmp_path, PROJECT).succeeded()
    (row,) = json.loads((tmp_path / "mnist" / "plan.json").read_text())
    assert row["is_fitting"]
    assert row["measured"]["work"]["kernels"] > 100
    assert "cheapest that fits" in run.stdout
    command = "--config_file accelerate_configs/single_gpu.yaml --num_processes 1 train.py --task.source=digits"
    assert command in run.stdout


def test_the_old_command_names_the_new_one(tmp_path: Path) -> None:
    run = run_command([f"{BIN}/python", "-m", "src.tools.plan", "--gpus", "1"], tmp_path, PROJECT)
    assert run.exit_code == 2
    assert run.stderr == "src.tools.plan: the command is now python -m plan --gpus 1 8 -- SETTINGS\n"


def test_without_a_compiler_it_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    is_served = (sys.platform, platform.machine()) == ("linux", "x86_64")
    reason = "is compiled by gcc, missing here" if is_served else "needs Linux on x86-64"
    with pytest.raises(UserError, match=f"measured on a null GPU, but the null GPU {reason}: use the Dockerfile"):
        main(["--", *DIGITS])


@needs_text
@needs_null_gpu
def test_a_config_alone_is_enough_to_plan(text: str, tmp_path: Path) -> None:
    """Also for 4-bit weights under adapters. Its tokens are bytes, which is said, and not part of the command to train
    with. Tried without: one line, that it has no tokenizer."""
    config = {"model_type": "llama", "vocab_size": 1000, **SHAPE}
    (tmp_path / "config.json").write_text(json.dumps(config))
    settings = ["--task.name=causal_lm", f"--task.model={tmp_path}", f"--task.dataset={text}", "--max_steps=1"]
    settings += ["--task.lora.r=4", "--task.lora.base_dtype=nf4"]
    run = run_command([*PLAN, f"--output={tmp_path}/plan", "--", *settings], tmp_path, PROJECT).succeeded()
    assert f"{tmp_path} has no tokenizer: the plan takes each byte for a token\n" in run.stdout
    assert "\nfrozen weights in nf4\n" in run.stdout
    assert "tokenizer=bytes" not in run.stdout
    assert "cheapest that fits" in run.stdout


@needs_text
@needs_null_gpu
@pytest.mark.slow
@pytest.mark.parametrize(("length", "says"), [(8192, "nothing fits: try "), (512, "cheapest that fits: ")])
def test_what_does_not_fit_says_by_how_much_and_what_to_try(text: str, tmp_path: Path, length: int, says: str) -> None:
    """On a GPU of 2.6 GiB, of which CUDA takes 1.5."""
    table, figures = tmp_path / "gpus.yaml", "memory_gib: 2.6, bandwidth_gb_s: 100, link_gb_s: 10, network_gb_s: 1"
    table.write_text(f"small: {{name: Small, capability: '9.0', tflops: {{bf16: 10, fp32: 1}}, {figures}}}")
    arguments = llama(text, length=length, batch=1, intermediate_size=4096)
    words = [*PLAN[3:], "--gpu=small", f"--output={tmp_path}", "--", *arguments, *QUIET]
    command = [f"{BIN}/python", "-c", WITH_A_TABLE, str(table), *words]
    run = run_command(command, tmp_path, PROJECT, **environment_for(H100)).succeeded()
    assert ("does not fit: " in run.stdout) == (length > 512)
    assert says in run.stdout


@needs_text
@needs_null_gpu
@pytest.mark.slow
@pytest.mark.parametrize(
    "more", ["", "--activation_checkpointing=true", "--optim.name=muon", "--task.attention=sdpa --task.packing=false"]
)
def test_at_the_edge_of_80_gb(text: str, tmp_path: Path, more: str) -> None:
    """Two runs below and above what fits by the plan, on a null GPU with that memory: at 93% fragmentation decides."""
    limit, long = find_gpu("h100").capacity, tmp_path / "long.txt"
    long.write_text(Path(text).read_text() * 30)  # 10 million tokens
    settings = (*more.split(), "--task.eval_fraction=0.5")  # four micro-batches at once are evaluated

    def arguments(batch: int) -> tuple[str, ...]:
        return (*llama(str(long), length=8192, batch=batch, hidden_size=1024, num_hidden_layers=8), *settings)

    endless = H100.model_copy(update={"memory_gib": 10_000})
    rows = measured(*[replace(setup("single_gpu", 1, arguments(batch)), gpu=endless) for batch in (16, 32)])
    few, many = (highest(row["measured"]["memory"]) for row in rows)
    each = (many - few) / 16
    fits, too_many = (int(16 + (share * limit - few) / each) for share in (0.85, 1.06))
    for batch, is_fitting in ((fits, True), (too_many, False)):
        (row,) = measured(setup("single_gpu", 1, arguments(batch)))
        assert (row["is_fitting"] and row["measured"]["micro_batch"] == batch) == is_fitting
        environment = null_environment(NULL_GPU_GIB=str(limit / 2**30), ACCELERATE_MIXED_PRECISION="bf16")
        told = [*arguments(batch), "--max_steps=2", *QUIET, f"--output_dir={tmp_path}/{batch}"]
        run = run_command([f"{BIN}/python", "-c", UNCOUNTED, *told], tmp_path, PROJECT, **environment)
        assert run.exit_code == (0 if is_fitting else 2), run.stdout + run.stderr
        assert is_fitting or "out of memory in the " in run.messages[0]


@needs_text
@needs_null_gpu
def test_out_of_memory_it_says_what_would_help(text: str, tmp_path: Path) -> None:
    """Tried without the decorator: a traceback."""
    arguments = [*llama(text, length=512, batch=64), *QUIET, f"--output_dir={tmp_path}/run"]
    environment = null_environment(NULL_GPU_GIB="1", ACCELERATE_MIXED_PRECISION="bf16")
    run = run_command([f"{BIN}/python", "train.py", *arguments], tmp_path, PROJECT, **environment)
    (message,) = run.messages
    assert run.exit_code == 2
    assert "Traceback" not in run.stderr
    assert "out of memory in the step, on a GPU of 1.1 GB, 0.0 GB outside torch: parameters 0.0, " in message
    assert re.search(r"activations [\d.]+; what would help: --activation_checkpointing=true, ", message)


MEASURED = Measured(
    strategy="ddp", micro_batch=1, largest=1, accumulation=1, model_flops=0.0, tokens=0.0, total_steps=1,
    memory={"step": (1, 1)}, parts={},
    work={
        "host_seconds": 0.5, "bytes": 8e9, "product flops bfloat16": 1e12, "attention flops bfloat16": 2e12,
        "sent within": 40e9, "collectives within": 100, "sent between": 8e9, "collectives between": 10,
        "awaited sent within": 4e9, "awaited collectives within": 20,
    },
    optimizations=[],
)  # fmt: skip


def test_the_time_of_a_step_by_hand() -> None:
    gpu = Gpu(
        name="", capability="9.0", memory_gib=80, bandwidth_gb_s=1000, tflops={"bf16": 10, "fp32": 1},
        product_share=0.5, attention_share=0.4, link_gb_s=50, network_gb_s=10,
    )  # fmt: skip
    seconds = seconds_of(MEASURED, gpu, 16, is_compiled=False)
    compute = 1 / (10 * 0.5) + 2 / (10 * 0.4) + 8 / (1000 * 0.8)
    communication = 40 / (50 * 0.8) + 100 * 20e-6 + 8 / (10 * 0.8) + 10 * 50e-6
    assert (seconds.compute, seconds.communication) == (pytest.approx(compute), pytest.approx(communication))
    assert seconds.step == pytest.approx(compute + communication - compute / 2)
    never_hidden = {"sent within": 4e9, "collectives within": 20, "sent between": 0, "collectives between": 0}
    for more, step in ((never_hidden, compute + 4 / (50 * 0.8) + 20 * 20e-6), ({"host_seconds": 60}, 60)):
        work = replace(MEASURED, work=MEASURED.work | more)
        assert seconds_of(work, gpu, 16, is_compiled=False).step == pytest.approx(step)


def test_the_cheapest_that_fits_is_recommended() -> None:
    """By hand: 100 steps of 3,600 / 100 s are an hour."""
    fits = replace(
        MEASURED, work={"host_seconds": 36.0, "bytes": 0.0}, total_steps=100, memory={"step": (57_130_000_000, 1)}
    )
    too_much = replace(fits, largest=0, memory={"evaluation": (H100.capacity + 12_340_000_000, 1)})
    rows = [Row(setup("ddp", 8, DIGITS), fits), Row(setup("fsdp", 8, DIGITS), too_much)]
    config = load_config(["--compile=false", *DIGITS], TASKS)
    assert re.search(
        r" 1\.0 h \$31\.92 +memory\n8 fsdp: does not fit: 12\.3 GB over in the evaluation$", table(rows, config)
    )
    assert recommendation(rows, config).startswith("cheapest that fits: 1.0 h, $31.92, 26.3 GB to spare\n")


def test_what_cannot_be_measured_is_one_line_beside_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tried without catching them: one architecture that fails under offload takes the whole plan with it."""
    for fails, says in (
        (lambda: 1 / 0, "cannot be measured: ZeroDivisionError: division by zero"),
        (lambda: os.kill(os.getpid(), signal.SIGKILL), "cannot be measured: its process was killed"),
        (lambda: raise_if_any(["a mistake", "and another"]), "a mistake and another"),
    ):
        monkeypatch.setattr(search, "measure", lambda of, _, fails=fails: fails() if of.gpus == 1 else MEASURED)
        failed, other = explore(setup("fsdp_offload", 1, ())), explore(setup("ddp", 2, ()))
        assert failed.reason.startswith(says)
        assert other.measured == MEASURED


def test_numbers_of_gpus_that_no_plan_is_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(null_gpu, "reason_to_skip", lambda: "these tests go no further")
    for words, says in (
        ("--gpus 12", "--gpus 12: must be at most 8 (one machine) or a multiple of it"),
        ("--gpus 1 8 --yamls hsdp", "--yamls hsdp: cannot run on --gpus 1 8"),
    ):
        with pytest.raises(UserError, match=re.escape(says)):
            main(words.split())


def test_mistakes_in_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(name: str) -> str:
        with pytest.raises(UserError) as error:
            find_gpu(name)
        return str(error.value)

    assert refused("h10").startswith("--gpu h10: no such GPU, did you mean h100?")
    file = tmp_path / "gpus.yaml"
    monkeypatch.setattr("plan.gpus.TABLE", file)
    file.write_text("mine: {name: Mine, capability: '9.0', memory_gib: -1, price: 3, tflops: {bf16: 1}}")
    told = refused("mine")
    assert told.startswith(f"{file}: mine: ")
    for says in ("memory_gib Input should be greater than 0", "price Extra inputs are not", "fp32 is missing"):
        assert says in told
    file.write_text("mine: {")
    assert refused("mine").startswith(f"{file}: mine: ")


def test_groups_that_share_sequences_stay_within_a_machine() -> None:
    tried = [*setups([], ["fsdp_cp"], [64, 8, 6, 1], H100)]
    assert [(of.gpus, of.cp_size) for of in tried] == [(6, 2), (8, 2), (8, 4), (8, 8), (64, 2), (64, 4), (64, 8)]
    config = load_config(["--task.source=digits", "--global_batch_size=64"], TASKS)
    line = recommendation([Row(tried[-1], replace(MEASURED, micro_batch=8))], config)
    sizes = "--num_processes 64 --num_machines 8 --parallelism_config_dp_shard_size=8 --parallelism_config_cp_size=8"
    assert f"accelerate_configs/fsdp_cp.yaml {sizes} --machine_rank=… " in line
    assert table([Row(tried[-1], None, "no")], config) == "64 fsdp_cp8: no"
    assert "--micro_batch_size" not in line  # it is the run's own
