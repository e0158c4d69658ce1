"""The snippets of the documentation: its fenced and indented blocks, and what stands in `backticks`."""

from __future__ import annotations

import re
import textwrap
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGES = ("README.md", "CONTRIBUTING.md", *sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md")))

_FENCE = re.compile(r"^ *(```+|~~~+) *(\S*)")
_INDENTED = re.compile(r"^(    |\t)")
_SPAN = re.compile(r"(?<!`)`([^`]+)`(?!`)")


@dataclass(frozen=True)
class Snippet:
    """A block or a span.

    Attributes:
        kind: the language of a fenced block ("output" for one without), "indented" or "span".
        line: where its text begins.
    """

    page: str
    line: int
    kind: str
    text: str

    def __str__(self) -> str:
        """Its place, for the name of a test."""
        return f"{self.page}:{self.line}"


def read(page: str, text: str | None = None) -> tuple[list[Snippet], list[Snippet]]:
    """The blocks and the spans of a page, or of a text that stands for it. A fence that isn't closed is an error."""
    lines = ((ROOT / page).read_text() if text is None else text).splitlines()
    blocks: list[Snippet] = []
    prose: list[str] = []  # the same lines, without those of blocks
    i = 0
    while i < len(lines):
        start = i
        if fence := _FENCE.match(lines[i]):
            end = next((n for n, line in enumerate(lines) if n > start and line.strip() == fence[1]), None)
            if end is None:
                raise ValueError(f"{page}:{start + 1}: this fence is never closed")
            i, kind, body = end + 1, fence[2] or "output", lines[start + 1 : end]
        elif _INDENTED.match(lines[i]):
            # Whatever stands before it: nothing is taken for the continuation of a list. A blank line may be within.
            while i < len(lines) and (_INDENTED.match(lines[i]) or (not lines[i].strip() and _goes_on(lines, i))):
                i += 1
            kind, body = "indented", lines[start:i]
        else:
            prose.append(lines[i])
            i += 1
            continue
        begin = start + 1 if kind == "indented" else start + 2
        blocks.append(Snippet(page, begin, kind, textwrap.dedent("\n".join(body)) + "\n"))
        prose += [""] * (i - start)
    return blocks, _spans(page, prose)


def _goes_on(lines: list[str], i: int) -> bool:
    """Is the next line that isn't blank an indented one?"""
    return next((bool(_INDENTED.match(line)) for line in lines[i:] if line.strip()), False)


def _spans(page: str, prose: list[str]) -> list[Snippet]:
    """A span may go over the end of a line, not of a paragraph."""
    text = "\n".join(prose)
    found, at = [], 0
    for paragraph in re.split(r"(\n\s*\n)", text):
        for span in _SPAN.finditer(paragraph):
            line = text.count("\n", 0, at + span.start()) + 1
            found.append(Snippet(page, line, "span", " ".join(span[1].split())))
        at += len(paragraph)
    return found


BLOCKS = [block for page in PAGES for block in read(page)[0]]
SPANS = [span for page in PAGES for span in read(page)[1]]
