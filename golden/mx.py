"""MXFP8: blocks of 8-bit floating-point elements under one power of two, as in OCP Microscaling Formats (MX) 1.0.

An element is E4M3 or E5M2 (OCP 8-bit Floating Point 1.0): a sign, 4 or 5 bits of exponent, 3 or 2 of mantissa. The
scale of a block is E8M0: a byte b that means 2^(b - 127), or NaN if it is 255. A value is element * scale.

The specification leaves some cases open; here they are:

    a block of zeros              scale byte 0, elements 0 with the signs of the values
    an element beyond the range   the largest finite one (saturating)
    a scale below the range       byte 0; above it there is none: the largest of fp32 has scale byte 246 (E4M3)
    an infinity in the block      log2 is 128: scale byte 247 (E4M3) or 240 (E5M2), and the infinity saturates
    a NaN in the block            scale byte 255, so that every value of the block is NaN; the element of a NaN is 0x7f,
                                  the others are 0 with their signs
"""

from typing import NamedTuple

import numpy as np

F32, F64 = np.float32, np.float64
SCALE_BIAS, SCALE_NAN = 127, 255  # of E8M0
LARGEST_BLOCK = 1024
BLOCK_UNIT = 32


class Element(NamedTuple):
    """An 8-bit floating-point format."""

    name: str
    mantissa_bits: int
    bias: int
    largest: float  # finite
    emax: int  # the exponent of the largest finite value: 2^emax <= largest < 2^(emax + 1)


E4M3 = Element("e4m3", 3, 7, 448.0, 8)  # no infinities; 0x7f and 0xff are NaN
E5M2 = Element("e5m2", 2, 15, 57344.0, 15)  # 0x7c is infinity; above it is NaN
ELEMENTS = {element.name: element for element in (E4M3, E5M2)}


class MX(NamedTuple):
    """codes: (..., n) uint8, elements; scales: (..., n / block) uint8, E8M0."""

    codes: np.ndarray
    scales: np.ndarray
    element: Element = E4M3

    @property
    def block(self) -> int:
        return self.codes.shape[-1] // self.scales.shape[-1]


# ----------------------------------------------------------------------------
# Elements


def element_values(element: Element) -> np.ndarray:
    """What each of the 256 codes means, fp32."""
    code = np.arange(256)
    exponent, mantissa = (
        code >> element.mantissa_bits & (1 << 7 - element.mantissa_bits) - 1,
        code % (1 << element.mantissa_bits),
    )
    fraction = mantissa / (1 << element.mantissa_bits)
    smallest = 1 - element.bias  # exponent of the subnormals and of the smallest normals
    magnitude = np.where(
        exponent == 0, np.exp2(F64(smallest)) * fraction, np.exp2(exponent - element.bias) * (1 + fraction)
    )
    if element is E4M3:
        magnitude[code & 0x7F == 0x7F] = np.nan
    else:
        magnitude[code & 0x7F == 0x7C] = np.inf
        magnitude[code & 0x7F > 0x7C] = np.nan
    return np.where(code < 128, magnitude, -magnitude).astype(F32)


def encode_elements(x: np.ndarray, element: Element) -> np.ndarray:
    """The code of each value, uint8: rounded half to even, saturating. x: any float; NaN gives 0x7f.

    Between 2^e and 2^(e + 1) values are 2^(e - mantissa_bits) apart, below the smallest normal as far as just above it.
    """
    undefined = np.isnan(x)
    magnitude = np.minimum(np.where(undefined, 0, np.abs(x.astype(F64))), element.largest)
    _, exponent = np.frexp(magnitude)  # magnitude = m * 2^exponent, 0.5 <= m < 1
    distance = np.exp2(np.maximum(exponent - 1, 1 - element.bias).astype(F64) - element.mantissa_bits)
    rounded = np.rint(magnitude / distance) * distance
    positive = element_values(element)[:128]
    codes = np.searchsorted(positive[np.isfinite(positive)], np.minimum(rounded, element.largest).astype(F32))
    return np.where(undefined, 0x7F, codes | np.signbit(x).astype(np.int64) << 7).astype(np.uint8)


# ----------------------------------------------------------------------------
# Blocks


def scale_values(scales: np.ndarray) -> np.ndarray:
    """What E8M0 bytes mean, fp64."""
    return np.where(scales == SCALE_NAN, np.nan, np.exp2(scales.astype(F64) - SCALE_BIAS))


def quantize_mx(x: np.ndarray, block: int = 32, element: Element = E4M3) -> MX:
    """Quantizes each block: scale = 2^(floor(log2(max|x|)) - emax), code = the element nearest to x / scale.

    x: (rows, n) fp32, n a multiple of block. This is the conversion of the MX specification (section 6.3).
    """
    blocks = x.astype(F32).reshape(*x.shape[:-1], x.shape[-1] // block, block)
    amax = np.abs(blocks).max(axis=-1).astype(F64)  # NaN if one is
    undefined = np.isnan(amax)
    _, exponent = np.frexp(np.where(np.isfinite(amax), amax, 2.0**128))  # 2^(exponent - 1) <= amax < 2^exponent
    shared = np.where(amax == 0, -SCALE_BIAS, exponent - 1 - element.emax)
    scales = np.where(undefined, SCALE_NAN, np.maximum(shared, -SCALE_BIAS) + SCALE_BIAS).astype(np.uint8)
    with np.errstate(invalid="ignore"):
        scaled = blocks / scale_values(scales)[..., None]  # exact in fp64
    beside_nan = undefined[..., None] & ~np.isnan(blocks)
    codes = encode_elements(np.where(beside_nan, np.copysign(0, blocks), scaled), element)
    return MX(codes.reshape(x.shape), scales, element)


def dequantize_mx(x: MX) -> np.ndarray:
    """element * scale, fp64, of the shape of the codes."""
    values = element_values(x.element).astype(F64)[x.codes].reshape(*x.scales.shape, x.block)
    with np.errstate(invalid="ignore"):
        return (values * scale_values(x.scales)[..., None]).reshape(x.codes.shape)
