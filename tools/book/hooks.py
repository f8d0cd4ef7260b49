"""What MkDocs is told about the pages beside mkdocs.yml: their navigation, and what their comments mean.

The pages are written for GitHub and for the tests that hold them to the sources. Here their links to files become links
to pages of the book, excerpts get their file and line, equations are set, answers fold, and terms get tooltips.
"""

import json
import re
import sys
from functools import cache
from html import escape
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from fontTools import subset
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.nav import Navigation, Section
from mkdocs.structure.pages import Page
from pygments.lexers import find_lexer_class_for_filename

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
KEPT = (".md", ".svg", ".png")  # files of docs/ that the book has as they are
WEB = ROOT / "build" / "web"  # the page in which the model runs, if it is built: run/ in the book
sys.path.insert(0, str(ROOT))

from tools.book.equations import FONT_SIGNS, NotMathsError, set_block  # noqa: E402
from tools.book.glossary import Glossary, read_glossary, with_tooltips  # noqa: E402
from tools.book.one_page import one_page  # noqa: E402
from tools.book.orders import Order, Stop, reading_orders  # noqa: E402

# Pages from outside docs/, by their address in the book. All others have the name that they have in docs/.
ELSEWHERE = {"readme.md": "README.md", "models.md": "models/README.md"}
BLOCK = re.compile(
    r"(?:^<!--\s*(?P<said>(?:(?!-->).)*?)\s*-->\n+)?^```(?P<language>[^\n`]*)\n(?P<text>.*?)^```$", re.M | re.S
)
COMMENT = re.compile(r"^<!--.*?-->\n", re.M | re.S)
LINK = re.compile(r"""(?P<before>\]\(|(?:src|href)=")(?P<path>[^):#"\s]+)(?P<anchor>#[^)"\s]*)?(?=[)"])""")


built_pages: dict[str, str] = {}  # HTML by its file in the site


# ----------------------------------------------------------------------------
# What the pages say


@cache
def overview() -> str:
    """docs/README.md, which has the orders and the glossary."""
    return (ROOT / "docs" / "README.md").read_text(encoding="utf-8")


@cache
def orders() -> list[Order]:
    """Its reading orders."""
    return reading_orders(overview())


@cache
def glossary() -> Glossary:
    """Its glossary."""
    return read_glossary(overview())


def repository_path(src_uri: str) -> str:
    """The file of the repository that a page of the book is made of."""
    return ELSEWHERE.get(src_uri, f"docs/{src_uri}")


def book_path(path: str) -> str:
    """The page of the book, or the picture, that shows a file of the repository."""
    for src_uri, elsewhere in ELSEWHERE.items():
        if path == elsewhere:
            return src_uri
    return path.removeprefix("docs/") if path.endswith(KEPT) else f"source/{path}.md"


def linked_path(src_uri: str, link: str) -> str:
    """The file of the repository to which a page links."""
    return str(((ROOT / repository_path(src_uri)).parent / link).resolve().relative_to(ROOT))


def shown_sources(src_uri: str, markdown: str) -> set[str]:
    """Sources that a page has excerpts of, or links."""
    excerpts = {m["said"].removeprefix("excerpt:").strip() for m in BLOCK.finditer(markdown) if is_excerpt(m)}
    links = {linked_path(src_uri, m["path"]) for m in LINK.finditer(BLOCK.sub("", markdown))}
    return excerpts | {path for path in links if not path.endswith(KEPT)}


def is_excerpt(block: re.Match[str]) -> bool:
    """Whether a block is lines of a source."""
    return (block["said"] or "").startswith("excerpt:")


def short_title(src_uri: str) -> str:
    """A page's heading, up to its colon."""
    heading = re.search(r"^# (.*)$", (ROOT / repository_path(src_uri)).read_text(encoding="utf-8"), re.M)
    return heading[1].partition(":")[0]


def page_of(stop: Stop) -> str:
    """The page of the book at a stop."""
    return book_path(linked_path("README.md", stop.page))


# ----------------------------------------------------------------------------
# Events of MkDocs, in the order in which they come


def on_config(config: MkDocsConfig) -> None:
    """Navigation: a section per reading order."""
    config.nav = ["README.md"]
    for order in orders():
        pages = dict.fromkeys(page_of(stop) for stop in order.stops)
        config.nav.append({order.title: [{short_title(page): page} for page in pages]})
    if (WEB / "index.html").is_file():
        title = re.search(r"<title>(.*?)</title>", (WEB / "index.html").read_text(encoding="utf-8"), re.S)
        config.nav.insert(1, {title[1].strip() if title else "Run": "run/index.html"})
    config.mdx_configs["toc"]["slugify"] = anchor_of


def anchor_of(heading: str, _separator: str) -> str:
    """The anchor that GitHub makes of a heading."""
    return re.sub(r"[^\w\- ]", "", heading).strip().lower().replace(" ", "-")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Of docs/ the pages and pictures; pages from elsewhere; run/; a page for each source that the pages show."""
    kept = Files([f for f in files if f.src_dir != config.docs_dir or f.src_uri.endswith(KEPT)])
    kept.append(File.generated(config, "book.css", abs_src_path=str(HERE / "book.css")))
    for src_uri, path in ELSEWHERE.items():
        kept.append(File.generated(config, src_uri, abs_src_path=str(ROOT / path), inclusion=InclusionLevel.NOT_IN_NAV))
    for path in sorted(p for p in WEB.rglob("*") if p.is_file() and (WEB / "index.html").is_file()):
        kept.append(File.generated(config, f"run/{path.relative_to(WEB).as_posix()}", abs_src_path=str(path)))
    sources: set[str] = set()
    for page in list(kept.documentation_pages()):
        sources |= shown_sources(page.src_uri, page.content_string)
    for path in sorted(sources):
        content = source_page(path)
        kept.append(File.generated(config, book_path(path), content=content, inclusion=InclusionLevel.NOT_IN_NAV))
    return kept


def source_page(path: str) -> str:
    """A page with all of a source."""
    text = (ROOT / path).read_text(encoding="utf-8")
    lexer = find_lexer_class_for_filename(path)
    language = lexer.aliases[0] if lexer else "text"
    head = f"---\ntitle: {path}\nsearch: {{exclude: true}}\nhide: [toc]\n---\n# `{path}`\n\n"
    return f'{head}~~~~~~~~ {{ .{language} linenums="1" }}\n{text}~~~~~~~~\n'


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """The page in the Markdown that MkDocs reads."""
    src_uri = page.file.src_uri
    if src_uri.startswith("source/"):
        return markdown
    out, at = [], 0
    for block in BLOCK.finditer(markdown):
        out += [prose(markdown[at : block.start()], src_uri), fenced(block, src_uri)]
        at = block.end()
    return "".join(out) + prose(markdown[at:], src_uri)


def prose(text: str, src_uri: str) -> str:
    """Text between blocks."""

    def in_book(m: re.Match[str]) -> str:
        return f"{m['before']}{book_path(linked_path(src_uri, m['path']))}{m['anchor'] or ''}"

    text = LINK.sub(in_book, COMMENT.sub("", text))
    # In a table GitHub takes `\|` for a bar that ends no cell, also in code.
    text = re.sub(
        r"^\|.*", lambda row: re.sub(r"`[^`]*`", lambda code: code[0].replace(r"\|", "|"), row[0]), text, flags=re.M
    )
    return text.replace("<details>", '<details markdown="1">')


def fenced(block: re.Match[str], src_uri: str) -> str:
    """A block, by what the comment in front of it says."""
    kind, _, rest = (block["said"] or "").partition(":")
    language, options = block["language"] or "text", ""
    if kind == "equation":
        try:
            return "\n" + set_block(block["text"]) + "\n"
        except NotMathsError as error:
            raise PluginError(f"{repository_path(src_uri)}: no equation: {error}: {block['text']}") from None
    if kind == "excerpt":
        path = rest.strip()
        before, found, _ = ("\n" + (ROOT / path).read_text(encoding="utf-8")).partition("\n" + block["text"])
        if not found:
            raise PluginError(f"{repository_path(src_uri)}: these lines are not in {path}:\n{block['text']}")
        line = before.count("\n") + 1
        options = f' title="{path}:{line}" linenums="{line}"'
    elif kind == "recipe":
        options = f' title="{escape(rest.strip())}"'
    return f"```` {{ .{language}{options} }}\n{block['text']}````"


def on_page_content(html: str, page: Page, **_: Any) -> str:
    """Links of excerpts to their sources, tooltips, ways on."""
    src_uri = page.file.src_uri
    if src_uri.startswith("source/"):
        return html
    html = re.sub(
        r'<span class="filename">([\w./-]+):(\d+)</span>',
        r'<span class="filename"><a href="source/\1.html#__codelineno-0-\2">\1, line \2</a></span>',
        html,
    )
    html = with_places(html, src_uri)
    html = re.sub(r"<table>.*?</table>", r'<div class="wide">\g<0></div>', html, flags=re.S)
    html = re.sub(r'<img [^>]*src="([^"]+)"[^>]*>', r'<a class="wide" href="\1">\g<0></a>', html)
    return with_tooltips(html, glossary(), "glossary" if src_uri == "README.md" else "") + ways_on(src_uri)


@cache
def places() -> dict[str, dict[str, str]]:
    """Where the page in run/ shows steps, words, sections (places() of web/page_data.py); none if it is not built."""
    data = WEB / "data.json"
    found = json.loads(data.read_text(encoding="utf-8")) if data.is_file() else {}
    return found.get("places", {"steps": {}, "words": {}, "sections": {}})


def to_place(text: str, place: str | None) -> str:
    """HTML as a link to a place of the page in run/; as it is if there is none."""
    return text if place is None else f'<a class="run" href="run/index.html#{escape(place)}">{text}</a>'


def with_places(html: str, src_uri: str) -> str:
    """The steps of the forward pass, below their headings, and the glossary's rows, as links to the page in run/."""
    steps, words, sections = (places()[kind] for kind in ("steps", "words", "sections"))
    if src_uri == "forward-pass.md":
        for anchor, place in sections.items():
            link = to_place("Step by step, in this browser", place)
            html = re.sub(rf'<h2 id="{anchor}">.*?</h2>', lambda m, link=link: f"{m[0]}\n<p>{link}</p>", html)
        return re.sub(r"(?<=<p>)<code>[\w.]+</code>(?:[\s,()]*<code>[\w.]+</code>)*\)?(?=</p>)", named_steps, html)
    if src_uri != "README.md":
        return html
    before, heading, after = html.partition('id="glossary"')
    after = re.sub(r"<code>([\w.]+)</code>", lambda m: to_place(m[0], steps.get(m[1])), after)
    after = re.sub(r"(?<=<td>)[A-Za-z ]+(?=[<,:])", lambda m: to_place(m[0], words.get(m[0])), after)
    return before + heading + after


def named_steps(line: re.Match[str]) -> str:
    """Names of steps in a line as links: `layers.N.attn.norm.q`, `.s`. One with a dot in front continues the last."""
    steps, last = places()["steps"], ""

    def link(m: re.Match[str]) -> str:
        nonlocal last
        parts = last.split(".")
        tries = [".".join(parts[:n]) + m[1] for n in range(len(parts), 0, -1)] if m[1].startswith(".") else [m[1]]
        found = next((t for t in (t.removeprefix("layers.N.") for t in tries) if t in steps), None)
        last = found or last
        return to_place(m[0], steps.get(found or ""))

    return re.sub(r"<code>([\w.]+)</code>", link, line[0])


def ways_on(src_uri: str) -> str:
    """The pages before and after this one, in each order that has it."""
    rows = []
    for order in orders():
        pages = [page_of(stop) for stop in order.stops]
        if src_uri == "README.md":
            before, after = None, order.stops[0]
        elif src_uri in pages:
            at = pages.index(src_uri)
            before = order.stops[at - 1] if at > 0 else Stop("", "README.md", "")
            after = order.stops[at + 1] if at + 1 < len(pages) else None
        else:
            continue
        rows.append(f"<div><span>{order.title}</span>{way(before, 'prev', '← {}')}{way(after, 'next', '{} →')}</div>")
    if src_uri == "README.md":
        rows.append(
            '<div><span>To print</span><span></span><a rel="alternate" href="print.html">All pages as one</a></div>'
        )
    return f'<nav class="ways" aria-label="Previous and next">{"".join(rows)}</nav>' if rows else ""


def way(stop: Stop | None, rel: str, text: str) -> str:
    """A link to a stop, or an empty cell."""
    if stop is None:
        return "<span></span>"
    page = page_of(stop)
    address = ("index.html" if page == "README.md" else page.replace(".md", ".html")) + (
        "#" + stop.anchor if stop.anchor else ""
    )
    return f'<a rel="{rel}" href="{address}">{text.format(escape(short_title(page)))}</a>'


def on_post_page(output: str, page: Page, **_: Any) -> None:
    """Keeps what print.html is made of: every page but the sources."""
    if not page.file.src_uri.startswith("source/"):
        built_pages[page.file.dest_uri] = output


def on_post_template(output_content: str, template_name: str, **_: Any) -> str:
    """404.html by relative paths, so that the book may lie below any address."""
    if template_name != "404.html":
        return output_content
    return re.sub(r'((?:href|src)="|"base": ?"|new URL\(")/', r"\1./", output_content)


def on_post_build(config: MkDocsConfig) -> None:
    """print.html, and the font of the equations."""
    stops = [page_of(stop).replace(".md", ".html") for order in orders() for stop in order.stops]
    names = dict.fromkeys(["index.html", *stops, *built_pages])
    pages = {name: built_pages[name] for name in names}
    (Path(config.site_dir) / "print.html").write_text(one_page(pages), encoding="utf-8")
    write_font(Path(config.site_dir) / "equations.woff2")


def write_font(to: Path) -> None:
    """Of all signs of a font for equations those that ours use."""
    font = Path(find_spec("ziamath").origin).parent / "fonts" / "STIXTwoMath-Regular.ttf"
    options = subset.Options(flavor="woff2", ignore_missing_unicodes=True)
    with subset.load_font(font, options) as all_signs:
        subsetter = subset.Subsetter(options)
        subsetter.populate(unicodes=FONT_SIGNS)
        subsetter.subset(all_signs)
        subset.save_font(all_signs, to, options)


def on_page_context(context: dict[str, Any], page: Page, nav: Navigation, **_: Any) -> None:
    """A page in several orders is open in the navigation in all of them."""
    for section in nav.items:
        if isinstance(section, Section):
            section.active = page in section.children
