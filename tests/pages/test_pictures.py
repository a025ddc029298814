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


def test_a_terminal_is_drawn_as_it_is_in_the_end(tmp_path: Path) -> None:
    """Tried without the move to the line above: the inner bar stays; without escape: not XML."""
    (tmp_path / "program.py").write_text(PROGRAM)
    output = in_terminal(f"PYTHONPATH={Path.cwd()} {sys.executable} program.py", tmp_path)
    assert "inner" in output
    lines = screen(output)
    assert lines[:2] == ["a line"] * 2
    assert lines[2].startswith("100% ██████████ 2/2  eta 00:00")
    assert lines[3:] == ["<" * COLUMNS, "<"]
    texts = [text.text for text in ElementTree.fromstring(drawn(lines)).iter("{http://www.w3.org/2000/svg}text")]
    assert texts == lines
