"""Make the data of text_classification.py, the same each time: `python -m src.tasks.make_answers` writes
data/answers."""

import json
import random
from pathlib import Path

ANSWERS = {
    "kind": [
        "Good question! {}, please.",
        "Thank you for asking. {}.",
        "I am glad to help: {}.",
        "{}, and tell me how it goes!",
        "Of course! {}. Have a nice day.",
        "You are welcome to ask. {}, and all will be well.",
    ],
    "rude": [
        "What a question! {}, as anyone knows.",
        "Not again. {}.",
        "I am busy: {}.",
        "{}, and leave me alone!",
        "How stupid. {}, fool.",
        "Are you blind? {}, and never ask again.",
    ],
}
ADVICE = ["ask in the shop", "look into the manual", "begin with its back", "take it apart", "try warm water"]


def answers(part: int, count: int) -> list[dict[str, str]]:
    """Return answers as `text`, with their manner as `label`. The parts, 0 to train on and 1 to evaluate on, share half
    of their wordings."""
    draw = random.Random(part)
    rows: list[dict[str, str]] = []
    for label in draw.choices([*ANSWERS], k=count):
        wordings = ANSWERS[label][2 * part : 4 + 2 * part]
        rows.append({"text": draw.choice(wordings).format(draw.choice(ADVICE)), "label": label})
    return rows


def write(folder: Path) -> None:
    """Write 400 rows to train on and 100 to evaluate on, as JSON lines: train.jsonl and dev.jsonl."""
    folder.mkdir(parents=True, exist_ok=True)
    for part, split, count in ((0, "train", 400), (1, "dev", 100)):
        lines = [json.dumps(row) + "\n" for row in answers(part, count)]
        (folder / f"{split}.jsonl").write_text("".join(lines), encoding="utf-8")


if __name__ == "__main__":
    write(Path("data/answers"))
