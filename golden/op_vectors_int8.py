"""Golden vectors of int8: quantizing, products, both products of attention, and the files of whole Q8 models."""

from functools import partial

import numpy as np

from formats.checkpoint import Config, tensor_shapes
from formats.model_file import Generation, header
from formats.schemes import Q8_FILE
from formats.tensors import q8_tensors, weights_end
from golden.attention_int8 import mix_of, mix_sums, quantized_weights, score_sums, scores_of, weights_of
from golden.forward import F32, F64, forward, is_future, softmax
from golden.op_cases import EXACT, OpVectors
from golden.op_vectors_fp32 import around_boundaries
from golden.q8 import Q8, Quantized, accumulators, dequantize, matmul, quantize, rows_of
from golden.w8a8 import quantize_static

# ----------------------------------------------------------------------------
# Quantizing


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


def near_ties(inv: np.float32, n: int, rng: np.random.Generator) -> np.ndarray:
    """n fp32 values whose products with inv, rounded to fp32, are at or beside the middle between two codes.

    Here the roundings decide the code: of the product, of the inverse, and of the half itself.
    """
    halves = (rng.integers(0, 126, n) + 0.5) * rng.choice([-1, 1], n)
    x = (halves / F64(inv)).astype(F32)
    for _ in range(n):  # in all mostly none or one step of fp32, up or down
        x = np.where(rng.integers(0, 3 * n, n) < 2, np.nextafter(x, x * rng.choice([-2, 2], n).astype(F32)), x)
    return x


def tie_groups(rng: np.random.Generator, group_size: int, n_groups: int) -> np.ndarray:
    """Groups all of whose values but the largest are near ties, (n_groups, group_size) fp32."""
    groups = []
    for _ in range(n_groups):
        amax = F32(np.exp(rng.uniform(-6, 6)))
        x = near_ties(F32(127) / amax, group_size, rng)
        x[rng.integers(group_size)] = amax
        groups.append(x)
    return np.array(groups, F32)


def add_quantized(vectors: OpVectors, case: str, x: np.ndarray, group_size: int) -> None:
    """One case of quantizing, and of what its codes stand for."""
    q = quantize(x, group_size)
    outputs = {"codes": (q.codes, EXACT), "scales": (q.scales, EXACT), "dequantized": (dequantize(q), EXACT)}
    vectors.add(case, "quantize", {"x": x}, outputs, group_size=group_size)


def add_quantize(vectors: OpVectors, rng: np.random.Generator) -> None:
    """int8 codes with a scale per group, and per row."""
    for group_size in (16, 32, 64, 128):
        add_quantized(vectors, f"quantize.{group_size}", edge_groups(rng, group_size), group_size)
    for n in (64, 384, 2048):
        x = edge_groups(rng, n)[:, :n].copy()
        x[6, : n // 2] = 0
        x = x if n < 2048 else x[[0, 2, 4, 5, 6, 8, 9]]  # so that the file stays small
        add_quantized(vectors, f"quantize.row{n}", x, n)
    add_quantized(vectors, "quantize.ties", tie_groups(rng, 64, 32).reshape(8, -1), 64)


def add_static(vectors: OpVectors, rng: np.random.Generator) -> None:
    """int8 codes under a given scale."""
    scales = {"one": 1.0, "tenth": 0.1, "zero": 0.0, "tiny": 1e-38, "two": 2.0}
    # Scales whose inverse is another fp32 number when taken as 127 / (127 * scale).
    candidates = rng.uniform(0.01, 0.02, 100).astype(F32)
    others = candidates[F32(127) / (F32(127) * candidates) != F32(1) / candidates][:4]
    scales |= {f"inverse{i}": scale for i, scale in enumerate(others)}
    halves = (np.arange(64) % 32) - 15.5  # ties at scale 1
    for case, scale in scales.items():
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
        if case.startswith("inverse"):
            rows += list(near_ties(F32(1) / F32(scale), 8 * 64, rng).reshape(8, 64))
        x, s = np.array(rows).astype(F32), F32(scale)
        codes = quantize_static(x, s).codes
        inputs = {"x": x, "scale": np.array([s])}
        vectors.add(f"quantize_static.{case}", "quantize_static", inputs, {"codes": (codes, EXACT)})


# ----------------------------------------------------------------------------
# Products


def random_matrix(rng: np.random.Generator, n_rows: int, n_cols: int, group_size: int) -> Quantized:
    """A quantized matrix of normal values."""
    return quantize(rng.standard_normal((n_rows, n_cols)).astype(F32), group_size)


def extreme_matrices(rng: np.random.Generator, n_cols: int, group_size: int) -> tuple[Quantized, Quantized]:
    """Two tokens and five rows with the largest accumulators of both signs that a group can give.

    The last two rows have codes of -128, which files made elsewhere may have: the sign trick of pmaddubsw fails there.
    """
    signs = np.where(rng.random(n_cols) < 0.5, -1, 1)
    x = np.array([np.full(n_cols, 127), 127 * signs])
    w = np.array([x[0], -x[0], x[1], np.full(n_cols, -128), np.where(signs < 0, -128, 127)])

    def scaled(codes: np.ndarray) -> Quantized:
        return Quantized(codes.astype(np.int8), rng.uniform(0.5, 2, (len(codes), n_cols // group_size)).astype(F32))

    return scaled(x), scaled(w)


def beyond_24_bits(n_cols: int) -> tuple[Quantized, Quantized]:
    """Accumulators above 2^24 that are no fp32 numbers, under scales of 1: the output is the conversion to fp32."""
    targets = [2**24 + 1, 2**24 + 3, 2**24 + 5, 2**25 - 1, 2**25 + 2, 2**25 + 3, 2**25 + 6, 2**25 + 10]
    targets += [-t for t in targets]
    w = np.zeros((len(targets), n_cols), np.int64)
    for row, target in zip(w, targets, strict=True):
        whole, rest = divmod(target, 127)  # of 127s in x; the last two values of x are 1
        row[:-2] = whole // (n_cols - 2)
        row[: whole % (n_cols - 2)] += 1
        row[-2:] = rest // 2, rest - rest // 2
    x = np.full((1, n_cols), 127, np.int8)
    x[0, -2:] = 1
    return Quantized(x, np.ones((1, 1), F32)), Quantized(w.astype(np.int8), np.ones((len(w), 1), F32))


def add_product(vectors: OpVectors, name: str, x: Quantized, w: Quantized, limit: float = EXACT) -> None:
    """One product."""
    inputs = {"x.codes": x.codes, "x.scales": x.scales, "w.codes": w.codes, "w.scales": w.scales}
    outputs = {"accumulators": (accumulators(x, w), EXACT), "out": (matmul(x, w), limit)}
    vectors.add(f"matmul.{name}", "matmul", inputs, outputs, group_size=x.group_size)


def add_matmul(vectors: OpVectors, rng: np.random.Generator) -> None:
    """int8 products: odd sizes, one group and many, extreme accumulators, and their conversion to fp32."""
    add = partial(add_product, vectors)

    # Tokens x rows x columns; rows and tokens that are no multiple of anything, one group, many groups, whole rows.
    shapes = (
        (1, 5, 64, 64),
        (3, 17, 128, 64),
        (2, 9, 384, 64),
        (5, 4, 96, 32),
        (2, 3, 48, 16),
        (2, 5, 384, 384),
        (3, 17, 2048, 2048),
    )
    for n, m, k, group_size in shapes:
        name = f"{n}x{m}x{k}g{group_size}"
        add(name, random_matrix(rng, n, k, group_size), random_matrix(rng, m, k, group_size))
    for k, group_size in ((128, 32), (256, 64), (2048, 2048), (8192, 8192), (65536, 65536)):
        x, w = extreme_matrices(rng, k, group_size)
        if k > 2048:  # those that are the largest, without others, so that the file stays small
            x, w = rows_of(x, [0]), rows_of(w, [0, 1, 3])
        add(f"extreme.{k}g{group_size}", x, w)
    add("beyond24bits", *beyond_24_bits(4096), limit=EXACT)
    add("16x64x64g64", random_matrix(rng, 16, 64, 64), random_matrix(rng, 64, 64, 64))  # a tile of an array


def add_attention_int8(vectors: OpVectors, rng: np.random.Generator) -> None:
    """Both products of attention in int8: of codes of queries and keys, and of probabilities and codes of values."""
    for case, n, start, head_dim in (
        ("attention_int8", 9, 0, 32), ("attention_int8.decode", 1, 300, 32), ("attention_int8.odd", 3, 5, 20),
        *((*case, 32) for case in around_boundaries("attention_int8.")),
    ):  # fmt: skip
        add_attention_int8_case(vectors, case, rng, n, start, head_dim)


def add_attention_int8_case(
    vectors: OpVectors, case: str, rng: np.random.Generator, n: int, start: int, head_dim: int, n_heads: int = 6,
    n_kv_heads: int = 2,
) -> None:  # fmt: skip
    """Both products of n tokens from a position on."""
    q = quantize(rng.standard_normal((n, n_heads * head_dim)).astype(F32), head_dim)
    k, v = (quantize(rng.standard_normal((start + n, n_kv_heads * head_dim)).astype(F32), head_dim) for _ in range(2))
    qc, kc, vc = (x.codes.reshape(len(x.codes), -1, head_dim) for x in (q, k, v))
    extreme = np.where(np.arange(start + n) % 3 == 0, 127, -127).astype(np.int8)
    kc[:, 1], vc[:, 1] = extreme[:, None], -extreme[:, None]  # the second head's sums are as large as can be
    qc[:, n_heads // n_kv_heads : 2 * n_heads // n_kv_heads] = 127
    future = is_future(n, start + n)
    sums = np.where(future, 0, score_sums(qc, kc)).astype(np.int32)
    scores = scores_of(sums, q.scales, k.scales, head_dim)
    inputs = {"q_codes": qc, "q_scales": q.scales, "k_codes": kc, "k_scales": k.scales}
    outputs = {"sums": (sums, EXACT), "scores": (scores, EXACT)}
    vectors.add(case + ".scores", "attention_int8_scores", inputs, outputs, first_position=start)

    probs = softmax(np.where(future, F32(-np.inf), scores / scores.std()))
    add_mix(vectors, case + ".mix", probs, Quantized(vc, v.scales))


def add_mix(vectors: OpVectors, case: str, probs: np.ndarray, v: Quantized) -> None:
    """The second product, (n, H, head_dim): probs (n, H, n_keys), those of positions to come 0; v's codes by head."""
    codes, scales = quantized_weights(weights_of(probs, v.scales))
    sums = mix_sums(codes, v.codes)
    outputs = {
        "weight_codes": (codes, EXACT), "weight_scales": (scales[..., 0], EXACT), "sums": (sums, EXACT),
        "out": (mix_of(sums, scales), EXACT),
    }  # fmt: skip
    inputs = {"probs": probs, "v_codes": v.codes, "v_scales": v.scales}
    vectors.add(case, "attention_int8_mix", inputs, outputs, first_position=len(v.codes) - len(probs))


# ----------------------------------------------------------------------------
# A whole model


class RandomModel:
    """A checkpoint in memory, with random weights, for `Q8`."""

    def __init__(self, config: Config, rng: np.random.Generator):
        self.config, self._rng = config, rng
        self._tensors: dict[str, np.ndarray] = {}

    def tensor(self, name: str) -> np.ndarray:
        """A tensor by its Hugging Face name, fp32, made when first asked for."""
        if name not in self._tensors:
            self._tensors[name] = self._rng.standard_normal(tensor_shapes(self.config)[name]).astype(F32)
        return self._tensors[name]


def add_models(vectors: OpVectors, rng: np.random.Generator) -> None:
    """Q8 files of a few kilobytes, as bytes, with the logits of six tokens: where each tensor lies in a file."""
    for case, arch, tied in (("model.tied", "llama", True), ("model.untied", "qwen3", False)):
        config = Config(
            arch=arch, dim=32, hidden_dim=48, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=8, vocab_size=40,
            max_seq_len=64, tied=tied, norm_eps=1e-5, rope_theta=10000.0, rope_scaling=None,
        )  # fmt: skip
        scheme, group_size = Q8(RandomModel(config, rng), 16), 16
        tensors, data = list(q8_tensors(config, group_size)), b""
        for tensor in tensors:
            name, _, part = tensor.name.rpartition(".")
            matrix = scheme.matrix(name) if part in Quantized._fields else None
            value = getattr(matrix, part) if matrix else scheme.vector(tensor.name)
            data += np.ascontiguousarray(value, tensor.dtype).tobytes()
        file = header(config, Generation(), Q8_FILE, group_size, weights_end(tensors), b"") + data
        tokens = rng.integers(0, config.vocab_size, 6).astype(np.int32)
        inputs = {"file": np.frombuffer(file, np.uint8), "tokens": tokens}
        vectors.add(case, "model", inputs, {"logits": (forward(config, scheme, tokens), EXACT)})
