"""Ask a run's chat model questions whose right answers are known, with its adapters and without them.

    python -m examples.ask runs/chat examples/chats_eval.jsonl

Each line of the file has a question, and the facts that a right answer contains, word for word: {"question": "Which
flag …?", "facts": ["--check"]}. Answers are decoded greedily, and written into answers.jsonl in the run's folder.
"""

import argparse
import json
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from pydantic import BaseModel, Field
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoTokenizer

from src.checkpoint.files import write_text
from src.config.errors import UserError, as_user_error
from src.distributed.process import exit_codes
from src.tasks.text.load import load_exported

MAX_TOKENS = 64
"""Maximum number of tokens in an answer."""


class Question(BaseModel, extra="forbid", strict=True):
    """A line of the file of questions."""

    question: str
    facts: list[str] = Field(min_length=1)
    """Texts that a right answer contains."""

    def is_right(self, answer: str) -> bool:
        """Return whether an answer contains all of the facts, ignoring case."""
        return all(fact.casefold() in answer.casefold() for fact in self.facts)


def read_questions(file: str) -> list[Question]:
    """Return the questions in a .jsonl file. Raise a UserError if there are none, or a line is not a question."""
    with as_user_error(f"{file}: cannot be read: ", (OSError, UnicodeDecodeError)):
        lines = Path(file).read_text(encoding="utf-8").split("\n")
    questions = []
    for number, line in enumerate(lines, start=1):
        if line.strip():
            with as_user_error(f"{file}, line {number}: "):
                questions.append(Question.model_validate_json(line))
    if not questions:
        raise UserError(f"{file}: it is empty")
    return questions


def answers(model: Any, tokenizer: Any, questions: list[str]) -> list[str]:
    """Return the model's answers, each to one question, decoded greedily. Raise a UserError if the tokenizer has no
    chat template, or it rejects a question."""
    chats = [[{"role": "user", "content": question}] for question in questions]
    with as_user_error("the tokenizer's chat template: "):  # it is a program: it can raise anything
        texts = tokenizer.apply_chat_template(chats, tokenize=False, add_generation_prompt=True)
    prompts = [torch.tensor(ids) for ids in tokenizer(texts, add_special_tokens=False)["input_ids"]]
    # on the left: an answer continues its prompt
    tokens = pad_sequence(prompts, batch_first=True, padding_value=-1, padding_side="left").to(model.device)
    output = model.generate(
        input_ids=tokens.clamp(min=0),
        attention_mask=(tokens >= 0).long(),
        max_new_tokens=MAX_TOKENS,
        do_sample=False,
        pad_token_id=tokenizer.pad_token_id or 0,
    )
    return tokenizer.batch_decode(output[:, tokens.shape[1] :], skip_special_tokens=True)


def main(argv: list[str]) -> None:
    """Ask the questions, write the answers, and print how many are right."""
    parser = argparse.ArgumentParser("python -m examples.ask", description=__doc__)
    parser.add_argument("run", type=Path, help="a run's output folder")
    parser.add_argument("questions", help="a .jsonl file of questions and facts")
    options = parser.parse_args(argv)
    questions = read_questions(options.questions)
    folder = options.run / "model"
    with as_user_error(f"{folder}: ", (OSError, ValueError)):
        model = load_exported(folder).to(PartialState().device).eval()
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    rows: list[dict[str, Any]] = [question.model_dump() for question in questions]
    # before training, that is, without the adapters; a model that was trained as a whole has no way back
    contexts = {"before": model.disable_adapter()} if hasattr(model, "disable_adapter") else {}
    counts = []
    for when, context in (contexts | {"after": nullcontext()}).items():
        with context:
            found = answers(model, tokenizer, [question.question for question in questions])
        right = [question.is_right(answer) for question, answer in zip(questions, found, strict=True)]
        counts.append(f"{sum(right)} of {len(right)} {when}")
        for row, answer, is_right in zip(rows, found, right, strict=True):
            row |= {when: answer, f"right {when}": is_right}
    file = options.run / "answers.jsonl"
    write_text(file, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    print(f"answers with the right facts: {', '.join(counts)}\n  answers    {file}")


if __name__ == "__main__":
    with exit_codes("ask"):
        main(sys.argv[1:])
