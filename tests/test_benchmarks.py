"""benchmarks: that what they compare with is what they say. Their figures are in docs/figures.md."""

import re
from pathlib import Path

import pytest

from benchmarks import mnist, mnist_peer
from benchmarks.runs import write_images
from src.tasks.mnist import MnistCnn


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
