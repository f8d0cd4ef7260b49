"""Choosing int4 codes and scales for A8W4: symmetric, a scale per group of a row or per row."""

import numpy as np

from golden.forward import F32, F64

DIVISORS = tuple(7 + i / 8 for i in range(21))  # of a group's largest magnitude, which has code 7 or is clipped to it


def quantize_int4(weight: np.ndarray, group: int) -> tuple[np.ndarray, np.ndarray]:
    """Codes (n, k) int8 in -8..7 and scales (n, k / group) fp32 of weights (n, k) fp32. group 0: a row.

    For each group the scale of DIVISORS under which the squared error is smallest; the first of equals. Codes are those
    of the scale as it is stored, fp16 for groups, fp32 for rows. Rounding is half to even.
    """
    groups = weight.reshape(len(weight), -1, group or weight.shape[1])
    amax = np.abs(groups).max(axis=-1)
    codes, scales = np.zeros(groups.shape, np.int8), np.zeros(amax.shape, F32)
    best = np.full(amax.shape, np.inf)
    for divisor in DIVISORS:
        scale = amax / F32(divisor)
        if group:
            scale = scale.astype(np.float16).astype(F32)
        with np.errstate(divide="ignore", invalid="ignore"):
            tried = np.where(scale[..., None] > 0, np.clip(np.rint(groups / scale[..., None]), -8, 7), 0)
        error = np.square(tried * scale[..., None] - groups, dtype=F64).sum(axis=-1)
        better = error < best
        best = np.where(better, error, best)
        scales = np.where(better, scale, scales)
        codes = np.where(better[..., None], tried, codes).astype(np.int8)
    return codes.reshape(weight.shape), scales
