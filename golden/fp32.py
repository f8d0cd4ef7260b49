"""fp32 arithmetic that has one answer: a fused multiply-add, the programs' exponential, sums in lanes; and hashes.

docs/numerics.md has the contract. All take and return fp32, of any shapes that numpy broadcasts.
"""

import numpy as np

F32, F64 = np.float32, np.float64
BELOW_FLOAT, HALF_OF_FLOAT = (1 << 29) - 1, 1 << 28  # of the 52 bits of an fp64 fraction, those that fp32 lacks
LEAST_NORMAL = 2.0**-126
LOG2_E, LN2_HIGH, LN2_LOW = F32(1.44269504), F32(0.693359375), F32(-2.12194440e-4)
ROUNDER = F32(1.5 * 2**23)  # a sum with it leaves no room for a fraction
EXP_TERMS = tuple(F32(1) / F32(n) for n in (720, 120, 24, 6, 2, 1, 1))


def fma(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """a * b + c rounded to fp32 once (IEEE 754-2019, fusedMultiplyAdd).

    The product is exact in fp64. Rounding its sum with c to fp64, then to fp32, is rounding once, but where the first
    result lies halfway between two fp32 numbers. There, what the first rounding has lost (Knuth's TwoSum) decides.
    """
    p = np.asarray(np.multiply(a, b, dtype=F64))
    total = np.asarray(p + c)
    doubtful = (total.view(np.int64) & BELOW_FLOAT == HALF_OF_FLOAT) | (np.abs(total) < LEAST_NORMAL)
    if doubtful.any():
        s, p, c = total[doubtful], *(np.broadcast_to(x, total.shape)[doubtful].astype(F64) for x in (p, c))
        part = s - p
        lost = (p - (s - part)) + (c - part)
        mirrored = s + (s - s.astype(F32))  # if halfway, the fp32 number on the other side
        halfway = (lost != 0) & (mirrored == mirrored.astype(F32))
        total[doubtful] = np.where(halfway, np.nextafter(s, np.where(lost > 0, np.inf, -np.inf)), s)
    return total.astype(F32)


def exp(x: np.ndarray) -> np.ndarray:
    """e^x within 1 unit in the last place; below -87 e^-87, above 88 e^88; NaN stays NaN.

    x = n ln 2 + r with n whole: e^r by the first terms of its Taylor series, times 2^n; ln 2 is taken off in two parts
    (Cody and Waite 1980).
    """
    x = np.clip(x.astype(F32), F32(-87), F32(88))
    n = fma(x, LOG2_E, ROUNDER) - ROUNDER
    r = fma(n, -LN2_LOW, fma(-n, LN2_HIGH, x))
    total = np.full_like(r, F32(1) / F32(5040))
    for term in EXP_TERMS:
        total = fma(total, r, term)
    return np.ldexp(total, np.nan_to_num(n).astype(np.int32))


def sum_in_lanes(x: np.ndarray, n_lanes: int) -> np.ndarray:
    """Sums along the last axis, in its type: lane i % n_lanes adds up its numbers in order; then lanes are added."""
    x = np.concatenate([x, np.zeros((*x.shape[:-1], -x.shape[-1] % n_lanes), x.dtype)], axis=-1)
    lanes = x.reshape(*x.shape[:-1], x.shape[-1] // n_lanes, n_lanes).cumsum(axis=-2)[..., -1, :]
    return lanes.cumsum(axis=-1)[..., -1] + x.dtype.type(0)  # sums begin at +0


def softmax(scores: np.ndarray) -> np.ndarray:
    """exp(s - max) / sum(exp(s - max)) over the last axis, summed in 16 lanes; -inf gives 0."""
    e = np.where(scores == -np.inf, F32(0), exp(scores - scores.max(axis=-1, keepdims=True)))
    return e * (F32(1) / sum_in_lanes(e, 16)[..., None])


def scaled_sum(accumulators: np.ndarray, w_scales: np.ndarray, x_scales: np.ndarray) -> np.ndarray:
    """What the integer sums of groups make, (n, m): out = fma(fp32(sum), w_scale * x_scale, out), in order, from 0.

    accumulators: (n, m, groups) int32; w_scales: (m, groups); x_scales: (n, groups), or (n, 1) for all of them.
    """
    out = np.zeros(accumulators.shape[:2], F32)
    for g in range(accumulators.shape[2]):
        scales = w_scales[None, :, g] * x_scales[:, g if x_scales.shape[1] > 1 else 0, None]
        out = fma(accumulators[..., g].astype(F32), scales, out)
    return out


def digest(logits: np.ndarray, found: int = 0xCBF29CE484222325) -> int:
    """FNV-1a of 64 bits (Fowler, Noll and Vo) over the bytes of logits, fp32: what the programs' --digest prints.

    found: the digest of the logits before these.
    """
    for byte in logits.astype("<f4").tobytes():
        found = (found ^ byte) * 0x100000001B3 % (1 << 64)
    return found


def splitmix64(x: np.ndarray) -> np.ndarray:
    """Steele, Lea and Flood 2014, "Fast Splittable Pseudorandom Number Generators": uint64 to uint64, modulo 2^64."""
    z = x + np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ z >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ z >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return z ^ z >> np.uint64(31)
