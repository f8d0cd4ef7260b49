"""SmoothQuant (Xiao et al. 2022, arXiv 2211.10438): what is hard to quantize moves from activations to weights.

A few input channels of a matrix are far larger than the rest, and one scale for the whole row of activations leaves
the rest few codes. Channel j of the input is therefore divided by s_j, and the weights of input channel j are
multiplied by it, as golden/channel_scaling.py describes, with

    s_j = max|X_j|^alpha / max|W_j|^(1 - alpha)

the maxima over calibration text and over all consumers' rows.
"""

from functools import partial

import numpy as np

from formats.checkpoint import Config, ModelError
from formats.source import Source
from golden.calibration import Inputs, observe
from golden.channel_scaling import ChannelScaling, consumers, largest_scaled, search, share, spread
from golden.forward import F32, F64, Fp32, load_weight
from golden.q8 import dequantize
from golden.w8a8 import quantize_static, static_scale

SMALLEST = 1e-5  # maxima and factors are kept from going below
ALPHAS = tuple(i / 20 for i in range(21))  # what `auto` tries
SEARCH_ROWS = 256  # and on how many rows of calibration text


# ----------------------------------------------------------------------------
# Factors


def factors(x_max: np.ndarray, w_max: np.ndarray, alpha: float) -> np.ndarray:
    """s of each channel, fp32, from the maxima of input and weights; 1 for a channel whose input is always 0."""
    x, w = np.maximum(x_max.astype(F64), SMALLEST), np.maximum(w_max.astype(F64), SMALLEST)
    s = np.maximum(x**alpha / w ** (1 - alpha), SMALLEST)
    return np.where(x_max == 0, 1, s).astype(F32)


class Smoothed(Fp32):
    """The smoothed model without quantization: up to rounding, it computes what the model itself does."""

    def __init__(self, checkpoint: Source, smoothing: ChannelScaling, interleaved: bool = False):
        super().__init__(checkpoint, interleaved)
        self._smoothing = smoothing

    def load(self, name: str) -> np.ndarray:
        return load_smoothed(self._checkpoint, name, self._smoothing, self.interleaved)


def load_smoothed(checkpoint: Source, name: str, smoothing: ChannelScaling, interleaved: bool) -> np.ndarray:
    """The smoothed weight that a step uses, fp32. (Rows of q and k change places, but none of them has a factor.)"""
    weight = load_weight(checkpoint, name, interleaved)
    try:
        return smoothing.weight(checkpoint.config, name, weight)
    except ModelError as error:
        raise ModelError(f"{error}; another --alpha, or --no-smooth, may do") from None


# ----------------------------------------------------------------------------
# Choosing alpha


def rounded(x: np.ndarray, group_size: int) -> np.ndarray:
    """x as its codes and scales stand for it, quantized by row (group_size 0) or by group. May overwrite x.

    The values of dequantize(quantize(x)), without making the codes: a search rounds every weight two dozen times.
    """
    groups = x.reshape(len(x), -1, group_size or x.shape[-1])
    amax = np.maximum(groups.max(axis=-1), -groups.min(axis=-1))
    with np.errstate(divide="ignore", over="ignore"):
        inv = F32(127) / amax
    usable = np.isfinite(inv)
    groups *= np.where(usable, inv, F32(0))[..., None]
    np.rint(groups, out=groups)
    groups *= np.where(usable, amax / F32(127), F32(0))[..., None]
    return groups.reshape(x.shape)


def find_smoothing(
    checkpoint: Source,
    samples: list[np.ndarray],
    alpha: float | str | None = 0.5,
    group_size: int = 0,
    static: bool = False,
    progress: bool = False,
) -> ChannelScaling:
    """Factors for every place of every layer, and the largest activation that each then sees.

    alpha: in 0..1; "auto": for each place of each layer whichever of ALPHAS, or no smoothing, gives the smallest
    error in the products with weights and activations quantized as group_size and static say; None: no smoothing.
    """
    config, found = checkpoint.config, ChannelScaling()
    for weights, seen in observe(checkpoint, samples, SEARCH_ROWS if alpha == "auto" else 0, progress):
        for name, inputs in seen.items():
            s = None
            if name != "norm" and alpha is not None:
                found.strength[name], s = choose(config, name, inputs, weights, alpha, group_size, static)
            if s is not None:
                found.s[name] = s
            found.largest[name] = largest_scaled(config, name.split(".", 2)[-1], inputs.largest, s)
        del weights  # before the next layer's are read
    return found


def choose(
    config: Config, name: str, inputs: Inputs, weights: Fp32, alpha: float | str, group_size: int, static: bool
) -> tuple[float | None, np.ndarray | None]:
    """Alpha and factors of one place; None, None if no smoothing is best. Arguments as of `find_smoothing`."""
    place, matrices = name.split(".", 2)[-1], [weights.vector(consumer) for consumer in consumers(config, name)]
    w_max = share(config, place, np.max([np.maximum(w.max(axis=0), -w.min(axis=0)) for w in matrices], axis=0))
    x_max = share(config, place, inputs.largest)
    if alpha != "auto":
        return float(alpha), factors(x_max, w_max, float(alpha))

    def round_x(x: np.ndarray, s: np.ndarray) -> np.ndarray:
        if not static:
            return rounded(x, group_size)
        return dequantize(quantize_static(x, static_scale((inputs.largest.astype(F64) / s).max())))

    tried = [factors(x_max, w_max, alpha) for alpha in ALPHAS]
    unsmoothed = np.ones(len(inputs.largest), F32)
    candidates = [unsmoothed, *(spread(config, place, s) for s in tried)]
    with np.errstate(over="ignore", invalid="ignore"):
        errors = np.array(search(inputs.rows, matrices, candidates, round_x, partial(rounded, group_size=group_size)))
    best = int(np.argmin(np.where(np.isfinite(errors), errors, np.inf)))
    return (None, None) if best == 0 else (ALPHAS[best - 1], tried[best - 1])
