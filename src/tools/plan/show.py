"""The plan as the user sees it: a table, a recommendation, plan.json and a picture."""

import json
import shlex
from collections import defaultdict
from dataclasses import asdict, dataclass
from itertools import count
from pathlib import Path
from typing import Any

from src.config.config import Config
from src.tools.plan.estimate import Seconds, seconds_of
from src.tools.plan.search import Row, yaml_for
from src.tools.plan.measure import Measured
from src.tracking.figures import draw

GB = 1e9
HEADER = ("GPUs", "yaml", "memory", "micro-batch", "step", "tokens/s/GPU", "MFU", "hours", "cost", "limited by")


def numbers(row: Row, measured: Measured, is_compiled: bool) -> dict[str, Any]:
    """Return what the row costs, by name."""
    gpu, gpus = row.setup.gpu, row.setup.gpus
    seconds = seconds_of(measured, gpu, is_compiled)
    ...
