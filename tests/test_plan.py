"""The plan of a run against the run: on a CPU, by --check, on the null GPU with a GPU's memory, and by hand."""

import json
import os
import platform
import re
import signal
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from torch import nn

import null_gpu
from null_gpu import null_environment
from src.config.config import load_config
from src.config.errors import UserError, refuse
from src.config.settings import read_yaml
from src.tasks import TASKS
from src.tasks.base import build_skeleton
from src.tasks.mnist import Mnist
from src.tools.plan import search
from src.tools.plan.__main__ import main
from src.tools.plan.estimate import seconds_of
from src.tools.plan.gpus import TABLE, Gpu, find_gpu
from src.tools.plan.measure import Measured, highest
from src.tools.plan.search import Row, explore_all, setups
from src.tools.plan.show import recommendation, table
from tests.launching import BIN, PROJECT, QUIET, Launch, needs, run_command, slow
from tests.planning import H100, llama, measured, setup

needs_text = needs("src/tasks/text/causal_lm.py")
needs_null_gpu = pytest.mark.skipif(bool(null_gpu.reason_to_skip()), reason=str(null_gpu.reason_to_skip()))
DIGITS = ("--task.source=digits", "--global_batch_size=8", "--micro_batch_size=1", *QUIET)
TELL = """
import json, os, src.training.gradients
from torch.distributed.tensor import DTensor

step = src.training.gradients.step_if_finite

def size(tensors):
    return sum((t.to_local() if isinstance(t, DTensor) else t).nbytes for t in tensors)

def told(optimizers, norm):
    parameters = [p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]]
    sizes = {"parameters": size(parameters), "gradients": size(p.grad for p in parameters)}
    step(optimizers, norm)
    states = [state for optimizer in optimizers for state in optimizer.state.values()]
    sizes["optimizer"] = size(value for state in states for value in state.values())
    if os.environ["RANK"] == "0":
        open(os.environ["SIZES"], "w").write(json.dumps(sizes))

src.training.gradients.step_if_finite = told
"""
"""Has the first process of a run write down how many bytes of tensors it holds."""


UNCOUNTED = """
import torch, src.training.evaluation, train
evaluate_batches = train.evaluate_batches
train.evaluate_batches = lambda *arguments: evaluate_batches(*arguments)._replace(totals=torch.ones(3))
src.training.evaluation.metrics_of = lambda *_: {"eval/loss": 1.0}
train.main()
"""
"""train.py on the null GPU, where no kernel counts what is evaluated."""


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    file = tmp_path_factory.mktemp("text") / "text.txt"
    file.write_text("to be or not to be, that is the question. " * 8000)
    return str(file)


@pytest.fixture(scope="module")
def in_fp32(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The yamls, in fp32: as a CPU trains."""
    folder = tmp_path_factory.mktemp("yamls")
    for file in (PROJECT / "accelerate_configs").glob("*.yaml"):
        (folder / file.name).write_text(file.read_text().replace("mixed_precision: bf16", 'mixed_precision: "no"'))
    return folder


@cache
def planned(in_fp32: Path, yaml: str, gpus: int) -> dict[str, Any]:
    """What is measured of the digits' run; of both that `make test` has, at once."""
    yamls = ["ddp", "fsdp"] if gpus == 2 else [yaml]
    yamls += [] if yaml in yamls else [yaml]
    rows = _measured_together(in_fp32, (*yamls,), gpus)
    return rows[yamls.index(yaml)]["measured"]


@cache
def _measured_together(in_fp32: Path, yamls: tuple[str, ...], gpus: int) -> list[dict[str, Any]]:
    machine = H100.model_copy(update={"gpus_per_machine": 2})  # hsdp.yaml has two of them
    return measured(*[replace(setup(f"{in_fp32}/{yaml}.yaml", gpus, DIGITS), gpu=machine) for yaml in yamls])


@needs_text
@needs_null_gpu
def test_what_each_process_holds_by_hand(text: str) -> None:
    """Parameters and gradients in fp32, and AdamW's two moments of each, among the processes that share them; under
    offload no moments, as its update is left out."""
    shards = [("single_gpu", 1, 1, 2), ("fsdp_grad_op", 16, 16, 2), ("hsdp", 16, 8, 2), ("fsdp_offload", 2, 2, 0)]
    rows = measured(*[setup(yaml, gpus, llama(text, batch=32)) for yaml, gpus, *_ in shards])
    parameters = rows[0]["measured"]["parts"]["parameters"]
    assert parameters == 4 * 2_493_696  # 4 blocks of 590,336, 2 x 258 x 256 for tokens in and out, a norm of 256
    for row, (*_, among, moments) in zip(rows, shards, strict=True):
        found = row["measured"]["parts"]
        assert found["gradients"] == pytest.approx(found["parameters"], rel=0.01)
        assert found["parameters"] == pytest.approx(parameters / among, rel=0.01)
        assert found["optimizer"] == pytest.approx(moments * parameters / among, rel=0.01)


@needs_text
@needs_null_gpu
def test_what_processes_that_share_sequences_hold_and_send_by_hand(text: str) -> None:
    """Four hold what each would with a sequence to itself that is a fourth as long. In a layer, each sends three
    quarters of what it has of queries, keys and values, and of outputs, there and back, all in bf16."""
    alone = setup("fsdp", 4, llama(text, length=512, batch=4, num_key_value_heads=4))
    together = setup("fsdp_cp", 4, llama(text, length=2048, batch=1, num_key_value_heads=4), cp_size=4)
    short, long = (row["measured"] for row in measured(alone, together))
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
    """docs/transformers.md has what a run with weights had allocated: within a hundredth."""
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
def test_a_run_on_cpus_holds_what_the_plan_says(
    launch: Launch, tmp_path: Path, in_fp32: Path, yaml: str, processes: int
) -> None:
    """Parameters, gradients and, but for offload, optimizer state of its first process, within 1%."""
    sizes = tmp_path / "sizes.json"
    launch(yaml, *DIGITS, "--max_steps=1", processes=processes, before=TELL, SIZES=str(sizes)).succeeded()
    found, plan = json.loads(sizes.read_text()), planned(in_fp32, yaml, processes)
    for name in ("parameters", "gradients", *(() if yaml == "fsdp_offload" else ("optimizer",))):
        assert plan["parts"][name] == pytest.approx(found[name], rel=0.01), name


@needs_null_gpu
@pytest.mark.parametrize(("yaml", "processes"), [("ddp", 2), slow("fsdp", 2), slow("hsdp", 4)])
def test_a_process_sends_the_bytes_that_a_run_on_cpus_sends(
    launch: Launch, tmp_path: Path, in_fp32: Path, yaml: str, processes: int
) -> None:
    arguments = [*DIGITS, f"--output_dir={tmp_path}/run"]
    run = launch(yaml, *arguments, script="tests/planning.py", processes=processes).succeeded()
    (sent,) = re.findall(r"([\d.]+) MB sent", run.stdout)
    work = planned(in_fp32, yaml, processes)["work"]
    megabytes = (work["sent within"] + work.get("sent between", 0)) / 1e6
    assert megabytes == pytest.approx(float(sent), abs=0.001)


@needs_null_gpu
def test_the_plan_that_is_printed(tmp_path: Path) -> None:
    words = ["-m", "src.tools.plan", "--gpus", "1", "--yamls", "single_gpu"]
    run = run_command([f"{BIN}/python", *words, f"--output={tmp_path}", "--", *DIGITS], tmp_path, PROJECT).succeeded()
    (row,) = json.loads((tmp_path / "mnist" / "plan.json").read_text())
    assert row["is_fitting"]
    assert row["measured"]["work"]["kernels"] > 100
    assert "cheapest that fits" in run.stdout
    assert (
        "--config_file accelerate_configs/single_gpu.yaml --num_processes 1 train.py --task.source=digits" in run.stdout
    )


def test_without_a_compiler_it_is_one_line(tmp_path: Path) -> None:
    words = [f"{BIN}/python", "-m", "src.tools.plan", f"--output={tmp_path}", "--", *DIGITS]
    run = run_command(words, tmp_path, PROJECT, PATH="/nowhere")
    assert run.exit_code == 2
    (message,) = run.stderr.splitlines()
    is_served = (sys.platform, platform.machine()) == ("linux", "x86_64")
    reason = "is compiled by gcc, missing here" if is_served else "needs Linux on x86-64"
    assert f"measured on a null GPU, but the null GPU {reason}: use the Dockerfile" in message


@needs_text
@needs_null_gpu
@pytest.mark.slow
@pytest.mark.parametrize(("length", "says"), [(8192, "nothing fits: try "), (512, "cheapest that fits: ")])
def test_what_does_not_fit_says_by_how_much_and_what_to_try(text: str, tmp_path: Path, length: int, says: str) -> None:
    """On a GPU of 2.6 GiB, of which CUDA takes 1.5."""
    gpu = tmp_path / "small.yaml"
    gpu.write_text(
        "small: {name: Small, capability: '9.0', memory_gib: 2.6, bandwidth_gb_s: 100, tflops: {bf16: 10, fp32: 1},"
        " link_gb_s: 10, network_gb_s: 1}"
    )
    words = [f"{BIN}/python", "-m", "src.tools.plan", "--gpus", "1", "--yamls", "single_gpu"]
    words += [f"--gpu={gpu}", f"--output={tmp_path}", "--"]
    arguments = llama(text, length=length, batch=1, intermediate_size=4096)
    run = run_command([*words, *arguments, *QUIET], tmp_path, PROJECT).succeeded()
    assert ("does not fit: " in run.stdout) == (length > 512)
    assert says in run.stdout


@needs_text
@needs_null_gpu
@pytest.mark.slow
@pytest.mark.parametrize(
    "more",
    [
        (),
        ("--activation_checkpointing=true",),
        ("--optim.name=muon",),
        ("--task.attention=sdpa", "--task.packing=false"),
    ],
)
def test_at_the_edge_of_80_gb(text: str, tmp_path: Path, more: tuple[str, ...]) -> None:
    """Two runs below and above what fits by the plan, on a null GPU with that memory: at 93% fragmentation decides."""
    limit = find_gpu("h100").capacity

    long = tmp_path / "long.txt"
    long.write_text(Path(text).read_text() * 30)  # 10 million tokens

    halves = ["--task.eval_fraction=0.5"]  # four micro-batches at once are evaluated

    def arguments(batch: int) -> tuple[str, ...]:
        return (*llama(str(long), length=8192, batch=batch, hidden_size=1024, num_hidden_layers=8), *more, *halves)

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
@pytest.mark.parametrize(
    ("length", "batch", "helps"),
    [(512, 64, "--micro_batch_size=32 ("), slow(32_768, 1, "accelerate_configs/fsdp_cp.yaml with cp_size=2 (")],
)
def test_a_gpu_that_is_out_of_memory_says_what_would_help(
    text: str, tmp_path: Path, length: int, batch: int, helps: str
) -> None:
    """Tried without the decorator: a traceback."""
    arguments = [*llama(text, length, batch), *QUIET, f"--output_dir={tmp_path}/run"]
    environment = null_environment(NULL_GPU_GIB="1", ACCELERATE_MIXED_PRECISION="bf16")
    run = run_command([f"{BIN}/python", "train.py", *arguments], tmp_path, PROJECT, **environment)
    (message,) = run.messages
    assert run.exit_code == 2
    assert "Traceback" not in run.stderr
    assert "out of memory in the step, on a GPU of 1.1 GB, 0.0 GB outside torch: parameters 0.0, " in message
    assert re.search(r"activations [\d.]+; what would help: --activation_checkpointing=true \(0.\d GB\), ", message)
    assert helps in message
    assert "python -m src.tools.plan" in message


MEASURED = Measured(
    strategy="ddp", micro_batch=1, largest=1, accumulation=1, model_flops=0.0, tokens=0.0, total_steps=1,
    memory={"step": (1, 1)}, parts={},
    work={
        "host_seconds": 0.5, "bytes": 8e9, "product flops bfloat16": 1e12, "attention flops bfloat16": 2e12,
        "sent within": 40e9, "collectives within": 100, "sent between": 8e9, "collectives between": 10,
        "awaited sent within": 4e9, "awaited collectives within": 20,
    },
    notes=[],
)  # fmt: skip


def test_the_time_of_a_step_by_hand() -> None:
    gpu = Gpu(
        name="", capability="9.0", memory_gib=80, bandwidth_gb_s=1000, tflops={"bf16": 10, "fp32": 1},
        product_share=0.5, attention_share=0.4, link_gb_s=50, network_gb_s=10,
    )  # fmt: skip
    seconds = seconds_of(MEASURED, gpu, 16, is_compiled=False)
    compute = 1 / (10 * 0.5) + 2 / (10 * 0.4) + 8 / (1000 * 0.8)
    communication = 40 / (50 * 0.8) + 100 * 20e-6 + 8 / (10 * 0.8) + 10 * 50e-6
    assert seconds.compute == pytest.approx(compute)
    assert seconds.communication == pytest.approx(communication)
    awaited = 4 / (50 * 0.8) + 20 * 20e-6
    hidden = compute / 2
    assert seconds.step == pytest.approx(compute + communication - hidden)
    MEASURED.work |= {"sent within": 4e9, "collectives within": 20, "sent between": 0, "collectives between": 0}
    assert seconds_of(MEASURED, gpu, 16, is_compiled=False).step == pytest.approx(compute + awaited)  # never hidden
    MEASURED.work["host_seconds"] = 60
    assert seconds_of(MEASURED, gpu, 16, is_compiled=False).step == 60
    MEASURED.work["host_seconds"] = 0.5


def test_the_plan_as_a_person_reads_it() -> None:
    """Within 80 columns, and 120 where a line doesn't fit. By hand: 100 steps of 3,600 / 100 s are an hour."""
    work = {"host_seconds": 36.0, "bytes": 0.0}
    fits = replace(
        MEASURED, work=work, tokens=12_417_840.0, model_flops=0.319 * 989e12 * 36 * 8, total_steps=100, largest=8,
        memory={"load": (1, 1), "step": (57_130_000_000, 1)}, notes=["varlen attention"],
    )  # fmt: skip
    memory = {"step": (1, 1), "evaluation": (H100.capacity + 12_340_000_000, 1)}
    reason = "cannot be measured: KeyError: 'x'"
    found = {"ddp": fits, "fsdp": replace(fits, largest=0, memory=memory), "fsdp_grad_op": None, "fsdp_offload": None}
    rows = [Row(setup(yaml, 8, DIGITS), one, "" if one else reason) for yaml, one in found.items()]
    config = load_config(["--compile=false", *DIGITS], TASKS)
    assert [line.rstrip() for line in table(rows, config).splitlines()] == [
        "varlen attention",
        "GPUs yaml   GB micro most   step tok/s/GPU   MFU    time   cost limit",
        "   8  ddp 57.1     1    8 36.000    43,118 31.9% 1:00:00 $31.92 the host",
        "   8 fsdp 95.8     1    0 36.000    43,118 31.9% 1:00:00 $31.92 does not fit: 12.3 GB over in the evaluation",
        "8 fsdp_grad_op: cannot be measured: KeyError: 'x'",
        "8 fsdp_offload: cannot be measured: KeyError: 'x'",
    ]
    assert recommendation(rows, config).startswith("cheapest that fits: 1:00:00, $31.92, 26.3 GB to spare\n")
    no_price = H100.model_copy(update={"price_usd_hour": None})
    free = [replace(row, setup=replace(row.setup, gpu=no_price)) for row in rows]
    assert "cost" not in table(free, config)
    assert recommendation(free, config).startswith("cheapest that fits: 1:00:00, 26.3 GB to spare\n")


def _unpicklable() -> None:
    class LocalError(Exception):
        pass

    raise LocalError("no\nsuch kernel")


@pytest.mark.parametrize(
    ("fails", "says"),
    [
        (_unpicklable, "cannot be measured: LocalError: no such kernel"),
        (lambda: os.kill(os.getpid(), signal.SIGKILL), "cannot be measured: its process was killed"),
        (lambda: refuse(["a mistake", "and another"]), "a mistake and another"),
    ],
)
def test_what_cannot_be_measured_is_one_line_beside_the_others(
    monkeypatch: pytest.MonkeyPatch, fails: Callable[[], None], says: str
) -> None:
    """Tried without catching them: one architecture that fails under offload takes the whole plan with it."""
    monkeypatch.setattr(search, "measure", lambda of, _: fails() if of.gpus == 1 else MEASURED)
    failed, other = explore_all([setup("fsdp_offload", 1, ()), setup("ddp", 2, ())])
    assert failed.reason.startswith(says)
    assert "\n" not in failed.reason
    assert other.measured == MEASURED


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("--gpus 8 0", "--gpus 0: must be at most 8 (one machine) or a multiple of it"),
        ("--gpus 12", "--gpus 12: must be at most 8 (one machine) or a multiple of it"),
        ("--gpus 1 8 --yamls hsdp", "--yamls hsdp: cannot run on --gpus 1 8"),
    ],
)
def test_numbers_of_gpus_that_no_plan_is_for(monkeypatch: pytest.MonkeyPatch, words: str, says: str) -> None:
    monkeypatch.setattr(null_gpu, "reason_to_skip", lambda: "these tests go no further")
    with pytest.raises(UserError) as error:
        main(words.split())
    assert str(error.value) == says


SLOW = """
import src.tools.plan.measure as measure
from types import SimpleNamespace
from tests.planning import main

now, build_data = [0.0], measure.build_data
measure.time = SimpleNamespace(perf_counter=lambda: now[0], sleep=measure.time.sleep)

def slowly(task, accelerator):
    now[0] += 19 + accelerator.num_processes
    return build_data(task, accelerator)

measure.build_data = slowly
main()
"""
"""Has the data read in 20 s by the clock of the plan, a second more on two GPUs."""


@needs_null_gpu
def test_a_plan_says_that_reading_is_slow() -> None:
    rows = measured(setup("single_gpu", 1, DIGITS), setup("ddp", 2, DIGITS), program=SLOW)
    note = "reading the data takes 21 s for each line below: plan with a sample of it"
    assert [row["measured"]["notes"] for row in rows] == [[], [note]]


@needs_null_gpu
def test_no_more_than_the_data_have() -> None:
    """A step of 2,048 digits, of which there are 1,438."""
    arguments = [word.replace("batch_size=8", "batch_size=2048") for word in DIGITS]
    (row,) = measured(setup("ddp", 2, arguments))
    assert (row["measured"]["largest"], row["measured"]["accumulation"]) == (512, 719)


GPUS = """
h100       79.19  3350 989   67   450 50   3.99
h100_pcie  79.11  2000 756   51   64  12.5 2.89
h200       139.8  4800 989   67   450 50   4.59
b200       178.35 8000 2250  80   900 50   6.79
a100       79.25  2039 312   19.5 300 25   1.79
a100_40gb  39.49  1555 312   19.5 300 6.25 1.99
l40s       44.52  864  362   91.6 32  6.25 1.861
l4         22.03  300  121   30.3 32  1.56 0.805
a10g       22.06  600  70    35   32  1.56 1.006
rtx_3090   23.7   936  71    35.6 32  0.31 0.5
rtx_4090   23.65  1008 165   82.6 32  0.31 0.74
rtx_5090   31.35  1792 209.5 104.8 64 0.31 0.99
t4         14.74  320  65    8.1  16  1.56 0.526
"""
"""Memory, bandwidth, operations in half precision and in fp32, links, network, price: kept twice, so that a slip in
one of them shows. Who changes a figure looks up its source, and changes both."""


def test_the_figures_of_each_gpu() -> None:
    lines = [line.split() for line in GPUS.splitlines()[1:]]
    assert [name for name, *_ in lines] == [*read_yaml(TABLE.read_text())]
    for name, *figures in lines:
        gpu = find_gpu(name)
        found = [gpu.memory_gib, gpu.bandwidth_gb_s, gpu.tflops["fp16"], gpu.tflops["fp32"], gpu.link_gb_s]
        assert [*found, gpu.network_gb_s, gpu.price_usd_hour] == [*map(float, figures)], name
        half = gpu.tflops["fp16"]
        assert gpu.tflops.get("bf16", half) == half, name
        assert gpu.tflops.get("fp8", 2 * half) == pytest.approx(2 * half, rel=0.02), name
        assert gpu.capacity == pytest.approx((gpu.memory_gib - 1.5) * 2**30, abs=1), name


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("h10", "--gpu h10: no such GPU, did you mean h100?"),
        ("nowhere.yaml", "--gpu nowhere.yaml: cannot be read, "),
    ],
)
def test_an_unknown_gpu(name: str, says: str) -> None:
    with pytest.raises(UserError) as error:
        find_gpu(name)
    assert str(error.value).startswith(says)


def test_mistakes_in_a_gpu_of_the_user(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("mine: {name: Mine, capability: '9.0', memory_gib: -1, price: 3, tflops: {bf16: 1}}")
    with pytest.raises(UserError) as error:
        find_gpu(str(file))
    lines = str(error.value).splitlines()
    assert f"{file}: mine.memory_gib: must be greater than 0" in lines
    assert f"{file}: mine.price: Extra inputs are not permitted" in lines
    assert f"{file}: mine.tflops: fp32 is missing" in lines
    for content in (b"", b"- a", b"hello", b"\xff\xfe\x80"):
        file.write_bytes(content)
        with pytest.raises(UserError) as error:
            find_gpu(str(file))
        assert str(error.value).startswith(f"--gpu {file}: ")


def test_a_model_that_reads_its_weights_while_it_is_built() -> None:
    class Reading(Mnist):
        def build_model(self) -> nn.Module:
            model = super().build_model()
            assert next(model.parameters()).sum().item() > 0
            return model

    with pytest.raises(UserError) as error:
        build_skeleton(Reading())
    assert str(error.value).startswith(
        "its model reads values that a plan does not have, Tensor.item() cannot be called"
    )


@needs_null_gpu
def test_a_number_of_gpus_that_does_not_divide_the_batch() -> None:
    (row,) = measured(setup("ddp", 3, DIGITS))
    expected = "global_batch_size=8: not a multiple of 1 (micro_batch_size) x 3 processes = 3"
    assert row["measured"].startswith(expected)


@needs_text
@needs("src/distributed/launcher.py")
@needs_null_gpu
@pytest.mark.slow
def test_a_task_without_sequences_is_one_line_whatever_the_size_of_groups(tmp_path: Path) -> None:
    words = ["-m", "src.tools.plan", "--gpus", "4", "--yamls", "fsdp_cp", f"--output={tmp_path}", "--", *DIGITS]
    run = run_command([f"{BIN}/python", *words], tmp_path, PROJECT)
    assert run.exit_code == 2
    (message,) = [line for line in run.stderr.splitlines() if line.startswith("plan: ")]
    assert message == "plan: task.name=mnist: has no sequences to split over processes: remove cp_size from the yaml"


def test_groups_that_share_sequences_stay_within_a_machine() -> None:
    tried = [*setups([], ["fsdp_cp"], [64, 8, 6, 1], H100)]
    assert [(of.gpus, of.cp_size) for of in tried] == [(6, 2), (8, 2), (8, 4), (8, 8), (64, 2), (64, 4), (64, 8)]
    config = load_config(["--task.source=digits", "--global_batch_size=64"], TASKS)
    line = recommendation([Row(tried[-1], replace(MEASURED, micro_batch=8))], config)
    sizes = "--num_processes 64 --num_machines 8 --parallelism_config_dp_shard_size=8 --parallelism_config_cp_size=8"
    assert f"accelerate_configs/fsdp_cp.yaml {sizes} --machine_rank=… " in line
    assert table([Row(tried[-1], None, "no")], config) == "64 fsdp_cp8: no"
    assert "--micro_batch_size" not in line  # it is the run's own
