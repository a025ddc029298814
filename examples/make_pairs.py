"""Make the data of dpo.py, the same each time: `python -m examples.make_pairs` writes data/pairs."""

import json
import random
from pathlib import Path

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


def pairs(part: int, count: int) -> list[dict[str, str]]:
    """Return questions as `prompt`, with a kind answer, `chosen`, and a rude one, `rejected`, that give the same
    advice. The parts, 0 to train on and 1 to evaluate on, ask about different things."""
    draw = random.Random(part)
    rows: list[dict[str, str]] = []
    for question in draw.choices(QUESTIONS, k=count):
        thing = draw.choice(THINGS.split()[part::2])
        advice = draw.choice(ADVICE).format(thing)
        kind, rude = (draw.choice(manner).format(advice) for manner in (KIND, RUDE))
        rows.append({"prompt": f"{question.format(thing)}\n", "chosen": kind, "rejected": rude})
    return rows


def write(folder: Path) -> None:
    """Write 400 rows to train on and 100 to evaluate on, as JSON lines: train.jsonl and dev.jsonl."""
    folder.mkdir(parents=True, exist_ok=True)
    for part, split, count in ((0, "train", 400), (1, "dev", 100)):
        lines = [json.dumps(row) + "\n" for row in pairs(part, count)]
        (folder / f"{split}.jsonl").write_text("".join(lines), encoding="utf-8")


if __name__ == "__main__":
    write(Path("data/pairs"))
