"""From labelled rows to batches and tables: labels by name or number, pairs, mistakes with their texts as written."""

from pathlib import Path
from typing import Any

import torch
from datasets import ClassLabel, Dataset, Features, Value

from src.tasks.text.text_classification import TextClassification
from src.tasks.text.tokenizing import sorted_labels
from tests.text import tiny


def classifier(train: str, dev: str, **settings: Any) -> Any:
    """The task on tables of this content."""
    tiny.write({"data/train.csv": train, "data/dev.csv": dev})
    return tiny.task(TextClassification, dataset="data", **settings)


def test_labels_are_in_the_order_of_their_numbers_and_have_their_names(models: Path, tmp_path: Path) -> None:
    assert sorted_labels(["10", "9", "-1", "9"]) == ["-1", "9", "10"]
    assert sorted_labels(["10", "9", "x"]) == ["10", "9", "x"]
    features = Features({"label": ClassLabel(names=["neg", "pos", "9"]), "text": Value("string")})
    table = Dataset.from_dict({"label": [1, 0, -1, 2], "text": ["a", "b", "c", "d"]}, features=features)
    table.to_parquet(tmp_path / "a.parquet")
    task = tiny.task(TextClassification, model=f"{models}/bert", dataset="a.parquet", eval_from="all")
    _, evaluation = task.build_datasets()
    assert [task.preview(evaluation, i).split("label: ")[1] for i in range(4)] == ["pos", "neg", "-1", "9"]


def test_pairs_are_read_together_and_long_ones_are_cut_off_and_counted(models: Path) -> None:
    settings = {"model": f"{models}/bert", "text_column": "a", "text_pair_column": "b", "label_column": "same"}
    tables = f"a,b,same\nhi,ho,0\nab,{'b' * 50},1\n", "a,b,same\nx,y,0\n"
    task = classifier(*tables, sequence_length=10, **settings)
    train, evaluation = task.build_datasets()
    assert train["length"][:] == [6, 10]  # both texts, each after the byte tokenizer's <|endoftext|>
    counted = {"tokens": 16, "truncated": 1, "skipped_rows": 0}
    assert task.describe("train", train) == counted | {"labels": 2, "label 0": 1, "label 1": 1}
    assert task.describe("eval", evaluation)["truncated"] == 0


def test_mistakes_show_the_texts_as_they_were_written_in_the_order_of_the_evaluation_set(models: Path) -> None:
    """Tried without the order by length: the texts are another example's. Tried without the cut."""
    rows = ["A\tlong  text, CAFÉ\tits second\tyes\n", f"B\t{'x' * 300}\tb\tno\n", "C\tShort\tc\tyes\n"]
    tiny.write({f"data/{name}.tsv": "id\tfirst\tsecond\tlabel\n" + "".join(rows) for name in ("train", "dev")})
    pair = {"text_column": "first", "text_pair_column": "second"}
    task = tiny.task(TextClassification, model=str(models / "bert"), dataset="data", **pair)
    _, evaluation = task.build_datasets()
    references = torch.tensor(evaluation["label"][:])
    outputs = {"references": references, "predictions": 1 - references, "probabilities": torch.eye(2)[1 - references]}
    mistakes = task.tables(outputs, evaluation)["mistakes"]
    named = {row["index"]: (row["text"], row["text_pair"], row["label"], row["prediction"]) for row in mistakes}
    assert named == {
        0: ("Short", "c", "yes", "no"),
        1: ("long  text, CAFÉ", "its second", "yes", "no"),
        2: ("x" * 200, "b", "no", "yes"),
    }
