"""W8A8: int8 weights with one fp32 scale per row, int8 activations with one fp32 scale per token.

The arithmetic is that of golden.q8 with the whole row as the group, or groups of 32 (`--block 32`). Static
activations have one scale a place instead, which calibration found (golden.smooth).

`W8A8` runs an exported file, so that a trace shows what the codes in that very file give.
"""

from pathlib import Path

import numpy as np

from formats.checkpoint import Config
from formats.schemes import W8A8_FILE
from golden.forward import F32, Attend, attention
from golden.q8 import Int8File, Quantized, quantize

STATIC_PLACES = ("attn.norm", "attn.mix", "ffn.norm", "ffn.swiglu")  # the order of a layer's static scales


def static_scale(largest: float) -> np.float32:
    """The scale under which the largest calibrated activation has code 127; 0 where `quantize` would say so."""
    return quantize(np.array([[largest]], F32), 1).scales[0, 0]


def quantize_static(x: np.ndarray, scale: np.float32) -> Quantized:
    """Rounds x, (n, k) fp32, with a given scale: rint(x * (1 / scale)), clipped to 127. Scale 0 gives codes 0.

    The scale is repeated for every row, (n, 1).
    """
    with np.errstate(divide="ignore", over="ignore"):
        inv = F32(1) / F32(scale)
        inv = inv if np.isfinite(inv) else F32(0)
        codes = np.clip(np.rint(x.astype(F32) * inv), -127, 127).astype(np.int8)
    return Quantized(codes, np.full((len(x), 1), scale, F32))


def static_places(config: Config) -> list[str]:
    """The step names of the activations that have static scales, in the order of a file."""
    return [*(f"layers.{i}.{place}" for i in range(config.n_layers) for place in STATIC_PLACES), "norm"]


class W8A8(Int8File):
    """The scheme of runq_w8a8.cpp, from a file that export/w8a8.py wrote (mapped, not read).

    attend: `attention`, or golden.attention_int8's. Raises ModelError if the file is no W8A8 file.
    """

    def __init__(self, path: Path | str, attend: Attend = attention):
        super().__init__(path, W8A8_FILE)
        self.attend = attend
        self.activation_scales: dict[str, np.float32] = {}  # by step name, if static
        if self.static:
            self.activation_scales = dict(zip(static_places(self.config), self.tensors["act_scales"], strict=True))

    def quantized(self, name: str, x: np.ndarray) -> Quantized:
        if self.static:
            return quantize_static(x, self.activation_scales[name])
        return super().quantized(name, x)
