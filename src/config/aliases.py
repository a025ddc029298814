"""Translate the settings of HF's Trainer, TRL and axolotl into this project's."""

import json
import re
from pathlib import Path

from src.config.environment import LaunchEnv
from src.config.settings import Values, Written, read_yaml


def translate(values: Values, written: Written) -> tuple[list[str], list[str], list[str]]:
    """Return, as src/config/aliases.yaml has it, a line about each of their settings that the user has given, all of
    the user's settings as arguments of train.py, and further arguments of `accelerate launch`."""
    ours = {name: text if isinstance(text := values[name], str) else json.dumps(text, default=str) for name in written}
    given = "\n".join(2 * [f"{name}={text}" for name, text in sorted(ours.items())])
    hints = []
    for task, table in read_yaml(Path(__file__).with_name("aliases.yaml").read_bytes()).items():
        has_it = f" (--{' or --'.join(task.split())} has it)" * bool(task and "task.name" not in written)
        for names, (says, rules) in table.items():
            for value, becomes in rules.items():
                for match in re.finditer(rf"(?im)^(?:{names})=(?:{value})$", given):
                    name = match[0].partition("=")[0]
                    if ours.pop(name, "null") != "null":  # in a yaml, it may have no value
                        hints += [f"{written[name]}: {says}{has_it}"] * bool(says)
                        for word in f"{task} {becomes}".split():
                            ours.setdefault(*match.expand(word).split("=", 1))
    if (factor := ours.pop("accumulation", "")) and (micro := ours.setdefault("micro_batch_size", "8")).isdigit():
        ours.setdefault("global_batch_size", f"{int(micro) * int(factor) * LaunchEnv().world_size}")
    launch = f"{ours.pop('launch', '')} {ours.pop('precision', '')}".split()
    return hints, [f"--{name}={text}" for name, text in ours.items()], launch
