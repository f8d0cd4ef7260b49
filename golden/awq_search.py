"""AWQ's search (Lin et al. 2023, arXiv 2306.00978): which weights matter, the activations tell.

Rounding a weight to int4 costs the output in proportion to the activation that it meets. A few channels of the
activations are large, and their weights are the ones to protect. As with SmoothQuant (golden/smooth.py) channel j of
the input is divided by s_j, and the weights of input channel j are multiplied by it (golden/channel_scaling.py). But
here the weights are to be hard, not easy: with a larger s_j, the weights of channel j take up more of their group's
range and lose less of themselves.

    s_j = mean|X_j|^ratio / sqrt(largest * smallest of these)

The means are over calibration text. One ratio for each place, of 0, 0.05, ... 0.95, is chosen by trying them: the
error is that of the outputs of the matrices that read the place, on rows of the calibration text. Ratio 0 is s = 1.

Then each group's range is tried at 1, 0.95, ... 0.5 times its width, and shrunk at one end more than at the other.
Weights outside are clipped; the others get a finer grid. What counts is the error of the outputs on the whole
calibration text, that of the other groups of the row included: errors of groups may cancel.
"""

from functools import partial

import numpy as np

from formats.checkpoint import Config
from golden.awq import Int4, grid, group_range, quantize, steps_from_zero
from golden.calibration import Inputs
from golden.channel_scaling import CONSUMERS, ChannelScaling, input_of, largest_scaled, search, share, spread
from golden.forward import F32, F64, Fp32

RATIOS = tuple(i / 20 for i in range(20))
EVENLY = tuple((1 - i / 20, 1 - i / 20) for i in range(11))
SHRINKS = (*EVENLY, *((1 - i / 10, 1 - j / 10) for i in range(5) for j in range(5) if i != j))  # of low and of high
SWEEPS = 2
SEARCH_ROWS = 256  # of calibration text
SEARCH_OUTPUTS = 1024  # rows of each matrix that a ratio is judged by
CLIP_ROWS = 512  # rows of a matrix whose groups are tried at a time: they stay in the cache


# ----------------------------------------------------------------------------
# Scales


def factors(mean: np.ndarray, ratio: float) -> np.ndarray:
    """s of each channel, fp32, from mean|x|; 1 for a channel whose input is always 0."""
    used = mean > 0
    if not used.any():
        return np.ones(len(mean), F32)
    s = np.where(used, mean, 1).astype(F64) ** ratio
    s /= np.sqrt(s[used].max() * s[used].min())
    return np.where(used, np.maximum(s, 1e-4), 1).astype(F32)


def rounded(weight: np.ndarray, group_size: int) -> np.ndarray:
    """What a matrix (n_out, n_in) fp32 stands for after plain rounding, before the product is rounded to fp16."""
    groups = weight.reshape(len(weight), -1, group_size)
    scale, zero = grid(*group_range(weight, group_size))
    out = steps_from_zero(groups, scale, zero)
    out *= scale.astype(F32)[..., None]
    return out.reshape(weight.shape)


def spaced(weight: np.ndarray, n: int) -> np.ndarray:
    """At most n rows of a matrix, evenly spread."""
    return weight if len(weight) <= n else weight[np.linspace(0, len(weight) - 1, n).round().astype(int)]


def choose_scale(
    config: Config, name: str, inputs: Inputs, weights: Fp32, group_size: int
) -> tuple[float, np.ndarray | None]:
    """Ratio and factors of one place, `layers.N.PLACE`; 0 and None if no scaling is best."""
    place = name.split(".", 2)[-1]
    layer = name.removesuffix(place)
    matrices = [spaced(weights.vector(layer + consumer), SEARCH_OUTPUTS) for consumer in CONSUMERS[place]]
    mean = share(config, place, inputs.mean)
    tried = [factors(mean, ratio) for ratio in RATIOS]
    candidates = [spread(config, place, s) for s in tried]
    with np.errstate(over="ignore", invalid="ignore"):
        errors = np.array(
            search(inputs.rows, matrices, candidates, lambda x, _s: x, partial(rounded, group_size=group_size))
        )
    best = int(np.argmin(np.where(np.isfinite(errors), errors, np.inf)))
    return RATIOS[best], (tried[best] if best else None)


# ----------------------------------------------------------------------------
# Clipping


def clip(
    weight: np.ndarray, products: np.ndarray, group_size: int, s: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """The range of each group, (n_out, n_in / group_size) each: low and high shrunk by one of SHRINKS.

    weight: (n_out, n_in) fp32, scaled by s, (n_in,), if there is one; products: X^T X, (n_in, n_in) fp64, of the inputs
    before scaling. With d = (Q(w) - w) / s the squared error of a row's outputs is d X^T X d^T, however many tokens
    there were. Each range in turn is the one with the smallest error of the whole row, all other groups as they are, so
    that the errors of groups make up for each other; SWEEPS times through the row. It is computed in fp64, so that the
    choice is the same everywhere.
    """
    low, high = group_range(weight, group_size)
    best_low, best_high = low.copy(), high.copy()
    unscale = np.ones(weight.shape[1]) if s is None else 1 / s.astype(F64)
    for start in range(0, len(weight), CLIP_ROWS):
        rows = slice(start, start + CLIP_ROWS)
        groups = weight[rows].reshape(*low[rows].shape, group_size)

        def loss(g: int, low: np.ndarray, high: np.ndarray, groups: np.ndarray = groups) -> np.ndarray:
            """d of a group's weights on the grids of low to high, (rows, group_size) fp64."""
            scale, zero = grid(low, high)
            d = steps_from_zero(groups[:, g], scale, zero)
            with np.errstate(over="ignore", invalid="ignore"):  # `quantize` refuses weights beyond fp16
                d *= scale.astype(F32)[:, None]
                return (d - groups[:, g]) * unscale[g * group_size : (g + 1) * group_size]

        n_groups = groups.shape[1]
        d = np.concatenate([loss(g, low[rows, g], high[rows, g]) for g in range(n_groups)], axis=1)
        for g in list(range(n_groups)) * SWEEPS:
            columns = slice(g * group_size, (g + 1) * group_size)
            own = products[columns, columns]
            with np.errstate(over="ignore", invalid="ignore"):
                others = 2 * (d @ products[columns].T - d[:, columns] @ own)
            smallest, best = np.full(len(d), np.inf), d[:, columns].copy()
            for shrink_low, shrink_high in SHRINKS:
                trial_low, trial_high = low[rows, g] * F32(shrink_low), high[rows, g] * F32(shrink_high)
                trial = loss(g, trial_low, trial_high)
                with np.errstate(over="ignore", invalid="ignore"):
                    error = np.einsum("ij,ij->i", trial @ own + others, trial)
                better = error < smallest
                smallest[better], best[better] = error[better], trial[better]
                best_low[rows, g][better], best_high[rows, g][better] = trial_low[better], trial_high[better]
            d[:, columns] = best
    return best_low, best_high


def error_of_outputs(weight: np.ndarray, matrix: Int4, products: np.ndarray, s: np.ndarray | None = None) -> float:
    """|X (Q(w) - w)| / |X w| of all outputs on the calibration text, by norm. Arguments as of `clip`."""
    unscale = 1 if s is None else 1 / s.astype(F64)
    steps = matrix.codes.reshape(*matrix.zeros.shape, -1) - matrix.zeros[..., None].astype(F32)
    d = ((steps * matrix.scales[..., None].astype(F32)).reshape(weight.shape) - weight) * unscale
    w = weight * unscale
    error, size = (float(np.einsum("ij,ij->", t @ products, t)) for t in (d, w))
    return float(np.sqrt(max(error, 0) / size)) if size > 0 else 0.0


# ----------------------------------------------------------------------------
# A layer


def choose_scales(
    config: Config, layer: int, inputs: dict[str, Inputs], weights: Fp32, group_size: int, found: ChannelScaling
) -> None:
    """Adds factors, ratios and largest scaled activations of the four places of a layer to `found`."""
    for place in CONSUMERS:
        name = f"layers.{layer}.{place}"
        found.strength[name], s = choose_scale(config, name, inputs[name], weights, group_size)
        if s is not None:
            found.s[name] = s
        found.largest[name] = largest_scaled(config, place, inputs[name].largest, s)


def quantize_scaled(
    config: Config, name: str, weight: np.ndarray, inputs: dict[str, Inputs], found: ChannelScaling, group_size: int
) -> Int4:
    """A scaled matrix, (n_out, n_in) fp32, on the best grids for its inputs. `found` gets the error of its outputs."""
    if not inputs:
        return quantize(weight, *group_range(weight, group_size))
    at = input_of(name)
    s = spread(config, at.split(".", 2)[-1], found.s[at]) if at in found.s else None
    products = inputs[at].products
    matrix = quantize(weight, *clip(weight, products, group_size, s))
    found.errors[name] = error_of_outputs(weight, matrix, products, s)
    return matrix
