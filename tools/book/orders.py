"""The reading orders of docs/README.md, which the book's navigation is made of.

A paragraph `**To learn how a language model runs**, ...` begins an order, and the numbered list behind it has its
steps. Every link of a step is a stop. The last paragraph of the section, which begins with `To add`, is an order of
its own.
"""

import re
from dataclasses import dataclass

LINK = re.compile(r"\[(?P<text>[^]]+)\]\((?P<target>[^)]+)\)")


@dataclass(frozen=True)
class Stop:
    """A page on the way, or a part of one."""

    text: str  # as the page says it
    page: str  # relative to docs/
    anchor: str  # of a heading in there; empty: all of it


@dataclass(frozen=True)
class Order:
    """Pages in the order in which somebody with this aim reads them."""

    title: str
    stops: tuple[Stop, ...]


def reading_orders(overview: str) -> list[Order]:
    """The orders of docs/README.md, given its text. Raises ValueError if it has none."""
    section = overview.partition("\n## Three ways\n")[2].partition("\n## ")[0]
    parts = re.split(r"^\*\*(To [^*]+)\*\*.*$", section, flags=re.M)
    if len(parts) < 3:
        raise ValueError("docs/README.md: no paragraphs **To ...** under ## Three ways")
    *_, last = parts
    parts[-1], _, more = last.partition("\n\nTo add ")
    titles, lists = [*parts[1::2], "To add"], [*parts[2::2], more]
    return [Order(title, tuple(stops(text))) for title, text in zip(titles, lists, strict=True)]


def stops(text: str) -> list[Stop]:
    """The stops of a list: a page once, unless a heading of it is named before or after."""
    found: list[Stop] = []
    for m in LINK.finditer(re.sub(r"\s*\n\s*", " ", text)):
        page, _, anchor = m["target"].partition("#")
        if page not in [stop.page for stop in found]:
            found.append(Stop(m["text"], page, anchor))
    return found
