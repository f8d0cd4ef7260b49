"""How quantized checkpoints store matrices: a description of each form, which gives the weights that it stands for.

A form lists the tensors that stand in the place of a matrix, each with a name, a shape, the types that are read, and
whether it has to be there (`parts`), and makes weights of them (`weights`). There are three kinds:

    Packing     integers, less a zero point, times a scale: GPTQ, AutoAWQ, compressed-tensors. Schemes keep such codes
    Scaled      numbers of 8 or 4 bits times the scales of blocks: FP8, NVFP4, MXFP4, int8 of bitsandbytes
    Levels      4-bit numbers of a table times the scales of blocks, which may be codes, too: bitsandbytes

`load(part)`, which they are given, is the tensor of a part, None where there is none.
"""

import json
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np

FLOATS = ("F32", "F16", "BF16")
E4M3, BYTES = ("F8_E4M3",), ("U8",)
INT_QUANTIZED, PACK_QUANTIZED = "int-quantized", "pack-quantized"  # formats of compressed-tensors

Load = Callable[[str], np.ndarray | None]
Shape = tuple[int, ...]
# Name; shape, or None for any; types, or none for any; whether it has to be there.
Part = tuple[str, Shape | None, tuple[str, ...], bool]


class Loose(tuple):
    """A shape that may be stored with more or fewer dimensions of 1."""


class PartError(Exception):
    """What is wrong with a part of a matrix: (part, text that goes on behind its name)."""


# ----------------------------------------------------------------------------
# Words


def pack_words(codes: np.ndarray, bits: int) -> np.ndarray:
    """Codes of a column in int32 words, bit behind bit, the first lowest: (n, m) -> (n * bits / 32, m) int32.

    bits: 2, 3, 4 or 8. A code of 3 bits may lie in two words.
    """
    words = np.zeros((len(codes) * bits // 32, codes.shape[1]), np.uint32)
    for first, period, at in _places(bits):
        part = codes[first::period].astype(np.uint32)
        words[at // 32 :: period * bits // 32] |= part << np.uint32(at % 32)
        if at % 32 + bits > 32:
            words[at // 32 + 1 :: period * bits // 32] |= part >> np.uint32(32 - at % 32)
    return words.view(np.int32)


def unpack_words(words: np.ndarray, bits: int) -> np.ndarray:
    """The codes of packed words: (n, m) int32 -> (n * 32 / bits, m) uint8."""
    words = np.ascontiguousarray(words).view(np.uint32)
    codes = np.empty((len(words) * 32 // bits, words.shape[1]), np.uint8)
    for first, period, at in _places(bits):
        part = words[at // 32 :: period * bits // 32] >> np.uint32(at % 32)
        if at % 32 + bits > 32:
            part = part | words[at // 32 + 1 :: period * bits // 32] << np.uint32(32 - at % 32)
        codes[first::period] = part & np.uint32((1 << bits) - 1)
    return codes


def _places(bits: int) -> Iterator[tuple[int, int, int]]:
    """Of each code of a period, which ends with a word: its number, codes in a period, its first bit."""
    period = 32 if 32 % bits else 32 // bits
    for i in range(period):
        yield i, period, i * bits


NIBBLE = (0, 4, 1, 5, 2, 6, 3, 7)  # AutoAWQ: channel 8c + i is in bits 4 * NIBBLE[i] and up of word c


def unpack_awq(words: np.ndarray) -> np.ndarray:
    """The codes of AutoAWQ's words: (rows, n / 8) int32 -> (rows, n) uint8."""
    words = np.ascontiguousarray(words).view(np.uint32)
    codes = np.empty((len(words), words.shape[1] * 8), np.uint8)
    for i, nibble in enumerate(NIBBLE):
        codes[:, i::8] = (words >> np.uint32(4 * nibble)) & np.uint32(15)
    return codes


# ----------------------------------------------------------------------------
# Integers


class Packing(NamedTuple):
    """Integer codes: what config.json says of them."""

    method: str  # "awq", AutoAWQ's; "gptq"; compressed-tensors' INT_QUANTIZED or PACK_QUANTIZED
    bits: int
    group_size: int  # weights that share a scale; 0: a row
    symmetric: bool = True  # all zero points are the middle code; PACK_QUANTIZED then stores none
    static: bool = False  # of INT_QUANTIZED: the activations' scales are stored
    added: int = 0  # of "gptq": what to add to stored zero points

    @property
    def is_compressed_tensors(self) -> bool:
        return self.method in (INT_QUANTIZED, PACK_QUANTIZED)

    def __str__(self) -> str:
        groups = f"in groups of {self.group_size}" if self.group_size else "per row"
        return f"{self.method} of {self.bits} bits {groups}"

    def parts(self, n_out: int, n_in: int) -> Iterator[Part]:
        """The tensors in the place of a matrix."""
        bits, n_groups = self.bits, n_in // (self.group_size or n_in)
        if self.method == INT_QUANTIZED:
            yield "weight", (n_out, n_in), ("I8",), True
            yield "weight_scale", (n_out, 1), FLOATS, True
            yield "weight_zero_point", (n_out, 1), ("I8",), False  # of zeros: older versions may have written them
            if self.static:
                yield "input_scale", (1,), FLOATS, True
                yield "input_zero_point", (1,), ("I8",), False
        elif self.method == PACK_QUANTIZED:
            yield "weight_packed", (n_out, -(-n_in * bits // 32)), ("I32",), True
            yield "weight_scale", (n_out, n_groups), FLOATS, True
            yield "weight_shape", (2,), ("I64", "I32"), True
            yield "weight_g_idx", (n_in,), ("I32",), False
            if not self.symmetric:
                yield "weight_zero_point", (-(-n_out * bits // 32), n_groups), ("I32",), True
        else:
            awq = self.method == "awq"
            yield "qweight", (n_in, n_out // 8) if awq else (n_in * bits // 32, n_out), ("I32",), True
            yield "qzeros", (n_groups, n_out * bits // 32), ("I32",), True
            yield "scales", (n_groups, n_out), FLOATS if not awq else ("F16",), True
            if not awq:
                yield "g_idx", (n_in,), ("I32",), False
                yield "bias", (n_out,), FLOATS, False  # of zeros: older versions of AutoGPTQ wrote them

    def integers(self, load: Load, shape: Shape) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Codes (n_out, n_in) uint8, zero points (n_out, n_groups) int16 and scales of a matrix, not of INT_QUANTIZED.

        Raises PartError.
        """
        bits = self.bits
        if self.method == "awq":
            return unpack_awq(load("qweight")).T, unpack_awq(load("qzeros")).T.astype(np.int16), load("scales").T
        if self.method == PACK_QUANTIZED:
            scales, found = load("weight_scale"), load("weight_shape")
            if tuple(found) != shape:
                raise PartError("weight_shape", f"is {found.tolist()}, expected {list(shape)}")
            codes = unpack_words(load("weight_packed").T, bits).T[:, : shape[1]]
            if self.symmetric:
                return codes, np.full(scales.shape, 1 << (bits - 1), np.int16), scales
            return codes, unpack_words(load("weight_zero_point"), bits)[: shape[0]].astype(np.int16), scales
        if (bias := load("bias")) is not None and bias.any():
            raise PartError("bias", "is not zero: not supported")
        zeros = unpack_words(load("qzeros").T, bits).astype(np.int16) + np.int16(self.added)
        return unpack_words(load("qweight"), bits).T, zeros, load("scales").T

    def groups(self, load: Load, n_in: int) -> np.ndarray | None:
        """The group of each input, (n_in,); None where groups are neighbours. Raises PartError for uneven groups."""
        part = "weight_g_idx" if self.method == PACK_QUANTIZED else "g_idx"
        found, neighbours = load(part), np.arange(n_in) // (self.group_size or n_in)
        # compressed-tensors has -1 where there is no order.
        if found is None or np.array_equal(found, neighbours) or (found == -1).all():
            return None
        if not np.array_equal(np.sort(found), neighbours):
            raise PartError(part, f"does not have {self.group_size or n_in} inputs in each group")
        return found

    def weights(self, load: Load, shape: Shape) -> np.ndarray:
        """The weights that a matrix stands for, (n_out, n_in) fp32. Raises PartError."""
        if self.method == INT_QUANTIZED:
            if (zeros := load("weight_zero_point")) is not None and zeros.any():
                raise PartError("weight_zero_point", "is not zero: not supported")
            return load("weight") * load("weight_scale").astype(np.float32)
        codes, zeros, scales = self.integers(load, shape)
        groups = self.groups(load, shape[1])
        if groups is None:
            groups = np.arange(shape[1]) // (self.group_size or shape[1])
        return (codes - zeros[:, groups]) * scales.astype(np.float32)[:, groups]


# ----------------------------------------------------------------------------
# Numbers of 8 and 4 bits

# FP4 E2M1 by code, OCP Microscaling Formats 1.0, section 5.3.3: a sign, two bits of exponent, one of mantissa.
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)


class Scale(NamedTuple):
    """Scales of a matrix's blocks."""

    part: str
    types: tuple[str, ...] = FLOATS
    rows: int = 0  # of a block; 0: all
    columns: int = 0
    divides: bool = False
    unit: float = 1.0  # what a stored 1 stands for

    def shape(self, n_out: int, n_in: int) -> Shape:
        return -(-n_out // (self.rows or n_out)), -(-n_in // (self.columns or n_in))

    def values(self, load: Load, n_out: int, n_in: int) -> np.ndarray:
        """By block, fp32. A byte is an exponent of 2 (E8M0), 127 stands for 1."""
        found = load(self.part).reshape(self.shape(n_out, n_in))
        if found.dtype == np.uint8:
            found = np.ldexp(np.float32(1), np.where(found == 255, 1 << 20, found.astype(np.int32) - 127))
        return found.astype(np.float32) * np.float32(self.unit)


class Scaled(NamedTuple):
    """Numbers of 8 bits, or two of E2M1 in a byte, the first in the low half, times scales."""

    name: str
    part: str
    types: tuple[str, ...]
    scales: tuple[Scale, ...]
    unused: tuple[str, ...] = ()  # parts of activations, which stay as they are here

    def __str__(self) -> str:
        return self.name

    def parts(self, n_out: int, n_in: int) -> Iterator[Part]:
        """The tensors in the place of a matrix."""
        yield self.part, (n_out, n_in // 2 if self.types == BYTES else n_in), self.types, True
        for scale in self.scales:
            yield scale.part, Loose(scale.shape(n_out, n_in)), scale.types, True
        for part in self.unused:
            yield part, None, (), False

    def weights(self, load: Load, shape: Shape) -> np.ndarray:
        """The weights that a matrix stands for, (n_out, n_in) fp32."""
        codes, by_block = load(self.part), np.ones((1, 1), np.float32)
        for scale in self.scales:
            values = scale.values(load, *shape)
            by_block = by_block / values if scale.divides else by_block * values
        if self.types == BYTES:
            codes = E2M1[np.stack([codes & 15, codes >> 4], axis=-1).reshape(shape)]
        for axis, block in enumerate((max(s.rows for s in self.scales), max(s.columns for s in self.scales))):
            if block and by_block.shape[axis] > 1:
                by_block = np.repeat(by_block, block, axis).take(np.arange(shape[axis]), axis)
        return codes.astype(np.float32) * by_block


class Levels(NamedTuple):
    """bitsandbytes' numbers of 4 bits, two in a byte, the first in the high half: levels of a table times a scale.

    Scales of blocks are fp32, or codes of 8 bits of a table ("double quantization"), times scales of blocks of them,
    plus an offset (bitsandbytes/functional.py: quantize_4bit).
    """

    name: str = "bitsandbytes of 4 bits"

    def __str__(self) -> str:
        return self.name

    def parts(self, n_out: int, n_in: int) -> Iterator[Part]:
        """The tensors in the place of a matrix."""
        yield "weight", Loose((n_out * n_in // 2, 1)), BYTES, True
        yield "weight.absmax", None, (*BYTES, "F32"), True
        yield "weight.quant_map", (16,), ("F32",), True
        yield "weight.nested_absmax", None, ("F32",), False
        yield "weight.nested_quant_map", (256,), ("F32",), False
        for kind in ("nf4", "fp4"):
            yield f"weight.quant_state.bitsandbytes__{kind}", None, BYTES, False

    def weights(self, load: Load, shape: Shape) -> np.ndarray:
        """The weights that a matrix stands for, (n_out, n_in) fp32. Raises PartError."""
        codes, absmax = load("weight").reshape(-1), load("weight.absmax")
        states = (load(f"weight.quant_state.bitsandbytes__{kind}") for kind in ("nf4", "fp4"))
        state = next((state for state in states if state is not None), None)
        try:
            state = {} if state is None else json.loads(state.tobytes())
            if (nested := load("weight.nested_absmax")) is not None:
                of_scales = np.repeat(nested, state["nested_blocksize"])[: len(absmax)]
                absmax = load("weight.nested_quant_map")[absmax] * of_scales + np.float32(state["nested_offset"])
            of_weights = np.repeat(absmax.astype(np.float32), state.get("blocksize", 64))[: 2 * len(codes)]
            levels = load("weight.quant_map")[np.stack([codes >> 4, codes & 15], axis=-1).reshape(-1)]
            return (levels * of_weights).reshape(shape)
        except (AttributeError, IndexError, KeyError, TypeError, ValueError):
            raise PartError("weight.absmax", "does not go with weight and quant_state") from None


Form = Packing | Scaled | Levels


def fp8(rows: int, columns: int, part: str = "weight_scale") -> Scaled:
    """FP8 E4M3 with a scale for each block of so many rows and columns; 0: all."""
    blocks = {(0, 0): "per matrix", (1, 0): "per row"}.get((rows, columns), f"in blocks of {rows} x {columns}")
    scale = Scale(part, FLOATS, rows, columns)
    return Scaled(f"FP8 {blocks}", "weight", E4M3, (scale,), ("input_scale", "output_scale", "k_scale", "v_scale"))


# compressed-tensors divides by the scale of the whole matrix, modelopt multiplies by it.
NVFP4 = Scaled("NVFP4", "weight_packed", BYTES,
               (Scale("weight_scale", E4M3, 1, 16), Scale("weight_global_scale", divides=True)),
               ("input_global_scale", "k_scale", "v_scale"))  # fmt: skip
MODELOPT_NVFP4 = Scaled("NVFP4", "weight", BYTES, (Scale("weight_scale", E4M3, 1, 16), Scale("weight_scale_2")),
                        ("input_scale", "k_scale", "v_scale"))  # fmt: skip
MXFP4 = Scaled("MXFP4", "weight_packed", BYTES, (Scale("weight_scale", ("U8", "F8_E8M0"), 1, 32),))
MXFP8 = Scaled("MXFP8", "weight", E4M3, (Scale("weight_scale", ("U8", "F8_E8M0"), 1, 32),))
# bitsandbytes: a row's largest weight, of which a code is 127ths.
INT8_ROWS = Scaled("int8 of bitsandbytes", "weight", ("I8",), (Scale("SCB", FLOATS, 1, 0, unit=1 / 127),),
                   ("weight_format",))  # fmt: skip
