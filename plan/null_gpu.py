"""Compile null_gpu.c: a GPU for machines without one, which counts calls and computes nothing.

plan/README.md says what it is for; null_gpu.c, what it does.
"""

import contextlib
import ctypes
import hashlib
import os
import platform
import re
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
CUDA = torch.version.cuda or "none"
SERVED = ("2.11", "2.12", "2.13", "2.14", "2.15")
"""Tested versions of torch. Others may call missing functions, or pass structs of another shape."""
WAITS = ("sync_stream", "sync_device", "sync_event", "sync_memcpy")
"""null_gpu.c's names for calls in which the host waits for the device."""


def headers() -> list[Path]:
    """Return the folders with CUDA's headers, torch's own runtime first: triton's may be of another version,
    whose structs have another shape (CUDA 12.8 with torch 2.11). Empty: the runtime's are missing."""
    folders = [
        Path(parent, name)
        for package, name in (("nvidia", f"cu{CUDA.partition('.')[0]}/include"), ("triton", "backends/nvidia/include"))
        for parent in (getattr(find_spec(package), "submodule_search_locations", None) or ())
    ]
    for i, folder in enumerate(folders):
        file = folder / "cuda_runtime_api.h"
        version = (
            re.search(r"define CUDART_VERSION +(\d+)", file.read_text(encoding="utf-8")) if file.exists() else None
        )
        if version and CUDA.startswith(f"{int(version[1]) // 1000}."):
            return folders[i:]
    return []


def reason_to_skip(*compilers: str) -> str | None:
    """Return why the null GPU can't be used here, or None. `compilers` are needed besides gcc."""
    missing = [name for name in ("gcc", *compilers) if not shutil.which(name)]
    if (sys.platform, platform.machine()) != ("linux", "x86_64"):
        return "the null GPU needs Linux on x86-64"
    if missing:
        return f"the null GPU is compiled by {' and '.join(missing)}, missing here"
    if not torch.__version__.startswith(tuple(f"{version}." for version in SERVED)):
        return f"the null GPU serves torch {SERVED[0]} to {SERVED[-1]}, and this is {torch.__version__}"
    if not CUDA.startswith("13."):
        return f"the null GPU stands for CUDA 13, and this torch is built for {CUDA}"
    if not headers():
        return f"the null GPU needs the headers of CUDA {CUDA}: install nvidia-cuda-runtime, or triton"
    return None


def cached(sources: list[Path], build: Callable[[Path], None]) -> Path:
    """Return the folder of the libraries that `build` compiles from the sources, calling it unless they are cached.
    NULL_GPU_CACHE may name another folder than ~/.cache."""
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
        with contextlib.suppress(OSError):  # another process was faster
            folder.rename(done)
    return done


def compile_null_gpu(folder: Path) -> None:
    """Compile null_gpu.c into a folder, as CUDA's driver and, under a second name, as NVML."""
    library = folder / "libcuda.so.1"
    options = ["-std=gnu17", "-O1", "-w", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1"]
    options += [f"-I{include}" for include in headers()]
    subprocess.run(["gcc", *options, "-o", library, SOURCE, "-ldl"], check=True)
    (folder / "libnvidia-ml.so.1").symlink_to("libcuda.so.1")


def null_environment(devices: int = 1, **more: str) -> dict[str, str]:
    """Return the environment variables that give a process this many null GPUs, and `more`.

    Raises:
        RuntimeError: this machine can't build the null GPU; `reason_to_skip` explains why.
    """
    if reason := reason_to_skip():
        raise RuntimeError(reason)
    folder = str(cached([SOURCE], compile_null_gpu))
    path = f"{folder}:{os.environ.get('LD_LIBRARY_PATH', '')}".rstrip(":")
    return {
        "LD_PRELOAD": "libcuda.so.1",  # found through LD_LIBRARY_PATH: a path here must not contain spaces
        "TRITON_LIBCUDA_PATH": folder,
        "LD_LIBRARY_PATH": path,
        "NULL_GPU_COUNT": str(devices),
        "CUDA_VISIBLE_DEVICES": ",".join(map(str, range(devices))),
        "OMP_NUM_THREADS": "1",
        **more,
    }


class NullGpu:
    """Counts this process's calls to its null GPU."""

    def __init__(self) -> None:
        self.library: Any = ctypes.CDLL("libcuda.so.1")
        self.library.null_gpu_kind_name.restype = ctypes.c_char_p
        self.library.null_gpu_count.restype = ctypes.c_long
        self.kinds: list[str] = []
        """null_gpu.c's names for its counters."""
        while name := self.library.null_gpu_kind_name(len(self.kinds)):
            self.kinds.append(name.decode())

    def counts(self) -> dict[str, int]:
        """Return the nonzero counts since the last `reset`, by kind."""
        return {kind: n for i, kind in enumerate(self.kinds) if (n := self.library.null_gpu_count(i))}

    def reset(self) -> None:
        self.library.null_gpu_reset()


def join_alone(gpus: int) -> None:
    """Join a process group of size `gpus` as rank 0, without any other process."""
    torch.cuda.set_device(0)
    # `fake` first: torch 2.11 gives a backend the options of the one before it
    # the null GPU's NCCL assumes that all others do the same; gloo would wait for them
    dist.init_process_group("cpu:fake,cuda:nccl", store=dist.HashStore(), rank=0, world_size=gpus)
    torch_distributed: Any = dist
    # torch 2.15 would split groups from this one, whose size only the others know
    torch_distributed.group.WORLD.bound_device_id = None
    # `fake` refuses it before torch 2.14
    torch_distributed.ProcessGroup.set_timeout = lambda *_: None
    # torch 2.15 copies gathered data with a kernel, which does not run: DDP would find that the others lack parameters
    torch_distributed._verify_params_across_processes = lambda *_: None
    new_group: Any = dist.new_group

    def without_gloo(*args: Any, backend: str | None = None, **more: Any) -> Any:
        return new_group(*args, backend="fake" if backend == "gloo" else backend, **more)

    dist.new_group = without_gloo
