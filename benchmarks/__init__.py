"""Benchmarks. They work offline, which the Hub's library has to be told before it is imported."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # processes are forked
