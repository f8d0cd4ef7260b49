"""What the KV cache keeps with `--kv f16` and `--kv q8`: keys, rotated, and values in fewer bits.

f16: each number rounded to fp16, half to even. q8: the head_dim numbers of a position and head quantized under one
scale, as golden.q8 does with a group. Attention is that of golden.forward, over what is kept.
"""

import numpy as np

from golden.forward import F32, Step, attention
from golden.q8 import Quantized, dequantize, quantize

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
    return attention(step, layer, q, *(dequantize(kept_q8(x)) for x in (k, v)))
