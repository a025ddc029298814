"""Tables of text classifiers and language models: the texts as they were written, and where the loss comes from."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from src.tasks.text.causal_lm import CausalLM
from src.tasks.text.text_classification import TextClassification
from src.training.batches import fetch
from tests.launching import Launch
from tests.text import tiny


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


@pytest.mark.parametrize("packing", [True, False])
def test_the_loss_by_position_is_that_of_each_token(models: Path, tmp_path: Path, packing: bool) -> None:
    """By hand, a document at a time. Tried with positions in the packed row in place of the document's own."""
    task = CausalLM(
        model=str(models / "llama"),
        dataset=str(tiny.questions(tmp_path / "data.jsonl")),
        sequence_length=90,
        packing=packing,
        eval_fraction=0.2,
    )
    _, evaluation = task.build_datasets()
    model: Any = task.build_model().eval()
    by_hand: dict[str, list[float]] = {}
    outputs: dict[str, list[torch.Tensor]] = {}
    total, targets = 0.0, 0
    with torch.no_grad():
        for start in range(0, len(evaluation), 3):
            indices = list(range(start, min(start + 3, len(evaluation))))
            batch = fetch(task, evaluation, indices)
            loss, found = task.evaluate(model, batch)
            total, targets = total + float(loss), targets + task.count_targets(batch)
            for name, output in found.items():
                outputs.setdefault(name, []).append(output)
            for chunk in (chunk for sample in evaluation.__getitems__(indices) for chunk in sample):
                tokens, labels = (torch.tensor(chunk[name]).long() for name in ("input_ids", "labels"))
                losses = F.cross_entropy(model.hf(tokens[None]).logits[0], labels, reduction="none")
                for i in (labels != -100).nonzero()[:, 0].tolist():
                    first = i // 6 * 6
                    by_hand.setdefault(f"{first}-{first + 5}", []).append(float(losses[i]))
    tables = task.tables({name: torch.cat(output) for name, output in outputs.items()}, evaluation)
    (table,) = tables.values()
    expected = {key: (len(losses), pytest.approx(sum(losses) / len(losses), rel=1e-4))
                for key, losses in by_hand.items()}  # fmt: skip
    assert len(table) > 3
    assert {row["position"]: (row["targets"], row["loss"]) for row in table} == expected
    assert sum(row["targets"] for row in table) == targets
    assert sum(row["targets"] * row["loss"] for row in table) == pytest.approx(total)


def test_their_sums_are_the_evaluations_loss_on_any_number_of_processes(
    launch: Launch, models: Path, tmp_path: Path
) -> None:
    task = ("--task.name=causal_lm", f"--task.model={models / 'llama'}", "--task.sequence_length=64",
            f"--task.dataset={tiny.questions(tmp_path / 'data.jsonl', 110)}", "--task.packing=false")  # fmt: skip
    settings = (*task, "--max_steps=2", "--global_batch_size=8", "--log_every=2", "--eval_every=2")
    alone, sharded = (
        launch(yaml, *settings, processes=processes).succeeded().records[-1]
        for yaml, processes in (("cpu", 1), ("fsdp", 2))
    )
    for name in ("eval/loss_by_position",):
        for record in (alone, sharded):
            loss = sum(row["loss"] * row["targets"] for row in record[name])
            assert loss / sum(row["targets"] for row in record[name]) == pytest.approx(record["eval/loss"], rel=1e-6)
        for row, other in zip(alone[name], sharded[name], strict=True):
            assert row == other | {"loss": pytest.approx(other["loss"], rel=1e-5)}
