"""Golden vectors of each operation alone, with inputs that probe its edges: golden/data/ops.safetensors."""

import numpy as np

from formats.checkpoint import Config, RopeScaling
from golden.awq import F16, Packed, pack
from golden.awq import dequantize as dequantize_awq
from golden.awq import matmul as matmul_awq
from golden.forward import (
    F32,
    attention_mix,
    attention_scores,
    rmsnorm,
    rope,
    rope_frequencies,
    rope_table,
    softmax,
    swiglu,
)
from golden.q8 import accumulators, dequantize, matmul, quantize
from golden.w8a8 import quantize_static

ROPE_POSITIONS = np.array([0, 1, 2, 127, 128, 511, 4095, 131071])
TINY_SCALING = RopeScaling(8.0, 1.0, 4.0, 128)  # tiny-llama's


def edge_groups(rng: np.random.Generator, group_size: int) -> np.ndarray:
    """Rows that probe the quantizer, (rows, 4 * group_size) fp32: ties, zeros, tiny, huge and one-sided values."""
    n = 4 * group_size
    rows = [
        rng.standard_normal(n),
        rng.standard_normal(n) * 1e-3,
        np.zeros(n),
        np.full(n, -0.0),
        np.where(np.arange(n) % group_size == 3, 127.0, (np.arange(n) % 25) - 12.5),  # scale 1: exact ties, .5
        np.where(np.arange(n) % group_size == 5, -254.0, (np.arange(n) % 63) - 31.0),  # scale 2: exact ties, odd
        np.where(np.arange(n) // group_size == 1, 0.0, rng.standard_normal(n)),  # one group of zeros
        np.full(n, 1e-38),  # 127 / amax overflows: treated as zeros
        rng.standard_normal(n) * 1e-36,
        rng.standard_normal(n) * 1e37,
        np.full(n, -3.0),
        np.where(np.arange(n) % 2, 5.0, -5.0),
    ]
    return np.array(rows, F32)


def op_vectors() -> dict[str, np.ndarray]:
    """Inputs and outputs of every operation, under names `op.case.part`."""
    rng = np.random.default_rng(2)
    out: dict[str, np.ndarray] = {}

    for group_size in (16, 32, 64, 128):
        x = edge_groups(rng, group_size)
        quantized = quantize(x, group_size)
        p = f"quantize.{group_size}."
        out |= {p + "x": x, p + "codes": quantized.codes, p + "scales": quantized.scales}
        out[p + "dequantized"] = dequantize(quantized)

    # Tokens x rows x columns; rows and tokens that are no multiple of anything, one group, many groups.
    for n, m, k, group_size in ((1, 5, 64, 64), (3, 17, 128, 64), (2, 9, 384, 64), (5, 4, 96, 32), (2, 3, 48, 16)):
        xq = quantize(rng.standard_normal((n, k)).astype(F32), group_size)
        wq = quantize(rng.standard_normal((m, k)).astype(F32), group_size)
        p = f"matmul.{n}x{m}x{k}g{group_size}."
        out |= {p + "x.codes": xq.codes, p + "x.scales": xq.scales, p + "w.codes": wq.codes, p + "w.scales": wq.scales}
        out |= {p + "accumulators": accumulators(xq, wq), p + "out": matmul(xq, wq)}

    x, weight = rng.standard_normal((3, 128)).astype(F32), rng.standard_normal(128).astype(F32)
    x[2] *= 1e-4  # so small that eps matters
    out |= {"rmsnorm.x": x, "rmsnorm.weight": weight}
    out |= {f"rmsnorm.out{eps}": rmsnorm(x, weight, eps) for eps in (1e-5, 1e-6)}

    plain = rope_config(head_dim=64, rope_theta=500000.0, scaling=None)
    scaled = rope_config(64, 500000.0, RopeScaling(32.0, 1.0, 4.0, 8192))  # Llama 3.2 1B
    tiny = rope_config(32, 1000000.0, TINY_SCALING)
    for name, config in (("plain", plain), ("llama-3.2-1b", scaled), ("tiny", tiny)):
        cos, sin = rope_table(config, ROPE_POSITIONS)
        x = rng.standard_normal((len(ROPE_POSITIONS), 2, config.head_dim)).astype(F32)
        p = f"rope.{name}."
        out |= {p + "frequencies": rope_frequencies(config), p + "cos": cos, p + "sin": sin, p + "x": x}
        out[p + "out"] = rope(x, cos, sin, interleaved=True)
    out["rope.positions"] = ROPE_POSITIONS.astype(np.int32)

    scores = np.stack([rng.standard_normal(77) * 4, np.full(77, -80.0), np.linspace(-100, 100, 77)]).astype(F32)
    out |= {"softmax.x": scores, "softmax.out": softmax(scores)}

    q, k, v = (rng.standard_normal((9, heads, 32)).astype(F32) for heads in (6, 2, 2))
    future = np.triu(np.ones((9, 9), bool), k=1)[:, None, :]
    scores = np.where(future, F32(0), attention_scores(q, k))
    probs = softmax(np.where(future, F32(-np.inf), scores))
    out |= {"attention.q": q, "attention.k": k, "attention.v": v, "attention.scores": scores}
    out |= {"attention.probs": probs, "attention.out": attention_mix(probs, v)}

    gate = np.concatenate([rng.standard_normal(100) * 3, [0.0, -0.0, 88.0, -88.0, 200.0, -200.0]]).astype(F32)
    up = rng.standard_normal(len(gate)).astype(F32)
    out |= {"swiglu.gate": gate, "swiglu.up": up, "swiglu.out": swiglu(gate, up)}
    return out | w8a8_op_vectors(np.random.default_rng(3)) | awq_op_vectors(np.random.default_rng(4))


def w8a8_op_vectors(rng: np.random.Generator) -> dict[str, np.ndarray]:
    """What W8A8 adds: groups as long as a row, and static scales."""
    out: dict[str, np.ndarray] = {}
    for n in (64, 384, 2048):
        x = edge_groups(rng, n)[:, :n].copy()
        x[6, : n // 2] = 0
        quantized = quantize(x, n)
        p = f"quantize.row{n}."
        out |= {p + "x": x, p + "codes": quantized.codes, p + "scales": quantized.scales}
        out[p + "dequantized"] = dequantize(quantized)

    for n, m, k in ((2, 5, 384), (3, 17, 2048)):
        xq = quantize(rng.standard_normal((n, k)).astype(F32), k)
        wq = quantize(rng.standard_normal((m, k)).astype(F32), k)
        p = f"matmul.{n}x{m}x{k}g{k}."
        out |= {p + "x.codes": xq.codes, p + "x.scales": xq.scales, p + "w.codes": wq.codes, p + "w.scales": wq.scales}
        out |= {p + "accumulators": accumulators(xq, wq), p + "out": matmul(xq, wq)}
    k = 2048  # the largest accumulators that there are: all codes 127, and the signs mixed
    signs = np.where(rng.random((2, k)) < 0.5, -1, 1)
    xq, wq = quantize(np.array([np.ones(k), signs[0]], F32), k), quantize(np.array([np.ones(k), *signs], F32), k)
    p = f"matmul.2x3x{k}g{k}."
    out |= {p + "x.codes": xq.codes, p + "x.scales": xq.scales, p + "w.codes": wq.codes, p + "w.scales": wq.scales}
    out |= {p + "accumulators": accumulators(xq, wq), p + "out": matmul(xq, wq)}

    halves = (np.arange(64) % 32) - 15.5  # ties at scale 1
    for case, scale in (("one", 1.0), ("tenth", 0.1), ("zero", 0.0), ("tiny", 1e-38), ("two", 2.0)):
        rows = [
            rng.standard_normal(64) * scale * 40,
            halves * scale,
            np.zeros(64),
            np.full(64, -0.0),
            rng.standard_normal(64) * scale * 1e4,  # nearly all far beyond 127 * scale
            np.where(np.arange(64) % 2, 3e38, -3e38),
            np.where(np.arange(64) % 2, 127.5, -127.5) * scale,
            np.arange(64) * 0.0625 * scale,
        ]
        x, s = np.array(rows).astype(F32), F32(scale)
        quantized = quantize_static(x, s)
        p = f"quantize_static.{case}."
        out |= {p + "x": x, p + "scale": np.array([s]), p + "codes": quantized.codes}
    return out


# M tokens, N outputs, K inputs, group size: one token and many, tiles of 16 just full and just not, narrow outputs,
# and a single group of inputs.
AWQ_MATMULS = (
    (1, 8, 128, 128),
    (1, 136, 256, 64),
    (2, 24, 256, 128),
    (15, 64, 128, 64),
    (16, 72, 128, 128),
    (17, 136, 256, 64),
    (64, 64, 64, 64),
    (100, 104, 256, 128),
)


def awq_op_vectors(rng: np.random.Generator) -> dict[str, np.ndarray]:
    """What AWQ adds: packed int4, fp16 inputs, rotation in halves, and where fp32 becomes fp16."""
    out: dict[str, np.ndarray] = {}
    codes = rng.integers(0, 16, (5, 72)).astype(np.int8)
    out |= {"awq_pack.codes": codes, "awq_pack.packed": pack(codes)}

    # Every code with every zero point and eight scales: column 16 j + z has zero point z and scale j.
    scales = np.array([1, 0.1, 2**-14, 2**-14 - 2**-24, 2**-24, 3e-6, 0.0, 4364], F16)
    codes = np.tile(np.arange(64)[:, None] % 16, (1, 128))
    matrix = Packed(pack(codes), pack(np.arange(128)[None] % 16), np.repeat(scales, 16)[None])
    out |= {f"awq_dequantize.{part}": value for part, value in matrix._asdict().items()}
    out["awq_dequantize.w16"] = dequantize_awq(matrix)

    for m, n, k, group_size in AWQ_MATMULS:
        x = rng.standard_normal((m, k)).astype(F16)
        matrix = Packed(
            pack(rng.integers(0, 16, (k, n))),
            pack(rng.integers(0, 16, (k // group_size, n))),
            (rng.uniform(0.5, 2, (k // group_size, n)) / 64).astype(F16),
        )
        p, w16 = f"awq_matmul.{m}x{n}x{k}g{group_size}.", dequantize_awq(matrix)
        out |= {p + "x": x, p + "w16": w16, p + "out": matmul_awq(x, w16)}
        out |= {p + part: value for part, value in matrix._asdict().items()}

    for name, config in (("plain", rope_config(128, 1e6, None)), ("tiny", rope_config(32, 500000.0, TINY_SCALING))):
        cos, sin = rope_table(config, ROPE_POSITIONS)
        x = rng.standard_normal((len(ROPE_POSITIONS), 2, config.head_dim)).astype(F32)
        p = f"rope_halves.{name}."
        out |= {p + "frequencies": rope_frequencies(config), p + "cos": cos, p + "sin": sin, p + "x": x}
        out[p + "out"] = rope(x, cos, sin, interleaved=False)
    out["rope_halves.positions"] = ROPE_POSITIONS.astype(np.int32)

    for n, n_heads, n_kv_heads, head_dim in ((9, 6, 2, 32), (37, 4, 1, 64)):
        q, k, v = (rng.standard_normal((n, heads, head_dim)).astype(F16) for heads in (n_heads, n_kv_heads, n_kv_heads))
        future = np.triu(np.ones((n, n), bool), k=1)[:, None, :]
        probs = softmax(np.where(future, F32(-np.inf), attention_scores(q, k)))
        p = f"attention_half.{n}x{n_heads}x{n_kv_heads}x{head_dim}."
        out |= {p + "q": q, p + "k": k, p + "v": v, p + "out": attention_mix(probs, v).astype(F16)}

    # Between two neighbours of fp16: below, on and above the middle, after even and odd; subnormal, tiny, too large.
    middles = [1 + 2**-11, 1 + 3 * 2**-11, 2048 + 1, 2050 + 1, 2**-14 - 2**-25, 1.5 * 2**-24, 2**-25, 65520.0]
    edges = [v for m in middles for v in (np.nextafter(F32(m), F32(0)), F32(m), np.nextafter(F32(m), F32(np.inf)))]
    edges += [0.0, 65504.0, 65519.0, 1e-10, 1e-40, 1e6, 3e38, *rng.standard_normal(20) * 10.0 ** np.arange(-10, 10)]
    x = np.array([*edges, *(-F32(v) for v in edges)], F32)
    with np.errstate(over="ignore"):
        out |= {"half.x": x, "half.out": x.astype(F16)}
    return out


def rope_config(head_dim: int, rope_theta: float, scaling: RopeScaling | None) -> Config:
    """A config of which only the fields that RoPE reads matter."""
    return Config(
        arch="llama", dim=1, hidden_dim=1, n_layers=1, n_heads=1, n_kv_heads=1, head_dim=head_dim, vocab_size=1,
        max_seq_len=1, tied=True, norm_eps=1e-5, rope_theta=rope_theta, rope_scaling=scaling,
    )  # fmt: skip
