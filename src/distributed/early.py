"""Imports take seconds: signals, and the launcher's death, are handled before them. train.py imports this first."""

import sys
from pathlib import Path

from src.distributed.process import SIGNALS, end_with_launcher

PROJECT = Path(__file__).resolve().parents[2]

# only where a script beside src runs, such as train.py: not where a test or a tool imports it
if Path(getattr(sys.modules["__main__"], "__file__", None) or "/").resolve().parent == PROJECT:
    end_with_launcher()
    SIGNALS.catch()
