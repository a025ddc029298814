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
TORCH, TRITON = (
    Path(spec.origin).parent if (spec := importlib.util.find_spec(name)) and spec.origin else Path("/missing")
    for name in ("torch", "triton")
)
HEADERS = TRITON / "backends/nvidia/include"
VERSIONS = runpy.run_path(f"{TORCH}/version.py") if TORCH.exists() else {"cuda": None}


def reason_to_skip() -> str | None:
    """Why the null GPU can't be used here, or None."""
    if (sys.platform, platform.machine()) != ("linux", "x86_64"):
        return "the null GPU needs Linux on x86-64"
    if not (shutil.which("gcc") and shutil.which("g++")):
        return "the null GPU is compiled by gcc and g++"
    if not (VERSIONS["cuda"] or "").startswith("13."):
        return f"the null GPU stands for CUDA 13, this torch is built for {VERSIONS['cuda'] or 'CPUs'}"
    if not (HEADERS / "driver_types.h").exists():
        return "the null GPU needs CUDA's headers, which come with triton"
    return None


def build() -> Path:
    """The folder of the compiled libraries, which are compiled if they aren't there yet."""
    if reason := reason_to_skip():
        raise RuntimeError(reason)
    sources = [HERE / "null_gpu.c", HERE / "emulated_gpu.cpp"]
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in (*sources, Path(__file__)))).hexdigest()[:12]
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    cache = Path(os.environ.get("NULL_GPU_CACHE") or home / "accelerate-template/null-gpu").absolute()
    done = cache / f"{VERSIONS['__version__']}-{digest}"
    if done.is_dir():
        return done
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache) as scratch:
        folder = Path(scratch, "libraries")
        folder.mkdir()
        shared = f"-O1 -w -shared -fPIC -I{HEADERS} -o {folder}"
        includes = f"-I{TORCH}/include -I{TORCH}/include/torch/csrc/api/include"
        libraries = f"-L{TORCH}/lib -Wl,-rpath,{TORCH}/lib -lc10 -lc10_cuda -ltorch_cpu -ltorch_cuda"
        for command in (
            f"gcc -std=gnu17 {shared}/libcuda.so.1 -Wl,-soname,libcuda.so.1 {sources[0]} -ldl",
            f"g++ -std=c++20 {shared}/emulated_gpu.so {includes} {sources[1]} {libraries}",
        ):
            subprocess.run(command.split(), check=True)
        (folder / "libnvidia-ml.so.1").symlink_to("libcuda.so.1")
        with contextlib.suppress(OSError):  # another process has built the same meanwhile
            folder.rename(done)
    return done


def null_environment(devices: int = 1, **more: str) -> dict[str, str]:
    """What a process needs in its environment for GPUs that run no kernel; `more` is added."""
    folder = str(build())
    found = {"LD_PRELOAD": f"{folder}/libcuda.so.1", "TRITON_LIBCUDA_PATH": folder, "NULL_GPU_LIBRARIES": folder}
    found["LD_LIBRARY_PATH"] = f"{folder}:{os.environ.get('LD_LIBRARY_PATH', '')}".rstrip(":")
    return {**found, "NULL_GPU_COUNT": str(devices), "OMP_NUM_THREADS": "1", **more}


def emulated_environment(devices: int = 1, **more: str) -> dict[str, str]:
    """The same for GPUs whose operators the CPU computes; NCCL moves real data between processes."""
    path = f"{HERE / 'site'}:{os.environ.get('PYTHONPATH', '')}".rstrip(":")
    found = {"NULL_GPU_EMULATE": "1", "NULL_GPU_NCCL": "shm", "TORCHDYNAMO_DISABLE": "1", "PYTHONPATH": path}
    return null_environment(devices, **{**found, "TORCH_NCCL_ENABLE_MONITORING": "0", **more})


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m tests.gpu.build")
    parser.add_argument("--null", action="store_true")
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("command", nargs=argparse.REMAINDER)
    options = parser.parse_args()
    added = (null_environment if options.null else emulated_environment)(options.devices)
    os.execvpe(options.command[0], options.command, {**os.environ, **added})
