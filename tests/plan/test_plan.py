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
from plan.gpus import TABLE, Gpu, find_gpu
from plan.measure import Measured, Setup, highest
from plan.null_gpu import null_environment
from plan.search import Row, explore, explore_until_it_fits, setups
from plan.show import line, recommendation, table
from src.config.config import load_config
from src.config.errors import UserError, raise_if_any
from src.config.settings import read_yaml
from src.tasks import TASKS
from tests.launching import BIN, PROJECT, QUIET, Launch, needs, run_command, slow
from tests.plan.planning import H100, SHAPE, llama, measured, setup

needs_text = needs("src/tasks/text/causal_lm.py")
needs_null_gpu = pytest.mark.skipif(bool(null_gpu.reason_to_skip()), reason=str(null_gpu.reason_to_skip()))
DIGITS = ("--task.source=digits", "--global_batch_size=8", "--micro_batch_size=1", *QUIET)
FROZEN = "--optim.groups=[{match: fc1.weight, frozen: true}]"
Plan = Callable[..., Any]
PLAN = (f"{BIN}/python", "-m", "plan", "--gpus", "1", "--yamls", "single_gpu")
UNCOUNTED = """
import torch, train
evaluate_batches = train.evaluate_batches
train.evaluate_batches = lambda *arguments: evaluate_batches(*arguments)._replace(totals=torch.ones(3))
train.metrics_of = lambda *_: {"eval/loss": 1.0}
train.main()
"""
"""train.py on the null GPU, where no kernel counts what is evaluated."""
DIGITS_ON = [("single_gpu", 1), ("ddp", 2), ("fsdp", 2), ("ddp", 3)]


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    file = tmp_path_factory.mktemp("text") / "text.txt"
    file.write_text("to be or not to be, that is the question. " * 8000)
    return str(file)


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
    for name, more in (("frozen", FROZEN), ("averaged", "--ema.decay=0.9")):
        asked |= {(yaml, 2, name): setup(yaml, 2, (*DIGITS, more)) for yaml in ("ddp", "fsdp")}
    asked["ddp", 2, "many"] = setup("ddp", 2, [word.replace("batch_size=8", "batch_size=2048") for word in DIGITS])

    def found(yaml: str, gpus: int, task: str = "digits") -> Any:
        if (yaml, gpus, task) not in asked:
            return measured(of_digits(tmp_path, yaml, gpus))[0]["measured"]
        with FileLock(shared / "plans.lock"):
            if not (file := shared / "plans.json").exists():
                file.write_text(json.dumps(measured(*asked.values())))
        return json.loads(file.read_text())[[*asked].index((yaml, gpus, task))]["measured"]

    return found


@pytest.mark.slow
@needs_text
@needs_null_gpu
def test_sharing_sequences_holds_and_sends_what_is_counted_by_hand(plan: Plan) -> None:
    """As with a sequence to itself a fourth as long; three quarters of what it has are sent there and back, in bf16."""
    short, long = plan("fsdp", 4, "lm"), plan("fsdp_cp", 4, "lm")
    assert (long["strategy"], long["micro_batch"], long["tokens"]) == ("fsdp_cp4", 1, short["tokens"])
    assert highest(long["memory"]) == pytest.approx(highest(short["memory"]), rel=0.05)
    assert long["work"]["awaited sent within"] == 4 * 2 * (3 + 1) * 512 * 256 * 2 * 3 / 4
    assert long["work"]["awaited collectives within"] == 4 * 2 * 2
    for name in ("sent within", "collectives within"):
        assert long["work"][name] - long["work"][f"awaited {name}"] == short["work"][name]


@needs_null_gpu
@pytest.mark.parametrize(
    ("yaml", "processes"),
    [("ddp", 2), ("fsdp", 2), slow("fsdp", 4), slow("fsdp_grad_op", 2), slow("fsdp_offload", 2), slow("hsdp", 4)],
)
def test_a_run_holds_and_sends_what_its_plan_says(launch: Launch, plan: Plan, yaml: str, processes: int) -> None:
    """Its first process: parameters, gradients and, but for offload, optimizer state within 1%; each byte sent."""
    run = launch(yaml, *DIGITS, script="tests/plan/planning.py", processes=processes).succeeded()
    planned, found = plan(yaml, processes), json.loads(run.stdout.splitlines()[-1])
    for name in ("parameters", "gradients", *(() if yaml == "fsdp_offload" else ("optimizer",))):
        assert planned["parts"][name] == pytest.approx(found[name], rel=0.01), name
    if yaml in ("ddp", "fsdp", "hsdp"):
        assert planned["work"]["sent within"] + planned["work"].get("sent between", 0) == found["sent"]


@needs_null_gpu
@pytest.mark.parametrize("yaml", ["ddp", "fsdp"])
def test_frozen_parts_take_no_gradients_and_averages_one_copy(plan: Plan, yaml: str) -> None:
    """Nor does AdamW keep moments of them. fc1 has 1,179,648 of the 1,199,882 weights."""
    own = 4 * 1_179_648 // (2 if yaml == "fsdp" else 1)
    usual, frozen, averaged = (plan(yaml, 2, name) for name in ("digits", "frozen", "averaged"))
    assert usual["parts"]["parameters"] == frozen["parts"]["parameters"] == averaged["parts"]["parameters"]
    assert usual["parts"]["gradients"] - frozen["parts"]["gradients"] == own
    assert highest(usual["memory"]) - highest(frozen["memory"]) >= 3 * own
    added = averaged["parts"]["optimizer"] - usual["parts"]["optimizer"]
    assert added == usual["parts"]["parameters"]


@needs_null_gpu
def test_a_plan_names_a_batch_that_does_not_divide(plan: Plan) -> None:
    """Of a step of 2,048 digits there are 1,438."""
    says = "global_batch_size=8: not a multiple of 1 (micro_batch_size) x 3 processes = 3"
    assert str(plan("ddp", 3)).startswith(says)
    assert (plan("ddp", 2, "many")["largest"], plan("ddp", 2, "many")["accumulation"]) == (512, 719)


@needs_null_gpu
def test_the_plan_recommends_a_command(tmp_path: Path) -> None:
    run = run_command([*PLAN, f"--output={tmp_path}", "--", *DIGITS], tmp_path, PROJECT).succeeded()
    (row,) = json.loads((tmp_path / "mnist" / "plan.json").read_text())
    assert row["is_fitting"]
    assert row["measured"]["work"]["kernels"] > 100
    assert "cheapest that fits" in run.stdout
    command = "--config_file accelerate_configs/single_gpu.yaml --num_processes 1 train.py --task.source=digits"
    assert command in run.stdout


def test_a_plan_without_a_compiler_ends_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    is_served = (sys.platform, platform.machine()) == ("linux", "x86_64")
    reason = "is compiled by gcc, missing here" if is_served else "needs Linux on x86-64"
    with pytest.raises(UserError, match=f"measured on a null GPU, but the null GPU {reason}: use the Dockerfile"):
        main(["--", *DIGITS])


@needs_text
@needs_null_gpu
def test_a_config_alone_is_enough_to_plan(text: str, tmp_path: Path) -> None:
    """Also for 4-bit weights under adapters. Its tokens are bytes, which is printed, and not part of the command."""
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
@pytest.mark.parametrize(
    "more", ["", "--activation_checkpointing=true", "--optim.name=muon", "--task.attention=sdpa --task.packing=false"]
)
def test_the_plan_knows_what_fits_in_80_gb(text: str, tmp_path: Path, more: str) -> None:
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
def test_a_run_out_of_memory_ends_in_a_line_of_what_would_help(text: str, tmp_path: Path) -> None:
    arguments = [*llama(text, length=512, batch=64), *QUIET, f"--output_dir={tmp_path}/run"]
    environment = null_environment(NULL_GPU_GIB="1", ACCELERATE_MIXED_PRECISION="bf16")
    run = run_command([f"{BIN}/python", "train.py", *arguments], tmp_path, PROJECT, **environment)
    (message,) = run.messages
    assert (run.exit_code, "Traceback" in run.stderr) == (2, False)
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


def test_the_time_of_a_planned_step_by_hand() -> None:
    gpu = Gpu(
        names=[""], capability="9.0", memory_gib=80, bandwidth_gb_s=1000, tflops={"bf16": 10, "fp32": 1},
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
    assert recommendation(rows[1:], config).startswith("nothing fits: try --activation_checkpointing=true")


@needs("src/config/transforms.py")
def test_settings_that_save_memory_are_tried_until_the_run_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    """But not those that are on, nor on a model that has no blocks."""
    fitting: list[str] = []

    def outcome(tried: Setup, _: float) -> Measured:
        if not {*tried.arguments} <= {*fitting, "--activation_checkpointing=true", *DIGITS}:
            raise UserError("it has no blocks")
        return replace(MEASURED, largest=int(tried.arguments[-1] in fitting))

    monkeypatch.setattr(search, "measure", outcome)
    recomputed, offloaded = ("--activation_checkpointing=true", "--activation_offload=true")
    for given, fits, names in (
        ([], DIGITS[-1], ["fsdp"]),
        ([], recomputed, ["fsdp", "fsdp +activation_checkpointing"]),
        ([], offloaded, ["fsdp", "fsdp +activation_checkpointing", "fsdp +activation_offload"]),
        ([recomputed], offloaded, ["fsdp", "fsdp +activation_offload"]),
        ([], "", ["fsdp", "fsdp +activation_checkpointing"]),
    ):
        fitting[:] = [fits]
        arguments = [*DIGITS, *given]
        config = load_config(["--compile=false", *arguments], TASKS)
        rows = [*explore_until_it_fits(setup("fsdp", 8, arguments), config)]
        assert [row.setup.name for row in rows] == names
        if fits:
            assert recommendation(rows, config).endswith(" ".join(rows[-1].setup.arguments))


@pytest.mark.slow
@needs_text
@needs("src/config/transforms.py")
@needs_null_gpu
def test_offloaded_activations_take_and_copy_what_is_counted_by_hand(text: str) -> None:
    """Eight inputs of blocks, 16,384 tokens of 256 values in bf16: on the GPU there is one at most, not eight."""
    arguments = (*llama(text, length=4096, batch=8, num_hidden_layers=8), "--activation_checkpointing=true")
    kept, moved = measured(*(setup("fsdp", 2, [*arguments, f"--activation_offload={on}"]) for on in ("false", "true")))
    (before, after), each = [row["measured"] for row in (kept, moved)], 16_384 * 256 * 2
    assert after["work"]["copied"] - before["work"].get("copied", 0) == 2 * 8 * each
    assert 6 * each <= before["memory"]["step"][0] - after["memory"]["step"][0] <= 8 * each


def test_what_cannot_be_measured_is_a_line_beside_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    for fails, says in (
        (lambda: 1 / 0, "cannot be measured: ZeroDivisionError: division by zero"),
        (lambda: os.kill(os.getpid(), signal.SIGKILL), "cannot be measured: its process was killed"),
        (lambda: raise_if_any(["a mistake", "and another"]), "a mistake and another"),
    ):
        monkeypatch.setattr(search, "measure", lambda of, _, fails=fails: fails() if of.gpus == 1 else MEASURED)
        failed, other = explore(setup("fsdp_offload", 1, ())), explore(setup("ddp", 2, ()))
        assert failed.reason.startswith(says)
        assert other.measured == MEASURED


def test_gpus_that_no_plan_is_for_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(null_gpu, "reason_to_skip", lambda: "these tests go no further")
    for words, says in (
        ("--gpus 12", "--gpus 12: must be at most 8 (one machine) or a multiple of it"),
        ("--gpus 1 8 --yamls hsdp", "--yamls hsdp: cannot run on --gpus 1 8"),
        ("--gpu h10", "--gpu h10: no such GPU, did you mean h100?"),
        ("--gpu mi300x", "--gpu mi300x: is no GPU of CUDA's, as plans need; choose one with a capability in "),
    ):
        with pytest.raises(UserError, match=re.escape(says)):
            main(words.split())
    monkeypatch.setattr("plan.gpus.TABLE", file := tmp_path / "gpus.yaml")
    file.write_text("mine: {names: [Mine], capability: '9.0', memory_gib: -1, price: 3, tflops: {bf16: 1}}")
    with pytest.raises(UserError, match=re.escape(f"{file}: mine: ")) as error:
        find_gpu("mine")
    for says in ("memory_gib Input should be greater than 0", "price Extra inputs are not", "fp32 is missing"):
        assert says in str(error.value)


def test_each_gpu_has_all_fields_and_its_price_a_source_and_a_date() -> None:
    """The header has the date of AWS's prices, and of all that has no other."""
    header, *entries = re.split(r"(?m)^(?=\w+: \{)", TABLE.read_text(encoding="utf-8"))
    assert re.search(r"Sources, read on 20\d\d-\d\d-\d\d.* AWS's from\W+\S+ \(.*20\d\d-", header, re.DOTALL)
    for entry in entries:
        (fields,) = read_yaml(entry).values()
        gpu = Gpu.model_validate(fields)
        assert Gpu.model_fields.keys() - fields.keys() <= {"capability", "price_usd_hour"}
        assert bool(gpu.capability) == gpu.name.startswith(("NVIDIA ", "Tesla "))
        says = r"price_usd_hour: [\d.]+\}  # (AWS \w+\.xlarge|\w+, (about )?20\d\d-\d\d)"
        assert bool(re.search(says, entry)) == bool(gpu.price_usd_hour)


def test_mfu_is_relative_to_the_peak_in_half_precision() -> None:
    """Which a T4 has in fp16 alone."""
    row = Row(replace(setup("ddp", 1, DIGITS), gpu=find_gpu("t4")), replace(MEASURED, model_flops=6.5e12))
    found = line(row, load_config([*DIGITS], TASKS))
    assert found["MFU"] == pytest.approx(0.1 / found["s/step"])


def test_gpus_that_share_sequences_are_in_one_machine() -> None:
    tried = [*setups([], ["fsdp_cp"], [64, 8, 6, 1], H100)]
    assert [(of.gpus, of.cp_size) for of in tried] == [(6, 2), (8, 2), (8, 4), (8, 8), (64, 2), (64, 4), (64, 8)]
    config = load_config(["--task.source=digits", "--global_batch_size=64"], TASKS)
    line = recommendation([Row(tried[-1], replace(MEASURED, micro_batch=8))], config)
    sizes = "--num_processes 64 --num_machines 8 --parallelism_config_dp_shard_size=8 --parallelism_config_cp_size=8"
    assert f"accelerate_configs/fsdp_cp.yaml {sizes} --machine_rank=… " in line
    assert "--micro_batch_size" not in line  # it is the run's own
