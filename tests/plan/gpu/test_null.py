"""What a step asks of a GPU, counted on one that computes nothing: each wait, launch, allocation is a promise."""

import re
from collections.abc import Callable
from functools import cache

import pytest

from plan import null_gpu
from tests.launching import PROJECT, needs
from tests.plan.gpu.probe import Probe, steps_of

MNIST = ("--task.source=digits",)
SHAPE = {"model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
         "num_attention_heads": 4}  # fmt: skip
TINYLLAMA = {"model_type": "llama", "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 22,
             "num_attention_heads": 32, "num_key_value_heads": 4, "vocab_size": 32_000}  # fmt: skip


def llama(length: int, batch: int, shape: dict[str, object] = SHAPE) -> tuple[str, ...]:
    sizes = [f"--task.architecture.{name}={value}" for name, value in shape.items()]
    return ("--task.name=causal_lm", f"--task.sequence_length={length}", f"--global_batch_size={batch}", *sizes)


def kinds(probe: Probe, *names: str) -> list[int]:
    return [probe.steps[-1].get(name, 0) for name in names]


def assert_allocates_nothing(probe: Probe, *, fsdp: bool) -> None:
    """Of pinned memory, FSDP's hooks and the thread that copies batches take blocks of the same sizes. Where they first
    do so at the same moment, which may be in any step, one more block is allocated, and kept: at most one of the size
    of tokens and one of the size of documents' lengths. A block for each step would be 6."""
    assert kinds(probe, "malloc") == [0]
    assert sum(step.get("host_alloc", 0) for step in probe.steps[-6:]) <= (2 if fsdp else 0)


probed = cache(steps_of)
text = (pytest.mark.slow, needs("src/tasks/text/causal_lm.py"))


def of_text(test: Callable[..., None]) -> Callable[..., None]:
    return text[0](text[1](test))


EAGER = llama(64, 4)
COMPILED = (*EAGER, "--compile=true")
OFFLOADED = ("--activation_checkpointing=true", "--activation_offload=true")
FSDP = llama(64, 8)
STEPS = [
    (MNIST, 0, 125),
    (("--ema.decay=0.9", *MNIST), 0, 125),
    (("--cuda_graphs=true", "--ema.decay=0.9", "--optim.groups=[{match: conv.*, lr_scale: 0.1}]", *MNIST), 0, 25),
    pytest.param(EAGER, 0, 325, marks=text),
    pytest.param(COMPILED, 0, 90, marks=text),
    pytest.param((*EAGER, *OFFLOADED), 0, 400, marks=text),
    pytest.param(FSDP, 8, 300, marks=text),
    pytest.param((*FSDP, "--compile=true"), 8, 130, marks=text),
]


@pytest.mark.parametrize(("arguments", "processes", "launches"), STEPS)
def test_a_step_waits_for_and_allocates_nothing(arguments: tuple[str, ...], processes: int, launches: int) -> None:
    """In the 12th step, with AdamW."""
    probe = probed(*arguments, steps=12, processes=processes)
    assert probe.waits() == 0, probe.places
    assert_allocates_nothing(probe, fsdp=processes > 0)
    assert kinds(probe, "launch")[0] <= launches
    assert bool(kinds(probe, "triton")[0] > 10) == ("--compile=true" in arguments)
    assert kinds(probe, "graph_launch") == ["--cuda_graphs=true" in arguments]


@of_text
@pytest.mark.parametrize(("arguments", "processes"), [(EAGER, 0), (FSDP, 8)])
def test_an_evaluation_does_not_wait_for_each_batch(arguments: tuple[str, ...], processes: int) -> None:
    """Nor where its size is measured."""
    evaluation = probed(*arguments, steps=12, processes=processes).evaluation
    assert sum(evaluation.get(kind, 0) for kind in ("sync_stream", "sync_device")) == 0


@of_text
def test_offload_waits_for_whether_a_step_is_skipped() -> None:
    """And for the factor that clips them, without which there are two waits, not three."""
    probe = steps_of(*EAGER, processes=1, FSDP_OFFLOAD_PARAMS="true")
    assert probe.places["sync_stream src/training/gradients.py"] == 3


@of_text
def test_fsdp_exchanges_each_shard_as_often_as_its_strategy_has_it() -> None:
    """Parameters in bf16, gathered again for backward but for the last block; gradients in fp32; their norm."""
    counts = {name: n for name, n in probed(*FSDP, steps=12, processes=8).kernels.items() if name.startswith("nccl")}
    block = 64 * 64 * 4 + 3 * 64 * 128 + 2 * 64
    gathered, reduced = "ncclAllGather {} bytes", "ncclReduceScatter {} bytes"
    rows = -(-258 // 8) * 64  # FSDP pads the vocabulary to a multiple of the processes
    assert counts == {
        gathered.format(block // 8 * 2): 4, gathered.format(rows * 2): 3, gathered.format(64 // 8 * 2): 1,
        reduced.format(block // 8 * 4): 2, reduced.format(rows * 4): 2, reduced.format(64 // 8 * 4): 1,
        "ncclAllReduce 8 bytes": 1,
    }, (counts)  # fmt: skip


@of_text
@pytest.mark.parametrize(
    ("heads", "kv_heads", "processes", "sent"), [(4, 4, 4, 12), (4, 2, 2, 8), (4, 2, 4, 12), (3, 3, 2, 12)]
)
def test_sharing_sequences_exchanges_tokens_for_heads(heads: int, kv_heads: int, processes: int, sent: int) -> None:
    """In bf16, there and back. Fewer heads than processes are repeated, heads that don't divide are filled up."""
    shape = SHAPE | {"hidden_size": 16 * heads, "num_attention_heads": heads, "num_key_value_heads": kv_heads}
    probe = steps_of(*llama(64 * processes, 1, shape), steps=12, processes=processes, cp_size=processes)
    to_each = [-(-number // processes) * 64 * 16 * 2 for number in (sent, heads)]
    counts = {name: n for name, n in probe.kernels.items() if name.startswith("ncclSend")}
    assert counts == {f"ncclSend {size} bytes": 2 * 2 * processes for size in to_each}
    assert probe.waits() == 0, probe.places
    assert_allocates_nothing(probe, fsdp=True)


@of_text
def test_fp8_computes_in_fp8() -> None:
    probe = steps_of(*llama(64, 8), processes=1, ACCELERATE_MIXED_PRECISION="fp8", ACCELERATE_FP8_BACKEND="AO")
    assert any("scaled" in name.lower() or "fp8" in name.lower() or "e4m3" in name.lower() for name in probe.kernels)


@of_text
def test_the_page_on_transformers_has_the_peaks_of_memory() -> None:
    """By torch's own allocator, within a hundredth."""
    page = (PROJECT / "docs/transformers.md").read_text()
    (cells,) = re.findall(r"^\| 1.1B, one GPU \|.*\| ([\d.]+) \| ([\d.]+) \|$", page, re.MULTILINE)
    probe = steps_of(*llama(4096, 4, TINYLLAMA), steps=3)
    assert [probe.peak, probe.reserved] == pytest.approx([float(cell) for cell in cells], rel=0.01)


def test_the_null_gpu_refuses_another_torch_or_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its structs may have another shape: torch 2.11 crashed where they were those of triton's headers, CUDA 12.8."""
    serves = "the null GPU serves torch 2.11 to 2.15, and this is"
    for name, value, says in (
        ("torch.__version__", "2.10.0+cu130", f"{serves} 2.10.0+cu130"),
        ("torch.__version__", "2.16.0", f"{serves} 2.16.0"),
        ("plan.null_gpu.CUDA", "12.8", "the null GPU stands for CUDA 13, and this torch is built for 12.8"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(name, value)
            assert null_gpu.reason_to_skip() == says
