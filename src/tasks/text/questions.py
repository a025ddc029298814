"""Questions whose right answers name certain facts: what a chat model answers them, before its training and after."""

from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict, Field

from src.config.errors import UserError, explained
from src.config.terminal import is_first, say
from src.tasks import load_metric
from src.tasks.base import Table

MOST_TOKENS = 64
"""Tokens after which an answer is cut off."""


class Question(BaseModel):
    """A line of the file."""

    model_config = ConfigDict(extra="forbid", strict=True)
    question: str
    facts: list[str] = Field(min_length=1)
    """What a right answer contains, in capital or small letters."""


def read_questions(file: str) -> list[Question]:
    """Return the questions in a .jsonl file. Raise a UserError if there are none, or a line is something else."""
    with explained(f"task.questions={file}: cannot be read, ", (OSError, UnicodeDecodeError)):
        lines = Path(file).read_text(encoding="utf-8").splitlines()
    questions = []
    for number, line in enumerate(lines, start=1):
        with explained(f"task.questions={file}, line {number}: ", ValueError):
            questions.append(Question.model_validate_json(line))
    if not questions:
        raise UserError(f"task.questions={file}: it is empty")
    return questions


def ask(
    model: Any, tokenizer: Any, questions: list[Question], device: torch.device, has_adapters: bool
) -> tuple[dict[str, float], dict[str, Table]]:
    """Return the share of right answers, and a table of all of them: what is likeliest, token by token. `before` is
    without the adapters. Collective: each process asks all the questions."""
    chats = [[{"role": "user", "content": asked.question}] for asked in questions]
    options = {"padding_side": "left"}
    inputs = tokenizer.apply_chat_template(
        chats, add_generation_prompt=True, padding=True, tokenizer_kwargs=options, return_dict=True, return_tensors="pt"
    )
    rows: Table = [{"question": asked.question, "facts": ", ".join(asked.facts)} for asked in questions]
    shares, counts = {}, []
    for when in ("before", "after") if has_adapters else ("after",):
        tokens = model(
            "generate",
            with_adapters=when == "after",
            **inputs.to(device),
            max_new_tokens=MOST_TOKENS,
            do_sample=False,
            synced_gpus=torch.distributed.is_initialized(),
        )
        answers = tokenizer.batch_decode(tokens[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        found = load_metric("Facts").compute(predictions=answers, references=[asked.facts for asked in questions])
        shares[f"right_answers_{when}"] = found["share"]
        counts.append(f"{sum(found['right'])} of {len(questions)} {when}")
        for row, answer, is_right in zip(rows, answers, found["right"], strict=True):
            row |= {when: answer, f"right {when}": is_right}
    if is_first():
        say(f"answers with the right facts: {', '.join(counts)}")
    return shares, {"answers": rows}
