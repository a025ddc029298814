"""Make the pictures in docs anew: `python scripts/take_pictures.py`. It takes two minutes and needs chromium.

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
from typing import Any

from playwright.sync_api import sync_playwright

PROJECT = Path(__file__).resolve().parent.parent
COMMAND = """\
accelerate launch --quiet --config_file accelerate_configs/cpu.yaml \\
    train.py --config configs/digits.yaml --eval_every=115
"""
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


def in_terminal(command: str, folder: Path) -> str:
    """Run a shell's command in a terminal, and return what it writes there. Exit if it fails."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = os.environ | {"TERM": "xterm-256color", "PATH": path, "NETRC": os.devnull}
    environment.setdefault("OMP_NUM_THREADS", str(os.cpu_count()))  # as the Makefile; else the launcher prints a notice
    environment.pop("WANDB_API_KEY", None)  # NETRC has W&B's credentials, too
    streams: Any = dict.fromkeys(("stdin", "stdout", "stderr"), theirs)
    process = subprocess.Popen(command, shell=True, cwd=folder, env=environment, **streams)
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


def screen(output: str) -> list[str]:
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
            if column == COLUMNS:
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
    """Have chromium draw a report as PNG, down to its second row of curves."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path="/usr/bin/chromium", args=["--no-sandbox"])
        tab = browser.new_page(viewport={"width": 1240, "height": 900}, color_scheme="light")
        tab.goto(page.as_uri())
        below = tab.locator(".curves figure").nth(6).bounding_box()
        assert below
        tab.screenshot(path=picture, clip={"x": 0, "y": 0, "width": 1240, "height": below["y"] - 10})


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for path in ("train.py", "src", "accelerate_configs", "configs"):
            (folder / path).symlink_to(PROJECT / path)
        shown = f"$ {COMMAND}".replace("\n", "\r\n") + in_terminal(COMMAND, folder)
        (PROJECT / "docs/run.svg").write_text(drawn(screen(shown)), encoding="utf-8")
        photograph(folder / "runs/digits/report.html", PROJECT / "docs/report.png")
    course = PROJECT / "docs/learn/pictures.py"
    subprocess.run([sys.executable, course], check=True)


if __name__ == "__main__":
    main()
