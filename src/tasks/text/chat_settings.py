"""The settings of chats."""

from src.tasks.text.settings import DecoderSettings


class ChatSettings(DecoderSettings):
    """Adds chats to what a language model is trained on."""

    chat_template: str | None = None
    """A Jinja file with a chat template, or chatml, a common one that writes tools, calls and thoughts; null: the
    tokenizer's own."""
    messages_column: str | None = None
    """Column of chats: lists of messages with role and content (and tool_calls), or ShareGPT's from and value. A
    `tools` column beside it describes the tools that they may call."""
