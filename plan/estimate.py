"""Estimate how long a step takes on a GPU, from the counted work. plan/README.md lists the omissions."""

from typing import NamedTuple

from plan.gpus import Gpu
from plan.measure import Measured

PRECISIONS = {"bfloat16": "bf16", "float16": "fp16", "float8_e4m3fn": "fp8"}
"""gpus.yaml's names for the dtypes of products; all others count as fp32."""
BANDWIDTH_SHARE = 0.8
"""Fraction of the bandwidth of memory and links that is reached."""
LATENCY = {"within": 20e-6, "between": 50e-6}
"""Seconds that a collective takes without data."""
HOST_LINK = 25e9
"""Bytes per second between a GPU and its host."""
HOST_MEMORY = 150e9
"""Bytes per second of a machine's memory, over all its processes."""
ADAMW_BYTES = 28
"""Bytes that AdamW reads and writes per parameter, in fp32."""
HIDDEN = {"ddp": 0.5}
"""Fraction of a step's computing that communication can overlap with, by strategy. DDP's overlaps with the backward
pass; FSDP's (1.0) with all of it, as one block's weights are gathered while another block computes."""
COMPILED = 0.45
"""Fraction of the memory traffic that is left once elementwise kernels are fused by the compiler."""


class Seconds(NamedTuple):
    """Where the time of a step goes, in seconds."""

    compute: float
    communication: float
    host: float
    step: float

    @property
    def limit(self) -> str:
        """Return the part that takes most of the step: host, network or compute."""
        if self.step == self.host:
            return "host"
        return "network" if self.communication > self.compute else "compute"


def seconds_of(measured: Measured, gpu: Gpu, gpus: int, is_compiled: bool) -> Seconds:
    """Return the seconds of a step: the larger of the host's time and the device's. The device computes, and
    waits for communication that does not overlap with computing and for all-to-alls, which overlap with nothing."""
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
    """Return the seconds that collectives take: all of them, or one kind, such as "awaited "."""
    seconds = 0.0
    for place, bandwidth in (("within", gpu.link_gb_s), ("between", gpu.network_gb_s)):
        seconds += work.get(f"{kind}sent {place}", 0) / (bandwidth * 1e9 * BANDWIDTH_SHARE)
        seconds += work.get(f"{kind}collectives {place}", 0) * LATENCY[place]
    return seconds
