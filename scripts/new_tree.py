"""Write the file tree of the smallest copy into docs/make-it-yours.md: `python scripts/new_tree.py`."""

import ast
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

from rooms import FILES, throw_out

PROJECT = Path(__file__).resolve().parent.parent
WIDTH = 100
BLOCK = re.compile(r"(?<=<!-- smallest tree -->\n```\n).*?(?=```\n<!-- /smallest tree -->)", re.DOTALL)


def tree() -> list[tuple[str, int, str]]:
    """Return train.py and the files in src that remain without any room: path, line count and purpose of each."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder)
        listed = subprocess.run(["git", "ls-files"], cwd=PROJECT, check=True, capture_output=True, encoding="utf-8")
        for name in listed.stdout.splitlines():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            if (PROJECT / name).exists():
                shutil.copy(PROJECT / name, copy / name)
        throw_out({*FILES}, copy)
        found = []
        for path in [copy / "train.py", *sorted(copy.glob("src/**/*.py"))]:
            text = path.read_text(encoding="utf-8")
            if text:
                found.append((str(path.relative_to(copy)), len(text.splitlines()), summary(text)))
        return found


def summary(code: str) -> str:
    """Return the first line of a file's docstring, or as many of its clauses as fit after the path and line count."""
    line = (ast.get_docstring(ast.parse(code)) or "").partition("\n")[0].rstrip(".")
    while len(line) > WIDTH:
        line = re.split(r"(.*)[:;,.] ", line)[1]
    return line


def main() -> None:
    files = tree()
    total = sum(lines for _, lines, _ in files)
    rows = [f"{path:<34} {lines:>4}  {summary}\n" for path, lines, summary in files]
    rows.append(f"{f'{len(files)} files':<33} {total:>5,}\n")
    page = PROJECT / "docs/make-it-yours.md"
    page.write_text(BLOCK.sub(lambda _: "".join(rows), page.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
