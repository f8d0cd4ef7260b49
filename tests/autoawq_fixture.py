"""Writes tests/hf/autoawq.safetensors: matrices packed and dequantized by AutoAWQ's own code.

    python -m tests.autoawq_fixture DIR

DIR is an unpacked autoawq 0.2.9 (pip download --no-deps autoawq). Needs torch and accelerate.

`weight` (n_out, n_in) fp32 is on the grid of `scales` and `zeros`, so that its codes are not a matter of rounding;
`qweight` and `qzeros` are what WQLinear_GEMM.from_linear makes of them, `dequantized` (n_in, n_out) fp16 is what
dequantize_gemm makes of those.
"""

import sys
import types
from pathlib import Path

from formats.interpreter import need

if __name__ == "__main__":
    need("numpy", "torch", "accelerate")

import numpy as np
from safetensors.numpy import save_file

OUT = Path(__file__).parent / "hf" / "autoawq.safetensors"
N_IN, N_OUT, GROUP_SIZE = 256, 64, 128


def main() -> int:
    """See the module's docstring."""
    package = types.ModuleType("awq")  # without its __init__, which imports every model that there is
    package.__path__ = [str(Path(sys.argv[1]) / "awq")]
    sys.modules["awq"] = package
    import torch
    from awq.modules.linear.gemm import WQLinear_GEMM
    from awq.utils.packing_utils import dequantize_gemm

    rng = np.random.default_rng(0)
    n_groups = N_IN // GROUP_SIZE
    codes, zeros = rng.integers(0, 16, (N_OUT, N_IN)), rng.integers(0, 16, (N_OUT, n_groups))
    scales = rng.uniform(0.001, 0.02, (N_OUT, n_groups)).astype(np.float16)
    steps = codes.reshape(N_OUT, n_groups, GROUP_SIZE) - zeros[..., None]
    weight = (steps * scales[..., None].astype(np.float32)).reshape(N_OUT, N_IN).astype(np.float32)
    linear = torch.nn.Linear(N_IN, N_OUT, bias=False)
    linear.weight.data = torch.from_numpy(weight)
    # It takes scales and zeros transposed, one row a group.
    packed = WQLinear_GEMM.from_linear(
        linear, 4, GROUP_SIZE, scales=torch.from_numpy(scales.T.copy()), zeros=torch.from_numpy(zeros.T.copy())
    )
    dequantized = dequantize_gemm(packed.qweight, packed.qzeros, packed.scales, 4, GROUP_SIZE)
    tensors = {"weight": linear.weight.data, "qweight": packed.qweight, "qzeros": packed.qzeros,
               "scales": packed.scales, "dequantized": dequantized}  # fmt: skip
    save_file({name: np.ascontiguousarray(t.numpy()) for name, t in tensors.items()}, OUT)
    return 0


if __name__ == "__main__":
    sys.exit(main())
