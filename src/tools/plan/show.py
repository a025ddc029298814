"""The plan as the user sees it: a table, a recommendation, plan.json and a picture."""

import json
import shlex
from collections import defaultdict
from dataclasses import asdict
from itertools import count
from pathlib import Path
from typing import Any

from src.config.config import Config
from src.tools.plan.estimate import Seconds, seconds_of
from src.tools.plan.search import Row, yaml_for
from src.tracking.figures import draw

GB = 1e9
COLUMNS = "{:>4}  {:<13}{:>13} {:>7} {:>8} {:>9} {:>8} {:>5} {:>8} {:>8}  {}"
HEADER = ["GPUs", "yaml", "memory,GB", "of,GB", "micro,most", "step,s", "tok/s/GPU", "MFU", "hours", "cost,$"]


def figures(row: Row, config: Config) -> dict[str, Any]:
    """Return what a row's run takes, by name; nothing if it was not measured."""
    measured, gpu, gpus = row.measured, row.setup.gpu, row.setup.gpus
    if not measured:
        return {}
    is_compiled = False
    is_compiled = config.compile  # room: compile
    seconds = seconds_of(measured, gpu, gpus, is_compiled)
    hours = seconds.step * measured.total_steps / 3600
    peak = gpu.tflops.get("bf16", gpu.tflops["fp32"]) * 1e12
    return {
        **seconds._asdict(),
        "peak_memory": highest_phase(row)[1],
        "tokens_per_second_per_gpu": measured.tokens / seconds.step / gpus,
        "mfu": measured.model_flops / seconds.step / gpus / peak,
        "hours": hours,
        "cost": hours * gpus * (gpu.price_usd_hour or 0),
    }


def highest_phase(row: Row) -> tuple[str, int]:
    """Return the phase that allocates the most memory, and how much."""
    assert row.measured
    return max(((phase, allocated) for phase, (allocated, _) in row.measured.memory.items()), key=lambda pair: pair[1])


def best(rows: list[Row], config: Config) -> Row | None:
    """Return the row that fits and costs least, in GPU hours; None: nothing fits."""
    fitting = [row for row in rows if row.is_fitting]
    return min(fitting, key=lambda row: figures(row, config)["hours"] * row.setup.gpus, default=None)


def limit_of(seconds: Seconds) -> str:
    """Return what a step takes its time for."""
    if seconds.step == seconds.host:
        return "the host"
    return "communication" if seconds.communication > seconds.compute else "computing"


def table(rows: list[Row], config: Config) -> list[str]:
    """Return a line per row."""
    notes = [note for row in rows if row.measured for note in row.measured.notes]
    lines = [*dict.fromkeys(notes), COLUMNS.format(*HEADER, "limited by")]
    for row in rows:
        setup, measured, found = row.setup, row.measured, figures(row, config)
        name = Path(setup.yaml).stem
        if not measured:
            lines.append(f"{setup.gpus:>4}  {name:<13} {row.reason}")
            continue
        limit, seconds = setup.gpu.capacity, Seconds(*[found[field] for field in Seconds._fields])
        says = limit_of(seconds)
        if not row.is_fitting:
            says = f"does not fit: {(found['peak_memory'] - limit) / GB:.1f} GB too much in the {highest_phase(row)[0]}"
        cells = [
            f"{found['peak_memory'] / GB:.1f}",
            f"{limit / GB:.1f}",
            f"{measured.micro_batch},{measured.largest}",
            f"{found['step']:.3g}",
            f"{found['tokens_per_second_per_gpu']:,.0f}",
            f"{found['mfu']:.0%}",
            f"{found['hours']:,.2f}",
            f"{found['cost']:,.2f}",
        ]
        lines.append(COLUMNS.format(setup.gpus, name, *cells, says + (f" ({row.change})" if row.change else "")))
    return lines


def recommendation(rows: list[Row], config: Config) -> str:
    """Return which row to take and its command; or what the run that comes nearest to fitting lacks."""
    row = best(rows, config)
    if not row:
        nearest = min((row for row in rows if row.measured), key=lambda row: highest_phase(row)[1])
        phase, peak = highest_phase(nearest)
        where = f"{nearest.setup.yaml} on {nearest.setup.gpus} needs {peak / GB:.1f} GB in the {phase}"
        return f"nothing fits: {where}; ask for more GPUs, or shorten the sequences"
    assert row.measured
    found, setup = figures(row, config), row.setup
    command = f"accelerate launch --config_file {yaml_for(setup)} --num_processes {setup.gpus} train.py "
    command += shlex.join(setup.arguments)
    if row.measured.micro_batch != config.micro_batch(setup.gpus):
        command += f" --micro_batch_size={row.measured.micro_batch}"
    spare = (setup.gpu.capacity - found["peak_memory"]) / GB
    costs = f"{found['hours']:.2f} h, ${found['cost']:,.2f}, {spare:.1f} GB to spare"
    return f"cheapest that fits: {costs}{', with ' + row.change if row.change else ''}\n  {command}"


def write(rows: list[Row], config: Config, output: Path) -> Path:
    """Write plan.json and plan.svg into a new folder, and return it."""
    names = (output / (config.run_name + (f"-{number}" if number else "")) for number in count())
    folder = next(name for name in names if not name.exists())
    folder.mkdir(parents=True)
    content = [asdict(row) | {"figures": figures(row, config)} for row in rows]
    for entry in content:
        entry["setup"]["gpu"] = entry["setup"]["gpu"].model_dump()
    (folder / "plan.json").write_text(json.dumps(content, indent=1))
    write_pictures(rows, config, folder)  # room: report
    return folder


def write_pictures(rows: list[Row], config: Config, folder: Path) -> None:  # room: report
    """Draw memory and hours over the number of GPUs, a curve for each strategy."""
    curves: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        if row.measured:
            curves[f"{Path(row.setup.yaml).stem} {row.change}"].append(row)
    for name, title, scale in (("peak_memory", "memory of a GPU, GB, by GPUs", GB), ("hours", "hours, by GPUs", 1.0)):
        found: Any = [
            (label, [row.setup.gpus for row in of], [figures(row, config)[name] / scale for row in of])
            for label, of in curves.items()
        ]
        (folder / f"{name}.svg").write_text(draw(title, found, log_base=2))
