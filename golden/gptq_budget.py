"""Bits by measured loss: which format each kind of matrix gets, for a file of a given size.

Matrices differ in what rounding them costs the model. Here it is measured: one kind of matrix at a time is quantized,
in all layers, and the rest stays as it is. The loss is the mean KL divergence, in nats, of the next token's
probabilities from the unquantized model's, on samples that gave no H. Losses of several kinds are taken to add up.
`choose` then takes the formats whose losses have the smallest sum within the budget: kind by kind, of the combinations
so far all that no other beats in both bytes and loss.
"""

import math
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from formats.checkpoint import Config, ModelError
from formats.gptq import KINDS, GptqLayout, MatrixFormat, gptq_tensors, matrix_tensors
from formats.source import Source
from formats.tensors import matrix_shapes
from golden.channel_scaling import CONSUMERS
from golden.forward import F64, Fp32, embed, ignore, last_norm, rotated
from golden.gptq import Matrix, stands_for
from golden.gptq_matching import InSinglePrecision, blocks, inputs_at

ROWS = 128  # of the logits at a time

Quantize = Callable[[str, np.ndarray, np.ndarray, MatrixFormat], Matrix]  # name, weight, H, format
Losses = dict[str, dict[MatrixFormat, float]]  # by kind


def kind_of(name: str) -> str:
    """`layers.0.attn.q_proj` -> `q_proj`."""
    return name.rsplit(".", 1)[-1]


def kinds_of(config: Config) -> list[str]:
    """The kinds of matrices that a file has."""
    return [kind for kind in KINDS if kind != "classifier" or not config.tied]


def final_inputs(
    checkpoint: Source, config: Config, samples: Sequence[np.ndarray], replaced: dict[str, np.ndarray]
) -> np.ndarray:
    """The classifier's inputs in all samples, (tokens, dim) fp32. replaced: matrices in place of the model's own."""
    last = Fp32(checkpoint)
    table = replaced["embed"] if "embed" in replaced else last.vector("embed")
    states = [rotated(config, last, table[sample]) for sample in samples]
    for i in range(config.n_layers):
        weights = InSinglePrecision(checkpoint, interleaved=True)
        for name, weight in replaced.items():
            if name.startswith(f"layers.{i}."):
                weights.replace(name, weight)
        for block, _ in blocks(config, f"layers.{i}."):
            states = [block(weights, x, ignore) for x in states]
    return np.concatenate([last_norm(config, last, x) for x in states])


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """log of the probabilities, fp64, along the last axis."""
    z = logits.astype(F64) - logits.max(axis=-1, keepdims=True)
    return z - np.log(np.exp(z).sum(axis=-1, keepdims=True))


def divergence(x: np.ndarray, classifier: np.ndarray, x_ref: np.ndarray, classifier_ref: np.ndarray) -> float:
    """The mean KL divergence of classifier @ x from classifier_ref @ x_ref. x, x_ref: (tokens, dim)."""
    total = 0.0
    for start in range(0, len(x), ROWS):
        at = slice(start, start + ROWS)
        p, q = log_softmax(x_ref[at] @ classifier_ref.T), log_softmax(x[at] @ classifier.T)
        total += float((np.exp(p) * (p - q)).sum())
    return total / len(x)


def quantized_kinds(
    checkpoint: Source, config: Config, samples: list[np.ndarray], forms: dict[str, list[MatrixFormat]],
    quantize: Quantize,
) -> Iterator[tuple[str, MatrixFormat, Matrix]]:  # fmt: skip
    """Every matrix in each of its kind's formats, for its inputs in the unquantized model: name, format, matrix."""
    last = Fp32(checkpoint)
    states = [embed(config, last, sample) for sample in samples]
    for i in range(config.n_layers):
        layer, weights = f"layers.{i}.", InSinglePrecision(checkpoint, interleaved=True)
        for block, places in blocks(config, layer):
            for place in places:
                read = [inputs_at(block, weights, x, layer + place).astype(F64) for x in states]
                hessian = sum(x.T @ x for x in read)
                for consumer in CONSUMERS[place]:
                    name = layer + consumer
                    for form in forms[kind_of(name)]:
                        yield name, form, quantize(name, weights.vector(name), hessian, form)
            states = [block(weights, x, ignore) for x in states]
    read = [last_norm(config, last, x).astype(F64) for x in states]
    hessian = sum(x.T @ x for x in read)
    for name in ("embed",) if config.tied else ("embed", "classifier"):
        for form in forms[name]:
            yield name, form, quantize(name, last.vector(name), hessian, form)


def measure_losses(
    checkpoint: Source,
    config: Config,
    samples: list[np.ndarray],
    forms: dict[str, list[MatrixFormat]],
    quantize: Quantize,
    tell: Callable[[str], object] = lambda _: None,
) -> Losses:
    """The loss of each kind in each of its formats. samples: the last quarter measures, the others give H.

    All matrices in all formats are held in memory as codes. tell: gets a line for each loss. Raises ModelError if there
    is but one sample.
    """
    n_measured = len(samples) // 4 or 1
    if len(samples) < 2:
        raise ModelError("--budget measures on samples that it does not calibrate on: --samples 2 and up")
    found: dict[tuple[str, MatrixFormat], dict[str, Matrix]] = {}
    for name, form, matrix in quantized_kinds(checkpoint, config, samples[:-n_measured], forms, quantize):
        found.setdefault((kind_of(name), form), {})[name] = matrix
    measured = samples[-n_measured:]
    exact, own = final_inputs(checkpoint, config, measured, {}), Fp32(checkpoint).vector("classifier")
    losses: Losses = {kind: {} for kind in forms}
    for (kind, form), matrices in found.items():
        dense = {name: stands_for(matrix) for name, matrix in matrices.items()}
        x = exact if kind == "classifier" else final_inputs(checkpoint, config, measured, dense)
        classifier = dense.get("embed" if config.tied else "classifier", own)
        losses[kind][form] = divergence(x, classifier, exact, own)
        tell(f"{kind:<10} {losses[kind][form]:.5f} nats  {form}")
    return losses


def choose(config: Config, losses: Losses, bits: float) -> GptqLayout:
    """The layout with the least sum of losses among those of at most `bits` per weight, norms and scales counted.

    Raises ModelError if even the smallest is larger.
    """
    kinds = list(losses)
    n_bytes = {kind: dict.fromkeys(forms, 0) for kind, forms in losses.items()}
    n_weights = 0
    for name, shape in matrix_shapes(config):
        n_weights += math.prod(shape)
        for form in n_bytes[kind_of(name)]:
            n_bytes[kind_of(name)][form] += sum(t.n_bytes for t in matrix_tensors(name, shape, form))
    norms = sum(t.n_bytes for t in gptq_tensors(config, layout_of(config, {k: next(iter(losses[k])) for k in kinds})))
    norms -= sum(n_bytes[k][next(iter(losses[k]))] for k in kinds)
    n_weights += norms // 4
    room = bits * n_weights / 8 - norms
    smallest = sum(min(sizes.values()) for sizes in n_bytes.values())
    if smallest > room:
        fewest = 8 * (smallest + norms) / n_weights
        raise ModelError(f"--budget is {bits:g}, the smallest file has {fewest:.2f} bits per weight")
    found: list[tuple[int, float, tuple[MatrixFormat, ...]]] = [(0, 0.0, ())]  # bytes, loss, formats; fewer bytes first
    for kind in kinds:
        more = [
            (size + n_bytes[kind][form], loss + of_form, (*forms, form))
            for size, loss, forms in found
            for form, of_form in losses[kind].items()
        ]
        found = []
        for combination in sorted(more):
            if not found or combination[1] < found[-1][1]:
                found.append(combination)
    best = [forms for size, _, forms in found if size <= room][-1]
    return layout_of(config, dict(zip(kinds, best, strict=True)))


def layout_of(config: Config, forms: dict[str, MatrixFormat]) -> GptqLayout:
    """The layout of these formats by kind; a tied classifier has the embedding's."""
    return GptqLayout(tuple(forms["embed" if kind == "classifier" and config.tied else kind] for kind in KINDS))
