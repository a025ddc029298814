"""stub_task trains with examples/stub_task.yaml."""

from tests.launching import Launch


def test_it_trains_on_two_processes(launch: Launch) -> None:
    arguments = (
        "--config=examples/stub_task.yaml",
        "--task.name=stub_task",
        "--max_steps=2",
        "--log_every=1",
    )
    assert len(launch("ddp", *arguments, processes=2).succeeded().losses) == 2
