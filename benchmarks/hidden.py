"""Hide libraries that touch the GPU when they are imported: a process that did cannot be forked. Import it first."""

import sys
from importlib.util import find_spec

HIDDEN = {name for name in ("bitsandbytes", "torchao") if find_spec(name)}
sys.modules.update(dict.fromkeys(HIDDEN))  # type: ignore[arg-type]  # None: transformers and peft find them missing
