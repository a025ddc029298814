"""benchmarks: that what they compare with is what they say. Their figures are in docs/figures.md."""

import re
import sys
from pathlib import Path

import pytest

from benchmarks import mnist, mnist_peer
from benchmarks.runs import write_images
from src.tasks.mnist import MnistCnn
from tests.launching import PROJECT


def test_the_mnist_peer_is_the_same_model_and_prints_what_its_turns_end_with(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Trained on random images: two epochs of eleven steps."""
    shapes = [sorted(tuple(p.shape) for p in m.parameters()) for m in (mnist_peer.build_model(), MnistCnn())]
    assert shapes[0] == shapes[1]
    write_images(tmp_path, 11 * mnist_peer.BATCH)
    mnist_peer.main(str(tmp_path), epochs=2)
    steps, right, *again = capsys.readouterr().out.splitlines()
    assert mnist.TEN_STEPS.match(steps)
    assert re.fullmatch(r"right: \d+/100", right)
    assert len(again) == 2
    side = mnist.theirs(tmp_path, tmp_path / "ours", 2, None)
    assert side.command == [sys.executable, "-m", "benchmarks.mnist_peer", "../data", "2"]
    assert re.search(side.ends, "right: 9876/10000")


def test_the_mnist_peer_can_be_the_users_own_download(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_images(tmp_path, 1)
    side = mnist.theirs(tmp_path, tmp_path / "theirs", 14, Path("main.py"))
    assert side.command == [sys.executable, f"{tmp_path}/main.py", "--no-accel", "--epochs=14"]
    assert (side.folder.parent / "data/MNIST/raw/train-images-idx3-ubyte").exists(), "where it looks for its images"


def test_no_file_is_left_out_of_the_linter_as_someone_elses() -> None:
    """Tried with a copy of the example's main.py."""
    assert "exclude" not in (PROJECT / "pyproject.toml").read_text()
    assert not (PROJECT / "benchmarks/peers").exists()
