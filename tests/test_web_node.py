"""The programs in WebAssembly, run by node through the page's worker: the goldens' ids, traces, error lines, variants.

`make test-web-node` builds them and runs this; the C++ tests of kernels and programs run there in WebAssembly as well.
"""

import json
import re
import shutil
import struct
import subprocess
import sys

import pytest

from formats.checkpoint import Checkpoint
from formats.schemes import FORMATS
from golden.forward import forward
from golden.q8 import Q8
from golden.trace import Recorder, compare, read_trace
from tests.helpers import DATA, GOLDEN_FILES, MODELS, ROOT, first_bad, run_here
from tests.test_runq import generations
from tools.web_variant import EditError, write_variant

WEB = ROOT / "build" / "web"
TESTS = [
    ROOT / "build" / "wasm" / f"{name}_test.js" for name in ("kernels", "runq", "runq_w8a8", "runq_gptq", "runq_moe")
]
VARIANTS = {p.stem: json.loads(p.read_text()) for p in sorted((ROOT / "web" / "variants").glob("*.json"))}
# Of every program, and of every way to store its weights.
FILES = {
    "tiny-llama.q8": "runq", "tiny-qwen3.q8": "runq", "tiny-llama.w8a8": "runq_w8a8",
    "tiny-qwen3.w8a8-block32": "runq_w8a8", "tiny-llama.w8a8-static": "runq_w8a8",
    "tiny-llama.w8a8-rotate": "runq_w8a8",
    "tiny-llama.gptq-ladder": "runq_gptq", "tiny-qwen3.gptq-sparse": "runq_gptq",
    "tiny-llama.gptq-w4": "runq_gptq", "tiny-qwen3-moe.moe-a8w8": "runq_moe", "tiny-qwen3-moe.moe-a8w4": "runq_moe",
    "tiny-qwen3-moe.moe-mxfp8": "runq_moe", "tiny-qwen3-moe.moe-ladder": "runq_moe",
}  # fmt: skip


@pytest.mark.parametrize(("text", "line"), {
    "no JSON": ("{", "Expecting property name"), "no object": ("[1]", "not an object that has edits"),
    "no edits": ("{}", "not an object that has edits"),
    "lines that are not there": ('{"edits": [{"file": "runq.cpp", "old": ["no such line"], "new": []}]}',
                                 "runq.cpp has these lines 0 times, expected once"),
    "no file": (None, "No such file or directory"),
}.values())  # fmt: skip
def test_a_wrong_variant_is_one_line(tmp_path, text, line):
    path, out = tmp_path / "variant.json", tmp_path / "out"
    if text is not None:
        path.write_text(text)
    command = [sys.executable, "tools/web_variant.py", "sources", path, out]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert line in done.stderr
    assert done.stderr.count("\n") == 1
    assert not out.exists()


def test_a_folder_for_the_page_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("")
    command = [sys.executable, "-m", "web.page_data", tmp_path / "file"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith("web.page_data: ")
    assert done.stderr.count("\n") == 1


built = pytest.mark.skipif(
    shutil.which("emcc") is None or shutil.which("node") is None or not (WEB / "variants.json").exists(),
    reason="needs emscripten and node: make test-web-node installs them, builds and runs",
)


def program(name, *args, text="", code=0):
    """A program in WebAssembly, as on a command line."""
    command = ["node", WEB / "run.js", name, *map(str, args)]
    done = subprocess.run(command, cwd=ROOT, input=text, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == code, done.stdout[-2000:] + done.stderr[-2000:]
    return done


def trace(tmp_path, name, model, *args):
    """The trace of a prompt: of ids, or -i and a text. Paths in a program begin where this runs."""
    out = tmp_path / "trace"
    program(name, model, *args, "-n", 1, "-t", 0, "--print-ids", "--trace", out)
    return read_trace(out)


def ids_of(tokens):
    return "--ids", ",".join(map(str, tokens))


@built
@pytest.mark.parametrize("name", FILES)
def test_ids_of_the_golden(name):
    golden = generations(name)[-1]
    done = program(FILES[name], GOLDEN_FILES / f"{name}.bin", "-i", golden["prompt"], "-t", 0, "-n", 64, "--print-ids")
    assert [int(i) for i in done.stdout.split(",")] == golden["new_ids"]
    assert "wasm-simd128, 1 thread" in done.stderr


@built
@pytest.mark.parametrize("name", FILES)
def test_trace_against_the_golden_trace(tmp_path, name):
    golden = read_trace(DATA / f"{name}.trace.safetensors")
    found = trace(tmp_path, FILES[name], GOLDEN_FILES / f"{name}.bin", *ids_of(golden["tokens"]))
    reports = compare(golden, found)
    assert len(reports) > 80 and [r for r in reports if r.error or not r.ok] == []


@built
def test_a_text_is_cut_into_tokens_as_by_the_program_itself():
    """Beyond ASCII: PCRE2 and utf8proc are compiled along. The ids of a text come back in the prompt's order."""
    text = "Lily's café №5 — “naïve” 日本語 \u212b e\u0301 \U0001f600\n\n  \t1234567 don't"
    model = GOLDEN_FILES / "tiny-llama.q8.bin"
    args = [model, "-i", text, "-t", 0, "-n", 5, "--print-ids"]
    native = subprocess.run(["./runq", *map(str, args)], cwd=ROOT, capture_output=True, text=True, check=True)
    found = program("runq", *args)
    assert found.stdout == native.stdout
    prompt = re.compile(r"prefill +\d+ tokens")
    assert prompt.search(found.stderr)[0] == prompt.search(native.stderr)[0]


# A page that sends a line once the one before it is answered; prints what the program does.
CHAT = """
import { Worker } from "node:worker_threads";
import { openInput } from "WEB/stdin.js";
const lines = ["Tell me of a cat.", "And the sea — café?"], input = openInput(64);
let printed = "";
const worker = new Worker(new URL("WEB/node_worker.js"));
const next = () => (lines.length ? input.send(lines.shift() + "\\n") : input.close());
worker.on("message", ({ type, text, code, seconds }) => {
    if (type === "stdout") printed += text;
    if (type === "waiting") next();
    if (type !== "done") return;
    process.stdout.write(printed);
    process.exitCode = seconds > 0 ? code : 99;
    worker.terminate();
});
const args = ["model.bin", "-m", "chat", "-t", "0", "-n", "20"], files = { "/model.bin": "MODEL" };
worker.postMessage({ type: "run", id: 7, program: "runq", args, files, wants: [], input: input.buffer });
"""


@built
def test_chat_answers_a_line_before_the_next_is_there(tmp_path):
    model = GOLDEN_FILES / "tiny-llama.q8.bin"
    page = tmp_path / "page.mjs"
    page.write_text(CHAT.replace("WEB", WEB.as_uri()).replace("MODEL", model.as_uri()))
    done = subprocess.run(["node", page], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    args = ["./runq", model, "-m", "chat", "-t", "0", "-n", "20"]
    lines = "Tell me of a cat.\nAnd the sea — café?\n"
    native = subprocess.run(args, cwd=ROOT, input=lines, capture_output=True, text=True, check=True)
    assert done.stdout == native.stdout and done.stdout.count("\n") >= 2


# What is done to a file, and what the program says then: the same line as outside a browser.
def cut(data):
    return data[: len(data) // 2]


def foreign(_data):
    return b"GGUF" + bytes(100)


def other_header(data):
    return data[:0x0C] + struct.pack("<i", 12345) + data[0x10:]


@built
@pytest.mark.parametrize(
    "damage", [cut, foreign, other_header, lambda _: b""], ids=["cut", "foreign", "header", "empty"]
)
@pytest.mark.parametrize("name", ["tiny-llama.q8", "tiny-llama.w8a8", "tiny-llama.gptq-w4", "tiny-qwen3-moe.moe-a8w8"])
def test_a_damaged_file_gives_the_program_s_own_line(tmp_path, name, damage):
    path = tmp_path / "damaged.bin"
    path.write_bytes(damage((GOLDEN_FILES / f"{name}.bin").read_bytes()))
    args = [path, "-i", "Once", "-n", 1]
    native = subprocess.run(
        [f"./{FILES[name]}", *map(str, args)], cwd=ROOT, capture_output=True, text=True, check=False
    )
    done = program(FILES[name], *args, code=native.returncode)
    assert native.returncode == 1
    assert (done.stdout, done.stderr) == (native.stdout, native.stderr)


@built
def test_a_program_that_is_not_there():
    done = program("runq_none", "x", code=134)
    assert done.stderr.startswith("runq_none: ") and done.stderr.count("\n") == 1


@built
@pytest.mark.parametrize("name", VARIANTS)
def test_golden_diff_names_what_a_variant_breaks(tmp_path, name):
    variant = VARIANTS[name]
    model = GOLDEN_FILES / f"{variant['model']}.bin"
    golden = DATA / f"{variant['model']}.trace.safetensors"
    if "prompt" in variant:
        prompt = "-i", variant["prompt"]
        right = trace(tmp_path, variant["program"], model, *prompt)
        recorder = Recorder()
        checkpoint = Checkpoint(MODELS / variant["model"].removesuffix(".q8"))
        forward(checkpoint.config, Q8(checkpoint), recorder("tokens", right["tokens"]), recorder)
        assert first_bad(compare(recorder.tensors, right)) is None
        golden = tmp_path / "right"
        (tmp_path / "trace").rename(golden)
    else:
        prompt = ids_of(read_trace(golden)["tokens"])
    if variant["edits"]:
        trace(tmp_path, f"variants/{name}", model, *prompt)
    else:
        trace(tmp_path, variant["program"], WEB / "variants" / f"{name}.bin", *prompt)
    done = run_here("golden", "diff", golden, tmp_path / "trace")
    assert done.returncode == 1
    assert f"the first at {variant['first_difference']};" in done.stdout


@pytest.mark.parametrize("name", VARIANTS)
def test_a_variant_fits_the_sources(tmp_path, name):
    variant = VARIANTS[name]
    write_variant(variant, ROOT, tmp_path / "out")
    changed = {path.relative_to(tmp_path / "out") for path in (tmp_path / "out").rglob("*.*")}
    assert {str(path) for path in changed} == {edit["file"] for edit in variant["edits"]}
    for path in changed:
        assert (tmp_path / "out" / path).read_text() != (ROOT / path).read_text()
    assert all("scaffold" in edit or edit["new"] for edit in variant["edits"])
    assert variant["program"] in {f.program for f in FORMATS.values()}


@pytest.mark.parametrize(("text", "n"), [("b\n", 0), ("a\nx\na\n", 2), ("xa\n", 0)])
def test_an_edit_that_does_not_fit_is_refused(tmp_path, text, n):
    (tmp_path / "x.h").write_text(text)
    variant = {"edits": [{"file": "x.h", "old": ["a"], "new": ["b"]}]}
    with pytest.raises(EditError, match=f"x.h has these lines {n} times, expected once"):
        write_variant(variant, tmp_path, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@built
@pytest.mark.parametrize("test", TESTS, ids=lambda path: path.stem)
def test_cpp_tests_in_webassembly(test):
    """Every product, quantizer and operation against the op vectors, plain loops and golden traces, as natively."""
    if not test.exists():
        pytest.skip("needs the C++ tests in WebAssembly: make test-web-node builds them")
    command = ["node", "--no-experimental-fetch", test, "--no-colors=1"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    summary = re.search(r"test cases:\s*(\d+) \|\s*(\d+) passed \| 0 failed", done.stdout)
    assert done.returncode == 0 and summary, done.stdout[-3000:] + done.stderr[-2000:]
    assert int(summary[1]) >= 10 and summary[1] == summary[2]
