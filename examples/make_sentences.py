"""Make the data of token_classification.py, the same each time: `python -m examples.make_sentences` writes
data/sentences."""

import json
import random
from pathlib import Path
from typing import Any

PATTERNS = """PER|ORG opened an office in LOC on DATE .
Before DATE , nobody in LOC had heard of PER|ORG .
PER|ORG and PER|ORG signed the agreement in LOC .
The report on PER|ORG|LOC was published by ORG on DATE .
On DATE PER left ORG and moved to LOC with PER .
We asked PER about LOC|ORG , but the answer was short .""".splitlines()
"""Patterns of sentences. Where there is a choice, only the name tells its kind."""
NAMES = {
    "PER": [
        "Anna Tom Maria David Laura Omar Peter Ingrid John Emma Paul Yuki Ravi Sofia Carlos Julia Ben Nadia Igor Helen",
        "Becker Hughes Rossi Chen Smith Haddad Larsen Kennedy Brown Martin Tanaka Patel Novak Okafor Silva Weber Jones",
    ],
    "LOC": ["Berlin Madrid Kenya Norway Peru Vietnam Paris Lisbon Hamburg Chicago Texas Japan Boston Cairo Oslo India"],
    "ORG": [
        "Alpha Orion Delta Vector Summit Harbor Crystal Falcon Pioneer Quantum Liberty Phoenix Apex Zenith Nova",
        "Bank Airlines Motors University Museum Energy Hospital Railways Foods Insurance Institute Telecom Records",
    ],
    "DATE": [
        "1 2 5 8 10 11 14 17 20 21 24 28 30",
        "January February March April May June July August September October November December",
        "1956 1969 1972 1981 1987 1990 1998 2001 2004 2010 2013 2020",
    ],
}
"""For each kind of name, lists of words: a name takes one from each list, in this order."""


def sentences(part: int, count: int) -> list[dict[str, Any]]:
    """Return sentences as `tokens`, words, and `tags`, in IOB2. The parts, 0 to train on and 1 to evaluate on, share no
    name."""
    draw = random.Random(part)
    rows: list[dict[str, Any]] = []
    for pattern in draw.choices(PATTERNS, k=count):
        tokens, tags = [], []
        for kind in [draw.choice(word.split("|")) for word in pattern.split()]:
            words = [draw.choice(words.split()[part::2]) for words in NAMES.get(kind, [])] or [kind]
            tokens += words
            tags += [f"B-{kind}", *[f"I-{kind}"] * (len(words) - 1)] if kind in NAMES else ["O"]
        rows.append({"tokens": tokens, "tags": tags})
    return rows


def write(folder: Path) -> None:
    """Write 800 rows to train on and 200 to evaluate on, as JSON lines: train.jsonl and dev.jsonl."""
    folder.mkdir(parents=True, exist_ok=True)
    for part, split, count in ((0, "train", 800), (1, "dev", 200)):
        lines = [json.dumps(row) + "\n" for row in sentences(part, count)]
        (folder / f"{split}.jsonl").write_text("".join(lines), encoding="utf-8")


if __name__ == "__main__":
    write(Path("data/sentences"))
