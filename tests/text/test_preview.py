"""--dry-run: the text of an example as the model sees it, and what of it contributes to the loss."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from src.tasks.text.text_classification import TextClassification
from src.tasks.text.tokenizing import byte_tokenizer
from tests.text import tiny
from tests.text.test_documents import CHAT
from tests.text.tiny import END, write


def shown(*rows: Any, **settings: Any) -> str:
    """The first example of these rows."""
    settings = {"sequence_length": 256, "eval_from": "all", **settings}
    task = tiny.task(dataset=write({"rows.jsonl": rows}), **settings)
    return task.preview(task.build_datasets()[0], 0)


def test_the_assistants_turns_are_marked_and_packed_documents_ruled_off() -> None:
    """The first token is never one, and the last one is that after all which is read. Tried with marks that are not
    shifted: ⟦>Yo⟧; and without the last label: no end mark."""
    beginning = f"{END}<system>Be brief.{END}<user>Hi{END}"
    assert shown({"messages": CHAT}, {"messages": CHAT[3:]}).splitlines() == [
        "93 tokens, 13 of them (14.0%) contribute to the loss",
        "──── document 1 of 2 ────",
        f"{beginning}<assistant>⟦Yo{END}⟧<user>Bye{END}<assistant>⟦Ciao{END}⟧",
        "──── document 2 of 2 ────",
        f"{END}<user>Bye{END}<assistant>⟦Ciao{END}⟧",
    ]


@pytest.mark.parametrize(
    ("row", "settings", "expected"),
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
def test_what_is_read_and_what_contributes(row: Any, settings: dict[str, Any], expected: str) -> None:
    assert shown(row, packing=False, **settings).split("────\n")[1] == expected


def test_all_that_contributes_is_marked_in_every_example(made: Path) -> None:
    """Of packed documents with masked prompts; and what is left of all marks is what is read."""
    task = tiny.task(dataset=f"{made}/questions.jsonl", sequence_length=128)
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


def test_a_classifiers_text_comes_with_its_label(models: Path) -> None:
    write({f"data/{name}.csv": "text,label\nso good,pos\nso bad,neg\n" for name in ("train", "dev")})
    task = tiny.task(TextClassification, dataset="data", model=f"{models}/bert")
    train, _ = task.build_datasets()
    assert [task.preview(train, i) for i in range(2)] == [f"{END}so good\nlabel: pos", f"{END}so bad\nlabel: neg"]
