"""The GPUs that a run can be planned for: those in gpus.yaml, or in a file of the user's."""

from pathlib import Path

from pydantic import BaseModel, PositiveFloat, PositiveInt, ValidationError, field_validator
from ruamel.yaml.error import YAMLError

from src.config.errors import UserError, explained
from src.config.settings import nearest, problem_text, read_yaml

TABLE = Path(__file__).with_name("gpus.yaml")
CONTEXT_GIB = 1.5
"""GiB of a GPU's memory that CUDA's context, NCCL and cuBLAS's workspaces take."""


class Gpu(BaseModel, extra="forbid"):
    """An entry of gpus.yaml, where the fields are explained."""

    name: str
    capability: str
    memory_gib: PositiveFloat
    bandwidth_gb_s: PositiveFloat
    tflops: dict[str, PositiveFloat]
    product_share: PositiveFloat = 0.65
    attention_share: PositiveFloat = 0.45
    link_gb_s: PositiveFloat
    network_gb_s: PositiveFloat
    gpus_per_machine: PositiveInt = 8
    price_usd_hour: float | None = None

    @field_validator("tflops")
    @classmethod
    def _require_fp32(cls, tflops: dict[str, float]) -> dict[str, float]:
        if "fp32" not in tflops:
            raise ValueError("fp32 is missing")
        return tflops

    @property
    def capacity(self) -> int:
        """Return the bytes of memory that torch can use."""
        return int((self.memory_gib - CONTEXT_GIB) * 2**30)

    def peak(self, precision: str) -> float:
        """Return the peak operations per second in this precision or, if it is not listed, in fp32."""
        return self.tflops.get(precision, self.tflops["fp32"]) * 1e12


def find_gpu(name: str) -> Gpu:
    """Return the GPU of this name in gpus.yaml, or the only one in the file NAME.yaml.

    Raises:
        UserError: there is none, or its entry has mistakes, one per line.
    """
    file = Path(name) if name.endswith((".yaml", ".yml")) else TABLE
    with explained(f"--gpu {name}: cannot be read, ", (OSError, UnicodeDecodeError, YAMLError)):
        table = read_yaml(file.read_bytes())
    if not isinstance(table, dict) or not table:
        raise UserError(f"--gpu {name}: must be NAME: {{memory_gib: 80, …}}, as in src/tools/plan/gpus.yaml")
    key = name if file == TABLE else next(iter(table))
    if key not in table:
        raise UserError(f"--gpu {name}: no such GPU{nearest(name, list(table))} ({', '.join(table)}, or a FILE.yaml)")
    try:
        return Gpu.model_validate(table[key])
    except ValidationError as error:
        lines = [f"{file}: {key}.{'.'.join(map(str, of['loc']))}: {problem_text(of)}" for of in error.errors()]
        raise UserError("\n".join(lines)) from error
