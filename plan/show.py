"""The plan as the user sees it: a table, a recommendation and plan.json."""

import json
import shlex
from collections.abc import Callable
from dataclasses import asdict
from itertools import count
from operator import itemgetter
from pathlib import Path
from typing import Any

import pandas as pd

from plan.estimate import seconds_of
from plan.measure import highest, launcher_arguments
from plan.search import Row
from src.config.config import Config
from src.config.errors import as_user_error
from src.config.terminal import BIN

GB = 1e9
FORMATS: dict[str, Callable[[float], str]] = {
    "GB": "{:,.1f}".format,
    "s/step": "{:,.3f}".format,
    "tok/s/GPU": "{:,.0f}".format,
    "MFU": "{:.1%}".format,
    "time": lambda hours: f"{hours:,.1f} h" if hours >= 1 else f"{hours * 60:.1f} min",
    "cost": "${:,.2f}".format,
}
"""How the table formats fractional numbers, by column."""


def line(row: Row, config: Config) -> dict[str, Any]:
    """Return a line of the table: the needs of the row's run by column, `time` in hours; fewer if it can't be run."""
    measured, gpu, gpus = row.measured, row.setup.gpu, row.setup.gpus
    shown: dict[str, Any] = {"GPUs": gpus, "yaml": row.setup.name}
    if not measured:
        return shown
    seconds = seconds_of(measured, gpu, gpus, getattr(config, "compile", False))
    hours = seconds.step * measured.total_steps / 3600
    return shown | {
        "GB": highest(measured.memory) / GB,
        "micro": measured.micro_batch,
        "most": measured.largest,
        "s/step": seconds.step,
        "tok/s/GPU": measured.tokens / seconds.step / gpus,
        "MFU": measured.model_flops / seconds.step / gpus / gpu.peak("fp16"),
        "time": hours,
        "cost": hours * gpus * gpu.price_usd_hour,
        "limit": seconds.limit if row.is_fitting else "memory",
    }


def obstacle(row: Row) -> str:
    """Return why the row's run can't be run, or by how much it doesn't fit; empty if it fits."""
    if not row.measured or row.is_fitting:
        return row.reason
    phase, (needed, _) = max(row.measured.memory.items(), key=itemgetter(1))
    excess = (needed - row.setup.gpu.capacity) / GB
    return f"does not fit: {f'{excess:,.1f} GB over in the {phase}' if excess > 0 else 'fragmentation'}"


def table(rows: list[Row], config: Config) -> str:
    """Return the optimizations, a line for each row that was measured, and the reasons why others can't be run or don't
    fit."""
    measured = [row for row in rows if row.measured]
    parts = [*dict.fromkeys(name for row in rows if row.measured for name in row.measured.optimizations)]
    if measured:
        lines = pd.DataFrame([line(row, config) for row in measured])
        lines = lines.loc[:, (lines != 0).any()]  # images have no tokens, and a GPU may have no price
        parts.append(lines.to_string(index=False, header=[*lines], formatters=FORMATS))
    parts += [f"{row.setup.gpus} {row.setup.name}: {why}" for row in rows if (why := obstacle(row))]
    return "\n".join(parts)


def recommendation(rows: list[Row], config: Config) -> str:
    """Return the command of the row that fits and takes the fewest GPU hours, and its needs."""
    fitting = [row for row in rows if row.measured and row.is_fitting]
    row = min(fitting, key=lambda row: line(row, config)["time"] * row.setup.gpus, default=None)
    if not row or not row.measured:
        return "nothing fits: try --activation_checkpointing=true, LoRA, shorter sequences, more GPUs or larger ones"
    setup, found = row.setup, line(row, config)
    command = f"{BIN}accelerate launch {shlex.join(launcher_arguments(setup))} "
    if setup.gpus > setup.gpu.gpus_per_machine:
        command += "--machine_rank=… --main_process_ip=… "
    command += f"train.py {shlex.join(setup.arguments)}"
    if row.measured.micro_batch != config.forward_batch_size(setup.gpus // setup.cp_size):
        command += f" --micro_batch_size={row.measured.micro_batch}"
    takes = (f"{FORMATS[name](found[name])}, " for name in ("time", "cost") if found[name])
    spare = f"{setup.gpu.capacity / GB - found['GB']:,.1f} GB to spare"
    return f"cheapest that fits: {''.join(takes)}{spare}\n  {command}"


def write(rows: list[Row], config: Config, output: Path) -> Path:
    """Write plan.json into a new folder, and return the folder."""
    names = (output / (config.run_name + (f"-{number}" if number else "")) for number in count())
    folder = next(name for name in names if not name.exists())
    with as_user_error(f"--output {output}: cannot be written, ", OSError):
        folder.mkdir(parents=True)
    content = [asdict(row) | {"is_fitting": row.is_fitting, "line": line(row, config)} for row in rows]
    (folder / "plan.json").write_text(json.dumps(content, indent=1, default=vars))
    return folder
