"""What is measured. Nothing here asks the Hub for anything, of which its library has to know before it is imported."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # processes are forked
