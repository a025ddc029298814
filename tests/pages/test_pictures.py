"""The pictures in docs show what a terminal shows: scripts/take_pictures.py."""

import sys
from pathlib import Path
from xml.etree import ElementTree

from take_pictures import COLUMNS, drawn, in_terminal, screen

PROGRAM = """
from src.config.terminal import bar, say

with bar(total=2, leave=True) as outer:
    for _ in range(2):
        for _ in bar("inner", iterable=range(3), total=3):
            pass
        say("a line")
        outer.update()
say("<" * 81)
"""


def test_a_picture_shows_the_terminal_as_it_is_in_the_end(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    output = in_terminal(f"PYTHONPATH={Path.cwd()} {sys.executable} program.py", tmp_path)
    lines = screen(output)
    assert "inner" in output
    assert (lines[:2], lines[3:]) == (["a line"] * 2, ["<" * COLUMNS, "<"])
    assert lines[2].startswith("100% ██████████ 2/2  eta 00:00")
    texts = ElementTree.fromstring(drawn(lines)).iter("{http://www.w3.org/2000/svg}text")
    assert [text.text for text in texts] == lines
