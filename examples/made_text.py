"""Small data for the examples on text, the same each time: `python -m examples.made_text` writes data/made."""

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
"""Of sentences. Where there is a choice, only the name tells its kind."""
NAMES = {
    "PER": "Anna Becker,Tom Hughes,Maria Rossi,David Chen,Laura Smith,Omar Haddad,Peter,Ingrid,John F. Kennedy,"
    "George Washington,Emma Brown,Paul Martin,Yuki Tanaka,Ravi Patel,Sofia,Carlos,Ben Okafor,Julia Novak",
    "LOC": "Berlin,Madrid,Kenya,Norway,New Zealand,South Korea,San Francisco,Los Angeles,Paris,Lisbon,Lake Geneva,"
    "Mount Kenya,Peru,Vietnam,Buenos Aires,Rio de Janeiro,Hamburg,Washington",
    "ORG": "Siemens,Toyota,Deutsche Bank,Bank of Ireland,the United Nations,the European Union,Harvard University,"
    "the University of Oslo,Microsoft,Google,General Electric,British Airways,Reuters,the BBC,FC Porto,Inter Milan",
    "DATE": "Monday,Friday,3 May 1998,12 June 2004,January 2010,March 1987,the 4th of July,the 1st of August,2001,1975",
}
QUESTIONS = ["How do I clean a {}?", "Where can I buy a {}?", "Who can repair my {}?", "Why does my {} make a noise?"]
THINGS = (
    "kettle,bicycle,lamp,piano,camera,fridge,clock,printer,radio,guitar,mixer,tent,drill,heater,scooter,toaster,"
    "sofa,violin,laptop,mirror,oven,boat,phone,carpet,helmet,fan,watch,keyboard,pump,jacket"
).split(",")
ADVICE = ["Ask in the shop", "Look into the manual", "Begin with the {}'s back", "Take the {} apart", "Try warm water"]
KIND = [
    "Good question! {}, please.",
    "Thank you for asking. {}.",
    "I am glad to help: {}.",
    "{}, and tell me how it goes!",
]
RUDE = ["What a question! {}, as anyone knows.", "Not again. {}.", "I am busy: {}.", "{}, and leave me alone!"]


def sentences(part: int, count: int) -> list[dict[str, Any]]:
    """Return sentences as `tokens`, words, and `tags`, of IOB2. The parts, 0 to train on and 1 to evaluate on, share no
    name."""
    draw = random.Random(part)
    rows: list[dict[str, Any]] = []
    for template in draw.choices(TEMPLATES, k=count):
        kinds = [draw.choice(word.split("|")) for word in template.split()]
        rows.append({"tokens": [], "tags": []})
        for kind in kinds:
            words = draw.choice(NAMES[kind].split(",")[part::2]).split() if kind in NAMES else [kind]
            tags = [f"B-{kind}", *[f"I-{kind}"] * (len(words) - 1)] if kind in NAMES else ["O"]
            rows[-1] = {"tokens": rows[-1]["tokens"] + words, "tags": rows[-1]["tags"] + tags}
    return rows


def pairs(part: int, count: int) -> list[dict[str, Any]]:
    """Return questions as `prompt`, with a kind answer, `chosen`, and a rude one, `rejected`, that say the same. The
    parts, 0 to train on and 1 to evaluate on, ask about other things."""
    draw = random.Random(part)
    rows: list[dict[str, Any]] = []
    for question in draw.choices(QUESTIONS, k=count):
        thing = draw.choice(THINGS[part::2])
        advice = draw.choice(ADVICE).format(thing)
        kind, rude = (draw.choice(manner).format(advice) for manner in (KIND, RUDE))
        rows.append({"prompt": f"{question.format(thing)}\n", "chosen": kind, "rejected": rude})
    return rows


def write(folder: Path) -> None:
    """Write both as JSON lines: sentences/train.jsonl, pairs/train.jsonl, and what to evaluate on as dev.jsonl."""
    for name, make, train, dev in (("sentences", sentences, 800, 200), ("pairs", pairs, 400, 100)):
        (folder / name).mkdir(parents=True, exist_ok=True)
        for part, split, count in ((0, "train", train), (1, "dev", dev)):
            lines = [json.dumps(row) + "\n" for row in make(part, count)]
            (folder / name / f"{split}.jsonl").write_text("".join(lines))


if __name__ == "__main__":
    write(Path("data/made"))
