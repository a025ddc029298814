"""task.questions: a chat model is asked at the end of its training, with its adapters and without."""

from pathlib import Path
from typing import Any

import pytest
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from src.config.errors import UserError
from src.tasks.text.chats import MOST_TOKENS, Question
from tests.launching import Whole, slow
from tests.text import tiny
from tests.text.tasks import EARLY

pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")  # as in lora.py
QUESTIONS = [("What is the?", ["the"]), ("And of?", ["of", "IT"]), ("A much longer question, is it not?", ["e"])]


@pytest.fixture(scope="module")
def arguments(made: Path) -> tuple[str, ...]:
    file = made / "asked.jsonl"
    file.write_bytes(tiny.content(file.name, [{"question": q, "facts": facts} for q, facts in QUESTIONS]))
    data = (f"--task.dataset={made}/questions.jsonl", "--task.sequence_length=128")
    model = (f"--task.model={made}/models/llama", "--task.lora.r=4")
    few = (*EARLY, "--optim.lr=3e-2", "--max_steps=4")
    return ("--task.name=causal_lm", *data, *model, f"--task.questions={file}", *few)


def greedy(model: Any, tokenizer: Any, question: str) -> str:
    """Transformers' own answer to this question alone."""
    chat = [{"role": "user", "content": question}]
    asked = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    tokens = model.eval().generate(**asked, do_sample=False, max_new_tokens=MOST_TOKENS)
    return tokenizer.decode(tokens[0, asked["input_ids"].shape[1] :], skip_special_tokens=True)


@pytest.mark.parametrize(
    "yaml", ["fsdp", *map(slow, ("cpu", "ddp", "fsdp_cp", "fsdp_grad_op", "fsdp_offload", "hsdp"))]
)
def test_answers_are_those_of_transformers(whole: Whole, arguments: tuple[str, ...], made: Path, yaml: str) -> None:
    """Asked together, to any number of processes. Tried with padding on the right, and with the adapters on twice."""
    run = whole(yaml, *arguments)
    tokenizer = AutoTokenizer.from_pretrained(run.folder / "model")
    auto: Any = AutoModelForCausalLM
    base = auto.from_pretrained(made / "models/llama")
    before = [greedy(base, tokenizer, question) for question, _ in QUESTIONS]
    tuned = PeftModel.from_pretrained(base, run.folder / "model")
    after = [greedy(tuned, tokenizer, question) for question, _ in QUESTIONS]
    ((step, rows),) = ((record["step"], record["eval/answers"]) for record in run.records if "eval/answers" in record)
    assert step == 4
    assert [row["question"] for row in rows] == [question for question, _ in QUESTIONS]
    assert [row["facts"] for row in rows] == ["the", "of, IT", "e"]
    assert [row["before"] for row in rows] == before
    assert [row["after"] for row in rows] == after
    assert before != after
    right = {when: sum(row[f"right {when}"] for row in rows) for when in ("before", "after")}
    assert f"answers with the right facts: {right['before']} of 3 before, {right['after']} of 3 after" in run.stdout
    for when, number in right.items():
        assert run.summary[f"eval/right_answers_{when}"] == pytest.approx(number / 3)


def test_an_answer_is_right_if_it_has_all_the_facts() -> None:
    """In capital or small letters; a part of them is not enough."""
    assert Question(question="?", facts=["--check"]).is_right("Add `--CHECK`.")
    asked = Question(question="?", facts=["Save_every", "500"])
    assert asked.is_right("`save_every`, 500 by default")
    assert not asked.is_right("It is `save_every`.")


MISTAKES = {
    '{"question": "Which?", "facts": []}': "line 2: .*facts",
    '{"question": "Which?", "facts": ["a"], "answer": "b"}': "line 2: .*answer",
    "Which?": "line 2: .*Invalid JSON",
}


def test_what_are_no_questions_is_named_before_training(made: Path) -> None:
    good = '{"question": "Which?", "facts": ["a"]}\n'
    files = {f"{i}.jsonl": good + line for i, line in enumerate(MISTAKES)} | {"empty.jsonl": ""}
    tiny.write(files)
    says = [*MISTAKES.values(), "it is empty", "cannot be read: .*No such file"]
    for file, named in zip([*files, "none.jsonl"], says, strict=True):
        task = tiny.task(model=f"{made}/models/llama", dataset=f"{made}/questions.jsonl", questions=file)
        with pytest.raises(UserError, match=f"^task.questions={file}[:,] .*{named}[^\\n]*$"):
            task.build_datasets()
