"""python -m src.tools.evaluate, of transformers."""

import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from src.config.errors import UserError
from src.tasks.text.causal_lm import CausalLM
from src.tools.evaluate import main
from tests.text.conftest import Trained

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # in this process, to read
PARTS = ["model", "checkpoints/step_00000012"]
PREDICTIONS = "predictions.parquet"


def evaluated(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> dict[str, float]:
    capsys.readouterr()
    main([*map(str, arguments)])
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("part", PARTS)
def test_a_language_models_metrics_are_the_trainings_own(
    trained: Trained, capsys: pytest.CaptureFixture[str], tmp_path: Path, part: str
) -> None:
    """Of adapters. Tried without loading them from the checkpoint: another loss."""
    run, output = trained("lm with adapters", "fsdp"), tmp_path / PREDICTIONS
    metrics = evaluated(capsys, run.folder / part, f"--output={output}")
    assert metrics == pytest.approx({name: run.summary[name] for name in metrics}, rel=1e-6)
    assert {"eval/loss", "eval/perplexity", "eval/accuracy"} < set(metrics)
    table = pq.read_table(output).to_pydict()
    assert len(table["nats"]) == metrics["eval/examples"]
    assert sum(table["nats"]) / sum(table["targets"]) == pytest.approx(metrics["eval/loss"])


@pytest.mark.parametrize("part", PARTS)
def test_a_classifiers_metrics_are_the_trainings_own(
    trained: Trained, made: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path, part: str
) -> None:
    run, output = trained("classifier with adapters", "fsdp"), tmp_path / PREDICTIONS
    metrics = evaluated(capsys, run.folder / part, f"--output={output}")
    assert metrics == pytest.approx({name: run.summary[name] for name in metrics}, rel=1e-6)
    assert {"eval/loss", "eval/accuracy", "eval/f1", "eval/matthews_correlation"} < set(metrics)
    rows = sorted(pq.read_table(output).to_pylist(), key=lambda row: row["row"])
    lines = (made / "reviews" / "dev.tsv").read_text().splitlines()
    assert [f"{row['text']}\t{row['label']}" for row in rows] == lines[1:]
    for row in rows:
        assert row["prediction"] == max(("falling", "rising"), key=lambda label: row[f"probability_{label}"])


def test_all_rows_of_another_file_count(trained: Trained, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Its labels need not be all, and keep their numbers. Tried without: a tenth of the rows."""
    other, output = tmp_path / "other.tsv", tmp_path / PREDICTIONS
    other.write_text("text\tlabel\n" + "of the and\trising\n" * 30)
    arguments = (trained("classifier", "fsdp").folder, f"--output={output}", f"--task.dataset={other}")
    metrics = evaluated(capsys, *arguments)
    assert metrics["eval/examples"] == 30
    predictions = pq.read_table(output).to_pydict()
    assert set(predictions["label"]) == {"rising"}
    assert metrics["eval/accuracy"] == (predictions["prediction"][0] == "rising")
    output.unlink()
    other.write_text("text\tlabel\nof the and\trising\nof\tflat\n")
    with pytest.raises(UserError, match="flat is in the data to evaluate on, but not in the data to train on"):
        evaluated(capsys, *arguments)


def test_longer_sequences_than_the_model_has_positions_for_are_refused(tmp_path: Path) -> None:
    """Of a model from scratch, whose settings name no positions. Tried without: IndexError, at the first batch."""
    gpt2 = {"model_type": "gpt2", "n_embd": 32, "n_layer": 1, "n_head": 2}
    task = CausalLM(architecture=gpt2, sequence_length=64)
    model = task.build_model()
    task.export(model, model.state_dict(), tmp_path)
    assert CausalLM(architecture=gpt2, sequence_length=32).load_export(tmp_path).lm.config.n_positions == 64
    with pytest.raises(UserError, match="^task.sequence_length=100000: the model sees at most 64 tokens$"):
        CausalLM(architecture=gpt2, sequence_length=100_000).load_export(tmp_path)


def test_what_would_be_another_model_is_refused(trained: Trained, models: Path) -> None:
    """With all other mistakes."""
    with pytest.raises(UserError) as error:
        main([str(trained("classifier", "fsdp").folder), f"--task.model={models}/llama", "--task.dataset=nowhere.tsv"])
    other = "does not say which data to evaluate on, as other settings of the task do"
    assert str(error.value).splitlines() == [
        f"--task.model={models}/llama: {other}",
        "task.dataset=nowhere.tsv: no such file or folder",
    ]
