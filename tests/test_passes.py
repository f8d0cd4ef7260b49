"""`golden passes`: the sums of each pass, fp32 in a stated order to the bit, and the bits that sums take."""

import json
import subprocess
from fractions import Fraction

import numpy as np
import pytest
from safetensors.numpy import load_file

from bench.systolic import Array, simulate
from golden.fp32 import fma, scaled_sum
from golden.grouped import int4_sums, msd_split
from golden.hex_tensors import read_tensors
from golden.mx import E4M3, E5M2, element_values
from golden.passes import draw, operands, pass_totals, running_sums
from golden.q8 import Quantized, accumulators, group_sums
from golden.tiles import tile
from tests.helpers import DATA, F32, F64, ROOT, run_golden
from tests.test_hex import read_words

OPS = DATA / "ops.safetensors"
PAGE = ROOT / "docs" / "hardware.md"


# ---- fp32


def nearest(exact):
    """A Fraction rounded to fp32, half to even, for values within its normal range."""
    if exact == 0:
        return F32(0)
    exponent = 0
    while abs(exact) >= Fraction(2) ** (exponent + 24):
        exponent += 1
    while abs(exact) < Fraction(2) ** (exponent + 23):
        exponent -= 1
    return F32(F64(round(exact / Fraction(2) ** exponent)) * 2.0**exponent)  # round() of a Fraction is half to even


def test_fma_rounds_once():
    """Against exact arithmetic: sums of like size, products that cancel, and addends far larger."""
    rng = np.random.default_rng(0)
    a, b = (rng.standard_normal(3000).astype(F32) for _ in range(2))
    c = np.concatenate([rng.standard_normal(1000), -(a * b)[1000:2000], rng.standard_normal(1000) * 2.0**20])
    c = c.astype(F32)
    exact = [Fraction(float(x)) * Fraction(float(y)) + Fraction(float(z)) for x, y, z in zip(a, b, c, strict=True)]
    assert np.array_equal(fma(a, b, c), [nearest(e) for e in exact])
    assert (fma(a, b, c) != a * b + c).mean() > 0.05


@pytest.mark.parametrize("sign", [1, -1])
def test_fma_where_fp64_rounds_twice(sign):
    """1 + 2^-23 + (2^-24 - 2^-60) is just below the middle of two fp32 numbers; fp64 makes it the middle."""
    a, b, c = F32([sign * (1 + 2.0**-18)]), F32([2.0**-24 * (1 - 2.0**-18)]), F32([sign * (1 + 2.0**-23)])
    twice = (a.astype(F64) * b + c).astype(F32)
    assert twice[0] == sign * (1 + 2.0**-22)
    assert fma(a, b, c)[0] == sign * (1 + 2.0**-23)


def test_the_order_group_by_group():
    """Scalar by scalar, as the page has it, with exact rationals for every rounding."""
    x, w = draw(3, 4, 256, 32)
    acc = accumulators(x, w)
    found = running_sums(acc, x, w)
    for n, m in np.ndindex(acc.shape[:2]):
        out = F32(0)
        for g in range(acc.shape[2]):
            a, s = F32(acc[n, m, g]), w.scales[m, g] * x.scales[n, g]
            product = Fraction(float(a)) * Fraction(float(s))
            out = nearest(product + Fraction(float(out)))
            assert found[n, m, g] == out
    assert np.array_equal(found[..., -1], scaled_sum(acc, w.scales, x.scales))


@pytest.mark.parametrize(("program", "file"), [("runq", "tiny-llama.q8"), ("runq_w8a8", "tiny-llama.w8a8-block32")])
def test_the_programs_have_the_fused_order(program, file, tmp_path):
    """The products of layer 1 in a program's own trace, from its own codes, bit for bit."""
    path, trace_path = ROOT / "build" / "models" / f"{file}.bin", tmp_path / "t.safetensors"
    command = [ROOT / program, path, "--ids", "1379,548,1226,322,259,1270", "-n", "1", "--trace", trace_path]
    subprocess.run(command, check=True, capture_output=True)
    trace = load_file(trace_path)
    tensors = read_tensors(path).tensors
    for name, place in {
        "attn.q_proj": "attn.norm", "attn.o_proj": "attn.mix", "ffn.up_proj": "ffn.norm", "ffn.down_proj": "ffn.swiglu"
    }.items():  # fmt: skip
        x = Quantized(trace[f"layers.1.{place}.q"], trace[f"layers.1.{place}.s"])
        w = Quantized(*(tensors[f"layers.1.{name}.{part}"]().array for part in ("codes", "scales")))
        acc, out = trace[f"layers.1.{name}.acc"], trace[f"layers.1.{name}"]
        assert acc.shape[-1] > 1
        assert np.array_equal(running_sums(acc, x, w)[..., -1], out)


# ---- files


def fields(folder):
    return {entry["name"]: entry for entry in json.loads((folder / "manifest.json").read_text())}


def at(folder, entry, *index):
    """The tile of a file at an index, (rows, lanes), as signed integers or fp32."""
    address = np.array(entry["tile_addresses"])[index]
    lines = (folder / entry["file"]).read_text().splitlines()[1:][address : address + entry["tile_words"]]
    values = read_words("\n".join(lines), entry["bits"], entry["lanes"]).astype(f"u{entry['bits'] // 8}")
    return values.view({"int8": np.int8, "int32": np.int32, "float32": F32}[entry["type"]])


@pytest.mark.parametrize("transpose", [False, True])
@pytest.mark.parametrize(
    ("case", "m", "k"), [("3x20x256g64", 16, 16), ("matmul.2x9x384g64", 4, 32), ("4x16x2048g2048", 16, 64)]
)
def test_an_array_fed_by_the_files_gives_the_sums(case, m, k, transpose, tmp_path):
    """The simulator of an array takes each tile from its address; its sums and all that follows are in the files."""
    done = run_golden("passes", case, "--tile", f"{m}x{k}", "--out", tmp_path, *(["--transpose"] if transpose else []))
    assert (done.returncode, done.stderr) == (0, "")
    about = fields(tmp_path)
    x, w = operands(case, OPS)
    n, group_size = len(x.codes), x.group_size
    n_tiles, n_passes = np.array(about["w.codes"]["tile_addresses"]).shape
    assert (n_tiles, n_passes) == (-(-len(w.codes) // m), x.codes.shape[1] // k)
    padded = np.pad(accumulators(x, w), ((0, 0), (0, -len(w.codes) % m), (0, 0)))
    for i in range(n_tiles):
        total, out = np.zeros((n, m), np.int32), np.zeros((n, m), F32)
        for p in range(n_passes):
            weights, tokens = at(tmp_path, about["w.codes"], i, p), at(tmp_path, about["x.codes"], 0, p)
            inputs_by_outputs = weights if transpose else weights.T
            sums, _ = simulate(Array(k, m), tokens.astype(np.int64), inputs_by_outputs.astype(np.int64))
            assert np.array_equal(sums[0], at(tmp_path, about["pass.sums"], i, p))
            total = sums[0] + (0 if p * k % group_size == 0 else total)
            assert np.array_equal(total, at(tmp_path, about["pass.totals"], i, p))
            if (p + 1) * k % group_size:
                continue
            g = p * k // group_size
            assert np.array_equal(total, padded[:, i * m : (i + 1) * m, g])
            scales = at(tmp_path, about["w.scales"], i, g).reshape(1, m) * at(tmp_path, about["x.scales"], 0, g)
            out = fma(total.astype(F32), scales, out)
            assert np.array_equal(out, at(tmp_path, about["out"], i, g))


def test_drawn_operands_reach_the_bounds():
    x, w = draw(16, 32, 2048, 64)
    sums = group_sums(x.codes, w.codes, 128)
    assert (sums.max(), sums.min()) == (16 * 2**14, -16 * 128 * 127)
    totals = pass_totals(sums, 32)
    assert totals.max() == 2**20
    assert np.array_equal(totals[..., 3::4], accumulators(x, w))
    assert np.array_equal(tile(x.codes, 16, 16)[5], x.codes[:, 80:96])


@pytest.mark.parametrize(
    ("args", "code", "text"),
    [
        (["16x32x2048g60", "--tile", "16x16"], 1, "groups of 60 do not divide 2048 inputs"),
        (["16x32x2048g64", "--tile", "16x48"], 1, "--tile: 48 inputs, expected a divisor of the group's 64"),
        (["quantize.64", "--tile", "16x16"], 1, "quantize.64: neither NxMxKgG nor a matmul case"),
        (["16x32x2048g64", "--tile", "16"], 2, "--tile: '16', expected MxK"),
    ],
)
def test_what_is_refused(args, code, text, tmp_path):
    done = run_golden("passes", *args, "--out", tmp_path / "out")
    assert (done.returncode, done.stdout, (tmp_path / "out").exists()) == (code, "", False)
    assert text in done.stderr
    assert "Traceback" not in done.stderr


# ---- bits


def int8(largest_x, largest_w, lowest_x, lowest_w):
    """The sums of n products at their extremes, by the reference."""

    def sums(n):
        x = np.array([[largest_x] * n, [lowest_x] * n], np.int8)
        w = np.array([[largest_w] * n, [lowest_w] * n], np.int8)
        return group_sums(x, w, 1)

    return sums


def digits(n):
    """A digit times int4."""
    high, low = msd_split(np.array([[-128] * n, [127] * n, [0] * n], np.int8))
    w = np.array([[-8] * n, [7] * n], np.int8)
    return np.concatenate([group_sums(high, w, 1), group_sums(low, w, 1)])


def both_digits(n):
    """16 high + low, before the eights."""
    x = np.array([[-128] * n, [127] * n], np.int8)
    high, low = msd_split(x)
    w = np.array([[-8] * n, [7] * n], np.int8)
    return 16 * group_sums(high, w, 1) + group_sums(low, w, 1)


def with_eights(n):
    return int4_sums(np.array([[-128] * n, [127] * n], np.int8), np.array([[-8] * n, [7] * n], np.int8), 1, "msd")


def mxfp8(element):
    """Whole multiples of the product of two smallest subnormals."""

    def sums(n):
        values = element_values(element)
        finite = values[np.isfinite(values)]
        smallest = Fraction(float(finite[finite > 0].min()))
        largest = Fraction(float(finite.max()))
        multiples = [Fraction(float(a)) * Fraction(float(b)) / smallest**2 for a in finite[:3] for b in finite]
        assert all(m.denominator == 1 for m in multiples)
        return np.array([int(sign * n * largest**2 / smallest**2) for sign in (1, -1)], object)

    return sums


SUMS = {
    "int8 x int8, both within -127..127": int8(127, 127, -127, -127),
    "int8 x int8, weights to -128": int8(127, 127, -127, -128),
    "int8 x int8, both to -128": int8(127, 127, -128, -128),
    "MSD: a digit x int4": digits,
    "MSD: 16 high + low": both_digits,
    "MSD: the row above and 8 * sum(w), so int8 x int4": with_eights,
    "MXFP8: E4M3 x E4M3, in multiples of 2^-18": mxfp8(E4M3),
    "MXFP8: E5M2 x E5M2, in multiples of 2^-32": mxfp8(E5M2),
}


def table():
    """The page's rows: what is summed -> bits for 1, 16, 32 and 64 products."""
    text = PAGE.read_text().split("| sum of | a product's extreme | 1 | 16 | 32 | 64 |")[1].split("\n\n")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines()[2:]]
    return {row[0]: dict(zip((1, 16, 32, 64), map(int, row[2:6]), strict=True)) for row in rows}


def test_every_sum_of_the_page_is_tried():
    assert list(table()) == list(SUMS)


@pytest.mark.parametrize("name", SUMS)
def test_sums_take_as_many_bits_as_the_page_says(name):
    """The extremes fit into these bits, and one of them does not fit into one bit less."""
    for n, bits in table()[name].items():
        sums = [int(value) for value in np.ravel(SUMS[name](n))]
        assert -(2 ** (bits - 1)) <= min(sums) and max(sums) < 2 ** (bits - 1)
        assert not (-(2 ** (bits - 2)) <= min(sums) and max(sums) < 2 ** (bits - 2))
