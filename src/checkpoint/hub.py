"""What the Hugging Face Hub shows of a model: a card that says how it came about, and the upload."""

import sys
from pathlib import Path

from huggingface_hub import HfApi, ModelCard, ModelCardData, constants

from src.config.config import Config
from src.config.errors import cause
from src.config.settings import write_yaml
from src.config.terminal import say


def write_card(config: Config, metrics: dict[str, float], folder: Path) -> None:
    """Write README.md, the card of each model in this folder, with the metrics of its weights."""
    task = config.task
    settings = write_yaml(config.model_dump(mode="json", exclude={"wandb", "output_dir"}))
    rows = "\n".join(f"| {name} | {value:.6g} |" for name, value in metrics.items() if isinstance(value, int | float))
    text = (
        f"# {config.run_name}\n\nTrained by `train.py` as `{task.name}`.\n\n"
        f"## Results\n\nOn the evaluation data, at the end:\n\n| metric | value |\n|---|---|\n{rows}\n\n"
        f"## Settings\n\nThe data are named under `task`.\n\n```yaml\n{settings}```\n"
    )
    for part, fields in task.cards().items():
        metadata = ModelCardData(**{"tags": [task.name], **fields}).to_yaml()
        ModelCard(f"---\n{metadata}\n---\n\n{text}").save(folder / part / "README.md")


def push_to_hub(config: Config) -> None:
    """Upload the exported folder to config.push_to_hub, without the further models in it, which need repositories of
    their own; exit with code 1 if that fails: all else is saved."""
    folder, repository = config.folder / "model", config.push_to_hub
    assert repository
    further = [part for part in config.task.cards() if part]
    excluded = [f"{part}/*" for part in further]
    constants.HF_HUB_OFFLINE = False  # set if the Hub was away at the start, and it may be back
    try:
        api = HfApi()
        api.create_repo(repository, private=True, exist_ok=True)
        api.upload_folder(
            repo_id=repository, folder_path=folder, commit_message=config.run_name, ignore_patterns=excluded
        )
    except Exception as error:  # from the Hub, its client or the network: in any case, the run is saved
        options = "".join(f" --exclude '{pattern}'" for pattern in excluded)
        hint = f"the run is complete, upload its model with `hf upload {repository} {folder} --private{options}`"
        sys.exit(f"train.py: push_to_hub={repository}: {cause(error)}; {hint}")
    say(f"  Hub        {repository}")
    for part in further:
        command = f"hf upload {repository}-{part} {folder / part} --private"
        say(f"             without {part}, which `{command}` uploads")
