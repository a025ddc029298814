"""Models and data by their name on the Hub, and the way there; nothing is asked of it."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest

from src.checkpoint.export import push_to_hub
from src.tasks.text.causal_lm import CausalLM
from src.tasks.text.meta_loading import weight_files
from tests.launching import PROJECT, clean_environment, mistakes
from tests.text.hub import serving
from train import run_settings


def test_a_model_is_found_by_its_name_and_revision_where_it_was_fetched_to(
    models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Offline. Its card names it, and the data."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    fetched = tmp_path / "models--team--model"
    shutil.copytree(models / "llama", fetched / "snapshots" / "0123abcd")
    (fetched / "refs").mkdir()
    (fetched / "refs" / "v2").write_text("0123abcd")
    task = CausalLM(model="team/model", revision="v2", dataset="team/data", sequence_length=16)
    here = CausalLM(model=f"{models}/llama", sequence_length=16)
    named, local = (model.state_dict() for model in (task.build_model(), here.build_model()))
    assert all(weight.equal(local[name]) for name, weight in named.items())
    assert weight_files("team/model", "v2") == [str(fetched / "snapshots/0123abcd/model.safetensors")]
    assert {"base_model": "team/model", "datasets": ["team/data"]}.items() <= task._cards()[""].items()
    assert "datasets" not in task.model_copy(update={"dataset": "s3://team/data"})._cards()[""]  # the Hub refuses it


def test_a_dataset_is_read_as_its_files_on_the_hub_say_and_found_by_its_configuration(tmp_path: Path) -> None:
    """In a process of its own, which asks a Hub on this machine. Tried with load_dataset: 2024-01-04 00:00:00."""
    files = {
        "README.md": "---\nconfigs:\n- config_name: small\n  data_files:\n  - split: train\n    path: a.jsonl\n"
        "  - split: test\n    path: b.jsonl\n- config_name: large\n  data_files: c.jsonl\n---\n",
        "a.jsonl": '{"text": "2024-01-04"}\n\n{"text": "01"}\n',
        "b.jsonl": '{"text": "1.10"}\n',
        "c.jsonl": '{"text": "large"}\n',
    }
    for name, content in files.items():
        (tmp_path / "data").mkdir(exist_ok=True)
        (tmp_path / "data" / name).write_text(content)
    code = """
import json, sys
from src.tasks.text.causal_lm import CausalLM
from src.tasks.text.reading import as_text
for dataset in sys.argv[1:]:
    task = CausalLM(dataset=dataset, dataset_config="small")
    print(json.dumps([part["text"][:] for part in task.usable_parts(task.open_rows(), {"text": as_text})]))
"""
    with serving({"team/data": tmp_path / "data"}, tmp_path / "home") as environment:
        run = [sys.executable, "-c", code, "team/data", str(tmp_path / "data")]  # as `hf download` leaves it, too
        printed = subprocess.check_output(run, cwd=PROJECT, env=clean_environment(**environment), text=True)
    assert [*map(json.loads, printed.splitlines())] == [[["2024-01-04", "01"], ["1.10"]]] * 2


# --------------------------------------------------------------------------------------------------------- uploading
@pytest.fixture
def online(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub.constants, "HF_TOKEN_PATH", str(tmp_path / "none"))
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")  # where nobody listens
    monkeypatch.setenv("HF_TOKEN", "dummy")


@pytest.mark.usefixtures("online")
def test_an_upload_that_must_fail_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert mistakes("--push_to_hub=mine") == ["push_to_hub=mine: must be USER/NAME"]
    monkeypatch.delenv("HF_TOKEN")
    assert mistakes("--push_to_hub=me/mine") == ["push_to_hub=me/mine: no credentials; run `hf auth login`"]
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    says = "push_to_hub=me/mine: HF_HUB_OFFLINE is set; unset it, or remove push_to_hub"
    assert mistakes("--push_to_hub=me/mine") == [says]


@pytest.mark.usefixtures("online")
@pytest.mark.parametrize("merge", [False, True])
def test_what_was_exported_is_uploaded_and_a_failure_says_how_to_repeat_it(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], merge: bool
) -> None:
    """Merged weights in a repository of their own: in that of the adapters, nobody would look for them."""
    config = run_settings([
        f"--output_dir={tmp_path}/run", "--push_to_hub=me/other", "--task.name=causal_lm", "--task.lora.r=4",
        f"--task.model={made}/models/llama", f"--task.dataset={made}/questions.jsonl", f"--task.lora.merge={merge}",
    ])  # fmt: skip
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)  # as where it was away at the start
    with pytest.raises(SystemExit) as end:
        push_to_hub(config)
    says = str(end.value.code)  # text: it is printed, and the exit code is 1
    assert says.startswith("train.py: push_to_hub=me/other: ")
    command = f"hf upload me/other {config.folder}/model --private" + " --exclude 'merged/*'" * merge
    assert says.endswith(f"; the run is complete, upload its model with `{command}`")
    assert "\n" not in says
    assert "refused" in says
    asked: list[Any] = []
    monkeypatch.setattr(huggingface_hub.HfApi, "create_repo", lambda _, name, **more: asked.append((name, more)))
    monkeypatch.setattr(huggingface_hub.HfApi, "upload_folder", lambda _, **more: asked.append(more))
    push_to_hub(config)
    assert asked == [
        ("me/other", {"private": True, "exist_ok": True}),
        {"repo_id": "me/other", "folder_path": config.folder / "model", "commit_message": config.run_name}
        | {"ignore_patterns": ["merged/*"] if merge else []},
    ]
    command = f"hf upload me/other-merged {config.folder}/model/merged --private"
    assert capfd.readouterr().out.splitlines() == [
        "  Hub        me/other",
        *[f"             without merged, which `{command}` uploads"] * merge,
    ]
