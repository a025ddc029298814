"""How much faster do packed documents train than padded ones? Instructions of very different lengths, on the CPU.

    python -m benchmarks.packing

Ours is train.py under `accelerate launch` with packing, theirs the `Trainer` of transformers with batches padded to
their longest document: in random order, as it does by default, and with train_sampling_strategy="group_by_length",
which is the best that takes no more than a setting. They take turns, an epoch each, in bf16 with two threads.

The data: 500 prompts with completions, log-normal in length, with a median of 60 bytes, cut at 510; a token is a byte.
The model: a Llama of 3.7 million parameters. Equal work, asserted: the same documents, each once per epoch, of which
the completions are learnt; optimizer steps (ours with 4 sequences of 512, theirs with as many documents as make as many
steps), real tokens, those that are followed by another of their document, targets, parameters and precision. That a
document's loss is the same packed and padded is asserted in tests/text/test_language_model.py.
"""

from pathlib import Path

from benchmarks import pairs
from benchmarks.language import Plan, assert_same_work, train_data, work, write_instructions
from benchmarks.pairs import Comparison
from benchmarks.runs import CORES, Side, arguments, take_turns, train_py
from src.checkpoint.folder import run_settings

DOCUMENTS, MEDIAN, LENGTH, BATCH, ROUNDS = 500, 60, 512, 4, 3
SHAPE = {
    "hidden_size": 384, "intermediate_size": 1024, "num_hidden_layers": 2, "num_attention_heads": 6,
    "num_key_value_heads": 6,
}  # fmt: skip


def measure(_: Path, folder: Path) -> list[Comparison]:
    write_instructions(folder, DOCUMENTS, MEDIAN, LENGTH)
    settings = Plan(SHAPE, LENGTH, BATCH, epochs=1 + ROUNDS).settings(folder / "data")
    task = run_settings(arguments(settings | {"output_dir": folder / "none"})).task
    steps = -(-len(task.build_datasets()[0]) // BATCH)
    plan = Plan(SHAPE, LENGTH, BATCH, epochs=1 + ROUNDS, micro=-(-DOCUMENTS // steps))
    every = {"log_every": steps, "eval_every": (1 + ROUNDS) * steps}
    ours = Side(train_py(settings | every, precision="bf16"), folder / "packed", CORES)
    padded, grouped = (
        Side(plan.peer(f"language_peers.{strategy}", folder), folder / strategy, CORES)
        for strategy in ("random", "group_by_length")
    )
    turns = take_turns(ROUNDS, (ours, padded, grouped))
    data, done = train_data(ours), [work(side) for side in (padded, grouped)]
    padding = [1 - theirs["tokens"] / theirs.pop("padded_tokens") for theirs in done]
    expected = work(ours) | {"targets": (1 + ROUNDS) * data["targets"]}
    assert data["truncated"] == 0
    assert_same_work({"packed": expected, "padded": done[0], "grouped": done[1]})
    print(f"{expected}; padding {1 - data['tokens'] / (data['sequences'] * LENGTH):.1%}, theirs {padding}")
    speeds, unit = [[data["tokens"] / s for s in of_side] for of_side in turns], "real tokens/s"
    return [
        Comparison("packed, Trainer padded", unit, speeds[0], speeds[1], 2.5, is_gain=True, is_speed=True),
        Comparison("packed, Trainer grouped by length", unit, speeds[0], speeds[2], 1.0, is_gain=True, is_speed=True),
    ]


if __name__ == "__main__":
    pairs.main(measure, __doc__)
