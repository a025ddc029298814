"""Take out what a test protects, row by row of tests/mutations.yaml, and see the test fail: `python -m tests.mutate`.

A row names a `file`, the code that is taken out of it (`takes`, which it has exactly once), what is put in its place
(`puts`, nothing by default) and the test that `fails`. Each runs in a copy of the project. A row whose test passes is
a finding: the test protects nothing, or the row is out of date. Words after the command choose the rows that contain
one of them: `python -m tests.mutate optim.py tests/faults`.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import yaml

PROJECT = Path(__file__).parent.parent
TABLE = PROJECT / "tests/mutations.yaml"
WORKERS = min(4, os.cpu_count() or 1)
SECONDS = 600
"""After which a test has failed: what was taken out may let it wait for ever."""
PASSED, FAILED = 0, 1
"""Exit codes of pytest."""


def copy_project(folder: Path) -> Path:
    """Copy the files that git tracks, and new ones that it does not ignore."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    listed = subprocess.run(command, cwd=PROJECT, check=True, stdout=subprocess.PIPE, encoding="utf-8").stdout
    for name in filter(None, listed.split("\0")):
        if (PROJECT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(PROJECT / name, folder / name)
    return folder


def finding(row: dict[str, str], project: Path) -> str:
    """Return what is wrong with a row, which is tried in this copy of the project; nothing if its test fails."""
    file = project / row["file"]
    before = file.read_text(encoding="utf-8") if file.exists() else ""
    if before.count(row["takes"]) != 1:
        return f"the file has what is taken out {before.count(row['takes'])} times, not once"
    file.write_text(before.replace(row["takes"], row.get("puts", "")), encoding="utf-8")
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", row["fails"]]
    # no bytecode: two versions of a file may have the same size, and be written in the same second
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    how: dict[str, Any] = {"env": environment, "capture_output": True, "encoding": "utf-8", "timeout": SECONDS}
    try:
        done = subprocess.run(command, cwd=project, **how)
    except subprocess.TimeoutExpired:
        return ""
    finally:
        file.write_text(before, encoding="utf-8")
    last = (done.stdout.strip() or done.stderr.strip()).rpartition("\n")[2]
    return "" if done.returncode == FAILED else f"{row['fails']} does not fail: {last}"


def main(words: list[str]) -> int:
    rows = yaml.safe_load(TABLE.read_text(encoding="utf-8"))
    chosen = [row for row in rows if not words or any(word in str(row) for word in words)]
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(WORKERS) as pool:
        free: SimpleQueue[Path] = SimpleQueue()
        for number in range(WORKERS):
            free.put(copy_project(Path(folder, str(number))))

        def try_row(row: dict[str, str]) -> str:
            project = free.get()
            try:
                return finding(row, project)
            finally:
                free.put(project)

        findings = 0
        for row, wrong in zip(chosen, pool.map(try_row, chosen), strict=True):
            findings += bool(wrong)
            print(
                f"{'FINDING' if wrong else 'fails'}  {row['file']}: {row['takes'].strip().splitlines()[0]}", flush=True
            )
            if wrong:
                print(f"         {wrong}", flush=True)
    print(f"{len(chosen)} rows, {len(chosen) - findings} fail their tests, {findings} findings")
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
