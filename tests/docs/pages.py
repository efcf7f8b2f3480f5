"""The pages of the documentation, and their blocks, marks of blocks, links and headings.

A mark is an HTML comment right above a block, invisible to readers:

`<!-- not run: why; what checks it instead -->`  the block is not run; the mark names the file that checks it
`<!-- file: name -->`                            the content of a file with that name in the reader's folder
"""

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[2]
SITE = ROOT / "docs"
INDEX = SITE / "index.md"

FENCE = re.compile(r"^( *)```(\S*)\s*$")
MARK = re.compile(r"^<!--\s*(not run|file):\s*(.*?)\s*-->$")
LINK = re.compile(r"\]\(([^()\s]+)\)")
HEADING = re.compile(r"^#{1,6} (.*?)\s*$")
CODE = re.compile(r"`[^`]*`")
PORT = re.compile(r"\$\{(\w+):-\d{4,5}\}")


@dataclass(frozen=True)
class Block:
    """A fenced block, its marks, and the block with its expected output that follows it."""

    page: Path
    line: int
    language: str
    text: str
    marks: dict[str, str] = field(default_factory=dict)
    expected_output: "Block | None" = None

    @property
    def location(self) -> str:
        return f"{os.path.relpath(self.page, ROOT)}:{self.line}"


def pages() -> list[Path]:
    """Return all pages, those outside `docs/` included."""
    return [
        ROOT / "README.md",
        *sorted(SITE.rglob("*.md")),
        ROOT / "helm" / "tarn" / "README.md",
        *sorted((ROOT / "clients").rglob("README.md")),
    ]


def blocks(page: Path) -> list[Block]:
    """Return the fenced blocks of a page, in order. A `text` block is the expected output of the one before it."""
    result: list[Block] = []
    for block in _fenced(page):
        if block.language == "text" and result and result[-1].expected_output is None:
            before = result.pop()
            result.append(Block(page, before.line, before.language, before.text, before.marks, block))
        else:
            result.append(block)
    return result


def ports(page: Path) -> set[str]:
    """Return the names of variables with which ports of a page can be set: `${NAME:-8000}`."""
    return set(PORT.findall(page.read_text()))


def links(page: Path) -> list[tuple[int, str]]:
    """Return the targets of a page's links and pictures, each with its line."""
    return [(number, target) for number, line in _prose(page) for target in LINK.findall(CODE.sub("", line))]


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as code hosts generate them."""
    result: set[str] = set()
    for _, line in _prose(page):
        if heading := HEADING.match(line):
            text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading[1]).lower()
            anchor = re.sub(r"[^\w\- ]", "", text).replace(" ", "-")
            candidates = [anchor, *(f"{anchor}-{number}" for number in range(1, 100))]
            result.add(next(one for one in candidates if one not in result))
    return result


def _fenced(page: Path) -> Iterator[Block]:
    lines = enumerate(page.read_text().splitlines(), 1)
    marks: dict[str, str] = {}
    for number, line in lines:
        if opening := FENCE.match(line):
            inside: list[str] = []
            for _, content in lines:
                if FENCE.match(content):
                    break
                inside.append(content.removeprefix(opening[1]))
            else:
                raise AssertionError(f"{page}:{number}: the block has no end")
            yield Block(page, number, opening[2], "".join(f"{each}\n" for each in inside), marks)
        if mark := MARK.match(line):
            marks = marks | {mark[1]: mark[2]}
        elif line.strip():
            marks = {}


def _prose(page: Path) -> Iterator[tuple[int, str]]:
    """Yield the numbered lines of a page outside blocks."""
    fenced = False
    for number, line in enumerate(page.read_text().splitlines(), 1):
        if FENCE.match(line):
            fenced = not fenced
        elif not fenced:
            yield number, line
