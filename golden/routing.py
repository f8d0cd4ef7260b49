"""Which experts a token goes to, and with what weight: the router of Qwen3-MoE."""

from collections.abc import Callable

import numpy as np

from golden.fp32 import F32, F64, exp, fma


def router_logits(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """x @ weight.T, (n, E) fp32, summed in 8 lanes of fp64. x: (n, dim), weight: (E, dim), fp32."""
    short = -x.shape[1] % 8
    x, weight = (np.pad(values.astype(F64), ((0, 0), (0, short))) for values in (x, weight))
    lanes = np.zeros((len(x), len(weight), 8))
    for k in range(0, x.shape[1], 8):
        lanes += x[:, None, k : k + 8] * weight[None, :, k : k + 8]
    return lanes.cumsum(axis=-1)[..., -1].astype(F32)


def route(logits: np.ndarray, n_active: int, normalize: bool) -> tuple[np.ndarray, np.ndarray]:
    """The n_active experts of each token with the largest logits, and their weights, (n, n_active) int32 and fp32.

    The largest first; of equal ones the lowest index. Weights are softmax over all experts; with `normalize`
    (norm_topk_prob) only over those chosen. logits: (n, E) fp32. Softmax keeps their order, so experts are chosen by
    logits: probabilities may round to equal fp32 numbers where logits differ. Exponentials are fp32; they are added up
    in fp64, in the order of experts or of those chosen.
    """
    chosen = np.argsort(-logits, axis=-1, kind="stable")[:, :n_active]
    e = exp(logits - logits.max(axis=-1, keepdims=True)).astype(F64)
    best = np.take_along_axis(e, chosen, axis=-1)
    total = (best if normalize else e).cumsum(axis=-1)[..., -1:]
    return chosen.astype(np.int32), (best / total).astype(F32)


def combine(outputs: np.ndarray, chosen: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """The weighted sum of each token's experts, (n, dim) fp32. outputs: (n, k, dim).

    Experts are added by fma in the order of their indices, whatever their weights.
    """
    order = np.argsort(chosen, axis=-1)
    out = np.zeros((len(outputs), outputs.shape[-1]), F32)
    for i in range(order.shape[1]):
        at = order[:, i, None]
        weight = np.take_along_axis(weights, at, axis=1)
        out = fma(weight, np.take_along_axis(outputs, at[..., None], axis=1)[:, 0], out)
    return out


def by_expert(rows: np.ndarray, experts: np.ndarray, matmul: Callable[[np.ndarray, int], np.ndarray]) -> np.ndarray:
    """Products of rows, each with its expert's matrix, (n, k, ...).

    rows, experts: (n, k), which row goes to which expert. matmul(rows, e): (len(rows), ...), with expert e's matrix.
    """
    products = {int(e): matmul(rows[experts == e], int(e)) for e in np.unique(experts)}
    first = next(iter(products.values()))
    out = np.empty((*experts.shape, *first.shape[1:]), first.dtype)
    for expert, product in products.items():
        out[experts == expert] = product
    return out
