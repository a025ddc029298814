"""benchmarks: that what they compare with is what they say. Their figures are in docs/figures.md."""

import re
from pathlib import Path

import pytest

from benchmarks import curves, mnist, mnist_peer
from benchmarks.runs import write_images
from src.tasks.mnist import MnistCnn
from tests.launching import PROJECT, Launch


def test_the_mnist_peer_is_the_same_model_and_ends_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shapes = [sorted(tuple(p.shape) for p in m.parameters()) for m in (mnist_peer.build_model(), MnistCnn())]
    assert shapes[0] == shapes[1]
    write_images(tmp_path, 11 * mnist_peer.BATCH)
    mnist_peer.main(str(tmp_path), epochs=2)
    steps, right, *_ = capsys.readouterr().out.splitlines()
    assert mnist.TEN_STEPS.match(steps)
    assert re.fullmatch(r"right: \d+/100", right)
    side = mnist.theirs(tmp_path, tmp_path / "ours", 2, None)
    assert re.search(side.ends, "right: 9876/10000")


def test_the_table_of_losses_in_the_readme_is_what_a_run_gives(launch: Launch) -> None:  # room: text+template
    """Four digits are rounded by 5e-5, and another processor's rounding adds 1e-5, as between strategies. Tried with
    another digit, and with dropout."""
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
