"""A GPU for machines without one: compiles null_gpu.c and emulated_gpu.cpp and says how a process comes to use them.

`python -m tests.gpu.build [--null] [--devices=4] COMMAND...` runs COMMAND on emulated GPUs, whose operators the CPU
computes, or, with --null, on GPUs that only count kernels. NULL_GPU_CACHE may name a folder for what is compiled.
"""

import argparse
import contextlib
import hashlib
import importlib.util
import os
import platform
import runpy
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
SPECS = map(importlib.util.find_spec, ("torch", "triton"))
TORCH, TRITON = (Path(spec.origin).parent if spec and spec.origin else Path("/missing") for spec in SPECS)
HEADERS = TRITON / "backends/nvidia/include"
VERSIONS = runpy.run_path(f"{TORCH}/version.py") if TORCH.exists() else {"cuda": None}


def reason_to_skip() -> str | None:
    """Why the null GPU can't be used here, or None."""
    reasons = {
        "the null GPU needs Linux on x86-64": (sys.platform, platform.machine()) == ("linux", "x86_64"),
        "the null GPU is compiled by gcc and g++": shutil.which("gcc") and shutil.which("g++"),
        f"the null GPU stands for CUDA 13, not for {VERSIONS['cuda']}": (VERSIONS["cuda"] or "").startswith("13."),
        "the null GPU needs CUDA's headers, which come with triton": (HEADERS / "driver_types.h").exists(),
    }
    return next((reason for reason, fulfilled in reasons.items() if not fulfilled), None)


def build() -> Path:
    """The folder of the compiled libraries, which are compiled if they aren't there yet."""
    if reason := reason_to_skip():
        raise RuntimeError(reason)
    sources = [HERE / "null_gpu.c", HERE / "emulated_gpu.cpp"]
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in (*sources, Path(__file__)))).hexdigest()[:12]
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    cache = Path(os.environ.get("NULL_GPU_CACHE") or f"{home}/accelerate-template/null-gpu").absolute()
    if (done := cache / f"{VERSIONS['__version__']}-{digest}").is_dir():
        return done
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache) as scratch:
        (folder := Path(scratch, "libraries")).mkdir()
        shared = f"-O1 -w -shared -fPIC -I{HEADERS} -o {folder}"
        torch = f"-I{TORCH}/include -I{TORCH}/include/torch/csrc/api/include -L{TORCH}/lib -Wl,-rpath,{TORCH}/lib"
        for command in (
            f"gcc -std=gnu17 {shared}/libcuda.so.1 -Wl,-soname,libcuda.so.1 {sources[0]} -ldl",
            f"g++ -std=c++20 {shared}/emulated_gpu.so {sources[1]} {torch} -lc10 -lc10_cuda -ltorch_cpu -ltorch_cuda",
        ):
            subprocess.run(command.split(), check=True)
        (folder / "libnvidia-ml.so.1").symlink_to("libcuda.so.1")
        with contextlib.suppress(OSError):  # another process has built the same meanwhile
            folder.rename(done)
    return done


def null_environment(devices: int = 1, **more: str) -> dict[str, str]:
    """What a process needs in its environment for GPUs that run no kernel; `more` is added."""
    path = f"{(folder := str(build()))}:{os.environ.get('LD_LIBRARY_PATH', '')}".rstrip(":")
    found = {"LD_PRELOAD": f"{folder}/libcuda.so.1", "TRITON_LIBCUDA_PATH": folder, "LD_LIBRARY_PATH": path}
    return {**found, "NULL_GPU_LIBRARIES": folder, "NULL_GPU_COUNT": str(devices), "OMP_NUM_THREADS": "1", **more}


def emulated_environment(devices: int = 1, **more: str) -> dict[str, str]:
    """The same for GPUs whose operators the CPU computes; NCCL moves real data between processes."""
    path = f"{HERE / 'site'}:{os.environ.get('PYTHONPATH', '')}".rstrip(":")
    found = {"NULL_GPU_EMULATE": "1", "NULL_GPU_NCCL": "shm", "TORCHDYNAMO_DISABLE": "1", "PYTHONPATH": path}
    return null_environment(devices, **{**found, **more})


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m tests.gpu.build")
    parser.add_argument("--null", dest="added", action="store_const", const=null_environment)
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("command", nargs=argparse.REMAINDER)
    options = parser.parse_args()
    added = (options.added or emulated_environment)(options.devices)
    os.execvpe(options.command[0], options.command, {**os.environ, **added})
