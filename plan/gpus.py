"""The GPUs that a run can be planned for: those in src/tracking/gpus.yaml that are CUDA's."""

from pathlib import Path

from pydantic import BaseModel, Field, PositiveFloat, PositiveInt, ValidationError, field_validator
from ruamel.yaml.error import YAMLError

from src.config.errors import UserError, as_user_error
from src.config.settings import nearest, read_yaml

TABLE = Path(__file__).parents[1] / "src/tracking/gpus.yaml"
CONTEXT_GIB = 1.5
"""GiB of a GPU's memory that CUDA's context, NCCL and cuBLAS's workspaces take."""


class Gpu(BaseModel, extra="forbid"):
    """An entry of gpus.yaml, where the fields are explained."""

    names: list[str] = Field(min_length=1)
    capability: str = ""
    memory_gib: PositiveFloat
    bandwidth_gb_s: PositiveFloat
    tflops: dict[str, PositiveFloat]
    product_share: PositiveFloat = 0.65
    attention_share: PositiveFloat = 0.45
    link_gb_s: PositiveFloat
    network_gb_s: PositiveFloat
    gpus_per_machine: PositiveInt = 8
    price_usd_hour: float = 0

    @field_validator("tflops")
    @classmethod
    def _require_fp32(cls, tflops: dict[str, float]) -> dict[str, float]:
        if "fp32" not in tflops:
            raise ValueError("fp32 is missing")
        return tflops

    @property
    def name(self) -> str:
        return self.names[0]

    @property
    def capacity(self) -> int:
        """Return the bytes of memory that torch can use."""
        return int((self.memory_gib - CONTEXT_GIB) * 2**30)

    def peak(self, precision: str) -> float:
        """Return the peak operations per second in this precision or, if it is not listed, in fp32."""
        return self.tflops.get(precision, self.tflops["fp32"]) * 1e12


def find_gpu(name: str) -> Gpu:
    """Return the GPU of this name in gpus.yaml. Raise a UserError if there is none, its entry has mistakes, or it isn't
    CUDA's: plans are measured with torch's CUDA build."""
    with as_user_error(f"{TABLE}: {name}: ", (YAMLError, ValidationError)):
        table = read_yaml(TABLE.read_bytes())
        if name not in table:
            there = f"{nearest(name, list(table))} ({', '.join(table)})"
            raise UserError(f"--gpu {name}: no such GPU{there}; to plan for another one, add it to {TABLE}")
        gpu = Gpu.model_validate(table[name])
    if not gpu.capability:
        raise UserError(f"--gpu {name}: is no GPU of CUDA's, as plans need; choose one with a capability in {TABLE}")
    return gpu
