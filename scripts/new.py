"""Make a new project from this one: `make new`, which asks, or `make new NAME=my-project DEST=../my-project TASK=dpo
WITHOUT="wandb report"`. It needs no installed packages.

A project has the files that each one has (ALWAYS), those of its task, and those of the parts that it keeps (PARTS).
Then the lines go that name a file which is not there: imports, and lines of lists.
"""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Callable, Iterable, Iterator
from difflib import get_close_matches
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).resolve().parent.parent
PARTS: dict[str, dict[str, str]] = tomllib.loads((HERE / "scripts/new/parts.toml").read_text(encoding="utf-8"))
ALWAYS = (
    ".devcontainer .dockerignore .github/dependabot.yml .github/workflows/test.yml .gitignore .pre-commit-config.yaml"
    " CLAUDE.md Dockerfile LICENSE Makefile pyproject.toml requirements*.txt train.py accelerate_configs src"
    " docs/running.md docs/tasks.md docs/stopping-and-resuming.md docs/tracking.md"
    " tests/__init__.py tests/conftest.py tests/launching.py tests/task_tests.py tests/tasks/__init__.py"
)
LISTS = "pyproject.toml requirements*.txt src/config/trackers.py .*ignore .github/dependabot.yml Makefile"
"""The files, besides Python's imports, that have a line for each of several things."""
DATA_RULE = "data: | setup  ## make the example data, if there is no folder data\n\t@$(BIN)/python -m examples.{}\n\n"
ONLY_HERE = (
    '"benchmarks" "docs/learn "scripts" mypy_path pythonpath "machines: chat sweeps -e~.[chat] -e~.[sweeps] gt-all'
    " kubernetes playwright trackio tensorboard mlflow comet moto s3fs gpu_proof /gpu_proof -~{~package-ecosystem:~uv"
    " -include"
)
"""How the lines of LISTS begin that no other project has."""


def read(file: Path) -> str:
    """Return what a file holds, as it is; nothing if it is not there."""
    return file.read_text(encoding="utf-8", errors="surrogateescape") if file.exists() else ""


MAP = dict(re.findall(r'"(\w+)": "([\w.]+:\w+)"', read(HERE / "src/tasks/__init__.py")))
"""Where each task, or its settings, is defined, read as text: importing it would need packages."""


def module_file(path: str) -> str:
    return f"{path.partition(':')[0].replace('.', '/')}.py"


def task_path(path: str) -> str:
    """Return where a task is defined, which its settings name if the map has those."""
    named = re.search(r'task_class: ClassVar\[str\] = "(.*)"', read(HERE / module_file(path)))
    return named[1] if named else path


def matching(files: Iterable[str], patterns: str) -> set[str]:
    """Return the files that a pattern names, or whose folder it names."""
    paths = [re.escape(pattern).replace(r"\*", "[^/]*") for pattern in patterns.split()]
    return {file for file in files for path in paths if re.fullmatch(rf"{path}(/.*)?", file)}


TASKS = {task: task_path(path) for task, path in MAP.items() if task != "streamed_lm"}  # which comes with `streaming`
for own in TASKS.keys() - PARTS.keys():  # needs what it imports
    text = read(HERE / module_file(TASKS[own]))
    text += "\nfrom src.tasks.metrics" * ("load_metric" in text)
    imports = [f"{module.replace('.', '/')}.py" for module in re.findall(r"^from (src[\w.]+)", text, re.M)]
    PARTS[own] = {"needs": " ".join(part for part in PARTS if matching(imports, PARTS[part].get("files", "")))}


def page(task: str) -> list[str]:
    """Return what the task does, what is said of its data, and maybe what only this project has."""
    file, code = HERE / f"examples/{task}.md", module_file(TASKS[task])
    own = f"Trains {task}.\n\n---\n\n`build_datasets` in [{code}]({code}) reads the data."
    return (read(file) or own).strip().split("\n\n---\n\n")


class Plan(NamedTuple):
    """What was asked for: by arguments, or by answers."""

    name: str
    dest: str
    task: str
    without: str

    @property
    def folder(self) -> Path:
        return Path(self.dest).expanduser().resolve()

    @property
    def kept(self) -> set[str]:
        """Return the task and the parts that the project has."""
        wanted = {*offered(self.task)} - {*names_in(self.without, offered(self.task))}
        kept = with_needs({self.task, *(part for part in wanted if not PARTS[part].get("within"))})
        return with_needs(kept | {part for part in wanted if PARTS[part].get("within") in kept})


def with_needs(names: set[str]) -> set[str]:
    """Return these parts, and all that they need."""
    needs = {need for name in names & PARTS.keys() for need in PARTS[name].get("needs", "").split()}
    return names if needs <= names else with_needs(names | needs)


def offered(task: str) -> list[str]:
    """Return the parts that a project with this task can do without, and that have to do with it."""
    needs = with_needs({task})
    choices = [name for name, part in PARTS.items() if part.get("about") and name not in needs]
    if "transformers" not in needs:
        return choices
    return [name for name in choices if name != "text" and PARTS[name].get("within", task) in needs]


def names_in(answer: str, choices: list[str]) -> list[str]:
    """Return the choices that an answer gives, by name or by number. `all` means all of them, `none` none."""
    numbers = {str(number): name for number, name in enumerate(choices, start=1)}
    words = [numbers.get(word, word) for word in answer.replace(",", " ").split()]
    return choices if words == ["all"] else [word for word in words if words != ["none"]]


def mistakes(plan: Plan, is_complete: bool) -> Iterator[str]:
    """Yield the mistakes, one line each. What is missing is one if nobody can be asked for it."""
    if not shutil.which("git"):
        yield "needs git"
    elif not succeeds("git", "-C", str(HERE), "ls-files", "--error-unmatch", __file__):
        yield f"{HERE} is not a git checkout: run `git init && git add --all` there first"
    for word, given, errors in (
        ("NAME", plan.name or is_complete, name_mistakes(plan.name)),
        ("DEST", plan.dest or is_complete, folder_mistakes(plan.dest)),
        ("TASK", plan.task, task_mistakes(plan.task)),
        ("WITHOUT", plan.without, part_mistakes(plan.without, plan.task)),
    ):
        yield from (f"{word}={error}" for error in errors if given)


def name_mistakes(name: str) -> Iterator[str]:
    if not re.fullmatch(r"[a-zA-Z0-9]([\w-]{0,28}[a-zA-Z0-9])?", name, re.ASCII):  # 31 make a line of src too long
        yield f"{name}: needs 1 to 30 letters, digits, - and _, with a letter or digit at both ends"
    required = read(HERE / "requirements.txt") + read(HERE / "requirements-dev.txt")
    if name.lower() in re.findall(r"^[\w-]+", required, re.M):
        yield f"{name}: is a package that it needs; name it otherwise"


def folder_mistakes(name: str) -> Iterator[str]:
    dest = Path(name).expanduser().resolve()
    folder = existing(dest)
    if folder == dest and (not dest.is_dir() or any(dest.iterdir()) or dest.is_mount()):
        yield f"{dest}: is there already; name a folder that doesn't exist or is empty, such as ../my-project"
    elif dest.is_relative_to(HERE):
        yield f"{dest}: is inside this project; name a folder outside of it, such as ../my-project"
    elif not folder.is_dir() or not os.access(folder, os.W_OK):
        yield f"{dest}: can't be created in {folder}; name another folder, such as ../my-project"


def existing(dest: Path) -> Path:
    """Return the folder, or the first above it that is there."""
    return next(path for path in (dest, *dest.parents) if os.path.lexists(path))


def task_mistakes(task: str) -> Iterator[str]:
    if task not in TASKS:
        yield unknown(task, [*TASKS])
    for file in sorted({module_file(paths[task]) for paths in (MAP, TASKS) if task in TASKS}):
        if not (HERE / file).exists():
            yield f"{task}: src/tasks/__init__.py names {file}, which is not there"


def part_mistakes(answer: str, task: str) -> Iterator[str]:
    choices, all_parts = offered(task), offered(next(iter(TASKS)))
    for part in names_in(answer, choices):
        if part in {"text", *with_needs({task})} - {*choices}:
            yield f"{part}: the task {task} needs it"
        elif part not in all_parts:  # one that has nothing to do with the task is not there anyway
            yield unknown(part, choices)


def unknown(word: str, known: list[str]) -> str:
    guess = "".join(f", did you mean {match}?" for match in get_close_matches(word, known, 1))
    return f"{word}: not known{guess} ({', '.join(known)})"


def completed(given: Plan) -> Plan:
    """Return the plan with what its user answers to what is missing in it."""
    if not all(given):
        print("A project of your own. Enter takes what is in brackets, Ctrl-C leaves.\n")
    name = given.name or ask("Name", "my-project", name_mistakes)
    dest = given.dest or ask("Folder", f"../{name}", folder_mistakes)
    task = given.task or ask_for("What does it train?", {task: page(task)[0] for task in TASKS}, task="")
    without = "" if [*part_mistakes(given.without, task)] else given.without
    parts = {part: PARTS[part]["about"] for part in offered(task)}
    return Plan(name, dest, task, without or ask_for("What can it do without?", parts, task))


def ask(question: str, default: str, mistakes: Callable[[str], Iterator[str]]) -> str:
    """Ask until an answer is free of mistakes. Return it, or the default if it is empty."""
    while True:
        answer = input(f"{question} [{default}]: ").strip() or default
        errors = list(mistakes(answer))
        if not errors:
            return answer
        print(*(f"  {error}" for error in errors), sep="\n")


def ask_for(title: str, choices: dict[str, str], task: str) -> str:
    """Show the choices, numbered: parts of this task, or tasks. Ask for some, or one, and return the names."""

    def chosen(answer: str) -> str:
        return " ".join(names_in(answer, [*choices])) or "none"

    def wrong(answer: str) -> Iterator[str]:
        return part_mistakes(chosen(answer), task) if task else task_mistakes(chosen(answer))

    print(f"\n{title}")
    for number, (name, about) in enumerate(choices.items(), start=1):
        print(f"  {number:>2}  {name:<{max(map(len, choices))}}  {about.splitlines()[0]}")
    if not task:
        return chosen(ask("Task, by number or name", next(iter(choices)), wrong))
    return chosen(ask("Leave out, by number or name, all or none", "text" if "text" in choices else "none", wrong))


def make(plan: Plan) -> dict[str, str]:
    """Make the project. Its folder gets everything at the end, or nothing. Return what the stubs are filled with."""
    with tempfile.TemporaryDirectory(dir=existing(plan.folder.parent), prefix=".new-") as temporary:
        project = Path(temporary, "project")
        listed = git(HERE, "ls-files", "--cached", "--others", "--exclude-standard", "-z").split("\0")
        files = {name for name in listed if name and os.path.lexists(HERE / name)}
        copy_parts(project, plan, files)
        values = {"name": plan.name, "task": plan.task} | copy_task(project, plan.task, files)
        write_own_files(project, plan, values)
        put_in_names(project, values)
        drop_lines(project, plan)
        commit(project, plan.name)
        plan.folder.parent.mkdir(parents=True, exist_ok=True)
        project.rename(plan.folder)
    return values


def copy(project: Path, file: str, to: str = "") -> None:
    target = project / (to or file)
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(HERE / file, target, follow_symlinks=False)


def write(file: Path, text: str) -> None:
    file.write_text(text, encoding="utf-8", errors="surrogateescape")


def files_of(folder: Path) -> list[Path]:
    """Return the files in a folder without links, which may lead to files of others."""
    return [file for file in folder.rglob("*") if file.is_file() and not file.is_symlink()]


def replaced(text: str, names: dict[str, str]) -> str:
    for old, new in names.items():
        text = text.replace(old, new)
    return text


def copy_parts(project: Path, plan: Plan, files: set[str]) -> None:
    """Copy what each project has, without what is of other tasks and of the parts that it leaves out."""
    parts = [(name, part.get("files", "")) for name, part in PARTS.items()]
    parts += [(task, f"{module_file(MAP[task])} {module_file(path)}") for task, path in TASKS.items()]
    kept, gone = set[str](), set[str]()
    for name, patterns in parts:
        (kept if name in plan.kept else gone).update(matching(files, patterns))
    for file in (matching(files, ALWAYS) | kept) - gone:
        copy(project, file, to=moved(file, plan.task))


def copy_task(project: Path, task: str, files: set[str]) -> dict[str, str]:
    """Copy the task's config, tests and example data. Return what `make train` needs of them."""
    config = first_config(task, files)
    text = read(HERE / config) if config else f"run_name: {task}\ntask:\n  name: {task}\n"
    maker = "".join(re.findall(r"python -m examples\.(make_\w+)", text)[:1])
    weights = "weights" if "sentence-transformers/all-MiniLM-L6-v2" in text else ""  # a package has them too
    own, tests = {config, f"configs/{task}.yaml"} & files, f"tests/tasks/test_{task}.py"
    copy(project, tests if tests in files else "tests/tasks/test_blank.py", to=tests)
    own |= matching(files, " ".join(re.findall(r"examples/[\w/.-]+\w", text)))
    own |= {f"examples/{module}.py" for module in ("__init__", maker, weights) if module and (maker or weights)}
    for file in own:
        copy(project, file, to=moved(file, task))
    if not config:
        (project / "configs").mkdir()
        write(project / f"configs/{task}.yaml", text)
    values = {"code": moved(module_file(TASKS[task]), task), "config": moved(config, task) or f"configs/{task}.yaml"}
    values |= {"run": [*re.findall(r"^run_name: ([\w.-]+)$", text, re.M), task][0], "needs": " data" * bool(maker)}
    values |= {"rule": DATA_RULE.format(maker) * bool(maker), "settings": "--task.model=$$model " * bool(weights)}
    return values | {"model": "model=$(or $(MODEL),$$($(BIN)/python -m examples.weights)) && " * bool(weights)}


def first_config(task: str, files: set[str]) -> str:
    """Return a config of the task: its example's, else the first that a CPU can train; nothing if there is none."""
    texts = {file: read(HERE / file) for file in matching(files, "configs examples") if file.endswith(".yaml")}
    found = [file for file, text in texts.items() if re.search(rf"(?m)^  name: {task}\s*(#.*)?$", text)]
    found += {f"configs/{task}.yaml"} & texts.keys()
    found.sort(key=lambda file: (file != f"examples/{task}.yaml", "/cpu.yaml" not in texts[file], file))
    return found[0] if found else ""


def moved(file: str, task: str) -> str:
    """Return where a project has a file of its task: what examples/ has of it moves to src and configs."""
    file = re.sub(rf"examples/({task}(_hub)?\.py)", r"src/tasks/\1", file)
    return file.replace(f"examples/{task}.", f"configs/{task}.")


def write_own_files(project: Path, plan: Plan, values: dict[str, str]) -> None:
    """Write what is about the task and nothing else: README, `make train`, and the likes of them."""
    what, data, *_ = page(plan.task)
    values = {"what": what, "data": data, **values}  # the first two name others
    pages = sorted(page.relative_to(project) for page in [*project.glob("docs/*.md"), *project.glob("plan/*.md")])
    values["pages"] = "\n".join(f"- [{p}]({p}): {read(project / p)[2:].splitlines()[0]}" for p in pages)
    marks, stubs = {f"{{{name}}}": value for name, value in values.items()}, HERE / "scripts/new"
    for stub in ("README.md", "AGENTS.md"):
        write(project / stub, replaced(read(stubs / stub), marks))
    rules, makefile = replaced(read(stubs / "rules.mk"), marks), project / "Makefile"
    write(makefile, re.sub(r"(?ms)^train: .*?(?=^lint:)", lambda _: rules, read(makefile)))
    tasks = project / "src/tasks/__init__.py"  # its own is the first, which is the default
    (own,) = re.findall(rf'^    "{plan.task}": .*\n', read(tasks), re.M)
    write(tasks, read(tasks).replace(own, "").replace("TASKS = {\n", f"TASKS = {{\n{own}"))
    if "wandb" in plan.kept:
        copy(project, "sweeps/blank.yaml", to=f"sweeps/{plan.task}.yaml")


def put_in_names(project: Path, values: dict[str, str]) -> None:
    """Name the project, its task, config and runs wherever others are named."""
    task, config, run = values["task"], values["config"], values["run"]
    names = {
        "accelerate-template": values["name"], f"examples.{task}": f"src.tasks.{task}", "-k parity": "-k learns",
        f"examples/{task}.py": values["code"], f"examples/{task}.yaml": config, "examples/blank.yaml": config,
        "name=blank": f"name={task}", "sweeps/blank": f"sweeps/{task}", "blank-sweep": f"{task}-sweep",
        "the blank task": f"the task {task}", "task blank": f"task {task}", "configs/digits.yaml": config,
    }  # fmt: skip
    if task != "mnist":
        names |= {"configs/mnist.yaml": config, "runs/mnist": f"runs/{run}", "task.name=mnist": f"task.name={task}"}
        names |= {"sweeps/mnist.yaml": f"sweeps/{task}.yaml"}
    for file in files_of(project):
        write(file, replaced(read(file), names))
    file, what = project / "pyproject.toml", page(task)[0].splitlines()[0]
    text = re.sub(r"(?m)^version = .*$", 'version = "0.1.0"', read(file))
    write(file, re.sub(r"(?m)^description = .*$", lambda _: f"description = {json.dumps(what)}", text))


def drop_lines(project: Path, plan: Plan) -> None:
    """Drop the lines that name what is not there: imports with the lines of lists that use them, and others' lines."""
    for file in [file for file in files_of(project / "src") if file.suffix == ".py"]:
        lines = read(file).splitlines(keepends=True)
        named = {line: re.match(r'(?:from |    "\w+": ")((?:src|examples)[\w.]*)', line) for line in lines}
        gone = {line for line, name in named.items() if name and not is_there(project, name[1])}
        names = {name for line in gone for name in re.findall(r"\w+", line.partition(" import ")[2])}
        kept = [line for line in lines if line not in gone and re.sub(r'^ *("\w+": |\*)?|,?\n$', "", line) not in names]
        write(file, "".join(kept))
    words = [ONLY_HERE, *(part.get("lines", "") for name, part in PARTS.items() if name not in plan.kept)]
    words += [] if (project / "examples").exists() else ['"examples"']
    starts = tuple(word.replace("~", " ") for word in " ".join(words).split())
    for file in [file for name in LISTS.split() for file in project.glob(name)]:
        kept = [line for line in read(file).splitlines(keepends=True) if not line.strip().startswith(starts)]
        write(file, "".join(kept))


def is_there(project: Path, module: str) -> bool:
    path = project / module.replace(".", "/")
    return path.is_dir() or path.with_suffix(".py").exists()


def succeeds(*command: str) -> bool:
    return bool(shutil.which(command[0])) and subprocess.run(command, capture_output=True).returncode == 0


def git(folder: Path, *words: str) -> str:
    return subprocess.run(["git", *words], cwd=folder, check=True, stdout=subprocess.PIPE, encoding="utf-8").stdout


def commit(project: Path, name: str) -> None:
    """Commit all files to a new repository, as a neutral author if git has none configured."""
    git(project, "init", "-q", "-b", "main")
    git(project, "add", "--all", "--force")
    is_known = succeeds("git", "-C", str(project), "var", "GIT_COMMITTER_IDENT")
    author = [] if is_known else ["-c", f"user.name={name}", "-c", f"user.email={name}@localhost"]
    git(project, *author, "-c", "commit.gpgsign=false", "commit", "-q", "--no-verify", "-m", f"Start {name}")


def main(given: Plan) -> None:
    if errors := [*mistakes(given, is_complete=not sys.stdin.isatty())]:
        print(*(f"make new: {error}" for error in errors), sep="\n", file=sys.stderr)
        sys.exit(2)
    try:
        plan = completed(given) if sys.stdin.isatty() else given._replace(task=given.task or next(iter(TASKS)))
        values = make(plan)
    except (KeyboardInterrupt, EOFError):
        print("\nmake new: you left; nothing was made", file=sys.stderr)
        sys.exit(130)
    modules = [plan.folder / "train.py", *(plan.folder / "src").rglob("*.py")]
    lines = sum(len(read(file).splitlines()) for file in modules)
    print(f"{plan.name} is in {plan.folder}, {lines:,} lines of Python in train.py and src")
    print(f"  task      {plan.task}: {values['code']}, {values['config']}")
    print(f"  left out  {', '.join(sorted({*offered(plan.task)} - plan.kept)) or 'nothing'}")
    print("  next      " + "\n            ".join([f"cd {shlex.quote(str(plan.folder))}", "make train", "make test"]))


if __name__ == "__main__":
    main(Plan(*(os.environ[f"NEW_{word}"] for word in ("NAME", "DEST", "TASK", "WITHOUT"))))
