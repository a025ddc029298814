"""python -m src.tools.evaluate, of transformers."""

import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from src.config.errors import UserError
from src.tools.evaluate import main
from tests.text import tiny
from tests.text.conftest import Trained

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # in this process, to read
PREDICTIONS = "predictions.parquet"


def evaluated(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> dict[str, float]:
    capsys.readouterr()
    main([*map(str, arguments)])
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize(("task", "names"), [("lm", {"perplexity"}), ("classifier", {"f1", "matthews_correlation"})])
def test_the_metrics_are_the_trainings_own(
    trained: Trained, capsys: pytest.CaptureFixture[str], tmp_path: Path, task: str, names: set[str]
) -> None:
    """Of adapters, exported or in a checkpoint. Tried without loading them from the checkpoint: another loss."""
    run = trained(f"{task} with adapters", "fsdp")
    for part in ("model", "checkpoints/step_00000012"):
        output = tmp_path / part.replace("/", "-") / PREDICTIONS
        output.parent.mkdir()
        metrics = evaluated(capsys, run.folder / part, f"--output={output}")
        assert metrics == pytest.approx({name: run.summary[name] for name in metrics}, rel=1e-6)
        assert {f"eval/{name}" for name in {"loss", "accuracy", "examples"} | names} == set(metrics)
        rows = pq.read_table(output).to_pylist()
        assert len(rows) == metrics["eval/examples"]
        if task == "lm":
            nats, targets = (sum(row[name] for row in rows) for name in ("nats", "targets"))
            assert nats / targets == pytest.approx(metrics["eval/loss"])


def test_all_rows_of_another_file_count(
    trained: Trained, made: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Its labels need not be all, and keep their numbers. Tried without: a tenth of the rows."""
    other, output = tmp_path / "other.tsv", tmp_path / PREDICTIONS
    lines = (made / "reviews" / "dev.tsv").read_text().splitlines()
    rising = [line for line in lines if line.endswith("rising")]
    other.write_text("\n".join([*lines[:1], *rising, ""]))
    arguments = (trained("classifier with adapters", "fsdp").folder, f"--output={output}", f"--task.dataset={other}")
    metrics = evaluated(capsys, *arguments)
    rows = sorted(pq.read_table(output).to_pylist(), key=lambda row: row["row"])
    assert [f"{row['text']}\t{row['label']}" for row in rows] == rising
    for row in rows:
        assert row["prediction"] == max(("falling", "rising"), key=lambda label: row[f"probability_{label}"])
    right = [row["prediction"] == "rising" for row in rows]
    assert metrics["eval/accuracy"] == pytest.approx(sum(right) / len(rising))
    output.unlink()
    other.write_text("text\tlabel\nof the and\trising\nof\tflat\n")
    with pytest.raises(UserError, match="flat is in the evaluation data, but not in the training data"):
        evaluated(capsys, *arguments)


def test_longer_sequences_than_the_model_has_positions_for_are_refused(tmp_path: Path) -> None:
    """Of a model from scratch, whose settings name no positions. Tried without: IndexError, at the first batch."""
    gpt2 = {"model_type": "gpt2", "n_embd": 32, "n_layer": 1, "n_head": 2}
    task = tiny.task(architecture=gpt2)
    model = task.build_model()
    task.export(model, model.state_dict(), tmp_path)
    assert tiny.task(architecture=gpt2, sequence_length=32).load_export(tmp_path).lm.config.n_positions == 64
    with pytest.raises(UserError, match="^task.sequence_length=100000: the model sees at most 64 tokens$"):
        tiny.task(architecture=gpt2, sequence_length=100_000).load_export(tmp_path)
