"""AWQ's storage and products: int4 weights with an fp16 scale and an integer zero point for each group of inputs.

    w16 = fp16((q - z) * s)        q, z in 0..15, s fp16: q - z is exact, the product is rounded once

That fp16 number is the weight, as it is in AutoAWQ's own dequantization: a product that multiplies groups first and
scales afterwards computes something else. Inputs of products are fp16, too, sums and outputs fp32 (docs/numerics.md).

Eight codes lie in an int32, in AutoAWQ's GEMM order. Matrices are stored (n_in, n_out), transposed against Hugging
Face's weights, and the eight are neighbours along n_out:

    qweight  (n_in, n_out / 8) int32
    qzeros   (n_in / group_size, n_out / 8) int32
    scales   (n_in / group_size, n_out) fp16

How scales are found is in golden/awq_search.py. `AWQ` runs a file that export/awq.py or another program wrote.
"""

from pathlib import Path
from typing import NamedTuple

import numpy as np

from formats.checkpoint import ModelError
from formats.model_file import map_tensors, read_header
from formats.packing import NIBBLE
from formats.packing import unpack_awq as unpack
from formats.schemes import AWQ_FILE
from golden.forward import Step, attention_fp64, ignore
from golden.fp32 import F32, F64

F16 = np.float16
MAX_CODE = 15
GROUP_SIZES = (64, 128)
HEAD_DIMS = (32, 64, 96, 128)  # runq_awq has attention for these

# Steps whose results go into a product, or into the cache of keys, as fp16. Values go into theirs as fp16 as well, but
# as the step is the product itself, traces keep its fp32.
HALF_STEPS = ("attn.norm", "attn.q_rope", "attn.k_rope", "attn.mix", "ffn.norm", "ffn.swiglu", "norm")
UNRECORDED_STEPS = ("attn.scores", "attn.probs")  # fused attention never has them in memory


# ----------------------------------------------------------------------------
# Codes


class Int4(NamedTuple):
    """A quantized matrix in the orientation of Hugging Face's weights.

    codes: (n_out, n_in) uint8 in 0..15; zeros: (n_out, n_in / group_size) uint8; scales: the same shape, fp16.
    """

    codes: np.ndarray
    zeros: np.ndarray
    scales: np.ndarray


def grid(low: np.ndarray, high: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Scale (fp16) and zero point (fp32, whole, 0..15) of groups whose weights go from low to high.

    scale = fp16((high - low) / 15), zero = clamp(rint(-low / scale), 0, 15), in fp32. The range is widened to include
    0, so that a group of one sign keeps its large weights, and a constant one is exact. Groups of zeros, or so small
    that fp16 has no scale for them, have scale 0 and zero point 0: their weights are 0.
    """
    low, high = np.minimum(low, F32(0)), np.maximum(high, F32(0))
    with np.errstate(over="ignore"):
        scale = ((high - low) / F32(MAX_CODE)).astype(F16)
    return scale, np.clip(np.rint(-low / divisor(scale)), 0, MAX_CODE)


def divisor(scale: np.ndarray) -> np.ndarray:
    """What weights are divided by: the scale in fp32; infinity for a scale of 0, so that codes are the zero point."""
    return np.where(scale > 0, scale, np.inf).astype(F32)


def steps_from_zero(groups: np.ndarray, scale: np.ndarray, zero: np.ndarray) -> np.ndarray:
    """code - zero of each weight, whole numbers in fp32: rint(w / scale), clipped to -zero..15 - zero.

    groups: (..., group_size) fp32; scale and zero: (...), from `grid`. The quotient is fp32's, by the fp16 scale that
    is stored; halves go to even.
    """
    out = groups / divisor(scale)[..., None]
    np.rint(out, out=out)
    zero = zero[..., None]
    np.maximum(out, -zero, out=out)
    return np.minimum(out, MAX_CODE - zero, out=out)


def largest_weights(scale: np.ndarray, zero: np.ndarray) -> np.ndarray:
    """The largest |(q - z) * s| of each group, whatever its codes q, in fp32; infinity for an infinite scale."""
    return np.maximum(zero, MAX_CODE - zero) * np.abs(scale.astype(F32))


def fits_half(values: np.ndarray | float) -> bool:
    """Whether the values are finite in fp16, which ends at 65504."""
    with np.errstate(over="ignore"):
        return bool(np.isfinite(np.asarray(values).astype(F16)).all())


def group_range(weight: np.ndarray, group_size: int) -> tuple[np.ndarray, np.ndarray]:
    """The smallest and the largest weight of each group, (n_out, n_in / group_size) each. weight: (n_out, n_in)."""
    groups = weight.reshape(len(weight), -1, group_size)
    return groups.min(axis=-1), groups.max(axis=-1)


def quantize(weight: np.ndarray, low: np.ndarray, high: np.ndarray) -> Int4:
    """Rounds a matrix (n_out, n_in) fp32 to int4 on the grids of low to high, (n_out, n_in / group_size) each.

    Weights outside get the nearest code. Raises OverflowError with the largest if fp16 cannot hold them.
    """
    scale, zero = grid(low, high)
    if not fits_half(largest_weights(scale, zero)):
        raise OverflowError(f"weights of {max(high.max(), -low.min()):.6g}")
    codes = steps_from_zero(weight.reshape(*scale.shape, -1), scale, zero) + zero[..., None]
    return Int4(codes.astype(np.uint8).reshape(weight.shape), zero.astype(np.uint8), scale)


def pack(codes: np.ndarray) -> np.ndarray:
    """Eight neighbours of a row in an int32: (rows, n) of 0..15 -> (rows, n / 8) int32. n is a multiple of 8."""
    words = np.zeros((len(codes), codes.shape[1] // 8), np.uint32)
    for i, nibble in enumerate(NIBBLE):
        words |= codes[:, i::8].astype(np.uint32) << np.uint32(4 * nibble)
    return words.view(np.int32)


class Packed(NamedTuple):
    """A matrix as files have it; shapes in the module's docstring."""

    qweight: np.ndarray
    qzeros: np.ndarray
    scales: np.ndarray


def pack_matrix(matrix: Int4) -> Packed:
    """Transposes and packs."""
    return Packed(pack(matrix.codes.T), pack(matrix.zeros.T), np.ascontiguousarray(matrix.scales.T))


def dequantize(matrix: Packed) -> np.ndarray:
    """w16 = fp16((q - z) * s), (n_in, n_out) fp16. The product of two fp16 numbers is exact in fp32."""
    codes = unpack(matrix.qweight).astype(np.int8)
    zeros = unpack(matrix.qzeros).astype(np.int8)
    scales = matrix.scales.astype(F32)
    groups = codes.reshape(len(scales), -1, codes.shape[1]) - zeros[:, None]  # (groups, group_size, n_out)
    return (groups * scales[:, None]).astype(F16).reshape(codes.shape)


def matmul(x: np.ndarray, w16: np.ndarray) -> np.ndarray:
    """x @ w16, (n, n_out) fp32: summed in fp64, rounded once. x: (n, n_in) of fp16 values; w16: (n_in, n_out) fp16."""
    return (x.astype(F64) @ w16.astype(F64)).astype(F32)


# ----------------------------------------------------------------------------
# A model file


class AWQ:
    """The scheme of runq_awq.cu, for golden.forward, from a file (mapped, not read).

    A file without extension block is another program's, and a Qwen3. Raises ModelError if the file is no AWQ file.
    """

    interleaved = False
    attend = staticmethod(attention_fp64)

    def __init__(self, path: Path | str):
        path = Path(path)
        head = read_header(path, AWQ_FILE)
        self.config, self.group_size = head.config, head.group_size
        c, size = self.config, self.group_size
        if size < 8 or any(n % size for n in (c.dim, c.hidden_dim, c.q_dim)) or c.kv_dim % 8:
            raise ModelError(f"{path}: group_size {size} does not go with these dimensions: {c}")
        self._tensors = map_tensors(path, head)
        self._w16: dict[str, np.ndarray] = {}

    def tensor(self, name: str) -> np.ndarray:
        """A tensor as it is in the file, by the names of `awq_tensors`."""
        return self._tensors[name]

    def matrix(self, name: str) -> Packed:
        """The packed weight matrix of a step."""
        return Packed(*(self._tensors[f"{name}.{part}"] for part in Packed._fields))

    def vector(self, name: str) -> np.ndarray:
        return self._tensors[name].astype(F32)

    def weight(self, name: str) -> np.ndarray:
        """The fp16 weight matrix of a step, (n_in, n_out)."""
        if name == "classifier":
            return self._tensors["embed" if self.config.tied else name].T
        if name not in self._w16:
            self._w16[name] = dequantize(self.matrix(name))
        return self._w16[name]

    def dense(self, name: str) -> np.ndarray:
        """What a matrix stands for, (n_out, n_in) fp32. Nothing is kept, unlike `weight`."""
        half = self.weight(name) if name == "classifier" else dequantize(self.matrix(name))
        return half.T.astype(F32)

    def steps(self, step: Step) -> Step:
        """Rounds to fp16 what goes into a product or the cache; see HALF_STEPS and UNRECORDED_STEPS."""

        def rounding(name: str, value: np.ndarray) -> np.ndarray:
            part = name.split(".", 2)[-1]
            if part in UNRECORDED_STEPS:
                return value
            if part in HALF_STEPS:
                return step(name, value.astype(F16)).astype(F32)
            value = step(name, value)
            return value.astype(F16).astype(F32) if part == "attn.v_proj" else value

        return rounding

    def embedding(self, tokens: np.ndarray) -> np.ndarray:
        return self._tensors["embed"][tokens].astype(F32)

    def activation(self, _step: Step, _name: str, x: np.ndarray) -> np.ndarray:
        return x

    def linear(self, x: np.ndarray, name: str, _step: Step = ignore) -> np.ndarray:
        return matmul(x, self.weight(name))
