"""The parts of train.py, in eight folders. Each imports from those below it: see tests/test_ladder.py."""

import logging

from src.config.requirements import require_installed

require_installed()
# what libraries say of each other
logging.getLogger("torch.utils._pytree").setLevel(logging.ERROR)  # of torchao, which is out of date
logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)  # of kernels
logging.getLogger("opentelemetry.sdk").setLevel(logging.ERROR)  # of W&B: shut down twice on Python 3.14  # room: wandb
