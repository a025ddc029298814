"""What the Hugging Face Hub shows of a model: a card that says how it came about, and the upload."""

import sys
from pathlib import Path

from huggingface_hub import HfApi, ModelCard, ModelCardData, constants

from src.config.config import Config
from src.config.errors import cause
from src.config.settings import write_yaml
from src.config.terminal import say


def write_card(config: Config, metrics: dict[str, float], folder: Path) -> None:
    """Write README.md, the card of the model in this folder, with the metrics of its weights."""
    task = config.task
    metadata = ModelCardData(**{"tags": [task.name], **task.card()}).to_yaml()
    settings = write_yaml(config.model_dump(mode="json", exclude={"wandb", "output_dir"}))
    rows = "\n".join(f"| {name} | {value:.6g} |" for name, value in metrics.items() if isinstance(value, int | float))
    card = ModelCard(
        f"---\n{metadata}\n---\n\n# {config.run_name}\n\nTrained by `train.py` as `{task.name}`.\n\n"
        f"## Results\n\nOn the evaluation data, at the end:\n\n| metric | value |\n|---|---|\n{rows}\n\n"
        f"## Settings\n\nThe data are named under `task`.\n\n```yaml\n{settings}```\n"
    )
    card.save(folder / "README.md")


def push_to_hub(config: Config) -> None:
    """Upload the exported folder to config.push_to_hub; exit with code 1 if that fails: all else is saved."""
    folder = config.folder / "model"
    assert config.push_to_hub
    constants.HF_HUB_OFFLINE = False  # set if the Hub was away at the start, and it may be back
    try:
        api = HfApi()
        api.create_repo(config.push_to_hub, private=True, exist_ok=True)
        api.upload_folder(repo_id=config.push_to_hub, folder_path=folder, commit_message=config.run_name)
    except Exception as error:  # from the Hub, its client or the network: in any case, the run is saved
        hint = f"the run is complete, upload its model with `hf upload {config.push_to_hub} {folder}`"
        sys.exit(f"train.py: push_to_hub={config.push_to_hub}: {cause(error)}; {hint}")
    say(f"  Hub        {config.push_to_hub}")
