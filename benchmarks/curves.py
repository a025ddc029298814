"""Print the table of losses that README.md shows: the same run under four yamls.

    python -m benchmarks.curves

A Llama of 0.2 million parameters learns the chats of examples/chats.jsonl, packed, from the answers alone: 50 steps of
8 sequences in fp32, without dropout. The largest difference is over all 50 losses, to those of one process. A minute on
two cores.
"""

import tempfile
from argparse import ArgumentParser
from pathlib import Path

from benchmarks.runs import NEVER, PROJECT, Side, train_py

STEPS = 50
SHOWN = (1, 25, 50)
CURVES: dict[str, tuple[str, int]] = {
    "one process": ("cpu", 1),
    "DDP, 2 processes": ("ddp", 2),
    "FSDP, 4 processes": ("fsdp", 4),
    "FSDP, each sequence over 2": ("fsdp_cp", 2),
}
"""The yaml and the number of processes of each column."""
SETTINGS = {
    "task.name": "causal_lm", "task.dataset": PROJECT / "examples" / "chats.jsonl", "task.sequence_length": 512,
    "task.architecture": "{model_type: llama, hidden_size: 64, intermediate_size: 256, num_hidden_layers: 3,"
    " num_attention_heads: 4, num_key_value_heads: 2}",
    "global_batch_size": 8, "optim.lr": 3e-3,
    "max_steps": STEPS, "log_every": 1, "eval_every": NEVER, "save_every": NEVER,
}  # fmt: skip


def table(curves: dict[str, list[float]]) -> str:
    """Return the table in Markdown, from each column's losses."""
    first = next(iter(curves.values()))
    rows = [["loss of step", *curves], ["---"] * (1 + len(curves))]
    rows += [[str(step), *(f"{losses[step - 1]:.4f}" for losses in curves.values())] for step in SHOWN]
    differences = [max(abs(a - b) for a, b in zip(losses, first, strict=True)) for losses in curves.values()]
    rows.append([f"largest difference in {STEPS} steps", "", *(f"{difference:.0e}" for difference in differences[1:])])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def main() -> None:
    ArgumentParser("python -m benchmarks.curves", description="Print the README's table of losses.").parse_args()
    curves = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, (yaml, processes) in CURVES.items():
            curves[name] = Side(train_py(SETTINGS, yaml, processes), Path(folder, yaml)).run().values
    print(table(curves))


if __name__ == "__main__":
    main()
