STOP = """
import os, signal
from src.training.progress import Progress
add_step = Progress.add_step
def stopping(progress, result):
    add_step(progress, result)
    if progress.step == 3:
        os.kill(os.getpid(), signal.SIGTERM)
Progress.add_step = stopping
"""
"""Tells each process to end in its third step, as a batch system does."""


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    """Those of a short run on a few rows."""
    folder = tmp_path_factory.mktemp("rows")
    write(folder)
    return tuple(word.replace("{folder}", str(folder)) for word in SHORT)


@pytest.fixture(scope="module")
def alone(launch: Launch, settings: tuple[str, ...]) -> Run:
    """A run on one process."""
    return launch("cpu", *settings).succeeded()


@pytest.fixture(scope="module", params=["ddp", "fsdp"])
def split(request: pytest.FixtureRequest, launch: Launch, settings: tuple[str, ...]) -> Run:
    """The same run on two processes."""
    return launch(request.param, *settings, processes=2).succeeded()


def evaluations(run: Run) -> list[dict[str, float]]:
    return [
        {name: value for name, value in record.items() if isinstance(value, float) and name.startswith("eval/")}
        for record in run.records
        if "eval/loss" in record
    ]


def norms(run: Run) -> list[float]:
    return [record["train/grad_norm"] for record in run.records if "train/grad_norm" in record]


def curve(run: Run) -> list[dict[str, Any]]:
    """The log without the times."""
    return [{name: value for name, value in r.items() if not name.startswith("perf/")} for r in run.records]


def test_it_learns(launch: Launch, settings: tuple[str, ...]) -> None:
    first, *_, last = evaluations(launch("cpu", *settings, *LEARNS).succeeded())
    assert last["eval/loss"] < 0.8 * first["eval/loss"]


def test_two_processes_train_as_one_does(alone: Run, split: Run) -> None:
    """Only the order of sums differs, and rounding with it."""
    assert split.summary["num_processes"] == 2
    assert split.losses == pytest.approx(alone.losses, rel=1e-5)
    assert norms(split) == pytest.approx(norms(alone), rel=1e-4)
    for found, expected in zip(evaluations(split), evaluations(alone), strict=True):
        assert found == pytest.approx(expected, rel=1e-4)


def test_a_stopped_run_goes_on_to_the_last_bit(launch: Launch, settings: tuple[str, ...], split: Run) -> None:
    yaml = split.summary["strategy"]
    stopped = launch(yaml, *settings, processes=2, before=STOP).succeeded()
    assert stopped.status["status"] == "preempted"
    resumed = launch(yaml, *settings, processes=2, folder=stopped.folder).succeeded()
    assert curve(resumed) == curve(split)
    first, second = (load_file(run.folder / "model/model.safetensors") for run in (split, resumed))
    assert all(first[name].equal(second[name]) for name in {*first, *second})


def test_the_export_scores_each_example_once_as_the_run_did(settings: tuple[str, ...], split: Run) -> None:
    """All examples in one batch, by hand."""
    set_seed(0)
    task = run_settings([*settings, f"--output_dir={split.folder}-again"]).task.bind(TaskState())
    _, examples = task.build_datasets()
    model = task.load_export(split.folder / "model").eval()
    batch = task.collate(samples(examples, [*range(len(examples))]))
    with torch.no_grad():
        loss, _ = task.evaluate(model, batch)
    assert split.summary["eval/examples"] == len(examples)
    assert split.summary["eval/loss"] == pytest.approx(loss.item() / task.count(batch)["targets"], rel=1e-5)


def test_a_wrong_setting_is_one_line(settings: tuple[str, ...]) -> None:
    setting, says = MISTAKE
    assert mistakes(*settings, setting) == [f"{setting}: {says}"]
