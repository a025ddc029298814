"""--dry-run: the text of an example as the model sees it, and what of it contributes to the loss."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from src.tasks.text.causal_lm import CausalLM
from src.tasks.text.text_classification import TextClassification
from src.tasks.text.tokenizing import byte_tokenizer
from tests.text.test_documents import CHAT

END = "<|endoftext|>"


def task_on(folder: Path, *rows: Any, **settings: Any) -> CausalLM:
    file = folder / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = {"sequence_length": 256, "eval_from": "all", **settings}
    return CausalLM(dataset=str(file), architecture={"model_type": "llama"}, **settings)


def test_the_assistants_turns_are_marked_and_packed_documents_ruled_off(tmp_path: Path) -> None:
    """The first token is never one, and the last one is that after all which is read. Tried with marks that are not
    shifted: ⟦>Yo⟧; and without the last label: no end mark."""
    task = task_on(tmp_path, {"messages": CHAT}, {"messages": CHAT[3:]})
    train, _ = task.build_datasets()
    beginning = f"{END}<system>Be brief.{END}<user>Hi{END}"
    assert task.preview(train, 0).splitlines() == [
        "93 tokens, 13 of them (14.0%) contribute to the loss",
        "──── document 1 of 2 ────",
        f"{beginning}<assistant>⟦Yo{END}⟧<user>Bye{END}<assistant>⟦Ciao{END}⟧",
        "──── document 2 of 2 ────",
        f"{END}<user>Bye{END}<assistant>⟦Ciao{END}⟧",
    ]


@pytest.mark.parametrize(
    ("row", "settings", "shown"),
    [
        ({"text": "añb"}, {}, f"{END}⟦añb{END}⟧"),
        ({"prompt": "Q:", "completion": " A"}, {}, f"{END}Q:⟦ A{END}⟧"),
        ({"prompt": "Q:", "completion": " A"}, {"train_on_prompts": True}, f"{END}⟦Q: A{END}⟧"),
        ({"messages": [*CHAT[3:], CHAT[1]]}, {}, f"{END}<user>Bye{END}<assistant>⟦Ciao{END}⟧<user>Hi"),
        # cut off: of what is not read, the next token is shown if it contributes
        ({"prompt": "Q:", "completion": "ABC"}, {"sequence_length": 4}, f"{END}Q:⟦AB⟧"),
        (
            {"messages": [*CHAT[3:], CHAT[1]]},
            {"sequence_length": 32},
            f"{END}<user>Bye{END}<assistant>⟦Ciao{END}⟧<user",
        ),
    ],
)
def test_what_is_read_and_what_contributes(tmp_path: Path, row: Any, settings: dict[str, Any], shown: str) -> None:
    task = task_on(tmp_path, row, packing=False, **settings)
    train, _ = task.build_datasets()
    assert task.preview(train, 0).split("────\n")[1] == shown


def test_all_that_contributes_is_marked_in_every_example(made: Path) -> None:
    """Of packed documents with masked prompts; and what is left of all marks is what is read."""
    task = CausalLM(dataset=f"{made}/questions.jsonl", architecture={"model_type": "llama"}, sequence_length=128)
    train, _ = task.build_datasets()
    decode = byte_tokenizer().decode
    for index in range(len(train)):
        header, *texts = re.split(r"\n──── .* ────\n", task.preview(train, index))
        (chunks,) = train.__getitems__([index])
        labels = [chunk["labels"] for chunk in chunks]
        expected = [decode(of[of != -100]) for of in labels]
        assert ["".join(re.findall("⟦(.*?)⟧", text, re.DOTALL)) for text in texts] == expected
        read = [decode(np.append(chunk["input_ids"], chunk["labels"][-1])) for chunk in chunks]
        assert [re.sub("[⟦⟧]", "", text) for text in texts] == read
        sizes = sum(map(len, labels)), sum(np.count_nonzero(of != -100) for of in labels)
        assert header.startswith(f"{sizes[0]} tokens, {sizes[1]} of them (")


def test_a_classifiers_text_comes_with_its_label(models: Path, tmp_path: Path) -> None:
    for name in ("train", "dev"):
        (tmp_path / f"{name}.csv").write_text("text,label\nso good,pos\nso bad,neg\n")
    task = TextClassification(dataset=str(tmp_path), model=f"{models}/bert")
    train, _ = task.build_datasets()
    assert [task.preview(train, i) for i in range(2)] == [f"{END}so good\nlabel: pos", f"{END}so bad\nlabel: neg"]
