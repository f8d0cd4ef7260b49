"""`golden hex`: tensors as text for hardware, and a port in C that has nothing else."""

import json
import re
import shutil
import subprocess
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from formats.gptq import FORMATS as GPTQ_FORMATS
from formats.gptq import GptqLayout
from formats.model_file import read_format, read_header
from formats.schemes import GPTQ_FILE as GPTQ_FORMAT
from formats.tensors import matrix_shapes
from golden import awq
from golden.gptq import GPTQ, pack_matrix
from golden.hex_files import c_array, c_literal, check_c_names, words
from golden.hex_tensors import read_tensors, unpacked
from golden.moe import MoE
from golden.op_vectors_gptq import random_matrix
from golden.schemes import SCHEMES, read_file
from golden.tiles import interleave, tile, tile_counts, untile
from tests.helpers import DATA, F32, FULL, ROOT, run_golden
from tests.pages import commands_of
from tests.test_docs import blocks

OPS = DATA / "ops.safetensors"
FILES = ROOT / "build" / "models"
GPTQ_FILE = FILES / "tiny-llama.gptq-ladder.bin"
DECODE = DATA / "tiny-llama.q8.decode.trace.safetensors"
PORT = ROOT / "tests" / "port_layer.c"
PAGE = ROOT / "docs" / "hardware.md"
VARIANTS = [
    path.stem
    for model in ("tiny-llama", "tiny-qwen3-moe")
    for reference in SCHEMES.values()
    if model in reference.models
    for path in (FILES / f"{model}.{variant}.bin" for variant in reference.variants)
]


def ok(*args):
    done = run_golden("hex", *args)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def read_words(text, bits, lanes):
    """The values of a $readmemh file, as unsigned integers: the first of a word from its lowest bits."""
    lines = [line for line in text.splitlines() if not line.startswith(("//", "@"))]
    return np.array([[int(line, 16) >> bits * i & (1 << bits) - 1 for i in range(lanes)] for line in lines])


# ---- words


def test_words_by_hand():
    codes = np.array([[1, -1, -128, 127, 5]], np.int8)
    assert words(codes, 1) == ["01", "ff", "80", "7f", "05"]
    assert words(codes, 4) == ["7f80ff01", "00000005"]  # the first value rightmost, the rest of the last word zeros
    assert words(np.array([1.0, -2.0], F32), 2) == ["c00000003f800000"]
    assert words(np.array([1.0], np.float16), 1) == ["3c00"]
    assert words(np.array(3, np.int32), 1) == ["00000003"]
    assert words(np.array([[1, 2, 3], [4, 5, 6]], np.int8), 2) == ["0201", "0003", "0504", "0006"]  # a row, a new word


@pytest.mark.parametrize(("name", "lanes"), [("quantize.64.codes", 16), ("matmul.2x9x384g64.accumulators", 6)])
@pytest.mark.parametrize("kind", ["hex", "mem"])
def test_what_is_written_can_be_read_back(name, lanes, kind):
    expected = load_file(OPS)[name]
    text = ok(name, "--format", kind, "--lanes", lanes)
    about = json.loads(text.splitlines()[0].removeprefix("// "))
    assert about["shape"] == list(expected.shape)
    assert text.splitlines()[1].startswith("@0") == (kind == "mem")
    found = read_words(text, 8 * expected.dtype.itemsize, lanes)
    unsigned = expected.view(f"u{expected.dtype.itemsize}")
    assert np.array_equal(found.reshape(-1), unsigned.reshape(-1))


def test_a_folder_with_a_manifest(tmp_path):
    files = ok("matmul.2x9x384g64.[xw].*", "--lanes", 8, "--out", tmp_path / "out").split()
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert [str(tmp_path / "out" / entry["file"]) for entry in manifest] == files
    by_name = {entry["name"]: entry for entry in manifest}
    assert set(by_name) == {f"matmul.2x9x384g64.{x}.{y}" for x in "xw" for y in ("codes", "scales")}
    assert by_name["matmul.2x9x384g64.w.scales"] == {
        "name": "matmul.2x9x384g64.w.scales", "type": "float32", "shape": [9, 6], "order": "row by row", "bits": 32,
        "lanes": 1, "file": "matmul.2x9x384g64.w.scales.hex", "width": 32, "depth": 54,
    }  # fmt: skip
    codes = by_name["matmul.2x9x384g64.w.codes"]
    assert [codes[key] for key in ("bits", "lanes", "width", "depth")] == [8, 8, 64, 9 * 48]
    ok("matmul.2x9x384g64.[xw].*", "--lanes", 8, "--scale-lanes", 4, "--out", tmp_path / "out")
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert [entry["lanes"] for entry in manifest] == [4 if "scales" in entry["name"] else 8 for entry in manifest]


def test_words_of_fewer_bits_by_hand():
    codes = np.array([[1, -1, -8, 7, 5]], np.int8)
    assert words(codes, 4, 4) == ["78f1", "0005"]
    assert words(np.array([[1, 2, 3, 0, 3]], np.uint8), 4, 2) == ["39", "03"]
    assert words(np.array([[1, 0, 1]], np.uint8), 3, 1) == ["5"]
    assert words(np.array([[3, 1, 2]], np.uint8), 3, 2) == ["27"]  # 6 bits: 10 01 11


@pytest.mark.parametrize("file", VARIANTS)
def test_every_kind_of_model_file(file, tmp_path):
    """As it is and unpacked; the norm is read back: in AWQ files fp16, in the others fp32.

    Of the layers one, or two of a mixture of experts, of which one has no experts; with FULL=1 all.
    """
    path = FILES / f"{file}.bin"
    names = ["*"] if FULL else ["[!l]*", "layers.[01].*" if "moe" in file else "layers.1.*"]
    ok(*names, "--file", path, "--out", tmp_path / "packed")
    ok(*names, "--file", path, "--unpack", "--out", tmp_path / "unpacked")
    for folder in ("packed", "unpacked"):
        for entry in json.loads((tmp_path / folder / "manifest.json").read_text()):
            text = (tmp_path / folder / entry["file"]).read_text().splitlines()[1:]
            assert len(text) == entry["depth"] == np.prod(entry["shape"])
            assert {len(line) for line in text} == {-(-entry["bits"] // 4)}
    values = read_words((tmp_path / "packed" / "norm.hex").read_text(), 64, 1).reshape(-1)
    found = values.astype(np.uint16).view(np.float16) if "awq" in file else values.astype(np.uint32).view(F32)
    assert np.array_equal(found.astype(F32), read_file(path).vector("norm"))


@pytest.mark.parametrize("file", VARIANTS)
def test_names_in_c_differ(file):
    """Also those of op vectors and traces, each beside its own."""
    check_c_names(list(read_tensors(FILES / f"{file}.bin").tensors), "w")
    check_c_names(list(read_tensors(FILES / f"{file}.bin", unpack=True).tensors), "w")
    for path in (OPS, DECODE):
        check_c_names(list(read_tensors(path).tensors), "s")
    with pytest.raises(ValueError, match=r"a\.b and a_b are both w_a_b"):
        check_c_names(["a.b", "a_b"], "w")


def test_unpacked_codes_are_the_matrix():
    """What `--unpack` writes is what the reference's own reader of each scheme has."""
    path = FILES / "tiny-llama.awq.bin"
    file, name = read_tensors(path, unpack=True), "layers.1.ffn.down_proj"
    got = {part: file.tensors[f"{name}.{part}"]() for part in ("codes", "zeros", "scales")}
    assert [got[part].bits for part in got] == [4, 4, 16]
    steps = got["codes"].array.reshape(*got["zeros"].array.shape, -1) - got["zeros"].array[..., None].astype(F32)
    weights = (steps * got["scales"].array[..., None]).astype(np.float16).reshape(got["codes"].array.shape)
    assert np.array_equal(weights, awq.dequantize(awq.AWQ(path).matrix(name)).T)

    for variant in ("moe-a8w4", "moe-a8w4-pure"):
        path = FILES / f"tiny-qwen3-moe.{variant}.bin"
        codes = read_tensors(path, unpack=True).tensors["layers.1.moe.gate_up_proj.codes"]()
        assert (codes.bits, codes.type) == (4, "int4")
        assert np.array_equal(codes.array, MoE(path).experts("layers.1.moe.gate_up_proj").codes)
    assert read_tensors(path, unpack=True).tensors["embed.codes"]().type == "int4"

    for variant in ("gptq-ladder", "gptq-w4", "gptq-w8", "gptq-sparse"):
        path = FILES / f"tiny-llama.{variant}.bin"
        scheme, file = GPTQ(path), read_tensors(path, unpack=True)
        for name, _ in matrix_shapes(scheme.config):
            m, codes = scheme.stored(name), file.tensors[f"{name}.codes"]()
            assert codes.bits == m.form.bits
            expected = m.codes if m.kept is None else m.codes[m.kept].reshape(len(m.codes), -1)
            assert np.array_equal(codes.array, expected)
            if m.kept is not None:
                assert np.array_equal(file.tensors[f"{name}.mask"]().array, m.kept)
            if m.zeros is not None and m.row_scales is None:
                assert np.array_equal(file.tensors[f"{name}.zeros"]().array, m.zeros)


@pytest.mark.parametrize("form", sorted(GPTQ_FORMATS), ids=str)
def test_every_format_of_gptq(form):
    """A random matrix of each, as a file would have it."""
    head = replace(read_header(GPTQ_FILE, read_format(GPTQ_FILE)), layout=GptqLayout((form,) * 9))
    assert head.file_format is GPTQ_FORMAT
    m = random_matrix(np.random.default_rng(0), form, 6, 384)
    tensors = {f"layers.0.attn.q_proj.{part}": value for part, value in pack_matrix(m).items()}
    found = {name: unpacked(head, tensors, name) for name in tensors}
    codes = found["layers.0.attn.q_proj.codes"]
    assert (codes is None) == (form.bits == 8)
    if codes is not None:
        expected = m.codes if m.kept is None else m.codes[m.kept].reshape(6, -1)
        assert (codes.bits, np.array_equal(codes.array, expected)) == (form.bits, True)
    if form.sparse:
        assert np.array_equal(found["layers.0.attn.q_proj.mask"].array, m.kept)
    if m.zeros is not None and not form.two_level:
        assert np.array_equal(found["layers.0.attn.q_proj.zeros"].array, m.zeros)


def test_a_memory_initialization_file():
    text = ok("quantize.16.codes", "--format", "coe", "--lanes", 4)
    comment, radix, head, *lines = text.splitlines()
    assert comment.startswith("; {")
    assert (radix, head) == ("memory_initialization_radix=16;", "memory_initialization_vector=")
    assert [line[-1] for line in lines] == [","] * (len(lines) - 1) + [";"]
    assert [line[:-1] for line in lines] == words(load_file(OPS)["quantize.16.codes"], 4)


def test_c_literals_are_exact():
    for value in (0.1, -0.0, 1e-45, 3.4028235e38, 1.0):
        literal = c_literal(float(F32(value)))
        assert literal.endswith("f")
        assert F32(float.fromhex(literal[:-1])).tobytes() == F32(value).tobytes()
    assert [c_literal(x) for x in (float("inf"), -float("inf"), float("nan"), -7)] == [
        "INFINITY",
        "-INFINITY",
        "NAN",
        "-7",
    ]


@pytest.mark.parametrize(
    ("args", "code", "text"),
    [
        (["nothing.*"], 1, "ops.safetensors: no tensor nothing.*"),
        (["quantize.64.*"], 1, "--format hex: 4 tensors, one file has one: give --out DIR"),
        (["half.x", "--format", "c", "--lanes", "2"], 1, "--lanes 2: a C array has no words"),
        (["quantize.64.codes", "--lanes", "0"], 2, "--lanes: 0 is not 1 to 1024"),
        (["quantize.64.codes", "--scale-lanes", "1025"], 2, "--scale-lanes: 1025 is not 1 to 1024"),
        (["half.x", "--format", "c", "--scale-lanes", "2"], 1, "--scale-lanes 2: a C array has no words"),
        (["quantize.64.codes", "--tile", "64"], 2, "--tile: '64', expected MxK"),
        (["half.x", "--tile", "2x2"], 1, "--tile: half.x has shape"),
        (["half.x", "--transpose"], 1, "--transpose: half.x has shape"),
        (["matmul.2x9x384g64.w.scales", "--tile", "3x48"], 1, "has 6 values for 384 inputs, which tiles of 48"),
        (["layers.0.ffn.gate_proj.codes", "--tile", "8x8", "--file", GPTQ_FILE], 1, "is packed in an order of its own"),
        (["half.x", "--file", "Makefile"], 1, "Makefile: "),
        (["gptq_expert.0.x"], 1, "ops.safetensors: gptq_expert.0.x has no values"),
    ],
)
def test_what_is_refused(args, code, text):
    done = run_golden("hex", *args)
    assert (done.returncode, done.stdout) == (code, "")
    assert text in done.stderr
    assert "Traceback" not in done.stderr


# ---- names of strangers

OUTSIDE = ["../evil", "../../evil", "/ABSOLUTE/evil", "a/b", "..\\evil", "..", ".", "", "C:evil", "C:\\evil", "..a"]
NO_FILES = [*OUTSIDE, "a\nb", "a\x1b[2Jb", "a\x7f", "a\x9b", "a\u2028b", "CON", "nul", "com1.txt", "LPT9 .x", "a*",
            "com\u00b9", "aux", "conout$.b", "a.", "a ", 'a"b', "a?b", "a<b", "a|b", "x" * 300, "é" * 120]  # fmt: skip
FILE_NAMES = ["x" * 236, "é" * 118, "com10", "console.a", "a..b", "-rf", "$HOME `id` 'x' (y)", "名前"]


@pytest.mark.parametrize("name", NO_FILES, ids=ascii)
@pytest.mark.parametrize("kind", ["hex", "c"])
def test_a_name_that_leads_elsewhere_or_is_no_files_writes_nothing(tmp_path, name, kind):
    """Nor do the other tensors of the file."""
    source, out = tmp_path / "in" / "t.safetensors", tmp_path / "out" / "deep"
    source.parent.mkdir()
    name = name.replace("/ABSOLUTE", str(tmp_path))
    save_file({"good": np.ones(3, F32), name: np.ones(3, F32)}, source)
    done = run_golden("hex", "*", "--file", source, "--format", kind, "--out", out)
    assert (done.returncode, done.stdout) == (1, "")
    assert re.fullmatch(
        rf"golden: {re.escape(str(source))}: tensor \"[ -~é¹…]*: no file can have that name[ -~]*\n", done.stderr
    )
    assert [p for p in tmp_path.rglob("*") if p.is_file()] == [source]
    assert not out.exists()


def test_names_that_files_can_have_stay_in_the_folder(tmp_path):
    source, out = tmp_path / "t.safetensors", tmp_path / "out"
    save_file({name: np.full(3, i, F32) for i, name in enumerate(FILE_NAMES)}, source)
    printed = ok("*", "--file", source, "--out", out).splitlines()
    manifest = json.loads((out / "manifest.json").read_text())
    assert sorted(p.name for p in out.iterdir()) == sorted([*(f"{name}.hex" for name in FILE_NAMES), "manifest.json"])
    assert printed == [str(out / entry["file"]) for entry in manifest]
    for entry in manifest:
        values = read_words((out / entry["file"]).read_text(), 32, 1).astype(np.uint32).view(F32)
        assert (values == FILE_NAMES.index(entry["name"])).all()


@pytest.mark.parametrize("pair", [("w.A", "w.a"), ("é", "e\u0301"), ("ß", "SS")], ids=ascii)
def test_names_that_are_one_file_where_case_does_not_count(tmp_path, pair):
    save_file({name: np.ones(3, F32) for name in pair}, tmp_path / "t.safetensors")
    done = run_golden("hex", "*", "--file", tmp_path / "t.safetensors", "--out", tmp_path / "out")
    assert (done.returncode, done.stdout, (tmp_path / "out").exists()) == (1, "", False)
    first, second = sorted(pair)
    assert f't.safetensors: tensors "{first}" and "{second}": one file on systems that ignore case\n' in done.stderr


def test_a_folder_whose_name_has_control_characters_is_shown_in_one_line(tmp_path):
    out = tmp_path / "a\x1b[2J\nb"
    done = run_golden("hex", "half.x", "--out", out)
    assert (done.returncode, done.stdout) == (0, f"{tmp_path}/a\\x1b[2J\\nb/half.x.hex\n")
    assert (out / "half.x.hex").is_file()


WORST = ["a*/ int evil(void){return 1;} /*", "b\\", "c??/", "d\nint evil;", "e\r*/ int evil; /*", 'f"; int evil; "',
         "é*/g", "", "h/*", "//i", "j*/\\\n#error", "int", "k\x7f\x1b[2J\x9b", "\U0001f600\u2028\u202e", "9",
         "l\\u002a/", "; memory_initialization_vector=", "@0", "`define m", "n" * 300]  # fmt: skip


def test_the_worst_names_in_c_leave_nothing_but_arrays(tmp_path):
    """What C calls them is in nobody's hand but ours, and no comment ends too soon: `nm` has the arrays alone."""
    save_file({name: np.full(2, i, np.int32) for i, name in enumerate(WORST)}, tmp_path / "t.safetensors")
    (tmp_path / "t.h").write_text(ok("*", "--file", tmp_path / "t.safetensors", "--format", "c"))
    text = (tmp_path / "t.h").read_bytes()
    assert not re.search(rb"[^ -~\n]", text)
    abouts = [json.loads(line[2:-2]) for line in text.decode().splitlines() if line.startswith("/*")]
    assert sorted(about["name"] for about in abouts) == sorted(WORST)
    arrays = re.findall(r"^static const int32_t (s_\w*)\[2\] = ", text.decode(), re.M)
    assert len(arrays) == len(WORST)
    (tmp_path / "all.c").write_text(f'#include "t.h"\nconst int32_t* const all[] = {{{", ".join(arrays)}}};\n')
    compilers = list(filter(shutil.which, ("gcc", "clang")))
    for compiler in compilers:
        command = [compiler, "-std=c11", "-Wall", "-Wextra", "-pedantic", "-Werror", "-c", "all.c"]
        subprocess.run(command, cwd=tmp_path, check=True)
        symbols = subprocess.run(["nm", "all.o"], cwd=tmp_path, check=True, capture_output=True, text=True).stdout
        assert {line.split()[-1] for line in symbols.splitlines()} == {"all", *arrays}
    assert compilers


@pytest.mark.parametrize("name", WORST, ids=ascii)
@pytest.mark.parametrize("kind", ["hex", "mem", "coe"])
def test_the_worst_names_in_text_are_one_comment(tmp_path, name, kind):
    save_file({name: np.array([1, 2, 3], np.int32)}, tmp_path / "t.safetensors")
    text = ok("*", "--file", tmp_path / "t.safetensors", "--format", kind)
    assert not re.search(r"[^ -~\n]", text)
    comment, *rest = text.splitlines()
    mark, about = comment.split(" ", 1)
    assert (mark, json.loads(about)["name"]) == (";" if kind == "coe" else "//", name)
    assert not re.search(r"[*/;`@]", about)
    heads = {"hex": [], "mem": ["@0"], "coe": ["memory_initialization_radix=16;", "memory_initialization_vector="]}[
        kind
    ]
    assert rest[: len(heads)] == heads
    assert [int(line.rstrip(",;"), 16) for line in rest[len(heads) :]] == [1, 2, 3]


def test_half_and_bfloat16_are_their_bits_in_c():
    for dtype, numbers in ((np.float16, "15360, 49408"), (ml_dtypes.bfloat16, "16256, 49184")):
        assert c_array("x", np.array([1, -2.5], dtype)) == f"static const uint16_t x[2] = {{\n  {numbers}}};\n"


@pytest.mark.parametrize(
    ("value", "kind", "text"),
    [(np.zeros((2, 0), F32), "hex", "b has no values"), (np.zeros(0, F32), "c", "b has no values"),
     (np.zeros(2), "c", "--format c: b: float64 has no C type here")],
)  # fmt: skip
def test_what_cannot_be_text_is_known_before_anything_is_written(tmp_path, value, kind, text):
    save_file({"a": np.ones(3, F32), "b": value}, tmp_path / "t.safetensors")
    done = run_golden("hex", "*", "--file", tmp_path / "t.safetensors", "--format", kind, "--out", tmp_path / "out")
    assert (done.returncode, done.stdout, (tmp_path / "out").exists()) == (1, "", False)
    assert done.stderr == f"golden: {tmp_path / 't.safetensors'}: {text}\n"


# ---- tiles


@pytest.mark.parametrize("shape", [(4, 6), (5, 7), (1, 1), (8, 3)])
def test_tiles_and_back(shape):
    matrix = np.arange(1, shape[0] * shape[1] + 1).reshape(shape)
    tiles = tile(matrix, 4, 3)
    assert tiles.shape[1:] == (4, 3)
    assert np.array_equal(untile(tiles, shape), matrix)
    assert tiles.sum() == matrix.sum()  # what is added is zeros
    assert tile(np.arange(16).reshape(4, 4), 2, 2)[1].tolist() == [[2, 3], [6, 7]]


@pytest.mark.parametrize("shape", [(3, 5, 7), (2, 8, 6), (1, 4, 3)])
@pytest.mark.parametrize("transpose", [False, True])
def test_tiles_of_experts(shape, transpose):
    experts = np.arange(1, np.prod(shape) + 1).reshape(shape)
    tiles, counts = tile(experts, 4, 3, transpose), tile_counts(shape, 4, 3)
    assert tiles.shape == (np.prod(counts), *((3, 4) if transpose else (4, 3)))
    assert np.array_equal(untile(tiles, shape, transpose), experts)
    for e, matrix in enumerate(experts):
        own = tiles.reshape(shape[0], -1, *tiles.shape[1:])[e]
        plain = tile(matrix, 4, 3)
        assert np.array_equal(own, plain.swapaxes(1, 2) if transpose else plain)


def test_transposed_words_by_hand(tmp_path):
    """The matrix of the page: weight 12 is that of output 1 and input 2."""
    matrix = np.array([[16 * o + i for i in range(6)] for o in range(4)], np.uint8)
    save_file({"w": matrix}, tmp_path / "t.safetensors")

    def lines(*args):
        return [line for line in ok("w", "--file", tmp_path / "t.safetensors", *args).splitlines() if line[0] != "/"]

    plain = lines("--tile", "2x3", "--lanes", 3)
    transposed = lines("--tile", "2x3", "--transpose", "--lanes", 2)
    assert plain[:5] == ["020100", "121110", "050403", "151413", "222120"]
    assert transposed[:7] == ["1000", "1101", "1202", "1303", "1404", "1505", "3020"]
    assert lines("--transpose", "--lanes", 4)[2] == "32221202"
    picture = next(block.text for block in blocks(PAGE.read_text()) if "--transpose: words of" in block.text)
    shown = re.findall(r"(?<!\S)(\d) {5,}((?:\d\d ){1,2}\d\d)(?!\S)", picture)  # address and word, of both kinds
    on_page = [{int(at): word.replace(" ", "") for at, word in shown if len(word) == size} for size in (8, 5)]
    assert on_page == [dict(enumerate(plain[:5])), dict(enumerate(transposed[:7]))]


@pytest.mark.parametrize(
    ("file", "pattern", "lanes"),
    [
        ("tiny-llama.q8", "layers.1.attn.q_proj.*", 16),
        ("tiny-llama.w8a8", "layers.1.ffn.down_proj.*", 16),
        ("tiny-llama.awq", "layers.1.attn.k_proj.*", 16),
        ("tiny-llama.gptq-ladder", "layers.1.*_proj.*", 16),
        ("tiny-llama.gptq-sparse", "layers.1.attn.*_proj.*", 16),
        ("tiny-qwen3-moe.moe-a8w8", "layers.1.moe.*_proj.*", 16),
        ("tiny-qwen3-moe.moe-a8w4", "layers.1.moe.*_proj.*", 16),
        ("tiny-qwen3-moe.moe-mxfp8", "layers.1.moe.*_proj.*", 16),
    ],
)
@pytest.mark.parametrize("transpose", [False, True])
def test_every_tile_is_where_the_manifest_says(file, pattern, lanes, transpose, tmp_path):
    """Each tile is read from its address and compared with the same part of the tensor."""
    path = FILES / f"{file}.bin"
    tensors = read_tensors(path, unpack=True).tensors
    options = ["--file", path, "--unpack", "--tile", "16x32", "--lanes", lanes, "--out", tmp_path]
    ok(pattern, *options, *(["--transpose"] if transpose else []))
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    parts = {entry["name"].rsplit(".", 1)[-1] for entry in manifest}
    assert {"codes", "scales"} <= parts
    for entry in manifest:
        values = tensors[entry["name"]]().array
        codes = tensors[entry["name"].rsplit(".", 1)[0] + ".codes"]().array
        if values.shape == codes.shape[:-1]:
            values = values[..., None]
        bits, n_lanes, (m, k) = entry["bits"], entry["lanes"], entry["tile"]
        assert (
            n_lanes == (lanes if entry["name"].endswith(("codes", "mask", "row_scales")) else 1)
            or "row" in entry["name"]
        )
        text = (tmp_path / entry["file"]).read_text().splitlines()[1:]
        assert len(text) == entry["depth"]
        rows, columns = (k, m) if transpose else (m, k)
        addresses = np.array(entry["tile_addresses"])
        assert addresses.shape == tile_counts(values.shape, m, k)
        for index in np.ndindex(*addresses.shape):
            lines = text[addresses[index] : addresses[index] + entry["tile_words"]]
            found = read_words("\n".join(lines), bits, n_lanes).reshape(rows, -1)[:, :columns]
            *expert, i, j = index
            part = values[tuple(expert)][i * m : (i + 1) * m, j * k : (j + 1) * k]
            part = np.ascontiguousarray(np.pad(part, ((0, m - part.shape[0]), (0, k - part.shape[1]))))
            unsigned = part.view(f"u{part.dtype.itemsize}").astype(np.uint64) & np.uint64((1 << bits) - 1)
            assert np.array_equal(found.astype(np.uint64), unsigned.T if transpose else unsigned)


def test_a_tiled_file(tmp_path):
    codes = np.arange(-30, 30, dtype=np.int8).reshape(6, 10)
    save_file({"w": codes}, tmp_path / "t.safetensors")
    text = ok("w", "--file", tmp_path / "t.safetensors", "--tile", "4x8", "--lanes", 8)
    assert "tiles of 4 x 8" in text.splitlines()[0]
    found = read_words(text, 8, 8).astype(np.uint8).view(np.int8).reshape(-1, 4, 8)
    assert np.array_equal(untile(found, (6, 10)), codes)


def test_a_stream_of_codes_and_scales():
    codes = np.arange(2 * 4, dtype=np.int8).reshape(2, 4)
    scales = np.array([[0.5, 1.0], [2.0, 4.0]], F32)
    stream = interleave(codes, scales, 2)
    assert stream == bytes([0, 1, 4, 5]) + F32([0.5, 2]).tobytes() + bytes([2, 3, 6, 7]) + F32([1, 4]).tobytes()


# ---- C


def test_headers_compile(tmp_path):
    """Every kind of file, alone and all together, without a warning."""
    sources = {
        "weights": ["layers.1.*", "--file", FILES / "tiny-llama.q8.bin"],
        "steps": ["layers.1.*", "--file", DECODE],
        "vectors": ["quantize.64.*", "half.*", "matmul.2x9x384g64.*", "rmsnorm.*"],
        "moe": ["layers.1.moe.*", "--file", FILES / "tiny-qwen3-moe.moe-a8w4.bin", "--unpack", "--tile", "16x16"],
    }
    for name, args in sources.items():
        (tmp_path / f"{name}.h").write_text(ok(*args, "--format", "c"))
    program = "".join(f'#include "{name}.h"\n' for name in sources)
    program += "int main(void) { return w_layers_1_attn_norm[0] == s_layers_1_attn_norm[0] + v_half_x[0]; }\n"
    (tmp_path / "all.c").write_text(program)
    for compiler in filter(shutil.which, ("gcc", "clang")):
        command = [compiler, "-std=c11", "-Wall", "-Wextra", "-pedantic", "-Werror", "-c", "all.c"]
        subprocess.run(command, cwd=tmp_path, check=True)


def test_c_takes_tiles_and_says_where_they_are(tmp_path):
    args = ["matmul.16x64x64g64.w.codes", "--format", "c", "--tile", "16x32", "--transpose", "--out", tmp_path]
    ok(*args)
    (entry,) = json.loads((tmp_path / "manifest.json").read_text())
    text = (tmp_path / entry["file"]).read_text()
    assert f"int8_t {entry['c_name']}[4096]" in text
    values = [int(v) for v in re.search(r"\{\n(.*)\};", text, re.S)[1].split(",")]
    at = entry["tile_addresses"][2][1]
    expected = load_file(OPS)["matmul.16x64x64g64.w.codes"][32:48, 32:64].T
    assert np.array_equal(np.array(values[at : at + entry["tile_words"]]).reshape(32, 16), expected)


# ---- a port in C


def port_commands():
    """The page's own commands, from the first to the run of the port."""
    (block,) = (b for b in blocks(PAGE.read_text()) if b.language == "sh" and "port_layer.c" in b.text)
    return commands_of(block)


@pytest.fixture(scope="module")
def vectors(tmp_path_factory):
    """A folder in which the page's commands were typed, and what the last of them, the port, did."""
    folder = tmp_path_factory.mktemp("port")
    for name in ("formats", "golden", "tests", ".venv"):
        (folder / name).symlink_to(ROOT / name)
    (folder / "model.bin").symlink_to(FILES / "tiny-llama.q8.bin")
    *before, last = port_commands()
    for command in before:
        subprocess.run(command, shell=True, cwd=folder, check=True)
    done = subprocess.run(last, shell=True, cwd=folder, capture_output=True, text=True, timeout=60)
    return folder, done


def run_port(folder, source):
    """A changed port, compiled by the page's command."""
    (command,) = (c for c in port_commands() if c.startswith("gcc "))
    (folder / "port.c").write_text(source)
    changed = command.replace("tests/port_layer.c", "port.c").replace("build/port/port_layer ", "port ")
    assert changed.count("port.c") == 1
    subprocess.run(changed, shell=True, cwd=folder, check=True)
    return subprocess.run([folder / "port"], capture_output=True, text=True, timeout=60)


def test_a_port_of_a_layer_passes(vectors):
    assert re.findall(r'#include "(.*)"', PORT.read_text()) == ["steps.h", "weights.h"]
    assert any(command.startswith("gcc -std=c11 -Wall -Werror ") for command in port_commands())
    _, done = vectors
    assert (done.returncode, done.stdout, done.stderr) == (0, "0 steps differ\n", "")


@pytest.mark.parametrize(
    ("right", "wrong", "step"),
    [
        ("FACTOR = 8.0", "FACTOR = 4.0", "attn.q_rope"),
        ("ORIGINAL = 128.0", "ORIGINAL = 256.0", "attn.q_rope"),
        ("THETA = 500000.0", "THETA = 10000.0", "attn.q_rope"),
        ("EPS = 1e-5f", "EPS = 1e-6f", "attn_norm.s"),
        ("largest / 127.0f", "largest / 128.0f", "attn_norm.s"),
        ("127.0f / largest", "126.0f / largest", "attn_norm.q"),
        ("h / (HEADS / KV_HEADS)", "h % KV_HEADS", "attn.mix"),
        ("sqrt(HEAD_DIM)", "sqrt(DIM)", "attn.mix"),
        ("POSITION = 300", "POSITION = 299", "attn.q_rope"),
    ],
)
def test_a_port_with_one_constant_changed_fails(vectors, right, wrong, step):
    source = PORT.read_text()
    assert source.count(right) == 1
    done = run_port(vectors[0], source.replace(right, wrong))
    assert done.returncode == 1
    assert done.stdout.startswith(f"{step}: ")
