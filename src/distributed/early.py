"""Imports take seconds, so handle signals and the launcher's death first. train.py imports this before the rest."""

import sys
from pathlib import Path

from src.distributed.process import SIGNALS, end_with_launcher

PROJECT = Path(__file__).resolve().parents[2]

# only if a script beside src runs, such as train.py, not if a test or a tool imports this
if Path(getattr(sys.modules["__main__"], "__file__", None) or "/").resolve().parent == PROJECT:
    end_with_launcher()
    SIGNALS.catch()
