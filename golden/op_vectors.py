"""Golden vectors of each operation alone, with inputs that probe its edges: golden/data/ops.safetensors.

golden/op_cases.py describes the file. A module's cases are drawn from random numbers of their own, so that a new case
changes none of another kind.
"""

import numpy as np

from golden.op_cases import OpVectors
from golden.op_vectors_awq import add_awq
from golden.op_vectors_formats import add_formats
from golden.op_vectors_fp32 import add_attention, add_fp32_operations, add_rescaled_rope, add_rotation
from golden.op_vectors_gptq import add_experts, add_gptq
from golden.op_vectors_int8 import add_attention_int8, add_matmul, add_models, add_quantize, add_static
from golden.op_vectors_kinds import add_kinds
from golden.op_vectors_moe import add_ladder, add_moe
from golden.op_vectors_sizes import add_sizes


def op_vectors() -> OpVectors:
    """Inputs and outputs of every operation."""
    vectors = OpVectors()
    add_quantize(vectors, np.random.default_rng(2))
    add_matmul(vectors, np.random.default_rng(5))
    add_fp32_operations(vectors, np.random.default_rng(6))
    add_attention(vectors, np.random.default_rng(7))
    add_static(vectors, np.random.default_rng(3))
    add_awq(vectors, np.random.default_rng(4))
    add_models(vectors, np.random.default_rng(8))
    add_gptq(vectors, np.random.default_rng(9))
    add_moe(vectors, np.random.default_rng(10))
    add_attention_int8(vectors, np.random.default_rng(11))
    add_kinds(vectors, np.random.default_rng(12))
    add_rescaled_rope(vectors, np.random.default_rng(13))
    add_ladder(vectors, np.random.default_rng(14))
    add_rotation(vectors, np.random.default_rng(15))
    add_experts(vectors, np.random.default_rng(16))
    add_sizes(vectors, np.random.default_rng(17))
    add_formats(vectors, np.random.default_rng(18))
    return vectors
