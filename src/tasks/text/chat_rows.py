"""Chats among the rows of a language model's data: whole, or as prompts and completions."""

from functools import cached_property, partial
from pathlib import Path
from typing import ClassVar

from transformers import PreTrainedTokenizerFast

from src.config.errors import UserError, as_user_error
from src.tasks.text.chats import CHATML, as_tools, encode_chat, encode_messages, ends_of_turn, with_date
from src.tasks.text.rows import ROW, Encoders, Split
from src.tasks.text.sequences import PackedSequences
from src.tasks.text.tokenizing import Columns


class ChatRows(PackedSequences):
    """Reads chats as a chat template writes them."""

    usual_columns: ClassVar[tuple[Columns, ...]] = (
        {"messages": "messages"},
        {"messages": "conversations"},
        *PackedSequences.usual_columns,
    )

    @cached_property
    def _tokenizer(self) -> PreTrainedTokenizerFast:
        tokenizer = super()._tokenizer
        if not self.chat_template:
            return tokenizer
        tokenizer.chat_template = CHATML
        if self.chat_template != "chatml":
            with as_user_error("task.chat_template: cannot be read: ", (OSError, UnicodeDecodeError)):
                tokenizer.chat_template = Path(self.chat_template).read_text(encoding="utf-8")
        marks = ends_of_turn(tokenizer)
        if not marks:
            raise UserError(
                f"task.chat_template={self.chat_template} ends a turn without a special token of the tokenizer's, so "
                "the model would never stop: list its marks in task.new_tokens, such as '[<|im_start|>, <|im_end|>]', "
                "or write {{ eos_token }}"
            )
        if tokenizer.eos_token not in marks:
            tokenizer.eos_token = marks[0]
        return tokenizer

    def choose_columns(self, split: Split, names: list[str]) -> Encoders:
        encoders = super().choose_columns(split, names)
        prompt = self._columns.get("prompt", "")
        rows = (record.row for file in split.files for record in split.read(file, [prompt]))
        # the first row tells, as in TRL
        has_chats = prompt and isinstance(next(rows).get(prompt), list)
        return self._chat_encoders() if "messages" in self._columns or has_chats else encoders

    def _chat_encoders(self) -> Encoders:
        """Return the encoders of chats, whole or as prompts and completions, whose rows are kept as text."""
        tokenizer, remarks = self._tokenizer, self.state.remarks
        template = str(tokenizer.chat_template or "")  # or several, by name
        if not ends_of_turn(tokenizer):
            remarks.append("the model's chat template ends turns without a token of their own: it may not stop")
        if "strftime_now" in template:
            date = self.state.data.setdefault("date", self.state.date)
            remarks.append(f"chats are dated {date}, when this run began")
            tokenizer = with_date(tokenizer, date)
        columns = self._columns | {"tools": "tools"}  # rows without tools need not have the column
        self._columns = {"chat": ROW}
        write = partial(encode_chat, columns=columns, tokenizer=tokenizer, train_on_prompts=self.train_on_prompts)
        encode = partial(encode_messages, template=template)
        return {**dict.fromkeys(columns.values(), encode), "tools": as_tools, ROW: write}
