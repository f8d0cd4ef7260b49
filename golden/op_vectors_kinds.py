"""Golden vectors of mistakes that lie beyond the usual sizes: late positions, long tables, the smallest and the
largest numbers, exact halves where other cases have none. docs/numerics.md lists the kinds.
"""

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from formats.checkpoint import Config, Moe
from formats.model_file import Generation, header
from formats.moe import DENSE_LAYERS, MoeLayout, moe_tensors, pack_layout
from formats.schemes import MOE_FILE, W8A8_FILE, FileFormat
from formats.tensors import HEADER_SIZE, Tensor, w8a8_tensors, weights_end, with_offsets
from golden.forward import F32, Step, forward, ignore, rmsnorm, softmax, swiglu
from golden.grouped import Int4Experts, assist_matrix
from golden.kv_cache import attention_kept, kept_half, kept_q8
from golden.moe import MoE
from golden.mx import E4M3, SCALE_NAN, scale_values
from golden.op_cases import EXACT, OpVectors
from golden.op_vectors_awq import add_attention_half
from golden.op_vectors_fp32 import add_attention_case
from golden.op_vectors_int8 import add_attention_int8_case, add_mix, add_product, add_quantized, near_ties
from golden.op_vectors_moe import add_case, mx_operands, until_clear
from golden.q8 import Quantized, accumulators, dequantize, matmul, quantize
from golden.schemes import FileScheme
from golden.trace import Recorder
from golden.w8a8 import W8A8, quantize_static, static_places, static_scale

LEAST_AMAX = F32(3.7321948e-37)  # the smallest amax whose 127 / amax is finite
LARGEST = F32(3.4028233e38)  # the largest amax whose code 127 still stands for a finite number


def add_kinds(vectors: OpVectors, rng: np.random.Generator) -> None:
    """All of them."""
    add_small_and_large(vectors, rng)
    add_late_positions(vectors, rng)
    add_kept(vectors, rng)
    add_table(vectors, rng)
    add_mx_scales(vectors, rng)
    add_int4_ties(vectors)
    add_files(vectors, rng)


# ----------------------------------------------------------------------------
# Numbers at the edge of what is normal


def limit_groups(rng: np.random.Generator, group_size: int) -> np.ndarray:
    """Rows of 4 groups, fp32: scales that are subnormal, just not 0 or just 0, and as large as can be."""
    unit = rng.uniform(-1, 1, (8, 4, group_size)).astype(F32)
    unit[..., 5] = 1
    below, above = np.nextafter(LEAST_AMAX, F32(0)), F32(1.4928779e-36)  # the smallest of a normal scale
    amax = np.array(
        [
            [LEAST_AMAX, np.nextafter(LEAST_AMAX, F32(1)), F32(5e-37), F32(1e-36)],
            [below, LEAST_AMAX, below, F32(3e-38)],
            [above, np.nextafter(above, F32(0)), F32(2e-36), F32(1.3e-36)],
            [LARGEST, LARGEST / 2, F32(1e38), F32(3e38)],
            [F32(1e-45), F32(1e-40), LARGEST, LEAST_AMAX],
            [F32(4e-37), F32(4e-37), F32(1), F32(1)],
            [F32(6e-37), F32(7e-37), F32(8e-37), F32(9e-37)],
            [F32(1.1e-36), F32(1.2e-36), F32(1.4e-36), F32(1.6e-36)],
        ]
    )
    return (unit * amax[..., None]).astype(F32).reshape(8, -1)


def add_small_and_large(vectors: OpVectors, rng: np.random.Generator) -> None:
    """Quantizing, products, RMSNorm and SwiGLU at the ends of fp32."""
    add_quantized(vectors, "quantize.limits", limit_groups(rng, 32), 32)
    add_quantized(vectors, "quantize.rowlimits", limit_groups(rng, 16), 64)
    ties = np.array([halves_of_head(20), *(near_ties_of_head(20, rng) for _ in range(3))])
    add_quantized(vectors, "quantize.heads", ties, 20)  # a head of 20, no multiple of a vector

    scale = F32(4e-39)  # subnormal, its inverse is not infinite
    x = np.array([np.arange(64) - 31.5, rng.uniform(-200, 200, 64), np.full(64, 1e4)]).astype(F32) * scale
    codes = quantize_static(x, scale).codes
    inputs = {"x": x, "scale": np.array([scale])}
    vectors.add("quantize_static.subnormal", "quantize_static", inputs, {"codes": (codes, EXACT)})

    # Scales of weights are subnormal, those of activations so large that outputs are not.
    for name, n_groups in (("subnormal", 2), ("subnormalrow", 1)):
        codes = (rng.integers(-127, 128, (n, 64)).astype(np.int8) for n in (3, 9))
        scales = (
            rng.uniform(1e36, 1e38, (3, n_groups)).astype(F32),
            rng.uniform(1e-40, 1e-38, (9, n_groups)).astype(F32),
        )
        add_product(vectors, name, *(Quantized(*operand) for operand in zip(codes, scales, strict=True)))

    weight = rng.standard_normal(64).astype(F32)
    x = (rng.standard_normal((4, 64)) * np.array([1e30, 1e-30, 3e37, 1e-19])[:, None]).astype(F32)
    out = rmsnorm(x, weight, 1e-5)  # squares overflow fp32, or are nothing beside eps
    vectors.add("rmsnorm.limits", "rmsnorm", {"x": x, "weight": weight}, {"out": (out, EXACT)}, eps=1e-5)

    # silu falls to e^gate: as large as `up` makes up for it, every gate counts alike.
    gate = np.linspace(-87, -1, 130).astype(F32)
    up = (np.exp(-gate.astype(np.float64)) / np.abs(gate) * rng.uniform(0.5, 2, len(gate))).astype(F32)
    vectors.add("swiglu.slope", "swiglu", {"gate": gate, "up": up}, {"out": (swiglu(gate, up), EXACT)})


# ----------------------------------------------------------------------------
# Late positions: third pages, and the ends of every block of positions

PEAKS = 0, 15, 16, 63, 64, 127, 128, 255, 256, 299  # where a row of scores has its maximum


def add_late_positions(vectors: OpVectors, rng: np.random.Generator) -> None:
    """Softmax and attention whose largest score stands at any place; prompts through all lengths; a third page."""
    x = rng.standard_normal((len(PEAKS) + 2, 300)).astype(F32) * 4
    # If another is taken off, exp of what is left overflows; where exp is capped, both come out alike.
    x[np.arange(len(PEAKS)), PEAKS] = 130
    x[np.arange(len(PEAKS)), np.minimum(np.add(PEAKS, 1), 298)] = 129
    vectors.add("softmax.long", "softmax", {"x": x}, {"out": (softmax(x), EXACT)})

    def drawn(n: int, n_heads: int, head_dim: int) -> np.ndarray:
        return rng.standard_normal((n, n_heads, head_dim)).astype(F32)

    for case, n, start, head_dim in (("prompt", 70, 0, 8), ("at512", 3, 511, 16)):
        q, k, v = drawn(n, 2, head_dim), drawn(start + n, 1, head_dim), drawn(start + n, 1, head_dim)
        if start:  # scores of exactly 120 and 118, far behind the first 256: head 0 sees nothing else
            q[:, 0], k[400, 0], k[401, 0] = 2, 15, 14.75
        add_attention_case(vectors, f"attention.{case}", q, k, v)
        add_attention_int8_case(vectors, f"attention_int8.{case}", rng, n, start, head_dim=8, n_heads=2)
    q, k, v = drawn(3, 2, 32), drawn(514, 1, 32), drawn(514, 1, 32)
    q[:, 0], k[400, 0], k[401, 0] = 2, 10.5, 10.375
    add_attention_half(vectors, "at512", *(x.astype(np.float16) for x in (q, k, v)))

    # Weights in the middle of two codes: the value's scale is 1, the largest is 127 / 512 and the others half steps.
    probs = ((np.arange(2 * 4 * 40).reshape(2, 4, 40) * 7 % 127) + 0.5) / 512
    probs[..., 11] = 127 / 512
    probs[0, ..., 39] = 0
    near = np.abs(near_ties(F32(127) / F32(0.3), 2 * 4 * 40, rng).reshape(2, 4, 40))  # and some steps of fp32 beside it
    near[..., 11], near[0, ..., 39] = 0.3, 0
    codes = rng.integers(-127, 128, (40, 2, 8)).astype(np.int8)
    for name, x in (("halves", probs), ("ties", near)):
        add_mix(vectors, f"attention_int8.{name}.mix", x.astype(F32), Quantized(codes, np.ones((40, 2), F32)))


# ----------------------------------------------------------------------------
# The KV cache in fp16 and int8


def add_kept(vectors: OpVectors, rng: np.random.Generator) -> None:
    """What the cache keeps and attention over it: around the end of a page, and numbers that probe the rounding."""
    for case, n, start, head_dim in (("at256", 3, 255, 8), ("edges", 12, 0, 20)):
        q = rng.standard_normal((n, 4, head_dim)).astype(F32)
        k, v = (rng.standard_normal((start + n, 2, head_dim)).astype(F32) for _ in range(2))
        k[:, 1] *= 3  # heads of a position differ
        v[:, 0] *= F32(0.01)
        k[-1, 0], v[-1, 1] = halves_of_head(head_dim), near_ties_of_head(head_dim, rng)
        for kv in ("f16", "q8"):
            if case == "edges":
                q[:] *= F32(1e-2)
                k, v = (edges(x, kv, rng) for x in (k, v))
            add_kept_case(vectors, kv, case, q.copy(), k, v)


def add_kept_case(vectors: OpVectors, kv: str, case: str, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> None:
    """Attention of queries at the last positions, over what a cache keeps. kv: "f16" or "q8"."""
    outputs = {"out": (attention_kept(kv, ignore, "", q, k, v), EXACT)}
    for name, x in (("k", k), ("v", v)):
        if kv == "f16":
            outputs[f"{name}_kept"] = kept_half(x), EXACT
        else:
            codes, scales = kept_q8(x)
            outputs |= {f"{name}_codes": (codes, EXACT), f"{name}_scales": (scales, EXACT)}
    inputs, start = {"q": q, "k": k, "v": v}, len(k) - len(q)
    vectors.add(f"attention_kv.{kv}.{case}", "attention_kv", inputs, outputs, kv=kv, first_position=start)


def halves_of_head(head_dim: int) -> np.ndarray:
    """Exact halves, in the middle of two codes under a scale of 1."""
    return np.where(np.arange(head_dim) == 7, 127, np.arange(head_dim) - head_dim / 2 + 0.5).astype(F32)


def near_ties_of_head(head_dim: int, rng: np.random.Generator) -> np.ndarray:
    """Within a few steps of fp32 of the middle of two codes; the quotient by the scale rounds to another code."""
    inv, scale = F32(127) / F32(3), F32(3) / F32(127)
    while True:
        x = np.where(np.arange(head_dim) == 2, F32(3), near_ties(inv, head_dim, rng))
        if (np.rint(x * inv) != np.rint(x / scale)).any():
            return x


def edges(x: np.ndarray, kv: str, rng: np.random.Generator) -> np.ndarray:
    """x, (12, 2, 20), some of whose heads are ties, zeros, tiny or large."""
    x = x.copy()
    x[0, 0], x[3, 1] = halves_of_head(20), -halves_of_head(20)
    x[1, 1] = near_ties_of_head(20, rng)
    x[2, 0] = 0
    x[4, 0] = F32(1e-36) * np.where(np.arange(20) == 1, 1, x[4, 0] / 4)  # a subnormal scale
    x[5, 1] = F32(1e-38)  # no scale
    if kv == "f16":
        middles = np.array([1 + 2**-11, 1 + 3 * 2**-11, 2049, 2051, 2**-14 - 2**-25, 1.5 * 2**-24, 2**-25])
        x[6, 0] = np.resize(np.concatenate([middles, -middles, [65504, 65519, 1e-10]]), 20)
    return x


# ----------------------------------------------------------------------------
# A table of more than 2^16 rows, which has a rule in place of bytes

TABLE_ROWS, TABLE_COLUMNS = 70001, 64
ROW_IDS = (0, 1, 127, 128, 255, 256, 2047, 2048, 32767, 32768, 32769, 40000, 65535, 65536, 65537, 70000)
TABLE_RULE = {
    "codes": "(7919 * row + 104729 * column) % 255 - 127",
    "scales": "(1 + (31 * row + 17 * group) % 10007) / 2**20",
}


def table(rows: np.ndarray, group_size: int) -> Quantized:
    """Some rows of TABLE_RULE's table. No two rows are alike."""
    r = rows.astype(np.int64)[:, None]
    codes = (7919 * r + 104729 * np.arange(TABLE_COLUMNS)) % 255 - 127
    scales = (1 + (31 * r + 17 * np.arange(TABLE_COLUMNS // group_size)) % 10007) / 2**20
    return Quantized(codes.astype(np.int8), scales.astype(F32))


def add_table(vectors: OpVectors, rng: np.random.Generator) -> None:
    """Rows of the embedding, and the classifier's logits and choices."""
    rule = {"vocab_size": TABLE_ROWS, "dim": TABLE_COLUMNS, "table": TABLE_RULE}
    ids = np.array(ROW_IDS, np.int32)
    for group_size in (32, 64):
        out = dequantize(table(ids, group_size))
        vectors.add(f"embedding.{group_size}", "embedding", {"tokens": ids}, {"out": (out, EXACT)},
                    group_size=group_size, **rule)  # fmt: skip

    # Tokens that are rows of the table, which have the largest logits of all: a row of each third, by chance none
    # of other codes has larger scales. All logits of the last token are equal.
    every, best = table(np.arange(TABLE_ROWS), 32), np.array([20659, 43578, 68757])
    x = quantize(dequantize(table(best, 32)), 32)
    x = Quantized(np.concatenate([x.codes, 0 * x.codes[:1]]), np.concatenate([x.scales, 0 * x.scales[:1]]))
    logits = matmul(x, every)
    assert logits.argmax(axis=-1).tolist() == [*best, 0]
    inputs = {"x.codes": x.codes, "x.scales": x.scales, "rows": ids}
    outputs = {
        "accumulators": (accumulators(x, table(ids, 32)), EXACT),
        "logits": (logits[:, ids], EXACT),
        "ids": (logits.argmax(axis=-1).astype(np.int32), EXACT),
    }
    vectors.add("classifier", "classifier", inputs, outputs, group_size=32, **rule)


# ----------------------------------------------------------------------------
# Mixtures of experts


def add_mx_scales(vectors: OpVectors, rng: np.random.Generator) -> None:
    """What bytes of E8M0 mean, and products in which the smallest and the largest count."""
    scales = np.arange(SCALE_NAN, dtype=np.uint8)
    vectors.add("mx_scales", "mx_scales", {"scales": scales}, {"values": (scale_values(scales).astype(F32), EXACT)})

    until_clear(lambda: add_scaled_experts(vectors, rng))


def add_scaled_experts(vectors: OpVectors, rng: np.random.Generator) -> bool:
    """Rows 0 to 2 are expert 1's, whose scale bytes are 0 and 1, rows 3 to 5 those of expert 3, with large ones."""
    x, w = mx_operands(rng, E4M3, 32, 64, 64)
    x.scales[:3], w.scales[1] = (238, 237), (0, 1)  # 2^-16 of products whose elements are some hundreds
    x.scales[3:], w.scales[3] = (0, 1), 238
    x.scales[4], x.scales[5] = (0, 0), (1, 0)
    x.scales[2, 0], w.scales[3, 9, 0] = 254, 254  # 2^127, with elements of up to 1, so that fp32 has the values
    for codes in (x.codes[2, :32], w.codes[3, 9, :32]):
        codes[:] = codes & 0x80 | rng.integers(0x28, 0x39, 32)
    return add_case(vectors, "scales", x, w, element="e4m3", block=32)


def add_int4_ties(vectors: OpVectors) -> None:
    """A8W4 whose results lie in the middle of two codes, as grouped_a8w8.ties."""
    x, w = np.zeros((4, 64), np.int8), np.zeros((32, 64), np.int8)
    x[:, 0], x[:, 1:6] = 64, np.array([1, -1, 1, -1])[:, None] * [1, 16, 16, 16, 1]
    w[:16, 0] = 2  # 64, which swish leaves as it is
    w[16:, 1], w[16:, 2] = np.arange(16) % 8 * 2 - 7, np.arange(16) - 8  # odd halves
    w[16, 1:6] = 7, 7, 7, 1, 7  # 127
    for case, n_groups in (("ties", 1), ("groupties", 2)):
        scales = np.full((1, 32, n_groups), 0.5, F32)
        weight = Int4Experts(w[None], scales, assist_matrix(w[None], scales))
        add_case(vectors, case, Quantized(x, np.ones((4, 1), F32)), weight, np.array([4], np.int32), exact=True)


# ----------------------------------------------------------------------------
# Whole files


def random_file(
    rng: np.random.Generator, config: Config, tensors: list[Tensor], file_format: FileFormat,
    act_scales: Sequence[np.float32] = (), own: bytes = b"",
) -> bytes:  # fmt: skip
    """A file of random weights without a tokenizer. act_scales: those of static activations."""
    data = bytearray(weights_end(tensors, file_format.alignment))
    for tensor in with_offsets(tensors, alignment=file_format.alignment):
        value: object = 1 + rng.standard_normal(tensor.shape) / 10  # of norms
        if tensor.name.endswith(".codes"):
            value = rng.integers(-127, 128, tensor.shape)
        elif tensor.name.endswith(".scales"):
            value = rng.uniform(0.5, 2, tensor.shape) / 400
        elif tensor.name.endswith(".router"):
            value = rng.standard_normal(tensor.shape) / 4
        elif tensor.name == "act_scales":
            value = act_scales
        elif tensor.name == DENSE_LAYERS:
            value = [config.moe is None or i in config.moe.dense_layers for i in range(config.n_layers)]
        data[tensor.offset : tensor.end] = np.array(value).astype(tensor.dtype).tobytes()
    data[:HEADER_SIZE] = header(
        config, Generation(), file_format, 0, len(data), b"", activations=int(len(act_scales) > 0), own=own
    )
    return bytes(data)


def logits_of(file: bytes, read: Callable[[Path], FileScheme], tokens: np.ndarray, step: Step = ignore) -> np.ndarray:
    """What the reference makes of a file's bytes."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.bin"
        path.write_bytes(file)
        scheme = read(path)
        return forward(scheme.config, scheme, tokens, step)


def add_files(vectors: OpVectors, rng: np.random.Generator) -> None:
    """A W8A8 file with static scales, and a mixture of experts, as `model.tied` is a Q8 file."""
    config = Config(
        arch="llama", dim=32, hidden_dim=48, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=8, vocab_size=40,
        max_seq_len=64, tied=True, norm_eps=1e-5, rope_theta=10000.0, rope_scaling=None,
    )  # fmt: skip
    tokens = rng.integers(0, config.vocab_size, 6).astype(np.int32)

    def add(case: str, file: bytes, read: Callable[[Path], FileScheme]) -> None:
        inputs = {"file": np.frombuffer(file, np.uint8), "tokens": tokens}
        vectors.add(case, "model", inputs, {"logits": (logits_of(file, read, tokens), EXACT)})

    weights, recorder = rng.bit_generator.state, Recorder()  # drawn a second time below
    dynamic = random_file(rng, config, list(w8a8_tensors(config, 0, static=False)), W8A8_FILE)
    logits_of(dynamic, W8A8, tokens, recorder)
    scales = [static_scale(np.abs(recorder.tensors[place]).max()) for place in static_places(config)]
    rng.bit_generator.state = weights
    add("model.static", random_file(rng, config, list(w8a8_tensors(config, 0, static=True)), W8A8_FILE, scales), W8A8)

    moe = Moe(n_experts=4, n_active=2, hidden_dim=16, norm_topk_prob=False, dense_layers=(0,))
    config, layout = replace(config, arch="qwen3_moe", tied=False, moe=moe), MoeLayout("a8w8", 0)
    file = random_file(rng, config, list(moe_tensors(config, layout)), MOE_FILE, own=pack_layout(config, layout))
    add("model.moe", file, MoE)
