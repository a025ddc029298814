"""A GPU for machines without one, which counts what it is asked to do and computes nothing: null_gpu.c, compiled here.

docs/gpu.md says what it is, and what it can't show.
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
"""Versions of torch that were tried. Another one may call what is not here, or take structs of another shape."""
WAITS = ("sync_stream", "sync_device", "sync_event", "sync_memcpy")
"""Kinds of what null_gpu.c counts for which the host waits for the device."""


def headers() -> list[Path]:
    """Return the folders with CUDA's headers, those of the runtime that torch is linked with first: triton's may be of
    another version, whose structs have another shape (CUDA 12.8 with torch 2.11). Empty: that runtime's are missing."""
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
    """Return why the null GPU can't be used here, or None. `compilers` are those needed besides gcc."""
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
    options += [f"-I{include}" for include in headers()]
    subprocess.run(["gcc", *options, "-o", library, SOURCE, "-ldl"], check=True)
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
        "LD_PRELOAD": "libcuda.so.1",  # looked for in LD_LIBRARY_PATH: spaces in a folder's name would cut it here
        "TRITON_LIBCUDA_PATH": folder,
        "LD_LIBRARY_PATH": path,
        "NULL_GPU_COUNT": str(devices),
        "CUDA_VISIBLE_DEVICES": ",".join(map(str, range(devices))),
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
    # `fake` first: torch 2.11 gives a backend the options of the one before it
    # the null GPU's NCCL takes all others to do as this process does; gloo would wait for them
    dist.init_process_group("cpu:fake,cuda:nccl", store=dist.HashStore(), rank=0, world_size=gpus)
    torch_distributed: Any = dist
    # torch 2.15 would split groups from this one, of a size that only the others could tell
    torch_distributed.group.WORLD.bound_device_id = None
    # `fake` refuses it before torch 2.14
    torch_distributed.ProcessGroup.set_timeout = lambda *_: None
    # torch 2.15 copies what was gathered by a kernel, which is not run: DDP would find the others without parameters
    torch_distributed._verify_params_across_processes = lambda *_: None
    new_group: Any = dist.new_group

    def without_gloo(*args: Any, backend: str | None = None, **more: Any) -> Any:
        return new_group(*args, backend="fake" if backend == "gloo" else backend, **more)

    dist.new_group = without_gloo
