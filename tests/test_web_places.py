"""Places on the page (make test-web): addresses, the map, the tour, two schemes side by side, fewer bits."""

import base64
import json
import re
import shutil
from urllib.parse import parse_qs, urlsplit

import numpy as np
import pytest
from safetensors.numpy import load

from formats.source import open_model
from golden.forward import load_weight
from golden.q8 import quantize
from tests.helpers import ROOT
from tests.test_web import (  # noqa: F401
    Firefox,
    browser,
    number,
    opened,
    page_data,
    pytestmark,
    server,
    too_small,
    unfold,
    violations,
)

NARROW = 375


def open_at(opened, place, **options):  # noqa: F811
    """The page at a place, when it is shown."""
    page = opened(place, **options)
    assert page.locator(".status.failed:visible").count() == 0, place
    return page


def address(page):
    """What the address names: {key: text}."""
    return {key: value[0] for key, value in parse_qs(urlsplit(page.url).fragment.partition("?")[2]).items()}


def until(page, holds, arg=None):
    """Waits until a function of JavaScript holds. (The page's policy forbids Playwright's wait_for_function.)"""
    for _ in range(600):
        if page.evaluate(holds, arg):
            return
        page.wait_for_timeout(100)
    raise AssertionError(f"{holds} {arg}: not at {page.url}")


def shown(page):
    """What the view shows, in text, without how long a program ran, and which number is chosen."""
    text = page.inner_text("main > section:not([hidden])")
    marks = page.locator("[aria-pressed=true]:visible, [aria-current]:visible").all_inner_texts()
    return re.sub(r"ran for [\d.]+ s", "", text), marks, page.locator("canvas:visible").count()


def trace_of(page, which):
    """A trace that the page holds, as numpy arrays: those of `which`, an expression."""
    text = page.evaluate(
        """async (which) => {
            const { traceRun } = await import("./runner.js");
            const { trace } = await traceRun(...which);
            return btoa(Array.from(new Uint8Array(trace), (x) => String.fromCharCode(x)).join(""));
        }""",
        which,
    )
    return load(base64.b64decode(text))


# ---- the address

STEP = "layers.1.attn.probs"
PLACES = (
    "walk",
    "walk?step=embed",
    "walk?step=embed&cell=3&token=1",
    "walk?step=layers.0.attn.norm.q&cell=5",
    "walk?step=layers.2.ffn.down_proj&cell=127&token=19",
    f"walk?step={STEP}&head=2&token=7",
    f"walk?step={STEP}&cell=3&token=7&map=1",
    "walk?step=logits&temperature=0.5&top-p=0.5",
    "walk?step=logits&cell=11",
    "walk?model=w8a8&step=layers.1.attn.q_proj&cell=1",
    "walk?model=rotated&step=rotate_back&cell=3",
    "walk?model=gptq&prompt=A+dragon%2C+%22red%22+%26+old&new=8&step=layers.3.ffn.swiglu.q&cell=9",
    "walk?model=moe&step=layers.1.moe.router&cell=3",
    "walk?model=moe&step=layers.1.moe.experts&cell=1",
    "walk?model=qwen3&prompt=שלום&step=layers.0.attn.q_norm",
    "walk?new=1&step=norm",
    "compare?step=layers.2.ffn.norm.q&token=9",
    "compare?a=w8a8&b=q8&prompt=A+king",
    "compare?b=bits&matrix=layers.0.attn.o_proj&bits=2&step=logits",
    "break?mistake=round-half-up",
    "walk?step=layers.0.attn.norm&cell=5&tour=2",
    "compare?b=bits&matrix=layers.1.ffn.down_proj&bits=2&token=9&step=layers.2.attn.residual&tour=9",
)


@pytest.mark.parametrize("place", PLACES)
def test_an_address_is_the_same_place_in_a_fresh_browser(opened, place):  # noqa: F811
    page = open_at(opened, place)
    named = parse_qs(place.partition("?")[2])
    found = address(page)
    assert {key: [found.get(key)] for key in named} == named
    if place.startswith("walk") and "step" in named:
        assert page.inner_text("#step-name") == named["step"][0]
    fresh = open_at(opened, urlsplit(page.url).fragment)
    assert fresh.url == page.url
    assert shown(fresh) == shown(page)
    if "bits" in named:
        assert fresh.input_value("#compare-bits") == named["bits"][0]
    if "cell" in named:
        assert fresh.locator("#explained .explain").count() == 1


def test_reload_back_and_forward(opened):  # noqa: F811
    page = opened()

    def at(step, view="walk"):
        until(
            page,
            "([view, step]) => new URLSearchParams(location.hash.split('?')[1]).get('step') === step"
            " && location.hash.startsWith('#' + view)",
            [view, step],
        )
        page.wait_for_timeout(450)  # what follows sooner belongs to the same entry

    page.click("#step")
    at("embed")
    page.click("#step")
    at("layers.0.attn.norm")
    unfold(page)
    page.check("input[name=walk-model][value=w8a8]", force=True)
    page.wait_for_selector("#walk .status:text-matches('^runq_w8a8 ran')")
    at("layers.0.attn.norm")
    page.click("#tabs a[href='#compare']")
    page.wait_for_selector("#compare-said")
    at("layers.0.attn.q_proj", "compare")
    page.go_back()
    at("layers.0.attn.norm")
    assert address(page)["model"] == "w8a8"
    page.go_back()
    page.wait_for_selector("#walk .status:text-matches('^runq ran')")
    assert page.is_checked("input[name=walk-model][value=q8]")
    page.go_back()
    at("embed")
    assert page.inner_text("#step-name") == "embed"
    page.go_forward()
    at("layers.0.attn.norm")
    assert page.inner_text("#step-name") == "layers.0.attn.norm"
    page.locator("#token-range").fill("2")
    until(page, "(text) => location.hash.includes(text)", "token=2&")
    before = shown(page)
    page.reload()
    page.wait_for_selector("html[data-ready]")
    assert shown(page) == before
    page.go_back()
    at("embed")


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("walk?step=embed", "walk?model=w8a8&step=norm"),
        ("compare?a=q8&b=w8a8&step=layers.1.ffn.norm", "compare?a=w8a8&b=q8&step=norm"),
        ("break?mistake=round-half-up", "break?mistake=group-of-128"),
    ],
)
def test_of_two_places_in_a_row_the_last_one_stays(opened, first, second):  # noqa: F811
    """The second place is left while its program runs; what that run finds is not shown."""
    page = open_at(opened, first)
    ready = "() => document.querySelectorAll('button:disabled:not(#back, #step)').length === 0"
    until(page, ready)
    before, text = page.url, shown(page)
    page.evaluate(
        """async ([first, second]) => {
            const { traceRun } = await import("./runner.js");
            const after = () => new Promise((done) => setTimeout(done));
            location.hash = second;
            await after();
            location.hash = first;
            await after();
            for (const model of ["w8a8", "q8"]) await traceRun(model, { prompt: "Once upon a time", newTokens: 64 });
        }""",
        [urlsplit(before).fragment, second],
    )
    until(page, ready)
    assert page.url == before
    assert shown(page) == text


@pytest.mark.parametrize(
    ("place", "line"),
    [
        ("walk?model=q9", "model is “q9”, expected q8, w8a8, rotated, gptq, moe, qwen3"),
        ("walk?step=layers.9.attn.norm", "step is “layers.9.attn.norm”, which is not there"),
        ("walk?token=20&cell=-1", "token is “20”, expected 0 to 19; cell is “-1”, expected 0 to 0"),
        ("walk?new=9&temperature=hot", "new is “9”, expected 1, 8, 16, 32, 64; temperature is “hot”, expected 0 to 2"),
        (f"walk?prompt={'a' * 301}", "prompt has 301 characters, of which 300 are taken"),
        ("compare?b=bits&bits=9&matrix=embed", "matrix is “embed”, which is not there; bits is “9”, expected 2 to 8"),
        ("break?mistake=none", "mistake is “none”, expected codes-to-minus-128"),
    ],
)
def test_what_is_wrong_in_an_address_is_said(opened, place, line):  # noqa: F811
    page = opened(place)
    view = place.partition("?")[0]
    assert page.inner_text(f"#{view} .status.failed").startswith(f"The address: {line}")


def test_places_of_the_book_are_there(opened):  # noqa: F811
    """What docs/ links to (tests/test_book.py): no place is wrong, and each step is shown."""
    page = opened()
    for place in sorted({at for kind in page_data()["places"].values() for at in kind.values()}):
        page.evaluate("(place) => void (location.hash = place)", place)
        view, _, query = place.partition("?")
        step = parse_qs(query).get("step", [""])[0]
        if view == "walk":
            page.wait_for_selector(f"#step-name:text-is('{step}')")
            page.wait_for_selector("#run:enabled", state="attached")
            assert page.locator("#explained .explain").count() == place.count("cell=")
        else:
            page.wait_for_selector(f"#{view}:visible")
        assert page.locator(".status.failed:visible").count() == 0, place


# ---- the map


def boxes(page, map_):
    """Steps of the map in their order: {number: {class of a rectangle: its width and height}}."""
    return page.locator(map_).evaluate(
        """(map) => Array.from(map.querySelectorAll(".map-step"), (step) => [
            step.dataset.at,
            Object.fromEntries(Array.from(step.querySelectorAll("rect"), (rect) =>
                [rect.getAttribute("class"), [rect.width.baseVal.value, rect.height.baseVal.value]])),
        ])"""
    )


@pytest.mark.parametrize("model", ["q8", "gptq", "moe"])
def test_the_map_is_true_to_scale(opened, model):  # noqa: F811
    step, token = "layers.1.attn.mix", 6
    page = open_at(opened, f"walk?model={model}&step={step}&token={token}&map=1")
    trace = trace_of(page, [model, {"prompt": "Once upon a time", "newTokens": 16}])
    names = page.evaluate("async () => (await import('./walk.js')).current().context.steps")
    assert {name for name in trace if not name.endswith((".s", ".acc", "positions"))} == set(names)
    drawn = boxes(page, "#map .map-box")
    assert [int(at) for at, _ in drawn] == list(range(len(names)))
    columns = trace["layers.0.ffn.norm"].shape[1]
    width = dict(drawn)[str(names.index("layers.0.ffn.norm"))]["map-fp32"][0]
    scale = width / columns
    formats = page_data()["models"][model]["layout"].get("formats", {})
    for at, parts in drawn:
        name, value = names[int(at)], trace[names[int(at)]]
        size = value[0].size if not name.endswith((".scores", ".probs")) else value.shape[1] * (token + 1)
        kind = "map-codes" if value.dtype.kind in "iu" else "map-fp32"
        assert parts[kind][0] == pytest.approx(max(3, scale * size)), name
        if "map-matrix" in parts:
            bits = formats.get(name.split(".")[-1], {"bits": 8})["bits"]
            inputs = {"o_proj": "attn.mix", "down_proj": "ffn.swiglu" if "ffn" in name else "moe.swiglu"}
            source = inputs.get(name.split(".")[-1], "attn.norm")
            layer = ".".join(name.split(".")[:2])
            n = trace[f"{layer}.{source}"].shape[-1] if name != "logits" else columns
            assert parts["map-matrix"] == pytest.approx([scale * size, scale * n * bits / 8]), name
            assert ("map-saved" in parts) == (bits < 8)
        if name.endswith((".scores", ".mix")) and "moe" not in name:
            keys = trace[f"{'.'.join(name.split('.')[:2])}.attn.v_proj"][0].size
            assert parts["map-cache"] == pytest.approx([scale * keys, max(1, scale * (token + 1))])
    tensors = page_data()["models"][model]["tensors"]
    matrices = {name for name in names if f"{name}.codes" in tensors} - {"embed"} | {"logits"}
    assert {names[int(at)] for at, parts in drawn if "map-matrix" in parts} == matrices
    assert [at for at, parts in drawn if "map-frame" in parts] == [str(names.index(step))]
    norms = page.locator("#map .map-length").all_text_contents()
    stream = ["embed"] + [f"layers.{layer}.ffn.residual" for layer in range(4)]
    assert list(map(number, norms)) == pytest.approx([np.linalg.norm(trace[s][token]) for s in stream], rel=1e-3)


def test_the_map_leads_to_steps(opened):  # noqa: F811
    page = open_at(opened, "walk?step=layers.1.ffn.gate_proj&token=3")
    line = page.locator(".map > .map-view .map-box")
    steps = page.evaluate("async () => (await import('./walk.js')).current().context.steps")
    line.locator(f".map-step[data-at='{steps.index('layers.2.attn.o_proj')}'] .map-hit").click(force=True)
    assert page.inner_text("#step-name") == "layers.2.attn.o_proj"
    assert "16 KiB" in page.inner_text(".map > .map-view .readout")
    line.focus()
    for key, step in {
        "ArrowDown": "layers.3.attn.o_proj",
        "ArrowRight": "layers.3.attn.residual",
        "ArrowUp": "layers.2.attn.residual",
        "End": "logits",
        "ArrowLeft": "norm.q",
    }.items():
        page.keyboard.press(key)
        assert page.inner_text("#step-name") == step
        assert step in line.get_attribute("aria-label")
    page.evaluate("async (at) => (await import('./walk.js')).go(at)", steps.index("layers.2.attn.scores"))
    assert page.inner_text(".shape b") == "4 × 4 numbers"  # heads, tokens up to number 3
    assert "16 fp32 numbers" in page.inner_text(".map > .map-view .readout")
    page.click("#map > summary")
    page.wait_for_selector("#map .map-step")
    assert not page.is_visible(".map > .map-view")
    until(page, "(text) => location.hash.includes(text)", "map=1")


@pytest.mark.parametrize("width", [NARROW, 768, 1440])
@pytest.mark.parametrize("colours", ["light", "dark"])
def test_the_map_fits(opened, width, colours):  # noqa: F811
    page = open_at(opened, "walk?step=layers.1.ffn.norm&map=1", width=width, colours=colours)
    page.wait_for_selector("#map .map-step")
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    right = page.locator("#map .map-step").evaluate_all(
        "(all) => Math.max(...all.map((s) => s.getBoundingClientRect().right))"
    )
    assert right <= width
    page.screenshot(path=ROOT / "build" / "web-pictures" / f"map-{width}-{colours}.png", full_page=True)


# ---- the tour


def sentences(text):
    return len(re.findall(r"[.?!](?:\s|$)", text.replace("[[", "").replace("]]", "")))


def test_the_tour_goes_through_its_stops(opened):  # noqa: F811
    """By keyboard alone: what a stop says, its link, its question, the next stop."""
    page = opened()
    page.focus("#tabs a[href='#tour']")
    page.keyboard.press("Enter")
    stops = page.evaluate("async () => (await import('./tour.js')).STOPS")
    assert 8 <= len(stops) <= 10
    for n, stop in enumerate(stops, 1):
        page.wait_for_selector(f"#tour[data-stop='{n}']")
        assert sentences(stop["text"]) == 3, stop["title"]
        for key in ("at", "next"):
            wanted = {k: v[0] for k, v in parse_qs(stop[key].partition("?")[2]).items()} | {"tour": str(n)}
            until(
                page,
                "(wanted) => { const of = new URLSearchParams(location.hash.split('?')[1]);"
                " return document.querySelectorAll('button:disabled:not(#back, #step)').length === 0"
                " && Object.entries(wanted).every(([key, value]) => of.get(key) === value); }",
                wanted,
            )
            assert page.locator(".status.failed:visible").count() == 0, stop[key]
            if stop[key].startswith("walk"):
                assert page.inner_text("#step-name") == wanted["step"]
                explained = "(n) => document.querySelectorAll('#explained .explain').length === n"
                until(page, explained, int("cell" in wanted))
                what = "#map" if "map" in wanted else "#stage .step-title"
                what = "#explained .formula" if "cell" in wanted else what
                place = "(what) => document.querySelector(what).getBoundingClientRect()"
                if "cell" in wanted:
                    until(page, f"(what) => ({place})(what).bottom <= ({place})('#tour').top", what)
                assert 0 <= page.evaluate(f"(what) => ({place})(what).top", what) < page.evaluate(place, "#tour")["top"]
            if key == "at":
                page.focus("#tour-click")
                page.keyboard.press("Enter")
        page.focus("#tour-body summary")
        page.keyboard.press("Enter")
        assert page.is_visible(f"#tour-body details p:has-text('{stop['answer'][:20]}')")
        if n < len(stops):
            page.focus("#tour-next")
            page.keyboard.press("Enter")
    page.keyboard.press("Tab")
    page.click("#tour button:text-is('End the tour')")
    assert page.is_hidden("#tour")
    until(page, "(text) => !location.hash.includes(text)", "tour")


def test_the_tour_says_what_is_so(opened):  # noqa: F811
    """Its numbers are those of the model and of its trace."""
    page = open_at(opened, "walk?new=64")
    told = json.dumps(page.evaluate("async () => (await import('./tour.js')).STOPS"), ensure_ascii=False)
    model = page_data()["models"]["q8"]
    shape = {name.removesuffix(".codes"): size for name, (_, size, _) in model["tensors"].items()}
    rows, dim = shape["layers.0.attn.q_proj"]
    kv = shape["layers.0.attn.k_proj"][0]
    size = {name: np.prod(shape[f"layers.0.{name}"]) for name in (
        "attn.q_proj", "attn.k_proj", "attn.v_proj", "attn.o_proj", "ffn.gate_proj", "ffn.up_proj", "ffn.down_proj",
    )}  # fmt: skip
    feed_forward = sum(size[name] for name in size if name.startswith("ffn"))
    assert feed_forward / sum(size.values()) == 0.75
    group = model["group_size"]
    for said in (
        f"a table: {dim} numbers",
        f"every {group} of them",
        f"group]] of {group} numbers",
        f"{rows} × {dim} = {rows * dim:,} products; each of the {rows} numbers has two groups",
        f"so {rows * dim // group} sums are scaled",
        f"{2 * kv * model['n_layers']}: in each of {model['n_layers']} layers {kv} of its key and {kv} of its value",
        f"make {shape['layers.0.ffn.up_proj'][0]} numbers each of its {dim}",
        f"3 × {shape['layers.0.ffn.up_proj'][0]} × {dim} = {feed_forward:,} of {sum(size.values()):,}",
        f"each of the {shape['embed'][0]:,} tokens",
        "Each of the four heads",
    ):
        assert said in told, said
    assert (dim, model["n_heads"]) == (2 * group, 4)
    assert "token=67" in told
    assert page.get_attribute("#token-range", "max") == "67"
    trace = trace_of(page, ["q8", {"prompt": "Once upon a time", "newTokens": 16}])
    assert trace["layers.1.attn.probs"].shape[0] > 12


@pytest.mark.parametrize("colours", ["light", "dark"])
def test_the_tour_on_a_phone(opened, colours):  # noqa: F811
    page = open_at(opened, "walk?step=layers.0.attn.q_proj&cell=0&tour=4", width=NARROW, colours=colours)
    panel = page.locator("#tour").bounding_box()
    assert panel["x"] >= 0
    assert panel["width"] <= NARROW
    assert panel["height"] <= 0.5 * 900
    assert page.evaluate("document.documentElement.scrollWidth") <= NARROW
    assert too_small(page) == []
    page.click("#tour-title")
    assert page.locator("#tour").bounding_box()["height"] < 110
    page.screenshot(path=ROOT / "build" / "web-pictures" / f"tour-{colours}.png")


@pytest.mark.parametrize("colours", ["light", "dark"])
@pytest.mark.parametrize("width", [NARROW, 1440])
def test_axe_finds_nothing_on_the_map_and_the_tour(opened, width, colours):  # noqa: F811
    for place in (
        "walk?step=layers.1.attn.q_proj&cell=0&map=1&tour=4",
        "compare?b=bits&bits=2&tour=9",
        "break?mistake=group-of-128&tour=10",
    ):
        page = open_at(opened, place, width=width, colours=colours)
        page.click("#tour-body summary")
        assert violations(page) == [], place
        if width == NARROW:
            page.evaluate("for (const it of document.querySelectorAll('.fold')) it.open = true")
            assert too_small(page) == [], place


# ---- two schemes side by side


def relative(x, y):
    x, y = x.astype(np.float64), y.astype(np.float64)
    return np.linalg.norm(x - y) / np.linalg.norm(x) if x.any() else 0.0


def worth(trace, name, token):
    """A step's values of a token; codes times their scales."""
    value = trace[name][token].reshape(-1)
    if not name.endswith(".q"):
        return value
    scales = trace[name[:-2] + ".s"][token].reshape(-1)
    return (value.reshape(len(scales), -1) * scales[:, None].astype(np.float64)).reshape(-1)


def test_the_difference_on_the_map_and_at_the_end(opened):  # noqa: F811
    token, name = 9, "layers.2.ffn.down_proj"
    page = open_at(opened, f"compare?a=q8&b=gptq&token={token}&step={name}")
    a = trace_of(page, ["q8", {"prompt": "Once upon a time", "newTokens": 32}])
    b = trace_of(page, ["gptq", {"ids": a["tokens"].tolist(), "newTokens": 1}])
    steps = [n for n in a if not n.endswith((".s", ".acc")) and n not in ("tokens", "positions")]
    errors = {n: relative(worth(a, n, token), worth(b, n, token)) for n in steps}
    shares = page.locator("#compare .map-step").evaluate_all(
        "(all) => all.map((s) => [s.querySelector('title').textContent,"
        " parseFloat(s.querySelector('.map-shaded').style.getPropertyValue('--share'))])"
    )
    largest = max(errors.values())
    assert number(page.inner_text("#compare-largest").removesuffix(" %")) == pytest.approx(100 * largest, rel=1e-3)
    for text, share in shares:
        step = re.search(r"\(([\w.]+)\)", text)[1]
        if step != "tokens":
            assert number(re.search(r"error ([\d.e−]+) %", text)[1]) == pytest.approx(100 * errors[step], rel=1e-3)
            assert share == pytest.approx(100 * errors[step] / largest, abs=0.51)
    p, q = (t["logits"][token].astype(np.float64) for t in (a, b))
    p, q = (x - x.max() - np.log(np.exp(x - x.max()).sum()) for x in (p, q))
    bits = (np.exp(p) * (p - q)).sum() / np.log(2)
    found = re.search(r"first: ([\d.e−]+) bits", page.inner_text("#compare-divergence"))[1]
    assert number(found) == pytest.approx(bits, rel=1e-3)
    grown, before, after = re.search(
        r"most at ([\w.]+), .*: from ([\d.e−]+) % .* to ([\d.e−]+) %", page.inner_text("#compare-grows")
    ).groups()
    assert number(after) == pytest.approx(100 * errors[grown], rel=1e-3)
    assert number(before) < number(after)
    page.locator("#compare .map-box").focus()
    page.keyboard.press("ArrowRight")
    assert page.locator("#compare-step option:checked").inner_text() == "layers.2.ffn.residual"


@pytest.mark.parametrize("name", ["layers.1.ffn.down_proj", "layers.3.attn.k_proj"])
def test_a_matrix_in_fewer_bits(opened, name):  # noqa: F811
    """Its codes are the reference's, all else is the Q8 file's; the fewer the bits, the larger the error."""
    page = opened("port")
    model = page_data()["models"]["q8"]
    weight = load_weight(open_model(ROOT / "models" / "tiny-llama"), name, interleaved=True)
    files = {}
    for bits in (8, 7, 6, 5, 4, 3, 2):
        files[bits] = base64.b64decode(
            page.evaluate(
                """async ([name, bits]) => {
                    const bytes = new Uint8Array(await (await import("./runner.js")).bytesInBits(name, bits));
                    return btoa(Array.from(bytes, (x) => String.fromCharCode(x)).join(""));
                }""",
                [name, bits],
            )
        )
        wanted = bytearray(files[8])
        found = quantize(weight, model["group_size"], bits)
        assert np.abs(found.codes).max() == 2 ** (bits - 1) - 1
        for part, values in (("codes", found.codes), ("scales", found.scales)):
            offset = model["tensors"][f"{name}.{part}"][2]
            wanted[offset : offset + values.nbytes] = values.tobytes()
        assert files[bits] == bytes(wanted), bits
    assert files[8] == (ROOT / "build" / "models" / "tiny-llama.q8.bin").read_bytes()
    ids = [1, 421, 480, 258, 426]
    traces = {}
    for bits in (8, 4, 2):
        text = page.evaluate(
            """async ([name, bits, ids]) => {
                const { bytesInBits, traceRun } = await import("./runner.js");
                const bytes = await bytesInBits(name, bits);
                const { trace } = await traceRun("q8", { ids, newTokens: 1, bytes });
                return btoa(Array.from(new Uint8Array(trace), (x) => String.fromCharCode(x)).join(""));
            }""",
            [name, bits, ids],
        )
        traces[bits] = load(base64.b64decode(text))
    layer = int(name.split(".")[1])
    for step in traces[8]:
        if re.match(rf"layers\.[0-{layer - 1}]\.", step):
            assert np.array_equal(traces[8][step], traces[2][step]), step
    errors = {bits: relative(traces[8][name], traces[bits][name]) for bits in (4, 2)}
    assert 0.01 < errors[4] < 0.5 * errors[2]
    page = open_at(opened, f"compare?b=bits&matrix={name}&bits=2")
    words = page.inner_text("#compare-divergence")
    # Errors of 0 are on a line of their own, below all others.
    zero, least, dots = page.locator("#growth svg").evaluate(
        """(chart) => {
            const at = (text) => Number(text.getAttribute("y")) - 4;
            const [zero, least] = chart.querySelectorAll("text[text-anchor=end]:not(.name)");
            const dots = Array.from(chart.querySelectorAll("circle"), (it) => [it.textContent, it.cy.baseVal.value]);
            return [[zero.textContent, at(zero)], at(least), dots];
        }"""
    )
    assert zero[0] == "0 %"
    assert {text.endswith(": 0 %") for text, _ in dots} == {True, False}
    for text, y in dots:
        assert y == pytest.approx(zero[1]) if text.endswith(": 0 %") else y <= least + 1e-9, text
    page.locator("#compare-bits").fill("8")
    page.locator("#compare-bits").dispatch_event("change")
    page.wait_for_selector("#compare-divergence:has-text(': 0 bits')")
    assert "No step of this token differs." in page.inner_text("#compare-grows")
    assert page.inner_text("#compare-legend") == "error of this token: no difference"
    assert page.inner_text("#growth").startswith("No difference")
    assert page.locator("#growth svg").count() == 0
    assert words != page.inner_text("#compare-divergence")
    until(page, "(text) => location.hash.includes(text)", "bits=8")


# ---- Firefox


@pytest.mark.parametrize("width", [NARROW, 1440])
def test_places_in_firefox(server, tmp_path, width):  # noqa: F811
    """The map, every stop of the tour, two schemes and a matrix in fewer bits; Back returns."""
    binary = shutil.which("firefox-esr") or shutil.which("firefox")
    if binary is None:
        pytest.skip("needs Firefox: make test-web")
    firefox = Firefox(binary, tmp_path, server.url, width)
    try:
        firefox.wait_for("document.documentElement.dataset.ready === 'yes'")
        firefox.evaluate("void (location.hash = 'walk?model=gptq&step=layers.1.ffn.up_proj&cell=3&map=1')")
        firefox.wait_for("document.querySelector('#step-name').textContent === 'layers.1.ffn.up_proj'")
        firefox.wait_for("document.querySelectorAll('#map .map-saved').length === 28")
        assert firefox.evaluate("document.querySelectorAll('#explained .explain').length") == 1
        assert firefox.evaluate("document.documentElement.scrollWidth") <= width
        stops = firefox.evaluate("(async () => (await import('./tour.js')).STOPS)()")
        for n, stop in enumerate(stops, 1):
            firefox.evaluate(f"void (location.hash = {json.dumps(stop['at'] + f'&tour={n}')})")
            firefox.wait_for(f"document.querySelector('#tour').dataset.stop === '{n}'")
            step = parse_qs(stop["at"].partition("?")[2]).get("step", [""])[0]
            if step:
                firefox.wait_for(f"document.querySelector('#step-name').textContent === {json.dumps(step)}")
            firefox.wait_for("document.querySelectorAll('button:disabled:not(#back, #step)').length === 0")
            firefox.wait_for(f"document.documentElement.scrollWidth <= {width}")  # once heat maps have their width
        firefox.wait_for("document.querySelector('#break-view .headline') !== null")
        firefox.evaluate("history.back()")
        firefox.wait_for("!document.querySelector('#compare').hidden")
        firefox.wait_for("document.querySelector('#compare .map-shaded') !== null")
        assert firefox.evaluate("location.hash").startswith("#compare?a=q8&b=bits")
        assert firefox.errors == []
    finally:
        firefox.close()
