"""Holds MXFP8 of golden/mx.py against torchao, which nobody here wrote: codes and scales, to the bit.

    python -m tests.mx_check

Needs torch and torchao (0.18). A million random values in blocks of 32 for each element format, twice, and the edges
of the op vectors. Two differences are left out. Where a scale byte is 0, which means 2^-127, torchao's to_mx divides by
2^-126 ("manually adjust the fp scale"), so that its elements are half of what they should be. A NaN with its sign bit
set has the element 0xff there, 0x7f here; this is checked.
"""

import sys

from formats.interpreter import need

if __name__ == "__main__":
    need("numpy", "torch", "torchao")

import numpy as np

from golden.forward import F32
from golden.mx import E4M3, E5M2, Element, quantize_mx
from golden.op_vectors_moe import mx_edges

BLOCKS = 31250  # of 32: a million values


def torchao_mx(x: np.ndarray, element: Element, block: int) -> tuple[np.ndarray, np.ndarray]:
    """Codes and scales as torchao's to_mx gives them, in its mode FLOOR."""
    import torch
    from torchao.prototype.mx_formats.config import ScaleCalculationMode
    from torchao.prototype.mx_formats.mx_tensor import to_mx

    dtype = torch.float8_e4m3fn if element is E4M3 else torch.float8_e5m2
    scales, codes = to_mx(torch.from_numpy(x), dtype, block, ScaleCalculationMode.FLOOR)
    codes, scales = (t.view(torch.uint8).numpy() for t in (codes, scales))
    return codes.reshape(x.shape), scales.reshape(len(x), -1)


def main() -> int:
    wrong = 0
    for element in (E4M3, E5M2):
        rng = np.random.default_rng(1)
        normal = rng.standard_normal((BLOCKS, 32))
        for name, block, x in (
            ("one size a block", 32, normal * np.exp2(rng.uniform(-100, 100, (BLOCKS, 1)))),
            ("all sizes", 32, normal * np.exp2(rng.uniform(-12, 12, normal.shape))),
            ("edges", 32, mx_edges(rng, 32, element)),
            ("edges", 64, mx_edges(rng, 64, element)),
            ("NaN with its sign bit", 32, np.where(np.arange(64) % 32 == 2, -np.nan, normal[:64, :1])),
        ):
            x = x.astype(F32)
            codes, scales = torchao_mx(x, element, block)
            mine = quantize_mx(x, block, element)
            smallest = np.repeat(mine.scales == 0, block, axis=1)
            signed = np.isnan(x) & np.signbit(x)
            differ = int(((codes != mine.codes) & ~smallest & ~signed).sum()), int((scales != mine.scales).sum())
            wrong += sum(differ) + int((codes[signed] != 0xFF).sum() + (mine.codes[signed] != 0x7F).sum())
            print(
                f"{element.name}, blocks of {block}, {name}: {x.size} values, {differ[0]} codes and {differ[1]} scales "
                f"differ; left out {int((smallest & (x != 0)).sum())} values under byte 0, {int(signed.sum())} NaN"
            )
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
