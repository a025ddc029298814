"""Loss scaling for fp16, the same under every strategy."""

import math

from torch import Tensor


class LossScale:
    """Multiplies the loss so that small gradients survive in fp16, by less after each overflow.

    Source: Micikevicius et al. 2018, https://arxiv.org/abs/1710.03740; constants as in torch.amp.GradScaler, which is
    not used because it looks for overflows optimizer by optimizer and, where the optimizer is fused, keeps from
    Accelerate that it skipped a step. Here the gradient norm over all parameters and processes decides.
    """

    GROWTH_INTERVAL = 2000
    """Good steps in a row after which the scale is doubled."""

    def __init__(self, enabled: bool) -> None:
        self.enabled = enabled
        self.value = 2.0**16 if enabled else 1.0
        self.skipped = 0
        self._good = 0

    def accepts(self, grad_norm: Tensor) -> bool:
        """Whether to take the step: False, and a smaller scale from now on, where the norm of the gradients overflowed.

        Raises:
            FloatingPointError: not even the smallest scale helps.
        """
        if not self.enabled:
            return True
        if math.isfinite(grad_norm.item()):
            self._good += 1
            if self._good % self.GROWTH_INTERVAL == 0:
                self.value *= 2
            return True
        self._good = 0
        self.skipped += 1
        self.value /= 2
        if self.value < 2.0**-24:
            raise FloatingPointError("the gradients are not finite in fp16, however small the loss scale: use bf16")
        return False
