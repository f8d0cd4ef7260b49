"""Attention whose two products are int8 by int8 with exact int32 sums: `runq_w8a8 --attn int8`.

A query, key or value head is quantized under one scale, as golden.q8 does with a group. The scale of a value goes to
the probability of its position before that is quantized, one scale for each query and head. docs/w8a8.md says why.
"""

import numpy as np

from golden.forward import Step, head_dots, head_sums, is_future
from golden.fp32 import F32, softmax
from golden.q8 import quantize

MAX_POSITIONS = 133144  # of 127 * 127 each, within int32


def quantized_heads(step: Step, name: str, x: np.ndarray, by_head: bool = True) -> tuple[np.ndarray, np.ndarray]:
    """Codes int8 and scales fp32 of x, (n, heads, head_dim), a scale for each head: (n, heads, head_dim), (n, heads).

    They are the steps NAME.q and NAME.s, (n, heads, head_dim) and (n, heads, 1); without `by_head` (n, heads *
    head_dim) and (n, heads), the form of a value.
    """
    n, heads, head_dim = x.shape
    codes, scales = quantize(x.reshape(n, -1), head_dim)
    if by_head:
        codes, scales = codes.reshape(x.shape), scales[..., None]
    codes, scales = step(name + ".q", codes), step(name + ".s", scales)
    return codes.reshape(x.shape), scales.reshape(n, heads)


def score_sums(q: np.ndarray, k: np.ndarray) -> np.ndarray:
    """q . k of codes, (n, H, n_keys) int32, exact. q: (n, H, head_dim) int8; k: (n_keys, G, head_dim) int8."""
    return head_dots(q, k).astype(np.int32)


def scores_of(sums: np.ndarray, q_scales: np.ndarray, k_scales: np.ndarray, head_dim: int) -> np.ndarray:
    """Scores fp32 of `score_sums`: times (q scale / sqrt(head_dim)) * k scale. Scales: (n, H) and (n_keys, G)."""
    k_scales = np.repeat(k_scales, q_scales.shape[1] // k_scales.shape[1], axis=1)
    q_scales = q_scales * (F32(1) / np.sqrt(F32(head_dim)))
    return sums.astype(F32) * (q_scales[..., None] * k_scales.T[None])


def weights_of(probs: np.ndarray, v_scales: np.ndarray) -> np.ndarray:
    """Probability times the value's scale, in fp32: (n, H, n_keys). probs: the same; v_scales: (n_keys, G)."""
    return probs * np.repeat(v_scales, probs.shape[1] // v_scales.shape[1], axis=1).T[None]


def quantized_weights(weights: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Codes and scales, one for each query and head, of weights (n, H, n_keys): (n, H, n_keys) and (n, H, 1)."""
    codes, scales = quantize(weights.reshape(-1, weights.shape[-1]), weights.shape[-1])
    return codes.reshape(weights.shape), scales.reshape(*weights.shape[:-1], 1)


def mix_sums(weights: np.ndarray, v: np.ndarray) -> np.ndarray:
    """Sums over keys, (n, H, head_dim) int32, exact. weights: (n, H, n_keys) int8; v: (n_keys, G, head_dim) int8."""
    return head_sums(weights, v).astype(np.int32)


def mix_of(sums: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """The result fp32 of `mix_sums`, (n, H, head_dim): times the scales of the weights, (n, H, 1)."""
    return sums.astype(F32) * scales


def attention_int8(step: Step, layer: str, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
    """Causal attention as golden.forward's `attention`, (n, H, head_dim) fp32, in int8."""
    if len(k) > MAX_POSITIONS:
        raise ValueError(f"{len(k)} positions, expected at most {MAX_POSITIONS}: sums would leave int32")
    qc, qs = quantized_heads(step, layer + "attn.q_rope", q)
    kc, ks = quantized_heads(step, layer + "attn.k_rope", k)
    vc, vs = quantized_heads(step, layer + "attn.v_proj", v, by_head=False)
    future = is_future(len(q), len(k))
    scores = scores_of(score_sums(qc, kc), qs, ks, q.shape[-1])
    scores = step(layer + "attn.scores", np.where(future, F32(0), scores))
    probs = step(layer + "attn.probs", softmax(np.where(future, F32(-np.inf), scores)))
    weights = step(layer + "attn.weights", weights_of(probs, vs))
    codes, scales = quantized_weights(weights)
    codes, scales = step(layer + "attn.weights.q", codes), step(layer + "attn.weights.s", scales)
    return mix_of(mix_sums(codes, vc), scales)
