"""How far a run has come: what the loop counts, and what each checkpoint keeps of it."""

from dataclasses import dataclass, field


@dataclass
class Progress:
    """Saved as JSON, which gives each float back to the last bit."""

    step: int = 0
    """Optimizer steps done, the skipped ones among them. With the seed, it says which examples come next."""
    skipped: int = 0
    """Steps that were not taken, as a gradient was not finite."""
    skipped_in_a_row: int = 0
    loss_scale: float = 2.0**16
    """What the loss is multiplied by in fp16; 1.0 in other precisions."""
    finite_in_a_row: int = 0
    """Steps since the loss scale last changed."""
    interval: list[float] = field(default_factory=lambda: [0.0] * 4)
    """Loss sum, count, tokens without and with padding, over all processes, since the last multiple of log_every."""
    interval_seconds: float = 0.0
    """Time since then, without evaluations."""
    training_seconds: float = 0.0
    """Time from the first step to then, without evaluations."""
    seconds: float = 0.0
    """Time since the first step, evaluations included, the time between two sessions of a run not."""
    tokens: float = 0.0
    """Without padding, up to then."""
    train_loss: float | None = None
    """Of the last training record; None: none of its steps had a finite one."""
    evaluated: int = 0
    """The step after which the last evaluation was; 0: none yet."""
    evaluation: dict[str, float] = field(default_factory=dict)
    """Its results, by name."""
    best: float | None = None
    """What early stopping compares with."""
    evaluations_without_gain: int = 0

    @property
    def updates(self) -> int:
        """Steps that were taken: what the learning rate's schedule counts."""
        return self.step - self.skipped
