"""GPTQ files: matrices of 2 to 8 bits, dense and 2:4 sparse, with int8 activations as in Q8.

Every format expands to what Q8 has, int8 codes w' and one fp32 scale per group of activations, and the product is
golden.q8's, letter for letter:

    format            codes   w'                                  scale of a group, fp32
    8 bits            int8    code                                the row's, or the group's fp16, widened
    4 bits, 2 bits    uint8   code - zero, zero a code            the group's fp16, widened
    2:4 sparse        uint8   code - zero where kept, otherwise 0 the group's fp16, widened
    2 bits, two-level uint8   5 code - z, z 0..15                 s * row_scale, s 0..15, rounded once
    nl4, 5 bits       uint8   table[code], int8, a matrix's own   s * row_scale, s -127..127, rounded once
    6 bits            uint8   code - 32                           s * row_scale, s -127..127, rounded once

The two-level form has its zero point at z / 5, between codes, so that groups need not have a code for 0; the 5 is
folded into the row's scale. A weight group is a whole number of groups of activations. Where a file has an order, the
activations of a place are gathered before they are quantized: x[order[k]] meets the k-th code of a row.

How the codes are found is in golden/gptq_quantize.py.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from formats.errors import ModelError
from formats.gptq import ORDER_PLACES, GptqLayout, MatrixFormat, check_masks
from formats.low_bits import pack_codes, pack_mask, pack_nibbles, unpack_codes, unpack_mask, unpack_nibbles
from formats.model_file import map_tensors, read_header
from formats.schemes import GPTQ_FILE
from formats.tensors import matrix_shapes, norm_shapes
from golden.forward import F32, Step
from golden.q8 import Int8Scheme, Quantized, dequantize, quantize

F16 = np.float16
ZERO_STEPS = 5  # of the two-level form: zero points lie at fifths of a code


class Matrix(NamedTuple):
    """A quantized matrix, unpacked. n_groups is 1 where a group is a row."""

    form: MatrixFormat
    codes: np.ndarray  # (n_out, n_in) int8 at 8 bits, otherwise uint8; at weights that are not kept without meaning
    scales: np.ndarray  # (n_out, n_groups) fp16; fp32 at 8 bits a row; uint8 if two-level, int8 of int8_scales
    zeros: np.ndarray | None = None  # (n_out, n_groups) uint8; None at 8 bits and with int8 scales
    row_scales: np.ndarray | None = None  # (n_out,) fp32, of the two-level form and with int8 scales
    kept: np.ndarray | None = None  # (n_out, n_in) bool, two of each four, of the sparse form
    table: np.ndarray | None = None  # int8, what codes stand for: (2^bits,), or (n_out, 2^bits) of experts' rows


def joined(parts: Sequence[Matrix]) -> Matrix:
    """Matrices of one format and table, with rows of one length, one behind the other."""
    columns = list(zip(*(part._replace(table=None) for part in parts), strict=True))[1:]
    rows = (None if column[0] is None else np.concatenate(column) for column in columns)
    return Matrix(parts[0].form, *rows)._replace(table=parts[0].table)


# ----------------------------------------------------------------------------
# Between a matrix and its tensors


def pack_matrix(m: Matrix) -> dict[str, np.ndarray]:
    """The tensors of a file (formats/gptq.py), by their parts' names: codes, scales, ..."""
    parts: dict[str, np.ndarray] = {}
    codes = m.codes
    if m.kept is not None:
        parts["mask"] = pack_mask(m.kept)
        codes = codes[m.kept].reshape(len(codes), -1)
    parts["codes"] = codes if m.form.bits == 8 else pack_codes(codes, m.form.bits)
    if m.row_scales is not None:
        groups = m.scales if m.zeros is None else m.scales | m.zeros << np.uint8(4)
        return ({} if m.table is None else {"table": m.table}) | parts | {"groups": groups, "row_scales": m.row_scales}
    parts["scales"] = m.scales[:, 0] if m.form.bits == 8 and not m.form.group else m.scales
    if m.zeros is not None:
        parts["zeros"] = pack_nibbles(m.zeros)
    return parts


def unpack_matrix(parts: Mapping[str, np.ndarray], form: MatrixFormat) -> Matrix:
    """The inverse. Codes of weights that are not kept are 0."""
    codes = parts["codes"]
    if form.bits < 8:
        codes = unpack_codes(codes, form.bits)
    kept = None
    if form.sparse:
        kept, stored = unpack_mask(parts["mask"]), codes
        codes = np.zeros(kept.shape, np.uint8)
        codes[kept] = stored.reshape(-1)
    if form.int8_scales:
        return Matrix(form, codes, parts["groups"], None, parts["row_scales"], table=parts.get("table"))
    if form.two_level:
        groups = parts["groups"]
        return Matrix(form, codes, groups & np.uint8(15), groups >> np.uint8(4), parts["row_scales"])
    scales = parts["scales"].reshape(len(codes), -1)
    zeros = unpack_nibbles(parts["zeros"], scales.shape[1]) if form.bits < 8 else None
    return Matrix(form, codes, scales, zeros, kept=kept)


def expand(m: Matrix, activation_group: int) -> Quantized:
    """What a matrix is in the product: int8 codes w' (n_out, n_in), fp32 scales (n_out, n_in / activation_group)."""
    n_out, n_in = m.codes.shape
    codes = m.codes.astype(np.int8).reshape(n_out, m.scales.shape[1], -1)
    if m.form.two_level:
        codes = np.int8(ZERO_STEPS) * codes
    elif m.form.has_table:
        codes = np.take_along_axis(np.atleast_2d(m.table), m.codes.astype(np.intp), 1).reshape(codes.shape)
    elif m.form.int8_scales:
        codes = codes - np.int8(1 << m.form.bits - 1)
    scales = m.scales.astype(F32) * (1 if m.row_scales is None else m.row_scales[:, None])
    if m.zeros is not None:
        codes = codes - m.zeros.astype(np.int8)[..., None]
    codes = codes.reshape(n_out, n_in)
    if m.kept is not None:
        codes = np.where(m.kept, codes, np.int8(0))
    return Quantized(codes, np.repeat(scales, n_in // activation_group // scales.shape[1], axis=1))


def expand_parts(parts: Mapping[str, np.ndarray], form: MatrixFormat, activation_group: int) -> Quantized:
    """`expand` of a matrix's tensors, or of those of all experts' matrices: codes (n_out, n_in) or (E, n_out, n_in)."""
    *rows, _ = parts["codes"].shape
    if "table" in parts:  # one for each row, so that all parts have rows
        parts = {**parts, "table": np.broadcast_to(parts["table"][..., None, :], (*rows, parts["table"].shape[-1]))}
    flat = {part: values.reshape(-1, *values.shape[len(rows) :]) for part, values in parts.items()}
    found = expand(unpack_matrix(flat, form), activation_group)
    return Quantized(found.codes.reshape(*rows, -1), found.scales.reshape(*rows, -1))


def stands_for(m: Matrix) -> np.ndarray:
    """The weights that a matrix stands for, w' * scale, (n_out, n_in) fp32."""
    return dequantize(expand(m, m.form.group or m.codes.shape[1]))


def gather(x: np.ndarray, order: np.ndarray) -> np.ndarray:
    """Column k of the result is column order[k] of x, (n, n_in)."""
    return x[:, order]


# ----------------------------------------------------------------------------
# A model file


class GPTQ(Int8Scheme):
    """The scheme of runq_gptq.cpp, from a file that export/gptq.py wrote (mapped, not read).

    Raises ModelError if the file is no GPTQ file, or has an order or a mask that is none.
    """

    def __init__(self, path: Path | str):
        path = Path(path)
        head = read_header(path, GPTQ_FILE)
        assert isinstance(head.layout, GptqLayout)
        self.config, self.group_size, self.layout = head.config, head.group_size, head.layout
        self._tensors = map_tensors(path, head)
        check_masks(path, self._tensors)
        self._vectors = {name: self._tensors[name] for name, _ in norm_shapes(self.config)}
        self._shapes = dict(matrix_shapes(self.config))
        self._expanded: dict[str, Quantized] = {}
        self.orders: dict[str, np.ndarray] = {}  # by step name, where activations are gathered
        if self.layout.has_order:
            places = [f"layers.{i}.{place}" for place in ORDER_PLACES for i in range(self.config.n_layers)]
            self.orders = {place: self._checked(path, place) for place in places}

    def _checked(self, path: Path, place: str) -> np.ndarray:
        """The order of a place. Raises ModelError if it does not have every channel once."""
        order = self._tensors[place + ".order"]
        if not np.array_equal(np.sort(order), np.arange(len(order))):
            raise ModelError(f"{path}: {place}.order does not have every channel once")
        return order

    def vector(self, name: str) -> np.ndarray:
        return self._vectors[name]

    def _name(self, name: str) -> str:
        return "embed" if name == "classifier" and self.config.tied else name

    def tensors(self, name: str) -> dict[str, np.ndarray]:
        """The tensors of a step's matrix as they are in the file, by their parts' names."""
        start = self._name(name) + "."
        return {tensor.removeprefix(start): v for tensor, v in self._tensors.items() if tensor.startswith(start)}

    def stored(self, name: str) -> Matrix:
        """The unpacked matrix of a step."""
        return unpack_matrix(self.tensors(name), self.layout.of(self._name(name)))

    def zeros(self, name: str) -> np.ndarray:
        """The zero points of a step's matrix at 4 bits, or at 2 in one level, (n_out, n_groups) uint8."""
        parts = self.tensors(name)
        return unpack_nibbles(parts["zeros"], parts["scales"].shape[1])

    def matrix(self, name: str) -> Quantized:
        """The expanded weight matrix of a step, codes (n_out, n_in)."""
        name = self._name(name)
        if name not in self._expanded:
            self._expanded[name] = expand(self.stored(name), self.group_size)
        return self._expanded[name]

    def dense(self, name: str) -> np.ndarray:
        """What a matrix stands for, (n_out, n_in) fp32. Nothing is kept, unlike `matrix`."""
        return stands_for(self.stored(name))

    def embedding(self, tokens: np.ndarray) -> np.ndarray:
        rows = {p: v if p == "table" else v[tokens] for p, v in self.tensors("embed").items()}
        return dequantize(expand_parts(rows, self.layout.of("embed"), self.group_size))

    def activation(self, step: Step, name: str, x: np.ndarray) -> Quantized:
        if name in self.orders:
            x = step(name + ".gathered", gather(x, self.orders[name]))
            name += ".gathered"
        return super().activation(step, name, x)

    def quantized(self, _name: str, x: np.ndarray) -> Quantized:
        return quantize(x, self.group_size)
