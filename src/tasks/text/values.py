"""Values of rows: as files and tables have them, and as the text that is kept of them."""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pyarrow as pa
from datasets import ClassLabel, Features, Json

from src.config.errors import cause, explained

Rows = dict[str, list[Any]]
"""Values of rows, by column."""
Found = tuple[Rows, dict[int, str]]
"""Rows as they were read, and why some of them cannot be used, by place."""
Encoder = Callable[[Any], str | None]
"""Returns a value as the text that is kept of it; raises a ValueError that says why it cannot be used."""
Encoders = Mapping[str, Encoder]
"""Those of the columns in use, by column. One that takes None is of a column that may be missing."""


def as_is(value: Any) -> Any:
    """Return a value that has been encoded already."""
    return value


def as_text(value: Any) -> str:
    """Return a text as it is. Raise a ValueError if it is something else."""
    if value is None or (isinstance(value, str) and not value.strip()):
        raise ValueError("is empty")
    if not isinstance(value, str):
        raise ValueError(f"is {type(value).__name__}, not text")
    return encodable(value)


def as_label(value: Any) -> str:
    """Return a label, a number or a text, as text without white space around it. Raise a ValueError if it is
    neither."""
    is_number = isinstance(value, int | float) and value == value  # a bool is one, what is not a number is none
    return str(value) if is_number else as_text(value).strip()


def as_json(value: Any) -> str:
    """Return a value as JSON. Raise a ValueError if it cannot be."""
    with explained("is no JSON, ", (TypeError, RecursionError), ValueError):
        return encodable(json.dumps(value, ensure_ascii=False))


def encodable(text: str) -> str:
    """Return the text. Raise a ValueError if it has half an emoji, or bytes that are not UTF-8, which no tokenizer
    takes."""
    try:  # `explained` would take eight times as long
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"is no Unicode text, {cause(error)}") from error
    return text


def arrow_values(table: pa.Table, columns: Sequence[str], features: Mapping[str, Any]) -> Found:
    """Return the values of a table, and why some rows are unreadable, by place. The features are those of datasets."""
    rows: Rows = {}
    unreadable: dict[int, str] = {}
    for name in columns:
        if name not in table.column_names:
            rows[name] = [None] * len(table)
            continue
        values = rows[name] = []
        for place, value in enumerate(table[name]):
            try:
                values.append(_as_meant(value.as_py(), features.get(name)))
            except UnicodeDecodeError as error:
                values.append(None)
                unreadable[place] = f"{name} is not UTF-8, {error}"
    return rows, unreadable


def _as_meant(value: Any, feature: Any) -> Any:
    """Return a table's value with names for the numbers of labels, where the table declares them, and without the nulls
    that a table has for each key which only other rows have."""
    if isinstance(feature, Json) and isinstance(value, str):
        return json.loads(value)
    if isinstance(feature, ClassLabel) and isinstance(value, int) and 0 <= value < feature.num_classes:
        return feature.names[value]  # a number without a name, such as -1 for unknown, stays a number
    if isinstance(value, dict):
        inner = feature if isinstance(feature, dict) else {}
        return {key: _as_meant(part, inner.get(key)) for key, part in value.items() if part is not None}
    if isinstance(value, list):
        return [_as_meant(part, getattr(feature, "feature", None)) for part in value]
    return value


def declared_features(schema: pa.Schema) -> Features:
    """Return the features that `datasets` has written into a parquet file; none if it is another's."""
    written = json.loads((schema.metadata or {}).get(b"huggingface", b"{}"))
    return Features.from_dict(written.get("info", {}).get("features") or {})
