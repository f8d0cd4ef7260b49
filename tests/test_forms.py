"""The forms of formats/packing.py by their definitions, in plain loops; tests/hf_foreign_check.py asks the packages."""

import json
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest

from export.hf_gptq import can_repack, widest
from formats.gptq import MatrixFormat
from formats.packing import (
    INT8_ROWS,
    INT_QUANTIZED,
    MODELOPT_NVFP4,
    MXFP4,
    MXFP8,
    NVFP4,
    PACK_QUANTIZED,
    Levels,
    Packing,
    PartError,
    fp8,
    pack_words,
    unpack_words,
)

E4M3, BF16, F32 = ml_dtypes.float8_e4m3fn, ml_dtypes.bfloat16, np.float32
ROWS, COLUMNS = 6, 64
# A form, and the weight in row i and column j by its tensors.
SCALED = {
    "blocks": (fp8(4, 24, "inv"), lambda t, i, j: t["weight"][i, j] * t["inv"][i // 4, j // 24]),
    "row": (fp8(1, 0), lambda t, i, j: t["weight"][i, j] * t["weight_scale"][i, 0]),
    "matrix": (fp8(0, 0), lambda t, i, j: t["weight"][i, j] * t["weight_scale"][0, 0]),
    "nvfp4": (NVFP4, lambda t, i, j: nibble(t["weight_packed"], i, j) * t["weight_scale"][i, j // 16]
              / t["weight_global_scale"][0, 0]),
    "modelopt": (MODELOPT_NVFP4, lambda t, i, j: nibble(t["weight"], i, j) * t["weight_scale"][i, j // 16]
                 * t["weight_scale_2"][0, 0]),
    "mxfp4": (MXFP4, lambda t, i, j: nibble(t["weight_packed"], i, j) * 2.0 ** (t["weight_scale"][i, j // 32] - 127)),
    "mxfp8": (MXFP8, lambda t, i, j: t["weight"][i, j] * 2.0 ** (t["weight_scale"][i, j // 32] - 127)),
    "int8": (INT8_ROWS, lambda t, i, j: t["weight"][i, j] * t["SCB"][i, 0] / 127),
}  # fmt: skip


def random_parts(form, rng):
    """Random tensors for a form, of the shapes and types that it asks for."""
    made = {}
    for part, shape, types, needed in form.parts(ROWS, COLUMNS):
        if not needed:
            continue
        if types[0] == "I8":
            made[part] = rng.integers(-128, 128, shape).astype(np.int8)
        elif types == ("U8",):
            made[part] = rng.integers(0, 256, shape).astype(np.uint8)
        elif types[0] == "U8":  # an exponent
            made[part] = rng.integers(120, 135, shape).astype(np.uint8)
        elif types == ("F8_E4M3",):
            made[part] = rng.uniform(-448, 448, shape).astype(E4M3)
        else:
            made[part] = rng.uniform(0.5, 2, shape).astype(BF16 if types[-1] == "BF16" else F32)
    return made


def e2m1(code):
    """OCP Microscaling Formats 1.0: sign, two bits of exponent with bias 1, one of mantissa."""
    sign, exponent, mantissa = code >> 3, code >> 1 & 3, code & 1
    value = mantissa / 2 if exponent == 0 else 2.0 ** (exponent - 1) * (1 + mantissa / 2)
    return -value if sign else value


def nibble(codes, i, j):
    """Two neighbours of a row are in a byte, the first in the low half."""
    return e2m1(int(codes[i, j // 2]) >> 4 * (j % 2) & 15)


@pytest.mark.parametrize("name", SCALED)
def test_codes_times_scales(name):
    form, weight = SCALED[name]
    parts = random_parts(form, np.random.default_rng(1))
    found, numbers = form.weights(parts.get, (ROWS, COLUMNS)), {}
    for part, values in parts.items():
        numbers[part] = values if values.dtype == np.uint8 and values.size > 12 else values.astype(np.float64)
    assert found.dtype == F32
    for i in range(ROWS):
        for j in range(COLUMNS):
            assert found[i, j] == pytest.approx(weight(numbers, i, j), rel=1e-6)


def test_an_exponent_of_255_is_no_number():
    parts = random_parts(MXFP4, np.random.default_rng(0))
    parts["weight_scale"][2, 1] = 255
    with np.errstate(invalid="ignore"):
        assert not np.isfinite(MXFP4.weights(parts.get, (ROWS, COLUMNS))).all()


@pytest.mark.parametrize("nested", [True, False])
def test_levels_of_bitsandbytes(nested):
    rng, n = np.random.default_rng(0), ROWS * COLUMNS
    state = {"blocksize": 64, "nested_blocksize": 4, "nested_offset": 0.25}
    parts = {
        "weight": rng.integers(0, 256, (n // 2, 1)).astype(np.uint8),
        "weight.absmax": rng.uniform(0.1, 1, n // 64).astype(F32),
        "weight.quant_map": np.sort(rng.uniform(-1, 1, 16)).astype(F32),
        "weight.quant_state.bitsandbytes__nf4": np.frombuffer(json.dumps(state).encode(), np.uint8),
    }
    absmax = parts["weight.absmax"]
    if nested:
        codes, table, of_blocks = rng.integers(0, 256, 6), rng.uniform(-1, 1, 256).astype(F32), np.array([0.5, 2], F32)
        parts |= {"weight.absmax": codes.astype(np.uint8), "weight.nested_quant_map": table,
                  "weight.nested_absmax": of_blocks}  # fmt: skip
        absmax = [table[code] * of_blocks[i // 4] + F32(0.25) for i, code in enumerate(codes)]
    found = Levels().weights(parts.get, (ROWS, COLUMNS)).reshape(-1)
    for i in range(n):
        code = int(parts["weight"][i // 2, 0]) >> (0 if i % 2 else 4) & 15
        assert found[i] == parts["weight.quant_map"][code] * absmax[i // 64]
    parts["weight.absmax"] = parts["weight.absmax"][:3]
    with pytest.raises(PartError):
        Levels().weights(parts.get, (ROWS, COLUMNS))


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_words_are_bit_behind_bit(bits):
    codes = np.random.default_rng(bits).integers(0, 1 << bits, (64, 3)).astype(np.uint8)
    words = pack_words(codes, bits)
    for column in range(3):
        stream = "".join(f"{int(word):032b}"[::-1] for word in words.view(np.uint32)[:, column])
        assert [int(stream[bits * i : bits * (i + 1)][::-1], 2) for i in range(64)] == codes[:, column].tolist()
    assert np.array_equal(unpack_words(words, bits), codes)


@pytest.mark.parametrize("bits", [3, 4])
def test_integers_in_scattered_groups(bits):
    """GPTQ's codes as a model: a group's inputs anywhere in the row."""
    rng = np.random.default_rng(0)
    form = Packing("gptq", bits, 32, added=1)
    codes, zeros = rng.integers(0, 1 << bits, (COLUMNS, 32)), rng.integers(1, 1 << bits, (32, 2))
    g_idx, scales = (
        rng.permutation(np.arange(COLUMNS) // 32).astype(np.int32),
        rng.uniform(0.1, 1, (2, 32)).astype(np.float16),
    )
    parts = {
        "qweight": pack_words(codes, bits),
        "qzeros": pack_words(zeros - 1, bits).T,
        "scales": scales,
        "g_idx": g_idx,
    }
    found = form.weights(parts.get, (32, COLUMNS))
    for i in range(32):
        for j in range(COLUMNS):
            assert found[i, j] == (int(codes[j, i]) - int(zeros[i, g_idx[j]])) * F32(scales[g_idx[j], i])


def test_the_format_that_has_room_for_others():
    three, four, row = Packing("gptq", 3, 128), Packing("gptq", 4, 32), Packing("awq", 4, 0)
    assert widest([three, three]) == MatrixFormat(4, 128)
    assert widest([three, four, row]) == MatrixFormat(4, 32)
    assert widest([four, None]) == MatrixFormat(8, 32)
    assert widest([None, None]) == MatrixFormat(8)
    assert widest([Packing("gptq", 4, 1024)]) == MatrixFormat(4, 128)
    for forms, taken in (([four], True), ([four, fp8(0, 0)], False), ([], False), ([Packing("gptq", 4, 16)], False),
                         ([Packing(INT_QUANTIZED, 8, 0)], False), ([Packing(PACK_QUANTIZED, 8, 0)], True)):  # fmt: skip
        assert can_repack(SimpleNamespace(forms=dict(enumerate(forms)))) is taken
