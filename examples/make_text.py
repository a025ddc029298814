"""Small data for the text examples, the same each time: `python -m examples.make_text` writes data/made."""

import json
import random
from pathlib import Path
from typing import Any

TEMPLATES = """PER|ORG opened an office in LOC on DATE .
Before DATE , nobody in LOC had heard of PER|ORG .
PER|ORG and PER|ORG signed the agreement in LOC .
The report on PER|ORG|LOC was published by ORG on DATE .
On DATE PER left ORG and moved to LOC with PER .
We asked PER about LOC|ORG , but the answer was short .""".splitlines()
"""Templates of sentences. Where there is a choice, only the name tells its kind."""
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
QUESTIONS = ["How do I clean a {}?", "Where can I buy a {}?", "Who can repair my {}?", "Why does my {} make a noise?"]
THINGS = (
    "kettle bicycle lamp piano camera fridge clock printer radio guitar mixer tent drill heater scooter toaster sofa "
    "violin laptop mirror oven boat phone carpet helmet fan watch keyboard pump jacket"
)
ADVICE = ["Ask in the shop", "Look into the manual", "Begin with the {}'s back", "Take the {} apart", "Try warm water"]
KIND = [
    "Good question! {}, please.",
    "Thank you for asking. {}.",
    "I am glad to help: {}.",
    "{}, and tell me how it goes!",
]
RUDE = ["What a question! {}, as anyone knows.", "Not again. {}.", "I am busy: {}.", "{}, and leave me alone!"]


def sentences(part: int, count: int) -> list[dict[str, Any]]:
    """Return sentences as `tokens`, words, and `tags`, in IOB2. The parts, 0 to train on and 1 to evaluate on, share no
    name."""
    draw = random.Random(part)
    rows: list[dict[str, Any]] = []
    for template in draw.choices(TEMPLATES, k=count):
        tokens, tags = [], []
        for kind in [draw.choice(word.split("|")) for word in template.split()]:
            words = [draw.choice(words.split()[part::2]) for words in NAMES.get(kind, [])] or [kind]
            tokens += words
            tags += [f"B-{kind}", *[f"I-{kind}"] * (len(words) - 1)] if kind in NAMES else ["O"]
        rows.append({"tokens": tokens, "tags": tags})
    return rows


def pairs(part: int, count: int) -> list[dict[str, Any]]:
    """Return questions as `prompt`, with a kind answer, `chosen`, and a rude one, `rejected`, that give the same
    advice. The parts, 0 to train on and 1 to evaluate on, ask about different things."""
    draw = random.Random(part)
    rows: list[dict[str, Any]] = []
    for question in draw.choices(QUESTIONS, k=count):
        thing = draw.choice(THINGS.split()[part::2])
        advice = draw.choice(ADVICE).format(thing)
        kind, rude = (draw.choice(manner).format(advice) for manner in (KIND, RUDE))
        rows.append({"prompt": f"{question.format(thing)}\n", "chosen": kind, "rejected": rude})
    return rows


def write(folder: Path) -> None:
    """Write both as JSON lines: sentences/train.jsonl, pairs/train.jsonl, and the evaluation data as dev.jsonl."""
    for name, make, train, dev in (("sentences", sentences, 800, 200), ("pairs", pairs, 400, 100)):
        (folder / name).mkdir(parents=True, exist_ok=True)
        for part, split, count in ((0, "train", train), (1, "dev", dev)):
            lines = [json.dumps(row) + "\n" for row in make(part, count)]
            (folder / name / f"{split}.jsonl").write_text("".join(lines), encoding="utf-8")


if __name__ == "__main__":
    write(Path("data/made"))
