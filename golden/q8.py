"""Q8: int8 weights and activations, one fp32 scale per group of `group_size` along a row.

The numeric contract (docs/numerics.md): codes, scales, the int32 accumulators and their sum over groups are the same
bits in every implementation.
"""

from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np

from formats.errors import ModelError
from formats.model_file import map_tensors, read_header
from formats.schemes import Q8_FILE, FileFormat
from formats.source import Source
from formats.tensors import matrix_shapes, norm_shapes
from golden.forward import Step, ignore, load_weight
from golden.fp32 import F32, F64, scaled_sum


class Quantized(NamedTuple):
    """codes: (rows, n) int8 in -127..127; scales: (rows, n / group_size) fp32."""

    codes: np.ndarray
    scales: np.ndarray

    @property
    def group_size(self) -> int:
        return self.codes.shape[-1] // self.scales.shape[-1]


Codes = TypeVar("Codes", bound=Any)  # Quantized, or golden.mx.MX: codes and scales, both by rows


def rows_of(x: Codes, rows: slice | np.ndarray) -> Codes:
    """Some rows of x, codes and scales."""
    return x._replace(codes=x.codes[rows], scales=x.scales[rows])


def recorded(step: Step, name: str, x: Codes) -> Codes:
    """x, whose codes and scales are the steps `name`.q and `name`.s."""
    return x._replace(codes=step(name + ".q", x.codes), scales=step(name + ".s", x.scales))


def quantize(x: np.ndarray, group_size: int, bits: int = 8) -> Quantized:
    """Rounds each group of x to int8: amax = max|x|, scale = amax / 127, code = rint(x * (127 / amax)).

    x: (rows, n) fp32, n a multiple of group_size. All in fp32, rounding half to even. A group whose amax is so
    small that 127 / amax overflows fp32 (below 3.74e-37), zero included, has scale 0 and codes 0. Fewer bits: codes
    of -most..most with most = 2^(bits - 1) - 1 in place of 127, still stored as int8.
    """
    most = F32(2 ** (bits - 1) - 1)
    groups = x.astype(F32).reshape(x.shape[0], -1, group_size)
    amax = np.abs(groups).max(axis=-1)  # (rows, n / group_size)
    with np.errstate(divide="ignore", over="ignore"):
        inv = most / amax
    usable = np.isfinite(inv) & (inv > 0)
    inv = np.where(usable, inv, F32(0))
    scales = np.where(usable, amax / most, F32(0))
    codes = np.clip(np.rint(groups * inv[..., None]), -most, most).astype(np.int8)
    return Quantized(codes.reshape(x.shape), scales)


def dequantize(x: Quantized) -> np.ndarray:
    """code * scale, (rows, n) fp32."""
    return (x.codes.reshape(*x.scales.shape, -1) * x.scales[..., None]).reshape(x.codes.shape).astype(F32)


def group_sums(x: np.ndarray, w: np.ndarray, n_groups: int) -> np.ndarray:
    """The dot product of each group of each row of x with the same group of each row of w, (n, m, n_groups) int32.

    x: (n, k), w: (m, k), codes of 8 bits or fewer. Exact: products are at most 2^14, and a sum of them that stays
    below 2^24 is exact in fp32, one of up to 2^39 of them in fp64.
    """
    size = x.shape[1] // n_groups
    exact = F32 if size * 2**14 < 2**24 else F64
    xg = x.reshape(len(x), n_groups, size).transpose(1, 0, 2).astype(exact)  # (groups, n, size)
    wg = w.reshape(len(w), n_groups, size).transpose(1, 2, 0).astype(exact)  # (groups, size, m)
    return np.matmul(xg, wg).transpose(1, 2, 0).astype(np.int32)


def accumulators(x: Quantized, w: Quantized) -> np.ndarray:
    """`group_sums` of two quantized matrices, (n, k) and (m, k): (n, m, k / group_size) int32."""
    return group_sums(x.codes, w.codes, x.scales.shape[-1])


MATMUL_VALUES = 1 << 24  # accumulators that `matmul` makes at a time, so that memory stays bounded whatever the matrix


def matmul(x: Quantized, w: Quantized) -> np.ndarray:
    """x @ w.T of two quantized matrices, (n, m) fp32: sum over groups of accumulator * w scale * x scale."""
    out = np.empty((len(x.codes), len(w.codes)), F32)
    rows = max(1, MATMUL_VALUES // max(1, w.scales.size))
    for start in range(0, len(out), rows):
        part = rows_of(x, slice(start, start + rows))
        out[start : start + rows] = scaled_sum(accumulators(part, w), w.scales, part.scales)
    return out


ACCUMULATOR_LAYER = 1  # traces have the accumulators of its products; engine/app/trace.h says the same


def has_accumulators(name: str, step: Step) -> bool:
    """Whether the accumulators of the product `name` are a step: in ACCUMULATOR_LAYER, if steps are recorded."""
    return step is not ignore and name.startswith(f"layers.{ACCUMULATOR_LAYER}.")


def traced_matmul(x: Quantized, w: Quantized, name: str, step: Step) -> np.ndarray:
    """`matmul`, (n, m) fp32. In ACCUMULATOR_LAYER the accumulators are the step `name`.acc, if steps are recorded."""
    if not has_accumulators(name, step):
        return matmul(x, w)
    return scaled_sum(step(name + ".acc", accumulators(x, w)), w.scales, x.scales)


class Int8Scheme:
    """What schemes with int8 products share, for golden.forward. Rows of q and k are in adjacent pairs.

    A scheme says what its vectors and matrices are, and how it rounds activations.
    """

    interleaved = True

    def vector(self, name: str) -> np.ndarray:
        """A norm's or a router's weight, fp32."""
        raise NotImplementedError

    def matrix(self, name: str) -> Quantized:
        """The quantized weight matrix of a step, codes (n_out, n_in)."""
        raise NotImplementedError

    def quantized(self, name: str, x: np.ndarray) -> Quantized:
        """The activation of a place, (n, n_in) fp32, in int8."""
        raise NotImplementedError

    def dense(self, name: str) -> np.ndarray:
        """What a matrix stands for, (n_out, n_in) fp32."""
        return dequantize(self.matrix(name))

    def steps(self, step: Step) -> Step:
        return step

    def embedding(self, tokens: np.ndarray) -> np.ndarray:
        return dequantize(rows_of(self.matrix("embed"), tokens))

    def activation(self, step: Step, name: str, x: np.ndarray) -> Quantized:
        return recorded(step, name, self.quantized(name, x))

    def linear(self, x: Quantized, name: str, step: Step = ignore) -> np.ndarray:
        return traced_matmul(x, self.matrix(name), name, step)


class Q8(Int8Scheme):
    """The scheme of runq.cpp, from the weights of an unquantized model."""

    def __init__(self, checkpoint: Source, group_size: int = 64):
        self._checkpoint, self._group_size = checkpoint, group_size
        self._vectors: dict[str, np.ndarray] = {}
        self._matrices: dict[str, Quantized] = {}

    def vector(self, name: str) -> np.ndarray:
        if name not in self._vectors:
            self._vectors[name] = load_weight(self._checkpoint, name, interleaved=True)
        return self._vectors[name]

    def matrix(self, name: str) -> Quantized:
        if name not in self._matrices:
            self._matrices[name] = quantize(load_weight(self._checkpoint, name, interleaved=True), self._group_size)
        return self._matrices[name]

    def quantized(self, _name: str, x: np.ndarray) -> Quantized:
        return quantize(x, self._group_size)


class Int8File(Int8Scheme):
    """The weights of a file that has int8 codes and fp32 scales of every matrix (mapped, not read).

    Raises ModelError if it is not of this format, or has rows that are not whole groups.
    """

    def __init__(self, path: Path | str, file_format: FileFormat):
        path = Path(path)
        head = read_header(path, file_format)
        self.config, self.group_size, self.static = head.config, head.group_size, bool(head.activations)
        for name, (_, columns) in matrix_shapes(self.config):  # W8A8 has groups of 0 where a row is one
            size = self.group_size or (0 if file_format is Q8_FILE else columns)
            if size <= 0 or columns % size:
                raise ModelError(f"{path}: group_size {self.group_size} does not divide {name}'s {columns} columns")
        self.tensors = map_tensors(path, head)
        self._vectors = {name: self.tensors[name] for name, _ in norm_shapes(self.config)}
        self._matrices = {
            name: Quantized(self.tensors[name + ".codes"], self.tensors[name + ".scales"])
            for name, _ in matrix_shapes(self.config)
        }
        if self.config.tied:
            self._matrices["classifier"] = self._matrices["embed"]

    def vector(self, name: str) -> np.ndarray:
        return self._vectors[name]

    def matrix(self, name: str) -> Quantized:
        return self._matrices[name]

    def quantized(self, _name: str, x: np.ndarray) -> Quantized:
        return quantize(x, self.group_size or x.shape[-1])


class Q8File(Int8File):
    """The scheme of runq.cpp, from a file that export/q8.py wrote."""

    def __init__(self, path: Path | str):
        super().__init__(path, Q8_FILE)
