"""Golden vectors of GPTQ's operations: matrices of a file expanded, activations gathered, experts quantized."""

import numpy as np

from formats.gptq import MatrixFormat
from golden.forward import F32
from golden.gptq import F16, Matrix, expand, gather, pack_matrix
from golden.gptq_experts import hessian
from golden.gptq_quantize import column_order, curvature, quantize_matrix
from golden.op_cases import EXACT, OpVectors
from golden.q8 import quantize

# Rows and columns: of whole blocks of 64 bytes and of each kind of rest. 448 codes of 2 bits are 64 + 32 + 16 bytes.
EXPANDED = (
    (MatrixFormat(8), 3, 64),
    (MatrixFormat(8, 64), 3, 192),
    (MatrixFormat(4), 3, 192),
    (MatrixFormat(4, 32), 3, 96 + 32),
    (MatrixFormat(4, 64), 5, 576),
    (MatrixFormat(4, 128), 3, 384),
    (MatrixFormat(2), 3, 64),
    (MatrixFormat(2, 64), 3, 576),
    (MatrixFormat(2, 64, two_level=True), 5, 576),
    (MatrixFormat(2, 64, two_level=True), 3, 448),
    (MatrixFormat(2, 64, two_level=True), 16, 1024),
    (MatrixFormat(4, 64, sparse=True), 5, 576),
    (MatrixFormat(4, 64, sparse=True), 3, 448),
    (MatrixFormat(4, 128, sparse=True), 3, 384),
)
INT8_SCALES = (  # with int8 scales
    (MatrixFormat(4, 32, int8_scales=True), 3, 192),
    (MatrixFormat(4, 64, int8_scales=True), 9, 448),
    (MatrixFormat(5, 32, int8_scales=True), 3, 192),
    (MatrixFormat(5, 64, int8_scales=True), 5, 576),
    (MatrixFormat(5, 128, int8_scales=True), 3, 896),
    (MatrixFormat(6, 64, int8_scales=True), 9, 448),
    (MatrixFormat(6, 32, int8_scales=True), 3, 192),
)
SCALES = (1, 0.1, 2**-14, 2**-14 - 2**-24, 2**-24, 3e-6, 0.0, 4364)  # fp16: some are subnormal


def random_table(rng: np.random.Generator, bits: int) -> np.ndarray:
    """Rising int8 values, -128 and 127 among them, (2^bits,)."""
    between = rng.choice(np.arange(-127, 127), 2**bits - 2, replace=False)
    return np.sort(np.append(between, (-128, 127))).astype(np.int8)


def random_matrix(rng: np.random.Generator, form: MatrixFormat, n_out: int, n_in: int) -> Matrix:
    """Codes, scales and zero points of every value that they may have."""
    shape = n_out, n_in // (form.group or n_in)
    if form.bits == 8:
        scales = rng.uniform(1e-4, 1, shape).astype(F16 if form.group else F32)
        return Matrix(form, rng.integers(-128, 128, (n_out, n_in)).astype(np.int8), scales)
    codes = rng.integers(0, 2**form.bits, (n_out, n_in)).astype(np.uint8)
    if form.two_level:
        s, z = (rng.permutation(np.arange(shape[0] * shape[1]) % 16).reshape(shape).astype(np.uint8) for _ in range(2))
        return Matrix(form, codes, s, z, rng.uniform(1e-4, 1, n_out).astype(F32))
    if form.int8_scales:
        s = rng.permutation(np.arange(shape[0] * shape[1]) * 37 % 255 - 127).reshape(shape).astype(np.int8)
        table = random_table(rng, form.bits) if form.has_table else None
        return Matrix(form, codes, s, None, rng.uniform(1e-4, 1, n_out).astype(F32), table=table)
    kept = None
    if form.sparse:
        kept = np.argsort(rng.random((n_out, n_in // 4, 4)), axis=2).reshape(n_out, n_in) < 2
        codes[~kept] = 0
    scales = np.resize(np.array(SCALES, F16), shape)
    return Matrix(form, codes, scales, rng.integers(0, 2**form.bits, shape).astype(np.uint8), kept=kept)


def format_name(form: MatrixFormat) -> str:
    """In the names of cases: w8g0, w2xg64 (two-level), w4sg64 (sparse), w4ig64 (int8 scales)."""
    return f"w{form.bits}{'x' * form.two_level}{'s' * form.sparse}{'i' * form.int8_scales}g{form.group}"


def add_expand(vectors: OpVectors, rng: np.random.Generator, form: MatrixFormat, n_out: int, n_in: int) -> None:
    """A random matrix and what it expands to."""
    m = random_matrix(rng, form, n_out, n_in)
    group_size = 32 if form.group == 32 else 64
    expanded = expand(m, group_size)
    outputs = {"w.codes": (expanded.codes, EXACT), "w.scales": (expanded.scales, EXACT)}
    vectors.add(
        f"gptq_expand.{format_name(form)}.{n_in}", "gptq_expand", pack_matrix(m), outputs, bits=form.bits,
        group=form.group, sparse=form.sparse, two_level=form.two_level, int8_scales=form.int8_scales,
        group_size=group_size,
    )  # fmt: skip


def add_gptq(vectors: OpVectors, rng: np.random.Generator) -> None:
    """All cases of GPTQ."""
    for form, n_out, n_in in EXPANDED:
        add_expand(vectors, rng, form, n_out, n_in)

    x = (rng.standard_normal((3, 192)) * np.exp(rng.uniform(-4, 4, 192))).astype(F32)
    order = rng.permutation(192).astype(np.int32)
    gathered = gather(x, order)
    q = quantize(gathered, 64)
    outputs = {"gathered": (gathered, EXACT), "codes": (q.codes, EXACT), "scales": (q.scales, EXACT)}
    vectors.add("gptq_gather", "gptq_gather", {"x": x, "order": order}, outputs, group_size=64)
    add_expand(vectors, rng, MatrixFormat(8), 3, 192)  # a row's scale counts for three groups of activations
    for form, n_out, n_in in INT8_SCALES:
        add_expand(vectors, rng, form, n_out, n_in)


def add_experts(vectors: OpVectors, rng: np.random.Generator) -> None:
    """GPTQ of a matrix of an expert that saw no token, fewer than H has of its own, and about as many.

    That of no token has no rows, and so no form in hex files.
    """
    form, mean_square = MatrixFormat(2, 64, two_level=True), 1.5
    weight = rng.standard_normal((8, 128)).astype(F32)
    for n in (0, 3, 60):
        x = (rng.standard_normal((n, 128)) * np.exp(rng.uniform(-1, 1, 128))).astype(F32)
        h = hessian(x, mean_square)
        m = quantize_matrix(weight, curvature(h, column_order(np.diag(h), form)), form)
        outputs = {"codes": m.codes, "scale_codes": m.scales, "zero_codes": m.zeros, "row_scales": m.row_scales}
        vectors.add(
            f"gptq_expert.{n}", "gptq_expert", {"weight": weight, "x": x},
            {name: (value, EXACT) for name, value in outputs.items()}, mean_square=mean_square, group=form.group,
        )  # fmt: skip
