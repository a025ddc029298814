"""The tensors that a run holds on this process."""

from torch import Tensor

from src.training.gradients import local_gradients, to_local
from src.training.run import Run


def tensors_of(run: Run) -> dict[str, list[Tensor]]:
    """Return this process's tensors by what they are: `parameters`, `gradients` and `optimizer`."""
    states = [state for optimizer in run.optimizers for state in optimizer.state.values()]
    return {
        "parameters": [to_local(parameter) for parameter in run.parameters],
        "gradients": local_gradients(run.parameters),
        "optimizer": [to_local(value) for state in states for value in state.values() if isinstance(value, Tensor)],
    }
