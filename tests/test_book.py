"""The book, tools/book/: what is made of the pages' orders, glossary and equations; its server; and the site itself.

What looks at the site needs one that is as new as the pages: `make test-book` builds it first.
"""

import json
import re
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from functools import cache
from html import unescape
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from tests.test_docs import DOCUMENTS, ROOT, anchors, blocks, prose, read
from tools.book import serve
from tools.book.equations import NotMathsError, math, set_block, set_line
from tools.book.glossary import read_glossary, with_tooltips
from tools.book.orders import Stop, reading_orders

OVERVIEW = read(Path("docs/README.md"))
EXERCISES = read(Path("docs/exercises.md"))
PAGES = {path.name for path in DOCUMENTS if path.parent.name == "docs"}


# ----------------------------------------------------------------------------
# Reading orders


def test_orders_have_every_page():
    orders = reading_orders(OVERVIEW)
    assert [order.title for order in orders] == [
        *re.findall(r"^\*\*(To .*?)\*\*", OVERVIEW, re.M),
        "To add",
    ]
    assert {stop.page for order in orders for stop in order.stops} >= PAGES - {"README.md"}
    for order in orders:
        pages = [stop.page for stop in order.stops]
        assert len(set(pages)) == len(pages) >= 2, order.title


def test_orders_have_the_exercises():
    """Each way has those under one heading of the page, and says their numbers."""
    stops = [stop for order in reading_orders(OVERVIEW) for stop in order.stops if stop.page == "exercises.md"]
    _, *parts = re.split(r"^## (\w+)$", EXERCISES, flags=re.M)
    sections = {heading.lower(): text for heading, text in zip(parts[::2], parts[1::2], strict=True)}
    assert [stop.anchor for stop in stops] == [*sections]
    for stop in stops:
        first, last = map(int, re.fullmatch(r"[Ee]xercises (\d+) to (\d+)", stop.text).groups())
        numbers = [int(n) for n in re.findall(r"^\*\*(\d+)\. ", sections[stop.anchor], re.M)]
        assert numbers == list(range(first, last + 1))


def test_orders_that_are_not_there():
    with pytest.raises(ValueError, match="no paragraphs"):
        reading_orders(OVERVIEW.replace("**To ", "**For "))


# ----------------------------------------------------------------------------
# Glossary


def test_glossary_has_all_tables():
    glossary = read_glossary(OVERVIEW)
    assert glossary.terms["accumulator"].startswith("accumulator: the exact int32 sum")
    assert "model.embed_tokens" in glossary.terms["embedding"]
    assert "apply_rotary_pos_emb" in glossary.terms["RoPE"]
    assert glossary.terms["key projection"].endswith("trace: attn.k_proj; llama2.c: wk")
    assert "hidden_size" in glossary.names["dim"]
    words = re.search(r"^\| word \| meaning \|\n\|.*\n((?:\|.*\n)+)", OVERVIEW, re.M)
    for row in words[1].splitlines():
        for term in re.split("[,;] ", row.split("|")[1].strip()):
            assert term in glossary.terms


@pytest.mark.parametrize(
    ("html", "marked"),
    [
        ("<p>a group and a group</p>", ["group"]),
        ("<p>Groups</p>", ["Groups"]),
        ("<h2>one</h2><p>a tile</p><h2>two</h2><p>tiles</p>", ["tile", "tiles"]),
        ("<h2>a tile</h2><pre>a tile</pre><p><a>a tile</a> <code>tile x</code></p>", []),
        ("<p><a>a tile</a> tile</p>", ["tile"]),
        ('<span class="filename">new tile</span><p>tile</p>', ["tile"]),
        ("<p>the KV cache</p>", ["KV cache"]),
        ("<p>row-major, regroup, MACs</p>", ["MACs"]),
        ("<p>lines of code, exit codes, codes</p>", ["codes"]),
        ("<p><code>dim</code> of <code>dim</code>, <code>dims</code></p>", ["<code>dim</code>"]),
    ],
)
def test_tooltips(html: str, marked: list[str]):
    out = with_tooltips(html, read_glossary(OVERVIEW))
    assert re.findall(r"<abbr [^>]*>(.*?)</abbr>", out) == marked
    assert re.sub(r"</?abbr[^>]*>", "", out) == html


def test_no_tooltips_in_the_glossary():
    html = '<h2 id="glossary">x</h2><p>tile</p><h2 id="y">y</h2><p>tile</p>'
    assert with_tooltips(html, read_glossary(OVERVIEW), "glossary").count("<abbr") == 1


# ----------------------------------------------------------------------------
# Equations


def equation_blocks() -> list[tuple[Path, str]]:
    return [(path, block.text) for path in DOCUMENTS for block in blocks(read(path)) if block.source == "equation"]


def letters(text: str) -> str:
    """Letters and digits alone."""
    return re.sub(r"[\W_]", "", text)


def expected_letters(line: str) -> str:
    """Those of a line as it is typed, but for words that become signs."""
    line = re.sub(r"\bsum over ((?:\w+ )+?)of\b", lambda m: re.sub(r"\bin\b", "", m[1]), line)
    line = re.sub(r"\bsum of\b|\bsqrt\b", "", line)
    for word, sign in (("theta", "θ"), ("alpha", "α"), ("pi", "π")):
        line = re.sub(rf"\b{word}\b", sign, line)
    return letters(line)


@pytest.mark.parametrize(("path", "text"), equation_blocks(), ids=lambda value: str(value)[:30])
def test_equations_keep_every_name(path: Path, text: str):
    for line in filter(str.strip, text.splitlines()):
        shown = unescape(re.sub(r"<[^>]*>", "", set_line(line)))
        assert letters(shown) == expected_letters(line), f"{path}: {line}"


@pytest.mark.parametrize("path", DOCUMENTS, ids=str)
def test_equations_are_marked(path: Path):
    """A text block in which a name is followed by an equals sign, and which nothing else makes, is an equation."""
    for block in blocks(read(path)):
        if block.language == "text" and not block.source:
            assert not re.search(r"^[A-Za-z][\w'\[\]]* +<?= ", block.text, re.M), f"{path}:{block.line}"


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("a / (b + c)", ["<mfrac><mrow><mi>a</mi></mrow><mrow><mi>b</mi><mo>+</mo><mi>c</mi></mrow></mfrac>"]),
        ("(a) + (b)", ["<mo>+</mo>", '<mo stretchy="false">(</mo>']),
        ("tokens/s", ["<mi>tokens</mi>", "/</mo><mi>s</mi>"]),
        ("x[t][k]", ["<msub><mrow><mi>x</mi></mrow><mrow><mi>t</mi><mo>,</mo><mi>k</mi></mrow></msub>"]),
        ("sqrt(x + 1)", ["<msqrt><mi>x</mi><mo>+</mo><mn>1</mn></msqrt>"]),
        ("sum over k in g of x[k]", ["<munder><mo>∑</mo><mrow><mi>k</mi><mo>∈</mo><mi>g</mi></mrow></munder>"]),
        ("x^(-2i / n)", ["<msup>", '<mo form="prefix">−</mo><mn>2</mn>']),
        ("angle_i * Wq xq", ["<msub><mi>angle</mi><mi>i</mi></msub>", "<msub><mi>W</mi><mi>q</mi></msub>"]),
        ("head_dim", ["<mi>head_dim</mi>"]),
        ("max|x|^a", ["<msup>", ">|</mo><mi>x</mi><mo"]),
        ("bytes of weights", ["<mtext>bytes of weights</mtext>"]),
    ],
)
def test_equation_is_set(text: str, parts: list[str]):
    for part in parts:
        assert part in math(text)


@pytest.mark.parametrize("text", ["a +", "(a", "a)", "|a", "a / / b", "= ="])
def test_no_equation(text: str):
    with pytest.raises(NotMathsError):
        math(text)


def test_equation_and_remarks():
    html = set_block("y = a + b        a: (n,);  c = a / b, a row\n")
    left, right, note = re.findall(r'<div class="(?:left|right|note)">(.*?)</div>', html)
    assert "<mi>y</mi>" in left and "<mo>+</mo>" in right
    assert "<mfrac>" in note and note.endswith(", a row")


# ----------------------------------------------------------------------------
# The server


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    tmp_path = tmp_path_factory.mktemp("site")
    for name in ("index.html", "a.js", "a.mjs", "a.wasm", "a.svg", "run/index.html"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name, encoding="utf-8")
    server = serve.serve(tmp_path, 0)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/"
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("", "text/html"),
        ("run/", "text/html"),
        ("a.js", "text/javascript"),
        ("a.mjs", "text/javascript"),
        ("a.wasm", "application/wasm"),
        ("a.svg", "image/svg+xml"),
    ],
)
def test_server(served: str, name: str, kind: str):
    with urllib.request.urlopen(served + name, timeout=10) as answer:
        assert answer.headers.get_content_type() == kind
        assert answer.headers["Cross-Origin-Opener-Policy"] == "same-origin"
        assert answer.headers["Cross-Origin-Embedder-Policy"] == "require-corp"
        assert answer.headers["Content-Security-Policy"].startswith("default-src 'self' ")
        assert answer.read().decode() == (name if name.startswith("a.") else name + "index.html")


def test_server_has_no_other_files(served: str):
    for name in ("no.html", "../pyproject.toml", "%2e%2e/pyproject.toml"):
        with pytest.raises(urllib.error.HTTPError, match="404"):
            urllib.request.urlopen(served + name, timeout=10)


@pytest.mark.parametrize(
    ("folder", "port", "line"),
    [
        ("nowhere", "0", r"serve.py: nowhere: no index.html \(make book makes build/book\)"),
        ("tests", "70000", "serve.py: PORT=70000: expected a number from 0 to 65535"),
        ("tests", "x", "serve.py: PORT=x: expected a number from 0 to 65535"),
        ("", "taken", r"serve.py: PORT=\d+: Address already in use"),
    ],
)
def test_server_says_what_is_wrong(served: str, tmp_path: Path, folder: str, port: str, line: str):
    (tmp_path / "index.html").write_text("", encoding="utf-8")
    port = served.rstrip("/").rpartition(":")[2] if port == "taken" else port
    command = [sys.executable, "tools/book/serve.py", folder or str(tmp_path), port]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=30)
    assert done.returncode == 1
    assert re.fullmatch(line + "\n", done.stderr)


# ----------------------------------------------------------------------------
# The site

BOOK, WEB = ROOT / "build" / "book", ROOT / "build" / "web"
LOADS = {
    "script": "src",
    "img": "src",
    "link": "href",
    "iframe": "src",
    "source": "src",
    "audio": "src",
    "video": "src",
}


class Site(HTMLParser):
    """What a page of the site has: elements with their attributes, and the text in some of them."""

    def __init__(self, html: str):
        super().__init__()
        self.elements: list[tuple[str, dict[str, str]]] = []
        self.feed(html)
        self.anchors = {a[key] for _, a in self.elements for key in ("id", "name") if key in a}

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, {name: value or "" for name, value in attrs}))

    def all(self, tag: str, **wanted: str) -> list[dict[str, str]]:
        return [a for t, a in self.elements if t == tag and all(a.get(k.strip("_")) == v for k, v in wanted.items())]


def stale() -> str:
    """Why the site cannot be looked at; empty if it can."""
    if not (BOOK / "sitemap.xml").is_file():
        return "needs build/book: make test-book"
    sources = [ROOT / path for path in DOCUMENTS] + [p for p in (ROOT / "tools/book").glob("*.*") if p.is_file()]
    newest = max(path.stat().st_mtime for path in sources)
    return "" if (BOOK / "sitemap.xml").stat().st_mtime >= newest else "needs build/book as it is now: make test-book"


looks_at_site = pytest.mark.skipif(bool(stale()), reason=stale())


def address(page: Path | str) -> str:
    """The file of the site that shows a page of the repository."""
    path = str(page)
    special = {"docs/README.md": "index.html", "README.md": "readme.html", "models/README.md": "models.html"}
    return special.get(path) or path.removeprefix("docs/").replace(".md", ".html")


def site_page(stop: Stop) -> str:
    return address(stop.page.removeprefix("../") if stop.page.startswith("../") else f"docs/{stop.page}")


@cache
def site(name: str) -> Site:
    return Site(html(name))


@cache
def html(name: str) -> str:
    return (BOOK / name).read_text(encoding="utf-8")


def names() -> list[str]:
    """All pages of the site but those of run/, which have tests of their own, and the one for wrong addresses."""
    found = [path.relative_to(BOOK).as_posix() for path in BOOK.rglob("*.html")]
    return sorted(name for name in found if name != "404.html" and not name.startswith("run/"))


def article(name: str) -> str:
    return re.search(r"<article.*?</article>", html(name), re.S)[0]


def broken_links(name: str) -> list[str]:
    """Links of a page that lead to no file of the site, or to no anchor of one."""
    bad = []
    for _, attributes in site(name).elements:
        for link in (attributes.get("href"), attributes.get("src")):
            if link is None or urlsplit(link).scheme:
                continue
            path, _, anchor = link.partition("#")
            if path == "run/index.html":
                anchor = anchor.partition("?")[0]  # a view, and what it shows: tests/test_web.py goes there
            file = (BOOK / name).parent / unquote(path) if path else BOOK / name
            file = file / "index.html" if file.is_dir() else file
            inside = file.is_file() and file.resolve().is_relative_to(BOOK.resolve())
            if not inside or (anchor and not has_anchor(file, unquote(anchor))):
                bad.append(link)
    return bad


def has_anchor(file: Path, anchor: str) -> bool:
    target = site(file.relative_to(BOOK.resolve() if file.is_absolute() else BOOK).as_posix())
    return anchor in target.anchors


@looks_at_site
def test_links():
    assert len(names()) > len(DOCUMENTS) + 20
    bad = {name: links for name in [*names(), "404.html"] if (links := broken_links(name))}
    assert not bad


@looks_at_site
def test_nothing_is_loaded_from_elsewhere():
    for name in names():
        for tag, attributes in site(name).elements:
            loaded = attributes.get(LOADS.get(tag, ""), "")
            assert not urlsplit(loaded).netloc, f"{name}: {tag} {loaded}"
        assert not re.search(r"url\(\s*['\"]?(?:https?:)?//|@import", html(name)), name
    for path in [*BOOK.rglob("*.css"), *BOOK.glob("*.svg")]:
        text = path.read_text(encoding="utf-8")
        assert not re.search(r"url\(\s*['\"]?(?:https?:)?//|@import|xlink:href=\"http", text), path


@looks_at_site
def test_navigation():
    """A section for each order, with its pages in their order: all of docs/."""
    _, *sections = re.split(r'<nav class="md-nav" data-md-level="1"', html("models.html"))
    orders = reading_orders(OVERVIEW)
    assert len(sections) == len(orders)
    for order, section in zip(orders, sections, strict=True):
        section = section.partition("</nav>")[0]
        assert order.title in section
        found = re.findall(r'<a href="([\w-]+\.html)" class="md-nav__link', section)
        assert found == [site_page(stop) for stop in order.stops]
    for path in DOCUMENTS:
        if path.parent.name == "docs":
            assert f'href="{address(path)}"' in "".join(sections) or path.name == "README.md"


@looks_at_site
def test_previous_and_next():
    for order in reading_orders(OVERVIEW):
        stops = [site_page(stop) for stop in order.stops]
        for at, name in enumerate(stops):
            row = re.search(rf"<div><span>{order.title}</span>(.*?)</div>", html(name))[1]
            ways = dict(re.findall(r'<a rel="(prev|next)" href="([^"#]+)', row))
            assert ways.get("prev") == (stops[at - 1] if at else "index.html"), name
            assert ways.get("next") == (stops[at + 1] if at + 1 < len(stops) else None), name


@looks_at_site
@pytest.mark.parametrize("path", DOCUMENTS, ids=str)
def test_excerpts_say_where_they_are(path: Path):
    shown = re.findall(
        r'<span class="filename"><a href="source/([\w./-]+)\.html#__codelineno-0-(\d+)">\1, line \2</a></span>'
        r".*?<code>(.*?)</code>",
        article(address(path)),
        re.S,
    )
    texts = [block.text for block in blocks(read(path)) if block.source.startswith("excerpt:")]
    assert len(shown) == len(texts)
    for (file, line, code), text in zip(shown, texts, strict=True):
        assert unescape(re.sub(r"<[^>]*>", "", code)).strip() == text.strip()
        lines = (ROOT / file).read_text(encoding="utf-8").splitlines()[int(line) - 1 :]
        assert lines[: text.count("\n")] == text.splitlines()


@looks_at_site
@pytest.mark.parametrize("path", DOCUMENTS, ids=str)
def test_page_is_whole(path: Path):
    """Headings with GitHub's anchors, equations, answers, pictures; no Markdown is left over."""
    name, document = address(path), read(path)
    page, text = site(name), article(name)
    ids = {a["id"] for tag in ("h1", "h2", "h3", "h4") for a in page.all(tag) if "id" in a}
    assert ids >= anchors(document)
    n_equations = sum(1 for b in blocks(document) if b.source == "equation")
    assert text.count('<div class="equation">') == n_equations
    assert text.count("<math") >= n_equations
    folded = page.all("details")
    assert len(folded) == document.count("<details>") and not any("open" in a for a in folded)
    assert len(page.all("img")) == len(re.findall(r"^!\[|^<img ", document, re.M))
    said = re.sub(r"<pre.*?</pre>|<code.*?</code>|<math.*?</math>|<[^>]+>", "", text, flags=re.S)
    assert not re.search(r"```|~~~|^\s*\||\]\(|\*\*|\$\$|^\s*[-*] \w", said, re.M)
    assert text.count("<li>") == len(re.findall(r"^ *(?:[-*]|\d\.) ", prose(document), re.M))
    assert not re.search(r"<td>[^\n]*\\\|", text)  # GitHub's way to have a bar in a cell
    assert list_numbers(text) == [int(n) for n in re.findall(r"^ *(\d)\. ", prose(document), re.M)]
    assert re.findall(r"<!--.*?-->", re.sub(r"<pre.*?</pre>", "", text, flags=re.S), re.S) == []


def list_numbers(html: str) -> list[int]:
    """The number that a browser shows in front of each item of the numbered lists."""
    numbers, lists = [], []
    for m in re.finditer(r'<(/?)(ol|ul|li)(?: start="(\d+)")?>', html):
        if m[2] == "li":
            if not m[1] and lists[-1] is not None:
                numbers.append(lists[-1])
                lists[-1] += 1
        elif m[1]:
            lists.pop()
        else:
            lists.append(int(m[3] or 1) if m[2] == "ol" else None)
    return numbers


@looks_at_site
def test_answers_are_folded():
    parts = re.split(r"<details[^>]*>", article("exercises.html"))
    exercises = re.findall(r"^\*\*(\d+)\. ", EXERCISES, re.M)
    assert len(parts) - 1 == len(exercises)
    for part in parts[1:]:
        assert part.startswith("\n<summary>Answer</summary>") or part.startswith("<summary>Answer</summary>")
        assert len(re.sub(r"<[^>]+>", "", part.partition("</details>")[0])) > 40  # more than the word


@looks_at_site
def test_terms_have_tooltips():
    glossary = read_glossary(OVERVIEW)
    found: set[str] = set()
    for path in DOCUMENTS:
        found |= {a["title"] for a in site(address(path)).all("abbr")}
    assert found <= {*glossary.terms.values(), *glossary.names.values()}
    words = {meaning for term, meaning in glossary.terms.items() if meaning.startswith(term + ": ")}
    assert words <= found
    assert 'title="accumulator: ' in html("q8.html")


@looks_at_site
def test_one_page_to_print():
    text = html("print.html")
    places = [text.find(f'<a id="{address(path)}"></a>') for path in DOCUMENTS]
    assert -1 not in places
    assert text.count("<math") == sum(article(address(path)).count("<math") for path in DOCUMENTS)
    assert text.count("<details open>") == text.count("<details") > 10
    assert "<script" not in text
    assert 'href="#forward-pass.html--13-prefill-and-decode"' in text


@looks_at_site
@pytest.mark.skipif(not (WEB / "index.html").is_file(), reason="needs build/web: make web")
def test_the_page_in_which_the_model_runs():
    for path in WEB.rglob("*"):
        if path.is_file():
            assert (BOOK / "run" / path.relative_to(WEB)).read_bytes() == path.read_bytes(), path
    assert any(a["href"] == "run/index.html" for a in site("q8.html").all("a"))


@looks_at_site
@pytest.mark.skipif(not (WEB / "index.html").is_file(), reason="needs build/web: make web")
def test_steps_and_words_lead_to_their_places():
    """Every section of the forward pass, each step that it names, the glossary's rows with a step or a place."""
    places = json.loads((WEB / "data.json").read_text(encoding="utf-8"))["places"]
    link = re.compile(r'<a class="run" href="run/index\.html#([^"]+)">(.*?)</a>')
    _, *sections = re.split(r'<h2 id="(?=\d+-)', article("forward-pass.html"))
    found = [(unescape(place), re.sub("<[^>]*>", "", text)) for s in sections for place, text in link.findall(s)]
    assert len(sections) == 14
    for section in sections[:13]:
        assert link.search(section), section[:40]
    shown = {place for name, place in places["steps"].items() if not name.startswith("moe.")}
    assert {place for place, _ in found} == shown | {*places["sections"].values()}
    for place, text in found:
        if text != "Step by step, in this browser":
            end = re.sub(r"\.s$", ".q", text.removeprefix("layers.N"))
            assert re.search(rf"(=|\.){re.escape(end.lstrip('.'))}(&|$)", place), (place, text)
    rows = link.findall(article("index.html").partition('id="glossary"')[2])
    assert {unescape(place) for place, _ in rows} >= {*places["words"].values()}
    assert {text for _, text in rows} >= {*places["words"], "<code>attn.q_proj</code>", "<code>logits</code>"}


@looks_at_site
def test_search_has_every_page_and_no_source():
    index = json.loads((BOOK / "search" / "search_index.json").read_text(encoding="utf-8"))
    found = {entry["location"].partition("#")[0] for entry in index["docs"]}
    assert found == set(map(address, DOCUMENTS))
