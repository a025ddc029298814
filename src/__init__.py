"""The parts of train.py, in eight folders. Each imports from those below it: see tests/test_ladder.py."""

import logging
import sys

# what libraries say of each other while they are imported
logging.getLogger("torch.utils._pytree").setLevel(logging.ERROR)  # of torchao, which is out of date
logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)  # of kernels  # room: four_bit
MOVED = {  # room: check checkpoints evaluate generate report sweep
    "src.checkpoint": "src.tools.checkpoints",
    "src.evaluate": "src.tools.evaluate",
    "src.generate": "src.tools.generate",
    "src.reference": "src.check.reference",
    "src.report": "src.tracking.report",
    "src.sweep": "src.tools.sweep",
}
"""Programs of the version before, which say their new name for one version."""

# what Python has in its place while it looks for the module that `python -m` runs
if sys.argv[:1] == ["-m"]:  # room: check checkpoints evaluate generate report sweep
    program = sys.orig_argv[sys.orig_argv.index("-m") + 1]
    if program in MOVED:
        sys.stderr.write(f"{program} is {MOVED[program]} now: python -m {MOVED[program]}\n")
        sys.exit(2)
