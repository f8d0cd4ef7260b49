"""SmoothQuant (Xiao et al. 2022, arXiv 2211.10438): what is hard to quantize moves from activations to weights.

A few input channels of a matrix are far larger than the rest, and one scale for the whole row of activations leaves
the rest few codes. A product does not change if channel j of the input is divided by s_j and column j of the weight
multiplied by it. The division costs nothing at run time: it is folded into whatever computes the input.

    place        folded into            consumers           folding
    attn.norm    the norm's weight      q_proj k_proj v_proj   norm[j] / s[j],  W[:, j] * s[j]
    attn.mix     v_proj's rows          o_proj                 V[j, :] / s[j],  W[:, j] * s[j]
    ffn.norm     the norm's weight      gate_proj up_proj      norm[j] / s[j],  W[:, j] * s[j]
    ffn.swiglu   up_proj's rows         down_proj              U[j, :] / s[j],  W[:, j] * s[j]

attn.mix mixes rows of v, so its channels can be scaled; with GQA the query heads that share a kv head share its s.
swiglu is linear in `up`. The classifier's input is left alone.

s_j = max|X_j|^alpha / max|W_j|^(1 - alpha), the maxima over calibration text and over all consumers' rows.
"""

import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path

import numpy as np
from tqdm import tqdm

from golden.checkpoint import Checkpoint, Config, ModelError
from golden.forward import F32, F64, Fp32, forward_layer, load_weight, rmsnorm, rope_table
from golden.perplexity import encode, windows
from golden.q8 import dequantize
from golden.w8a8 import quantize_static, static_scale

CONSUMERS = {
    "attn.norm": ("attn.q_proj", "attn.k_proj", "attn.v_proj"),
    "attn.mix": ("attn.o_proj",),
    "ffn.norm": ("ffn.gate_proj", "ffn.up_proj"),
    "ffn.swiglu": ("ffn.down_proj",),
}
PLACES = tuple(CONSUMERS)
PLACE_READ_BY = {consumer: place for place, consumers in CONSUMERS.items() for consumer in consumers}
DIVIDED_BY = {"attn.norm": "attn.norm", "attn.v_proj": "attn.mix", "ffn.norm": "ffn.norm", "ffn.up_proj": "ffn.swiglu"}

SMALLEST = 1e-5  # maxima and factors are kept from going below
ALPHAS = tuple(i / 20 for i in range(21))  # what `auto` tries
SEARCH_ROWS = 256  # and on how many rows of calibration text
CHUNK_VALUES = 1 << 18  # weights that are rounded at a time: they stay in the cache


# ----------------------------------------------------------------------------
# Calibration


def calibration_samples(hf_dir: Path, config: Config, text: str, n_samples: int, seq_len: int) -> list[np.ndarray]:
    """Up to n_samples pieces of the text, each of at most seq_len ids, the model's first token in front if it has one.

    Raises ModelError if there is no tokenizer or no text; warns if the text is too short for so many.
    """
    if n_samples < 1:
        raise ModelError(f"--samples is {n_samples}, expected 1 or more")
    if not 2 <= seq_len <= config.max_seq_len:
        raise ModelError(f"--seq-len is {seq_len}, expected 2 to the model's {config.max_seq_len}")
    path = Path(hf_dir) / "tokenizer.json"
    if not path.exists():
        raise ModelError(f"{path}: no such file, and calibration needs the model's tokenizer")
    try:
        ids, bos = encode(hf_dir, text)
    except Exception as error:  # tokenizers raises nothing more specific
        raise ModelError(f"{path}: {error}") from None
    if not ids:
        raise ModelError("the calibration text is empty")
    if max(ids) >= config.vocab_size:
        raise ModelError(f"{path}: gives id {max(ids)}, vocab_size is {config.vocab_size}")
    samples = list(windows(ids, bos, seq_len))[:n_samples]
    found = sum(len(sample) for sample in samples)
    if found < n_samples * seq_len:
        warnings.warn(
            f"the calibration text gives {found} ids, {n_samples} samples of {seq_len} would take "
            f"{n_samples * seq_len}; going on with what there is",
            stacklevel=2,
        )
    return samples


@dataclass
class Inputs:
    """What calibration saw at one place, fp32. largest, mean: (width,), of each channel's |x|; rows: some rows of x."""

    largest: np.ndarray
    mean: np.ndarray
    rows: np.ndarray


class Observer:
    """A step that keeps each channel's maximum and mean magnitude, and some rows, of what quantized matrices read."""

    def __init__(self) -> None:
        self._largest: dict[str, np.ndarray] = {}
        self._sum: dict[str, np.ndarray] = {}
        self._count: dict[str, int] = {}
        self._rows: dict[str, list[np.ndarray]] = {}
        self.picked = np.zeros(0, int)  # which rows of the current sample to keep

    def __call__(self, name: str, value: np.ndarray) -> np.ndarray:
        if name == "norm" or name.split(".", 2)[-1] in PLACES:
            magnitude = np.abs(value)
            largest = magnitude.max(axis=0)
            if not np.isfinite(largest).all():
                raise ModelError(f"calibration met a value that is not finite at {name}")
            self._largest[name] = np.maximum(self._largest.get(name, F32(0)), largest)
            self._sum[name] = self._sum.get(name, F64(0)) + magnitude.sum(axis=0, dtype=F64)
            self._count[name] = self._count.get(name, 0) + len(value)
            self._rows.setdefault(name, []).append(value[self.picked])
        return value

    def inputs(self) -> dict[str, Inputs]:
        """What was seen since the last call, by step name."""
        seen = {
            name: Inputs(largest, (self._sum[name] / self._count[name]).astype(F32), np.concatenate(self._rows[name]))
            for name, largest in self._largest.items()
        }
        self._largest, self._sum, self._count, self._rows = {}, {}, {}, {}
        return seen


def observe(
    checkpoint: Checkpoint, samples: list[np.ndarray], n_rows: int = 0, progress: bool = False
) -> Iterator[tuple[Fp32, dict[str, Inputs]]]:
    """The unquantized forward pass over all samples, one layer's weights in memory at a time if the caller keeps none.

    After each layer: its weights, and what its four places saw. At the end the same for the final norm. n_rows: rows
    to keep of each place, spread evenly over the samples.
    """
    config, observer = checkpoint.config, Observer()
    total = sum(len(sample) for sample in samples)
    kept = np.unique(np.linspace(0, total - 1, min(n_rows, total)).round().astype(int))
    starts = np.cumsum([0, *(len(sample) for sample in samples)])
    picked = [kept[(kept >= a) & (kept < b)] - a for a, b in pairwise(starts)]

    table = Fp32(checkpoint)
    states = [table.embedding(sample) for sample in samples]
    del table
    with tqdm(total=config.n_layers * total, unit="token", unit_scale=True, desc="calibrating",
              disable=not progress, mininterval=0.5) as bar:  # fmt: skip
        for i in range(config.n_layers):
            weights = Fp32(checkpoint)
            for j, x in enumerate(states):
                observer.picked = picked[j]
                states[j] = forward_layer(config, weights, i, x, rope_table(config, np.arange(len(x))), observer)
                bar.update(len(x))
            yield weights, observer.inputs()
            del weights  # before the next layer's are read
        last = Fp32(checkpoint)
        for j, x in enumerate(states):
            observer.picked = picked[j]
            observer("norm", rmsnorm(x, last.vector("norm"), config.norm_eps))
        yield last, observer.inputs()


# ----------------------------------------------------------------------------
# Factors


def factors(x_max: np.ndarray, w_max: np.ndarray, alpha: float) -> np.ndarray:
    """s of each channel, fp32, from the maxima of input and weights; 1 for a channel whose input is always 0."""
    x, w = np.maximum(x_max.astype(F64), SMALLEST), np.maximum(w_max.astype(F64), SMALLEST)
    s = np.maximum(x**alpha / w ** (1 - alpha), SMALLEST)
    return np.where(x_max == 0, 1, s).astype(F32)


def share(config: Config, place: str, largest: np.ndarray) -> np.ndarray:
    """The maximum over the channels that have to share a factor: at attn.mix, (H * head_dim,) -> (G * head_dim,)."""
    if place != "attn.mix":
        return largest
    return largest.reshape(config.n_kv_heads, -1, config.head_dim).max(axis=1).ravel()


def spread(config: Config, place: str, s: np.ndarray) -> np.ndarray:
    """The factor of every input channel: at attn.mix, (G * head_dim,) -> (H * head_dim,), otherwise s itself."""
    if place != "attn.mix":
        return s
    per_head = s.reshape(config.n_kv_heads, 1, config.head_dim)
    return np.repeat(per_head, config.n_heads // config.n_kv_heads, axis=1).ravel()


@dataclass
class Smoothing:
    """Factors and what was chosen, by step name: `layers.0.attn.norm`. A place that is missing is left alone."""

    s: dict[str, np.ndarray] = field(default_factory=dict)  # fp32; (kv_dim,) at attn.mix
    alphas: dict[str, float | None] = field(default_factory=dict)  # None: no smoothing was best. AWQ: the ratios
    largest: dict[str, float] = field(default_factory=dict)  # calibrated max|x| after smoothing, "norm" included

    def weight(self, config: Config, name: str, weight: np.ndarray) -> np.ndarray:
        """The smoothed weight of a step, fp32: weight / (s of its rows) * (s of its columns) in fp64."""
        part = name.split(".", 2)[-1]
        layer, place = name.removesuffix(part), PLACE_READ_BY.get(part, "")
        rows, columns = self.s.get(layer + DIVIDED_BY.get(part, "-")), self.s.get(layer + place)
        if rows is None and columns is None:
            return weight
        out = weight.astype(F64)
        if rows is not None:
            out /= rows.astype(F64).reshape(-1, *[1] * (weight.ndim - 1))
        if columns is not None:
            out *= spread(config, place, columns).astype(F64)
        if np.abs(out).max() > np.finfo(F32).max:
            raise ModelError(f"smoothing takes {name} beyond fp32")
        return out.astype(F32)


class Smoothed(Fp32):
    """The smoothed model without quantization: up to rounding, it computes what the model itself does."""

    def __init__(self, checkpoint: Checkpoint, smoothing: Smoothing, interleaved: bool = False):
        super().__init__(checkpoint, interleaved)
        self._smoothing = smoothing

    def load(self, name: str) -> np.ndarray:
        return load_smoothed(self._checkpoint, name, self._smoothing, self.interleaved)


def load_smoothed(checkpoint: Checkpoint, name: str, smoothing: Smoothing, interleaved: bool) -> np.ndarray:
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


def search(
    x: np.ndarray,
    weights: list[np.ndarray],
    candidates: list[np.ndarray],
    round_x: Callable[[np.ndarray, np.ndarray], np.ndarray],
    round_w: Callable[[np.ndarray], np.ndarray],
) -> list[float]:
    """For each candidate s, sum |Q(x / s) Q(W s)^T - x W^T|^2 over the rows x (n, k) and the weights (m, k).

    round_x(x / s, s) rounds activations, round_w(W s) weights. Products are in fp32, the sum of squares in fp64.
    """
    errors = [0.0] * len(candidates)
    inputs = [round_x(x / s, s) for s in candidates]
    for weight in weights:
        rows = max(1, CHUNK_VALUES // weight.shape[1])
        for start in range(0, len(weight), rows):
            chunk = weight[start : start + rows]
            exact = x @ chunk.T
            for i, s in enumerate(candidates):
                difference = inputs[i] @ round_w(chunk * s).T - exact
                errors[i] += float(np.square(difference, dtype=F64).sum())
    return errors


def find_smoothing(
    checkpoint: Checkpoint,
    samples: list[np.ndarray],
    alpha: float | str | None = 0.5,
    group_size: int = 0,
    static: bool = False,
    progress: bool = False,
) -> Smoothing:
    """Factors for every place of every layer, and the largest activation that each then sees.

    alpha: in 0..1; "auto": for each place of each layer whichever of ALPHAS, or no smoothing, gives the smallest
    error in the products with weights and activations quantized as group_size and static say; None: no smoothing.
    """
    config, found = checkpoint.config, Smoothing()
    for weights, seen in observe(checkpoint, samples, SEARCH_ROWS if alpha == "auto" else 0, progress):
        for name, inputs in seen.items():
            s = None
            if name != "norm" and alpha is not None:
                found.alphas[name], s = choose(config, name, inputs, weights, alpha, group_size, static)
            if s is not None:
                found.s[name] = s
            found.largest[name] = largest_smoothed(config, name.split(".", 2)[-1], inputs.largest, s)
        del weights  # before the next layer's are read
    return found


def largest_smoothed(config: Config, place: str, largest: np.ndarray, s: np.ndarray | None) -> float:
    """max|x| of a whole place after smoothing, an fp32 value."""
    return float((largest if s is None else (largest.astype(F64) / spread(config, place, s)).astype(F32)).max())


def choose(
    config: Config, name: str, inputs: Inputs, weights: Fp32, alpha: float | str, group_size: int, static: bool
) -> tuple[float | None, np.ndarray | None]:
    """Alpha and factors of one place; None, None if no smoothing is best. Arguments as of `find_smoothing`."""
    layer, place = name.removesuffix(name.split(".", 2)[-1]), name.split(".", 2)[-1]
    matrices = [weights.vector(layer + consumer) for consumer in CONSUMERS[place]]
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


def describe(smoothing: Smoothing, verbose: bool = False, what: str = "alpha") -> Iterator[str]:
    """What was chosen: a line a place with median and range over the layers, or a line a layer and place."""
    for place in PLACES:
        chosen = {name: a for name, a in smoothing.alphas.items() if name.split(".", 2)[-1] == place}
        values = [a for a in chosen.values() if a is not None]
        text = f"median {np.median(values):.2f}, {min(values):.2f} to {max(values):.2f}" if values else "none"
        left = len(chosen) - len(values)
        yield f"{place:<10} {what} {text}" + (f"; {left} of {len(chosen)} layers not smoothed" if left else "")
        if verbose:
            yield from (f"  {name:<22} {'not smoothed' if a is None else f'{a:.2f}'}" for name, a in chosen.items())
