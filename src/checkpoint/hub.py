"""Upload the trained model to the Hub: `push_to_hub=USER/NAME`."""

import shlex

from huggingface_hub import HfApi, constants

from src.config.config import Config
from src.config.errors import as_run_error
from src.config.terminal import say


def push_to_hub(config: Config) -> None:
    """Upload the exported model to config.push_to_hub, if that is set, but not further models in its folder, which need
    repositories of their own. Raise a RunError if that fails; the run itself is complete."""
    folder, repository = config.folder / "model", config.push_to_hub
    if not repository:
        return
    excluded = [f"{card.parent.name}/*" for card in folder.glob("*/README.md")]
    command = shlex.join(
        ["hf", "upload", repository, str(folder), "--private", *(f"--exclude={pattern}" for pattern in excluded)]
    )
    constants.HF_HUB_OFFLINE = False  # set if the Hub was unreachable at the start
    with as_run_error(f"push_to_hub={repository}: the run is complete, upload its model with `{command}`: "):
        api = HfApi()
        api.create_repo(repository, private=True, exist_ok=True)
        api.upload_folder(
            repo_id=repository, folder_path=folder, commit_message=config.run_name, ignore_patterns=excluded
        )
    say(f"  Hub        {repository}")
