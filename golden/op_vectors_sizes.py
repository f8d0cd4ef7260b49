"""Golden vectors at the sizes of real models: heads of 128 and 256, five and eight queries to a key, 128 experts, late
positions, rows whose sums pass 2^24, and more than 256 of everything else that a model has many of.
"""

from functools import partial

import numpy as np

from golden.forward import F32, softmax, swiglu
from golden.gptq import gather
from golden.grouped import Int4Experts, Int8Experts, assist_matrix
from golden.mx import E4M3, MX, quantize_mx
from golden.op_cases import EXACT, OpVectors
from golden.op_vectors_awq import add_attention_half
from golden.op_vectors_fp32 import add_attention_case, add_rope, rope_config
from golden.op_vectors_int8 import add_attention_int8_case, add_mix, add_product, random_matrix
from golden.op_vectors_kinds import add_kept_case
from golden.op_vectors_moe import add_case, until_clear
from golden.q8 import Quantized, quantize
from golden.rotation import random_signs, rotate, rotate_back
from golden.routing import combine, route

LONG = 1100  # positions: of 1041 on, a sum of products of int8 codes passes 2^24


def add_sizes(vectors: OpVectors, rng: np.random.Generator) -> None:
    """All of them."""
    add_heads(vectors, rng)
    add_long(vectors, rng)
    add_wide(vectors, rng)
    add_many_experts(vectors, rng)


# ----------------------------------------------------------------------------
# Attention and positions


def add_heads(vectors: OpVectors, rng: np.random.Generator) -> None:
    """Attention of every kind: query heads to a key/value head x numbers of a head, and 136 heads.

    Five of 128 as in Qwen3-14B, eight to a head as in Qwen3-32B and 30B-A3B. AWQ has heads of up to 128.
    """

    def drawn(n: int, heads: int, head_dim: int) -> np.ndarray:
        return rng.standard_normal((n, heads, head_dim)).astype(F32)

    # Query heads, key/value heads, numbers of a head, positions: the last token is the only query.
    for case, n_heads, n_kv_heads, head_dim, n in (
        ("5x128", 10, 2, 128, 3), ("1x256", 2, 2, 256, 3), ("8x8", 136, 17, 8, 3),
    ):  # fmt: skip
        q, k, v = drawn(1, n_heads, head_dim), drawn(n, n_kv_heads, head_dim), drawn(n, n_kv_heads, head_dim)
        add_attention_case(vectors, f"attention.{case}", q, k, v)
        for kv in ("f16", "q8"):
            add_kept_case(vectors, kv, case, q, k, v)
        add_attention_int8_case(vectors, f"attention_int8.{case}", rng, 1, n - 1, head_dim, n_heads, n_kv_heads)
    for case, n_heads, n_kv_heads, head_dim in (("5x128", 10, 2, 128), ("8x96", 16, 2, 96)):
        q, k, v = drawn(1, n_heads, head_dim), drawn(4, n_kv_heads, head_dim), drawn(4, n_kv_heads, head_dim)
        add_attention_half(vectors, case, *(x.astype(np.float16) for x in (q, k, v)))


def add_long(vectors: OpVectors, rng: np.random.Generator) -> None:
    """Late positions: every one up to 1100 and some up to 65536 in RoPE, a context of 1100 in attention.

    int8: all weights of head 0 are 127, so that its sums pass 2^24, most of them odd.
    """
    every = rope_config(head_dim=2, rope_theta=1e6, scaling=None)
    add_rope(vectors, "rope.every", every, rng, interleaved=True, positions=np.arange(LONG), n_heads=1)
    late = [255, 384, 1024, 2048, 4096, 8192, 16384, 32768, 40000, 40959, 65536]
    qwen3 = rope_config(head_dim=128, rope_theta=1e6, scaling=None)
    add_rope(vectors, "rope.late", qwen3, rng, interleaved=True, positions=np.array(late), n_heads=1)

    x = rng.standard_normal((1, LONG)).astype(F32) * 4
    vectors.add("softmax.wide", "softmax", {"x": x}, {"out": (softmax(x), EXACT)})
    q = rng.standard_normal((1, 1, 2)).astype(F32)
    k, v = (rng.standard_normal((LONG, 1, 2)).astype(F32) for _ in range(2))
    add_attention_case(vectors, "attention.long", q, k, v)
    for kv in ("f16", "q8"):
        add_kept_case(vectors, kv, "long", q, k, v)
    scores = rng.standard_normal((1, 2, LONG)).astype(F32)
    scores[:, 0] = 0
    codes = rng.integers(-127, 128, (LONG, 2, 8)).astype(np.int8)
    codes[:, 0] = np.where(rng.random((LONG, 8)) < 1e-2, 126, 127) * np.resize([1, -1], 8)
    scales = rng.uniform(0.5, 2, (LONG, 2)).astype(F32)
    scales[:, 0] = F32(1 / 3)
    add_mix(vectors, "attention_int8.long.mix", softmax(scores), Quantized(codes, scales))


# ----------------------------------------------------------------------------
# Rows


def add_wide(vectors: OpVectors, rng: np.random.Generator) -> None:
    """More than 256 tokens, groups, channels and outputs."""
    for n, m, k, group_size in ((260, 1, 64, 64), (1, 260, 64, 64), (1, 1, 8320, 32)):
        x, w = random_matrix(rng, n, k, group_size), random_matrix(rng, m, k, group_size)
        add_product(vectors, f"{n}x{m}x{k}g{group_size}", x, w)

    x, order = rng.standard_normal((1, 320)).astype(F32), rng.permutation(320).astype(np.int32)
    gathered = gather(x, order)
    q = quantize(gathered, 64)
    outputs = {"gathered": (gathered, EXACT), "codes": (q.codes, EXACT), "scales": (q.scales, EXACT)}
    vectors.add("gptq_gather.320", "gptq_gather", {"x": x, "order": order}, outputs, group_size=64)

    gate, up = (rng.standard_normal((1, 300)).astype(F32) * 3 for _ in range(2))
    vectors.add("swiglu.wide", "swiglu", {"gate": gate, "up": up}, {"out": (swiglu(gate, up), EXACT)})

    x, s = rng.standard_normal((1, 1024)).astype(F32), random_signs(1024, 1024, 1024).astype(F32)
    outputs = {"rotated": (rotate(x, s, 1024), EXACT), "back": (rotate_back(x, s, 1024), EXACT)}
    vectors.add("rotate.1024", "rotate", {"x": x, "s": s}, outputs, block=1024)


# ----------------------------------------------------------------------------
# Mixtures of experts


def add_many_experts(vectors: OpVectors, rng: np.random.Generator) -> None:
    """8 of 128 experts, 9 of 300; the operator with 130 of few rows; long rows, whose sums pass 2^24."""
    logits = rng.standard_normal((3, 300)).astype(F32)
    logits[0, [127, 126, 64, 63, 16, 15]] = 5, 4, 4, 4, 6, 6  # some are equal
    logits[1, [299, 256, 255, 128]] = 7
    for name, n_experts, k in (("8of128", 128, 8), ("9of300", 300, 9)):
        for normalize in (False, True):
            chosen, weights = route(logits[:, :n_experts], k, normalize)
            outputs = {"experts": (chosen, EXACT), "weights": (weights, EXACT)}
            vectors.add(f"route.{name}{'n' if normalize else ''}", "route", {"logits": logits[:, :n_experts]}, outputs,
                        n_active=k, norm_topk_prob=normalize)  # fmt: skip
    chosen, weights = route(logits[:1, :128], 8, normalize=True)
    rows = (rng.standard_normal((1, 8, 264)) * np.exp(rng.uniform(-3, 3, (1, 8, 1)))).astype(F32)
    inputs = {"outputs": rows, "experts": chosen, "weights": weights}
    vectors.add("moe_combine.8of128", "moe_combine", inputs, {"out": (combine(rows, chosen, weights), EXACT)})

    until_clear(partial(add_int8_experts, vectors, rng))
    until_clear(partial(add_long_rows, vectors, rng))
    until_clear(partial(add_int4_experts, vectors, rng))
    for group, k in ((64, 192), (128, 256)):
        until_clear(partial(add_int4_groups, vectors, rng, group, k))
    for name, block, k in (("wide", 32, 288), ("b96", 96, 96)):
        until_clear(partial(add_mx_rows, vectors, rng, name, block, k))


def int8_rows(rng: np.random.Generator, m: int, k: int) -> Quantized:
    """Tokens with a scale each, as our quantizer gives them: without -128."""
    return Quantized(rng.integers(-127, 128, (m, k)).astype(np.int8), rng.uniform(0.5, 2, (m, 1)).astype(F32) / 64)


def ends_of(n_experts: int, *with_row: int) -> np.ndarray:
    """The group list in which these experts have a row each."""
    return np.isin(np.arange(n_experts), with_row).cumsum().astype(np.int32)


def add_int8_experts(vectors: OpVectors, rng: np.random.Generator) -> bool:
    """A8W8 with 130 experts."""
    ends = ends_of(130, 3, 15, 16, 19, 63, 64, 67, 127, 128, 129)
    scales = rng.uniform(0.5, 2, (130, 4)).astype(F32) / 256
    weight = Int8Experts(rng.integers(-127, 128, (130, 4, 32)).astype(np.int8), scales)
    return add_case(vectors, "130experts", int8_rows(rng, ends[-1], 32), weight, ends)


def add_long_rows(vectors: OpVectors, rng: np.random.Generator) -> bool:
    """A8W8 with rows of 2112 codes of nearly the same signs: sums of 2^25."""
    signs = np.where(rng.random(2112) < 0.5, -1, 1)
    x = Quantized((np.array([[1], [-1], [1]]) * signs * rng.integers(120, 128, (3, 2112))).astype(np.int8),
                  rng.uniform(0.5, 2, (3, 1)).astype(F32) / 4096)  # fmt: skip
    w = (signs * rng.integers(120, 128, (1, 4, 2112))).astype(np.int8)
    weight = Int8Experts(w, rng.uniform(0.5, 2, (1, 4)).astype(F32) / 4096)
    return add_case(vectors, "long", x, weight, ends_of(1, 0) * 3)


def int4_experts(rng: np.random.Generator, n_experts: int, n: int, k: int, n_groups: int) -> Int4Experts:
    """A8W4, with fp16 scales where a row has several groups."""
    codes = rng.integers(-8, 8, (n_experts, n, k)).astype(np.int8)
    scales = rng.uniform(0.5, 2, (n_experts, n, n_groups)) / 16
    scales = scales.astype(np.float16 if n_groups > 1 else F32).astype(F32)
    return Int4Experts(codes, scales, assist_matrix(codes, scales))


def add_int4_experts(vectors: OpVectors, rng: np.random.Generator) -> bool:
    """A8W4 with 18 experts."""
    ends = ends_of(18, 1, 2, 15, 16, 17)
    return add_case(vectors, "18experts", int8_rows(rng, ends[-1], 32), int4_experts(rng, 18, 16, 32, 1), ends)


def add_int4_groups(vectors: OpVectors, rng: np.random.Generator, group: int, k: int) -> bool:
    """A8W4 in groups of 64 or 128."""
    ends = ends_of(2, 0, 1)
    return add_case(vectors, f"g{group}", int8_rows(rng, 2, k), int4_experts(rng, 2, 16, k, k // group), ends)


def add_mx_rows(vectors: OpVectors, rng: np.random.Generator, name: str, block: int, k: int) -> bool:
    """MXFP8 of one expert: rows of 9 blocks; a block that is no power of two."""
    x = quantize_mx(rng.standard_normal((2, k)).astype(F32) * F32(3), block, E4M3)
    w = quantize_mx(rng.standard_normal((2 * block, k)).astype(F32) * F32(0.2), block, E4M3)
    weight = MX(w.codes[None], w.scales[None], E4M3)
    return add_case(vectors, name, x, weight, ends_of(1, 0) * 2, element="e4m3", block=block)
