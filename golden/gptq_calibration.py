"""GPTQ of a whole model: every place's inputs come from the layers before it as they are quantized already.

The calibration text goes through the model layer by layer. In a layer, the four places come one after the other: the
inputs of q, k and v; those of o, with the quantized q, k and v; those of gate and up; those of down. So each matrix is
quantized for the inputs that it will have. One layer's weights are in memory at a time. golden/gptq_experts.py has
layers with experts.
"""

from collections.abc import Callable, Iterator
from copy import copy

import numpy as np

from formats.checkpoint import Config, ModelError
from formats.source import Source
from golden.channel_scaling import CONSUMERS
from golden.forward import (
    F64,
    Fp32,
    Step,
    attention_block,
    embed,
    feed_forward_block,
    ignore,
    last_norm,
    rope_table,
)
from golden.gptq import Matrix, stands_for
from golden.gptq_experts import quantize_experts


class Partly(Fp32):
    """Weights as stored, but for those that are quantized already."""

    def replace(self, name: str, weight: np.ndarray) -> None:
        """From here on the matrix is what its quantized form stands for, (n_out, n_in) fp32."""
        self._weights[name] = weight

    def changed(self, weights: dict[str, np.ndarray]) -> "Partly":
        """A copy in which these are quantized, too."""
        copied = copy(self)
        copied._weights = self._weights | weights
        return copied


class ReachedError(Exception):
    """A pass has come to the place that is looked at."""


def _hessian_until(place: str, run: Callable[[np.ndarray, Step], object], states: list[np.ndarray]) -> np.ndarray:
    """H = X^T X, (n_in, n_in) fp64, of what a place reads in all samples. run(x, step): its block."""
    total: np.ndarray | None = None

    def step(name: str, value: np.ndarray) -> np.ndarray:
        nonlocal total
        if name != place:
            return value
        if not np.isfinite(value).all():
            raise ModelError(f"calibration met a value that is not finite at {name}")
        x = value.astype(F64)
        total = x.T @ x if total is None else total + x.T @ x
        raise ReachedError

    for x in states:
        try:
            run(x, step)
        except ReachedError:
            continue
    if total is None:
        raise ValueError(f"no sample reached {place}")
    return total


Quantize = Callable[[str, np.ndarray, np.ndarray], Matrix]


def quantize_model(
    checkpoint: Source, config: Config, samples: list[np.ndarray], quantize: Quantize
) -> Iterator[tuple[str, Matrix | np.ndarray]]:
    """Every matrix of the layers, by step name, quantized; at the end `norm` with H of the classifier's inputs.

    samples: token ids. quantize(name, weight (n_out, n_in) fp32, H (n_in, n_in) fp64) -> Matrix. config: of the file.
    The last pair's second member is H, an array. For layers with experts see `quantize_experts`.
    """
    table = Fp32(checkpoint, interleaved=True)
    states = [embed(config, table, sample) for sample in samples]
    del table
    for i in range(config.n_layers):
        layer, weights = f"layers.{i}.", Partly(checkpoint, interleaved=True)

        def attend(x: np.ndarray, step: Step, layer: str = layer, weights: Partly = weights) -> np.ndarray:
            rotation = rope_table(config, np.arange(len(x)))
            return attention_block(config, weights, layer, x, rotation, step)

        def feed_forward(x: np.ndarray, step: Step, layer: str = layer, weights: Partly = weights) -> np.ndarray:
            return feed_forward_block(config, weights, layer, x, step)

        blocks = [(attend, ("attn.norm", "attn.mix")), (feed_forward, ("ffn.norm", "ffn.swiglu"))]
        for block, places in blocks[:1] if config.has_experts(i) else blocks:
            for place in places:
                hessian = _hessian_until(layer + place, block, states)
                for consumer in CONSUMERS[place]:
                    matrix = quantize(layer + consumer, weights.vector(layer + consumer), hessian)
                    weights.replace(layer + consumer, stands_for(matrix))
                    yield layer + consumer, matrix
            for j, x in enumerate(states):
                states[j] = block(x, ignore)
        if config.has_experts(i):
            ends = np.cumsum([len(x) for x in states])[:-1]
            x = yield from quantize_experts(config, weights, layer, np.concatenate(states), quantize)
            states = np.split(x, ends)
        del weights  # before the next layer's are read
    last = Fp32(checkpoint)
    total = np.zeros((config.dim, config.dim))
    for x in states:
        normed = last_norm(config, last, x).astype(F64)
        total += normed.T @ normed
    yield "norm", total
