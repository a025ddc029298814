"""The course in docs/learn: its scripts print and break as the pages say, and its links lead to what they quote."""

import re
import runpy
import signal
from itertools import pairwise
from pathlib import Path

import pytest

from tests.launching import BIN, PROJECT, Launch, Run, run_command, slow

LEARN = PROJECT / "docs" / "learn"
PAGES = {page.name: page.read_text() for page in sorted(LEARN.glob("*.md"))}
LESSONS = [name for name in PAGES if name[0].isdigit()]
NUDGE = f"""
import sys; sys.path.append({str(LEARN)!r})  # as when Python runs one of that folder
import torch
for layer in (torch.nn.Linear, torch.nn.modules.conv._ConvNd):
    def drawn_and_nudged(self, draw=layer.reset_parameters):
        draw(self)
        with torch.no_grad():
            for parameter in self.parameters(recurse=False):
                parameter.mul_(1 + SIGN * 10 * torch.finfo(torch.float32).eps)
    layer.reset_parameters = drawn_and_nudged
"""
"""Makes each weight at the start 10 to 20 units in its last place larger or smaller: 30 times what another order of
sums does to a printed number, and a third of what would change its digits."""
LARGER, SMALLER = (f"SIGN = {sign}\n{NUDGE}" for sign in (1, -1))


def blocks(lesson: str, heading: str, language: str) -> list[str]:
    """Return the code blocks of this language under a heading."""
    section = PAGES[lesson].split(f"\n## {heading}\n")[1].split("\n## ")[0]
    return re.findall(rf"^```{language}\n(.*?)^```$", section, re.DOTALL | re.MULTILINE)


def command(lesson: str) -> tuple[str, int]:
    """Return the script that the page runs, and on how many processes."""
    (line,) = blocks(lesson, "What it prints", "sh")
    found = re.fullmatch(r"torchrun --standalone --nproc-per-node=(\d) (docs/learn/\w+\.py)\n", line)
    assert found, line
    return found[2], int(found[1])


def check_output(run: Run, said: str) -> None:
    """Compare all but the timings."""
    printed, said = (re.sub(r" *[\d.,]+ ms\b", " # ms", text).strip() for text in (run.succeeded().stdout, said))
    assert printed == said


@pytest.mark.parametrize("lesson", [slow(lesson) if lesson[0] in "3456" else lesson for lesson in LESSONS])
@pytest.mark.parametrize("nudge", [LARGER, slow(SMALLER)], ids=["larger", "smaller"])
def test_the_file_prints_what_its_page_says(launch: Launch, lesson: str, nudge: str) -> None:
    """And its own assertions hold."""
    script, processes = command(lesson)
    run = launch("ddp", processes=processes, script=script, before=nudge)
    check_output(run, blocks(lesson, "What it prints", "text")[0])
    if lesson == "7-train.md" and nudge == LARGER:
        run = launch("fsdp", processes=2, script="docs/learn/from_here.py", before=nudge)
        check_output(run, blocks(lesson, "The same under FSDP", "text")[0])


@pytest.mark.parametrize(
    ("lesson", "number"),
    [
        slow(lesson, number) if number or lesson[0] in "3456" else (lesson, number)
        for lesson in LESSONS
        for number, _ in enumerate(blocks(lesson, "Break it", "diff"))
    ],
)
def test_it_breaks_as_its_page_says(launch: Launch, tmp_path: Path, lesson: str, number: int) -> None:
    """The last line on standard error says so: for an assertion, the only one."""
    script, processes = command(lesson)
    change = blocks(lesson, "Break it", "diff")[number].splitlines(keepends=True)
    old, new = ("".join(line[1:] for line in change if line[0] in signs) for signs in ("- ", "+ "))
    code = (PROJECT / script).read_text()
    assert code.count(old) == 1, f"{script} has this {code.count(old)} times:\n{old}"
    (tmp_path / "broken.py").write_text(code.replace(old, new))
    run = launch("ddp", processes=processes, script=str(tmp_path / "broken.py"), before=LARGER)
    assert run.exit_code != 0, run.stdout
    starting, *lines = [line for line in run.stderr.splitlines() if "Warning" not in line]
    assert starting == f"{processes} processes are starting …"
    said = blocks(lesson, "Break it", "text")[number].strip()
    assert lines[-1].endswith(said)
    where = re.fullmatch(rf"\S*broken\.py:(\d+), rank \d: {re.escape(said)}", lines[-1])
    assert bool(where) == said.startswith("AssertionError: ")
    assert len(lines) == 1 or not where, run.stderr


@pytest.mark.slow
def test_a_broken_script_ends_torchrun_with_one_line(tmp_path: Path) -> None:
    """Under the real one, whose own 80 lines would hide the one that matters."""
    for script in ("course.py", "data_parallel.py"):
        code = (LEARN / script).read_text()
        gone = blocks("2-data-parallelism.md", "Break it", "diff")[2].replace("\n-", "\n").removeprefix("-")
        (tmp_path / script).write_text(code.replace(gone, ""))
    torchrun = [str(BIN / "torchrun"), "--standalone", "--nproc-per-node=4", "data_parallel.py"]
    run = run_command(torchrun, tmp_path, cwd=tmp_path)
    starting, *lines = run.stderr.splitlines()
    assert starting == "4 processes are starting …"
    assert [f"docs/learn/{line}" for line in lines] == re.findall("^docs/learn/.*$", PAGES["README.md"], re.MULTILINE)
    assert run.exit_code == -signal.SIGUSR1


def test_the_pictures_show_what_the_pages_print() -> None:
    pictures = runpy.run_path(str(LEARN / "pictures.py"))
    for picture, height in pictures["PICTURES"].items():
        drawn, saved = pictures["draw"](picture, height), (LEARN / f"{picture.__name__}.svg").read_text()
        now, then = (re.findall(r">([^<>]+)</text>", svg) for svg in (drawn, saved))
        assert now == then, "run python docs/learn/pictures.py"


def test_each_page_ends_with_a_link_to_the_next() -> None:
    for page, following in pairwise(["README.md", *LESSONS]):
        assert re.findall(r"\]\(([^)]*)\)", PAGES[page])[-1] == following, page


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_to_the_lines_that_they_quote(page: str) -> None:
    wrong = []
    for target, line, quoted in re.findall(r"\]\((?!https?:)([^)#]*)(?:#L(\d+)|[^)]*)\)(?: `([^`]+)`)?", PAGES[page]):
        assert (LEARN / (target or page)).exists(), target
        lines = ["", *(LEARN / target).read_text().splitlines()] if line else []
        if line and not (quoted and quoted in lines[int(line)]):
            found = [number for number, text in enumerate(lines) if quoted in text]
            wrong.append(f"{target}#L{line} `{quoted}`: now in line {found or 'none: it has changed'}")
    assert not wrong, "\n".join([f"mend these links of {page}:", *wrong])
