"""Make a new project from this one: `make new NAME=my-project DEST=../my-project TASK=dpo WITHOUT="wandb report"`.

It needs no installed packages. docs/make-it-yours.md says what goes and what stays.
"""

import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from difflib import get_close_matches
from pathlib import Path

from rooms import FILES, throw_out

TEMPLATE = Path(__file__).resolve().parent.parent
TASKS = dict(re.findall(r'"(\w+)": "([\w.]+):\w+"', (TEMPLATE / "src/tasks/__init__.py").read_text(encoding="utf-8")))
"""Each task's module. The map is read as text: importing it would import torch."""
SECTION = re.compile(r"^## .*?(?=^## |\Z)", re.M | re.S)


def main(name: str, folder: str, task: str, without: str) -> None:
    task, dest, unwanted = task or "mnist", Path(folder).expanduser().resolve(), without.replace(",", " ").split()
    if unwanted == ["all"]:
        unwanted = list(FILES)
    if errors := list(mistakes(name, dest, task, unwanted)):
        print(*(f"make new: {error}" for error in errors), sep="\n", file=sys.stderr)
        sys.exit(2)
    rooms = list(dict.fromkeys([*unwanted, "benchmarks", "course", "examples", "template"]))
    with tempfile.TemporaryDirectory() as temporary:  # DEST gets everything at the end, or nothing
        project = Path(temporary, "project")
        for file in filter(Path.exists, map(TEMPLATE.joinpath, git(TEMPLATE, "ls-files", "-z").split("\0")[:-1])):
            copy = project / file.relative_to(TEMPLATE)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(file, copy, follow_symlinks=False)
        code, config = train_by_default(project, task)
        throw_out(set(rooms), project)
        rename(project, name)
        commit(project, name)  # git lists what is left
        write_docs(project, rooms, name=name, task=task, code=code, config=config)
        shutil.rmtree(project / ".git")
        commit(project, name)
        shutil.copytree(project, dest, symlinks=True, dirs_exist_ok=True)
    lines = sum(
        len(file.read_text(encoding="utf-8").splitlines())
        for file in [dest / "train.py", *(dest / "src").rglob("*.py")]
    )
    downloads = re.findall(r"^#   (curl .*)", (dest / config).read_text(encoding="utf-8"), re.M)
    print(f"{name} is in {dest}, {lines:,} lines of Python in train.py and src")
    print(f"  task      {task}: {code}, {config}")
    print(f"  left out  {', '.join(rooms)}")
    print("  next      " + "\n            ".join([f"cd {shlex.quote(str(dest))}", *downloads, "make train"]))


def mistakes(name: str, dest: Path, task: str, without: list[str]) -> Iterator[str]:
    """Yield the mistakes, one line each."""
    if not re.fullmatch(r"[a-zA-Z0-9]([\w-]{0,28}[a-zA-Z0-9])?", name, re.ASCII):  # 31 make a line of src too long
        yield f"NAME={name}: needs 1 to 30 letters, digits, - and _, with a letter or digit at both ends"
    folder = next(path for path in (dest, *dest.parents) if os.path.lexists(path))
    if folder == dest and (not dest.is_dir() or any(dest.iterdir())):
        yield f"DEST={dest}: is there already; name a folder that doesn't exist or is empty, such as DEST=../my-project"
    elif dest.is_relative_to(TEMPLATE):
        yield f"DEST={dest}: is inside this project; name a folder outside of it, such as DEST=../my-project"
    elif not folder.is_dir() or not os.access(folder, os.W_OK):
        yield f"DEST={dest}: can't be created in {folder}; name another folder, such as DEST=../my-project"
    for variable, word, known in [("TASK", task, TASKS), *(("WITHOUT", room, FILES) for room in without)]:
        if word not in known:
            guess = "".join(f", did you mean {match}?" for match in get_close_matches(word, known, 1))
            yield f"{variable}={word}: not known{guess} ({', '.join(known)})"
        elif known is FILES and is_part_of(TASKS.get(task, "?").replace(".", "/"), word):
            yield f"WITHOUT={word}: the task {task} needs it"
    if not shutil.which("git"):
        yield "needs git"
    elif not answers("git", "-C", str(TEMPLATE), "ls-files", "--error-unmatch", __file__):
        yield f"{TEMPLATE} is not a git checkout: run `git init && git add --all` there first"


def is_part_of(module: str, room: str) -> bool:
    """Return whether a task's file, given without its suffix, belongs to the room."""
    return any(f"{module}.".startswith((f"{path}/", path.replace("*", ""))) for path in FILES[room].split())


def rename(project: Path, name: str) -> None:
    """Replace this project's name everywhere: the name of the package, and the default project in W&B."""
    for file in project.rglob("*"):
        if file.is_file() and not file.is_symlink() and b"accelerate-template" in (content := file.read_bytes()):
            file.write_bytes(content.replace(b"accelerate-template", name.encode()))


def answers(*command: str) -> bool:
    return bool(shutil.which(command[0])) and subprocess.run(command, capture_output=True).returncode == 0


def git(folder: Path, *words: str) -> str:
    return subprocess.run(["git", *words], cwd=folder, check=True, stdout=subprocess.PIPE, encoding="utf-8").stdout


def commit(project: Path, name: str) -> None:
    """Commit all files to a new repository, as a neutral author if git has none configured."""
    git(project, "init", "-q", "-b", "main")
    git(project, "add", "--all", "--force")
    is_known = answers("git", "-C", str(project), "var", "GIT_COMMITTER_IDENT")
    author = [] if is_known else ["-c", f"user.name={name}", "-c", f"user.email={name}@localhost"]
    git(project, *author, "-c", "commit.gpgsign=false", "commit", "-q", "--no-verify", "-m", f"Start {name}")


def train_by_default(project: Path, task: str) -> tuple[str, str]:
    """Make `make train` train the task, moved to src/tasks if it is an example. Return the paths of code and config."""
    code, config, makefile = f"src/tasks/{task}.py", f"configs/{task}.yaml", project / "Makefile"
    if TASKS[task].startswith("examples."):
        tasks, example = (
            project / "src/tasks/__init__.py",
            (project / f"examples/{task}.yaml").read_text(encoding="utf-8"),
        )
        (line,) = re.findall(rf'"{task}": "examples\.{task}:\w+"', tasks.read_text(encoding="utf-8"))
        first = '    "mnist": "src.tasks.mnist:Mnist",\n'  # the default, which most tests train
        replace(tasks, {first: f"{first}    {line.replace('examples.', 'src.tasks.')},\n"})
        moves = {f"examples/{task}.py": code, f"examples/{task}.yaml": config}
        names = {"stub_task": task, f"examples/{task}.y": f"configs/{task}.y"}
        for maker in set(re.findall(r"python -m examples\.(\w+)", example)):  # scripts that make the data
            moves[f"examples/{maker}.py"] = f"src/tasks/{maker}.py"
            names[f"examples.{maker}"] = f"src.tasks.{maker}"
            text = re.sub("^(train|test.*): setup", r"\1: setup data", makefile.read_text(encoding="utf-8"), flags=re.M)
            makefile.write_text(
                f"{text}\ndata: | setup  ## make the data\n\t@$(BIN)/python -m src.tasks.{maker}\n", encoding="utf-8"
            )
        if not re.search("^  model: .*/", example, re.M):  # tests can't download one
            moves["scripts/stub_test.py"] = f"tests/test_{task}.py"
        for old, new in moves.items():
            replace((project / old).rename(project / new), names)
    else:
        code = f"{TASKS[task].replace('.', '/')}.py"
        files = sorted((project / "configs").glob("*.yaml"))
        texts = {f"configs/{file.name}": file.read_text(encoding="utf-8") for file in files}
        # the first that a CPU can train
        config = next(
            name for name, text in texts.items() if f"\ntask:\n  name: {task}\n" in text and "/cpu.yaml" in text
        )
    what = "the CNN on scikit-learn's digits: two minutes on 2 cores, no download"
    names = {"unused_name,digits": f"unused_name,{Path(config).stem}", "configs/digits.yaml": config}
    replace(makefile, names | {what: f"{task} with {config}"})
    return code, config


def replace(file: Path, changes: dict[str, str]) -> None:
    text = file.read_text(encoding="utf-8")
    for old, new in changes.items():
        text = text.replace(old, new)
    file.write_text(text, encoding="utf-8")


def write_docs(project: Path, rooms: list[str], **names: str) -> None:
    """Write a README. Reduce links to removed files to their text, and drop table rows without any other link."""
    readme = project / "README.md"
    useful = re.compile("## (Choosing how to run|Adding a task|Further reading)\n")
    stub = (TEMPLATE / "scripts/stub_README.md").read_text(encoding="utf-8").format(**names)
    readme.write_text(
        stub + "".join(part for part in SECTION.findall(readme.read_text(encoding="utf-8")) if useful.match(part)),
        encoding="utf-8",
    )
    if (by_hand := project / "docs/make-it-yours.md").exists():
        gone = re.compile(rf"^\| `({'|'.join(rooms)})` \|.*\n", re.M)
        by_hand.write_text(gone.sub("", by_hand.read_text(encoding="utf-8")), encoding="utf-8")
    for page in map(project.joinpath, git(project, "ls-files", "*.md").splitlines()):
        old = text = page.read_text(encoding="utf-8")
        for path in re.findall(r"\]\(([^):]+)\)", old):
            if not (page.parent / path.partition("#")[0]).exists():
                text = re.sub(rf"!?\[([^]]*)\]\({re.escape(path)}\)", r"\1", text)
        lines = zip(old.splitlines(keepends=True), text.splitlines(keepends=True), strict=True)
        page.write_text(
            "".join(new for was, new in lines if new == was or "](" in new or not was.startswith("|")), encoding="utf-8"
        )


if __name__ == "__main__":
    main(*(os.environ[f"NEW_{word}"] for word in ("NAME", "DEST", "TASK", "WITHOUT")))
