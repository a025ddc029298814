"""Remove optional parts of the project: `python scripts/rooms.py check wandb`. It needs no installed packages.

Such a part, a room, consists of its files (FILES) and of each line elsewhere that ends with `# room: NAME`. A line that
opens a block (`def f(self):  # room: NAME`) takes the block and its decorators with it, a field the docstring below it,
and the last use of an import that import. A line of several rooms goes with the last of them if it says
`# room: wandb trackers`, and with the first if it says `# room: text+examples`. On a page, `<!-- room: NAME -->` on the
line below a heading marks its section, up to the next heading of the same or a higher level.
docs/make-it-yours.md says what each room does.
"""

import ast
import re
import subprocess
import sys
from pathlib import Path

FILES = {
    "check": "src/check src/config/check.py tests/check tests/check/test_text.py tests/check/split_faults.py"
    " docs/check.md",
    "cpu": "src/distributed/cpu.py",
    "machines": "src/distributed/machines.py src/checkpoint/mirror.py src/config/mirror.py launchers tests/machines"
    " tests/machines/test_mirror.py tests/machines/mirror_kills.py accelerate_configs/multi_node_*.yaml docs/machines.md",
    "plan": "plan src/tools/plan.py benchmarks/gpu* .github/ISSUE_TEMPLATE/gpu.yml",
    "report": "src/tracking/report.* src/tracking/plots.* tests/core/test_report.py docs/report.png",
    "streaming": "src/tasks/streaming tests/text/test_streaming*.py tests/streaming/test_reading.py docs/streaming.md"
    " benchmarks/streaming.py",
    "text": "src/tasks/text src/tasks/streaming tests/text"
    " configs/chat_*.yaml configs/pretrain.yaml configs/classify.yaml sweeps/pretrain.yaml sweeps/classify.yaml"
    " examples/chat* examples/ask.py examples/text.mk"
    " examples/topics examples/weights.py examples/dpo.* examples/token_classification.*"
    " examples/make_pairs.py examples/make_sentences.py src/tools/generate.py docs/transformers.md plan/four_bits.py"
    " plan/benchmarks plan/figures.md",
    "tools": "src/tools/checkpoints.py src/tools/evaluate.py src/tools/generate.py src/tracking/next_step.py"
    " src/checkpoint/load.py tests/core/test_evaluate.py tests/text/test_tools.py",
    "trackers": "src/tracking/accelerate_trackers.py",
    "wandb": "src/tracking/wandb.py src/config/wandb.py sweeps",
    "benchmarks": "benchmarks docs/figures.md tests/pages/test_benchmarks.py plan/benchmarks plan/figures.md"
    " tests/plan/gpu/test_benchmark.py",
    "course": "docs/learn tests/pages/test_learn.py",
    "examples": "examples/__init__.py examples/dpo.py examples/*_*.py examples/*.yaml"
    " tests/tasks/test_examples.py tests/tasks/test_optuna_sweep.py tests/tasks/test_text_examples.py",
    "template": "scripts/new* scripts/stubs scripts/take_pictures.py tests/check tests/faults tests/machines"
    " tests/text tests/test_*.py tests/machines/mirror_kills.py tests/s3.py tests/curves.py tests/plan plan/gpu.mk plan/gpu.md"
    " src/tools/plan.py .github/ISSUE_TEMPLATE .github/workflows/locked.yml .ci CITATION.cff CONTRIBUTING.md"
    " SECURITY.md docs/accelerate.md docs/promises.md docs/report.png docs/run.svg uv.lock",
}
"""The files and folders of each room."""
ABOUT = {
    "check": "--check: is a run correct?",
    "cpu": "faster training on CPUs",
    "machines": "several machines, Slurm, Kubernetes, a mirror of the checkpoints",
    "plan": "python -m plan: will it fit, how long will it take, what will it cost?",
    "report": "report.html, a page about each run",
    "streaming": "text that is read while training, for more than fits on a disk",
    "text": "language models and text classifiers, with transformers",
    "tools": "evaluate, generate and checkpoints, in src/tools",
    "trackers": "trackio and TensorBoard",
    "wandb": "Weights & Biases",
}
"""What the rooms do that `make new` offers to leave out. It leaves out the others in any case."""
SHARED = {
    "src/tracking/records.py": {"report", "examples"},
    "src/config/trackers.py": {"wandb", "trackers"},
    "tests/core/test_trackers.py": {"wandb", "trackers"},
    "tests/s3.py": {"machines", "streaming"},
    "scripts/rooms.py": {*FILES},
    "docs/after-training.md": {"text", "tools"},
    "docs/make-it-yours.md": {*FILES},
}
"""Files that several rooms share, which go with the last of them."""
LINE_LENGTH = 120
QUOTES = '"""'
MARK = re.compile(r"(?m)^(.*?)  # room: ([\w+ ]+)$")
SECTION_MARK = re.compile(r"(?m)^<!-- room: ([\w+ ]+) -->$")


def throw_out(rooms: set[str], project: Path) -> None:
    """Delete the files of the rooms, and the lines that only they need. Nothing refers to them afterwards."""
    paths = [path for room in rooms for pattern in FILES[room].split() for path in project.glob(pattern)]
    paths += [project / path for path, of in SHARED.items() if not any(is_there(r, project) for r in of - rooms)]
    for path in paths:
        delete(path)
    for folder in (*project.glob("src/*"), project / "scripts"):
        left = {path.name for path in folder.glob("*")} - {"__pycache__", "__init__.py"}
        if folder.is_dir() and not left:
            delete(folder)
    for path in files(project):
        lines = path.read_text(encoding="utf-8").split("\n")
        others = without(lines, rooms)
        if others != lines and path.suffix == ".py":
            others = with_used_imports(others, used_names(lines) - used_names(others))
        if others != lines:
            path.write_text("\n".join(others), encoding="utf-8")
    for page in pages(project):
        lines = page.read_text(encoding="utf-8").split("\n")
        others = without_sections(lines, rooms)
        if others != lines:
            page.write_text("\n".join(others), encoding="utf-8")


def remove_marks(project: Path) -> None:
    """Remove the marks that are left, for a project that keeps no rooms apart."""
    for path in files(project):
        text = path.read_text(encoding="utf-8")
        path.write_text(MARK.sub(r"\1", text), encoding="utf-8")
    for page in pages(project):
        text = page.read_text(encoding="utf-8")
        page.write_text(re.sub(rf"{SECTION_MARK.pattern}\n+", "\n", text), encoding="utf-8")


def is_there(room: str, project: Path) -> bool:
    return any(True for pattern in FILES[room].split() for _ in project.glob(pattern))


def without(lines: list[str], rooms: set[str]) -> list[str]:
    """Return the lines of a file except those of the rooms."""
    left: list[str] = []
    i = 0
    while i < len(lines):
        mark = MARK.fullmatch(lines[i])
        names = remaining(mark[2], rooms) if mark else []
        if mark and not names:
            end = end_of_block(lines, i, mark[1])
            drop_decorators(left, mark[1])
            i = close_gap(left, lines, i, end)
            continue
        left.append(f"{mark[1]}  # room: {' '.join(names)}" if mark else lines[i])
        i += 1
    return left


def remaining(names: str, rooms: set[str]) -> list[str]:
    """Return the names in a mark that are left without the rooms."""
    return [name for name in names.split() if rooms.isdisjoint(name.split("+"))]


def without_sections(lines: list[str], rooms: set[str]) -> list[str]:
    """Return the lines of a page except the sections of the rooms."""
    left: list[str] = []
    is_code, gone = False, 0  # gone: the level of the heading whose section goes
    for i, line in enumerate(lines):
        level = 0 if is_code else heading_level(line)
        mark = SECTION_MARK.fullmatch(lines[i + 1]) if level and i + 1 < len(lines) else None
        if 0 < level <= gone:
            gone = 0
        if mark and not gone and not remaining(mark[1], rooms):
            gone = level
        is_code ^= line.startswith("```")
        own = SECTION_MARK.fullmatch(line)
        if not gone:
            left.append(f"<!-- room: {' '.join(remaining(own[1], rooms))} -->" if own and not is_code else line)
    while left[-2:] == ["", ""]:  # a section at the end of the page
        left.pop()
    return left if left[-1:] == [""] else [*left, ""]


def heading_level(line: str) -> int:
    """Return how many # a heading begins with; 0 if the line is none."""
    return len(line) - len(line.lstrip("#")) if re.match("#+ ", line) else 0


def drop_decorators(left: list[str], code: str) -> None:
    """Drop the decorators above a removed function or class."""
    indent = code[: depth(code)]
    while code.lstrip().startswith(("def ", "class ")) and left[-1].startswith((f"{indent}@", f"{indent})")):
        while not left.pop().startswith(f"{indent}@"):
            pass


def end_of_block(lines: list[str], start: int, code: str) -> int:
    """Return the index after the block, brackets or field docstring that the line at `start` opens."""
    end = start + 1
    if code.endswith((":", "(", "[", "{")):
        while end < len(lines) and (not lines[end] or depth(lines[end]) > depth(code)):
            end += 1
        while not lines[end - 1]:
            end -= 1
        if end < len(lines) and lines[end].lstrip().startswith((")", "]", "}")) and depth(lines[end]) == depth(code):
            end = end_of_block(lines, end, lines[end].partition("  # room:")[0])
    elif end < len(lines) and lines[end].startswith(" " * depth(code) + QUOTES):
        if lines[end].count(QUOTES) == 1:  # it spans several lines
            end += 1
            while QUOTES not in lines[end]:
                end += 1
        end += 1
    return end


def used_names(lines: list[str]) -> set[str]:
    """Return the names that the code of a file uses."""
    return {node.id for node in ast.walk(ast.parse("\n".join(lines))) if isinstance(node, ast.Name)}


def with_used_imports(lines: list[str], unused: set[str]) -> list[str]:
    """Return the lines of a file without the imports of names that are now unused."""
    statements = [node for node in ast.parse("\n".join(lines)).body if isinstance(node, ast.Import | ast.ImportFrom)]
    for node in reversed(statements):
        aliases = [alias for alias in node.names if (alias.asname or alias.name.partition(".")[0]) not in unused]
        if len(aliases) == len(node.names):
            continue
        start, end = node.lineno - 1, node.end_lineno or node.lineno
        rest = lines[:start]
        if aliases:
            names = [f"{alias.name} as {alias.asname}" if alias.asname else alias.name for alias in aliases]
            module = f"from {node.module} import" if isinstance(node, ast.ImportFrom) else "import"
            rest += import_lines(module, names)
            lines = rest + lines[end:]
        else:
            lines = rest + lines[close_gap(rest, lines, start, end) :]
    return lines


def import_lines(module: str, names: list[str]) -> list[str]:
    """Return the import as ruff formats it."""
    line = f"{module} {', '.join(names)}"
    if len(line) <= LINE_LENGTH:
        return [line]
    return [f"{module} (", *(f"    {name}," for name in names), ")"]


def close_gap(left: list[str], lines: list[str], start: int, end: int) -> int:
    """Leave as many blank lines as there would have been without what is removed; return where to continue."""
    before = after = 0
    while left and not left[-1]:
        left.pop()
        before += 1
    while end + after < len(lines) and not lines[end + after]:
        after += 1
    rest = end + after
    if rest == len(lines):
        after = 1  # the file's last newline
    elif depth(lines[rest]) >= depth(lines[start]):
        after = max(before, after)
    left.extend([""] * after)
    return rest


def depth(line: str) -> int:
    return len(line) - len(line.lstrip())


def files(project: Path) -> list[Path]:
    """Return the files that can have marked lines."""
    kinds = {".py", ".txt", ".toml", ".yml", ".yaml", ".mk", ""}
    found = [*project.glob("*"), *project.glob(".github/**/*")]
    for folder in ("src", "tests", "examples", "configs", "accelerate_configs"):
        found += project.glob(f"{folder}/**/*")
    return [path for path in found if path.suffix in kinds and path.is_file() and not path.is_symlink()]


def pages(project: Path) -> list[Path]:
    """Return the pages, which can have marked sections."""
    return sorted([*project.glob("*.md"), *project.glob("docs/**/*.md"), *project.glob("plan/*.md")])


def delete(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        for inner in path.iterdir():
            delete(inner)
        path.rmdir()
    elif path.exists():
        path.unlink()


def main(names: list[str]) -> None:
    """Remove the rooms from this project. Exit with code 2 if one is unknown or uncommitted changes would be lost."""
    project = Path(__file__).resolve().parent.parent
    if unknown := [name for name in names if name not in FILES]:
        sys.stderr.write(f"rooms: no such room: {', '.join(unknown)} ({', '.join(FILES)})\n")
        sys.exit(2)
    status = subprocess.run(["git", "status", "--porcelain"], cwd=project, capture_output=True, encoding="utf-8")
    if status.returncode or status.stdout:
        sys.stderr.write("rooms: commit your changes first, so that nothing is lost (git status)\n")
        sys.exit(2)
    throw_out(set(names), project)


if __name__ == "__main__":
    main(sys.argv[1:])
