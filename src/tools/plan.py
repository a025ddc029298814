"""Name the command that has taken this one's place."""

from src.config.errors import UserError
from src.distributed.process import exit_codes

if __name__ == "__main__":
    with exit_codes("src.tools.plan"):
        raise UserError("the command is now python -m plan --gpus 1 8 -- SETTINGS")
