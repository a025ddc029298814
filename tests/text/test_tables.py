"""Tables of text classifiers: the texts as they were written."""

from pathlib import Path

import torch

from src.tasks.text.text_classification import TextClassification


def test_mistakes_show_the_texts_as_they_were_written_in_the_order_of_the_evaluation_set(
    models: Path, tmp_path: Path
) -> None:
    """Tried without the order by length: the texts are another example's. Tried without the cut."""
    rows = ["A\tlong  text, CAFÉ\tits second\tyes\n", f"B\t{'x' * 300}\tb\tno\n", "C\tShort\tc\tyes\n"]
    for name in ("train", "dev"):
        (tmp_path / f"{name}.tsv").write_text("id\tfirst\tsecond\tlabel\n" + "".join(rows))
    columns = {"text_column": "first", "text_pair_column": "second"}
    task = TextClassification(model=str(models / "bert"), dataset=str(tmp_path), **columns)
    _, evaluation = task.build_datasets()
    references = torch.tensor(evaluation["label"][:])
    probabilities = torch.tensor([[0.3, 0.7], [0.4, 0.6], [0.8, 0.2]])
    probabilities[references == 1] = probabilities[references == 1].flip(1)  # all of them wrong
    outputs = {"references": references, "predictions": 1 - references, "probabilities": probabilities}
    mistakes = task.tables(outputs, evaluation)["mistakes"]
    assert {(row["text"], row["text_pair"], row["label"], row["prediction"]) for row in mistakes} == {
        ("long  text, CAFÉ", "its second", "yes", "no"),
        ("x" * 200, "b", "no", "yes"),
        ("Short", "c", "yes", "no"),
    }
    assert {row["text"]: row["index"] for row in mistakes} == {"Short": 0, "long  text, CAFÉ": 1, "x" * 200: 2}
