"""The fused operator of mixtures of experts, MXFP8, and int4 products by the MSD split."""

import ml_dtypes
import numpy as np
import pytest

from golden.forward import F32, F64, swiglu
from golden.grouped import (
    MAX_K,
    MAX_N,
    Int4Experts,
    Int8Experts,
    assist_matrix,
    expert_matmul,
    group_starts,
    grouped_matmul_swiglu_quant,
    int4_sums,
    msd_split,
)
from golden.mx import E4M3, E5M2, MX, dequantize_mx, element_values, encode_elements, quantize_mx, scale_values
from golden.q8 import Quantized, dequantize, quantize

RNG = np.random.default_rng(11)
ML_DTYPES = {"e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2}


# ---- MXFP8


@pytest.mark.parametrize("element", [E4M3, E5M2], ids=lambda e: e.name)
def test_elements_are_those_of_ml_dtypes(element):
    """All codes; a million values, and every middle of two elements with its fp32 neighbours."""
    theirs = np.arange(256, dtype=np.uint8).view(ML_DTYPES[element.name]).astype(F32)
    assert np.array_equal(element_values(element), theirs, equal_nan=True)
    finite = np.sort(theirs[np.isfinite(theirs)])
    middles = ((finite[1:].astype(F64) + finite[:-1]) / 2).astype(F32)
    x = (RNG.standard_normal(10**6) * np.exp2(RNG.uniform(-25, 20, 10**6))).astype(F32)
    x = np.concatenate([x, finite, middles, np.nextafter(middles, F32(9e9)), np.nextafter(middles, F32(-9e9))])
    inside = np.clip(x, -element.largest, element.largest)
    assert np.array_equal(encode_elements(inside, element), inside.astype(ML_DTYPES[element.name]).view(np.uint8))
    assert np.array_equal(encode_elements(x, element), encode_elements(inside, element))  # saturating


def test_scales_are_those_of_ml_dtypes():
    scales = np.arange(256, dtype=np.uint8)
    theirs = scales.view(ml_dtypes.float8_e8m0fnu).astype(F32)
    assert np.array_equal(scale_values(scales).astype(F32), theirs, equal_nan=True)


@pytest.mark.parametrize("element", [E4M3, E5M2], ids=lambda e: e.name)
def test_no_other_code_is_nearer(element):
    """A block's codes are the best for its scale, and the largest value is never more than saturated."""
    x = (RNG.standard_normal((64, 64)) * np.exp2(RNG.uniform(-20, 20, (64, 1)))).astype(F32)
    mx = quantize_mx(x, 32, element)
    values = element_values(element).astype(F64)
    values = values[np.isfinite(values)]
    scales = np.repeat(scale_values(mx.scales), 32, axis=1)
    best = np.abs(values[None, None] * scales[..., None] - x[..., None]).min(axis=-1)
    assert np.array_equal(np.abs(dequantize_mx(mx) - x), best)
    assert np.abs(x / scales).max() < 2 ** (element.emax + 1)


def test_floor_and_rounded_exponents_differ():
    """The operator's document has a bracket for rounding where the MX specification has floor."""
    block = np.full((1, 32), 1.5, F32)
    assert quantize_mx(block).scales[0, 0] == 127 + 0 - 8
    assert round(np.log2(1.5)) == 1  # the other reading: 2^(1 - 8), with one bit less for every value
    assert dequantize_mx(quantize_mx(block)).tolist() == block.tolist()


def test_a_nan_leaves_zeros_of_the_others_signs_in_its_block():
    """Also of an infinity, which would otherwise be a NaN itself. tests/runq_moe_test.cpp has the same block."""
    block = np.zeros((1, 32), F32)
    block[0, :5] = np.nan, np.inf, -np.inf, -2, 3
    mx = quantize_mx(block)
    assert mx.scales.tolist() == [[255]]
    assert mx.codes[0].tolist() == [0x7F, 0, 0x80, 0x80] + [0] * 28


# ---- int4 by the MSD split


def test_msd_split_of_every_byte():
    x = np.arange(-128, 128).astype(np.int8)
    high, low = msd_split(x)
    assert (high.dtype, low.dtype) == (np.int8, np.int8)
    assert np.array_equal(16 * high.astype(int) + low + 8, x)
    assert (high.min(), high.max(), low.min(), low.max()) == (-8, 7, -8, 7)


@pytest.mark.parametrize(("k", "n_groups"), [(64, 1), (96, 3), (8192, 64), (65536, 1)])
def test_both_paths_give_the_same_int32(k, n_groups):
    x, w = RNG.integers(-128, 128, (4, k)).astype(np.int8), RNG.integers(-8, 8, (6, k)).astype(np.int8)
    x[0], w[0], w[1] = -128, -8, 7
    direct, msd = int4_sums(x, w, n_groups), int4_sums(x, w, n_groups, "msd")
    assert direct.dtype == msd.dtype == np.int32
    assert np.array_equal(direct, msd)
    exact = (x.astype(np.int64).reshape(4, 1, n_groups, -1) * w.reshape(1, 6, n_groups, -1)).sum(axis=-1)
    assert np.array_equal(direct, exact)


def int4_experts(e, n, k, n_groups):
    codes = RNG.integers(-8, 8, (e, n, k)).astype(np.int8)
    scales = RNG.uniform(0.5, 2, (e, n, n_groups)).astype(F32)
    return Int4Experts(codes, scales, assist_matrix(codes, scales))


@pytest.mark.parametrize("n_groups", [1, 4])
def test_the_assist_matrix_stands_for_the_eights(n_groups):
    weight = int4_experts(2, 16, 128, n_groups)
    x = Quantized(RNG.integers(-128, 128, (5, 128)).astype(np.int8), np.ones((5, 1), F32))
    direct, msd = (expert_matmul(x, weight, 1, path) for path in ("direct", "msd"))
    assert np.linalg.norm(direct - msd) < 1e-6 * np.linalg.norm(direct)
    without = expert_matmul(x, weight._replace(assist=0 * weight.assist), 1, "msd")
    assert np.linalg.norm(direct - without) > 0.1 * np.linalg.norm(direct)


# ---- the operator


def int8_operands(m=9, e=4, n=32, k=48):
    x = quantize(RNG.standard_normal((m, k)).astype(F32), k)
    weight = quantize(RNG.standard_normal((e * n, k)).astype(F32), k)
    return x, Int8Experts(weight.codes.reshape(e, n, k), weight.scales.reshape(e, n))


def test_it_is_matmul_swiglu_quantize_of_each_expert():
    """Against dequantized matrices in fp64, with empty groups at head, middle and tail and rows of nobody."""
    x, weight = int8_operands(e=5)
    ends = np.array([0, 3, 3, 7, 7])
    out = grouped_matmul_swiglu_quant(x, weight, ends)
    values = dequantize(x).astype(F64)
    for expert, rows in ((1, slice(0, 3)), (3, slice(3, 7))):
        w = weight.codes[expert] * weight.scales[expert][:, None].astype(F64)
        c = values[rows] @ w.T
        expected = c[:, :16] / (1 + np.exp(-c[:, :16])) * c[:, 16:]
        assert np.abs(dequantize(out)[rows] - expected).max() <= 0.51 * out.scales[rows].max()
    assert not out.codes[7:].any()


@pytest.mark.parametrize("kind", ["a8w8", "a8w4", "mxfp8"])
def test_rows_of_nobody_are_not_touched_and_lists_of_two_kinds_agree(kind):
    m, e, n, k = 9, 4, 64, 64
    x, weight = int8_operands(m, e, n, k)
    if kind == "a8w4":
        weight = int4_experts(e, n, k, 2)
    if kind == "mxfp8":
        x = quantize_mx(dequantize(x))
        w = quantize_mx(RNG.standard_normal((e * n, k)).astype(F32))
        weight = MX(w.codes.reshape(e, n, k), w.scales.reshape(e, n, -1))
    ends = np.array([2, 2, 6, 6])
    results = []
    for group_list, list_type in ((ends, "cumsum"), (np.diff(ends, prepend=0), "count")):
        codes, scales = np.full((m, n // 2), 85, x.codes.dtype), np.full((m, 1), 77, x.scales.dtype)
        out = x._replace(codes=codes, scales=scales)
        assert grouped_matmul_swiglu_quant(x, weight, group_list, list_type, out) is out
        assert (codes[6:] == 85).all()
        assert (scales[6:] == 77).all()
        results.append((codes, scales))
    assert all(np.array_equal(a, b) for a, b in zip(*results, strict=True))
    product = expert_matmul(x._replace(codes=x.codes[2:6], scales=x.scales[2:6]), weight, 2)
    hidden = swiglu(product[:, : n // 2], product[:, n // 2 :])
    last = quantize_mx(hidden) if kind == "mxfp8" else quantize(hidden, n // 2)
    assert np.array_equal(last.codes, results[0][0][2:6])
    assert np.array_equal(last.scales, results[0][1][2:6])


def mx_ones(*shape, block=32):
    codes = np.full(shape, 0x38, np.uint8)
    return MX(codes, np.full((*shape[:-1], max(1, shape[-1] // block)), 127, np.uint8))


def int8_ones(m, k):
    return Quantized(np.ones((m, k), np.int8), np.ones((m, 1), F32))


def int8_matrices(e, n, k):
    return Int8Experts(np.ones((e, n, k), np.int8), np.ones((e, n), F32))


LIST = np.array([1, 2])
X, W = int8_ones(2, 8), int8_matrices(2, 4, 8)
W4 = Int4Experts(np.ones((2, 4, 8), np.int8), np.ones((2, 4, 1), F32), np.ones((2, 4), F32))


@pytest.mark.parametrize(
    ("call", "text"),
    [
        ((X, int8_matrices(2, 4, 9), LIST), "x is (2, 8) and weight (2, 4, 9), expected (M, K)"),
        ((X, int8_matrices(2, 3, 8), LIST), "N is 3, expected an even number, at most 10240"),
        ((X, int8_matrices(1, MAX_N + 2, 8), LIST[:1]), "N is 10242, expected an even number"),
        ((int8_ones(1, MAX_K + 1), int8_matrices(1, 2, MAX_K + 1), LIST[:1]), "K is 65537, expected 1 to 65536"),
        ((X, int8_matrices(3, 4, 8), LIST), "group_list is int64 (2,), expected a whole number for each of"),
        ((X, W, LIST / 1), "group_list is float64 (2,), expected a whole number"),
        ((X, W, LIST[::-1]), "group_list has the end 1 of expert 1 behind 2"),
        ((X, W, LIST - 2), "group_list has the end -1 of expert 0 behind 0"),
        ((X, W, LIST - 2, "count"), "group_list has the count -1, expected 0 or more"),
        ((X, W, LIST, "count"), "group_list ends at row 3, x has 2 rows"),
        ((X, W, LIST, "sum"), "group_list_type is 'sum', expected cumsum or count"),
        ((X, mx_ones(2, 4, 8), LIST), "x and weight are of two kinds"),
        (
            (X._replace(scales=np.ones(2, F32)), W, LIST),
            "x's scales is float32 (2,), expected float32 (2, 1)",
        ),
        (
            (X, W._replace(scales=np.ones((2, 4))), LIST),
            "weight's scales is float64 (2, 4), expected float32 (2, 4)",
        ),
        (
            (X, W4._replace(codes=W.codes * np.int8(8)), LIST),
            "weight has codes of 8 to 8, expected -8 to 7",
        ),
        (
            (X, W4._replace(scales=np.ones((2, 4, 3), F32)), LIST),
            "weight's scales are (2, 4, 3), expected (E, N, G) with a G that divides K 8",
        ),
        ((mx_ones(2, 64), mx_ones(2, 64, 64, block=64), LIST), "x has blocks of 32 and weight of 64, expected"),
        ((mx_ones(2, 48, block=16), mx_ones(2, 4, 48, block=16), LIST), "x has 3 scales for 48 elements"),
        ((mx_ones(2, 2048, block=2048), mx_ones(2, 4, 2048, block=2048), LIST), "x has 1 scales for 2048 elements"),
        ((mx_ones(2, 64), mx_ones(2, 32, 64), LIST), "N / 2 is 16, no multiple of the block 32"),
        (
            (X, W, LIST, "cumsum", int8_ones(2, 4)),
            "out is int8 (2, 4), expected int8 (2, 2)",
        ),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused_with_the_numbers(call, text):
    with pytest.raises(ValueError) as error:
        grouped_matmul_swiglu_quant(*call)
    assert text in str(error.value)
    assert "\n" not in str(error.value)


def test_group_lists_of_the_operators_document():
    """[3, 4, 4, 6] as ends and [3, 1, 0, 2] as counts are the same rows."""
    expected = [0, 3, 4, 4, 6]
    assert group_starts(np.array([3, 4, 4, 6]), "cumsum", 4, 6).tolist() == expected
    assert group_starts(np.array([3, 1, 0, 2]), "count", 4, 6).tolist() == expected
