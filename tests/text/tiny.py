"""Tiny models, written as a user would have them in a folder, tasks on them, and tiny data with ragged lengths."""

import json
import random
from itertools import pairwise
from pathlib import Path
from typing import Any

import pyarrow as pa
import torch
from pyarrow import parquet
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMaskedLM, AutoModelForSeq2SeqLM

from src.tasks.text.causal_lm import CausalLM
from src.tasks.text.tokenizing import byte_tokenizer

SIZES: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
LLAMA: dict[str, Any] = SIZES | {"num_key_value_heads": 2}
T5: dict[str, Any] = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4, "dropout_rate": 0.0}
T5 |= {"decoder_start_token_id": 257}
BART: dict[str, Any] = {"d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4}
BART |= {"decoder_attention_heads": 4, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64}
NEW_LLAMA = ("--task.architecture.model_type=llama", *(f"--task.architecture.{n}={v}" for n, v in LLAMA.items()))
"""A Llama from scratch, on the command line."""
WORDS = ["the", "of", "and", "to", "in", "is", "you", "that", "it", "he", "was", "for", "on", "are", "as", "with"]
END = "<|endoftext|>"
"""The byte tokenizer's token before and after a text."""


def task(kind: Any = CausalLM, **settings: Any) -> Any:
    """Return a task with these settings. A language model is a new Llama, unless they name a model."""
    if issubclass(kind, CausalLM):
        new = {} if "model" in settings else {"architecture": {"model_type": "llama", **LLAMA}}
        settings = {**new, "sequence_length": 64, **settings}
    return kind(**settings)


def llama(folder: Path, seed: int = 0) -> Path:
    """Write a causal language model with fresh weights, and the byte tokenizer."""
    return saved("llama", folder, seed=seed, **LLAMA)


def saved(
    kind: str, folder: Path, dtype: torch.dtype = torch.float32, file_size: str = "5GB", seed: int = 0, **fields: Any
) -> Path:
    """Write a model of this kind with these fields of its config, fresh weights and the byte tokenizer."""
    tokenizer = byte_tokenizer()
    known = {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("bos", "eos", "pad")}
    known |= {"vocab_size": len(tokenizer), "max_position_embeddings": 256}
    autos: dict[str, Any] = {"bert": AutoModelForMaskedLM, "t5": AutoModelForSeq2SeqLM, "bart": AutoModelForSeq2SeqLM}
    torch.manual_seed(seed)
    config = AutoConfig.for_model(kind, **known | fields)
    model = autos.get(kind, AutoModelForCausalLM).from_config(config, dtype=dtype)
    model.save_pretrained(folder, max_shard_size=file_size)
    tokenizer.save_pretrained(folder)
    return folder


def content(name: str, rows: Any, metadata: Any = None) -> bytes:
    """Return a file of these rows: parquet with 25 rows in a group and this metadata, or a line of JSON for each, where
    bytes stay as they are. A text or bytes in place of rows are the whole file."""
    if isinstance(rows, str | bytes):
        return rows.encode() if isinstance(rows, str) else rows
    if name.endswith(".parquet"):
        sink = pa.BufferOutputStream()
        table = pa.Table.from_pylist(rows) if rows else pa.table({"text": pa.array([], pa.string())})
        parquet.write_table(table.replace_schema_metadata(metadata), sink, row_group_size=25, compression="none")
        return sink.getvalue().to_pybytes()
    return b"".join((row if isinstance(row, bytes) else json.dumps(row).encode()) + b"\n" for row in rows)


def write(files: dict[str, Any]) -> str:
    """Write files of this `content` into the current folder. A mapping changes fields of a JSON file, and None deletes
    a file. Return the file or folder that the first one is in."""
    for name, rows in files.items():
        file = Path(name)
        file.parent.mkdir(parents=True, exist_ok=True)
        if rows is None:
            file.unlink()
        elif isinstance(rows, dict):
            file.write_text(json.dumps(json.loads(file.read_text()) | rows))
        else:
            file.write_bytes(content(name, rows))
    return next(iter(files)).partition("/")[0]


def texts_of(samples: Any) -> list[str]:
    """Return the texts of the documents in these samples, in order, without the empty ones of skipped rows."""
    chunks, decode = (chunk for sample in samples for chunk in sample if chunk["length"]), byte_tokenizer().decode
    return [str(decode(chunk["input_ids"], skip_special_tokens=True)) for chunk in chunks]


def questions(file: Path, rows: int = 120) -> Path:
    """Write prompts of 1 to 8 words with completions of 1 to 12."""
    draw = random.Random(0)
    texts = ([" ".join(draw.choices(WORDS, k=draw.randint(1, most))) for most in (8, 12)] for _ in range(rows))
    lines = [{"prompt": f"Q: {question}\nA:", "completion": f" {answer}"} for question, answer in texts]
    file.write_bytes(content(file.name, lines))
    return file


def reviews(folder: Path) -> Path:
    """Write train.tsv and dev.tsv: texts of 1 to 20 words, labelled by whether the first comes before the last."""
    draw = random.Random(0)
    folder.mkdir()
    for name, count in (("train", 110), ("dev", 37)):
        texts = [draw.choices(WORDS, k=draw.randint(1, 20)) for _ in range(count)]
        rows = [f"{' '.join(text)}\t{'rising' if text[0] < text[-1] else 'falling'}\n" for text in texts]
        (folder / f"{name}.tsv").write_text("text\tlabel\n" + "".join(rows))
    return folder


def rated(file: Path) -> None:
    """Write texts of 1 to 20 words with `labels`, those of four words that are in it, and their mean place, `score`."""
    draw = random.Random(0)
    texts = [draw.choices(WORDS, k=draw.randint(1, 20)) for _ in range(147)]
    scores = [sum(map(WORDS.index, text)) / len(text) for text in texts]
    named = [[word for word in ("and", "of", "the", "you") if word in text] for text in texts]
    made = zip(map(" ".join, texts), named, scores, strict=True)
    file.write_bytes(
        content(file.name, [{"text": text, "labels": words, "score": score} for text, words, score in made])
    )


def chat(*contents: str) -> list[dict[str, Any]]:
    """Return a chat of these contents, in turns the user's and the assistant's."""
    return [{"role": ("user", "assistant")[i % 2], "content": content} for i, content in enumerate(contents)]


def chats(file: Path) -> None:
    """Write chats of a question and an answer each."""
    texts = [(f"say {i}", f"{i} {i}") for i in range(40)]
    file.write_bytes(content(file.name, [{"messages": chat(*text)} for text in texts]))


def shards(folder: Path, rows: int, seed: int = 0, words: int = 12) -> Path:
    """Write eight files of ragged sizes, two of them empty, in row groups of ragged sizes. A row begins with its
    number."""
    folder.mkdir(parents=True)
    draw = random.Random(seed)
    cuts = sorted(draw.randrange(rows) for _ in range(5))
    for number, (first, last) in enumerate(pairwise(sorted([0, *cuts, cuts[1], cuts[1], rows]))):
        texts = [f"<{row}> {' '.join(draw.choices(WORDS, k=draw.randint(1, 2 * words)))}" for row in range(first, last)]
        table = pa.table({"text": pa.array(texts, pa.string())})
        parquet.write_table(table, folder / f"part-{number:02}.parquet", row_group_size=draw.randint(50, 400))
    return folder
