"""Tables of text classifiers: the texts as they were written."""

from pathlib import Path

import torch

from src.tasks.text.text_classification import TextClassification
from tests.text import tiny


def test_mistakes_show_the_texts_as_they_were_written_in_the_order_of_the_evaluation_set(
    models: Path,
) -> None:
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
