"""A GPU for machines without one, which counts what it is asked to do and computes nothing: null_gpu.c, compiled here.

docs/gpu.md says what it is, and what it can't show.
"""

import contextlib
import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore  # noqa: F401  # registers the backend `fake`

SOURCE = Path(__file__).with_name("null_gpu.c")
TRITON = find_spec("triton")
HEADERS = Path((TRITON.origin if TRITON else None) or "/missing").parent / "backends/nvidia/include"
CUDA = torch.version.cuda or "none"
WAITS = ("sync_stream", "sync_device", "sync_event", "sync_memcpy")
"""Kinds of what null_gpu.c counts for which the host waits for the device."""


def reason_to_skip(*compilers: str) -> str | None:
    """Return why the null GPU can't be used here, or None. `compilers` are those needed besides gcc."""
    missing = [name for name in ("gcc", *compilers) if not shutil.which(name)]
    if (sys.platform, platform.machine()) != ("linux", "x86_64"):
        return "the null GPU needs Linux on x86-64"
    if missing:
        return f"the null GPU is compiled by {' and '.join(missing)}, missing here"
    if not CUDA.startswith("13."):
        return f"the null GPU stands for CUDA 13, and this torch is built for {CUDA}"
    if not (HEADERS / "driver_types.h").exists():
        return "the null GPU needs CUDA's headers, which come with triton"
    return None


def cached(sources: list[Path], build: Callable[[Path], None]) -> Path:
    """Return the folder of what `build` makes of the sources in the folder that it is given; it is called unless that
    was done before. NULL_GPU_CACHE may name another place for it than ~/.cache."""
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in (*sources, Path(__file__)))).hexdigest()[:12]
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    cache = Path(os.environ.get("NULL_GPU_CACHE") or f"{home}/accelerate-template/null-gpu").absolute()
    done = cache / f"{torch.__version__}-{digest}"
    if done.is_dir():
        return done
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache) as scratch:
        folder = Path(scratch, "libraries")
        folder.mkdir()
        build(folder)
        with contextlib.suppress(OSError):  # another process has built the same meanwhile
            folder.rename(done)
    return done


def compile_null_gpu(folder: Path) -> None:
    """Compile null_gpu.c into a folder, as the driver and, under a second name, as NVML."""
    library = folder / "libcuda.so.1"
    options = ["-std=gnu17", "-O1", "-w", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1"]
    subprocess.run(["gcc", *options, f"-I{HEADERS}", "-o", library, SOURCE, "-ldl"], check=True)
    (folder / "libnvidia-ml.so.1").symlink_to("libcuda.so.1")


def null_environment(devices: int = 1, **more: str) -> dict[str, str]:
    """Return what a process needs in its environment for so many GPUs that run no kernel; `more` is added.

    Raises:
        RuntimeError: this machine can't build it; `reason_to_skip` says why.
    """
    if reason := reason_to_skip():
        raise RuntimeError(reason)
    folder = str(cached([SOURCE], compile_null_gpu))
    path = f"{folder}:{os.environ.get('LD_LIBRARY_PATH', '')}".rstrip(":")
    return {
        "LD_PRELOAD": f"{folder}/libcuda.so.1",
        "TRITON_LIBCUDA_PATH": folder,
        "LD_LIBRARY_PATH": path,
        "NULL_GPU_COUNT": str(devices),
        "OMP_NUM_THREADS": "1",
        **more,
    }


class NullGpu:
    """What this process has asked of its null GPU."""

    def __init__(self) -> None:
        self.library: Any = ctypes.CDLL("libcuda.so.1")
        self.library.null_gpu_kind_name.restype = ctypes.c_char_p
        self.library.null_gpu_count.restype = ctypes.c_long
        self.kinds: list[str] = []
        """What it counts, by the names that null_gpu.c gives."""
        while name := self.library.null_gpu_kind_name(len(self.kinds)):
            self.kinds.append(name.decode())

    def counts(self) -> dict[str, int]:
        """Return how often each kind of thing has happened, if it has, since the last `reset`."""
        return {kind: n for i, kind in enumerate(self.kinds) if (n := self.library.null_gpu_count(i))}

    def reset(self) -> None:
        self.library.null_gpu_reset()


def join_alone(gpus: int) -> None:
    """Join a group of so many processes, of which this one is the first and the only one."""
    torch.cuda.set_device(0)
    # the null GPU's NCCL takes all others to do as this process does; gloo would wait for them
    dist.init_process_group("cuda:nccl,cpu:fake", store=dist.HashStore(), rank=0, world_size=gpus)
    new_group: Any = dist.new_group

    def without_gloo(*args: Any, backend: str | None = None, **more: Any) -> Any:
        return new_group(*args, backend="fake" if backend == "gloo" else backend, **more)

    dist.new_group = without_gloo
