"""All pages of the book as one, to be printed: `make book-pdf`."""

import re

CONTENT = re.compile(r"<article[^>]*>(.*)</article>", re.S)
WAYS = re.compile(r'<nav class="ways".*?</nav>', re.S)


def one_page(pages: dict[str, str]) -> str:
    """The HTML of the contents of all pages, given by their names, in their order.

    Anchors get the name of their page in front, links between the pages lead to these, answers are open.
    """
    first = next(iter(pages.values()))
    head = re.search(r"<head>(.*?)</head>", first, re.S)[1]
    head = re.sub(r"<script.*?</script>", "", head, flags=re.S)
    contents = [f'<section class="printed">{content(name, html, pages)}</section>' for name, html in pages.items()]
    return (
        f'<!doctype html>\n<html lang="en" dir="ltr"><head>{head}</head>\n<body data-md-color-scheme="default">'
        f'<main class="md-typeset printed-book">{"".join(contents)}</main></body></html>\n'
    )


def content(name: str, html: str, pages: dict[str, str]) -> str:
    """The content of one page."""

    def inside(m: re.Match[str]) -> str:
        page, _, anchor = m[1].partition("#")
        page = page or name
        return f'href="#{place(page, anchor)}"' if page in pages else m[0]

    text = WAYS.sub("", CONTENT.search(html)[1])
    text = re.sub(r'<a class="headerlink".*?</a>', "", text)
    text = re.sub(r'\bid="([^"]*)"', lambda m: f'id="{place(name, m[1])}"', text)
    text = re.sub(r'\bhref="([^":]+)"', inside, text)
    return f'<a id="{place(name, "")}"></a>' + text.replace("<details>", "<details open>")


def place(name: str, anchor: str) -> str:
    """The anchor in the one page of an anchor in a page."""
    return f"{name}--{anchor}" if anchor else name
