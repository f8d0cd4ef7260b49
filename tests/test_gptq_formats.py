"""GPTQ files: the order of codes, the header's formats, and what a matrix expands to."""

import re
import struct
import zlib
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from export.gptq import Options, export_gptq
from export.gptq_layout import check_dimensions
from formats.errors import ModelError
from formats.gptq import FORMATS, KINDS, ROW_UNIT, GptqLayout, MatrixFormat, matrix_tensors, pack_layout, read_layout
from formats.low_bits import (
    code_order,
    pack_codes,
    pack_mask,
    pack_nibbles,
    unpack_codes,
    unpack_mask,
    unpack_nibbles,
    why_not_two_of_four,
)
from formats.model_file import read_header
from formats.schemes import GPTQ_FILE
from formats.tensors import with_offsets
from golden.gptq import GPTQ, Matrix, expand, pack_matrix, stands_for, unpack_matrix
from golden.gptq_grid import NORMAL_TABLES, fitted_table, nearest_codes
from golden.gptq_quantize import round_matrix
from golden.op_vectors_fp32 import rope_config
from tests.helpers import F16, F32, MODELS, ROOT
from tests.malformed import small_model

ALL = sorted(FORMATS)


def test_full_blocks_hold_groups_of_64_a_shift_apart():
    codes = np.arange(256).reshape(1, 256) // 16  # 0..15
    packed = pack_codes(codes.astype(np.uint8), 4)
    for start, block in ((0, packed[:, :64]), (128, packed[:, 64:])):
        assert np.array_equal(block & 15, codes[:, start : start + 64])
        assert np.array_equal(block >> 4, codes[:, start + 64 : start + 128])
    two = pack_codes((codes % 4).astype(np.uint8), 2)
    for i in range(4):
        assert np.array_equal(two >> (2 * i) & 3, codes[:, 64 * i : 64 * i + 64] % 4)


def test_the_end_of_a_row_goes_into_smaller_blocks():
    # 576 codes of 4 bits: four blocks of 64 bytes, then one of 32. Byte 256 + j has codes 512 + j and 544 + j.
    order = code_order(576, 4)
    assert order[256].tolist() == [512, 544]
    assert order[287].tolist() == [543, 575]
    # 576 codes of 2 bits: two blocks of 64 bytes, then one of 16.
    order = code_order(576, 2)
    assert order[128].tolist() == [512, 528, 544, 560]
    for n, bits in ((576, 4), (576, 2), (64, 2), (64, 4), (1472, 2)):
        assert np.array_equal(np.sort(code_order(n, bits).ravel()), np.arange(n))
    with pytest.raises(ValueError, match="a row of 4 bytes"):
        code_order(16, 2)


@pytest.mark.parametrize("bits", [1, 2, 4, 5, 6])
@pytest.mark.parametrize("n", [64, 128, 192, 576, 1536])
def test_codes_come_back(bits, n):
    codes = np.random.default_rng(n).integers(0, 2**bits, (5, n)).astype(np.uint8)
    packed = pack_codes(codes, bits)
    assert packed.shape == (5, n * bits // 8)
    assert np.array_equal(unpack_codes(packed, bits), codes)


def test_nibbles_and_masks_have_the_first_value_lowest():
    assert pack_nibbles(np.array([[1, 2, 3]])).tolist() == [[0x21, 0x03]]
    assert unpack_nibbles(np.array([[0x21, 0x03]], np.uint8), 3).tolist() == [[1, 2, 3]]
    kept = np.array([[1, 1, 0, 0, 0, 1, 0, 1]], bool)
    assert pack_mask(kept).tolist() == [[0b10100011]]
    assert np.array_equal(unpack_mask(pack_mask(kept)), kept)


def test_a_mask_keeps_two_of_each_four():
    for byte in range(256):
        n_kept = {8: (byte & 15).bit_count(), 12: (byte >> 4).bit_count()}
        why = "row 1 keeps {} of columns {} to {}, expected 2 of each 4"
        wrong = [why.format(n, k, k + 3) for k, n in n_kept.items() if n != 2]
        found = why_not_two_of_four(np.array([[0x5A, 0xC3], [0x99, byte]], np.uint8))
        assert found == (wrong[0] if wrong else None)
    with pytest.raises(ValueError, match="row 0 keeps 4 of columns 4 to 7"):
        unpack_mask(np.array([[0xF3]], np.uint8))


@pytest.mark.parametrize("form", ALL, ids=str)
def test_a_matrix_comes_back_from_its_tensors(form):
    weight = np.random.default_rng(0).standard_normal((6, 384)).astype(F32)
    m = round_matrix(weight, form)
    parts = pack_matrix(m)
    expected = {t.name.removeprefix("m."): (np.dtype(t.dtype), t.shape) for t in matrix_tensors("m", (6, 384), form)}
    assert {name: (v.dtype, v.shape) for name, v in parts.items()} == expected
    for a, b in zip(m[1:], unpack_matrix(parts, form)[1:], strict=True):
        assert (a is None) == (b is None)
        assert a is None or np.array_equal(a, b)


def test_every_format_by_hand():
    """One row of 64, as each format has it, weight by weight."""
    codes = np.arange(64, dtype=np.uint8)[None] % 16
    scale = np.array([[0.5, 0.25]], F16)
    zeros = np.array([[3, 15]], np.uint8)
    four = expand(Matrix(MatrixFormat(4, 32), codes, scale, zeros), 32)
    assert four.codes.tolist() == [[k % 16 - (3 if k < 32 else 15) for k in range(64)]]
    assert four.scales.tolist() == [[0.5, 0.25]]

    s, z = np.array([[7]], np.uint8), np.array([[9]], np.uint8)
    ladder = Matrix(MatrixFormat(2, 64, two_level=True), codes % 4, s, z, np.array([0.1], F32))
    found = expand(ladder, 64)
    assert found.codes.tolist() == [[5 * (k % 4) - 9 for k in range(64)]]
    assert found.scales[0, 0] == F32(7) * F32(0.1)
    assert stands_for(ladder)[0, 3] == F32(5 * 3 - 9) * (F32(7) * F32(0.1))

    kept = np.tile([True, False, False, True], 16)[None]
    sparse = expand(Matrix(MatrixFormat(4, 64, sparse=True), codes, scale[:, :1], zeros[:, :1], kept=kept), 64)
    assert sparse.codes.tolist() == [[k % 16 - 3 if k % 4 in (0, 3) else 0 for k in range(64)]]

    table = np.arange(-120, 120, 15, dtype=np.int8)
    by_table = Matrix(MatrixFormat(4, 32, int8_scales=True), codes, np.array([[-3, 127]], np.int8), None, F32([0.1]),
                      table=table)  # fmt: skip
    found = expand(by_table, 32)
    assert found.codes.tolist() == [[15 * (k % 16) - 120 for k in range(64)]]
    assert found.scales.tolist() == [[F32(-3) * F32(0.1), F32(127) * F32(0.1)]]
    assert stands_for(by_table)[0, 0] == F32(-120) * (F32(-3) * F32(0.1))

    six = Matrix(MatrixFormat(6, 64, int8_scales=True), np.arange(64, dtype=np.uint8)[None], s.astype(np.int8), None,
                 F32([0.1]))  # fmt: skip
    assert expand(six, 64).codes.tolist() == [[k - 32 for k in range(64)]]
    five = Matrix(MatrixFormat(5, 64, int8_scales=True), codes * 2, s.astype(np.int8), None, F32([0.1]),
                  table=np.arange(-96, 128, 7, dtype=np.int8))  # fmt: skip
    assert expand(five, 64).codes.tolist() == [[14 * (k % 16) - 96 for k in range(64)]]
    planes = pack_matrix(six)["codes"][0]
    assert [planes[k % 32] >> (k // 32 * 4) & 15 for k in range(64)] == [k % 16 for k in range(64)]
    assert [planes[32 + k % 16] >> (k // 16 * 2) & 3 for k in range(64)] == [k // 16 for k in range(64)]

    eight = expand(Matrix(MatrixFormat(8), codes.astype(np.int8), np.array([[0.1]], F32)), 32)
    assert eight.codes.tolist() == codes.tolist()
    assert eight.scales.tolist() == [[F32(0.1), F32(0.1)]]


def test_nearest_of_a_table():
    table = np.array([-127, -90, -60, -31, -30, -9, -1, 2, 3, 5, 8, 13, 40, 77, 100, 126], np.int8)
    x = np.arange(-1200, 1200, dtype=F32) / 8  # every middle among them, and beyond both ends
    distance = np.abs(x[:, None] - table)
    assert np.array_equal(nearest_codes(x, table), distance.argmin(axis=1))  # the lower of two as near


# ---- the header


def config(**changes):
    return replace(rope_config(64, 1e4, None), dim=128, hidden_dim=192, n_heads=2, vocab_size=8, **changes)


def test_formats_come_back_from_the_header():
    layout = GptqLayout((MatrixFormat(8), MatrixFormat(4, 128), *[MatrixFormat(4, 64)] * 3,
                         *[MatrixFormat(2, 64, two_level=True)] * 3, MatrixFormat(8)))  # fmt: skip
    raw = pack_layout(layout)
    assert len(raw) == 37
    assert raw[:8] == struct.pack("<BBHBBH", 8, 0, 0, 4, 0, 128)
    assert raw[20:24] == struct.pack("<BBH", 2, 2, 64)
    assert read_layout(Path("x"), raw, config(), 64) == (config(), layout)
    ordered = read_layout(Path("x"), raw[:-1] + b"\1", config(), 64)
    assert ordered == (config(), layout._replace(has_order=True))


@pytest.mark.parametrize(
    ("at", "value", "group_size", "says"),
    [
        (4, 3, 64, "q_proj has bits 3, flags 0, group 64: not supported"),
        (5, 8, 64, "q_proj has bits 4, flags 8, group 64: not supported"),
        (5, 6, 64, "q_proj has bits 4, flags 6, group 64: not supported"),
        (4, 5, 64, "q_proj has bits 5, flags 0, group 64: not supported"),
        (5, 2, 64, "q_proj has bits 4, flags 2, group 64: not supported"),
        (6, 65, 64, "q_proj has bits 4, flags 0, group 65: not supported"),
        (0, 4, 64, "embed has bits 4, flags 0, group 0"),
        (36, 2, 64, "has_order is 2, expected 0 or 1"),
        (24, 4, 32, "group_size is 32, expected 64"),
        (26, 128, 64, "layers.0.ffn.down_proj has 192 columns, expected groups of 128"),
    ],
)
def test_other_formats_are_refused_by_name(at, value, group_size, says):
    raw = bytearray(pack_layout(GptqLayout((MatrixFormat(8), *[MatrixFormat(4, 64)] * 7, MatrixFormat(8)))))
    raw[at] = value
    if at == 0:  # valid of its own, but the classifier's entry differs
        says = "the classifier is the embedding, but its format is 8 bits per row, not 4 bits per row"
    with pytest.raises(ModelError) as error:
        read_layout(Path("x"), bytes(raw), config(), group_size)
    assert str(error.value).endswith(says) or says in str(error.value)


@pytest.mark.parametrize(
    ("fields", "name", "matrix"),
    [
        ({"dim": 96}, "hidden_size is 96", "embed has 96"),
        ({"hidden_dim": 800}, "intermediate_size is 800", "layers.0.ffn.down_proj has 800"),
        ({"n_heads": 3, "n_kv_heads": 3, "head_dim": 96}, "num_attention_heads * head_dim is 288",
         "layers.0.attn.o_proj has 288"),
    ],
)  # fmt: skip
def test_rows_that_are_no_multiple_of_64_are_refused_by_name(fields, name, matrix):
    c = replace(config(), **fields)
    with pytest.raises(ModelError, match=re.escape(f"x/config.json: {name}, expected a multiple of 64")):
        check_dimensions(SimpleNamespace(config=c, config_path=Path("x/config.json")))
    whole_rows = pack_layout(GptqLayout((MatrixFormat(8),) * len(KINDS)))
    with pytest.raises(ModelError, match=f"x: {matrix} columns, expected a multiple of 64"):
        read_layout(Path("x"), whole_rows, c, 64)


def test_rows_of_the_models_on_the_page_are_multiples_of_64():
    table = (ROOT / "docs" / "gptq.md").read_text().split("| heads * head_dim |\n")[1].split("\n\n")[0]
    rows = [row.split("|")[2:] for row in table.splitlines()[1:]]
    widths = [int(n) for row in rows for n in re.findall(r"\d+", "".join(row))]
    assert (len(rows), len(widths)) == (5, 33)
    assert all(n % ROW_UNIT == 0 for n in widths)


def test_tensors_lie_at_multiples_of_64_and_zeros_between(tmp_path):
    path = tmp_path / "m.bin"
    small = small_model(MODELS / "tiny-llama", tmp_path / "small")  # vocabulary and rows of any number
    export_gptq(small, path, options=Options(rtn=True), progress=False)
    head, data = read_header(path, GPTQ_FILE), path.read_bytes()
    assert head.layout.of("layers.0.ffn.up_proj").two_level
    tensors = list(with_offsets(head.tensors(), alignment=64))
    assert all(t.offset % 64 == 0 for t in tensors)
    assert tensors[-1].end == head.weights_end
    gaps = [data[a.end : b.offset] for a, b in pairwise(tensors)]
    assert max(map(len, gaps)) > 0
    assert all(not any(gap) for gap in gaps)


def rewritten(data, at, value):
    """A file with one byte of its header changed, the checksum made to hold."""
    offset, size = struct.unpack_from("<QQ", data, 0xA0)
    head = bytearray(data[:256])
    head[at] = value
    head[0xB0:0xB4] = bytes(4)
    struct.pack_into("<I", head, 0xB0, zlib.crc32(data[offset : offset + size], zlib.crc32(head)))
    return bytes(head) + data[256:]


def test_a_file_with_another_format_is_refused(tmp_path):
    path = tmp_path / "m.bin"
    export_gptq(MODELS / "tiny-llama", path, options=Options(rtn=True), progress=False)
    data = path.read_bytes()
    for at, value, says in (
        (0xC4, 3, "q_proj has bits 3"),
        (0xE4, 7, "has_order is 7"),
        (0xE4, 1, "too soon"),
        (0xC4, 8, "q_proj has 128 columns|weights end at"),
    ):
        path.write_bytes(rewritten(data, at, value))
        with pytest.raises(ModelError, match=says):
            GPTQ(path)


def test_kinds_are_those_of_the_list_of_matrices():
    layout = GptqLayout((MatrixFormat(8),) * 9)
    names = [t.name for t in GPTQ_FILE.tensors(replace(config(), tied=False), layout)]
    kinds = list(dict.fromkeys(name.split(".")[-2] for name in names if name.endswith(".codes")))
    assert kinds == list(KINDS)


@pytest.mark.parametrize(("bits", "most"), [(4, 1), (5, 6)])  # SmolLM2 at 5 bits, which is nearly so
def test_tables_are_those_of_lloyd_and_max(bits, most):
    """Fitted to normally distributed weights, each value stays, or nearly, and the error is as small."""
    groups = np.random.default_rng(0).standard_normal((2048, 32)).astype(F32)
    form, table, errors = MatrixFormat(bits, 32, int8_scales=True), NORMAL_TABLES[bits], []
    for _ in range(5):
        following, error = fitted_table(groups, form, table)
        errors.append(error)
        table = following
        assert np.abs(table.astype(int) - NORMAL_TABLES[bits]).max() <= most
    assert errors[0] < 1.02 * min(errors)
    # From a table that is even, the error falls.
    even = np.rint(np.linspace(-127, 127, 2**bits)).astype(np.int8)
    following, error = fitted_table(groups, form, even)
    assert fitted_table(groups, form, following)[1] < 0.97 * error
