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
    """A task with these settings. A language model is a Llama from scratch, unless they name another one."""
    if issubclass(kind, CausalLM):
        new = {} if "model" in settings else {"architecture": {"model_type": "llama", **LLAMA}}
        settings = {**new, "sequence_length": 64, **settings}
    return kind(**settings)


def llama(folder: Path, seed: int = 0) -> Path:
    """A causal language model with fresh weights, and the byte tokenizer."""
    return saved("llama", folder, seed=seed, **LLAMA)


def saved(
    kind: str, folder: Path, dtype: torch.dtype = torch.float32, file_size: str = "5GB", seed: int = 0, **fields: Any
) -> Path:
    """A model of this kind with these fields of its config, fresh weights and the byte tokenizer."""
    tokenizer = byte_tokenizer()
    special = {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("bos", "eos", "pad")}
    sizes = {"vocab_size": len(tokenizer), "max_position_embeddings": 256}
    autos: dict[str, Any] = {"bert": AutoModelForMaskedLM, "t5": AutoModelForSeq2SeqLM, "bart": AutoModelForSeq2SeqLM}
    auto = autos.get(kind, AutoModelForCausalLM)
    torch.manual_seed(seed)
    model = auto.from_config(AutoConfig.for_model(kind, **special | sizes | fields), dtype=dtype)
    model.save_pretrained(folder, max_shard_size=file_size)
    tokenizer.save_pretrained(folder)
    return folder


def content(name: str, rows: Any, metadata: Any = None) -> bytes:
    """A file of these rows: parquet with 25 in a group and this metadata, or a line for each, of JSON unless it is
    bytes already; or of this text."""
    if isinstance(rows, str | bytes):
        return rows.encode() if isinstance(rows, str) else rows
    if name.endswith(".parquet"):
        sink = pa.BufferOutputStream()
        table = pa.Table.from_pylist(rows) if rows else pa.table({"text": pa.array([], pa.string())})
        parquet.write_table(table.replace_schema_metadata(metadata), sink, row_group_size=25, compression="none")
        return sink.getvalue().to_pybytes()
    return b"".join((row if isinstance(row, bytes) else json.dumps(row).encode()) + b"\n" for row in rows)


def write(files: dict[str, Any]) -> str:
    """Write files with this `content` below the current folder; a mapping changes fields of the JSON that is there, and
    None deletes the file. Return what they are all in."""
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
    """The documents that they show the model, in their order, without what stands for rows that were left out."""
    chunks, decode = (chunk for sample in samples for chunk in sample if chunk["length"]), byte_tokenizer().decode
    return [str(decode(chunk["input_ids"], skip_special_tokens=True)) for chunk in chunks]


def questions(file: Path, rows: int = 120) -> Path:
    """Prompts of 1 to 8 words with completions of 1 to 12."""
    draw = random.Random(0)

    def words(most: int) -> str:
        return " ".join(draw.choices(WORDS, k=draw.randint(1, most)))

    lines = [{"prompt": f"Q: {words(8)}\nA:", "completion": f" {words(12)}"} for _ in range(rows)]
    file.write_bytes(content(file.name, lines))
    return file


def reviews(folder: Path) -> Path:
    """Texts of 1 to 20 words, labelled by whether the first word comes before the last; train.tsv and dev.tsv."""
    draw = random.Random(0)
    folder.mkdir()
    for name, count in (("train", 110), ("dev", 37)):
        texts = [draw.choices(WORDS, k=draw.randint(1, 20)) for _ in range(count)]
        rows = [f"{' '.join(text)}\t{'rising' if text[0] < text[-1] else 'falling'}\n" for text in texts]
        (folder / f"{name}.tsv").write_text("text\tlabel\n" + "".join(rows))
    return folder


def chats(file: Path) -> None:
    """Of a question and an answer each."""
    rows = [[{"role": "user", "content": f"say {i}"}, {"role": "assistant", "content": f"{i} {i}"}] for i in range(40)]
    file.write_bytes(content(file.name, [{"messages": row} for row in rows]))


def shards(folder: Path, rows: int, seed: int = 0, words: int = 12) -> Path:
    """Eight files of ragged sizes, two of them empty, in row groups of ragged sizes. A row begins with its number."""
    folder.mkdir(parents=True)
    draw = random.Random(seed)
    cuts = sorted(draw.randrange(rows) for _ in range(5))
    for number, (first, last) in enumerate(pairwise(sorted([0, *cuts, cuts[1], cuts[1], rows]))):
        texts = [f"<{row}> {' '.join(draw.choices(WORDS, k=draw.randint(1, 2 * words)))}" for row in range(first, last)]
        table = pa.table({"text": pa.array(texts, pa.string())})
        parquet.write_table(table, folder / f"part-{number:02}.parquet", row_group_size=draw.randint(50, 400))
    return folder
