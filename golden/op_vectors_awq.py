"""Golden vectors of what AWQ adds: packed int4, fp16 inputs, rotation in halves, and where fp32 becomes fp16."""

import numpy as np

from golden.awq import F16, Packed, dequantize, matmul, pack
from golden.forward import F32, attention, ignore
from golden.op_cases import EXACT, OpVectors
from golden.op_vectors_fp32 import TINY_SCALING, add_rope, around_boundaries, rope_config
from golden.trace import HALF_MIX_TOLERANCE, OP_TOLERANCE

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


def add_awq(vectors: OpVectors, rng: np.random.Generator) -> None:
    """All cases of AWQ."""
    codes = rng.integers(0, 16, (5, 72)).astype(np.int8)
    vectors.add("awq_pack", "awq_pack", {"codes": codes}, {"packed": (pack(codes), EXACT)})

    # Every code with every zero point and eight scales: column 16 j + z has zero point z and scale j.
    scales = np.array([1, 0.1, 2**-14, 2**-14 - 2**-24, 2**-24, 3e-6, 0.0, 4364], F16)
    codes = np.tile(np.arange(64)[:, None] % 16, (1, 128))
    matrix = Packed(pack(codes), pack(np.arange(128)[None] % 16), np.repeat(scales, 16)[None])
    outputs = {"w16": (dequantize(matrix), EXACT)}
    vectors.add("awq_dequantize", "awq_dequantize", matrix._asdict(), outputs, group_size=64)

    for m, n, k, group_size in AWQ_MATMULS:
        x = rng.standard_normal((m, k)).astype(F16)
        matrix = Packed(
            pack(rng.integers(0, 16, (k, n))),
            pack(rng.integers(0, 16, (k // group_size, n))),
            (rng.uniform(0.5, 2, (k // group_size, n)) / 64).astype(F16),
        )
        w16 = dequantize(matrix)
        outputs = {"w16": (w16, EXACT), "out": (matmul(x, w16), OP_TOLERANCE)}
        name = f"awq_matmul.{m}x{n}x{k}g{group_size}"
        vectors.add(name, "awq_matmul", {"x": x, **matrix._asdict()}, outputs, group_size=group_size)

    for name, config in (("plain", rope_config(128, 1e6, None)), ("tiny", rope_config(32, 500000.0, TINY_SCALING))):
        add_rope(vectors, f"rope_halves.{name}", config, rng, interleaved=False)

    for n, n_heads, n_kv_heads, head_dim in ((9, 6, 2, 32), (37, 4, 1, 64)):
        q, k, v = (rng.standard_normal((n, heads, head_dim)).astype(F16) for heads in (n_heads, n_kv_heads, n_kv_heads))
        add_attention_half(vectors, f"{n}x{n_heads}x{n_kv_heads}x{head_dim}", q, k, v)
    for name, qkv in rounded_on_the_way().items():
        add_attention_half(vectors, name, *qkv)

    # Between two neighbours of fp16: below, on and above the middle, after even and odd; subnormal, tiny, too large.
    middles = [1 + 2**-11, 1 + 3 * 2**-11, 2048 + 1, 2050 + 1, 2**-14 - 2**-25, 1.5 * 2**-24, 2**-25, 65520.0]
    edges = [v for m in middles for v in (np.nextafter(F32(m), F32(0)), F32(m), np.nextafter(F32(m), F32(np.inf)))]
    edges += [0.0, 65504.0, 65519.0, 1e-10, 1e-40, 1e6, 3e38, *rng.standard_normal(20) * 10.0 ** np.arange(-10, 10)]
    x = np.array([*edges, *(-F32(v) for v in edges)], F32)
    with np.errstate(over="ignore"):
        vectors.add("half", "half", {"x": x}, {"out": (x.astype(F16), EXACT)})

    for case, n, start in around_boundaries(""):
        shapes = (n, 4, 32), (start + n, 2, 32), (start + n, 2, 32)
        add_attention_half(vectors, case, *(rng.standard_normal(shape).astype(F16) for shape in shapes))


def add_attention_half(vectors: OpVectors, name: str, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> None:
    """Attention over what q, k and v are in fp16; the output, too, is rounded to fp16."""
    out = attention(ignore, "", *(t.astype(F16) for t in (q, k, v))).astype(F16)
    inputs, outputs = {"q": q, "k": k, "v": v}, {"out": (out, HALF_MIX_TOLERANCE)}
    vectors.add(f"attention_half.{name}", "attention_half", inputs, outputs, first_position=len(k) - len(q))


def rounded_on_the_way() -> dict[str, tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """A query at position 3 in fp32, with keys and values, whose rounding to fp16 shows in the output.

    In each case one of the three has values of +1 and -1 that cancel, and parts beyond fp16 that add up.
    """
    head_dim, beyond = 32, F32(2**-11 * (1 - 2**-8))  # just below the middle of two neighbours: rounded away
    signs = np.where(np.arange(head_dim) % 2, F32(-1), 1 + beyond)
    ramp = np.linspace(-1, 1, 4 * head_dim, dtype=F32).reshape(4, 1, head_dim).astype(F16).astype(F32)
    one, odd = np.full((1, 1, head_dim), 64, F32), np.array([0, 1, 0, 1], F32)[:, None, None]
    values = np.array([1 + beyond, -1, 1 + beyond, -1 + 2**-9], F32)[:, None, None]
    return {
        "values": (0 * one, 0 * ramp, np.repeat(values, head_dim, axis=-1)),  # all scores 0: the mean of the values
        "keys": (one, odd * signs, ramp),
        "queries": (signs[None, None], odd * one, ramp),
    }
