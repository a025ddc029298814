"""Tokens that a model gets beside its own, such as the marks of a chat's turns, and the rows that they have in its
first and its last layer."""

from typing import Any

import torch
from tokenizers import AddedToken
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from src.config.errors import UserError


def add_tokens(tokenizer: PreTrainedTokenizerFast, tokens: list[str]) -> None:
    """Add special tokens to the tokenizer. Raise a UserError if it has one of them already, or one is listed twice."""
    known = tokenizer.get_vocab()
    repeated = {token for token in tokens if token in known or tokens.count(token) > 1}
    if repeated:
        says = "the tokenizer has it already, or it is listed twice: leave it out"
        raise UserError(f"task.new_tokens: {', '.join(sorted(repeated))}: {says}")
    tokenizer.add_tokens([AddedToken(token, special=True, normalized=False) for token in tokens])


def add_rows(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, tokens: list[str]) -> dict[str, list[int]]:
    """Give the tokens, which the tokenizer has, rows in the model's first and last layer; return the rows by layer, as
    peft takes them: of tied layers, the first.

    A row starts as the mean of those of the tokens before, so that it is neither likely nor unlikely (Hewitt 2021,
    https://www.cs.columbia.edu/~johnhew/vocab-expansion.html).
    """
    grow(model, len(tokenizer))
    vocabulary = tokenizer.get_vocab()
    rows = [vocabulary[token] for token in tokens]
    ends: dict[Any, str] = {}
    names = {module: name for name, module in model.named_modules()}
    layers: list[Any] = [model.get_input_embeddings(), model.get_output_embeddings()]
    for layer in layers:
        with torch.no_grad():
            layer.weight[rows] = layer.weight[: min(rows)].mean(0)
        ends.setdefault(layer.weight, names[layer])
    return dict.fromkeys(ends.values(), rows)


def grow(model: PreTrainedModel, num_tokens: int) -> None:
    """Add rows to the model's first and last layer if they are fewer than the tokens; many have some to spare."""
    embedding: Any = model.get_input_embeddings()
    if embedding.num_embeddings < num_tokens:
        model.resize_token_embeddings(num_tokens, mean_resizing=False)
