"""How long a step takes on a GPU, from the work that was counted. docs/plan.md says what this model leaves out."""

from typing import NamedTuple

from src.tools.plan.gpus import Gpu
from src.tools.plan.measure import Measured

PRECISIONS = {"bfloat16": "bf16", "float16": "fp16", "float8_e4m3fn": "fp8"}
"""What gpus.yaml calls the dtypes of products; all others are taken for fp32."""
BANDWIDTH_SHARE = 0.8
"""What of the bandwidth of memory and links is reached."""
LATENCY = {"within": 20e-6, "between": 50e-6}
"""Seconds of a collective without data."""
HOST_LINK = 25e9
"""Bytes per second between a GPU and its host."""
HOST_MEMORY = 150e9
"""Bytes per second that the processes of a machine read and write together in its memory."""
ADAMW_BYTES = 28
"""What AdamW reads and writes for each parameter, in fp32."""
HIDDEN = {"ddp": 0.5}
"""The share of a step's computing behind which communication hides, by strategy: DDP's, that of the backward pass, in
which only the last buckets wait. All of it, where a block's weights are gathered while another one computes."""
COMPILED = 0.45
"""What of the traffic of memory is left where elementwise kernels are compiled into one."""


class Seconds(NamedTuple):
    """Where the time of a step goes."""

    compute: float
    communication: float
    host: float
    step: float

    @property
    def limit(self) -> str:
        """Return what takes the most of it."""
        if self.step == self.host:
            return "the host"
        return "communication" if self.communication > self.compute else "computing"


def seconds_of(measured: Measured, gpu: Gpu, gpus: int, is_compiled: bool) -> Seconds:
    """Return the seconds of a step: the larger of the host's time, and of computing and what communication takes beyond
    that which hides behind it, and of all-to-alls, behind which nothing computes."""
    compute = 0.0
    for name, amount in measured.work.items():
        kind, _, dtype = name.partition(" flops ")
        if dtype:
            share = gpu.attention_share if kind == "attention" else gpu.product_share
            compute += amount / gpu.peak(PRECISIONS.get(dtype, "fp32")) / share
    traffic = measured.work["bytes"] * (COMPILED if is_compiled else 1)
    compute += traffic / (gpu.bandwidth_gb_s * 1e9 * BANDWIDTH_SHARE)
    compute += measured.work.get("copied", 0) / HOST_LINK
    if measured.strategy.endswith("offload"):
        updated = measured.parts["gradients"] / 4 * min(gpus, gpu.gpus_per_machine)
        compute += updated * ADAMW_BYTES / HOST_MEMORY
    communication, awaited = (_communication(measured.work, gpu, kind) for kind in ("", "awaited "))
    shown = awaited + max(0.0, communication - awaited - compute * HIDDEN.get(measured.strategy, 1.0))
    host = measured.work["host_seconds"]
    return Seconds(compute, communication, host, max(compute + shown, host))


def _communication(work: dict[str, float], gpu: Gpu, kind: str) -> float:
    """Return the seconds that collectives take: all of them, or those of a kind, such as "awaited "."""
    seconds = 0.0
    for place, bandwidth in (("within", gpu.link_gb_s), ("between", gpu.network_gb_s)):
        seconds += work.get(f"{kind}sent {place}", 0) / (bandwidth * 1e9 * BANDWIDTH_SHARE)
        seconds += work.get(f"{kind}collectives {place}", 0) * LATENCY[place]
    return seconds
