"""AWQ: packing, rounding, dequantizing and products, by hand and against AutoAWQ's own code."""

import numpy as np
import pytest
from safetensors.numpy import load_file

from golden.awq import GROUP_SIZES, NIBBLE, Packed, dequantize, matmul, pack, pack_matrix, unpack
from tests.helpers import F16, F32, plain_int4, stands_for
from tests.hf_fixtures import FOLDER

# ---- packing


def test_packing_is_autoawqs_order():
    """Spelled out as AutoAWQ does: bit 4 i of a word takes channel [0, 2, 4, 6, 1, 3, 5, 7][i] of its eight."""
    order = [0, 2, 4, 6, 1, 3, 5, 7]
    codes = np.random.default_rng(0).integers(0, 16, (7, 40))
    words = pack(codes)
    assert (words.shape, words.dtype) == ((7, 5), np.int32)
    for row in range(7):
        for word in range(5):
            expected = 0
            for i in range(8):
                expected |= int(codes[row, 8 * word + order[i]]) << (4 * i)
            assert int(words[row, word]) & 0xFFFFFFFF == expected
    assert [order[n] for n in NIBBLE] == list(range(8))


def test_packing_and_weights_are_what_autoawq_itself_makes():
    """tests/autoawq_fixture.py ran AutoAWQ's own code."""
    theirs = load_file(FOLDER / "autoawq.safetensors")
    weight, scales = theirs["weight"], theirs["scales"]
    zeros = unpack(theirs["qzeros"])
    steps = weight.T.reshape(len(scales), -1, len(weight)) / scales[:, None].astype(F32)
    codes = (np.rint(steps) + zeros[:, None]).astype(np.uint8).reshape(weight.T.shape)
    assert np.array_equal(pack(codes), theirs["qweight"])
    assert np.array_equal(pack(zeros), theirs["qzeros"])
    w16 = dequantize(Packed(theirs["qweight"], theirs["qzeros"], scales))
    assert np.array_equal(w16.view(np.uint16), theirs["dequantized"].view(np.uint16))


def test_packing_by_hand():
    """Channels 0..7 with codes 0..7: from the highest nibble, 7 5 3 1 6 4 2 0."""
    assert pack(np.arange(8)[None]).view(np.uint32)[0, 0] == 0x75316420
    assert pack(np.array([[0, 15, 0, 0, 0, 0, 0, 0]])).view(np.uint32)[0, 0] == 0x000F0000
    assert pack(np.array([[0, 0, 0, 0, 0, 0, 0, 15]]))[0, 0] == -(1 << 28)


def test_unpacking_is_the_inverse():
    rng = np.random.default_rng(1)
    codes = rng.integers(0, 16, (33, 136)).astype(np.uint8)
    assert np.array_equal(unpack(pack(codes)), codes)
    words = rng.integers(-(2**31), 2**31, (5, 9)).astype(np.int32)
    assert np.array_equal(pack(unpack(words)), words)
    assert np.array_equal(unpack(words[:, ::2]), unpack(words.copy()[:, ::2].copy()))  # strided, as a slice of a file


# ---- quantizing


def group_of(*values):
    """A matrix of one group of 64 that begins with the values; the rest are zeros."""
    weight = np.zeros((1, 64), F32)
    weight[0, : len(values)] = values
    return weight


def test_quantize_by_hand():
    q = plain_int4(group_of(-2.0, 13.0, 0.5, 1.5, 2.5, -0.5, -1.5))  # scale 1, zero point 2; ties go to even
    assert (q.scales.tolist(), q.zeros.tolist()) == ([[1.0]], [[2]])
    assert q.codes[0, :8].tolist() == [0, 15, 2, 4, 4, 2, 0, 2]
    q = plain_int4(group_of(-0.15, 0.0, 0.15))
    assert q.scales[0, 0] == F16(F32(0.3) / F32(15))  # fp16's scale is a little off 0.02
    assert q.zeros[0, 0] == 7  # 7.5 of these scales, a little less
    codes = np.rint(F32([-0.15, 0, 0.15]) / F32(q.scales[0, 0])) + 7
    assert q.codes[0, :3].tolist() == np.clip(codes, 0, 15).tolist()


def test_codes_are_those_of_the_stored_scale():
    """Rounded by the fp16 scale: with the fp32 one, some would differ."""
    weight = np.random.default_rng(2).standard_normal((64, 512)).astype(F32)
    q = plain_int4(weight, 128)
    groups = weight.reshape(64, 4, 128)
    low, high = groups.min(axis=-1), groups.max(axis=-1)
    assert np.array_equal(q.scales, ((high - low) / F32(15)).astype(F16))
    scales = q.scales.astype(F32)
    zeros = np.clip(np.rint(-low / scales), 0, 15)
    assert np.array_equal(q.zeros, zeros)
    for scale, same in ((scales, True), ((high - low) / F32(15), False)):
        codes = np.clip(np.rint(groups / scale[..., None]) + zeros[..., None], 0, 15).reshape(weight.shape)
        assert np.array_equal(q.codes, codes) == same
    error = np.abs(stands_for(q).astype(F32) - weight).reshape(groups.shape).max(axis=-1)
    assert (error <= 1.01 * scales).all()  # half a step; at the ends, where the zero point is rounded, up to one
    assert np.median(error / scales) == pytest.approx(0.5, abs=0.02)


@pytest.mark.parametrize(
    ("values", "scale", "zero"),
    [
        (np.zeros(64), 0.0, 0),
        (np.full(64, -0.0), 0.0, 0),
        (np.full(64, 3.75), 0.25, 0),  # constant: code 15
        (np.full(64, -3.75), 0.25, 15),  # code 0
        (np.linspace(1, 3.75, 64), 0.25, 0),  # of one sign: the range goes on to 0
        (np.linspace(-3.75, -1, 64), 0.25, 15),
        (np.full(64, 1e-10), 0.0, 0),  # no fp16 scale
        (np.full(64, -1e-40), 0.0, 0),
        (np.where(np.arange(64) % 2, 15 * 2.0**-24, 0), 2.0**-24, 0),  # fp16's smallest
        (np.where(np.arange(64) % 2, 60000.0, 0), 4000.0, 0),
    ],
)
def test_groups_out_of_the_ordinary(values, scale, zero):
    q = plain_int4(values.astype(F32)[None])
    assert (q.scales[0, 0], q.zeros[0, 0]) == (F16(scale), zero)
    assert q.codes.max() <= 15
    w16 = dequantize(pack_matrix(plain_int4(np.tile(values.astype(F32), (8, 1)))))
    assert np.isfinite(w16).all()
    assert np.abs(w16[:, 0] - values).max() <= max(0.5 * float(F16(scale)) * 1.001, 1e-9)
    if len(set(values.tolist())) == 1 and scale:
        assert (w16 == F16(values[0])).all()


@pytest.mark.parametrize("value", [65600.0, -70000.0, 1e30, 3e38])
def test_weights_beyond_fp16_are_an_overflow(value):
    with pytest.raises(OverflowError, match="weights of"):
        plain_int4(group_of(value, 1.0))


# ---- dequantizing and products


@pytest.mark.parametrize("group_size", GROUP_SIZES)
def test_dequantization_to_the_bit(group_size):
    """Against fp16((q - z) * s) one number at a time, in Python's own arithmetic."""
    rng = np.random.default_rng(3)
    k, n = 2 * group_size, 24
    codes, zeros = rng.integers(0, 16, (k, n)), rng.integers(0, 16, (2, n))
    scales = (rng.uniform(0.5, 2, (2, n)) * 10.0 ** rng.integers(-8, 4, (2, n))).astype(F16)
    w16 = dequantize(Packed(pack(codes), pack(zeros), scales))
    assert (w16.shape, w16.dtype) == ((k, n), F16)
    for i in range(k):
        for j in range(n):
            exact = (int(codes[i, j]) - int(zeros[i // group_size, j])) * float(scales[i // group_size, j])
            assert w16[i, j].tobytes() == F16(exact).tobytes() or (w16[i, j] == 0 == F16(exact))


def test_a_quantized_matrix_survives_packing():
    weight = np.random.default_rng(4).standard_normal((40, 256)).astype(F32)
    q = plain_int4(weight, 128)
    packed = pack_matrix(q)
    assert [(p.shape, p.dtype) for p in packed] == [((256, 5), np.int32), ((2, 5), np.int32), ((2, 40), F16)]
    assert np.array_equal(dequantize(packed), stands_for(q).T)


def test_products_sum_without_rounding():
    rng = np.random.default_rng(5)
    x, w = rng.standard_normal((3, 256)).astype(F16), rng.standard_normal((256, 16)).astype(F16)
    expected = [[sum(float(a) * float(b) for a, b in zip(row, column, strict=True)) for column in w.T] for row in x]
    assert np.array_equal(matmul(x, w), np.array(expected).astype(F32))
