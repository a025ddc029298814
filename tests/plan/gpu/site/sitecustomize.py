"""Python imports this at its start, as build.py puts this folder on PYTHONPATH: it makes torch's CUDA compute."""

import os
import runpy
import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import PathFinder
from typing import Any


class AfterTorch(MetaPathFinder):  # installs the emulation when torch has been imported, which not every process does
    def find_spec(self, name: str, *_: Any) -> Any:
        spec: Any = PathFinder.find_spec(name) if name == "torch" else None
        if spec:
            execute = spec.loader.exec_module
            spec.loader.exec_module = lambda torch: (execute(torch), EMULATION["install"](torch))
        return spec


if os.environ.get("NULL_GPU_EMULATE") == "1" and "libcuda.so.1" in os.environ.get("LD_PRELOAD", ""):
    EMULATION = runpy.run_path(f"{os.path.dirname(__file__)}/../emulation.py")
    sys.meta_path.insert(0, AfterTorch())
