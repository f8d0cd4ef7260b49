"""GPTQ that also makes up for the error of the layers before.

Plain GPTQ asks each matrix to do with its inputs X~, those of the model as it is quantized so far, what the unquantized
weights would do with them. But the inputs are off already, and so is the sum that o and down add to. Here a matrix is
asked for the *unquantized model's* outputs, as GPTAQ has it (Li et al. 2025, arXiv 2504.02692). With X the inputs of
the unquantized model on the same text and R what is missing from the sum before (0 for all but o and down), the cost

    |X W^T + R - X~ Q^T|^2

is, but for a constant, that of GPTQ for another weight:

    |X~ (W' - Q)^T|^2        W' = W + (W D^T X~ + R^T X~) H^-1,  D = X - X~,  H = X~^T X~

W' is the least-squares fit to what the layer should give. It sees only the calibration text, so H is damped in the
fit. `SHARE` of the correction is taken.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial

import numpy as np

from formats.checkpoint import Config, ModelError
from formats.source import Source
from formats.tensors import matrix_shapes, norm_shapes
from golden.channel_scaling import CONSUMERS
from golden.forward import (
    F32,
    F64,
    Fp32,
    Step,
    attention_block,
    embed,
    feed_forward_block,
    last_norm,
    rope_table,
    rotated,
)
from golden.gptq import Matrix, stands_for
from golden.gptq_calibration import Partly, Quantize, ReachedError
from golden.gptq_quantize import damped
from golden.parallel import in_parallel

SHARE = 1.0  # of the correction W' - W
FIT_DAMPING = 0.05  # of H's mean diagonal, in the fit


class InSinglePrecision(Partly):
    """Products in fp32: calibration needs no more, and takes half the time."""

    @staticmethod
    def linear_with(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
        return x @ weight.T


def layer_weights(checkpoint: Source, config: Config, layer: str) -> InSinglePrecision:
    """Those of one layer, `layers.0.`, read at once and without the model's file: a process can be sent them."""
    names = [name for name, _ in (*norm_shapes(config), *matrix_shapes(config)) if name.startswith(layer)]
    stored = Fp32(checkpoint, interleaved=True)
    return InSinglePrecision(None, interleaved=True).changed({name: stored.vector(name) for name in names})


Block = Callable[[Partly, np.ndarray, Step], np.ndarray]


def _attend(config: Config, layer: str, weights: Partly, x: np.ndarray, step: Step) -> np.ndarray:
    return attention_block(config, weights, layer, x, rope_table(config, np.arange(len(x))), step)


def _feed_forward(config: Config, layer: str, weights: Partly, x: np.ndarray, step: Step) -> np.ndarray:
    return feed_forward_block(config, weights, layer, x, step)


def blocks(config: Config, layer: str) -> Iterator[tuple[Block, tuple[str, str]]]:
    """The two blocks of a layer and the places in each whose inputs quantized matrices read, by step name."""
    yield partial(_attend, config, layer), (layer + "attn.norm", layer + "attn.mix")
    yield partial(_feed_forward, config, layer), (layer + "ffn.norm", layer + "ffn.swiglu")


def _finite(place: str, value: np.ndarray) -> np.ndarray:
    if not np.isfinite(value).all():
        raise ModelError(f"calibration met a value that is not finite at {place}")
    return value


def run_block(
    block: Block, weights: Partly, x: np.ndarray, places: Sequence[str]
) -> tuple[np.ndarray, list[np.ndarray]]:
    """What a block makes of one sample, and what is read at its places on the way, (n, n_in) fp32 each.

    Raises ModelError if that is not finite.
    """
    read: dict[str, np.ndarray] = {}

    def step(name: str, value: np.ndarray) -> np.ndarray:
        read[name] = value
        return value

    return block(weights, x, step), [_finite(place, read[place]) for place in places]


def inputs_at(block: Block, weights: Partly, x: np.ndarray, place: str) -> np.ndarray:
    """What a place reads, (n, n_in) fp32; nothing behind it is computed. Raises ModelError if it is not finite."""
    found = np.empty(0, F32)

    def step(name: str, value: np.ndarray) -> np.ndarray:
        nonlocal found
        if name != place:
            return value
        found = value
        raise ReachedError

    with suppress(ReachedError):
        block(weights, x, step)
    return _finite(place, found)


def quantize_matching(
    checkpoint: Source,
    config: Config,
    samples: list[np.ndarray],
    quantize: Quantize,
    embedding: Callable[[np.ndarray], np.ndarray] | None = None,
    share: float = SHARE,
    n_layers: int | None = None,
) -> Iterator[tuple[str, Matrix]]:
    """As `golden.gptq_calibration.quantize_model`, with W' for W.

    embedding(ids) -> (n, dim) fp32: the quantized model's; None: the unquantized. n_layers: the first ones only.
    """
    table = Fp32(checkpoint, interleaved=True)
    exact = [embed(config, table, sample) for sample in samples]
    states = [rotated(config, table, embedding(sample)) for sample in samples] if embedding else list(exact)
    del table
    for i in range(config.n_layers if n_layers is None else n_layers):
        layer = f"layers.{i}."
        unquantized = layer_weights(checkpoint, config, layer)
        weights = unquantized.changed({})
        for block, places in blocks(config, layer):
            runs = in_parallel([partial(run_block, block, unquantized, x, places) for x in exact])
            for k, place in enumerate(places):
                hessian, toward, missing = 0.0, 0.0, 0.0  # X~^T X~, X~^T D and X~^T R
                found = in_parallel([partial(inputs_at, block, weights, x, place) for x in states])
                for j, (_, wanted) in enumerate(runs):
                    read = found[j].astype(F64)
                    hessian = hessian + read.T @ read
                    toward = toward + read.T @ (wanted[k] - read)
                    missing = missing + read.T @ (exact[j] - states[j])
                inverse = np.linalg.inv(damped(hessian, FIT_DAMPING))
                for consumer in CONSUMERS[place.removeprefix(layer)]:
                    w = weights.vector(layer + consumer)
                    change = w @ toward.T
                    if place == places[1]:  # its product is added to the sum
                        change = change + missing.T
                    fitted = (w + share * (change @ inverse)).astype(F32)
                    matrix = quantize(layer + consumer, fitted, hessian)
                    weights.replace(layer + consumer, stands_for(matrix))
                    yield layer + consumer, matrix
            states = [x for x, _ in in_parallel([partial(run_block, block, weights, x, ()) for x in states])]
            exact = [x for x, _ in runs]
        del unquantized, weights  # before the next layer's are read
    yield "norm", _products(checkpoint, config, states)


def _products(checkpoint: Source, config: Config, states: list[np.ndarray]) -> np.ndarray:
    """H of the classifier's inputs, (dim, dim) fp64, after the last layer."""
    last, total = Fp32(checkpoint), np.zeros((config.dim, config.dim))
    for x in states:
        normed = last_norm(config, last, x).astype(F64)
        total += normed.T @ normed
    return total


def classifier_hessian(checkpoint: Source, config: Config, samples: list[np.ndarray]) -> np.ndarray:
    """H of the classifier's inputs in the unquantized model."""
    table = Fp32(checkpoint, interleaved=True)
    states = [embed(config, table, sample) for sample in samples]
    del table
    for layer in (f"layers.{i}." for i in range(config.n_layers)):
        weights = layer_weights(checkpoint, config, layer)
        for block, _ in blocks(config, layer):
            states = [x for x, _ in in_parallel([partial(run_block, block, weights, x, ()) for x in states])]
    return _products(checkpoint, config, states)
