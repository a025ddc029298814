"""Questions whose right answers name certain facts: what a chat model answers them, before its training and after."""

from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel, Field
from torch.distributed.fsdp import FSDPModule
from torch.nn.utils.rnn import pad_sequence

from src.config.errors import UserError, explained
from src.config.terminal import is_first, say
from src.tasks.base import Metrics, Table, Tables

MOST_TOKENS = 64
"""Tokens after which an answer is cut off."""


class Question(BaseModel, extra="forbid", strict=True):
    """A line of the file."""

    question: str
    facts: list[str] = Field(min_length=1)
    """What a right answer contains."""
    _prompt: list[int]
    """The question as the model sees it, in tokens."""

    def is_right(self, answer: str) -> bool:
        """Return whether an answer has all of the facts, in capital or small letters."""
        return all(fact.casefold() in answer.casefold() for fact in self.facts)


def read_questions(file: str, tokenizer: Any) -> list[Question]:
    """Return the questions in a .jsonl file. Raise a UserError if there are none, a line is something else, or the chat
    template refuses it."""
    with explained(f"task.questions={file}: cannot be read, ", (OSError, UnicodeDecodeError)):
        lines = Path(file).read_text(encoding="utf-8").split("\n")
    questions = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        with explained(f"task.questions={file}, line {number}: "):
            asked = Question.model_validate_json(line)
            chat = [{"role": "user", "content": asked.question}]
            text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
            asked._prompt = tokenizer(text, add_special_tokens=False)["input_ids"]
        questions.append(asked)
    if not questions:
        raise UserError(f"task.questions={file}: it is empty")
    return questions


def ask(
    model: Any, tokenizer: Any, questions: list[Question], device: torch.device, has_adapters: bool
) -> tuple[Metrics, Tables]:
    """Return the share of right answers, and a table of all of them: what is likeliest, token by token. `before` is
    without the adapters. Collective: each process asks all the questions."""
    parameters = [*model.parameters()]
    if parameters[0].device.type != device.type:
        if is_first():  # generate would put its inputs there
            say("task.questions: not asked, as the weights are in the CPU's memory")
        return {}, {}
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    prompts = [torch.tensor(asked._prompt, device=device) for asked in questions]
    tokens = pad_sequence(prompts, batch_first=True, padding_value=-1, padding_side="left")
    pad = tokenizer.pad_token_id or 0
    rows: Table = [{"question": asked.question, "facts": ", ".join(asked.facts)} for asked in questions]
    shares, counts = {}, []
    for when in ("before", "after") if has_adapters else ("after",):
        output = model(
            "generate",
            with_adapters=when == "after",
            input_ids=tokens.where(tokens >= 0, pad),
            attention_mask=(tokens >= 0).long(),
            pad_token_id=pad,
            max_new_tokens=MOST_TOKENS,
            do_sample=False,
            synced_gpus=torch.distributed.is_initialized(),
        )
        answers = tokenizer.batch_decode(output[:, tokens.shape[1] :], skip_special_tokens=True)
        right = [asked.is_right(answer) for asked, answer in zip(questions, answers, strict=True)]
        shares[f"right_answers_{when}"] = sum(right) / len(right)
        counts.append(f"{sum(right)} of {len(right)} {when}")
        for row, answer, is_right in zip(rows, answers, right, strict=True):
            row |= {when: answer, f"right {when}": is_right}
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()  # some units stay gathered after a forward pass, and what is exported is sharded
    for parameter in trained:  # which peft has frozen and not found again, where they were gathered meanwhile
        parameter.requires_grad_(True)
    if is_first():
        say(f"answers with the right facts: {', '.join(counts)}")
    return shares, {"answers": rows}
