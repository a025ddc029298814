"""The modules behind train.py, in folders. Each file imports only from its own folder and from those below it."""

import logging
import sys

from src.requirements import explain_missing, require_installed

require_installed()
sys.excepthook = explain_missing
# silence what libraries warn about each other
logging.getLogger("torch.utils._pytree").setLevel(logging.ERROR)  # torchao is out of date
logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)  # kernels is missing
