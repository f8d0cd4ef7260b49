"""Which experts a token goes to, and with what weight: the router of Qwen3-MoE."""

from collections.abc import Callable

import numpy as np

F32, F64 = np.float32, np.float64


def router_logits(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """x @ weight.T in fp32 arithmetic or better, (n, E) fp32. x: (n, dim), weight: (E, dim), fp32."""
    return (x.astype(F64) @ weight.astype(F64).T).astype(F32)


def route(logits: np.ndarray, n_active: int, normalize: bool) -> tuple[np.ndarray, np.ndarray]:
    """The n_active experts of each token with the largest logits, and their weights, (n, n_active) int32 and fp32.

    The largest first; of equal ones the lowest index. Weights are softmax over all experts; with `normalize`
    (norm_topk_prob) divided by the sum of those chosen. logits: (n, E) fp32. Softmax keeps their order, so experts
    are chosen by logits: probabilities may round to equal fp32 numbers where logits differ.
    """
    chosen = np.argsort(-logits, axis=-1, kind="stable")[:, :n_active]
    e = np.exp(logits.astype(F64) - logits.max(axis=-1, keepdims=True))
    weights = np.take_along_axis(e / e.sum(axis=-1, keepdims=True), chosen, axis=-1)
    if normalize:
        weights = weights / weights.sum(axis=-1, keepdims=True)
    return chosen.astype(np.int32), weights.astype(F32)


def combine(outputs: np.ndarray, chosen: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """The weighted sum of each token's experts, (n, dim) fp32. outputs: (n, k, dim).

    Experts are added in the order of their indices, whatever their weights.
    """
    terms = outputs.astype(F64) * weights[..., None]
    return np.take_along_axis(terms, np.argsort(chosen, axis=-1)[..., None], axis=1).sum(axis=1).astype(F32)


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
