"""train.py on emulated GPUs, with CUDA's dispatch, allocator, streams and NCCL's groups: its losses are the CPU's."""

import json
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from tests.launching import PROJECT, Launch, Whole, needs, slow

SHORT = ("--log_every=1", "--save_every=4", "--optim.lr=1e-4", "--optim.max_grad_norm=1")
TEXT = ("--task.name=causal_lm", "--task.sequence_length=64", "--global_batch_size=8")
SIZES = {"model_type": "llama", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
         "num_attention_heads": 4, "num_key_value_heads": 2}  # fmt: skip
SCRATCH = tuple(f"--task.architecture.{name}={value}" for name, value in SIZES.items())
needs_text = needs("src/tasks/text/causal_lm.py")
BF16 = ("--mixed_precision=bf16",)
"""Where attention is torch's varlen kernel on a GPU, and convolutions are channels-last."""
YAMLS = {
    "cpu": 1, "single_gpu": 1, "ddp": 2, "ddp_bf16_hook": 2, "fsdp": 2, "fsdp_grad_op": 2, "fsdp_offload": 2,
    "fsdp_fp8": 2, "fsdp_cp": 2, "hsdp": 4, "multi_node_ddp": 2, "multi_node_fsdp": 2,
}  # fmt: skip
"""All of accelerate_configs/, and on how many processes each is run."""


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[str, ...]]:
    cnn = ("--task.dropout=0", "--micro_batch_size=16")
    if not (PROJECT / "src/tasks/text").exists():
        return {"cnn": cnn}
    tiny, folder = import_module("tests.text.tiny"), tmp_path_factory.mktemp("data")
    data = (*TEXT, f"--task.dataset={tiny.questions(folder / 'questions.jsonl')}")
    files = (*data, f"--task.model={tiny.llama(folder / 'llama')}")
    adapters = (*files, "--task.lora.r=4")
    return {"cnn": cnn, "llama": (*data, *SCRATCH), "llama_files": files, "llama_adapters": adapters}


@pytest.mark.parametrize(
    ("yaml", "kind"),
    [
        ("single_gpu", "cnn"),
        *(slow(yaml, "cnn") for yaml in YAMLS if yaml not in ("single_gpu", "fsdp_cp")),
        *(slow(yaml, "llama_files") for yaml in YAMLS if yaml not in ("cpu", "multi_node_ddp", "multi_node_fsdp")),
        *(slow(yaml, "llama_adapters") for yaml in ("single_gpu", "ddp", "fsdp")),
        *(slow(yaml, "llama") for yaml in ("single_gpu", "fsdp")),
    ],
)
def test_a_run_on_gpus_has_the_cpus_losses_resumes_and_exports(
    gpu: Launch, whole: Whole, text: Any, tmp_path: Path, yaml: str, kind: str
) -> None:
    task, folder = text[kind], tmp_path / "run"
    arguments = (*task, *SHORT)
    first, run = (
        gpu(yaml, *arguments, f"--max_steps={steps}", folder=folder, processes=YAMLS[yaml]).succeeded()
        for steps in (4, 6)
    )
    alone = whole("cpu", *arguments, "--max_steps=6")
    assert (first.stderr, run.stderr) == ("", "")
    assert run.losses == pytest.approx(alone.losses, rel=1e-5)
    for name in ("eval/loss", "eval/examples"):
        assert run.summary[name] == pytest.approx(alone.summary[name], rel=1e-5)
    assert run.summary["device"] == ("cpu" if yaml == "cpu" else "cuda")
    assert ("nccl" in str(run.summary["backend"])) == (YAMLS[yaml] > 1)
    for file in (alone.folder / "model").glob("*.safetensors"):
        weights, expected = load_file(run.folder / "model" / file.name), load_file(file)
        assert weights.keys() == expected.keys()
        for name, weight in weights.items():
            assert (weight - expected[name]).norm() <= 1e-3 * expected[name].norm(), name


@needs_text
@pytest.mark.slow
@pytest.mark.parametrize(
    ("groups", "parts", "heads", "rows"),
    [(1, 2, (4, 2), 1), (2, 2, (4, 1), 2), (1, 4, (4, 2), 8), (1, 4, (6, 3), 4), (1, 3, (4, 4), 2)],
)
def test_shared_sequences_have_the_losses_of_whole_ones_on_gpus(
    gpu: Launch, text: Any, groups: int, parts: int, heads: tuple[int, int], rows: int
) -> None:
    """Within bf16's rounding of FSDP on one GPU."""
    shape = {"hidden_size": 8 * heads[0], "num_attention_heads": heads[0], "num_key_value_heads": heads[1],
             "initializer_range": 0.2}  # fmt: skip
    arguments = (*text["llama"], *(f"--task.architecture.{name}={value}" for name, value in shape.items()))
    arguments += ("--log_every=1", "--max_steps=6", "--optim.lr=1e-3", "--optim.warmup_steps=0")
    mesh = (f"--parallelism_config_dp_shard_size={groups}", f"--parallelism_config_cp_size={parts}")
    how: dict[str, Any] = {"processes": groups * parts, "launcher_arguments": (*BF16, *mesh)}
    run = gpu("fsdp_cp", *arguments, f"--micro_batch_size={rows}", **how).succeeded()
    alone = gpu("fsdp", *arguments, processes=1, launcher_arguments=BF16).succeeded()
    assert f"varlen attention, across {parts} processes" in run.summary["optimizations"]
    assert run.losses == pytest.approx(alone.losses, rel=2**-9)
    assert run.summary["eval/loss"] == pytest.approx(alone.summary["eval/loss"], rel=2**-9)


@needs_text
@needs("src/training/transforms.py")
@pytest.mark.parametrize("yaml", ["single_gpu", slow("ddp"), slow("fsdp"), slow("fsdp_cp")])
def test_activations_that_wait_on_the_host_change_no_loss(gpu: Launch, text: dict[str, Any], yaml: str) -> None:
    """Not a bit of it."""
    arguments = (yaml, *text["llama"], *SHORT, "--max_steps=6", "--activation_checkpointing=true")
    kept, moved = (
        gpu(*arguments, f"--activation_offload={is_moved}", processes=YAMLS[yaml]).succeeded()
        for is_moved in (False, True)
    )
    assert moved.losses == kept.losses
    assert moved.summary["eval/loss"] == kept.summary["eval/loss"]


@pytest.mark.parametrize("optimizer", ["adamw", slow("adadelta"), slow("sgd")])
def test_cuda_graphs_have_the_losses_of_eager_steps(gpu: Launch, tmp_path: Path, optimizer: str) -> None:
    """With dropout, over ragged batches, after a resume."""
    arguments = ("single_gpu", *SHORT, "--max_steps=25", f"--optim.name={optimizer}", "--optim.momentum=0.5")
    plain = gpu(*arguments).succeeded()
    for steps in (12, 25):
        more = ("--cuda_graphs=true", f"--max_steps={steps}")
        graphs = gpu(*arguments, *more, folder=tmp_path / "run").succeeded()
    assert "cuda_graphs" in graphs.summary["optimizations"]
    assert graphs.losses == pytest.approx(plain.losses, rel=1e-6)  # the rate is rounded to fp32
    assert len(set(graphs.losses)) == 25


@needs_text
@needs("src/check")
@pytest.mark.slow
def test_the_check_passes_though_attention_is_not_deterministic(gpu: Launch, text: dict[str, Any]) -> None:
    run = gpu("single_gpu", *text["llama"], "--check", launcher_arguments=BF16).succeeded()
    found = {row["what"]: row["result"] for row in json.loads((run.folder / "check.json").read_text())["checks"]}
    assert found["losses and weights after resuming"] == "pass"


@needs_text
@pytest.mark.slow
@pytest.mark.parametrize("model_type", ["olmo", "phi"])
def test_attention_falls_back_where_flash_takes_no_such_heads(gpu: Launch, text: Any, model_type: str) -> None:
    """10 heads of 12: flash attention takes multiples of 8."""
    sizes = {"model_type": model_type, "hidden_size": 120, "num_attention_heads": 10, "num_key_value_heads": 10}
    shape = [f"--task.architecture.{name}={value}" for name, value in sizes.items()]
    run = gpu("single_gpu", *text["llama"], *shape, "--max_steps=1", launcher_arguments=BF16).succeeded()
    assert any(fact.startswith("sdpa attention (not varlen:") for fact in run.summary["optimizations"])


FULL = "out of memory in the load, on a GPU of 84.9 GB, 84.9 GB outside torch; "


@pytest.mark.slow
@pytest.mark.parametrize(
    ("yaml", "environment", "says"),
    [
        ("single_gpu", {"NULL_GPU_TAKEN_GIB": "79.09"}, FULL),
        ("ddp", {"NULL_GPU_TAKEN_GIB": "79.09"}, FULL),
        ("ddp", {"NULL_GPU_COUNT": "1"}, "2 processes on this machine, but it has 1 GPU(s): set --num_processes"),
        (
            "single_gpu",
            {"NULL_GPU_DRIVER": "12080"},
            "The NVIDIA driver on your system is too old (found version 12",
        ),
    ],
)
def test_an_unusable_gpu_ends_the_run_in_one_line(
    gpu: Launch, yaml: str, environment: dict[str, str], says: str
) -> None:
    run = gpu(yaml, "--max_steps=1", processes=YAMLS[yaml], real=True, **environment)
    assert run.exit_code != 0
    (message,) = run.messages
    assert message.startswith(f"train.py: {says}")
    assert "Traceback" not in run.stderr.partition(message)[0]  # but the launcher's own, and torch's log
    assert 'train.py", line' not in run.stderr, "a traceback"
