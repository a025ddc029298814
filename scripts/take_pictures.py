"""Make the pictures in docs anew: `make pictures`, two minutes. It needs Debian's chromium.

The digits are trained in a terminal of 80 columns, which docs/run.svg shows at the end of the run; docs/report.png is
the top of its report. docs/learn/pictures.py draws the course's pictures.
"""

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import tempfile
import termios
from html import escape
from pathlib import Path

from playwright.sync_api import sync_playwright

PROJECT = Path(__file__).resolve().parent.parent
RUN = "accelerate launch --config_file accelerate_configs/cpu.yaml train.py --config configs/digits.yaml"
MORE = "--eval_every=115"
"""Evaluates four times rather than twenty, to fit the picture."""
COLUMNS, ROWS = 80, 40
CELL, LINE = 8.4, 20
"""Width and height of a character, in pixels."""
STYLE = """\
<style>
rect { fill: #161b22; stroke: #484f58 }
text { fill: #e6edf3; font: 14px ui-monospace, SFMono-Regular, Menlo, Consolas, "DejaVu Sans Mono", monospace;
  white-space: pre }
@media (prefers-color-scheme: light) { rect { fill: #f6f8fa; stroke: #d0d7de } text { fill: #1f2328 } }
</style>"""


def in_terminal(command: list[str], folder: Path, columns: int = COLUMNS, **variables: str) -> str:
    """Run a command in a terminal, and return what it writes there. Raise an error if it fails."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, columns, 0, 0))
    environment = {"TERM": "xterm-256color", **variables}
    process = subprocess.Popen(
        command, cwd=folder, stdin=theirs, stdout=theirs, stderr=theirs, env=os.environ | environment
    )
    os.close(theirs)
    written = b""
    try:
        while part := os.read(ours, 65536):
            written += part
    except OSError:  # how Linux says that the last process has closed the terminal
        pass
    os.close(ours)
    output = written.decode(errors="replace")
    if process.wait():
        sys.exit(output)
    return output


def screen(output: str, columns: int = COLUMNS) -> list[str]:
    """Return the lines that a terminal shows in the end. It knows what a run writes: text, new lines, and tqdm's moves
    to the start of a line and to the line above."""
    lines, row, column = [""], 0, 0
    for word in re.findall(r"\x1b\[[\d;?]*[A-Za-z]|[\s\S]", output):
        if word == "\r":
            column = 0
        elif word == "\n":
            row += 1
        elif word == "\x1b[A":
            row -= 1
        elif word[0] != "\x1b":
            if column == columns:
                row, column = row + 1, 0
            lines += [""] * (row + 1 - len(lines))
            line = lines[row].ljust(column)
            lines[row] = line[:column] + word + line[column + 1 :]
            column += 1
    return [line.rstrip() for line in lines]


def drawn(lines: list[str]) -> str:
    """Return a picture of these lines, as SVG. Its text has fixed widths, whatever the font."""
    width, height = CELL * COLUMNS + 40, LINE * len(lines) + 30
    texts = [
        f'<text x="20" y="{LINE * row + 30}" textLength="{CELL * len(line):.1f}">{escape(line)}</text>'
        for row, line in enumerate(lines)
        if line
    ]
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height}">'
    frame = f'<rect x="0.5" y="0.5" width="{width - 1:.0f}" height="{height - 1}" rx="8"/>'
    return "\n".join([head, STYLE, frame, *texts, "</svg>", ""])


def photograph(page: Path, picture: Path) -> None:
    """Have chromium draw the top of a page as PNG."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path="/usr/bin/chromium", args=["--no-sandbox"])
        tab = browser.new_page(viewport={"width": 1240, "height": 880}, color_scheme="light")
        tab.goto(page.as_uri())
        tab.screenshot(path=picture)


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for path in ("train.py", "src", "accelerate_configs", "configs"):
            (folder / path).symlink_to(PROJECT / path)
        command = [f"{Path(sys.executable).parent}/accelerate", *RUN.split()[1:], MORE]
        output = in_terminal(command, folder, WANDB_MODE="offline")
        (PROJECT / "docs/run.svg").write_text(drawn(screen(f"$ {RUN} {MORE}\r\n{output}")), encoding="utf-8")
        photograph(folder / "runs/digits/report.html", PROJECT / "docs/report.png")
    course = PROJECT / "docs/learn/pictures.py"
    subprocess.run([sys.executable, course], check=True)


if __name__ == "__main__":
    main()
