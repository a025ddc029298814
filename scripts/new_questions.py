"""Ask for what `make new` was not told: the project's name and folder, its task, and which rooms it does without."""

import ast
import re
from collections.abc import Callable, Iterator
from difflib import get_close_matches
from pathlib import Path

from rooms import ABOUT, FILES

TEMPLATE = Path(__file__).resolve().parent.parent
MAP = dict(re.findall(r'"(\w+)": "([\w.]+:\w+)"', (TEMPLATE / "src/tasks/__init__.py").read_text(encoding="utf-8")))
"""The map of tasks, read as text: importing it would need packages."""


def task_path(path: str) -> str:
    """Return where a task is defined, which its settings name if the map has those."""
    module, _, name = path.partition(":")
    code = (TEMPLATE / f"{module.replace('.', '/')}.py").read_text(encoding="utf-8")
    own = code.partition(f"class {name}(")[2].partition("\nclass ")[0]
    named = re.search(r'task_class: ClassVar\[str\] = "(.*)"', own)
    return named[1] if named else path


TASKS = {name: task_path(path) for name, path in MAP.items()}
"""Where each task is defined."""
TASKS.pop("streamed_lm", None)  # which comes with causal_lm, unless `streaming` is left out


def code_of(task: str) -> str:
    """Return the path of the file that defines a task."""
    return f"{TASKS[task].partition(':')[0].replace('.', '/')}.py"


def about(task: str) -> str:
    """Return the first sentence of the docstring of a task's class."""
    tree = ast.parse((TEMPLATE / code_of(task)).read_text(encoding="utf-8"))
    name = TASKS[task].partition(":")[2]
    (node,) = (node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name)
    return re.split(r"(?<=\.)\s", ast.get_docstring(node) or "")[0]


def is_part_of(task: str, room: str) -> bool:
    """Return whether the file of a task belongs to the room."""
    return any(code_of(task).startswith((f"{path}/", path.replace("*", ""))) for path in FILES[room].split())


def task_mistakes(task: str) -> Iterator[str]:
    if task not in TASKS:
        yield unknown(task, [*TASKS])


def room_mistakes(rooms: list[str], task: str) -> Iterator[str]:
    for room in rooms:
        if room not in FILES:
            yield unknown(room, [*FILES])
        elif task in TASKS and is_part_of(task, room):
            yield f"{room}: the task {task} needs it"


def unknown(word: str, known: list[str]) -> str:
    guess = "".join(f", did you mean {match}?" for match in get_close_matches(word, known, 1))
    return f"{word}: not known{guess} ({', '.join(known)})"


def rooms_in(words: str, task: str) -> list[str]:
    """Return the rooms that an answer names. All of them means all that the task can do without."""
    if words.strip() == "all":
        return [room for room in FILES if task not in TASKS or not is_part_of(task, room)]
    return [] if words.strip() == "none" else words.replace(",", " ").split()


def ask(question: str, default: str, mistakes: Callable[[str], Iterator[str]]) -> str:
    """Ask until an answer is free of mistakes. Return it, or the default if it is empty."""
    while True:
        answer = input(f"{question} [{default}]: ").strip() or default
        errors = list(mistakes(answer))
        if not errors:
            return answer
        print(*(f"  {error}" for error in errors), sep="\n")


def ask_task() -> str:
    """Show the tasks, numbered, and return the name of the chosen one."""
    numbers = {str(number): task for number, task in enumerate(TASKS, start=1)}
    print("\nWhat does it train?")
    for number, task in numbers.items():
        print(f"  {number}  {task:<22}{about(task)}")
    answer = ask("Task, by number or name", next(iter(TASKS)), lambda word: task_mistakes(numbers.get(word, word)))
    return numbers.get(answer, answer)


def ask_rooms(task: str) -> str:
    """Show the rooms that the task can do without, and return the answer: names, all or none."""
    offered = {room: line for room, line in ABOUT.items() if not is_part_of(task, room)}
    print("\nWhat can it do without?")
    for room, line in offered.items():
        print(f"  {room:<11}{line}")
    default = "text" if "text" in offered else "none"
    return ask("Leave out, by name, all or none", default, lambda words: room_mistakes(rooms_in(words, task), task))
