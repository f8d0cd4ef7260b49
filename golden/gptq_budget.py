"""Bits by measured loss: which format each kind of matrix gets, for a file of a given size.

Matrices differ in what rounding them costs the model. Here it is measured: one kind of matrix at a time is quantized,
in all layers, and the rest stays as it is. The loss is the mean KL divergence, in nats, of the next token's
probabilities from the unquantized model's, on samples that gave no H. Losses of several kinds are taken to add up.
`choose` then takes the formats whose losses have the smallest sum within the budget: kind by kind, of the combinations
so far all that no other beats in both bytes and loss.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
from tqdm import tqdm

from formats.checkpoint import Config, ModelError
from formats.gptq import KINDS, GptqLayout, MatrixFormat, gptq_tensors, matrix_tensors
from formats.source import Source
from formats.tensors import matrix_shapes
from golden.channel_scaling import CONSUMERS
from golden.forward import F64, Fp32, embed, ignore, last_norm, rotated
from golden.gptq import Matrix, stands_for
from golden.gptq_calibration import Partly
from golden.gptq_matching import Block, blocks, classifier_hessian, layer_weights, run_block
from golden.parallel import in_parallel

ROWS = 128  # of the logits at a time

# Matrices by name, their H, formats by name: the name and the matrix of each
Quantize = Callable[[dict[str, np.ndarray], np.ndarray, dict[str, list[MatrixFormat]]], list[tuple[str, Matrix]]]
Losses = dict[str, dict[MatrixFormat, float]]  # by kind
Candidate = tuple[str, MatrixFormat]  # one kind of matrix in one format, in all layers; all else is not quantized


def kind_of(name: str) -> str:
    """`layers.0.attn.q_proj` -> `q_proj`."""
    return name.rsplit(".", 1)[-1]


def kinds_of(config: Config) -> list[str]:
    """The kinds of matrices that a file has."""
    return [kind for kind in KINDS if kind != "classifier" or not config.tied]


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """log of the probabilities, fp64, along the last axis."""
    z = logits.astype(F64) - logits.max(axis=-1, keepdims=True)
    return z - np.log(np.exp(z).sum(axis=-1, keepdims=True))


def sums(inputs: Sequence[np.ndarray], classifier: np.ndarray, x_ref: np.ndarray, classifier_ref: np.ndarray) -> list:
    """`divergences` of so few tokens that their logits fit into memory, summed over them."""
    log_p = log_softmax(x_ref @ classifier_ref.T)
    p = np.exp(log_p)
    return [float((p * (log_p - log_softmax(x @ classifier.T))).sum()) for x in inputs]


def divergences(
    inputs: Sequence[np.ndarray], classifier: np.ndarray, x_ref: np.ndarray, classifier_ref: np.ndarray
) -> np.ndarray:
    """The mean KL divergence of classifier @ x from classifier_ref @ x_ref, of each x of inputs, all (tokens, dim)."""
    rows = [slice(start, start + ROWS) for start in range(0, len(x_ref), ROWS)]
    calls = [partial(sums, [x[at] for x in inputs], classifier, x_ref[at], classifier_ref) for at in rows]
    return np.sum(in_parallel(calls), axis=0) / len(x_ref)


def run_candidate(
    block: Block, weights: Partly, replaced: dict[str, Matrix], states: list[np.ndarray]
) -> list[np.ndarray]:
    """What a block makes of each sample with some of its matrices quantized."""
    weights = weights.changed({name: stands_for(matrix) for name, matrix in replaced.items()})
    return [block(weights, x, ignore) for x in states]


def measure_losses(
    checkpoint: Source,
    config: Config,
    samples: list[np.ndarray],
    forms: dict[str, list[MatrixFormat]],
    quantize: Quantize,
    progress: bool = False,
) -> Losses:
    """The loss of each kind in each of its formats. samples: the last eighth measures, the others give H.

    All candidates go through the model side by side, layer by layer. progress: shows a bar. Raises ModelError if there
    is but one sample.
    """
    n_measured = len(samples) // 8 or 1
    if len(samples) < 2:
        raise ModelError("--budget measures on samples that it does not calibrate on: --samples 2 and up")
    last, measured = Fp32(checkpoint), samples[-n_measured:]
    of_outputs = classifier_hessian(checkpoint, config, samples[:-n_measured])
    hessians = {"classifier": of_outputs, "embed": of_outputs if config.tied else np.eye(config.dim)}
    exact = [embed(config, last, sample) for sample in samples]
    states = {(kind, form): exact[-n_measured:] for kind, of_kind in forms.items() for form in of_kind}
    tables: dict[Candidate, Matrix] = {}
    for kind in forms.keys() & hessians.keys():
        for _, matrix in quantize({kind: last.vector(kind)}, hessians[kind], forms):
            tables[kind, matrix.form] = matrix
            if kind == "embed":
                table = stands_for(matrix)
                states[kind, matrix.form] = [rotated(config, last, table[sample]) for sample in measured]
    for i in tqdm(range(config.n_layers), desc="measuring losses", unit="layer", disable=not progress):
        layer = f"layers.{i}."
        weights = layer_weights(checkpoint, config, layer)
        for block, places in blocks(config, layer):
            runs = in_parallel([partial(run_block, block, weights, x, places) for x in exact])
            replaced: dict[Candidate, dict[str, Matrix]] = {}
            for k, place in enumerate(places):
                hessian = sum(x.T @ x for x in (read[k].astype(F64) for _, read in runs[:-n_measured]))
                own = {n: weights.vector(n) for n in (layer + c for c in CONSUMERS[place.removeprefix(layer)])}
                for name, matrix in quantize(own, hessian, {name: forms[kind_of(name)] for name in own}):
                    replaced[kind_of(name), matrix.form] = {name: matrix}
            run = partial(run_candidate, block, weights)
            after = in_parallel([partial(run, replaced.get(candidate, {}), x) for candidate, x in states.items()])
            exact, states = [x for x, _ in runs], dict(zip(states, after, strict=True))

    def inputs(states: list[np.ndarray]) -> np.ndarray:
        """The classifier's in all samples, (tokens, dim) fp32."""
        return np.concatenate([last_norm(config, last, x) for x in states])

    x_ref, own = inputs(exact[-n_measured:]), last.vector("classifier")
    changed = "embed" if config.tied else "classifier"
    rest = [candidate for candidate in states if candidate[0] != changed]
    found = dict(zip(rest, divergences([inputs(states[c]) for c in rest], own, x_ref, own), strict=True))
    for candidate in states.keys() - found.keys():
        classifier = stands_for(tables[candidate])
        (found[candidate],) = divergences([inputs(states[candidate])], classifier, x_ref, own)
    return {kind: {form: float(found[kind, form]) for form in of_kind} for kind, of_kind in forms.items()}


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
