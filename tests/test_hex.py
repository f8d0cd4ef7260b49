"""`golden hex`: tensors as text for hardware, and a port in C that has nothing else."""

import json
import re
import subprocess

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from golden.hex_files import c_literal, words
from golden.schemes import read_file
from golden.tiles import interleave, tile, untile
from tests.helpers import DATA, F32, ROOT, run_golden

OPS = DATA / "ops.safetensors"
Q8_FILE = ROOT / "build" / "models" / "tiny-llama.q8.bin"
DECODE = DATA / "tiny-llama.q8.decode.trace.safetensors"
PORT = ROOT / "tests" / "port_layer.c"


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
        "name": "matmul.2x9x384g64.w.scales", "type": "float32", "shape": [9, 6], "order": "row by row", "lanes": 8,
        "file": "matmul.2x9x384g64.w.scales.hex",
    }  # fmt: skip


@pytest.mark.parametrize("file", ["tiny-llama.gptq-ladder", "tiny-llama.awq", "tiny-qwen3-moe.moe-a8w4"])
def test_tensors_of_a_model_file(file):
    """The last norm: in one file fp16, in the others fp32 at an aligned place."""
    path = ROOT / "build" / "models" / f"{file}.bin"
    expected = read_file(path).vector("norm")
    text = ok("norm", "--file", path)
    values = read_words(text, 16 if "awq" in file else 32, 1).reshape(-1)
    found = values.astype(np.uint16).view(np.float16) if "awq" in file else values.astype(np.uint32).view(F32)
    assert np.array_equal(found.astype(F32), expected)


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
        (["quantize.64.codes", "--tile", "64"], 2, "--tile: '64', expected RxC"),
        (["half.x", "--tile", "2x2"], 1, "expected a matrix"),
        (["half.x", "--file", "Makefile"], 1, "Makefile: "),
    ],
)
def test_what_is_refused(args, code, text):
    done = run_golden("hex", *args)
    assert (done.returncode, done.stdout) == (code, "")
    assert text in done.stderr
    assert "Traceback" not in done.stderr


# ---- tiles


@pytest.mark.parametrize("shape", [(4, 6), (5, 7), (1, 1), (8, 3)])
def test_tiles_and_back(shape):
    matrix = np.arange(1, shape[0] * shape[1] + 1).reshape(shape)
    tiles = tile(matrix, 4, 3)
    assert tiles.shape[1:] == (4, 3)
    assert np.array_equal(untile(tiles, shape), matrix)
    assert tiles.sum() == matrix.sum()  # what is added is zeros
    assert tile(np.arange(16).reshape(4, 4), 2, 2)[1].tolist() == [[2, 3], [6, 7]]


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


# ---- a port in C


@pytest.fixture(scope="module")
def vectors(tmp_path_factory):
    """The header that the port includes."""
    folder = tmp_path_factory.mktemp("port")
    weights = ok("layers.1.*", "--file", Q8_FILE, "--format", "c")
    for norm in ("attn_norm", "ffn_norm"):
        weights = weights.replace(f"layers_1_{norm}[", f"layers_1_{norm}_weight[")
    trace = ok("layers.1.*", "layers.0.ffn.residual", "--file", DECODE, "--format", "c")
    (folder / "vectors.h").write_text(weights + trace)
    return folder


def run_port(folder, source):
    (folder / "port.c").write_text(source)
    command = ["cc", "-std=c11", "-O1", "-ffp-contract=off", "-w", "port.c", "-o", "port", "-lm"]
    subprocess.run(command, cwd=folder, check=True)
    return subprocess.run([folder / "port"], capture_output=True, text=True, timeout=60)


def test_a_port_of_a_layer_passes(vectors):
    source = PORT.read_text()
    assert re.findall(r'#include "(.*)"', source) == ["vectors.h"]
    done = run_port(vectors, source)
    assert (done.returncode, done.stdout) == (0, "0 steps differ\n")


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
    done = run_port(vectors, source.replace(right, wrong))
    assert done.returncode == 1
    assert done.stdout.startswith(f"{step}: ")
