"""The task blank."""

from tests.task_tests import TaskTests


class TestBlank(TaskTests):
    settings = "--task.name=blank --max_steps=8 --global_batch_size=128 --optim.lr=1e-4"
    """An epoch has eight steps, the last of 104 examples. For a task that reads files, name {folder} and let `write`
    fill it; for one with dropout, turn it off."""
