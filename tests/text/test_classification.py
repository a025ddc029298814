"""From labelled rows to batches: labels by name or number, pairs, batches of similar lengths."""

from pathlib import Path
from typing import Any

import numpy as np
from datasets import ClassLabel, Dataset, Features, Value
from transformers import PreTrainedConfig

from src.tasks.text.text_classification import TextClassification
from src.tasks.text.tokenizing import byte_tokenizer, length_grouped, sorted_labels
from tests.text import tiny


def classifier(train: str, dev: str, **settings: Any) -> Any:
    """The task on tables of this content."""
    tiny.write({"data/train.csv": train, "data/dev.csv": dev})
    return tiny.task(TextClassification, dataset="data", **settings)


def test_numbers_are_in_the_order_of_their_size_and_get_the_names_that_the_dataset_has_for_them(
    models: Path, tmp_path: Path
) -> None:
    assert sorted_labels(["10", "9", "-1", "9"]) == ["-1", "9", "10"]
    assert sorted_labels(["10", "9", "x"]) == ["10", "9", "x"]
    features = Features({"label": ClassLabel(names=["neg", "pos", "9"]), "text": Value("string")})
    table = Dataset.from_dict({"label": [1, 0, -1, 2], "text": ["a", "b", "c", "d"]}, features=features)
    table.to_parquet(tmp_path / "a.parquet")
    task = tiny.task(TextClassification, model=f"{models}/bert", dataset="a.parquet", eval_from="all")
    _, evaluation = task.build_datasets()
    assert [task.preview(evaluation, i).split("label: ")[1] for i in range(4)] == ["pos", "neg", "-1", "9"]


def test_a_head_that_knows_the_labels_keeps_their_order(models: Path, tmp_path: Path) -> None:
    tables = "text,label\na,negative\nb,positive\n", "text,label\nc,positive\n"
    first = classifier(*tables, model=f"{models}/bert")
    first.build_datasets()
    trained: Any = first.build_model()
    trained.config.id2label, trained.config.label2id = {0: "positive", 1: "negative"}, {"positive": 0, "negative": 1}
    trained.save_pretrained(tmp_path / "trained")
    byte_tokenizer().save_pretrained(tmp_path / "trained")
    again = classifier(*tables, model=f"{tmp_path}/trained")
    train, _ = again.build_datasets()
    assert train["label"][:] == [1, 0]
    model: Any = again.build_model()
    assert model.config.id2label == {0: "positive", 1: "negative"}
    assert model.classifier.weight.equal(trained.classifier.weight)


def test_dropout_is_set_everywhere_but_for_whole_layers() -> None:
    rates: dict[str, Any] = {"attention_dropout": 0.0, "dropout": 0.0, "layerdrop": 0.0, "classifier_dropout": None}
    config = tiny.task(TextClassification, dropout=0.3).with_dropout(PreTrainedConfig(**rates))
    assert {name: getattr(config, name) for name in rates} == {**dict.fromkeys(rates, 0.3), "layerdrop": 0.0}


def test_pairs_are_read_together_and_long_ones_are_cut_off_and_counted(models: Path) -> None:
    settings = {"model": f"{models}/bert", "text_column": "a", "text_pair_column": "b", "label_column": "same"}
    tables = f"a,b,same\nhi,ho,0\nab,{'b' * 50},1\n", "a,b,same\nx,y,0\n"
    task = classifier(*tables, sequence_length=10, **settings)
    train, evaluation = task.build_datasets()
    assert train["length"][:] == [6, 10]  # both texts, each after the byte tokenizer's <|endoftext|>
    counted = {"tokens": 16, "truncated": 1, "skipped_rows": 0}
    assert task.describe("train", train) == counted | {"labels": 2, "label 0": 1, "label 1": 1}
    assert task.describe("eval", evaluation)["truncated"] == 0


def test_batches_have_similar_lengths_and_come_at_random() -> None:
    lengths = np.random.default_rng(0).integers(1, 200, 1003)

    def epoch(seed: int) -> np.ndarray:
        return length_grouped(lengths, np.random.default_rng(seed), 8)

    order = epoch(0)
    assert sorted(order) == list(range(1003))
    assert (order != epoch(1)).any()
    batches = [lengths[order[i : i + 8]] for i in range(0, 1000, 8)]
    padding = 1 - sum(batch.sum() for batch in batches) / sum(8 * batch.max() for batch in batches)
    assert padding < 0.05  # 0.4 in a random order
    assert abs(np.corrcoef(np.arange(125), [batch.max() for batch in batches])[0, 1]) < 0.3
