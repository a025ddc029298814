"""benchmarks/gpu.py on an emulated GPU: the minutes that it has on a real one are not spent on its own mistakes."""

import json
from collections import Counter
from pathlib import Path

import pytest

from tests.gpu.build import emulated_environment, reason_to_skip
from tests.launching import BIN, PROJECT, needs, run_command

pytestmark = [needs("benchmarks/gpu.py"), pytest.mark.skipif(bool(reason_to_skip()), reason=str(reason_to_skip()))]


@pytest.mark.slow
def test_each_question_is_answered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No row compares a run with itself."""
    from benchmarks.runs import write_images

    monkeypatch.setattr("tests.launching.SECONDS", 900)
    write_images(tmp_path / "mnist", 2000)
    words = f"{BIN}/python -m benchmarks.gpu --smoke --data_dir={tmp_path}/mnist --save={tmp_path}/rows.json".split()
    run_command(words, tmp_path, PROJECT, **emulated_environment(CUDA_VISIBLE_DEVICES="0")).succeeded()
    rows = json.loads((tmp_path / "rows.json").read_text())
    kinds = Counter(row["question"].replace("_", " ").split()[0].strip(":,") for row in rows)
    assert kinds == {"mnist": 5, "llama": 6, "fsdp": 1}
    assert all(row["ours"] != row["theirs"] for row in rows)


def test_the_precision_is_read_in_front_of_the_yaml(tmp_path: Path) -> None:
    """Tried with a pattern that has it at the end of the line: nothing is found."""
    from benchmarks.language import STRATEGY, Side, told

    (tmp_path / "log").write_text("  strategy   none, 1 process, cuda, bf16 (accelerate_configs/single_gpu.yaml)\n")
    assert told(Side([], tmp_path), STRATEGY) == ("cuda", "bf16")
