"""Writes tests/hf/gptq.safetensors: matrices packed and dequantized by AutoGPTQ's own code.

    python -m tests.gptq_fixture DIR

DIR is an unpacked auto-gptq 0.7.1 (pip download --no-deps auto-gptq). Needs torch and transformers.

Cases are w4, w4-order, ... of 2, 4 and 8 bits, with groups of neighbours and scattered ones. `CASE.weight`
(n_out, n_in) is on the grid of scales and zero points, so that its codes are not a matter of rounding; qweight, qzeros,
scales and g_idx are what QuantLinear.pack makes of it. QuantLinear.forward makes `weight` of them again, to the bit.
"""

import importlib.util
import sys
from pathlib import Path

from formats.interpreter import need

if __name__ == "__main__":
    need("numpy", "torch", "transformers")

import numpy as np
from safetensors.numpy import save_file

OUT = Path(__file__).parent / "hf" / "gptq.safetensors"
N_IN, N_OUT, GROUP_SIZE = 128, 32, 32


def main() -> int:
    """See the module's docstring."""
    import torch

    path = Path(sys.argv[1]) / "auto_gptq" / "nn_modules" / "qlinear" / "qlinear_cuda.py"
    spec = importlib.util.spec_from_file_location("qlinear_cuda", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)

    rng, tensors = np.random.default_rng(0), {}
    groups = np.arange(N_IN) // GROUP_SIZE
    for bits in (2, 4, 8):
        for case, g_idx in ((f"w{bits}", groups), (f"w{bits}-order", rng.permutation(groups))):
            top = 2**bits - 1
            codes = rng.integers(0, top + 1, (N_OUT, N_IN))
            zeros = np.full((N_OUT, 4), 128) if bits == 8 else rng.integers(1, top + 1, (N_OUT, 4))
            scales = rng.uniform(0.001, 0.02, zeros.shape).astype(np.float16).astype(np.float32)
            linear = torch.nn.Linear(N_IN, N_OUT, bias=False)
            linear.weight.data = torch.from_numpy(((codes - zeros[:, g_idx]) * scales[:, g_idx]).astype(np.float32))
            packed = module.QuantLinear(bits, GROUP_SIZE, N_IN, N_OUT, bias=False)
            packed.pack(linear, torch.from_numpy(scales), torch.from_numpy(zeros.astype(np.float32)),
                        torch.from_numpy(g_idx.astype(np.int32)))  # fmt: skip
            packed.bias = None
            parts = {
                "weight": linear.weight.data,
                "qweight": packed.qweight,
                "qzeros": packed.qzeros,
                "scales": packed.scales.half(),
                "g_idx": packed.g_idx,
            }
            assert torch.equal(packed(torch.eye(N_IN)).T, linear.weight.data), case
            tensors |= {f"{case}.{name}": np.ascontiguousarray(t.detach().numpy()) for name, t in parts.items()}
    save_file(tensors, OUT)
    return 0


if __name__ == "__main__":
    sys.exit(main())
