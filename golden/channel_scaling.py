"""Scaling input channels of weight matrices: what SmoothQuant (golden/smooth.py) and AWQ (golden/awq_search.py) share.

A product does not change if channel j of the input is divided by s_j and the weights of input channel j are multiplied
by it. The division costs nothing at run time: it is folded into whatever computes the input.

    place        folded into            consumers           folding
    attn.norm    the norm's weight      q_proj k_proj v_proj   norm[j] / s[j],  W[:, j] * s[j]
    attn.mix     v_proj's rows          o_proj                 V[j, :] / s[j],  W[:, j] * s[j]
    ffn.norm     the norm's weight      gate_proj up_proj      norm[j] / s[j],  W[:, j] * s[j]
    ffn.swiglu   up_proj's rows         down_proj              U[j, :] / s[j],  W[:, j] * s[j]

attn.mix mixes rows of v, so its channels can be scaled; with GQA the query heads that share a kv head share its s.
swiglu is linear in `up`. The classifier's input is left alone. In a layer with experts, all of them and the router
read ffn.norm; what they compute inside is left alone.

The two schemes differ in how they choose s.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np

from formats.checkpoint import Config, ModelError
from golden.forward import F32, F64

CONSUMERS = {
    "attn.norm": ("attn.q_proj", "attn.k_proj", "attn.v_proj"),
    "attn.mix": ("attn.o_proj",),
    "ffn.norm": ("ffn.gate_proj", "ffn.up_proj"),
    "ffn.swiglu": ("ffn.down_proj",),
}
PLACES = tuple(CONSUMERS)
PLACE_READ_BY = {consumer: place for place, consumers in CONSUMERS.items() for consumer in consumers}
DIVIDED_BY = {"attn.norm": "attn.norm", "attn.v_proj": "attn.mix", "ffn.norm": "ffn.norm", "ffn.up_proj": "ffn.swiglu"}
CHUNK_VALUES = 1 << 18  # weights that are rounded at a time: they stay in the cache


def consumers(config: Config, name: str) -> list[str]:
    """The step names of the matrices that are quantized and read a place, such as `layers.0.attn.norm`."""
    _, layer, place = name.split(".", 2)
    if place == "ffn.norm" and config.moe is not None and config.has_experts(int(layer)):
        experts = range(config.moe.n_experts)
        return [f"layers.{layer}.moe.{e}.{part}" for e in experts for part in ("gate_proj", "up_proj")]
    return [f"layers.{layer}.{part}" for part in CONSUMERS[place]]


def place_read_by(part: str) -> str:
    """The place that a matrix reads, such as `attn.norm` for `attn.q_proj`; empty where it is not scaled."""
    if part.startswith("moe."):  # a router, or an expert's matrix
        return "" if part.endswith("down_proj") else "ffn.norm"
    return PLACE_READ_BY.get(part, "")


def input_of(name: str) -> str:
    """The step that a matrix of a layer reads: `layers.0.attn.q_proj` -> `layers.0.attn.norm`."""
    part = name.split(".", 2)[-1]
    return name.removesuffix(part) + PLACE_READ_BY[part]


# ----------------------------------------------------------------------------
# Factors


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
class ChannelScaling:
    """Factors and what was chosen, by step name: `layers.0.attn.norm`. A place that is missing is left alone."""

    s: dict[str, np.ndarray] = field(default_factory=dict)  # fp32; (kv_dim,) at attn.mix
    # What the factors were made with: SmoothQuant's alpha, None where no smoothing was best; AWQ's ratio.
    strength: dict[str, float | None] = field(default_factory=dict)
    largest: dict[str, float] = field(default_factory=dict)  # calibrated max|x| after scaling, "norm" included
    # AWQ: of each quantized matrix's outputs on the calibration text, by norm, as a share of the outputs.
    errors: dict[str, float] = field(default_factory=dict)

    def weight(self, config: Config, name: str, weight: np.ndarray) -> np.ndarray:
        """The scaled weight of a step, fp32: weight / (s of output channels) * (s of input channels), in fp64."""
        part = name.split(".", 2)[-1]
        layer, place = name.removesuffix(part), place_read_by(part)
        outputs, inputs = self.s.get(layer + DIVIDED_BY.get(part, "-")), self.s.get(layer + place)
        if outputs is None and inputs is None:
            return weight
        out = weight.astype(F64)
        if outputs is not None:
            out /= outputs.astype(F64).reshape(-1, *[1] * (weight.ndim - 1))
        if inputs is not None:
            out *= spread(config, place, inputs).astype(F64)
        if np.abs(out).max() > np.finfo(F32).max:
            raise ModelError(f"smoothing takes {name} beyond fp32")
        return out.astype(F32)


def largest_scaled(config: Config, place: str, largest: np.ndarray, s: np.ndarray | None) -> float:
    """max|x| of a whole place after scaling, an fp32 value."""
    return float((largest if s is None else (largest.astype(F64) / spread(config, place, s)).astype(F32)).max())


# ----------------------------------------------------------------------------
# Choosing factors


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


def describe(scaling: ChannelScaling, verbose: bool = False, what: str = "alpha") -> Iterator[str]:
    """What was chosen: a line per place with median and range over the layers, or a line per layer and place."""
    for place in PLACES:
        chosen = {name: a for name, a in scaling.strength.items() if name.split(".", 2)[-1] == place}
        values = [a for a in chosen.values() if a is not None]
        text = f"median {np.median(values):.2f}, {min(values):.2f} to {max(values):.2f}" if values else "none"
        left = len(chosen) - len(values)
        yield f"{place:<10} {what} {text}" + (f"; {left} of {len(chosen)} layers not smoothed" if left else "")
        if verbose:
            yield from (f"  {name:<22} {'not smoothed' if a is None else f'{a:.2f}'}" for name, a in chosen.items())


def describe_errors(scaling: ChannelScaling, verbose: bool = False) -> Iterator[str]:
    """The errors of outputs: a line per kind of matrix with median and range over the layers, or one per matrix."""
    for part in PLACE_READ_BY:
        found = {name: error for name, error in scaling.errors.items() if name.split(".", 2)[-1] == part}
        if found:
            percent = [100 * error for error in found.values()]
            yield f"{part:<14} error median {np.median(percent):.2f} %, {min(percent):.2f} to {max(percent):.2f}"
        if verbose:
            yield from (f"  {name:<22} {100 * error:.2f} %" for name, error in found.items())
