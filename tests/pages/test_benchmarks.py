"""Benchmarks compare with what they say, a loss of speed is found, and pages show the figures that are committed."""

import re
from pathlib import Path

import pytest

from benchmarks import curves, mnist, mnist_peer
from benchmarks.__main__ import RESULTS, worse
from benchmarks.pairs import Comparison, load, table
from benchmarks.runs import write_images
from src.tasks.mnist import MnistCnn
from tests.launching import PROJECT, Launch


def test_the_mnist_peer_trains_the_same_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shapes = [sorted(tuple(p.shape) for p in m.parameters()) for m in (mnist_peer.build_model(), MnistCnn())]
    assert shapes[0] == shapes[1]
    write_images(tmp_path, 11 * mnist_peer.BATCH)
    mnist_peer.main(str(tmp_path), epochs=2)
    steps, right, *_ = capsys.readouterr().out.splitlines()
    assert mnist.TEN_STEPS.match(steps)
    assert re.fullmatch(r"right: \d+/100", right)
    side = mnist.theirs(tmp_path, tmp_path / "ours", 2, None)
    assert re.search(side.ends, "right: 9876/10000")


def test_the_page_of_figures_shows_what_is_committed() -> None:
    assert table(load(RESULTS)) in (PROJECT / "docs/figures.md").read_text()


@pytest.mark.parametrize(("unit", "is_gain", "better"), [("s", False, -1), ("s", True, -1), ("tokens/s", True, 1)])
def test_a_ratio_is_worse_only_beyond_the_noise(unit: str, is_gain: bool, better: int) -> None:
    def measured(change: float) -> Comparison:
        ours = [100 * (1 + better * change) * noise for noise in (0.99, 1, 1.01)]
        return Comparison("question", unit, ours, [100, 100, 100], 1, is_gain)

    committed = {"question": measured(0)}
    assert [bool(worse([measured(change)], committed)) for change in (0.2, 0, -0.02, -0.1)] == [
        False,
        False,
        False,
        True,
    ]


@pytest.mark.slow
def test_the_readme_shows_the_losses_of_a_run(launch: Launch) -> None:
    """Four digits are rounded by 5e-5, and another processor's rounding adds 1e-5, as between strategies."""
    rows = re.findall(r"^\| (\d+) \| (.*) \|$", (PROJECT / "README.md").read_text(), re.MULTILINE)
    shown = {int(step): list(map(float, losses.split(" | "))) for step, losses in rows}
    arguments = [f"--{name}={value}" for name, value in curves.SETTINGS.items()]
    found = {
        name: launch(yaml, *arguments, processes=processes).succeeded().losses
        for name, (yaml, processes) in curves.CURVES.items()
    }
    assert list(shown) == list(curves.SHOWN)
    for step, losses in shown.items():
        assert losses == pytest.approx([column[step - 1] for column in found.values()], abs=6e-5)
    for column in found.values():
        assert column == pytest.approx(found["one process"], rel=1e-5)
