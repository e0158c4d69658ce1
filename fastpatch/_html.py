"""The HTML of reports and explanations in notebooks. All text is escaped, once, in here."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence


class Markup(str):
    """Text that is HTML already."""

    __slots__ = ()


def _escaped(content: object) -> str:
    return content if isinstance(content, Markup) else html.escape(str(content))


def element(tag: str, *contents: object) -> Markup:
    """An element without attributes around contents; what isn't Markup is escaped."""
    return Markup(f"<{tag}>{''.join(map(_escaped, contents))}</{tag}>")


def table(head: Sequence[object], rows: Iterable[Sequence[object]]) -> Markup:
    """A table with a line of heads."""
    heads = element("tr", *(element("th", cell) for cell in head))
    lines = (element("tr", *(element("td", cell) for cell in row)) for row in rows)
    return element("table", element("thead", heads), element("tbody", *lines))
