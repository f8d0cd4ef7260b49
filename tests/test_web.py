"""The page in a browser (make test-web): Debian's Chromium, headless, driven by Playwright.

It is served from build/web on the loopback address and isolated from other origins, as `make book-serve` serves it.
After every test: no request has left the origin, and the console has no error.
"""

import base64
import contextlib
import functools
import gzip
import json
import re
import shutil
import struct
import subprocess
import threading
from collections import Counter
from fractions import Fraction
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load, save

from docs.planted import BUGS, planted
from golden.trace import compare, read_trace, summarize, write_trace
from tests.helpers import DATA, ROOT, broken, first_bad

sync_api = pytest.importorskip("playwright.sync_api", reason="needs Playwright: make test-web")
Firefox = pytest.importorskip("tests.firefox", reason="needs websocket-client: make test-web").Firefox
WEB = ROOT / "build" / "web"
BROWSER = shutil.which("chromium")
pytestmark = [
    pytest.mark.skipif(BROWSER is None, reason="needs Chromium: make test-web"),
    pytest.mark.skipif(
        not all((WEB / name).exists() for name in ("index.html", "data.json", "worker.js", "runq.wasm")),
        reason="needs the page: make web",
    ),
]
PICTURES = ROOT / "build" / "web-pictures"
WIDTHS = (375, 768, 1024, 1440)
VIEWS = ("walk", "compare", "break", "port", "chat")
MEGABYTE = 1e6
IS_THE_PROGRAMS = "= the value of the program in WebAssembly, to the bit ✓"
# A model of the page and the golden vectors of its file.
GOLDEN = {
    "q8": "tiny-llama.q8",
    "w8a8": "tiny-llama.w8a8",
    "rotated": "tiny-llama.w8a8-rotate",
    "gptq": "tiny-llama.gptq-ladder",
    "moe": "tiny-qwen3-moe.moe-a8w8",
    "qwen3": "tiny-qwen3.q8",
}


@functools.cache
def page_data():
    return json.loads((WEB / "data.json").read_text(encoding="utf-8"))


# ---- a server and a browser


class Handler(SimpleHTTPRequestHandler):
    """Files of build/web, or of the server's folder. The server counts what it sends, by path."""

    extensions_map = SimpleHTTPRequestHandler.extensions_map | {".wasm": "application/wasm", ".js": "text/javascript"}

    def __init__(self, *args):
        super().__init__(*args, directory=str(args[-1].folder))

    def end_headers(self):
        if self.server.isolated:
            self.send_header("Cross-Origin-Opener-Policy", "same-origin")
            self.send_header("Cross-Origin-Embedder-Policy", "require-corp")
        super().end_headers()

    def copyfile(self, source, outputfile):
        self.server.sent[self.path.split("?")[0]] += 1
        super().copyfile(source, outputfile)

    def log_message(self, *_):
        pass


def serve(isolated, folder=WEB):
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.isolated, server.folder, server.sent = isolated, folder, Counter()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    server.url = f"http://127.0.0.1:{server.server_port}/"
    return server


@pytest.fixture(scope="module")
def server():
    server = serve(isolated=True)
    yield server
    server.shutdown()


@pytest.fixture(scope="module")
def browser():
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def opened(browser, server):
    """A function that opens the page, at a view, width and colours. Nothing may go wrong there or leave the origin."""
    wrong, contexts = [], []

    def open_page(view="walk", width=1280, colours="light", url=None, script=None, **options):
        context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=colours, **options)
        contexts.append(context)
        context.set_default_timeout(300_000)
        if script:
            context.add_init_script(script)
        page = context.new_page()
        page.on("console", lambda m: wrong.append(f"console: {m.text}") if m.type in ("error", "warning") else None)
        page.on("pageerror", lambda error: wrong.append(f"error: {error}"))
        page.on(
            "request", lambda r: wrong.append(f"left: {r.url}") if not r.url.startswith(url or server.url) else None
        )
        page.goto((url or server.url) + (f"#{view}" if view != "walk" else ""))
        page.wait_for_selector("html[data-ready]")
        if view == "walk":
            page.wait_for_selector("#stage .step-title")
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert wrong == []


def unfold(page, view="walk"):
    """Opens the form of a view, which is folded to a line."""
    page.evaluate("(view) => void (document.querySelector(`#${view} .fold`).open = true)", view)


def choose(page, model, prompt=None, tokens=None):
    """Runs a model in the first view."""
    unfold(page)
    if prompt is not None:
        page.fill("#prompt", prompt)
    if tokens is not None:
        page.select_option("#amount", str(tokens))
    page.check(f"input[name=walk-model][value={model}]", force=True)
    page.wait_for_selector("#run:enabled", state="attached")
    unfold(page)  # another model has run
    page.click("#run")
    page.wait_for_selector("#run:enabled", state="attached")
    program = page_data()["models"][model]["program"]
    page.wait_for_selector(f"#walk .status:text-matches('^{program} ran for')")


def look_at(page, model, ids):
    """Shows the run of a model on some ids, as the form does for a text."""
    page.evaluate(
        """async ([model, ids]) => {
            const { contextOfRun } = await import("./context.js");
            const { look } = await import("./walk.js");
            look(await contextOfRun(model, { ids, newTokens: 1 }));
        }""",
        [model, [int(i) for i in ids]],
    )


def go_to(page, step, token=None):
    page.evaluate(
        """async ([step, token]) => {
            const walk = await import("./walk.js");
            if (token !== null) walk.goToken(token);
            walk.go(walk.current().context.steps.indexOf(step));
        }""",
        [step, token],
    )
    assert page.inner_text("#step-name") == step


def number(text):
    """A number as the page writes it."""
    return float(text.replace("−", "-").replace(",", ""))


def to_page(trace):
    return base64.b64encode(save({name: np.ascontiguousarray(value) for name, value in trace.items()})).decode()


# ---- what the programs say


@pytest.mark.parametrize("story", [0, 1])
@pytest.mark.parametrize("model", GOLDEN)
def test_ids_are_the_goldens(opened, model, story):
    story = json.loads((DATA / f"{GOLDEN[model]}.json").read_text())["generations"][story]
    page = opened()
    choose(page, model, story["prompt"], 64)
    page.click(".ids summary")
    ids = [int(i) for i in page.inner_text("#new-ids").split(",")]
    assert len(ids) == 64
    assert ids == story["new_ids"]


TEN_STEPS = (
    "embed",
    "layers.0.attn.norm",
    "layers.0.attn.norm.q",
    "layers.0.attn.q_proj",
    "layers.1.attn.k_rope",
    "layers.1.attn.mix",
    "layers.2.attn.residual",
    "layers.2.{ffn}",
    "layers.3.ffn.residual",
    "logits",
)


@pytest.mark.parametrize("model", GOLDEN)
def test_shown_values_are_the_goldens(opened, model):
    golden = read_trace(DATA / f"{GOLDEN[model]}.trace.safetensors")
    page = opened()
    look_at(page, model, golden["tokens"])
    token = len(golden["tokens"]) - 1
    ffn = "moe.mix" if model == "moe" else "ffn.swiglu.q"
    for step in (name.format(ffn=ffn) for name in TEN_STEPS):
        go_to(page, step, token)
        values = golden[step][token].reshape(-1)
        heat = page.locator(".picture > .heat").last
        canvas = heat.locator("canvas")
        canvas.focus()
        canvas.press("Home")
        for i in range(3):
            shown = re.search(r"(?:code |: )([−\d.,e]+)", heat.locator(".readout").inner_text())[1]
            if values.dtype == np.int8:
                assert number(shown) == values[i]
            else:
                assert number(shown) == pytest.approx(
                    float(values[i]), rel=2e-5, abs=2e-5 * float(np.abs(values).max())
                )
            canvas.press("ArrowRight")


def multiply_add(a, b, c):
    """a * b + c of fp32 numbers, rounded once to fp32, half to even: of the two fp32 neighbours the nearer."""
    exact = Fraction(float(a)) * Fraction(float(b)) + Fraction(float(c))
    near = np.float32(float(exact))
    around = (np.nextafter(near, np.float32(-np.inf)), near, np.nextafter(near, np.float32(np.inf)))
    return min(around, key=lambda x: (abs(Fraction(float(x)) - exact), int(x.view(np.uint32)) & 1))


@pytest.mark.parametrize("model", GOLDEN)
def test_products_add_up_to_the_value(opened, model):
    """The numbers that a visitor sees: codes, products, their sum, the scales, the value, of a row of q_proj."""
    golden = read_trace(DATA / f"{GOLDEN[model]}.trace.safetensors")
    page = opened()
    look_at(page, model, golden["tokens"])
    name, token = "layers.1.attn.q_proj", 1
    go_to(page, name, token)
    # The first value that differs where product and sum are each rounded; none does where a row is one group.
    n_groups = golden[f"{name}.acc"].shape[-1]
    channel = page.evaluate(
        """async ([name, t]) => {
            const { groupsOf, productOf } = await import("./products.js");
            const { context } = (await import("./walk.js")).current();
            return Array.from(context.trace[name].row(t)).findIndex((value, i) => {
                const { x, w, groups } = productOf(name, t, i, context);
                return groupsOf(x, groups.map((g) => g.xScale), w, false).at(-1).total !== value;
            });
        }""",
        [name, token],
    )
    assert (channel >= 0) == (n_groups > 1)
    channel = max(channel, 0)
    canvas = page.locator(".picture > .heat").last.locator("canvas")
    canvas.focus()
    canvas.press("Home")
    for _ in range(channel):
        canvas.press("ArrowRight")
    canvas.press("Enter")
    place = "layers.1.attn.norm"
    own = page.evaluate(
        "async ([step, t]) => Array.from((await import('./walk.js')).current().context.trace[step].row(t))",
        [f"{place}.s", token],
    )
    assert page.evaluate(
        "async ([n, t, i]) => (await import('./products.js')).productOf(n, t, i, "
        "(await import('./walk.js')).current().context).fused",
        [name, token, channel],
    )
    codes, scales, acc = golden[f"{place}.q"][token], golden[f"{place}.s"][token], golden[f"{name}.acc"][token, channel]
    groups = page.locator(".explain > section.group").all()
    size = len(codes) // len(acc)
    assert len(groups) == len(acc)
    total = twice_rounded = np.float32(0)
    for g, group in enumerate(groups):
        tiles = [t.split("\n") for t in group.locator(".tile").all_inner_texts()]
        assert [number(pair.split(" × ")[0]) for pair, _ in tiles] == codes[g * size : (g + 1) * size].tolist()
        products = [number(product) for _, product in tiles]
        assert [np.prod([number(x) for x in pair.split(" × ")]) for pair, _ in tiles] == products
        figures = list(map(number, group.locator(".figure b").all_inner_texts()))
        weight_scale, token_scale, both, shown_sum = figures[:4]
        before = figures[5] if g else 0
        after = figures[-1]
        assert sum(products) == shown_sum == acc[g]
        assert np.float32(token_scale) == np.float32(own[g]) == pytest.approx(scales[g], rel=1e-5)
        assert np.float32(both) == np.float32(figures[4]) == np.float32(weight_scale) * np.float32(token_scale)
        assert np.float32(before) == total
        twice_rounded = np.float32(shown_sum) * np.float32(both) + twice_rounded
        total = multiply_add(np.float32(shown_sum), np.float32(both), total)
        assert np.float32(after) == total
    assert (total != twice_rounded) == (n_groups > 1)
    sums = [np.float32(number(text)) for text in page.locator(".explain .total .figure b").all_inner_texts()]
    assert len(sums) == len(acc)
    assert sums[-1] == total == np.float32(number(page.inner_text(".explain h3 .value")))
    own_value = page.evaluate(
        "async ([n, t, i]) => (await import('./walk.js')).current().context.trace[n].row(t)[i]", [name, token, channel]
    )
    assert total == np.float32(own_value)
    assert (len(acc) > 1) == ("rounded once (a fused multiply-add)" in page.inner_text(".explain .total"))
    assert page.inner_text(".explain .total .check") == IS_THE_PROGRAMS


@pytest.mark.parametrize("model", GOLDEN)
def test_the_native_program_says_the_same(opened, tmp_path, model):
    """Every step is equal to the bit, and so is the digest; six values are shown so."""
    about = page_data()["models"][model]
    native = tmp_path / "trace"
    done = subprocess.run(
        [f"./{about['program']}", ROOT / "build" / "models" / f"{GOLDEN[model]}.bin", "-i", about["prompt"],
         "-n", "1", "-t", "0", "--digest", "--trace", native],
        cwd=ROOT, capture_output=True, check=True, text=True,
    )  # fmt: skip
    native = read_trace(native)
    page = opened()
    choose(page, model, tokens=1)
    assert re.search(r"^digest +(\w+)$", done.stderr, re.M)[1] == page.text_content("#digest")
    text = page.evaluate(
        """async ([model, prompt]) => {
            const { trace } = await (await import("./runner.js")).traceRun(model, { prompt, newTokens: 1 });
            return btoa(Array.from(new Uint8Array(trace), (x) => String.fromCharCode(x)).join(""));
        }""",
        [model, about["prompt"]],
    )
    found = load(base64.b64decode(text))
    assert len(native) > 80
    assert [report for report in compare(native, found) if report.error or not report.ok] == []
    steps = ("embed", "layers.1.attn.norm", "layers.0.attn.norm.q", "layers.2.attn.o_proj", "norm", "logits")
    for i, step in enumerate(steps):
        go_to(page, step)
        page.evaluate("async (i) => (await import('./state.js')).explained(i)", 7 * i)
        shown = number(page.inner_text(".explain h3 .value"))
        values = native[step][len(native["tokens"]) - 1].reshape(-1)
        assert shown == pytest.approx(float(values[7 * i]), rel=2e-5, abs=2e-5 * float(np.abs(values).max()))
        assert page.locator(".explain .check").last.inner_text() == IS_THE_PROGRAMS
    assert "finds the same numbers, to the bit" in page.text_content(".explain")


@pytest.mark.parametrize("model", GOLDEN)
def test_explanations_give_the_value(opened, model):
    """Every step whose numbers are explained, to the bit: in layer 1 and outside the layers, of the last token."""
    page = opened()
    choose(page, model)
    found = page.evaluate(
        """async () => {
            const { context } = (await import("./walk.js")).current();
            const { explain } = await import("./explain.js");
            const t = context.tokens.length - 1;
            const checks = [];
            for (const name of context.steps.filter((name) => !/^layers\\.[^1]/.test(name))) {
                const n = context.trace[name].perToken;
                for (const i of n > 1 ? [0, 1, 7, Math.floor(n / 3), n - 2, n - 1] : []) {
                    const said = explain(name, t, i, context)?.querySelectorAll(".check");
                    if (said?.length) checks.push([name, i, Array.from(said).at(-1).textContent]);
                }
            }
            return checks;
        }"""
    )
    assert [check for check in found if check[2] != IS_THE_PROGRAMS] == []
    steps = {
        "embed", "norm", "norm.q", "logits", *(f"layers.1.attn.{step}" for step in (
            "norm", "norm.q", "q_proj", "k_proj", "v_proj", "scores", "probs", "mix", "mix.q", "o_proj", "residual")),
        "layers.1.ffn.norm", "layers.1.ffn.norm.q", "layers.1.ffn.residual",
    }  # fmt: skip
    ffn = ("moe.router", "moe.gate_up_proj", "moe.swiglu", "moe.swiglu.q", "moe.down_proj", "moe.mix")
    ffn = ffn if model == "moe" else ("ffn.gate_proj", "ffn.up_proj", "ffn.swiglu", "ffn.swiglu.q", "ffn.down_proj")
    steps |= {f"layers.1.{step}" for step in ffn}
    steps |= {"rotate", "rotate_back"} if model == "rotated" else set()
    steps |= {"layers.1.attn.q_norm", "layers.1.attn.k_norm"} if model in ("moe", "qwen3") else set()
    assert {name for name, _, _ in found} == steps


@pytest.mark.parametrize(("second", "is_close"), [("w8a8", True), ("gptq", False)])
def test_two_schemes_are_compared(opened, second, is_close):
    page = opened("compare")
    page.wait_for_selector("#compare-said")
    unfold(page, "compare")
    page.check(f"input[name=compare-b][value={second}]", force=True)
    page.click("#compare form button[type=submit]")
    page.wait_for_selector("#compare form button[type=submit]:enabled", state="attached")
    page.select_option("#compare-step", label="layers.2.ffn.norm.q")
    codes, ids, logits = page.evaluate(
        """async (second) => {
            const { contextOfRun } = await import("./context.js");
            const text = { prompt: "Once upon a time", newTokens: 32 };
            const [a, own] = [await contextOfRun("q8", text), await contextOfRun(second, text)];
            const b = await contextOfRun(second, { ids: a.tokens, newTokens: 1 });
            const row = (run) => Array.from(run.trace["layers.2.ffn.norm.q"].row(a.nPrompt - 1));
            const logits = a.newIds.map((_, i) => Array.from(a.trace.logits.row(a.nPrompt - 1 + i)));
            return [[row(a), row(b)], [a.newIds, own.newIds], logits];
        }""",
        second,
    )
    differ = sum(x != y for x, y in zip(*codes, strict=True))
    same = next(i for i, (x, y) in enumerate(zip(*ids, strict=True)) if x != y)
    assert page.inner_text("#compare-said").startswith(f"{differ} of {len(codes[0])} codes differ")
    parted = f"After {same} equal tokens they part." if same else "They part at the first token."
    p = np.exp(logits[same] - np.max(logits[same]))
    p /= p.sum()
    first, next_ = np.argsort(-p)[:2]
    assert (p[next_] >= 0.9 * p[first]) == is_close
    if is_close:
        texts = [f"“{page_data()['vocabularies']['tiny-llama'][i].replace(' ', '␣')}”" for i in (first, next_)]
        parted += f" {' and '.join(texts)} were almost equally likely in Q8: {p[first]:.2%} and {p[next_]:.2%}."
    assert page.inner_text("#compare-parted").replace(" %", "%") == parted
    assert page.locator("#growth polyline").count() == 2
    assert page.locator("#growth .name").all_text_contents() == ["residual stream", "ffn.norm"]


@pytest.mark.parametrize(
    ("temperature", "shares"), [(0.5, [0.881, 0.119]), (2, [0.455, 0.276, 0.167, 0.102]), (0, [1])]
)
def test_the_next_token_is_drawn_as_the_contract_says(opened, temperature, shares):
    """Four logits under top-p 0.9, as in an exercise of docs/exercises.md."""
    found = opened("port").evaluate(
        """async (temperature) => {
            const { sampler } = await import("./context.js");
            return sampler([2, 1, 0, -1], temperature, 0.9).all.filter((x) => x.kept).map((x) => x.share);
        }""",
        temperature,
    )
    assert found == pytest.approx(shares, abs=5e-4)


# ---- verdicts


def other_type(x):
    return x.astype(np.float64)


def last_bit(x):
    """x, its last value of another last bit."""
    x.view(f"u{x.itemsize}").reshape(-1)[-1] ^= 1
    return x


def verdict_cases():
    """Name -> the two traces: of ports with a mistake, and of what every rule of the comparison is about."""
    q8 = read_trace(DATA / "tiny-llama.q8.trace.safetensors")
    late = read_trace(DATA / "tiny-llama.q8.boundary.trace.safetensors")
    static = read_trace(DATA / "tiny-llama.w8a8-static.trace.safetensors")
    rotated = read_trace(DATA / "tiny-llama.w8a8-rotate.trace.safetensors")
    attn8 = read_trace(DATA / "tiny-llama.w8a8-attn8.trace.safetensors")
    moe = read_trace(DATA / "tiny-qwen3-moe.moe-a8w8.trace.safetensors")
    mx = read_trace(DATA / "tiny-qwen3-moe.moe-mxfp8.trace.safetensors")
    awq = read_trace(DATA / "tiny-llama.awq.trace.safetensors")
    rng = np.random.default_rng(1)

    def noisy(size):
        return lambda x: (x * (1 + size * rng.standard_normal(x.shape))).astype(x.dtype)

    cases = {bug: (q8, planted(bug)) for bug in BUGS}
    cases |= {
        "equal": (q8, q8),
        "no steps": (q8, {"tokens": q8["tokens"]}),
        "some steps": (q8, {name: q8[name] for name in ("tokens", "embed", "layers.0.attn.norm")}),
        "one step more": (q8, q8 | {"layers.0.attn.other": q8["embed"]}),
        "other type": (q8, broken(q8, "layers.1.attn.q_rope", other_type)),
        "other shape": (q8, broken(q8, "layers.1.attn.q_rope", lambda x: x[:, :1])),
        "other tokens": (q8, broken(q8, "tokens", lambda x: x[::-1].copy())),
        "not a number": (q8, broken(q8, "layers.0.ffn.swiglu", lambda x: np.where(x > 1, np.float32(np.nan), x))),
        "the other sign": (q8, broken(q8, "layers.0.ffn.swiglu", lambda x: -x)),
        "the other zero": (
            broken(q8, "layers.0.ffn.swiglu", np.zeros_like),
            broken(q8, "layers.0.ffn.swiglu", lambda x: -(0 * abs(x))),
        ),
        "last bits": (q8, broken(q8, "layers.1.ffn.norm", noisy(1e-7))),
        "far away": (q8, broken(q8, "layers.1.ffn.norm", noisy(0.2))),
        "two steps": (q8, broken(broken(q8, "layers.2.ffn.norm.s", last_bit), "layers.1.ffn.up_proj.acc", last_bit)),
        "late": (late, broken(late, "layers.1.attn.k_rope", lambda x: x * np.float32(1.001))),
        "late, far": (late, broken(late, "layers.1.attn.k_rope", lambda x: x * np.float32(1.1))),
        "static": (static, static),
        "static scale": (static, broken(static, "layers.1.attn.mix.s", lambda x: x * np.float32(1.5))),
        "rotated": (rotated, rotated),
        "not rotated": (rotated, rotated | {"rotate": rotated["embed"]}),
        "rotated too far": (rotated, broken(rotated, "rotate_back", lambda x: x * np.float32(1.01))),
        "int8 attention": (attn8, broken(attn8, "layers.1.attn.weights.q", last_bit)),
        "experts": (moe, broken(moe, "layers.1.moe.experts", lambda x: x[:, ::-1].copy())),
        "experts' codes": (moe, broken(moe, "layers.2.moe.swiglu.q", last_bit)),
        "mx": (mx, mx),
        "mx scale": (mx, broken(mx, "layers.1.moe.swiglu.s", lambda x: x + np.uint8(1))),
        "mx code": (mx, broken(mx, "layers.1.moe.swiglu.q", lambda x: x ^ np.uint8(1))),
        "half": (awq, broken(awq, "layers.0.attn.mix", noisy(4e-4))),
        "half, far": (awq, broken(awq, "layers.1.ffn.norm", noisy(2e-3))),
        "half, last bit": (awq, broken(awq, "layers.1.ffn.norm", last_bit)),
        "half, equal": (awq, awq),
        "half, fp32": (awq, broken(awq, "layers.1.ffn.up_proj", noisy(5e-6))),
        "half, fp32 far": (awq, broken(awq, "layers.1.ffn.up_proj", noisy(1e-4))),
        "half, behind": (awq, broken(broken(awq, "layers.0.ffn.norm", last_bit), "logits", noisy(5e-3))),
        "half, far behind": (awq, broken(broken(awq, "layers.0.ffn.norm", last_bit), "logits", noisy(2e-2))),
    }
    return cases


@pytest.mark.parametrize(
    "name",
    [*GOLDEN.values(), "tiny-llama.q8.boundary", "tiny-llama.w8a8-attn8", "tiny-qwen3-moe.moe-mxfp8"],
)
def test_one_unit_in_any_step_is_named(opened, name):
    golden = read_trace(DATA / f"{name}.trace.safetensors")
    steps = {step: {step: last_bit(value.copy())} for step, value in golden.items()}
    found = opened("port").evaluate(
        """async ([whole, steps]) => {
            const { compare } = await import("./diff.js");
            const { readTrace } = await import("./trace.js");
            const { data } = await import("./runner.js");
            const read = (text) => readTrace(Uint8Array.from(atob(text), (c) => c.charCodeAt(0)).buffer);
            const a = read(whole);
            const bad = (b) => compare(a, { ...a, ...b }, data.contract).filter((r) => !r.ok);
            return Object.entries(steps).map(([step, b]) => [step, bad(read(b)).map((r) => [r.name, r.note])]);
        }""",
        [to_page(golden), {step: to_page(trace) for step, trace in steps.items()}],
    )
    units = {"f": ", by up to 1 units in the last place", "i": "", "u": ""}
    notes = {step: f"1 of {value.size} differ{units[value.dtype.kind]}" for step, value in golden.items()}
    assert len(found) > 80
    assert found == [[step, [[step, notes[step]]]] for step in steps]


def test_verdicts_are_those_of_golden_diff(opened):
    page = opened("port")
    for case, (a, b) in verdict_cases().items():
        found = page.evaluate(
            """async ([a, b]) => {
                const { compare, verdict } = await import("./diff.js");
                const { readTrace } = await import("./trace.js");
                const { data } = await import("./runner.js");
                const bytes = (text) => Uint8Array.from(atob(text), (c) => c.charCodeAt(0)).buffer;
                const reports = compare(readTrace(bytes(a)), readTrace(bytes(b)), data.contract);
                return [reports.map((r) => [r.name, String(r.error), r.note, r.ok, r.missing]), verdict(reports)];
            }""",
            [to_page(a), to_page(b)],
        )
        reports = compare(a, b)
        assert [r[:1] + r[2:] for r in found[0]] == [[r.name, r.note, r.ok, r.missing] for r in reports], case
        errors = [float(r[1].replace("Infinity", "inf")) for r in found[0]]
        assert errors == pytest.approx([r.error for r in reports], rel=1e-9, abs=1e-15), case
        assert found[1] == summarize(reports, verbose=False)[0].split("\n")[-1], case


def test_a_ports_trace_is_judged(opened, tmp_path):
    golden, late = (read_trace(DATA / f"tiny-llama.q8.{name}safetensors") for name in ("trace.", "boundary.trace."))
    cases = {bug: (golden, planted(bug)) for bug in BUGS} | {
        "right": (golden, golden),
        "unit": (golden, broken(golden, "layers.2.ffn.swiglu", last_bit)),
        "late": (late, late),
        "late-unit": (late, broken(late, "layers.2.attn.k_rope", last_bit)),
    }
    page = opened("port")
    for name, (right, mine) in cases.items():
        path = tmp_path / f"{name}.safetensors"
        write_trace(path, mine)
        page.set_input_files("#port-file", path)
        page.wait_for_selector(f"#port-view h3:text-is('{path.name}')")
        reports = compare(right, mine)
        assert (first_bad(reports) is None) == (right is mine)
        assert page.get_attribute("#port-view .headline", "data-first") == (first_bad(reports) or "")
        assert page.inner_text("#port-view .diff-line") == summarize(reports, verbose=False)[0].split("\n")[-1]
    note = f"1 of {late['layers.2.attn.k_rope'].size} differ, by up to 1 units in the last place ← the first"
    assert note in page.inner_text("#port-view .verdict tr.first")


@pytest.mark.parametrize(
    ("data", "line"),
    [
        (b"no", "not a safetensors file: 2 bytes"),
        (b"\xff" * 16, "not a safetensors file: its header would have"),
        (struct.pack("<Q", 4) + b"text", "not a safetensors file: its header is not JSON"),
        (save({"embed": np.zeros(2, np.float32)}), "the trace has no tokens"),
        (save({"tokens": np.array([1, 5000], np.int32)}), "token 5000 is no id below the model's vocab_size, 2048"),
        (save({"tokens": np.array([2**61 + 1])}), "token 2305843009213693953 is no id below"),
        (
            struct.pack("<Q", 99)
            + b'{"a":{"dtype":"F32","shape":[1234567890123456789],"data_offsets":[0,9007199254740993]}}'.ljust(99),
            "tensor a does not fit: shape [1234567890123456789], bytes [0,9007199254740993]",
        ),
        (
            save({"tokens": np.ones(2, np.int32), "positions": np.array([1, 1], np.int32)}),
            "positions are not ascending",
        ),
    ],
)
def test_what_is_no_trace_is_named_in_one_line(opened, tmp_path, data, line):
    page = opened("port")
    path = tmp_path / "mine.safetensors"
    path.write_bytes(data)
    page.set_input_files("#port-file", path)
    page.wait_for_selector(f'#port .status:has-text("mine.safetensors: {line}")')


def variants():
    return page_data().get("variants", {}) if (WEB / "data.json").exists() else {}


@pytest.mark.parametrize(
    "name", variants() or [pytest.param(None, marks=pytest.mark.skip(reason="needs the broken programs: make web"))]
)
def test_a_broken_program_is_named_by_its_step(opened, name):
    variant = variants()[name]
    page = opened("break")
    page.check(f"input[name=variant][value={name}]", force=True)
    page.click("#break form button[type=submit]")
    page.wait_for_selector("#break-view .headline")
    assert page.get_attribute("#break-view .headline", "data-first") == variant["step"]
    assert page.locator("#break-view").bounding_box()["y"] < 100  # the page has scrolled to the result
    assert page.locator("#break-view .begun").all_inner_texts() == [variant["prompt"]] * 2
    texts = page.evaluate(
        """async () => {
            const text = (b) => btoa(Array.from(new Uint8Array(b), (x) => String.fromCharCode(x)).join(""));
            return (await import("./break.js")).judgedTraces.map(text);
        }"""
    )
    right, wrong = (load(base64.b64decode(text)) for text in texts)
    reports = compare(right, wrong)
    assert first_bad(reports) == variant["step"]
    assert page.inner_text("#break-view .diff-line") == summarize(reports, verbose=False)[0].split("\n")[-1]


# ---- files, browsers, people


def test_a_damaged_file_gives_the_programs_own_line(opened, tmp_path):
    model = page_data()["models"]["q8"]
    data = gzip.decompress((WEB / model["file"]).read_bytes())
    (tokenizer, size) = struct.unpack_from("<QI", data, 0xA0)
    cases = {
        "cut.bin": (
            data[:1_000_000],
            f"runq: /cut.bin: file is 1000000 bytes, but its tokenizer section is {size} bytes at {tokenizer}",
        ),
        "empty.bin": (b"", "runq: /empty.bin: "),
        "magic.bin": (b"X" + data[1:], "runq: /magic.bin: magic is 0x616b3458, expected 0x616b3432"),
    }
    page = opened("chat")
    for name, (content, line) in cases.items():
        (tmp_path / name).write_bytes(content)
        page.set_input_files("#chat-file", tmp_path / name)
        page.wait_for_selector(f'#chat .status.failed:has-text("{line}")')


def test_a_model_of_ones_own_answers(opened):
    path = ROOT / "build" / "models" / "smollm2.q8.bin"
    if not path.exists():
        pytest.skip("needs SmolLM2: make smollm2")
    page = opened("chat")
    page.set_input_files("#chat-file", path)
    page.fill("#chat-line", "What is the capital of France?")
    page.keyboard.press("Enter")
    page.wait_for_selector("#talk .it:has-text('Paris')")
    page.wait_for_selector("#chat button[type=submit]:enabled")
    page.fill("#chat-line", "And of Italy?")
    page.keyboard.press("Enter")
    page.wait_for_selector("#talk .it:has-text('Rome')")
    page.wait_for_selector("#chat button[type=submit]:enabled")
    page.click("#chat button:text-is('End')")
    page.wait_for_selector("#chat-rate:has-text('The conversation has ended')")
    assert re.search(r"decode \d+ tokens in .* tokens/s", page.inner_text("#chat-rate"))


def test_what_a_browser_lacks_is_said_in_one_line(opened):
    assert opened().locator("#lacks").is_hidden()
    page = opened("chat", script="WebAssembly.validate = () => false")
    assert "SIMD" in page.inner_text("#lacks")


@contextlib.contextmanager
def plain_site(tmp_path):
    """The page as a plain server has it: below a folder, without headers. Gives its address."""
    (tmp_path / "site" / "below").mkdir(parents=True)
    (tmp_path / "site" / "below" / "page").symlink_to(WEB)
    server = serve(isolated=False, folder=tmp_path / "site")
    try:
        yield f"{server.url}below/page/"
    finally:
        server.shutdown()


# Drops a file with the bytes of a URL, or with a text, onto an element, as a hand would.
DROP = """async ([at, name, url, text]) => {
    let bytes = text;
    if (url) bytes = await (await import("./runner.js")).modelBytes(url);
    const dataTransfer = new DataTransfer();
    dataTransfer.items.add(new File([bytes], name));
    for (const type of ["dragover", "drop"]) {
        const event = new DragEvent(type, { dataTransfer, bubbles: true, cancelable: true });
        document.querySelector(at).dispatchEvent(event);
        if (!event.defaultPrevented) throw new Error(`the browser would take the ${type}`);
    }
}"""


def test_a_plain_server_is_enough(opened, tmp_path):
    """Every view, the tour, chat with a model of the page's own; none has a line on what the server lacks."""
    with plain_site(tmp_path) as url:
        page = opened(url=url)
        for view in VIEWS[1:-1]:
            page.click(f"#tabs a[href='#{view}']")
            page.wait_for_selector(f"#{view}:not([hidden])")
        page.wait_for_selector("#compare-said", state="attached")
        page.click("#tabs a[href='#tour']")
        for stop in page.evaluate("async () => (await import('./tour.js')).STOPS.map((stop) => stop.at)"):
            step = re.search(r"&step=([\w.]+)", stop)
            if step:
                page.wait_for_selector(f"#step-name:text-is('{step[1]}')")
            else:
                page.wait_for_selector("#compare:visible .map-shaded, #break:visible .headline")
            page.wait_for_selector("button:disabled:not(#back, #step)", state="detached")
            assert page.locator(".status.failed:visible").count() == 0, stop
            if stop.startswith("break"):
                break
            page.click("#tour-next")
        assert page.locator("#tour").get_attribute("data-stop") == "10"
        assert page.locator("#lacks").is_hidden()
        assert not page.evaluate("crossOriginIsolated")
        with page.expect_event("load"):
            page.click("#tabs a[href='#chat']")
        page.wait_for_selector("html[data-ready]")
        assert page.evaluate("crossOriginIsolated")
        page.evaluate(DROP, ["body", "q8.bin", "q8", None])
        page.fill("#chat-line", "Tell me of a cat.")
        page.keyboard.press("Enter")
        page.wait_for_selector("#talk .it:not(:empty)")


def test_a_plain_server_is_enough_for_firefox(tmp_path):
    binary = shutil.which("firefox-esr") or shutil.which("firefox")
    if binary is None:
        pytest.skip("needs Firefox: make test-web")
    (tmp_path / "profile").mkdir()
    with plain_site(tmp_path) as url:
        firefox = Firefox(binary, tmp_path / "profile", url, 375)
        try:
            firefox.wait_for("document.querySelector('#stage .step-title') !== null")
            assert firefox.evaluate("document.querySelector('#lacks').hidden && !crossOriginIsolated")
            firefox.evaluate("void (location.hash = 'chat')")
            firefox.wait_for("crossOriginIsolated && document.querySelector('#chat .drop') !== null")
            firefox.evaluate(f"({DROP})(['body', 'q8.bin', 'q8', null])")
            firefox.wait_for("document.querySelector('#chat-line') !== null")
            firefox.evaluate(
                "void ((document.querySelector('#chat-line').value = 'Tell me of a cat.'), "
                "document.querySelector('#chat form').requestSubmit())"
            )
            firefox.wait_for("document.querySelector('#talk .it')?.textContent.length > 0")
            assert firefox.errors == []
        finally:
            firefox.close()


def test_where_there_is_no_chat_the_view_says_what_to_do(opened):
    plain = serve(isolated=False)
    try:
        page = opened("chat", url=plain.url, service_workers="block", script="sessionStorage.isolating = 'yes'")
        assert page.locator("#lacks").is_hidden()
        page.evaluate(DROP, ["#chat .drop", "q8.bin", "q8", None])
        page.wait_for_selector("#chat .note:has-text('https, or from this very computer')")
    finally:
        plain.shutdown()


def test_a_file_beside_the_place_for_files(opened):
    page = opened()
    page.evaluate(DROP, ["footer", "mine.bin", None, "text"])
    assert page.inner_text("#said") == "Not taken: mine.bin. Check takes one trace file, Chat one model file."
    page.click("#tabs a[href='#port']")
    page.wait_for_selector("#port .drop")
    assert page.inner_text("#said") == ""
    page.evaluate(DROP, ["h1", "mine.safetensors", None, "text"])
    page.wait_for_selector("#port .status.failed:has-text('mine.safetensors: not a safetensors file: 4 bytes')")


def test_bytes_are_of_a_character(opened):
    page = opened()
    choose(page, "q8", "שلا😀", 1)
    chips = [text.split("\n") for text in page.locator("#chips .given").all_inner_texts()][1:]
    shown = [(token, text.partition(",")[0].removeprefix("of ").strip("\u2068\u2069")) for token, text in chips]
    assert shown == [(f"<0x{byte:02X}>", c) for c in "שلا😀" for byte in c.encode()]
    tokens = ["a", "<0xD7>", "<0xA9>", "b", "<0xD7>", " <0x41"]
    text = page.evaluate("async (tokens) => (await import('./context.js')).textOfTokens(tokens)", tokens)
    assert text == "aשb\ufffd <0x41"
    page.click("#tabs a[href='#compare']")
    page.wait_for_selector(".story .begun:has-text('שلا😀')")


def test_a_prompt_that_is_too_long_is_counted(opened):
    page = opened()
    unfold(page)
    page.fill("#prompt", "x" * 280)
    assert page.inner_text("#prompt-count") == ": 280 of 300 characters"
    page.fill("#prompt", "")
    assert page.inner_text("#prompt-count") == ""
    page.fill("#prompt", "y" * 250)
    page.evaluate(
        """() => {
            const clipboardData = new DataTransfer();
            clipboardData.setData("text", "z".repeat(73));
            const it = document.querySelector("#prompt");
            it.setSelectionRange(240, 250);
            it.dispatchEvent(new ClipboardEvent("paste", { clipboardData }));
            it.setRangeText("z".repeat(60));
            it.dispatchEvent(new Event("input"));
        }"""
    )
    assert page.inner_text("#prompt-count") == ": the last 13 do not fit"


def test_it_is_light(opened):
    """Compressed, until the first step is seen; then what each other scheme adds when it is chosen."""
    server = serve(isolated=True)

    @functools.cache
    def packed(path):
        return len(gzip.compress((WEB / path.lstrip("/")).read_bytes()))

    def size():
        return sum(packed(path) for path in server.sent if path != "/")

    try:
        page = opened(url=server.url)
        first = size()
        assert 1 * MEGABYTE < first < 3 * MEGABYTE
        for model in GOLDEN:
            before = size()
            choose(page, model)
            assert size() - before < 3 * MEGABYTE, model
    finally:
        server.shutdown()


def test_the_first_step_takes_three_seconds_of_a_processor(opened):
    """Of all threads of the page's process, the run of the program included: not how long it waits for a processor."""
    page = opened()
    assert page.inner_text(".step-title") == "Tokens"
    tools = page.context.new_cdp_session(page)
    tools.send("Performance.enable")
    metrics = {metric["name"]: metric["value"] for metric in tools.send("Performance.getMetrics")["metrics"]}
    assert 0 < metrics["ProcessTime"] < 3


def test_the_keyboard_is_enough(opened):
    page = opened()
    unfold(page)
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "skip"
    seen = set()
    for _ in range(80):  # whatever has the focus shows it
        page.keyboard.press("Tab")
        outline, what = page.evaluate(
            """() => {
                const it = document.activeElement, pill = it.matches(".pill input") ? it.nextElementSibling : it;
                return [getComputedStyle(pill).outlineStyle, it.id || it.textContent.slice(0, 20) || it.tagName];
            }"""
        )
        if page.evaluate("document.activeElement === document.body"):
            continue  # behind the last one the browser itself has the focus
        seen.add(what)
        assert outline != "none", what
    assert {"prompt", "run", "step", "layer-range", "token-range"} <= seen
    page.reload()
    page.wait_for_selector("#stage .step-title")
    page.locator(".skip").focus()  # the first stop; a browser may go on from where it was before
    stops = ["skip"]
    while stops[-1] != "step":
        page.keyboard.press("Tab")
        stops.append(page.evaluate("document.activeElement.id"))
        assert len(stops) <= 22, stops
    page.locator("#chips [tabindex='0']").focus()
    page.keyboard.press("ArrowLeft")
    assert page.evaluate("document.activeElement.dataset.token") == page.get_attribute(
        "#chips [aria-pressed=true]", "data-token"
    )
    assert page.inner_text("#step-name") == "tokens"  # the chips have taken the key
    page.locator("#path [aria-current]").focus()
    page.keyboard.press("ArrowDown")
    page.keyboard.press("ArrowDown")
    assert page.inner_text("#step-name") == "layers.0.attn.norm"
    assert page.evaluate("document.activeElement.getAttribute('aria-current')") == "step"
    page.keyboard.press("Home")
    page.locator("#main").focus()
    for _ in range(4):
        page.keyboard.press("ArrowRight")
    assert page.inner_text("#step-name") == "layers.0.attn.q_proj"
    page.keyboard.press("ArrowLeft")
    assert page.inner_text("#step-name") == "layers.0.attn.norm.q"
    canvas = page.locator(".picture > .heat").last.locator("canvas")
    canvas.focus()
    for key in ("ArrowRight", "ArrowRight", "ArrowDown", "Enter"):
        page.keyboard.press(key)
    assert page.inner_text("#step-name") == "layers.0.attn.norm.q"  # the heat map has taken the keys
    assert page.inner_text(".explain h3").startswith("How value 65 came about")
    assert "Arrow keys move" in canvas.get_attribute("aria-label")


@pytest.mark.parametrize("width", [375, 1280])
@pytest.mark.parametrize("view", VIEWS)
def test_tab_goes_everywhere(opened, view, width):
    """To all that can be used, and whatever has the focus shows it. One stop for radio buttons, chips, steps."""
    page = opened(view, width)
    if view == "compare":
        page.wait_for_selector("#compare-said")
    hidden = []
    for _ in range(150):
        page.keyboard.press("Tab")
        outline = page.evaluate(
            """() => {
                const it = document.activeElement;
                if (it.dataset.seen) return null;
                if (it === document.body) return "the browser's own";
                it.dataset.seen = "yes";
                const shown = it.matches(".pill input") ? it.nextElementSibling : it.closest(".pick") ?? it;
                return getComputedStyle(shown).outlineStyle + " " + it.outerHTML.slice(0, 100);
            }"""
        )
        if outline is None:
            break
        if outline.startswith("none"):
            hidden.append(outline)
    assert hidden == []
    left = page.evaluate(
        """() => Array.from(document.querySelectorAll("a, button, input, select, summary, canvas, [tabindex]"), (it) =>
            it.dataset.seen || it.disabled || it.tabIndex < 0 || it.type === "radio" || !it.checkVisibility() ||
            (it.matches("canvas") && !it.hasAttribute("tabindex")) ? null : it.outerHTML.slice(0, 120)
        ).filter(Boolean)"""
    )
    assert left == []


def test_words_of_the_glossary_say_what_they_mean(opened):
    page = opened()
    go_to(page, "layers.0.attn.norm.q")
    guide = page.inner_text(".guide")
    page.click(".guide .term:text-is('scale')")
    assert page.inner_text(".guide + .bubble") == f"scale: {page_data()['words']['scale']}"
    assert page.inner_text(".guide") == guide
    page.click(".guide .term:text-is('group')")
    assert page.locator(".bubble").all_inner_texts() == [f"group: {page_data()['words']['group']}"]
    page.click(".guide .term:text-is('group')")
    assert page.locator(".bubble").count() == 0


@pytest.mark.parametrize("view", VIEWS)
def test_tabs_are_visible_on_a_phone(opened, view):
    page = opened(view, 360)
    for link in page.locator("#tabs a").all():
        box = link.bounding_box()
        assert box["x"] >= 0, link.inner_text()
        assert box["x"] + box["width"] <= 360, link.inner_text()
    assert page.evaluate(
        "(() => { const it = document.querySelector('#tabs'); return it.scrollWidth <= it.clientWidth; })()"
    )


def test_a_product_does_not_scroll_on_its_own_on_a_phone(opened):
    page = opened(width=360)
    go_to(page, "layers.0.attn.q_proj")
    page.evaluate("async () => (await import('./state.js')).explained(0)")
    page.wait_for_selector(".tiles")
    assert (
        page.evaluate(
            "Array.from(document.querySelectorAll('.explain *')).filter((it) => "
            "['auto', 'scroll'].includes(getComputedStyle(it).overflowY) && it.scrollHeight > it.clientHeight).length"
        )
        == 0
    )


def test_softmax_comes_out_as_shown(opened):
    page = opened()
    go_to(page, "layers.1.attn.probs", 3)
    canvas = page.locator(".picture > .heat").first.locator("canvas")
    canvas.focus()
    for key in ("Home", "ArrowRight", "ArrowRight", "Enter"):
        canvas.press(key)
    power, computed, again, total, share = page.locator(".explain .figure b").all_inner_texts()
    score, largest = re.fullmatch(r"exp\((−?[\d.]+) − \(?(−?[\d.]+)\)?\)", power).groups()
    assert computed == again
    assert number(computed) == pytest.approx(np.exp(number(score) - number(largest)), rel=2e-8)
    assert number(computed) / number(total) == pytest.approx(number(share), rel=1e-7)


def test_the_list_of_tokens_keeps_its_height(opened):
    page = opened()
    go_to(page, "logits")
    height = page.locator("#next-tokens").bounding_box()["height"]
    page.fill("#temperature", "0")
    assert page.locator("#next-tokens").bounding_box()["height"] == height
    assert page.locator("#next-tokens .chosen").count() == 1


def test_one_beginning_for_two_views(opened):
    page = opened()
    unfold(page)
    page.fill("#prompt", "A dragon")
    page.click("#tabs a[href='#compare']")
    page.wait_for_selector("#compare-said")
    assert page.input_value("#compare-prompt") == "A dragon"
    assert page.inner_text("#compare .fold > summary").startswith("“A dragon” · Q8 beside GPTQ")
    assert "A dragon" in page.locator(".story .begun").first.inner_text()
    page.click("#tabs a[href='#walk']")
    unfold(page)
    page.fill("#prompt", "A king")
    page.click("#tabs a[href='#compare']")
    page.wait_for_selector(".story .begun:has-text('A king')")


@pytest.mark.parametrize(("width", "most"), [(360, 440), (768, 440), (1024, 520), (1440, 520)])
def test_the_step_is_on_the_first_screen(opened, width, most):
    """Of 900 pixels; so are the numbers of a step, where there is room."""
    page = opened(width=width)
    title = page.locator("#stage .step-title").bounding_box()
    assert title["y"] + title["height"] < most
    assert page.evaluate("scrollY") == 0
    for _ in range(3):
        page.click("#step")
    assert page.inner_text("#step-name") == "layers.0.attn.norm.q"
    assert page.evaluate("scrollY") == 0
    if width > 700:
        assert page.locator(".picture > .heat canvas").first.bounding_box()["y"] < 850


def test_show_me_goes_to_the_heading(opened):
    page = opened()
    for button in page.locator(".shortcuts button").all():
        button.click()
        heading, bar = page.locator("#stage .step-title").bounding_box(), page.locator(".stepper").bounding_box()
        assert bar["y"] + bar["height"] <= heading["y"] < 400


@functools.cache
def axe():
    """The source of axe-core: https://github.com/dequelabs/axe-core"""
    package = pytest.importorskip("axe_playwright_python", reason="needs axe: make test-web")
    return (Path(package.__file__).parent / "axe.min.js").read_text(encoding="utf-8")


def violations(page):
    """What axe-core has to say of the page as it is, a line for each."""
    page.evaluate(axe())
    found = page.evaluate("async () => (await axe.run()).violations")
    return [f"{v['id']}: {node['html'][:200]}" for v in found for node in v["nodes"]]


@pytest.mark.parametrize("colours", ["light", "dark"])
@pytest.mark.parametrize("width", [375, 1280])
def test_axe_finds_nothing(opened, tmp_path, width, colours):
    trace = tmp_path / "mine.safetensors"
    write_trace(trace, planted(next(iter(BUGS))))
    page = opened(width=width, colours=colours)
    assert violations(page) == []
    for step in ("layers.0.attn.norm.q", "layers.0.attn.q_proj", "layers.1.attn.probs", "logits"):
        go_to(page, step)
        page.evaluate("async () => (await import('./state.js')).explained(3)")
        page.evaluate("for (const it of document.querySelectorAll('#walk details')) it.open = true")
        assert violations(page) == [], step
    page.click("#tabs a[href='#compare']")
    page.wait_for_selector("#compare-said")
    assert violations(page) == []
    page.click("#tabs a[href='#break']")
    page.click("#break form button[type=submit]")
    page.wait_for_selector("#break-view .headline")
    assert violations(page) == []
    page.click("#tabs a[href='#port']")
    page.set_input_files("#port-file", trace)
    page.wait_for_selector("#port-view .headline")
    assert violations(page) == []
    page.click("#tabs a[href='#chat']")
    page.wait_for_selector("#chat .drop")
    page.evaluate(DROP, ["#chat .drop", "q8.bin", "q8", None])
    page.wait_for_selector("#chat-line")
    assert violations(page) == []


def too_small(page):
    """What fingers miss: less than 44 pixels high or wide (WCAG 2.5.5)."""
    return page.evaluate(
        """() => Array.from(document.querySelectorAll("a, button, select, input, summary"), (it) => {
            const isInLabel = it.matches("input[type=radio], input[type=checkbox], input[type=file]");
            const box = (isInLabel ? it.closest("label") : it).getBoundingClientRect();
            const exempt = it.matches(".term, .skip") || it.closest("p.more, .intro");
            return box.width && !exempt && (box.width < 44 || box.height < 44) ? it.outerHTML.slice(0, 120) : null;
        }).filter(Boolean)"""
    )


@pytest.mark.parametrize("width", [375, 768])
@pytest.mark.parametrize("view", VIEWS)
def test_fingers_hit(opened, view, width):
    """44 pixels each way (WCAG 2.5.5): all that can be tapped but words in a text and numbers of a heat map, which have
    buttons of their own."""
    page = opened(view, width)
    if view == "walk":
        page.click("#walk .fold > summary")
        go_to(page, "layers.0.attn.q_proj")
        page.evaluate("async () => (await import('./state.js')).explained(3)")
        for _ in range(2):
            page.locator(".nudge button").nth(1).click()
        assert page.inner_text(".explain h3").startswith("How value 1 ")
    if view == "compare":
        page.wait_for_selector("#compare-said")
        page.click("#compare .fold > summary")
    if view == "break":
        page.click("#break form button[type=submit]")
        page.wait_for_selector("#break-view .headline")
    assert too_small(page) == []


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("view", VIEWS)
def test_views_fit_their_width(opened, view, width):
    """And their pictures are in build/web-pictures, to be looked at."""
    PICTURES.mkdir(parents=True, exist_ok=True)
    page = opened(view, width)
    steps = {"walk": ("layers.0.attn.norm.q", "layers.0.attn.q_proj", "layers.0.attn.probs", "logits")}.get(view, ("",))
    if view == "compare":
        page.wait_for_selector("#compare-said")
    if view == "break" and variants():
        page.click("#break form button[type=submit]")
        page.wait_for_selector("#break-view .headline")
    for step in steps:
        if step:
            go_to(page, step)
            canvas = (
                page.locator(".picture .heat canvas").first
                if "probs" in step
                else page.locator(".picture > .heat").last.locator("canvas")
            )
            canvas.focus()
            canvas.press("Home")
            canvas.press("Enter")
        assert page.evaluate("document.documentElement.scrollWidth") <= width, step
        page.screenshot(path=PICTURES / f"{view}-{step.split('.')[-1] or 'view'}-{width}.png", full_page=True)


def test_pictures_of_the_pages(opened):
    """Those of README.md and docs/web.md are copies of these in 256 colours, docs/web-NAME.png."""
    PICTURES.mkdir(parents=True, exist_ok=True)

    def take(page, name, step=None, at=None):
        if step:
            go_to(page, step)
            canvas = page.locator(".picture > .heat").last.locator("canvas")
            canvas.focus()
            canvas.press("Home")
            canvas.press("Enter")
        if at:
            page.evaluate(
                "(at) => scrollTo(0, document.querySelector(at).getBoundingClientRect().top + scrollY - 70)", at
            )
        page.mouse.move(0, 0)
        page.evaluate("document.activeElement.blur()")
        page.screenshot(path=PICTURES / f"{name}.png")
        assert (PICTURES / f"{name}.png").stat().st_size < 250_000

    page = opened()
    take(page, "web-product", "layers.0.attn.q_proj", ".picture h4:nth-of-type(2)")
    page = opened(colours="dark")
    take(page, "web-quantize", "layers.0.attn.norm.q", "#stage")
    page = opened(width=360)
    take(page, "web-phone", "layers.0.attn.norm.q", ".picture")
    page = opened("compare")
    page.wait_for_selector("#compare-said")
    take(page, "web-compare", at="#compare-view")
    page = opened("break")
    if variants():
        page.check("input[name=variant][value=round-half-up]", force=True)
        page.click("#break form button[type=submit]")
        page.wait_for_selector("#break-view .headline")
        take(page, "web-break", at="#break-view")


@pytest.mark.parametrize("width", [360, 1280])
def test_it_runs_in_firefox(server, tmp_path, width):
    binary = shutil.which("firefox-esr") or shutil.which("firefox")
    if binary is None:
        pytest.skip("needs Firefox: make test-web")
    firefox = Firefox(binary, tmp_path, server.url, width)
    try:
        firefox.wait_for("document.querySelector('#stage .step-title') !== null")
        assert firefox.evaluate("document.querySelector('#lacks').hidden")
        for model, golden in GOLDEN.items():
            story = json.loads((DATA / f"{golden}.json").read_text())["generations"][1]
            found = firefox.evaluate(
                f"""(async () => {{
                    const {{ contextOfRun }} = await import("./context.js");
                    const {{ productOf }} = await import("./products.js");
                    const prompt = {json.dumps(story["prompt"])};
                    const run = await contextOfRun("{model}", {{ prompt, newTokens: 64 }});
                    const {{ groups, value }} = productOf("layers.1.attn.q_proj", 3, 7, run);
                    return [run.newIds, groups.at(-1).total === value];
                }})()"""
            )
            assert found == [story["new_ids"], True], model
        for view in VIEWS:
            firefox.evaluate(f"void (location.hash = '{view}')")
            firefox.wait_for(f"!document.querySelector('#{view}').hidden")
            assert firefox.evaluate("document.documentElement.scrollWidth") <= width, view
        assert firefox.errors == []
    finally:
        firefox.close()


def test_steps_of_the_page_are_those_of_the_programs():
    """Every step that a trace of a program has is on the page with a guide, a line of source and what it reads."""
    for model, golden in GOLDEN.items():
        program = page_data()["programs"][page_data()["models"][model]["program"]]
        for name in read_trace(DATA / f"{golden}.trace.safetensors"):
            step = re.sub(r"^layers\.\d+\.", "", name)
            if step.endswith((".s", ".acc")):
                continue
            assert step in page_data()["steps"], name
            lines = program["steps"][step]
            source = (ROOT / program["source"]).read_text(encoding="utf-8").split("\n")
            for i, line in enumerate(lines["lines"]):
                assert " ".join(source[lines["first"] - 1 + i].split()).startswith(" ".join(line.split())), name
