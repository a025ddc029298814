"""What train.py is made of, in eight folders. Each imports only from those below it: see tests/test_ladder.py."""

import logging

from src.config.requirements import require_installed

require_installed()
# silence warnings of libraries about each other
logging.getLogger("torch.utils._pytree").setLevel(logging.ERROR)  # about torchao, which uses an old API
logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)  # about kernels
logging.getLogger("opentelemetry.sdk").setLevel(logging.ERROR)  # W&B shuts it down twice on 3.14  # room: wandb
