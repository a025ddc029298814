"""Translate the settings of HF's Trainer, TRL and axolotl into this project's, by the tables in this folder.

A row has a regular expression for their names, what to say and, by regular expressions for their values, what they
become ("" is nothing). The first that matches counts; of two that set the same, the upper one, and what the user has
set in our terms before both. They look at all given settings, sorted, one a line, and once more:
`(?=\\n(?:.*\\n)*use_peft=)` is beside use_peft. `launch` and `precision` are for accelerate launch, whose yamls for
GPUs have bf16; `accumulation` is multiplied into global_batch_size. A table's title names the tasks that have its
settings. Where a name is also ours, only their values are here, or what to add beside theirs, of which nothing is said.
Files are read in the order of their names. One for an optional thing goes with it.
"""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from src.config.environment import LaunchEnv, command_with
from src.config.settings import Values, Written, read_arguments, read_yaml

Check = Callable[[Values, Written, list[str]], Any]
"""Appends a line to the list for each mistake in these settings."""


def in_our_terms(
    values: Values, written: Written, tasks: dict[str, str], misread: list[str], check: Check
) -> list[str] | None:
    """Return a line about each of their settings that the user has given, and the command with ours in their place;
    before them, what could not be read. None if the user has given none of theirs."""
    hints, ours, launch = translate(values, written, tasks)
    if not hints:
        return None
    check(*read_arguments(ours, hints), hints)
    said = "\n".join(hints)
    right = [word for word in ours if word.startswith("--task.name=") or f"\n{word}: " not in said]
    here = "in this project's terms, without what these lines leave out, and with its defaults for the rest:"
    return [*misread, *hints, here, f"  {command_with(right, launch)}"]


def translate(values: Values, written: Written, tasks: dict[str, str]) -> tuple[list[str], list[str], list[str]]:
    """Return a line about each of their settings that the user has given, all of the user's settings as arguments of
    train.py, and further arguments of `accelerate launch`."""
    ours = {name: text if isinstance(text := values[name], str) else json.dumps(text, default=str) for name in written}
    given = "\n".join(2 * [f"{name}={text}" for name, text in sorted(ours.items())])
    hints = []
    files = sorted(Path(__file__).parent.glob("*.yaml"))
    for title, table in [table for file in files for table in read_yaml(file.read_bytes()).items()]:
        having = [word for word in title.split() if word.partition("=")[2] in tasks]
        if title and not having:
            continue  # a copy may lack these tasks
        has_it = f" (--{' or --'.join(having)} has it)" * bool(having and "task.name" not in written)
        for names, (says, rules) in table.items():
            for value, becomes in rules.items():
                for match in re.finditer(rf"(?im)^(?:{names})=(?:{value})$", given):
                    name = match[0].partition("=")[0]
                    if ours.pop(name, "null") != "null":  # in a yaml, it may have no value
                        hints += [f"{written[name]}: {says}{has_it}"] * bool(says)
                        for word in [*having, *becomes.split()]:
                            ours.setdefault(*match.expand(word).split("=", 1))
    if (factor := ours.pop("accumulation", "")) and (micro := ours.setdefault("micro_batch_size", "8")).isdigit():
        ours.setdefault("global_batch_size", f"{int(micro) * int(factor) * LaunchEnv().world_size}")
    launch = f"{ours.pop('launch', '')} {ours.pop('precision', '')}".split()
    return hints, [f"--{name}={text}" for name, text in ours.items()], launch
