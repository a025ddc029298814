"""Python imports this at its start, as build.py puts this folder on PYTHONPATH: it makes torch's CUDA compute."""

import os
import sys
from pathlib import Path

if os.environ.get("NULL_GPU_EMULATE") == "1" and "libcuda.so.1" in os.environ.get("LD_PRELOAD", ""):
    sys.path.insert(0, str(Path(__file__).parents[1]))
    from emulation import after_import, install  # type: ignore[import-not-found]

    del sys.path[0]
    after_import("torch", install)
