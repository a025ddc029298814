"""A run that was killed goes on exactly: losses, record and final weights are those of a run in one piece."""

import itertools
import shutil
from pathlib import Path

import pytest
import torch

from src.checkpoint import resume
from src.config import config_from
from tests import tiny
from tests.conftest import Launch, Run
from tests.faults.runs import (
    EACH_STEP,
    INJECT,
    SHORT,
    Started,
    Whole,
    assert_same_run,
    checkpoints,
    curve,
    cut_back,
    lines,
    weights,
)

Arguments = tuple[str, ...]


@pytest.fixture(scope="module")
def transformer(tmp_path_factory: pytest.TempPathFactory) -> Arguments:
    """With dropout, accumulation and packing."""
    folder = tmp_path_factory.mktemp("tiny")
    model, data = tiny.llama(folder / "llama"), tiny.questions(folder / "questions.jsonl", rows=400)
    return (
        "--task.name=causal_lm", f"--task.model={model}", f"--task.dataset={data}", "--task.sequence_length=64",
        "--task.packing=true", "--task.dropout=0.1", "--global_batch_size=8", "--micro_batch_size=2", *SHORT,
        "--log_every=3",
    )  # fmt: skip


def killed_and_resumed(launch: Launch, yaml: str, arguments: Arguments, folder: Path) -> Run:
    """Killed when the checkpoint of step 8 and records up to step 12 are there, and launched again as it was."""
    with Started(yaml, *arguments, folder=folder) as started:
        started.wait_for("step     12/").wait_until(lambda: 8 in checkpoints(folder)).kill_all()
    run = launch(yaml, *arguments, folder=folder).succeeded()
    assert any("after step 8, from" in line for line in lines(run, "resume"))
    return run


@pytest.mark.parametrize("yaml", ["cpu", "ddp", "fsdp"])
def test_a_killed_transformer_goes_on_to_the_last_bit(
    launch: Launch, whole: Whole, transformer: Arguments, tmp_path: Path, yaml: str
) -> None:
    """Tried without: restoring the random numbers (dropout), the optimizer, what was summed up since the last record;
    cutting the order of the epoch and the record off where the checkpoint was made."""
    run = killed_and_resumed(launch, yaml, transformer, tmp_path / "run")
    assert_same_run(run, whole(yaml, *transformer))


def test_a_killed_cnn_goes_on_to_the_last_bit(launch: Launch, whole: Whole, tmp_path: Path) -> None:
    """With a process that loads data. (Under DDP and FSDP: test_killed.py.) Tried as above."""
    run = killed_and_resumed(launch, "cpu", (*SHORT, "--num_workers=1"), tmp_path / "run")
    assert_same_run(run, whole("cpu", *EACH_STEP))


SMOOTH = ("--task.dropout=0", "--optim.lr=1e-4", *SHORT, "--checkpoint.keep_last=9")
EVERY_STRATEGY = [("cpu", 1), ("ddp", 2), ("fsdp", 2), ("fsdp", 4), ("fsdp_offload", 2)]


@pytest.mark.slow
@pytest.mark.xdist_group("strategies")
@pytest.mark.parametrize(("origin", "to"), list(itertools.permutations(EVERY_STRATEGY, 2)))
def test_saved_under_any_strategy_and_resumed_under_any_other(
    launch: Launch, whole: Whole, origin: tuple[str, int], to: tuple[str, int]
) -> None:
    """Tried without taking shards apart anew: reading fails. Tried with a checkpoint of another seed: losses differ."""
    saved = whole(origin[0], *SMOOTH, processes=origin[1])
    source = saved.folder / "checkpoints" / "step_00000016"
    run = launch(to[0], *SMOOTH, f"--resume={source}", processes=to[1]).succeeded()
    alone = whole("cpu", *SMOOTH, processes=1)
    assert run.records[0]["step"] == 17
    assert run.losses == pytest.approx(alone.losses[16:], rel=1e-6)
    assert run.summary["eval/loss"] == pytest.approx(alone.summary["eval/loss"], rel=1e-6)
    assert f"saved under {saved.summary['strategy']} x {origin[1]}" in run.stdout
    assert norms(run) == pytest.approx(norms(alone), rel=1e-5)


def norms(run: Run) -> list[float]:
    return [weight.double().norm().item() for _, weight in sorted(weights(run).items())]


@pytest.mark.parametrize("yaml", ["cpu", "ddp", "fsdp", "fsdp_grad_op"])
def test_at_the_end_of_an_epoch(launch: Launch, whole: Whole, tmp_path: Path, yaml: str) -> None:
    """An epoch has 23 steps, and at its end there is an evaluation, which comes before the save: it is not made again.
    Tried without `step > progress.evaluated`: the record has it twice."""
    expected = whole(yaml, *EACH_STEP)
    run = launch(yaml, *SHORT, folder=cut_back(expected, tmp_path / "run", 23)).succeeded()
    assert "after step 23, from" in run.stdout
    assert_same_run(run, expected)


def test_a_longer_run_goes_on_from_the_end(launch: Launch, tmp_path: Path) -> None:
    """With the records of the longer run, but for the evaluation at the end of the shorter. Tried without restoring
    what was summed up: the first record after step 18 is of fewer steps."""
    arguments = (*SHORT, "--log_every=4")
    whole = launch("cpu", *arguments).succeeded()
    shorter = launch("cpu", *arguments, "--max_steps=18", folder=tmp_path / "run").succeeded()
    assert (shorter.summary["step"], (shorter.folder / "model").is_dir()) == (18, True)
    longer = launch("cpu", *arguments, folder=tmp_path / "run").succeeded()
    assert "changed since: max_steps 18 -> 30" in longer.stdout
    assert [record for record in curve(longer) if record["step"] != 18] == curve(whole)
    assert all(torch.equal(weight, weights(whole)[name]) for name, weight in weights(longer).items())


def test_a_finished_run_is_left_alone(launch: Launch, whole: Whole) -> None:
    """Tried without: it is evaluated and exported again."""
    finished = whole("ddp", *EACH_STEP)
    before = {path: path.stat().st_mtime_ns for path in finished.folder.rglob("*")}
    again = launch("ddp", *EACH_STEP, folder=finished.folder).succeeded()
    assert again.stdout.splitlines()[-1].endswith("finished: nothing to do; more --epochs or --max_steps go on")
    assert {path: path.stat().st_mtime_ns for path in finished.folder.rglob("*")} == before


def test_changed_settings_are_listed_in_one_line_and_refused_unless_asked_for(
    launch: Launch, whole: Whole, tmp_path: Path
) -> None:
    """Tried without refusing: it trains on."""
    folder = cut_back(whole("cpu", *EACH_STEP), tmp_path / "run", 24)
    changed = (*SHORT, "--optim.lr=0.001", "--global_batch_size=32", "--micro_batch_size=16", "--wandb.tags=[x]")
    refused = launch("cpu", *changed, folder=folder)
    assert refused.exit_code != 0
    (line,) = refused.messages
    assert "global_batch_size 64 -> 32, optim.lr 0.003 -> 0.001; set them back" in line
    asked = launch("cpu", *changed, "--checkpoint.accept_changes=true", folder=folder).succeeded()
    assert "changed since: global_batch_size 64 -> 32, optim.lr 0.003 -> 0.001" in asked.stdout
    assert [record["step"] for record in asked.records if "train/loss" in record] == list(range(1, 31))


def test_a_checkpoint_of_another_run_starts_a_branch(launch: Launch, whole: Whole) -> None:
    """With a record and a W&B run of its own; the run that it comes from stays as it is. Tried without comparing
    with the newest checkpoint of its own: what came after is overwritten."""
    origin = whole("cpu", *EACH_STEP)
    source = origin.folder / "checkpoints" / "step_00000025"
    before = {path: path.stat().st_mtime_ns for path in origin.folder.rglob("*")}
    branch = launch("cpu", *SHORT, f"--resume={source}", wandb="offline").succeeded()
    assert branch.records[0]["step"] == 26
    assert {path: path.stat().st_mtime_ns for path in origin.folder.rglob("*")} == before
    rewound = launch("cpu", *SHORT, f"--resume={source}", folder=origin.folder)
    assert "whose newest checkpoint is not" in rewound.messages[0]
    absent = launch("cpu", *SHORT, f"--resume={source}x")
    assert absent.messages[0].endswith("not a checkpoint; auto, never, or a folder step_…")


def test_never_refuses_a_folder_with_a_run(launch: Launch, whole: Whole) -> None:
    """Tried without: it starts over in there."""
    refused = launch("cpu", *SHORT, "--resume=never", folder=whole("cpu", *EACH_STEP).folder)
    assert "holds a run already" in refused.messages[0]


def test_the_wandb_run_goes_on_too(launch: Launch, tmp_path: Path) -> None:
    """Tried with a new id each time: two runs in W&B."""
    folder = tmp_path / "run"
    launch("cpu", *SHORT, "--max_steps=8", folder=folder, wandb="offline").succeeded()
    first = (folder / "wandb" / "run_id").read_text()
    launch("cpu", *SHORT, folder=folder, wandb="offline").succeeded()
    assert (folder / "wandb" / "run_id").read_text() == first
    assert len(list(folder.glob(f"wandb/offline-run-*-{first}"))) == 2


def test_missing_random_numbers_are_a_loud_warning(launch: Launch, whole: Whole, tmp_path: Path) -> None:
    """Dropout can't go on as it was: said loudly, and the rest goes on. Tried without looking: a traceback."""
    checkpoint = tmp_path / "step_00000025"
    shutil.copytree(whole("cpu", *EACH_STEP).folder / "checkpoints" / "step_00000025", checkpoint)
    (checkpoint / "rng_00001.json").unlink()
    run = launch("cpu", *SHORT, f"--resume={checkpoint}").succeeded()
    assert "WARNING" in run.stdout
    assert "rng_00001.json is missing" in run.stdout


def test_resuming_reads_no_batch_twice(launch: Launch, whole: Whole) -> None:
    """The order is cut off, not replayed: one batch for the epoch's last step, and six to evaluate on. Tried with
    skipping batches instead: 29. Tried without either: it is another batch."""
    origin = whole("cpu", *EACH_STEP)
    source = origin.folder / "checkpoints" / "step_00000022"
    arguments = (*SHORT, f"--resume={source}", "--max_steps=23", "--checkpoint.accept_changes=true")
    run = launch("cpu", *arguments, script=INJECT, FAULT="count batches").succeeded()
    assert "batches made: 7" in run.stdout
    assert curve(run) == [record for record in curve(origin) if record["step"] == 23]


def test_a_branch_goes_on_by_the_same_command(launch: Launch, whole: Whole, tmp_path: Path) -> None:
    """From its own newest checkpoint, and from where it branched off while it has none, which each launch remembers
    for the next. Tried without `config.origin` in config.yaml: the third launch starts over."""
    origin = whole("cpu", *EACH_STEP).folder / "checkpoints" / "step_00000024"
    folder = tmp_path / "run"
    for start, save_every in ((origin, 8), ("auto", 8), ("auto", 2)):
        with Started("cpu", *SHORT, f"--resume={start}", f"--save_every={save_every}", folder=folder) as started:
            started.wait_for(f"after step 24, from {origin}")
            started.wait_until(lambda: save_every == 8 or checkpoints(folder)).kill_all()  # noqa: B023
    again = launch("cpu", *SHORT, f"--resume={origin}", folder=folder).succeeded()
    assert f"from {folder}/checkpoints/step_000000" in again.stdout
    assert [record["step"] for record in again.records if "train/loss" in record] == list(range(25, 31))


def test_a_change_within_a_mapping_is_a_change() -> None:
    """Tried with comparing only what is no mapping."""
    then, now = (
        config_from(
            {"task": {"name": "causal_lm", "architecture": {"model_type": "llama", **more}}, "output_dir": "nowhere"}
        )
        for more in ({"hidden_size": 32}, {"hidden_size": 32, "hidden_act": "relu"})
    )
    assert list(now.changes_since(then.model_dump(mode="json"))[1]) == ["task.architecture"]
    assert now.changes_since(now.model_dump(mode="json")) == ({}, {})


def test_more_steps_taken_than_asked_for_are_named(launch: Launch, whole: Whole) -> None:
    """Tried without: a traceback."""
    source = whole("cpu", *EACH_STEP).folder / "checkpoints" / "step_00000025"
    refused = launch("cpu", *SHORT, f"--resume={source}", "--max_steps=20", "--checkpoint.accept_changes=true")
    assert refused.messages == [f"train.py: {source} has 25 steps already, and epochs=10 and max_steps=20 make 20"]


def test_one_run_is_written_by_one_process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Tried with a lock that can be shared."""
    monkeypatch.setattr(resume, "PATIENCE_SECONDS", 1)
    resume._lock(tmp_path)
    with pytest.raises(ValueError, match="another process writes this run"):
        resume._lock(tmp_path)
