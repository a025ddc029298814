"""`python -m tests.plan.gpu.build [--null] [--devices=4] COMMAND...` runs COMMAND on emulated GPUs, whose operators the
CPU computes: the null GPU with emulated_gpu.cpp, compiled here. With --null, they only count kernels."""

import argparse
import os
import subprocess
from pathlib import Path

import torch

from plan import null_gpu
from plan.null_gpu import SOURCE, headers, null_environment

HERE = Path(__file__).resolve().parent
EMULATION = HERE / "emulated_gpu.cpp"


def reason_to_skip() -> str | None:
    """Return why emulated GPUs can't be used here, or None."""
    return null_gpu.reason_to_skip("g++")


def compile_emulation(folder: Path) -> None:
    torch_folder = Path(torch.__file__).parent
    include, lib = torch_folder / "include", torch_folder / "lib"
    options = ["-std=c++20", "-O1", "-w", "-shared", "-fPIC", f"-L{lib}", f"-Wl,-rpath,{lib}"]
    options += [f"-I{folder}" for folder in (*headers(), include, include / "torch/csrc/api/include")]
    libraries = ["-lc10", "-lc10_cuda", "-ltorch_cpu", "-ltorch_cuda"]
    subprocess.run(["g++", *options, "-o", folder / "emulated_gpu.so", EMULATION, *libraries], check=True)


def emulated_environment(devices: int = 1, **more: str) -> dict[str, str]:
    """Return what a process needs for GPUs whose operators the CPU computes; NCCL moves real data between processes."""
    path = f"{HERE / 'site'}:{os.environ.get('PYTHONPATH', '')}".rstrip(":")
    found = {
        "NULL_GPU_EMULATE": "1",
        "NULL_GPU_LIBRARIES": str(null_gpu.cached([SOURCE, EMULATION, Path(__file__)], compile_emulation)),
        "NULL_GPU_NCCL": "shm",
        "TORCHDYNAMO_DISABLE": "1",
        "PYTHONPATH": path,
    }
    return null_environment(devices, **{**found, **more})


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m tests.plan.gpu.build")
    parser.add_argument("--null", dest="added", action="store_const", const=null_environment)
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("command", nargs=argparse.REMAINDER)
    options = parser.parse_args()
    added = (options.added or emulated_environment)(options.devices)
    os.execvpe(options.command[0], options.command, {**os.environ, **added})
