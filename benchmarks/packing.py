"""How much faster do packed documents train than padded ones? Instructions of very different lengths, on the CPU.

    python -m benchmarks.packing

Ours is train.py under `accelerate launch` with packing, theirs the `Trainer` of transformers with batches padded to
their longest document: in random order, as it does by default, and with train_sampling_strategy="group_by_length",
which is the best that takes no more than a setting.

The data: 500 prompts with completions, whose lengths together are log-normal as those of instruction data are, with
a median of 60 bytes, sigma 1 (a mean of about 95, 95% below 310), cut at 510. A token is a byte. The model: a Llama of
3.7 million parameters. Each side trains an epoch that is not counted, then one in each round, in turn: see
benchmarks/transformer.py, also for what a speed is.

Equal work: the same documents, each once per epoch, of which the completions are learnt; the same number of optimizer
steps (ours with 4 sequences of 512, theirs with as many documents as make the same number of steps: about as many
tokens); real tokens, those that are followed by another of their document, and targets are counted on both sides, and
must be the same; so must the model's config, the threads and the precision (bf16, by autocast). The loss per document
is the same: with the initial weights, that of each of about 50 documents, packed and through our model, is within 1e-4
of that padded and through transformers' own, in fp32; this ends with an error where it is not.

Where the time goes: on padding, in the padded batches, three quarters of which it is in random order. Trainer's sorting
by length leaves 40%: it sorts a quarter of these data at a time (50 batches, where there are more), and lengths differ
most at the long end; its batches then hold documents of about the same length, which random order and packing don't.
Ours has a few percent of padding at most and computes logits only where there is a target, but its attention computes
whole squares of 512 x 512 under a mask, where a document needs only its own; that share is larger the narrower the
model.
"""

import json
import math
import random
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import pairs
from benchmarks.llama import WEIGHT_DECAY, counting_collator, new_llama, record
from benchmarks.pairs import Comparison, in_turn
from benchmarks.transformer import LR, generated
from benchmarks.turns import CONTEXT, CORES, SEED, launch, sides
from src.data.byte_tokenizer import byte_tokenizer

DOCUMENTS, MEDIAN, SIGMA, LENGTH = 500, 60, 1.0, 512
BATCH = 4
"""Ours: sequences per step."""
ROUNDS = 3
CHECKED = 48
"""Documents whose losses are compared."""
PRECISION = "bf16"
SHAPE = {
    "hidden_size": 384,
    "intermediate_size": 1024,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 6,
}


# -------------------------------------------------------------------------------------------------------------- data
def prepare(folder: Path) -> None:
    """Writes rows of prompt and completion; a few of them also to evaluate on, as ours does at the end."""
    source = random.Random(SEED)
    rows = []
    for _ in range(DOCUMENTS):
        size = min(max(round(source.lognormvariate(math.log(MEDIAN), SIGMA)), 8), LENGTH - 2)
        text, cut = generated(size, source), source.randint(2, size - 2)
        rows.append(json.dumps({"prompt": text[:cut], "completion": text[cut:]}) + "\n")
    (folder / "data").mkdir()
    (folder / "data" / "train.jsonl").write_text("".join(rows))
    (folder / "data" / "validation.jsonl").write_text("".join(rows[:8]))


def tokenised(folder: Path) -> list[dict[str, list[int]]]:
    """The documents as Trainer reads them: the labels are not shifted."""
    tokenizer = byte_tokenizer()
    documents = []
    for row in map(json.loads, (folder / "data" / "train.jsonl").read_text().splitlines()):
        prompt = tokenizer(row["prompt"])["input_ids"]
        completion = [*tokenizer(row["completion"], add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
        documents.append({"input_ids": prompt + completion, "labels": [-100] * len(prompt) + completion})
    return documents


# -------------------------------------------------------------------------------------------------------------- ours
def settings(folder: Path) -> dict[str, Any]:
    """Of train.py."""
    return {
        "epochs": 1 + ROUNDS,
        "global_batch_size": BATCH,
        "task.name": "causal_lm",
        "task.dataset": folder / "data",
        "task.sequence_length": LENGTH,
        "task.packing": True,
        "task.architecture.model_type": "llama",
        **{f"task.architecture.{name}": value for name, value in SHAPE.items()},
        "optim.lr": LR,
        "optim.weight_decay": WEIGHT_DECAY,
        "optim.schedule": "constant",
        "optim.warmup_steps": 0,
    }


def train_packed(steps: int, folder: Path) -> None:
    every = {"log_every": steps, "eval_every": (1 + ROUNDS) * steps}
    summary = launch(settings(folder.parent) | every, PRECISION, folder)
    epochs, data = 1 + ROUNDS, summary["data"]["train"]
    assert (summary["epoch"], data["truncated"]) == (epochs, 0)
    work = {
        "parameters": summary["trained_parameters"],
        "steps": summary["step"],
        "tokens": epochs * data["tokens"],
        "targets": epochs * data["targets"],
        "device": summary["device"],
        "precision": summary["precision"],
    }
    (folder / "work.json").write_text(json.dumps(work))


# ------------------------------------------------------------------------------------------------------------ theirs
def train_padded(steps: int, strategy: str, folder: Path) -> None:
    import torch
    from transformers import (
        Trainer,
        TrainerCallback,
        TrainingArguments,
        set_seed,
    )

    class Record(TrainerCallback):
        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
            if "loss" in logs:
                record(folder, logs["loss"])

    torch.set_num_threads(CORES)
    set_seed(SEED)
    documents: Any = tokenised(folder.parent)
    arguments = TrainingArguments(
        output_dir=str(folder / "trainer"),
        use_cpu=True,
        bf16=PRECISION == "bf16",
        per_device_train_batch_size=-(-len(documents) // steps),
        train_sampling_strategy=strategy,
        num_train_epochs=1 + ROUNDS,
        optim="adamw_torch_fused",
        learning_rate=LR,
        weight_decay=WEIGHT_DECAY,
        lr_scheduler_type="constant",
        max_grad_norm=0,
        logging_strategy="epoch",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        seed=SEED,
    )
    model, collator = new_llama(SHAPE, LENGTH), counting_collator()
    trainer = Trainer(
        model,
        arguments,
        data_collator=collator,
        train_dataset=documents,
        processing_class=byte_tokenizer(),
        callbacks=[Record()],
    )
    trainer.train()
    work = {
        "parameters": sum(p.numel() for p in model.parameters() if p.requires_grad),
        "steps": trainer.state.global_step,
        "tokens": collator.tokens,
        "targets": collator.targets,
        "device": trainer.accelerator.device.type,
        "precision": trainer.accelerator.mixed_precision.replace("no", "fp32"),
    }
    (folder / "work.json").write_text(json.dumps(work))


# ----------------------------------------------------------------------------------------------------------- compare
def examine(folder: Path) -> None:
    """Compares the losses of documents, packed through our model and padded through transformers' own, with the same
    weights, and writes how many steps ours makes of an epoch."""
    import torch
    from torch.nn.functional import cross_entropy
    from torch.nn.utils.rnn import pad_sequence

    from src.config import load_config

    task: Any = load_config([f"--{name}={value}" for name, value in settings(folder).items()]).task
    dataset, _ = task.build_datasets()
    torch.set_num_threads(CORES)
    torch.manual_seed(SEED)
    model = task.build_model().eval()
    documents = {tuple(document["input_ids"]): document["labels"] for document in tokenised(folder)}
    losses: dict[tuple[int, ...], float] = {}
    with torch.no_grad():
        order = torch.randperm(len(dataset)).tolist()  # long documents come first
        while len(losses) < CHECKED:
            (pieces,) = dataset.__getitems__([order.pop()])
            batch = task.collate([pieces])
            start = 0
            for piece in pieces:
                end = start + len(piece["input_ids"])
                here = (batch["index"] >= start) & (batch["index"] < end)
                part = {"index": batch["index"][here], "targets": batch["targets"][here]}
                loss = model(batch["input_ids"], batch["position_ids"], **part)
                document = (*piece["input_ids"].tolist(), int(piece["labels"][-1]))
                losses[document] = loss.item()
                start = end
        ids = pad_sequence([torch.tensor(of) for of in losses], batch_first=True, padding_value=0)
        labels = pad_sequence([torch.tensor(documents[of]) for of in losses], batch_first=True, padding_value=-100)
        mask = pad_sequence([torch.ones(len(of)) for of in losses], batch_first=True)
        logits = model.hf(input_ids=ids, attention_mask=mask).logits[:, :-1]
        padded = cross_entropy(logits.transpose(1, 2), labels[:, 1:], reduction="none").sum(1).tolist()
    worst = max(abs(a / b - 1) for a, b in zip(losses.values(), padded, strict=True))
    assert worst < 1e-4, f"the loss of a document is off by {worst:.1e}"
    facts = {"documents": len(losses), "difference": worst, "steps": -(-len(dataset) // BATCH)}
    (folder / "facts.json").write_text(json.dumps(facts | dataset.describe(LENGTH)))


def measure(data_dir: str) -> list[Comparison]:
    """
    Args:
        data_dir: not used: the text is generated.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        prepare(folder)
        examination = CONTEXT.Process(target=examine, args=(folder,))
        examination.start()
        examination.join()
        assert examination.exitcode == 0
        facts = json.loads((folder / "facts.json").read_text())
        trainings: dict[str, Callable[[Path], None]] = {
            "packed": partial(train_packed, facts["steps"]),
            "padded": partial(train_padded, facts["steps"], "random"),
            "grouped": partial(train_padded, facts["steps"], "group_by_length"),
        }
        with sides(trainings, folder) as started:
            seconds = in_turn(ROUNDS, *(side.turn for side in started))
            did = [side.finish() for side in started]
    for side, work in zip(trainings, did, strict=True):
        assert work == did[0], f"not the same work: packed {did[0]}, {side} {work}"
    print(
        f"{did[0]['parameters']:,} parameters, {DOCUMENTS} documents, {facts['tokens']:,} real tokens, "
        f"{facts['targets']:,} targets; packed: {facts['steps']} steps, {facts['padding']:.1%} padding; "
        f"losses of {facts['documents']} documents: relative difference up to {facts['difference']:.1e}"
    )
    ours, padded, grouped = ([facts["tokens"] / s for s in of_side] for of_side in seconds)
    unit = "real tokens/s"
    return [
        Comparison("packed, Trainer padded", unit, ours, padded, 2.5, is_gain=True, is_speed=True),
        Comparison("packed, Trainer grouped by length", unit, ours, grouped, 1.0, is_gain=True, is_speed=True),
    ]


if __name__ == "__main__":
    pairs.main(measure, __doc__)
