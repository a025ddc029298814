"""The links of pages, and where they lead."""

import re
from collections.abc import Iterator
from pathlib import Path

from tests.launching import PROJECT

LINK = re.compile(r"!?\[((?:[^][]|\[[^]]*\])*)\]\(([^)\s]+)\)")


def pages() -> list[Path]:
    return sorted([*PROJECT.glob("*.md"), *PROJECT.glob("docs/**/*.md"), *PROJECT.glob("plan/*.md")])


def links_of(text: str) -> list[str]:
    return [target for _, target in LINK.findall(text)]


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
