"""Make a new project from this one: `make new`, which asks, or `make new NAME=my-project DEST=../my-project TASK=dpo
WITHOUT="wandb report"`.

It needs no installed packages. docs/make-it-yours.md says what goes and what stays.
"""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from new_pages import cut_comments, cut_pages
from new_questions import (
    MAP,
    TASKS,
    TEMPLATE,
    about,
    ask,
    ask_rooms,
    ask_task,
    code_of,
    room_mistakes,
    rooms_in,
    task_mistakes,
)
from rooms import ABOUT, remove_marks, throw_out

ALWAYS = ("benchmarks", "course", "examples", "template")
"""The rooms that no new project has."""
PAGES = (
    "running", "stopping-and-resuming", "tracking", "check", "machines", "transformers", "streaming",
    "after-training",
)  # fmt: skip
"""The pages that it has, if their rooms stay."""
STUBS = TEMPLATE / "scripts/stubs"
SHARED_STUBS = {"# the tests of every task\n": "every_task.py", "# a tiny encoder\n": "tiny_encoder.py"}
"""What stands in place of a line of a task's tests."""
ITS_DATA = "`build_datasets` in [{code}]({code}) reads the data."
ELSEWHERE = "name another folder, such as ../my-project"
LEFT = 130
"""Exit code after Ctrl-C or Ctrl-D."""


class Plan(NamedTuple):
    """What was asked for: by arguments, or by answers."""

    name: str
    folder: str
    task: str
    without: str

    @property
    def dest(self) -> Path:
        return Path(self.folder).expanduser().resolve()

    @property
    def unwanted(self) -> list[str]:
        return rooms_in(self.without, self.task)

    @property
    def rooms(self) -> set[str]:
        """Return the rooms that the project does without. Streaming is of texts."""
        return {*self.unwanted, *ALWAYS, *(["streaming"] if "text" in self.unwanted else [])}


class Training(NamedTuple):
    """What `make train` trains in the new project."""

    code: str
    config: str
    maker: str = ""
    """Module that makes the data, if there is one."""
    has_weights: bool = False
    """Whether its pretrained model also comes from a package, where the Hub cannot be reached."""


def main(given: Plan) -> None:
    if errors := [*mistakes(given, is_complete=not sys.stdin.isatty())]:
        print(*(f"make new: {error}" for error in errors), sep="\n", file=sys.stderr)
        sys.exit(2)
    try:
        plan = completed(given) if sys.stdin.isatty() else given._replace(task=given.task or next(iter(TASKS)))
        training = make(plan)
    except (KeyboardInterrupt, EOFError):
        print("\nmake new: you left; nothing was made", file=sys.stderr)
        sys.exit(LEFT)
    lines = sum(
        len(file.read_text(encoding="utf-8").splitlines())
        for file in [plan.dest / "train.py", *(plan.dest / "src").rglob("*.py")]
    )
    print(f"{plan.name} is in {plan.dest}, {lines:,} lines of Python in train.py and src")
    print(f"  task      {plan.task}: {training.code}, {training.config}")
    print(f"  left out  {', '.join(room for room in plan.unwanted if room in ABOUT) or 'nothing'}")
    print("  next      " + "\n            ".join([f"cd {shlex.quote(str(plan.dest))}", "make train", "make test"]))


def mistakes(plan: Plan, is_complete: bool) -> Iterator[str]:
    """Yield the mistakes, one line each. What is missing is one if nobody can be asked for it."""
    if not shutil.which("git"):
        yield "needs git"
    elif not answers("git", "-C", str(TEMPLATE), "ls-files", "--error-unmatch", __file__):
        yield f"{TEMPLATE} is not a git checkout: run `git init && git add --all` there first"
    if plan.name or is_complete:
        yield from (f"NAME={error}" for error in name_mistakes(plan.name))
    if plan.folder or is_complete:
        yield from (f"DEST={error}" for error in folder_mistakes(plan.folder))
    if plan.task:
        yield from (f"TASK={error}" for error in task_mistakes(plan.task))
    yield from (f"WITHOUT={error}" for error in room_mistakes(plan.unwanted, plan.task))


def completed(given: Plan) -> Plan:
    """Return the plan with what its user answers to what is missing in it."""
    if not all(given):
        print("A project of your own. Enter takes what is in brackets, Ctrl-C leaves.\n")
    name = given.name or ask("Name", "my-project", name_mistakes)
    folder = given.folder or ask("Folder", f"../{name}", folder_mistakes)
    task = given.task or ask_task()
    return Plan(name, folder, task, given.without or ask_rooms(task))


def name_mistakes(name: str) -> Iterator[str]:
    if not re.fullmatch(r"[a-zA-Z0-9]([\w-]{0,28}[a-zA-Z0-9])?", name, re.ASCII):  # 31 make a line of src too long
        yield f"{name}: needs 1 to 30 letters, digits, - and _, with a letter or digit at both ends"


def folder_mistakes(name: str) -> Iterator[str]:
    dest = Path(name).expanduser().resolve()
    folder = next(path for path in (dest, *dest.parents) if os.path.lexists(path))
    if folder == dest and (not dest.is_dir() or any(dest.iterdir())):
        yield f"{dest}: is there already; name a folder that doesn't exist or is empty, such as ../my-project"
    elif dest.is_relative_to(TEMPLATE):
        yield f"{dest}: is inside this project; name a folder outside of it, such as ../my-project"
    elif not folder.is_dir() or not os.access(folder, os.W_OK):
        yield f"{dest}: can't be created in {folder}; {ELSEWHERE}"


def make(plan: Plan) -> Training:
    """Make the project. Its folder gets everything at the end, or nothing."""
    with tempfile.TemporaryDirectory() as temporary:
        project = Path(temporary, "project")
        for file in filter(Path.exists, map(TEMPLATE.joinpath, git(TEMPLATE, "ls-files", "-z").split("\0")[:-1])):
            copy = project / file.relative_to(TEMPLATE)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(file, copy, follow_symlinks=False)
        training = move_task(project, plan.task)
        throw_out(plan.rooms, project)
        remove_marks(project)
        keep_one_task(project, plan.task, training)
        write_makefile(project / "Makefile", plan.task, training)
        write_own_files(project, plan, training)
        name_what_is_there(project, plan, training)
        cut_pages(project, plan.rooms if plan.task == "mnist" else {*plan.rooms, "mnist"})
        commit(project, plan.name)
        publish(project, plan.dest)
    return training


def publish(project: Path, dest: Path) -> None:
    """Copy the project to its folder. If that fails or is interrupted, nothing of it stays."""
    new = next((path for path in (*reversed(dest.parents), dest) if not path.exists()), None)
    try:
        shutil.copytree(project, dest, symlinks=True, dirs_exist_ok=True)
    except BaseException:
        shutil.rmtree(new or dest, ignore_errors=True)
        if new is None:
            dest.mkdir()
        raise


def move_task(project: Path, task: str) -> Training:
    """Move the task's code, config and data to where a project has them."""
    code, config = code_of(task), f"configs/{task}.yaml"
    examples = STUBS / f"{task}.yaml", TEMPLATE / f"examples/{task}.yaml"
    example = next(filter(Path.exists, examples), None)
    if not example:
        return Training(code, own_config(project, task))
    text = example.read_text(encoding="utf-8")
    (project / config).write_text(text, encoding="utf-8")
    if code.startswith("examples/"):
        (project / code).rename(project / f"src/tasks/{task}.py")
        code = f"src/tasks/{task}.py"
    names, maker = {f"examples/{task}.y": f"configs/{task}.y", "stubs/": "configs/"}, ""
    for maker in re.findall(r"python -m examples\.(\w+)", text)[:1]:
        names |= {f"examples.{maker}": f"src.tasks.{maker}", "data of dpo.py": f"data of {task}.py"}
        shutil.copy(maker_file(maker), project / f"src/tasks/{maker}.py")
        replace(project / f"src/tasks/{maker}.py", names)
    for path in (project / code, project / config):
        replace(path, names)
    has_weights = "sentence-transformers/all-MiniLM-L6-v2" in text
    if has_weights:
        write_weights(project)
    return Training(code, config, maker, has_weights)


def maker_file(maker: str) -> Path:
    stub = STUBS / f"{maker}.py"
    return stub if stub.exists() else TEMPLATE / f"examples/{maker}.py"


def own_config(project: Path, task: str) -> str:
    """Return the first config of the task that a CPU can train, written if there is none."""
    for file in sorted((project / "configs").glob("*.yaml")):
        text = file.read_text(encoding="utf-8")
        if f"\ntask:\n  name: {task}\n" in text and "/cpu.yaml" in text:
            return f"configs/{file.name}"
    (project / f"configs/{task}.yaml").write_text(f"run_name: {task}\ntask:\n  name: {task}\n", encoding="utf-8")
    return f"configs/{task}.yaml"


def write_weights(project: Path) -> None:
    """Write the module that finds the pretrained encoder, without what is for the chat model."""
    text = (TEMPLATE / "examples/weights.py").read_text(encoding="utf-8")
    for pattern, by in (
        (r'    "chat": .*?\n    \),\n', ""),
        (r"def convert.*?(?=if __name__)", ""),
        (r"import (?:contextlib|io)\n", ""),
        (r", as_user_error(?=\n)", ""),
        (r"(?<=Path\(temporary, )\"package\"\), Path\(temporary, \"model\"\)", '"package")'),
        (r"package, model = ", "package = "),
        (r'        if source.suffix == ".gguf":.*?model.rename', "        source.rename"),
        (r"`make chat` and `make classify`", "`make train`"),
        (r"examples\.weights chat ", "src.tasks.weights"),
        (r"a GGUF file, or a folder", "a folder"),
        (r"make chat MODEL", "make train MODEL"),
        (r"sys\.argv\[1\]", '"classify"'),
    ):
        text, found = re.subn(pattern, by, text, flags=re.S)
        assert found, pattern
    (project / "src/tasks/weights.py").write_text(text, encoding="utf-8")


def keep_one_task(project: Path, task: str, training: Training) -> None:
    """Make the task the first in the map, which is the default, and remove the others' configs and MNIST."""
    tasks = project / "src/tasks/__init__.py"
    lines = tasks.read_text(encoding="utf-8").splitlines(keepends=True)
    moved = f"{training.code[:-3].replace('/', '.')}:{TASKS[task].partition(':')[2]}"
    own = f'    "{task}": "{moved if training.code != code_of(task) else MAP[task]}",\n'
    goes = [f'    "{task}": "{MAP[task]}"', *(['    "mnist":'] if task != "mnist" else [])]
    lines = [line for line in lines if not line.startswith(tuple(goes))]
    lines.insert(lines.index("TASKS = {\n") + 1, own)
    tasks.write_text("".join(lines), encoding="utf-8")
    kept = {training.config, *(["configs/mnist.yaml", "sweeps/mnist.yaml"] if task == "mnist" else [])}
    gone = [*project.glob("configs/*.yaml"), *project.glob("sweeps/*.yaml")]
    gone += project.glob("src/tasks/mnist*.py") if task != "mnist" else []
    gone += [page for page in project.glob("docs/*") if page.stem not in PAGES]
    for file in gone:
        if str(file.relative_to(project)) not in kept:
            file.unlink()
    for folder in ("examples", "scripts"):
        shutil.rmtree(project / folder, ignore_errors=True)


def write_makefile(file: Path, task: str, training: Training) -> None:
    """Make `make train` train the task, and leave out what only this project does."""
    text = file.read_text(encoding="utf-8")
    choose, run = f"$(call choose_run,{Path(training.config).stem})", f"--config {training.config} --run_name=$$run"
    train = f"{choose}; \\\n\t$(TRAIN) {run} $(ARGS)"
    if training.has_weights:
        model = "model=$(or $(MODEL),$$($(BIN)/python -m src.tasks.weights))"
        train = f"{model} && {choose} && \\\n\t$(TRAIN) {run} --task.model=$$model $(ARGS)"
    needs = "setup data" if training.maker else "setup"
    rules = f"train: {needs}  ## train with {training.config}; ARGS='--seed=1 …'\n\t@{train}\n\n"
    if training.maker:
        rules += "data: | setup  ## make the example data, if there is no folder data\n"
        rules += f"\t@$(BIN)/python -m src.tasks.{training.maker}\n\n"
    rules += "test: setup  ## test the task on a few rows, on one process and on two: a minute; ARGS='-k learns'\n"
    rules += "\t@OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(ARGS)\n\n"
    for pattern, by in (
        (r"^train: .*?(?=^lint:)", rules),
        (r"^-include .*\n", ""),
        (r" testall test-oldest test-machines(?= lint)", ""),
        (r"s/  # room\[:\]\.\*//; ", ""),
        (r"remove \.venv, \.venv-oldest and caches", "remove .venv and caches"),
        (r"\.venv \.venv-oldest \.\*_cache", ".venv .*_cache"),
        (r"\n{3,}", "\n\n"),
    ):
        text, found = re.subn(pattern, by.replace("\\", r"\\"), text, flags=re.M | re.S if "?=^" in pattern else re.M)
        assert found, pattern
    file.write_text(text, encoding="utf-8")


def write_own_files(project: Path, plan: Plan, training: Training) -> None:
    """Write what is about the task and nothing else: README, tests, and the likes of them."""
    task = plan.task
    stub = STUBS / f"{task}.md"
    text = stub.read_text(encoding="utf-8") if stub.exists() else f"{about(task)}\n---\n{ITS_DATA}"
    what, data = (part.strip() for part in text.split("\n---\n"))
    values = {
        "what": what,  # these first: they have some of the others
        "data": data,
        "name": plan.name,
        "task": task,
        "code": training.code,
        "config": training.config,
        "run": f"runs/{run_name(project, plan, training)}",
        "installs": ", make the example data" if training.maker else "",
    }
    for target in ("README.md", "AGENTS.md", ".github/workflows/test.yml"):
        text = (STUBS / Path(target).name).read_text(encoding="utf-8")
        (project / target).write_text(filled(text, values), encoding="utf-8")
    stub = STUBS / f"test_{task}.py"
    tests = (stub if stub.exists() else STUBS / "test_other.py").read_text(encoding="utf-8")
    for line, shared in SHARED_STUBS.items():
        tests = tests.replace(line, (STUBS / shared).read_text(encoding="utf-8"))
    (project / f"tests/test_{task}.py").write_text(tests.replace("stub_task", task), encoding="utf-8")
    if (project / "src/tracking/wandb.py").exists() and task != "mnist":
        (project / "sweeps").mkdir(exist_ok=True)
        text = (STUBS / "sweep.yaml").read_text(encoding="utf-8")
        (project / f"sweeps/{task}.yaml").write_text(filled(text, values), encoding="utf-8")


def run_name(project: Path, plan: Plan, training: Training) -> str:
    """Return the name that `make train` gives its run: the config's, or else the task's."""
    named = re.search(r"^run_name: (\S+)", (project / training.config).read_text(encoding="utf-8"), re.M)
    return named[1] if named else plan.task


def filled(text: str, values: dict[str, str]) -> str:
    for name, value in values.items():
        text = text.replace(f"{{{name}}}", value)
    return text


def name_what_is_there(project: Path, plan: Plan, training: Training) -> None:
    """Name the project, its config and its runs wherever others are named, and cut references to what is gone."""
    names = {"accelerate-template": plan.name}
    patterns = [
        (r"(?<=--config[= ])configs/\w+\.yaml", training.config),
        (
            r"\b(?<=runs/)(?:mnist|digits|chat|chats|pretrain|classify|a)(?=[\s/`*.,)])",
            run_name(project, plan, training),
        ),
    ]
    if plan.task != "mnist":
        names |= {"sweeps/mnist.yaml": f"sweeps/{plan.task}.yaml", "--task=mnist hides": f"--task={plan.task} hides"}
        names |= {"only to download MNIST; must": "must", "  # the bundled digits": ""}
    for file in project.rglob("*"):
        if file.is_file() and not file.is_symlink():
            old = text = file.read_text(encoding="utf-8", errors="surrogateescape")  # as it is, whatever it is
            for before, after in names.items():
                text = text.replace(before, after)
            for pattern, by in patterns:
                text = re.sub(pattern, by, text)
            if file.suffix == ".md":  # the comment of a line that has become too long
                text = re.sub(r"(?m)^(?=.{121})(\w.*?) +# .*$", r"\1", text)
            if text != old:
                file.write_text(text, encoding="utf-8", errors="surrogateescape")
    for name in (".gitignore", ".dockerignore"):
        lines = (project / name).read_text(encoding="utf-8").splitlines(keepends=True)
        (project / name).write_text("".join(line for line in lines if "gpu_proof" not in line), encoding="utf-8")
    project_file = project / "pyproject.toml"
    text, found = re.subn(
        "^description = .*$",
        lambda _: f"description = {json.dumps(about(plan.task))}",
        project_file.read_text(encoding="utf-8"),
        flags=re.M,
    )
    assert found
    project_file.write_text(text, encoding="utf-8")
    cut_comments(project, {".py", ".yaml", ".yml", ".sbatch", ".c"})


def replace(file: Path, changes: dict[str, str]) -> None:
    text = file.read_text(encoding="utf-8")
    for old, new in changes.items():
        text = text.replace(old, new)
    file.write_text(text, encoding="utf-8")


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


if __name__ == "__main__":
    main(Plan(*(os.environ[f"NEW_{word}"] for word in ("NAME", "DEST", "TASK", "WITHOUT"))))
