"""What the KV cache keeps with `--kv f16` and `--kv q8`: keys, rotated, and values in fewer bits.

f16: each number rounded to fp16, half to even. q8: the head_dim numbers of a position and head quantized under one
scale, as golden.q8 does with a group. Attention is that of golden.forward, over what is kept; codes are multiplied, the
scale of a key goes to its score, that of a value to its probability.
"""

import numpy as np

from golden.forward import Step, attention, attention_dots, attention_mix, is_future
from golden.fp32 import F32, softmax
from golden.q8 import Quantized, quantize

F16 = np.float16


def kept_half(x: np.ndarray) -> np.ndarray:
    """x in fp16; from 65520 on that is infinity."""
    with np.errstate(over="ignore"):
        return x.astype(F16)


def kept_q8(x: np.ndarray) -> Quantized:
    """Codes (n, heads, head_dim) and scales (n, heads) of x, (n, heads, head_dim) fp32."""
    codes, scales = quantize(x.reshape(len(x), -1), x.shape[-1])
    return Quantized(codes.reshape(x.shape), scales)


def attention_kept(kv: str, step: Step, layer: str, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
    """`attention` of golden.forward over keys and values as a cache keeps them. kv: "f16" or "q8"."""
    if kv == "f16":
        return attention(step, layer, q, kept_half(k).astype(F32), kept_half(v).astype(F32))
    future, per_kv = is_future(len(q), len(k)), q.shape[1] // k.shape[1]
    (k, k_scales), (v, v_scales) = kept_q8(k), kept_q8(v)
    k_scales, v_scales = (np.repeat(s, per_kv, axis=1).T[None] for s in (k_scales, v_scales))  # (1, H, n_keys)
    scales = F32(1) / np.sqrt(F32(q.shape[-1])) * k_scales
    scores = step(layer + "attn.scores", attention_dots(q, k.astype(F32)) * scales)
    probs = step(layer + "attn.probs", softmax(np.where(future, F32(-np.inf), scores)))
    return attention_mix(probs * v_scales, v.astype(F32))
